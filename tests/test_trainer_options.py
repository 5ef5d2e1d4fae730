"""The Trainer's options that touch sampling, each seen from outside."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Command
from tests.test_cli import rows

SHORT = (
    *("--trainer.max_epochs", "2", "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1"),
    *("--trainer.log_every_n_steps", "1", "--data.val_size", "58000", "--data.batch_size", "100"),
)
Epochs = list[list[list[int]]]


@pytest.fixture
def seen(command: Command, tmp_path: Path) -> Callable[..., Epochs]:
    """Runs a fit and returns the samples of each batch of each epoch."""

    def call(*options: str) -> Epochs:
        log = ("--trainer.callbacks+=tests.stops.SampleLog", "--trainer.callbacks.path", str(tmp_path / "log"))
        command("fit", *SHORT, *log, *options)
        epochs: Epochs = []
        for line in (tmp_path / "log.0").read_text().splitlines():
            epoch, _, *index = map(int, line.split())
            epochs += [[]] if epoch == len(epochs) else []
            epochs[epoch].append(index)
        return epochs

    return call


def flat(epoch: list[list[int]]) -> list[int]:
    return [i for batch in epoch for i in batch]


def test_each_epoch_is_another_order_of_all_samples(seen: Callable[..., Epochs]) -> None:
    first, second = seen()
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(2000))
    assert flat(first) != flat(second)  # set_epoch arrives


def test_a_tail_is_trained_on_too(seen: Callable[..., Epochs]) -> None:
    for epoch in seen("--data.batch_size", "300"):
        assert [len(batch) for batch in epoch] == [300] * 6 + [200]
        assert sorted(flat(epoch)) == list(range(2000))


def test_limit_train_batches_takes_the_orders_first(seen: Callable[..., Epochs], tmp_path: Path) -> None:
    limited = seen("--trainer.limit_train_batches", "3")
    (tmp_path / "log.0").unlink()
    assert limited == [epoch[:3] for epoch in seen()]


def test_overfit_batches_repeats_the_same_samples_in_order(seen: Callable[..., Epochs]) -> None:
    first, second = seen("--trainer.overfit_batches", "2")
    assert first == second == [list(range(100)), list(range(100, 200))]


def test_accumulation_makes_fewer_steps_of_the_same_batches(seen: Callable[..., Epochs]) -> None:
    epochs = seen("--trainer.accumulate_grad_batches", "4")
    assert [len(epoch) for epoch in epochs] == [20, 20]
    assert [row["step"] for row in rows(Path("runs/version_0")) if row["train_loss"]] == [str(n) for n in range(10)]


def test_val_check_interval_validates_inside_epochs(seen: Callable[..., Epochs]) -> None:
    epochs = seen("--trainer.val_check_interval", "5")
    assert [sorted(flat(epoch)) for epoch in epochs] == [list(range(2000))] * 2
    validated = [row["step"] for row in rows(Path("runs/version_0")) if row["val_acc"]]
    assert validated == [str(n) for n in range(4, 40, 5)]


def test_max_steps_ends_inside_an_epoch(seen: Callable[..., Epochs]) -> None:
    epochs = seen("--trainer.max_steps", "25", "--trainer.max_epochs", "-1")
    assert [len(epoch) for epoch in epochs] == [20, 5]


def test_fast_dev_run_is_one_batch(seen: Callable[..., Epochs]) -> None:
    assert [len(epoch) for epoch in seen("--trainer.fast_dev_run", "true")] == [1]


def test_reloaded_loaders_give_the_same_order(seen: Callable[..., Epochs], tmp_path: Path) -> None:
    reloaded = seen("--trainer.reload_dataloaders_every_n_epochs", "1")
    (tmp_path / "log.0").unlink()
    assert reloaded == seen()


def test_a_profiler_reports(command: Command, tmp_path: Path) -> None:
    profiler = ("--trainer.profiler", "SimpleProfiler", "--trainer.profiler.dirpath", str(tmp_path))
    command("fit", *SHORT, *profiler, "--trainer.profiler.filename", "profile")
    assert "run_training_batch" in (tmp_path / "fit-profile.txt").read_text()
