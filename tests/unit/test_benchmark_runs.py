"""The benchmarks that run in one process, at sizes that show nothing but that they work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = "All happy families are alike. " * 200
RUNS = {
    "codec.py": "--numel 4096 --codecs int4 --repeats 1",
    "gradient_errors.py": "--looks 1 --nodes 2 --batch 2 --layers 1 --width 32 --text TEXT",
}


@pytest.mark.parametrize("script", RUNS)
def test_benchmark_writes_its_file(script: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    arguments = RUNS[script].replace("TEXT", str(tmp_path / "text")).split()
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    out = tmp_path / "out.json"
    done = subprocess.run(
        [*command, "--json", str(out)], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(out.read_text("utf-8"))
    assert written["kind"] == script.removesuffix(".py") and written["versions"]["torch"]
    assert str(tmp_path) not in written["command"], "paths of this machine tell others nothing"
    assert "\n| --- |" in out.with_suffix(".md").read_text("utf-8")


@pytest.mark.parametrize("script", ("convergence.py", "speed.py", "peer_suite.py", "sections.py"))
def test_benchmark_starts(script: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--help"]
    assert "usage: " in subprocess.run(command, capture_output=True, text=True, check=True).stdout
