"""What a run sends, in words of its users: bytes beside those without the block, bits per role."""

from __future__ import annotations

import torch

from ds_quant.codec.codec import GroupCodec
from ds_quant.policy.cost import LOSSLESS_BITS
from ds_quant.policy.route import Route, Routes

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_ALIKE = 0.05  # share by which bytes may differ and still count as equal
UNCOMPRESSED = "NOT compressed"
NOTHING = "nothing is quantized"


def saving(stock_bytes: float, sent_bytes: float, *, nodes: int, ranks: str = "GPUs") -> str:
    """Compare the bytes of a step with those of a run without the block.

    ranks: their name on one node.
    """
    where = "between nodes" if nodes > 1 else f"between {ranks}"
    if not sent_bytes:
        return f"no bytes {where}"
    ratio = stock_bytes / sent_bytes
    if abs(ratio - 1) < _ALIKE:
        return f"as many bytes {where} as without it"
    if ratio < 1:
        return f"{1 / ratio:.1f} times more bytes {where}"
    return f"{ratio:.1f} times fewer bytes {where}"


def formats(routes: Routes, dtype: torch.dtype) -> str:
    """Name the number formats of both roles, between nodes if there are several.

    dtype: of the weights.
    """
    weights = _format(routes.weights(dtype=dtype))
    gradients = _format(routes.gradients())
    if weights == gradients == UNCOMPRESSED:
        return NOTHING
    if not routes.sends_weights:
        return f"gradients {gradients}"
    if routes.replicas:
        return f"weights stay in the node, gradients {gradients}"
    if weights == gradients:
        return f"weights and gradients {weights}"
    return f"weights {weights}, gradients {gradients}"


def amount(nbytes: float) -> str:
    """Return bytes with their unit, as "1.7 GB" or "13 MB"."""
    unit, size = next((u, s) for u, s in _UNITS if nbytes >= s or u == "kB")
    value = nbytes / size
    digits = 0 if value >= 10 else 1
    return f"{value:.{digits}f} {unit}"


def _format(route: Route) -> str:
    """Name the format of a collective, on its hop between nodes if it has one."""
    hops = [hop for hop in route.hops if hop.level != "intra"] or list(route.hops)
    if not hops or hops[0].is_full_precision:
        return UNCOMPRESSED
    if hops[0].lossless:
        return f"in about {LOSSLESS_BITS:.1f} bits without loss"
    codec = hops[0].codec
    if isinstance(codec, GroupCodec):
        return f"in {codec.bits} bits"
    return "in a format of your own"
