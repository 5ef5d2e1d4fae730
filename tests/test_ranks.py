"""Several real processes with gloo against one: the same samples, the same numbers."""

import csv
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import CONFIGS, start
from tests.test_cli import rows, weights

SMOKE = ("--config", str(CONFIGS / "smoke.yaml"))


def evaluated(stage: str, ranks: int, trained: Path, folder: Path, *options: str) -> Path:
    checkpoint = str(trained / "checkpoints" / "best.ckpt")
    done = start(stage, "--ckpt_path", checkpoint, "--trainer.devices", str(ranks), *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no advice to use one device, among others
    return folder / "runs" / "version_0"


@pytest.mark.parametrize("stage", [pytest.param("validate", marks=pytest.mark.slow), "test"])
def test_evaluation_does_not_depend_on_the_ranks(stage: str, trained: Path, tmp_path: Path) -> None:
    prefix = {"validate": "val", "test": "test"}[stage]
    found = []
    for ranks in (1, 2, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        (row,) = rows(evaluated(stage, ranks, trained, folder))
        found.append({name: float(row[f"{prefix}_{name}"]) for name in ("loss", "acc", "samples")})
    one, *others = found
    assert one["samples"] == {"val": 5000, "test": 10_000}[prefix]
    for several in others:
        assert several["acc"] == one["acc"]
        assert several["samples"] == one["samples"]
        assert several["loss"] == pytest.approx(one["loss"], abs=1e-6)


@pytest.mark.parametrize("size", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_rank_may_have_no_sample_to_evaluate(size: int, trained: Path, tmp_path: Path) -> None:
    found = []
    for ranks in (1, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        options = ("--data.val_size", str(size), "--data.eval_batch_size", "1")
        (row,) = rows(evaluated("validate", ranks, trained, folder, *options))
        found.append({name: float(row[f"val_{name}"]) for name in ("loss", "acc", "samples")})
    assert found[0]["samples"] == size
    assert found[1] == pytest.approx(found[0], abs=1e-6)


def test_predictions_do_not_depend_on_the_ranks(trained: Path, tmp_path: Path) -> None:
    tables = []
    for ranks in (1, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        with (evaluated("predict", ranks, trained, folder) / "predictions.csv").open(newline="") as file:
            tables.append(list(csv.reader(file))[1:])
    one, three = tables
    assert [row[:2] for row in one] == [row[:2] for row in three]
    numbers = [torch.tensor([[float(p) for p in row[2:]] for row in table]) for table in tables]
    torch.testing.assert_close(*numbers, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("launcher", ["Lightning", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_training_on_three_ranks_is_training_on_one(launcher: str, tmp_path: Path) -> None:
    """The same global batches: what is left is the order of the sums, in fp32 over 20 steps of Adam."""
    options = (*SMOKE, "--data.global_batch_size", "96", "--trainer.accelerator", "cpu")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    for ranks in (1, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        launched = torchrun if launcher == "torchrun" and ranks == 3 else ()
        done = start("fit", *options, "--trainer.devices", str(ranks), cwd=folder, launcher=launched)
        assert done.returncode == 0, done.stderr
        said = " ".join(done.stdout.split())
        assert f"launcher {launcher if ranks == 3 else 'Lightning'} world size {ranks}" in said
    runs = [tmp_path / ranks / "runs" / "version_0" for ranks in "13"]
    one, three = (weights(run / "checkpoints" / "last.ckpt") for run in runs)
    for name in one:
        torch.testing.assert_close(three[name], one[name], atol=2e-5, rtol=0, msg=name)
    losses = [[float(row["train_loss"]) for row in rows(run) if row["train_loss"]] for run in runs]
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_a_left_over_slurm_variable_changes_nothing(tmp_path: Path) -> None:
    """As in a shell or a notebook that a SLURM job has started: Lightning alone would train on one process."""
    done = start(
        "fit", *SMOKE, "--trainer.accelerator", "cpu", "--trainer.devices", "2", cwd=tmp_path,
        SLURM_NTASKS="1", SLURM_JOB_ID="7", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "launcher Lightning world size 2 = 1 node(s) x 2 cpu device(s)" in " ".join(done.stdout.split())
    assert (tmp_path / "runs" / "version_0").is_dir()
