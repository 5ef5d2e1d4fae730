"""The processes of one run: who came, who is alive, who failed first, and at which point all of them stop.

Rank 0 keeps a desk, to which every rank (rank 0 too) holds one TCP connection for as long as it lives. The desk calls
the roll before a process group is made, so that who is missing can be named. Afterwards each rank says a few words a
second. A connection that closes without a word is a rank that died; one that is silent for the bound is a rank that is
frozen or cut off. Then the desk tells all which rank was the first, and each ends, whatever its main thread waits for.

The desk also finds the point at which all ranks stop on request. Every rank counts the points at which it could stop
(`Peers.may_go_on`). Asked to hold, each says how many it has passed, and passes no other until it knows the largest of
these counts: there all of them stop. So the ranks agree without a collective, and a step costs a lock and an addition.
"""

import os
import signal
import socket
import threading
import time
from dataclasses import asdict, replace
from typing import Any

from lit_mnist.errors import RunError, UserError, complain
from lit_mnist.wire import GRACE, TICK, UNMET, Meeting, Member, Wire, died, silent, started_at


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
        self._verdict: str | None = None
        self._status = 1
        self._gone: list[int] = []
        self._leaving = False
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
            raise (UserError if peers._status == 2 else RunError)(peers._said())
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

    def fail(self, reason: str) -> None:
        """Tell the others that this rank fails, and why; it is about to end, and says itself what to say."""
        if self._wire is None:
            return
        with self._condition:
            self._leaving = True
            self._wire.send({"failed": reason, "at": self._at})
            self._condition.wait_for(lambda: self._verdict is not None, timeout=GRACE)
        self._part()

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
        return self._said() if self._verdict is not None else reason

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
        if self._verdict is not None or status or self._desk:
            self._part()
        self._wire.close()
        if self._verdict is not None:
            raise RunError(self._said())
        return status if self.status is None else self.status

    def _part(self) -> None:
        """Rank 0 waits until all have heard of the end, and the others until rank 0 has ended.

        Lightning's launcher, which is rank 0's process, would be killed for a child that fails before it.
        """
        assert self._wire
        if self._desk:
            self._desk.join()
        deadline = time.monotonic() + GRACE
        while not self._desk and time.monotonic() < deadline and self._wire.receive(TICK) is not None:
            pass

    def _listen(self) -> None:
        """The thread of the connection: signs of life, and what the desk says."""
        assert self._wire
        silence = 0.0
        while self.status is None:
            self._wire.send({"at": self._at})
            since = time.monotonic()
            messages = self._wire.receive(TICK)
            if messages is None:
                self._end(died(self._who(0), self._at), [0])
                return
            silence = 0.0 if messages else silence + min(time.monotonic() - since, 2 * TICK)
            for message in messages:
                if "end" in message:
                    self.roll = [Member(**member) for member in message["roll"]] if "roll" in message else self.roll
                    self._end_frozen(message["gone"] if message["frozen"] else [])
                    self._end(message["end"], message["gone"], message["status"])
                    return
                self._hear(message)
            if silence > self._bound:
                self._end_frozen([0])
                self._end(silent(self._who(0), self._bound, self._at), [0])
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

    def _end(self, verdict: str, gone: list[int], status: int = 1) -> None:
        """End this process for another's failure, unless its main thread is about to end it."""
        assert self._wire
        self._wire.finish()
        with self._condition:
            self._verdict, self._gone, self._status = verdict, gone, status
            self._condition.notify_all()
        if not self._met:
            return  # the main thread waits for the meeting, and says what came of it
        time.sleep(TICK / 2)  # it may fail in the same way, or wait in `explain`
        if not self._leaving:
            complain(self._said())
            os._exit(status)

    def _said(self) -> str:
        """The verdict, on the first rank of each host that is left to say it; empty on others."""
        assert self._me
        left = [m.rank for m in self.roll if m.host == self._me.host and m.rank not in self._gone]
        return self._verdict or "" if not left or self._me.rank == left[0] else ""

    def _end_frozen(self, ranks: list[int]) -> None:
        """SIGKILL to those of them that are on this host."""
        for member in self.roll:
            here = self._me and member.host == self._me.host and member.pid != self._me.pid
            if here and member.rank in ranks and started_at(member.pid) == member.started:
                os.kill(member.pid, signal.SIGKILL)

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
            except OSError as error:
                reason = error.strerror or str(error) or "no answer"
        time.sleep(min(0.2, left))
    raise RunError(f"{me} could not reach {where} within {meeting.bound:g} s ({reason}): {UNMET}")
