"""LitMNIST's arithmetic against plain torch, and its checkpoints."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torchvision.transforms import v2

from lit_mnist import LitMNIST, MNISTDataModule, ToyModel
from lit_mnist.batch import Batch
from lit_mnist.errors import UserError
from lit_mnist.sampling import GlobalBatchSampler
from lit_mnist.sources import load_mnist


class OneLayer(nn.Module):
    """A user's own network."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(784, 10))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def pixels(count: int) -> tuple[Tensor, Tensor]:
    samples = load_mnist("t10k")
    return samples.images[:count], samples.labels[:count]


def plain_gradients(network: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients by the textbook: softmax, negative log-likelihood, mean; none of the project's code."""
    network.zero_grad()
    x = (images.double() / 255 - 0.1307) / 0.3081
    logits = network.double()(x)
    probabilities = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
    loss = -probabilities[torch.arange(len(labels)), labels].log().mean()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in network.parameters() if p.grad is not None]


def test_loss_and_gradients_of_a_step_are_those_of_plain_torch() -> None:
    model = LitMNIST()
    images, labels = pixels(64)
    loss = model.training_step((images, labels), 0)
    loss.backward()
    ours = [p.grad for p in model.network.parameters()]
    reference = ToyModel()
    reference.load_state_dict(model.network.state_dict())
    expected, gradients = plain_gradients(reference, images, labels)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for got, wanted in zip(ours, gradients, strict=True):
        assert got is not None
        torch.testing.assert_close(got.double(), wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("count", "world"), [(64, 2), (65, 3), (7, 4), (2, 4)])
def test_the_ranks_mean_gradient_is_that_of_the_global_batch(count: int, world: int) -> None:
    """Uneven and empty parts included: DDP averages what each rank's backward leaves."""
    images, labels = pixels(count)
    model = LitMNIST()
    losses, sums = [], [torch.zeros_like(p) for p in model.network.parameters()]
    for rank in range(world):
        (part,) = GlobalBatchSampler(count, count, world, rank)
        model.zero_grad()
        loss = model.training_step(Batch(images[part.index], labels[part.index], part.index, part.scale), 0)
        loss.backward()
        losses.append(loss.item())
        for total, parameter in zip(sums, model.network.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad / world
    expected, gradients = plain_gradients(model.network, images, labels)
    assert sum(losses) / world == pytest.approx(expected.item(), abs=1e-6)
    for got, wanted in zip(sums, gradients, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=1e-6, rtol=0)


def test_an_empty_part_asks_nothing_of_the_network() -> None:
    """A convolution, like many layers, does not take an empty batch without its channel; the gradient is zero."""

    class Refuses(OneLayer):
        def forward(self, images: Tensor) -> Tensor:
            assert len(images)
            return super().forward(images)

    model = LitMNIST(network=Refuses())
    empty = torch.zeros(0, dtype=torch.int64)
    loss = model.training_step(Batch(torch.zeros((0, 28, 28), dtype=torch.uint8), empty, empty, 2.0), 0)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_normalisation_is_torchvisions() -> None:
    images, _ = pixels(16)
    theirs = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.1307,), (0.3081,))])(images[:, None])
    seen: list[Tensor] = []

    class Probe(OneLayer):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(images)
            return super().forward(images)

    LitMNIST(network=Probe())(images)
    torch.testing.assert_close(seen[0][:, None], theirs, atol=1e-6, rtol=1e-6)
    normalised = torch.randn(2, 28, 28)
    LitMNIST(network=Probe())(normalised)
    assert torch.equal(seen[1], normalised)


def quiet_trainer(**arguments: Any) -> Trainer:
    return Trainer(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        devices=1,
        **arguments,
    )


def test_evaluation_metrics_are_means_over_samples() -> None:
    torch.manual_seed(0)
    model, data = LitMNIST(), MNISTDataModule(eval_batch_size=999)  # a last batch of another size
    (metrics,) = quiet_trainer().test(model, data, verbose=False)
    images, labels, _ = load_mnist("t10k")
    with torch.no_grad():
        logits = model(images)
    loss = -logits.double().log_softmax(dim=1)[torch.arange(10_000), labels].mean()
    assert metrics["test_loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["test_acc"] == pytest.approx((logits.argmax(1) == labels).double().mean().item(), abs=1e-7)
    assert metrics["test_samples"] == 10_000


def test_adam_steps_as_the_seeds_does() -> None:
    """Ten steps of a fit against ten steps written by hand with the seed's optimiser."""
    torch.manual_seed(0)
    model, data = LitMNIST(), MNISTDataModule(val_size=0)
    reference = ToyModel()
    reference.load_state_dict(model.network.state_dict())
    quiet_trainer(max_steps=10, limit_val_batches=0).fit(model, data)
    optimizer = torch.optim.Adam(reference.parameters())
    sampler = GlobalBatchSampler(60_000, 64, shuffle=True)
    for part in islice(sampler, 10):
        images, labels = data.splits["train"].images[part.index], data.splits["train"].labels[part.index]
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference((images / 255 - 0.1307) / 0.3081), labels).backward()
        optimizer.step()
    for ours, theirs in zip(model.network.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def test_train_loss_is_the_mean_over_an_accumulated_step() -> None:
    torch.manual_seed(0)
    losses: list[float] = []

    class Kept(LitMNIST):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            losses.append(loss.item())
            return loss

    trainer = quiet_trainer(max_steps=4, accumulate_grad_batches=3, log_every_n_steps=4, limit_val_batches=0)
    trainer.fit(Kept(), MNISTDataModule())
    assert len(losses) == 12
    assert trainer.callback_metrics["train_loss"].item() == pytest.approx(sum(losses[-3:]) / 3, abs=1e-6)


@pytest.mark.parametrize(("interval", "rate"), [("step", 0.1 * 0.5**4), ("epoch", 0.1 * 0.5)])
def test_the_schedule_advances_at_its_interval(interval: Any, rate: float) -> None:
    model = LitMNIST(
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
        lr_interval=interval,
    )
    trainer = quiet_trainer(max_epochs=1, limit_train_batches=4, limit_val_batches=0)
    trainer.fit(model, MNISTDataModule())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(rate)


def saved(model: LitMNIST, path: Path) -> str:
    trainer = quiet_trainer(max_steps=2, limit_val_batches=0)
    trainer.fit(model, MNISTDataModule())
    trainer.save_checkpoint(path)
    return str(path)


def test_a_scripts_checkpoint_predicts_in_three_lines(tmp_path: Path) -> None:
    images, _ = pixels(3)
    path = saved(LitMNIST(mean=0.5), tmp_path / "a.ckpt")
    model = LitMNIST.load_from_checkpoint(path, weights_only=True).eval()
    assert model.mean == 0.5
    assert model(images).argmax(1).shape == (3,)


def test_objects_of_a_script_are_given_again(tmp_path: Path) -> None:
    ours = LitMNIST(network=OneLayer(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    path = saved(ours, tmp_path / "a.ckpt")
    with pytest.raises(UserError, match=r"another architecture: .* is absent in it and .* give --model.network"):
        LitMNIST.load_from_checkpoint(path, weights_only=True)
    model = LitMNIST.load_from_checkpoint(path, weights_only=True, network=OneLayer())
    for theirs, own in zip(model.network.parameters(), ours.network.parameters(), strict=True):
        assert torch.equal(theirs, own)


@pytest.mark.parametrize("number", [None, 2, "1"])
def test_refuses_another_format(number: object, tmp_path: Path) -> None:
    path = saved(LitMNIST(), tmp_path / "a.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["lit_mnist_format"] = number
    torch.save(checkpoint, path)
    with pytest.raises(UserError, match=f"has lit-mnist format {number}, and this version reads 1"):
        LitMNIST.load_from_checkpoint(path, weights_only=True)


def test_attributes_are_those_of_nn_module() -> None:
    """Words take a shorter way (`__setattr__`), and what is registered is not left behind by it."""
    model = LitMNIST()
    model.note = "a"
    model.note = None
    assert model.note is None
    with pytest.raises(TypeError, match="cannot assign 'str'"):
        model.network = "none"  # type: ignore[assignment]
    model.network = None  # type: ignore[assignment]
    assert not list(model.parameters())
