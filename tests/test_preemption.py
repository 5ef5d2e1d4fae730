"""Requests to stop, in processes of their own on one machine; SLURM's and other hosts are in tests/cluster."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lit_mnist.checkpoints import load_checkpoint
from lit_mnist.preemption import requeue
from tests.conftest import ENVIRONMENT, start
from tests.stops import difference, outcome
from tests.test_resume import SHORT

CKPT = "runs/version_0/checkpoints/last.ckpt"


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The outcome of the run in one go, by number of ranks."""
    outcomes = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp(f"whole{ranks}")
        done = start("fit", *SHORT, "--trainer.devices", str(ranks), cwd=folder)
        assert done.returncode == 0, done.stderr
        outcomes[ranks] = outcome(folder / "runs" / "version_0")
    return outcomes


def begin(*args: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lit_mnist", *args],
        cwd=cwd,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def signal_at(hook: str, step: int, rank: int) -> tuple[str, ...]:
    options = ("--trainer.callbacks+=tests.stops.SignalAt", "--trainer.callbacks.hook", hook)
    return (*options, "--trainer.callbacks.step", str(step), "--trainer.callbacks.rank", str(rank))


@pytest.mark.parametrize(
    ("ranks", "hook", "step", "stopped"),
    [
        (1, "on_train_batch_end", 3, "step 3"),
        pytest.param(2, "on_train_batch_start", 9, r"step (9|10)", marks=pytest.mark.slow),
        (2, "on_validation_batch_end", 6, "step 6"),  # at its end
        pytest.param(1, "on_train_epoch_end", 18, "step 18", marks=pytest.mark.slow),
        (1, "on_test_batch_start", 18, "the test"),
    ],
)
def test_a_request_stops_all_at_one_step(
    ranks: int, hook: str, step: int, stopped: str, tmp_path: Path, uninterrupted: dict[int, dict[str, Any]]
) -> None:
    options = (*SHORT, "--trainer.devices", str(ranks))
    ended = start("fit", *options, *signal_at(hook, step, ranks - 1), cwd=tmp_path)
    assert ended.returncode == 75, ended.stderr + ended.stdout
    who = r" to rank 1 \(\S+, process \d+\)" if ranks == 2 else ""
    said = rf"stopped at {stopped} on request \(SIGUSR1{who}\), checkpoint {CKPT}: run the same command again to go on"
    assert re.fullmatch(said, ended.stdout.splitlines()[-1])
    note = "lit-mnist: note: SIGUSR1: asked to stop; Ctrl-C twice ends it at once\n"
    assert ended.stderr == (note if ranks == 1 else "")
    load_checkpoint(tmp_path / CKPT)
    done = start("fit", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert difference(uninterrupted[ranks], outcome(tmp_path / "runs" / "version_0")) == ""


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_request_during_the_start_waits_for_the_first_step(
    ranks: int, tmp_path: Path, uninterrupted: dict[int, dict[str, Any]]
) -> None:
    options = (*SHORT, "--trainer.devices", str(ranks))
    process = begin("fit", *options, cwd=tmp_path)
    time.sleep(1)  # it imports
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=90)
    assert process.returncode == 75, said
    assert f"checkpoint {CKPT}: run the same command again to go on" in said
    assert start("fit", *options, cwd=tmp_path).returncode == 0
    assert difference(uninterrupted[ranks], outcome(tmp_path / "runs" / "version_0")) == ""


JOB = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
ELEMENT = {**JOB, "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}


@pytest.mark.parametrize(
    ("environ", "reason", "scontrol", "expected"),
    [
        ({}, "SIGUSR1", "exit 1", (False, "run the same command again to go on")),
        (JOB, "SIGINT to rank 0", "exit 1", (False, "run the same command again to go on")),
        (JOB, "SIGUSR1", 'echo "$*" >>calls; echo JobState=RUNNING', (True, "job 7 is requeued and goes on by itself")),
        (
            ELEMENT,
            "SIGTERM",
            'echo "$*" >>calls; echo JobState=RUNNING',
            (True, "job 5_2 is requeued and goes on by itself"),
        ),
        (
            JOB,
            "SIGTERM",
            "echo JobState=COMPLETING",
            (False, "SLURM itself ends job 7 (completing), which is not requeued from here"),
        ),
        (
            JOB,
            "SIGUSR1",
            'echo JobState=RUNNING; [ "$1" != requeue ] || { echo "Requeue is off" >&2; exit 1; }',
            (False, "job 7 could not be requeued: Requeue is off"),
        ),
        (
            JOB,
            "SIGUSR1",
            None,
            (False, "scontrol is not here, so the batch script has to requeue job 7 on exit status 75"),
        ),
    ],
)
def test_requeue(
    environ: dict[str, str],
    reason: str,
    scontrol: str | None,
    expected: tuple[bool, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if scontrol is not None:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{scontrol}\n")
        (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert requeue(reason) == expected
    if expected[0]:
        job = expected[1].split()[1]
        assert (tmp_path / "calls").read_text() == f"--oneliner show job {job}\nrequeue {job}\n"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_at_random_moments(ranks: int, tmp_path: Path, uninterrupted: dict[int, dict[str, Any]]) -> None:
    """Any of the signals, to any rank or to all, again and again until the run is done."""
    draw = random.Random(ranks)
    stops = 0
    for run in range(4):
        folder = tmp_path / str(run)
        folder.mkdir()
        for attempt in range(30):
            process = begin("fit", *SHORT, "--trainer.devices", str(ranks), cwd=folder)
            time.sleep(draw.uniform(0, 14))
            listed = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
            every = [str(process.pid), *listed]
            received = draw.choice(["USR1", "TERM", "INT"])
            subprocess.run(["kill", f"-{received}", *(every if draw.random() < 0.5 else [draw.choice(every)])])
            said, _ = process.communicate(timeout=200)  # above --timeout: a rank that is missed is named before
            if (folder / CKPT).exists():
                load_checkpoint(folder / CKPT)
            if process.returncode == 0:
                break
            assert process.returncode in (75, -10, -15, -2), said
            assert attempt < 29, "no progress"
            stops += process.returncode == 75
        assert difference(uninterrupted[ranks], outcome(folder / "runs" / "version_0")) == ""
    print(f"{stops} stops of runs with {ranks} rank(s)")
