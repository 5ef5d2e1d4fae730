"""What a run says to the person who started it: the plan, one line an epoch, the result."""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, RichProgressBar
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.markup import escape

from lit_mnist import launch
from lit_mnist.data import MNISTDataModule
from lit_mnist.errors import UserError
from lit_mnist.predictions import PredictionWriter
from lit_mnist.resume import RunFolder, Start

# Drawing a bar costs as much as a step of a small model.
_DRAWN_A_SECOND = 4
_START = {True: "the beginning", False: "untrained weights; --ckpt_path gives trained ones"}


class Report(Callback):
    """Prints on rank 0: the plan when a command starts, each epoch where output is no terminal, throughput for the end.

    Args:
        folder: The run's folder.
        start: What the command starts from.
    """

    def __init__(self, folder: RunFolder, start: Start) -> None:
        self.folder = folder
        self.start = start
        self.console = Console(highlight=False)
        self.planned = False
        self.samples = 0
        self.val_samples = 0
        self.seconds = 0.0
        self._since: float | None = None
        self._epoch_from = (0, 0.0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._plan(trainer, pl_module)
        self._start_clock(trainer)  # a run that goes on inside an epoch does not come by its start

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._plan(trainer, pl_module)
            self._stop_clock()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_clock(trainer)
        self.val_samples = int(trainer.callback_metrics.get("val_samples", 0))

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._plan(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._plan(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch_from = (self.samples, self.seconds)
        self._start_clock(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.samples += round(trainer.world_size / batch.scale)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_clock()
        loss = trainer.callback_metrics.get("train_loss")
        if loss is not None and not loss.isfinite() and trainer.is_global_zero:
            self.warn(f"train_loss is {loss:.4f}: a smaller --model.optimizer.lr may help")
        if not (self.console.is_terminal and trainer.progress_bar_callback) and trainer.is_global_zero:
            samples, seconds = self.samples - self._epoch_from[0], self.seconds - self._epoch_from[1]
            metrics = "".join(
                f"  {name} {trainer.callback_metrics[name]:.4f}"
                for name in ("train_loss", "val_loss", "val_acc")
                if name in trainer.callback_metrics
            )
            epochs = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else "?"
            self.console.print(
                f"epoch {trainer.current_epoch + 1}/{epochs}{metrics}  "
                f"{seconds:.1f} s  {samples / seconds:,.0f} samples/s",
                soft_wrap=True,
            )

    def finished(self, start: Start) -> None:
        """Say that the run to continue has nothing left to do."""
        self.console.print(
            f"{shown(start.folder)} is finished, at step {start.step:,}; a larger --trainer.max_epochs extends it",
            soft_wrap=True,
        )

    def before(self, trainer: Trainer) -> None:
        """Say on rank 0, before the processes meet, what is worth a warning; raise what could not work."""
        for line in self.start.damaged:
            going_on = shown(self.start.path) if self.start.path else "the beginning"
            self.warn(f"{line}; going on from {going_on}")
        for finding in launch.findings(launch.describe(trainer)):
            if finding.is_fatal:
                raise UserError(finding.line)
            self.warn(finding.line)

    def warn(self, line: str) -> None:
        """Print a warning, on rank 0."""
        if not rank_zero_only.rank:
            self.console.print(f"[yellow]warning:[/] {escape(line)}", soft_wrap=True)

    def result(
        self,
        trainer: Trainer,
        best: ModelCheckpoint | None = None,
        last: Path | None = None,
        predictions: PredictionWriter | None = None,
    ) -> None:
        """Print what a command came to.

        Args:
            trainer: The run's.
            best: What wrote the best checkpoint of a fit; None where none was written.
            last: The last checkpoint of a fit, tested where there is no best one.
            predictions: What wrote a prediction's file.
        """
        if not trainer.is_global_zero:
            return
        rows = {}
        if best is not None:
            rows["best checkpoint"] = shown(best.best_model_path)
            rows["val_acc"] = f"{best.best_model_score:.4f} over {self.val_samples:,} samples"
        elif last is not None:
            rows["last checkpoint"] = shown(last)
        metrics = trainer.callback_metrics
        for stage in ("val", "test"):
            if f"{stage}_acc" in metrics and trainer.state.fn != "fit":
                samples = int(metrics[f"{stage}_samples"])
                rows[f"{stage}_acc"] = f"{metrics[f'{stage}_acc']:.4f} over {samples:,} samples"
                rows[f"{stage}_loss"] = f"{metrics[f'{stage}_loss']:.6f}"
        if self.samples:
            speed = self.samples / self.seconds
            rows["training"] = f"{self.samples:,} samples in {self.seconds:.1f} s = {speed:,.0f} samples/s"
        if predictions is not None and predictions.path is not None:
            rows["predictions"] = f"{shown(predictions.path)}, {predictions.count:,} rows"
        if self.folder.path is not None:
            hidden = {"hparams.yaml", "lock"}
            files = [f for f in sorted(os.listdir(self.folder.path)) if f not in hidden and ".tfevents." not in f]
            rows["run folder"] = f"{shown(self.folder.path)} ({', '.join(files)})"
        if self.folder.default_loggers and trainer.loggers:
            rows["curves"] = f"tensorboard --logdir {shown(self.folder.root)}"
        self.print_table("result", rows)

    def _start_clock(self, trainer: Trainer) -> None:
        """Training goes on; validation and the sanity check before training do not count."""
        self._since = time.perf_counter() if trainer.state.fn == "fit" and not trainer.sanity_checking else None

    def _stop_clock(self) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None

    def _plan(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.planned:
            return
        self.planned = True
        if not trainer.is_global_zero:
            return
        run = launch.describe(trainer)
        rows = {
            "command": f"{trainer.state.fn.value}" if trainer.state.fn else "",
            "launcher": run.launcher,
            "world size": f"{run.world_size} = {run.num_nodes} node(s) x {run.devices} {run.accelerator} device(s)",
            "backend": run.backend or "none (one process)",
            "parameters": f"{sum(p.numel() for p in pl_module.parameters()):,}",
            **_data_rows(trainer),
            "run folder": shown(self.folder.path) if self.folder.path else "none (fast_dev_run)",
            "starts from": f"step {self.start.step:,} of {shown(self.start.path)}"
            if self.start.path
            else _START[trainer.state.fn == "fit"],
        }
        self.print_table("plan", rows)

    def print_table(self, title: str, rows: Mapping[str, str]) -> None:
        """Print names and values in two columns under a title."""
        self.console.print(f"[bold]{title}[/]")
        for name, value in rows.items():
            self.console.print(f"  [cyan]{name:<16}[/]", escape(value), soft_wrap=True)


def progress_bar() -> ProgressBar | None:
    """The bar of a terminal; None where output goes to a file."""
    return _Bar(refresh_rate=_DRAWN_A_SECOND) if sys.stdout.isatty() else None


class _Bar(RichProgressBar):
    """Lightning's bar, which at each step gathers what it shows, but for steps that nobody could see."""

    def __init__(self, refresh_rate: int) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._gathered_at = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        if now - self._gathered_at >= 1 / self.refresh_rate or batch_idx + 1 == self.total_train_batches:
            self._gathered_at = now
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


def _data_rows(trainer: Trainer) -> dict[str, str]:
    data = trainer.datamodule
    if not isinstance(data, MNISTDataModule):
        return {}
    rows = {"samples": ", ".join(f"{len(split.labels):,} {name}" for name, split in data.splits.items())}
    if trainer.state.fn == "fit":
        batch, world = data.global_batch, trainer.world_size
        rows["batch"] = f"{batch:,} = {world} x {batch / world:g} a device"
        rows["steps per epoch"] = f"{trainer.num_training_batches:,}"
    return rows


def shown(path: str | Path | None) -> str:
    """A path as short as it can be from here."""
    return "" if path is None else min(os.path.relpath(path), str(path), key=len)
