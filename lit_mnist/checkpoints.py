"""Checkpoint files: when they are written, whole or not at all, and how they are read, as plain data."""

import os
import re
import shutil
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lit_mnist.errors import RunError, UserError

# Whether minutes have passed is looked at, and agreed between the ranks, every so many optimiser steps.
_LOOK_EVERY = 20
_PARTS = "state_dict", "hyper_parameters"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and moves it there, so that a kill or a full disk leaves the old one."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path`.

        Raises:
            RunError: If the file cannot be written; what stood at `path` is untouched.
        """
        target = Path(path)
        temporary = target.with_name(f".{target.name}.partial")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except (OSError, RuntimeError) as error:  # torch turns a failed write into a RuntimeError
            temporary.unlink(missing_ok=True)
            cause = error if isinstance(error, OSError) else error.__context__ or error
            raise RunError(
                f"checkpoint {target} cannot be written ({cause}): free space or choose another folder"
            ) from error


class LastCheckpoint(Checkpoint):
    """Keeps the checkpoint to go on from: `last.ckpt`, and the one before it, `previous.ckpt`.

    Written at the end of each epoch, and inside epochs as set here: after an optimiser step that no validation follows
    at once, since a run that goes on from between the two would leave the validation out.

    Args:
        every_n_steps: Optimiser steps between checkpoints inside an epoch; 0: by time alone.
        every_n_minutes: Minutes after which the next one is due; 0: by steps alone.

    Raises:
        UserError: If one of them is negative.
    """

    def __init__(self, every_n_steps: int = 0, every_n_minutes: float = 1.0) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("every_n_minutes", every_n_minutes)):
            if value < 0:
                raise UserError(f"checkpoint.{name} must be at least 0, got {value}")
        self.every_n_steps = every_n_steps
        self.every_n_minutes = every_n_minutes
        self.folder: Path | None = None  # set when the run's is known
        self._saved_step = 0
        self._seen_step = 0
        self._saved_at = 0.0
        self._due = False

    @property
    def path(self) -> Path | None:
        """`last.ckpt`; None before one was written or known."""
        path = self.folder / "last.ckpt" if self.folder else None
        return path if path and path.exists() else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_step = self._seen_step = trainer.global_step
        self._saved_at = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._seen_step:
            return  # inside an accumulated step, whose gradients no checkpoint holds
        self._seen_step = step
        if (self.every_n_steps and step % self.every_n_steps == 0) or step == trainer.max_steps:
            self._due = True
        if self.every_n_minutes and step % _LOOK_EVERY == 0:
            late = time.monotonic() - self._saved_at >= 60 * self.every_n_minutes
            self._due = trainer.strategy.broadcast(late) or self._due
        if self._due and not ends_in_validation(trainer, batch_idx):
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Write `last.ckpt` unless it is of this step already; on all ranks, between optimiser steps."""
        if self.folder is None or trainer.global_step == self._saved_step:
            return
        last, previous = self.folder / "last.ckpt", self.folder / "previous.ckpt"
        if trainer.is_global_zero and last.exists():
            second_name = self.folder / ".previous.ckpt.partial"
            second_name.unlink(missing_ok=True)
            try:
                os.link(last, second_name)
            except OSError:  # a file system without links
                shutil.copyfile(last, second_name)
            os.replace(second_name, previous)
        trainer.save_checkpoint(last)
        self._saved_step = trainer.global_step
        self._saved_at = time.monotonic()
        self._due = False


def ends_in_validation(trainer: Trainer, batch_idx: int) -> bool:
    """Whether a batch is an epoch's last or one after which Lightning may validate."""
    if batch_idx + 1 == trainer.num_training_batches:
        return True
    if not trainer.val_check_batch or trainer.val_check_batch == float("inf"):
        return False
    count = batch_idx if trainer.check_val_every_n_epoch else trainer.fit_loop.total_batch_idx
    return bool((count + 1) % trainer.val_check_batch == 0)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint file, plain data only.

    Raises:
        UserError: If the file is missing, or is not a whole checkpoint.
    """
    if not Path(path).is_file():
        raise UserError(f"ckpt_path={path}: {'a folder, not a file' if Path(path).is_dir() else 'no such file'}")
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("the file is empty, cut off or of another kind")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        with zipfile.ZipFile(path) as file:  # torch does not compare the checksums
            damaged = file.testzip()
        if damaged:
            raise ValueError(f"the checksum of {damaged} is wrong")
    except Exception as error:  # torch raises many kinds for what is not its own file
        reason = re.split(r"\.\s|\n", str(error))[0] or type(error).__name__
        raise UserError(f"ckpt_path={path}: not a whole checkpoint ({reason}): use another") from None
    if not isinstance(checkpoint, dict) or not all(isinstance(checkpoint.get(k), dict) for k in _PARTS):
        raise UserError(
            f"ckpt_path={path}: not a checkpoint of lit-mnist ({' and '.join(_PARTS)} expected): use another"
        )
    if "pytorch-lightning_version" not in checkpoint:
        raise UserError(f"ckpt_path={path}: not a checkpoint of Lightning (its version is missing): use another")
    return checkpoint
