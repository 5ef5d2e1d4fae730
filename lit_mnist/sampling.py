"""Who sees which sample, when: the order is a function of (seed, epoch), cut into global batches, then into ranks.

The global batches therefore do not depend on the number of ranks, and each sample is used exactly once an epoch:
nothing is padded, repeated or dropped. Where the samples do not divide, the last global batch is smaller and its parts
may differ by one sample, down to none; `scale` weights them so that the ranks' mean is the mean over the global batch.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler, SequentialSampler


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a global batch.

    Attributes:
        index: (B,) int64, places in the data set.
        scale: Ranks / samples of the global batch (see `lit_mnist.batch.Batch`).
    """

    index: Tensor
    scale: float


def derived_seed(*key: int) -> int:
    """A seed for a torch generator, 64 bits, that depends on the numbers of `key` alone; another key, another seed."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little", signed=True)


def permutation(size: int, *key: int) -> Tensor:
    """A random order of 0 ... size-1, (size,) int64, that depends on `size` and the numbers of `key` alone."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(derived_seed(*key)))


class GlobalBatchSampler(DistributedSampler[Part], SequentialSampler):
    """One rank's parts of an epoch's global batches, a `Part` at a time.

    For `DataLoader(batch_size=None, sampler=...)`. It is a `DistributedSampler`, so that Lightning calls `set_epoch`
    and puts no padded sampler in its place, and a `SequentialSampler`, so that `overfit_batches` leaves it alone.

    Every rank yields the same number of parts, ceil(size / global_batch), so that collectives match.

    Args:
        size: Samples in the data set.
        global_batch: Samples in a global batch, over all ranks.
        world_size: Number of ranks.
        rank: This rank, 0 ... world_size-1.
        seed: Of the order, with `shuffle`.
        shuffle: False: the data set's own order, in every epoch.
    """

    def __init__(
        self, size: int, global_batch: int, world_size: int = 1, rank: int = 0, seed: int = 0, shuffle: bool = False
    ) -> None:
        DistributedSampler.__init__(self, _Sized(size), world_size, rank, shuffle=shuffle, seed=seed)
        self.size = size
        self.global_batch = global_batch
        self.skip = 0

    def resume_at(self, consumed: int) -> None:
        """Leave out, in the next epoch iterated and in no other, the first `consumed` samples: whole global batches."""
        self.skip = consumed // self.global_batch

    def __len__(self) -> int:
        """Parts of a whole epoch, also when the next one starts inside it: Lightning counts from its beginning."""
        return -(-self.size // self.global_batch)

    def __iter__(self) -> Iterator[Part]:  # type: ignore[override]  # SequentialSampler's are int
        # A generator: Lightning calls iter() before set_epoch() when it resumes; the order is made at the first next().
        order = permutation(self.size, self.seed, self.epoch) if self.shuffle else torch.arange(self.size)
        skip, self.skip = self.skip, 0
        for batch in order.split(self.global_batch)[skip:]:
            start, stop = (len(batch) * rank // self.num_replicas for rank in (self.rank, self.rank + 1))
            yield Part(batch[start:stop], self.num_replicas / len(batch))


class _Sized(Dataset[Part]):
    """All that `DistributedSampler` asks of a data set."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size
