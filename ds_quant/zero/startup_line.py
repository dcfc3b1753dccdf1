"""The part of the start-up lines that DeepSpeed knows."""

from __future__ import annotations

from ds_quant.codec.codec import CAST_NAMES
from ds_quant.policy.cost import stock_bytes
from ds_quant.policy.model_volume import ModelVolume
from ds_quant.runtime.run import StockVolume
from ds_quant.runtime.start_line import LineParts, weights_stay
from ds_quant.zero import hooks, offload
from ds_quant.zero.front import EngineFront


def line_parts_of(front: EngineFront) -> LineParts:
    """Return the part of the start-up lines that DeepSpeed knows of an engine."""
    volume = front.run.comm_volume()
    crosses_once = volume.crosses_once and hooks.accumulates(front.engine)
    micro_steps, period = _period(front, volume, crosses_once)
    dtype = front.engine.communication_data_type
    of_stock = stock_bytes(
        front.stage,
        dtype,
        micro_steps=micro_steps,
        gathers=volume.gathers,
        trained=volume.trained,
    )
    fetches = ""
    if front.stage == 3:
        times = "once" if volume.gathers == 1 else f"{volume.gathers:.3g} times"
        fetches = f"weights fetched {times} per micro-batch"
    gradients = ""
    if crosses_once:
        gradients = "gradients are sent between nodes once per optimizer step"
    return LineParts(
        layout=f"ZeRO-{front.stage}",
        report_of="engine",
        volume=volume,
        stock=StockVolume(of_stock + volume.boundary, CAST_NAMES.get(dtype, "fp32")),
        micro_steps=micro_steps,
        period=period,
        kept_bytes=volume.memory * volume.numel,
        kept_where=" in host memory" if offload.offloads_parameters(front.engine) else "",
        fetches=fetches,
        gradients=gradients,
        accumulates=crosses_once,
        reasons=_why_weights_stay(front, volume),
    )


def _period(front: EngineFront, volume: ModelVolume, crosses_once: bool) -> tuple[int, str]:
    """Return the micro-steps that the line counts bytes of, and the name of this period.

    One micro-step under ZeRO-3, unless some bytes are sent once per optimizer step.
    """
    micro_steps = front.engine.gradient_accumulation_steps()
    once_per_step = (
        volume.routes.keeps_shard or volume.boundary > 0 or (crosses_once and micro_steps > 1)
    )
    if front.stage == 3 and not once_per_step:
        return 1, "micro-step"
    return micro_steps, "step"


def _why_weights_stay(front: EngineFront, volume: ModelVolume) -> list[str]:
    """Explain why weights are sent in full precision, and name the setting that helps."""
    if not weights_stay(volume):
        return []
    scheme = front.run.scheme
    way_out = 'take "qsdp", or set weights.intra, such as {"bits": 8}'
    if scheme.name == "qsdp":
        way_out = 'leave node_shard out, or set weights.intra, such as {"bits": 8}'
    if scheme.lossless:
        way_out = "take zero_optimization.stage 2, where they are compressed on one node too"
    if scheme.gradients is None:
        return [f"advice: nothing to gain on one node: remove the block, or {way_out}"]
    return [f"advice: {scheme.name} compresses weights between nodes only; on one node {way_out}"]
