"""The processes of one run: who came, who is alive, who failed first, and at which point all of them stop.

Rank 0 keeps a desk, to which every rank (rank 0 too) holds one TCP connection for as long as it lives. The desk calls
the roll before a process group is made, so that who is missing can be named. Afterwards each rank says a few words a
second. A connection that closes without a word is a rank that died; one that is silent for the bound is a rank that is
frozen or cut off. Then the desk tells all which rank was the first, and each ends, whatever its main thread waits for.

The desk also finds the point at which all ranks stop on request. Every rank counts the points at which it could stop
(`Peers.may_go_on`). Asked to hold, each says how many it has passed, and passes no other until it knows the largest of
these counts: there all of them stop. So the ranks agree without a collective, and a step costs a lock and an addition.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from dataclasses import asdict, replace
from typing import Any

from lit_mnist.errors import RunError, UserError, complain
from lit_mnist.wire import GRACE, TICK, UNMET, Meeting, Member, Verdict, Wire, is_alive


class Peers:
    """This rank's end of the connection; alone, without one.

    Attributes:
        roll: All ranks in order; empty when alone.
        store: Host and port of the store that rank 0 offers for the process group.
        status: Exit status rank 0 ends with, once it said so.
    """

    def __init__(self) -> None:
        self.roll: list[Member] = []
        self.store: tuple[str, int] | None = None
        self.status: int | None = None
        self._condition = threading.Condition()
        self._at = "the start"
        self._passed = 0
        self._holding = False
        self._stop_at: int | None = None
        self._stop_reason = ""
        self._verdict: Verdict | None = None
        self._leaving = False
        self._has_spoken = False
        self._met = False
        self._me: Member | None = None
        self._bound = 0.0
        self._wire: Wire | None = None
        self._desk: threading.Thread | None = None

    @classmethod
    def meet(cls, me: Member, meeting: Meeting, desk: threading.Thread | None = None) -> "Peers":
        """Come to rank 0's desk and wait until all have.

        Args:
            me: This process.
            meeting: Whom it meets.
            desk: The desk, on rank 0.

        Raises:
            RunError: If they have not within the bound, or one of them died; it names which came and which did not.
            UserError: If they cannot work together. Both are empty where another rank of this host says it.
        """
        peers = cls()
        peers._me, peers._bound, peers._desk = me, meeting.bound, desk
        peers._wire = _connect(me, meeting)
        threading.Thread(target=peers._listen, daemon=True, name="peers").start()
        with peers._condition:
            peers._condition.wait_for(lambda: peers.store is not None or peers._verdict is not None)
        if peers._verdict is not None:
            if desk:
                desk.join()
            peers._wire.close()
            raise (UserError if peers._verdict.status == 2 else RunError)(peers._words())
        peers._met = True
        return peers

    def at(self, place: str) -> None:
        """Say where in the run this rank is, for the messages about it."""
        self._at = place

    def may_go_on(self) -> bool:
        """To be asked at each point where this rank could stop, the same points on all ranks; False: stop here."""
        with self._condition:
            self._condition.wait_for(lambda: not self._holding or self._stop_at is not None)
            if self._stop_at is not None and self._passed >= self._stop_at:
                return False
            self._passed += 1
            return True

    @property
    def is_alone(self) -> bool:
        """Whether there are no others."""
        return self._wire is None

    @property
    def stop_reason(self) -> str:
        """Who asked to stop; empty: nobody did."""
        return self._stop_reason

    def request_stop(self, received: signal.Signals) -> None:
        """Have all ranks stop at the next point they agree on."""
        if self._wire is None:
            with self._condition:
                self._stop_reason, self._stop_at = received.name, self._passed
        else:
            self._wire.send({"stop": f"{received.name} to {self._me}"})

    def fail(self, reason: str, is_said: bool = False) -> None:
        """Tell the others that this rank fails; it is about to end.

        Args:
            reason: Why.
            is_said: Whether it says so itself, so that the others of its host need not.
        """
        if self._wire is None:
            return
        with self._condition:
            self._leaving = True
            self._wire.send({"failed": reason, "at": self._at, "is_said": is_said})
            self._condition.wait_for(lambda: self._verdict is not None, timeout=GRACE)

    def explain(self, reason: str) -> str:
        """What to say of a failed collective: which rank failed first. Empty: another rank of this host says it.

        Args:
            reason: What this rank saw of it.
        """
        if self._wire is None:
            return reason
        with self._condition:
            self._leaving = True
            self._wire.send({"suffered": reason, "at": self._at})
            self._condition.wait_for(lambda: self._verdict is not None, timeout=self._bound + 2 * GRACE)
        return self._words() if self._verdict is not None else reason

    def leave(self, status: int) -> int:
        """Part from the others at the end of the command, within the bound.

        Args:
            status: Exit status; rank 0's is everyone's.

        Returns:
            The status to end with.

        Raises:
            RunError: If another rank does not come to its end.
        """
        if self._wire is None:
            return status
        with self._condition:
            self._wire.send({"bye": status})
            self._condition.wait_for(lambda: self.status is not None or self._verdict is not None, self._bound + GRACE)
            self._leaving = True
        if self._desk:
            self._desk.join()
        self._wire.close()
        if self._verdict is not None:
            raise RunError(self._words())
        return status if self.status is None else self.status

    def part(self) -> None:
        """Go without a word on how it ended and without waiting: this rank needs none of the others any more."""
        if self._wire is None:
            return
        self.status = 0
        self._wire.send({"gone": True})
        if self._desk:
            self._desk.join(timeout=2 * GRACE)

    def see_off(self, status: int) -> int:
        """The last thing a process does: the first of each host waits for the others there to end, and kills those
        that do not.

        Args:
            status: Exit status as it is.

        Returns:
            Exit status to end with: 1 where one had to be killed. 0 where Lightning started this process, which would
            kill its own, the first, for any other; that one knows already how the run ended, and tells the shell.
        """
        if self._wire is None or self._me is None:
            return status
        here = self._here()
        if not here or here[0].rank != self._me.rank:
            return 0 if os.getppid() in [member.pid for member in here] else status
        if self._desk:
            self._desk.join(timeout=2 * GRACE)
        patience = self._bound if self._verdict is None else 2 * GRACE
        deadline = time.monotonic() + patience
        while left := [member for member in here[1:] if is_alive(member)]:
            if time.monotonic() > deadline:
                names = ", ".join(map(str, left))
                complain(f"{names} did not end within {patience:g} s after the others, and is killed")
                self._kill(left)
                return status or 1
            time.sleep(0.01)
        return status

    def _listen(self) -> None:
        """The thread of the connection: signs of life, and what the desk says."""
        assert self._wire
        silence = 0.0
        while self.status is None:
            self._wire.send({"at": self._at})
            since = time.monotonic()
            messages = self._wire.receive(TICK)
            if messages is None:
                if self.status is None:
                    self._end(Verdict.of_the_dead(0, self._who(0), self._at))
                return
            silence = 0.0 if messages else silence + min(time.monotonic() - since, 2 * TICK)
            for message in messages:
                if "end" in message:
                    self.roll = [Member(**member) for member in message["roll"]] if "roll" in message else self.roll
                    self._end(Verdict(**message["end"]))
                    return
                self._hear(message)
            if silence > self._bound:
                self._end(Verdict.of_the_silent(0, self._who(0), self._at, self._bound))
                return

    def _hear(self, message: dict[str, Any]) -> None:
        assert self._wire
        with self._condition:
            if "roll" in message:
                self.store = self._wire.host, message["store"]
                self.roll = [Member(**member) for member in message["roll"]]
            elif "hold" in message:
                self._holding = True
                self._stop_reason = message["hold"]
                self._wire.send({"passed": self._passed})
            elif "stop_at" in message:
                self._stop_at = message["stop_at"]
            elif "bye" in message:
                self._wire.finish()
                self.status = message["bye"]
            self._condition.notify_all()

    def _end(self, verdict: Verdict) -> None:
        """End this process for another's failure, unless its main thread is about to end it."""
        assert self._wire
        if verdict.frozen:
            self._kill([member for member in self._here() if member.rank in verdict.gone])
        self._wire.finish()
        with self._condition:
            self._verdict = verdict
            self._condition.notify_all()
        if not self._met:
            return  # the main thread waits for the meeting, and says what came of it
        if verdict.died and not self._leaving:
            complain(self._words())  # at once: Lightning's launcher may be about to kill this process for it
        time.sleep(TICK / 2)  # the main thread may fail in the same way
        if not self._leaving:
            complain(self._words())
            os._exit(self.see_off(verdict.status))

    def _words(self) -> str:
        """Those of the verdict, once, on the first rank of each host that is left to say them; else empty."""
        assert self._me
        assert self._verdict
        here = [member.rank for member in self._here()]
        left = [rank for rank in here if rank not in self._verdict.gone]
        with self._condition:
            if self._has_spoken or self._verdict.said_by in here or (left and self._me.rank != left[0]):
                return ""
            self._has_spoken = True
            return self._verdict.words

    def _kill(self, members: list[Member]) -> None:
        for member in members:
            if is_alive(member) and member.pid != os.getpid():
                os.kill(member.pid, signal.SIGKILL)

    def _here(self) -> list[Member]:
        """Those of this host."""
        return [member for member in self.roll if self._me and member.host == self._me.host]

    def _who(self, rank: int) -> str:
        return str(self.roll[rank]) if self._met else f"rank {rank}"


def _connect(me: Member, meeting: Meeting) -> Wire:
    """A connection to rank 0's desk, which has taken this rank in, within the bound."""
    deadline = time.monotonic() + meeting.bound
    where, reason = "rank 0", "it has not said where it is"
    while (left := deadline - time.monotonic()) > 0:
        address = meeting.address()
        if address:
            where = f"rank 0 at {address[0]}:{address[1]}"
            try:
                wire = Wire(socket.create_connection(address, timeout=min(5.0, left)))
                here = replace(me, address=wire.socket.getsockname()[0])
                wire.send({"hello": asdict(here), "run": meeting.run, "world_size": meeting.world_size})
                if wire.is_welcome(min(5.0, left)):
                    return wire
                reason = "what answers there is not this run's rank 0"
            except TimeoutError:
                reason = "timed out: a firewall may drop what is sent there"
            except OSError as error:
                reason = f"{_itself(address[0])}{error.strerror or error or 'no answer'}"
        time.sleep(min(0.2, left))
    raise RunError(f"{me} could not reach {where} within {meeting.bound:g} s ({reason}): {UNMET}")


def _itself(host: str) -> str:
    """Says so, where a name means the host that asks for it, by its loopback interface; else empty."""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(host)
        if address.startswith("127."):
            return f"{address} there, which is {socket.gethostname()} itself: "
    return ""
