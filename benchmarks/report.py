"""What a comparison shows: figures of each run, a table, a picture, a result file's header.

May import the standard library and, inside the functions that need them, rich, matplotlib, torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import fmean, median
from typing import Any

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
    """The figures as a rich table."""
    from rich.table import Table

    grid = Table()
    grid.add_column("scheme")
    between_nodes = any(row.inter_bytes for row in entries)
    headers = ["final loss", "gap %", "held-out loss", "wire B/param/step"]
    headers += ["between nodes"] if between_nodes else []
    for header in (*headers, "step ms", "run s"):
        grid.add_column(header, justify="right")
    for row in entries:
        cells = [f"{row.final_loss:.4f}", _number(row.gap_percent, "+.2f")]
        cells += [f"{row.validation_loss:.4f}", _number(row.wire_bytes, ".3f")]
        cells += [_number(row.inter_bytes, ".3f")] if between_nodes else []
        cells += [f"{1e3 * row.step_seconds:.0f}", f"{row.run_seconds:.0f}"]
        grid.add_row(row.label, *cells)
    return grid


def _number(value: float | None, spec: str) -> str:
    return "n/a" if value is None else format(value, spec)


def smoothed(losses: Sequence[float], *, window: int = 20) -> list[float]:
    """Mean over the last `window` values (fewer at the start), one per loss."""
    return [fmean(losses[max(0, i + 1 - window) : i + 1]) for i in range(len(losses))]


def plot(runs: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Write a PNG: smoothed loss curves, and beside them the difference to the baseline."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = {run["label"]: smoothed(run["result"]["losses"]) for run in runs}
    baseline = next((curves[name] for name in BASELINES if name in curves), None)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5.6), layout="constrained")
    for row in rows(runs):
        curve = curves[row.label]
        label = f"{row.label}: {row.final_loss:.3f}, {_number(row.wire_bytes, '.2f')} B/param/step"
        left.plot(curve, label=label, linewidth=1.4)
        if baseline is not None:
            right.plot([a - b for a, b in zip(curve, baseline, strict=True)], linewidth=1.4)
    left.set(xlabel="optimizer step", ylabel="loss, nats per byte (mean of 20 steps)")
    figure.legend(loc="outside lower left", title="scheme: final loss, bytes received per rank")
    right.set(xlabel="optimizer step", ylabel="difference to full precision, nats per byte")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# Flags that say where to write or what to print, not what is measured.
_ABOUT_OUTPUT = ("json", "out", "plot", "trace", "profile", "lab")


def save(path: Path, kind: str, args: argparse.Namespace, **content: Any) -> None:
    """Write the result file of benchmarks/``kind``.py: what it ran with, where, and ``content``."""
    arguments = {k: v for k, v in vars(args).items() if k not in _ABOUT_OUTPUT}
    written = {"kind": kind, "version": 1, "command": f"python benchmarks/{kind}.py",
               "arguments": arguments, **provenance(), **content}  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=1) + "\n", "utf-8")


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
