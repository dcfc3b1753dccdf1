"""`ds_quant plot`: what is read from a metrics file."""

from __future__ import annotations

import sys
from pathlib import Path

import pictures
import pytest

from ds_quant.runtime.telemetry import json_line
from ds_quant.tools import plot, plot_style
from ds_quant.tools.cli import main

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'ds_quant[bench]'")


def record(step: int, **changes: float) -> str:
    """A line as the run writes it."""
    values = {
        "weights/inter/bytes": 2e6, "weights/inter/saved": 0.5, "weights/inter/error": 1e-4,
        "gradients/inter/bytes": 1e6, "gradients/inter/saved": 0.75, "gradients/inter/error": 1e-2,
        "seconds/encode": 0.1, "seconds/wait": 0.6, "seconds/decode": 0.1, "resyncs": 0,
    }  # fmt: skip
    return json_line({"step": step, "samples": 8 * step}, values | changes)


def write(folder: Path, *lines: str) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_picture_is_written_beside_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, record(50), record(100))
    assert main(["plot", str(path)]) == 0
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{tmp_path / 'metrics.png'}: 2 sampled steps, 50 to 100\n"


def test_what_is_drawn_is_what_the_records_hold(tmp_path: Path) -> None:
    """A hole where one has no value."""
    lacking = record(100, **{"weights/inter/bytes": 3e6}).replace("gradients/inter/bytes", "other")
    rows = plot.read(write(tmp_path, record(50), lacking))
    series = plot._series(rows, "bytes")
    assert series["weights inter"] == [2e6, 3e6]
    first, second = series["gradients inter"]
    assert first == 1e6 and second != second


def test_the_share_that_was_saved_is_of_the_bytes_of_full_precision(tmp_path: Path) -> None:
    """4 MB of weights and 4 MB of gradients in full precision; 2 MB and 1 MB were sent."""
    rows = plot.read(write(tmp_path, record(50), record(100)))
    assert plot._saved(rows) == pytest.approx(1 - 3 / 8)


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    path = write(tmp_path, *(record(step) for step in (10, 20, 30, 20, 30, 40)))
    assert [row["step"] for row in plot.read(path)] == [10, 20, 30, 40]
    again = write(tmp_path, *(record(step) for step in (10, 20, 30, 5, 10)))
    assert [row["step"] for row in plot.read(again)] == [5, 10]


def test_lines_that_are_no_records_are_named_and_the_others_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record that a full disk has cut off, other text, wrong values; saved without its bytes."""
    wrong = [record(2)[:40], "loss 3.4", record(3).replace("0.1", '"fast"'), "[" * 100_000]
    wrong += [record(3).replace("0.1", value) for value in ("[1]", "true", "1" * 400)]
    wrong += [f'{{"step": {step}, "seconds/wait": 1}}' for step in ("true", "1" * 400)]
    alone = '{"step": 5, "weights/inter/saved": 0.9, "seconds/wait": 1}'
    path = write(tmp_path, record(1), *wrong, record(4), alone)
    assert main(["plot", str(path)]) == 0
    said = capsys.readouterr()
    assert said.out.endswith("metrics.png: 3 sampled steps, 1 to 5\n")
    problem = "no JSON objects of numbers with a step in line(s) "
    assert said.err.startswith(f"{path}: {problem}2, 3, 4, 5") and said.err.endswith("left out\n")


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(write(tmp_path, record(1)))]) == 1
    assert "plots need matplotlib: pip install 'ds_quant[bench]'" in capsys.readouterr().err


def test_a_scheme_has_shades_of_one_colour_under_every_front() -> None:
    names = ("eden4", "fsdp2:eden4", "fsdp2_hsdp:eden4", "ddp:eden4", "fsdp2", "qsdp:min_numel=0")
    found = plot_style.colors(names)
    assert len(set(found.values())) == len(names)
    assert found["eden4"] == plot_style.COLORS["eden4"]
    for name in names[1:4]:
        lighter = plot_style.COLORS["eden4"]
        while lighter != found[name] and lighter != "#ffffff":
            lighter = plot_style.shade(lighter, 0.25)
        assert lighter == found[name], name
    assert found["qsdp:min_numel=0"] == plot_style.COLORS["qsdp"]


def test_the_picture_of_readme_has_the_ranges_of_its_table(tmp_path: Path) -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")
    row = readme.partition("| fine-tuning, 7 B, ZeRO-3 | 2 x 8 | `eden4` | ")[2].partition(" |\n")[
        0
    ]
    drawn = ["{:.1f} to {:.1f}".format(*pictures.band(link)) for link in (1, 2.5, 10, 25, 100)]
    assert drawn == row.split(" | ")
    pictures.draw(tmp_path / "speedup.png")
    assert (tmp_path / "speedup.png").read_bytes().startswith(b"\x89PNG")
