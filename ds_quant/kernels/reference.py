"""Reference kernels of GroupCodec, in torch, on any device: the specification of the numbers.

CUDA kernels equal this file bit for bit, so every step is one correctly rounded fp32 operation
and no product is fused with a sum.

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
integer by the addition itself. Clamping T before r is added gives the same q.
Groups without a usable range: [Note: exceptional groups]. Gaussian levels are an affair of their
own, [Note: Gaussian levels] of gaussian.py.

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

from ds_quant.kernels import gaussian, packing, philox, random_bits, scratch
from ds_quant.kernels.hadamard import BlockRotation, rotate, rotated_rows, unrotate_  # noqa: F401
from ds_quant.kernels.packing import (
    Block,
    Format,
    blocks,
    gaps,
    group_section,
    has_table,
    layout_of,
    plane_sections,
    scale_bytes,
    section,
)
from ds_quant.kernels.wire import FP32_BYTES, VECTOR_NUMEL, WireLayout, round_up

# ---- ranges of groups ----


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


# ---- encode and decode ----


_UNIT = 2.0**23  # floats in [2^23, 2^24) are the integers, one per bit pattern


# --- encode


def encode(
    x: torch.Tensor,  # (rows, numel) floating point
    out: torch.Tensor,  # (rows, nbytes) uint8
    fmt: Format,
    *,
    address: random_bits.Address | None,
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned and Gaussian levels only
    base: torch.Tensor | None = None,  # (rows, numel) floating point, subtracted from x in fp32
    rotation: BlockRotation | None = None,  # of x, or x - base; the wire holds whole blocks
) -> None:
    """Write the wire bytes of every row, padding included."""
    if rotation is not None:
        x, base = rotated_rows(x, base, rotation), None
    rows, numel = x.shape
    layout = layout_of(fmt, numel)
    x = x.detach()
    for start, length in gaps(layout, fmt.bits, scale_bytes(fmt)):
        out.narrow(1, start, length).zero_()
    shift = random_bits.shift_of(address) if fmt.rounding == "random_shift" else None
    for block in blocks(rows, numel, group_size=fmt.group_size, device=x.device):
        random = None
        if fmt.rounding == "stochastic":  # first, because it uses the scratch of the values
            random = _random(block, fmt, address, numel, x.device)
        groups = _load_groups(x, base, block, fmt.group_size)
        if fmt.is_gaussian:
            codes, scales = gaussian.quantize(groups, levels)
            _store_codes(codes, plane_sections(out, layout, block, fmt.bits), block, fmt)
            _store_numbers(scales, out, layout.scale_offset, block, fmt)
            continue
        ranges = ranges_of(groups, fmt, shift)
        codes = _codes(groups, ranges, fmt, levels)
        if random is not None:
            fixed = codes.view(block.num_rows, block.padded_numel)
            fixed[:, : block.vector_numel].add_(random)
            codes.bitwise_right_shift_(fraction_bits(fmt))
        if ranges.code_of_zero is not None:
            codes.masked_fill_(ranges.code_of_zero, 0 if fmt.has_offset else 1 << (fmt.bits - 1))
        _store_codes(codes, plane_sections(out, layout, block, fmt.bits), block, fmt)
        _store_numbers(ranges.scale, out, layout.scale_offset, block, fmt)
        if layout.offset_offset is not None:
            _store_numbers(ranges.offset, out, layout.offset_offset, block, fmt)


def _take_values(block: Block, device: torch.device) -> torch.Tensor:
    shape = (block.num_rows, block.padded_numel)
    return scratch.take("values", shape, dtype=torch.float32, device=device)


def _load_groups(
    x: torch.Tensor, base: torch.Tensor | None, block: Block, group_size: int
) -> torch.Tensor:
    """A block of x - base as (groups, group_size) fp32: scratch, or x where it has that form.

    A short last group is filled up with its own first element, which leaves its range alone.
    """
    source = section(x, block, block.start, block.numel)
    whole = block.numel == block.padded_numel
    if whole and base is None and source.dtype == torch.float32 and source.is_contiguous():
        return source.view(-1, group_size)
    values = _take_values(block, x.device)
    filled = values if whole else values[:, : block.numel]
    filled.copy_(source)
    if base is not None:
        filled.sub_(section(base.detach(), block, block.start, block.numel))
    if not whole:
        first = block.padded_numel - group_size
        values[:, block.numel :] = values[:, first : first + 1]
    return values.view(-1, group_size)


def _codes(
    groups: torch.Tensor, ranges: Ranges, fmt: Format, levels: torch.Tensor | None
) -> torch.Tensor:
    """Codes in the low bits, or T + zero for stochastic rounding, as (groups, size) int32.

    groups may be the caller's x and is read only; the result is scratch.
    """
    values = scratch.take("values", tuple(groups.shape), dtype=torch.float32, device=groups.device)
    if ranges.offset is not None:
        groups = torch.sub(groups, ranges.offset, out=values)
    torch.mul(groups, ranges.inverse, out=values)
    if fmt.levels == "learned":
        middles = (levels[1:] + levels[:-1]) / 2
        out = scratch.take("codes", tuple(values.shape), dtype=torch.int32, device=values.device)
        return torch.bucketize(values, middles, out_int32=True, out=out)
    fraction = fraction_bits(fmt)
    if fmt.rounding == "random_shift" or (fraction and fmt.bits == 8):
        # Elsewhere |fl(x * inv)| exceeds the range by far less than 1/2, which nearest rounding
        # forgives, and _store_codes clamps what stochastic rounding makes of it.
        low, high = code_range(fmt)
        zero = 0 if fmt.has_offset else 1 << (fmt.bits - 1)
        values.clamp_(float((low - zero) << fraction), float((high - zero) << fraction))
    zero = 0 if fmt.has_offset else 1 << (fmt.bits - 1 + fraction)
    return values.add_(_UNIT + zero).view(torch.int32)


def _random(
    block: Block, fmt: Format, address: random_bits.Address, numel: int, device: torch.device
) -> torch.Tensor:
    """r of [Note: numbers] for the elements of a block, (num_rows, vector_numel) int32."""
    vectors, step = block.vector_numel // VECTOR_NUMEL, address.vectors_per_row(numel)
    shape = (block.num_rows * vectors, VECTOR_NUMEL)
    bits = scratch.take("narrow", shape, dtype=torch.uint16, device=device)
    first = address.first_vector + block.row * step + block.start // VECTOR_NUMEL
    runs = (bits,) if step == vectors else bits.split(vectors)  # several rows are whole ones
    for row, run in enumerate(runs):
        philox.random_bits(address, first + row * step, run)
    shape = (block.num_rows, block.vector_numel)
    random = scratch.take("random", shape, dtype=torch.int32, device=device)
    random.copy_(bits.view(shape))
    if fraction_bits(fmt) < 16:
        random.bitwise_right_shift_(16 - fraction_bits(fmt))
    return random


def _store_codes(
    codes: torch.Tensor, sections: list[torch.Tensor], block: Block, fmt: Format
) -> None:
    """Pack the low bits of the codes of a block; codes past the end of a row become 0."""
    codes = codes.view(block.num_rows, block.padded_numel)
    if block.vector_numel != block.padded_numel:
        codes = codes[:, : block.vector_numel]
    if block.vector_numel != block.numel:
        codes[:, block.numel :].zero_()
    if fmt.bits == 8:
        sections[0].copy_(codes)  # int32 -> uint8 keeps the lowest byte
        return
    narrow = scratch.take("narrow", tuple(codes.shape), dtype=torch.uint8, device=codes.device)
    narrow.copy_(codes)
    if fmt.rounding == "stochastic":
        narrow.clamp_(*code_range(fmt))  # at most one off, and 2^b still fits a byte
    if block.vector_numel != block.numel:
        narrow[:, block.numel :].zero_()
    packing.pack(narrow, sections, bits=fmt.bits)


def _store_numbers(
    numbers: torch.Tensor, out: torch.Tensor, base: int, block: Block, fmt: Format
) -> None:
    target = group_section(out, base, block, fmt.group_size, numbers.element_size())
    target.copy_(numbers.view(block.num_rows, -1).view(torch.uint8))


# --- decode


def decode(
    wire: torch.Tensor,  # (rows, nbytes) uint8
    out: torch.Tensor,  # (rows, numel) floating point
    fmt: Format,
    *,
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned and Gaussian levels only
    add: bool = False,  # in fp32 to what `out` holds
) -> None:
    """Decode every row and cast once to the dtype of `out`."""
    rows, numel = out.shape
    layout = layout_of(fmt, numel)
    for block in blocks(rows, numel, group_size=fmt.group_size, device=wire.device):
        target = section(out, block, block.start, block.numel)
        direct = not add and block.numel == block.padded_numel and target.dtype == torch.float32
        values = target if direct and target.is_contiguous() else _take_values(block, wire.device)
        _decode_block(wire, values, layout, block, fmt, levels)
        if values is not target:
            decoded = values[:, : block.numel]
            target.copy_(decoded.add_(target) if add else decoded)


def decode_sum(
    wire: torch.Tensor,  # (rows, nbytes) uint8
    out: torch.Tensor,  # (numel,) fp32
    fmt: Format,
    *,
    scale: float,
    own: tuple[int, torch.Tensor] | None,  # place and values, (numel on the wire,) floating point
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned and Gaussian levels only
    rotation: BlockRotation | None = None,  # to undo; the wire holds whole blocks
) -> None:
    """out = scale * (row 0 + row 1 + ...), fp32 sums in row order, multiplied once at the end.

    ``own[1]`` is added as row ``own[0]``, which the wire leaves out. With a rotation the sum is
    rotated back before it is multiplied.
    """
    if rotation is not None:
        total = out.new_empty(round_up(out.shape[0], rotation.block))
        decode_sum(wire, total, fmt, scale=1.0, own=own, levels=levels)
        unrotate_(total, rotation, scale=scale)
        out.copy_(total[: out.shape[0]])
        return
    layout = layout_of(fmt, out.shape[0])
    for block in blocks(wire.shape[0], layout.numel, group_size=fmt.group_size, device=wire.device):
        values = _take_values(block, wire.device)
        _decode_block(wire, values, layout, block, fmt, levels)
        total = out[block.start : block.start + block.numel]
        rows = list(values[:, : block.numel].unbind(0))
        is_last = block.row + block.num_rows == wire.shape[0]
        if own is not None and own[0] - block.row in range(block.num_rows + is_last):
            rows.insert(own[0] - block.row, own[1][block.start : block.start + block.numel])
        for index, row in enumerate(rows, start=block.row):
            total.copy_(row) if index == 0 else total.add_(row)
    if wire.shape[0] == 0:
        out.zero_() if own is None else out.copy_(own[1])
    if scale != 1.0:
        out.mul_(scale)


def _decode_block(
    wire: torch.Tensor,  # (rows, nbytes) uint8
    values: torch.Tensor,  # (num_rows, padded_numel) fp32, contiguous
    layout: WireLayout,
    block: Block,
    fmt: Format,
    levels: torch.Tensor | None,
) -> None:
    """Fill `values` with the block; what lies past the end of a row is undefined."""
    codes = _load_codes(wire, layout, block, fmt)
    decoded = values
    if block.vector_numel != block.padded_numel:
        decoded = values[:, : block.vector_numel]
    if has_table(fmt):
        shape, device = tuple(codes.shape), wire.device
        index = scratch.take("codes", shape, dtype=torch.int32, device=device).copy_(codes)
        looked_up = scratch.take("looked up", shape, dtype=torch.float32, device=device)
        torch.index_select(levels, 0, index.view(-1), out=looked_up.view(-1))
        codes = looked_up
    decoded.copy_(codes)
    groups = values.view(-1, fmt.group_size)
    groups.mul_(_load_numbers(wire, layout.scale_offset, block, fmt.group_size, scale_bytes(fmt)))
    if layout.offset_offset is not None:
        groups.add_(_load_numbers(wire, layout.offset_offset, block, fmt.group_size, FP32_BYTES))


def _load_codes(wire: torch.Tensor, layout: WireLayout, block: Block, fmt: Format) -> torch.Tensor:
    """(num_rows, vector_numel): codes as uint8, or q as int8 for absmax."""
    sections = plane_sections(wire, layout, block, fmt.bits)
    if fmt.bits == 8 and fmt.has_offset:
        return sections[0]
    shape = (block.num_rows, block.vector_numel)
    codes = scratch.take("narrow", shape, dtype=torch.uint8, device=wire.device)
    zero = 0 if fmt.has_offset or fmt.is_gaussian else 1 << (fmt.bits - 1)
    if fmt.bits == 8:
        return torch.sub(sections[0], zero, out=codes).view(torch.int8)
    packing.unpack(sections, codes, bits=fmt.bits)
    return codes.sub_(zero).view(torch.int8) if zero else codes


def _load_numbers(
    wire: torch.Tensor, base: int, block: Block, group_size: int, width: int
) -> torch.Tensor:
    """Scales or offsets of a block, fp32 or bf16, as (groups, 1) scratch."""
    source = group_section(wire, base, block, group_size, width)
    shape = (block.num_rows, block.padded_numel // group_size)
    dtype = torch.float32 if width == FP32_BYTES else torch.bfloat16
    numbers = scratch.take("numbers", shape, dtype=dtype, device=wire.device)
    numbers.view(torch.uint8).copy_(source)
    return numbers.view(-1, 1)
