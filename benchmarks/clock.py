"""Callbacks by which commands of lit-mnist, and other Trainers, take part in `speed.py`."""

from typing import Any

from lightning.pytorch import Callback

from benchmarks.turns import Turns


class EachEpoch(Callback):
    """A turn is a training epoch with all that comes before the next one: logs, checkpoints."""

    def __init__(self) -> None:
        self.turns = Turns()

    def on_train_epoch_start(self, *_: Any) -> None:
        self.turns.begin()

    def on_fit_end(self, *_: Any) -> None:
        self.turns.end()


class EachTest(Callback):
    """A turn is the loop over the test images."""

    turns: Turns | None = None  # of the process: it tests many times

    def on_test_start(self, *_: Any) -> None:
        EachTest.turns = EachTest.turns or Turns()
        EachTest.turns.begin()

    def on_test_end(self, *_: Any) -> None:
        assert EachTest.turns
        EachTest.turns.end()
