"""How a command ends: what it says, what the other ranks are told, and the exit status."""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_mnist.errors import FinishedError, RunError, UserError, complain, is_lightnings, one_line
from lit_mnist.preemption import STOPPED, StopOnRequest, StoppedError, requeue
from lit_mnist.report import shown
from lit_mnist.strategy import is_of_another_rank
from lit_mnist.surroundings import is_first_of_host

_NOT_WRITTEN = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EPIPE
_LAUNCHER_ACTS = 20.0  # seconds that a launcher may take to end the other processes of a host once one has failed
_NO_OUTPUT = "standard output cannot be written ({}): send it to a file"


def run_to_its_end(stop: StopOnRequest, command: Callable[[], object], is_own_process: bool) -> int:
    """Run a command, and part from the other ranks.

    Args:
        stop: Of the command; it knows the other ranks.
        command: Its errors are shown here, in one line where that explains them.
        is_own_process: Whether the process ends with the command.

    Returns:
        The exit status: 0 done, or stopped on request and queued again; 1 failed; 2 what was typed cannot work; 75
        stopped on request.
    """
    handler = signal.getsignal(signal.SIGINT)
    try:
        try:
            command()
            status = 0
        except StoppedError as stopped:
            status = _stopped(stop, f"{stopped}")
        except FinishedError as finished:
            status = finished.status
        status = stop.peers.leave(status)
    except Exception as error:
        status = _failed(stop, error)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # as rich ends
            return _failed(stop, RunError(_NO_OUTPUT.format("Broken pipe")))
        is_interrupt = isinstance(ended.__context__, KeyboardInterrupt)
        if ended.code and not stop.peers.is_alone:
            stop.peers.fail("KeyboardInterrupt" if is_interrupt else f"exit status {ended.code}")
            _end_alone(stop, 130 if is_interrupt else ended.code if isinstance(ended.code, int) else 1)
        if is_interrupt:  # of a script's process, which wants to see it; Lightning ignores all further ones
            signal.signal(signal.SIGINT, handler)
            raise KeyboardInterrupt from None
        raise
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()  # or its threads may abort the exit
    return stop.peers.see_off(status) if is_own_process else status


def _stopped(stop: StopOnRequest, where: str) -> int:
    """Say where a run has stopped on request, and have it go on later; the exit status."""
    if rank_zero_only.rank:
        return STOPPED
    reason = stop.peers.stop_reason
    is_queued, remedy = requeue(reason)
    path = stop.last.path if stop.last else None
    print(f"stopped at {where} on request ({reason}), checkpoint {shown(path)}: {remedy}", flush=True)
    return 0 if is_queued else STOPPED


def _failed(stop: StopOnRequest, error: Exception) -> int:
    """Say why a run has failed, and tell the other ranks; the exit status."""
    status, line = _explained(error)
    is_said_before = stop.peers.is_alone and not is_first_of_host(os.environ) and stop.requests.wait(_LAUNCHER_ACTS)
    if line is not None and is_said_before:
        pass  # the first of the host has said the same, and the launcher ends the others for it
    elif line is not None:
        complain(f"[rank {rank_zero_only.rank}] {line}" if line and rank_zero_only.rank else line)
    elif stop.peers.is_alone:
        raise error
    elif is_of_another_rank(error):
        # The rank that failed first says it itself; this one's traceback would only bury its.
        complain(stop.peers.explain(one_line(str(error))))
    else:
        traceback.print_exception(error)
    if not stop.peers.is_alone:
        stop.peers.fail(line or one_line(f"{type(error).__name__}: {error}"), is_said=True)
        _end_alone(stop, status)
    return status


def _end_alone(stop: StopOnRequest, status: int) -> None:
    """End this process without leaving the process group, which would be to wait for the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(stop.peers.see_off(status))


def _explained(error: Exception) -> tuple[int, str | None]:
    """Exit status of an error, and the line that says it all; None: its traceback is needed."""
    if isinstance(error, UserError):
        return 2, str(error)
    if isinstance(error, RunError):
        return 1, str(error)
    if isinstance(error, OSError) and error.errno in _NOT_WRITTEN:
        if error.filename is None and _is_output_lost():
            return 1, _NO_OUTPUT.format(error.strerror)
        return 1, f"{error.filename or 'a file of the run'} cannot be written ({error.strerror})"
    if is_lightnings(error):
        return 2, str(error)
    return 1, None


def _is_output_lost() -> bool:
    """Whether standard output takes nothing more; then the rest goes nowhere, or the exit would fail of it again."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
