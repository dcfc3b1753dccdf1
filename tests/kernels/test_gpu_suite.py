"""benchmarks/gpu_suite.sh without a GPU: a rehearsal with fakes, order, limits, a dry run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import kernels
import one_gpu
import pytest
import torch

from tests.kernels import fake_gpu_machine
from tests.kernels.backends import tables_of
from tests.kernels.inputs import CODECS

ROOT = Path(__file__).resolve().parents[2]
PY = sys.executable
RUNNER = f"""
PART=1 OUT={{out}} WORK={{out}}/work SECONDS_LEFT=90 PYTHON={PY}
source {ROOT / "benchmarks" / "gpu" / "runner.sh"}
"""
SECONDS = 780  # of both calls: 15 minutes without starts and transfers
INSTALLATION = 15  # seconds of a call
LEFT = {"zero2_2", "fsdp2_replicas", "loss"}  # sections that get what is left


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
    summary = (tmp_path / "summary_1.txt").read_text()
    verdicts = [line.partition(",")[0] for line in summary.splitlines() if ": " in line]
    expected = "first: passed, fails: failed (3), stuck: time limit, lacking: needs no_such_package"
    assert verdicts == [*expected.split(", "), "last: passed", "late: no time left"]
    assert done.returncode == 1 and {"seen", "last words"} < set(summary.splitlines())
    with tarfile.open(tmp_path / "1.tar.gz") as archive:
        assert archive.extractfile("./first.json").read() == b"55\n"
        assert {"./fails.log", "./summary_1.txt"} < set(archive.getnames())


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> fake_gpu_machine.Rehearsal:
    return fake_gpu_machine.rehearse(tmp_path_factory.mktemp("machine"), speed=float("inf"))


def test_both_calls_run_their_sections_in_order(rehearsal) -> None:
    for part, expected in fake_gpu_machine.EXPECTED.items():
        sections = rehearsal.sections[part]
        assert [section.name for section in sections] == list(expected)
        assert {section.verdict for section in sections} == {"passed"}
    assert rehearsal.exit_codes == {"1": 0, "2": 0}
    installed = [call for call in rehearsal.calls if " pip install " in call]
    assert len(installed) == 2 and all("--no-index" in call for call in installed)


def test_limits_and_installations_fill_the_time_of_both_calls(rehearsal) -> None:
    limits = {
        section.name: section.limit
        for sections in rehearsal.sections.values()
        for section in sections
    }
    fixed = sum(limit for name, limit in limits.items() if name not in LEFT)
    assert fixed + 2 * INSTALLATION == SECONDS
    for expected in fake_gpu_machine.EXPECTED.values():
        assert all(limits[name] >= expected[name] for name in expected if name not in LEFT)


def test_results_are_few_files_with_every_log_and_figure(rehearsal) -> None:
    names = sorted(path.name for path in rehearsal.out.iterdir())
    assert names == ["1.tar.gz", "2.tar.gz", "summary_1.txt", "summary_2.txt"]
    for part, expected in fake_gpu_machine.EXPECTED.items():
        with tarfile.open(rehearsal.out / f"{part}.tar.gz") as archive:
            packed = set(archive.getnames())
        assert {f"./{name}.log" for name in expected} < packed
        summary = (rehearsal.out / f"summary_{part}.txt").read_text()
        assert all(f"last words of {name}" in summary for name in expected)
    assert {"./zero3_2.json", "./fsdp2_2x2.json", "./stores.json", "./loss.json"} < packed


def test_losses_of_every_section_are_recorded(rehearsal) -> None:
    """Every model that the ranks of a section train has been trained on the CPU."""
    recorded = json.loads((ROOT / "benchmarks" / "gpu" / "cpu_losses.json").read_text("utf-8"))
    compared = 0
    for call in rehearsal.calls:
        program, _, arguments = call.partition(" benchmarks/one_gpu.py ")
        if arguments:
            args = one_gpu.parse_args(arguments.split())
            assert set(args.schemes) <= set(recorded[one_gpu.settings_of(args)])
            compared += 1
    assert compared == 5


def test_a_loss_that_differs_from_the_recorded_one_is_an_error() -> None:
    recorded = {"qsdp": [1.0, 0.5]}
    (line,) = one_gpu.compared({"qsdp": [1.0, 0.54]}, recorded)
    assert line.endswith("largest difference 4.00 % of the first loss")
    with pytest.raises(SystemExit, match="losses of qsdp differ by more than 5 %"):
        one_gpu.compared({"qsdp": [1.0, 0.56]}, recorded)
    assert one_gpu.compared({"eden4": [1.0]}, recorded) == ["eden4: not recorded"]


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("part", "12")
def test_dry_run_of_the_suite(part: str, tmp_path: Path) -> None:
    environment = os.environ | {"DRY": "1", "PYTHON": PY, "CACHE": str(tmp_path / "cache")}
    environment |= {"OMP_NUM_THREADS": "1", "LIMIT": "900"}
    command = [str(fake_gpu_machine.SUITE), part, str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    sections = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    assert done.stdout.count(": passed, ") == len(sections) > 0, done.stdout
    assert ": needs " not in done.stdout


def test_memory_checks_choose_tests_that_exist(rehearsal) -> None:
    """pytest -k is silent about words that fit none."""
    calls = [call for call in rehearsal.calls if call.startswith("compute-sanitizer ")]
    words = set()
    for call in calls:
        words |= set(re.findall(r"\w+", call.partition(" -k ")[2])) - {"and", "or", "not"}
    modules = ("test_gpu.py", "test_numbers.py")
    tests = "".join((ROOT / "tests" / "kernels" / name).read_text() for name in modules)
    names = re.findall(r"def (test_\w+)", tests) + [codec.name for codec in CODECS]
    assert {word for word in words if not any(word in name for name in names)} == set()
    assert len(calls) == 2 and {"g96", "recode", "gaussian"} < words


@pytest.mark.parametrize("jobs", kernels.TABLE_SIZES)
def test_launch_overhead_is_measured_on_tables_of_so_many_jobs(jobs: int) -> None:
    bench = kernels.Bench(torch.device("cpu"), 0)
    codec = kernels.CODECS[0]
    tasks, buffers = bench.many(codec, codec.group_size, torch.bfloat16, jobs)
    (table,) = tables_of(tasks, buffers)
    assert len(table.jobs) == jobs and len(table.launches()) == 1


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
