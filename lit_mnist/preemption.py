"""Stop on request: the ranks agree on a step, its checkpoint is written, and under SLURM the job is queued again."""

import os
import re
import shutil
import signal
import subprocess
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from lit_mnist.checkpoints import LastCheckpoint, ends_in_validation
from lit_mnist.peers import Peers
from lit_mnist.signals import StopRequests
from lit_mnist.surroundings import is_rank_0, slurm_job

STOPPED = 75  # exit status: EX_TEMPFAIL of sysexits.h, "the user is invited to retry"


class StoppedError(Exception):
    """The run stops where all ranks agreed to, on request."""


class StopOnRequest(Checkpoint):
    """Asks, wherever a run could go on from, whether to stop; the checkpoint of that step is written then.

    These points are the ends of optimiser steps that no validation follows at once, the ends of epochs and, when the
    best checkpoint is tested at last, the ends of batches. A `Checkpoint`, so that it comes after all other callbacks.

    Args:
        requests: Where requests come in.
    """

    def __init__(self, requests: StopRequests) -> None:
        self.requests = requests
        self.peers = Peers()
        self.last: LastCheckpoint | None = None
        self._seen_step = 0

    def met(self, peers: Peers) -> None:
        """All ranks have met: `peers` are they."""
        self.peers = peers
        if self.requests.received:  # it came before
            (self._request if self.last else self._end)(self.requests.received)

    def listen(self, last: LastCheckpoint | None) -> None:
        """Take requests from now on.

        Args:
            last: What writes the checkpoint; None: nothing is to be kept, and a request ends the process at once.
        """
        self.last = last
        self.requests.listen(self._request if last else self._end)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen_step = trainer.global_step
        self.peers.at(f"step {trainer.global_step}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._seen_step:
            return  # inside an accumulated step, whose gradients no checkpoint holds
        self._seen_step = trainer.global_step
        self.peers.at(f"step {self._seen_step}")
        if not ends_in_validation(trainer, batch_idx):
            self._ask(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.peers.at(f"step {trainer.global_step}")
        self._ask(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.peers.at(f"validation after step {trainer.global_step}")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.peers.at("the test")

    def on_test_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.last and not self.peers.may_go_on():
            raise StoppedError("the test")

    def _ask(self, trainer: Trainer) -> None:
        if self.last and not self.peers.may_go_on():
            self.last.save(trainer)
            raise StoppedError(f"step {trainer.global_step:,}")

    def _request(self, received: signal.Signals) -> None:
        self.peers.request_stop(received)

    def _end(self, received: signal.Signals) -> None:
        self.peers.fail(f"ended by {received.name}", is_said=is_rank_0(os.environ))  # where it was acknowledged
        os._exit(self.peers.see_off(128 + received))


def requeue(reason: str) -> tuple[bool, str]:
    """Have SLURM queue the job that this process is of once more.

    Args:
        reason: Who asked to stop. A person's Ctrl-C (SIGINT) is no reason.

    Returns:
        Whether it will run again, and what to say about it.
    """
    job = slurm_job(os.environ)
    if job is None or reason.startswith("SIGINT"):
        return False, "run the same command again to go on"
    if shutil.which("scontrol") is None:
        return False, f"scontrol is not here, so the batch script has to requeue job {job} on exit status {STOPPED}"
    shown = subprocess.run(["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True)
    state = re.search(r"JobState=(\S+)", shown.stdout)
    if state and state[1] != "RUNNING":
        return False, f"SLURM itself ends job {job} ({state[1].lower()}), which is not requeued from here"
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    if done.returncode:
        return False, f"job {job} could not be requeued: {' '.join((done.stderr or done.stdout).split())}"
    return True, f"job {job} is requeued and goes on by itself"
