"""The start-up line of a model under FSDP2, and the figures of ``ds_quant.report``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_quant.codec.codec import CAST_NAMES
from ds_quant.kernels import dispatch
from ds_quant.policy.cost import CommVolume
from ds_quant.runtime import start_line as shared
from ds_quant.runtime.figures import saved_bytes

if TYPE_CHECKING:
    from ds_quant.fsdp2.front import Front


def start_line(front: Front) -> str:
    """Describe the model in one line: scheme, bytes beside FSDP2's own, nodes, kernels."""
    from ds_quant.fsdp2.front import STAGE

    volume = front.comm_volume()
    topology = front.topology
    layout = "FSDP2"
    nodes = "x"
    if front.replicas > 1:
        layout = "FSDP2 with replicas"
        nodes = "replicas of"
    inside = volume.intra_bytes(STAGE)
    between = " between nodes" if inside else ""
    parts = [
        f"{front.scheme.name} on {layout}, volume {volume.step_bytes(STAGE):.2f} "
        f"B/param/step{between} ({_alone(front, volume)}), {shared.unquantized(volume)}",
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
    if front.copies is not None:
        parts.append(shared.kept(front.copies.nbytes, volume.numel))
    if front.replicas > 1:
        is_exact = front.routes.weights().is_full_precision
        parts.append("weights stay in the node" + (", exact" if is_exact else ""))
    if front.defers_inter_node:
        declare = "set_requires_all_reduce" if front.replicas > 1 else "set_is_last_backward"
        parts.append(
            "gradients are sent between nodes in every backward that is not declared otherwise by "
            f"{declare}(False); {shared.buffering(volume)}"
        )
    parts.append(shared.extra_memory(front.peak_bytes(volume)))
    if front.scheme.block.warmup_steps:
        parts.append(f"from step {front.scheme.block.warmup_steps} on")
    parts += shared.advised(volume, front.comm_volume, micro_steps=1)
    return "; ".join([*parts, *front.notices])


def _alone(front: Front, volume: CommVolume) -> str:
    """Describe the volume of FSDP2 without the block, as "bf16 6.00" or "bf16 + fp32 8.00".

    Weights are gathered in one dtype, gradients reduced in another. With replicas an all-reduce of
    gradients is all that crosses between the nodes.
    """
    nbytes = 0.0
    names: dict[str, None] = {}
    for sharded in front.sharded_modules:
        for param, dtype in zip(sharded.params, sharded.dtypes, strict=True):
            numel = param.shape.numel()
            if front.replicas == 1:
                nbytes += volume.gathers * numel * dtype.itemsize
                names[CAST_NAMES.get(dtype, str(dtype).removeprefix("torch."))] = None
            if param.trained:
                passes = 1 if front.replicas == 1 else 2
                nbytes += passes * numel * sharded.gradient_dtype.itemsize
                names[CAST_NAMES.get(sharded.gradient_dtype, "fp64")] = None
    return f"{' + '.join(names)} {nbytes / max(1, volume.numel):.2f}"


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
        "saved_bytes": saved_bytes(
            front.traffic.received,
            front.received_by_formula(volume),
            front.received_in_full_precision(),
        ),
        "collectives": dict(front.traffic.collectives),
        "full_precision_share": volume.full_precision_share,
        "expected_bytes_per_param": volume.step_bytes(STAGE),
        "expected_intra_bytes_per_param": volume.intra_bytes(STAGE),
        "expected_most_bytes_per_param": volume.step_bytes(STAGE, most=True),
        "lossless_bits": front.traffic.lossless.bits,
        "lossless_padding": front.traffic.lossless.padding,
        "kept_bytes": 0 if front.copies is None else front.copies.nbytes,
        "expected_kept_bytes": volume.memory * volume.numel,
        "held_bytes": front.sums.most_nbytes,
        "expected_held_bytes": volume.partial_sums * volume.numel,
        "expected_peak_bytes": front.peak_bytes(volume),
        "buffer_bytes": front.buffers.nbytes,
        "line": front.line,
    }
