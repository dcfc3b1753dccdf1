"""`ds_quant plot`: what is read from a metrics file, and what the picture says."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_quant.tools import plot, plot_style
from ds_quant.tools.cli import main
from ds_quant.zero.telemetry import Record

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'ds_quant[bench]'")


def record(step: int, **changes: float) -> str:
    """A line as the run writes it."""
    values = {
        "weights/inter/bytes": 2e6, "weights/inter/saved": 0.5, "weights/inter/error": 1e-4,
        "gradients/inter/bytes": 1e6, "gradients/inter/saved": 0.75, "gradients/inter/error": 1e-2,
        "seconds/encode": 0.1, "seconds/wait": 0.6, "seconds/decode": 0.1, "resyncs": 0,
    }  # fmt: skip
    return Record(step=step, samples=8 * step, values=values | changes).line()


def write(folder: Path, *lines: str, end: str = "\n") -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("\n".join(lines) + end, "utf-8")
    return path


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Fills with the titles and the labels at the lines of the picture that is drawn."""
    seen: dict[str, list[str]] = {}
    original = plot_style.save

    def noted(figure: Any, path: Path) -> None:
        for axes in figure.axes:
            seen[axes.get_title()] = [text.get_text() for text in axes.texts]
            assert all(math.isfinite(y) for text in axes.texts for y in (text.xy[1], text.xyann[1]))
        original(figure, path)

    monkeypatch.setattr(plot_style, "save", noted)
    return seen


def test_picture_is_written_beside_the_file_and_says_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], texts: dict[str, list[str]]
) -> None:
    path = write(tmp_path, record(50), record(100))
    assert main(["plot", str(path)]) == 0
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{tmp_path / 'metrics.png'}: 2 sampled steps, 50 to 100\n"
    roles = ["weights inter", "gradients inter"]
    assert texts == {  # 3 MB instead of 8; 0.6 of 0.8 seconds
        "Bytes received per step: 62 % less than in full precision": roles,
        "Error of the messages of rank 0": roles,
        "Time in collectives of a sampled step: wait takes 75 %": ["encode", "wait", "decode"],
    }


def test_out_names_file_and_format(tmp_path: Path) -> None:
    path, out = write(tmp_path, record(1)), tmp_path / "new" / "run.svg"
    assert main(["plot", str(path), "--out", str(out)]) == 0
    assert "<svg" in out.read_text("utf-8") and not (tmp_path / "metrics.png").exists()


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    path = write(tmp_path, *(record(step) for step in (10, 20, 30, 20, 30, 40)))
    assert [row["step"] for row in plot.read(path)] == [10, 20, 30, 40]
    again = write(tmp_path, *(record(step) for step in (10, 20, 30, 5, 10)))
    assert [row["step"] for row in plot.read(again)] == [5, 10]


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, record(10), record(20)[:30], end="")
    assert [row["step"] for row in plot.read(path)] == [10]


def test_lines_that_are_no_records_are_named_and_the_others_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], texts: dict[str, list[str]]
) -> None:
    """A record that a full disk has cut off, other text, wrong values; saved without its bytes."""
    torn, odd = record(2)[:40], record(3).replace("0.1", '"fast"')
    alone = '{"step": 5, "weights/inter/saved": 0.9, "seconds/wait": 1}'
    path = write(tmp_path, record(1), torn, "loss 3.4", odd, record(4), alone)
    assert main(["plot", str(path)]) == 0
    said = capsys.readouterr()
    assert said.out.endswith("metrics.png: 3 sampled steps, 1 to 5\n")
    wrong = "no JSON objects of numbers with a step in line(s) 2, 3, 4: left out"
    assert said.err == f"{path}: {wrong}\n"
    assert "Bytes received per step: 62 % less than in full precision" in texts


def test_what_has_no_error_or_no_value_is_drawn_without_it(
    tmp_path: Path, texts: dict[str, list[str]]
) -> None:
    """Infinite errors are null in the file; full precision has the error 0."""
    lines = [record(i, **{"weights/inter/error": 0.0, "gradients/inter/error": error})
             for i, error in ((1, float("inf")), (2, 1e-2), (3, 0.0))]  # fmt: skip
    assert main(["plot", str(write(tmp_path, *lines))]) == 0
    assert texts["Error of the messages of rank 0 (none: weights inter)"] == ["gradients inter"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no records yet: allowed: a file that quantized_comm.metrics.file names"),
        (['{"loss": 1}', "[1]"], "no JSON objects of numbers with a step in line(s) 1, 2: allowed"),
    ],
)
def test_a_file_that_holds_no_metrics_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str], message: str
) -> None:
    assert main(["plot", str(write(tmp_path, *lines, end="\n" if lines else ""))]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.glob("*.png")) == []


def test_unknown_format_is_refused_with_those_that_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, record(1))
    assert main(["plot", str(path), "--out", str(tmp_path / "a.txt")]) == 1
    assert "ds_quant plot: Format 'txt' is not supported" in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(write(tmp_path, record(1)))]) == 1
    assert "plots need matplotlib: pip install 'ds_quant[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("heights", "expected", "above_zero"),
    [
        ([], [], []),
        ([0, 30, 100], [0, 30, 100], [0, 30, 100]),
        ([50, 50], [45, 55], [45, 55]),
        ([100, 3, 0], [100, 6.5, -3.5], [100, 10, 0]),  # in the same order
        ([0, 9, 18], [-1, 9, 19], [0, 10, 20]),
    ],
)
def test_labels_are_moved_apart_as_little_as_possible(
    heights: list[float], expected: list[float], above_zero: list[float]
) -> None:
    sizes = [10.0] * len(heights)
    assert plot_style.spread(heights, sizes) == pytest.approx(expected)
    assert plot_style.spread(heights, sizes, floor=0) == pytest.approx(above_zero)


def test_a_scheme_has_its_colour_in_every_plot_and_others_differ() -> None:
    found = plot_style.colors(["mine", "qsdp", "sdp4bit", "yours"])
    assert found["qsdp"] == plot_style.colors(["qsdp"])["qsdp"]
    assert len(set(found.values())) == 4
    assert (
        len(set(plot_style.colors(f"qsdp:weights.bits={bits}" for bits in range(7)).values())) == 7
    )
