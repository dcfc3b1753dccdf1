"""``ds_quant plot``: draw the metrics file of a run: bytes, error and seconds over steps."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from ds_quant.tools import plot_style

_SECTIONS = ("encode", "wait", "decode")
_LINKS = ("weights inter", "weights intra", "gradients inter", "gradients intra")
# The same in every panel.
_COLORS = {
    name: color
    for names in (_SECTIONS, _LINKS)
    for name, color in zip(names, plot_style.PALETTE, strict=False)
}

Row = dict[str, Any]  # a line of the file


def main(arguments: argparse.Namespace) -> int:
    """Write the picture."""
    path: Path = arguments.metrics
    out = arguments.out or path.with_suffix(".png")
    out = out if out.suffix else out.with_suffix(".png")  # as matplotlib would
    rows = read(path)
    draw(rows, title=path.name, path=out)
    print(f"{out}: {len(rows)} sampled steps, {rows[0]['step']} to {rows[-1]['step']}")
    return 0


def read(path: Path) -> list[Row]:
    """Return the records of a metrics file, by step.

    A run that was resumed appends to the file: its records replace those of the steps it repeats.
    A last line without an end is still being written and is left out. So are lines that are not
    records, such as one that a full disk has cut off; they are named on standard error.

    Raises:
        ValueError: there is no record.
    """
    rows: list[Row] = []
    bad: list[int] = []
    lines = path.read_text("utf-8", errors="replace").split("\n")[:-1]
    for number, line in enumerate(lines, start=1):
        row = _record(line)
        if row is None:
            bad.append(number)
            continue
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        rows.append(row)
    wrong = f"no JSON objects of numbers with a step in line(s) {', '.join(map(str, bad))}"
    if not rows:
        raise ValueError(
            f"{path}: {wrong if bad else 'no records yet'}: allowed: a file that "
            "quantized_comm.metrics.file names, written every metrics.interval optimizer steps"
        )
    if bad:
        print(f"{path}: {wrong}: left out", file=sys.stderr)
    return rows


def _record(line: str) -> Row | None:
    """Parse a record; None if the line is something else."""
    try:
        row = json.loads(line)
        sound = isinstance(row["step"], int) and all(
            value is None or (math.isfinite(value) and not isinstance(value, bool))
            for value in row.values()
        )
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None
    return row if sound else None


def draw(rows: list[Row], *, title: str, path: Path) -> None:
    """Write a picture of three panels over the optimizer steps."""
    figure, panels = plot_style.pyplot().subplots(3, 1, figsize=(8, 9), sharex=True)
    steps = [row["step"] for row in rows]
    for axes, panel in zip(panels, (_bytes, _errors, _seconds), strict=True):
        for name, values in panel(axes, rows).items():
            axes.plot(steps, values, label=name, color=_COLORS.get(name, "#444444"), marker=".")
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
        plot_style.finish(axes)
    panels[-1].set_xlabel("optimizer step")
    figure.suptitle(title)
    plot_style.save(figure, path)


def _series(rows: list[Row], what: str) -> dict[str, list[float]]:
    """Values of ``<role>/<link>/<what>`` by "role link"; NaN where a record has none."""
    ending = f"/{what}"
    names = dict.fromkeys(name for row in rows for name in row if name.endswith(ending))
    return {name.removesuffix(ending).replace("/", " "): _values(rows, name) for name in names}


def _values(rows: list[Row], name: str) -> list[float]:
    return [math.nan if (value := row.get(name)) is None else float(value) for row in rows]


def _saved(rows: list[Row]) -> float | None:
    """Share of the bytes of full precision that all records together did not send."""
    sent = exact = 0.0
    for row in rows:
        for name, share in row.items():
            if name.endswith("/saved") and share is not None and share < 1:
                nbytes = row.get(name.removesuffix("saved") + "bytes") or 0.0
                sent, exact = sent + nbytes, exact + nbytes / (1 - share)
    return 1 - sent / exact if exact else None


def _bytes(axes: Any, rows: list[Row]) -> dict[str, list[float]]:
    from matplotlib.ticker import EngFormatter

    saved = _saved(rows)
    than = "" if saved is None else f": {100 * saved:.0f} % less than in full precision"
    axes.set_title(f"Bytes received per step{than}")
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    return _series(rows, "bytes")


def _errors(axes: Any, rows: list[Row]) -> dict[str, list[float]]:
    series = _series(rows, "error")
    exact = [name for name, line in series.items() if not any(value > 0 for value in line)]
    without = f" (none: {', '.join(exact)})" if exact else ""
    axes.set(title=f"Error of the messages of rank 0{without}",
             ylabel="squared error / squared norm")  # fmt: skip
    if len(exact) < len(series):
        axes.set_yscale("log")
    return {
        name: [value if value > 0 else math.nan for value in line]
        for name, line in series.items()
        if name not in exact
    }


def _seconds(axes: Any, rows: list[Row]) -> dict[str, list[float]]:
    series = {name: _values(rows, f"seconds/{name}") for name in _SECTIONS}
    totals = {name: sum(value for value in line if value == value) for name, line in series.items()}
    most, whole = max(totals, key=totals.__getitem__), sum(totals.values())
    share = f": {most} takes {100 * totals[most] / whole:.0f} %" if whole else ""
    axes.set(title=f"Time in collectives of a sampled step{share}", ylabel="seconds")
    return series
