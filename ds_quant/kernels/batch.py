"""Operations on pieces of many tensors as one call, with their arguments as arrays.

[Note: operations] A collective does the same for every tensor, slice and rank: encode, add up,
encode the sum. An operation says what is done and in which buffers, its offsets say where. Both
follow from sizes alone, so they are made once per kind of bucket; a step hands over the buffers and
the streams of random bits, whose numbers are filled into one array. So the host's work does not
grow with the ranks. Offsets are in items of a buffer, and vectors count from the stream's first.

[Note: operands] Every class of operations describes itself once: the buffers that it reads and
writes, the codecs of its messages, its numbers and its random bits. Buffers and codecs are named by
their operand, a field of ``Offsets``. A back end has a ``Struct`` for each of its kernels, which
maps these names to the fields of the kernel's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ds_quant.kernels.wire import Codec, GroupFormat, round_up

Buffers = Sequence[torch.Tensor]

OWN_SIGNS = 2  # a value of ``flips``: every sender has sign flips of its own

# Numbers by which the kernels know dtypes and ways to round.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ROUNDINGS = {"nearest": 0, "stochastic": 1, "random_shift": 2}


def rounding_of(fmt: GroupFormat) -> int:
    """Return how the codes of a format are made."""
    if fmt.is_gaussian:
        return 4
    return 3 if fmt.levels == "learned" else _ROUNDINGS[fmt.rounding]


def _whole_blocks(numel: int, block: int) -> int:
    """Elements of the blocks of a rotation that hold `numel`; block 0: no rotation."""
    return round_up(numel, block or 1)


# ---- descriptions of operations ----


class Offsets(NamedTuple):
    """First items of a task in its buffers, by operand; of operands that it lacks 0.

    values: numbers of any dtype, read or written. base: numbers that are subtracted from them.
    wire: a message, in bytes. wire_in: the first of several messages that are added up.
    own: fp32 contribution of this rank to a sum. rotated: fp32 result of a rotation.
    vector: first vector of the random bits, no buffer.
    """

    values: int = 0
    base: int = 0
    wire: int = 0
    wire_in: int = 0
    own: int = 0
    rotated: int = 0
    vector: int = 0

    def times(self, count: int) -> Offsets:
        """Return all offsets multiplied by ``count``."""
        return Offsets(*[offset * count for offset in self])


NO_OFFSETS = Offsets()
MESSAGES = ("wire", "wire_in")  # operands that a codec encodes
NUMBERS = ("values", "base")  # operands whose dtype depends on the buffer


class Numbers(NamedTuple):
    """Constants of an operation.

    numel: elements of its values. wire_numel: elements of its messages, whole rotation blocks.
    block: elements of a rotation block; 0: no rotation.
    flips: 0 for a rotation without sign flips, 1 with those of the stream, OWN_SIGNS.
    sources: messages that are added up. stride: bytes from one to the next.
    own_row: index of this rank's own row among them; None if all rows are messages.
    scale: factor of the sum.
    add: True to add to the values that are there.
    """

    numel: int
    wire_numel: int
    block: int = 0
    flips: int = 0
    sources: int = 1
    stride: int = 0
    own_row: int | None = None
    scale: float = 1.0
    add: bool = False

    @property
    def rows_added(self) -> int:
        """Rows of a sum, the messages and this rank's own."""
        return self.sources + (self.own_row is not None)


# Arrays of RngArrays: random bits, sign flips, and the stream of sign flips of every source.
RANDOM_BITS = ("key", "step", "first_vector")
FLIPS = ("flips_low", "flips_high")
SIGNS = ("signs_key", "signs_step")


def _flips_of(block: int, flips: int) -> tuple[str, ...]:
    """Return the arrays that hold the sign flips of a rotation."""
    if not block or not flips:
        return ()
    return SIGNS if flips == OWN_SIGNS else FLIPS


class Encode(NamedTuple):
    """Encode values into a message.

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

    def reads(self) -> dict[str, int]:
        if self.base is None:
            return {"values": self.values}
        return {"values": self.values, "base": self.base}

    def writes(self) -> dict[str, int]:
        return {"wire": self.wire}

    def codecs(self) -> dict[str, Codec]:
        return {"wire": self.codec}

    def numbers(self) -> Numbers:
        return Numbers(
            numel=self.numel,
            wire_numel=self.on_wire,
            block=self.block,
            flips=int(self.flips),
        )

    def rng_fields(self) -> tuple[str, ...]:
        return RANDOM_BITS + _flips_of(self.block, self.flips)


class Decode(NamedTuple):
    """Decode a message.

    add: True to add to the values that are there.
    """

    codec: Codec
    numel: int
    wire: int
    values: int
    stream: int
    add: bool = False

    def reads(self) -> dict[str, int]:
        return {"wire": self.wire}

    def writes(self) -> dict[str, int]:
        return {"values": self.values}

    def codecs(self) -> dict[str, Codec]:
        return {"wire": self.codec}

    def numbers(self) -> Numbers:
        return Numbers(numel=self.numel, wire_numel=self.numel, add=self.add)

    def rng_fields(self) -> tuple[str, ...]:
        return ()


class Sum(NamedTuple):
    """Decode and add up messages, rows ``stride`` bytes apart.

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

    def reads(self) -> dict[str, int]:
        return _rows_read(self)

    def writes(self) -> dict[str, int]:
        return {"values": self.values}

    def codecs(self) -> dict[str, Codec]:
        return {"wire_in": self.codec}

    def numbers(self) -> Numbers:
        return Numbers(
            numel=self.numel,
            wire_numel=self.on_wire,
            block=self.block,
            flips=int(self.flips),
            sources=self.sources,
            stride=self.stride,
            own_row=self.own_row,
            scale=self.scale,
        )

    def rng_fields(self) -> tuple[str, ...]:
        return _flips_of(self.block, self.flips)


class Recode(NamedTuple):
    """Encode a sum of messages, see ``Sum``. Rotated values stay rotated.

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

    def reads(self) -> dict[str, int]:
        return _rows_read(self)

    def writes(self) -> dict[str, int]:
        return {"wire": self.wire}

    def codecs(self) -> dict[str, Codec]:
        return {"wire_in": self.source, "wire": self.codec}

    def numbers(self) -> Numbers:
        return Numbers(
            numel=self.on_wire,
            wire_numel=self.on_wire,
            sources=self.sources,
            stride=self.stride,
            own_row=self.own_row,
        )

    def rng_fields(self) -> tuple[str, ...]:
        return RANDOM_BITS


class Rotate(NamedTuple):
    """Rotate values, or cast them to fp32 without a block.

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

    def reads(self) -> dict[str, int]:
        return {"values": self.values}

    def writes(self) -> dict[str, int]:
        return {"rotated": self.rotated}

    def codecs(self) -> dict[str, Codec]:
        return {"rotated": self.codec}

    def numbers(self) -> Numbers:
        return Numbers(
            numel=self.numel,
            wire_numel=self.padded,
            block=self.block,
            flips=int(self.flips),
        )

    def rng_fields(self) -> tuple[str, ...]:
        return _flips_of(self.block, self.flips)


def _rows_read(operation: Sum | Recode) -> dict[str, int]:
    """Return the buffers of the rows that are added up."""
    if operation.own_row is None:
        return {"wire_in": operation.wire_in}
    return {"wire_in": operation.wire_in, "own": operation.own}


Operation = Encode | Decode | Sum | Recode | Rotate
Task = tuple[Operation, Offsets]


def operands_of(operation: Operation) -> dict[str, int]:
    """Return the buffers that an operation reads or writes."""
    return operation.reads() | operation.writes()


def source_of(operation: Operation) -> str:
    """Return the operand that an operation reads first."""
    return next(iter(operation.reads()))


def target_of(operation: Operation) -> str:
    """Return the operand that an operation writes."""
    return next(iter(operation.writes()))


def has_dtypes_of_kernels(operation: Operation, buffers: Buffers) -> bool:
    """Return True if kernels read and write the dtypes of its numbers."""
    operands = operands_of(operation)
    dtypes = [buffers[operands[name]].dtype for name in NUMBERS if name in operands]
    return all(dtype in DTYPES for dtype in dtypes)


# ---- rows ----


class Rows(NamedTuple):
    """Tasks of one operation at equal distances, which kernels take as rows of one job.

    first: offsets of the first task. step: from one task to the next, 0 for a single one.
    """

    operation: Operation
    first: Offsets
    num_rows: int = 1
    step: Offsets = NO_OFFSETS


def rows_of(tasks: Iterable[Task]) -> list[Rows]:
    """Merge consecutive tasks of one operation whose offsets increase by equal steps.

    Tasks that ``is_single`` stay alone.
    """
    rows: list[Rows] = []
    for task in tasks:
        operation, offsets = task
        longer = None
        if rows and operation == rows[-1].operation and not is_single(task):
            longer = _extended(rows[-1], offsets)
        if longer is None:
            rows.append(Rows(operation, offsets))
        else:
            rows[-1] = longer
    return rows


def is_single(task: Task) -> bool:
    """Return True unless kernels take many rows of the operation at once."""
    return not isinstance(task[0], _IN_ROWS)


_IN_ROWS = (Encode, Decode)


def _extended(rows: Rows, offsets: Offsets) -> Rows | None:
    """Return the rows and one more task behind them; None if it does not lie at the next step."""
    if rows.num_rows == 1:
        step = Offsets(*[b - a for a, b in zip(rows.first, offsets, strict=True)])
        return None if min(step) < 0 else Rows(rows.operation, rows.first, 2, step)
    expected = [a + rows.num_rows * step for a, step in zip(rows.first, rows.step, strict=True)]
    if list(offsets) != expected:
        return None
    return rows._replace(num_rows=rows.num_rows + 1)


# ---- arguments ----


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


Field = float | tuple[int, ...]  # a constant field of a struct
Pointer = tuple[int, int]  # a buffer and an offset in bytes


class Struct(NamedTuple):
    """Fields of a kernel's arguments, by the names of [Note: operands].

    addresses: of operands.
    strides: bytes from row to row of operands; vectors from row to row.
    levels: addresses of the tables of codecs.
    rng: numbers of the stream, by their names in RngArrays.
    """

    addresses: Mapping[str, str]
    strides: Mapping[str, str]
    levels: Mapping[str, str]
    rng: Mapping[str, str]


class Job(NamedTuple):
    """Arguments of a kernel for rows of an operation.

    numbers: constant fields.
    pointers: addresses, filled in at every run.
    rng_fields: numbers of the stream, filled in at every run: field -> name in RngArrays.
    levels: fields for addresses of tables of levels, and the codecs of the tables.
    vector: first vector of the random bits, counted from the stream's first.
    """

    numbers: Mapping[str, Field]
    stream: int
    pointers: dict[str, Pointer]
    rng_fields: Mapping[str, str]
    levels: Mapping[str, Codec]
    vector: int


def pointer(buffers: Buffers, buffer: int, offset: int) -> Pointer:
    """Return a pointer to an offset in items of a buffer."""
    return buffer, offset * buffers[buffer].element_size()


def job_of(
    rows: Rows,
    buffers: Buffers,
    struct: Struct,
    numbers: Mapping[str, Field],
    codecs: Mapping[str, Codec],
) -> Job:
    """Return the arguments of rows of an operation.

    numbers: constant fields other than strides. codecs: of its operands.
    """
    operation = rows.operation
    pointers: dict[str, Pointer] = {}
    fields = dict(numbers)
    for name, buffer in operands_of(operation).items():
        if name in struct.addresses:
            first = getattr(rows.first, name)
            pointers[struct.addresses[name]] = pointer(buffers, buffer, first)
        if name in struct.strides:
            _, stride = pointer(buffers, buffer, getattr(rows.step, name))
            fields[struct.strides[name]] = stride
    if "vector" in struct.strides:
        fields[struct.strides["vector"]] = rows.step.vector
    rng_fields = {struct.rng[name]: name for name in operation.rng_fields() if name in struct.rng}
    levels = {struct.levels[name]: codecs[name] for name in codecs if name in struct.levels}
    return Job(fields, operation.stream, pointers, rng_fields, levels, rows.first.vector)


def records_of(fields: np.dtype, numbers: Sequence[Mapping[str, Field]]) -> np.ndarray:
    """Return a record for each mapping; fields that it lacks are 0."""
    records = np.zeros(len(numbers), dtype=fields)
    for name in dict.fromkeys(name for each in numbers for name in each):
        records[name] = [each.get(name, 0) for each in numbers]
    return records


class Arguments:
    """Jobs of one kernel as ``records``, for runs to fill in.

    All jobs have the same pointers and tables. A number of the stream that one of them takes is
    filled in for all; the others do not read it.
    """

    def __init__(self, fields: np.dtype, jobs: Sequence[Job], device: torch.device) -> None:
        self.records = records_of(fields, [job.numbers for job in jobs])
        self._streams = np.array([job.stream for job in jobs])
        self._pointers = []
        for field in jobs[0].pointers:
            buffers, offsets = np.array([job.pointers[field] for job in jobs], dtype=np.int64).T
            target = self.records[field]
            self._pointers.append((target, buffers.copy(), offsets.astype(np.uint64)))
        self._rng_fields = []
        vectors = np.array([job.vector for job in jobs], dtype=np.uint64)
        rng_fields = {field: name for job in jobs for field, name in job.rng_fields.items()}
        for field, name in rng_fields.items():
            first = vectors if name == "first_vector" else np.zeros_like(vectors)
            self._rng_fields.append((self.records[field], name, first))
        self._levels = []
        for field in jobs[0].levels:
            tables = _tables_of({job.levels[field] for job in jobs}, device)
            if any(table is not None for table in tables.values()):
                addresses = [_address_of(tables[job.levels[field]]) for job in jobs]
                initial = np.array(addresses, dtype=np.uint64)
                self._levels.append((self.records[field], initial, tables))  # keeps them alive

    def fill(self, addresses: np.ndarray, streams: RngArrays) -> None:
        """Fill in addresses and random bits. A codec without learned levels has its own.

        addresses: of the buffers, uint64.
        """
        for target, buffers, offsets in self._pointers:
            np.add(addresses[buffers], offsets, out=target)
        for target, name, vectors in self._rng_fields:
            np.add(getattr(streams, name)[self._streams], vectors, out=target)
        for target, initial, _ in self._levels:
            learned = streams.levels[self._streams]
            target[:] = np.where(learned, learned, initial)


def _tables_of(codecs: Iterable[Codec], device: torch.device) -> dict[Codec, torch.Tensor | None]:
    """Return the codecs' own tables of levels, which later runs may use under autograd."""
    with torch.inference_mode(False):
        return {codec: codec.table(None, device) for codec in codecs}


def _address_of(table: torch.Tensor | None) -> int:
    """Address of a table of levels; 0 for a codec without one."""
    return 0 if table is None else table.data_ptr()


Runnable = Callable[[np.ndarray, RngArrays], None]  # addresses of the buffers, uint64
