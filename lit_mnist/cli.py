"""The command line: LightningCLI's fit, validate, test and predict, with the run's folder, plan and result around."""

import difflib
import errno
import inspect
import logging
import re
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_mnist.checkpoints import AtomicCheckpointIO, checkpoint_callbacks, load_checkpoint
from lit_mnist.data import MNISTDataModule
from lit_mnist.errors import RunError, UserError
from lit_mnist.launch import require_devices
from lit_mnist.module import LitMNIST
from lit_mnist.predictions import PredictionWriter
from lit_mnist.report import Report, progress_bar
from lit_mnist.resume import RunFolder

_PARSER = {"default_env": True, "env_prefix": "LIT_MNIST", "allow_abbrev": False}


def run(args: list[str] | None) -> None:
    """Run one command (see `lit_mnist.main`)."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # the plan says what their lines would
    with warnings.catch_warnings():
        for pattern in (
            ".*does not have many workers.*",  # our loaders read memory
            ".*LeafSpec.*",  # Lightning calls what torch deprecates ...
            "(?s).*JsonargparseDeprecationWarning",  # ... and what jsonargparse does:
            "(?s).*was deprecated in v4",  # the first such warning reads otherwise than the next
            ".*callbacks used to create the checkpoint.*",  # evaluation needs none of a training's callbacks
            ".*dirpath has changed.*",  # each run has its folder, also when it starts from another's checkpoint
        ):
            warnings.filterwarnings("ignore", pattern)
        try:
            _CommandLine(
                LitMNIST,
                MNISTDataModule,
                args=args,
                trainer_class=_Trainer,
                parser_class=_Parser,
                parser_kwargs={
                    "description": "Train one model on MNIST, on one process or on many machines.",
                    **_PARSER,
                    **{name: dict(_PARSER) for name in LightningCLI.subcommands()},
                },
                trainer_defaults={"default_root_dir": "runs", "max_epochs": 10, "enable_model_summary": False},
                seed_everything_default=0,
                save_config_callback=_SaveConfig,
                save_config_kwargs={"save_to_log_dir": False},
                auto_configure_optimizers=False,
            )
        except UserError as error:
            _exit(2, str(error))
        except RunError as error:
            _exit(1, str(error))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
                raise
            _exit(1, f"{error.filename or 'a file of the run'} cannot be written ({error.strerror})")


class _Trainer(Trainer):
    """Lightning's Trainer, reading checkpoints as plain data; its methods' docstrings are the commands' help."""

    def fit(self, *args: Any, ckpt_path: str | None = None, **kwargs: Any) -> None:
        """Train on the training images, validate after each epoch, and test the best checkpoint at the end.

        Args:
            ckpt_path: A checkpoint to go on from. What is typed wins over the hyperparameters in it.
        """
        super().fit(*args, **_plain(kwargs), ckpt_path=ckpt_path)

    def validate(self, *args: Any, ckpt_path: str | None = None, **kwargs: Any) -> Any:
        """Loss and accuracy of a checkpoint on the images held out for validation.

        Args:
            ckpt_path: The checkpoint. None: weights as they are before training.
        """
        return super().validate(*args, **_plain(kwargs), ckpt_path=ckpt_path, verbose=False)

    def test(self, *args: Any, ckpt_path: str | None = None, **kwargs: Any) -> Any:
        """Loss and accuracy of a checkpoint on the 10,000 official test images.

        Args:
            ckpt_path: The checkpoint. None: weights as they are before training.
        """
        return super().test(*args, **_plain(kwargs), ckpt_path=ckpt_path, verbose=False)

    def predict(self, *args: Any, ckpt_path: str | None = None, **kwargs: Any) -> Any:
        """Write predictions.csv: each test image's digit and ten probabilities, by a checkpoint.

        Args:
            ckpt_path: The checkpoint. None: weights as they are before training.
        """
        return super().predict(*args, **_plain(kwargs), ckpt_path=ckpt_path, return_predictions=False)


def _plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "weights_only": True}


class _CommandLine(LightningCLI):
    """LightningCLI with the checkpoint's hyperparameters as defaults, and this project's callbacks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.subparsers: list[LightningArgumentParser] = []
        self.ckpt_path: str | None = None
        self.checkpoint: dict[str, Any] | None = None
        super().__init__(*args, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        self.subparsers.append(parser)
        parser.set_defaults(
            {
                "model.network": {"class_path": "lit_mnist.ToyModel"},
                "model.optimizer": {"class_path": "torch.optim.Adam", "init_args": {"fused": True}},
            }
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse; given a checkpoint, again with its hyperparameters as defaults, so that what is typed wins."""
        self.config = parser.parse_args(args)
        options = self.config[self.config.subcommand]
        self.ckpt_path = options.ckpt_path
        if self.ckpt_path is not None:
            self.checkpoint = load_checkpoint(self.ckpt_path)
            hyperparameters = {k: v for k, v in self.checkpoint["hyper_parameters"].items() if k != "_instantiator"}
            subparser = self.subparsers[list(self.subcommands()).index(self.config.subcommand)]
            try:
                subparser.set_defaults({f"model.{name}": value for name, value in hyperparameters.items()})
            except KeyError as error:
                raise UserError(
                    f"ckpt_path={self.ckpt_path}: its hyperparameter {error} is not one of LitMNIST's: use another"
                ) from None
            self.config = parser.parse_args(args)
        # Lightning would let the checkpoint's hyperparameters override what was typed.
        self.config[self.config.subcommand].ckpt_path = None

    def before_instantiate_classes(self) -> None:
        options = self.config[self.subcommand]
        options.ckpt_path = self.ckpt_path
        require_devices(options.trainer.accelerator, options.trainer.devices)

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except UserError:
            raise
        except (MisconfigurationException, ValueError, TypeError, ImportError) as error:
            raise UserError(_one_line(str(error))) from error

    def after_instantiate_classes(self) -> None:
        # What would fail on every rank fails here first, before other processes are started.
        self.datamodule.check_world_size(self.trainer.world_size)
        if self.checkpoint is not None:
            self.model.on_load_checkpoint(self.checkpoint)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        given = self.config_init[self.subcommand].trainer
        default_loggers = given.logger in (None, True)
        self.folder = RunFolder(Path(given.default_root_dir), default_loggers)
        self.report = Report(self.folder, self.ckpt_path)
        callbacks = [self.folder, *_listed(given.callbacks), self.report]
        if self.subcommand == "fit":
            if self.datamodule.val_size == 0:
                given.limit_val_batches = 0
            if given.enable_checkpointing is not False:
                callbacks += checkpoint_callbacks(validates=given.limit_val_batches != 0)
        elif self.subcommand == "predict":
            callbacks.append(PredictionWriter(self.folder))
        bar = progress_bar() if given.enable_progress_bar is not False else None
        return super().instantiate_trainer(
            callbacks=callbacks + _listed(bar),
            plugins=[*_listed(given.plugins), AtomicCheckpointIO()],
            enable_progress_bar=bar is not None,
            enable_checkpointing=self.subcommand == "fit" and given.enable_checkpointing,
            logger=False if default_loggers else given.logger,
            **kwargs,
        )

    def after_fit(self) -> None:
        """Test the best checkpoint, and say what came out."""
        if self.trainer.fast_dev_run:
            return
        written = [callback for callback in self.trainer.checkpoint_callbacks if callback.best_model_path]
        best = written[0] if written else None
        self.trainer.test(
            self.model,
            datamodule=self.datamodule,
            ckpt_path=best and best.best_model_path,
        )
        self.report.result(self.trainer, best)

    def after_validate(self) -> None:
        """Say what came out."""
        self.report.result(self.trainer)

    after_test = after_predict = after_validate


class _Parser(LightningArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        _exit(2, _one_line(message))


class _SaveConfig(SaveConfigCallback):
    """Saves the whole config to the run's folder."""

    def save_config(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        folder = next(callback for callback in trainer.callbacks if isinstance(callback, RunFolder)).path
        if folder is not None:
            self.parser.save(self.config, folder / "config.yaml", skip_none=False)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _one_line(message: str) -> str:
    """What a parser's message of many lines says: the key, the value, what would work."""
    unknown = re.search(r"unrecognized arguments: --(\S+)|[Oo]ption '(\S+)'", message)
    if unknown:
        key = (unknown[1] or unknown[2]).split("=")[0]
        groups = {"trainer": Trainer, "model": LitMNIST, "data": MNISTDataModule}
        keys = [f"{group}.{name}" for group, kind in groups.items() for name in inspect.signature(kind).parameters]
        close = difflib.get_close_matches(key, keys, n=1)
        return f"unknown option {key}; " + (f"did you mean {close[0]}?" if close else "--help lists the options")
    message = re.sub(r'^Parser key "([^"]+)":\s*', r"\1: ", message)
    key, given = (
        re.match(r"[\w.]+(?=: )", message),
        re.search(r"(?:Given value|Got value|import path string): (.*)", message),
    )
    where = f"{key[0]}={given[1]}: " if key and given else ""
    problem = re.search(r"Problem with given class_path '[^']+':\s*(?:- )?(.*)|callable class: (.*?)\. Got", message)
    if problem:
        return where + (problem[1] or problem[2])
    reasons = re.findall(r"^\s*- ((?!Expected|Does not validate).*)", message, re.MULTILINE)
    if reasons:
        return where + reasons[0]
    wanted = [
        _kind(kind) for kind in re.findall(r"Expected an? (?!path)(.*?)(?:\. Got value.*)?$", message, re.MULTILINE)
    ]
    return f"{where}expected {' or '.join(dict.fromkeys(wanted))}" if where and wanted else message


def _kind(expected: str) -> str:
    """A type as the parser names it, in words."""
    if expected.startswith("dot import path"):
        return "a class path"
    name = re.sub(r"<class '(.*)'>", r"\1", expected)
    return {"NoneType": "null"}.get(name, name.removeprefix("typing.").removeprefix("collections.abc."))


def _exit(status: int, message: str) -> NoReturn:
    rank = rank_zero_only.rank
    print(f"lit-mnist: error: {f'[rank {rank}] ' if rank else ''}{' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)
