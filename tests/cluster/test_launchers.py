"""The README's lines for many machines, on virtual hosts: torchrun, static and c10d, and by hand."""

import re
import shlex

import pytest

from tests.cluster.conftest import PROJECT, Lab, Started, wait_for
from tests.stops import difference, outcome
from tests.test_resume import SHORT

README = (PROJECT / "README.md").read_text()
LINES = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if not line.startswith("sbatch ")
]
SIZE = (*SHORT, "--data.global_batch_size", "48", "--timeout", "60")
PACED = (*SIZE, "--trainer.callbacks+=tests.stops.Pace", "--trainer.callbacks.seconds")


def on_cpus(line: str, node: int) -> list[str]:
    """A line of the README for two processes on CPUs a host, as it is typed on one of the hosts."""
    line = line.replace("ddp_gpu", "ddp_cpu").replace("--nproc-per-node 4", "--nproc-per-node 2")
    line = line.replace("--node-rank 0", f"--node-rank {node - 1}").replace("NODE_RANK=0", f"NODE_RANK={node - 1}")
    words = shlex.split(line.replace("configs/", f"{PROJECT}/configs/"))
    return ["env", *words] if "=" in words[0] else words


def start(lab: Lab, line: str, node: int, *options: str) -> Started:
    return lab.start(node, *on_cpus(line, node), *options, cwd=lab.folder)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Four ranks in one go, on this machine."""
    from tests.conftest import start

    folder = tmp_path_factory.mktemp("four")
    done = start("fit", *SIZE, "--trainer.devices", "4", cwd=folder)
    assert done.returncode == 0, done.stderr
    return outcome(folder / "runs" / "version_0")


def test_there_are_three() -> None:
    assert ["torchrun" in line for line in LINES] == [True, True, False]


@pytest.mark.parametrize("line", LINES, ids=["static", "c10d", "by hand"])
def test_a_line_of_the_readme(line: str, lab: Lab, uninterrupted: dict[str, object]) -> None:
    both = [start(lab, line, node, *SIZE) for node in (1, 2)]
    assert [process.end() for process in both] == [0, 0], both[0].text + both[1].text
    launcher = "Lightning" if "NODE_RANK" in line else "torchrun"
    said = " ".join((both[0].text + both[1].text).split())
    assert f"launcher {launcher} world size 4 = 2 node(s) x 2 cpu device(s)" in said
    assert difference(uninterrupted, outcome(lab.folder / "runs" / "version_0")) == ""


@pytest.mark.parametrize(
    ("lost", "pace"), [("lit_mnist fit", "0.3"), pytest.param("bin/torchrun", "3", marks=pytest.mark.slow)]
)
def test_a_host_is_lost_and_comes_back(lost: str, pace: str, lab: Lab, uninterrupted: dict[str, object]) -> None:
    """All of it, or its torchrun alone, whose workers stay until the other notices; then the line is typed again."""
    line = LINES[1]
    both = [start(lab, line, node, *PACED, pace) for node in (1, 2)]
    log = lab.folder / "runs" / "version_0" / "metrics.csv"
    wait_for(lambda: log.exists() and "\n5," in log.read_text(), 90, lambda: both[0].text + both[1].text)
    lab.do("on", "2", "pkill", "-KILL", "-f", lost)
    both[1].end(10)
    both[1] = start(lab, line, 2, *PACED, "0.3")
    assert [process.end(200) for process in both] == [0, 0], both[0].text + both[1].text
    assert "starts from      step" in both[0].text + both[1].text
    assert difference(uninterrupted, outcome(lab.folder / "runs" / "version_0")) == ""


def test_a_worker_is_lost(lab: Lab, uninterrupted: dict[str, object]) -> None:
    """torchrun starts all workers of both hosts again."""
    line = LINES[1]
    both = [start(lab, line, node, *PACED, "0.3") for node in (1, 2)]
    log = lab.folder / "runs" / "version_0" / "metrics.csv"
    wait_for(lambda: log.exists() and "\n5," in log.read_text(), 90, lambda: both[0].text + both[1].text)
    lab.do("on", "2", "pkill", "-KILL", "--newest", "-f", "u -m lit_mnist fit")
    assert [process.end(200) for process in both] == [0, 0], both[0].text + both[1].text
    assert difference(uninterrupted, outcome(lab.folder / "runs" / "version_0")) == ""
