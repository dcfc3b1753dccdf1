"""What a run sends, in words of its users: bytes beside those without the block, bits per role."""

from __future__ import annotations

import torch

from ds_quant.codec.codec import GroupCodec
from ds_quant.policy.cost import LOSSLESS_BITS
from ds_quant.policy.route import Route, Routes

_ALIKE = 0.05  # share by which bytes may differ and still count as equal
_FULL_PRECISION = "full precision"


def saving(stock_bytes: float, sent_bytes: float, *, nodes: int) -> str:
    """Compare the bytes of a step with those of a run without the block."""
    where = "between nodes" if nodes > 1 else "between GPUs"
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
    if weights != gradients:
        return f"weights in {weights}, gradients in {gradients}"
    if weights == _FULL_PRECISION:
        return "nothing is quantized"
    return f"weights and gradients in {weights}"


def _format(route: Route) -> str:
    """Name the format of a collective, on its hop between nodes if it has one."""
    hops = [hop for hop in route.hops if hop.level != "intra"] or list(route.hops)
    if not hops or hops[0].is_full_precision:
        return _FULL_PRECISION
    if hops[0].lossless:
        return f"about {LOSSLESS_BITS:.1f} bits without loss"
    codec = hops[0].codec
    if isinstance(codec, GroupCodec):
        return f"{codec.bits} bits"
    return "a format of your own"
