"""How a command ends: what it says, what the other ranks are told, and the exit status."""

import errno
import os
import sys
import traceback
from collections.abc import Callable

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_mnist.errors import RunError, UserError, complain, is_lightnings, one_line
from lit_mnist.preemption import STOPPED, StopOnRequest, StoppedError, requeue
from lit_mnist.report import shown


def run_to_its_end(stop: StopOnRequest, command: Callable[[], object]) -> int:
    """Run a command, and part from the other ranks.

    Args:
        stop: Of the command; it knows the other ranks.
        command: Its errors are shown here, in one line where that explains them.

    Returns:
        The exit status: 0 done, or stopped on request and queued again; 1 failed; 2 what was typed cannot work; 75
        stopped on request.
    """
    try:
        try:
            command()
            status = 0
        except StoppedError as stopped:
            status = _stopped(stop, f"{stopped}")
        status = stop.peers.leave(status)
    except Exception as error:
        status = _failed(stop, error)
    except SystemExit as ended:
        if ended.code and not stop.peers.is_alone:
            stop.peers.fail(f"exit status {ended.code}")
            _end_alone(ended.code if isinstance(ended.code, int) else 1)
        raise
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()  # or its threads may abort the exit
    return status


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
    if line is not None:
        complain(f"[rank {rank_zero_only.rank}] {line}" if line and rank_zero_only.rank else line)
    elif stop.peers.is_alone:
        raise error
    elif _is_collective(error):
        # The rank that failed first says it itself; this one's traceback would only bury its.
        complain(stop.peers.explain(one_line(str(error))))
    else:
        traceback.print_exception(error)
    if not stop.peers.is_alone:
        stop.peers.fail(line or one_line(f"{type(error).__name__}: {error}"))
        _end_alone(status)
    return status


def _end_alone(status: int) -> None:
    """End this process without leaving the process group, which would be to wait for the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _explained(error: Exception) -> tuple[int, str | None]:
    """Exit status of an error, and the line that says it all; None: its traceback is needed."""
    if isinstance(error, UserError):
        return 2, str(error)
    if isinstance(error, RunError):
        return 1, str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        return 1, f"{error.filename or 'a file of the run'} cannot be written ({error.strerror})"
    if is_lightnings(error):
        return 2, str(error)
    return 1, None


def _is_collective(error: Exception) -> bool:
    """Whether it is another rank's failure, as a collective shows it: gloo raises bare RuntimeErrors."""
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "/gloo/" in str(error))
