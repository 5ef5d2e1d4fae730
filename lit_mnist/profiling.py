"""No profiler, for less: Lightning asks it about a hundred times a step."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch.profilers import Profiler


class NoProfiler(Profiler):
    """Measures nothing. Lightning's PassThroughProfiler does too, and makes a generator each time."""

    _nothing = nullcontext()

    def start(self, action_name: str) -> None:
        """Do nothing."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """A context that does nothing."""
        return self._nothing
