"""Operations on pieces of many tensors as one call, with their arguments as arrays.

[Note: operations] A collective does the same for every tensor, slice and rank: encode, add up,
encode the sum. An operation says what is done and in which buffers, its places say where. Both
follow from sizes alone, so they are made once per kind of bucket; a step hands over the buffers and
the streams of random bits, whose numbers are filled into one array. So the host's work does not
grow with the ranks. Places are in items of a buffer, and vectors count from the stream's first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ds_quant.kernels.wire import Codec, Format, round_up

# First items in the buffers of an operation, and its first vector of random bits if it takes any.
# The class of the operation gives their order.
Places = tuple[int, ...]

OWN_SIGNS = 2  # a value of ``flips``: every sender has sign flips of its own

# Numbers by which the kernels know dtypes and ways to round.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ROUNDINGS = {"nearest": 0, "stochastic": 1, "random_shift": 2}


def rounding_of(fmt: Format) -> int:
    """Return how the codes of a format are made."""
    if fmt.is_gaussian:
        return 4
    return 3 if fmt.levels == "learned" else _ROUNDINGS[fmt.rounding]


def _whole_blocks(numel: int, block: int) -> int:
    """Elements of the blocks of a rotation that hold `numel`; block 0: no rotation."""
    return round_up(numel, block or 1)


class Encode(NamedTuple):
    """Encode values into a message. Places: values, wire, vector, and base if there is one.

    base: buffer of the values that are subtracted first.
    block: elements of a rotation block, of which the wire then holds whole ones; 0: no rotation.
    flips: True if the rotation may flip signs.
    """

    codec: Codec
    numel: int
    values: int  # a buffer, as wire and own
    wire: int
    stream: int
    block: int = 0
    flips: bool = False
    base: int | None = None

    @property
    def on_wire(self) -> int:
        """Elements of a row."""
        return _whole_blocks(self.numel, self.block)


class Decode(NamedTuple):
    """Decode a message. Places: wire, values.

    add: True to add to the values that are there.
    """

    codec: Codec
    numel: int
    wire: int
    values: int
    stream: int
    add: bool = False


class Sum(NamedTuple):
    """Decode and add up messages, rows ``stride`` bytes apart. Places: wire, values, own.

    sources: number of rows on the wire.
    own_row: index of this rank's own row, read from ``own`` (fp32) instead of the wire; None if all
        rows are on the wire.
    block, flips: of a rotation, which is undone; with OWN_SIGNS that of every source before it is
        added, see ``reference.decode_sum``.
    fuse_with: codec of the Recode tasks to fuse with, for fp32 values that are neither scaled nor
        rotated back; does not affect the result.
    """

    codec: Codec
    numel: int
    wire_in: int
    values: int
    stream: int
    sources: int
    stride: int
    own_row: int | None
    own: int
    block: int = 0
    flips: int = 0
    scale: float = 1.0
    fuse_with: Codec | None = None

    @property
    def on_wire(self) -> int:
        """Elements of a row."""
        return _whole_blocks(self.numel, self.block)


class Recode(NamedTuple):
    """Encode a sum of messages, see ``Sum``. Places: wire_in, wire, own, vector.

    Rotated values stay rotated.

    source: codec of the messages.
    codec: of the sum.
    """

    source: Codec
    codec: Codec
    numel: int
    wire_in: int
    wire: int
    stream: int
    sources: int
    stride: int
    own_row: int | None
    own: int
    block: int = 0

    @property
    def on_wire(self) -> int:
        """Elements of a row."""
        return _whole_blocks(self.numel, self.block)


class Rotate(NamedTuple):
    """Rotate values, or cast them to fp32 without a block. Places: values, rotated.

    codec: makes operations alike; does not affect the result.
    """

    codec: Codec
    numel: int
    values: int
    rotated: int
    stream: int
    block: int = 0
    flips: bool = False

    @property
    def padded(self) -> int:
        """Elements of the rotated blocks."""
        return _whole_blocks(self.numel, self.block)


Operation = Encode | Decode | Sum | Recode | Rotate
Task = tuple[Operation, Places]


class Rows(NamedTuple):
    """An operation at places that follow each other at equal steps, in one or more dimensions."""

    operation: Operation
    places: Places
    shape: tuple[int, ...] = ()
    steps: tuple[Places, ...] = ()  # of each dimension


def rows_of(tasks: Iterable[Task], dims: int) -> list[Rows]:
    """Merge consecutive tasks into few rows of ``dims`` dimensions, whose places increase."""
    rows = [Rows(*task) for task in tasks]
    for _ in range(dims):
        rows = _joined(rows)
    return rows


def _joined(rows: Sequence[Rows]) -> list[Rows]:
    joined = []
    first = 0
    while first < len(rows):
        one, last = rows[first], first
        step = tuple(0 for _ in one.places)
        while last + 1 < len(rows) and _are_alike(one, rows[last + 1]):
            pairs = zip(rows[last + 1].places, rows[last].places, strict=True)
            difference = tuple(b - a for b, a in pairs)
            if min(difference) < 0 or (last > first and difference != step):
                break
            step, last = difference, last + 1
        shape, steps = (last - first + 1, *one.shape), (step, *one.steps)
        joined.append(Rows(one.operation, one.places, shape, steps))
        first = last + 1
    return joined


def _are_alike(a: Rows, b: Rows) -> bool:
    return a.operation == b.operation and a.shape == b.shape and a.steps == b.steps


class RngArrays(NamedTuple):
    """The streams of a run as arrays, (streams,) uint64, and the tensors that must outlive them."""

    key: np.ndarray
    step: np.ndarray
    first_vector: np.ndarray
    levels: np.ndarray  # addresses of tables, 0 for the initial one
    flips_low: np.ndarray
    flips_high: np.ndarray
    signs_key: np.ndarray
    signs_step: np.ndarray
    tensors: Sequence[torch.Tensor | None] = ()


# Fields of a job that its stream fills in: field -> name in RngArrays.
RANDOM = {name: name for name in ("key", "step", "first_vector")}
FLIPS = {name: name for name in ("flips_low", "flips_high")}


class Job(NamedTuple):
    """Arguments of a kernel for one operation, or for rows of it.

    numbers: constant fields.
    pointers: addresses, filled in at every run: a buffer and an offset in bytes.
    rng_fields: fields filled in at every run, and their names in RngArrays.
    levels: fields for addresses of tables of levels, and the codecs of the tables.
    vector: first vector of the random bits, counted from the stream's first.
    """

    numbers: Mapping[str, Any]
    stream: int
    pointers: Mapping[str, tuple[int, int]]
    rng_fields: Mapping[str, str]
    levels: Mapping[str, Codec]
    vector: int = 0


def at(buffers: Sequence[torch.Tensor], buffer: int, start: int) -> tuple[int, int]:
    """Return a place in items of a buffer as ``Job.pointers`` has it: in bytes."""
    return buffer, start * buffers[buffer].element_size()


def records_of(fields: np.dtype, numbers: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Return a record for each mapping; fields that it lacks are 0."""
    records = np.zeros(len(numbers), dtype=fields)
    for name in dict.fromkeys(name for each in numbers for name in each):
        records[name] = [each.get(name, 0) for each in numbers]
    return records


def _address_of(table: torch.Tensor | None) -> int:
    """Address of a table of levels; 0 for a codec without one."""
    return 0 if table is None else table.data_ptr()


class Arguments:
    """Jobs of one kernel and kind as ``records``, for runs to fill in."""

    def __init__(self, fields: np.dtype, jobs: Sequence[Job], device: torch.device) -> None:
        self.records = records_of(fields, [job.numbers for job in jobs])
        self._streams = np.array([job.stream for job in jobs])
        self._pointers = []
        self._rng_fields = []
        first = jobs[0]
        for field in first.pointers:
            buffers, behind = np.array([job.pointers[field] for job in jobs], dtype=np.int64).T
            offsets = behind.astype(np.uint64)
            self._pointers.append((self.records[field], buffers.copy(), offsets))
        for field, name in first.rng_fields.items():
            vectors = [job.vector if field == "first_vector" else 0 for job in jobs]
            self._rng_fields.append((self.records[field], name, np.array(vectors, dtype=np.uint64)))
        self._levels = []
        for field in first.levels:
            codecs = [job.levels[field] for job in jobs]
            with torch.inference_mode(False):
                tables = {codec: codec.table(None, device) for codec in set(codecs)}
            if any(table is not None for table in tables.values()):
                addresses = [_address_of(tables[codec]) for codec in codecs]
                initial = np.array(addresses, dtype=np.uint64)
                self._levels.append((self.records[field], initial, tables))  # alive

    def fill(self, addresses: np.ndarray, streams: RngArrays) -> None:
        """addresses: of the buffers, uint64. Without learned levels a codec's own are taken."""
        for target, buffers, offsets in self._pointers:
            np.add(addresses[buffers], offsets, out=target)
        for target, name, vectors in self._rng_fields:
            np.add(getattr(streams, name)[self._streams], vectors, out=target)
        for target, initial, _ in self._levels:
            learned = streams.levels[self._streams]
            target[:] = np.where(learned, learned, initial)


Runnable = Callable[[np.ndarray, RngArrays], None]  # addresses of the buffers, uint64
