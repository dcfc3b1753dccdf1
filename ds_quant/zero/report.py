"""What an engine does, in one line at start-up and in the figures of ``ds_quant.report``."""

from __future__ import annotations

from typing import Any

import torch

from ds_quant.config.errors import did_you_mean
from ds_quant.config.presets import preset_groups
from ds_quant.config.schema import parse_block
from ds_quant.kernels import dispatch
from ds_quant.policy import choosing
from ds_quant.policy.cost import LABELS, Costs, shipped_bytes
from ds_quant.policy.scheme import matches
from ds_quant.zero import hooks, log, offload
from ds_quant.zero.engine import QuantizedEngine

_LESS = 0.9  # of the bytes: a scheme that sends more than that is not worth a sentence


def start_line(binding: QuantizedEngine) -> str:
    """Describe the engine in one line: scheme, bytes against DeepSpeed's, what stays exact,
    kernels.
    """
    costs, stage = binding.bill(), binding.stage
    micro_steps = binding.engine.gradient_accumulation_steps()
    waits = costs.crosses_once and hooks.accumulates(binding.engine)
    once = costs.once_per_step or costs.boundary or (waits and micro_steps > 1)
    per_micro_step = stage == 3 and not once
    micro_steps = 1 if per_micro_step else micro_steps
    dtype = binding.engine.communication_data_type
    label = LABELS.get(dtype, "fp32")
    shipped = shipped_bytes(
        stage, dtype, micro_steps=micro_steps, gathers=costs.gathers, trained=costs.trained
    )
    inside = costs.intra_bytes(stage, micro_steps=micro_steps)
    parts = [
        f"{binding.scheme.name} on ZeRO-{stage}, "
        f"{costs.step_bytes(stage, micro_steps=micro_steps):.2f} "
        f"B/param/{'micro-step' if per_micro_step else 'step'}"
        f"{' between nodes' if inside else ''} "
        f"({label} {shipped + costs.boundary:.2f}), " + _unquantized(binding, costs),
        f"{binding.topology.nodes} x {binding.topology.node_size} ranks",
        dispatch.describe(hooks.device(), binding.scheme.block.backend),
    ]
    if stage == 3:
        times = "once" if costs.gathers == 1 else f"{costs.gathers:.3g} times"
        parts.append(f"weights fetched {times} per micro-batch")
    if inside:
        parts.append(f"{inside:.2f} B/param inside a node")
    if costs.memory:
        gigabytes = costs.memory * costs.numel / 1e9
        where = "in host memory " if offload.offloads_parameters(binding.engine) else ""
        parts.append(
            f"keeps {costs.memory:.2f} B/param ({gigabytes:.3g} GB) more {where}on every rank"
        )
    if waits:
        gigabytes = costs.held * costs.numel / 1e9
        parts.append(
            "gradients are sent between nodes once per optimizer step; buffering them takes "
            f"{costs.held:.2f} B/param ({gigabytes:.3g} GB) on every rank"
        )
    if binding.topology.world > 1:
        parts.append(f"extra memory: up to {binding.peak_bytes(costs) / 1e9:.2g} GB")
    if binding.scheme.name == "hybrid" and binding.topology.nodes > 1:
        parts.append('scheme "lossless" is also exact and sends less')
    if binding.scheme.block.warmup_steps:
        parts.append(f"from step {binding.scheme.block.warmup_steps} on")
    if costs.varies:
        most = costs.step_bytes(stage, micro_steps=micro_steps, most=True)
        parts.append(f"traffic depends on the learning rate: {most:.2f} B/param/step at most")
    return "; ".join([*parts, *_why_weights_stay(binding), *_advised(binding), *binding.notices])


def _advised(binding: QuantizedEngine) -> list[str]:
    """Name the scheme that is advised between these nodes, if it sends clearly less."""
    stage, topology, block = binding.stage, binding.topology, binding.scheme.block
    place = choosing.Place(stage, topology.nodes, topology.node_size, block.allow_full_replica)
    lossy = binding.scheme.gradients is not None and block.scheme in preset_groups()[""]
    if topology.nodes == 1 or not lossy or block.scheme in choosing.candidates(place):
        return []
    best = choosing.tuned(place)[-1]
    ours, theirs = binding.bill(), binding.bill(parse_block({"scheme": best}).to_scheme())
    often = {"micro_steps": binding.engine.gradient_accumulation_steps()}
    less = theirs.step_bytes(stage, **often)
    if less > _LESS * ours.step_bytes(stage, **often):
        return []
    keeps = f", and keeps {theirs.memory:.2f} more" if theirs.memory > ours.memory else ""
    return [f'advised here: scheme "{best}", which sends {less:.2f} B/param/step{keeps}']


def _unquantized(binding: QuantizedEngine, costs: Costs) -> str:
    """Name what is sent in full precision, and its share of the bytes."""
    scheme, kept = binding.scheme, dict(costs.kept)
    if scheme.weights is None and scheme.gradients is None and not scheme.lossless:
        return "nothing quantized"
    small = kept.pop("1-D", 0) + kept.pop("small", 0)
    all_weights = _weights_stay(binding) or (scheme.weights is None and not scheme.lossless)
    parts = ["all weights"] * all_weights + ["all gradients"] * (scheme.gradients is None)
    parts += [f"{small} small tensor{'s' if small > 1 else ''}"] * (small > 0)
    parts += [f"{n} {reason}" for reason, n in sorted(kept.items())]
    share = f"{100 * costs.full_precision_share:.1f} % of bytes"
    return f"{', '.join(parts)} unquantized ({share})" if parts else "all tensors quantized"


def _weights_stay(binding: QuantizedEngine) -> bool:
    """Whether a node shard has nobody to exchange quantized weights with."""
    sends = binding.scheme.weights is not None or binding.scheme.lossless
    route = binding.routes.weights(dtype=torch.bfloat16)
    return sends and binding.topology.world > 1 and route.is_exact


def _why_weights_stay(binding: QuantizedEngine) -> list[str]:
    """Say why and what would help, if they do."""
    if not _weights_stay(binding):
        return []
    way_out = 'set weights.intra, such as {"bits": 8}, or use scheme "qsdp"'
    if binding.scheme.lossless:
        way_out = "use zero_optimization.stage 2, where they are compressed on one node too"
    if binding.scheme.gradients is None:
        return [f"nothing to gain on one node: remove the block, or {way_out}"]
    return [
        "weights are sent in full precision: this scheme compresses them between nodes only, and "
        f"there is one node; {way_out}"
    ]


def announce(binding: QuantizedEngine) -> None:
    """Log the start-up line and its warnings on rank 0."""
    for sentence in _idle_patterns(binding):
        log.log_rank0(f"quantized_comm: {sentence}")
    log.info_rank0(f"quantized_comm: {start_line(binding)}")


def _idle_patterns(binding: QuantizedEngine) -> list[str]:
    """One sentence per ``exclude`` pattern that matches no parameter."""
    names = [param.name for param in binding.all_params()]
    sentences = []
    for pattern in binding.scheme.block.exclude:
        if not any(matches(name, pattern) for name in names):
            near = did_you_mean(pattern, names, cutoff=0.4) or next(iter(names), "nothing")
            sentences.append(
                f'exclude pattern "{pattern}" matches no parameter; one is called {near}'
            )
    return sentences


def _saved(binding: QuantizedEngine, bill: Costs) -> dict[str, dict[str, float]]:
    """Bytes that full precision would have received besides, in as many steps: by formula."""
    plain, own = binding.received_in_full_precision(), binding.received_by_formula(bill)
    return {
        role: {at: nbytes * (plain[role][at] / own[role][at] - 1) if own[role][at] else 0.0
               for at, nbytes in links.items()}
        for role, links in binding.traffic.received.items()
    }  # fmt: skip


def figures(binding: QuantizedEngine) -> dict[str, Any]:
    """See ``ds_quant.report``."""
    bill, engine = binding.bill(), binding.engine
    often = {"micro_steps": engine.gradient_accumulation_steps()}
    return {
        "scheme": binding.scheme.name,
        "stage": binding.stage,
        "world": binding.topology.world,
        "node_size": binding.topology.node_size,
        "params": bill.numel,
        "steps": engine.global_steps,
        "micro_steps": engine.micro_steps,
        "received_bytes": {r: dict(links) for r, links in binding.traffic.received.items()},
        "saved_bytes": _saved(binding, bill),
        "collectives": dict(binding.traffic.collectives),
        "not_counted": ["gradients"] if binding.shipped_gradients else [],
        "gathers": binding.gathers,
        "full_precision_share": bill.full_precision_share,
        "expected_bytes_per_param": bill.step_bytes(binding.stage, **often),
        "expected_intra_bytes_per_param": bill.intra_bytes(binding.stage, **often),
        "expected_most_bytes_per_param": bill.step_bytes(binding.stage, **often, most=True),
        "lossless_bits": binding.traffic.exact.bits,
        "lossless_padding": binding.traffic.exact.padding,
        "kept_bytes": 0 if binding.node is None else binding.node.nbytes(),
        "expected_kept_bytes": bill.memory * bill.numel,
        "held_bytes": 0 if binding.held is None else binding.held.most_nbytes,
        "expected_held_bytes": bill.held * bill.numel if hooks.accumulates(engine) else 0,
        "expected_peak_bytes": binding.peak_bytes(bill),
        "buffer_bytes": binding.buffers.nbytes,
        "resyncs": binding.state.resyncs,
        "nonfinite_steps": binding.state.nonfinite_steps,
        "exact_steps": binding.state.exact_steps,
        "killed": binding.state.killed,
        "line": start_line(binding),
    }
