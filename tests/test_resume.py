"""Stop it anyhow, run the same command again: same weights, same optimiser, same log, to the last bit."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from lit_mnist import LitMNIST, MNISTDataModule, main
from lit_mnist.checkpoints import LastCheckpoint
from tests.conftest import ENVIRONMENT, Command, start
from tests.stops import HOOKS, StopAt, StoppedError, difference, outcome

# Three epochs of six steps, in a fraction of a second, of a network whose dropout would show any draw that is off.
SHORT = (
    *("--trainer.max_epochs", "3", "--trainer.limit_train_batches", "6", "--trainer.limit_val_batches", "2"),
    *("--trainer.limit_test_batches", "1", "--trainer.log_every_n_steps", "1", "--trainer.accelerator", "cpu"),
    *("--data.batch_size", "32", "--data.eval_batch_size", "50", "--model.network", "tests.stops.Noisy"),
    *("--checkpoint.every_n_steps", "1", "--ckpt_path", "last"),
)
COSINE = "torch.optim.lr_scheduler.CosineAnnealingLR"
PLATEAU = "lightning.pytorch.cli.ReduceLROnPlateau"
CASES = {
    "plain": (),
    "every second step": ("--checkpoint.every_n_steps", "2"),
    "validation inside epochs": ("--trainer.val_check_interval", "0.5"),
    "validation every second epoch": ("--trainer.check_val_every_n_epoch", "2"),
    "accumulation": ("--trainer.accumulate_grad_batches", "4"),
    "schedule by step": (
        "--model.lr_scheduler",
        COSINE,
        "--model.lr_scheduler.T_max",
        "18",
        "--model.lr_interval",
        "step",
    ),
    "schedule by epoch": ("--model.lr_scheduler", COSINE, "--model.lr_scheduler.T_max", "3"),
    "schedule by metric": (
        *("--model.lr_scheduler", PLATEAU, "--model.lr_scheduler.monitor", "val_loss"),
        *("--model.lr_scheduler.patience", "0", "--model.lr_scheduler.threshold", "1.0"),
    ),
    "no validation": ("--data.val_size", "0"),
}


def fit(root: Path, *options: str, stop: tuple[str, int] | None = None) -> bool:
    """Run the command, to be stopped by an exception in one hook at one step; whether it was."""
    stopper: tuple[str, ...] = ()
    if stop:
        stopper = ("--trainer.callbacks+=tests.stops.StopAt", "--trainer.callbacks.hook", stop[0])
        stopper += ("--trainer.callbacks.step", str(stop[1]))
    try:
        main(["fit", *SHORT, *options, *stopper, "--trainer.default_root_dir", str(root)])
    except StoppedError:
        return True
    return False


def run_of(root: Path) -> Path:
    """The newest run that wrote checkpoints."""
    return sorted(path for path in root.iterdir() if (path / "checkpoints").is_dir())[-1]


REFERENCES: dict[str, dict[str, Any]] = {}


def reference(case: str, tmp_path: Path) -> dict[str, Any]:
    if case not in REFERENCES:
        assert not fit(tmp_path / "reference", *CASES[case])
        REFERENCES[case] = outcome(run_of(tmp_path / "reference"))
    return REFERENCES[case]


FEW = [
    *(("plain", hook, 6) for hook in HOOKS),
    ("plain", "on_train_batch_end", 1),
    ("plain", "on_train_batch_start", 0),
    ("plain", "on_train_batch_end", 9),
    ("plain", "on_train_batch_end", 18),
    ("every second step", "on_train_batch_end", 12),
    ("validation inside epochs", "on_validation_end", 3),
    ("validation inside epochs", "on_train_batch_end", 10),
    ("validation every second epoch", "on_train_epoch_end", 6),
    ("validation every second epoch", "on_train_batch_end", 14),
    ("accumulation", "on_before_optimizer_step", 3),
    ("accumulation", "on_train_batch_end", 4),
    ("schedule by step", "on_train_batch_end", 8),
    ("schedule by epoch", "on_train_batch_end", 13),
    ("schedule by metric", "on_train_batch_end", 8),
    ("schedule by metric", "on_train_epoch_end", 12),
    ("no validation", "on_train_batch_end", 7),
]


@pytest.mark.parametrize(("case", "hook", "step"), FEW)
def test_a_stopped_run_ends_as_if_it_had_not_been(case: str, hook: str, step: int, tmp_path: Path) -> None:
    whole = reference(case, tmp_path)
    assert fit(tmp_path / "runs", *CASES[case], stop=(hook, step))
    assert not fit(tmp_path / "runs", *CASES[case])
    assert difference(whole, outcome(run_of(tmp_path / "runs"))) == ""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("hook", HOOKS)
def test_at_every_step_and_hook(case: str, hook: str, tmp_path: Path) -> None:
    whole = reference(case, tmp_path)
    stopped = 0
    for step in range(19):
        root = tmp_path / str(step)
        if fit(root, *CASES[case], stop=(hook, step)):
            stopped += 1
            assert not fit(root, *CASES[case])
            assert difference(whole, outcome(run_of(root))) == "", f"stopped at step {step}"
    assert stopped > 0 or case == "no validation"


def test_many_stops_in_one_run(tmp_path: Path) -> None:
    whole = reference("plain", tmp_path)
    for step in (2, 3, 6, 7, 12, 17, 18):
        assert fit(tmp_path / "runs", stop=("on_train_batch_end", step))
    assert not fit(tmp_path / "runs")
    assert difference(whole, outcome(run_of(tmp_path / "runs"))) == ""
    assert len(list((tmp_path / "runs").iterdir())) == 1  # all in one folder


def test_a_best_checkpoint_is_a_start_too(tmp_path: Path) -> None:
    """Written after an epoch's last batch, which would end a fit silently if it were taken for the middle of one."""
    assert fit(tmp_path / "runs", stop=("on_train_epoch_end", 12))
    best = run_of(tmp_path / "runs") / "checkpoints" / "best.ckpt"
    at = torch.load(best, weights_only=True)["global_step"]
    assert at in (6, 12)
    main(["fit", *SHORT, "--ckpt_path", str(best), "--trainer.default_root_dir", str(tmp_path / "runs")])
    last = torch.load(tmp_path / "runs" / "version_1" / "checkpoints" / "last.ckpt", weights_only=True)
    whole = reference("plain", tmp_path)
    assert difference(whole["weights"], last["state_dict"]) == ""


def test_a_larger_max_epochs_extends_a_finished_run(command: Command, tmp_path: Path) -> None:
    said = command("fit", *SHORT, "--trainer.max_epochs", "2", "--trainer.default_root_dir", "runs")
    assert "result" in said
    log = Path("runs/version_0/metrics.csv").read_text()
    said = command("fit", *SHORT, "--trainer.max_epochs", "2", "--trainer.default_root_dir", "runs")
    assert said == "runs/version_0 is finished, at step 12; a larger --trainer.max_epochs extends it\n"
    assert Path("runs/version_0/metrics.csv").read_text() == log
    command("fit", *SHORT, "--trainer.default_root_dir", "runs")
    assert difference(reference("plain", tmp_path), outcome(Path("runs/version_0"))) == ""
    assert not Path("runs/version_1").exists()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize("damage", [flip, cut])
def test_a_damaged_checkpoint_is_passed_over(damage: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = reference("plain", tmp_path)
    assert fit(tmp_path / "runs", stop=("on_train_batch_end", 9))
    damage(tmp_path / "runs" / "version_0" / "checkpoints" / "last.ckpt")
    capsys.readouterr()
    assert not fit(tmp_path / "runs")
    said = capsys.readouterr()
    assert "last.ckpt: not a whole checkpoint (" in said.out
    assert "; going on from " in said.out
    assert "previous.ckpt" in said.out
    assert "step 7 of " in said.out
    assert difference(whole, outcome(tmp_path / "runs" / "version_0")) == ""


@pytest.mark.parametrize("damage", [b"", b"step,epoch\n", bytes(range(256)), b"epoch\n1\n"])
def test_a_damaged_log_does_not_keep_a_run_from_going_on(damage: bytes, tmp_path: Path) -> None:
    whole = reference("plain", tmp_path)
    assert fit(tmp_path / "runs", stop=("on_train_batch_end", 9))
    (tmp_path / "runs" / "version_0" / "metrics.csv").write_bytes(damage)
    assert not fit(tmp_path / "runs")
    found = outcome(tmp_path / "runs" / "version_0")
    assert difference(whole["weights"], found["weights"]) == ""
    assert "val_acc" in found["log"]


def test_a_torn_last_row_is_written_again(tmp_path: Path) -> None:
    whole = reference("plain", tmp_path)
    assert fit(tmp_path / "runs", stop=("on_train_batch_end", 9))
    with (tmp_path / "runs" / "version_0" / "metrics.csv").open("a") as file:
        file.write("1")  # of "15,2,..."
    assert not fit(tmp_path / "runs")
    assert difference(whole, outcome(tmp_path / "runs" / "version_0")) == ""


def test_without_a_whole_checkpoint_a_run_begins_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = reference("plain", tmp_path)
    assert fit(tmp_path / "runs", stop=("on_train_batch_end", 9))
    for path in (tmp_path / "runs" / "version_0" / "checkpoints").iterdir():
        cut(path)
    assert not fit(tmp_path / "runs")
    assert capsys.readouterr().out.count("going on from the beginning") == 2
    assert difference(whole, outcome(tmp_path / "runs" / "version_0")) == ""


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--data.batch_size 16", "data.global_batch_size=16, but the checkpoint was written with 32 and cannot go on"),
        ("--data.val_size 4000", "data.val_size=4000, but the checkpoint was written with 5000 and cannot go on"),
        ("--data.split_seed 1", "data.split_seed=1, but the checkpoint was written with 0 and cannot go on"),
        ("--seed_everything 1", "seed_everything=1, but the checkpoint was written with 0 and cannot go on"),
    ],
)
def test_what_cannot_change_is_an_error_that_names_both(
    options: str, line: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(Path("runs"), stop=("on_train_batch_end", 9))
    log = Path("runs/version_0/metrics.csv").read_text()
    with pytest.raises(SystemExit) as ended:
        fit(Path("runs"), *options.split())
    assert ended.value.code == 2
    assert line in capsys.readouterr().err
    assert Path("runs/version_0/metrics.csv").read_text() == log


def test_a_typed_learning_rate_wins(command: Command) -> None:
    assert fit(Path("runs"), stop=("on_train_batch_end", 9))
    assert not fit(Path("runs"), "--model.optimizer.lr", "0.5")
    last = torch.load("runs/version_0/checkpoints/last.ckpt", weights_only=True)
    assert last["optimizer_states"][0]["param_groups"][0]["lr"] == 0.5


def test_a_schedule_cannot_start_from_another_learning_rate(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(Path("runs"), *CASES["schedule by step"], stop=("on_train_batch_end", 9))
    with pytest.raises(SystemExit):
        fit(Path("runs"), *CASES["schedule by step"], "--model.optimizer.lr", "0.5")
    line = "model.optimizer.init_args.lr=0.5, but the checkpoint was written with 0.001 and cannot go on with another"
    assert line in capsys.readouterr().err


class Total(LitMNIST):
    """A user's own: its schedule asks Lightning for the total length, whereupon Lightning forgets a loader's state."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train_total(folder: Path, stop: int | None = None) -> dict[str, Any]:
    """Train, or go on, in a script; the last checkpoint."""
    seed_everything(0, verbose=False)
    last = LastCheckpoint(every_n_steps=1)
    last.folder = folder
    start_from = folder / "last.ckpt" if (folder / "last.ckpt").exists() else None
    stops = [StopAt("on_train_batch_end", stop)] if stop else []
    trainer = Trainer(
        max_epochs=3,
        limit_train_batches=6,
        limit_val_batches=1,
        callbacks=[*stops, last],
        logger=False,
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with contextlib.suppress(StoppedError):
        trainer.fit(Total(), MNISTDataModule(batch_size=32), ckpt_path=start_from, weights_only=True)
    checkpoint: dict[str, Any] = torch.load(folder / "last.ckpt", weights_only=True)
    return checkpoint


@pytest.mark.parametrize("stop", [3, 8, 13])
def test_a_schedule_that_asks_for_the_total_length(stop: int, tmp_path: Path) -> None:
    whole = train_total(tmp_path / "whole")
    assert train_total(tmp_path / "cut", stop)["global_step"] == stop - 1
    cut_run = train_total(tmp_path / "cut")
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert difference(whole[part], cut_run[part]) == "", part


def test_one_command_at_a_time_has_a_folder(tmp_path: Path) -> None:
    """A second one is refused and told of the first; what a killed one left is taken over."""
    slow = ("fit", *SHORT, "--trainer.max_epochs", "100000", "--trainer.limit_train_batches", "1.0")
    first = subprocess.Popen(
        [sys.executable, "-m", "lit_mnist", *slow],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    try:
        last = tmp_path / "runs" / "version_0" / "checkpoints" / "last.ckpt"
        while not last.exists():
            assert first.poll() is None
        second = start(*slow, cwd=tmp_path)
        assert second.returncode == 2
        assert f"runs/version_0 is in use by host {os.uname().nodename}, process {first.pid}, since 2" in second.stderr
    finally:
        first.kill()
        first.wait()
        assert first.stdout
        first.stdout.close()
    third = start("fit", *SHORT, "--trainer.max_steps", "1", cwd=tmp_path)
    assert third.returncode == 0, third.stderr
    assert not (tmp_path / "runs" / "version_1").exists()
