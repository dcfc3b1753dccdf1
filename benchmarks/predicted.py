"""Prediction against measurement: the cost model on the points of result files of speed.py.

    python benchmarks/predicted.py benchmarks/results/speed_*.json

[Note: calibration] Bytes come from ``policy.cost`` through the start-up lines' schemes, the link
from the rate that the lab set. What a step does without any link (compute, encoding, links inside
a host) is not predicted but taken from the point that was measured without a rate limit, once per
stage and scheme; those points test nothing and are left out.

[Note: overlap] Messages take no time as far as compute hides them. Where nothing is fetched ahead
and one bucket holds all gradients, and under ZeRO-1/2 on the CPU, messages and compute add up.
Under ZeRO-3 with several ranks per node they were seen to add up to less even so: those ranks
gather layer by layer, each on its own, so one may compute on the shared cores while another waits.
What crosses once per optimizer step has the compute of one micro-step to hide behind.
``TURNS`` and, with ``--prefetch-bucket-size``, ``AHEAD`` are fitted to the lab's files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from schemes import parse_schemes, with_overrides

from ds_quant.config.presets import preset_names
from ds_quant.config.schema import parse_block
from ds_quant.policy import cost
from ds_quant.policy.cost import Cluster, Volume, predict
from ds_quant.policy.gathers import FetchSettings, Module, Unit, mean_gathers
from ds_quant.tools.forecast import block_cargo

CLOSE = 0.15  # the error that a prediction may have
TURNS = 0.15  # of the compute hides messages where ranks take turns: see [Note: overlap]
AHEAD = 0.5  # the same where parameters are fetched ahead


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured step time and its prediction, in seconds; rate in Mbit/s."""

    topology: str
    stage: int
    scheme: str
    rate: float
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative; positive if the prediction is too long."""
        return self.predicted / self.measured - 1


def compare(path: Path) -> tuple[list[Point], list[str]]:
    """Every point that can be predicted, and a sentence for every scheme that cannot.

    Raises:
        ValueError: the file holds no step times by link rate.
    """
    result = json.loads(path.read_text("utf-8"))
    if not isinstance(result, dict) or result.get("kind") != "speed":
        raise ValueError(f"{path}: allowed: a result file of speed.py")
    arguments = result["arguments"]
    width, gathered = arguments["width"], _gathers(arguments)
    ahead = bool(arguments.get("prefetch_bucket_size"))
    micro_steps = arguments.get("accumulation", 1)
    points, left_out = [], []
    for place in result["points"]:
        local = {row["scheme"]: row["seconds"] for row in place["rows"] if row["rate"] == 0}
        for scheme in dict.fromkeys(row["scheme"] for row in place["rows"]):
            own = [row for row in place["rows"] if row["scheme"] == scheme]
            where = f"ZeRO-{place['stage']} {scheme}"
            if scheme.split(":")[0] not in preset_names():
                left_out.append(f"{where}: another program's collectives, not in the cost model")
            elif scheme not in local:
                left_out.append(f"{where}: no point without a rate limit to take compute from")
            else:
                how = {"gathered": gathered, "ahead": ahead, "micro_steps": micro_steps}
                points += _points(place, own, local[scheme], width, **how)
    return points, left_out


def _gathers(arguments: dict[str, Any]) -> float:
    """Of the weights in a micro-step under ZeRO-3: speed.py's blocks are gathered whole."""
    cargo = block_cargo(arguments["width"], dtype=torch.bfloat16)
    numel = sum(torch.Size(item.shape).numel() for item in cargo)
    blocks = tuple(Module((Unit(i, numel),)) for i in range(arguments.get("layers", 1)))
    settings = FetchSettings(
        max_reuse_distance=arguments.get("reuse_distance", 0),
        prefetch_bucket_size=arguments.get("prefetch_bucket_size") or 0,
    )
    return mean_gathers(Module((), blocks), settings)


def _points(
    place: dict[str, Any],
    rows: list[dict],
    local: float,
    width: int,
    *,
    gathered: float,
    ahead: bool,
    micro_steps: int,
) -> list[Point]:
    nodes, node_size = map(int, place["topology"].split("x"))
    scheme, stage = rows[0]["scheme"], place["stage"]
    (entry,) = parse_schemes(scheme)
    block = with_overrides({"scheme": entry.name}, entry.overrides)
    costs = cost.bill(
        parse_block(block).to_scheme(), stage,
        block_cargo(width, dtype=torch.bfloat16), ranks=nodes * node_size, node_size=node_size,
        gradient_dtype=torch.bfloat16, gathers=gathered,
    )  # fmt: skip
    moved = costs.step_bytes(stage, micro_steps=micro_steps)
    each = costs.step_bytes(stage, micro_steps=micro_steps + 1) - moved  # micro-step
    takes_turns = stage == 3 and nodes > 1 and node_size > 1
    hidden = local * (AHEAD if ahead and stage == 3 else TURNS if takes_turns else 0.0)
    hidden /= micro_steps
    found = []
    for row in rows:
        if row["rate"]:
            cluster = Cluster(
                nodes=nodes, node_size=node_size, link=row["rate"] * 1e6 / 8,
                intra_link=float("inf"), flops=6.0 * place["parameters"] / local,
            )  # fmt: skip
            often, once = (
                predict(Volume(inter=nbytes), cluster, numel=place["parameters"], tokens=1)
                for nbytes in (each, moved - each * micro_steps)
            )
            exposed = micro_steps * max(0.0, often.communication - hidden)
            exposed += max(0.0, once.communication - max(0.0, hidden - often.communication))
            found.append(
                Point(
                    topology=place["topology"],
                    stage=stage,
                    scheme=scheme,
                    rate=row["rate"],
                    measured=row["seconds"],
                    predicted=once.compute + exposed,
                )
            )
    return found


def summary(points: list[Point]) -> str:
    """One line on all errors."""
    errors = [abs(point.error) for point in points]
    close = sum(error <= CLOSE for error in errors)
    return (
        f"{close} of {len(points)} points within {CLOSE:.0%}; mean error {mean(errors):.1%}, "
        f"largest {max(errors):.1%}"
    )


def table(points: Sequence[Point]) -> Table:
    grid = Table(title="Network lab, seconds per step")
    for header in ("ranks, ZeRO, scheme", "Mbit/s", "measured", "predicted", "error"):
        grid.add_column(header, justify="right")
    for point in points:
        grid.add_row(
            f"{point.topology}, {point.stage}, {point.scheme}", f"{point.rate:g}",
            f"{point.measured:.3f}", f"{point.predicted:.3f}", f"{point.error:+.1%}",
        )  # fmt: skip
    return grid


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="written by speed.py")
    try:
        compared = [compare(path) for path in parser.parse_args(argv).results]
    except (OSError, ValueError) as error:
        print(f"predicted.py: {error}", file=sys.stderr)
        return 1
    points = [point for found, _ in compared for point in found]
    for line in dict.fromkeys(line for _, left_out in compared for line in left_out):
        print(f"not predicted: {line}")
    if not points:
        print("predicted.py: no scheme has points both with and without a rate limit",
              file=sys.stderr)  # fmt: skip
        return 1
    Console().print(table(points), summary(points))
    return 0


if __name__ == "__main__":
    sys.exit(main())
