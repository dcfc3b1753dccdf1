"""Step times on paper: the cost model for more GPUs, links and models than one machine has.

    python benchmarks/scaling.py --json scaling.json --plot scaling.png
    python benchmarks/scaling.py --models 7B --ranks 64 --rates 10 100 --stages 3 --node-sizes 8

Bytes are those of ds_quant.policy.cost, taken from one transformer block (the rest of a model has
the same bytes per parameter to within its embedding). Compute is 6 flops per parameter and
token. Everything else is an assumption given as a flag. Speed-ups are over full_precision (bf16)
at the same point, without any overlap of communication and compute, and with perfect overlap. Ends
with SDP4Bit's Table 2: which rows the model reproduces, and why not. predicted.py holds the model
against the step times of the network lab.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import published
import report
import sections
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ds_quant.config.presets import preset_names
from ds_quant.config.schema import parse_block
from ds_quant.policy import cost
from ds_quant.policy.cost import Cluster, Costs, Volume, bill, predict
from ds_quant.tools.forecast import block_cargo

BASELINE = "full_precision"


class Model(NamedTuple):
    """A GPT: parameters, width, blocks."""

    numel: int
    hidden: int
    layers: int


MODELS = {
    "1.3B": Model(1_300_000_000, 2048, 24),
    "2.7B": Model(2_700_000_000, 2560, 32),
    "6.7B": Model(6_700_000_000, 4096, 32),
    "13B": Model(13_000_000_000, 5120, 40),
    "30B": Model(30_000_000_000, 7168, 48),
    "70B": Model(70_000_000_000, 8192, 80),
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    add("--schemes", nargs="+", choices=preset_names(), default=list(preset_names()))
    add("--stages", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3])
    add("--ranks", type=_positive, nargs="+", default=[2**i for i in range(1, 11)], help="GPUs")
    add("--node-sizes", type=_positive, nargs="+", default=[1, 4, 8], help="GPUs per node")
    add("--rates", type=_positive_float, nargs="+", default=[1, 10, 25, 50, 100, 200, 400],
        help="Gb/s into a node")  # fmt: skip
    add("--intra", type=_positive_float, default=1800.0, help="Gb/s into a GPU from its node")
    add("--tokens", type=_positive, default=8192, help="per GPU and micro-step")
    add("--micro-steps", type=_positive, default=1, help="per optimizer step")
    add("--tflops", type=_positive_float, default=312.0, help="peak of a GPU")
    add("--utilisation", type=_positive_float, default=0.4, help="share of the peak reached")
    add("--latency", type=float, default=2e-5, help="seconds per collective")
    add("--encode", type=_positive_float, default=1e11, help="parameters per second and GPU")
    add("--json", type=Path)
    add("--plot", type=Path)
    return parser.parse_args(argv)


def _positive(value: str) -> int:
    if not value.isdigit() or int(value) == 0:
        raise argparse.ArgumentTypeError(f"{value!r}: allowed: whole numbers from 1")
    return int(value)


def _positive_float(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{value!r}: allowed: numbers above 0")
    return number


@cache
def block_bill(scheme: str, stage: int, hidden: int, ranks: int, node_size: int) -> Costs:
    """Bytes per parameter of one transformer block in bf16."""
    cargo = block_cargo(hidden, dtype=torch.bfloat16)
    return bill(
        parse_block({"scheme": scheme}).to_scheme(), stage, cargo,
        ranks=ranks, gradient_dtype=torch.bfloat16, node_size=node_size,
    )  # fmt: skip


def volume(scheme: str, stage: int, model: Model, ranks: int, node_size: int, k: int) -> Volume:
    """What one step moves and encodes, `k` micro-steps."""
    costs = block_bill(scheme, stage, model.hidden, ranks, node_size)
    return cost.volume(costs, stage, micro_steps=k, layers=model.layers)


def points(args: argparse.Namespace) -> list[tuple[str, int, int, int]]:
    """Model, stage, ranks and node size of every topology that exists."""
    return [
        (model, stage, ranks, node_size)
        for model in args.models
        for stage in args.stages
        for ranks in args.ranks
        for node_size in args.node_sizes
        if ranks > 1 and ranks % node_size == 0
    ]


def rows_of(point: tuple[str, int, int, int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rates and schemes of a point."""
    name, stage, ranks, node_size = point
    model, rows = MODELS[name], []
    one_node = ranks == node_size
    for rate in args.rates[:1] if one_node else args.rates:  # one node has no link to others
        cluster = Cluster(
            nodes=ranks // node_size, node_size=node_size, link=rate * 1e9 / 8,
            intra_link=args.intra * 1e9 / 8, flops=args.tflops * 1e12 * args.utilisation,
            encode=args.encode, latency=args.latency,
        )  # fmt: skip
        times = {}
        for scheme in dict.fromkeys([BASELINE, *args.schemes]):
            moved = volume(scheme, stage, model, ranks, node_size, args.micro_steps)
            tokens = args.tokens * args.micro_steps
            times[scheme] = moved, predict(moved, cluster, numel=model.numel, tokens=tokens)
        base = times[BASELINE][1]
        for scheme in args.schemes:
            moved, time = times[scheme]
            rows.append({
                "model": name, "scheme": scheme, "stage": stage, "ranks": ranks,
                "node_size": node_size, "rate": float(rate),
                "inter_bytes": moved.inter, "intra_bytes": moved.intra,
                "communication_seconds": time.communication, "compute_seconds": time.compute,
                "no_overlap_seconds": time.no_overlap, "full_overlap_seconds": time.full_overlap,
                "speedup_no_overlap": base.no_overlap / time.no_overlap,
                "speedup_full_overlap": base.full_overlap / time.full_overlap,
            })  # fmt: skip
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Table:
    grid = Table(title="Predicted; speed-ups over full_precision without / with perfect overlap")
    for header in ("model", "ZeRO", "GPUs", "per node", "Gb/s", "scheme", "B/param between",
                   "comm s", "compute s", "step s", "speed-up"):  # fmt: skip
        grid.add_column(header, justify="left" if header == "scheme" else "right")
    for row in rows:
        grid.add_row(
            row["model"], str(row["stage"]), str(row["ranks"]), str(row["node_size"]),
            f"{row['rate']:g}", row["scheme"], f"{row['inter_bytes']:.3f}",
            f"{row['communication_seconds']:.3g}", f"{row['compute_seconds']:.3g}",
            f"{row['no_overlap_seconds']:.3g} / {row['full_overlap_seconds']:.3g}",
            f"{row['speedup_no_overlap']:.2f} / {row['speedup_full_overlap']:.2f}",
        )  # fmt: skip
    return grid


def published_table(rows: Sequence[dict[str, Any]]) -> Table:
    grid = Table(title="SDP4Bit, Table 2 (baseline with fp32 gradients: 6 B/param/step)")
    for header in ("cluster", "model", "published", "model: stated", "model: fitted", "verdict"):
        grid.add_column(header, justify="left" if header == "verdict" else "right")
    for row in rows:
        stated = "n/a" if row["at_stated_rate"] is None else f"{row['at_stated_rate']:.2f}"
        grid.add_row(
            row["cluster"], row["model"], f"{row['published']:.2f}",
            f"{stated} ({row['stated_rate']:g} Gb/s)",
            f"{row['at_fitted_rate']:.2f} ({row['fitted_rate']:.0f} Gb/s)", row["verdict"],
        )  # fmt: skip
    return grid


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Speed-up against link rate at the largest stage, node size and number of GPUs, per model.

    The band reaches from no overlap to perfect overlap.
    """
    from ds_quant.tools import plot_style

    top = {key: max(row[key] for row in rows) for key in ("stage", "ranks", "node_size")}
    shown = [row for row in rows if all(row[key] == value for key, value in top.items())]
    models = list(dict.fromkeys(row["model"] for row in shown))
    colors = plot_style.colors(dict.fromkeys(row["scheme"] for row in shown))
    figure, axes = plot_style.pyplot().subplots(
        1, max(1, len(models)), figsize=(5.5 * max(1, len(models)), 5), layout="constrained",
        squeeze=False, sharey=True,
    )  # fmt: skip
    for each, model in zip(axes[0], models, strict=False):
        for scheme, color in colors.items():
            own = [row for row in shown if (row["scheme"], row["model"]) == (scheme, model)]
            rates = [row["rate"] for row in own]
            serial = [row["speedup_no_overlap"] for row in own]
            each.plot(rates, serial, color=color, label=scheme)
            hidden = [row["speedup_full_overlap"] for row in own]
            each.fill_between(rates, serial, hidden, color=color, alpha=0.1, linewidth=0)
        each.set(title=model, xscale="log", xlabel="link, Gb/s per node")
        plot_style.plain_ticks(each.xaxis, sorted({row["rate"] for row in shown}))
        plot_style.finish(each)
        plot_style.label_lines(each, at_start=True)
    axes[0][0].set_ylabel("predicted speed-up (line: no overlap, band: up to all)")
    figure.suptitle(f"The slower the link, the larger the gain: ZeRO-{top['stage']}, "
                    f"{top['ranks']} GPUs, {top['node_size']} per node")  # fmt: skip
    plot_style.save(figure, path)


def section(result: dict[str, Any]) -> tuple[str, str]:
    """See sections.py; the largest stage, node size and number of GPUs."""
    keys = ("stage", "ranks", "node_size")
    top = {key: max(row[key] for row in result["rows"]) for key in keys}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if all(row[key] == top[key] for key in keys):
            found.setdefault((row["model"], row["scheme"]), []).append(row)
    rates = [f"{row['rate']:g} Gb/s" for row in next(iter(found.values()))]
    rows = [
        [f"{model}, `{scheme}`",
         *(f"{r['speedup_no_overlap']:.2f} / {r['speedup_full_overlap']:.2f}" for r in own)]
        for (model, scheme), own in found.items()
    ]  # fmt: skip
    papers = [
        [f"{row['cluster']} {row['model']}", f"{row['published']:.2f}",
         f"{report.number(row['at_stated_rate'], '.2f')} ({row['stated_rate']:g} Gb/s)",
         f"{row['at_fitted_rate']:.2f} ({row['fitted_rate']:.0f} Gb/s)"]
        for row in result["published"]
    ]  # fmt: skip
    return "Predicted for larger clusters", (
        "A cost model, nothing measured: speed-up over bf16 without and with perfect overlap,\n"
        f"ZeRO-{top['stage']}, {top['ranks']} GPUs, {top['node_size']} per node; assumptions are "
        "in the command.\n\n"
        + sections.table(["model, scheme", *rates], rows)
        + "\n\nSDP4Bit's Table 2, whose baseline reduces fp32 gradients (6 B/param/step), with the"
        "\nlink rate its clusters state, and with one rate per cluster fitted to its rows; n/a: "
        "the\nbaseline's bytes alone take longer than its step.\n\n"
        + sections.table(["row", "published", "stated rate", "fitted rate"], papers)
    )


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse_args(argv), Console()
    found = points(args)
    if not found:
        console.print(f"scaling.py: --ranks {args.ranks} --node-sizes {args.node_sizes}: no number "
                      "of GPUs above 1 is a multiple of a node size")  # fmt: skip
        return 1
    rows = [row for p in track(found, description="points") for row in rows_of(p, args)]
    papers = published.compare()
    console.print(table(rows))
    console.print(published_table(papers))
    if args.plot is not None:
        plot(rows, args.plot)
    if args.json is not None:
        report.save(args.json, "scaling", args, rows=rows, published=papers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
