"""What the environment variables of launchers say about this process.

Imports nothing of size: it is asked before torch is imported.
"""

from collections.abc import Mapping

from lit_mnist.errors import UserError

_RANKS = "RANK", "NODE_RANK", "LOCAL_RANK"
_NUMBERS = *_RANKS, "GROUP_RANK", "WORLD_SIZE", "MASTER_PORT"


def require_numbers(environ: Mapping[str, str]) -> None:
    """Refuse what Lightning and torch would take for numbers, and is none.

    Raises:
        UserError: If one of the variables is no whole number, or the port none that can be used.
    """
    for name in _NUMBERS:
        value = environ.get(name, "1")
        largest = 65535 if name == "MASTER_PORT" else 2**31
        if not (value.isascii() and value.isdigit() and int(value) <= largest) or (name, value) == ("MASTER_PORT", "0"):
            wanted = f"a port, 1 ... {largest}" if name == "MASTER_PORT" else "a whole number"
            raise UserError(f"{name}={value} in the environment: expected {wanted}; correct it, or unset it")


def is_srun_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of a step's tasks, not a shell of a batch job or of a person."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < 2**31 and "SLURM_PTY_PORT" not in environ


def slurm_job(environ: Mapping[str, str]) -> str | None:
    """`<job>` or `<array job>_<task>` where SLURM runs this command, with srun or from a batch script; else None."""
    if "SLURM_JOB_ID" not in environ or not (is_srun_task(environ) or environ.get("ENVIRONMENT") == "BATCH"):
        return None
    task = environ.get("SLURM_ARRAY_TASK_ID")
    return f"{environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else environ["SLURM_JOB_ID"]


def is_first_of_host(environ: Mapping[str, str]) -> bool:
    """Whether this is the first process of its host, which speaks for it before the ranks have met."""
    local = environ.get("LOCAL_RANK") or (environ.get("SLURM_LOCALID") if is_srun_task(environ) else None)
    return local in (None, "0")


def is_rank_0(environ: Mapping[str, str]) -> bool:
    """Whether this is the first process of the run, as far as that is known before Lightning says it."""
    ranks = [environ.get(name) for name in _RANKS]
    return all(rank in (None, "0") for rank in (*ranks, environ.get("SLURM_PROCID") if is_srun_task(environ) else None))


def run_name(environ: Mapping[str, str]) -> str:
    """What tells a run's processes from those of others: the launcher's names for it."""
    names = "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"
    return " ".join(["lit-mnist", *(f"{name}={environ[name]}" for name in names if name in environ)])
