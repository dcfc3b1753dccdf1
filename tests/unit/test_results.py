"""The committed result files: every one is readable, wrong ones are named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
sys.path.append(str(ROOT / "benchmarks"))

import make_report  # noqa: E402
import results_schema  # noqa: E402


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_committed_result_validates_and_says_where_it_comes_from(path: Path) -> None:
    about = results_schema.load(path).about()
    assert all(about)
    assert about.date.startswith("20")
    assert about.command.startswith("python benchmarks/")


def changed(tmp_path: Path, **changes: Any) -> Path:
    source = next(path for path in RESULTS if path.stem == "convergence_sdp4bit_cpu")
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(json.loads(source.read_text("utf-8")) | changes), "utf-8")
    return path


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"version": 2}, "version=2: expected 1"),
        ({"kind": "colour"}, "kind='colour': expected one of collectives, convergence"),
        ({"gaps": [{"label": "x"}]}, r"key 'gaps.0.gaps': field required \(and 2 more\)|more"),
        ({"extra": 1}, "key 'extra': no such key"),
        ({"hardware": None}, "key 'hardware'"),
    ],
)
def test_wrong_file_is_refused_with_its_name_and_key(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(results_schema.ResultError, match=rf"changed\.json: .*({expected})"):
        results_schema.load(changed(tmp_path, **changes))


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}'])
def test_file_that_is_no_result_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(content, "utf-8")
    with pytest.raises(results_schema.ResultError, match="other.json"):
        results_schema.load(path)


def test_command_line_repeats_lists_and_drops_what_is_unset() -> None:
    arguments = {
        "schemes": ["a", "b:x=[1]"],
        "seeds": [0, 1],
        "override": [["k", True]],
        "lr": 2e-3,
        "text": None,
        "tied": False,
        "quick": True,
        "node_size": 2,
    }
    assert results_schema.command_line("s.py", arguments, commas=("schemes",)) == (
        "python s.py --schemes 'a,b:x=[1]' --seeds 0 1 --override k=true --lr 0.002 --quick "
        "--node-size 2"
    )


def test_page_of_results_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_report.main(["--check"]) == 0, capsys.readouterr().err


def test_page_says_where_every_file_comes_from_and_stale_ones_are_found(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    assert make_report.main(["--out", str(page)]) == 0
    text = page.read_text("utf-8")
    assert text.count("- Command: ") == text.count("- Hardware: ") == len(RESULTS)
    page.write_text(text + "x", "utf-8")
    assert make_report.main(["--out", str(page), "--check"]) == 1


def test_speed_ups_in_the_readme_are_those_of_the_result_file() -> None:
    """The table `| Mbit/s | stage |`: speed-up, in brackets what the bytes allow."""
    measured = {}
    for name in ("speed_shipped_2x2_cpu", "speed_2x2_cpu"):  # where both have one, the latter
        result = results_schema.load(ROOT / "benchmarks" / "results" / f"{name}.json")
        for point in result.points:
            measured |= {(point.stage, row.rate, row.scheme): row for row in point.rows}
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| Mbit/s | stage |"))
    header = [cell.strip() for cell in lines[start].strip("|").split("|")]
    schemes = [cell.strip("`") if "`" in cell else "deepspeed_plain" for cell in header[2:]]
    checked = 0
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rate, stage, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        place = int(stage.removeprefix("ZeRO-")), 0.0 if rate == "not shaped" else float(rate)
        for scheme, cell in zip(schemes, cells, strict=True):
            row = measured[(*place, scheme)]
            expected = f"{row.speedup:.2f}"
            bound = f" ({row.bytes_bound:.2f})" if "(" in cell else ""
            assert cell == expected + bound, f"{line}: {scheme} is {expected}{bound}"
            checked += 1
    assert checked >= 20
