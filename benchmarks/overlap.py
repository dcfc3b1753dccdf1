"""How much of the communication is exposed, against the same with every message awaited at once.

    sudo python benchmarks/overlap.py                       # 2 hosts of 2 ranks, 50 Mbit/s
    sudo python benchmarks/overlap.py --trace overlap.json  # and a step of rank 0 to look at

Per scheme two engines take turns in one set of processes of the network lab: one as users have it,
one whose every message is awaited where it is posted, so that nothing overlaps. The step without a
rate limit is taken as compute; what a step takes beyond that is exposed communication. Blocks pair
neighbours in time, ratios are medians over blocks with their range.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import report
import sections
from netlab.lab import Lab, LabError, obstacle, remove
from rich.console import Console
from rich.table import Table
from speed import add_run_flags, config_of, nodes_and_ranks, run_ranks

WAITING = " waiting"  # ends the label of an engine that overlaps nothing


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--stage", type=int, default=3)
    add("--topology", default="2x2", help="nodes x ranks per node")
    add("--rates", type=float, nargs="+", default=[50.0], help="Mbit/s of every host's link")
    add("--schemes", nargs="+", default=["full_precision", "sdp4bit"])
    add_run_flags(parser)
    add("--timeout", type=float, default=1800)
    add("--trace", type=Path, help="Chrome trace of a step of the last scheme, at the first rate")
    add("--out", type=Path, default=Path("overlap_out"))
    add("--json", type=Path, help="default: OUT/overlap.json")
    args = parser.parse_args(argv)
    args.json = args.json or args.out / "overlap.json"
    return args


def plan_of(args: argparse.Namespace) -> dict[str, Any]:
    """What every rank does, see speed_worker.py; rate 0 comes last."""
    nodes, ranks = nodes_and_ranks(args.topology)
    schemes = []
    for scheme in args.schemes:
        config = config_of(scheme, args.stage, ranks, args)
        schemes += [{"label": scheme, "config": config},
                    {"label": scheme + WAITING, "config": config, "waiting": True}]  # fmt: skip
    return {
        "nodes": nodes, "rates": [*args.rates, 0.0], "schemes": schemes,
        "trace": str(args.trace.resolve()) if args.trace else None,
        **{k: getattr(args, k) for k in ("blocks", "steps_per_block", "warmup", "layers", "width",
                                         "heads", "seq_len", "batch")},
    }  # fmt: skip


def summary(blocks: Sequence[dict[str, Any]], *, max_foreign: float) -> list[dict[str, Any]]:
    """Per rate and scheme: seconds of a step, exposed seconds of both engines, and their ratio."""
    found: dict[tuple[str, float], dict[int, dict[str, Any]]] = {}
    for block in blocks:
        found.setdefault((block["scheme"], block["rate"]), {})[block["block"]] = block

    def clean(label: str, rate: float) -> dict[int, float]:
        own = found[label, rate]
        quiet = {i: b for i, b in own.items() if b["foreign_cores"] <= max_foreign}
        return {i: b["seconds"] for i, b in (quiet or own).items()}

    rows = []
    for label, rate in found:
        if rate == 0 or label.endswith(WAITING):
            continue
        compute = {name: median(clean(name, 0.0).values()) for name in (label, label + WAITING)}
        ours, waiting = clean(label, rate), clean(label + WAITING, rate)
        pairs = ours.keys() & waiting.keys() or ours.keys()
        exposed = {i: ours[i] - compute[label] for i in pairs}
        at_most = {i: waiting.get(i, median(waiting.values())) - compute[label + WAITING]
                   for i in pairs}  # fmt: skip
        ratios = [exposed[i] / at_most[i] for i in pairs]
        rows.append({
            "rate": rate, "scheme": label,
            "seconds": median(ours.values()), "seconds_waiting": median(waiting.values()),
            "compute": compute[label], "compute_waiting": compute[label + WAITING],
            "exposed": median(exposed.values()), "exposed_waiting": median(at_most.values()),
            "ratio": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios),
            "clean_blocks": sum(b["foreign_cores"] <= max_foreign
                                for b in found[label, rate].values()),
        })  # fmt: skip
    return rows


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    grid = Table(title=title)
    for header in ("Mbit/s", "scheme", "step s", "waiting", "compute", "exposed s", "waiting",
                   "ratio (range)", "clean"):  # fmt: skip
        grid.add_column(header, justify="right")
    for row in rows:
        grid.add_row(
            f"{row['rate']:g}", row["scheme"], f"{row['seconds']:.3f}",
            f"{row['seconds_waiting']:.3f}", f"{row['compute']:.3f}", f"{row['exposed']:.3f}",
            f"{row['exposed_waiting']:.3f}",
            f"{row['ratio']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})",
            str(row["clean_blocks"]),
        )  # fmt: skip
    return grid


def section(result: dict[str, Any]) -> tuple[str, str]:
    """See sections.py."""
    header = ["Mbit/s, scheme", "step s", "compute s", "exposed s", "every message awaited, s",
              "ratio (range)", "quiet blocks"]  # fmt: skip
    rows = [
        [f"{row['rate']:g} `{row['scheme']}`", f"{row['seconds']:.3f}", f"{row['compute']:.3f}",
         f"{row['exposed']:.3f}", f"{row['exposed_waiting']:.3f}",
         f"{row['ratio']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})",
         f"{row['clean_blocks']} of {result['arguments']['blocks']}"]
        for row in result["rows"]
    ]  # fmt: skip
    return "Exposed communication", (
        f"{result['title']}. Compute is the step without a rate limit, exposed what a step takes\n"
        "beyond it; beside it the same engine with every message awaited where it is posted. The\n"
        f"ratio is the median of neighbouring blocks.\n\n{sections.table(header, rows)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse_args(argv), Console()
    if (reason := obstacle()) is not None:
        console.print(f"overlap.py: needs the network lab: {reason}")
        return 1
    nodes, ranks = nodes_and_ranks(args.topology)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with Lab(nodes) as network:
            plan = plan_of(args) | {"lab": network.name}
            outcome = run_ranks(plan, network, ranks, args.out, args.timeout)
    except LabError as error:
        console.print(f"overlap.py: {error}")
        return 1
    finally:
        remove()
    rows = summary(outcome["blocks"], max_foreign=args.max_foreign)
    title = f"ZeRO-{args.stage}, {args.topology} ranks, {outcome['parameters'] / 1e6:.1f} M"
    console.print(table(rows, title))
    report.save(
        args.json, "overlap", args, title=title, parameters=outcome["parameters"], rows=rows
    )
    console.print(f"results: {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
