"""The benchmarks start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("script", ("convergence.py", "speed.py", "peer_suite.py", "sections.py"))
def test_benchmark_starts(script: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--help"]
    assert "usage: " in subprocess.run(command, capture_output=True, text=True, check=True).stdout
