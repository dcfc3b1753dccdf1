"""``ds_quant plot``: draw the metrics file of a run: bytes, errors and seconds by step."""

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
_OTHER_COLOR = "#444444"
# A link has the same colour in every panel.
_COLORS = {
    **dict(zip(_SECTIONS, plot_style.PALETTE, strict=False)),
    **dict(zip(_LINKS, plot_style.PALETTE, strict=False)),
}

Record = dict[str, Any]  # a line of the file
Series = dict[str, list[float]]  # values of every line of a panel, NaN where a record has none


def main(arguments: argparse.Namespace) -> int:
    """Write the picture."""
    path: Path = arguments.metrics
    out: Path = arguments.out or path
    if arguments.out is None or not out.suffix:
        out = out.with_suffix(".png")
    records = read(path)
    draw(records, title=path.name, path=out)
    print(f"{out}: {len(records)} sampled steps, {records[0]['step']} to {records[-1]['step']}")
    return 0


# ---- the file ----


def read(path: Path) -> list[Record]:
    """Return the records of a metrics file, by step.

    A resumed run appends to the file: its records replace those of the steps it repeats. A last
    line without a newline is still being written and is left out. Lines that are not records, such
    as one that a full disk has cut off, are left out and named on standard error.

    Raises:
        ValueError: there is no record.
    """
    records: list[Record] = []
    wrong_lines: list[str] = []
    lines = path.read_text("utf-8", errors="replace").split("\n")[:-1]
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is None:
            wrong_lines.append(str(number))
            continue
        while records and records[-1]["step"] >= record["step"]:
            records.pop()
        records.append(record)
    problem = "no records yet"
    if wrong_lines:
        problem = f"no JSON objects of numbers with a step in line(s) {', '.join(wrong_lines)}"
    if not records:
        raise ValueError(
            f"{path}: {problem}: allowed: a file that quantized_comm.metrics.file names, written "
            "every metrics.interval optimizer steps"
        )
    if wrong_lines:
        print(f"{path}: {problem}: left out", file=sys.stderr)
    return records


def _parse(line: str) -> Record | None:
    """Return the record of a line: an integer ``step``, and finite numbers or nulls.

    None if the line is something else.
    """
    try:
        record = json.loads(line)
        if not isinstance(record["step"], int):
            return None
        for value in record.values():
            if isinstance(value, bool):
                return None
            if value is not None and not math.isfinite(value):
                return None
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None
    return record


# ---- the picture ----


def draw(records: list[Record], *, title: str, path: Path) -> None:
    """Write a picture of three panels: bytes, errors and seconds by optimizer step."""
    figure, panels = plot_style.pyplot().subplots(3, 1, figsize=(8, 9), sharex=True)
    bytes_axes, error_axes, seconds_axes = panels
    steps = [record["step"] for record in records]
    _plot(bytes_axes, steps, _bytes(bytes_axes, records))
    _plot(error_axes, steps, _errors(error_axes, records))
    _plot(seconds_axes, steps, _seconds(seconds_axes, records))
    seconds_axes.set_xlabel("optimizer step")
    figure.suptitle(title)
    plot_style.save(figure, path)


def _plot(axes: Any, steps: list[int], series: Series) -> None:
    """Draw the lines of a panel and their legend."""
    for name, values in series.items():
        axes.plot(steps, values, label=name, color=_COLORS.get(name, _OTHER_COLOR), marker=".")
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    plot_style.add_legend(axes)


def _bytes(axes: Any, records: list[Record]) -> Series:
    """Label the panel of bytes; return its series."""
    from matplotlib.ticker import EngFormatter

    title = "Bytes received per step"
    saved = _saved(records)
    if saved is not None:
        title += f": {100 * saved:.0f} % less than in full precision"
    axes.set_title(title)
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    return _series(records, "bytes")


def _errors(axes: Any, records: list[Record]) -> Series:
    """Label the panel of errors; return its series, without messages that have no error."""
    title = "Error of the messages of rank 0"
    series = {}
    without_error = []
    for name, values in _series(records, "error").items():
        if any(value > 0 for value in values):
            # A logarithmic axis has no 0.
            series[name] = [value if value > 0 else math.nan for value in values]
        else:
            without_error.append(name)
    if without_error:
        title += f" (none: {', '.join(without_error)})"
    if series:
        axes.set_yscale("log")
    axes.set_title(title)
    axes.set_ylabel("squared error / squared norm")
    return series


def _seconds(axes: Any, records: list[Record]) -> Series:
    """Label the panel of seconds; return its series."""
    title = "Time in collectives of a sampled step"
    series = {name: _values(records, f"seconds/{name}") for name in _SECTIONS}
    totals = {}
    for name, values in series.items():
        totals[name] = sum(value for value in values if not math.isnan(value))
    total = sum(totals.values())
    if total:
        longest = max(totals, key=totals.__getitem__)
        title += f": {longest} takes {100 * totals[longest] / total:.0f} %"
    axes.set_title(title)
    axes.set_ylabel("seconds")
    return series


def _series(records: list[Record], quantity: str) -> Series:
    """Return the values of ``<role>/<link>/<quantity>`` by "role link"."""
    ending = f"/{quantity}"
    names = dict.fromkeys(name for record in records for name in record if name.endswith(ending))
    series = {}
    for name in names:
        series[name.removesuffix(ending).replace("/", " ")] = _values(records, name)
    return series


def _values(records: list[Record], name: str) -> list[float]:
    """Return a value per record, NaN where it has none."""
    values = (record.get(name) for record in records)
    return [math.nan if value is None else float(value) for value in values]


def _saved(records: list[Record]) -> float | None:
    """Return the share of the bytes of full precision that was saved; None without bytes."""
    sent = 0.0
    full_precision = 0.0
    for record in records:
        for name, share in record.items():
            if name.endswith("/saved") and share is not None and share < 1:
                nbytes = record.get(name.removesuffix("saved") + "bytes") or 0.0
                sent += nbytes
                full_precision += nbytes / (1 - share)
    if not full_precision:
        return None
    return 1 - sent / full_precision
