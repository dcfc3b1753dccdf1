"""The GPU benchmarks without a GPU: command lines, a dry run on the CPU, the summary's parts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "benchmarks"


def run(*command: str, timeout: float = 120) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=SCRIPTS
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_dry_run_writes_rows_and_a_plot(tmp_path: Path) -> None:
    sizes = ["--min-bytes", "1e5", "--max-bytes", "1e5", "--repeats", "1", "--dtypes", "fp32"]
    files = ["--json", str(tmp_path / "k.json"), "--plot", str(tmp_path / "k.png")]
    command = ["--device", "cpu", "--codecs", "int8", "--ways", "torch", *sizes, *files]
    text = run(sys.executable, "kernels.py", *command)
    document = json.loads((tmp_path / "k.json").read_text())
    rows = document["rows"]
    operations = {row["operation"] for row in rows}
    assert operations == {
        "encode", "rotate and encode", "decode", "decode_sum of 8", "recode of 8"
    }  # fmt: skip
    for row in rows:
        assert row["way"] == "torch"
        assert 0 < row["copy_seconds"] and 0 < row["share_of_copy"]
        assert row["codec"] in text
    assert document["launch_overhead_s"]
    assert (tmp_path / "k.png").stat().st_size > 1000


@pytest.mark.parametrize("script", ("gpu_suite.sh", "gpu/collect_wheels.sh"))
def test_scripts_are_valid_shell(script: str) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    run(bash, "-n", script)
