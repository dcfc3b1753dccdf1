"""Bandwidth of quantized gathers and reductions against message size and link rate.

    sudo python benchmarks/collectives.py                  # 2 hosts of 2 ranks
    sudo python benchmarks/collectives.py --topology 4x1 --rates 100 1000 0

Algorithm bandwidth is bf16 bytes of the whole tensor over time, bus bandwidth that times
(ranks - 1) / ranks, as nccl-tests define them for all-gather and reduce-scatter: what a user of
bf16 would call the speed of the network. Wire bandwidth counts the bytes that a rank really
received. Encoding and decoding are part of the time. Without root: over loopback, no rates.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report
import sections
from netlab.lab import Lab, LabError, Loopback, obstacle
from rich.console import Console
from rich.table import Table
from speed import nodes_and_ranks, run_ranks

BASELINE = "full_precision"
SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--topology", default="2x2", help="nodes x ranks per node")
    add("--rates", type=float, nargs="+", default=[50, 200, 800, 0],
        help="Mbit/s of every host's link; 0: not shaped")  # fmt: skip
    add("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the tensor in bf16")
    add("--schemes", nargs="+", default=[BASELINE, "qsdp", "zeropp", "sdp4bit"])
    add("--blocks", type=int, default=5, help="turns of every scheme")
    add("--limit", type=float, default=10, help="seconds in bf16 beyond which a size is left out")
    add("--timeout", type=float, default=1800)
    add("--out", type=Path, default=Path("collectives_out"))
    add("--json", type=Path, help="default: OUT/collectives.json")
    args = parser.parse_args(argv)
    args.json = args.json or args.out / "collectives.json"
    return args


def summary(rows: Sequence[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Bandwidths in bytes per second, and the speed-up over bf16."""
    exact = {
        (row["operation"], row["rate"], row["numel"]): row["seconds"]
        for row in rows
        if row["scheme"] == BASELINE
    }
    return [
        {
            **row,
            "bus_bandwidth": 2 * row["numel"] / row["seconds"] * (ranks - 1) / ranks,
            "wire_bandwidth": row["received"] / row["seconds"],
            "speedup": exact[row["operation"], row["rate"], row["numel"]] / row["seconds"],
        }
        for row in rows
    ]


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    grid = Table(title=title)
    for header in ("Mbit/s", "operation", "bf16 bytes", "scheme", "ms", "bus MB/s", "wire MB/s",
                   "speed-up"):  # fmt: skip
        grid.add_column(header, justify="right")
    for row in rows:
        grid.add_row(
            f"{row['rate']:g}" if row["rate"] else "none", row["operation"],
            str(2 * row["numel"]), row["scheme"], f"{1e3 * row['seconds']:.2f}",
            f"{row['bus_bandwidth'] / 1e6:.1f}", f"{row['wire_bandwidth'] / 1e6:.1f}",
            f"{row['speedup']:.2f}",
        )  # fmt: skip
    return grid


def section(result: dict[str, Any]) -> tuple[str, str]:
    """See sections.py; messages below a megabyte, where latency decides, are in the file."""
    schemes = list(dict.fromkeys(row["scheme"] for row in result["rows"]))
    found = {(r["rate"], r["operation"], r["numel"], r["scheme"]): r for r in result["rows"]}
    rows = [
        [f"{f'{rate:g} Mbit/s' if rate else 'not shaped'}, {operation}, {2 * numel / 1e6:.0f} MB",
         f"{found[rate, operation, numel, BASELINE]['bus_bandwidth'] / 1e6:.1f}",
         *(f"{found[rate, operation, numel, name]['speedup']:.2f}"
           for name in schemes if name != BASELINE)]
        for rate, operation, numel in dict.fromkeys(key[:3] for key in found)
        if 2 * numel >= 1e6
    ]  # fmt: skip
    header = ["link, operation, bf16 bytes", f"`{BASELINE}` bus MB/s",
              *(f"`{name}`" for name in schemes if name != BASELINE)]  # fmt: skip
    return "Bandwidth of collectives", (
        f"On {result['arguments']['topology']} ranks: bandwidth in full precision as nccl-tests\n"
        "count it, and speed-ups over it, encoding and decoding included.\n\n"
        + sections.table(header, rows)
    )


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse_args(argv), Console()
    reason = obstacle()
    if reason is not None:
        args.rates = [0]
        console.print(
            f"collectives.py: warning: no network lab: {reason}. Over loopback instead, without a "
            "rate limit"
        )
    try:
        nodes, ranks = nodes_and_ranks(args.topology)
        plan = {k: getattr(args, k) for k in ("rates", "schemes", "blocks", "limit")}
        plan |= {"nodes": nodes, "numels": [size // 2 for size in args.sizes]}
        if BASELINE not in args.schemes:
            raise ValueError(f"--schemes {' '.join(args.schemes)}: must hold {BASELINE}")
        args.out.mkdir(parents=True, exist_ok=True)
        with (Lab if reason is None else Loopback)(nodes) as network:
            plan["lab"] = network.name
            worker = "collectives_worker.py"
            outcome = run_ranks(plan, network, ranks, args.out, args.timeout, worker=worker)
    except (LabError, ValueError) as error:
        console.print(f"collectives.py: {error}")
        return 1
    rows = summary(outcome["rows"], nodes * ranks)
    console.print(table(rows, f"{args.topology} ranks"))
    report.save(args.json, "collectives", args, rows=rows)
    console.print(f"results: {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
