"""What the processes of a run tell each other, with threads in their place; real processes are in tests/cluster."""

import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from lit_mnist.desk import Desk
from lit_mnist.errors import RunError, UserError
from lit_mnist.hosts import differences
from lit_mnist.peers import Peers
from lit_mnist.wire import Meeting, Member


def meeting(world_size: int, bound: float = 10.0) -> tuple[Meeting, Desk]:
    """A meeting at a desk on a free port; the desk is not yet open."""
    place: list[tuple[str, int]] = []
    at = Meeting(
        world_size, bound, "a test", lambda: place[0], lambda rank: f"rank {rank} (there)", lambda members: None
    )
    desk = Desk(at, 0, store=1)
    place.append(("127.0.0.1", desk.port))
    return at, desk


def member(rank: int, host: str = "here") -> Member:
    return Member(rank, host, 1000 + rank, 1)


def together(tasks: Sequence[Callable[[], object]]) -> list[object]:
    """Run all at once; what each returned or raised."""
    results: list[object] = [None] * len(tasks)

    def run(index: int) -> None:
        try:
            results[index] = tasks[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "it hangs"
    return results


def come(rank: int, at: Meeting, desk: Desk) -> Callable[[], Peers]:
    return partial(Peers.meet, member(rank), at, None if rank else desk)


def met(world_size: int) -> list[Peers]:
    at, desk = meeting(world_size)
    desk.start()
    peers = together([come(rank, at, desk) for rank in range(world_size)])
    assert all(isinstance(peer, Peers) for peer in peers), peers
    return [peer for peer in peers if isinstance(peer, Peers)]


def left(peers: Sequence[Peers], *statuses: int) -> list[object]:
    return together([partial(p.leave, s) for p, s in zip(peers, statuses, strict=True)])


def test_all_know_all_and_part() -> None:
    peers = met(3)
    for peer in peers:
        assert [m.rank for m in peer.roll] == [0, 1, 2]
        assert peer.store == ("127.0.0.1", 1)
        assert peer.roll[2].address == "127.0.0.1"
    assert left(peers, 0, 0, 0) == [0, 0, 0]


def test_the_status_of_rank_0_is_everyones() -> None:
    assert left(met(2), 0, 75) == [0, 0]


@pytest.mark.parametrize("seed", range(60))
def test_all_stop_at_the_same_point(seed: int) -> None:
    """Ranks in lock step, as collectives hold them, or one of them ahead by one; requests at random moments."""
    draw = random.Random(seed)
    world = draw.choice([1, 2, 3, 4])
    peers = met(world) if world > 1 else [Peers()]
    ahead = threading.Barrier(world)
    requests = [draw.uniform(0, 0.1) for _ in range(draw.choice([1, 1, 2, world]))]
    pauses = [draw.choice([0, 0.0001, 0.002]) for _ in range(world)]

    def train(rank: int) -> int:
        for step in range(100_000):
            ahead.wait(10)  # no rank starts a step before all have come to its collective
            time.sleep(pauses[rank])
            if not peers[rank].may_go_on():
                return step
        raise AssertionError("nobody stops")

    def ask(delay: float, rank: int) -> None:
        time.sleep(delay)
        peers[rank].request_stop(signal.SIGUSR1)

    asked = [partial(ask, delay, draw.randrange(world)) for delay in requests]
    steps = together([*(partial(train, rank) for rank in range(world)), *asked])[:world]
    assert len(set(steps)) == 1, steps
    assert isinstance(steps[0], int)
    assert peers[0].stop_reason.startswith("SIGUSR1")
    if world > 1:
        assert left(peers, *[0] * world) == [0] * world


def test_who_is_missing_is_named_to_all() -> None:
    at, desk = meeting(4, bound=1.0)
    desk.start()
    first, second = together([come(rank, at, desk) for rank in (0, 2)])
    assert isinstance(first, RunError)
    assert isinstance(second, RunError)
    assert str(first).startswith(
        "rank 1 (there), rank 3 (there) did not come, rank 0 (here, process 1000), rank 2 (here, process 1002) came "
        "within 1 s: "
    )
    assert str(second) == ""  # rank 0 of the same host says it


@pytest.mark.parametrize(
    ("others", "error"),
    [
        ([(1, 3)], "rank 1 (here, process 1001) expects 3 ranks, rank 0 2: "),
        ([(0, 2)], "rank 0 (here, process 1000) and rank 0 (here, process 1000) are the same rank: "),
    ],
)
def test_ranks_that_disagree(others: list[tuple[int, int]], error: str) -> None:
    at, desk = meeting(2)
    desk.start()
    of = [(0, 2), *others]
    results = together([come(rank, replace(at, world_size=size), desk) for rank, size in of])
    assert all(isinstance(result, UserError) for result in results), results
    assert str(results[0]).startswith(error)


def test_another_run_at_the_same_port_is_not_joined() -> None:
    at, desk = meeting(2, bound=1.5)
    desk.start()
    of = (0, at), (1, replace(at, run="another"))
    results = together([come(rank, where, desk) for rank, where in of])
    assert all(isinstance(result, RunError) for result in results)
    assert "rank 1 (there) did not come" in str(results[0])
    assert "(what answers there is not this run's rank 0)" in str(results[1])


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-x\r\n"])
def test_what_answers_may_be_no_desk_at_all(greeting: bytes) -> None:
    kept: list[socket.socket] = []

    def answer() -> None:
        while True:
            try:
                kept.append(server.accept()[0])
                kept[-1].sendall(greeting)
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(2)
        answering = threading.Thread(target=answer)
        answering.start()
        at = Meeting(2, 1.0, "a test", server.getsockname, str, lambda members: None)
        since = time.monotonic()
        with pytest.raises(RunError, match="what answers there is not this run's rank 0"):
            Peers.meet(member(1), at)
        assert time.monotonic() - since < 3
        answering.join()
    for connection in kept:
        connection.close()


def test_strangers_at_the_desk_do_no_harm() -> None:
    at, desk = meeting(2)
    desk.start()
    whole = b'{"failed": "x"}\n', b'{"hello": 1}\n', b"[]\n" * 100
    for said in (b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff\n", *whole):
        with socket.create_connection(("127.0.0.1", desk.port)) as stranger:
            stranger.sendall(said)
    peers = together([come(rank, at, desk) for rank in (0, 1)])
    assert all(isinstance(peer, Peers) for peer in peers), peers
    left([peer for peer in peers if isinstance(peer, Peers)], 0, 0)


def test_a_taken_port() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"MASTER_PORT={port} cannot be used on .*Address already in use"):
            Desk(Meeting(2, 1.0, "", lambda: None, str, lambda members: None), port, 0)


def facts(**changes: object) -> dict[str, object]:
    return {"devices": 2, "name": "10.0.0.1", "unreachable": False, "interfaces": {"10.0.0.2": "eth0"}, **changes}


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ([("a", facts()), ("b", facts())], None),
        ([("a", facts(unreachable=True)), ("a", facts(unreachable=True))], None),  # one host needs no other's way
        (
            [("a", facts()), ("b", facts(devices=4))],
            "the hosts differ in processes: rank 0 (a, process 1) 2, rank 1 (b, process 1) 4: give the same "
            "--trainer.devices on each",
        ),
        (
            [("a", facts()), ("b", facts(unreachable=True, name="127.0.1.1"))],
            "b takes its own name for 127.0.1.1, which other hosts cannot reach: export GLOO_SOCKET_IFNAME=eth0 there, "
            "or give it its address in /etc/hosts",
        ),
    ],
)
def test_hosts_that_cannot_work_together(members: list[tuple[str, dict[str, object]]], problem: str | None) -> None:
    roll = [Member(rank, host, 1, 1, facts, "10.0.0.2") for rank, (host, facts) in enumerate(members)]
    assert differences(roll) == problem
