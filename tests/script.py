"""A script as a person writes one, with a Trainer of its own: `script.py HOW`, for tests/test_ending.py."""

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, Trainer

from lit_mnist import LitMNIST, MNISTDataModule
from lit_mnist.strategy import WatchedDDP

BOUND = timedelta(seconds=60)  # the start of the other has to fit into it


class Fail(Callback):
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1:
            if sys.argv[1] == "raise":
                raise ValueError("planted")
            if sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    trainer = Trainer(
        strategy=WatchedDDP(BOUND),
        accelerator="cpu",
        devices=2,
        max_steps=10,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Fail()],
    )
    trainer.fit(LitMNIST(), MNISTDataModule())
    if trainer.global_rank == 0:
        time.sleep(3)
    print("done", flush=True)


if __name__ == "__main__":
    main()
