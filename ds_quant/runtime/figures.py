"""The figures of ``ds_quant.report`` that all fronts have."""

from __future__ import annotations

from typing import Any

from ds_quant.policy.cost import CommVolume
from ds_quant.runtime.run import Level, Run


def figures(
    run: Run,
    *,
    micro_steps: int = 1,
    kept_bytes: int = 0,
    held_bytes: int = 0,
    accumulates: bool = False,
) -> dict[str, Any]:
    """Return the figures that ``ds_quant.report`` documents.

    Args:
        micro_steps: of the period of "expected" bytes.
        kept_bytes: that the scheme keeps on this rank between steps.
        held_bytes: most bytes so far of gradients that wait for the last micro-step.
        accumulates: an optimizer step may have several micro-steps.
    """
    stage, traffic, volume = run.routes.stage, run.traffic, run.comm_volume()
    held = volume.partial_sums * volume.numel if accumulates else 0
    return {
        "scheme": run.scheme.name,
        "world": run.topology.world,
        "node_size": run.topology.node_size,
        "params": volume.numel,
        "steps": run.counted_steps,
        "received_bytes": {role: dict(links) for role, links in traffic.received.items()},
        "saved_bytes": run.savings.total(
            run.received_by_formula(volume), run.received_in_full_precision()
        ),
        "collectives": dict(traffic.collectives),
        "full_precision_share": volume.full_precision_share,
        "expected_bytes_per_param": volume.step_bytes(stage, micro_steps=micro_steps),
        "expected_intra_bytes_per_param": volume.intra_bytes(stage, micro_steps=micro_steps),
        "expected_most_bytes_per_param": volume.step_bytes(
            stage, micro_steps=micro_steps, most=True
        ),
        "lossless_bits": traffic.lossless.bits,
        "lossless_padding": traffic.lossless.padding,
        "kept_bytes": kept_bytes,
        "expected_kept_bytes": volume.memory * volume.numel,
        "held_bytes": held_bytes,
        "expected_held_bytes": held,
        "expected_peak_bytes": run.peak_bytes(volume),
        "buffer_bytes": run.buffers.nbytes,
        "resyncs": run.state.resyncs,
        "nonfinite_steps": run.state.nonfinite_steps,
        "exact_steps": run.state.exact_steps,
        "killed": run.state.killed,
        "levels": [_of_level(*each) for each in zip(run.levels, volume.parts, strict=True)],
    }


def _of_level(level: Level, volume: CommVolume) -> dict[str, Any]:
    """Return the figures of one set of ranks."""
    topology = level.topology
    return {
        "ranks": list(topology.all_ranks),
        "nodes": topology.nodes,
        "node_size": topology.node_size,
        "replicas": level.replicas,
        "params": volume.numel,
        "received_bytes": {role: dict(links) for role, links in level.traffic.received.items()},
    }
