"""benchmarks/predicted.py: the cost model against the step times of the network lab."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT / "benchmarks"))

import predicted  # noqa: E402


def test_predictions_of_the_network_lab_are_as_close_as_we_say(capsys) -> None:
    """docs/choosing.md states these figures; a change of the model must not make them worse."""
    files = sorted(map(str, RESULTS.glob("speed_*.json")))
    errors = [abs(point.error) for path in files for point in predicted.compare(Path(path))[0]]
    assert len(errors) > 50 and max(errors) < predicted.CLOSE
    mean, worst = 100 * sum(errors) / len(errors), 100 * max(errors)
    said = f"at all {len(errors)} points (mean error {mean:.1f} %, largest {worst:.1f} %"
    assert said in " ".join((ROOT / "docs" / "choosing.md").read_text("utf-8").split())
    assert predicted.main(files) == 0
    printed = capsys.readouterr().out
    assert f"{len(errors)} of {len(errors)} points within 15%" in printed
    assert "not predicted: ZeRO-2 deepspeed_plain: another program's" in printed


def test_every_shaped_point_of_a_file_is_predicted() -> None:
    points, left_out = predicted.compare(RESULTS / "speed_2x2_cpu.json")
    assert len(points) == 2 * 9 * 2 and len(left_out) == 2
    errors = sorted(abs(point.error) for point in points)
    assert sum(errors) / len(errors) < 0.05 and errors[-1] < 0.115


def test_a_run_that_fetches_nothing_ahead_is_predicted_to_hide_less() -> None:
    points, _ = predicted.compare(RESULTS / "speed_hpz_2x2_cpu.json")
    assert len(points) == 2 and all(abs(point.error) < 0.1 for point in points)


def speed_file(path: Path, rows: dict[float, float], **place: Any) -> Path:
    """Seconds of full precision by rate, as speed.py writes them."""
    found = [{"scheme": "full_precision", "rate": r, "seconds": s} for r, s in rows.items()]
    point = {"stage": 3, "topology": "2x2", "parameters": 10**6, "rows": found, **place}
    path.write_text(json.dumps({"kind": "speed", "arguments": {"width": 256}, "points": [point]}))
    return path


@pytest.mark.parametrize(
    ("place", "hidden"),
    [
        ({"topology": "4x1"}, 0.0),
        ({"topology": "2x2"}, 0.15 * 2.0),
        ({"topology": "2x2", "stage": 2}, 0.0),
    ],
)
def test_a_prediction_is_the_unshaped_step_plus_what_it_does_not_hide(
    place: dict[str, Any], hidden: float, tmp_path: Path
) -> None:
    path = speed_file(tmp_path / "speed.json", {0: 2.0, 40.0: 10.0}, **place)
    ((found,), _) = predicted.compare(path)
    nodes, nbytes = int(place["topology"][0]), 4 if place.get("stage") == 2 else 6
    wire = nbytes * 10**6 * (1 - 1 / nodes) / 5e6
    assert found.predicted == pytest.approx(2.0 + wire - hidden, rel=1e-6)
    assert found.error == pytest.approx(found.predicted / 10 - 1)


def test_points_without_a_rate_limit_alone_predict_nothing(capsys, tmp_path: Path) -> None:
    path = speed_file(tmp_path / "speed.json", {0: 2.0})
    assert predicted.main([str(path)]) == 1
    assert "no scheme has points both with and without a rate limit" in capsys.readouterr().err


def test_a_file_of_another_benchmark_is_refused(capsys, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    assert predicted.main([str(tmp_path / "other.json")]) == 1
    assert "other.json: allowed: a result file of speed.py" in capsys.readouterr().err
