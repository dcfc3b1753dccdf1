"""What a comparison shows: figures of each run, a table, a picture, a result file's header.

May import sections, the standard library and, inside the functions that need them, rich,
matplotlib, torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import fmean, median
from typing import Any

import sections

FINAL_STEPS = 50  # the final loss is the mean over the last 50 steps
BASELINES = ("full_precision", "deepspeed_plain")  # the first one present
PACKAGES = ("torch", "deepspeed", "numpy", "pydantic")


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figures of one run; bytes are received per rank, parameter and optimizer step."""

    label: str
    final_loss: float  # nats per byte of text, mean of the last FINAL_STEPS steps
    gap_percent: float | None  # against the baseline run, None without one
    validation_loss: float
    wire_bytes: float | None  # None: not counted, the plugin is not active
    inter_bytes: float | None  # the part of them that comes from other nodes
    step_seconds: float  # median
    run_seconds: float  # with start-up


def wire_bytes(
    result: dict[str, Any], *, links: Sequence[str] = ("intra", "inter")
) -> float | None:
    """Bytes received over `links` per rank, parameter and optimizer step, or None if not counted.

    `result` is what train.py wrote; the mean over its ranks.
    """
    reports = result["reports"]
    if reports is None:
        return None
    received = fmean(_received(report, links) for report in reports)
    return received / reports[0]["params"] / len(result["losses"])


def _received(report: dict[str, Any], links: Sequence[str]) -> int:
    return sum(by_link[link] for by_link in report["received_bytes"].values() for link in links)


def final_loss(losses: Sequence[float]) -> float:
    """Mean of the last FINAL_STEPS losses."""
    return fmean(losses[-FINAL_STEPS:])


def rows(runs: Sequence[dict[str, Any]]) -> list[Row]:
    """The figures of all runs; each run has `label`, `result` and `run_seconds`."""
    by_label = {run["label"]: final_loss(run["result"]["losses"]) for run in runs}
    baseline = next((by_label[name] for name in BASELINES if name in by_label), None)
    return [
        Row(
            label=run["label"],
            final_loss=by_label[run["label"]],
            gap_percent=(
                None if baseline is None else 100 * (by_label[run["label"]] / baseline - 1)
            ),
            validation_loss=run["result"]["validation_loss"],
            wire_bytes=wire_bytes(run["result"]),
            inter_bytes=wire_bytes(run["result"], links=("inter",)),
            step_seconds=median(run["result"]["seconds"]),
            run_seconds=run["run_seconds"],
        )
        for run in runs
    ]


def table(entries: Sequence[Row]) -> Any:
    """The figures as a rich table that fits 80 columns."""
    from rich.table import Table

    grid = Table()
    grid.add_column("scheme", overflow="fold")
    between_nodes = any(row.inter_bytes for row in entries)
    headers = [f"loss, last\n{FINAL_STEPS} steps", "gap\n%", "held-out\nloss", "received\nB/param"]
    headers += ["between\nnodes"] if between_nodes else []
    for header in (*headers, "step\nms"):
        grid.add_column(header, justify="right")
    for row in entries:
        cells = [f"{row.final_loss:.4f}", number(row.gap_percent, "+.2f")]
        cells += [f"{row.validation_loss:.4f}", number(row.wire_bytes, ".3f")]
        cells += [number(row.inter_bytes, ".3f")] if between_nodes else []
        grid.add_row(row.label, *cells, f"{1e3 * row.step_seconds:.0f}")
    return grid


def conclusions(entries: Sequence[Row], *, world: int) -> list[str]:
    """What the table shows, in sentences: one per scheme that was compared with a baseline."""
    baseline = next((row for name in BASELINES for row in entries if row.label == name), None)
    lines = [
        "received: bytes per parameter and optimizer step that a rank gets from the others. The "
        f"start-up line counts whole tensors, of which a rank of {world} holds 1/{world} itself: "
        f"{world}/{world - 1} times as much."
    ]
    for row in entries:
        if baseline is None or row is baseline or not row.wire_bytes or not baseline.wire_bytes:
            continue
        where, of, to = "", baseline.wire_bytes, row.wire_bytes
        if row.inter_bytes and baseline.inter_bytes:
            where, of, to = " between nodes", baseline.inter_bytes, row.inter_bytes
        lines.append(
            f"{row.label}: {of / to:.1f}x fewer bytes{where} than {baseline.label}, "
            f"loss {row.gap_percent:+.2f} %."
        )
    lines.append(
        "Steps are not faster here: ranks of one machine have no network between them. "
        "`ds_quant estimate` predicts step times for yours."
    )
    return lines


def number(value: float | None, spec: str) -> str:
    return "n/a" if value is None else format(value, spec)


def smoothed(values: Sequence[float], *, window: int = 20) -> list[float]:
    """Median of the last `window` values (fewer at the start): a spike stays out of it, where a
    mean would stretch it over the whole window.
    """
    return [median(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def quartiles(values: Sequence[float], *, window: int = 20) -> tuple[list[float], list[float]]:
    """Lower and upper quartiles of the last `window` values (fewer at the start)."""
    low, high = [], []
    for i in range(len(values)):
        last = sorted(values[max(0, i + 1 - window) : i + 1])
        low.append(last[(len(last) - 1) // 4])
        high.append(last[(3 * len(last) - 1) // 4])
    return low, high


def plot(runs: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Write a PNG: smoothed loss curves, and the difference of each step's loss to the baseline's,
    which sees the same data, with the quartiles of the last 20 steps as a band.
    """
    from ds_quant.tools import plot_style

    losses = {run["label"]: run["result"]["losses"] for run in runs}
    base = next((name for name in BASELINES if name in losses), None)
    colors = plot_style.colors(losses)
    figure, panels = plot_style.pyplot().subplots(
        1, 1 if base is None else 2, figsize=(7 if base is None else 13, 5),
        layout="constrained", squeeze=False,
    )  # fmt: skip
    left, right = panels[0][0], panels[0][-1]
    for row in rows(runs):
        label = f"{row.label}, {number(row.wire_bytes, '.2f')} B/param"
        left.plot(smoothed(losses[row.label]), color=colors[row.label], label=label)
    left.set(xlabel="optimizer step", ylabel="nats per byte, median of 20 steps",
             title="Training loss, and bytes received per step")  # fmt: skip
    if base is not None:
        for row in (row for row in rows(runs) if row.label != base):
            pairs = zip(losses[row.label], losses[base], strict=True)
            apart = [100 * (ours / exact - 1) for ours, exact in pairs]
            label = f"{row.label} {number(row.gap_percent, '+.2f')} %"
            right.plot(smoothed(apart), color=colors[row.label], label=label)
            right.fill_between(range(len(apart)), *quartiles(apart), color=colors[row.label],
                               alpha=0.15, linewidth=0)  # fmt: skip
        right.axhline(0, color="0.5", linewidth=0.8, label="_")
        right.set(xlabel="optimizer step", ylabel="%, median and quartiles of 20 steps",
                  title=f"Loss against {base}, same data")  # fmt: skip
    for axes in panels[0]:
        plot_style.finish(axes)
        plot_style.label_lines(axes)
    figure.suptitle(title)
    plot_style.save(figure, path)


# Flags that say where to write or what to print, not what is measured.
_ABOUT_OUTPUT = ("json", "out", "plot", "trace", "profile")


def save(
    path: Path,
    kind: str,
    args: argparse.Namespace | dict[str, Any],
    *,
    commas: Sequence[str] = (),
    **content: Any,
) -> None:
    """Write the result file of benchmarks/``kind``.py, and the page that shows it."""
    given = args if isinstance(args, dict) else vars(args)
    arguments = {k: v for k, v in given.items() if k not in _ABOUT_OUTPUT}
    command = command_line(f"benchmarks/{kind}.py", arguments, commas=commas)
    written = {"kind": kind, "version": 1, "command": command, "arguments": arguments,
               **provenance(), **content}  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    path.with_suffix(".md").write_text(sections.section_of(path) or "", "utf-8")


def command_line(script: str, arguments: dict[str, Any], *, commas: Sequence[str] = ()) -> str:
    """Return the command with its arguments; lists named in ``commas`` are joined by commas."""
    words = ["python", script]
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif isinstance(value, list) and name == "override":
            for key, setting in value:
                text = setting if isinstance(setting, str) else json.dumps(setting)
                words += [flag, f"{key}={text}"]
        elif isinstance(value, list) and value:
            plain = [_plain(item) for item in value]
            words += [flag, *([",".join(plain)] if name in commas else plain)]
        elif value is not None and value is not False and value != []:
            words += [flag, _plain(value)]
    return shlex.join(words)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def provenance() -> dict[str, Any]:
    """Date, versions and hardware: what a number needs to be quoted later."""
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
            "gpus": _gpu_names(),
            "load_average": round(os.getloadavg()[0], 2),  # others at work make times worthless
        },
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu_names() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
