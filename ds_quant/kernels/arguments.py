"""Parts of a launch: macros of a codec, fields of a job, addresses of rows.

May import torch, layout, rng and its sister modules.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ds_quant import rng
from ds_quant.kernels.blocks import Format
from ds_quant.kernels.geometry import THREADS, Tiling
from ds_quant.kernels.jobs import NO_SOURCE
from ds_quant.kernels.rotation import Rotation
from ds_quant.layout import ALIGNMENT

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_ROUNDINGS = {"nearest": 0, "stochastic": 1, "random_shift": 2}
_LEARNED = 3
_MAX_UNROLLED_SOURCES = 8
_MAX_GRID_ROWS = 65535
_WORD = (1 << 64) - 1


class Own(NamedTuple):
    """Values of a row of a sum, which the wire leaves out."""

    row: int
    values: torch.Tensor  # (elements on the wire,) floating point


def encode_macros(fmt: Format, tiles: Tiling) -> dict[str, int]:
    learned = fmt.levels == "learned"
    return {
        "DSQ_BITS": fmt.bits,
        "DSQ_GROUP": fmt.group_size,
        "DSQ_MINMAX": int(fmt.has_offset),
        "DSQ_ROUNDING": _LEARNED if learned else _ROUNDINGS[fmt.rounding],
        "DSQ_RUN": tiles.run,
        "DSQ_LANES": tiles.lanes,
        "DSQ_WARPS": tiles.warps,
        "DSQ_VECTORS": tiles.vectors,
        "DSQ_SLOTS": tiles.slots,
        "DSQ_THREADS": THREADS,
    }


def source_macros(fmt: Format, sources: int, has_own: bool) -> dict[str, int]:
    return {
        "DSQ_SOURCE_BITS": fmt.bits,
        "DSQ_SOURCE_GROUP": fmt.group_size,
        "DSQ_SOURCE_MINMAX": int(fmt.has_offset),
        "DSQ_SOURCE_LEARNED": int(fmt.levels == "learned"),
        "DSQ_SOURCES": sources if sources <= _MAX_UNROLLED_SOURCES else 0,
        "DSQ_OWN": int(has_own),
    }


def rotation_macros(rotation: Rotation | None) -> dict[str, int]:
    """Block of the rotation and whether signs flip; 0 and 0 without one."""
    if rotation is None:
        return {"DSQ_ROTATION": 0, "DSQ_FLIPS": 0}
    return {"DSQ_ROTATION": rotation.block, "DSQ_FLIPS": int(rotation.flips is not None)}


def flip_fields(rotation: Rotation | None) -> dict[str, int]:
    flips = (rotation.flips or 0) if rotation else 0
    return {"flips_low": flips & _WORD, "flips_high": flips >> 64 & _WORD}


def own_as_fp32(own: Own | None) -> torch.Tensor | None:
    """As contiguous fp32; the caller keeps it until the launch."""
    return None if own is None else own.values.detach().to(torch.float32).contiguous()


def own_fields(own: Own | None, values: torch.Tensor | None) -> dict[str, int]:
    return {"own": NO_SOURCE if own is None else own.row, "own_values": pointer(values)}


def stream_fields(address: rng.Address | None, row: int, numel: int) -> dict[str, int]:
    """Random bits of row ``row`` and those behind it, ``numel`` elements on the wire each."""
    if address is None:
        return {}
    step = address.vectors_per_row(numel)
    first = address.first_vector + row * step
    return {
        "key": address.key,
        "step": address.step,
        "first_vector": first & _WORD,
        "row_vectors": step,
    }


def float_bits(number: float) -> int:
    return struct.unpack("<I", struct.pack("<f", number))[0]


# --- addresses


def pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def stride(tensor: torch.Tensor, dim: int = 0) -> int:
    return tensor.stride(dim) * tensor.element_size()


def rows_at(address: str, step: str, rows: torch.Tensor, first: int) -> dict[str, int]:
    """The fields named `address` and `step`: of row `first`, and to the next one, in bytes."""
    nbytes = stride(rows)
    return {address: rows.data_ptr() + first * nbytes, step: nbytes}


def row_chunks(rows: int) -> Sequence[tuple[int, int]]:
    """(first row, rows) of each launch: the second grid dimension is limited."""
    if rows <= _MAX_GRID_ROWS:
        return ((0, rows),)
    starts = range(0, rows, _MAX_GRID_ROWS)
    return [(row, min(_MAX_GRID_ROWS, rows - row)) for row in starts]


def dense(x: torch.Tensor) -> torch.Tensor:
    """x with a dtype that the kernels load and store and rows without holes, copied if need be."""
    x = x.detach()
    if x.dtype not in DTYPES:
        x = x.to(torch.float32)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes and has no holes."""
    if tensor.data_ptr() % ALIGNMENT:
        return False
    if tensor.is_contiguous() and tensor.shape[-1] * tensor.element_size() % ALIGNMENT == 0:
        return True
    *outer, last = zip(tensor.stride(), tensor.shape, strict=True)
    steps = (step * tensor.element_size() for step, size in outer if size > 1)
    return (last[0] == 1 or last[1] == 1) and not any(step % ALIGNMENT for step in steps)


def aligned(wire: torch.Tensor, *, copy: bool) -> torch.Tensor:
    """`wire`, or a buffer of its shape that is aligned; `copy`: with the same content."""
    if is_aligned(wire):
        return wire
    buffer = torch.empty(wire.shape, dtype=wire.dtype, device=wire.device)
    return buffer.copy_(wire) if copy else buffer
