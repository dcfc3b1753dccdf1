"""Output of comparisons: figures of each run, a table, a plot, the header of a result file.

May import sections, the standard library and, inside the functions that need them, rich,
ds_quant.tools.plot_style, torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Collection, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import fmean, median
from typing import Any

import sections

sys.path.append(str(sections.ROOT))  # last: an installed ds_quant comes first

FINAL_STEPS = 50  # the final loss is the mean over the last 50 steps
# Pairs of one scheme scatter by up to 0.4 % (convergence_10m.json), and a demo trains one.
TELLING_GAP = 1.0  # %
BASELINES = ("full_precision", "deepspeed_plain")  # the first one that was run
PACKAGES = ("torch", "deepspeed", "numpy", "pydantic")


def parser(about: str) -> argparse.ArgumentParser:
    """Return the parser of a script. about: its docstring, printed with its line breaks."""
    return argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


# ---- figures of runs ----


def received(result: dict[str, Any], *hops: str) -> float | None:
    """Return the bytes received on ``hops`` per parameter and optimizer step, mean over the ranks.

    result: content of the result file of train.py.

    Returns:
        None if bytes were not counted.
    """
    reports = result["reports"]
    if reports is None:
        return None
    bytes_of_ranks = []
    for report in reports:
        nbytes = 0
        for bytes_by_hop in report["received_bytes"].values():
            nbytes += sum(bytes_by_hop[hop] for hop in hops)
        bytes_of_ranks.append(nbytes)
    return fmean(bytes_of_ranks) / reports[0]["params"] / len(result["losses"])


def rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of all runs; each run has `label`, `result` and `run_seconds`.

    Losses are nats per byte of text. gap_percent: gap to the baseline run, None without one.
    wire_bytes: per rank, parameter and optimizer step, None if not counted, as under DeepSpeed
    alone; inter_bytes: those from other nodes. step_seconds: median. run_seconds: with start-up.
    """
    final = {run["label"]: fmean(run["result"]["losses"][-FINAL_STEPS:]) for run in runs}
    base = baseline(final)
    return [
        {
            "label": run["label"],
            "final_loss": final[run["label"]],
            "gap_percent": 100 * (final[run["label"]] / final[base] - 1) if base else None,
            "validation_loss": run["result"]["validation_loss"],
            "wire_bytes": received(run["result"], "intra", "inter"),
            "inter_bytes": received(run["result"], "inter"),
            "step_seconds": median(run["result"]["seconds"]),
            "run_seconds": run["run_seconds"],
        }
        for run in runs
    ]


def baseline(labels: Collection[str]) -> str | None:
    """Return the run that others are compared with, None if it was not run."""
    return next((name for name in BASELINES if name in labels), None)


def conclusions(entries: Sequence[dict[str, Any]], *, world: int) -> list[str]:
    """Return the conclusions from the table: a sentence per scheme that has a baseline."""
    by_label = {row["label"]: row for row in entries}
    base = by_label.get(baseline(by_label) or "")
    lines = []
    for label, row in by_label.items():
        if base is None or label == base["label"]:
            continue
        if not row["wire_bytes"] or not base["wire_bytes"]:
            continue
        if row["inter_bytes"] and base["inter_bytes"]:
            key = "inter_bytes"
            scope = " between nodes"
        else:
            key = "wire_bytes"
            scope = ""
        lines.append(
            f"{label}: {base[key] / row[key]:.1f}x fewer bytes{scope} than {base['label']}, "
            f"loss {gap(row)} %."
        )
    lines.append(
        "B/param: bytes that a rank receives per parameter and step; multiply by "
        f"{world}/{world - 1} to compare with the volume in the start-up line."
    )
    lines.append(
        "Steps are not faster here: ranks of one machine have no network between them. "
        "`ds_quant estimate` predicts step times for yours."
    )
    return lines


def gap(row: dict[str, Any]) -> str:
    """Format the gap of a run in percent. Small gaps are marked."""
    percent = row["gap_percent"]
    doubt = " (too short to tell)" if percent and abs(percent) < TELLING_GAP else ""
    return number(percent, "+.2f") + doubt


def number(value: float | None, spec: str) -> str:
    return "n/a" if value is None else format(value, spec)


_WIDEST = 1000  # columns


def show(header: Sequence[str], body: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Print the table of a page, a line per row: wider than the terminal rather than folded."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=title)
    for column, name in enumerate(header):
        words = name.replace("`", "").replace(" ", "\n")  # narrow, so that labels are not folded
        grid.add_column(words, justify="right" if column else "left", no_wrap=True)
    for cells in body:
        grid.add_row(*(cell.replace("`", "") for cell in cells))
    console = Console()
    unlimited = console.options.update(max_width=_WIDEST)
    width = max(console.width, console.measure(grid, options=unlimited).maximum)
    Console(width=width).print(grid)


# ---- plot ----


def rolling(values: Sequence[float], *, window: int = 20) -> list[list[float]]:
    """Return lower quartile, median and upper quartile of the last ``window`` values, per value.

    A mean would spread a spike over the whole window.
    """
    windows = [sorted(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
    quartiles = []
    for quarter in (1, 2, 3):
        quartiles.append([window[(len(window) - 1) * quarter // 4] for window in windows])
    return quartiles


def plot(runs: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Write a PNG: bytes per step, smoothed loss curves, and each step's gap to the baseline.

    The baseline trains on the same data. Bands are quartiles of the last 20 steps.
    """
    from ds_quant.tools import plot_style

    losses = {run["label"]: run["result"]["losses"] for run in runs}
    figures = rows(runs)
    base = baseline(losses)
    colors = plot_style.colors(losses)
    panels = 3 if base else 2
    figure, ((bars, left, *others),) = plot_style.pyplot().subplots(
        1, panels, figsize=(5.5 * panels, 5), squeeze=False
    )
    if any(row["inter_bytes"] for row in figures):
        key = "inter_bytes"
        receiver = "between nodes"
    else:
        key = "wire_bytes"
        receiver = "by a rank"
    drawn = bars.barh(
        [plot_style.wrapped(row["label"]) for row in figures],
        [row[key] or 0.0 for row in figures],
        color=[colors[row["label"]] for row in figures],
    )
    bars.bar_label(drawn, fmt="%.2f", padding=4)
    bars.invert_yaxis()
    bars.margins(x=0.15)
    bars.set(xlabel="bytes per parameter and step", title=f"Bytes received {receiver}")
    for row in figures:
        name = row["label"]
        left.plot(rolling(losses[name])[1], color=colors[name], label=name)
        if base in (None, name):
            continue
        pairs = zip(losses[name], losses[base], strict=True)
        low, middle, high = rolling([100 * (ours / exact - 1) for ours, exact in pairs])
        others[0].plot(middle, color=colors[name], label=f"{name} {gap(row)}")
        others[0].fill_between(
            range(len(low)), low, high, color=colors[name], alpha=0.15, linewidth=0
        )
    left.set(
        xlabel="optimizer step",
        ylabel="nats per byte, median of 20 steps",
        title="Training loss",
    )
    for right in others:
        right.axhline(0, color="0.5", linewidth=0.8, label="_")
        right.set(
            xlabel="optimizer step",
            ylabel="%, median and quartiles of 20 steps",
            title=f"Loss against {base}, same data",
        )
    for axes in (bars, left, *others):
        plot_style.add_legend(axes)
    figure.suptitle(title)
    plot_style.save(figure, path)


# ---- result files ----

# Flags of the output; they do not change the results.
_ABOUT_OUTPUT = ("json", "out", "plot", "report", "limit")


def save(
    path: Path,
    kind: str,
    args: argparse.Namespace | dict[str, Any],
    *,
    commas: Sequence[str] = (),
    **content: Any,
) -> dict[str, Any]:
    """Write the result file of benchmarks/``kind``.py and its page. Return the file's content.

    commas: arguments that are lists joined by commas.
    """
    given = args if isinstance(args, dict) else vars(args)
    arguments = {name: _plain(value) for name, value in given.items() if name not in _ABOUT_OUTPUT}
    result = {
        "kind": kind,
        "version": 1,
        "command": command_line(f"benchmarks/{kind}.py", arguments, commas=commas),
        "arguments": arguments,
        **provenance(),
        **content,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, result)
    path.with_suffix(".md").write_text(sections.section_of(path), "utf-8")
    return result


def write(path: Path | None, document: dict[str, Any]) -> None:
    """Replace the file in one step, so that a reader or a killed program never finds half of it.

    path: None to write nothing.
    """
    if path is not None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        part.replace(path)


def _plain(value: Any) -> Any:
    """Return the name of a file without its folder, and other values unchanged."""
    return value.name if isinstance(value, Path) else value


def command_line(script: str, arguments: dict[str, Any], *, commas: Sequence[str] = ()) -> str:
    """Return the command with its arguments. commas: lists to join by commas."""
    return shlex.join(["python", script, *flags(arguments, commas=commas)])


def flags(arguments: dict[str, Any], *, commas: Sequence[str] = ()) -> list[str]:
    """Return the words of a command line. Unset arguments are left out."""
    words = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif isinstance(value, list) and value:
            items = [_word(item) for item in value]
            words += [flag, *([",".join(items)] if name in commas else items)]
        elif value is not None and value is not False and value != []:
            words += [flag, _word(value)]
    return words


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def provenance() -> dict[str, Any]:
    """Return date, versions and hardware of a measurement."""
    import torch

    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # a machine that measures kernels may lack DeepSpeed
            versions[package] = None
    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions,
        "hardware": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "load_average": round(os.getloadavg()[0], 2),  # times on a busy machine mean nothing
        },
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
