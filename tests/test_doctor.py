"""`lit-mnist doctor` on one machine: all is well, and planted faults; tests/cluster/test_doctor.py has other hosts."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_mnist import ToyModel, checks
from lit_mnist.checks import Case, Line
from lit_mnist.examination import Facts
from lit_mnist.launch import Launch
from lit_mnist.measure import Measured
from tests.conftest import CONFIGS, Command, start

ONE = ("doctor", "--trainer.accelerator", "cpu", "--trainer.devices", "1")
TWO = (*ONE[:-1], "2", "--timeout", "120")


class SlowAndDrawing(nn.Module):
    """Takes its time on rank 1, and adds noise of its own, which no seed explains."""

    def __init__(self) -> None:
        super().__init__()
        self.network = ToyModel()
        self.draws = torch.Generator().manual_seed(torch.initial_seed())

    def forward(self, images: Tensor) -> Tensor:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            torch.ones(3_000_000).sin()
        return self.network(images) + torch.randn((len(images), 10), generator=self.draws)


def lines_of(text: str) -> dict[str, tuple[str, str]]:
    """State and value by check."""
    found = re.findall(r"^(ok|warning|fail) +([a-z-]+(?: [a-z]+)*)  +(.*)", text, re.MULTILINE)
    return {check: (state, value) for state, check, value in found}


def test_one_process(command: Command) -> None:
    text = command(*ONE, "--config", str(CONFIGS / "mnist.yaml"), "--json", "found.json")
    found = lines_of(text)
    assert {state for state, _ in found.values()} == {"ok"}, text
    assert list(found) == [
        *("launcher", "variables", "versions", "devices", "threads", "limits", "run folder", "data"),
        *("compute", "training", "epoch"),
    ]
    assert found["epoch"][1].startswith("860 steps, about ")
    assert not Path("runs").exists()
    report = json.loads(Path("found.json").read_text())
    assert report["status"] == 0
    assert report["measured"]["difference"] <= 1e-6
    assert [line["check"] for line in report["lines"]] == list(found)


def test_a_schedule_of_steps_is_followed(command: Command) -> None:
    schedule = ("--model.lr_scheduler", "torch.optim.lr_scheduler.ExponentialLR", "--model.lr_scheduler.gamma", "0.5")
    found = lines_of(command(*ONE, *schedule, "--model.lr_interval", "step", "--model.optimizer.lr", "0.01"))
    assert found["training"][0] == "ok", found


@pytest.mark.parametrize("file", ["nowhere/found.json", "/"])
def test_a_report_that_cannot_be_written(file: str, refused: Command) -> None:
    line = refused(*ONE, "--json", file)
    assert line == f"2 json={file} cannot be written: give a file in a folder that can be written to"


def test_numbers_of_few_bits(command: Command) -> None:
    found = lines_of(command(*ONE, "--trainer.precision", "bf16-true"))
    assert found["training"][0] == "ok", found


def test_two_processes(tmp_path: Path) -> None:
    options = ("--data.global_batch_size", "50", "--json", "found.json")
    done = start(*TWO, *options, cwd=tmp_path, AWS_SECRET_ACCESS_KEY="xyzzy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "xyzzy" not in done.stdout + (tmp_path / "found.json").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    found = lines_of(done.stdout)
    assert {state for state, _ in found.values()} <= {"ok", "warning"}, done.stdout
    assert found["meeting"][1].startswith("rank 0 (")
    assert found["all the same"][0] == "ok"
    assert re.match(
        r"4 B .* ms, 1.5 MiB .* ms, 16.0 MiB .* ms; [\d,]+ us a message, [\d,]+ MB/s", found["all-reduce"][1]
    )
    assert re.match(r"equal on all ranks: \d+ steps, [\d,]+ samples/s a rank, weights ", found["training"][1])
    assert found["epoch"][1].startswith("1,100 steps")
    assert re.match(r"by hosts 1: \d+%, 2: \d+%, .* 64: \d+%; .* of this host's own memory", found["efficiency"][1])


@pytest.mark.parametrize(
    ("options", "env", "check", "state", "words"),
    [
        (("--config", str(CONFIGS / "ddp_gpu.yaml")), {}, "launch", "fail", "torch finds no GPU on this machine"),
        (("--trainer.default_root_dir", "/proc/x"), {}, "run folder", "fail", "/proc/x cannot be written (/proc: "),
        ((), {"SLURM_NTASKS": "4"}, "surroundings", "warning", "SLURM_NTASKS=4, but this run is 1 process(es)"),
        ((), {"OMP_NUM_THREADS": "500"}, "threads", "warning", "1 process(es) x 500 thread(s) on "),
        ((), {"NODE_RANK": "x"}, "launch", "fail", "NODE_RANK=x in the environment"),
        (
            (),
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"},
            "surroundings",
            "fail",
            "srun started 4 task(s) on 2 host(s), but the run is 1 node(s) x 1 device(s)",
        ),
        (("--trainer.num_nodes", "2"), {}, "surroundings", "fail", "trainer.num_nodes=2, but MASTER_ADDR, MASTER_PORT"),
        (
            ("--trainer.devices", "2"),
            {"GLOO_SOCKET_IFNAME": "ib7"},
            "surroundings",
            "fail",
            "GLOO_SOCKET_IFNAME=ib7, but ",
        ),
        (("--model.network", "torch.nn.Identity"), {}, "launch", "fail", "model.network must map images"),
        (("--trainer.strategy", "single_device"), {}, "launch", "fail", "=single_device: the doctor examines ddp"),
    ],
)
def test_a_planted_fault(
    options: tuple[str, ...],
    env: dict[str, str],
    check: str,
    state: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lit_mnist import main

    monkeypatch.chdir(tmp_path)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    status = 0
    try:
        main([*ONE, *options])
    except SystemExit as ended:
        status = int(ended.code or 0)
    said = capsys.readouterr()
    found = lines_of(said.out)
    assert check in found, said.out + said.err
    assert found[check][0] == state
    assert words in found[check][1]
    if check != "launch":  # whose line holds it
        assert re.search(rf"^{state} +{check} .*\n {{20}}", said.out, re.MULTILINE), "no remedy"
    assert status == (state == "fail")
    assert said.err == ""
    assert not (tmp_path / "runs").exists()


def test_faults_that_show_in_training(tmp_path: Path) -> None:
    done = start(*TWO, "--model.network", "tests.test_doctor.SlowAndDrawing", cwd=tmp_path)
    assert done.returncode == 1
    found = lines_of(done.stdout)
    assert found["compute"][0] == "warning", done.stdout + done.stderr
    assert "slow: rank 1 (" in found["compute"][1]
    assert found["training"][0] == "fail", done.stdout
    assert found["training"][1].endswith("from one process's, above 1e-04")


FACTS = Facts(
    host="node1",
    versions={"torch": "2.14.1"},
    devices=[],
    driver="",
    cores=8,
    host_cores=8,
    omp_threads=4,
    open_files=1 << 20,
    locked_memory=None,
    shared_memory=1 << 30,
    variables={},
    interfaces={"127.0.0.1": "lo", "10.0.0.1": "eth0"},
    folder="/runs",
    folder_problem="",
    folder_free=1 << 30,
    data="d" * 64,
    data_problem="",
)
LAUNCH = Launch(
    launcher="SLURM",
    num_nodes=2,
    devices=2,
    accelerator="cpu",
    backend="gloo",
    gpus=0,
    cores=8,
    is_repeatable=True,
    interfaces=("lo", "eth0"),
    environ={},
)
MEASURED = Measured(
    is_reduced_right=True,
    reduce_s={4: 60e-6, 2**20: 2e-3, 2**24: 30e-3},
    compute_s=[0.01] * 4,
    step_s=0.013,
    samples_per_s=1000.0,
    steps=20,
    steps_per_epoch=100,
    weights=["a"] * 4,
    difference=1e-6,
    tolerance=1e-4,
    gradient=2**20,
)


def case(*facts: dict[str, Any], **changes: Any) -> Case:
    ranks = [replace(FACTS, **changed) for changed in (facts or [{}])]
    return Case(**{"launch": LAUNCH, "ranks": ranks, **changes})


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        (case({"open_files": 256}), ("limits", "warning", "open files 256", "ulimit -n 65536")),
        (
            case({"shared_memory": 2**20}, launch=replace(LAUNCH, accelerator="cuda")),
            ("limits", "warning", "/dev/shm 1 MiB free", "docker run --shm-size=1g"),
        ),
        (
            case({"locked_memory": 2**23}, launch=replace(LAUNCH, accelerator="cuda")),
            ("limits", "warning", "locked memory 8 MiB", "ulimit -l unlimited"),
        ),
        (case({"folder_free": 100}, params=1000), ("run folder", "fail", "checkpoints take", "free space")),
        (case({"omp_threads": 8}), ("threads", "warning", "2 process(es) x 8 thread(s) on 8", "OMP_NUM_THREADS=4")),
        (case({"versions": {"torch": "absent"}}), ("versions", "fail", "torch not installed", "install lit-mnist")),
        (
            case({"data": "", "data_problem": "file x is damaged: get another"}),
            ("data", "fail", "file x is damaged", "get another"),
        ),
        (
            case({}, {"host": "node2", "versions": {"torch": "2.9"}}, {"host": "node3"}),
            ("same versions", "fail", "torch differs: rank 1 (node2) 2.9, the others 2.14.1", "the same torch"),
        ),
        (
            case({}, {"host": "node2", "data": ""}, {}),
            ("same data", "fail", "differs: rank 1 (node2) damaged, the others dddddddddddd", "where the data differ"),
        ),
        (
            case({}, {"host": "node2"}, {}, configs=[{"a": "1"}, {"a": "2"}, {"a": "1"}]),
            ("same config", "fail", "a differs: rank 1 (node2) 2, the others 1", "the same options"),
        ),
        (
            case({}, {"host": "node2"}, seen=[True, False]),
            ("same folder", "fail", "is not seen on node2", "a file system that all hosts share"),
        ),
        (
            case({}, {}, {}, {"host": "node2"}, measured=replace(MEASURED, compute_s=[0.01, 0.01, 0.01, 0.02])),
            ("compute", "warning", "slow: rank 3 (node2), 2.0 times the fastest", "what else runs there"),
        ),
        (
            case({}, {}, {}, {"host": "node2"}, measured=replace(MEASURED, weights=["a", "a", "a", "b"])),
            ("training", "fail", "the ranks' weights differ: differs: rank 3 (node2) b", "draw nothing"),
        ),
        (
            case({}, {}, {}, {}, measured=replace(MEASURED, difference=float("nan"))),
            ("training", "fail", "weights nan from one process's, above 1e-04", "a function of its input"),
        ),
        (
            case({}, {}, {}, {}, measured=replace(MEASURED, is_reduced_right=False)),
            ("all-reduce", "fail", "sums are wrong", "NCCL_DEBUG"),
        ),
    ],
)
def test_what_a_check_finds(known: Case, wanted: tuple[str, str, str, str]) -> None:
    found = checks.look((*checks.ALONE, *checks.TOGETHER, *checks.MEASURED), known)
    (line,) = [line for line in found if line.state != "ok"]
    assert (line.check, line.state) == wanted[:2]
    assert wanted[2] in line.value
    assert wanted[3] in line.remedy


def test_where_all_is_well_nothing_else_is_said() -> None:
    known = case(
        {}, {}, {"host": "node2"}, {"host": "node2"}, measured=MEASURED, configs=[{"a": "1"}] * 4, seen=[True] * 4
    )
    found = checks.look((*checks.ALONE, *checks.TOGETHER, *checks.MEASURED), known)
    assert {line.state for line in found} == {"ok"}, found
    assert Line("all the same", "ok", "versions, data, config and run folder on every rank") in found


def test_what_more_hosts_bring() -> None:
    """Four ranks: a word in 60 us makes 10 us a message, 16 MiB in 29.94 ms more 840.6 MB/s between neighbours."""
    assert MEASURED.alpha == pytest.approx(10e-6)
    assert MEASURED.bandwidth == pytest.approx(1.5 * 2**24 / 29.94e-3)
    assert MEASURED.efficiency(1) == 1.0
    reduce = 2 * 7 * 10e-6 + 2 * 7 / 8 * 2**20 / MEASURED.bandwidth
    assert MEASURED.efficiency(8) == pytest.approx(0.01 / (0.01 + reduce))
    (line,) = [
        line
        for line in checks.look(checks.MEASURED, case({}, {}, {}, {"host": "node2"}, measured=MEASURED))
        if line.check == "efficiency"
    ]
    assert "64: 67%; all pay (ring all-reduce" in line.value


def test_every_check_is_on_its_page() -> None:
    page = (CONFIGS.parent / "docs" / "doctor.md").read_text()
    source = (CONFIGS.parent / "lit_mnist" / "checks.py").read_text()
    names = set(re.findall(r'Line\(\s*"([^"]+)"', source)) - {"all the same"}
    assert names
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
