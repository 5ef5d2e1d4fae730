"""slurm/train.sbatch on virtual hosts: worlds, and every way a job is stopped, moved or lost."""

import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_mnist.checkpoints import load_checkpoint
from tests.cluster.conftest import BIN, PROJECT, Lab, edited, wait_for
from tests.conftest import start
from tests.stops import difference, outcome
from tests.test_resume import SHORT

GLOBAL = (*SHORT, "--data.global_batch_size", "48", "--timeout", "60")
PACED = (*GLOBAL, "--trainer.callbacks+=tests.stops.Pace", "--trainer.callbacks.seconds")


PLAIN = ("--model.network", "lit_mnist.ToyModel")  # without dropout, whose draws are a rank's own


def in_one_go(folder: Path, *options: str) -> dict[str, Any]:
    """The outcome of a run that nothing happens to, on this machine with Lightning's launcher."""
    folder.mkdir(exist_ok=True)
    done = start("fit", *GLOBAL, *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return outcome(folder / "runs" / "version_0")


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With two ranks."""
    return in_one_go(tmp_path_factory.mktemp("two"), "--trainer.devices", "2")


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With one, without dropout."""
    return in_one_go(tmp_path_factory.mktemp("one"), *PLAIN, "--trainer.devices", "1")


def submit(lab: Lab, script: Path, *options: str, pace: str = "0", sbatch: tuple[str, ...] = ()) -> str:
    folder = lab.folder
    return lab.submit(
        script, *PACED, pace, "--trainer.default_root_dir", str(folder / "runs"), *options,
        to=(f"--output={folder}/%j.out", *sbatch),
    )  # fmt: skip


def said(lab: Lab, job: str) -> str:
    path = lab.folder / f"{job}.out"
    return path.read_text() if path.exists() else ""


def until_step(lab: Lab, job: str, step: int) -> None:
    log = lab.folder / "runs" / job / "metrics.csv"
    wait_for(
        lambda: log.exists() and re.search(rf"^{step},", log.read_text(), re.MULTILINE) is not None,
        90,
        lambda: said(lab, job),
    )


def completed(lab: Lab, job: str, timeout: float = 150) -> dict[str, Any]:
    wait_for(lambda: lab.state(job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), timeout, lambda: said(lab, job))
    assert lab.state(job) == "COMPLETED", said(lab, job)
    return outcome(lab.folder / "runs" / job)


@pytest.mark.parametrize(
    ("lab", "hosts", "tasks"),
    [
        ((3, {}), 2, 2),
        ((3, {}), 3, 1),
        pytest.param((3, {}), 2, 1, marks=pytest.mark.slow),
        pytest.param((3, {}), 3, 2, marks=pytest.mark.slow),
    ],
    indirect=["lab"],
)
def test_worlds(lab: Lab, hosts: int, tasks: int, train_sbatch: Path, one_process: dict[str, Any]) -> None:
    world = hosts * tasks
    size = (f"--nodes={hosts}", f"--ntasks-per-node={tasks}")
    log = lab.folder / "weights"
    config = str(PROJECT / "configs" / "ddp_cpu.yaml")  # whose devices are not this job's
    logged = ("--trainer.callbacks+=tests.stops.WeightLog", "--trainer.callbacks.path", str(log))
    job = submit(lab, train_sbatch, *PLAIN, "--config", config, *logged, sbatch=size)
    found = completed(lab, job)
    text = " ".join(said(lab, job).split())
    assert f"launcher SLURM world size {world} = {hosts} node(s) x {tasks} cpu device(s) backend gloo" in text
    logs = [Path(f"{log}.{rank}").read_text().split() for rank in range(world)]
    assert [host for host, _ in logs] == [f"node{1 + rank // tasks}" for rank in range(world)]
    assert len({weights for _, weights in logs}) == 1
    for key, weight in one_process["weights"].items():
        torch.testing.assert_close(found["weights"][key], weight, atol=2e-5, rtol=0, msg=key)
    assert found["progress"] == one_process["progress"]


@pytest.mark.parametrize("received", ["TERM", pytest.param("USR1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lab", [(4, {})], indirect=True)
def test_a_signal_moves_the_job_to_other_hosts(
    received: str, lab: Lab, train_sbatch: Path, uninterrupted: dict[str, Any]
) -> None:
    job = submit(lab, train_sbatch, pace="0.3")
    until_step(lab, job, 5)
    first = lab.value(job, "NodeList")
    lab.slurm("scontrol", "update", f"nodename={first}", "state=drain", "reason=test")
    lab.slurm("scancel", f"--signal={received}", job)
    wait_for(lambda: lab.value(job, "Restarts") == "1", 60, lambda: said(lab, job))
    found = completed(lab, job)
    assert lab.value(job, "NodeList") != first
    assert difference(uninterrupted, found) == ""
    assert (
        len(
            re.findall(
                rf"^stopped at step \d+ on request \(SIG{received} .*: job {job} is requeued", said(lab, job), re.M
            )
        )
        == 1
    )
    assert [path.name for path in (lab.folder / "runs").iterdir()] == [job]


def test_the_warning_before_the_time_limit(lab: Lab, train_sbatch: Path, uninterrupted: dict[str, Any]) -> None:
    """Slurm looks at limits every 30 s, so `USR1@30` of a minute comes after about 20 s: steps must last until then."""
    job = submit(lab, train_sbatch, pace="1.5", sbatch=("--time=1", "--signal=USR1@30"))
    wait_for(lambda: lab.value(job, "Restarts") == "1", 90, lambda: said(lab, job))
    lab.slurm("scontrol", "update", f"jobid={job}", "timelimit=30")  # or a slow machine comes a step on each time
    found = completed(lab, job)
    assert "on request (SIGUSR1" in said(lab, job)
    assert difference(uninterrupted, found) == ""


def test_preemption(lab: Lab, train_sbatch: Path, uninterrupted: dict[str, Any]) -> None:
    job = submit(lab, train_sbatch, pace="0.3")
    until_step(lab, job, 5)
    urgent = lab.slurm(
        "sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    ).strip()
    lab.wait(urgent)
    found = completed(lab, job)
    assert lab.value(job, "Restarts") == "1"
    assert "on request (SIG" in said(lab, job)
    assert difference(uninterrupted, found) == ""


def test_scontrol_requeue(lab: Lab, train_sbatch: Path, uninterrupted: dict[str, Any]) -> None:
    job = submit(lab, train_sbatch, pace="0.3")
    until_step(lab, job, 5)
    lab.slurm("scontrol", "requeue", job)
    wait_for(lambda: lab.value(job, "Restarts") == "1", 60, lambda: said(lab, job))
    assert difference(uninterrupted, completed(lab, job)) == ""


@pytest.mark.parametrize("lab", [(2, {"conf": "JobRequeue=0\nJobFileAppend=0"})], indirect=True)
def test_a_site_whose_defaults_are_others(lab: Lab, train_sbatch: Path, uninterrupted: dict[str, Any]) -> None:
    """The script itself asks to be queued again, to add to its output, and where that is."""
    options = (*PACED, "0.3", "--trainer.default_root_dir", str(lab.folder / "runs"))
    job = lab.submit(train_sbatch, *options, to=(f"--chdir={lab.folder}",))
    output = lab.folder / f"lit-mnist-{job}.out"
    log = lab.folder / "runs" / job / "metrics.csv"
    wait_for(lambda: log.exists() and "\n5," in log.read_text(), 90, lambda: lab.state(job))
    lab.slurm("scancel", "--signal=USR1", job)
    wait_for(lambda: lab.value(job, "Restarts") == "1", 60, output.read_text)
    assert difference(uninterrupted, completed(lab, job)) == ""
    text = output.read_text()
    assert text.count("launcher         SLURM") == 2, text
    assert f"job {job} is requeued" in text


def test_scancel_is_not_undone(lab: Lab, train_sbatch: Path) -> None:
    """A person who cancels a job does not find it in the queue again; its checkpoint is there."""
    job = submit(lab, train_sbatch, pace="0.3")
    until_step(lab, job, 5)
    lab.slurm("scancel", job)
    lab.wait(job, "CANCELLED", 60)
    wait_for(lambda: "stopped at step" in said(lab, job), 30, lambda: said(lab, job))
    assert re.search(rf"SLURM itself ends job {job} \(\w+\), which is not requeued from here", said(lab, job))
    assert (lab.folder / "runs" / job / "checkpoints" / "last.ckpt").exists()


@pytest.mark.parametrize("lab", [(4, {})], indirect=True)
def test_the_loss_of_a_host(lab: Lab, train_sbatch: Path, uninterrupted: dict[str, Any]) -> None:
    """Its network is cut, and all that ran on it is gone: Slurm finds out after SlurmdTimeout, and requeues."""
    job = submit(lab, train_sbatch, pace="0.3")
    until_step(lab, job, 5)
    lost = lab.slurm("scontrol", "show", "hostnames", lab.value(job, "NodeList")).split()[1].removeprefix("node")
    lab.do("link", lost, "down")
    lab.do("poweroff", lost)
    wait_for(lambda: lab.value(job, "Restarts") == "1", 120, lambda: said(lab, job))
    found = completed(lab, job)
    assert f"node{lost}" not in lab.slurm("scontrol", "show", "hostnames", lab.value(job, "NodeList")).split()
    assert difference(uninterrupted, found) == ""


def test_an_array_of_three(lab: Lab) -> None:
    folder = lab.folder / "slurm"
    folder.mkdir()
    edited("train.sbatch", folder)
    job = submit(lab, edited("array.sbatch", folder), sbatch=("--array=0-2", f"--output={lab.folder}/%a.out"))
    runs = lab.folder / "runs"
    for task in range(3):
        lab.wait(f"{job}_{task}")
    assert sorted(path.name for path in runs.iterdir()) == [f"{job}_{task}" for task in range(3)]
    weights = [outcome(runs / f"{job}_{task}")["weights"] for task in range(3)]
    assert difference(weights[0], weights[1]) != "" != difference(weights[1], weights[2])
    for task in range(3):
        assert f"seed_everything: {task}\n" in (runs / f"{job}_{task}" / "config.yaml").read_text()


def test_without_scontrol_the_script_requeues(lab: Lab, uninterrupted: dict[str, Any]) -> None:
    """As in a container: the tasks find no scontrol, the batch script does."""
    folder = lab.folder / "slurm"
    folder.mkdir()
    script = edited("train.sbatch", folder)
    hidden = lab.folder / "bin"
    hidden.mkdir()
    (hidden / "lit-mnist").symlink_to(BIN / "lit-mnist")
    script.write_text(script.read_text().replace("container=()", f"container=(env PATH={hidden})"))
    job = submit(lab, script, pace="0.3")
    until_step(lab, job, 5)
    lab.slurm("scancel", "--signal=USR1", job)
    wait_for(lambda: lab.value(job, "Restarts") == "1", 60, lambda: said(lab, job))
    assert f"scontrol is not here, so the batch script has to requeue job {job} on exit status 75" in said(lab, job)
    assert difference(uninterrupted, completed(lab, job)) == ""


def test_a_mistake_is_said_once_a_host(lab: Lab, train_sbatch: Path) -> None:
    job = submit(lab, train_sbatch, "--model.nonsense", "1", sbatch=("--ntasks-per-node=2",))
    lab.wait(job, "FAILED", 90)
    said_so = re.findall(r"^lit-mnist: error: (?:\[rank 2\] )?unknown option model.nonsense; .*", said(lab, job), re.M)
    assert 1 <= len(said_so) <= 2, said(lab, job)
    assert said(lab, job).count("lit-mnist: error: ") == len(said_so)


@pytest.mark.parametrize("lab", [(2, {"gpus": "4", "cpus": "32"})], indirect=True)
def test_the_script_as_it_is_asks_for_gpus(lab: Lab) -> None:
    """Slurm grants it GPUs that are none, and the run says so."""
    script = lab.folder / "train.sbatch"
    text = (PROJECT / "slurm" / "train.sbatch").read_text()
    script.write_text(text.replace("environment=.venv", f"environment={BIN.parent}"))
    to = (f"--output={lab.folder}/%j.out", "--ntasks-per-node=1")  # for the sake of the cores here
    job = lab.submit(script, "--trainer.default_root_dir", str(lab.folder), to=to)
    lab.wait(job, "FAILED", 60)
    assert "lit-mnist: error: trainer.accelerator=gpu: torch finds no GPU on this machine" in said(lab, job)
    shown = lab.slurm("scontrol", "show", "job", job)
    for wanted in ("NumNodes=2", "NumTasks=2", "TresPerNode=gres:gpu:4", "Requeue=1", "TimeLimit=04:00:00"):
        assert wanted in shown, shown


@pytest.mark.slow
def test_torchrun_under_srun(lab: Lab) -> None:
    """The line of docs/clusters.md, for two processes on CPUs a host; SIGTERM as a warning, and on again."""
    (line,) = re.findall(r"^srun .*torchrun.*", (PROJECT / "docs" / "clusters.md").read_text(), re.MULTILINE)
    line = line.replace("--nproc-per-node 4", "--nproc-per-node 2").replace(
        "--trainer.devices 4", "--trainer.devices 2"
    )
    options = " ".join((*PACED, "0.5", "--trainer.default_root_dir", str(lab.folder / "runs")))
    script = lab.folder / "torchrun.sbatch"
    script.write_text(f"#!/bin/bash\nset -euo pipefail\n{line} {options}\n")
    job = lab.submit(script, to=("--nodes=2", "--requeue", "--open-mode=append", f"--output={lab.folder}/%j.out"))
    until_step(lab, job, 5)
    lab.slurm("scancel", "--signal=TERM", job)
    wait_for(lambda: lab.value(job, "Restarts") == "1", 60, lambda: said(lab, job))
    found = completed(lab, job)
    assert "launcher         torchrun" in said(lab, job)
    assert "world size       4 = 2 node(s) x 2 cpu device(s)" in said(lab, job)
    expected = in_one_go(lab.folder / "whole", "--trainer.devices", "4")
    assert difference(expected, found) == ""


@pytest.mark.slow
@pytest.mark.parametrize("lab", [(4, {})], indirect=True)
@pytest.mark.parametrize("seed", range(5))
def test_ten_warnings_at_random_moments(seed: int, lab: Lab, train_sbatch: Path, uninterrupted: dict[str, Any]) -> None:
    """From before the processes are there to after they are gone; two jobs at a time."""
    draw = random.Random(seed)
    for _ in range(5):
        jobs = [submit(lab, train_sbatch, pace="0.15") for _ in range(2)]
        for job in jobs:
            lab.wait(job, "RUNNING", 60)
        moments = sorted((draw.uniform(0, 22), job) for job in jobs)
        since = time.monotonic()
        for moment, job in moments:
            time.sleep(max(0.0, since + moment - time.monotonic()))
            lab.slurm("scancel", "--signal=USR1", job, check=False)
        for moment, job in moments:
            found = completed(lab, job, timeout=240)
            print(f"USR1 after {moment:.1f} s: {lab.value(job, 'Restarts')} restart(s)")
            assert lab.value(job, "Restarts") in ("0", "1"), said(lab, job)
            assert difference(uninterrupted, found) == "", said(lab, job)
            load_checkpoint(lab.folder / "runs" / job / "checkpoints" / "last.ckpt")
