"""Batch: what one rank gets at one step, the border between data and model."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Batch:
    """One rank's part of a global batch. B, the samples in it, may differ by one between ranks, and may be 0.

    `images, labels = batch` works, for LightningModules that know nothing of this class.

    Attributes:
        images: (B, 28, 28) uint8, or what a `LitMNIST` network takes, (B, ...) floating point.
        labels: (B,) int64.
        index: (B,) int64, each sample's place in its data set.
        scale: What a sum over this rank's B samples is multiplied by so that its mean over the ranks is the mean over
            the global batch: ranks / samples of the global batch.
    """

    images: Tensor
    labels: Tensor
    index: Tensor
    scale: float

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same batch on `device`, itself where it is there already; Lightning moves batches with this."""
        if self.images.device == torch.device(device):
            return self
        return Batch(
            self.images.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            self.index.to(device, non_blocking=non_blocking),
            self.scale,
        )

    def __iter__(self) -> Iterator[Tensor]:
        yield self.images
        yield self.labels
