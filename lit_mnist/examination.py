"""What a process finds out about itself and its host: the facts that `lit-mnist doctor` judges."""

import hashlib
import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from lit_mnist.errors import RunError
from lit_mnist.hosts import interfaces
from lit_mnist.sources import load_mnist

PACKAGES = "lit-mnist", "torch", "torchvision", "lightning", "torchmetrics", "numpy"
# What is shown of the environment, which may hold secrets elsewhere.
_NAMES = (
    *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS"),
    *("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_CPUS_PER_TASK", "ENVIRONMENT"),
)
_PREFIXES = "NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_"


@dataclass(frozen=True)
class Facts:
    """What one process knows of itself.

    Attributes:
        host: Its host's name.
        versions: Of Python and the packages; `absent` for one that is not installed.
        devices: Names of the GPUs that torch can use; empty: none.
        driver: Versions of CUDA and NCCL; empty without a GPU.
        cores: CPU cores this process may use.
        host_cores: CPU cores of the host.
        omp_threads: `OMP_NUM_THREADS`; None: not set, so that Lightning divides the cores between the processes.
        open_files: Limit of open files.
        locked_memory: Limit of locked memory in bytes; None: no limit.
        shared_memory: Bytes free in /dev/shm; None: there is none.
        variables: Those of the environment that launchers and collectives read.
        interfaces: Names of the network interfaces, by IPv4 address.
        folder: The folder of runs.
        folder_problem: Why nothing can be written there; empty: it can.
        folder_free: Bytes free there.
        data: SHA-256 of the images; empty: they are not whole.
        data_problem: Why not.
    """

    host: str
    versions: dict[str, str]
    devices: list[str]
    driver: str
    cores: int
    host_cores: int
    omp_threads: int | None
    open_files: int
    locked_memory: int | None
    shared_memory: int | None
    variables: dict[str, str]
    interfaces: dict[str, str]
    folder: str
    folder_problem: str
    folder_free: int
    data: str
    data_problem: str


def examine(root: Path, environ: Mapping[str, str]) -> Facts:
    """The facts of this process.

    Args:
        root: The folder of runs.
        environ: The environment variables.
    """
    data, data_problem = _data()
    folder_problem, free = _folder(root)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    threads = environ.get("OMP_NUM_THREADS", "")
    return Facts(
        host=socket.gethostname(),
        versions={"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        devices=[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        driver=_driver(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        host_cores=os.cpu_count() or 1,
        omp_threads=int(threads) if threads.isdigit() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=None if locked == resource.RLIM_INFINITY else locked,
        shared_memory=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        variables={n: environ[n] for n in sorted(environ) if n in _NAMES or n.startswith(_PREFIXES)},
        interfaces=interfaces(),
        folder=str(root.resolve()),
        folder_problem=folder_problem,
        folder_free=free,
        data=data,
        data_problem=data_problem,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _driver() -> str:
    if not torch.cuda.is_available():
        return ""
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    return f"CUDA {torch.version.cuda}" + (f", NCCL {'.'.join(map(str, nccl))}" if nccl else "")


def _folder(root: Path) -> tuple[str, int]:
    """Why nothing can be written to a folder that may not be there yet, and the bytes free on its disk."""
    existing = root.resolve()
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"0" * 4096)
        return "", shutil.disk_usage(existing).free
    except OSError as error:
        return f"{existing}: {error.strerror}", 0


def _data() -> tuple[str, str]:
    """A digest of the images, or why there are none."""
    try:
        digests = [load_mnist(split).digest for split in ("train", "t10k")]
    except RunError as error:
        return "", str(error)
    return hashlib.sha256(" ".join(digests).encode()).hexdigest(), ""
