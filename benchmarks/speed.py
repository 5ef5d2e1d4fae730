"""How fast each way of training is, side by side: `make bench`, or `python -m benchmarks.speed --help`.

Contestants take turns, epoch by epoch, in one run: `seed` (seed.py), `bare` (bare.py, the yardstick), `documented`
(documented.py) and `ours`, the command as a user runs it, in a terminal, with its bar, logs and checkpoints. Then
whole commands, from the prompt to the exit; the loop over the test images; the time to start. All with the same number
of threads, 64 images a process and step, 60,000 images an epoch. Figures are medians of the rounds after a warm-up,
with the lowest and highest; the last line of the output is the same as JSON.
"""

import argparse
import gzip
import importlib.metadata
import json
import os
import platform
import pty
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

PROJECT = Path(__file__).parent.parent
PYTHON = sys.executable
COMMAND = (PYTHON, "-m", "lit_mnist")
# Name of a goal, numerator, denominator, bound; `>`: at least, `<`: at most.
GOALS = (
    ("epoch, seed / ours, 1 process", "epoch seed x1", "epoch ours x1", ">", 5.0),
    ("epoch, seed / ours, 2 processes", "epoch seed x2", "epoch ours x2", ">", 2.0),
    ("throughput, ours / bare, 1 process", "epoch bare x1", "epoch ours x1", ">", 0.90),
    ("throughput, ours / bare, 2 processes", "epoch bare x2", "epoch ours x2", ">", 0.90),
    ("ten epochs, seed / ours", "command seed", "command ours", ">", 4.0),
    ("evaluation, ours / bare", "test ours", "test bare", "<", 1.3),
    ("start, lit-mnist --help / import lightning", "start lit-mnist --help", "start import lightning", "<", 1.2),
)
MEMORY_GOAL = 400  # MB more than bare


@dataclass
class Process:
    """A command in a terminal of its own, whose words are kept for the case that it fails."""

    name: str
    process: subprocess.Popen[bytes]
    terminal: int
    said: bytes = b""

    @classmethod
    def start(cls, name: str, command: Sequence[str], cwd: Path, environ: dict[str, str]) -> "Process":
        ours, theirs = pty.openpty()
        process = subprocess.Popen(command, cwd=cwd, env=environ, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self = cls(name, process, ours)
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def _listen(self) -> None:
        while True:
            try:
                more = os.read(self.terminal, 65536)
            except OSError:  # it has ended
                return
            self.said = (self.said + more)[-20_000:]

    def end(self) -> int:
        """Wait for its end; its peak memory in kB, of its largest process."""
        _, status, usage = os.wait4(self.process.pid, 0)
        if status:
            sys.exit(f"{self.name} failed:\n{self.said.decode(errors='replace')}")
        os.close(self.terminal)
        return usage.ru_maxrss


class Turns:
    """Contestants that are alive together, of which one works at a time (see turns.py for their side)."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder = folder
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(1)
        self.environ = {**environ, "BENCH_TURNS": f"127.0.0.1:{self.server.getsockname()[1]}"}
        self.contestants: list[tuple[Process, list[TextIO]]] = []

    def enter(self, name: str, command: Sequence[str], processes: int) -> None:
        """Start one, and wait until all of its processes are ready."""
        process = Process.start(name, command, self.folder, {**self.environ, "BENCH_NAME": name})
        files = []
        while len(files) < processes:
            try:
                files.append(self.server.accept()[0].makefile("rw"))
            except TimeoutError:
                if process.process.poll() is not None:
                    sys.exit(f"{name} has gone:\n{process.said.decode(errors='replace')}")
                continue
            assert files[-1].readline().strip() == name
        self._expect_ready(process, files)
        self.contestants.append((process, files))
        print(f"  {name} is ready", flush=True)

    def run(self, rounds: int, result: dict[str, list[float]]) -> None:
        """Each has a turn in each round, of which the first is the warm-up; seconds of the slowest process."""
        for turn in range(rounds + 1):
            print(f"  round {turn} of {rounds}", flush=True)
            for process, files in self.contestants:
                for file in files:
                    print("go", file=file, flush=True)
                seconds = [self._line(process, file) for file in files]
                if turn:
                    result.setdefault(process.name, []).append(max(map(float, seconds)))
                if turn == rounds:
                    process.end()
                else:
                    self._expect_ready(process, files)

    def _expect_ready(self, process: Process, files: list[TextIO]) -> None:
        for file in files:
            assert self._line(process, file) == "ready"

    def _line(self, process: Process, file: TextIO) -> str:
        line = file.readline().strip()
        if not line:
            sys.exit(f"{process.name} has gone:\n{process.said.decode(errors='replace')}")
        return line


def measure(options: argparse.Namespace, folder: Path) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Seconds by what was measured, and kB by command."""
    environ = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": str(PROJECT), "TERM": "xterm"}
    environ["COLUMNS"] = "120"
    seconds: dict[str, list[float]] = {}
    memory: dict[str, list[int]] = {}
    accelerator = ("--accelerator", options.accelerator)
    scripts = {
        "seed": (PYTHON, str(PROJECT / "benchmarks" / "seed.py"), str(folder), *accelerator),
        "bare": (PYTHON, str(PROJECT / "benchmarks" / "bare.py"), str(folder), *accelerator),
        "documented": (PYTHON, str(PROJECT / "benchmarks" / "documented.py"), str(folder), *accelerator),
    }
    ours = (*COMMAND, "fit", "--trainer.accelerator", options.accelerator, "--trainer.default_root_dir")

    if "epoch" in options.parts:
        print("epochs", flush=True)
        turns, epochs = Turns(folder, environ), options.rounds + 1
        for processes in range(1, options.processes + 1):
            for name, script in scripts.items():
                size: tuple[str, ...] = ("--processes", str(processes), "--epochs", str(epochs))
                if name != "documented":
                    size += ("--port", free_port())
                turns.enter(f"epoch {name} x{processes}", (*script, *size), processes)
            root, size = str(folder / f"runs{processes}"), ("--trainer.devices", str(processes))
            plain = ("--data.val_size", "0", "--trainer.max_epochs", str(epochs), "--trainer.limit_test_batches", "1")
            plain += ("--timeout", "3600")  # for the others' turns
            clock = "--trainer.callbacks+=benchmarks.clock.EachEpoch"
            turns.enter(f"epoch ours x{processes}", (*ours, root, *size, *plain, clock), processes)
        turns.run(options.rounds, seconds)

    if "command" in options.parts:
        print("whole commands", flush=True)
        commands = {
            "command seed": scripts["seed"],
            "command bare": scripts["bare"],
            "command ours": (*ours, str(folder / "runs"), "--config", str(PROJECT / "configs" / "mnist.yaml")),
        }
        commands["command ours"] += ("--trainer.devices", "1")
        for turn in range(options.commands):
            print(f"  round {turn + 1} of {options.commands}", flush=True)
            for name, command in commands.items():
                since = time.perf_counter()
                peak = Process.start(name, command, folder, environ).end()
                seconds.setdefault(name, []).append(time.perf_counter() - since)
                memory.setdefault(name, []).append(peak)

    if "test" in options.parts:
        print("tests", flush=True)
        turns, times = Turns(folder, environ), options.rounds * 4 + 1
        turns.enter("test bare", (*scripts["bare"], "--evaluate", "--epochs", str(times)), 1)
        test = ["test", "--trainer.accelerator", options.accelerator, "--trainer.devices", "1"]
        test += ["--trainer.default_root_dir", str(folder / "tests"), "--trainer.callbacks+=benchmarks.clock.EachTest"]
        again = f"from lit_mnist import main\nfor _ in range({times}):\n    main({test})"
        turns.enter("test ours", (PYTHON, "-c", again), 1)
        turns.run(times - 1, seconds)

    if "start" in options.parts:
        print("starts", flush=True)
        commands = {
            "start import torch": (PYTHON, "-c", "import torch"),
            "start import lightning": (PYTHON, "-c", "import lightning"),
            "start lit-mnist --help": (*COMMAND, "--help"),
            "start lit-mnist fit --help": (*COMMAND, "fit", "--help"),
        }
        for turn in range(options.rounds + 1):
            for name, command in commands.items():
                since = time.perf_counter()
                Process.start(name, command, folder, environ).end()
                if turn:
                    seconds.setdefault(name, []).append(time.perf_counter() - since)
    return seconds, memory


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def unpack(folder: Path) -> None:
    """The images as torchvision wants them."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for path in (PROJECT / "lit_mnist" / "mnist").glob("*.gz"):
        with gzip.open(path) as packed, (raw / path.stem).open("wb") as file:
            shutil.copyfileobj(packed, file)


def machine(options: argparse.Namespace) -> dict[str, str]:
    """What the figures depend on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), cpu)
    packages = ("torch", "torchvision", "lightning", "torchmetrics")
    return {
        "cpu": f"{os.cpu_count()} cores, {cpu}",
        **({"gpu": torch.cuda.get_device_name()} if options.accelerator == "gpu" else {}),
        "threads a process": str(options.threads),
        "versions": ", ".join(
            [
                f"Python {platform.python_version()}",
                *(f"{name} {importlib.metadata.version(name)}" for name in packages),
            ]
        ),
    }


def main() -> None:
    parts = ("epoch", "command", "test", "start")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured epochs of each contestant")
    parser.add_argument("--commands", type=int, default=3, help="rounds of whole commands")
    parser.add_argument("--processes", type=int, default=2, help="up to how many processes")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lit-mnist-speed-") as name:
        folder = Path(name)
        unpack(folder)
        seconds, memory = measure(options, folder)

    print(f"\n{'what':<36}{'median s':>10}{'least':>9}{'most':>9}{'n':>4}")
    for what, values in seconds.items():
        middle = statistics.median(values)
        print(f"{what:<36}{middle:>10.3f}{min(values):>9.3f}{max(values):>9.3f}{len(values):>4}")
    for what, peaks in memory.items():
        print(f"{'peak MB of ' + what:<36}{statistics.median(peaks) / 1000:>10.0f}")
    print(f"\n{'goal, as a ratio of medians':<46}{'is':>8}{'bound':>10}")
    ratios = {}
    for goal, above, below, kind, bound in GOALS:
        if above in seconds and below in seconds:
            ratio = ratios[goal] = statistics.median(seconds[above]) / statistics.median(seconds[below])
            met = ratio >= bound if kind == ">" else ratio <= bound
            print(f"{goal:<46}{ratio:>8.2f}{'>= ' if kind == '>' else '<= ':>6}{bound:<4g} {'' if met else 'missed'}")
    if memory:
        more = (statistics.median(memory["command ours"]) - statistics.median(memory["command bare"])) / 1000
        ratios["memory"] = more
        print(f"{'peak memory, ours - bare, MB':<46}{more:>8.0f}{'<= ':>6}{MEMORY_GOAL} ", end="")
        print("" if more <= MEMORY_GOAL else "missed")
    about = machine(options)
    print("\n" + "\n".join(f"{key}: {value}" for key, value in about.items()))
    print(json.dumps({**about, "seconds": seconds, "peak_kb": memory, "ratios": ratios}))


if __name__ == "__main__":
    main()
