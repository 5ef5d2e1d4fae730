"""MNISTDataModule: the splits, the loaders, and what it refuses."""

import pytest
import torch

from lit_mnist import MNISTDataModule
from lit_mnist.batch import Batch
from lit_mnist.errors import UserError
from lit_mnist.sources import load_mnist


@pytest.fixture(scope="module")
def data() -> MNISTDataModule:
    module = MNISTDataModule()
    module.setup()
    return module


def test_splits_are_a_partition_of_the_training_images(data: MNISTDataModule) -> None:
    whole = load_mnist("train")
    train, val = data.splits["train"], data.splits["val"]
    assert (len(train.labels), len(val.labels), len(data.splits["test"].labels)) == (55_000, 5_000, 10_000)
    both = torch.cat([train.images.flatten(1), val.images.flatten(1)])
    # Sums with random weights tell the images apart (but for true duplicates), so equal sorted sums mean equal sets.
    weights = torch.rand(784, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, theirs = ((images.double() @ weights).sort().values for images in (both, whole.images.flatten(1)))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    assert torch.equal(torch.cat([train.labels, val.labels]).bincount(), whole.labels.bincount())


def test_the_split_depends_on_its_seed_alone(data: MNISTDataModule) -> None:
    torch.manual_seed(99)
    again, other = MNISTDataModule(batch_size=7), MNISTDataModule(split_seed=1)
    again.setup("validate")
    other.setup("validate")
    assert torch.equal(again.splits["val"].images, data.splits["val"].images)
    assert not torch.equal(other.splits["val"].images, data.splits["val"].images)


def test_val_size_0_trains_on_all() -> None:
    module = MNISTDataModule(val_size=0)
    module.setup("fit")
    assert len(module.splits["train"].labels) == 60_000
    assert module.val_dataloader() == []


def test_an_epoch_yields_every_sample_once_with_its_label(data: MNISTDataModule) -> None:
    loader = data.train_dataloader()
    batches = list(loader)
    assert len(batches) == len(loader) == 860  # 55,000 / 64, rounded up
    index = torch.cat([batch.index for batch in batches])
    assert sorted(index.tolist()) == list(range(55_000))
    train = data.splits["train"]
    for batch in (batches[0], batches[-1]):
        assert isinstance(batch, Batch)
        images, labels = batch
        assert images.dtype == torch.uint8
        assert torch.equal(images, train.images[batch.index])
        assert torch.equal(labels, train.labels[batch.index])
        assert batch.scale == 1 / len(labels)
    assert len(batches[-1].labels) == 55_000 % 64


def test_a_batch_moves_as_a_whole() -> None:
    batch = Batch(torch.zeros(2, 28, 28), torch.zeros(2), torch.zeros(2), 0.5).to("meta")
    assert {batch.images.device.type, batch.labels.device.type, batch.index.device.type} == {"meta"}
    assert batch.scale == 0.5
    assert batch.to(torch.device("meta")) is batch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "data.batch_size must be at least 1, got 0"),
        ({"global_batch_size": -1}, "data.global_batch_size must be at least 1, got -1"),
        ({"val_size": -1}, "data.val_size must be at least 0, got -1"),
        ({"eval_batch_size": 0}, "data.eval_batch_size must be at least 1, got 0"),
        ({"val_size": 60_000}, "data.val_size must be below the 60000 training images, got 60000"),
    ],
)
def test_refuses_what_is_out_of_range(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MNISTDataModule(**arguments).setup("fit")


def test_refuses_a_global_batch_that_cannot_be_cut() -> None:
    MNISTDataModule(global_batch_size=64).check_world_size(4)
    with pytest.raises(UserError, match="global_batch_size=64 is not divisible by the 3 devices"):
        MNISTDataModule(global_batch_size=64).check_world_size(3)
