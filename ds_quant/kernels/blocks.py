"""Geometry of the reference kernels: which part of a message a pass works on, and where it lies.

A pass takes one block: several whole rows of a small tensor, or a run of groups of one long row,
so that its scratch stays in cache. May import torch, layout and packing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from ds_quant.kernels import packing
from ds_quant.layout import (
    FP32_BYTES,
    VECTOR_NUMEL,
    WireLayout,
    ceil_div,
    planes,
    round_up,
    wire_layout,
)

# Elements per pass, so that scratch (about 14 bytes each) fits the third-level cache. Measured on
# one core with AVX2, at 2^18 / 2^19 / 2^20 / 2^21: int8 encode 1.11 / 0.89 / 0.80 / 0.82 ns per
# element, int4 stochastic 4.8 / 3.9 / 3.9 / 4.3; below 2^19 the cost of a call dominates.
_CHUNK_NUMEL = {"cpu": 1 << 20}
_DEVICE_CHUNK_NUMEL = 1 << 24  # devices without that concern


class Format(Protocol):
    """What the kernels need to know of a codec; codec.GroupCodec is one."""

    bits: int
    group_size: int
    rounding: str  # nearest, stochastic or random_shift
    levels: str  # uniform or learned

    @property
    def has_offset(self) -> bool: ...


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
    return wire_layout(numel, bits=fmt.bits, group_size=fmt.group_size, has_offset=fmt.has_offset)


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
        first = base + packing.plane_bytes(block.start, width)
        nbytes = packing.plane_bytes(block.vector_numel, width)
        sections.append(section(wire, block, first, nbytes))
    return sections


def fp32_section(wire: torch.Tensor, base: int, block: Block, group_size: int) -> torch.Tensor:
    """Bytes (num_rows, 4 * groups) of the scales or offsets of a block; any alignment."""
    first = base + block.start // group_size * FP32_BYTES
    return section(wire, block, first, block.padded_numel // group_size * FP32_BYTES)


@lru_cache(maxsize=4096)
def gaps(layout: WireLayout, bits: int) -> tuple[tuple[int, int], ...]:
    """(start, length) of the bytes of a row between and after its sections."""
    vectors = ceil_div(layout.numel, VECTOR_NUMEL)
    group_bytes = layout.num_groups * FP32_BYTES
    sections = [
        (base, packing.plane_bytes(vectors * VECTOR_NUMEL, width))
        for base, width in zip(layout.plane_offsets, planes(bits), strict=True)
    ]
    sections.append((layout.scale_offset, group_bytes))
    if layout.offset_offset is not None:
        sections.append((layout.offset_offset, group_bytes))
    ends = [start + length for start, length in sections]
    following = [*(start for start, _ in sections[1:]), layout.nbytes]
    return tuple((end, stop - end) for end, stop in zip(ends, following, strict=True) if end < stop)
