"""How long one rank takes to plan an epoch, and how much memory: `python benchmarks/sampling.py`.

Prints, for 60,000 samples and more and more ranks, the median over 20 epochs of the time to draw the order and cut
this rank's parts from it, the bytes of the indices it allocates, and as the last line the same as JSON.
"""

import json
import platform
import resource
import statistics
import time

import torch

from lit_mnist.sampling import GlobalBatchSampler

SIZE, PER_RANK, EPOCHS = 60_000, 64, 20


def plan(world: int) -> dict[str, float]:
    """Median and extremes of the seconds for one rank's epoch, and the growth of the process over all of them."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for epoch in range(EPOCHS):
        sampler = GlobalBatchSampler(SIZE, PER_RANK * world, world, rank=world // 2, shuffle=True)
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        parts = list(sampler)
        seconds.append(time.perf_counter() - start)
        assert abs(sum(len(part.index) for part in parts) - SIZE / world) <= len(parts)
    return {
        "ranks": world,
        "median_ms": 1e3 * statistics.median(seconds),
        "least_ms": 1e3 * min(seconds),
        "most_ms": 1e3 * max(seconds),
        "order_kib": SIZE * 8 / 1024,
        "process_growth_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before,
    }


def main() -> None:
    """Print the table and its JSON."""
    plan(1)  # warm-up
    results = [plan(world) for world in (1, 8, 64, 512, 4096)]
    print(f"{SIZE:,} samples, {PER_RANK} a rank and step; torch {torch.__version__}, {platform.machine()}")
    for row in results:
        print("  ".join(f"{name} {value:,.2f}" for name, value in row.items()))
    print(json.dumps({"n": EPOCHS, "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
