"""The start-up line: scheme, bytes beside those without it, tensors in full precision, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ds_quant.config.errors import did_you_mean
from ds_quant.config.presets import preset_groups
from ds_quant.config.schema import parse_block
from ds_quant.kernels import dispatch
from ds_quant.policy import choosing
from ds_quant.policy.model_volume import ModelVolume
from ds_quant.policy.scheme import Scheme, matches
from ds_quant.runtime.run import Run

GB = 1e9
_LESS = 0.9  # share of the bytes below which another scheme is advised


@dataclass(frozen=True, kw_only=True)
class LineParts:
    """The part of the line that a front knows.

    layout: such as "ZeRO-3". stock: bytes per parameter without the block, such as "bf16 6.00".
    micro_steps: of the period that bytes are counted of. period: its name.
    kept_bytes: that the scheme keeps on this rank. kept_where: " in host memory", or "".
    between: stands between the number of nodes and that of their ranks.
    fetches, weights, gradients: clauses about these, or "". gradients: how they are kept until the
        last micro-step.
    reasons: clauses that say why something stays in full precision.
    """

    layout: str
    stock: str
    micro_steps: int = 1
    period: str = "step"
    kept_bytes: float = 0.0
    kept_where: str = ""
    between: str = "x"
    fetches: str = ""
    weights: str = ""
    gradients: str = ""
    reasons: Sequence[str] = ()


def announce(run: Run, line: str) -> None:
    """Log the start-up line and its warnings on the first rank of the run."""
    _warn_of_unmatched(run)
    run.info(f"quantized_comm: {line}")


def start_line(run: Run, volume: ModelVolume, front: LineParts) -> str:
    """Describe a run in one line, its notices last."""
    parts = [*_traffic(run, volume, front), *_memory(run, volume, front)]
    scheme = run.scheme
    if scheme.name == "hybrid" and run.topology.nodes > 1 and not run.routes.replicas:
        parts.append('scheme "lossless" is also exact and sends less')
    if scheme.block.warmup_steps:
        parts.append(f"from step {scheme.block.warmup_steps} on")
    if volume.varies:
        most = volume.step_bytes(run.routes.stage, micro_steps=front.micro_steps, most=True)
        parts.append(
            f"traffic depends on the learning rate: volume {most:.2f} B/param/step at most"
        )
    parts += front.reasons
    parts += _advised(volume, run.comm_volume, micro_steps=run.workload.micro_steps)
    parts += run.notices
    return "; ".join(parts)


def _traffic(run: Run, volume: ModelVolume, front: LineParts) -> list[str]:
    """Describe scheme, bytes, ranks and kernels."""
    stage = run.routes.stage
    outer = volume.step_bytes(stage, micro_steps=front.micro_steps)
    inner = volume.intra_bytes(stage, micro_steps=front.micro_steps)
    between = " between nodes" if inner else ""
    parts = [
        f"{run.scheme.name} on {front.layout}, volume {outer:.2f} B/param/{front.period}{between} "
        f"({front.stock}), {_unquantized(volume)}",
        *_ranks(run, volume, front),
        dispatch.describe(run.device, run.scheme.block.backend),
    ]
    if front.fetches:
        parts.append(front.fetches)
    if run.topology.world > 1:
        received = volume.received_per_node(stage, micro_steps=front.micro_steps)
        crosses = any(level.topology.nodes > 1 for level in run.levels)
        receiver = "node" if crosses else "rank"
        parts.append(f"{received:.2f} B/param/{front.period} received per {receiver}")
    if inner:
        parts.append(f"volume inside a node {inner:.2f} B/param")
    return parts


def _ranks(run: Run, volume: ModelVolume, front: LineParts) -> list[str]:
    """Describe the ranks of every level; of several levels also their shares of the parameters and
    the bytes that each sends, the largest first.
    """
    clauses: list[tuple[int, str]] = []
    for level, part in zip(run.levels, volume.parts, strict=True):
        topology = level.topology
        between = front.between if level.routes.replicas else "x"
        of_all = "" if topology.world == run.topology.world else f"of {run.topology.world} "
        clause = f"{topology.nodes} {between} {topology.node_size} {of_all}ranks"
        if len(run.levels) > 1:
            share = 100 * part.numel / max(1, volume.numel)
            nbytes = part.step_bytes(level.routes.stage, micro_steps=front.micro_steps)
            clause = f"{share:.3g} % of the parameters on {clause}, {nbytes:.2f} B/param"
        clauses.append((part.numel, clause))
    clauses.sort(key=lambda numel_and_clause: -numel_and_clause[0])
    return [clause for _, clause in clauses]


def _memory(run: Run, volume: ModelVolume, front: LineParts) -> list[str]:
    """Describe the memory that the scheme takes on a rank."""
    parts: list[str] = []
    if front.kept_bytes:
        per_param = f"{front.kept_bytes / volume.numel:.2f} B/param"
        gigabytes = f"{front.kept_bytes / GB:.3g} GB"
        parts.append(f"keeps {per_param} ({gigabytes}) more{front.kept_where} on every rank")
    if front.weights:
        parts.append(front.weights)
    if front.gradients:
        gigabytes = f"{volume.partial_sums * volume.numel / GB:.3g} GB"
        per_param = f"{volume.partial_sums:.2f} B/param"
        parts.append(
            f"{front.gradients}; buffering them takes {per_param} ({gigabytes}) on every rank"
        )
    if run.topology.world > 1:
        parts.append(f"extra memory: up to {run.peak_bytes(volume) / GB:.2g} GB")
    return parts


def _warn_of_unmatched(run: Run) -> None:
    """Log the patterns of ``exclude`` that match none of the parameters' names."""
    names = [param.name for param in run.params]
    for pattern in run.scheme.block.exclude:
        if not any(matches(name, pattern) for name in names):
            similar = did_you_mean(pattern, names, cutoff=0.4) or next(iter(names), "nothing")
            run.log(
                f'quantized_comm: exclude pattern "{pattern}" matches no parameter; one is called '
                f"{similar}"
            )


def _unquantized(comm_volume: ModelVolume) -> str:
    """Name the tensors that are sent in full precision, and their share of the bytes."""
    routes, scheme = comm_volume.routes, comm_volume.routes.scheme
    quantizes_weights = routes.sends_weights and (scheme.weights is not None or scheme.lossless)
    if not quantizes_weights and scheme.gradients is None:
        return "nothing quantized"
    tensors_by_reason = dict(comm_volume.kept)
    small = tensors_by_reason.pop("1-D", 0) + tensors_by_reason.pop("small", 0)
    parts: list[str] = []
    if routes.sends_weights and (weights_stay(comm_volume) or not quantizes_weights):
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


def weights_stay(comm_volume: ModelVolume) -> bool:
    """Return True if the scheme compresses weights between nodes only, and there is one node."""
    routes = comm_volume.routes
    compresses = routes.scheme.weights is not None or routes.scheme.lossless
    route = routes.weights(dtype=torch.bfloat16)
    return compresses and routes.ranks > 1 and route.is_full_precision


def _advised(
    own: ModelVolume, volume_of: Callable[[Scheme], ModelVolume], *, micro_steps: int
) -> list[str]:
    """Name the scheme that is advised between these nodes, if it sends clearly less.

    volume_of: the volume of another scheme on the same model.
    """
    routes = own.routes
    block = routes.scheme.block
    stage = routes.stage
    place = choosing.Place(stage, routes.nodes, routes.node_size, block.allow_full_replica)
    lossy = routes.scheme.gradients is not None and block.scheme in preset_groups()[""]
    if routes.nodes == 1 or not lossy or block.scheme in choosing.candidates(place):
        return []
    best = choosing.autotune_candidates(place)[-1]
    other = volume_of(parse_block({"scheme": best}).to_scheme())
    other_bytes = other.step_bytes(stage, micro_steps=micro_steps)
    if other_bytes > _LESS * own.step_bytes(stage, micro_steps=micro_steps):
        return []
    keeps = ""
    if other.memory > own.memory:
        keeps = f", and keeps {other.memory:.2f} more"
    return [
        f'advised here: scheme "{best}", with a volume of {other_bytes:.2f} B/param/step{keeps}'
    ]
