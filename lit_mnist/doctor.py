"""`lit-mnist doctor`: whether a launch will work, in the place of `fit`, and why not."""

import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from rich.console import Console
from rich.markup import escape
from torch.utils.data import DataLoader

from lit_mnist import launch, measure
from lit_mnist.batch import Batch
from lit_mnist.checks import ALONE, FAIL, MEASURED, TOGETHER, Case, Line, look
from lit_mnist.data import MNISTDataModule
from lit_mnist.errors import FinishedError, RunError, UserError
from lit_mnist.examination import examine
from lit_mnist.module import LitMNIST
from lit_mnist.peers import Peers
from lit_mnist.resume import appears
from lit_mnist.surroundings import is_first_of_host, is_rank_0
from lit_mnist.wire import LOOK_CLOSER

_TRAINING_S = 2.0  # seconds that the short training may last, about
_STEPS = 5, 50  # at least and at most
# Between a weight of many ranks and of one after so many steps of Adam; and where numbers have few bits
_TOLERANCE, _ROUGH_TOLERANCE = 1e-4, 5e-2
_COLOURS = {"ok": "green", "warning": "yellow", "fail": "red"}
T = TypeVar("T")


class Doctor(Callback):
    """Examines a launch in three stages: each process alone, all together, all in a short training.

    What is found is printed as soon as it is known, on rank 0, or where a process cannot come to it.

    Args:
        root: The folder of runs.
        file: Where all that is known is written to, as JSON; None: nowhere.

    Raises:
        UserError: If its folder cannot be written to.
    """

    def __init__(self, root: Path, file: Path | None) -> None:
        if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
            raise UserError(f"json={file} cannot be written: give a file in a folder that can be written to")
        self.root = root
        self.file = file
        self.console = Console(highlight=False)
        self.facts = examine(root, os.environ)
        self.options: dict[str, str] = {}
        self.lines: list[Line] = []
        self.case: Case | None = None
        self.peers = Peers()
        self._since = time.monotonic()
        self._met_at = 0.0
        self._before: LitMNIST | None = None
        self._reduced = measure.Reduced(True, {})
        self._compute_s = 0.0
        self._steps = 0
        self._indices: list[torch.Tensor] = []
        self._times: list[float] = []

    @property
    def status(self) -> int:
        """Exit status: 1 where something failed."""
        return int(any(line.state == FAIL for line in self.lines))

    def refuse(self, error: Exception) -> NoReturn:
        """Say that the launch cannot begin, or that the ranks could not come together, and end."""
        if str(error) and is_first_of_host(os.environ):  # its remedy is in it; empty: another rank says it
            self._say([Line("launch", FAIL, str(error).removesuffix(LOOK_CLOSER))])
        raise FinishedError(1)

    def look_alone(self, trainer: Trainer, model: LitMNIST) -> None:
        """The first stage; ends where the others would be waited for in vain."""
        run = launch.describe(trainer)
        self.case = Case(run, [self.facts], params=sum(p.numel() for p in model.parameters()))
        lines = look(ALONE, self.case)
        is_vain = any(finding.is_fatal for finding in launch.findings(run))
        if is_rank_0(os.environ):
            self._say(lines)
        elif is_vain and is_first_of_host(os.environ):
            self._say([line for line in lines if line.state == FAIL])
        if is_vain:
            raise FinishedError(1)

    def met(self, peers: Peers) -> None:
        """All ranks have met: `peers` are they."""
        self.peers = peers
        self._met_at = time.monotonic()

    def examine(self, trainer: Trainer, model: LitMNIST, data: MNISTDataModule) -> NoReturn:
        """The other stages, as the training of a few steps; ends with the status."""
        self._since = time.monotonic()
        try:
            trainer.fit(model, datamodule=_Examined(self, data))
        except (UserError, RunError) as error:
            self.refuse(error)
        raise FinishedError(self.status)

    def look_together(self, trainer: Trainer) -> None:
        """The second stage, once the process group is there; ends on all ranks where one of them found a failure."""
        case = self.case
        assert case is not None
        if self.peers.roll:
            case.roll, case.meeting_s = self.peers.roll, self._met_at - self._since
            case.group_s = time.monotonic() - self._met_at
        case.seen = _gathered(trainer, self._sees_folder(trainer))
        known = _gathered(trainer, (self.facts, self.options, _master(trainer)))
        case.ranks, case.configs, case.masters = map(list, zip(*known, strict=True))
        if trainer.is_global_zero:
            self._say(self._of_others(case))
            self._say(look(TOGETHER, case))
        if trainer.strategy.broadcast(self.status):
            raise FinishedError(1)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LitMNIST)
        assert isinstance(trainer.datamodule, _Examined)
        data = trainer.datamodule.data
        self._before = measure.twin(pl_module)
        gradient = measure.gradient_bytes(pl_module)
        if trainer.world_size > 1:
            self._reduced = measure.reduce_between(trainer.world_size, gradient, pl_module.device)
        size = max(1, data.global_batch // trainer.world_size)
        images, labels, _ = data.splits["train"]
        trainer.strategy.barrier()  # so that all are busy, as in training
        self._compute_s = measure.compute_alone(pl_module, images[:size], labels[:size])
        step = self._compute_s + self._reduced.seconds.get(gradient, 0.0)
        least, most = _STEPS
        self._steps = trainer.strategy.broadcast(max(least, min(most, int(_TRAINING_S / step))))
        pl_module.eval()  # dropout draws differ between ranks, and one process makes none of theirs

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        self._indices.append(batch.index.cpu())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._times.append(time.perf_counter())
        if len(self._times) == self._steps:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The third stage."""
        case = self.case
        assert case is not None
        assert isinstance(pl_module, LitMNIST)
        assert isinstance(trainer.datamodule, _Examined)
        data = trainer.datamodule.data
        known = _gathered(trainer, (self._compute_s, self._indices, measure.digest(pl_module)))
        if not trainer.is_global_zero:
            return
        assert self._before
        parts = [indices for _, indices, _ in known]
        samples = sum(len(index) for indices in parts for index in indices[1:])
        gaps = sorted(b - a for a, b in zip(self._times, self._times[1:], strict=False)) or [self._compute_s]
        alone = measure.repeat_alone(self._before, _global_batches(data, parts))
        case.measured = measure.Measured(
            is_reduced_right=self._reduced.is_right,
            reduce_s=self._reduced.seconds,
            compute_s=[seconds for seconds, _, _ in known],
            step_s=gaps[len(gaps) // 2],
            samples_per_s=samples / sum(gaps),
            steps=len(self._times),
            steps_per_epoch=int(trainer.num_training_batches),
            weights=[digest for _, _, digest in known],
            difference=measure.largest_difference(pl_module, alone),
            tolerance=_TOLERANCE if trainer.precision in ("32-true", "64-true") else _ROUGH_TOLERANCE,
            gradient=measure.gradient_bytes(pl_module),
        )
        self._say(look(MEASURED, case))

    def _of_others(self, case: Case) -> list[Line]:
        """What the first stage found on other ranks, where that was not well."""
        lines: list[Line] = []
        for rank, facts in enumerate(case.ranks[1:], start=1):
            for line in look(ALONE[1:], replace(case, ranks=[facts])):
                same = any((line.check, line.remedy) == (known.check, known.remedy) for known in self.lines)
                if line.state != "ok" and not same:
                    lines.append(replace(line, value=f"{case.who(rank)}: {line.value}"))
        return lines

    def _sees_folder(self, trainer: Trainer) -> bool:
        """Whether this rank sees what rank 0 writes to the folder of runs; True where it cannot write there."""
        mark: Path | None = None
        made = False
        if trainer.is_global_zero and not self.facts.folder_problem:
            made = not self.root.exists()
            self.root.mkdir(parents=True, exist_ok=True)
            mark = self.root.resolve() / f".doctor-{secrets.token_hex(8)}"
            mark.touch()
        mark = trainer.strategy.broadcast(mark)
        sees = mark is None or appears(mark)
        trainer.strategy.barrier()
        if trainer.is_global_zero and mark:
            mark.unlink()
            if made:
                self.root.rmdir()
        return sees

    def _say(self, lines: Sequence[Line]) -> None:
        for line in lines:
            colour = _COLOURS[line.state]
            self.console.print(f"[{colour}]{line.state:<8}[/] {line.check:<14}", escape(line.value), soft_wrap=True)
            if line.remedy:
                self.console.print(f"{'':<23}", f"[bold]{escape(line.remedy)}[/]", soft_wrap=True)
        self.lines += lines
        if self.file and lines and is_rank_0(os.environ):
            self._write(self.file)

    def _write(self, file: Path) -> None:
        case = self.case
        known = {
            "when": f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
            "status": self.status,
            "lines": [asdict(line) for line in self.lines],
            "ranks": [asdict(facts) for facts in (case.ranks if case else [self.facts])],
            "roll": [{"rank": m.rank, "host": m.host, "address": m.address} for m in (case.roll if case else [])],
            "measured": asdict(case.measured) if case and case.measured else None,
        }
        temporary = file.with_name(f".{file.name}.partial")
        temporary.write_text(json.dumps(known, indent=1) + "\n")
        os.replace(temporary, file)


class _Examined(LightningDataModule):
    """The data of the short training, which are read after all ranks have compared what they are."""

    def __init__(self, doctor: Doctor, data: MNISTDataModule) -> None:
        super().__init__()
        self.doctor = doctor
        self.data = data

    def setup(self, stage: str) -> None:
        assert self.trainer
        self.doctor.look_together(self.trainer)
        self.data.trainer = self.trainer
        self.data.setup(stage)

    def train_dataloader(self) -> DataLoader[Batch]:
        return self.data.train_dataloader()


def _master(trainer: Trainer) -> str:
    """The name of rank 0's host, and the address it has here; empty for one process."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is None:
        return ""
    name = environment.main_address
    try:
        return f"{name} = {socket.gethostbyname(name)}"
    except OSError:
        return f"{name}, which has no address here"


def _gathered(trainer: Trainer, value: T) -> list[T]:
    """The values of all ranks, in order."""
    if trainer.world_size == 1:
        return [value]
    values: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(values, value)
    return values


def _global_batches(data: MNISTDataModule, parts: list[list[torch.Tensor]]) -> list[Batch]:
    """Whole global batches, from the indices of each rank's part of each."""
    images, labels, _ = data.splits["train"]
    indices = [torch.cat(of_step) for of_step in zip(*parts, strict=True)]
    return [Batch(images[index], labels[index], index, 1 / len(index)) for index in indices]
