"""MNISTDataModule: the splits in memory and the loaders over them."""

import os
from collections.abc import Iterator

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_mnist.batch import Batch
from lit_mnist.errors import UserError
from lit_mnist.sampling import GlobalBatchSampler, Part, permutation
from lit_mnist.sources import Samples, load_mnist

_REMEDY = {"data": "give it the same data"}


class MNISTDataModule(LightningDataModule):
    """MNIST in memory: training and validation cut from the 60,000 training images, the 10,000 test images apart.

    Each rank holds the images as bytes and gathers a batch with one index operation, which is faster than worker
    processes could be. Loaders yield `lit_mnist.batch.Batch`.

    Args:
        batch_size: Samples per device at each training step.
        global_batch_size: Samples over all devices at each training step, in place of batch_size; must be divisible by
            their number.
        val_size: Images of the 60,000 held out for validation; 0 trains on all of them, without validation.
        split_seed: Chooses the images held out.
        eval_batch_size: Samples per device at each step of validation, test and prediction; no result depends on it.

    Raises:
        UserError: If a size is out of range, or global_batch_size not divisible by the number of devices.
    """

    def __init__(
        self,
        batch_size: int = 64,
        global_batch_size: int | None = None,
        val_size: int = 5000,
        split_seed: int = 0,
        eval_batch_size: int = 1000,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("global_batch_size", global_batch_size, 1),
            ("val_size", val_size, 0),
            ("split_seed", split_seed, 0),
            ("eval_batch_size", eval_batch_size, 1),
        ):
            if value is not None and value < least:
                raise UserError(f"data.{name} must be at least {least}, got {value}")
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.val_size = val_size
        self.split_seed = split_seed
        self.eval_batch_size = eval_batch_size
        self.splits: dict[str, Samples] = {}
        self._consumed = 0

    @property
    def world_size(self) -> int:
        """Ranks of the trainer this is attached to; 1 without one."""
        return self.trainer.world_size if self.trainer else 1

    @property
    def rank(self) -> int:
        """This process's rank among them."""
        return self.trainer.global_rank if self.trainer else 0

    @property
    def global_batch(self) -> int:
        """Samples over all devices at each training step."""
        return self.global_batch_size or self.batch_size * self.world_size

    def check_world_size(self, world_size: int) -> None:
        """Refuse a number of ranks that global_batch_size cannot be cut into.

        Raises:
            UserError: If it is not divisible by `world_size`.
        """
        if self.global_batch_size is not None and self.global_batch_size % world_size:
            raise UserError(
                f"data.global_batch_size={self.global_batch_size} is not divisible by the {world_size} devices of "
                f"this run: use a multiple of {world_size}, or data.batch_size, which is per device"
            )

    def setup(self, stage: str | None = None) -> None:
        """Load what `stage` needs: `train` and `val`, `test`, or (None) all of them."""
        self.check_world_size(self.world_size)
        if stage in (None, "fit", "validate") and "train" not in self.splits:
            whole = load_mnist("train")
            size = len(whole.labels)
            if self.val_size >= size:
                raise UserError(f"data.val_size must be below the {size} training images, got {self.val_size}")
            order = permutation(size, self.split_seed)
            for name, part in (("train", order[self.val_size :]), ("val", order[: self.val_size])):
                index = part.sort().values
                self.splits[name] = Samples(whole.images[index], whole.labels[index], whole.digest)
        if stage in (None, "test", "predict") and "test" not in self.splits:
            self.splits["test"] = load_mnist("t10k")

    def train_dataloader(self) -> DataLoader[Batch]:
        """Shuffled by the run's seed and the epoch; with `overfit_batches`, in order."""
        overfit = bool(self.trainer and self.trainer.overfit_batches)
        loader = self._loader("train", self.global_batch, shuffle=not overfit)
        assert isinstance(loader.sampler, GlobalBatchSampler)
        loader.sampler.resume_at(self._consumed)
        self._consumed = 0
        return loader

    def val_dataloader(self) -> list[DataLoader[Batch]]:
        """None or one loader over the images held out."""
        return [self._eval_loader("val")] if self.val_size else []

    def test_dataloader(self) -> DataLoader[Batch]:
        """The official test set, in its order."""
        return self._eval_loader("test")

    def predict_dataloader(self) -> DataLoader[Batch]:
        """The official test set, in its order."""
        return self._eval_loader("test")

    def state_dict(self) -> dict[str, int | str]:
        """What a checkpoint holds of the data: the position in the epoch, and what it would mean nothing without."""
        assert self.trainer is not None
        # Inside an epoch; at its end, after its last batch, the position is the next one's beginning.
        batches = (self.trainer.fit_loop.epoch_loop.batch_idx + 1) % max(1, self.trainer.num_training_batches)
        return {"consumed": batches * self.global_batch, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, int | str]) -> None:
        """Go on from the position, when fitting.

        Raises:
            UserError: If this run's seed, global batch, split or data are not the checkpoint's; both are named.
        """
        assert self.trainer is not None
        if self.trainer.state.fn == "fit":
            self.check_resumable(state_dict)
            self._consumed = int(state_dict["consumed"])

    def check_resumable(self, state_dict: dict[str, int | str]) -> None:
        """Refuse a checkpoint of other data, or of another order of them (see `load_state_dict`)."""
        for name, ours in self._identity().items():
            theirs = state_dict.get(name)
            if ours != theirs and ours is not None:
                raise UserError(
                    f"{name}={ours}, but the checkpoint was written with {theirs} and cannot go on with another: "
                    f"{_REMEDY.get(name, f'give --{name} {theirs}')}, or begin a new run without --ckpt_path"
                )

    def _identity(self) -> dict[str, int | str | None]:
        """What may not change between stop and go, under the names of the options that set it."""
        return {
            "data.global_batch_size": self.global_batch,
            "data.val_size": self.val_size,
            "data.split_seed": self.split_seed,
            "seed_everything": self._order_seed(),
            "data": self.splits["train"].digest if "train" in self.splits else None,
        }

    def _eval_loader(self, split: str) -> DataLoader[Batch]:
        return self._loader(split, self.eval_batch_size * self.world_size, shuffle=False)

    def _loader(self, split: str, global_batch: int, shuffle: bool) -> "_Loader":
        samples = self.splits[split]
        sampler = GlobalBatchSampler(
            len(samples.labels), global_batch, self.world_size, self.rank, self._order_seed(), shuffle
        )
        return _Loader(_InMemory(samples.images, samples.labels), batch_size=None, sampler=sampler)

    def _order_seed(self) -> int:
        """The run's seed, as `seed_everything` left it and Lightning's own samplers read it, the same on every rank."""
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        return self.trainer.strategy.broadcast(seed) if self.trainer else seed


class _Loader(DataLoader[Batch]):
    """A loader without workers, whose position the data module keeps: state of its own would be lost (Lightning 20550).

    For `batch_size=None`.
    """

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # DataLoader's own has a profiler range a batch
        return map(self.dataset.__getitem__, self.sampler)

    def state_dict(self) -> dict[str, int]:
        """Empty: it is here to tell Lightning that an epoch can be resumed inside."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Nothing: see `MNISTDataModule.load_state_dict`."""


class _InMemory(Dataset[Batch]):
    """A data set that is asked for one rank's part of a global batch at a time."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, part: Part) -> Batch:
        return Batch(
            self.images.index_select(0, part.index), self.labels.index_select(0, part.index), part.index, part.scale
        )
