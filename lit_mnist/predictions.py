"""Predictions of all ranks, in one CSV file."""

import csv
import os
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_mnist.batch import Batch
from lit_mnist.resume import RunFolder


class PredictionWriter(Callback):
    """Writes `predictions.csv` to the run's folder: index, digit, and each class's probability, one row a sample.

    Rank 0 gathers the rows, orders them by index and writes the file whole or not at all.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.parts: list[tuple[Tensor, Tensor]] = []

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, *_: Any
    ) -> None:
        """Keep a batch's rows."""
        self.parts.append((batch.index.cpu(), outputs.float().cpu()))

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file."""
        gathered = [self.parts]
        if trainer.world_size > 1:
            gathered *= trainer.world_size
            dist.gather_object(self.parts, gathered if trainer.is_global_zero else None)
        self.parts = []
        if self.folder.path is not None and trainer.is_global_zero:
            index, probabilities = (torch.cat(column) for column in zip(*chain.from_iterable(gathered), strict=True))
            order = index.argsort()
            path = self.folder.path / "predictions.csv"
            write_predictions(path, index[order], probabilities[order])
            self.path, self.count = path, len(index)


def write_predictions(path: Path, index: Tensor, probabilities: Tensor) -> None:
    """Write one row a sample: index, digit (the most probable class), p0, p1, ...

    Args:
        path: The CSV file; replaced whole.
        index: (N,) int64.
        probabilities: (N, classes) floating point.
    """
    temporary = path.with_suffix(".partial")
    try:
        with temporary.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["index", "digit", *(f"p{k}" for k in range(probabilities.shape[1]))])
            digits = probabilities.argmax(dim=1)
            for i, digit, row in zip(index.tolist(), digits.tolist(), probabilities.tolist(), strict=True):
                writer.writerow([i, digit, *(f"{p:.6g}" for p in row)])
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
