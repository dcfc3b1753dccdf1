"""The figures of ``ds_quant.report``."""

from __future__ import annotations

from typing import Any

from ds_quant.runtime import figures as shared
from ds_quant.zero import hooks
from ds_quant.zero.engine import AttachedEngine
from ds_quant.zero.startup_line import line_of


def figures(attached: AttachedEngine) -> dict[str, Any]:
    """Return the figures that ``ds_quant.report`` documents."""
    front, engine = attached.front, attached.front.engine
    kept_bytes = 0
    if attached.node_shard is not None:
        kept_bytes = attached.node_shard.nbytes()
    held_bytes = 0
    if attached.partial_gradients is not None:
        held_bytes = attached.partial_gradients.most_nbytes
    return {
        "stage": front.stage,
        "micro_steps": engine.micro_steps,
        "not_counted": ["gradients"] if front.stock_gradients_reason else [],
        "gathers": front.gathers,
        **shared.figures(
            front.run,
            micro_steps=engine.gradient_accumulation_steps(),
            kept_bytes=kept_bytes,
            held_bytes=held_bytes,
            accumulates=hooks.accumulates(engine),
        ),
        "line": line_of(front),
    }
