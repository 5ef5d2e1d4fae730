"""The seed's recipe as its author meant it, in plain torch: `python benchmarks/seed.py FOLDER [--processes 2]`.

The forty lines of the article with what they lack to run: the processes are started and joined into a group, gloo
stands in for NCCL where there is no GPU, each epoch is shuffled anew. Nothing else is changed: torchvision's MNIST (in
FOLDER) with a transform for each image, DistributedSampler, DDP, Adam, `loss.item()` each step; no evaluation, no
checkpoint.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms
from turns import Turns


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        current_dim = 784
        for _ in range(2):
            next_dim = max(current_dim // 2, 10)
            layers += [nn.Linear(current_dim, next_dim), nn.ReLU()]
            current_dim = next_dim
        self.network = nn.Sequential(*layers, nn.Linear(current_dim, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x.view(x.size()[0], -1))


def train_model(rank: int, options: argparse.Namespace) -> None:
    is_gpu = options.accelerator == "gpu"
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=options.port)
    dist.init_process_group("nccl" if is_gpu else "gloo", rank=rank, world_size=options.processes)
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    dataset_train = datasets.MNIST(options.folder, transform=transform, train=True)
    sampler = DistributedSampler(dataset_train, num_replicas=options.processes, rank=rank)
    dataloader = DataLoader(dataset_train, batch_size=64, shuffle=False, sampler=sampler)
    ddp_model = DistributedDataParallel(ToyModel().to(device), device_ids=[rank] if is_gpu else None)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(ddp_model.parameters())
    for epoch in Turns().epochs(options.epochs):
        sampler.set_epoch(epoch)
        running_loss = 0.0
        for inputs, labels in dataloader:
            inputs, labels = inputs.to(device), labels.to(device)
            loss = loss_fn(ddp_model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        if rank == 0:
            print(f"epoch {epoch + 1}: mean loss {running_loss / len(dataloader):.4f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--port", default="12355")
    options = parser.parse_args()
    torch.multiprocessing.spawn(train_model, args=(options,), nprocs=options.processes, join=True)


if __name__ == "__main__":
    main()
