"""The figures of ``ds_quant.report``."""

from __future__ import annotations

from typing import Any

from ds_quant.runtime.figures import saved_bytes
from ds_quant.zero import hooks
from ds_quant.zero.plugin import Plugin
from ds_quant.zero.startup_line import start_line


def figures(plugin: Plugin) -> dict[str, Any]:
    """Return the figures that ``ds_quant.report`` documents."""
    engine, state, traffic = plugin.engine, plugin.state, plugin.traffic
    comm_volume = plugin.comm_volume()
    stage = plugin.stage
    micro_steps = engine.gradient_accumulation_steps()
    node_shard_bytes = 0
    if plugin.node_shard is not None:
        node_shard_bytes = plugin.node_shard.nbytes()
    partial_sums_bytes = 0
    if plugin.partial_gradients is not None:
        partial_sums_bytes = plugin.partial_gradients.most_nbytes
    expected_partial_sums_bytes: float = 0
    if hooks.accumulates(engine):
        expected_partial_sums_bytes = comm_volume.partial_sums * comm_volume.numel
    return {
        "scheme": plugin.scheme.name,
        "stage": stage,
        "world": plugin.topology.world,
        "node_size": plugin.topology.node_size,
        "params": comm_volume.numel,
        "steps": engine.global_steps,
        "micro_steps": engine.micro_steps,
        "received_bytes": {role: dict(links) for role, links in traffic.received.items()},
        "saved_bytes": saved_bytes(
            traffic.received,
            plugin.received_by_formula(comm_volume),
            plugin.received_in_full_precision(),
        ),
        "collectives": dict(traffic.collectives),
        "not_counted": ["gradients"] if plugin.stock_gradients_reason else [],
        "gathers": plugin.gathers,
        "full_precision_share": comm_volume.full_precision_share,
        "expected_bytes_per_param": comm_volume.step_bytes(stage, micro_steps=micro_steps),
        "expected_intra_bytes_per_param": comm_volume.intra_bytes(stage, micro_steps=micro_steps),
        "expected_most_bytes_per_param": comm_volume.step_bytes(
            stage, micro_steps=micro_steps, most=True
        ),
        "lossless_bits": traffic.lossless.bits,
        "lossless_padding": traffic.lossless.padding,
        "kept_bytes": node_shard_bytes,
        "expected_kept_bytes": comm_volume.memory * comm_volume.numel,
        "held_bytes": partial_sums_bytes,
        "expected_held_bytes": expected_partial_sums_bytes,
        "expected_peak_bytes": plugin.peak_bytes(comm_volume),
        "buffer_bytes": plugin.buffers.nbytes,
        "resyncs": state.resyncs,
        "nonfinite_steps": state.nonfinite_steps,
        "exact_steps": state.exact_steps,
        "killed": state.killed,
        "line": start_line(plugin),
    }
