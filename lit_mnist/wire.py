"""What the processes of a run say to each other, and over what: one JSON object a line, over TCP."""

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TICK = 1.0  # seconds between two signs of life
GRACE = 3.0  # seconds for a rank to say why it fails, once another's collective has failed; the dead need no time
LOOK_CLOSER = " `lit-mnist doctor` in place of the command looks closer"
UNMET = (
    "were all hosts started, with the same MASTER_ADDR and MASTER_PORT, and can they reach each other there?"
    + LOOK_CLOSER
)


@dataclass(frozen=True)
class Member:
    """One process of the run.

    Attributes:
        rank: 0 ... ranks-1.
        host: Its host's name.
        pid: Its process id there.
        started: When it started, in clock ticks since the host's boot: with pid, this process and no later one.
        facts: What the ranks are compared by (see `lit_mnist.launch`).
        address: Its own, as it reaches rank 0's host.
    """

    rank: int
    host: str
    pid: int
    started: int
    facts: dict[str, Any] = field(default_factory=dict)
    address: str = ""

    @classmethod
    def this(cls, rank: int, facts: dict[str, Any]) -> "Member":
        """This process."""
        return cls(rank, socket.gethostname(), os.getpid(), started_at(os.getpid()), facts)

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"


@dataclass(frozen=True)
class Meeting:
    """Where and when the ranks of a run meet.

    Attributes:
        world_size: How many they are.
        bound: Seconds after which a wait for another rank is given up.
        run: Tells this run from others, and from other programs, that may have the same port.
        address: Host and port of rank 0's desk; asked for again at each attempt. None: not known yet.
        place: Where a rank is expected, in words, for one that did not come.
        judge: Why the ranks that came cannot work together, by their members; None: they can.
    """

    world_size: int
    bound: float
    run: str
    address: Callable[[], tuple[str, int] | None]
    place: Callable[[int], str]
    judge: Callable[[Sequence[Member]], str | None]


@dataclass(frozen=True)
class Verdict:
    """Why a run ends.

    Attributes:
        words: In one line.
        status: Exit status.
        gone: The ranks at fault: they have ended or are about to.
        died: Whether they have, without a word.
        frozen: Whether they do not end by themselves, and are to be killed where they are.
        said_by: The rank at fault, where it says so itself.
    """

    words: str
    status: int = 1
    gone: Sequence[int] = ()
    died: bool = False
    frozen: bool = False
    said_by: int | None = None

    @classmethod
    def of_the_dead(cls, rank: int, who: str, at: str) -> "Verdict":
        """`who`, at a place in the run, is no more."""
        words = f"{who} died at {at}: its connection closed without a word (killed? out of memory?)"
        return cls(words, gone=[rank], died=True)

    @classmethod
    def of_the_silent(cls, rank: int, who: str, at: str, bound: float) -> "Verdict":
        """`who` has said nothing for `bound` seconds."""
        reason = "it is frozen, or its host or network is gone"
        return cls(f"{who}, at {at}, has given no sign of life for {bound:g} s: {reason}", gone=[rank], frozen=True)


class Wire:
    """Messages, one JSON object a line, over a socket; sending never raises nor blocks for long."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(TICK)
        self.socket = connected
        self._lock = threading.Lock()
        self._buffer = b""

    @property
    def host(self) -> str:
        """The address of the other end."""
        return str(self.socket.getpeername()[0])

    def close(self) -> None:
        """End the connection."""
        self.socket.close()

    def finish(self) -> None:
        """Say that nothing more is said from here."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def send(self, message: dict[str, Any]) -> None:
        """Send, or let it be: that the connection is lost is seen where it is read."""
        with contextlib.suppress(OSError), self._lock:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def is_welcome(self, timeout: float) -> bool:
        """Whether the desk's answer, the first message, is a welcome; what follows it is left to be received."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer and (left := deadline - time.monotonic()) > 0:
            if not self._read(left):
                break
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline or _parsed(line) != {"welcome": True}:
            self.close()
            return False
        self._buffer = rest
        return True

    def receive(self, timeout: float) -> list[dict[str, Any]] | None:
        """What came within `timeout` seconds; None: the connection is closed."""
        if b"\n" not in self._buffer and self._read(timeout) is None:
            return None
        *lines, self._buffer = self._buffer.split(b"\n")
        return [message for line in lines if isinstance(message := _parsed(line), dict)]

    def _read(self, timeout: float) -> bool | None:
        """Whether something came; None: the connection is closed."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.socket, selectors.EVENT_READ)
                if not selector.select(timeout):
                    return False
            data = self.socket.recv(1 << 20)
        except (OSError, ValueError):  # ValueError: closed from here
            return None
        self._buffer += data
        return True if data else None


def started_at(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 where it has ended, or that cannot be known."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if state in "ZX" else int(fields[18])
    except (OSError, IndexError, ValueError):
        return 0


def age() -> float:
    """Seconds since this process started; 0 where that cannot be known."""
    started = started_at(os.getpid())
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK") if started else 0.0


def is_alive(member: Member) -> bool:
    """Whether a process of this host has not ended; False where that cannot be known."""
    return member.started != 0 and started_at(member.pid) == member.started


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
