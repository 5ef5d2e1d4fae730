"""What several test files need: commands in this process and in processes of their own, and a trained checkpoint."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_mnist import main

CONFIGS = Path(__file__).parent.parent / "configs"

# For processes of their own: one thread each, and the class paths of these tests.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}

Command = Callable[..., str]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's variables and no command line of pytest's in the tests."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_JOB_ID", "SLURM_NTASKS", "PL_GLOBAL_SEED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", [str(Path(sys.executable).parent / "lit-mnist")])


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command in this process, in an empty folder, and returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def call(*args: str) -> str:
        capsys.readouterr()
        try:
            main(list(args))
        except SystemExit as ended:  # --help and --print_config end so
            if ended.code:
                raise
        return capsys.readouterr().out

    return call


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command that must fail; returns `<status> <its one line on stderr>`, and finds no run folder left."""
    monkeypatch.chdir(tmp_path)

    def call(*args: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(args))
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert not list(tmp_path.glob("runs/*")), "something half-written"
        return f"{ended.value.code} {lines[0].removeprefix('lit-mnist: error: ')}"

    return call


def start(*args: str, cwd: Path, launcher: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
    """Run `lit-mnist *args` in processes of its own (several with --trainer.devices) and wait for it."""
    run = [*launcher] if launcher else [sys.executable]
    return subprocess.run(
        [*run, "-m", "lit_mnist", *args],
        cwd=cwd,
        env={**os.environ, **ENVIRONMENT, **env},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a short training by the command line, made once."""
    root = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lit-mnist"])
        main(["fit", "--config", str(CONFIGS / "smoke.yaml"), "--trainer.default_root_dir", str(root)])
    return root / "version_0"
