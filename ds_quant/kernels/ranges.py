"""Ranges of groups: scale, offset and inverse of each, and what happens to groups without one.

May import torch, blocks and scratch. Off the CPU nothing is read back: an encode must not wait for
what its stream still has to do.

[Note: exceptional groups]
tiny        m < 2^-99, or max - min < 2^-99: scale 0 and the code of 0; offset = min, or 0 when
            all |x| < 2^-99. CUDA runs with flush-to-zero: above the threshold a denormal operand
            is below 2^-4 in units of T, so flushing it changes no code.
non-finite  Inf or NaN in the group, or a range, scale or offset that leaves fp32: scale NaN,
            offset 0, the code of 0: every element decodes to NaN. A scale above 2^126 counts,
            because 1 / scale would be denormal (reachable with at most 3 bits).
offsets     a denormal or negative-zero offset is written as +0, as flush-to-zero would have it
            and because min(-0, +0) depends on the order of comparison.
A value near FLT_MAX may decode to Inf, as (2^b - 1) * scale rounds up: visible, never plausible.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ds_quant.kernels import scratch
from ds_quant.kernels.blocks import Format

TINY = 2.0**-99
HUGE_SCALE = 2.0**126
LARGEST_DENORMAL = 2.0**-126 - 2.0**-149
FLT_MAX = torch.finfo(torch.float32).max


class Ranges(NamedTuple):
    """Per-group numbers of a block, each (groups, 1)."""

    scale: torch.Tensor  # fp32
    offset: torch.Tensor | None  # fp32
    inverse: torch.Tensor  # fp32: 2^F / scale, 0 in exceptional groups
    code_of_zero: torch.Tensor | None  # bool: groups whose codes are forced, None for none


def fraction_bits(fmt: Format) -> int:
    """F of [Note: numbers]: fixed-point bits below a code; code and fraction fit 23 bits."""
    if fmt.rounding != "stochastic":
        return 0
    return 15 if fmt.bits == 8 else 16


def code_range(fmt: Format) -> tuple[int, int]:
    """Smallest and largest code on the wire: 0..K for minmax, 2^(b-1) -+ L for absmax."""
    return (0 if fmt.has_offset else 1), (1 << fmt.bits) - 1


def ranges_of(values: torch.Tensor, fmt: Format, shift: float | None) -> Ranges:
    """Scale, offset and inverse of each group of `values` (groups, group_size) fp32."""
    low = torch.amin(values, dim=1, keepdim=True)
    high = torch.amax(values, dim=1, keepdim=True)
    if fmt.has_offset:
        span = high - low
        scale = _divided(span, (1 << fmt.bits) - 1)
        offset = _flush(low)
    else:
        span = torch.maximum(high, -low)
        scale = _divided(span, (1 << (fmt.bits - 1)) - 1)
        offset = None
    tiny = nan = None
    if not _all_usual(span):
        tiny = span < TINY
        nan = (tiny | (scale <= HUGE_SCALE)).logical_not_()
        scale.masked_fill_(tiny, 0.0)
        if offset is not None:
            offset.masked_fill_(tiny & (torch.maximum(high, -low) < TINY), 0.0)
    if shift is not None:
        # Tiny groups stay where they are: their scale is 0.
        offset = _flush(offset + _flush(scale * shift))
        if not _all_finite(offset):
            outside = (offset.abs() <= FLT_MAX).logical_not_()
            nan = outside if nan is None else nan.logical_or_(outside)
    return _with_inverse(scale, offset, fmt, tiny=tiny, nan=nan)


def _all_usual(span: torch.Tensor) -> bool:
    """Whether no group is tiny or non-finite; False too where that could only be read back late.

    Then no comparison per group is needed: scale <= span.
    """
    if not scratch.is_synchronous(span.device):
        return False
    smallest, largest = (bound.item() for bound in span.aminmax())
    return TINY <= smallest <= largest <= HUGE_SCALE  # False for NaN


def _all_finite(offset: torch.Tensor) -> bool:
    """Whether all offsets are; False too where that could only be read back late."""
    return scratch.is_synchronous(offset.device) and offset.abs().max().item() <= FLT_MAX


def _divided(span: torch.Tensor, steps: int) -> torch.Tensor:
    """Rounded once. By a tensor, because torch on CUDA multiplies by the reciprocal of a number."""
    return span / torch.full((), float(steps), device=span.device)


def _flush(numbers: torch.Tensor) -> torch.Tensor:
    """Denormals and negative zeros become +0; NaN stays."""
    return torch.nn.functional.hardshrink(numbers, LARGEST_DENORMAL)


def _with_inverse(
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    fmt: Format,
    *,
    tiny: torch.Tensor | None,
    nan: torch.Tensor | None,
) -> Ranges:
    """Adds 2^F / scale and settles the exceptional groups; tiny and nan are bool or None."""
    inverse = scale.reciprocal()
    if fraction_bits(fmt):
        # Rounded once: 1 / scale is a normal number and the power of two is exact.
        inverse.mul_(2.0 ** fraction_bits(fmt))
    if nan is not None:
        scale.masked_fill_(nan, float("nan"))
        inverse.masked_fill_(nan, 0.0)
        if offset is not None:
            offset.masked_fill_(nan, 0.0)
    if tiny is not None:
        inverse.masked_fill_(tiny, 0.0)
        if fmt.levels == "learned":
            nan = nan | tiny  # with uniform levels x * 0 is the code of 0 already
    if nan is not None and scratch.is_synchronous(nan.device) and not bool(nan.any()):
        nan = None
    return Ranges(scale, offset, inverse, nan)
