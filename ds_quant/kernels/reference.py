"""Reference kernels of GroupCodec, in torch, on any device: the specification of the numbers.

CUDA kernels equal this file bit for bit, so every step is one correctly rounded fp32 operation
and no product is fused with a sum. May import torch, layout, rng and its sister modules.

[Note: numbers]
x is converted to fp32 (exact). Per group, with b bits, F = fraction bits of the rounding:

absmax   L = 2^(b-1) - 1, m = max|x|, scale = fl(m / L), codes -L..L stored as q + 2^(b-1)
minmax   K = 2^b - 1, scale = fl(fl(max - min) / K), offset = min, codes 0..K
         and x is replaced by fl(x - offset)
inv      fl(2^F / scale); F is 16 for stochastic rounding below 8 bits, 15 at 8 bits, else 0
nearest  q = rint(fl(x * inv)), ties to even
stochastic  T = rint(fl(x * inv)), q = (T + r) >> F, r of F random bits: the coin flip of QSDP
random_shift  offset = fl(offset + fl(u * scale)), then nearest against that offset; the shift u
         is one scalar per parameter and step, so the receiver needs no random bits
learned  q = index of the nearest level (ties to the lower one) to fl(fl(x - offset) * inv)
decode   fl(q * scale), or fl(fl(table[q] * scale) + offset), then one cast to the output dtype

q is clamped to its range. T and q are read off the mantissa: 2^23 + zero + t is rounded to an
integer by the addition itself. T is clamped before r is added, which gives the same q.
Groups without a usable range: [Note: exceptional groups] of ranges.py.
"""

from __future__ import annotations

import torch

from ds_quant import rng
from ds_quant.kernels import packing, philox, scratch
from ds_quant.kernels.blocks import (
    Block,
    Format,
    blocks,
    fp32_section,
    layout_of,
    plane_sections,
    zero_gaps,
)
from ds_quant.kernels.ranges import Ranges, fraction_bits, ranges_of
from ds_quant.layout import VECTOR_NUMEL, WireLayout, ceil_div

_UNIT = 2.0**23  # floats in [2^23, 2^24) are the integers, one per bit pattern


# --- encode


def encode(
    x: torch.Tensor,  # (rows, numel) floating point
    out: torch.Tensor,  # (rows, nbytes) uint8
    fmt: Format,
    *,
    address: rng.Address | None,
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned levels only
) -> None:
    """Write the wire bytes of every row, padding included."""
    rows, numel = x.shape
    layout = layout_of(fmt, numel)
    x = x.detach()
    zero_gaps(out, layout, fmt.bits)
    shift = rng.shift_of(address) if fmt.rounding == "random_shift" else None
    for block in blocks(rows, numel, group_size=fmt.group_size, device=x.device):
        values = _load_groups(x, block, fmt.group_size)
        ranges = ranges_of(values, fmt, shift)
        codes = _codes(values, ranges, fmt, levels)
        if fmt.rounding == "stochastic":
            _round_stochastically(codes, block, fmt, address, ceil_div(numel, VECTOR_NUMEL))
        if ranges.code_of_zero is not None:
            code = 0 if fmt.has_offset else 1 << (fmt.bits - 1)
            codes.masked_fill_(ranges.code_of_zero, code)
        _store_codes(codes, out, layout, block, fmt.bits)
        _store_fp32(ranges.scale, fp32_section(out, layout.scale_offset, block, fmt.group_size))
        if layout.offset_offset is not None:
            section = fp32_section(out, layout.offset_offset, block, fmt.group_size)
            _store_fp32(ranges.offset, section)


def _load_groups(x: torch.Tensor, block: Block, group_size: int) -> torch.Tensor:
    """A block of x as (groups, group_size) fp32 scratch.

    A short last group is filled up with its own first element, which leaves its range alone.
    """
    shape = (block.num_rows, block.padded_numel)
    values = scratch.take("values", shape, dtype=torch.float32, device=x.device)
    source = x[block.row : block.row + block.num_rows, block.start : block.start + block.numel]
    values[:, : block.numel].copy_(source)
    if block.numel < block.padded_numel:
        first = block.padded_numel - group_size
        values[:, block.numel :] = values[:, first : first + 1]
    return values.view(-1, group_size)


def _codes(
    values: torch.Tensor, ranges: Ranges, fmt: Format, levels: torch.Tensor | None
) -> torch.Tensor:
    """Codes in the low bits, or T + zero for stochastic rounding, as (groups, size) int32.

    Overwrites `values`, whose memory the result shares for uniform levels.
    """
    if ranges.offset is not None:
        values.sub_(ranges.offset)
    values.mul_(ranges.inverse)
    if fmt.levels == "learned":
        middles = (levels[1:] + levels[:-1]) / 2
        out = scratch.take("codes", values.shape, dtype=torch.int32, device=values.device)
        return torch.bucketize(values, middles, out_int32=True, out=out)
    fraction = fraction_bits(fmt)
    limit = ((1 << fmt.bits) - 1 if fmt.has_offset else (1 << (fmt.bits - 1)) - 1) << fraction
    if fmt.rounding != "nearest":
        # Nearest needs none: |fl(x * inv)| exceeds the limit by far less than 1/2.
        values.clamp_(0.0 if fmt.has_offset else -float(limit), float(limit))
    zero = 0 if fmt.has_offset else 1 << (fmt.bits - 1 + fraction)
    return values.add_(_UNIT + zero).view(torch.int32)


def _round_stochastically(
    codes: torch.Tensor, block: Block, fmt: Format, address: rng.Address, row_vectors: int
) -> None:
    """codes = (codes + r) >> F in place; r as in [Note: who gets which bits] of ds_quant/rng.py."""
    vectors = block.vector_numel // VECTOR_NUMEL
    shape = (block.num_rows * vectors, VECTOR_NUMEL)
    bits = scratch.take("random bits", shape, dtype=torch.uint16, device=codes.device)
    first = address.first_vector + block.row * row_vectors + block.start // VECTOR_NUMEL
    philox.random_bits(address, first, bits)
    wide = scratch.take("random", shape, dtype=torch.int32, device=codes.device).copy_(bits)
    fraction = fraction_bits(fmt)
    if fraction < 16:
        wide.bitwise_right_shift_(16 - fraction)
    codes = codes.view(block.num_rows, block.padded_numel)
    codes[:, : block.vector_numel].add_(wide.view(block.num_rows, block.vector_numel))
    codes.bitwise_right_shift_(fraction)


def _store_codes(
    codes: torch.Tensor, out: torch.Tensor, layout: WireLayout, block: Block, bits: int
) -> None:
    """Pack the low bits of the codes of a block; codes past the end of a row become 0."""
    codes = codes.view(block.num_rows, block.padded_numel)[:, : block.vector_numel]
    codes[:, block.numel :].zero_()
    sections = plane_sections(out, layout, block, bits)
    if bits == 8:
        sections[0].copy_(codes)  # int32 -> uint8 keeps the lowest byte
        return
    narrow = scratch.take("narrow", tuple(codes.shape), dtype=torch.uint8, device=codes.device)
    packing.pack(narrow.copy_(codes), sections, bits=bits)


def _store_fp32(numbers: torch.Tensor, section: torch.Tensor) -> None:
    section.copy_(numbers.view(torch.uint8).view(section.shape))


# --- decode


def decode(
    wire: torch.Tensor,  # (rows, nbytes) uint8
    out: torch.Tensor,  # (rows, numel) floating point
    fmt: Format,
    *,
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned levels only
) -> None:
    """Decode every row and cast once to the dtype of `out`."""
    rows, numel = out.shape
    layout = layout_of(fmt, numel)
    for block in blocks(rows, numel, group_size=fmt.group_size, device=wire.device):
        values = _decode_block(wire, layout, block, fmt, levels)
        target = out[block.row : block.row + block.num_rows]
        target[:, block.start : block.start + block.numel].copy_(values[:, : block.numel])


def decode_sum(
    wire: torch.Tensor,  # (rows, nbytes) uint8
    out: torch.Tensor,  # (numel,) fp32
    fmt: Format,
    *,
    scale: float,
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned levels only
) -> None:
    """out = scale * (row 0 + row 1 + ...), fp32 sums in row order, multiplied once at the end."""
    numel = out.shape[0]
    layout = layout_of(fmt, numel)
    for block in blocks(wire.shape[0], numel, group_size=fmt.group_size, device=wire.device):
        values = _decode_block(wire, layout, block, fmt, levels)
        total = out[block.start : block.start + block.numel]
        for index, row in enumerate(values[:, : block.numel]):
            if block.row + index == 0:
                total.copy_(row)
            else:
                total.add_(row)
    if wire.shape[0] == 0:
        out.zero_()
    elif scale != 1.0:
        out.mul_(scale)


def _decode_block(
    wire: torch.Tensor,
    layout: WireLayout,
    block: Block,
    fmt: Format,
    levels: torch.Tensor | None,
) -> torch.Tensor:
    """Values of a block as (num_rows, padded_numel) fp32 scratch; undefined past its numel."""
    shape = (block.num_rows, block.padded_numel)
    values = scratch.take("values", shape, dtype=torch.float32, device=wire.device)
    codes = _load_codes(wire, layout, block, fmt)
    if fmt.levels == "learned":
        index = scratch.take("codes", codes.shape, dtype=torch.int32, device=wire.device)
        looked_up = scratch.take("looked up", codes.shape, dtype=torch.float32, device=wire.device)
        torch.index_select(levels, 0, index.copy_(codes).view(-1), out=looked_up.view(-1))
        values[:, : block.vector_numel].copy_(looked_up)
    else:
        values[:, : block.vector_numel].copy_(codes)
    groups = values.view(-1, fmt.group_size)
    groups.mul_(_load_fp32(wire, layout.scale_offset, block, fmt.group_size, "scale"))
    if layout.offset_offset is not None:
        groups.add_(_load_fp32(wire, layout.offset_offset, block, fmt.group_size, "offset"))
    return values


def _load_codes(wire: torch.Tensor, layout: WireLayout, block: Block, fmt: Format) -> torch.Tensor:
    """(num_rows, vector_numel): codes as uint8, or q as int8 for absmax."""
    sections = plane_sections(wire, layout, block, fmt.bits)
    if fmt.bits == 8 and fmt.has_offset:
        return sections[0]
    shape = (block.num_rows, block.vector_numel)
    codes = scratch.take("narrow", shape, dtype=torch.uint8, device=wire.device)
    if fmt.bits == 8:
        codes.copy_(sections[0])
    else:
        packing.unpack(sections, codes, bits=fmt.bits)
    if fmt.has_offset:
        return codes
    return codes.sub_(1 << (fmt.bits - 1)).view(torch.int8)


def _load_fp32(
    wire: torch.Tensor, base: int, block: Block, group_size: int, slot: str
) -> torch.Tensor:
    """Scales or offsets of a block as (groups, 1) fp32 scratch."""
    section = fp32_section(wire, base, block, group_size)
    numbers = scratch.take(slot, tuple(section.shape), dtype=torch.uint8, device=wire.device)
    return numbers.copy_(section).view(torch.float32).view(-1, 1)
