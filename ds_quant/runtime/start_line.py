"""The parts of the start-up line that both fronts have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ds_quant.config.errors import did_you_mean
from ds_quant.config.presets import preset_groups
from ds_quant.config.schema import parse_block
from ds_quant.policy import choosing
from ds_quant.policy.cost import CommVolume
from ds_quant.policy.scheme import Scheme, matches
from ds_quant.runtime import log

GB = 1e9
_LESS = 0.9  # share of the bytes below which another scheme is advised


def warn_of_unmatched(exclude: Sequence[str], names: Sequence[str]) -> None:
    """Log on rank 0 the patterns of ``exclude`` that match none of the parameters' names."""
    for pattern in exclude:
        if not any(matches(name, pattern) for name in names):
            similar = did_you_mean(pattern, names, cutoff=0.4) or next(iter(names), "nothing")
            log.log_rank0(
                f'quantized_comm: exclude pattern "{pattern}" matches no parameter; one is called '
                f"{similar}"
            )


def unquantized(comm_volume: CommVolume) -> str:
    """Name the tensors that are sent in full precision, and their share of the bytes."""
    scheme = comm_volume.routes.scheme
    if scheme.weights is None and scheme.gradients is None and not scheme.lossless:
        return "nothing quantized"
    tensors_by_reason = dict(comm_volume.kept)
    small = tensors_by_reason.pop("1-D", 0) + tensors_by_reason.pop("small", 0)
    parts: list[str] = []
    if weights_stay(comm_volume) or (scheme.weights is None and not scheme.lossless):
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


def weights_stay(comm_volume: CommVolume) -> bool:
    """Return True if the scheme compresses weights between nodes only, and there is one node."""
    routes = comm_volume.routes
    compresses = routes.scheme.weights is not None or routes.scheme.lossless
    route = routes.weights(dtype=torch.bfloat16)
    return compresses and routes.ranks > 1 and route.is_full_precision


def kept(nbytes: float, numel: int, *, where: str = "") -> str:
    """Describe the bytes that are kept between steps, of a model of ``numel``.

    where: " in host memory", or "".
    """
    per_param = f"{nbytes / numel:.2f} B/param"
    return f"keeps {per_param} ({nbytes / GB:.3g} GB) more{where} on every rank"


def buffering(comm_volume: CommVolume) -> str:
    """Describe the memory of gradients that wait for the last micro-step."""
    gigabytes = comm_volume.partial_sums * comm_volume.numel / GB
    per_param = f"{comm_volume.partial_sums:.2f} B/param"
    return f"buffering them takes {per_param} ({gigabytes:.3g} GB) on every rank"


def extra_memory(nbytes: float) -> str:
    """Describe the peak of messages and sums in a step."""
    return f"extra memory: up to {nbytes / GB:.2g} GB"


def advised(
    own: CommVolume, volume_of: Callable[[Scheme], CommVolume], *, micro_steps: int
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
