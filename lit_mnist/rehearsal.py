"""What would fail on every rank, tried first in one process, before others are started or anything is written."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer

from lit_mnist.data import MNISTDataModule
from lit_mnist.errors import UserError, one_line
from lit_mnist.module import LitMNIST
from lit_mnist.resume import Start, is_finished


def rehearse(model: LitMNIST, data: MNISTDataModule, trainer: Trainer, start: Start, stage: str) -> None:
    """Try what a command is made of.

    Args:
        model: Untouched but for what a forward pass in evaluation mode leaves.
        data: Its trainer is set.
        trainer: Not yet running.
        start: What the command starts from.
        stage: `fit`, `validate`, `test` or `predict`.

    Raises:
        UserError: If the network does not take the images, the optimiser or schedule cannot be made, the checkpoint is
            not one to start this from, or there is nothing to do.
    """
    data.trainer = trainer
    data.check_world_size(trainer.world_size)
    if stage == "validate" and data.val_size == 0:
        raise UserError("data.val_size=0 holds no images out: there is nothing to validate")
    _try_network(model)
    if stage == "fit":
        _try_optimizer(model)
    if start.checkpoint is not None:
        model.on_load_checkpoint(start.checkpoint)
        if stage == "fit":
            _try_going_on(model, data, trainer, start, start.checkpoint)


def _try_network(model: LitMNIST) -> None:
    images = torch.zeros((2, 28, 28), dtype=torch.uint8)
    wanted = "model.network must map images (B, 28, 28) float to logits (B, classes) for 10 classes or more"
    try:
        with torch.no_grad():
            logits = model.eval()(images)
    except Exception as error:
        raise UserError(f"{wanted}; on two blank images it fails: {one_line(str(error))}") from error
    finally:
        model.train()
    if logits.dim() != 2 or logits.shape[0] != 2 or logits.shape[1] < 10:
        raise UserError(f"{wanted}; of two images it makes {tuple(logits.shape)}")


def _try_optimizer(model: LitMNIST) -> None:
    try:
        model.configure_optimizers()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"model.optimizer or model.lr_scheduler cannot be made: {one_line(str(error))}") from error


def _try_going_on(
    model: LitMNIST, data: MNISTDataModule, trainer: Trainer, start: Start, checkpoint: dict[str, Any]
) -> None:
    if not {"optimizer_states", "lr_schedulers", "loops"} <= set(checkpoint):
        raise UserError(f"ckpt_path={start.path} holds weights alone, from which no training can go on: use another")
    if not start.folder and is_finished(checkpoint, trainer.max_epochs, trainer.max_steps):
        raise UserError(
            f"ckpt_path={start.path} is of step {start.step:,}, where trainer.max_epochs={trainer.max_epochs} and "
            f"trainer.max_steps={trainer.max_steps} end: give a larger one"
        )
    if "optimizer" in checkpoint["hyper_parameters"]:  # a script's has none
        ours, theirs = (dict(_leaves(h)) for h in (model.hparams, checkpoint["hyper_parameters"]))
        # Settings of an optimiser can change where no schedule moves them; nothing else can.
        fixed = "optimizer.class_path" if model.lr_scheduler is None else "optimizer"
        for key in sorted(ours.keys() | theirs.keys()):
            if key.startswith((fixed, "lr_")) and ours.get(key) != theirs.get(key):
                raise UserError(
                    f"model.{key}={ours.get(key)}, but the checkpoint was written with {theirs.get(key)} and cannot go "
                    "on with another: give the same, or begin a new run without --ckpt_path"
                )
    if "MNISTDataModule" in checkpoint:
        data.check_resumable(checkpoint["MNISTDataModule"])


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else name)
    else:
        yield key, value
