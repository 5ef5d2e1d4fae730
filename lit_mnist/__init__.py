"""lit-mnist: one model, many machines, with PyTorch Lightning.

Names are imported when first used, so that importing the package costs nothing and configures nothing.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_mnist.data import MNISTDataModule
    from lit_mnist.model import ToyModel
    from lit_mnist.module import LitMNIST

__all__ = ["LitMNIST", "MNISTDataModule", "ToyModel", "main"]

_HOMES = {"LitMNIST": "module", "MNISTDataModule": "data", "ToyModel": "model"}


def main(args: list[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: What would be typed after `lit-mnist`, e.g. `["fit", "--trainer.max_epochs", "1"]`. None: `sys.argv[1:]`.

    Raises:
        SystemExit: With status 2 for what the user typed, 1 for a run that failed, 75 for one that stopped on request.
        KeyboardInterrupt: If `args` are given and Ctrl-C ends a run of one process.
    """
    from lit_mnist.signals import StopRequests

    requests = StopRequests()
    if args is None:  # a process of its own, not a call from a script or a notebook, whose signals are theirs
        _open_streams()
        requests.take()  # before the seconds that the next import takes

    from lit_mnist.cli import run

    run(args, requests)


def _open_streams() -> None:
    """Let standard streams that are closed lead nowhere, before the next file that is opened takes their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"lit_mnist.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'lit_mnist' has no attribute {name!r}")
