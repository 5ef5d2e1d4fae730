"""What the surroundings promise against what the run uses: one list of checks over one description of both."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, Strategy
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]  # torch marks none as exported

from lit_mnist.errors import UserError


@dataclass(frozen=True)
class Launch:
    """What a run uses, and what the process finds around it.

    Attributes:
        launcher: What started the processes: `Lightning`, `torchrun`, `SLURM`, or another cluster environment's name.
        num_nodes: Machines the run spans.
        devices: Processes on each, one a device.
        accelerator: `cpu`, `cuda` or `mps`.
        backend: Of the process group: `nccl` or `gloo`; None without one.
        gpus: GPUs that torch can use on this machine.
        cores: CPU cores this process may use.
        environ: The environment variables.
    """

    launcher: str
    num_nodes: int
    devices: int
    accelerator: str
    backend: str | None
    gpus: int
    cores: int
    environ: Mapping[str, str]

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.num_nodes * self.devices


def describe(trainer: Trainer) -> Launch:
    """The launch of `trainer`'s run."""
    strategy = trainer.strategy
    parallel = isinstance(strategy, ParallelStrategy)
    return Launch(
        launcher=_launcher(strategy.cluster_environment) if parallel else "Lightning",
        num_nodes=trainer.num_nodes,
        devices=trainer.num_devices,
        accelerator=strategy.root_device.type,
        backend=_backend(strategy),
        gpus=torch.cuda.device_count(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        environ=os.environ,
    )


def warnings(launch: Launch) -> list[str]:
    """One line for each thing the surroundings promise and the run does not use."""
    return [line for check in CHECKS if (line := check(launch))]


def require_devices(accelerator: str, devices: int | str | list[int]) -> None:
    """Refuse a request for GPUs that are not there, before a Trainer is made.

    Args:
        accelerator: `--trainer.accelerator` as given.
        devices: `--trainer.devices` as given.

    Raises:
        UserError: If no GPU, or fewer than asked for, can be used on this machine.
    """
    if accelerator not in ("gpu", "cuda"):
        return
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if accelerator == "gpu" and not found and torch.backends.mps.is_available():
        return
    if not found:
        raise UserError(
            f"trainer.accelerator={accelerator}: torch finds no GPU on this machine; on CPUs, use "
            "`--config configs/ddp_cpu.yaml` (two processes) or `--trainer.accelerator cpu --trainer.devices 1`"
        )
    wanted = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdigit() else 0
    if wanted > found:
        raise UserError(f"trainer.devices={devices}: this machine has {found} GPU(s); use --trainer.devices {found}")


def slurm_environment() -> SLURMEnvironment | None:
    """SLURM's environment where Lightning would find it, without Lightning's requeueing.

    That writes a checkpoint which every later job with the same root would start from.
    """
    if SLURMEnvironment.detect() and not TorchElasticEnvironment.detect():
        return SLURMEnvironment(auto_requeue=False)
    return None


def rejoin(trainer: Trainer) -> None:
    """After a restart by torchrun, form the process group in a part of torchrun's store that is this attempt's own.

    The store outlives a restart, and ranks that read in it the addresses of the attempt before wait for the dead.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or not isinstance(trainer.strategy, DDPStrategy) or not TorchElasticEnvironment.detect():
        return
    store, rank, world_size = next(rendezvous("env://"))
    dist.init_process_group(
        _backend(trainer.strategy),
        store=PrefixStore(f"attempt {attempt}", store),
        rank=rank,
        world_size=world_size,
    )


def _backend(strategy: Strategy) -> str | None:
    if not isinstance(strategy, DDPStrategy):
        return None
    return strategy.process_group_backend or dist.get_default_backend_for_device(strategy.root_device)


def _launcher(environment: ClusterEnvironment | None) -> str:
    for kind, name in (
        (TorchElasticEnvironment, "torchrun"),
        (SLURMEnvironment, "SLURM"),
        (LightningEnvironment, "Lightning"),
    ):
        if isinstance(environment, kind):
            return name
    return type(environment).__name__.removesuffix("Environment")


def _slurm_tasks(launch: Launch) -> str | None:
    tasks = launch.environ.get("SLURM_NTASKS", "")
    if tasks.isdigit() and int(tasks) > launch.world_size:
        return (
            f"SLURM_NTASKS={tasks}, but this run is {launch.world_size} process(es): set --trainer.num_nodes and "
            "--trainer.devices to SLURM's nodes and tasks per node and start it with srun"
        )
    return None


def _world_size(launch: Launch) -> str | None:
    promised = launch.environ.get("WORLD_SIZE", "")
    if promised.isdigit() and int(promised) > launch.world_size:
        return (
            f"WORLD_SIZE={promised}, but this run is {launch.world_size} process(es): give --trainer.strategy ddp with "
            "the --trainer.num_nodes and --trainer.devices of the launcher, or unset WORLD_SIZE"
        )
    return None


def _idle_gpus(launch: Launch) -> str | None:
    used = launch.devices if launch.accelerator == "cuda" else 0
    if launch.gpus > used:
        return (
            f"{launch.gpus - used} of {launch.gpus} GPUs of this machine stay idle: use --trainer.accelerator gpu "
            f"--trainer.devices {launch.gpus}"
        )
    return None


def _crowded_cores(launch: Launch) -> str | None:
    if launch.accelerator == "cpu" and launch.devices > launch.cores:
        return (
            f"{launch.devices} processes share {launch.cores} CPU cores and will be slow: "
            f"use --trainer.devices {launch.cores}"
        )
    return None


CHECKS: tuple[Callable[[Launch], str | None], ...] = (_slurm_tasks, _world_size, _idle_gpus, _crowded_cores)
