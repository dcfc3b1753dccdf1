"""Gaussian levels with EDEN's scale, in torch, on any device: the specification of the numbers.

Random signs and a Hadamard transform make any group look Gaussian; each value then goes to the
nearest of the levels that Lloyd and Max found for N(0, 1), and the scale makes the decoded group
unbiased over the signs (EDEN: Vargaftik et al., arXiv 2108.08842). It takes no random bits.

[Note: Gaussian levels]
Per group of 128 elements x, with b bits, levels t_0 < t_1 < ... of 2^(b-1) magnitudes and
boundaries h_k = fl(fl(t_k + t_(k+1)) / 2); every step is one correctly rounded fp32 operation:

m, e    m = max|x|, 2^e <= m < 2^(e+1); u = x * 2^-e, exact unless it is lost beside m
S       sum of fl(u * u)
k       number of fl(h_k * h_k) below fl(fl(u * u) * fl(1 / fl(S / 128))): squares, so no root
code    k, plus 2^(b-1) unless the sign bit of x is set
P       sum of fl(|u| * t_k)
scale   bf16 of fl(fl(S * fl(1 / P)) * 2^e), nearest, ties to even: <x, x> / <x, levels>
decode  fl(level * scale) with level = t_k or -t_k

Sums fold the group by distance 8, 16, 1, 2, 4, 32 and 64: the values whose places differ in that
bit are added, 128 become 64, and so on. So a thread that holds 32 values in a row folds them
first, and a vector of 8 lanes is full.
tiny: m < 2^-99 gives scale 0; non-finite: an Inf or NaN, or m of at least 2^127, gives scale NaN;
both have the codes of t_0, 2^(b-1). Messages hold whole groups: what is shorter is filled up with
zeros by the rotation.
"""

from __future__ import annotations

from functools import cache

import torch

GROUP = 128  # elements: of a group, and of the block of the rotation before
BITS = (2, 3, 4)
TINY = 2.0**-99
HUGE = 2.0**127

_MAGNITUDES = {
    2: (0.452780035, 1.510417608),
    3: (0.245094179, 0.756005281, 1.343909279, 2.151945705),
    4: (
        *(0.128395030, 0.388048299, 0.656759119, 0.942340456),
        *(1.256231197, 1.618046386, 2.069017227, 2.732589571),
    ),
}
_MANTISSA = 23  # bits
_FOLDS = (8, 16, 1, 2, 4, 32, 64)


@cache
def table_of(bits: int, device: torch.device) -> torch.Tensor:
    """(2^bits,) fp32: the level of every code."""
    with torch.inference_mode(False):
        magnitudes = torch.tensor(_MAGNITUDES[bits], dtype=torch.float32, device=device)
        return torch.cat([-magnitudes, magnitudes])


def quantize(
    groups: torch.Tensor,  # (groups, 128) fp32
    levels: torch.Tensor,  # (2^bits,) fp32, from `table_of`
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (groups, 128) int32 and scales (groups, 1) bf16; groups are read only."""
    half = levels.numel() // 2
    magnitudes = levels[half:]
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    largest = torch.amax(groups.abs(), dim=1, keepdim=True)
    exponents = largest.view(torch.int32) >> _MANTISSA  # biased
    units = groups * ((254 - exponents) << _MANTISSA).view(torch.float32)
    squares = units * units
    energy = folded(squares)
    squares.mul_((energy / GROUP).reciprocal_())
    codes = torch.bucketize(squares, middles * middles, out_int32=True)
    products = units.abs_().mul_(magnitudes[codes])
    scales = energy * folded(products).reciprocal_()
    scales.mul_((exponents << _MANTISSA).view(torch.float32))
    codes.add_(torch.signbit(groups).logical_not_(), alpha=half)
    tiny = largest < TINY
    unusable = (largest < HUGE).logical_not_()
    codes.masked_fill_(tiny | unusable, half)
    scales = scales.to(torch.bfloat16)  # before, because casts differ in the bits of a NaN
    return codes, scales.masked_fill_(tiny, 0.0).masked_fill_(unusable, float("nan"))


def folded(values: torch.Tensor) -> torch.Tensor:
    """(groups, 128) -> (groups, 1): sums in the order of [Note: Gaussian levels]."""
    places = list(range(1, 8))  # dimension of each bit of the place, highest first
    values = values.view(-1, *(2 for _ in places))
    for distance in _FOLDS:
        dimension = 7 - (distance.bit_length() - 1)
        first, second = values.unbind(places.index(dimension) + 1)
        values = first + second
        places.remove(dimension)
    return values.view(-1, 1)
