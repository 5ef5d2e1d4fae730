"""Turns: contestants of `speed.py` are alive together, and one at a time runs an epoch, by word of mouth over TCP.

Without the variable BENCH_TURNS, which says where speed.py listens, a contestant waits for nobody.
"""

import os
import socket
import time
from collections.abc import Iterator

import torch


class Turns:
    """One process's side. CUDA devices are waited for before a turn counts as ended, and timed with events."""

    def __init__(self) -> None:
        address = os.environ.get("BENCH_TURNS")
        self._file = None
        if address:
            host, port = address.split(":")
            self._file = socket.create_connection((host, int(port))).makefile("rw")
            self._say(os.environ["BENCH_NAME"])
        self._began: float | None = None
        self._events = [torch.cuda.Event(enable_timing=True) for _ in "ab"] if torch.cuda.is_available() else []

    def begin(self) -> None:
        """End the turn before, and wait for the next."""
        self.end()
        if self._file:
            self._say("ready")
            self._file.readline()
        if self._events:
            torch.cuda.synchronize()
            self._events[0].record()
        self._began = time.perf_counter()

    def end(self) -> None:
        """Say how long the turn took, where there was one."""
        if self._began is None:
            return
        if self._events:
            self._events[1].record()
            torch.cuda.synchronize()
            seconds = self._events[0].elapsed_time(self._events[1]) / 1000
        else:
            seconds = time.perf_counter() - self._began
        self._began = None
        self._say(f"{seconds}")

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of `count` epochs, a turn each."""
        for epoch in range(count):
            self.begin()
            yield epoch
        self.end()

    def _say(self, line: str) -> None:
        if self._file:
            print(line, file=self._file, flush=True)
