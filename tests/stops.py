"""Callbacks that end a run in the middle, put in by class path, and what it takes to compare two runs."""

import atexit
import hashlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

HOOKS = (
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
)


class StoppedError(Exception):
    """The failure of a test's run."""


class StopAt(Callback):
    """Ends the run in one hook, at a number of optimiser steps.

    Args:
        hook: One of `HOOKS`, as far as the callback's place in the order of callbacks: before checkpoints are written.
        step: Optimiser steps made by then.
        how: `raise`, or `kill`: SIGKILL to this process.
        rank: The rank that does it; None: all.
    """

    def __init__(self, hook: str, step: int, how: str = "raise", rank: int | None = None) -> None:
        def stop(trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
            if trainer.global_step != step or trainer.sanity_checking or rank not in (None, trainer.global_rank):
                return
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise StoppedError

        setattr(self, hook, stop)


class SignalAt(Callback):
    """SIGUSR1 to one rank's own process in one hook, at a number of optimiser steps made by then."""

    def __init__(self, hook: str, step: int, rank: int) -> None:
        def ask(trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
            if trainer.global_step == step and trainer.global_rank == rank and not trainer.sanity_checking:
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.2)  # for the thread that takes it

        setattr(self, hook, ask)


class KillOnce(Callback):
    """SIGKILL to one rank at a step, unless it was done before: `mark` is a file that says so."""

    def __init__(self, step: int, rank: int, mark: str) -> None:
        self.step, self.rank, self.mark = step, rank, Path(mark)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class AtExit(Callback):
    """Sends `SIG<how>` to a rank's own process when Python ends, after all that the command does."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how = rank, signal.Signals[f"SIG{how}"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.global_rank == self.rank:
            atexit.register(os.kill, os.getpid(), self.how)


class Pace(Callback):
    """Makes training steps last, so that what is done to a run from outside comes inside it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(self.seconds)


class FaultError(Exception):
    """A failure planted from outside."""


class Fault(Callback):
    """Fails as the file `<path>.<rank>` says, as soon as it is there: `exception` or `exit`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        planted = Path(f"{self.path}.{trainer.global_rank}")
        if planted.exists():
            if planted.read_text() == "exit":
                sys.exit(3)
            raise FaultError("planted")


class LongValidation(Callback):
    """A validation that lasts."""

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            print("in validation", flush=True)
            time.sleep(3600)


class WeightLog(Callback):
    """Writes each rank's host and a checksum of its final weights to `<path>.<rank>`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weights = b"".join(p.detach().numpy().tobytes() for p in pl_module.parameters())
        line = f"{socket.gethostname()} {hashlib.sha256(weights).hexdigest()}\n"
        Path(f"{self.path}.{trainer.global_rank}").write_text(line)


class SampleLog(Callback):
    """Writes the samples of each training step a rank has finished to `<path>.<rank>`: step, then the indices."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        with open(f"{self.path}.{trainer.global_rank}", "a") as file:
            file.write(f"{trainer.current_epoch} {batch_idx} {' '.join(map(str, batch.index.tolist()))}\n")


class Noisy(nn.Module):
    """A network with dropout: its draws must not depend on what ran before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(784, 10))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def outcome(run: Path) -> dict[str, Any]:
    """What must be equal between a run in one go and one in pieces: all that later steps depend on, and the log."""
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    best_path = run / "checkpoints" / "best.ckpt"  # a run without validation has none
    best = torch.load(best_path, weights_only=True) if best_path.exists() else {"global_step": 0, "state_dict": {}}
    return {
        "weights": checkpoint["state_dict"],
        "optimizer": checkpoint["optimizer_states"],
        "schedule": checkpoint["lr_schedulers"],
        "progress": (checkpoint["epoch"], checkpoint["global_step"]),
        "best": (best["global_step"], best["state_dict"]),
        "log": (run / "metrics.csv").read_text(),
    }


def difference(a: Any, b: Any, where: str = "") -> str:
    """Where two outcomes differ, to the last bit; empty where they do not."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next((d for key in a if (d := difference(a[key], b[key], f"{where}.{key}"))), "")
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return next(
            (d for i, (x, y) in enumerate(zip(a, b, strict=True)) if (d := difference(x, y, f"{where}[{i}]"))), ""
        )
    equal = torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
    return "" if equal else f"{where}: {a} != {b}"
