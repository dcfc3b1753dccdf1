"""From tensors to kernel launches: macros, grids, addresses and tails of the CUDA kernels.

Everything between a codec and a launch that can go wrong without a GPU is here, so tests run it on
CPU tensors with a runner that executes the CUDA sources on the host. The signatures are those of
reference.py with a ``run`` argument; messages at odd addresses go through an aligned copy. What
follows from codecs and shapes is kept in plans: a launch must take few microseconds.
May import torch, layout, rng and its sister modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache

import torch

from ds_quant import rng
from ds_quant.kernels.arguments import (
    DTYPES,
    Own,
    aligned,
    dense,
    encode_macros,
    flip_fields,
    float_bits,
    is_aligned,
    own_as_fp32,
    own_fields,
    pointer,
    rotation_macros,
    row_chunks,
    rows_at,
    source_macros,
    stream_fields,
    stride,
)
from ds_quant.kernels.blocks import Format, layout_of
from ds_quant.kernels.geometry import (
    MAX_GROUP,
    THREADS,
    Stores,
    runs_of,
    stores_of,
    sum_threads,
    tiling,
)
from ds_quant.kernels.jobs import Launch, Plan, wire_fields
from ds_quant.kernels.rotation import Rotation
from ds_quant.layout import VECTOR_NUMEL, ceil_div, round_up

Runner = Callable[[Launch], None]

ROTATION_RUN = 4  # vectors of 8: a lane rotates 32 elements
_PLANS = 4096  # a training run repeats a few dozen


def supports(fmt: Format, rotation: Rotation | None = None) -> bool:
    """Whether the kernels cover a codec; the torch reference covers all."""
    if fmt.group_size > MAX_GROUP:
        return False
    return rotation is None or fmt.group_size % rotation.block == 0


def whole_numel(fmts: Iterable[Format]) -> int:
    """A number of elements that fills whole thread blocks of every kernel, for all codecs."""
    units = [8 * VECTOR_NUMEL * THREADS]  # of decode_sum, whose runs are 2, 4 or 8 vectors
    for fmt in fmts:
        tiles = (tiling(fmt.group_size, run) for run in (1, ROTATION_RUN))
        units += [each.block_groups * fmt.group_size for each in tiles]
    return math.lcm(*units)


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
    if rows == 0 or numel == 0:
        return
    x, base = dense(x), None if base is None else dense(base)
    levels = None if levels is None else dense(levels)
    target = aligned(out, copy=False)
    is_easy = is_aligned(x) and (base is None or is_aligned(base))
    base_dtype = None if base is None else base.dtype
    plan = _encode_plan(fmt, numel, x.dtype, base_dtype, rotation, is_easy)
    on_wire = round_up(numel, rotation.block) if rotation else numel
    for row, count in row_chunks(rows):
        fields = rows_at("wire.bytes", "wire.stride", target, row)
        fields |= rows_at("values", "values_stride", x, row)
        if base is not None:
            fields |= rows_at("base", "base_stride", base, row)
        fields |= stream_fields(address, row * ceil_div(on_wire, VECTOR_NUMEL))
        fields["levels"] = pointer(levels)
        tensors = x, base, levels, target
        run(plan.launch(count, fields, *tensors, at_once=target is not out))
    if target is not out:
        out.copy_(target)


@lru_cache(maxsize=_PLANS)
def _encode_plan(
    fmt: Format,
    numel: int,
    dtype: torch.dtype,
    base_dtype: torch.dtype | None,
    rotation: Rotation | None,
    is_easy: bool,
) -> Plan:
    layout = layout_of(fmt, round_up(numel, rotation.block) if rotation else numel)
    tiles = tiling(fmt.group_size, ROTATION_RUN if rotation else 1)
    macros = encode_macros(fmt, tiles) | rotation_macros(rotation)
    macros |= {
        "DSQ_VALUES": DTYPES[dtype],
        "DSQ_BASE": -1 if base_dtype is None else DTYPES[base_dtype],
        "DSQ_WHOLE": int(is_easy and numel % (tiles.block_groups * fmt.group_size) == 0),
    }
    fields = wire_fields("wire", layout) | flip_fields(rotation) | {"numel": numel}
    blocks = ceil_div(layout.num_groups, tiles.block_groups)
    return Plan("encode", macros, blocks=blocks, threads=THREADS, fields=fields)


def decode(
    wire: torch.Tensor,  # (rows, nbytes) uint8
    out: torch.Tensor,  # (rows, numel) floating point
    fmt: Format,
    *,
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned levels only
    run: Runner,
    add: bool = False,
    stores: Stores | None = None,  # None: as geometry.py chooses
) -> None:
    """Decode every row and cast once to the dtype of `out`; or add it to `out` in fp32 first."""
    target = dense(out)
    copied = target.data_ptr() != out.data_ptr()
    _sum(wire, target, fmt, levels=levels, run=run, add=add, at_once=copied, stores=stores)
    if copied:
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
    stores: Stores | None = None,  # None: as geometry.py chooses
) -> None:
    """out = scale * (row 0 + row 1 + ...), fp32 sums in row order, multiplied once at the end.

    With a rotation the sum is rotated back before it is multiplied.
    """
    if wire.shape[0] == 0 and own is None:
        return None if add else out.zero_()
    target = dense(out)
    copied = target.data_ptr() != out.data_ptr()
    options = {"levels": levels, "run": run, "own": own, "rotation": rotation, "add": add}
    _sum(wire, target, fmt, scale=scale, at_once=copied, stores=stores, **options)
    if copied:
        out.copy_(target)


def _sum(
    wire: torch.Tensor,  # (rows, nbytes) uint8
    out: torch.Tensor,  # (rows, numel), or (numel,) for the sum of the rows; as from `dense`
    fmt: Format,
    *,
    levels: torch.Tensor | None,
    run: Runner,
    scale: float = 1.0,
    own: Own | None = None,
    rotation: Rotation | None = None,
    add: bool = False,
    at_once: bool = False,
    stores: Stores | None = None,
) -> None:
    numel = out.shape[-1]
    rows, sources = (1, wire.shape[0] + (own is not None)) if out.dim() == 1 else (wire.shape[0], 1)
    if rows == 0 or numel == 0:
        return
    wire = aligned(wire, copy=True)
    levels = None if levels is None else dense(levels)
    own_values = own_as_fp32(own)
    shape = (numel, sources, out.dtype)
    plan = _sum_plan(fmt, *shape, scale, own is not None, rotation, add, is_aligned(out), stores)
    for row, count in row_chunks(rows):
        fields = rows_at("wire.bytes", "wire.stride", wire, row)
        fields |= rows_at("values", "values_stride", out, row)
        fields["source_stride"] = fields["wire.stride"]  # of these two, one is used
        fields["levels"] = pointer(levels)
        if own is not None:
            fields |= own_fields(own, own_values)
        run(plan.launch(count, fields, wire, out, levels, own_values, at_once=at_once))


@lru_cache(maxsize=_PLANS)
def _sum_plan(
    fmt: Format,
    numel: int,
    sources: int,
    dtype: torch.dtype,
    scale: float,
    has_own: bool,
    rotation: Rotation | None,
    add: bool,
    is_easy: bool,
    stores: Stores | None,
) -> Plan:
    layout = layout_of(fmt, round_up(numel, rotation.block) if rotation else numel)
    if stores is None:
        stores = stores_of(fmt.bits, fmt.group_size, sources)
        stores = stores._replace(run=ROTATION_RUN) if rotation else stores
    vectors = stores.run
    allowed = [ROTATION_RUN] if rotation else runs_of(fmt.group_size)
    if vectors not in allowed:
        raise ValueError(f"stores.run = {vectors}: allowed with {fmt} are {allowed}")
    threads = sum_threads(vectors)
    macros = source_macros(fmt, sources, has_own) | rotation_macros(rotation)
    macros |= {
        "DSQ_RUN": vectors,
        "DSQ_THREADS": threads,
        "DSQ_VALUES": DTYPES[dtype],
        "DSQ_ADD": int(add),
        "DSQ_STAGED": int(stores.staged),
        "DSQ_FACTOR": int(scale != 1.0 or rotation is not None),
        "DSQ_WHOLE": int(is_easy and numel % (vectors * VECTOR_NUMEL * threads) == 0),
    }
    fields = wire_fields("wire", layout) | flip_fields(rotation) | own_fields(None, None)
    fields |= {"numel": numel, "sources": sources}
    fields["factor"] = float_bits(scale / rotation.block if rotation else scale)
    blocks = ceil_div(ceil_div(layout.numel, VECTOR_NUMEL), vectors * threads)
    return Plan("decode_sum", macros, blocks=blocks, threads=threads, fields=fields)


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
    rows, sources = wire.shape[0], wire.shape[1] + (own is not None)
    if rows == 0 or numel == 0:
        return
    wire, target = aligned(wire, copy=True), aligned(out, copy=False)
    levels = None if levels is None else dense(levels)
    source_levels = None if source_levels is None else dense(source_levels)
    own_values = own_as_fp32(own)
    plan = _recode_plan(source_fmt, fmt, numel, sources, own is not None)
    for row, count in row_chunks(rows):
        fields = rows_at("wire.bytes", "wire.stride", target, row)
        fields |= rows_at("source.bytes", "source.stride", wire, row)
        fields |= own_fields(own, own_values)
        fields |= stream_fields(address, row * ceil_div(numel, VECTOR_NUMEL))
        fields |= {"levels": pointer(levels), "source_levels": pointer(source_levels)}
        fields["source_stride"] = stride(wire, 1)
        tensors = wire, target, levels, source_levels, own_values
        run(plan.launch(count, fields, *tensors, at_once=target is not out))
    if target is not out:
        out.copy_(target)


@lru_cache(maxsize=_PLANS)
def _recode_plan(source_fmt: Format, fmt: Format, numel: int, sources: int, has_own: bool) -> Plan:
    layout = layout_of(fmt, numel)
    tiles = tiling(fmt.group_size, ROTATION_RUN)
    macros = encode_macros(fmt, tiles) | source_macros(source_fmt, sources, has_own)
    macros["DSQ_WHOLE"] = int(numel % (tiles.block_groups * fmt.group_size) == 0)
    fields = wire_fields("wire", layout) | wire_fields("source", layout_of(source_fmt, numel))
    fields["sources"] = sources
    blocks = ceil_div(layout.num_groups, tiles.block_groups)
    return Plan("recode", macros, blocks=blocks, threads=THREADS, fields=fields)
