"""benchmarks/convergence.py: statistics of pairs, the order of runs, going on, and the page."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import convergence  # noqa: E402
import paired  # noqa: E402

TINY = [
    "--layers=1", "--width=8", "--heads=1", "--seq-len=8", "--batch=1", "--base-steps=3",
    "--steps=2", "--nodes=2", "--node-size=1", "--pairs=2", "--most-pairs=3", "--interval=0.0001",
]  # fmt: skip


# ---- pairs ----


def test_gaps_are_paired_by_seed() -> None:
    """Seeds differ by 10 %, schemes by 1 % and 3 %: mean 2 %, spread sqrt(2), t of one degree."""
    found = paired.gap({1: 2.266, 0: 2.02, 7: 9.0}, {0: 2.0, 1: 2.2, 5: 1.0})
    assert found.pairs == pytest.approx([1, 3])
    assert found.mean == pytest.approx(2) and found.half_width == pytest.approx(12.706)
    assert paired.student(9) == 2.306 and paired.student(31) == 2.042
    assert paired.student(100_001) == pytest.approx(1.96, abs=1e-3)


@pytest.mark.parametrize(
    ("pairs", "least", "settled"),
    [
        ([0.0, 0.1, 0.0, 0.1], 4, False),  # +-0.09
        ([0.0, 0.02, 0.0, 0.02], 4, True),
        ([0.0, 0.02, 0.0, 0.02], 8, False),  # too few
        ([5.0, 5.1, 5.0, 5.1], 4, True),  # narrow against the gap
    ],
)
def test_an_interval_settles_when_it_is_narrow(
    pairs: list[float], least: int, settled: bool
) -> None:
    assert paired.of_pairs(pairs).is_settled(interval=0.05, least=least) == settled


# ---- the order of runs ----


def order(tmp_path: Path, losses: dict[str, list[float]], **given: float) -> list[tuple[str, int]]:
    """Runs in their order, if every run of a scheme finds these losses one after the other."""
    args = {"pairs": 2, "most_pairs": 3, "interval": 0.05} | given
    ledger, found = convergence.Ledger(tmp_path / "runs.jsonl", "study"), []
    labels = [label for label in losses if label != convergence.BASELINE]
    for label, seed in convergence.missing_runs(ledger, labels, argparse.Namespace(**args)):
        found.append((label, seed))
        ledger.add({"scheme": label, "seed": seed, "held_out": losses[label][seed]})
    return found


def test_every_scheme_gets_the_least_number_then_the_widest_interval_one_more(
    tmp_path: Path,
) -> None:
    losses = {
        "full_precision": [2.0] * 4,
        "narrow": [2.0002, 2.0001, 2.0],
        "wide": [2.0, 2.1, 2.0],
        "wider": [2.0, 2.5, 2.0],
    }
    assert order(tmp_path, losses) == [
        ("full_precision", 0), ("narrow", 0), ("full_precision", 1), ("narrow", 1),
        ("wide", 0), ("wide", 1), ("wider", 0), ("wider", 1),
        ("full_precision", 2), ("wider", 2), ("wide", 2),
    ]  # fmt: skip
    assert order(tmp_path, losses) == []  # all of it is in the file
    assert order(tmp_path, losses, pairs=3) == [("narrow", 2)]


# ---- a whole study ----


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    """A tiny study of sdp4bit; everything in ``tmp_path``, another text beside its own."""
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    (tmp_path / "other").write_bytes(b"pack my box with five dozen liquor jugs; " * 40)
    files = [
        f"--out={tmp_path}",
        f"--json={tmp_path / 'found.json'}",
        f"--text={tmp_path / 'text'}",
    ]
    return [*TINY, *files, "--schemes=sdp4bit:min_numel=0"]


def study(argv: list[str]) -> dict[str, Any]:
    """What its file says afterwards."""
    assert convergence.main(argv) == 0
    path = next(word for word in argv if word.startswith("--json=")).removeprefix("--json=")
    return json.loads(Path(path).read_text("utf-8"))


def test_a_study_that_was_interrupted_goes_on_where_it_was(argv, tmp_path: Path) -> None:
    study(argv)
    runs = tmp_path / "runs.jsonl"
    whole = runs.read_text("utf-8").splitlines()
    assert len(whole) == 6  # three pairs of a gap that is never narrow enough
    runs.write_text("\n".join(whole[:4]) + "\n", "utf-8")
    found = study(argv)
    assert runs.read_text("utf-8").splitlines() == whole  # bit by bit
    exact, ours = ([json.loads(r)["held_out"] for r in whole[i::2]] for i in (0, 1))
    gaps = [100 * (a / b - 1) for a, b in zip(ours, exact, strict=True)]
    (row,) = found["rows"]
    assert row["gap"]["pairs"] == pytest.approx(gaps)
    page = (tmp_path / "found.md").read_text("utf-8")
    assert f"| `sdp4bit:min_numel=0` | {row['gap']['mean']:+.3f} % |" in page
    assert str(tmp_path) not in found["command"]
