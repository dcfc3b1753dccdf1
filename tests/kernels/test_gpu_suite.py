"""benchmarks/gpu_suite.sh without a GPU: order, limits, a dry run."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PY = sys.executable
RUNNER = f"""
PART=A OUT={{out}} WORK={{out}}/work SECONDS_LEFT=60 PYTHON={PY}
source {ROOT / "benchmarks" / "gpu" / "runner.sh"}
"""


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
@pytest.mark.parametrize("part", "ABC")
def test_dry_run_of_the_suite(part: str, tmp_path: Path) -> None:
    environment = os.environ | {"DRY": "1", "PYTHON": PY, "CACHE": str(tmp_path / "cache")}
    environment |= {"OMP_NUM_THREADS": "1"}
    command = [str(ROOT / "benchmarks" / "gpu_suite.sh"), part, str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    sections = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    assert len(sections) == {"A": 4, "B": 6, "C": 8}[part]
    assert done.stdout.count(": passed, ") == len(sections), done.stdout


@pytest.mark.parametrize("script", ("gpu_suite.sh", "gpu/runner.sh", "gpu/collect_wheels.sh"))
def test_scripts_are_valid_shell(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / "benchmarks" / script)], check=True)
