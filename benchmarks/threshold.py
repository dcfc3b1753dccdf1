"""From how many elements on a quantized matrix is cheaper than one in full precision.

    python benchmarks/threshold.py                        # qsdp and sdp4bit under ZeRO-2
    python benchmarks/threshold.py --stages 2 3 --json threshold.json

A matrix that is quantized costs time beside its bytes: its own slots, views and calls, encoding and
decoding. Two engines of one process, the plugin's full precision and the scheme, take turns in a
world of two ranks that sends nothing (fake_world.py). By how much a matrix takes longer, over the
bytes that it no longer receives, is the rate of the link below which it is better quantized. The
block's ``min_numel`` is this table read for one's own link.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import report
import sections
from fake_world import World, join, without_handshake
from glue import build, in_turns
from rich.console import Console
from rich.table import Table


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--stages", type=int, nargs="+", default=[2])
    add("--schemes", nargs="+", default=["qsdp", "sdp4bit"])
    add("--widths", type=int, nargs="+", default=[16, 32, 64, 128, 256], help="of square matrices")
    add("--layers", type=int, default=200, help="matrices of a model")
    add("--rounds", type=int, default=20, help="turns of either engine")
    add("--json", type=Path, default=Path("threshold.json"))
    return parser.parse_args(argv)


def measure(stage: int, scheme: str, width: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row: what a matrix costs and saves in an optimizer step."""
    blocks = [{"scheme": name, "min_numel": 0, "metrics": {"interval": 0}, "checksum_steps": 0}
              for name in ("full_precision", scheme)]  # fmt: skip
    with without_handshake():
        engines = [build(str(stage), args.layers, block, width=width) for block in blocks]
        pairs = in_turns(engines, args.rounds)
        bills = [engine.ds_quant_engine.bill() for engine in engines]
        for engine in engines:
            engine.destroy()
    saved = bills[0].step_bytes(stage) - bills[1].step_bytes(stage)
    nbytes = saved * bills[0].numel / args.layers / 2  # the other half is already here
    added = [(ours - exact) / args.layers for exact, ours in pairs]
    low, _, high = quantiles(added, n=4)
    cost = median(added)
    return {
        "stage": stage, "scheme": scheme, "numel": width * width, "saved_bytes": nbytes,
        "added_us": 1e6 * cost, "added_us_low": 1e6 * low, "added_us_high": 1e6 * high,
        "break_even": 8e-6 * nbytes / cost if cost > 0 else None,
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> Table:
    grid = Table(title="A quantized matrix against one in full precision")
    for header in ("ZeRO", "scheme", "elements", "added us (quartiles)", "saved bytes",
                   "pays below Mbit/s"):  # fmt: skip
        grid.add_column(header, justify="right")
    for row in rows:
        spread = f"{row['added_us_low']:.0f} to {row['added_us_high']:.0f}"
        even = "any" if row["break_even"] is None else f"{row['break_even']:.0f}"
        grid.add_row(
            str(row["stage"]), row["scheme"], str(row["numel"]),
            f"{row['added_us']:.0f} ({spread})", f"{row['saved_bytes']:.0f}", even,
        )  # fmt: skip
    return grid


def section(result: dict[str, Any]) -> tuple[str, str]:
    """See sections.py."""
    rows = [
        [f"ZeRO-{row['stage']} `{row['scheme']}` {row['numel']}",
         f"{row['added_us']:.0f} ({row['added_us_low']:.0f} to {row['added_us_high']:.0f})",
         f"{row['saved_bytes']:.0f}", report.number(row["break_even"], ".0f")]
        for row in result["rows"]
    ]  # fmt: skip
    header = ["stage, scheme, elements", "added us (quartiles)", "saved bytes", "pays below Mbit/s"]
    return "From which size on a matrix is worth quantizing", (
        "CPU time that a quantized matrix adds to an optimizer step, against one in full\n"
        "precision through the same collectives, and the bytes that a rank no longer receives\n"
        "(two ranks). Below that link rate it is better quantized: `min_numel`.\n\n"
        + sections.table(header, rows)
    )


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse_args(argv), Console()
    os.environ |= {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    join(World(1, 2))
    rows = [
        measure(stage, scheme, width, args)
        for stage in args.stages
        for scheme in args.schemes
        for width in args.widths
    ]
    console.print(table(rows))
    report.save(args.json, "threshold", args, rows=rows)
    console.print(f"results: {args.json}")
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed on CPU may abort in a normal interpreter exit


if __name__ == "__main__":
    main()
