"""What the surroundings promise against what the run uses: one list of checks over one description of both."""

import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, Strategy

from lit_mnist.errors import UserError
from lit_mnist.surroundings import is_srun_task


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
        is_repeatable: Whether its command can be started again, for other devices: it is a file or a module.
        interfaces: Names of this host's network interfaces.
        environ: The environment variables.
    """

    launcher: str
    num_nodes: int
    devices: int
    accelerator: str
    backend: str | None
    gpus: int
    cores: int
    is_repeatable: bool
    interfaces: tuple[str, ...]
    environ: Mapping[str, str]

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.num_nodes * self.devices


@dataclass(frozen=True)
class Finding:
    """What a check found: one line, with the remedy.

    Attributes:
        line: What was found, and what to do.
        is_fatal: Whether the run could not work, or would wait for ever.
    """

    line: str
    is_fatal: bool = False


def describe(trainer: Trainer) -> Launch:
    """The launch of `trainer`'s run."""
    strategy = trainer.strategy
    parallel = isinstance(strategy, ParallelStrategy)
    return Launch(
        launcher=_launcher(strategy.cluster_environment) if parallel else "Lightning",
        num_nodes=trainer.num_nodes,
        devices=trainer.num_devices,
        accelerator=strategy.root_device.type,
        backend=backend(strategy),
        gpus=torch.cuda.device_count(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        is_repeatable=sys.modules["__main__"].__spec__ is not None or os.path.isfile(sys.argv[0]),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        environ=os.environ,
    )


def findings(launch: Launch) -> list[Finding]:
    """What all checks find."""
    return [finding for check in CHECKS if (finding := check(launch))]


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


def cluster_environment() -> ClusterEnvironment | None:
    """SLURM's environment in a task of srun, Lightning's own in other shells of a SLURM job; None: Lightning chooses.

    Lightning takes any shell with SLURM_NTASKS for a task, so that a left-over one changes what a run is. Its
    requeueing is left out: that works inside the signal handler, and `lit_mnist.preemption` does it between steps.
    """
    if TorchElasticEnvironment.detect() or not {"SLURM_JOB_ID", "SLURM_NTASKS"} & set(os.environ):
        return None
    if not is_srun_task(os.environ):
        return LightningEnvironment()
    if "SLURM_NTASKS_PER_NODE" not in os.environ:  # set by an option of that name alone, and Lightning insists
        counts = re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
        os.environ["SLURM_NTASKS_PER_NODE"] = counts[0]
    return SLURMEnvironment(auto_requeue=False)


def backend(strategy: Strategy) -> str | None:
    """The process group's: `nccl` or `gloo`; None without one."""
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


def _srun_tasks(launch: Launch) -> Finding | None:
    environ = launch.environ
    if launch.launcher == "torchrun" or not is_srun_task(environ):
        return None
    tasks, nodes = int(environ.get("SLURM_STEP_NUM_TASKS", 1)), int(environ.get("SLURM_STEP_NUM_NODES", 1))
    if (tasks, nodes) == (launch.world_size, launch.num_nodes):
        return None
    uneven = "," in environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    return Finding(
        f"srun started {tasks} task(s) on {nodes} host(s), but the run is {launch.num_nodes} node(s) x "
        f"{launch.devices} device(s): "
        + (
            "give srun the same --ntasks-per-node on every host"
            if uneven
            else f"give --trainer.strategy ddp --trainer.num_nodes {nodes} --trainer.devices {tasks // nodes}, or give "
            f"srun --nodes={launch.num_nodes} --ntasks-per-node={launch.devices}"
        ),
        is_fatal=True,
    )


def _srun_forgotten(launch: Launch) -> Finding | None:
    if launch.launcher != "Lightning" or is_srun_task(launch.environ):
        return None
    if "SLURM_JOB_ID" in launch.environ and launch.num_nodes > 1 and "NODE_RANK" not in launch.environ:
        return Finding(
            f"trainer.num_nodes={launch.num_nodes} in a SLURM job, but not started by srun: no other host would start "
            f"anything; use srun --nodes={launch.num_nodes} --ntasks-per-node={launch.devices} lit-mnist ...",
            is_fatal=True,
        )
    tasks = launch.environ.get("SLURM_NTASKS", "1")
    if tasks.isdigit() and int(tasks) > launch.world_size:
        return Finding(
            f"SLURM_NTASKS={tasks}, but this run is {launch.world_size} process(es) of this shell: to use all, start "
            "it with srun, and --trainer.num_nodes and --trainer.devices of the job"
        )
    return None


def _hosts_by_hand(launch: Launch) -> Finding | None:
    if launch.launcher == "Lightning" and launch.num_nodes > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in launch.environ]
        if missing:
            return Finding(
                f"trainer.num_nodes={launch.num_nodes}, but {', '.join(missing)} not set: on every host export "
                "MASTER_ADDR and MASTER_PORT of the first one and NODE_RANK from 0, or start with srun or torchrun",
                is_fatal=True,
            )
        rank = launch.environ["NODE_RANK"]
        if not rank.isdigit() or int(rank) >= launch.num_nodes:
            return Finding(
                f"NODE_RANK={rank}: expected 0 ... {launch.num_nodes - 1}, on each host another", is_fatal=True
            )
    return None


def _repeated_command(launch: Launch) -> Finding | None:
    if launch.launcher != "Lightning" or launch.devices == 1 or launch.is_repeatable:
        return None
    return Finding(
        f"trainer.devices={launch.devices}, but what runs here (`python -c`, standard input) cannot be started again "
        "for the other processes: put it into a file",
        is_fatal=True,
    )


def _torchruns(launch: Launch) -> Finding | None:
    environ = launch.environ
    if launch.launcher == "torchrun" and is_srun_task(environ):
        tasks, nodes = int(environ.get("SLURM_STEP_NUM_TASKS", 1)), int(environ.get("SLURM_STEP_NUM_NODES", 1))
        if tasks > nodes:
            return Finding(
                f"srun started {tasks} torchruns on {nodes} host(s): one on each is enough, --ntasks-per-node=1"
            )
    return None


def _world_size(launch: Launch) -> Finding | None:
    promised = launch.environ.get("WORLD_SIZE", "")
    if not promised.isdigit() or int(promised) <= launch.world_size:
        return None
    if launch.launcher == "torchrun" or "TORCHELASTIC_RUN_ID" in launch.environ:
        remedy = f"give --trainer.strategy ddp, --trainer.num_nodes and --trainer.devices so that they make {promised}"
    else:
        remedy = "give --trainer.num_nodes and --trainer.devices of the launcher, or unset WORLD_SIZE"
    return Finding(f"WORLD_SIZE={promised}, but this run is {launch.world_size} process(es): {remedy}")


def _network_interface(launch: Launch) -> Finding | None:
    name = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}.get(launch.backend or "", "")
    wanted = launch.environ.get(name, "")
    if not wanted or wanted.startswith("^"):  # all but these
        return None
    is_there = str.startswith if launch.backend == "nccl" and not wanted.startswith("=") else str.__eq__
    names = wanted.removeprefix("=").split(",")
    if any(is_there(there, part) for there in launch.interfaces for part in names):
        return None
    return Finding(
        f"{name}={wanted}, but {socket.gethostname()} has {', '.join(launch.interfaces)}: give one, or unset it",
        is_fatal=True,
    )


def _idle_gpus(launch: Launch) -> Finding | None:
    used = launch.devices if launch.accelerator == "cuda" else 0
    if launch.gpus > used:
        return Finding(
            f"{launch.gpus - used} of {launch.gpus} GPUs of this machine stay idle: use --trainer.accelerator gpu "
            f"--trainer.devices {launch.gpus}"
        )
    return None


def _crowded_cores(launch: Launch) -> Finding | None:
    if launch.accelerator == "cpu" and launch.devices > launch.cores:
        return Finding(
            f"{launch.devices} processes share {launch.cores} CPU cores and will be slow: "
            f"use --trainer.devices {launch.cores}"
        )
    return None


CHECKS: tuple[Callable[[Launch], Finding | None], ...] = (
    _srun_tasks,
    _srun_forgotten,
    _hosts_by_hand,
    _repeated_command,
    _torchruns,
    _world_size,
    _network_interface,
    _idle_gpus,
    _crowded_cores,
)
