"""The same quantizers as anyone would write them in Triton: the fair rival of the CUDA kernels.

Symmetric codes of 4 or 8 bits, one fp32 scale per group, codes and scales in two tensors. Random
bits are Triton's own, as cheap as ours: one Philox call of 7 rounds serves 8 elements with 16 bits
each. Needs Triton; imported only where a GPU is measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _uniform(seed, groups, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """(GROUPS, GROUP) of multiples of 2^-16 in [0, 1)."""
    calls = groups[:, None] * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :]
    a, b, c, d = tl.randint4x(seed, calls, n_rounds=7)
    words = tl.join(tl.join(a, b), tl.join(c, d))
    halves = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF)
    return tl.reshape(halves, (GROUPS, GROUP)).to(tl.float32) * (1.0 / 65536)


@triton.jit
def _encode(
    x_ptr,
    codes_ptr,
    scales_ptr,
    seed,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    groups = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    elements = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + elements).to(tl.float32)
    TOP: tl.constexpr = 2 ** (BITS - 1) - 1
    scale = tl.max(tl.abs(x), axis=1) / TOP
    inverse = tl.where(scale > 0, 1.0 / scale, 0.0)
    t = x * inverse[:, None]
    if STOCHASTIC:
        t = tl.floor(t + _uniform(seed, groups, GROUP, GROUPS))
    else:
        t = tl.floor(t + 0.5)
    codes = (tl.minimum(tl.maximum(t, -TOP), TOP) + (TOP + 1)).to(tl.uint8)
    if BITS == 4:
        low, high = tl.split(tl.reshape(codes, (GROUPS, GROUP // 2, 2)))
        places = groups[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        tl.store(codes_ptr + places, low | (high << 4))
    else:
        tl.store(codes_ptr + elements, codes)
    tl.store(scales_ptr + groups, scale)


@triton.jit
def _decode_sum(
    codes_ptr,
    scales_ptr,
    out_ptr,
    row_bytes,
    row_groups,
    SOURCES: tl.constexpr,
    GROUP: tl.constexpr,
    BYTES: tl.constexpr,
    BITS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BYTES
    places = start + tl.arange(0, BYTES)
    PER_BYTE: tl.constexpr = 8 // BITS
    low = tl.zeros((BYTES,), tl.float32)
    high = tl.zeros((BYTES,), tl.float32)
    for k in tl.static_range(SOURCES):
        packed = tl.load(codes_ptr + k * row_bytes + places)
        scale = tl.load(scales_ptr + k * row_groups + places * PER_BYTE // GROUP)
        if BITS == 4:
            low += ((packed & 15).to(tl.float32) - 8) * scale
            high += ((packed >> 4).to(tl.float32) - 8) * scale
        else:
            low += (packed.to(tl.float32) - 128) * scale
    if BITS == 4:
        out = out_ptr + 2 * start + tl.arange(0, 2 * BYTES)
        tl.store(out, tl.interleave(low, high).to(out_ptr.dtype.element_ty))
    else:
        tl.store(out_ptr + places, low.to(out_ptr.dtype.element_ty))


def encode(
    x: torch.Tensor,  # (numel,), whole blocks of 4096
    codes: torch.Tensor,  # (numel * bits / 8,) uint8
    scales: torch.Tensor,  # (numel / group_size,) fp32
    *,
    group_size: int,
    bits: int,
    stochastic: bool,
) -> None:
    """codes and scales of x."""
    groups = max(4096 // group_size, 1)
    grid = (x.numel() // (group_size * groups),)
    _encode[grid](x, codes, scales, 1, group_size, groups, bits, stochastic)


def decode_sum(
    codes: torch.Tensor,  # (sources, numel * bits / 8) uint8
    scales: torch.Tensor,  # (sources, numel / group_size) fp32
    out: torch.Tensor,  # (numel,)
    *,
    group_size: int,
    bits: int,
) -> None:
    """Sum of the decoded rows; with one row, plain decoding."""
    sources, row_bytes = codes.shape
    block = 1024
    grid = (row_bytes // block,)
    _decode_sum[grid](
        codes, scales, out, row_bytes, scales.shape[1], sources, group_size, block, bits
    )
