"""The start-up line of a model under FSDP2, and the figures of ``ds_quant.report``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_quant.codec.codec import CAST_NAMES
from ds_quant.kernels import dispatch
from ds_quant.policy.cost import stock_bytes

if TYPE_CHECKING:
    from ds_quant.fsdp2.front import Front


def start_line(front: Front) -> str:
    """Describe the model in one line: scheme, bytes beside FSDP2's own, nodes, kernels."""
    from ds_quant.fsdp2.front import STAGE

    volume = front.comm_volume()
    topology = front.topology
    dtype = front.gradient_dtype
    plain = stock_bytes(STAGE, dtype, gathers=volume.gathers, trained=volume.trained)
    layout = "FSDP2"
    nodes = "x"
    if front.replicas > 1:
        plain = 2 * dtype.itemsize * volume.trained  # an all-reduce
        layout = "FSDP2 with replicas"
        nodes = "replicas of"
    inside = volume.intra_bytes(STAGE)
    between = " between nodes" if inside else ""
    parts = [
        f"{front.scheme.name} on {layout}, volume {volume.step_bytes(STAGE):.2f} "
        f"B/param/step{between} ({CAST_NAMES.get(dtype, 'fp32')} {plain:.2f})",
        f"{topology.nodes} {nodes} {topology.node_size} ranks",
        dispatch.describe(front.device, front.scheme.block.backend),
    ]
    if topology.world == 1:
        return "; ".join([*parts, "single rank: nothing to communicate"])
    where = "node" if topology.nodes > 1 else "rank"
    received = volume.received_per_node(STAGE, micro_steps=1)
    parts.append(f"{received:.2f} B/param/step received per {where}")
    if inside:
        parts.append(f"volume inside a node {inside:.2f} B/param")
    if front.node_shards:
        kept = sum(node_shard.nbytes for node_shard in front.node_shards)
        parts.append(f"keeps {kept / 1e9:.3g} GB more on every rank")
    if front.replicas > 1:
        is_exact = front.routes.weights().is_full_precision
        parts.append("weights stay in the node" + (", exact" if is_exact else ""))
    if front.defers_inter_node:
        declare = "set_requires_all_reduce" if front.replicas > 1 else "set_is_last_backward"
        parts.append(
            "gradients are sent between nodes in every backward that is not declared otherwise by "
            f"{declare}(False)"
        )
    if front.scheme.block.warmup_steps:
        parts.append(f"from step {front.scheme.block.warmup_steps} on")
    return "; ".join([*parts, *front.notices])


def figures(front: Front) -> dict[str, Any]:
    """Return the figures of ``ds_quant.report`` that FSDP2 has."""
    from ds_quant.fsdp2.front import STAGE

    volume = front.comm_volume()
    return {
        "front": "fsdp2",
        "scheme": front.scheme.name,
        "world": front.topology.world,
        "node_size": front.topology.node_size,
        "replicas": front.replicas,
        "params": volume.numel,
        "steps": front.step,
        "received_bytes": {role: dict(hops) for role, hops in front.traffic.received.items()},
        "collectives": dict(front.traffic.collectives),
        "full_precision_share": volume.full_precision_share,
        "expected_bytes_per_param": volume.step_bytes(STAGE),
        "expected_intra_bytes_per_param": volume.intra_bytes(STAGE),
        "kept_bytes": sum(node_shard.nbytes for node_shard in front.node_shards),
        "buffer_bytes": front.buffers.nbytes,
        "line": front.line,
    }
