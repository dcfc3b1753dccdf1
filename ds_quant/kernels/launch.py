"""From tensors to kernel launches: macros, grids, addresses and tails of the CUDA kernels.

Everything between a codec and a launch that can go wrong without a GPU is here, so tests run it on
CPU tensors with a runner that executes the CUDA sources on the host. The signatures are those of
reference.py with a ``run`` argument; messages at odd addresses go through an aligned copy.
May import torch, layout, rng and its sister modules.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ds_quant import rng
from ds_quant.kernels.blocks import Format, layout_of
from ds_quant.kernels.geometry import MAX_GROUP, THREADS, Tiling, sum_run, tiling
from ds_quant.kernels.jobs import NO_SOURCE, Launch, pack, wire_fields
from ds_quant.layout import ALIGNMENT, VECTOR_NUMEL, ceil_div, round_up

Runner = Callable[[Launch], None]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ROUNDINGS = {"nearest": 0, "stochastic": 1, "random_shift": 2}
_LEARNED = 3
_ROTATION_RUN = 4
_MAX_UNROLLED_SOURCES = 8
_MAX_GRID_ROWS = 65535
_WORD = (1 << 64) - 1


class Rotation(NamedTuple):
    """Walsh-Hadamard transform of blocks of 32, 64 or 128 elements.

    flips: bit i set = element i of every block changes its sign; None for no flips.
    """

    block: int
    flips: int | None = None


class Own(NamedTuple):
    """A row that counts as these values, whatever its bytes are."""

    row: int
    values: torch.Tensor  # (elements on the wire,) floating point


def supports(fmt: Format, rotation: Rotation | None = None) -> bool:
    """Whether the kernels cover a codec; the torch reference covers all."""
    if fmt.group_size > MAX_GROUP:
        return False
    return rotation is None or fmt.group_size % rotation.block == 0


def encode(
    x: torch.Tensor,  # (rows, numel) floating point
    out: torch.Tensor,  # (rows, nbytes) uint8
    fmt: Format,
    *,
    address: rng.Address | None,
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned levels only
    run: Runner,
    base: torch.Tensor | None = None,  # (rows, numel) floating point, subtracted from x
    rotation: Rotation | None = None,  # of rows filled up with zeros to whole blocks
) -> None:
    """Write the wire bytes of every row of x, of x - base, or of their rotation."""
    rows, numel = x.shape
    on_wire = round_up(numel, rotation.block) if rotation else numel
    layout = layout_of(fmt, on_wire)
    if rows == 0 or numel == 0:
        return
    x, base = _readable(x), None if base is None else _readable(base)
    target = _aligned(out, copy=False)
    tiles = tiling(fmt.group_size, _ROTATION_RUN if rotation else 1)
    macros = _encode_macros(fmt, tiles) | {
        "DSQ_VALUES": _DTYPES[x.dtype],
        "DSQ_BASE": -1 if base is None else _DTYPES[base.dtype],
        "DSQ_ROTATION": rotation.block if rotation else 0,
        "DSQ_FLIPS": int(rotation is not None and rotation.flips is not None),
    }
    fields = _flip_fields(rotation) | {"numel": numel, "levels": _pointer(levels)}
    blocks = ceil_div(layout.num_groups, tiles.block_groups)
    for row, count in _row_chunks(rows):
        fields |= wire_fields("wire", layout, **_rows_at(target, row))
        fields |= {"values": _row_address(x, row), "values_stride": _stride(x)}
        if base is not None:
            fields |= {"base": _row_address(base, row), "base_stride": _stride(base)}
        fields |= _stream_fields(address, row * ceil_div(on_wire, VECTOR_NUMEL))
        run(_launch("encode", macros, (blocks, count), fields))
    if target is not out:
        out.copy_(target)


def decode(
    wire: torch.Tensor,  # (rows, nbytes) uint8
    out: torch.Tensor,  # (rows, numel) floating point
    fmt: Format,
    *,
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned levels only
    run: Runner,
    add: bool = False,
) -> None:
    """Decode every row and cast once to the dtype of `out`; or add it to `out` in fp32 first."""
    target = _writable(out)
    _sum(wire[:, None], target, fmt, levels=levels, run=run, add=add)
    if target is not out:
        out.copy_(target)


def decode_sum(
    wire: torch.Tensor,  # (rows, nbytes) uint8
    out: torch.Tensor,  # (numel,) floating point
    fmt: Format,
    *,
    scale: float,
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned levels only
    run: Runner,
    own: Own | None = None,
    rotation: Rotation | None = None,  # to undo; the wire holds whole blocks
    add: bool = False,
) -> None:
    """out = scale * (row 0 + row 1 + ...), fp32 sums in row order, multiplied once at the end.

    With a rotation the sum is rotated back before it is multiplied.
    """
    if wire.shape[0] == 0:
        return None if add else out.zero_()
    target = _writable(out)
    options = {"levels": levels, "run": run, "own": own, "rotation": rotation, "add": add}
    _sum(wire[None], target[None], fmt, scale=scale, **options)
    if target is not out:
        out.copy_(target)


def _sum(
    wire: torch.Tensor,  # (rows, sources, nbytes) uint8
    out: torch.Tensor,  # (rows, numel) of a supported dtype, last stride 1
    fmt: Format,
    *,
    levels: torch.Tensor | None,
    run: Runner,
    scale: float = 1.0,
    own: Own | None = None,
    rotation: Rotation | None = None,
    add: bool = False,
) -> None:
    rows, numel = out.shape
    layout = layout_of(fmt, round_up(numel, rotation.block) if rotation else numel)
    if rows == 0 or numel == 0:
        return
    wire = _aligned(wire, copy=True)
    sources = wire.shape[1]
    vectors = _ROTATION_RUN if rotation else sum_run(fmt.bits, sources)
    macros = _source_macros(fmt, sources, own) | {
        "DSQ_RUN": vectors,
        "DSQ_THREADS": THREADS,
        "DSQ_VALUES": _DTYPES[out.dtype],
        "DSQ_ADD": int(add),
        "DSQ_FACTOR": int(scale != 1.0 or rotation is not None),
        "DSQ_ROTATION": rotation.block if rotation else 0,
        "DSQ_FLIPS": int(rotation is not None and rotation.flips is not None),
    }
    own_values = _own_values(own)
    fields = _flip_fields(rotation) | _own_fields(own, own_values)
    fields |= {"sources": sources, "source_stride": _stride(wire, 1), "numel": numel}
    fields |= {"levels": _pointer(levels), "values_stride": _stride(out)}
    fields["factor"] = _float_bits(scale / rotation.block if rotation else scale)
    blocks = ceil_div(ceil_div(layout.numel, VECTOR_NUMEL), vectors * THREADS)
    for row, count in _row_chunks(rows):
        fields |= wire_fields("wire", layout, **_rows_at(wire, row))
        fields["values"] = _row_address(out, row)
        run(_launch("decode_sum", macros, (blocks, count), fields))


def recode(
    wire: torch.Tensor,  # (rows, sources, nbytes of source_fmt) uint8
    out: torch.Tensor,  # (rows, nbytes of fmt) uint8
    source_fmt: Format,
    fmt: Format,
    *,
    numel: int,  # of a row on the wire
    address: rng.Address | None,
    run: Runner,
    source_levels: torch.Tensor | None = None,  # (2^bits,) fp32, learned levels only
    levels: torch.Tensor | None = None,  # (2^bits,) fp32, learned levels only
    own: Own | None = None,
) -> None:
    """Decode and add up the sources of every row in fp32, in order, and encode the sum."""
    rows, sources = wire.shape[:2]
    if rows == 0 or numel == 0:
        return
    layout = layout_of(fmt, numel)
    wire, target = _aligned(wire, copy=True), _aligned(out, copy=False)
    tiles = tiling(fmt.group_size, _ROTATION_RUN)
    macros = _encode_macros(fmt, tiles) | _source_macros(source_fmt, sources, own)
    own_values = _own_values(own)
    fields = _own_fields(own, own_values)
    fields |= {"sources": sources, "source_stride": _stride(wire, 1)}
    fields |= {"levels": _pointer(levels), "source_levels": _pointer(source_levels)}
    blocks = ceil_div(layout.num_groups, tiles.block_groups)
    for row, count in _row_chunks(rows):
        fields |= wire_fields("wire", layout, **_rows_at(target, row))
        fields |= wire_fields("source", layout_of(source_fmt, numel), **_rows_at(wire, row))
        fields |= _stream_fields(address, row * ceil_div(numel, VECTOR_NUMEL))
        run(_launch("recode", macros, (blocks, count), fields))
    if target is not out:
        out.copy_(target)


# --- parts of a launch


def _launch(
    kernel: str, macros: dict[str, int], grid: tuple[int, int], fields: dict[str, int]
) -> Launch:
    return Launch(kernel, tuple(sorted(macros.items())), grid, THREADS, pack(kernel, fields))


def _encode_macros(fmt: Format, tiles: Tiling) -> dict[str, int]:
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


def _source_macros(fmt: Format, sources: int, own: Own | None) -> dict[str, int]:
    return {
        "DSQ_SOURCE_BITS": fmt.bits,
        "DSQ_SOURCE_GROUP": fmt.group_size,
        "DSQ_SOURCE_MINMAX": int(fmt.has_offset),
        "DSQ_SOURCE_LEARNED": int(fmt.levels == "learned"),
        "DSQ_SOURCES": sources if sources <= _MAX_UNROLLED_SOURCES else 0,
        "DSQ_OWN": int(own is not None),
    }


def _flip_fields(rotation: Rotation | None) -> dict[str, int]:
    flips = (rotation.flips or 0) if rotation else 0
    return {"flips_low": flips & _WORD, "flips_high": flips >> 64 & _WORD}


def _own_values(own: Own | None) -> torch.Tensor | None:
    """As contiguous fp32; the caller keeps it until the launch."""
    return None if own is None else own.values.detach().to(torch.float32).contiguous()


def _own_fields(own: Own | None, values: torch.Tensor | None) -> dict[str, int]:
    return {"own": NO_SOURCE if own is None else own.row, "own_values": _pointer(values)}


def _stream_fields(address: rng.Address | None, vectors_before: int) -> dict[str, int]:
    if address is None:
        return {}
    first = address.first_vector + vectors_before
    return {"key": address.key, "step": address.step, "first_vector": first & _WORD}


def _float_bits(number: float) -> int:
    return struct.unpack("<I", struct.pack("<f", number))[0]


# --- addresses


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _stride(tensor: torch.Tensor, dim: int = 0) -> int:
    return tensor.stride(dim) * tensor.element_size()


def _row_address(tensor: torch.Tensor, row: int) -> int:
    return tensor.data_ptr() + row * _stride(tensor)


def _rows_at(wire: torch.Tensor, row: int) -> dict[str, int]:
    return {"address": _row_address(wire, row), "stride": _stride(wire)}


def _row_chunks(rows: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of each launch: the second grid dimension is limited."""
    for row in range(0, rows, _MAX_GRID_ROWS):
        yield row, min(_MAX_GRID_ROWS, rows - row)


def _readable(x: torch.Tensor) -> torch.Tensor:
    """x as a dtype the kernels load, each row without holes; other dtypes pass through fp32."""
    x = x.detach()
    if x.dtype not in _DTYPES:
        x = x.to(torch.float32)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _writable(out: torch.Tensor) -> torch.Tensor:
    """`out`, or a contiguous copy of a dtype that the kernels store."""
    return _readable(out)


def _aligned(wire: torch.Tensor, *, copy: bool) -> torch.Tensor:
    """`wire`, or a buffer of its shape whose rows lie at multiples of 16 bytes."""
    strides = [s for s, size in zip(wire.stride()[:-1], wire.shape[:-1], strict=True) if size > 1]
    dense = wire.stride(-1) == 1 or wire.shape[-1] == 1
    if dense and not any(number % ALIGNMENT for number in (wire.data_ptr(), *strides)):
        return wire
    buffer = torch.empty(wire.shape, dtype=wire.dtype, device=wire.device)
    return buffer.copy_(wire) if copy else buffer
