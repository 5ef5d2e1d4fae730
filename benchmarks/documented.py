"""What Lightning's documentation would have a person write: `python benchmarks/documented.py FOLDER [--processes 2]`.

A DataLoader over torchvision's MNIST, a LightningModule that logs its loss each step, a Trainer with its defaults.
"""

import argparse
import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from benchmarks.clock import EachEpoch


class LitClassifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 392), nn.ReLU(), nn.Linear(392, 196), nn.ReLU(), nn.Linear(196, 10)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.network(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    options = parser.parse_args()
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    images = datasets.MNIST(options.folder, train=True, transform=transform)
    trainer = Trainer(
        max_epochs=options.epochs,
        accelerator=options.accelerator,
        devices=options.processes,
        default_root_dir=os.path.join(options.folder, "documented"),
        callbacks=[EachEpoch()],
    )
    trainer.fit(LitClassifier(), DataLoader(images, batch_size=64, shuffle=True))


if __name__ == "__main__":
    main()
