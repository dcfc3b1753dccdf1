"""benchmarks/convergence.py: paired statistics, and studies read from finished comparisons."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import compare  # noqa: E402
import convergence  # noqa: E402


def study(seed: int, final: dict[str, float], **arguments: Any) -> dict[str, Any]:
    """As compare.py writes it; every loss curve ends in 50 equal values."""
    runs = [
        {"label": label, "result": {"losses": [5.0] * 10 + [loss] * 50}}
        for label, loss in final.items()
    ]
    about = {"created": "2026-01-01", "versions": {}, "hardware": {}, "device": "cpu", "text": {}}
    settings = {"seed": seed, "steps": 60, **arguments}
    return {**about, "arguments": settings, "summary": [], "runs": runs}


def test_gaps_are_paired_by_seed() -> None:
    """Seeds differ by 10 %, schemes by 1 % and 3 %: mean 2 %, spread sqrt(2), t of one degree."""
    studies = [
        study(0, {"full_precision": 2.0, "qsdp": 2.02}),
        study(1, {"full_precision": 2.2, "qsdp": 2.266}),
    ]
    exact, ours = convergence.gaps(studies)
    assert exact.gaps == [0, 0] and exact.half_width == 0
    assert ours.gaps == pytest.approx([1, 3])
    assert (ours.mean, ours.spread) == pytest.approx((2, 2**0.5))
    assert ours.half_width == pytest.approx(12.71)


def test_one_seed_has_no_interval() -> None:
    (_, ours) = convergence.gaps([study(0, {"full_precision": 2.0, "qsdp": 1.99})])
    assert ours.mean == pytest.approx(-0.5) and ours.half_width is None


def test_studies_that_differ_in_more_than_the_seed_are_refused() -> None:
    studies = [study(0, {"full_precision": 2.0}), study(1, {"full_precision": 2.0}, lr=1)]
    with pytest.raises(ValueError, match="the studies differ in lr: only the seed may differ"):
        convergence.gaps(studies)
    with pytest.raises(ValueError, match="no baseline: run one of full_precision"):
        convergence.gaps([study(0, {"qsdp": 2.0})])


def test_finished_comparisons_become_a_study(tmp_path: Path, capsys) -> None:
    for seed in (0, 1, 2):
        folder = tmp_path / f"seed{seed}"
        folder.mkdir()
        losses = {"full_precision": 2.0, "sdp4bit": 2.0 + 0.002 * seed}
        (folder / "compare.json").write_text(json.dumps(study(seed, losses)))
    folders = [str(tmp_path / f"seed{seed}") for seed in (0, 1, 2)]
    assert convergence.main(["--from", *folders, "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "convergence.json").read_text())
    assert written["arguments"]["seed"] == [0, 1, 2]
    assert written["gaps"][1]["mean"] == pytest.approx(0.1)
    assert (tmp_path / "convergence.png").stat().st_size > 10_000
    assert convergence.main(["--from", str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err


def test_a_finished_seed_is_not_repeated(tmp_path: Path, monkeypatch) -> None:
    calls = []

    def finished(argv: list[str]) -> int:
        args = compare.parse_args(argv)
        result = study(args.seed, {"full_precision": 2.0, "qsdp": 2.0})
        result["arguments"] = compare._arguments(args)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "compare.json").write_text(json.dumps(result))
        calls.append(args.seed)
        return 0

    monkeypatch.setattr(compare, "main", finished)
    argv = ["--grid", "sdp4bit", "--seeds", "0", "1", "--out", str(tmp_path), "--steps=60"]
    assert convergence.main(argv) == 0 and calls == [0, 1]
    assert convergence.main(argv) == 0 and calls == [0, 1]
    assert convergence.main([*argv, "--lr=1e-3"]) == 0 and calls == [0, 1, 0, 1]


@pytest.mark.parametrize("grid", sorted(convergence.GRIDS))
def test_grids_are_valid_schemes(grid: str) -> None:
    args = compare.parse_args([f"--schemes={convergence.GRIDS[grid]}"])
    compare.check(args)
    assert args.schemes[0].label == "full_precision"


@pytest.mark.parametrize("grid", sorted(convergence.GRIDS))
def test_every_scheme_of_a_grid_is_a_valid_configuration(grid: str) -> None:
    args = compare.parse_args(["--schemes", convergence.GRIDS[grid], "--node-size", "2"])
    assert args.schemes[0].name == "full_precision"
    compare.check(args)
