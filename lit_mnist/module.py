"""LitMNIST: the LightningModule around a network: loss, metrics, optimiser, and what a checkpoint holds."""

import math
import os
from functools import partial
from types import NoneType
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MeanMetric, SumMetric

from lit_mnist.batch import Batch
from lit_mnist.errors import UserError
from lit_mnist.model import ToyModel
from lit_mnist.sampling import derived_seed

CHECKPOINT_FORMAT = 1


class LitMNIST(LightningModule):
    """A classifier of 28x28 pictures, trained with cross-entropy.

    Logs `train_loss` every `log_every_n_steps` steps (the mean over the step's global batch, before the step), and
    `val_loss`, `val_acc`, `val_samples` (and the same with `test_`) after each evaluation: sums over all samples of all
    ranks, so they do not depend on how the data were cut.

    Args:
        network: Maps images (B, 28, 28) float to logits (B, classes). None: `ToyModel()`.
        optimizer: Called with the parameters. None: the seed's Adam (lr 0.001), in torch's fused form.
        lr_scheduler: Called with the optimiser. None: the learning rate stays.
        lr_interval: Whether the schedule advances every `epoch` or every optimiser `step`; ReduceLROnPlateau, which
            watches a metric, advances every epoch.
        mean: Of the pixels scaled to 0 ... 1; subtracted. MNIST's training set has 0.1307.
        std: Of the same; divided by. MNIST's training set has 0.3081.

    Raises:
        UserError: If mean is not finite, or std not finite and above 0.
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
        mean: float = 0.1307,
        std: float = 0.3081,
    ) -> None:
        super().__init__()
        if not math.isfinite(mean):
            raise UserError(f"model.mean={mean}: expected a finite number")
        if not (math.isfinite(std) and std > 0):
            raise UserError(f"model.std={std}: expected a finite number above 0")
        self.network = ToyModel() if network is None else network
        self.optimizer = partial(torch.optim.Adam, fused=True) if optimizer is None else optimizer
        self.lr_scheduler = lr_scheduler
        # A checkpoint holds plain hyperparameters: the command line's class paths, but no objects of a script.
        network = optimizer = lr_scheduler = None
        self.save_hyperparameters(logger=False)
        self.lr_interval = lr_interval
        self.mean = mean
        self.std = std
        self._changed: dict[str, Any] = {}
        self._plateau: ReduceLROnPlateau | None = None
        self._plateau_state: dict[str, Any] | None = None
        self.val_metrics = _Metrics()
        self.test_metrics = _Metrics()

    def __setattr__(self, name: str, value: Any) -> None:
        """As `nn.Module`, without the search for what a word could be: Lightning notes each hook's name, 40 a step."""
        if type(value) in (str, NoneType) and name in self.__dict__:  # so it is no parameter, buffer or module
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, ...): uint8 pixels are normalised, floating point is taken as it is."""
        if images.dtype == torch.uint8:
            images = images.to(self.dtype).sub_(255 * self.mean).div_(255 * self.std)
        logits: Tensor = self.network(images)
        return logits

    def training_step(self, batch: Batch | tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """This rank's share of the loss; its mean over the ranks is the mean over the global batch."""
        images, labels = batch
        if not len(labels):  # the tail of an epoch may leave a rank none, which not every network takes
            return 0.0 * torch.stack([parameter.sum() for parameter in self.parameters()]).sum()
        scale = batch.scale if isinstance(batch, Batch) else 1 / len(labels)
        return F.cross_entropy(self(images), labels, reduction="sum") * scale

    def validation_step(self, batch: Batch | tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add a batch to `val_loss`, `val_acc` and `val_samples`."""
        self._evaluate("val", self.val_metrics, batch)

    def test_step(self, batch: Batch | tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add a batch to `test_loss`, `test_acc` and `test_samples`."""
        self._evaluate("test", self.test_metrics, batch)

    def predict_step(self, batch: Batch | tuple[Tensor, Tensor] | Tensor, batch_idx: int) -> Tensor:
        """Probabilities (B, classes)."""
        images = batch if isinstance(batch, Tensor) else next(iter(batch))
        return self(images).softmax(dim=1)

    def configure_optimizers(self) -> Any:
        """The optimiser, and the schedule where there is one."""
        optimizer = self.optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])
        scheduler = self.lr_scheduler(optimizer) if self.lr_scheduler else None
        if scheduler is None:
            return optimizer
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            if not isinstance(scheduler, ReduceLROnPlateau):
                raise UserError(
                    "model.lr_scheduler: torch's own ReduceLROnPlateau does not say which metric it watches: "
                    "use lightning.pytorch.cli.ReduceLROnPlateau with its monitor"
                )
            self._plateau = scheduler
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.lr_interval}}

    def configure_callbacks(self) -> list[Callback]:
        """What logs `train_loss`."""
        return [_TrainLoss()]

    def on_train_start(self) -> None:
        """Let what was typed of the optimiser win over what a checkpoint restored."""
        if self.device.type == "cpu":
            # Lightning has torch ask NVML whether there is a GPU, and an optimiser asks at each step: where there is
            # none, torch loads the library each time, a tenth of a step of a small model.
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
        for group in self.optimizers().param_groups:
            group.update({name: value for name, value in self._changed.items() if name in group})
        if self._plateau and self._plateau_state:
            self._plateau.load_state_dict(self._plateau_state)
        if isinstance(self.trainer.strategy.model, DistributedDataParallel):
            self._settle_buckets()

    def on_train_epoch_end(self) -> None:
        """Advance a schedule that watches a metric; Lightning would do it after the epoch's checkpoint is written."""
        if self._plateau:
            self._plateau.step(self.trainer.callback_metrics[self._plateau.monitor])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed torch's generators from (seed, epoch, batch, rank), so that no draw depends on what ran before."""
        seed = os.environ.get("PL_GLOBAL_SEED")
        if seed is not None:
            key = derived_seed(int(seed), self.current_epoch, batch_idx, self.global_rank)
            torch.default_generator.manual_seed(key)
            if self.device.type == "cuda":
                torch.cuda.manual_seed(key)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Number the format, and add what Lightning does not hold."""
        checkpoint["lit_mnist_format"] = CHECKPOINT_FORMAT
        if self._plateau:
            checkpoint["plateau"] = self._plateau.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse what is not a checkpoint of this network.

        Raises:
            UserError: If the format is unknown, or a tensor's shape differs (both are named).
        """
        found = checkpoint.get("lit_mnist_format")
        if found != CHECKPOINT_FORMAT:
            raise UserError(
                f"the checkpoint has lit-mnist format {found}, and this version reads {CHECKPOINT_FORMAT}: "
                "use the version that wrote it"
            )
        self._plateau_state = checkpoint.get("plateau")
        before, now = (h.get("optimizer") or {} for h in (checkpoint["hyper_parameters"], self.hparams))
        if before and now:  # a script's are objects, which cannot be compared
            old = before.get("init_args", {})
            self._changed = {k: v for k, v in now.get("init_args", {}).items() if k not in old or old[k] != v}
        theirs, ours = checkpoint["state_dict"], self.state_dict()
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            a, b = (tuple(state[name].shape) if name in state else "absent" for state in (theirs, ours))
            if a != b:
                raise UserError(
                    f"the checkpoint is of another architecture: {name} is {a} in it and {b} in this model; "
                    "give --model.network (network= in Python) as in the run that wrote it"
                )

    def _settle_buckets(self) -> None:
        """One backward pass for nothing, on blank images.

        DDP puts gradients into buckets by the order in which the first pass of a process makes them, from the second
        pass on. Where a gradient lies decides in which order three ranks and more are summed, so a run that goes on
        would differ in its first step, by the last bit, from one that was never stopped.
        """
        buffers = {name: buffer.clone() for name, buffer in self.named_buffers()}
        blank = torch.zeros((2, 28, 28), dtype=torch.uint8), torch.zeros(2, dtype=torch.long)
        self.trainer.strategy.training_step(tuple(tensor.to(self.device) for tensor in blank), 0).backward()
        self.zero_grad()
        for name, buffer in self.named_buffers():
            buffer.copy_(buffers[name])

    def _evaluate(self, stage: str, metrics: "_Metrics", batch: Batch | tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        if len(labels):
            logits = self(images)
            losses, hits = F.cross_entropy(logits, labels, reduction="none"), (logits.argmax(dim=1) == labels).float()
        else:  # a rank may have no sample of a global batch, which not every network takes
            losses = hits = torch.zeros(0, device=self.device)
        metrics.loss.update(losses)
        metrics.acc.update(hits)
        metrics.samples.update(len(labels))
        for name, metric in metrics.named_children():
            self.log(f"{stage}_{name}", metric, on_step=False, on_epoch=True, prog_bar=name == "acc")


class _Metrics(nn.Module):
    """Sums over samples and ranks: mean loss, accuracy (micro: the mean of hits), and how many samples there were."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = MeanMetric(nan_strategy="disable")  # a nan is a result, not a sample to leave out
        self.acc = MeanMetric()
        self.samples = SumMetric()


class _TrainLoss(Callback):
    """Logs `train_loss`.

    A callback, because the row has to be written before a checkpoint of the same step is: Lightning runs checkpoint
    callbacks after all others and writes what `training_step` logs after those.
    """

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.parts = []
        self.step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.parts.append(outputs["loss"])  # already divided by accumulate_grad_batches
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        parts, self.parts = self.parts, []
        if not trainer.log_every_n_steps or self.step % trainer.log_every_n_steps:
            return
        loss = trainer.strategy.reduce(torch.stack(parts).sum(), reduce_op="mean")
        self.log("train_loss", loss, prog_bar=True, logger=False)
        for logger in trainer.loggers:
            # Lightning numbers the rows of a step from 0, and its evaluation rows with it.
            logger.log_metrics({"train_loss": float(loss), "epoch": trainer.current_epoch}, step=self.step - 1)
