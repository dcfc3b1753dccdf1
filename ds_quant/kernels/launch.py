"""Kernel launches: argument structs, macros and grids.

Everything between a codec and a launch that can go wrong without a GPU is here and in
launch_batch.py, so tests run it on CPU tensors with a runner that executes the CUDA sources on the
host. What follows from codecs and shapes is kept in plans: a launch must take few microseconds.

All fields are unsigned 64-bit integers: addresses, strides and offsets in bytes, counts, bit
patterns.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from ds_quant.kernels.batch import DTYPES, OWN_SIGNS, rounding_of
from ds_quant.kernels.wire import (
    VECTOR_NUMEL,
    GroupFormat,
    WireLayout,
    ceil_div,
    layout_of,
    round_up,
)

# ---- argument structs ----


_WIRE = ("bytes", "stride", "plane1", "plane2", "scales", "offsets", "end", "numel")
_PLACE = ("first_block", "row_blocks")  # used by tables only

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

FIELDS["cast"] = (
    *_PLACE,
    *("source", "source_row", "sources", "source_stride"),
    *("values", "values_stride", "numel", "padded", "own", "own_values", "factor"),
    *("source_type", "values_type", "is_copy"),
)

FIELDS["lossless"] = (
    *_PLACE,
    *("values", "reference", "wire", "numel", "nbytes", "status"),
)

NO_SOURCE = (1 << 64) - 1  # `own` when no source is given as values


class Launch(NamedTuple):
    """Arguments of one launch of a kernel."""

    kernel: str
    macros: tuple[tuple[str, int], ...]  # sorted by name; the defaults of the sources left out
    grid: tuple[int, int]
    threads: int
    job: bytes


class Plan(NamedTuple):
    """The part common to all jobs on tensors of one shape."""

    kernel: str
    macros: tuple[tuple[str, int], ...]
    blocks: int  # of a row
    threads: int
    fields: Mapping[str, int]


def fields_of(kernel: str) -> np.dtype:
    """The job of a kernel as a record."""
    return np.dtype([(name, "<u8") for name in FIELDS[kernel]])


ROOM = 32764  # bytes of arguments that a kernel may have, since CUDA 12.1


class Table(NamedTuple):
    """Jobs of one kernel as one launch, in order of their first blocks."""

    kernel: str
    macros: tuple[tuple[str, int], ...]
    blocks: int
    threads: int
    jobs: np.ndarray  # records of ``fields_of`` the kernel

    def launches(self, room: int = ROOM) -> list[Launch]:
        """Launches whose arguments take up to ``room`` bytes: one, but of very many jobs."""
        jobs = self.jobs
        if len(jobs) == 1:
            row_blocks = int(jobs["row_blocks"][0])
            grid = row_blocks, self.blocks // row_blocks
            return [Launch(self.kernel, self.macros, grid, self.threads, jobs.tobytes())]
        most = (room - 16) // jobs.itemsize
        parts = [jobs[at : at + most] for at in range(0, len(jobs), most)]
        begins = [int(part["first_block"][0]) for part in parts]
        macros = tuple(sorted((*self.macros, ("DSQ_TABLE", room))))
        launches = []
        for part, begin, end in zip(parts, begins, [*begins[1:], self.blocks], strict=True):
            size = most * jobs.itemsize  # filled up with zeros
            table = struct.pack(f"<2Q{size}s", len(part), begin, part.tobytes())
            launches.append(Launch(self.kernel, macros, (end - begin, 1), self.threads, table))
        return launches


def table_of(plans: Sequence[Plan], rows: Sequence[int], jobs: np.ndarray) -> Table:
    """One launch of jobs that do not depend on each other, each with its plan and number of rows;
    the plans' macros differ in DSQ_WHOLE at most.
    """
    first, row_blocks = plans[0], np.array([plan.blocks for plan in plans])
    blocks = row_blocks * rows
    jobs["row_blocks"], jobs["first_block"] = row_blocks, blocks.cumsum() - blocks
    macros = min(plan.macros for plan in plans)  # whole blocks only if all have them
    return Table(first.kernel, macros, int(blocks.sum()), first.threads, jobs)


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


def sum_fields(numel: int, sources: int, factor: float) -> dict[str, int]:
    """Fields of a sum of rows of the wire, none of which is this rank's own."""
    return {
        "numel": numel,
        "sources": sources,
        "factor": float_bits(factor),
        "own": NO_SOURCE,
    }


# ---- which threads of a block hold which elements ----

# The numbers behind cuda/include/tile.cuh. They are handed over as macros, so that the grid of a
# launch and the indices inside the kernel come from one place.
THREADS = 256  # of a block
MAX_GROUP = 8192  # elements; larger groups would need more registers or a second pass
_WARP = 32
_MAX_VECTORS = 8  # a lane holds 64 elements at most
_RUN_BYTES = 16  # one load
_SUM_BLOCK = 8192  # elements; fewer blocks leave multiprocessors idle at a million elements


class Tiling(NamedTuple):
    """Place of the groups of encode and recode. The fields are the macros of tile.cuh."""

    run: int  # consecutive vectors of a lane
    lanes: int  # of a warp that share a group
    warps: int  # that share a group
    vectors: int  # of a group per lane
    slots: int  # groups per lane

    @property
    def block_groups(self) -> int:
        """Groups of a thread block."""
        return THREADS // (self.lanes * self.warps) * self.slots


@cache
def tiling(group_size: int, run: int) -> Tiling:
    """Tiling of groups of `group_size` (a multiple of 32, at most MAX_GROUP) in runs of 1 or 4.

    run 1: neighbouring lanes read neighbouring 16 bytes, and two vectors per lane and group keep
    the packed codes of a warp in whole 32-byte sectors. run 4: a lane holds 32 elements, a whole
    rotation block or 16 bytes of 4-bit codes.
    """
    vectors = group_size // VECTOR_NUMEL
    runs = vectors // run
    wanted = ceil_div(vectors, 2) if run == 1 else runs
    lanes = 1
    while 2 * lanes <= min(wanted, _WARP, runs) or (run == 1 and lanes < min(wanted, _WARP)):
        lanes *= 2
    warps = 1
    while lanes * warps * _MAX_VECTORS < vectors:
        warps *= 2
    held = ceil_div(runs, lanes * warps) * run
    slots = 2 if held <= 2 and lanes >= 2 and warps == 1 else 1
    return Tiling(run=run, lanes=lanes, warps=warps, vectors=held, slots=slots)


class Stores(NamedTuple):
    """How a thread of decode and decode_sum writes its results."""

    run: int  # vectors in a row, 1, 2, 4 or 8; a run lies in one group
    staged: bool = False  # through shared memory, a warp at a time; False: each thread its own run


def stores_of(bits: int, group_size: int, num_sources: int) -> Stores:
    """Choose the stores for a codec and a number of rows; no choice has been measured yet.

    With one row short runs, so that the stores of neighbouring threads lie close together. Where
    several are read, long ones: addresses and scales are paid for once per row and run. Runs of 8
    take 32.6 instructions per element of 8 x int4 instead of the 33.7 of runs of 4, but 96
    registers instead of 64.
    """
    if num_sources == 1:
        return Stores(run=2)
    if bits <= 4 and group_size % (8 * VECTOR_NUMEL) == 0:
        return Stores(run=8)
    return Stores(run=4 if bits < 8 else _RUN_BYTES // VECTOR_NUMEL)


def sum_threads(run: int) -> int:
    """Threads of a block of decode_sum, which adds up 8192 elements at most."""
    return min(THREADS, _SUM_BLOCK // (run * VECTOR_NUMEL))


# ---- macros ----


_MAX_UNROLLED_SOURCES = 8


def encode_macros(fmt: GroupFormat, tiles: Tiling) -> dict[str, int]:
    return {
        "DSQ_BITS": fmt.bits,
        "DSQ_GROUP": fmt.group_size,
        "DSQ_MINMAX": int(fmt.has_offset),
        "DSQ_ROUNDING": rounding_of(fmt),
        "DSQ_RUN": tiles.run,
        "DSQ_LANES": tiles.lanes,
        "DSQ_WARPS": tiles.warps,
        "DSQ_VECTORS": tiles.vectors,
        "DSQ_SLOTS": tiles.slots,
        "DSQ_THREADS": THREADS,
    }


def source_macros(fmt: GroupFormat, sources: int, has_own: bool) -> dict[str, int]:
    return {
        "DSQ_SOURCE_BITS": fmt.bits,
        "DSQ_SOURCE_GROUP": fmt.group_size,
        "DSQ_SOURCE_MINMAX": int(fmt.has_offset),
        "DSQ_SOURCE_LEARNED": int(fmt.levels == "learned"),
        "DSQ_SOURCE_GAUSSIAN": int(fmt.is_gaussian),
        "DSQ_SOURCES": sources if sources <= _MAX_UNROLLED_SOURCES else 0,
        "DSQ_OWN": int(has_own),
    }


# A rotation as a pair: its block, 0 for none, and the sign flips: 0 none, 1 those of the stream,
# 2 (sums only) those of every source.
NO_ROTATION = (0, 0)


def rotation_macros(rotation: tuple[int, int]) -> dict[str, int]:
    block, flips = rotation
    return {"DSQ_ROTATION": block, "DSQ_FLIPS": flips}


def _sorted(macros: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(macros.items()))


def float_bits(number: float) -> int:
    return struct.unpack("<I", struct.pack("<f", number))[0]


# ---- plans ----


ROTATION_RUN = 4  # vectors of 8: a lane rotates 32 elements
_PLANS = 4096  # a training run repeats a few dozen


def supports(fmt: GroupFormat, block: int = 0) -> bool:
    """Return True if the kernels cover a codec; the torch reference covers all."""
    return fmt.group_size <= MAX_GROUP and fmt.group_size % (block or 1) == 0


def whole_numel(fmts: Iterable[GroupFormat]) -> int:
    """A number of elements that fills whole thread blocks of every kernel, for all codecs."""
    units = [8 * VECTOR_NUMEL * THREADS]  # of decode_sum, whose runs are 2, 4 or 8 vectors
    for fmt in fmts:
        tiles = (tiling(fmt.group_size, run) for run in (1, ROTATION_RUN))
        units += [each.block_groups * fmt.group_size for each in tiles]
    return math.lcm(*units)


@lru_cache(maxsize=_PLANS)
def encode_plan(
    fmt: GroupFormat,
    numel: int,
    dtype: torch.dtype,
    base_dtype: torch.dtype | None,
    rotation: tuple[int, int],
    is_aligned: bool,
) -> Plan:
    """Plan launches on rows of ``numel`` elements.

    rotation: elements of a block, 0 for none, and its flips: see ``GradientSpec``.
    is_aligned: rows of values begin at multiples of 16 bytes.
    """
    block = rotation[0]
    layout = layout_of(fmt, round_up(numel, block or 1))
    tiles = tiling(fmt.group_size, ROTATION_RUN if block or fmt.is_gaussian else 1)
    macros = encode_macros(fmt, tiles) | rotation_macros(rotation)
    macros |= {
        "DSQ_VALUES": DTYPES[dtype],
        "DSQ_BASE": -1 if base_dtype is None else DTYPES[base_dtype],
        "DSQ_WHOLE": int(is_aligned and numel % (tiles.block_groups * fmt.group_size) == 0),
    }
    fields = wire_fields("wire", layout) | {"numel": numel}
    blocks = ceil_div(layout.num_groups, tiles.block_groups)
    return Plan("encode", _sorted(macros), blocks, THREADS, fields)


@lru_cache(maxsize=_PLANS)
def sum_plan(
    fmt: GroupFormat,
    numel: int,
    sources: int,
    dtype: torch.dtype,
    scale: float,
    has_own: bool,
    rotation: tuple[int, int],
    add: bool,
    is_aligned: bool,
) -> Plan:
    """Plan launches that add up rows, or decode single ones, as ``encode_plan`` does."""
    block, flips = rotation
    layout = layout_of(fmt, round_up(numel, block or 1))
    stores = _stores(fmt, sources, block)
    threads = sum_threads(stores.run)
    unrolled = 0 if flips == OWN_SIGNS else sources  # that is much code for each source
    macros = source_macros(fmt, unrolled, has_own) | rotation_macros(rotation)
    macros |= {
        "DSQ_RUN": stores.run,
        "DSQ_THREADS": threads,
        "DSQ_VALUES": DTYPES[dtype],
        "DSQ_ADD": int(add),
        "DSQ_STAGED": int(stores.staged),
        "DSQ_FACTOR": int(scale != 1.0 or block > 0),
        "DSQ_WHOLE": int(is_aligned and numel % (stores.run * VECTOR_NUMEL * threads) == 0),
    }
    fields = wire_fields("wire", layout) | sum_fields(numel, sources, scale / (block or 1))
    blocks = ceil_div(ceil_div(layout.numel, VECTOR_NUMEL), stores.run * threads)
    return Plan("decode_sum", _sorted(macros), blocks, threads, fields)


def _stores(fmt: GroupFormat, sources: int, block: int) -> Stores:
    """Choose the stores of a sum; the runs of a rotated one are as long as those of a rotation."""
    stores = stores_of(fmt.bits, fmt.group_size, sources)
    return stores._replace(run=ROTATION_RUN) if block else stores


@lru_cache(maxsize=_PLANS)
def recode_plan(
    source_fmt: GroupFormat, fmt: GroupFormat, numel: int, sources: int, has_own: bool
) -> Plan:
    """Plan launches of recode, as ``encode_plan`` does."""
    layout = layout_of(fmt, numel)
    tiles = tiling(fmt.group_size, ROTATION_RUN)
    macros = encode_macros(fmt, tiles) | source_macros(source_fmt, sources, has_own)
    macros["DSQ_WHOLE"] = int(numel % (tiles.block_groups * fmt.group_size) == 0)
    fields = wire_fields("wire", layout) | wire_fields("source", layout_of(source_fmt, numel))
    fields["sources"] = sources
    blocks = ceil_div(layout.num_groups, tiles.block_groups)
    return Plan("recode", _sorted(macros), blocks, THREADS, fields)


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
    fields = sum_fields(numel, sources, scale) | {
        "padded": padded,
        "source_type": DTYPES[source],
        "values_type": DTYPES[dtype],
        "is_copy": int(is_copy),
    }
    blocks = ceil_div(padded, VECTOR_NUMEL * THREADS)
    return Plan("cast", (("DSQ_THREADS", THREADS),), blocks, THREADS, fields)
