"""What rank 0 logs when quantization is on: warnings, and the line that ``report`` repeats."""

from __future__ import annotations

import torch

from ds_quant.config_errors import did_you_mean
from ds_quant.cost import shipped_bytes
from ds_quant.kernels import dispatch
from ds_quant.scheme import matches
from ds_quant.zero import parameters, seams
from ds_quant.zero.binding import Binding
from ds_quant.zero.log import info_rank0


def start_line(binding: Binding) -> str:
    """What is on, its bytes against DeepSpeed's, what stays exact, which kernels work."""
    costs, stage = binding.bill(), binding.stage
    per_micro_step = stage == 3 and not costs.once_per_step
    micro_steps = 1 if per_micro_step else binding.engine.gradient_accumulation_steps()
    dtype = seams.gradient_dtype(binding.engine)
    label = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")
    kept = [f"{n} {reason}" for reason, n in sorted(costs.kept.items())]
    if _weights_stay(binding):
        kept.insert(0, "all weights")
    shipped = shipped_bytes(
        stage, dtype, micro_steps=micro_steps, gathers=costs.gathers, trained=costs.trained
    )
    inside = costs.intra_bytes(stage, micro_steps=micro_steps)
    parts = [
        f"{binding.scheme.name} on ZeRO-{stage}, "
        f"{costs.step_bytes(stage, micro_steps=micro_steps):.2f} "
        f"B/param/{'micro-step' if per_micro_step else 'step'}"
        f"{' between nodes' if inside else ''} "
        f"({label} {shipped:.2f}), "
        f"{100 * costs.full_precision_share:.1f} % of bytes left in full precision "
        f"({', '.join(kept) or 'none'})",
        f"{binding.topology.nodes} x {binding.topology.node_size} ranks",
        dispatch.describe(parameters.device()),
    ]
    if stage == 3:
        parts.append(f"{costs.gathers:.3g} gathers of the weights per micro-step")
    if inside:
        parts.append(f"{inside:.2f} B/param inside a node")
    if costs.memory:
        gigabytes = costs.memory * costs.numel / 1e9
        parts.append(f"keeps {costs.memory:.2f} B/param ({gigabytes:.3g} GB) more on every rank")
    if binding.topology.world > 1:
        parts.append(f"messages and sums of up to {binding.peak_bytes(costs) / 1e9:.2g} GB")
    if binding.scheme.warmup_steps:
        parts.append(f"from step {binding.scheme.warmup_steps} on")
    if _weights_stay(binding):
        parts.append(
            "weights stay exact, because this scheme quantizes what they cross between nodes and "
            'there is one node: weights.intra, such as {"bits": 8}, quantizes gathers inside it, '
            'scheme "qsdp" all weights'
        )
    return "; ".join(parts + binding.notices)


def _weights_stay(binding: Binding) -> bool:
    """Whether a node shard has nobody to exchange quantized weights with."""
    scheme, topology = binding.scheme, binding.topology
    keeps = binding.stage == 3 and scheme.node_shard and scheme.weights is not None
    return keeps and scheme.weights_intra is None and topology.nodes == 1 < topology.world


def announce(binding: Binding) -> None:
    """Log what rank 0 has to say once an engine is ready."""
    for sentence in _idle_patterns(binding):
        seams.log_rank0(f"quantized_comm: {sentence}")
    info_rank0(f"quantized_comm: {start_line(binding)}")


def _idle_patterns(binding: Binding) -> list[str]:
    """One sentence per ``exclude`` pattern that matches no parameter."""
    names = [tracked.name for tracked in binding.all_tracked()]
    sentences = []
    for pattern in binding.scheme.exclude:
        if not any(matches(name, pattern) for name in names):
            near = did_you_mean(pattern, names, cutoff=0.4) or next(iter(names), "nothing")
            sentences.append(
                f'exclude pattern "{pattern}" matches no parameter; one is called {near}'
            )
    return sentences
