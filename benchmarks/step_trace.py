"""Draws the trace of one training step: compute, and the plugin's ranges by hop and action.

    deepspeed --num_accelerators 4 benchmarks/train.py --deepspeed_config ds_config.json \
        --steps 5 --profile trace.json
    python benchmarks/step_trace.py trace.json --plot trace.png

Reads a Chrome trace that torch.profiler exports from a process with ds_quant. A wait with no
compute above it is communication that compute does not hide. Prints the milliseconds of every lane.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

RANGE = re.compile(r"ds_quant::(?P<action>\w+) (?P<role>weights|gradients) (?P<hop>intra|inter)")
COMPUTE = re.compile(
    r"aten::(addmm|mm|bmm|matmul|linear|_scaled_dot_product\w*|native_layer_norm)$"
)
COLOURS = {"weights": "#3465a4", "gradients": "#cc5500", "compute": "#777777"}
ACTIONS = ("encode", "all_gather", "all_to_all", "wait", "decode", "sum")


class Interval(NamedTuple):
    """A horizontal bar. start, duration: milliseconds."""

    lane: str
    colour: str
    start: float
    duration: float


def intervals(events: Iterable[dict]) -> list[Interval]:
    """Return the bars of a trace. They start at 0. Other events are left out."""
    bars = []
    for event in events:
        if event.get("ph") != "X":
            continue
        name = event["name"]
        start, duration = event["ts"] / 1000, event["dur"] / 1000
        if match := RANGE.fullmatch(name):
            lane = f"{match['hop']}: {match['action']}"
            bars.append(Interval(lane, COLOURS[match["role"]], start, duration))
        elif COMPUTE.fullmatch(name):
            bars.append(Interval("compute", COLOURS["compute"], start, duration))
    if not any(bar.lane != "compute" for bar in bars):
        raise SystemExit("no range of ds_quant in this trace: was the plugin active in the step?")
    first = min(bar.start for bar in bars)
    return [bar._replace(start=bar.start - first) for bar in bars]


def lanes(bars: Iterable[Interval]) -> dict[str, list[Interval]]:
    """Group bars by lane: compute, then every hop in the order of its actions."""
    grouped = defaultdict(list)
    for bar in bars:
        grouped[bar.lane].append(bar)
    order = ["compute"]
    for hop in ("intra", "inter"):
        order += [f"{hop}: {action}" for action in ACTIONS]
    return {lane: grouped[lane] for lane in order if lane in grouped}


def draw(by_lane: dict[str, list[Interval]], path: Path) -> None:
    """Write the plot."""
    figure, axes = plt.subplots(figsize=(10, 0.35 * len(by_lane) + 1.2))
    for height, bars in enumerate(by_lane.values()):
        spans = [(bar.start, bar.duration) for bar in bars]
        axes.broken_barh(spans, (height - 0.4, 0.8), facecolors=[bar.colour for bar in bars])
    axes.set_yticks(range(len(by_lane)), list(by_lane))
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of one step on rank 0")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    axes.legend(
        handles, list(COLOURS), ncol=len(COLOURS), loc="lower center", bbox_to_anchor=(0.5, 1)
    )
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(argv: list[str] | None = None) -> None:
    """Draw a trace and print its lanes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="Chrome trace of torch.profiler")
    parser.add_argument("--plot", type=Path, default=Path("trace.png"))
    args = parser.parse_args(argv)
    by_lane = lanes(intervals(json.loads(args.trace.read_text("utf-8"))["traceEvents"]))
    for lane, bars in by_lane.items():
        print(f"{lane:20} {sum(bar.duration for bar in bars):9.1f} ms in {len(bars)} ranges")
    draw(by_lane, args.plot)


if __name__ == "__main__":
    main()
