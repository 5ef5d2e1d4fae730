"""ToyModel against the seed's description."""

from itertools import pairwise

import pytest
import torch

from lit_mnist import ToyModel


def test_has_the_seeds_386718_parameters() -> None:
    widths = [784, 784 // 2, 784 // 2 // 2, 10]
    derived = sum(i * o + o for i, o in pairwise(widths))
    assert derived == 386_718
    assert sum(p.numel() for p in ToyModel().parameters()) == derived


def test_is_the_seeds_network_layer_by_layer() -> None:
    torch.manual_seed(0)
    ours = ToyModel()
    torch.manual_seed(0)
    seeds = torch.nn.Sequential(
        torch.nn.Linear(784, 392),
        torch.nn.ReLU(),
        torch.nn.Linear(392, 196),
        torch.nn.ReLU(),
        torch.nn.Linear(196, 10),
    )
    images = torch.randn(5, 1, 28, 28)
    assert torch.equal(ours(images), seeds(images.view(5, -1)))


@pytest.mark.parametrize("shape", [(3, 28, 28), (3, 1, 28, 28), (0, 28, 28)])
def test_takes_images_with_and_without_a_channel(shape: tuple[int, ...]) -> None:
    assert ToyModel()(torch.zeros(shape)).shape == (shape[0], 10)


def test_width_never_falls_below_the_classes() -> None:
    widths = [layer.out_features for layer in ToyModel(in_features=64, hidden_layers=4, shrink=3).network[::2]]
    assert widths == [21, 10, 10, 10, 10]


@pytest.mark.parametrize("name", ["in_features", "num_classes", "hidden_layers", "shrink"])
def test_refuses_what_is_below_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        ToyModel(**{name: 0})
