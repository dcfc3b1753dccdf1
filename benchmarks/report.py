"""What a comparison shows: figures of each run, a table, a picture, a result file's header.

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
BASELINES = ("full_precision", "deepspeed_plain")  # the first one present
PACKAGES = ("torch", "deepspeed", "numpy", "pydantic")


def parser(about: str) -> argparse.ArgumentParser:
    """Of a script, with its docstring as it stands."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=about, formatter_class=form)


# ---- figures of runs ----


def received(result: dict[str, Any], *links: str) -> float | None:
    """Bytes over ``links`` per parameter and optimizer step, mean over the ranks of a run.

    ``result`` is what train.py wrote. None if bytes were not counted.
    """
    if (reports := result["reports"]) is None:
        return None
    nbytes = fmean(
        sum(
            by_communicator[link]
            for by_communicator in report["received_bytes"].values()
            for link in links
        )
        for report in reports
    )
    return nbytes / reports[0]["params"] / len(result["losses"])


def rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of all runs; each run has `label`, `result` and `run_seconds`.

    Losses are nats per byte of text, the gap is against the baseline run, None without one. Bytes
    are per rank, parameter and optimizer step, None if not counted, as by DeepSpeed alone;
    inter_bytes: the part of them that comes from other nodes. step_seconds is a median, run_seconds
    has the start-up in it.
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
    """The run that others are compared with."""
    return next((name for name in BASELINES if name in labels), None)


def conclusions(entries: Sequence[dict[str, Any]], *, world: int) -> list[str]:
    """What the table shows, in sentences: one per scheme that was compared with a baseline."""
    by_label = {row["label"]: row for row in entries}
    base = by_label.get(baseline(by_label) or "", {"label": None, "wire_bytes": None})
    lines = []
    for label, row in by_label.items():
        if label == base["label"] or not row["wire_bytes"] or not base["wire_bytes"]:
            continue
        key, where = "wire_bytes", ""
        if row["inter_bytes"] and base["inter_bytes"]:
            key, where = "inter_bytes", " between nodes"
        lines.append(
            f"{label}: {base[key] / row[key]:.1f}x fewer bytes{where} than {base['label']}, "
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
    """The gap of a run, in percent, and whether it tells anything."""
    percent = row["gap_percent"]
    doubt = " (too short to tell)" if percent and abs(percent) < TELLING_GAP else ""
    return number(percent, "+.2f") + doubt


def number(value: float | None, spec: str) -> str:
    return "n/a" if value is None else format(value, spec)


def show(header: Sequence[str], body: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Print the table of a page."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=title)
    for place, name in enumerate(header):
        words = name.replace("`", "").replace(" ", "\n")  # narrow, so that labels need no folding
        grid.add_column(words, justify="right" if place else "left", overflow="fold")
    for cells in body:
        grid.add_row(*(cell.replace("`", "") for cell in cells))
    Console().print(grid)


# ---- picture ----


def rolling(values: Sequence[float], *, window: int = 20) -> list[list[float]]:
    """Lower quartile, median and upper quartile of the last ``window`` values (fewer at the
    start): a spike stays out of them, where a mean would stretch it over the whole window.
    """
    last = [sorted(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
    return [[found[(len(found) - 1) * k // 4] for found in last] for k in (1, 2, 3)]


def plot(runs: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Write a PNG: bytes per step, smoothed loss curves, and the difference of each step's loss to
    the baseline's, which sees the same data, with the quartiles of the last 20 steps as a band.
    """
    from ds_quant.tools import plot_style

    losses = {run["label"]: run["result"]["losses"] for run in runs}
    found, base, colors = rows(runs), baseline(losses), plot_style.colors(losses)
    wide = 3 if base else 2
    figure, ((bars, left, *others),) = plot_style.pyplot().subplots(
        1, wide, figsize=(5.5 * wide, 5), squeeze=False
    )
    between = any(row["inter_bytes"] for row in found)
    sent = [row["inter_bytes" if between else "wire_bytes"] or 0.0 for row in found]
    names = [plot_style.wrapped(row["label"]) for row in found]
    drawn = bars.barh(names, sent, color=[colors[row["label"]] for row in found])
    bars.bar_label(drawn, fmt="%.2f", padding=4)
    bars.invert_yaxis()
    bars.margins(x=0.15)
    bars.set(xlabel="bytes per parameter and step",
             title=f"Bytes received {'between nodes' if between else 'by a rank'}")  # fmt: skip
    for row in found:
        name = row["label"]
        left.plot(rolling(losses[name])[1], color=colors[name], label=name)
        if base in (None, name):
            continue
        pairs = zip(losses[name], losses[base], strict=True)
        low, middle, high = rolling([100 * (ours / exact - 1) for ours, exact in pairs])
        others[0].plot(middle, color=colors[name], label=f"{name} {gap(row)}")
        others[0].fill_between(range(len(low)), low, high, color=colors[name], alpha=0.15,
                               linewidth=0)  # fmt: skip
    left.set(xlabel="optimizer step", ylabel="nats per byte, median of 20 steps",
             title="Training loss")  # fmt: skip
    for right in others:
        right.axhline(0, color="0.5", linewidth=0.8, label="_")
        right.set(xlabel="optimizer step", ylabel="%, median and quartiles of 20 steps",
                  title=f"Loss against {base}, same data")  # fmt: skip
    for axes in (bars, left, *others):
        plot_style.finish(axes)
    figure.suptitle(title)
    plot_style.save(figure, path)


# ---- result files ----

# Flags that say where to write or what to print, not what is measured.
_ABOUT_OUTPUT = ("json", "out", "plot", "report")


def save(
    path: Path,
    kind: str,
    args: argparse.Namespace | dict[str, Any],
    *,
    commas: Sequence[str] = (),
    **content: Any,
) -> dict[str, Any]:
    """Write the result file of benchmarks/``kind``.py, and the page that shows it."""
    given = args if isinstance(args, dict) else vars(args)
    arguments = {k: _plain(v) for k, v in given.items() if k not in _ABOUT_OUTPUT}
    command = command_line(f"benchmarks/{kind}.py", arguments, commas=commas)
    written = {"kind": kind, "version": 1, "command": command, "arguments": arguments,
               **provenance(), **content}  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, written)
    path.with_suffix(".md").write_text(sections.section_of(path), "utf-8")
    return written


def write(path: Path | None, document: dict[str, Any]) -> None:
    """Replace the file as a whole: it may be read, or this program ended, at any moment."""
    if path is not None:
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        beside.replace(path)


def _plain(value: Any) -> Any:
    """A file by its name: paths of this machine tell others nothing."""
    return value.name if isinstance(value, Path) else value


def command_line(script: str, arguments: dict[str, Any], *, commas: Sequence[str] = ()) -> str:
    """Return the command with its arguments; lists named in ``commas`` are joined by commas."""
    return shlex.join(["python", script, *flags(arguments, commas=commas)])


def flags(arguments: dict[str, Any], *, commas: Sequence[str] = ()) -> list[str]:
    """Return the words of a command line; what is unset is left out."""
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
    """Date, versions and hardware: what a number needs to be quoted later."""
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
            "load_average": round(os.getloadavg()[0], 2),  # others at work make times worthless
        },
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
