"""benchmarks/gpu_suite.sh without a GPU: order, limits, a dry run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import kernels
import pytest
import torch
from gpu import sweeps

from tests.kernels.backends import tables_of
from tests.kernels.inputs import CODECS

ROOT = Path(__file__).resolve().parents[2]
PY = sys.executable
RUNNER = f"""
PART=A OUT={{out}} WORK={{out}}/work SECONDS_LEFT=90 PYTHON={PY}
source {ROOT / "benchmarks" / "gpu" / "runner.sh"}
"""


@pytest.mark.slow
def test_sections_run_in_order_and_a_bad_one_stops_nothing(tmp_path: Path) -> None:
    script = (
        RUNNER.format(out=tmp_path)
        + """
    section first 60 "bash json" bash -c 'echo {limit} >{json}; echo seen'
    section fails 60 "" bash -c 'echo last words; exit 3'
    section stuck 6 "" bash -c 'sleep 60 & wait'
    section lacking 60 "json no_such_package" true
    section last 60 "" true
    END=$SECONDS
    section late 60 "" true
    exit $FAILED
    """
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    summary = (tmp_path / "summary_A.txt").read_text()
    verdicts = [line.partition(",")[0] for line in summary.splitlines() if ": " in line]
    expected = "first: passed, fails: failed (3), stuck: time limit, lacking: needs no_such_package"
    assert verdicts == [*expected.split(", "), "last: passed", "late: no time left"]
    assert done.returncode == 1 and {"seen", "last words"} < set(summary.splitlines())
    with tarfile.open(tmp_path / "A.tar.gz") as archive:
        assert archive.extractfile("./first.json").read() == b"55\n"
        assert {"./fails.log", "./summary_A.txt"} < set(archive.getnames())


@pytest.mark.slow
@pytest.mark.parametrize("part", "ABCD")
def test_dry_run_of_the_suite(part: str, tmp_path: Path) -> None:
    environment = os.environ | {"DRY": "1", "PYTHON": PY, "CACHE": str(tmp_path / "cache")}
    environment |= {"OMP_NUM_THREADS": "1"}
    command = [str(ROOT / "benchmarks" / "gpu_suite.sh"), part, str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    sections = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    assert done.stdout.count(": passed, ") == len(sections) > 0, done.stdout


def test_memory_checks_choose_tests_that_exist() -> None:
    """pytest -k is silent about words that fit none."""
    part = (ROOT / "benchmarks" / "gpu_suite.sh").read_text().partition("part_D() {")[2]
    chosen = "".join(re.findall(r'"([^"]*)"', part.partition("}")[0]))
    words = set(re.findall(r"(?<![$\w])[a-z]\w+", chosen)) - {"and", "or", "part_"}
    modules = ("test_gpu.py", "test_numbers.py")
    tests = "".join((ROOT / "tests" / "kernels" / name).read_text() for name in modules)
    names = re.findall(r"def (test_\w+)", tests) + [codec.name for codec in CODECS]
    assert {word for word in words if not any(word in name for name in names)} == set()
    assert {"g96", "many_codecs", "way_of_storing"} < words


def jobs_of(tasks: list, buffers: list) -> list[int]:
    return [len(table.jobs) for table in tables_of(tasks, buffers)]


@pytest.mark.parametrize("jobs", kernels.TABLE_SIZES)
def test_launch_overhead_is_measured_on_tables_of_so_many_jobs(jobs: int) -> None:
    bench = kernels.Bench(torch.device("cpu"), 0)
    codec = kernels.CODECS[0]
    tasks, buffers = bench.many(codec, codec.group_size, torch.bfloat16, jobs)
    (table,) = tables_of(tasks, buffers)
    assert len(table.jobs) == jobs and len(table.launches()) == 1


def test_forms_of_launch_are_compared_on_the_same_elements(monkeypatch) -> None:
    """As one job, and as two that no rows of one job can hold."""
    found = []

    def noted(self, name: str, codec: str, tasks: list, buffers: list) -> None:
        found.append((jobs_of(tasks, buffers), sum(task.numel for task, _ in tasks)))

    monkeypatch.setattr(kernels.Bench, "tasks", noted)
    for make in sweeps.forms(kernels.Bench(torch.device("cpu"), 0), 1e6):
        make()
    single, split = found[::2], found[1::2]
    assert len(single) == 6 and {tuple(jobs) for jobs, _ in single} == {(1,)}
    assert {tuple(jobs) for jobs, _ in split} == {(2,)}
    assert [numel for _, numel in single] == [numel for _, numel in split]


def test_calls_of_many_launches_fit_the_queue(monkeypatch) -> None:
    """The device sleeps until all are queued: else a sweep would time the host."""
    slept, work = [], []
    event = type("Event", (), {"record": lambda self: None, "elapsed_time": lambda self, _: 1.0})
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    kernels.seconds_of(work.append, 1, 20, True)
    assert len(work) == 1 + 20 and slept == [20 * kernels.SLEEP_CYCLES]
    work.clear()
    kernels.seconds_of(work.append, 1, 20, True, launches=64)
    assert len(work) == 1 + 8 and slept[1:] == [8 * 64 * kernels.SLEEP_CYCLES]


@pytest.mark.parametrize(("mib", "code"), [(1, 0), (65, 1)])
def test_wheels_for_a_machine_without_a_network_take_at_most_64_mib(
    mib: int, code: int, tmp_path: Path
) -> None:
    """Instead of Python a script runs, which notes its arguments; the second wheel has ``mib``."""
    python, wheels = tmp_path / "python", tmp_path / "wheels"
    python.write_text(
        f"""#!/usr/bin/env bash
        echo "$@" >>{tmp_path}/calls
        if [ "$3" = download ]; then head -c {mib}M /dev/zero >{wheels}/one.whl; fi
        """
    )
    python.chmod(0o755)
    command = [str(ROOT / "benchmarks" / "gpu" / "collect_wheels.sh"), str(wheels), "3.11"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHON": str(python)}, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert ("more than 64 MiB" in done.stderr) == (code == 1)
    built, downloaded = (tmp_path / "calls").read_text().splitlines()
    assert built.startswith(f"-m pip wheel --no-deps --no-build-isolation --wheel-dir {wheels} ")
    assert " --python-version 3.11 --platform manylinux_2_28_x86_64 " in downloaded
    assert f" --dest {wheels} " in downloaded
