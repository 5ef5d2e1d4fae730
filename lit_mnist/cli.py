"""The command line: LightningCLI's fit, validate, test and predict, with the run's folder, plan and result around."""

import inspect
import logging
import os
import sys
import warnings
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from lit_mnist.checkpoints import AtomicCheckpointIO, LastCheckpoint
from lit_mnist.data import MNISTDataModule
from lit_mnist.doctor import Doctor
from lit_mnist.ending import run_to_its_end
from lit_mnist.errors import RunError, UserError, one_line, user_mistakes
from lit_mnist.launch import cluster_environment, require_devices
from lit_mnist.module import LitMNIST
from lit_mnist.peers import Peers
from lit_mnist.predictions import PredictionWriter
from lit_mnist.preemption import StopOnRequest
from lit_mnist.profiling import NoProfiler
from lit_mnist.rehearsal import rehearse
from lit_mnist.report import Report, progress_bar
from lit_mnist.resume import RunFolder, Start, find_start, is_finished
from lit_mnist.signals import StopRequests
from lit_mnist.strategy import require_processes_of_their_own, watch_ddp
from lit_mnist.surroundings import require_numbers
from lit_mnist.wire import age

_LEAST_WAIT = 5.0  # seconds
_LONGEST_WAIT = 1_000_000  # seconds: eleven days
# The short training of the doctor: it ends by itself, keeps nothing, and makes plain steps.
_FEW_STEPS = {
    **dict.fromkeys(("min_epochs", "min_steps", "max_time", "gradient_clip_val", "callbacks", "profiler")),
    **{"max_epochs": 1, "max_steps": -1, "limit_val_batches": 0, "num_sanity_val_steps": 0},
    **{"accumulate_grad_batches": 1, "fast_dev_run": False, "enable_progress_bar": False},
}
_PARSER = {"default_env": True, "env_prefix": "LIT_MNIST", "allow_abbrev": False}


def run(args: list[str] | None, requests: StopRequests) -> None:
    """Run one command (see `lit_mnist.main`)."""
    stop = StopOnRequest(requests)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # the plan says what their lines would
    with warnings.catch_warnings():
        for pattern in (
            ".*does not have many workers.*",  # our loaders read memory
            ".*`srun` command is available.*",  # `launch.CHECKS` says so where it matters
            ".*LeafSpec.*",  # Lightning calls what torch deprecates ...
            "(?s).*JsonargparseDeprecationWarning",  # ... and what jsonargparse does:
            "(?s).*was deprecated in v4",  # the first such warning reads otherwise than the next
            ".*callbacks used to create the checkpoint.*",  # evaluation needs none of a training's callbacks
            ".*Checkpoint directory .* exists and is not empty",  # a run that is continued
            ".*but have no `val_dataloader`.*",  # the doctor validates nothing
            ".*dirpath has changed.*",  # each run has its folder, also when it starts from another's checkpoint
        ):
            warnings.filterwarnings("ignore", pattern)
        status = run_to_its_end(
            stop,
            partial(
                _CommandLine,
                LitMNIST,
                MNISTDataModule,
                args=args,
                trainer_class=_Trainer,
                stop=stop,
                parser_class=_Parser,
                parser_kwargs={
                    "description": "Train one model on MNIST, on one process or on many machines.",
                    **_PARSER,
                    **{name: dict(_PARSER) for name in _CommandLine.subcommands()},
                },
                trainer_defaults={"default_root_dir": "runs", "max_epochs": 10, "enable_model_summary": False},
                seed_everything_default=0,
                save_config_callback=_SaveConfig,
                save_config_kwargs={"save_to_log_dir": False},
                auto_configure_optimizers=False,
            ),
            is_own_process=args is None,
        )
    if status:
        sys.exit(status)


class _Trainer(Trainer):
    """Lightning's Trainer: devices, precision, length of the run, and much more."""

    # It reads checkpoints as plain data, and the first lines of its methods are the commands' help.

    def fit(self, *args: Any, ckpt_path: str | None = None, **kwargs: Any) -> None:
        """Train on the training images, validate after each epoch, and test the best checkpoint at the end.

        Args:
            ckpt_path: A checkpoint's file to start from, in a new run; `last`: go on with the newest run, in its folder
                (begin, where there is none). What is typed wins over the hyperparameters in it.
        """
        super().fit(*args, **_plain(kwargs), ckpt_path=ckpt_path)

    def validate(self, *args: Any, ckpt_path: str | None = None, **kwargs: Any) -> Any:
        """Loss and accuracy of a checkpoint on the images held out for validation.

        Args:
            ckpt_path: The checkpoint's file; `last`: the newest of the newest run. None: untrained weights.
        """
        return super().validate(*args, **_plain(kwargs), ckpt_path=ckpt_path, verbose=False)

    def test(self, *args: Any, ckpt_path: str | None = None, **kwargs: Any) -> Any:
        """Loss and accuracy of a checkpoint on the 10,000 official test images.

        Args:
            ckpt_path: The checkpoint's file; `last`: the newest of the newest run. None: untrained weights.
        """
        return super().test(*args, **_plain(kwargs), ckpt_path=ckpt_path, verbose=False)

    def predict(self, *args: Any, ckpt_path: str | None = None, **kwargs: Any) -> Any:
        """Write predictions.csv: each test image's digit and ten probabilities, by a checkpoint.

        Args:
            ckpt_path: The checkpoint's file; `last`: the newest of the newest run. None: untrained weights.
        """
        return super().predict(*args, **_plain(kwargs), ckpt_path=ckpt_path, return_predictions=False)

    def doctor(self, model: Any, datamodule: Any, ckpt_path: str | None = None, json: Path | None = None) -> None:
        """Know in a minute whether this launch will work, and why not: type it in the place of fit.

        Args:
            ckpt_path: As for fit; not read.
            json: A file for all that is found, to be pasted into a report.
        """
        next(callback for callback in self.callbacks if isinstance(callback, Doctor)).examine(self, model, datamodule)


def _plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "weights_only": True}


class _CommandLine(LightningCLI):
    """LightningCLI with the checkpoint's hyperparameters as defaults, and this project's callbacks."""

    def __init__(self, *args: Any, stop: StopOnRequest, **kwargs: Any) -> None:
        self.stop = stop
        self.subparsers: list[LightningArgumentParser] = []
        self.ckpt_path: str | None = None
        self.start = Start()
        self.examiner: Doctor | None = None
        try:
            super().__init__(*args, **kwargs)
        except (UserError, RunError) as error:
            if self.examiner is None:
                raise
            self.examiner.refuse(error)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, and `doctor`."""
        return {**LightningCLI.subcommands(), "doctor": {"model", "datamodule"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        self.subparsers.append(parser)
        parser.add_class_arguments(LastCheckpoint, "checkpoint")
        is_doctors = list(self.subcommands())[len(self.subparsers) - 1] == "doctor"
        parser.add_argument(
            "--timeout",
            type=float,
            default=60.0 if is_doctors else 120.0,
            help="Seconds since the start after which the answer is there, whatever the other processes do."
            if is_doctors
            else "Seconds after which a wait for another process of the run is given up: to meet at the start, to give "
            "a sign of life, to come to a collective. To be above the longest that one may let the others wait, as by "
            "writing a large checkpoint.",
        )
        parser.set_defaults(
            {
                "model.network": {"class_path": "lit_mnist.ToyModel"},
                "model.optimizer": {"class_path": "torch.optim.Adam", "init_args": {"fused": True}},
            }
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse; given a checkpoint, again with its hyperparameters as defaults, so that what is typed wins."""
        with user_mistakes():
            self.config = parser.parse_args(args)
            options = self.config[self.config.subcommand]
            root = Path(options.trainer.default_root_dir)
            if self.config.subcommand == "doctor":
                self.examiner = Doctor(root, options.json)
                self.examiner.options = {k: str(v) for k, v in vars(options.as_flat()).items() if k != "config"}
            else:
                self.ckpt_path = options.ckpt_path
            self.start = find_start(self.ckpt_path, root)
            if self.start.checkpoint is not None:
                self._set_defaults(self.start.checkpoint["hyper_parameters"])
                self.config = parser.parse_args(args)
            # Lightning would let the checkpoint's hyperparameters override what was typed.
            self.config[self.config.subcommand].ckpt_path = None
            seed = options.seed_everything
            if not isinstance(seed, bool) and not 0 <= seed < 2**32:
                raise UserError(f"seed_everything={seed}: expected 0 ... {2**32 - 1}")
            if not 0 < options.timeout <= _LONGEST_WAIT:
                raise UserError(f"timeout={options.timeout:g}: expected seconds above 0, {_LONGEST_WAIT:,} at most")

    def _set_defaults(self, hyperparameters: dict[str, Any]) -> None:
        subparser = self.subparsers[list(self.subcommands()).index(self.config.subcommand)]
        for name, value in hyperparameters.items():
            if name != "_instantiator":
                try:
                    subparser.set_defaults({f"model.{name}": value})
                except KeyError:
                    raise UserError(
                        f"ckpt_path={self.start.path}: LitMNIST has no {name}, which is in it: use another"
                    ) from None

    def before_instantiate_classes(self) -> None:
        options = self.config[self.subcommand]
        if self.ckpt_path != "last":  # the config saved to a folder must not mean that folder
            options.ckpt_path = self.ckpt_path
        require_numbers(os.environ)
        require_devices(options.trainer.accelerator, options.trainer.devices)
        require_processes_of_their_own(options.trainer.strategy)

    def instantiate_classes(self) -> None:
        with user_mistakes():
            super().instantiate_classes()

    def after_instantiate_classes(self) -> None:
        if self.examiner:
            self.examiner.look_alone(self.trainer, self.model)
        else:
            self.report.before(self.trainer)
        stage = "fit" if self.examiner else self.subcommand
        with user_mistakes():
            rehearse(self.model, self.datamodule, self.trainer, self.start, stage)
        self.config_init[self.subcommand].ckpt_path = self.start.path

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        given = self.config_init[self.subcommand].trainer
        default_loggers = given.logger in (None, True)
        continued = self.start if self.subcommand == "fit" else replace(self.start, folder=None)
        self.folder = RunFolder(Path(given.default_root_dir), default_loggers, continued)
        self.report = Report(self.folder, self.start)
        self.best: ModelCheckpoint | None = None
        callbacks = [self.folder, *_listed(given.callbacks), self.report]
        last = None
        if self.examiner:
            for name, value in _FEW_STEPS.items():
                given[name] = value
            callbacks, default_loggers = [self.examiner], True
        elif self.subcommand == "fit":
            if self.datamodule.val_size == 0:
                given.limit_val_batches = 0
            if given.enable_checkpointing is not False:
                if given.limit_val_batches != 0:
                    self.best = ModelCheckpoint(
                        filename="best", monitor="val_acc", mode="max", enable_version_counter=False
                    )
                last = self.config_init.fit.checkpoint
                callbacks += [*_listed(self.best), last]
        elif self.subcommand == "predict":
            self.predictions = PredictionWriter(self.folder)
            callbacks.append(self.predictions)
        # What is stopped with nothing to keep, or with processes that cannot agree, ends at once.
        seconds = self.config_init[self.subcommand].timeout
        if self.examiner:  # who waits for an answer, not for a part of it
            seconds = max(_LEAST_WAIT, round(seconds - age()))
        timeout = timedelta(seconds=seconds)
        is_watched = watch_ddp(given.strategy, timeout, self._met)
        if self.examiner and not is_watched:
            raise UserError(f"trainer.strategy={given.strategy}: the doctor examines ddp: leave it out for the doctor")
        self.stop.listen(last if is_watched and not given.fast_dev_run else None)
        callbacks.append(self.stop)
        bar = progress_bar() if given.enable_progress_bar is not False else None
        return super().instantiate_trainer(
            callbacks=callbacks + _listed(bar),
            plugins=[*_listed(given.plugins), *_listed(cluster_environment()), AtomicCheckpointIO()],
            enable_progress_bar=bar is not None,
            enable_checkpointing=True,
            profiler=given.profiler or NoProfiler(),
            logger=False if default_loggers else given.logger,
            **kwargs,
        )

    def _met(self, peers: Peers) -> None:
        self.stop.met(peers)
        if self.examiner:
            self.examiner.met(peers)

    def before_fit(self) -> None:
        """End at once where the run to continue is finished."""
        given = self.config_init.fit.trainer
        checkpoint = self.start.checkpoint if self.start.folder else None
        if checkpoint and is_finished(checkpoint, given.max_epochs, given.max_steps) and self.folder.is_tested:
            self.report.finished(self.start)
            sys.exit(0)

    def after_fit(self) -> None:
        """Test the best checkpoint of this run, or the last, and say what came out."""
        if self.trainer.fast_dev_run:
            return
        last = self.config_init.fit.checkpoint.path
        best = self.best
        if best is None or not best.best_model_path or Path(best.best_model_path).parent != Path(best.dirpath):
            best = None  # none was written: no validation came, or it was another run's
        self.trainer.test(self.model, datamodule=self.datamodule, ckpt_path=best.best_model_path if best else last)
        self.report.result(self.trainer, best, last)
        self.folder.release()

    def after_validate(self) -> None:
        """Say what came out."""
        self.report.result(self.trainer)
        self.folder.release()

    after_test = after_validate

    def after_predict(self) -> None:
        """Say where the predictions are."""
        self.report.result(self.trainer, predictions=self.predictions)
        self.folder.release()


class _Parser(LightningArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        groups = {"trainer": Trainer, "model": LitMNIST, "data": MNISTDataModule, "checkpoint": LastCheckpoint}
        keys = [f"{group}.{name}" for group, kind in groups.items() for name in inspect.signature(kind).parameters]
        raise UserError(one_line(message, keys)) from ex


class _SaveConfig(SaveConfigCallback):
    """Saves the whole config to the run's folder."""

    def save_config(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, RunFolder) and callback.path is not None:
                self.parser.save(self.config, callback.path / "config.yaml", skip_none=False, overwrite=True)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
