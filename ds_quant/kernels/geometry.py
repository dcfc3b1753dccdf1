"""Which threads of a CUDA block hold which elements; the numbers behind cuda/include/tile.cuh.

Python decides and hands the result over as macros, so that the grid of a launch and the indices
inside the kernel come from one place. Standard library only, besides layout.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ds_quant.kernels.wire import VECTOR_NUMEL, ceil_div

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
    """How a thread of decode and decode_sum writes what it has computed."""

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
