"""How commands end: with what status, what is said, and that none of their processes is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lit_mnist.wire import started_at
from tests.conftest import ENVIRONMENT
from tests.test_resume import SHORT

TWO = ("--trainer.devices", "2", "--timeout", "60")  # also the start has to fit into it
SLOW = ("--trainer.callbacks+=tests.stops.Pace", "--trainer.callbacks.seconds")
SCRIPT = Path(__file__).parent / "script.py"


class Command:
    """A command in a process group of its own, whose output goes to a file."""

    def __init__(self, *command: str, cwd: Path, **env: str) -> None:
        self.out = cwd / "out"
        with self.out.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env={**os.environ, **ENVIRONMENT, **env},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @classmethod
    def lit_mnist(cls, *options: str, cwd: Path) -> "Command":
        return cls(sys.executable, "-m", "lit_mnist", *options, cwd=cwd)

    @property
    def text(self) -> str:
        return self.out.read_text()

    @property
    def errors(self) -> list[str]:
        start = "lit-mnist: error: "
        return [line.removeprefix(start) for line in self.text.splitlines() if line.startswith(start)]

    def until(self, words: str) -> None:
        deadline = time.monotonic() + 90
        while words not in self.text:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def signal(self, received: signal.Signals, to: str = "the first") -> None:
        every = [self.process.pid, *self.others()]
        for pid in {"the first": every[:1], "the other": every[1:], "all": every}[to]:
            os.kill(pid, received)

    def others(self) -> list[int]:
        """The living processes of the command but the first."""
        listed = subprocess.run(["pgrep", "-g", str(self.process.pid)], capture_output=True, text=True).stdout.split()
        return [pid for pid in map(int, listed) if pid != self.process.pid and started_at(pid)]

    def end(self, timeout: float = 120) -> int:
        """Wait for the end of the first; no other must be left then."""
        try:
            status = self.process.wait(timeout)
            left = self.others()
        finally:
            subprocess.run(["pkill", "-KILL", "-g", str(self.process.pid)])
        assert not left, self.text
        return status


@pytest.mark.parametrize(
    ("received", "to", "status"),
    [
        (signal.SIGINT, "all", 75),  # as Ctrl-C in a terminal
        pytest.param(signal.SIGTERM, "the first", 75, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, "the other", 75, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_leaves_no_process(received: signal.Signals, to: str, status: int, tmp_path: Path) -> None:
    command = Command.lit_mnist("fit", *SHORT, *TWO, *SLOW, "0.3", cwd=tmp_path)
    command.until("starts from")
    command.signal(received, to)
    assert command.end() == status, command.text
    assert command.text.count("asked to stop; Ctrl-C twice ends it at once") == (to != "the other")
    assert not command.errors


@pytest.mark.parametrize(
    ("received", "to", "status", "error"),
    [
        (signal.SIGINT, "all", 130, ""),
        pytest.param(signal.SIGTERM, "the first", 143, "", marks=pytest.mark.slow),
        (signal.SIGTERM, "the other", 1, "ended by SIGTERM"),
        pytest.param(signal.SIGKILL, "the other", 1, "its connection closed without a word", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, "the other", 1, "has given no sign of life for 60 s", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, "the first", -9, "has given no sign of life for 60 s", marks=pytest.mark.slow),
    ],
)
def test_an_evaluation_that_is_ended_leaves_no_process(
    received: signal.Signals, to: str, status: int, error: str, tmp_path: Path
) -> None:
    command = Command.lit_mnist("validate", *TWO, "--data.eval_batch_size", "1", cwd=tmp_path)
    command.until("starts from")
    command.signal(received, to)
    if status != -9:
        ended = command.end()
        assert ended == status or (received == signal.SIGKILL and ended == -9), command.text  # Lightning may see it too
    else:  # it was killed by the other, which then ends itself
        assert command.process.wait(120) == status, command.text
        time.sleep(3)
        assert command.end() == status
    assert len(command.errors) == bool(error), command.text
    assert not error or error in command.errors[0]


@pytest.mark.parametrize("to", [pytest.param("the first", marks=pytest.mark.slow), "all"])
def test_ctrl_c_twice_ends_it_at_once_and_not_other_signals(to: str, tmp_path: Path) -> None:
    command = Command.lit_mnist("fit", *SHORT, *TWO, *SLOW, "60", cwd=tmp_path)
    command.until("starts from")
    for received in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
        command.signal(received, to)
        time.sleep(0.2)
    assert command.process.poll() is None
    command.signal(signal.SIGINT, to)
    assert command.process.wait(5) == 130
    time.sleep(2)  # the other may have to find out
    command.end()
    assert "lit-mnist: note: ended at once by a second Ctrl-C" in command.text


@pytest.mark.parametrize("how", ["STOP", pytest.param("KILL", marks=pytest.mark.slow)])
def test_a_process_that_cannot_end_after_the_command_has(how: str, tmp_path: Path) -> None:
    """Its part of the work is done, so to be killed does no harm; frozen, it would be left for ever."""
    planted = (
        "--trainer.callbacks+=tests.stops.AtExit",
        "--trainer.callbacks.how",
        how,
        "--trainer.callbacks.rank",
        "1",
    )
    command = Command.lit_mnist("validate", "--trainer.devices", "2", "--timeout", "30", *planted, cwd=tmp_path)
    assert command.end() == (how == "STOP"), command.text
    assert ("did not end within 30 s after the others, and is killed" in command.text) == (how == "STOP")


def test_a_process_that_is_frozen_before_the_ranks_have_met(tmp_path: Path) -> None:
    command = Command.lit_mnist("validate", "--trainer.devices", "2", "--timeout", "5", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (others := command.others()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(others[0], signal.SIGSTOP)
    assert command.end() == 1, command.text
    assert "did not come" in command.errors[-1]


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_output_that_takes_nothing(ranks: str, tmp_path: Path) -> None:
    run = ("-m", "lit_mnist", "validate", "--trainer.devices", ranks, "--data.eval_batch_size", "64")
    full = f"{sys.executable} {' '.join(run)} >/dev/full"
    cut = f"set -o pipefail; {sys.executable} {' '.join(run)} | true"
    for line, reason in ((full, "No space left on device"), (cut, "Broken pipe")):
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True
        )
        assert done.returncode == 1
        said = f"lit-mnist: error: standard output cannot be written ({reason}): send it to a file"
        assert [line for line in done.stderr.splitlines() if "error" in line] == [said], done.stderr


def test_streams_that_are_closed(tmp_path: Path) -> None:
    line = f"{sys.executable} -m lit_mnist fit {' '.join(SHORT)} --trainer.devices 1 <&- >&- 2>&-"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env={**os.environ, **ENVIRONMENT})
    assert done.returncode == 0
    assert (tmp_path / "runs" / "version_0" / "metrics.csv").read_text().startswith("step,")


def test_a_script_sees_its_ctrl_c(tmp_path: Path) -> None:
    script = "from lit_mnist import main\ntry:\n    main({})\nexcept KeyboardInterrupt:\n    print('seen')\n    raise\n"
    options = ["fit", *SHORT, "--trainer.devices", "1", *SLOW, "0.3"]
    (tmp_path / "script.py").write_text(script.format(options))
    command = Command(sys.executable, "script.py", cwd=tmp_path)
    command.until("starts from")
    command.signal(signal.SIGINT)
    assert command.end() == -signal.SIGINT
    assert "seen" in command.text


@pytest.mark.parametrize(
    ("how", "status", "error"),
    [
        ("", 0, ""),
        pytest.param("raise", 1, "failed at batch 2: ValueError: planted", marks=pytest.mark.slow),
        ("kill", 1, "its connection closed without a word (killed? out of memory?)"),
    ],
)
def test_a_script_with_a_watched_trainer(how: str, status: int, error: str, tmp_path: Path) -> None:
    """Its ranks may end long after one another, and are no failure to the others for it."""
    command = Command(sys.executable, str(SCRIPT), how, cwd=tmp_path)
    ended = command.end()
    assert ended == status or (how == "kill" and ended == -9), command.text  # Lightning may have seen it too
    assert command.text.count("done") == (0 if how else 2)
    if how == "raise":
        assert command.text.count("Traceback") == 1
        assert "ValueError: planted" in command.text
    elif error:
        assert error in command.text
