"""ToyModel: the network of the seed script, as a plain `nn.Module`."""

from torch import Tensor, nn


class ToyModel(nn.Module):
    """A multilayer perceptron whose hidden layers halve in width: 784 -> 392 -> 196 -> 10, 386,718 parameters.

    Args:
        in_features: Numbers in one sample; 28 x 28 = 784 for MNIST.
        num_classes: Logits per sample, and the least width of a hidden layer.
        hidden_layers: How many hidden layers, each followed by a ReLU; the seed has 2.
        shrink: Each hidden layer is this many times narrower than the one before it (integer division); the seed
            halves.

    Raises:
        ValueError: If an argument is below 1.
    """

    def __init__(self, in_features: int = 784, num_classes: int = 10, hidden_layers: int = 2, shrink: int = 2) -> None:
        super().__init__()
        for name, value in (
            ("in_features", in_features),
            ("num_classes", num_classes),
            ("hidden_layers", hidden_layers),
            ("shrink", shrink),
        ):
            if value < 1:
                raise ValueError(f"ToyModel: {name} must be at least 1, got {value}")
        layers: list[nn.Module] = []
        width = in_features
        for _ in range(hidden_layers):
            narrower = max(width // shrink, num_classes)
            layers += [nn.Linear(width, narrower), nn.ReLU()]
            width = narrower
        self.network = nn.Sequential(*layers, nn.Linear(width, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes) of images (B, 28, 28), (B, 1, 28, 28), or any shape of `in_features` numbers each."""
        logits: Tensor = self.network(images.flatten(1))
        return logits
