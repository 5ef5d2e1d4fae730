"""The README's commands and code, run."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import Command, start

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


COMMANDS = [
    line for block in blocks("sh") for line in block.splitlines() if line.startswith(("lit-mnist ", "torchrun "))
]


@pytest.fixture
def folder(tmp_path: Path, trained: Path) -> Path:
    """A folder as the README's reader has it after a first run."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "version_0").symlink_to(trained)
    return tmp_path


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_works(line: str, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_MNIST_FIT__TRAINER__LIMIT_TRAIN_BATCHES", "50")
    monkeypatch.setenv("LIT_MNIST_FIT__TRAINER__LIMIT_TEST_BATCHES", "1")
    program, *arguments = line.split()
    if program == "torchrun":
        options, arguments = (part.split() for part in line.split(" -m lit_mnist "))
        done = start(*arguments, cwd=folder, launcher=(sys.executable, "-m", "torch.distributed.run", *options[1:]))
        assert done.returncode == 0, done.stderr
    elif "--help" in arguments or "--print_config" in arguments:
        assert command(*arguments)
    elif "configs/ddp_cpu.yaml" in arguments:
        done = start(*arguments, cwd=folder)
        assert done.returncode == 0, done.stderr
    elif "doctor" in arguments:
        assert "fail" not in command(*arguments)
    elif "last" in arguments:
        assert "is finished, at step 20" in command(*arguments)
    else:
        assert "result" in command(*arguments)
        assert (folder / "runs" / "version_1" / "config.yaml").exists()


def test_there_are_commands_for_every_subcommand() -> None:
    assert {line.split()[1] for line in COMMANDS if line.startswith("lit-mnist")} == {
        "fit",
        "validate",
        "test",
        "predict",
        "doctor",
    }


def test_make_has_what_is_named() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([\w-]+)", "\n".join(blocks("sh")) + README)) <= targets | {"fit"}


def test_the_python_code_predicts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    (code,) = blocks("python")
    exec(code, {})
    assert capsys.readouterr().out.startswith("tensor([7, ")  # the first test image is a 7


def test_a_model_of_ones_own(folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    (folder / "mine.py").write_text(
        "from torch import nn\n\n\nclass MyNet(nn.Sequential):\n"
        "    def __init__(self, width: int):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))\n"
    )
    (text,) = blocks("yaml")
    (folder / "mine.yaml").write_text(text)
    command("fit", "--config", "configs/smoke.yaml", "--config", "mine.yaml")
    config = yaml.safe_load((folder / "runs" / "version_1" / "config.yaml").read_text())
    assert config["model"]["network"] == {"class_path": "mine.MyNet", "init_args": {"width": 64}}
    sys.modules.pop("mine")


def test_the_map_names_what_is_there() -> None:
    table = README.split("## Map")[1].split("## ")[0]
    names = re.findall(r"`((?:lit_mnist|configs|tests)/[\w./]*)`", table)
    assert len(names) > 10
    for name in names:
        assert (ROOT / name).exists(), name
    modules = {f"lit_mnist/{path.name}" for path in (ROOT / "lit_mnist").glob("[!_]*.py")}
    assert modules <= set(names)
