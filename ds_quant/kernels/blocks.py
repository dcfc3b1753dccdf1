"""Geometry of the reference kernels: which part of a message a pass works on, and where it lies.

A pass takes one block: several whole rows of a small tensor, or a run of groups of one long row,
so that its scratch stays in cache. May import torch, layout and packing.
"""

from __future__ import annotations

from collections.abc import Iterator
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

_CHUNK_NUMEL = {"cpu": 1 << 18}  # elements per pass, so that scratch stays in cache
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


def blocks(rows: int, numel: int, *, group_size: int, device: torch.device) -> Iterator[Block]:
    """Blocks of at most a chunk: several whole rows, or a run of groups of one row."""
    if rows == 0 or numel == 0:
        return
    chunk = _CHUNK_NUMEL.get(device.type, _DEVICE_CHUNK_NUMEL)
    chunk = max(chunk // group_size, 1) * group_size
    rows_per_block = max(chunk // round_up(numel, group_size), 1)
    for row in range(0, rows, rows_per_block):
        num_rows = min(rows_per_block, rows - row)
        for start in range(0, numel, chunk):
            count = min(chunk, numel - start)
            padded = round_up(count, group_size)
            yield Block(row, num_rows, start, count, padded, round_up(count, VECTOR_NUMEL))


def plane_sections(
    wire: torch.Tensor, layout: WireLayout, block: Block, bits: int
) -> list[torch.Tensor]:
    """The parts of the planes of `wire` (rows, nbytes) that hold the codes of a block."""
    rows = wire[block.row : block.row + block.num_rows]
    sections = []
    for base, width in zip(layout.plane_offsets, planes(bits), strict=True):
        first = base + packing.plane_bytes(block.start, width)
        sections.append(rows[:, first : first + packing.plane_bytes(block.vector_numel, width)])
    return sections


def fp32_section(wire: torch.Tensor, base: int, block: Block, group_size: int) -> torch.Tensor:
    """Bytes (num_rows, 4 * groups) of the scales or offsets of a block; any alignment."""
    first = base + block.start // group_size * FP32_BYTES
    nbytes = block.padded_numel // group_size * FP32_BYTES
    return wire[block.row : block.row + block.num_rows, first : first + nbytes]


def zero_gaps(out: torch.Tensor, layout: WireLayout, bits: int) -> None:
    vectors = ceil_div(layout.numel, VECTOR_NUMEL)
    ends = [
        base + vectors * width
        for base, width in zip(layout.plane_offsets, planes(bits), strict=True)
    ]
    ends.append(layout.scale_offset + layout.num_groups * FP32_BYTES)
    starts = [*layout.plane_offsets[1:], layout.scale_offset]
    if layout.offset_offset is not None:
        starts.append(layout.offset_offset)
        ends.append(layout.offset_offset + layout.num_groups * FP32_BYTES)
    starts.append(layout.nbytes)
    for end, start in zip(ends, starts, strict=True):
        if end < start:
            out[:, end:start].zero_()
