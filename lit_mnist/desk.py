"""Rank 0's side of the connection between the processes of a run (see `lit_mnist.peers`)."""

import os
import selectors
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from lit_mnist.errors import UserError, complain
from lit_mnist.wire import GRACE, TICK, UNMET, Meeting, Member, Verdict, Wire


class Desk(threading.Thread):
    """Rank 0's side, a thread of it.

    Args:
        meeting: What ranks are expected, and how long.
        port: To listen on; 0: a free one.
        store: Port of the process group's store, for the roll.

    Raises:
        UserError: If the port is taken.
    """

    def __init__(self, meeting: Meeting, port: int, store: int) -> None:
        super().__init__(daemon=True, name="desk")
        self.meeting = meeting
        self._store = store
        try:
            self._server = socket.create_server(("", port), backlog=1024)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise UserError(
                f"MASTER_PORT={port} cannot be used on {socket.gethostname()} ({reason}): another run or program may "
                "have it; export another MASTER_PORT, the same on every host"
            ) from None
        self.port = self._server.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._seats: dict[int, _Seat] = {}
        self._twice: _Seat | None = None
        self._untold: Verdict | None = None
        self._complete = False
        self._closed = False
        self._hold: str | None = None
        self._suffered: dict[int, str] = {}  # by rank: how a collective failed there
        self._suffering = 0.0  # seconds since the first of them
        self._parting = 0.0  # seconds since the first rank left

    def run(self) -> None:
        """Serve until all have left, or the run has ended."""
        last = time.monotonic()
        deadline, notice = last + self.meeting.bound, last + self.meeting.bound / 2
        while not self._closed:
            for key, _ in self._selector.select(TICK / 2):
                if key.fileobj is self._server:
                    self._greet()
                elif not self._closed:
                    self._serve(key.data)
            now = time.monotonic()
            if self._closed or now < last + TICK / 2:
                continue
            if not self._complete and now >= notice:
                notice = deadline + 1
                complain(f"{self._absent()}; waiting up to {self.meeting.bound:g} s", "note")
            if not self._complete and now >= deadline:
                self._end(Verdict(f"{self._absent()} within {self.meeting.bound:g} s: {UNMET}"))
            else:
                self._watch(min(now - last, 2 * TICK))  # less than passed, where this process itself was stopped
            last = now
        self._linger()

    def _greet(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:  # it is gone again
            return
        seat = _Seat(Wire(connection))
        self._selector.register(connection, selectors.EVENT_READ, seat)

    def _serve(self, seat: "_Seat") -> None:
        messages = seat.wire.receive(0)
        if messages is None:
            self._dismiss(seat)
            if seat.member:
                self._end(Verdict.of_the_dead(seat.member.rank, str(seat.member), seat.at))
            return
        seat.silence = 0.0
        for message in messages:
            if seat.member is None and not {"hello", "run", "world_size"} <= set(message):
                self._dismiss(seat)  # it is of no run
                return
            if not self._closed:
                self._hear(seat, message)

    def _dismiss(self, seat: "_Seat") -> None:
        self._selector.unregister(seat.wire.socket)
        seat.wire.close()

    def _hear(self, seat: "_Seat", message: dict[str, Any]) -> None:
        seat.at = message.get("at", seat.at)
        if "hello" in message:
            self._seat(seat, message)
        elif seat.member is None:
            return
        elif "failed" in message:
            rank = seat.member.rank
            words = f"{seat.member} failed at {seat.at}: {message['failed']}"
            self._end(Verdict(words, gone=[rank], said_by=rank if message["is_said"] else None))
        elif "suffered" in message:
            self._suffered[seat.member.rank] = message["suffered"]
        elif "stop" in message and self._hold is None:
            self._hold = message["stop"]
            if self._complete:
                self._say({"hold": self._hold})
        elif "passed" in message:
            seat.passed = message["passed"]
            counts = [s.passed for s in self._seats.values()]
            if all(count is not None for count in counts):
                self._say({"stop_at": max(count for count in counts if count is not None)})
        elif "bye" in message:
            seat.left = True
            seat.status = message["bye"]
            if all(s.left for s in self._seats.values()):
                self._say({"bye": self._seats[0].status})
                self._close()
        elif "gone" in message and seat.member.rank:
            del self._seats[seat.member.rank]
            self._dismiss(seat)
        elif "gone" in message:
            self._say({"bye": 0})
            self._close()

    def _seat(self, seat: "_Seat", message: dict[str, Any]) -> None:
        if message["run"] != self.meeting.run or self._complete:
            seat.wire.send({"welcome": False})
            return
        seat.wire.send({"welcome": True})
        member = seat.member = Member(**message["hello"])
        held = self._seats.setdefault(member.rank, seat)
        if member.rank == 0 and self._untold is not None:
            self._end(self._untold)
        elif held is not seat:
            self._twice = seat
            self._differ(
                f"{held.member} and {member} are the same rank: give each host a NODE_RANK of its own, from 0, and "
                "each process on it a LOCAL_RANK of its own"
            )
        elif message["world_size"] != self.meeting.world_size:
            self._differ(
                f"{member} expects {message['world_size']} ranks, rank 0 {self.meeting.world_size}: give the same "
                "--trainer.num_nodes and --trainer.devices on every host"
            )
        elif len(self._seats) == self.meeting.world_size:
            self._begin()

    def _begin(self) -> None:
        self._complete = True
        members = self._members()
        problem = self.meeting.judge(members)
        if problem:
            self._differ(problem)
            return
        self._say({"roll": self._roll(), "store": self._store})
        if self._hold is not None:
            self._say({"hold": self._hold})

    def _watch(self, elapsed: float) -> None:
        """Find who is silent for too long, and who it was when collectives failed without a word of a culprit."""
        seats = [seat for seat in self._seats.values() if seat.member]
        for seat in seats:
            seat.silence += elapsed
            if seat.silence > self.meeting.bound and seat.member:
                self._end(Verdict.of_the_silent(seat.member.rank, str(seat.member), seat.at, self.meeting.bound))
                return
        if any(seat.left for seat in self._seats.values()):
            self._parting += elapsed
            if self._parting > self.meeting.bound:
                names = ", ".join(f"{seat.member} at {seat.at}" for seat in seats if not seat.left)
                self._end(Verdict(f"{names} has not ended {self.meeting.bound:g} s after the others"))
                return
        if self._suffered:
            self._suffering += elapsed
        if self._suffering > GRACE:
            quiet = [seat for seat in seats if seat.silence > GRACE]
            waiting = [s for s in seats if s.member and s.member.rank not in self._suffered]
            what = next(iter(self._suffered.values()))
            if quiet:
                names = ", ".join(f"{seat.member} at {seat.at}" for seat in quiet)
                words = f"no sign of life from {names}: frozen, or cut off ({what})"
                self._end(Verdict(words, gone=_ranks(quiet), frozen=True))
            elif waiting:
                names = ", ".join(f"{seat.member} at {seat.at}" for seat in waiting)
                self._end(Verdict(f"{names} is alive but did not come to a collective: {what}"))
            else:
                self._end(Verdict(f"a collective failed on all ranks, which are all alive: {what}"))
        for seat in self._seats.values():
            seat.wire.send({})

    def _roll(self) -> list[dict[str, Any]]:
        return [asdict(replace(member, facts={})) for member in self._members()]

    def _members(self) -> list[Member]:
        return [seat.member for _, seat in sorted(self._seats.items()) if seat.member]

    def _absent(self) -> str:
        here = [f"{seat.member}" for _, seat in sorted(self._seats.items())]
        missing = [self.meeting.place(rank) for rank in range(self.meeting.world_size) if rank not in self._seats]
        return f"{_few(missing)} did not come, {_few(here)} came"

    def _differ(self, problem: str) -> None:
        self._end(Verdict(problem, status=2))

    def _end(self, verdict: Verdict) -> None:
        """Tell all ranks to end."""
        if 0 not in self._seats:  # it comes in a moment, to its own host, and would find the desk closed
            self._untold = verdict
            return
        said = {"end": asdict(verdict)}
        self._say(said if self._complete else {**said, "roll": self._roll()})
        self._close()

    def _say(self, message: dict[str, Any]) -> None:
        """To rank 0 last: it may end this process as soon as it knows."""
        if self._twice:
            self._twice.wire.send(message)
        for rank in sorted(self._seats, reverse=True):
            self._seats[rank].wire.send(message)

    def _close(self) -> None:
        """No more is said."""
        self._closed = True
        self._selector.unregister(self._server)
        self._server.close()

    def _linger(self) -> None:
        """Wait until all have heard what was said last; their connections stay open until this process ends."""
        deadline = time.monotonic() + GRACE
        while self._selector.get_map() and time.monotonic() < deadline:
            for key, _ in self._selector.select(TICK / 2):
                if key.data.wire.receive(0) is None:
                    self._selector.unregister(key.fileobj)
                    key.data.wire.socket.detach()
        self._selector.close()


@dataclass
class _Seat:
    """A connection at the desk."""

    wire: Wire
    member: Member | None = None
    at: str = "the start"
    silence: float = 0.0
    passed: int | None = None
    left: bool = False
    status: int = 0


def _ranks(seats: list[_Seat]) -> list[int]:
    return [seat.member.rank for seat in seats if seat.member]


def _few(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "nobody"
