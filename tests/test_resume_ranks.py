"""Stop and go with real processes: kills, other numbers of ranks, torchrun's restarts, kills while writing."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from lit_mnist.checkpoints import AtomicCheckpointIO, load_checkpoint
from tests.conftest import ENVIRONMENT, start
from tests.stops import HOOKS, difference, outcome
from tests.test_resume import SHORT, run_of

BATCH = 48  # divides by 1, 2, 3 and 4
GLOBAL = (*SHORT, "--data.global_batch_size", str(BATCH))


def stopper(hook: str, step: int, how: str, rank: int | None = None) -> tuple[str, ...]:
    options: tuple[str, ...] = ("--trainer.callbacks+=tests.stops.StopAt", "--trainer.callbacks.hook", hook)
    options += ("--trainer.callbacks.step", str(step), "--trainer.callbacks.how", how)
    return (*options, "--trainer.callbacks.rank", str(rank)) if rank is not None else options


def sample_log(path: Path) -> tuple[str, ...]:
    return ("--trainer.callbacks+=tests.stops.SampleLog", "--trainer.callbacks.path", str(path))


def samples(path: Path) -> dict[tuple[int, int], list[int]]:
    """By (epoch, batch): the samples of all ranks. A batch done again after a stop counts as done last."""
    seen: dict[tuple[int, int], dict[str, list[int]]] = {}
    for file in sorted(path.parent.glob(f"{path.name}.*")):
        for line in file.read_text().splitlines():
            epoch, batch, *index = map(int, line.split())
            seen.setdefault((epoch, batch), {})[file.suffix] = index
    return {key: [i for index in ranks.values() for i in index] for key, ranks in seen.items()}


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(1, 2, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.slow), (2, 3)],
)
def test_going_on_with_other_ranks_sees_each_sample_once(before: int, after: int, tmp_path: Path) -> None:
    whole = start("fit", *GLOBAL, *sample_log(tmp_path / "whole"), "--trainer.devices", "1", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    expected = outcome(run_of(tmp_path / "runs"))
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    options = (*GLOBAL, "--trainer.devices")
    killed = start(
        "fit", *options, str(before), *stopper("on_train_batch_end", 9, "kill"), *sample_log(pieces / "a"), cwd=pieces
    )
    assert killed.returncode != 0
    done = start("fit", *options, str(after), *sample_log(pieces / "b"), cwd=pieces)
    assert done.returncode == 0, done.stderr
    assert f"world size {after} = 1 node(s)" in " ".join(done.stdout.split())
    first, second, uncut = samples(pieces / "a"), samples(pieces / "b"), samples(tmp_path / "whole")
    assert min(second) == (1, 2)  # the last checkpoint was written after step 8, the second of the second epoch
    joined = {**first, **second}
    assert joined.keys() == uncut.keys()
    for key, index in uncut.items():
        assert sorted(joined[key]) == sorted(index), key
    for epoch in range(3):
        counts = Counter(i for (e, _), index in joined.items() if e == epoch for i in index)
        assert len(counts) == 6 * BATCH
        assert set(counts.values()) == {1}
    found = outcome(run_of(pieces / "runs"))
    assert found["progress"] == expected["progress"]


def test_the_curve_does_not_depend_on_the_ranks_before_and_after(tmp_path: Path) -> None:
    """Without dropout, whose draws are a rank's own: what is left is the order of sums in fp32, over 18 Adam steps."""
    options = (*GLOBAL, "--model.network", "lit_mnist.ToyModel", "--trainer.devices")
    runs = []
    for name, ranks in (("one", (1, 1)), ("cut", (2, 3))):
        (tmp_path / name).mkdir()
        stop = stopper("on_train_batch_end", 9, "kill")
        assert start("fit", *options, str(ranks[0]), *stop, cwd=tmp_path / name).returncode != 0
        done = start("fit", *options, str(ranks[1]), cwd=tmp_path / name)
        assert done.returncode == 0, done.stderr
        runs.append(outcome(run_of(tmp_path / name / "runs")))
    one, several = runs
    for key, weight in one["weights"].items():
        torch.testing.assert_close(several["weights"][key], weight, atol=2e-5, rtol=0, msg=key)


def test_the_order_of_sums_is_the_same_after_a_stop(tmp_path: Path) -> None:
    """From three ranks on it shows in the last bit, in a network of several layers, whose gradients change places."""
    options = (*GLOBAL, "--model.network", "lit_mnist.ToyModel", "--trainer.devices", "4")
    whole = start("fit", *options, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    (tmp_path / "cut").mkdir()
    stop = stopper("on_train_batch_end", 9, "kill")
    assert start("fit", *options, *stop, cwd=tmp_path / "cut").returncode != 0
    done = start("fit", *options, cwd=tmp_path / "cut")
    assert done.returncode == 0, done.stderr
    found = outcome(run_of(tmp_path / "cut" / "runs"))
    assert difference(outcome(run_of(tmp_path / "runs")), found) == ""


def test_ranks_that_would_go_on_from_different_steps_are_told(tmp_path: Path) -> None:
    """Two ranks with folders of their own, as on hosts that share no file system; one has a checkpoint."""
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    stop = stopper("on_train_batch_end", 9, "kill")
    assert start("fit", *SHORT, *stop, "--trainer.devices", "1", cwd=tmp_path / "0").returncode != 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "lit_mnist", "fit", *SHORT, "--trainer.devices", "1", "--trainer.num_nodes", "2",
             "--data.global_batch_size", "32"],
            cwd=tmp_path / str(rank),
            env={**os.environ, **ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                 "NODE_RANK": str(rank), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    for process in ranks:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 2
        line = said.strip().splitlines()[-1]
        assert "the ranks would not go on from the same step: rank 0 from step 8 of runs/version_0" in line
        assert (
            "rank 1 from the beginning: put trainer.default_root_dir=runs on a file system that all hosts share" in line
        )


def test_torchrun_restarts_go_on(tmp_path: Path) -> None:
    """A rank dies once; torchrun starts all again with the same command, which goes on."""
    reference = start("fit", *GLOBAL, "--trainer.devices", "2", cwd=tmp_path)
    assert reference.returncode == 0, reference.stderr
    (tmp_path / "restarted").mkdir()
    done = start(
        "fit", *GLOBAL, "--trainer.devices", "2", "--trainer.callbacks+=tests.stops.KillOnce",
        "--trainer.callbacks.step", "9", "--trainer.callbacks.rank", "1", "--trainer.callbacks.mark", "mark",
        cwd=tmp_path / "restarted",
        launcher=(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                  "--max-restarts", "2"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "restarted" / "mark").exists()
    found = outcome(run_of(tmp_path / "restarted" / "runs"))
    assert difference(outcome(run_of(tmp_path / "runs")), found) == ""


# Kills a process of its own, again and again, while it does nothing but write checkpoints; each time the file is whole.
KILLER = """
import itertools, os, random, signal, sys, time, torch
from lit_mnist.checkpoints import AtomicCheckpointIO, load_checkpoint
path, size, newest, torn = sys.argv[1], 500_000, -1, 0
for kill in range(int(sys.argv[2])):
    pid = os.fork()
    if pid == 0:
        for n in itertools.count():
            content = {"state_dict": {"w": torch.full((size,), float(n))}, "hyper_parameters": {}, "n": n}
            AtomicCheckpointIO().save_checkpoint({**content, "pytorch-lightning_version": "2"}, path)
    time.sleep(random.uniform(0.02, 0.2))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    torn += os.path.exists(os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.partial"))
    if newest >= 0 or os.path.exists(path):
        checkpoint = load_checkpoint(path)
        assert torch.equal(checkpoint["state_dict"]["w"], torch.full((size,), float(checkpoint["n"])))
        newest = max(newest, checkpoint["n"])
print(newest, torn)
"""


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_kills_while_writing_leave_a_whole_checkpoint(kills: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLER, str(tmp_path / "last.ckpt"), str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, **ENVIRONMENT})
    assert done.returncode == 0, done.stderr
    newest, torn = map(int, done.stdout.split())
    assert newest > 0
    assert torn > 0  # some kills did come in the middle of a file


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    io, path = AtomicCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint({"state_dict": {}, "hyper_parameters": {}, "pytorch-lightning_version": "2", "n": 1}, path)

    class Unwritable:
        def __reduce__(self) -> str:
            raise OSError(28, "No space left on device")

    with pytest.raises(Exception, match=r"last\.ckpt cannot be written .*No space left on device"):
        io.save_checkpoint({"state_dict": Unwritable()}, path)
    assert load_checkpoint(path)["n"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


# Long enough for a kill at a random moment to come inside it: 120 steps, each with its checkpoint.
LONGER = (*GLOBAL, "--trainer.limit_train_batches", "40")


def torture(ranks: int, how: str, folder: Path, options: tuple[str, ...], draw: random.Random, kills: int) -> int:
    """End the command at random moments, `kills` times, then let it end; how often it was ended in time."""
    folder.mkdir()
    for attempt in range(20):
        stop: tuple[str, ...] = ()
        if how == "exception" and attempt < kills:
            hook = draw.choice(HOOKS)
            inside = hook in ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")
            step = 40 * attempt + (draw.randrange(1, 40) if inside else 40)  # the others come at an epoch's end
            stop = stopper(hook, step, "raise", draw.randrange(ranks))
        process = subprocess.Popen(
            [sys.executable, "-m", "lit_mnist", "fit", *options, *stop, *sample_log(folder / "log")],
            cwd=folder,
            env={**os.environ, **ENVIRONMENT, "TMPDIR": draw.choice([str(folder), "/dev/shm"])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout
        lines = []
        for line in process.stdout:  # up to the plan's end, that is, the start of training
            lines.append(line)
            if "starts from" in line:
                break
        if attempt < kills and how != "exception":
            time.sleep(draw.uniform(0, 2))
            end(process, how, draw)
        lines += process.stdout.readlines()
        process.stdout.close()
        if process.wait(timeout=120) == 0:
            return attempt
        assert attempt < kills, "".join(lines)
    raise AssertionError("it does not come to its end")


def end(process: subprocess.Popen[str], how: str, draw: random.Random) -> None:
    """SIGKILL to the whole job, or one signal to one rank of it."""
    if how == "job":
        os.killpg(process.pid, signal.SIGKILL)
        return
    listed = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, text=True).stdout.split()
    if listed:
        os.kill(int(draw.choice(listed)), signal.SIGKILL if how == "rank" else signal.SIGTERM)


def tortured(ranks: int, how: str, tmp_path: Path, runs: int, kills: int) -> int:
    options = (*LONGER, "--trainer.devices", str(ranks))
    whole = start("fit", *options, *sample_log(tmp_path / "log"), cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    expected, order = outcome(run_of(tmp_path / "runs")), samples(tmp_path / "log")
    draw = random.Random(f"{ranks} {how}")
    ended = 0
    for n in range(runs):
        ended += torture(ranks, how, tmp_path / str(n), options, draw, kills)
        assert difference(expected, outcome(run_of(tmp_path / str(n) / "runs"))) == ""
        assert samples(tmp_path / str(n) / "log") == order
    print(f"torture: {how}, {ranks} rank(s): {ended} ends in {runs} runs")
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["job", "rank", "term", "exception"])
def test_torture(ranks: int, how: str, tmp_path: Path) -> None:
    assert tortured(ranks, how, tmp_path, runs=3, kills=3) >= 4


def test_a_small_torture(tmp_path: Path) -> None:
    assert tortured(2, "job", tmp_path, runs=1, kills=2) >= 1
