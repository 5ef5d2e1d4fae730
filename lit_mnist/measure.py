"""What `lit-mnist doctor` measures with all ranks together: all-reduce, each rank's own compute, a short training."""

import copy
import hashlib
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lit_mnist.batch import Batch
from lit_mnist.module import LitMNIST

_SECONDS = 1.0  # for each of the measurements, about
_LARGE = 2**24  # bytes


@dataclass(frozen=True)
class Reduced:
    """All-reduce between the ranks.

    Attributes:
        is_right: Whether sums were.
        seconds: Median, by bytes reduced.
    """

    is_right: bool
    seconds: dict[int, float]


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        is_reduced_right: Whether all-reduce gave the right sums.
        reduce_s: Seconds of an all-reduce, median, by bytes.
        compute_s: Seconds of a training step of each rank on its own, without the others, median.
        step_s: Seconds of a training step of all together, median.
        samples_per_s: Of all together.
        steps: Of the short training.
        steps_per_epoch: Of the real one.
        weights: SHA-256 of each rank's weights after it.
        difference: Largest between a weight of rank 0 and of one process that made the same global batches.
        tolerance: What it may be: sums are made in another order.
        gradient: Bytes of the model's gradient.
    """

    is_reduced_right: bool
    reduce_s: dict[int, float]
    compute_s: list[float]
    step_s: float
    samples_per_s: float
    steps: int
    steps_per_epoch: int
    weights: list[str]
    difference: float
    tolerance: float
    gradient: int

    @property
    def _ranks(self) -> int:
        return len(self.compute_s)

    @property
    def alpha(self) -> float:
        """Seconds of a message of a ring all-reduce, which sends 2(n-1) of them one after the other."""
        return self.reduce_s[min(self.reduce_s)] / (2 * (self._ranks - 1))

    @property
    def bandwidth(self) -> float:
        """Bytes a second between neighbours of the ring, each of which sends 2(n-1)/n of what is reduced."""
        largest, smallest = max(self.reduce_s), min(self.reduce_s)
        seconds = max(self.reduce_s[largest] - self.reduce_s[smallest], 1e-9)
        return 2 * (self._ranks - 1) / self._ranks * largest / seconds

    def efficiency(self, ranks: int) -> float:
        """Share of `ranks` times one rank's speed that is to be expected, 0 ... 1: compute / (compute + all-reduce).

        The all-reduce of the gradient on a ring: 2(n-1) alpha + 2(n-1)/n bytes / bandwidth. DDP hides a part of it
        behind the backward pass, which is left out: it is little for a small model.
        """
        compute = max(self.compute_s)
        reduce = 2 * (ranks - 1) * self.alpha + 2 * (ranks - 1) / ranks * self.gradient / self.bandwidth
        return compute / (compute + reduce)


def gradient_bytes(model: LitMNIST) -> int:
    """Bytes that DDP reduces at each step."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def reduce_between(ranks: int, gradient: int, device: torch.device) -> Reduced:
    """All-reduces of a word, of the gradient's size and of 16 MiB; to be called on all ranks at once.

    Args:
        ranks: How many they are.
        gradient: Bytes of the model's gradient.
        device: Where the tensors are.
    """
    is_right = True
    seconds: dict[int, float] = {}
    for size in sorted({4, gradient // 4 * 4, _LARGE}):
        times: list[float] = []
        tensor = torch.ones(size // 4, device=device)
        dist.all_reduce(tensor)
        is_right = is_right and bool((tensor == ranks).all())
        for _ in range(30 if size < _LARGE else 7):
            tensor.fill_(1.0)
            _wait(device)
            since = time.perf_counter()
            dist.all_reduce(tensor)
            _wait(device)
            times.append(time.perf_counter() - since)
        is_right = is_right and bool((tensor == ranks).all())
        seconds[size] = _median(times[2:])  # the first ones connect and warm up
    return Reduced(is_right, seconds)


def twin(model: LitMNIST) -> LitMNIST:
    """Another of the same weights, without the trainer."""
    network = copy.deepcopy(model.network)
    made = LitMNIST(network, model.optimizer, model.lr_scheduler, model.lr_interval, model.mean, model.std)
    return made.to(device=model.device, dtype=model.dtype)


def compute_alone(model: LitMNIST, images: Tensor, labels: Tensor) -> float:
    """Seconds of a training step without any other rank: forward, backward and update of a copy; median.

    Args:
        model: On its device.
        images: (B, 28, 28) uint8, of one rank's batch.
        labels: (B,) int64.
    """
    device = model.device
    copied = twin(model).eval()
    optimizer, _ = _optimizer_of(copied)
    batch = Batch(images, labels, torch.arange(len(labels)), 1 / len(labels)).to(device)
    times: list[float] = []
    deadline = time.perf_counter() + _SECONDS
    while len(times) < 5 or (time.perf_counter() < deadline and len(times) < 200):
        since = time.perf_counter()
        _step(copied, optimizer, batch)
        _wait(device)
        times.append(time.perf_counter() - since)
    return _median(times[2:])


def repeat_alone(model: LitMNIST, batches: list[Batch]) -> LitMNIST:
    """The model after the given global batches, made by this process alone.

    Args:
        model: As it was before them; it is changed.
        batches: Whole global batches.
    """
    model.eval()
    optimizer, schedule = _optimizer_of(model)
    for batch in batches:
        _step(model, optimizer, batch.to(model.device))
        if schedule:
            schedule.step()
    return model


def digest(model: LitMNIST) -> str:
    """SHA-256 of the weights."""
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def largest_difference(one: LitMNIST, other: LitMNIST) -> float:
    """Between two weights at the same place; nan if one is."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def _optimizer_of(model: LitMNIST) -> tuple[Any, Any]:
    """A new one, and the schedule that advances with its steps, if there is one."""
    made = model.configure_optimizers()
    if not isinstance(made, dict):
        return made, None
    schedule = made["lr_scheduler"]
    return made["optimizer"], schedule["scheduler"] if schedule["interval"] == "step" else None


def _step(model: LitMNIST, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    model.training_step(batch, 0).backward()
    optimizer.step()


def _median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
