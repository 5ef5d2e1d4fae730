"""Every file in configs/ is run, the GPU one as far as a machine without a GPU can."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer

from lit_mnist import launch
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
    command("fit", "--config", str(CONFIGS / "ddp_gpu.yaml"), "--trainer.num_nodes", str(nodes))
    (trainer,) = made
    assert type(trainer.strategy).__name__ == "DDPStrategy"
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
        "environ": {},
    }
    return launch.Launch(**{**base, **changes})


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"environ": {"SLURM_NTASKS": "4"}}, "SLURM_NTASKS=4, but this run is 1 process"),
        ({"environ": {"WORLD_SIZE": "2"}}, "WORLD_SIZE=2, but this run is 1 process"),
        ({"gpus": 4}, "4 of 4 GPUs of this machine stay idle"),
        ({"gpus": 4, "accelerator": "cuda", "devices": 3}, "1 of 4 GPUs of this machine stay idle"),
        ({"devices": 3}, "3 processes share 2 CPU cores"),
    ],
)
def test_warns_where_the_surroundings_promise_more(changes: dict[str, Any], warning: str) -> None:
    (line,) = launch.warnings(description(**changes))
    assert line.startswith(warning)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"environ": {"SLURM_NTASKS": "4"}, "num_nodes": 2, "devices": 2},
        {"environ": {"WORLD_SIZE": "2"}, "devices": 2},
        {"gpus": 2, "accelerator": "cuda", "devices": 2},
    ],
)
def test_says_nothing_where_all_is_used(changes: dict[str, Any]) -> None:
    assert launch.warnings(description(**changes)) == []
