"""What `lit-mnist doctor` looks at: one list of checks, each a function of what is known by then.

A check returns a `Line`, several, or none where it does not apply. To add one, write the function and put it into
`ALONE` (asked of each process), `TOGETHER` (of all, once they have met) or `MEASURED` (of a short training).
docs/doctor.md lists them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lit_mnist.examination import Facts
from lit_mnist.launch import Launch, findings
from lit_mnist.measure import Measured
from lit_mnist.wire import Member

OK: Literal["ok"] = "ok"
WARNING: Literal["warning"] = "warning"
FAIL: Literal["fail"] = "fail"

_MIB = 2**20
_SLOW = 1.5  # times the fastest rank's step, from where on a rank holds up the others
_PAYS = 1.1  # throughput that twice the hosts must bring


@dataclass(frozen=True)
class Line:
    """What a check found.

    Attributes:
        check: Its name.
        state: `ok`, `warning`, or `fail` where the training would not work.
        value: What was found.
        remedy: What to do, where that is needed.
    """

    check: str
    state: Literal["ok", "warning", "fail"]
    value: str
    remedy: str = ""


@dataclass
class Case:
    """What is known.

    Attributes:
        launch: What the run uses, and what the process finds around it.
        ranks: The facts of each process, in order; before they have met, of this one.
        roll: Who they are and by which address they came; empty for one process.
        masters: How each process resolves the name of rank 0's host.
        params: Parameters of the model.
        configs: The options of each process, by key.
        seen: For each process whether it sees in its folder of runs what rank 0 wrote there.
        meeting_s: Seconds until all had met.
        group_s: Seconds until the process group was there.
        measured: Of the short training.
    """

    launch: Launch
    ranks: list[Facts]
    roll: list[Member] = field(default_factory=list)
    masters: list[str] = field(default_factory=list)
    params: int = 0
    configs: list[dict[str, str]] = field(default_factory=list)
    seen: list[bool] = field(default_factory=list)
    meeting_s: float = 0.0
    group_s: float = 0.0
    measured: Measured | None = None

    def who(self, rank: int) -> str:
        """A rank, in words."""
        return f"rank {rank} ({self.ranks[rank].host})"


Found = Line | Iterable[Line] | None


def look(checks: Sequence[Callable[[Case], Found]], case: Case) -> list[Line]:
    """What checks find, in order."""
    lines: list[Line] = []
    for check in checks:
        found = check(case)
        lines += [] if found is None else [found] if isinstance(found, Line) else list(found)
    return lines


def _launcher(case: Case) -> Iterator[Line]:
    run = case.launch
    value = f"{run.launcher}, {run.world_size} = {run.num_nodes} node(s) x {run.devices} {run.accelerator} device(s)"
    yield Line("launcher", OK, value)
    for finding in findings(run):
        line, _, remedy = finding.line.rpartition(": ")
        yield Line("surroundings", FAIL if finding.is_fatal else WARNING, line or remedy, remedy if line else "")


def _variables(case: Case) -> Found:
    variables = case.ranks[0].variables
    return Line("variables", OK, " ".join(f"{k}={v}" for k, v in variables.items()) or "none of a launcher")


def _versions(case: Case) -> Found:
    found = case.ranks[0].versions
    absent = [name for name, number in found.items() if number == "absent"]
    if absent:
        return Line("versions", FAIL, f"{', '.join(absent)} not installed", "install lit-mnist with its dependencies")
    return Line("versions", OK, ", ".join(f"{name} {number}" for name, number in found.items()))


def _devices(case: Case) -> Found:
    me = case.ranks[0]
    gpus = ", ".join(f"{n} x {name}" for name, n in Counter(me.devices).items())
    return Line("devices", OK, f"{gpus}, {me.driver}" if gpus else f"no GPU; {me.cores} of {me.host_cores} CPU cores")


def _threads(case: Case) -> Found:
    me, ranks = case.ranks[0], case.launch.devices
    threads = me.omp_threads or max(1, me.cores // ranks)
    value = f"{ranks} process(es) x {threads} thread(s) on {me.host_cores} cores"
    if threads > me.cores or ranks * threads > me.host_cores:
        fair = max(1, min(me.cores, me.host_cores // ranks))
        if threads > fair:
            return Line(
                "threads", WARNING, f"{value}: they get into each other's way", f"export OMP_NUM_THREADS={fair}"
            )
    return Line("threads", OK, value)


def _limits(case: Case) -> Found:
    me, uses_gpus = case.ranks[0], case.launch.accelerator == "cuda"
    locked = "no limit" if me.locked_memory is None else f"{me.locked_memory // _MIB:,} MiB"
    shared = "none" if me.shared_memory is None else f"{me.shared_memory // _MIB:,} MiB free"
    value = f"open files {me.open_files:,}, locked memory {locked}, /dev/shm {shared}"
    if me.open_files < 1024:
        return Line("limits", WARNING, value, "ulimit -n 65536 before the command")
    if uses_gpus and me.shared_memory is not None and me.shared_memory < 64 * _MIB:
        return Line("limits", WARNING, value, "NCCL needs more of /dev/shm: docker run --shm-size=1g")
    if uses_gpus and case.launch.num_nodes > 1 and me.locked_memory is not None:
        return Line("limits", WARNING, value, "for InfiniBand, ulimit -l unlimited before the command")
    return Line("limits", OK, value)


def _folder(case: Case) -> Found:
    me = case.ranks[0]
    needed = 3 * 3 * 4 * case.params  # best, last, previous: weights and Adam's two moments in fp32
    if me.folder_problem:
        return Line(
            "run folder",
            FAIL,
            f"{me.folder} cannot be written ({me.folder_problem})",
            "choose another --trainer.default_root_dir",
        )
    value = f"{me.folder}, {me.folder_free // _MIB:,} MiB free"
    if me.folder_free < needed:
        remedy = "free space, or choose another --trainer.default_root_dir"
        return Line("run folder", FAIL, f"{value}, and checkpoints take {needed // _MIB:,} MiB", remedy)
    return Line("run folder", OK, value)


def _data(case: Case) -> Found:
    problem, _, remedy = case.ranks[0].data_problem.rpartition(": ")
    return Line("data", FAIL, problem, remedy) if problem else Line("data", OK, "whole")


def _met(case: Case) -> Iterator[Line]:
    if case.roll:
        came = [
            f"rank {m.rank} ({m.host}, {m.address} by {facts.interfaces.get(m.address, 'another interface')})"
            for m, facts in zip(case.roll, case.ranks, strict=True)
        ]
        to = " or ".join(dict.fromkeys(case.masters))
        yield Line("meeting", OK, f"{_few(came)} in {case.meeting_s:.1f} s, at {to}")
        yield Line("process group", OK, f"{case.launch.backend}, up in {case.group_s:.1f} s")


def _same_versions(case: Case) -> Iterator[Line]:
    for name in case.ranks[0].versions:
        found = [facts.versions[name] for facts in case.ranks]
        if odd := _odd(case, found):
            yield Line("same versions", FAIL, f"{name} {odd}", f"install the same {name} on every host")


def _same_data(case: Case) -> Iterator[Line]:
    whole = [facts.data or "damaged" for facts in case.ranks]
    if odd := _odd(case, [digest[:12] for digest in whole]):
        yield Line("same data", FAIL, odd, "install lit-mnist again where the data differ")


def _same_config(case: Case) -> Iterator[Line]:
    keys = sorted({key for config in case.configs for key in config})
    for key in keys:
        if odd := _odd(case, [config.get(key, "not there") for config in case.configs]):
            yield Line("same config", FAIL, f"{key} {odd}", "give the same options and files on every host")


def _same_folder(case: Case) -> Found:
    blind = sorted({case.ranks[rank].host for rank, seen in enumerate(case.seen) if not seen})
    if blind:
        remedy = "put --trainer.default_root_dir on a file system that all hosts share"
        return Line(
            "same folder", FAIL, f"what rank 0 writes to {case.ranks[0].folder} is not seen on {_few(blind)}", remedy
        )
    return None


def _all_the_same(case: Case) -> Found:
    if len(case.ranks) == 1 or look((_same_versions, _same_data, _same_config, _same_folder), case):
        return None
    return Line("all the same", OK, "versions, data, config and run folder on every rank")


def _reduced(case: Case) -> Found:
    measured = case.measured
    if not measured or len(case.ranks) == 1:
        return None
    if not measured.is_reduced_right:
        return Line("all-reduce", FAIL, "sums are wrong", "try NCCL_DEBUG=INFO, NCCL_P2P_DISABLE=1, other drivers")
    sizes = ", ".join(f"{_size(size)} {1000 * seconds:.2f} ms" for size, seconds in measured.reduce_s.items())
    return Line(
        "all-reduce", OK, f"{sizes}; {measured.alpha * 1e6:,.0f} us a message, {measured.bandwidth / 1e6:,.0f} MB/s"
    )


def _computed(case: Case) -> Found:
    if not case.measured:
        return None
    times = case.measured.compute_s
    fastest, slowest = min(times), max(times)
    value = (
        f"{1000 * fastest:.2f} ... {1000 * slowest:.2f} ms a step of its own"
        if len(times) > 1
        else f"{1000 * fastest:.2f} ms a step"
    )
    slow = [case.who(rank) for rank, seconds in enumerate(times) if seconds > _SLOW * fastest]
    if slow:
        remedy = "see what else runs there, its clocks and its threads: all others wait for it at every step"
        return Line(
            "compute", WARNING, f"{value}; slow: {_few(slow)}, {slowest / fastest:.1f} times the fastest", remedy
        )
    return Line("compute", OK, value)


def _trained(case: Case) -> Found:
    measured = case.measured
    if not measured:
        return None
    value = (
        f"{measured.steps} steps, {measured.samples_per_s / len(case.ranks):,.0f} samples/s a rank, weights "
        f"{measured.difference:.1e} from one process's"
    )
    if len(set(measured.weights)) > 1:
        groups = _odd(case, [digest[:8] for digest in measured.weights])
        return Line(
            "training", FAIL, f"the ranks' weights differ: {groups}", "make the network draw nothing of its own"
        )
    if not measured.difference <= measured.tolerance:
        remedy = "the network may not be a function of its input alone (BatchNorm?), or a rank computes wrongly"
        return Line("training", FAIL, f"{value}, above {measured.tolerance:.0e}", remedy)
    return Line("training", OK, f"equal on all ranks: {value}" if len(case.ranks) > 1 else value)


def _expected(case: Case) -> Iterator[Line]:
    measured = case.measured
    if not measured:
        return None
    epoch = measured.steps_per_epoch * measured.step_s
    yield Line("epoch", OK, f"{measured.steps_per_epoch:,} steps, about {epoch:,.1f} s of training")
    if len(case.ranks) == 1:
        return
    local = len({facts.host for facts in case.ranks}) == 1
    hosts = [2**n for n in range(7)]
    shares = {count: measured.efficiency(count * case.launch.devices) for count in hosts}
    speed = {count: count * share for count, share in shares.items()}
    last = next((n for n in hosts[:-1] if speed[2 * n] < _PAYS * speed[n]), hosts[-1])
    row = ", ".join(f"{count}: {share:.0%}" for count, share in shares.items())
    stop = f"more than {last} do not pay" if last < hosts[-1] else "all pay"
    of = "this host's own memory, not of a network" if local else "this network"
    yield Line(
        "efficiency", OK, f"by hosts {row}; {stop} (ring all-reduce, alpha-beta model, no overlap, figures of {of})"
    )


ALONE: tuple[Callable[[Case], Found], ...] = (
    _launcher,
    _variables,
    _versions,
    _devices,
    _threads,
    _limits,
    _folder,
    _data,
)
TOGETHER: tuple[Callable[[Case], Found], ...] = (
    _met,
    _same_versions,
    _same_data,
    _same_config,
    _same_folder,
    _all_the_same,
)
MEASURED: tuple[Callable[[Case], Found], ...] = (_reduced, _computed, _trained, _expected)


def _odd(case: Case, values: Sequence[Any]) -> str:
    """The values of ranks that differ, the rarer ones with their ranks; empty where all are equal."""
    counts = Counter(values)
    if len(counts) == 1:
        return ""
    common = counts.most_common(1)[0][0]
    odd = [f"{case.who(rank)} {value}" for rank, value in enumerate(values) if value != common]
    return f"differs: {_few(odd)}, the others {common}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _size(size: int) -> str:
    return f"{size} B" if size < 1024 else f"{size / 1024:,.0f} KiB" if size < _MIB else f"{size / _MIB:,.1f} MiB"
