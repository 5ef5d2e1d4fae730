"""Virtual hosts with a real Slurm on them: each has its own network, address, name, hosts file and processes."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.conftest import ENVIRONMENT

PROJECT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).parent / "lab.sh"
NEEDED = ("slurmctld", "slurmd", "munged", "ip", "nsenter", "unshare")
BIN = Path(sys.executable).parent


def reason_to_skip() -> str:
    """Why there can be no virtual hosts here; empty: there can."""
    missing = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install slurm-wlm munge iproute2"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    tried = subprocess.run(["unshare", "-n", "-u", "-i", "-m", "-p", "--fork", "true"], capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            reason = reason_to_skip() if reason is None else reason
            if reason and os.environ.get("LIT_MNIST_CLUSTER_TESTS") == "required":
                raise pytest.UsageError(f"the cluster tests cannot run: {reason}")
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


class Lab:
    """Hosts `ctl` and `node1` ... `node<n>`, at 10.77.0.1 and 10.77.0.11 ..."""

    def __init__(self, folder: Path, **options: str) -> None:
        self.folder = folder
        self.started: list[Started] = []
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
            **ENVIRONMENT,
            "PATH": f"{BIN}:{os.environ['PATH']}:/usr/sbin:/sbin",
            "SLURMLAB": str(folder / "lab"),
            **{f"SLURMLAB_{name.upper()}": value for name, value in options.items()},
        }

    def do(self, *action: str, check: bool = True) -> str:
        """One action of lab.sh; its output."""
        done = subprocess.run([str(SCRIPT), *action], env=self.environ, capture_output=True, text=True, timeout=120)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def slurm(self, *command: str, check: bool = True) -> str:
        """A command on the control host, in the project's folder."""
        return self.do("exec", *command, check=check)

    def start(self, node: int, *command: str, cwd: Path, out: Path | None = None, **env: str) -> "Started":
        """A command on a node, in the background; its output goes to `out`, by default `<cwd>/node<n>.out`."""
        command = (str(SCRIPT), "on", str(node), *command)
        self.started.append(Started(command, {**self.environ, **env}, cwd, out or cwd / f"node{node}.out"))
        return self.started[-1]

    def submit(self, script: Path, *options: str, to: Sequence[str]) -> str:
        """sbatch; the job's id.

        Args:
            script: The batch script.
            options: Of the script.
            to: Options of sbatch.
        """
        return self.slurm("sbatch", "--parsable", *to, str(script), *options).strip()

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, ..."""
        shown = self.slurm("scontrol", "--oneliner", "show", "job", job)
        found = re.search(r"JobState=(\S+)", shown)
        assert found, shown
        return found[1]

    def value(self, job: str, name: str) -> str:
        """A field of `scontrol show job`."""
        found = re.search(rf"\b{name}=(\S*)", self.slurm("scontrol", "--oneliner", "show", "job", job))
        return found[1] if found else ""

    def wait(self, job: str, state: str = "COMPLETED", timeout: float = 150) -> None:
        """Wait until a job is in a state."""
        wait_for(lambda: self.state(job) == state, timeout, lambda: f"{job} is {self.state(job)}, not {state}")


class Started:
    """A process on a node."""

    def __init__(self, command: Sequence[str], environ: dict[str, str], cwd: Path, out: Path) -> None:
        self.out = out
        with out.open("ab") as file:
            self.process = subprocess.Popen(command, env=environ, cwd=cwd, stdout=file, stderr=subprocess.STDOUT)

    def end(self, timeout: float = 120) -> int:
        """Wait for its end; the status."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {timeout} s:\n{self.text}") from None

    @property
    def text(self) -> str:
        """What it has said."""
        return self.out.read_text(errors="replace")


def wait_for(condition: Callable[[], bool], timeout: float, problem: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, problem()
        time.sleep(0.1)


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Two nodes; `@pytest.mark.parametrize("lab", [(3, {...})], indirect=True)` for others, with options of lab.sh."""
    nodes, options = getattr(request, "param", (2, {}))
    with tempfile.TemporaryDirectory(prefix="lit-mnist-lab-") as folder:
        os.chmod(folder, 0o755)  # munge refuses a socket in a folder that others cannot enter, as pytest's are
        lab = Lab(Path(folder), **options)
        try:
            lab.do("up", str(nodes))
            yield lab
        finally:
            lab.do("down")
            for started in lab.started:
                started.process.kill()  # it may be stopped, as what it waited for was
                started.process.wait()


@pytest.fixture(scope="session")
def train_sbatch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """slurm/train.sbatch as a person edits it for two hosts without GPUs."""
    return edited("train.sbatch", tmp_path_factory.mktemp("slurm"))


def edited(name: str, folder: Path) -> Path:
    text = (PROJECT / "slurm" / name).read_text()
    for before, after in (
        (r"#SBATCH --gpus-per-node=\d\n", ""),
        (r"(#SBATCH --ntasks-per-node)=\d", r"\1=1"),
        (r"(#SBATCH --cpus-per-task)=\d", r"\1=1"),
        (r"environment=\.venv\b", f"environment={BIN.parent}"),
        (r"\. slurm/train\.sbatch", f". {folder}/train.sbatch"),
    ):
        text = re.sub(before, after, text)
    path = folder / name
    path.write_text(text)
    return path
