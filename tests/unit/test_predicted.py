"""The cost model against the step times of the network lab, as docs/choosing.md states it.

Bytes come from ``policy.cost``, the link from the rate that the lab set. What a step does without
any link is not predicted but taken from the point without a rate limit, which so tests nothing.

[Note: overlap] Messages take no time as far as compute hides them. Where nothing is fetched ahead
and one bucket holds all gradients, and under ZeRO-1/2 on the CPU, messages and compute add up.
Under ZeRO-3 with several ranks per node they were seen to add up to less even so: those ranks
gather layer by layer, each on its own, so one may compute on the shared cores while another waits.
What crosses once per optimizer step has the compute of one micro-step to hide behind.
``TURNS`` and, with ``--prefetch-bucket-size``, ``AHEAD`` are fitted to the lab's files but the one
of the advised schemes, which is of two layers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from ds_quant.config.presets import RENAMED, preset_names
from ds_quant.config.schema import parse_block
from ds_quant.policy import cost
from ds_quant.policy.model import block_cargo

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT / "benchmarks"))

from schemes import parse_schemes, with_overrides  # noqa: E402

TURNS = 0.15  # of the compute hides messages where ranks take turns: see [Note: overlap]
AHEAD = 0.5  # the same where parameters are fetched ahead


def gathers(point: dict[str, Any], micro_steps: int) -> float:
    """Of the weights in a micro-step, from the bytes into a node that were counted in full
    precision: 2 per gather and crossing of gradients, less what the node has.
    """
    nodes, node_size = map(int, point["topology"].split("x"))
    (counted,) = {r["counted_bytes"] for r in point["rows"] if r["scheme"] == "full_precision"}
    crossings = 1 if node_size > 1 else micro_steps
    return (counted / (1 - 1 / nodes) / 2 - crossings) / micro_steps


def predicted(point: dict[str, Any], row: dict[str, Any], local: float, given: Any) -> float:
    """Seconds of a step that takes ``local`` without a rate limit."""
    nodes, node_size = map(int, point["topology"].split("x"))
    stage, micro_steps = point["stage"], given.get("accumulation", 1)
    ahead = given.get("prefetch_bucket_size") or 0
    (entry,) = parse_schemes(row["scheme"])
    bill = cost.bill(
        parse_block(with_overrides({"scheme": entry.name}, entry.overrides)).to_scheme(), stage,
        block_cargo(given["width"], dtype=torch.bfloat16), ranks=nodes * node_size,
        node_size=node_size, gradient_dtype=torch.bfloat16,
        gathers=gathers(point, micro_steps) if stage == 3 else 1.0,
    )  # fmt: skip
    moved, next_one = (bill.step_bytes(stage, micro_steps=micro_steps + i) for i in (0, 1))
    each = next_one - moved  # micro-step
    wire = point["parameters"] * (1 - 1 / nodes) / (row["rate"] * 1e6 / 8)
    often, once = each * wire, (moved - each * micro_steps) * wire
    takes_turns = stage == 3 and nodes > 1 and node_size > 1
    share = AHEAD if ahead and stage == 3 else TURNS if takes_turns else 0.0
    hidden = local * share / micro_steps
    exposed = micro_steps * max(0.0, often - hidden)
    exposed += max(0.0, once - max(0.0, hidden - often))
    return local + exposed


def _is_preset(name: str) -> bool:
    return RENAMED.get(name, name) in preset_names()


def errors(path: Path) -> list[float]:
    """Relative ones of every point that can be predicted."""
    result, found = json.loads(path.read_text("utf-8")), []
    for point in result["points"]:
        local = {row["scheme"]: row["seconds"] for row in point["rows"] if not row["rate"]}
        for row in point["rows"]:
            name = row["scheme"]
            if row["rate"] and name in local and _is_preset(name.partition(":")[0]):
                seconds = predicted(point, row, local[name], result["arguments"])
                found.append(abs(seconds / row["seconds"] - 1))
    return found


def test_predictions_of_the_network_lab_are_as_close_as_we_say() -> None:
    """A change of the model must not make them worse."""
    found = {path.stem: errors(path) for path in RESULTS.glob("speed_*.json")}
    assert len(found["speed_2x2_cpu"]) == 2 * 9 * 2
    every = [error for of_file in found.values() for error in of_file]
    assert len(every) > 50 and max(every) < 0.18
    mean, worst = 100 * sum(every) / len(every), 100 * max(every)
    said = f"at all {len(every)} points (mean error {mean:.1f} %, largest {worst:.1f} %"
    assert said in " ".join((ROOT / "docs" / "choosing.md").read_text("utf-8").split())
