"""What every scheme does to one step of one model on one cluster, by ``ds_quant.cost``.

No GPU, no files, no printing: settings in, rows out. May import torch, cost, config, presets.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ds_quant import cost
from ds_quant.config import QuantizedCommConfig, parse_block
from ds_quant.cost import Cluster, Volume, predict
from ds_quant.presets import preset_names
from ds_quant.tools.models import Model

SHIPPED = "deepspeed as shipped"
WORTH_IT = 1.02  # speed-ups below are not worth a change


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run to predict. compute: seconds of an optimizer step without communication."""

    model: Model
    dtype: torch.dtype
    stage: int
    micro_steps: int
    compute: float
    cluster: Cluster
    block: QuantizedCommConfig | None = None  # of the user's own config

    @property
    def priced_cluster(self) -> Cluster:
        """The cluster with a rate of computing that gives ``compute`` for one token."""
        return replace(self.cluster, flops=6.0 * self.model.numel / self.compute)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One scheme. Bytes per parameter and step as volumes, see cost.py; times in seconds.

    step_overlapped, step_serial: communication hidden behind compute entirely, or not at all.
    speedup_*: over DeepSpeed as shipped, of these two. memory: bytes more on every rank.
    limit: what takes longest. note: what the scheme needs.
    """

    scheme: str
    inter_bytes: float
    intra_bytes: float
    communication: float
    step_overlapped: float
    step_serial: float
    speedup_overlapped: float
    speedup_serial: float
    memory: float
    limit: str
    note: str = ""

    @property
    def speedups(self) -> tuple[float, float]:
        """Lowest and highest."""
        both = self.speedup_overlapped, self.speedup_serial
        return min(both), max(both)


def forecast(plan: Plan) -> list[Row]:
    """A row for DeepSpeed as shipped, for the user's block and for every preset."""
    blocks = {name: parse_block({"scheme": name}) for name in preset_names()}
    if plan.block is not None:
        blocks = {f"your block ({plan.block.scheme})": plan.block, **blocks}
    rows = [_row(SHIPPED, _shipped(plan), plan, None)]
    for name, block in blocks.items():
        costs = _bill(block, plan)
        note = ""
        if costs.memory and plan.cluster.node_size == 1:
            note = "needs allow_full_replica"
        row = _row(name, _volume(costs, plan), plan, rows[0])
        rows.append(replace(row, memory=costs.memory * plan.model.numel, note=note))
    return rows


def best(rows: list[Row]) -> Row:
    """The scheme with the shortest step without overlap; DeepSpeed as shipped if little is won."""
    fastest = min(rows, key=lambda row: row.step_serial)
    return fastest if fastest.speedup_serial >= WORTH_IT else rows[0]


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows as JSON types."""
    return [asdict(row) for row in rows]


def _bill(block: QuantizedCommConfig, plan: Plan) -> cost.Bill:
    cluster = plan.cluster
    return cost.bill(
        block.to_scheme(), plan.stage, plan.model.cargo, ranks=cluster.nodes * cluster.node_size,
        node_size=cluster.node_size, gradient_dtype=plan.dtype,
    )  # fmt: skip


def _volume(costs: cost.Bill, plan: Plan) -> Volume:
    return cost.volume(costs, plan.stage, micro_steps=plan.micro_steps, layers=plan.model.layers)


def _shipped(plan: Plan) -> Volume:
    """DeepSpeed's own collectives: rings, which bring each byte into a node once."""
    costs = _bill(parse_block({"scheme": "full_precision"}), plan)
    nbytes = cost.shipped_bytes(plan.stage, plan.dtype, micro_steps=plan.micro_steps)
    two_levels = plan.cluster.nodes > 1 and plan.cluster.node_size > 1
    return replace(_volume(costs, plan), inter=nbytes, intra=nbytes if two_levels else 0.0)


def _row(scheme: str, volume: Volume, plan: Plan, base: Row | None) -> Row:
    time = predict(volume, plan.priced_cluster, numel=plan.model.numel, tokens=1)
    overlapped, serial = time.full_overlap, time.no_overlap
    return Row(
        scheme=scheme, inter_bytes=volume.inter, intra_bytes=volume.intra,
        communication=time.communication, step_overlapped=overlapped, step_serial=serial,
        speedup_overlapped=1.0 if base is None else base.step_overlapped / overlapped,
        speedup_serial=1.0 if base is None else base.step_serial / serial,
        memory=0.0, limit=_limit(volume, plan),
    )  # fmt: skip


def _limit(volume: Volume, plan: Plan) -> str:
    """The part of a step that takes longest, each priced alone by ``predict``."""
    one_node = plan.cluster.nodes == 1
    alone = {
        "links inside a node" if one_node else "link between nodes": Volume(inter=volume.inter),
        "encoding": Volume(inter=0.0, encoded=volume.encoded),
        "latency": Volume(inter=0.0, collectives=volume.collectives),
    }
    if not one_node:
        alone["links inside a node"] = Volume(inter=0.0, intra=volume.intra)
    parts = {name: predict(v, plan.priced_cluster, numel=plan.model.numel, tokens=1)
             for name, v in alone.items()}  # fmt: skip
    seconds = {name: time.communication for name, time in parts.items()}
    seconds["compute"] = plan.compute
    return max(seconds, key=seconds.__getitem__)
