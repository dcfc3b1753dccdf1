"""The numbers of GroupCodec and of rotations in plain torch, on any device: the specification.

C++ and CUDA kernels equal this file bit for bit, so every step is one correctly rounded fp32
operation and no product is fused with a sum. It is written to be read; nothing reads a value back
to the host or keeps memory, so it may run on several streams at once.

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

q is clamped to its range; clamping T before r is added gives the same q. Groups without a usable
range: [Note: exceptional groups].

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

[Note: rotation numbers]
Natural (Sylvester) order, entries +-1. Stages of distance 1, 2, 4, ... block / 2; each stage maps
the pair (a, b) to (fl(a + b), fl(a - b)) in fp32. Signs, if any, multiply the input of the forward
transform and the output of the inverse, which is the same butterflies and then one multiplication
by fl(scale / block), because H H = block * I. Where every source of a sum has signs of its own,
each is transformed and multiplied by them before it is added; fl(scale / block) comes last.
Pairs are independent within a stage, so every order of work gives the same bits.

[Note: Gaussian levels]
Random signs and a Hadamard transform make any group look Gaussian; each value then goes to the
nearest of the levels that Lloyd and Max found for N(0, 1), and the scale makes the decoded group
unbiased over the signs (EDEN: Vargaftik et al., arXiv 2108.08842). It takes no random bits.
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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ds_quant.kernels.random_bits import (
    PHILOX_M0,
    PHILOX_M1,
    PHILOX_ROUNDS,
    PHILOX_W0,
    PHILOX_W1,
    Address,
    flips_of,
    shift_of,
)
from ds_quant.kernels.wire import (
    GroupFormat,
    WireLayout,
    ceil_div,
    layout_of,
    planes,
    round_up,
    scale_bytes,
)

# See [Note: exceptional groups] and [Note: Gaussian levels].
TINY = 2.0**-99  # groups below are zeros
HUGE_SCALE = 2.0**126  # groups with a larger scale are NaN
HUGE = 2.0**127  # Gaussian groups from here on are NaN
LARGEST_DENORMAL = 2.0**-126 - 2.0**-149
FLT_MAX = torch.finfo(torch.float32).max

# Elements of a run. On one core runs of 2^22, whose values leave the cache, take 40 times as long.
_RUN_NUMEL = {"cpu": 1 << 17}
_DEVICE_RUN_NUMEL = 1 << 24

_LOW32 = (1 << 32) - 1


def fraction_bits(fmt: GroupFormat) -> int:
    """F of [Note: numbers]: fixed-point bits below a code; code and fraction fit 23 bits."""
    if fmt.rounding != "stochastic":
        return 0
    return 15 if fmt.bits == 8 else 16


def code_of_zero(fmt: GroupFormat) -> int:
    return 0 if fmt.has_offset else 1 << (fmt.bits - 1)


# ---- random bits ----


def random_bits(address: Address, first: int, vectors: int, device: torch.device) -> Tensor:
    """The bits of ``vectors`` vectors from ``first`` on, (vectors, 8) int32 of 16 bits each.

    See [Note: who gets which bits] of random_bits.py. Products of 32-bit words wrap in int64, but
    keep all 64 bits.
    """
    start = (first + (1 << 63)) % (1 << 64) - (1 << 63)  # as int64
    index = torch.arange(vectors, dtype=torch.int64, device=device) + start
    c0, c1 = index & _LOW32, index >> 32 & _LOW32
    c2, c3 = (torch.full_like(index, word) for word in address.step_words)
    k0, k1 = address.key_words
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = PHILOX_M0 * c0, PHILOX_M1 * c2
        c0, c1 = (p1 >> 32 & _LOW32) ^ c1 ^ k0, p1 & _LOW32
        c2, c3 = (p0 >> 32 & _LOW32) ^ c3 ^ k1, p0 & _LOW32
        k0, k1 = k0 + PHILOX_W0 & _LOW32, k1 + PHILOX_W1 & _LOW32
    words = torch.stack([c0, c1, c2, c3], dim=1)
    return torch.stack([words & 0xFFFF, words >> 16], dim=2).int().view(-1, 8)


# ---- rotation ----


BLOCKS = (32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """Walsh-Hadamard transform of blocks of consecutive elements.

    block: 32, 64 or 128 elements.
    signs: stream of the sign flips before the transform, one pattern for all blocks: vector 0 is
        that of all ranks, k + 1 that of the k-th sender on the last hop; None for none. Without
        flips a block of equal values becomes one spike.
    """

    block: int
    signs: Address | None = None

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            raise ValueError(f"rotation block = {self.block}: allowed are {BLOCKS}")

    @property
    def flips(self) -> int | None:
        """Bit i set: element i of every block changes its sign. None: no flips."""
        return None if self.signs is None else flips_of(self.signs) & (1 << self.block) - 1

    def of(self, sender: int) -> Rotation:
        """Return the same with the signs of a sender on the last hop."""
        if self.signs is None:
            raise ValueError("signs = None: the rotation has no signs of senders")
        signs = Address(self.signs.key, self.signs.step, sender + 1)
        return Rotation(block=self.block, signs=signs)


def rotate(
    x: Tensor,  # (numel,) floating point
    out: Tensor,  # (blocks * block,) fp32
    rotation: Rotation,
) -> None:
    """out = H (signs * x) block by block, x filled up with zeros to whole blocks."""
    for start, stop in _runs(1, out.shape[0], rotation.block, x.device):
        out[start:stop] = _rotated(x.detach()[None, start:stop].float(), rotation)


def unrotate_(
    x: Tensor,  # (blocks * block,) fp32
    rotation: Rotation,
    *,
    scale: float = 1.0,
) -> None:
    """x = signs * (H x * (scale / block)), in place: the inverse of ``rotate``, times scale."""
    for start, stop in _runs(1, x.shape[0], rotation.block, x.device):
        x[start:stop] = _unrotated(x[start:stop], rotation, scale)


def _rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """(rows, numel) fp32 -> (rows, whole blocks)."""
    missing = -x.shape[1] % rotation.block
    blocks = torch.nn.functional.pad(x, (0, missing)).view(len(x), -1, rotation.block)
    return _hadamard(_flipped(blocks, rotation)).flatten(1)


def _unrotated(x: Tensor, rotation: Rotation, scale: float) -> Tensor:
    """(whole blocks,) fp32 -> the same."""
    blocks = _hadamard(x.view(-1, rotation.block)) * (scale / rotation.block)
    return _flipped(blocks, rotation).view(-1)


def _hadamard(x: Tensor) -> Tensor:
    """H of the last dimension, in stages of distance 1, 2, 4, ..."""
    distance = 1
    while distance < x.shape[-1]:
        a, b = x.view(*x.shape[:-1], -1, 2, distance).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).view(x.shape)
        distance *= 2
    return x


def _flipped(blocks: Tensor, rotation: Rotation) -> Tensor:
    """Multiply the elements of every block, the last dimension, by their signs."""
    if rotation.flips is None:
        return blocks
    places = torch.arange(32, device=blocks.device)
    words = [rotation.flips >> start & _LOW32 for start in range(0, rotation.block, 32)]
    bits = torch.cat([torch.full_like(places, word) >> places & 1 for word in words])
    return blocks * (1 - 2 * bits).float()


# ---- codes and ranges of groups ----


# Codes (groups, size) int32, scales and offsets (groups, 1), offsets None for none.
_Quantized = tuple[Tensor, Tensor, Tensor | None]


def _uniform(
    x: Tensor,  # (groups, size) fp32
    fmt: GroupFormat,
    address: Address | None,
    levels: Tensor | None,  # learned ones
    random: Tensor | None,  # (groups, size) int32 of 16 bits
) -> _Quantized:
    scale, offset, tiny, nan = _ranges(x, fmt, address)
    zero, fraction = code_of_zero(fmt), fraction_bits(fmt)
    inverse = (scale.reciprocal() * 2.0**fraction).masked_fill(tiny | nan, 0.0)
    y = (x if offset is None else x - offset) * inverse
    if levels is not None:
        codes = torch.bucketize(y, (levels[1:] + levels[:-1]) / 2).masked_fill(tiny, 0)
    else:
        highest = (1 << fmt.bits) - 1
        lowest = 1 if zero else 0
        codes = y.clamp_(lowest - zero << fraction, highest - zero << fraction).round_().int()
        codes += zero << fraction
        if random is not None:
            codes = (codes + (random >> 16 - fraction) >> fraction).clamp_(lowest, highest)
    return codes.masked_fill_(nan, zero), scale.masked_fill(nan, float("nan")), offset


def _ranges(
    x: Tensor, fmt: GroupFormat, address: Address | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Scale, offset, and which groups are tiny and non-finite, (groups, 1) each.

    The scale of a non-finite group is not NaN yet: the caller writes that.
    """
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    largest = torch.maximum(high, -low)
    span = high - low if fmt.has_offset else largest
    steps = (1 << fmt.bits) - 1 if fmt.has_offset else (1 << (fmt.bits - 1)) - 1
    # By a tensor: torch on CUDA multiplies by the reciprocal of a number.
    scale = span / span.new_full((), float(steps))
    tiny = span < TINY
    nan = ~(tiny | (scale <= HUGE_SCALE))  # negated, because a NaN compares False
    scale = scale.masked_fill(tiny, 0.0)
    if not fmt.has_offset:
        return scale, None, tiny, nan
    offset = _flushed(low).masked_fill(tiny & (largest < TINY), 0.0)
    if fmt.rounding == "random_shift":
        offset = _flushed(offset + _flushed(scale * shift_of(_needed(address, fmt))))
        nan = nan | ~(offset.abs() <= FLT_MAX)
    return scale, offset.masked_fill(nan, 0.0), tiny, nan


def _flushed(numbers: Tensor) -> Tensor:
    """Denormals and negative zeros become +0; NaN stays."""
    return torch.nn.functional.hardshrink(numbers, LARGEST_DENORMAL)


# --- Gaussian levels


GAUSSIAN_GROUP = 128  # elements: of a group, and of the block of the rotation before

_MAGNITUDES = {
    2: (0.452780035, 1.510417608),
    3: (0.245094179, 0.756005281, 1.343909279, 2.151945705),
    4: (
        *(0.128395030, 0.388048299, 0.656759119, 0.942340456),
        *(1.256231197, 1.618046386, 2.069017227, 2.732589571),
    ),
    5: (
        *(0.065889660, 0.198051830, 0.331378306, 0.466699523),
        *(0.604933624, 0.747135704, 0.894565117, 1.048783320),
        *(1.211804381, 1.386340340, 1.576228079, 1.787233218),
        *(2.028728399, 2.317739404, 2.691119577, 3.260732493),
    ),
}
_MANTISSA = 23  # bits
_FOLDED_BITS = (3, 4, 0, 1, 2, 5, 6)  # of a place in a group


@cache
def gaussian_table(bits: int, device: torch.device) -> Tensor:
    """(2^bits,) fp32: the level of every code."""
    with torch.inference_mode(False):
        magnitudes = torch.tensor(_MAGNITUDES[bits], dtype=torch.float32, device=device)
        return torch.cat([-magnitudes, magnitudes])


def _gaussian(
    x: Tensor,  # (groups, 128) fp32
    levels: Tensor,  # (2^bits,) fp32, those of ``gaussian_table``
) -> _Quantized:
    """Quantize by the steps of [Note: Gaussian levels], with its symbols in the comments."""
    half = levels.numel() // 2
    magnitudes = levels[half:]  # t_k
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2  # h_k
    largest = x.abs().amax(1, keepdim=True)  # m
    exponent = largest.view(torch.int32) >> _MANTISSA  # e + 127, as fp32 holds it
    inverse_power = ((254 - exponent) << _MANTISSA).view(torch.float32)  # 2^-e
    units = x * inverse_power  # u
    squares = units * units
    energy = _folded(squares)  # S
    inverse_mean = (energy / GAUSSIAN_GROUP).reciprocal()
    codes = torch.bucketize(squares * inverse_mean, middles * middles)  # k
    projection = _folded(units.abs() * magnitudes[codes])  # P
    scale = energy * projection.reciprocal()
    scale = (scale * (exponent << _MANTISSA).view(torch.float32)).bfloat16()
    tiny, nan = largest < TINY, ~(largest < HUGE)
    codes = (codes + half * ~torch.signbit(x)).masked_fill(tiny | nan, half)
    # After the cast, because casts differ in the bits of a NaN.
    return codes, scale.masked_fill(tiny, 0.0).masked_fill(nan, float("nan")), None


def _folded(values: Tensor) -> Tensor:
    """(groups, 128) -> (groups, 1): sums in the order of [Note: Gaussian levels]."""
    values, left = values.view(-1, *[2] * 7), [6, 5, 4, 3, 2, 1, 0]
    for bit in _FOLDED_BITS:
        first, second = values.unbind(1 + left.index(bit))
        values = first + second
        left.remove(bit)
    return values.view(-1, 1)


# ---- messages ----


def encode(
    x: Tensor,  # (rows, numel) floating point
    out: Tensor,  # (rows, nbytes) uint8
    fmt: GroupFormat,
    *,
    address: Address | None,
    levels: Tensor | None,  # (2^bits,) fp32, learned and Gaussian levels only
    base: Tensor | None = None,  # (rows, numel) floating point, subtracted from x in fp32
    rotation: Rotation | None = None,  # of x, or x - base; the wire holds whole blocks
) -> None:
    """Write the wire bytes of every row, padding included."""
    (rows, numel), group = x.shape, fmt.group_size
    layout = layout_of(fmt, round_up(numel, rotation.block if rotation else 1))
    out.zero_()
    for start, stop in _runs(rows, layout.numel, group, x.device):
        part = x.detach()[:, start:stop].float()
        if base is not None:
            part = part - base.detach()[:, start:stop].float()
        if rotation is not None:
            part = _rotated(part, rotation)
        random = _random_of_groups(part, fmt, address, layout, start)
        groups = _whole_groups(part, group).view(-1, group)
        codes, scales, offsets = _quantized(groups, fmt, address, levels, random)
        codes = codes.view(rows, -1)[:, : round_up(stop - start, 8)].contiguous()
        codes[:, stop - start :].zero_()
        sections, scales_at, offsets_at = _sections(out, layout, fmt, start, stop)
        _pack(codes, sections, fmt)
        scales_at.copy_(scales.view(rows, -1).view(torch.uint8))
        if offsets is not None and offsets_at is not None:
            offsets_at.copy_(offsets.view(rows, -1).view(torch.uint8))


def _quantized(
    groups: Tensor,  # (groups, size) fp32
    fmt: GroupFormat,
    address: Address | None,
    levels: Tensor | None,
    random: Tensor | None,  # (groups, size) int32 of 16 bits
) -> _Quantized:
    if not fmt.is_gaussian:
        return _uniform(groups, fmt, address, levels, random)
    if levels is None:
        raise ValueError("levels = None: Gaussian codes need their table")
    return _gaussian(groups, levels)


def decode(
    wire: Tensor,  # (rows, nbytes) uint8
    out: Tensor,  # (rows, numel) floating point
    fmt: GroupFormat,
    *,
    levels: Tensor | None,  # (2^bits,) fp32, learned and Gaussian levels only
    add: bool = False,  # in fp32 to what `out` holds
) -> None:
    """Decode every row and cast once to the dtype of `out`."""
    for start, stop, values in _decoded(wire, fmt, out.shape[1], levels):
        part = out[:, start:stop]
        part.copy_(values + part if add else values)


def decode_sum(
    wire: Tensor,  # (rows, nbytes) uint8
    out: Tensor,  # (numel,) floating point
    fmt: GroupFormat,
    *,
    scale: float,
    own: tuple[int, Tensor] | None,  # place and values, (numel on the wire,) floating point
    levels: Tensor | None,  # (2^bits,) fp32, learned and Gaussian levels only
    rotation: Rotation | None = None,  # to undo; the wire holds whole blocks
    own_signs: bool = False,  # row k has those of the k-th sender
) -> None:
    """out = scale * (row 0 + row 1 + ...), fp32 sums in row order, multiplied once at the end.

    ``own[1]`` is added as row ``own[0]``, which the wire leaves out. With a rotation the sum is
    rotated back before it is multiplied; with ``own_signs`` every row is, before it is added.
    """
    if own_signs and rotation is None:
        raise ValueError("own_signs = True with rotation = None: only rotations have signs")
    block = rotation.block if rotation else 1
    numel, factor = round_up(out.shape[0], block), scale / block
    for start, stop, values in _decoded(wire, fmt, numel, levels):
        rows = list(values)
        if own is not None:
            rows.insert(own[0], own[1][start:stop].float())
        total = _added_up(rows, rotation if own_signs else None)
        if rotation is not None and not own_signs:
            total = _unrotated(total, rotation, scale)
        elif factor != 1.0:
            total *= factor
        out[start:stop].copy_(total[: out.shape[0] - start])


def _added_up(rows: Sequence[Tensor], rotation: Rotation | None) -> Tensor:
    """Return the sum of fp32 rows in their order.

    rotation: undone in every row, with the signs of its sender; not divided by its block.
    """
    if rotation is not None:
        rows = [_unrotated(x, rotation.of(k), rotation.block) for k, x in enumerate(rows)]
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _runs(rows: int, numel: int, unit: int, device: torch.device) -> list[tuple[int, int]]:
    """Columns [start, stop) of whole units, as many elements as stay in cache."""
    limit = _RUN_NUMEL.get(device.type, _DEVICE_RUN_NUMEL)
    step = max(1, limit // max(1, rows) // unit) * unit
    return [(start, min(start + step, numel)) for start in range(0, numel if rows else 0, step)]


def _whole_groups(values: Tensor, group: int) -> Tensor:
    """Fill a short last group up with its own first element, which leaves its range alone."""
    missing = -values.shape[1] % group
    if not missing:
        return values.contiguous()
    first = values[:, values.shape[1] + missing - group, None]
    return torch.cat([values, first.expand(-1, missing)], dim=1)


def _needed(address: Address | None, fmt: GroupFormat) -> Address:
    """Return the address of the random bits. ValueError if there is none."""
    if address is None:
        raise ValueError(f"address = None: rounding {fmt.rounding!r} needs an Address")
    return address


def _random_of(x: Tensor, address: Address, layout: WireLayout, start: int) -> Tensor:
    """The random bits of x, columns from ``start`` on: (rows, whole vectors) int32."""
    step, first = address.vectors_per_row(layout.numel), address.first_vector + start // 8
    firsts, vectors = [first + row * step for row in range(len(x))], ceil_div(x.shape[1], 8)
    rows = [random_bits(address, first, vectors, x.device).view(-1) for first in firsts]
    return torch.stack(rows)


def _random_of_groups(
    x: Tensor, fmt: GroupFormat, address: Address | None, layout: WireLayout, start: int
) -> Tensor | None:
    """The random bits of x in groups, (groups, size) int32; None if the rounding takes none."""
    if fmt.rounding != "stochastic":
        return None
    random = _random_of(x, _needed(address, fmt), layout, start)
    return _whole_groups(random, fmt.group_size).view(-1, fmt.group_size)


def _sections(
    wire: Tensor, layout: WireLayout, fmt: GroupFormat, start: int, stop: int
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Views (rows, bytes) of what messages hold of some columns: planes, scales and offsets."""
    first_group, groups = start // fmt.group_size, ceil_div(stop - start, fmt.group_size)

    def of_groups(base: int, width: int) -> Tensor:
        return wire.narrow(1, base + first_group * width, groups * width)

    parts = [
        wire.narrow(1, base + start // 8 * width, ceil_div(stop - start, 8) * width)
        for base, width in zip(layout.plane_offsets, planes(fmt.bits), strict=True)
    ]
    offsets = None if layout.offset_offset is None else of_groups(layout.offset_offset, 4)
    return parts, of_groups(layout.scale_offset, scale_bytes(fmt)), offsets


def _pack(codes: Tensor, sections: Sequence[Tensor], fmt: GroupFormat) -> None:
    """Write the planes of codes (rows, 8 n) int32."""
    shift = 0
    for section, width in zip(sections, planes(fmt.bits), strict=True):
        section.copy_(_packed(codes, width, shift))
        shift += width


def _packed(codes: Tensor, width: int, shift: int) -> Tensor:
    """(rows, 8 n) int32 -> (rows, width n) uint8: one plane."""
    part = (codes >> shift).to(torch.uint8)
    if width == 8:
        return part
    parts = (part & (1 << width) - 1).view(len(codes), -1, 8 // width).unbind(-1)
    packed = parts[0]
    for place, codes in enumerate(parts[1:], start=1):
        packed = packed + (codes << width * place)
    return packed


def _unpacked(section: Tensor, width: int) -> Tensor:
    """(rows, width n) uint8 -> (rows, 8 n)."""
    mask = (1 << width) - 1
    return torch.stack([section >> place & mask for place in range(0, 8, width)], -1).flatten(1)


def _decoded(
    wire: Tensor, fmt: GroupFormat, numel: int, levels: Tensor | None
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield start, stop and the values (rows, stop - start) fp32 of runs of columns."""
    layout = layout_of(fmt, numel)
    for start, stop in _runs(max(1, len(wire)), numel, fmt.group_size, wire.device):
        count = stop - start
        sections, scales, offsets = _sections(wire, layout, fmt, start, stop)
        codes = _joined_planes(sections, fmt)[:, :count]
        values = levels[codes.long()] if levels is not None else codes.float() - code_of_zero(fmt)
        padded = torch.nn.functional.pad(values, (0, -count % fmt.group_size))
        groups = padded.unflatten(1, (-1, fmt.group_size))
        groups = groups * _numbers(scales, torch.bfloat16 if fmt.is_gaussian else torch.float32)
        if offsets is not None:
            groups = groups + _numbers(offsets, torch.float32)
        yield start, stop, groups.flatten(1)[:, :count]


def _joined_planes(sections: Sequence[Tensor], fmt: GroupFormat) -> Tensor:
    """Return the codes (rows, 8 n) of the planes of a message."""
    widths = planes(fmt.bits)
    codes = _unpacked(sections[0], widths[0])
    shift = widths[0]
    for section, width in zip(sections[1:], widths[1:], strict=True):
        codes = codes | _unpacked(section, width) << shift
        shift += width
    return codes


def _numbers(section: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes of scales or offsets, at any alignment, as (rows, groups, 1) fp32."""
    return section.clone(memory_format=torch.contiguous_format).view(dtype).float().unsqueeze(2)
