"""The command line: what a run leaves and says, and one line for each mistake."""

import csv
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lit_mnist import LitMNIST
from lit_mnist.sources import load_mnist
from tests.conftest import CONFIGS, Command
from tests.stops import StoppedError

SMOKE = ("--config", str(CONFIGS / "smoke.yaml"))


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(checkpoint, weights_only=True)["state_dict"]
    return state


def same(a: Path, b: Path) -> bool:
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_folder_holds_config_logs_and_checkpoints(trained: Path) -> None:
    assert {path.name for path in (trained / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    assert list(trained.glob("events.out.tfevents.*"))
    config = yaml.safe_load((trained / "config.yaml").read_text())
    assert config["data"]["batch_size"] == 64
    assert config["model"]["network"]["init_args"]["hidden_layers"] == 2
    logged = rows(trained)
    assert [row["step"] for row in logged if row["train_loss"]] == ["4", "9", "14", "19"]
    (evaluated,) = [row for row in logged if row["val_acc"]]
    assert evaluated["step"] == "19"
    assert float(evaluated["val_samples"]) == 2000
    (tested,) = [row for row in logged if row["test_acc"]]
    assert float(tested["test_samples"]) == 2000


def test_the_same_command_twice_gives_the_same_weights_and_keeps_both_runs(command: Command) -> None:
    command("fit", *SMOKE)
    first = Path("runs/version_0/metrics.csv").read_text()
    command("fit", *SMOKE)
    assert same(Path("runs/version_0/checkpoints/last.ckpt"), Path("runs/version_1/checkpoints/last.ckpt"))
    assert Path("runs/version_0/metrics.csv").read_text() == first


def test_the_saved_config_reproduces_the_run(command: Command, trained: Path) -> None:
    command("fit", "--config", str(trained / "config.yaml"), "--trainer.default_root_dir", "again")
    assert same(Path("again/version_0/checkpoints/last.ckpt"), trained / "checkpoints" / "last.ckpt")


def test_the_plan_and_the_result_say_what_happens(command: Command) -> None:
    said = " ".join(command("fit", *SMOKE).split())
    for part in (
        "launcher Lightning",
        "world size 1 = 1 node(s) x 1 cpu device(s)",
        "backend none (one process)",
        "parameters 386,718",
        "samples 55,000 train, 5,000 val",
        "batch 64 = 1 x 64 a device",
        "steps per epoch 20",
        "run folder runs/version_0",
        "starts from the beginning",
        "best checkpoint runs/version_0/checkpoints/best.ckpt",
        "over 2,000 samples",
        "training 1,280 samples in",
    ):
        assert part in said


def test_one_plain_line_an_epoch_where_output_is_no_terminal(command: Command) -> None:
    said = command("fit", *SMOKE, "--trainer.max_epochs", "3")
    epochs = [line for line in said.splitlines() if line.startswith("epoch ")]
    assert [line.split()[1] for line in epochs] == ["1/3", "2/3", "3/3"]
    assert all("val_acc" in line and "samples/s" in line for line in epochs)
    assert "\x1b" not in said


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "lit_mnist", "fit", *SMOKE]
    code = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert "Epoch 0/0" in done.stdout
    assert "━" in done.stdout
    assert "\x1b[" in done.stdout
    assert "epoch 1/1" not in done.stdout


def test_later_configs_and_options_win(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data: {batch_size: 32}\ntrainer: {max_epochs: 2}\n")
    printed = command_config(command, "fit", *SMOKE, "--config", "mine.yaml", "--trainer.max_epochs", "3")
    assert printed["data"]["batch_size"] == 32
    assert printed["trainer"]["max_epochs"] == 3
    assert printed["trainer"]["limit_train_batches"] == 20


def test_environment_variables_set_options(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_MNIST_FIT__DATA__BATCH_SIZE", "17")
    assert command_config(command, "fit")["data"]["batch_size"] == 17
    assert command_config(command, "fit", "--data.batch_size", "18")["data"]["batch_size"] == 18


def command_config(command: Command, *args: str) -> dict[str, dict[str, object]]:
    printed: dict[str, dict[str, object]] = yaml.safe_load(command(*args, "--print_config"))
    return printed


def test_help_is_written_for_people(command: Command) -> None:
    said = " ".join(command("--help").split())
    assert "Train on the training images, validate after each epoch, and test the best checkpoint at the end." in said
    said = " ".join(command("fit", "--help").split())
    assert "Samples per device at each training step. (type: int, default: 64)" in said
    assert "Images of the 60,000 held out for validation; 0 trains on all of them" in said
    assert "--weights_only" not in said


def test_val_size_0_trains_on_all_60000(command: Command) -> None:
    said = " ".join(
        command("fit", "--data.val_size", "0", "--trainer.max_epochs", "1", "--data.batch_size", "600").split()
    )
    assert "samples 60,000 train" in said
    assert "training 60,000 samples in" in said
    assert not Path("runs/version_0/checkpoints/best.ckpt").exists()
    assert "last checkpoint runs/version_0/checkpoints/last.ckpt" in said


@pytest.mark.parametrize(("stage", "samples"), [("validate", "val_acc"), ("test", "test_acc")])
def test_evaluation_counts_each_sample_once(stage: str, samples: str, command: Command, trained: Path) -> None:
    said = command(stage, "--ckpt_path", str(trained / "checkpoints" / "best.ckpt"))
    (row,) = rows(Path("runs/version_0"))
    assert float(row[samples.replace("acc", "samples")]) == {"validate": 5000, "test": 10_000}[stage]
    assert f"{float(row[samples]):.4f} over {'5,000' if stage == 'validate' else '10,000'} samples" in said


def test_predict_writes_each_test_image_once_with_its_probabilities(command: Command, trained: Path) -> None:
    checkpoint = trained / "checkpoints" / "best.ckpt"
    command("predict", "--ckpt_path", str(checkpoint))
    with Path("runs/version_0/predictions.csv").open(newline="") as file:
        header, *table = csv.reader(file)
    assert header == ["index", "digit", *(f"p{k}" for k in range(10))]
    assert [int(row[0]) for row in table] == list(range(10_000))
    model = LitMNIST.load_from_checkpoint(checkpoint, weights_only=True).eval()
    with torch.no_grad():
        expected = model(load_mnist("t10k").images).softmax(dim=1)
    probabilities = torch.tensor([[float(p) for p in row[2:]] for row in table])
    torch.testing.assert_close(probabilities, expected, atol=1e-5, rtol=0)
    assert [int(row[1]) for row in table] == probabilities.argmax(dim=1).tolist()


def test_a_users_own_network_optimizer_and_schedule_by_class_path(command: Command, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        """
model:
  network: {class_path: tests.test_module.OneLayer, init_args: {dropout: 0.25}}
  optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.05, momentum: 0.9}}
  lr_scheduler: {class_path: torch.optim.lr_scheduler.CosineAnnealingLR, init_args: {T_max: 20}}
  lr_interval: step
"""
    )
    command("fit", *SMOKE, "--config", "own.yaml")
    checkpoint = torch.load("runs/version_0/checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["state_dict"]["network.layers.2.weight"].shape == (10, 784)
    group = checkpoint["optimizer_states"][0]["param_groups"][0]
    assert group["momentum"] == 0.9
    assert group["lr"] == pytest.approx(0, abs=1e-9)  # the cosine's end, after 20 steps
    command("test", "--ckpt_path", "runs/version_0/checkpoints/best.ckpt")  # the checkpoint knows its network
    model = LitMNIST.load_from_checkpoint("runs/version_0/checkpoints/best.ckpt", weights_only=True)
    assert type(model.network).__name__ == "OneLayer"


def test_reduce_on_plateau_watches_a_metric(command: Command) -> None:
    scheduler = "lightning.pytorch.cli.ReduceLROnPlateau"
    said = command("fit", *SMOKE, "--model.lr_scheduler", scheduler, "--model.lr_scheduler.monitor", "val_loss")
    assert "result" in said


def test_options_win_over_what_a_checkpoint_remembers(command: Command, trained: Path) -> None:
    last = str(trained / "checkpoints" / "last.ckpt")
    command("fit", *SMOKE, "--trainer.max_epochs", "2", "--ckpt_path", last, "--model.mean", "0.5")
    config = yaml.safe_load(Path("runs/version_0/config.yaml").read_text())
    assert config["model"]["mean"] == 0.5
    assert config["ckpt_path"] == last


def test_fast_dev_run_leaves_nothing(command: Command) -> None:
    assert "none (fast_dev_run)" in command("fit", "--trainer.fast_dev_run", "true")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("fit --trainer.max_epoch 3", "2 unknown option trainer.max_epoch; did you mean trainer.max_epochs?"),
        ("fit --data.batchsize=3", "2 unknown option data.batchsize; did you mean data.batch_size?"),
        ("fit --config bad.yaml", "2 unknown option trainer.max_epoch; did you mean trainer.max_epochs?"),
        ("fit --config none.yaml", "2 config: File does not exist:"),
        ("fit --trainer.max_epochs three", "2 trainer.max_epochs=three: expected int or null"),
        ("fit --data.batch_size x", "2 data.batch_size=x: expected int"),
        ("fit --model.lr_interval day", "2 model.lr_interval=day: expected Literal['epoch', 'step']"),
        (
            "fit --model.network no.Such",
            "2 model.network=no.Such: No module named 'no'; is the folder it is in on PYTHONPATH?",
        ),
        ("fit --model.optimizer SGDD", "2 model.optimizer=SGDD: expected a class path"),
        ("fit --model.network.hidden_layers 0", "2 ToyModel: hidden_layers must be at least 1, got 0"),
        ("fit --data.batch_size 0", "2 data.batch_size must be at least 1, got 0"),
        ("fit --data.batch_size -1", "2 data.batch_size must be at least 1, got -1"),
        ("fit --data.val_size -1", "2 data.val_size must be at least 0, got -1"),
        ("fit --data.val_size 60000", "2 data.val_size must be below the 60000 training images, got 60000"),
        (
            "fit --data.global_batch_size 63 --trainer.devices 2 --trainer.accelerator cpu",
            "2 data.global_batch_size=63 is not divisible by the 2 devices of this run",
        ),
        ("fit --trainer.devices 0 --trainer.accelerator cpu", "2 `Trainer(devices='0')` value is not a valid input"),
        ("fit --trainer.strategy foo", "2 You selected an invalid strategy name: `strategy='foo'`"),
        (
            "fit --trainer.default_root_dir bad.yaml",
            "2 trainer.default_root_dir=bad.yaml cannot be written (File exists)",
        ),
        ("fit --trainer.default_root_dir /proc/none", "2 trainer.default_root_dir=/proc/none cannot be written"),
        ("train", "2 argument subcommand: invalid choice: 'train' (choose from"),
        ("test --ckpt_path none.ckpt", "2 ckpt_path=none.ckpt: no such file"),
        ("test --ckpt_path .", "2 ckpt_path=.: a folder, not a file"),
        (
            "test --ckpt_path empty.ckpt",
            "2 ckpt_path=empty.ckpt: not a whole checkpoint (the file is empty, cut off or of",
        ),
        (
            "test --ckpt_path foreign.ckpt",
            "2 ckpt_path=foreign.ckpt: not a checkpoint of lit-mnist (state_dict and hyper",
        ),
        ("test --ckpt_path odd.ckpt", "2 ckpt_path=odd.ckpt: not a checkpoint of lit-mnist (state_dict and hyper"),
        ("fit --ckpt_path bare.ckpt", "2 ckpt_path=bare.ckpt holds weights alone, from which no training can go on"),
        ("test --ckpt_path elsewhere.ckpt", "2 No module named 'mine'; is the folder it is in on PYTHONPATH?"),
        (
            "fit --ckpt_path whole.ckpt --trainer.max_epochs 1",
            "2 ckpt_path=whole.ckpt is of step 20, where trainer.max_epochs=1 and trainer.max_steps=-1 end",
        ),
        (
            "fit --ckpt_path whole.ckpt --model.optimizer torch.optim.SGD",
            "2 model.optimizer.class_path=torch.optim.SGD, but the checkpoint was written with torch.optim.Adam",
        ),
        ("fit --trainer 3", "2 "),
        ("fit --config binary.yaml", "2 "),
        ("fit --seed_everything -1", "2 seed_everything=-1: expected 0 ... 4294967295"),
        ("fit --timeout 0", "2 timeout=0: expected seconds above 0, 1,000,000 at most"),
        ("validate --timeout 1e9", "2 timeout=1e+09: expected seconds above 0, 1,000,000 at most"),
        ("fit --timeout abc", "2 timeout=abc: expected float"),
        ("fit --trainer.strategy ddp_spawn", "2 trainer.strategy=ddp_spawn is for notebooks: use --trainer"),
        ("fit --model.std 0", "2 model.std=0.0: expected a finite number above 0"),
        (
            "fit --model.optimizer.lr -1",
            "2 model.optimizer or model.lr_scheduler cannot be made: Invalid learning rate: -1",
        ),
        (
            "fit --model.lr_scheduler torch.optim.lr_scheduler.ReduceLROnPlateau",
            "2 ",
        ),
        (
            "fit --model.network.in_features 100",
            "2 model.network must map images (B, 28, 28) float to logits (B, classes) for 10 classes or more; on two",
        ),
        (
            "fit --model.network.num_classes 7",
            "2 model.network must map images (B, 28, 28) float to logits (B, classes)",
        ),
        ("validate --data.val_size 0", "2 data.val_size=0 holds no images out: there is nothing to validate"),
        ("test --ckpt_path text.ckpt", "2 ckpt_path=text.ckpt: not a whole checkpoint ("),
        ("test --ckpt_path cut.ckpt", "2 ckpt_path=cut.ckpt: not a whole checkpoint (the file is empty, cut off or"),
        ("fit --ckpt_path cut.ckpt", "2 ckpt_path=cut.ckpt: not a whole checkpoint (the file is empty, cut off or"),
        ("test --ckpt_path list.ckpt", "2 ckpt_path=list.ckpt: not a checkpoint of lit-mnist ("),
        ("test --ckpt_path newer.ckpt", "2 the checkpoint has lit-mnist format 2, and this version reads 1"),
        (
            "predict --ckpt_path whole.ckpt --model.network.hidden_layers 3",
            "2 the checkpoint is of another architecture: network.network.4.weight is (10, 196) in it and (98, 196) in "
            "this model; give --model.network",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: str, line: str, refused: Command, trained: Path, tmp_path: Path) -> None:
    whole = trained / "checkpoints" / "best.ckpt"
    (tmp_path / "bad.yaml").write_text("trainer: {max_epoch: 3}\n")
    (tmp_path / "text.ckpt").write_text("hello")
    (tmp_path / "cut.ckpt").write_bytes(whole.read_bytes()[:100_000])
    (tmp_path / "whole.ckpt").write_bytes(whole.read_bytes())
    (tmp_path / "empty.ckpt").touch()
    (tmp_path / "binary.yaml").write_bytes(bytes(range(128, 256)))
    torch.save([1], tmp_path / "list.ckpt")
    torch.save({"model": {}}, tmp_path / "foreign.ckpt")
    content = torch.load(whole, weights_only=True)
    torch.save({**content, "hyper_parameters": "none"}, tmp_path / "odd.ckpt")
    parts = ("state_dict", "hyper_parameters", "pytorch-lightning_version", "lit_mnist_format")
    torch.save({name: content[name] for name in parts}, tmp_path / "bare.ckpt")
    hyperparameters = {**content["hyper_parameters"], "network": {"class_path": "mine.Net", "init_args": {}}}
    torch.save({**content, "hyper_parameters": hyperparameters}, tmp_path / "elsewhere.ckpt")
    torch.save({**torch.load(whole, weights_only=True), "lit_mnist_format": 2}, tmp_path / "newer.ckpt")
    assert refused(*arguments.split()).startswith(line)


def test_a_damaged_data_file_is_one_line_and_status_1(
    refused: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lit_mnist.sources.files", lambda package: tmp_path)
    line = refused("fit", *SMOKE)
    assert line.startswith("1 data file ")
    assert "is missing: install lit-mnist again" in line


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(trained: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: the write fails half-way, as on a full one."""
    checkpoints = tmp_path / "runs" / "version_0" / "checkpoints"
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6)); from lit_mnist import main; main(sys.argv[1:])"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] in (-1, resource.RLIM_INFINITY)
    done = subprocess.run(
        [sys.executable, "-c", code, "fit", *SMOKE], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "best.ckpt cannot be written" in line
    assert "File too large" in line
    assert list(checkpoints.iterdir()) == []


def test_what_lightning_refuses_later_is_one_line_too(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command("fit", *SMOKE, "--trainer.val_check_interval", "50")
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lit-mnist: error: `val_check_interval` (50) must be less than or equal")


def test_a_failure_in_a_users_code_keeps_its_traceback(command: Command) -> None:
    stop = ("--trainer.callbacks+=tests.stops.StopAt", "--trainer.callbacks.hook", "on_train_batch_end")
    with pytest.raises(StoppedError):
        command("fit", *SMOKE, *stop, "--trainer.callbacks.step", "3")


def test_results_are_of_the_runs_own_best_checkpoint(command: Command) -> None:
    """Not of a checkpoint callback that a user adds, which may watch something else."""
    added = (
        "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint",
        "--trainer.callbacks.monitor",
        "val_loss",
    )
    said = " ".join(command("fit", *SMOKE, *added, "--trainer.callbacks.dirpath", "own").split())
    assert "best checkpoint runs/version_0/checkpoints/best.ckpt val_acc 0.7" in said
    assert len(list(Path("own").iterdir())) == 1


def test_a_run_without_validation_in_time_keeps_its_last_checkpoint(command: Command) -> None:
    said = " ".join(command("fit", *SMOKE, "--trainer.check_val_every_n_epoch", "5").split())
    assert "last checkpoint runs/version_0/checkpoints/last.ckpt test_acc" in said


def test_a_checkpoint_from_another_folder_starts_a_new_run(command: Command, trained: Path) -> None:
    last = str(trained / "checkpoints" / "last.ckpt")
    said = " ".join(command("fit", *SMOKE, "--trainer.max_epochs", "2", "--ckpt_path", last).split())
    assert "starts from step 20 of" in said
    assert "best checkpoint runs/version_0/checkpoints/best.ckpt" in said


def test_a_loss_that_is_not_a_number_is_said(command: Command) -> None:
    said = command("fit", *SMOKE, "--model.optimizer.lr", "1e30")
    assert "warning: train_loss is nan: a smaller --model.optimizer.lr may help" in said


def test_surroundings_that_promise_more_are_said_before_the_plan(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    first, *_ = command("fit", *SMOKE).splitlines()
    assert first.startswith("warning: WORLD_SIZE=2, but this run is 1 process(es)")
