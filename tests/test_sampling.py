"""The order of samples: exact cover, the same global batches at any number of ranks."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_mnist.sampling import GlobalBatchSampler, Part, permutation

sizes = st.integers(1, 5000)
worlds = st.one_of(st.integers(1, 9), st.integers(1, 4096))


def parts(size: int, batch: int, world: int, rank: int, *, epoch: int = 0, shuffle: bool = True) -> list[Part]:
    sampler = GlobalBatchSampler(size, batch, world, rank, seed=3, shuffle=shuffle)
    sampler.set_epoch(epoch)
    return list(sampler)


@settings(max_examples=60, deadline=None)
@given(sizes, worlds, st.integers(1, 700), st.integers(0, 5), st.booleans())
def test_ranks_cover_each_global_batch_exactly(size: int, world: int, batch: int, epoch: int, shuffle: bool) -> None:
    whole = parts(size, batch, 1, 0, epoch=epoch, shuffle=shuffle)
    assert sorted(torch.cat([p.index for p in whole]).tolist()) == list(range(size))
    ranks = [parts(size, batch, world, rank, epoch=epoch, shuffle=shuffle) for rank in range(min(world, 40))]
    ranks += [parts(size, batch, world, rank, epoch=epoch, shuffle=shuffle) for rank in range(40, world)]
    for step, (global_batch, *pieces) in enumerate(zip(whole, *ranks, strict=True)):
        assert torch.equal(torch.cat([p.index for p in pieces]), global_batch.index), step
        lengths = {len(p.index) for p in pieces}
        assert max(lengths) - min(lengths) <= 1
        assert {p.scale for p in pieces} == {world / len(global_batch.index)}


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 700), st.integers(1, 9), st.integers(1, 9), st.data())
def test_a_position_is_restored_anywhere(size: int, batch: int, before: int, after: int, data: st.DataObject) -> None:
    """Also with another number of ranks: what was consumed and what comes then are the epoch, in order."""
    whole = parts(size, batch, 1, 0)
    done = data.draw(st.integers(0, len(whole) - 1))
    consumed = [
        torch.cat([p.index for p in step])
        for step in zip(*(parts(size, batch, before, r) for r in range(before)), strict=True)
    ]
    samplers = [GlobalBatchSampler(size, batch, after, rank, seed=3, shuffle=True) for rank in range(after)]
    for sampler in samplers:
        sampler.resume_at(done * batch)
        assert len(sampler) == len(whole)
    rest = [torch.cat([p.index for p in step]) for step in zip(*samplers, strict=True)]
    assert torch.equal(torch.cat(consumed[:done] + rest), torch.cat([p.index for p in whole]))
    assert len(list(samplers[0])) == len(whole)  # the epoch after it is whole again


@given(sizes, st.integers(0, 2**32), st.integers(0, 100))
def test_a_permutation_is_a_function_of_its_key(size: int, seed: int, epoch: int) -> None:
    order = permutation(size, seed, epoch)
    assert sorted(order.tolist()) == list(range(size))
    torch.manual_seed(1)  # the framework's generator has no part in it
    assert torch.equal(permutation(size, seed, epoch), order)


def test_neighbouring_keys_give_other_orders() -> None:
    # A sum of seed and epoch, as torch's own sampler has it, would make (0, 1) and (1, 0) the same.
    orders = [
        tuple(permutation(100, *key).tolist()) for key in ((0,), (0, 0), (0, 1), (1, 0), (1, 1), (10,), (1, 0, 0))
    ]
    assert len(set(orders)) == len(orders)


def test_epochs_differ_and_evaluation_keeps_the_order() -> None:
    first, second = (torch.cat([p.index for p in parts(100, 7, 1, 0, epoch=epoch)]) for epoch in (0, 1))
    assert not torch.equal(first, second)
    assert torch.cat([p.index for p in parts(100, 7, 1, 0, shuffle=False)]).tolist() == list(range(100))


def test_five_samples_on_eight_ranks() -> None:
    lengths = [[len(p.index) for p in parts(5, 8, 8, rank)] for rank in range(8)]
    assert sum(sum(rank) for rank in lengths) == 5
    assert all(len(rank) == 1 for rank in lengths)
