"""Loss gaps of schemes over seeds: same start, same data, paired with full precision seed by seed.

    python benchmarks/convergence.py --grid sdp4bit --seeds 0 1 2
    python benchmarks/convergence.py --from runs/seed0 runs/seed1     # of compare.py, as they are

Runs benchmarks/compare.py once per seed; a seed whose results are there with equal arguments is not
repeated, so an interrupted study continues. Prints the paired gap of the mean over the last 50
steps with its 95 % confidence interval, and writes JSON and a plot of mean curves and gaps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import compare
import report

_LEARNED = "weights.levels=learned,weights.rounding=nearest,weights.level_steps=[30,80,150,220]"

GRIDS = {
    "sdp4bit": "full_precision,sdp4bit,qwd,qw4,tlq,tlq_hs",
    # SDP4Bit, Table 3: group sizes of weights; and what its Table 1 leaves out
    "sdp4bit_groups": "full_precision,qw4:weights.group_size=32,qw4:weights.group_size=128,qw4,"
    "ulq,sdp4bit_paper",
    # QSDP, widths with uniform and learned levels, and how W4G4 rounds the weights (unpublished)
    "qsdp": ",".join(
        ["full_precision"]
        + [
            f"qsdp:weights.bits={w},gradients.bits={g}{levels}"
            for w, g in ((8, 8), (6, 4), (5, 4), (4, 4))
            for levels in ("", f",{_LEARNED}")
        ]
        + [f"qsdp_w4g4:weights.rounding={rounding}" for rounding in ("nearest", "stochastic")]
    ),
}

# Student's t for a two-sided 95 % interval, by degrees of freedom; 1.96 beyond.
_T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Gaps to full precision in per cent of its final loss, one per seed, and their interval."""

    label: str
    gaps: list[float]
    mean: float
    spread: float  # sample standard deviation, 0 for one seed
    half_width: float | None  # of the 95 % interval of the mean; None for one seed


def gap(label: str, ours: Sequence[float], exact: Sequence[float]) -> Gap:
    """Paired gap of final losses, seed by seed."""
    gaps = [100 * (a / b - 1) for a, b in zip(ours, exact, strict=True)]
    count = len(gaps)
    spread = stdev(gaps) if count > 1 else 0.0
    t = _T95[count - 2] if 2 <= count < len(_T95) + 2 else 1.96
    half_width = t * spread / count**0.5 if count > 1 else None
    return Gap(label=label, gaps=gaps, mean=fmean(gaps), spread=spread, half_width=half_width)


def gaps(studies: Sequence[dict[str, Any]]) -> list[Gap]:
    """Of every scheme that all seeds have, in the order of the first.

    Raises:
        ValueError: no full_precision, or studies that differ in more than the seed.
    """
    arguments = [{k: v for k, v in s["arguments"].items() if k != "seed"} for s in studies]
    differing = sorted({k for a in arguments for k in a if a[k] != arguments[0].get(k)})
    if differing:
        raise ValueError(f"the studies differ in {', '.join(differing)}: only the seed may differ")
    final = [
        {run["label"]: report.final_loss(run["result"]["losses"]) for run in study["runs"]}
        for study in studies
    ]
    baseline = next((b for b in report.BASELINES if all(b in losses for losses in final)), None)
    if baseline is None:
        raise ValueError(f"no baseline: run one of {', '.join(report.BASELINES)} in every study")
    labels = [label for label in final[0] if all(label in losses for losses in final)]
    exact = [losses[baseline] for losses in final]
    return [gap(label, [losses[label] for losses in final], exact) for label in labels]


def table(entries: Sequence[Gap], seeds: Sequence[int]) -> Any:
    from rich.table import Table

    grid = Table()
    grid.add_column("scheme")
    for header in (*(f"seed {seed}" for seed in seeds), "mean gap %", "95 %", "spread"):
        grid.add_column(header, justify="right")
    for entry in entries:
        half = "n/a" if entry.half_width is None else f"+-{entry.half_width:.2f}"
        cells = [f"{value:+.2f}" for value in entry.gaps]
        grid.add_row(entry.label, *cells, f"{entry.mean:+.3f}", half, f"{entry.spread:.2f}")
    return grid


def plot(studies: Sequence[dict[str, Any]], entries: Sequence[Gap], path: Path) -> None:
    """Difference of the mean curves to full precision, and the final gaps with their intervals.

    A band reaches from the lowest to the highest seed.
    """
    from ds_quant.tools import plot_style

    figure, (left, right) = plot_style.pyplot().subplots(
        1, 2, figsize=(14, 5.6), layout="constrained"
    )
    base = next(b for b in report.BASELINES if any(e.label == b for e in entries))
    exact = [_losses(study, base) for study in studies]
    colors = plot_style.colors(entry.label for entry in entries)
    for place, entry in enumerate(entries):
        color = colors[entry.label]
        curves = [_losses(study, entry.label) for study in studies]
        apart = [report.smoothed([a - b for a, b in zip(ours, theirs, strict=True)])
                 for ours, theirs in zip(curves, exact, strict=True)]  # fmt: skip
        steps = list(zip(*apart, strict=True))
        left.plot([fmean(step) for step in steps], color=color, label=entry.label)
        left.fill_between(range(len(steps)), *([f(step) for step in steps] for f in (min, max)),
                          color=color, alpha=0.12, linewidth=0)  # fmt: skip
        right.errorbar(entry.mean, place, xerr=entry.half_width or 0, marker="o", capsize=4,
                       color=color)  # fmt: skip
        right.scatter(entry.gaps, [place] * len(entry.gaps), s=8, color="grey", zorder=3)
    left.set(xlabel="optimizer step", ylabel="nats per byte, median of 20 steps",
             title=f"Loss against {base}: mean and range of {len(studies)} seeds")  # fmt: skip
    right.axvline(0, color="0.5", linewidth=0.8)
    right.set(xlabel="%", title="Gap of the last 50 steps (bars: 95 %, dots: seeds)", yticks=[])
    for place, entry in enumerate(entries):
        right.annotate(plot_style.wrapped(entry.label), (1, place), xytext=(5, 0), va="center",
                       xycoords=("axes fraction", "data"), textcoords="offset points",
                       color=colors[entry.label], fontsize=9)  # fmt: skip
    for axes in (left, right):
        plot_style.finish(axes)
    if len(entries) <= 6:  # else the names at the right are enough
        plot_style.label_lines(left)
    plot_style.save(figure, path)


def _losses(study: dict[str, Any], label: str) -> list[float]:
    return next(run["result"]["losses"] for run in study["runs"] if run["label"] == label)


def parse_args(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Our own flags, and the rest for compare.py."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other flags are those of compare.py (--stage, --world, --steps, --lr, ...).",
    )  # fmt: skip
    parser.add_argument("--grid", choices=sorted(GRIDS), help="schemes to compare")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--from", dest="folders", type=Path, nargs="+", metavar="FOLDER",
                        help="finished results of compare.py, one folder per seed")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("convergence_out"))
    parser.add_argument("--json", type=Path, help="default: OUT/convergence.json")
    parser.add_argument("--plot", type=Path, help="default: OUT/convergence.png")
    args, rest = parser.parse_known_args(argv)
    args.json = args.json or args.out / "convergence.json"
    args.plot = args.plot or args.out / "convergence.png"
    return args, rest


def run_seed(args: argparse.Namespace, rest: Sequence[str], seed: int) -> Path:
    """Folder with the finished comparison of one seed.

    Raises:
        RuntimeError: compare.py failed; it has said why.
    """
    folder = args.out / f"seed{seed}"
    schemes = [f"--schemes={GRIDS[args.grid]}"] if args.grid else []
    argv = [*schemes, *rest, f"--seed={seed}", f"--out={folder}"]
    wanted = compare._arguments(compare.parse_args(argv))
    done = folder / "compare.json"
    if done.exists() and json.loads(done.read_text("utf-8"))["arguments"] == wanted:
        print(f"seed {seed}: taken from {done}")
        return folder
    if compare.main(argv) != 0:
        raise RuntimeError(f"seed {seed}: the comparison failed")
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    args, rest = parse_args(argv)
    try:
        folders = args.folders or [run_seed(args, rest, seed) for seed in args.seeds]
        studies = [json.loads((f / "compare.json").read_text("utf-8")) for f in folders]
        entries = gaps(studies)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"convergence.py: {error}", file=sys.stderr)
        return 1
    from rich.console import Console

    seeds = [study["arguments"]["seed"] for study in studies]
    Console().print(table(entries, seeds))
    plot(studies, entries, args.plot)
    first = {k: studies[0][k] for k in ("versions", "hardware", "device", "text")}
    result = {
        "kind": "convergence", "version": 1, "command": "python benchmarks/convergence.py",
        "created": studies[-1]["created"], **first,
        "arguments": {**studies[0]["arguments"], "seed": seeds},
        "gaps": [asdict(entry) for entry in entries],
        "summaries": [study["summary"] for study in studies],
    }  # fmt: skip
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(f"results: {args.json}\nplot: {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
