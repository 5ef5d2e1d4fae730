"""Requests to stop a command: signals, taken by a thread, so that no handler runs in the middle of anything.

Imports nothing of size: it has to be there before the seconds in which torch is imported.
"""

import os
import signal
import threading
from collections.abc import Callable

from lit_mnist.errors import complain
from lit_mnist.surroundings import is_rank_0

_TAKEN = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT


class StopRequests:
    """Takes SIGUSR1, SIGTERM and SIGINT from all threads of this process, and tells one listener of the first.

    The signals are blocked, and a thread waits for them: no handler runs, neither Lightning's, which calls collectives,
    nor Python's, which cannot while the main thread waits for other ranks. Processes started from here inherit the
    block, so that data loading workers outlive a request as they should. A second SIGINT ends the process at once.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._any = threading.Event()
        self._listener: Callable[[signal.Signals], None] | None = None
        self._lock = threading.Lock()

    def take(self) -> None:
        """Begin; to be called in the main thread before another is started."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
        threading.Thread(target=self._wait, daemon=True, name="stop requests").start()

    def listen(self, listener: Callable[[signal.Signals], None]) -> None:
        """Call `listener` in the thread of requests at the first signal, or now if that was before."""
        with self._lock:
            self._listener = listener
            received = self.received
        if received:
            listener(received)

    def wait(self, timeout: float) -> bool:
        """Whether one comes within `timeout` seconds, or has come."""
        return self._any.wait(timeout)

    def _wait(self) -> None:
        interrupts = 0
        while True:
            received = signal.Signals(signal.sigwait(_TAKEN))
            if received == signal.SIGINT:
                interrupts += 1
                if interrupts > 1:
                    _say("ended at once by a second Ctrl-C")
                    os._exit(128 + signal.SIGINT)
            with self._lock:
                first, self.received = self.received is None, self.received or received
                listener = self._listener
            self._any.set()
            if first:
                _say(f"{received.name}: asked to stop; Ctrl-C twice ends it at once")
            if first and listener:
                listener(received)


def _say(line: str) -> None:
    if is_rank_0(os.environ):
        complain(line, "note")
