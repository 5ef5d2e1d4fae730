"""`lit-mnist doctor` on virtual hosts: all is well under each launcher; each fault of a host is found by its name."""

import re
import time
from pathlib import Path

import pytest

import lit_mnist
from tests.cluster.conftest import Lab, Started
from tests.test_doctor import lines_of

BOUND = 40.0  # seconds, half of which processes may need for their start, on a machine that is busy
OPTIONS = ("--trainer.accelerator", "cpu", "--trainer.strategy", "ddp", "--trainer.num_nodes", "2")
RUN = ("doctor", *OPTIONS, "--trainer.devices", "1", "--timeout", f"{BOUND:g}")


def by_hand(lab: Lab, node: int, *options: str, master: str = "node1", **env: str) -> Started:
    command = ("env", *(f"{name}={value}" for name, value in env.items()), "lit-mnist", *RUN, *options)
    here = {"MASTER_ADDR": master, "MASTER_PORT": "29500", "NODE_RANK": str(node - 1)}
    return lab.start(node, *command, cwd=lab.folder, out=None, **here)


def both(lab: Lab) -> dict[str, tuple[str, str]]:
    """What the first host says of the two; none takes longer than it may."""
    processes = [by_hand(lab, node, "--timeout", "120") for node in (1, 2)]
    since = time.monotonic()
    statuses = [process.end(130) for process in processes]
    found = lines_of(processes[0].text)
    print(f"{time.monotonic() - since:.1f} s", processes[0].text, processes[1].text)
    assert statuses == [int(any(state == "fail" for state, _ in found.values()))] * 2
    return found


def is_well(found: dict[str, tuple[str, str]], text: str) -> None:
    assert {state for state, _ in found.values()} <= {"ok", "warning"}, text
    assert {"meeting", "process group", "all the same", "all-reduce", "training", "efficiency"} <= set(found), text
    assert re.search(
        r"rank 0 \(node1, 10.77.0.11 by eth0\), .*rank \d \(node2, 10.77.0.12 by eth0\)", found["meeting"][1]
    ), text
    assert "figures of this network" in found["efficiency"][1]


def test_by_hand(lab: Lab) -> None:
    is_well(both(lab), "")


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_under_a_launcher(launcher: str, lab: Lab) -> None:
    if launcher == "srun":
        srun = ("srun", "--nodes=2", "--ntasks-per-node=2", f"--chdir={lab.folder}", "lit-mnist", "doctor")
        text = lab.slurm(*srun, *OPTIONS, "--trainer.devices", "2", "--timeout", "120")
    else:
        ranks = ("torchrun", "--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "node1", "-m", "lit_mnist")
        options = ("doctor", *OPTIONS, "--trainer.devices", "2", "--timeout", "120")
        hosts = [
            lab.start(node, *ranks[:3], "--node-rank", str(node - 1), *ranks[3:], *options, cwd=lab.folder)
            for node in (1, 2)
        ]
        assert [host.end() for host in hosts] == [0, 0], hosts[0].text + hosts[1].text
        text = hosts[0].text
    found = lines_of(text)
    assert {"srun": "SLURM", "torchrun": "torchrun"}[launcher] + ", 4 = 2 node(s) x 2" in found["launcher"][1]
    is_well(found, text)


def test_a_host_that_is_missing(lab: Lab) -> None:
    one = by_hand(lab, 1)
    assert one.end(BOUND + 10) == 1
    state, value = lines_of(one.text)["launch"]
    assert state == "fail"
    assert re.match(r"rank 1 \(node rank 1\) did not come, rank 0 \(node1, process \d+\) came within [0-9.]+ s", value)


@pytest.mark.parametrize(
    ("master", "reason"),
    [
        pytest.param("ctl", "Connection refused", marks=pytest.mark.slow),
        ("localhost", r"127.0.0.1 there, which is node2 itself: Connection refused"),
    ],
)
def test_a_wrong_master(master: str, reason: str, lab: Lab) -> None:
    two = by_hand(lab, 2, master=master)
    assert two.end(BOUND + 10) == 1
    value = lines_of(two.text)["launch"][1]
    assert re.match(
        rf"rank 1 \(node2, .*\) could not reach rank 0 at {master}:29500 within [0-9.]+ s \({reason}\)", value
    ), value


@pytest.mark.parametrize("lab", [(2, {"hosts": "debian"})], indirect=True)
def test_a_name_that_is_loopback(lab: Lab) -> None:
    found = both(lab)
    assert found["launch"][0] == "fail"
    assert found["launch"][1].startswith("node1 takes its own name for 127.0.1.1, which other hosts cannot reach")


def test_a_firewall_that_drops(lab: Lab) -> None:
    """What node2 sends to node1 goes to a card that is not there."""
    lab.do(
        "on",
        "2",
        "ip",
        "neigh",
        "replace",
        "10.77.0.11",
        "lladdr",
        "02:00:00:00:00:99",
        "dev",
        "eth0",
        "nud",
        "permanent",
    )
    two = by_hand(lab, 2)
    assert two.end(BOUND + 10) == 1
    value = lines_of(two.text)["launch"][1]
    assert re.search(
        r"could not reach rank 0 at node1:29500 within [0-9.]+ s \(timed out: a firewall may drop", value
    ), value


def test_all_that_is_wrong_with_a_host_is_said_at_once(lab: Lab, tmp_path: Path) -> None:
    """Another version of a package, damaged data, other options, a run folder of its own, which is read-only."""
    info = tmp_path / "torchmetrics-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchmetrics\nVersion: 0.1\n")
    damaged = lab.folder / "damaged.gz"
    file = Path(lit_mnist.__file__).parent / "mnist" / "t10k-labels-idx1-ubyte.gz"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    lab.do("on", "2", "mount", "--bind", str(damaged), str(file))
    runs = lab.folder / "runs"
    runs.mkdir()
    lab.do("on", "2", "mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(runs))

    one = by_hand(lab, 1, "--timeout", "120")
    two = by_hand(
        lab, 2, "--timeout", "120", "--data.split_seed", "3", PYTHONPATH=f"{tmp_path}:{lab.environ['PYTHONPATH']}"
    )
    assert [one.end(), two.end()] == [1, 1], one.text + two.text
    found = lines_of(one.text)
    assert found["same versions"][0] == "fail"
    assert re.match(r"torchmetrics differs: .*rank 1 \(node2\) 0.1", found["same versions"][1])
    assert found["data"][0] == "fail"
    assert re.match(rf"rank 1 \(node2\): data file {file} is damaged", found["data"][1])
    assert found["same data"][0] == "fail"
    assert found["same config"] == ("fail", "data.split_seed differs: rank 1 (node2) 3, the others 0")
    assert found["run folder"][0] == "fail"
    assert re.match(rf"rank 1 \(node2\): {runs} cannot be written \({runs}: Read-only", found["run folder"][1])
    assert found["same folder"] == ("fail", f"what rank 0 writes to {runs} is not seen on node2")
    assert list(runs.iterdir()) == []
    assert "training" not in found
