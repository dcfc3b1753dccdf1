"""Pack codes into bit planes, and cut messages into blocks that stay in cache.

A pass takes one block: several whole rows of a small tensor, or a run of groups of one long row,
so that its scratch stays in cache.

The layout is [Note: wire layout] of wire.py. A plane of width p holds 8 / p codes per
byte; as many code bytes are viewed as one little-endian word and folded onto its lowest byte.
Words are 2, 4 or 8 bytes, so rows hold whole vectors of 8 codes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from ds_quant.kernels import scratch
from ds_quant.kernels.wire import (
    BF16_BYTES,
    FP32_BYTES,
    VECTOR_NUMEL,
    WireLayout,
    ceil_div,
    planes,
    round_up,
    wire_layout,
)

# ---- bit planes ----


# width -> (word dtype, left shifts that spread the lowest byte, mask after each shift)
_WORDS = {
    4: (torch.int16, ((4, 0x0F0F),)),
    2: (torch.int32, ((12, 0x000F000F), (6, 0x03030303))),
    1: (
        torch.int64,
        ((28, 0x0000000F0000000F), (14, 0x0003000300030003), (7, 0x0101010101010101)),
    ),
}


def plane_bytes(numel: int, width: int) -> int:
    """Bytes of a plane of `numel` codes (a multiple of 8) of `width` bits."""
    return numel // VECTOR_NUMEL * width


def pack(codes: torch.Tensor, sections: list[torch.Tensor], *, bits: int) -> None:
    """Write the planes of `codes` (rows, numel) uint8, numel a multiple of 8, contiguous.

    sections: one (rows, plane_bytes) uint8 tensor per plane, rows may be strided. 2 to 7 bits.
    """
    widths = planes(bits)
    shift = 0
    for width, section in zip(widths, sections, strict=True):
        plane = codes
        if len(widths) > 1:
            plane = scratch.take("plane", codes.shape, dtype=torch.uint8, device=codes.device)
            torch.bitwise_right_shift(codes, shift, out=plane)
            plane.bitwise_and_((1 << width) - 1)
        dtype, spreads = _WORDS[width]
        words = plane.view(dtype)
        folded = scratch.take("words", words.shape, dtype=dtype, device=codes.device)
        for position, (distance, _) in enumerate(reversed(spreads)):
            source = words if position == 0 else folded
            shifted = scratch.take("shifted", words.shape, dtype=dtype, device=codes.device)
            torch.bitwise_right_shift(source, distance, out=shifted)
            torch.bitwise_or(source, shifted, out=folded)
        section.copy_(folded)  # keeps the lowest byte of each word
        shift += width


def unpack(sections: list[torch.Tensor], codes: torch.Tensor, *, bits: int) -> None:
    """Inverse of `pack`: fill `codes` (rows, numel) uint8, contiguous, from its planes."""
    shift = 0
    for width, section in zip(planes(bits), sections, strict=True):
        dtype, spreads = _WORDS[width]
        shape = (codes.shape[0], codes.shape[1] // dtype.itemsize)
        words = codes.view(dtype)
        if shift:
            words = scratch.take("words", shape, dtype=dtype, device=codes.device)
        shifted = scratch.take("shifted", shape, dtype=dtype, device=codes.device)
        words.copy_(section)
        for distance, mask in spreads:
            torch.bitwise_left_shift(words, distance, out=shifted)
            words.bitwise_or_(shifted).bitwise_and_(mask)
        if shift:
            plane = words.view(torch.uint8)
            codes.bitwise_or_(plane.bitwise_left_shift_(shift))
        shift += width


# ---- blocks of a message ----


# Elements per pass, so that scratch (about 14 bytes each) fits the third-level cache. Measured on
# one core with AVX2, at 2^18 / 2^19 / 2^20 / 2^21: int8 encode 1.11 / 0.89 / 0.80 / 0.82 ns per
# element, int4 stochastic 4.8 / 3.9 / 3.9 / 4.3; below 2^19 the cost of a call dominates.
_CHUNK_NUMEL = {"cpu": 1 << 20}
_DEVICE_CHUNK_NUMEL = 1 << 24  # devices without that concern


class Format(Protocol):
    """The part of a codec that the kernels read; GroupCodec has it."""

    bits: int
    group_size: int
    rounding: str  # nearest, stochastic or random_shift
    levels: str  # uniform or learned
    backend: str  # auto or torch: which kernels, not what they compute

    @property
    def has_offset(self) -> bool: ...

    @property
    def is_gaussian(self) -> bool: ...  # [Note: Gaussian levels] of gaussian.py

    def table(self, levels: torch.Tensor | None, device: torch.device) -> torch.Tensor | None: ...


class Block(NamedTuple):
    """Rows [row, row + num_rows) and elements [start, start + numel), start on a group."""

    row: int
    num_rows: int
    start: int
    numel: int
    padded_numel: int  # whole groups
    vector_numel: int  # whole vectors of 8


def layout_of(fmt: Format, numel: int) -> WireLayout:
    """Wire layout of one row of `numel` elements."""
    return wire_layout(
        numel, bits=fmt.bits, group_size=fmt.group_size, has_offset=fmt.has_offset,
        scale_bytes=scale_bytes(fmt),
    )  # fmt: skip


def scale_bytes(fmt: Format) -> int:
    """Bytes of the scale of a group."""
    return BF16_BYTES if fmt.is_gaussian else FP32_BYTES


def has_table(fmt: Format) -> bool:
    """Whether a code is the index of a level."""
    return fmt.is_gaussian or fmt.levels == "learned"


def blocks(rows: int, numel: int, *, group_size: int, device: torch.device) -> tuple[Block, ...]:
    """Blocks of at most a chunk: several whole rows, or a run of groups of one row.

    Rows follow each other fastest, so that a sum over rows stays in cache.
    """
    chunk = _CHUNK_NUMEL.get(device.type, _DEVICE_CHUNK_NUMEL)
    return _cut(rows, numel, group_size, chunk)


@lru_cache(maxsize=4096)
def _cut(rows: int, numel: int, group_size: int, chunk: int) -> tuple[Block, ...]:
    if rows == 0 or numel == 0:
        return ()
    chunk = max(chunk // group_size, 1) * group_size
    rows_per_block = max(chunk // round_up(numel, group_size), 1)
    found = []
    for start in range(0, numel, chunk):
        count = min(chunk, numel - start)
        lengths = (count, round_up(count, group_size), round_up(count, VECTOR_NUMEL))
        for row in range(0, rows, rows_per_block):
            found.append(Block(row, min(rows_per_block, rows - row), start, *lengths))
    return tuple(found)


def section(tensor: torch.Tensor, block: Block, start: int, length: int) -> torch.Tensor:
    """Columns [start, start + length) of the rows of a block: (num_rows, length)."""
    if block.num_rows != tensor.shape[0]:
        tensor = tensor.narrow(0, block.row, block.num_rows)
    return tensor.narrow(1, start, length)


def plane_sections(
    wire: torch.Tensor, layout: WireLayout, block: Block, bits: int
) -> list[torch.Tensor]:
    """The parts of the planes of `wire` (rows, nbytes) that hold the codes of a block."""
    sections = []
    for base, width in zip(layout.plane_offsets, planes(bits), strict=True):
        first = base + plane_bytes(block.start, width)
        nbytes = plane_bytes(block.vector_numel, width)
        sections.append(section(wire, block, first, nbytes))
    return sections


def group_section(
    wire: torch.Tensor, base: int, block: Block, group_size: int, width: int
) -> torch.Tensor:
    """Bytes (num_rows, width * groups) of the scales or offsets of a block; any alignment."""
    first = base + block.start // group_size * width
    return section(wire, block, first, block.padded_numel // group_size * width)


@lru_cache(maxsize=4096)
def gaps(layout: WireLayout, bits: int, scale_bytes: int) -> tuple[tuple[int, int], ...]:
    """(start, length) of the bytes of a row between and after its sections."""
    vectors = ceil_div(layout.numel, VECTOR_NUMEL)
    sections = [
        (base, plane_bytes(vectors * VECTOR_NUMEL, width))
        for base, width in zip(layout.plane_offsets, planes(bits), strict=True)
    ]
    sections.append((layout.scale_offset, layout.num_groups * scale_bytes))
    if layout.offset_offset is not None:
        sections.append((layout.offset_offset, layout.num_groups * FP32_BYTES))
    ends = [start + length for start, length in sections]
    following = [*(start for start, _ in sections[1:]), layout.nbytes]
    return tuple((end, stop - end) for end, stop in zip(ends, following, strict=True) if end < stop)
