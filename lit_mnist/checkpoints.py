"""Checkpoint files: written whole or not at all, read as plain data, and when they are written."""

import os
import re
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lit_mnist.errors import RunError, UserError


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and moves it there, so that a kill or a full disk leaves the old one."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path`.

        Raises:
            RunError: If the file cannot be written; what stood at `path` is untouched.
        """
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
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


def load_checkpoint(path: str) -> dict[str, Any]:
    """The content of a checkpoint file, plain data only.

    Raises:
        UserError: If the file is missing, or is not a whole checkpoint.
    """
    if not Path(path).is_file():
        raise UserError(f"ckpt_path={path}: no such file")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for what is not its own file
        reason = re.split(r"\.\s|\n", str(error))[0] if " " in str(error) else type(error).__name__
        raise UserError(f"ckpt_path={path}: not a whole checkpoint ({reason}): use another") from None
    if not isinstance(checkpoint, dict) or not {"state_dict", "hyper_parameters"} <= set(checkpoint):
        raise UserError(
            f"ckpt_path={path}: not a checkpoint of lit-mnist (no state_dict, no hyperparameters): use another"
        )
    return checkpoint


def checkpoint_callbacks(validates: bool) -> list[ModelCheckpoint]:
    """What writes `last.ckpt` after each epoch and, where the run validates, `best.ckpt` by `val_acc`."""
    last = ModelCheckpoint(filename="last", every_n_epochs=1, enable_version_counter=False)
    if not validates:
        return [last]
    best = ModelCheckpoint(filename="best", monitor="val_acc", mode="max", enable_version_counter=False)
    return [best, last]
