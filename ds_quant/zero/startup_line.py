"""The start-up line: scheme, bytes against DeepSpeed's, full-precision tensors, kernels, memory."""

from __future__ import annotations

from ds_quant.codec.codec import CAST_NAMES
from ds_quant.kernels import dispatch
from ds_quant.policy.cost import CommVolume, stock_bytes
from ds_quant.runtime import log
from ds_quant.runtime import start_line as shared
from ds_quant.zero import accelerator, hooks, offload
from ds_quant.zero.plugin import Plugin


def announce(plugin: Plugin) -> None:
    """Log the start-up line and its warnings on rank 0."""
    names = [param.name for param in plugin.all_params()]
    shared.warn_of_unmatched(plugin.scheme.block.exclude, names)
    log.info_rank0(f"quantized_comm: {start_line(plugin)}")


def start_line(plugin: Plugin) -> str:
    """Describe the engine in one line, its notices last."""
    comm_volume = plugin.comm_volume()
    crosses_once = comm_volume.crosses_once and hooks.accumulates(plugin.engine)
    parts = [
        *_traffic(plugin, comm_volume, crosses_once),
        *_memory(plugin, comm_volume, crosses_once),
    ]
    if plugin.scheme.name == "hybrid" and plugin.topology.nodes > 1:
        parts.append('scheme "lossless" is also exact and sends less')
    if plugin.scheme.block.warmup_steps:
        parts.append(f"from step {plugin.scheme.block.warmup_steps} on")
    if comm_volume.varies:
        micro_steps = _micro_steps(plugin, comm_volume, crosses_once)[0]
        most = comm_volume.step_bytes(plugin.stage, micro_steps=micro_steps, most=True)
        parts.append(
            f"traffic depends on the learning rate: volume {most:.2f} B/param/step at most"
        )
    parts += _why_weights_stay(plugin, comm_volume)
    parts += shared.advised(
        comm_volume,
        plugin.comm_volume,
        micro_steps=plugin.engine.gradient_accumulation_steps(),
    )
    parts += plugin.notices
    return "; ".join(parts)


def _micro_steps(plugin: Plugin, comm_volume: CommVolume, crosses_once: bool) -> tuple[int, str]:
    """Return the micro-steps that the line counts bytes of, and the name of this period.

    One micro-step under ZeRO-3, unless some bytes are sent once per optimizer step.
    """
    micro_steps = plugin.engine.gradient_accumulation_steps()
    once_per_step = (
        comm_volume.routes.keeps_shard
        or comm_volume.boundary > 0
        or (crosses_once and micro_steps > 1)
    )
    if plugin.stage == 3 and not once_per_step:
        return 1, "micro-step"
    return micro_steps, "step"


def _traffic(plugin: Plugin, comm_volume: CommVolume, crosses_once: bool) -> list[str]:
    """Describe scheme, bytes, ranks and kernels."""
    stage, topology = plugin.stage, plugin.topology
    micro_steps, period = _micro_steps(plugin, comm_volume, crosses_once)
    dtype = plugin.engine.communication_data_type
    of_stock = stock_bytes(
        stage,
        dtype,
        micro_steps=micro_steps,
        gathers=comm_volume.gathers,
        trained=comm_volume.trained,
    )
    outer = comm_volume.step_bytes(stage, micro_steps=micro_steps)
    inner = comm_volume.intra_bytes(stage, micro_steps=micro_steps)
    level = " between nodes" if inner else ""
    parts = [
        f"{plugin.scheme.name} on ZeRO-{stage}, volume {outer:.2f} B/param/{period}{level} "
        f"({CAST_NAMES.get(dtype, 'fp32')} {of_stock + comm_volume.boundary:.2f}), "
        f"{shared.unquantized(comm_volume)}",
        f"{topology.nodes} x {topology.node_size} ranks",
        dispatch.describe(accelerator.device(), plugin.scheme.block.backend),
    ]
    if stage == 3:
        times = "once"
        if comm_volume.gathers != 1:
            times = f"{comm_volume.gathers:.3g} times"
        parts.append(f"weights fetched {times} per micro-batch")
    if topology.world > 1:
        received = comm_volume.received_per_node(stage, micro_steps=micro_steps)
        receiver = "node" if topology.nodes > 1 else "rank"
        parts.append(f"{received:.2f} B/param/{period} received per {receiver}")
    if inner:
        parts.append(f"volume inside a node {inner:.2f} B/param")
    return parts


def _memory(plugin: Plugin, comm_volume: CommVolume, crosses_once: bool) -> list[str]:
    """Describe the memory that the scheme takes on a rank."""
    parts: list[str] = []
    if comm_volume.memory:
        where = " in host memory" if offload.offloads_parameters(plugin.engine) else ""
        nbytes = comm_volume.memory * comm_volume.numel
        parts.append(shared.kept(nbytes, comm_volume.numel, where=where))
    if crosses_once:
        parts.append(
            "gradients are sent between nodes once per optimizer step; "
            f"{shared.buffering(comm_volume)}"
        )
    if plugin.topology.world > 1:
        parts.append(shared.extra_memory(plugin.peak_bytes(comm_volume)))
    return parts


def _why_weights_stay(plugin: Plugin, comm_volume: CommVolume) -> list[str]:
    """Explain why weights are sent in full precision, and name the setting that helps."""
    if not shared.weights_stay(comm_volume):
        return []
    way_out = 'set weights.intra, such as {"bits": 8}, or use scheme "qsdp"'
    if plugin.scheme.lossless:
        way_out = "use zero_optimization.stage 2, where they are compressed on one node too"
    if plugin.scheme.gradients is None:
        return [f"nothing to gain on one node: remove the block, or {way_out}"]
    return [
        "weights are sent in full precision: this scheme compresses them between nodes only, and "
        f"there is one node; {way_out}"
    ]
