"""The run's folder."""

import os
from collections.abc import Iterable
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lit_mnist.errors import UserError
from lit_mnist.metrics_csv import MetricsCSV


class RunFolder(Callback):
    """Gives a run its folder, and puts its logs and checkpoints there.

    The folder is made when the processes have met and the data are there, so that a command that fails before leaves
    nothing, and not at all with `fast_dev_run`; rank 0 chooses and tells the others. It is `<root>/<job>` or
    `<root>/<job>_<task>` under SLURM, else the first free `<root>/version_<N>`.

    Args:
        root: The folder of runs.
        default_loggers: Whether to log to CSV and TensorBoard files in the folder.
    """

    def __init__(self, root: Path, default_loggers: bool) -> None:
        self.root = root
        self.default_loggers = default_loggers
        self.path: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the folder at the first stage of a command; a test after a fit stays in it."""
        if self.path is not None or trainer.fast_dev_run:
            return
        problem = None
        if trainer.is_global_zero:
            try:
                self.path = _claim(self.root)
            except OSError as error:
                problem = f"trainer.default_root_dir={self.root} cannot be written ({error.strerror}): choose another"
        self.path, problem = trainer.strategy.broadcast((self.path, problem))
        if problem or self.path is None:
            raise UserError(problem)
        if self.default_loggers and stage != "predict":
            trainer.loggers = [MetricsCSV(self.path), TensorBoardLogger(self.path, name="", version="")]
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(self.path / "checkpoints")


def _claim(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name in _names(root):
        try:
            (root / name).mkdir()
        except FileExistsError:
            continue
        return root / name
    raise AssertionError("names are endless")


def _names(root: Path) -> Iterable[str]:
    if SLURMEnvironment.detect():
        job = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ["SLURM_JOB_ID"]
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        job = f"{job}_{task}" if task else job
        yield job
        yield from (f"{job}.{n}" for n in range(1, 1_000_000))
    taken = [int(path.name.removeprefix("version_")) for path in root.glob("version_*") if path.name[8:].isdigit()]
    yield from (f"version_{n}" for n in range(max(taken, default=-1) + 1, 1_000_000))
