"""What can be wrong with hosts, names, ports and processes: each ends in time, everywhere, and is called by its name.

The seconds and words here are the table in docs/clusters.md.
"""

import re
import signal
import time

import pytest

from tests.cluster.conftest import Lab, Started, wait_for
from tests.test_resume import SHORT

BOUND = 12.0
START = 120.0  # seconds in which a process imports and comes to its first words, on a machine that is busy
RUN = (
    *("lit-mnist", "fit", *SHORT, "--data.global_batch_size", "48", "--timeout", f"{BOUND:g}"),
    *("--trainer.strategy", "ddp", "--trainer.num_nodes", "2", "--trainer.devices", "1"),
)
SLOW = ("--trainer.max_epochs", "1000", "--trainer.callbacks+=tests.stops.Pace", "--trainer.callbacks.seconds", "0.1")
ME = r"\(node1, process \d+\)"
YOU = r"\(node2, process \d+\)"


SLOW_FAULTS = ("KILL", 2), ("STOP", 1), ("exception", 1), ("exit", 1), ("exit", 2)


def by_hand(lab: Lab, node: int, *options: str, master: str = "node1", rank: int | None = None) -> Started:
    """One host's command, as a person types it: MASTER_ADDR, MASTER_PORT and NODE_RANK, the same options on all."""
    rank = node - 1 if rank is None else rank
    return lab.start(node, *RUN, *options, cwd=lab.folder, MASTER_ADDR=master, MASTER_PORT="29500", NODE_RANK=str(rank))


def errors(started: Started) -> list[str]:
    return re.findall(r"^lit-mnist: error: (?:\[rank \d+\] )?(.*)", started.text, re.MULTILINE)


def last_error(started: Started) -> str:
    found = errors(started)
    assert found, started.text
    return found[-1]


def running(lab: Lab, *options: str, in_validation: bool = False) -> tuple[Started, Started]:
    """Two hosts in the middle of training, or of validation."""
    options = (*SLOW, *options, *(("--trainer.callbacks+=tests.stops.LongValidation",) if in_validation else ()))
    both = by_hand(lab, 1, *options), by_hand(lab, 2, *options)
    log = lab.folder / "runs" / "version_0" / "metrics.csv"
    row = r"^3," if not in_validation else r"^5,"  # the first epoch has six steps
    wait_for(lambda: log.exists() and re.search(row, log.read_text(), re.M) is not None, 90, lambda: both[0].text)
    if in_validation:
        wait_for(lambda: "in validation" in both[0].text, 30, lambda: both[0].text)
        time.sleep(2)  # until each has said where it is
    return both


def ends(started: Started, since: float, within: float = BOUND + 10) -> float:
    """Wait for the end of a process that must not take longer; the seconds it took."""
    started.end(max(0.1, since + within - time.monotonic()))
    took = time.monotonic() - since
    print(f"{started.out.name}: {took:.1f} s: {(errors(started) or ['no error'])[-1]}")
    return took


def nothing_is_left(lab: Lab, *nodes: int) -> bool:
    return not any(lab.do("on", str(node), "pgrep", "-f", "lit-mnist fit", check=False) for node in nodes)


def test_a_host_that_never_starts(lab: Lab) -> None:
    since = time.monotonic()
    one = by_hand(lab, 1)
    ends(one, since, BOUND + START)  # with the time to start
    assert one.process.returncode == 1
    assert re.fullmatch(
        rf"rank 1 \(node rank 1\) did not come, rank 0 {ME} came within 12 s: were all hosts started, .*",
        last_error(one),
    )
    assert "lit-mnist: note: rank 1 (node rank 1) did not come, " in one.text


def test_the_first_host_never_starts(lab: Lab) -> None:
    two = by_hand(lab, 2)
    ends(two, time.monotonic(), BOUND + START)
    assert two.process.returncode == 1
    reason = rf"rank 1 {YOU} could not reach rank 0 at node1:29500 within 12 s \(Connection refused\): were all .*"
    assert re.fullmatch(reason, last_error(two))


@pytest.mark.parametrize(
    ("master", "reason"),
    [
        pytest.param("ctl", "Connection refused", marks=pytest.mark.slow),
        ("10.77.0.99", "No route to host|a firewall may drop what is sent there"),
        ("localhost", "Connection refused"),
        pytest.param("10.99.0.1", "Network is unreachable", marks=pytest.mark.slow),
        pytest.param("nowhere", ".*[Nn]ame.*", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_master_on_the_second_host(master: str, reason: str, lab: Lab) -> None:
    one, two = by_hand(lab, 1), by_hand(lab, 2, master=master)
    since = time.monotonic()
    ends(one, since, BOUND + START)
    ends(two, since, BOUND + START)
    assert one.process.returncode == two.process.returncode == 1
    assert re.fullmatch(rf"rank 1 \(node rank 1\) did not come, rank 0 {ME} came .*", last_error(one))
    found = rf"rank 1 {YOU} could not reach rank 0 at {master}:29500 within 12 s \((.*: )?({reason})\): .*"
    assert re.fullmatch(found, last_error(two))


@pytest.mark.parametrize("master", ["ctl", pytest.param("nowhere", marks=pytest.mark.slow)])
def test_a_wrong_master_on_the_first_host(master: str, lab: Lab) -> None:
    one = by_hand(lab, 1, master=master)
    ends(one, time.monotonic(), START)
    assert one.process.returncode == 2
    problem = "is not an address of node1, where rank 0 is" if master == "ctl" else "is no address that node1 knows"
    assert f"MASTER_ADDR={master} {problem}" in last_error(one)


def test_the_masters_port_is_taken(lab: Lab) -> None:
    taken = lab.start(1, "python", "-m", "http.server", "29500", cwd=lab.folder, out=lab.folder / "server.out")
    time.sleep(1)
    since = time.monotonic()
    one, two = by_hand(lab, 1), by_hand(lab, 2)
    ends(one, since, START)
    assert one.process.returncode == 2
    assert "MASTER_PORT=29500 cannot be used on node1 (Address already in use): another run or" in last_error(one)
    ends(two, since, BOUND + START)
    assert two.process.returncode == 1
    assert "(what answers there is not this run's rank 0)" in last_error(two)
    taken.process.kill()


@pytest.mark.parametrize(
    ("first", "second", "error"),
    [
        ((), ("--trainer.num_nodes", "3"), rf"rank 1 {YOU} expects 3 ranks, rank 0 2: give the same .*"),
        (
            ("--trainer.num_nodes", "3", "--data.global_batch_size", "96"),
            ("--trainer.num_nodes", "2", "--trainer.devices", "2", "--data.global_batch_size", "96"),
            rf"rank [23] {YOU} expects 4 ranks, rank 0 3: give the same .*",
        ),
    ],
)
def test_hosts_that_disagree(first: tuple[str, ...], second: tuple[str, ...], error: str, lab: Lab) -> None:
    one, two = by_hand(lab, 1, *first), by_hand(lab, 2, *second)
    since = time.monotonic()
    for process in (one, two):
        ends(process, since, START)
        assert process.process.returncode != 0
        assert re.fullmatch(error, last_error(process))


def test_two_hosts_that_think_they_are_the_first(lab: Lab) -> None:
    two = by_hand(lab, 2, rank=0)
    ends(two, time.monotonic(), START)
    assert two.process.returncode == 2
    assert "MASTER_ADDR=node1 is not an address of node2, where rank 0 is" in last_error(two)


@pytest.mark.parametrize("lab", [(3, {})], indirect=True)
def test_two_hosts_with_the_same_rank(lab: Lab) -> None:
    size = ("--trainer.num_nodes", "3")
    since = time.monotonic()
    processes = [by_hand(lab, 1, *size), by_hand(lab, 2, *size), by_hand(lab, 3, *size, rank=1)]
    for process in processes:
        ends(process, since, START)
        assert process.process.returncode == 2
        assert re.fullmatch(
            r"rank 1 \(node[23], .* and rank 1 \(node[23], .* are the same rank: give .*", last_error(process)
        )


@pytest.mark.parametrize("lab", [(2, {"hosts": "debian"})], indirect=True)
def test_a_name_that_is_loopback(lab: Lab) -> None:
    both = by_hand(lab, 1), by_hand(lab, 2)
    since = time.monotonic()
    for process in both:
        ends(process, since, START)
        assert process.process.returncode == 2
        assert last_error(process).startswith(
            "node1 takes its own name for 127.0.1.1, which other hosts cannot reach: export GLOO_SOCKET_IFNAME=eth0 "
        )


@pytest.mark.parametrize("lab", [(2, {"hosts": "debian"})], indirect=True)
@pytest.mark.slow
def test_its_remedy(lab: Lab) -> None:
    lab.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    both = by_hand(lab, 1), by_hand(lab, 2)
    assert [process.end() for process in both] == [0, 0], both[0].text + both[1].text


def test_a_run_folder_that_is_not_shared(lab: Lab) -> None:
    (lab.folder / "runs").mkdir()
    for node in ("1", "2"):
        lab.do("on", node, "mount", "-t", "tmpfs", "tmpfs", str(lab.folder / "runs"))
    for process in [by_hand(lab, node) for node in (1, 2)]:
        assert process.end() == 2, process.text
        assert "made by rank 0, is not there on node2: put trainer.default_root_dir=" in last_error(process)


@pytest.mark.parametrize(
    ("how", "node"),
    [
        ("KILL", 1),
        ("STOP", 2),
        ("exception", 2),
        *(pytest.param(how, node, marks=pytest.mark.slow) for how, node in SLOW_FAULTS),
    ],
)
def test_a_rank_that_fails(how: str, node: int, lab: Lab) -> None:
    rank, other, who = node - 1, 3 - node, ME if node == 1 else YOU
    fault = lab.folder / f"fault.{rank}"
    both = running(lab, "--trainer.callbacks+=tests.stops.Fault", "--trainer.callbacks.path", str(lab.folder / "fault"))
    failing, left = both[rank], both[1 - rank]
    since = time.monotonic()
    if how in ("KILL", "STOP"):
        lab.do("on", str(node), "pkill", f"-{how}", "-f", "lit-mnist fit")
    else:
        fault.write_text(how)
    took = ends(left, since)
    assert left.process.returncode == 1
    reason = {
        "KILL": rf"rank {rank} {who} died at step \d+: its connection closed without a word .*",
        "STOP": rf"rank {rank} {who}, at step \d+, has given no sign of life for 12 s: it is frozen, or its host .*",
        "exception": rf"rank {rank} {who} failed at step \d+: FaultError: planted",
        "exit": rf"rank {rank} {who} failed at step \d+: exit status 3",
    }[how]
    assert re.fullmatch(reason, last_error(left))
    assert errors(left) == [last_error(left)]
    assert "Traceback" not in left.text
    assert took < (BOUND + 10 if how == "STOP" else 6)
    if how == "STOP":  # nothing can end it from another host; it does so itself as soon as it can
        since = time.monotonic()
        failing.process.send_signal(signal.SIGCONT)
        lab.do("on", str(node), "pkill", "-CONT", "-f", "lit-mnist fit", check=False)
        ends(failing, since, 6)
    else:
        ends(failing, since, 6)
    assert failing.process.returncode == {"KILL": -9, "STOP": 1, "exception": 1, "exit": 3}[how]
    if how == "exception":
        assert failing.text.count("Traceback") == 1
        assert "FaultError: planted" in failing.text
    assert nothing_is_left(lab, 1, 2), other


@pytest.mark.parametrize("node", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["TERM", *(pytest.param(how, marks=pytest.mark.slow) for how in ("USR1", "INT"))])
def test_a_request_to_one_rank_stops_all(how: str, node: int, lab: Lab) -> None:
    both = running(lab)
    since = time.monotonic()
    lab.do("on", str(node), "pkill", f"-{how}", "-f", "lit-mnist fit")
    for process in both:
        ends(process, since, 10)
        assert process.process.returncode == 75
    who = f"rank {node - 1} {YOU if node == 2 else ME}"
    path = "runs/version_0/checkpoints/last.ckpt"
    assert re.search(
        rf"^stopped at step \d+ on request \(SIG{how} to {who}\), checkpoint {path}: run", both[0].text, re.M
    )
    assert (lab.folder / path).exists()


@pytest.mark.parametrize("in_validation", [False, True])
def test_a_cable_is_pulled(in_validation: bool, lab: Lab) -> None:
    both = running(lab, in_validation=in_validation)
    since = time.monotonic()
    lab.do("link", "2", "down")
    place = r"validation after step 6" if in_validation else r"step \d+"
    for process, other in ((both[0], f"rank 1 {YOU}"), (both[1], f"rank 0 {ME}")):
        ends(process, since)
        assert process.process.returncode == 1
        assert re.fullmatch(rf"{other}, at {place}, has given no sign of life for 12 s: .*", last_error(process))
    assert nothing_is_left(lab, 1, 2)
