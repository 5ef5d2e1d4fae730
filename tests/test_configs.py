"""Every file in configs/ is run, the GPU one as far as a machine without a GPU can."""

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

from lit_mnist import hosts, launch, surroundings
from lit_mnist.errors import UserError
from tests.conftest import CONFIGS, Command, start


def test_all_are_known_here() -> None:
    assert {path.name for path in CONFIGS.iterdir()} == {"mnist.yaml", "ddp_gpu.yaml", "ddp_cpu.yaml", "smoke.yaml"}


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: str(path.name))
def test_the_first_line_is_the_command(path: Path) -> None:
    assert path.read_text().splitlines()[0] == f"# lit-mnist fit --config configs/{path.name}"


def test_mnist_is_the_seeds_recipe(command: Command) -> None:
    said = " ".join(
        command("fit", "--config", str(CONFIGS / "mnist.yaml"), "--trainer.limit_train_batches", "50").split()
    )
    assert "epoch 10/10" in said
    config = yaml.safe_load(Path("runs/version_0/config.yaml").read_text())
    assert config["data"]["batch_size"] == 64
    optimizer = config["model"]["optimizer"]
    assert optimizer["class_path"] == "torch.optim.Adam"
    assert (optimizer["init_args"]["lr"], optimizer["init_args"]["betas"]) == (0.001, [0.9, 0.999])


def test_ddp_cpu_trains_on_two_gloo_processes(tmp_path: Path) -> None:
    smoke = ("--config", str(CONFIGS / "smoke.yaml"), "--config", str(CONFIGS / "ddp_cpu.yaml"))
    done = start("fit", *smoke, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    said = " ".join(done.stdout.split())
    assert "world size 2 = 1 node(s) x 2 cpu device(s) backend gloo" in said
    assert "batch 128 = 2 x 64 a device" in said
    assert said.count("result best checkpoint") == 1


def test_ddp_gpu_says_that_there_is_no_gpu(refused: Command) -> None:
    line = refused("fit", "--config", str(CONFIGS / "ddp_gpu.yaml"))
    assert line.startswith(
        "2 trainer.accelerator=gpu: torch finds no GPU on this machine; on CPUs, use `--config configs/"
    )


def fake_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("lightning.fabric.accelerators.cuda.num_cuda_devices", lambda: count)


@pytest.mark.parametrize("nodes", [1, 2])
def test_ddp_gpu_is_ddp_on_nccl(nodes: int, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 4)
    made: list[Trainer] = []
    monkeypatch.setattr("lit_mnist.cli._Trainer.fit", lambda self, *args, **kwargs: made.append(self))
    monkeypatch.setattr("lit_mnist.cli._CommandLine.after_fit", lambda self: None)
    for name, value in (("MASTER_ADDR", "node1"), ("MASTER_PORT", "15000"), ("NODE_RANK", "0")):
        monkeypatch.setenv(name, value)
    command("fit", "--config", str(CONFIGS / "ddp_gpu.yaml"), "--trainer.num_nodes", str(nodes))
    (trainer,) = made
    assert isinstance(trainer.strategy, DDPStrategy)
    described = launch.describe(trainer)
    assert (described.backend, described.accelerator) == ("nccl", "cuda")
    assert described.world_size == trainer.world_size == 4 * nodes


def test_more_gpus_than_there_are(refused: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 2)
    line = refused("fit", "--config", str(CONFIGS / "ddp_gpu.yaml"))
    assert line == "2 trainer.devices=4: this machine has 2 GPU(s); use --trainer.devices 2"


def description(**changes: Any) -> launch.Launch:
    base: dict[str, Any] = {
        "launcher": "Lightning",
        "num_nodes": 1,
        "devices": 1,
        "accelerator": "cpu",
        "backend": None,
        "gpus": 0,
        "cores": 2,
        "is_repeatable": True,
        "interfaces": ("lo", "eth0"),
        "environ": {},
    }
    return launch.Launch(**{**base, **changes})


SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
BY_HAND = {"MASTER_ADDR": "node1", "MASTER_PORT": "15000", "NODE_RANK": "0"}


def step(tasks: int, nodes: int, counts: str = "") -> dict[str, Any]:
    numbers = {
        "SLURM_STEP_NUM_TASKS": f"{tasks}",
        "SLURM_STEP_NUM_NODES": f"{nodes}",
        "SLURM_STEP_TASKS_PER_NODE": counts,
    }
    return {"launcher": "SLURM", "environ": {**SRUN, **numbers}}


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"environ": {"SLURM_NTASKS": "4"}}, "SLURM_NTASKS=4, but this run is 1 process(es) of this shell: "),
        ({"environ": {"WORLD_SIZE": "2"}}, "WORLD_SIZE=2, but this run is 1 process(es): give --trainer.num_nodes"),
        (
            {"environ": {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}},
            "WORLD_SIZE=2, but this run is 1 process(es): give --trainer.strategy ddp, ",
        ),
        ({"gpus": 4}, "4 of 4 GPUs of this machine stay idle"),
        ({"gpus": 4, "accelerator": "cuda", "devices": 3}, "1 of 4 GPUs of this machine stay idle"),
        ({"devices": 3}, "3 processes share 2 CPU cores"),
        (
            {**step(8, 2), "launcher": "torchrun", "num_nodes": 2, "devices": 4, "cores": 4},
            "srun started 8 torchruns on 2 host(s): one on each is enough",
        ),
    ],
)
def test_warns_where_the_surroundings_promise_more(changes: dict[str, Any], warning: str) -> None:
    (finding,) = launch.findings(description(**changes))
    assert finding.line.startswith(warning)
    assert not finding.is_fatal


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            step(4, 2, "2(x2)"),
            "srun started 4 task(s) on 2 host(s), but the run is 1 node(s) x 1 device(s): give --trainer.strategy ddp "
            "--trainer.num_nodes 2 --trainer.devices 2, or give srun --nodes=1 --ntasks-per-node=1",
        ),
        (
            {**step(3, 2, "2,1"), "num_nodes": 2, "devices": 2},
            "srun started 3 task(s) on 2 host(s), but the run is 2 node(s) x 2 device(s): give srun the same "
            "--ntasks-per-node on every host",
        ),
        (
            {"num_nodes": 2, "environ": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}},
            "trainer.num_nodes=2 in a SLURM job, but not started by srun: no other host would start anything; use "
            "srun --nodes=2 --ntasks-per-node=1 lit-mnist ...",
        ),
        (
            {"num_nodes": 2, "environ": {"MASTER_ADDR": "node1"}},
            "trainer.num_nodes=2, but MASTER_PORT, NODE_RANK not set: on every host export MASTER_ADDR and MASTER_PORT "
            "of the first one and NODE_RANK from 0, or start with srun or torchrun",
        ),
        (
            {"devices": 2, "backend": "gloo", "environ": {"GLOO_SOCKET_IFNAME": "ib0,eth1"}},
            f"GLOO_SOCKET_IFNAME=ib0,eth1, but {socket.gethostname()} has lo, eth0: give one, or unset it",
        ),
        (
            {
                "devices": 2,
                "backend": "nccl",
                "gpus": 2,
                "accelerator": "cuda",
                "environ": {"NCCL_SOCKET_IFNAME": "=eth"},
            },
            f"NCCL_SOCKET_IFNAME==eth, but {socket.gethostname()} has lo, eth0: give one, or unset it",
        ),
        (
            {"devices": 2, "is_repeatable": False},
            "trainer.devices=2, but what runs here (`python -c`, standard input) cannot be started again for the other "
            "processes: put it into a file",
        ),
    ],
)
def test_refuses_what_would_wait_for_ever(changes: dict[str, Any], error: str) -> None:
    finding = launch.findings(description(**changes))[0]
    assert finding.line == error
    assert finding.is_fatal


@pytest.mark.parametrize("rank", ["2", "5", "-1"])
def test_refuses_a_node_rank_that_is_none(rank: str) -> None:
    (finding,) = launch.findings(description(num_nodes=2, environ={**BY_HAND, "NODE_RANK": rank}))
    assert finding.line == f"NODE_RANK={rank}: expected 0 ... 1, on each host another"
    assert finding.is_fatal


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("NODE_RANK", "x", "a whole number"),
        ("LOCAL_RANK", "", "a whole number"),
        ("WORLD_SIZE", "-1", "a whole number"),
        ("MASTER_PORT", "x", "a port, 1 ... 65535"),
        ("MASTER_PORT", "0", "a port, 1 ... 65535"),
        ("MASTER_PORT", "65536", "a port, 1 ... 65535"),
    ],
)
def test_refuses_what_is_no_number(name: str, value: str, wanted: str) -> None:
    with pytest.raises(UserError) as refused:
        surroundings.require_numbers({**BY_HAND, name: value})
    assert str(refused.value) == f"{name}={value} in the environment: expected {wanted}; correct it, or unset it"
    surroundings.require_numbers(BY_HAND)
    surroundings.require_numbers({})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_repeatable": False},
        {"backend": "gloo", "environ": {"GLOO_SOCKET_IFNAME": "ib0,eth0"}},
        {"backend": "nccl", "environ": {"NCCL_SOCKET_IFNAME": "eth"}},
        {"backend": "nccl", "environ": {"NCCL_SOCKET_IFNAME": "^docker0"}},
        {**step(4, 2, "2(x2)"), "num_nodes": 2, "devices": 2},
        {"environ": {"SLURM_NTASKS": "2"}, "devices": 2},
        {"environ": {"WORLD_SIZE": "2"}, "devices": 2},
        {"environ": BY_HAND, "num_nodes": 2, "devices": 2},
        {"gpus": 2, "accelerator": "cuda", "devices": 2},
    ],
)
def test_says_nothing_where_all_is_used(changes: dict[str, Any]) -> None:
    assert launch.findings(description(**changes)) == []


@pytest.mark.parametrize(
    ("environ", "is_task", "job"),
    [
        ({}, False, None),
        (SRUN, True, "7"),
        ({**SRUN, "SLURM_PTY_PORT": "4000"}, False, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, False, None),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967290"}, False, None),  # the shell of salloc
        ({"SLURM_JOB_ID": "7", "ENVIRONMENT": "BATCH"}, False, "7"),
        ({**SRUN, "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}, True, "5_2"),
    ],
)
def test_what_slurm_started(environ: dict[str, str], is_task: bool, job: str | None) -> None:
    assert surroundings.is_srun_task(environ) == is_task
    assert surroundings.slurm_job(environ) == job


@pytest.mark.parametrize("name", ["train.sbatch", "array.sbatch"])
def test_sbatch_reads_all_options_of_a_script(name: str) -> None:
    """It stops at the first command."""
    lines = (CONFIGS.parent / "slurm" / name).read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line for line in lines if line.startswith("#SBATCH ")]
    assert [line for line in lines[:first] if line.startswith("#SBATCH ")] == options
    assert {"#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(options)


@pytest.mark.parametrize("option", ["--trainer.num_nodes", "--trainer.devices=4"])
def test_the_batch_script_takes_sizes_from_slurm_alone(option: str) -> None:
    script = CONFIGS.parent / "slurm" / "train.sbatch"
    done = subprocess.run(["bash", script, "--config", "x", option, "5"], capture_output=True, text=True)
    assert done.returncode == 2
    said = "follows from --nodes and --ntasks-per-node: give those, to sbatch or at the top of the script"
    assert done.stderr == f"{option} {said}\n"


@pytest.mark.parametrize(
    ("nodelist", "places"),
    [
        ("node[1-2,7]", ["node1", "node1", "node2", "node2", "node7", "node7", "node rank 3"]),
        ("a,b", ["a", "a", "b", "b", "node rank 2"]),
        (
            "gpu[008-010]-ib,login",
            ["gpu008-ib", "gpu008-ib", "gpu009-ib", "gpu009-ib", "gpu010-ib", "gpu010-ib", "login"],
        ),
    ],
)
def test_names_the_host_of_a_rank_that_is_missing(nodelist: str, places: list[str]) -> None:
    environ = {**SRUN, "SLURM_STEP_NODELIST": nodelist}
    assert [hosts.place(rank, 2, environ) for rank in range(len(places))] == [
        f"rank {rank} ({place})" for rank, place in enumerate(places)
    ]
