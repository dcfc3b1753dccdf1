"""Arguments of the CUDA kernels as bytes: the structs of cuda/include/job.cuh, field by field.

All fields are unsigned 64-bit integers: addresses, strides and offsets in bytes, counts, bit
patterns. May import layout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ds_quant.layout import WireLayout

_WIRE = ("bytes", "stride", "plane1", "plane2", "scales", "offsets", "end", "numel")
_PLACE = ("first_block", "row_blocks")  # first, and used by tables only

FIELDS = {
    "encode": (
        *_PLACE,
        *(f"wire.{field}" for field in _WIRE),
        *("values", "values_stride", "numel", "base", "base_stride"),
        *("key", "step", "first_vector", "levels", "flips_low", "flips_high"),
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
        *("key", "step", "first_vector", "levels", "source_levels"),
    ),
}

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
        """What the buffer holds."""
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


def place_of(kernel: str, field: str) -> int:
    """Index of a field among the 64-bit integers of a job, to change it in a device buffer."""
    return FIELDS[kernel].index(field)


class Plan:
    """What all launches on tensors of one shape have in common; made once, used at every call."""

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
