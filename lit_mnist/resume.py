"""The run's folder, and the checkpoint a command goes on from."""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from lit_mnist.checkpoints import LastCheckpoint, load_checkpoint
from lit_mnist.errors import UserError
from lit_mnist.metrics_csv import MetricsCSV, read_rows
from lit_mnist.surroundings import slurm_job

# Seconds in which a file made on one host is seen on all that share its folder.
_NFS_LOOKS_AGAIN = 10.0


@dataclass(frozen=True)
class Start:
    """What a command starts from.

    Attributes:
        checkpoint: The content of the checkpoint; None: the beginning.
        path: Its file.
        folder: The run's folder, where an earlier run is continued; None: a new one.
        damaged: One line for each newer checkpoint that was passed over.
    """

    checkpoint: dict[str, Any] | None = None
    path: Path | None = None
    folder: Path | None = None
    damaged: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Optimiser steps behind it."""
        return self.checkpoint["global_step"] if self.checkpoint else 0


def find_start(ckpt_path: str | None, root: Path) -> Start:
    """What `--ckpt_path` names.

    Args:
        ckpt_path: A checkpoint's file; `last`: the newest whole one of the newest run under `root`, or under SLURM of
            the job's own, to be continued in its folder, or the beginning where there is none; None: the beginning.
        root: The folder of runs.

    Raises:
        UserError: If the file is not a checkpoint.
    """
    if ckpt_path is None:
        return Start()
    if ckpt_path != "last":
        return Start(load_checkpoint(ckpt_path), Path(ckpt_path))
    job = slurm_job(os.environ)
    if job:
        folder = root / job
    else:
        folders = [folder for _, folder in sorted(_versions(root)) if (folder / "checkpoints").is_dir()]
        folder = folders[-1] if folders else root
    damaged: list[str] = []
    for name in ("last.ckpt", "previous.ckpt"):
        path = folder / "checkpoints" / name
        if path.exists():
            try:
                return Start(load_checkpoint(path), path, folder, tuple(damaged))
            except UserError as error:
                damaged.append(f"{error}".replace(": use another", ""))
    return Start(folder=folder if folder.is_dir() and folder != root else None, damaged=tuple(damaged))


def is_finished(checkpoint: dict[str, Any], max_epochs: int | None, max_steps: int) -> bool:
    """Whether a training to `max_epochs` (-1: no limit) or `max_steps` (likewise) has nothing left to do."""
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    return 0 <= (max_epochs or -1) <= epochs or 0 <= max_steps <= checkpoint["global_step"]


class RunFolder(Callback):
    """Gives a run its folder, and puts its logs and checkpoints there.

    The folder is made when the processes have met and the data are there, so that a command that fails before leaves
    nothing, and not at all with `fast_dev_run`; rank 0 chooses and tells the others. It is `<root>/<job>` or
    `<root>/<job>_<task>` under SLURM, else the first free `<root>/version_<N>`, or that of the run that is continued.
    One live command at a time has it: rank 0 holds a lock on `<folder>/lock`, which ends with its process.

    Args:
        root: The folder of runs.
        default_loggers: Whether to log to CSV and TensorBoard files in the folder.
        start: What the command starts from.
    """

    def __init__(self, root: Path, default_loggers: bool, start: Start) -> None:
        self.root = root
        self.default_loggers = default_loggers
        self.start = start
        self.path: Path | None = None
        self._lock: TextIO | None = None

    @property
    def is_tested(self) -> bool:
        """Whether the run to continue ended with its test."""
        log = self.start.folder / "metrics.csv" if self.start.folder else None
        return bool(log and log.exists() and any(row.get("test_acc") for row in read_rows(log)[1]))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the folder at the first stage of a command; a test after a fit stays in it.

        Raises:
            UserError: If it cannot be written, another command has it, or the ranks start from different checkpoints.
        """
        if self.path is not None or trainer.fast_dev_run:
            return
        self._compare_starts(trainer)
        problem = None
        if trainer.is_global_zero:
            try:
                self.path = (self.start.folder or _claim(self.root)).resolve()
                self._take_lock(self.path)
            except UserError as error:
                problem = str(error)
            except OSError as error:
                problem = f"trainer.default_root_dir={self.root} cannot be written ({error.strerror}): choose another"
        self.path, problem = trainer.strategy.broadcast((self.path, problem))
        if problem or self.path is None:
            raise UserError(problem)
        self._see_that_all_see_it(trainer)
        if self.default_loggers and stage != "predict":
            step = self.start.step if self.start.folder else 0
            csv = MetricsCSV(self.path, step)
            csv.cut()
            trainer.loggers = [csv, TensorBoardLogger(self.path, name="", version="", purge_step=step or None)]
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(self.path / "checkpoints")
            elif isinstance(callback, LastCheckpoint):
                callback.folder = self.path / "checkpoints"

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.release()

    def release(self) -> None:
        """Let another command have the folder, before this process ends."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _compare_starts(self, trainer: Trainer) -> None:
        if trainer.world_size == 1:
            return
        ours = f"step {self.start.step} of {self.start.path}" if self.start.path else "the beginning"
        all_of_them: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(all_of_them, (self.start.step, f"rank {trainer.global_rank} from {ours}"))
        if len({step for step, _ in all_of_them}) > 1:
            raise UserError(
                f"the ranks would not go on from the same step: {'; '.join(line for _, line in all_of_them)}: put "
                f"trainer.default_root_dir={self.root} on a file system that all hosts share"
            )

    def _see_that_all_see_it(self, trainer: Trainer) -> None:
        """All ranks read the checkpoints that rank 0 writes: at the latest when the best one is tested."""
        assert self.path
        if trainer.world_size == 1:
            return
        found = appears(self.path / "lock")
        hosts: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(hosts, None if found else socket.gethostname())
        if any(hosts):
            names = ", ".join(sorted({host for host in hosts if host}))
            raise UserError(
                f"run folder {self.path}, made by rank 0, is not there on {names}: put trainer.default_root_dir="
                f"{self.root} on a file system that all hosts share"
            )

    def _take_lock(self, folder: Path) -> None:
        lock = (folder / "lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UserError(
                f"run folder {folder} is in use by {lock.read().strip()}: wait for it or end it, or begin a new run "
                "without --ckpt_path"
            ) from None
        lock.truncate(0)
        lock.write(f"host {socket.gethostname()}, process {os.getpid()}, since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
        lock.flush()
        self._lock = lock  # open as long as this process lives


def appears(path: Path) -> bool:
    """Whether a file that another host made is seen here, at the latest when NFS has looked again."""
    deadline = time.monotonic() + _NFS_LOOKS_AGAIN
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
        with contextlib.suppress(OSError):
            os.listdir(path.parent.parent)  # opening a folder makes NFS ask the server
    return True


def _claim(root: Path) -> Path:
    """Make the folder of a new run; atomic, for commands that start at once."""
    root.mkdir(parents=True, exist_ok=True)
    for name in _names(root):
        try:
            (root / name).mkdir()
        except FileExistsError:
            continue
        return root / name
    raise AssertionError("names are endless")


def _names(root: Path) -> Iterator[str]:
    job = slurm_job(os.environ)
    if job:
        yield job
        yield from (f"{job}.{n}" for n in range(1, 1_000_000))
    taken = [number for number, _ in _versions(root)]
    yield from (f"version_{n}" for n in range(max(taken, default=-1) + 1, 1_000_000))


def _versions(root: Path) -> list[tuple[int, Path]]:
    numbered = [(path.name.removeprefix("version_"), path) for path in root.glob("version_*")]
    return [(int(number), path) for number, path in numbered if number.isdigit()]
