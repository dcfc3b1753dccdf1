"""What an engine does, in one line at start-up and in the figures of ``ds_quant.report``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from ds_quant.codec.codec import CAST_NAMES
from ds_quant.config.errors import did_you_mean
from ds_quant.config.presets import preset_groups
from ds_quant.config.schema import parse_block
from ds_quant.kernels import dispatch
from ds_quant.kernels.wire import round_up
from ds_quant.policy import choosing
from ds_quant.policy.cost import CommVolume, stock_bytes
from ds_quant.policy.scheme import matches
from ds_quant.zero import hooks, log, offload, sharded_params
from ds_quant.zero.plugin import Plugin

_LESS = 0.9  # of the bytes: a scheme that sends more than that is not worth a sentence


def start_line(plugin: Plugin) -> str:
    """Describe the engine in one line: scheme, bytes against DeepSpeed's, what stays exact,
    kernels.
    """
    costs, stage = plugin.comm_volume(), plugin.stage
    micro_steps = plugin.engine.gradient_accumulation_steps()
    waits = costs.crosses_once and hooks.accumulates(plugin.engine)
    once = costs.routes.keeps_shard or costs.boundary or (waits and micro_steps > 1)
    per_micro_step = stage == 3 and not once
    micro_steps = 1 if per_micro_step else micro_steps
    dtype = plugin.engine.communication_data_type
    label = CAST_NAMES.get(dtype, "fp32")
    shipped = stock_bytes(
        stage, dtype, micro_steps=micro_steps, gathers=costs.gathers, trained=costs.trained
    )
    inside = costs.intra_bytes(stage, micro_steps=micro_steps)
    per = "micro-step" if per_micro_step else "step"
    parts = [
        f"{plugin.scheme.name} on ZeRO-{stage}, volume "
        f"{costs.step_bytes(stage, micro_steps=micro_steps):.2f} "
        f"B/param/{per}"
        f"{' between nodes' if inside else ''} "
        f"({label} {shipped + costs.boundary:.2f}), " + _unquantized(plugin, costs),
        f"{plugin.topology.nodes} x {plugin.topology.node_size} ranks",
        dispatch.describe(hooks.device(), plugin.scheme.block.backend),
    ]
    if stage == 3:
        times = "once" if costs.gathers == 1 else f"{costs.gathers:.3g} times"
        parts.append(f"weights fetched {times} per micro-batch")
    if plugin.topology.world > 1:
        received = costs.received_per_node(stage, micro_steps=micro_steps)
        where = "node" if plugin.topology.nodes > 1 else "rank"
        parts.append(f"{received:.2f} B/param/{per} received per {where}")
    if inside:
        parts.append(f"volume inside a node {inside:.2f} B/param")
    if costs.memory:
        gigabytes = costs.memory * costs.numel / 1e9
        where = "in host memory " if offload.offloads_parameters(plugin.engine) else ""
        parts.append(
            f"keeps {costs.memory:.2f} B/param ({gigabytes:.3g} GB) more {where}on every rank"
        )
    if waits:
        gigabytes = costs.partial_sums * costs.numel / 1e9
        parts.append(
            "gradients are sent between nodes once per optimizer step; buffering them takes "
            f"{costs.partial_sums:.2f} B/param ({gigabytes:.3g} GB) on every rank"
        )
    if plugin.topology.world > 1:
        parts.append(f"extra memory: up to {plugin.peak_bytes(costs) / 1e9:.2g} GB")
    if plugin.scheme.name == "hybrid" and plugin.topology.nodes > 1:
        parts.append('scheme "lossless" is also exact and sends less')
    if plugin.scheme.block.warmup_steps:
        parts.append(f"from step {plugin.scheme.block.warmup_steps} on")
    if costs.varies:
        most = costs.step_bytes(stage, micro_steps=micro_steps, most=True)
        parts.append(
            f"traffic depends on the learning rate: volume {most:.2f} B/param/step at most"
        )
    return "; ".join([*parts, *_why_weights_stay(plugin), *_advised(plugin), *plugin.notices])


def _advised(plugin: Plugin) -> list[str]:
    """Name the scheme that is advised between these nodes, if it sends clearly less."""
    stage, topology, block = plugin.stage, plugin.topology, plugin.scheme.block
    place = choosing.Place(stage, topology.nodes, topology.node_size, block.allow_full_replica)
    lossy = plugin.scheme.gradients is not None and block.scheme in preset_groups()[""]
    if topology.nodes == 1 or not lossy or block.scheme in choosing.candidates(place):
        return []
    best = choosing.tuned(place)[-1]
    ours, theirs = (
        plugin.comm_volume(),
        plugin.comm_volume(parse_block({"scheme": best}).to_scheme()),
    )
    often = {"micro_steps": plugin.engine.gradient_accumulation_steps()}
    less = theirs.step_bytes(stage, **often)
    if less > _LESS * ours.step_bytes(stage, **often):
        return []
    keeps = f", and keeps {theirs.memory:.2f} more" if theirs.memory > ours.memory else ""
    return [f'advised here: scheme "{best}", with a volume of {less:.2f} B/param/step{keeps}']


def _unquantized(plugin: Plugin, costs: CommVolume) -> str:
    """Name what is sent in full precision, and its share of the bytes."""
    scheme, kept = plugin.scheme, dict(costs.kept)
    if scheme.weights is None and scheme.gradients is None and not scheme.lossless:
        return "nothing quantized"
    small = kept.pop("1-D", 0) + kept.pop("small", 0)
    all_weights = _weights_stay(plugin) or (scheme.weights is None and not scheme.lossless)
    parts = ["all weights"] * all_weights + ["all gradients"] * (scheme.gradients is None)
    parts += [f"{small} small tensor{'s' if small > 1 else ''}"] * (small > 0)
    parts += [f"{n} {reason}" for reason, n in sorted(kept.items())]
    share = f"{100 * costs.full_precision_share:.1f} % of bytes"
    return f"{', '.join(parts)} unquantized ({share})" if parts else "all tensors quantized"


def _weights_stay(plugin: Plugin) -> bool:
    """Whether a node shard has nobody to exchange quantized weights with."""
    sends = plugin.scheme.weights is not None or plugin.scheme.lossless
    route = plugin.routes.weights(dtype=torch.bfloat16)
    return sends and plugin.topology.world > 1 and route.is_full_precision


def _why_weights_stay(plugin: Plugin) -> list[str]:
    """Say why and what would help, if they do."""
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


def announce(plugin: Plugin) -> None:
    """Log the start-up line and its warnings on rank 0."""
    names = [param.name for param in plugin.all_params()]
    for pattern in plugin.scheme.block.exclude:
        if not any(matches(name, pattern) for name in names):
            near = did_you_mean(pattern, names, cutoff=0.4) or next(iter(names), "nothing")
            log.log_rank0(
                f'quantized_comm: exclude pattern "{pattern}" matches no parameter; one is called '
                f"{near}"
            )
    log.info_rank0(f"quantized_comm: {start_line(plugin)}")


def advice(engine: Any) -> Iterator[str]:
    """One sentence per setting that costs time on a device with streams and changes no number."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1":
        yield (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 lets a stream that waits for a message stop all others, "
            "so that little overlaps: unset it, unless tensor parallelism needs it"
        )
    logged = hooks.param_dict(engine).get("comms_logger")
    if isinstance(logged, dict) and logged.get("enabled"):
        yield (
            "comms_logger.enabled=true waits for the device around every message: set it to false "
            "unless you look at messages"
        )
    for name in ("offload_optimizer", "offload_param"):
        offload = getattr(engine, f"zero_{name}")()
        if offload is not None and offload.device == "cpu" and not offload.pin_memory:
            yield (
                f"zero_optimization.{name}.pin_memory=false makes the host wait for copies of "
                "weights to the device: set it to true"
            )


def one_bucket(engine: Any, muon_round: int = 0) -> Iterator[str]:
    """Say so if no gradient is reduced before backward ends: DeepSpeed hands over a bucket when it
    is full. Not worth a notice if most of the model is frozen.

    muon_round: elements of one of Muon's largest matrices per rank, see ``muon.full_round``. The
        advised size is a multiple of it, and no size is advised if one such bucket holds all.
    """
    room, (numel, trained) = (
        engine.zero_reduce_bucket_size(),
        sharded_params.elements(engine.module),
    )
    several = len(list(engine.module.parameters())) > 1
    advised = round_up(trained // 8, muon_round) if muon_round else trained // 8
    waits = engine.zero_overlap_comm() and several and numel / 2 < trained <= room
    if waits and advised < trained:
        yield (
            f"gradients are not reduced during backward: reduce_bucket_size={room} holds all "
            f"{trained} elements (try {advised})"
        )


def _saved(plugin: Plugin, comm_volume: CommVolume) -> dict[str, dict[str, float]]:
    """Bytes that full precision would have received besides, in as many steps: by formula."""
    plain, own = plugin.received_in_full_precision(), plugin.received_by_formula(comm_volume)
    return {
        role: {at: nbytes * (plain[role][at] / own[role][at] - 1) if own[role][at] else 0.0
               for at, nbytes in links.items()}
        for role, links in plugin.traffic.received.items()
    }  # fmt: skip


def figures(plugin: Plugin) -> dict[str, Any]:
    """See ``ds_quant.report``."""
    comm_volume, engine = plugin.comm_volume(), plugin.engine
    often = {"micro_steps": engine.gradient_accumulation_steps()}
    return {
        "scheme": plugin.scheme.name,
        "stage": plugin.stage,
        "world": plugin.topology.world,
        "node_size": plugin.topology.node_size,
        "params": comm_volume.numel,
        "steps": engine.global_steps,
        "micro_steps": engine.micro_steps,
        "received_bytes": {r: dict(links) for r, links in plugin.traffic.received.items()},
        "saved_bytes": _saved(plugin, comm_volume),
        "collectives": dict(plugin.traffic.collectives),
        "not_counted": ["gradients"] if plugin.stock_gradients else [],
        "gathers": plugin.gathers,
        "full_precision_share": comm_volume.full_precision_share,
        "expected_bytes_per_param": comm_volume.step_bytes(plugin.stage, **often),
        "expected_intra_bytes_per_param": comm_volume.intra_bytes(plugin.stage, **often),
        "expected_most_bytes_per_param": comm_volume.step_bytes(plugin.stage, **often, most=True),
        "lossless_bits": plugin.traffic.lossless.bits,
        "lossless_padding": plugin.traffic.lossless.padding,
        "kept_bytes": 0 if plugin.node is None else plugin.node.nbytes(),
        "expected_kept_bytes": comm_volume.memory * comm_volume.numel,
        "held_bytes": 0
        if plugin.partial_gradients is None
        else plugin.partial_gradients.most_nbytes,
        "expected_held_bytes": comm_volume.partial_sums * comm_volume.numel
        if hooks.accumulates(engine)
        else 0,
        "expected_peak_bytes": plugin.peak_bytes(comm_volume),
        "buffer_bytes": plugin.buffers.nbytes,
        "resyncs": plugin.state.resyncs,
        "nonfinite_steps": plugin.state.nonfinite_steps,
        "exact_steps": plugin.state.exact_steps,
        "killed": plugin.state.killed,
        "line": start_line(plugin),
    }
