"""The best plain-torch loop known for the same arithmetic in fp32: `python benchmarks/bare.py FOLDER [--processes 2]`.

The yardstick of speed.py: all images in memory, one gather a batch, fused Adam, nothing logged, nothing kept. LOG.md
has what was tried for it. FOLDER is torchvision's. `--evaluate` times a forward pass over the 10,000 test images
instead.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from turns import Turns

BATCH, EVAL_BATCH = 64, 1000


def load(folder: str, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images (N, 784) float32, normalised, and labels (N,) int64."""
    raw = Path(folder) / "MNIST" / "raw"
    images = torch.frombuffer(bytearray((raw / f"{name}-images-idx3-ubyte").read_bytes()[16:]), dtype=torch.uint8)
    labels = torch.frombuffer(bytearray((raw / f"{name}-labels-idx1-ubyte").read_bytes()[8:]), dtype=torch.uint8)
    pixels = images.view(-1, 784).to(device).float()
    return pixels.div_(255).sub_(0.1307).div_(0.3081), labels.long().to(device)


def toy_model() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 392), nn.ReLU(), nn.Linear(392, 196), nn.ReLU(), nn.Linear(196, 10))


def train(rank: int, options: argparse.Namespace) -> None:
    device, world = start(rank, options), options.processes
    torch.manual_seed(0)
    images, labels = load(options.folder, "train", device)
    model: nn.Module = toy_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    if world > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    for epoch in Turns().epochs(options.epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch)).to(device)
        for global_batch in order.split(BATCH * world):
            mine = global_batch[len(global_batch) * rank // world : len(global_batch) * (rank + 1) // world]
            loss = F.cross_entropy(model(images.index_select(0, mine)), labels.index_select(0, mine))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1}: last loss {loss.item():.4f}", flush=True)
    if world > 1:
        dist.destroy_process_group()


def evaluate(rank: int, options: argparse.Namespace) -> None:
    device = start(rank, options)
    images, labels = load(options.folder, "t10k", device)
    model = toy_model().to(device).eval()
    with torch.inference_mode():
        for _ in Turns().epochs(options.epochs):
            loss = hits = torch.zeros((), device=device)
            for x, y in zip(images.split(EVAL_BATCH), labels.split(EVAL_BATCH), strict=True):
                logits = model(x)
                loss = loss + F.cross_entropy(logits, y, reduction="sum")
                hits = hits + (logits.argmax(dim=1) == y).sum()
            print(f"loss {loss.item() / len(labels):.4f}, accuracy {hits.item() / len(labels):.4f}", flush=True)


def start(rank: int, options: argparse.Namespace) -> torch.device:
    is_gpu = options.accelerator == "gpu"
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    if options.processes > 1:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=options.port)
        dist.init_process_group("nccl" if is_gpu else "gloo", rank=rank, world_size=options.processes)
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--port", default="12356")
    options = parser.parse_args()
    work = evaluate if options.evaluate else train
    if options.processes == 1:
        work(0, options)
    else:
        torch.multiprocessing.spawn(work, args=(options,), nprocs=options.processes, join=True)


if __name__ == "__main__":
    main()
