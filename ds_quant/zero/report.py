"""The figures of ``ds_quant.report``."""

from __future__ import annotations

from typing import Any

from ds_quant.runtime import figures as shared
from ds_quant.zero import hooks
from ds_quant.zero.plugin import Plugin
from ds_quant.zero.startup_line import line_of


def figures(plugin: Plugin) -> dict[str, Any]:
    """Return the figures that ``ds_quant.report`` documents."""
    engine = plugin.engine
    kept_bytes = 0
    if plugin.node_shard is not None:
        kept_bytes = plugin.node_shard.nbytes()
    held_bytes = 0
    if plugin.partial_gradients is not None:
        held_bytes = plugin.partial_gradients.most_nbytes
    return {
        "stage": plugin.stage,
        "micro_steps": engine.micro_steps,
        "not_counted": ["gradients"] if plugin.stock_gradients_reason else [],
        "gathers": plugin.gathers,
        **shared.figures(
            plugin.run,
            micro_steps=engine.gradient_accumulation_steps(),
            kept_bytes=kept_bytes,
            held_bytes=held_bytes,
            accumulates=hooks.accumulates(engine),
        ),
        "line": line_of(plugin),
    }
