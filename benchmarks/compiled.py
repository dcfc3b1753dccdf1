"""The same quantizers in a few lines of torch under torch.compile: the rival that costs no effort.

Symmetric codes of 4 or 8 bits, one fp32 scale per group, codes and scales in two tensors, random
numbers of torch's own. Imported only where it is measured: compiling takes seconds per function.
"""

from __future__ import annotations

from functools import cache

import torch


def _encode(
    x: torch.Tensor, group_size: int, bits: int, stochastic: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    top = 2 ** (bits - 1) - 1
    groups = x.view(-1, group_size).float()
    scales = groups.abs().amax(1, keepdim=True) / top
    t = groups * torch.where(scales > 0, 1 / scales, 0.0)
    t = torch.floor(t + torch.rand_like(t)) if stochastic else torch.round(t)
    codes = (t.clamp(-top, top) + (top + 1)).to(torch.uint8).view(-1)
    if bits == 4:
        codes = codes[::2] | codes[1::2] << 4
    return codes, scales


def _decode_sum(
    codes: torch.Tensor, scales: torch.Tensor, group_size: int, bits: int, dtype: torch.dtype
) -> torch.Tensor:
    rows = codes.shape[0]
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=2)
    zero = 2 ** (bits - 1)
    values = (codes.view(rows, -1, group_size).float() - zero) * scales.view(rows, -1, 1)
    return values.sum(0).view(-1).to(dtype)


@cache
def encode():
    """encode(x, group_size, bits, stochastic) -> codes, scales."""
    return torch.compile(_encode, dynamic=False)


@cache
def decode_sum():
    """decode_sum(codes (rows, bytes), scales (rows, groups), group_size, bits, dtype)."""
    return torch.compile(_decode_sum, dynamic=False)
