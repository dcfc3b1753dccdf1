"""The demo end to end: real launcher, real ranks, a table, a picture and a result file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMPARE = Path(__file__).resolve().parents[2] / "benchmarks" / "compare.py"
TINY = ["--world=2", "--steps=6", "--layers=1", "--width=64", "--heads=2", "--batch=2",
        "--seq-len=16", "--stage=3", "--timeout=200"]  # fmt: skip


def compare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    corpus = folder / "corpus.txt"
    corpus.write_text("All happy families are alike. " * 200, "utf-8")
    line = [sys.executable, str(COMPARE), "--out=out", f"--text={corpus}", *TINY, *arguments]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=280)


def compared(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The result file and what was printed."""
    finished = compare(folder, *arguments)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return json.loads((folder / "out" / "compare.json").read_text("utf-8")), finished.stdout


@pytest.mark.slow
def test_two_schemes_train_on_the_same_data_and_count_their_bytes(tmp_path: Path) -> None:
    results, printed = compared(tmp_path, "--schemes=full_precision,qsdp:min_numel=0")
    assert "qsdp:min_numel=0" in printed
    assert (tmp_path / "out" / "compare.png").stat().st_size > 10_000
    exact, quantized = (run["result"] for run in results["runs"])
    # Same weights and bytes at the start: only the rounding of 8-bit weights separates the losses.
    assert exact["losses"][0] == pytest.approx(quantized["losses"][0], rel=2e-3)
    assert exact["losses"] != quantized["losses"]
    assert len(exact["losses"]) == len(exact["seconds"]) == 6
    full, reduced = (row["wire_bytes"] for row in results["summary"])
    # Two gathers and one reduction of bf16, half of them from the other rank of two, and the
    # padding of a few parameters that two ranks cannot divide evenly.
    assert full == pytest.approx(3.0, rel=0.01)
    assert reduced < full / 1.8
    assert [report["steps"] for report in quantized["reports"]] == [6, 6]


OWN_MODEL = """
import torch

class Net(torch.nn.Linear):
    def forward(self, x, y):
        return (super().forward(x) - y).float().square().mean()

def build(seed):
    def batch(step, rank, size):
        x = torch.randn(size, 64, generator=torch.Generator().manual_seed(step * 64 + rank))
        return x.bfloat16(), x.sum(1, keepdim=True).bfloat16()
    return Net(64, 64), batch
"""


@pytest.mark.slow
def test_schemes_are_compared_on_a_model_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_MODEL)
    options = ("--model=mine:build", "--batch=8", "--steps=4")
    results, _ = compared(tmp_path, *options, "--schemes=full_precision,qsdp")
    exact, quantized = (run["result"] for run in results["runs"])
    assert exact["parameters"] == 64 * 64 + 64 and exact["losses"][-1] < exact["losses"][0]
    assert quantized["losses"][-1] == pytest.approx(exact["losses"][-1], rel=0.05)


def test_a_model_that_is_not_there_is_refused_before_anything_runs(tmp_path: Path) -> None:
    finished = compare(tmp_path, "--schemes=qsdp", "--model=missing:build")
    assert finished.returncode == 1 and "--model=missing:build" in finished.stderr
    assert not (tmp_path / "out").exists()
