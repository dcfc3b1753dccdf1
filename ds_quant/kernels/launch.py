"""From tensors to kernel launches: argument structs, macros, grids and addresses.

Everything between a codec and a launch that can go wrong without a GPU is here, so tests run it on
CPU tensors with a runner that executes the CUDA sources on the host. The signatures are those of
reference.py with a ``run`` argument; messages at odd addresses go through an aligned copy. What
follows from codecs and shapes is kept in plans: a launch must take few microseconds.

All fields are unsigned 64-bit integers: addresses, strides and offsets in bytes, counts, bit
patterns.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from ds_quant.kernels import random_bits
from ds_quant.kernels.geometry import (
    MAX_GROUP,
    THREADS,
    Stores,
    Tiling,
    runs_of,
    stores_of,
    sum_threads,
    tiling,
)
from ds_quant.kernels.reference import BlockRotation
from ds_quant.kernels.wire import (
    ALIGNMENT,
    VECTOR_NUMEL,
    Format,
    WireLayout,
    ceil_div,
    layout_of,
    round_up,
)

# ---- argument structs ----


_WIRE = ("bytes", "stride", "plane1", "plane2", "scales", "offsets", "end", "numel")
_PLACE = ("first_block", "row_blocks")  # first, and used by tables only

FIELDS = {
    "encode": (
        *_PLACE,
        *(f"wire.{field}" for field in _WIRE),
        *("values", "values_stride", "numel", "base", "base_stride"),
        *("key", "step", "first_vector", "row_vectors", "levels", "flips_low", "flips_high"),
    ),
    "decode_sum": (
        *_PLACE,
        *(f"wire.{field}" for field in _WIRE),
        *("sources", "source_stride", "values", "values_stride", "numel"),
        *("own", "own_values", "factor", "levels", "flips_low", "flips_high"),
    ),
    "recode": (
        *_PLACE,
        *(f"wire.{field}" for field in _WIRE),
        *(f"source.{field}" for field in _WIRE),
        *("sources", "source_stride", "own", "own_values"),
        *("key", "step", "first_vector", "row_vectors", "levels", "source_levels"),
    ),
}

FIELDS["rotate"] = (
    *_PLACE,
    *("values", "values_stride", "numel", "rotated", "rotated_stride", "padded"),
    *("flips_low", "flips_high"),
)

FIELDS["cast"] = (
    *_PLACE,
    *("source", "source_row", "sources", "source_stride"),
    *("values", "values_stride", "numel", "padded", "own", "own_values", "factor"),
)

FIELDS["lossless"] = (
    *_PLACE,
    *("values", "reference", "wire", "numel", "nbytes", "status"),
)

NO_SOURCE = (1 << 64) - 1  # `own` when no source is given as values


class Launch(NamedTuple):
    """One launch of a kernel, whoever carries it out."""

    kernel: str
    macros: tuple[tuple[str, int], ...]  # sorted by name; the defaults of the sources left out
    grid: tuple[int, int]
    threads: int
    job: bytes
    tensors: tuple[object, ...] = ()  # behind the addresses: they live as long as this
    at_once: bool = False  # what it writes is read by the next line of Python


class Table(NamedTuple):
    """Several launches of one kernel as one: their jobs in a device buffer, one grid for all."""

    kernel: str
    macros: tuple[tuple[str, int], ...]
    blocks: int
    threads: int
    jobs: bytes
    num_jobs: int
    job_of_block: bytes  # behind the jobs in the buffer, whole 8 bytes

    @property
    def written(self) -> bytes:
        """The bytes that the buffer holds."""
        return self.jobs + self.job_of_block

    def alone(self) -> Launch:
        """The launch of the only job, which needs no buffer; it points into the same tensors."""
        _, row_blocks = struct.unpack_from("<2Q", self.jobs)
        macros = tuple(macro for macro in self.macros if macro[0] != "DSQ_TABLE")
        grid = row_blocks, self.blocks // row_blocks
        return Launch(self.kernel, macros, grid, self.threads, self.jobs)


def merge(launches: Iterable[Launch]) -> list[Table]:
    """One table per kernel and set of macros; launches must not depend on each other."""
    alike: dict[tuple, list[Launch]] = {}
    for launch in launches:
        alike.setdefault((launch.kernel, launch.macros, launch.threads), []).append(launch)
    tables = []
    for (kernel, macros, threads), members in alike.items():
        blocks, jobs, job_of_block = 0, [], []
        for index, member in enumerate(members):
            jobs.append(struct.pack("<2Q", blocks, member.grid[0]) + member.job[16:])
            count = member.grid[0] * member.grid[1]
            job_of_block.append(struct.pack("<I", index) * count)
            blocks += count
        job_of_block.append(b"\0" * (blocks % 2 * 4))
        macros = tuple(sorted((*macros, ("DSQ_TABLE", 1))))
        written = b"".join(jobs), len(jobs), b"".join(job_of_block)
        tables.append(Table(kernel, macros, blocks, threads, *written))
    return tables


class Plan:
    """The part common to all launches on tensors of one shape; made once, used at every call."""

    def __init__(
        self,
        kernel: str,
        macros: Mapping[str, int],
        *,
        blocks: int,
        threads: int,
        fields: Mapping[str, int],
    ) -> None:
        """blocks: of a row; fields: those of the job that are the same at every launch."""
        self.kernel, self.macros = kernel, tuple(sorted(macros.items()))
        self.blocks, self.threads = blocks, threads
        self._places = {name: place for place, name in enumerate(FIELDS[kernel])}
        self._struct = struct.Struct(f"<{len(self._places)}Q")
        self._numbers = [0] * len(self._places)
        self._set(self._numbers, fields)

    def launch(
        self, rows: int, fields: Mapping[str, int], *tensors: object, at_once: bool = False
    ) -> Launch:
        """A launch on `rows` rows with the remaining fields, which point into the tensors."""
        numbers = self._numbers.copy()
        self._set(numbers, fields)
        job = self._struct.pack(*numbers)
        grid = self.blocks, rows
        return Launch(self.kernel, self.macros, grid, self.threads, job, tensors, at_once)

    def _set(self, numbers: list[int], fields: Mapping[str, int]) -> None:
        for name, number in fields.items():
            numbers[self._places[name]] = number


def wire_fields(name: str, layout: WireLayout) -> dict[str, int]:
    """Fields of a WireJob that follow from the layout of a row."""
    planes = (*layout.plane_offsets, 0, 0)
    return {
        f"{name}.plane1": planes[1],
        f"{name}.plane2": planes[2],
        f"{name}.scales": layout.scale_offset,
        f"{name}.offsets": layout.offset_offset or 0,
        f"{name}.end": layout.nbytes,
        f"{name}.numel": layout.numel,
    }


# ---- macros, fields and addresses ----


DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_ROUNDINGS = {"nearest": 0, "stochastic": 1, "random_shift": 2}
_LEARNED, _GAUSSIAN = 3, 4
_MAX_UNROLLED_SOURCES = 8
_MAX_GRID_ROWS = 65535
_WORD = (1 << 64) - 1


Own = tuple[int, torch.Tensor]  # a row that the wire leaves out: (elements on the wire,) values


def encode_macros(fmt: Format, tiles: Tiling) -> dict[str, int]:
    rounding = _LEARNED if fmt.levels == "learned" else _ROUNDINGS[fmt.rounding]
    return {
        "DSQ_BITS": fmt.bits,
        "DSQ_GROUP": fmt.group_size,
        "DSQ_MINMAX": int(fmt.has_offset),
        "DSQ_ROUNDING": _GAUSSIAN if fmt.is_gaussian else rounding,
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
        "DSQ_SOURCE_GAUSSIAN": int(fmt.is_gaussian),
        "DSQ_SOURCES": sources if sources <= _MAX_UNROLLED_SOURCES else 0,
        "DSQ_OWN": int(has_own),
    }


def rotation_macros(rotation: BlockRotation | None) -> dict[str, int]:
    """Block of the rotation and whether signs flip; 0 and 0 without one."""
    if rotation is None:
        return {"DSQ_ROTATION": 0, "DSQ_FLIPS": 0}
    return {"DSQ_ROTATION": rotation.block, "DSQ_FLIPS": int(rotation.flips is not None)}


def flip_fields(rotation: BlockRotation | None) -> dict[str, int]:
    flips = (rotation.flips or 0) if rotation else 0
    return {"flips_low": flips & _WORD, "flips_high": flips >> 64 & _WORD}


def own_as_fp32(own: Own | None) -> torch.Tensor | None:
    """As contiguous fp32; the caller keeps it until the launch."""
    return None if own is None else own[1].detach().to(torch.float32).contiguous()


def own_fields(own: Own | None, values: torch.Tensor | None) -> dict[str, int]:
    return {"own": NO_SOURCE if own is None else own[0], "own_values": pointer(values)}


def stream_fields(address: random_bits.Address | None, row: int, numel: int) -> dict[str, int]:
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


# ---- launches ----


Runner = Callable[[Launch], None]

ROTATION_RUN = 4  # vectors of 8: a lane rotates 32 elements
_PLANS = 4096  # a training run repeats a few dozen


def supports(fmt: Format, rotation: BlockRotation | None = None) -> bool:
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
    address: random_bits.Address | None,
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned and Gaussian levels only
    run: Runner,
    base: torch.Tensor | None = None,  # (rows, numel) floating point, subtracted from x
    rotation: BlockRotation | None = None,  # of rows filled up with zeros to whole blocks
) -> None:
    """Write the wire bytes of every row of x, of x - base, or of their rotation."""
    rows, numel = x.shape
    if rows == 0 or numel == 0:
        return
    x, base = dense(x), None if base is None else dense(base)
    target = aligned(out, copy=False)
    is_easy = is_aligned(x) and (base is None or is_aligned(base))
    base_dtype = None if base is None else base.dtype
    plan = encode_plan(fmt, numel, x.dtype, base_dtype, rotation, is_easy)
    on_wire = round_up(numel, rotation.block) if rotation else numel
    for row, count in row_chunks(rows):
        fields = rows_at("wire.bytes", "wire.stride", target, row)
        fields |= rows_at("values", "values_stride", x, row)
        if base is not None:
            fields |= rows_at("base", "base_stride", base, row)
        fields |= stream_fields(address, row, on_wire)
        fields["levels"] = pointer(levels)
        tensors = x, base, levels, target
        run(plan.launch(count, fields, *tensors, at_once=target is not out))
    if target is not out:
        out.copy_(target)


@lru_cache(maxsize=_PLANS)
def encode_plan(
    fmt: Format,
    numel: int,
    dtype: torch.dtype,
    base_dtype: torch.dtype | None,
    rotation: BlockRotation | None,
    is_easy: bool,
) -> Plan:
    """Plan launches on rows of ``numel`` elements; is_easy: aligned ones."""
    layout = layout_of(fmt, round_up(numel, rotation.block) if rotation else numel)
    tiles = tiling(fmt.group_size, ROTATION_RUN if rotation or fmt.is_gaussian else 1)
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
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned and Gaussian levels only
    run: Runner,
    add: bool = False,
    stores: Stores | None = None,  # None: as geometry.py chooses
) -> None:
    """Decode every row and cast once to the dtype of `out`; or add it to `out` in fp32 first."""
    _sum(wire, out, fmt, levels=levels, run=run, add=add, stores=stores)


def decode_sum(
    wire: torch.Tensor,  # (rows, nbytes) uint8
    out: torch.Tensor,  # (numel,) floating point
    fmt: Format,
    *,
    scale: float,
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned and Gaussian levels only
    run: Runner,
    own: Own | None = None,
    rotation: BlockRotation | None = None,  # to undo; the wire holds whole blocks
    add: bool = False,
    stores: Stores | None = None,  # None: as geometry.py chooses
) -> None:
    """out = scale * (row 0 + row 1 + ...), fp32 sums in row order, multiplied once at the end.

    With a rotation the sum is rotated back before it is multiplied.
    """
    if wire.shape[0] == 0 and own is None:
        return None if add else out.zero_()
    options = {"levels": levels, "run": run, "own": own, "rotation": rotation, "add": add}
    _sum(wire, out, fmt, scale=scale, stores=stores, **options)


def _sum(
    wire: torch.Tensor,  # (rows, nbytes) uint8
    out: torch.Tensor,  # (rows, numel), or (numel,) for the sum of the rows
    fmt: Format,
    *,
    levels: torch.Tensor | None,
    run: Runner,
    scale: float = 1.0,
    own: Own | None = None,
    rotation: BlockRotation | None = None,
    add: bool = False,
    stores: Stores | None = None,
) -> None:
    numel = out.shape[-1]
    rows, sources = (1, wire.shape[0] + (own is not None)) if out.dim() == 1 else (wire.shape[0], 1)
    if rows == 0 or numel == 0:
        return
    wire, target, own_values = aligned(wire, copy=True), dense(out), own_as_fp32(own)
    copied = target.data_ptr() != out.data_ptr()
    shape, is_easy = (numel, sources, target.dtype), is_aligned(target)
    plan = sum_plan(fmt, *shape, scale, own is not None, rotation, add, is_easy, stores)
    for row, count in row_chunks(rows):
        fields = rows_at("wire.bytes", "wire.stride", wire, row)
        fields |= rows_at("values", "values_stride", target, row)
        fields["source_stride"] = fields["wire.stride"]  # of these two, one is used
        fields["levels"] = pointer(levels)
        if own is not None:
            fields |= own_fields(own, own_values)
        run(plan.launch(count, fields, wire, target, levels, own_values, at_once=copied))
    if copied:
        out.copy_(target)


@lru_cache(maxsize=_PLANS)
def sum_plan(
    fmt: Format,
    numel: int,
    sources: int,
    dtype: torch.dtype,
    scale: float,
    has_own: bool,
    rotation: BlockRotation | None,
    add: bool,
    is_easy: bool,
    stores: Stores | None = None,
) -> Plan:
    """Plan launches of decode and decode_sum, as ``encode_plan`` does."""
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
    address: random_bits.Address | None,
    run: Runner,
    source_levels: torch.Tensor | None = None,  # (2^bits,) fp32, learned and Gaussian levels only
    levels: torch.Tensor | None = None,  # (2^bits,) fp32, learned and Gaussian levels only
    own: Own | None = None,
) -> None:
    """Decode and add up the sources of every row in fp32, in order, and encode the sum."""
    rows, sources = wire.shape[0], wire.shape[1] + (own is not None)
    if rows == 0 or numel == 0:
        return
    wire, target = aligned(wire, copy=True), aligned(out, copy=False)
    own_values = own_as_fp32(own)
    plan = recode_plan(source_fmt, fmt, numel, sources, own is not None)
    for row, count in row_chunks(rows):
        fields = rows_at("wire.bytes", "wire.stride", target, row)
        fields |= rows_at("source.bytes", "source.stride", wire, row)
        fields |= own_fields(own, own_values)
        fields |= stream_fields(address, row, numel)
        fields |= {"levels": pointer(levels), "source_levels": pointer(source_levels)}
        fields["source_stride"] = stride(wire, 1)
        tensors = wire, target, levels, source_levels, own_values
        run(plan.launch(count, fields, *tensors, at_once=target is not out))
    if target is not out:
        out.copy_(target)


@lru_cache(maxsize=_PLANS)
def recode_plan(source_fmt: Format, fmt: Format, numel: int, sources: int, has_own: bool) -> Plan:
    """Plan launches of recode, as ``encode_plan`` does."""
    layout = layout_of(fmt, numel)
    tiles = tiling(fmt.group_size, ROTATION_RUN)
    macros = encode_macros(fmt, tiles) | source_macros(source_fmt, sources, has_own)
    macros["DSQ_WHOLE"] = int(numel % (tiles.block_groups * fmt.group_size) == 0)
    fields = wire_fields("wire", layout) | wire_fields("source", layout_of(source_fmt, numel))
    fields["sources"] = sources
    blocks = ceil_div(layout.num_groups, tiles.block_groups)
    return Plan("recode", macros, blocks=blocks, threads=THREADS, fields=fields)


@lru_cache(maxsize=_PLANS)
def cast_plan(
    source: torch.dtype,
    dtype: torch.dtype,
    numel: int,
    padded: int,
    *,
    sources: int = 1,
    has_own: bool = False,
    scale: float = 1.0,
) -> Plan:
    """Plan launches that cast rows to ``dtype``, filled up with zeros, or add them up."""
    is_copy = source == dtype and sources == 1 and not has_own and scale == 1.0
    macros = {"DSQ_SOURCE": DTYPES[source], "DSQ_VALUES": DTYPES[dtype]}
    macros |= {"DSQ_COPY": int(is_copy), "DSQ_THREADS": THREADS}
    fields = {"numel": numel, "padded": padded, "sources": sources, "factor": float_bits(scale)}
    blocks = ceil_div(padded, VECTOR_NUMEL * THREADS)
    fields["own"] = NO_SOURCE
    return Plan("cast", macros, blocks=blocks, threads=THREADS, fields=fields)


@lru_cache(maxsize=_PLANS)
def rotate_plan(numel: int, dtype: torch.dtype, rotation: BlockRotation) -> Plan:
    """Plan launches of a rotation into fp32 that is filled up with zeros to whole blocks."""
    padded = round_up(numel, rotation.block)
    macros = rotation_macros(rotation)
    macros |= {"DSQ_VALUES": DTYPES[dtype], "DSQ_THREADS": THREADS}
    fields = flip_fields(rotation) | {"numel": numel, "padded": padded}
    blocks = ceil_div(padded, ROTATION_RUN * VECTOR_NUMEL * THREADS)
    return Plan("rotate", macros, blocks=blocks, threads=THREADS, fields=fields)
