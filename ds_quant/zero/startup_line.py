"""The start-up line: scheme, bytes against DeepSpeed's, full-precision tensors, kernels, memory."""

from __future__ import annotations

import torch

from ds_quant.codec.codec import CAST_NAMES
from ds_quant.config.errors import did_you_mean
from ds_quant.config.presets import preset_groups
from ds_quant.config.schema import parse_block
from ds_quant.kernels import dispatch
from ds_quant.policy import choosing
from ds_quant.policy.cost import CommVolume, stock_bytes
from ds_quant.policy.scheme import matches
from ds_quant.runtime import log
from ds_quant.zero import accelerator, hooks, offload
from ds_quant.zero.plugin import Plugin

_LESS = 0.9  # share of the bytes below which another scheme is advised
_GB = 1e9


def announce(plugin: Plugin) -> None:
    """Log the start-up line and its warnings on rank 0."""
    names = [param.name for param in plugin.all_params()]
    for pattern in plugin.scheme.block.exclude:
        if not any(matches(name, pattern) for name in names):
            similar = did_you_mean(pattern, names, cutoff=0.4) or next(iter(names), "nothing")
            log.log_rank0(
                f'quantized_comm: exclude pattern "{pattern}" matches no parameter; one is called '
                f"{similar}"
            )
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
    parts += _why_weights_stay(plugin)
    parts += _advised(plugin)
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
        f"{_unquantized(plugin, comm_volume)}",
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
        gigabytes = comm_volume.memory * comm_volume.numel / _GB
        where = "in host memory " if offload.offloads_parameters(plugin.engine) else ""
        parts.append(
            f"keeps {comm_volume.memory:.2f} B/param ({gigabytes:.3g} GB) more {where}on every rank"
        )
    if crosses_once:
        gigabytes = comm_volume.partial_sums * comm_volume.numel / _GB
        parts.append(
            "gradients are sent between nodes once per optimizer step; buffering them takes "
            f"{comm_volume.partial_sums:.2f} B/param ({gigabytes:.3g} GB) on every rank"
        )
    if plugin.topology.world > 1:
        parts.append(f"extra memory: up to {plugin.peak_bytes(comm_volume) / _GB:.2g} GB")
    return parts


def _advised(plugin: Plugin) -> list[str]:
    """Name the scheme that is advised between these nodes, if it sends clearly less."""
    stage, topology, block = plugin.stage, plugin.topology, plugin.scheme.block
    place = choosing.Place(stage, topology.nodes, topology.node_size, block.allow_full_replica)
    lossy = plugin.scheme.gradients is not None and block.scheme in preset_groups()[""]
    if topology.nodes == 1 or not lossy or block.scheme in choosing.candidates(place):
        return []
    best = choosing.autotune_candidates(place)[-1]
    own = plugin.comm_volume()
    advised = plugin.comm_volume(parse_block({"scheme": best}).to_scheme())
    micro_steps = plugin.engine.gradient_accumulation_steps()
    own_bytes = own.step_bytes(stage, micro_steps=micro_steps)
    advised_bytes = advised.step_bytes(stage, micro_steps=micro_steps)
    if advised_bytes > _LESS * own_bytes:
        return []
    keeps = ""
    if advised.memory > own.memory:
        keeps = f", and keeps {advised.memory:.2f} more"
    return [
        f'advised here: scheme "{best}", with a volume of {advised_bytes:.2f} B/param/step{keeps}'
    ]


def _unquantized(plugin: Plugin, comm_volume: CommVolume) -> str:
    """Name the tensors that are sent in full precision, and their share of the bytes."""
    scheme = plugin.scheme
    if scheme.weights is None and scheme.gradients is None and not scheme.lossless:
        return "nothing quantized"
    tensors_by_reason = dict(comm_volume.kept)
    small = tensors_by_reason.pop("1-D", 0) + tensors_by_reason.pop("small", 0)
    parts: list[str] = []
    if _weights_stay(plugin) or (scheme.weights is None and not scheme.lossless):
        parts.append("all weights")
    if scheme.gradients is None:
        parts.append("all gradients")
    if small:
        parts.append(f"{small} small tensor{'s' if small > 1 else ''}")
    parts += [f"{count} {reason}" for reason, count in sorted(tensors_by_reason.items())]
    if not parts:
        return "all tensors quantized"
    share = f"{100 * comm_volume.full_precision_share:.1f} % of bytes"
    return f"{', '.join(parts)} unquantized ({share})"


def _weights_stay(plugin: Plugin) -> bool:
    """Return True if the scheme compresses weights between nodes only, and there is one node."""
    compresses = plugin.scheme.weights is not None or plugin.scheme.lossless
    route = plugin.routes.weights(dtype=torch.bfloat16)
    return compresses and plugin.topology.world > 1 and route.is_full_precision


def _why_weights_stay(plugin: Plugin) -> list[str]:
    """Explain why weights are sent in full precision, and name the setting that helps."""
    if not _weights_stay(plugin):
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
