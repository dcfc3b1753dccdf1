"""Programs for the kernels: tasks on guarded memory, carried out by a back end and, independently,
as docs/wire_format.md says. Both must leave equal buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np
import torch

from ds_quant.codec.bound import BoundCodec, Rotation
from ds_quant.codec.codec import Codec, GroupCodec
from ds_quant.kernels.batch import (
    OWN_SIGNS,
    Decode,
    Encode,
    Offsets,
    Operation,
    Recode,
    Rotate,
    Sum,
)
from ds_quant.kernels.dispatch import Operations, RngState
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.wire import ceil_div, round_up
from tests.codecs import format_of
from tests.kernels.inputs import KINDS, awkward, guarded, learned
from tests.unit import wire_oracle as oracle

# The buffers of a program, by number.
X = 0  # values that are encoded or rotated
BASE = 1  # values that are subtracted from them
ARRIVED = 2  # messages of all sources
OWN = 3  # fp32 values in place of a message
WIRE = 4  # messages that are written
OUT = 5  # values that are written, in the dtype of X
SUMS = 6  # fp32 values that are written
NUM_BUFFERS = 7

FIRST_VECTORS = (3, (1 << 32) - 3, 1 << 40, (1 << 63) + 7)
Values = Callable[[int], torch.Tensor]  # returns that many numbers, fp32


def streams_of(codecs: Sequence[Codec], *, block: int = 0, flips: int = 0) -> RngState:
    """Return a stream per codec; every second one has learned levels of its own."""
    bound_codecs: list[BoundCodec] = []
    rotations: list[Rotation | None] = []
    for index, codec in enumerate(codecs):
        address = Address(0x0123456789ABCDEF + index, (1 << 33) + 1, FIRST_VECTORS[index % 4])
        has_levels = isinstance(codec, GroupCodec) and index % 2 == 1
        bound_codecs.append(BoundCodec(codec, address, learned(codec) if has_levels else None))
        signs = Address(key=index, step=5) if flips else None
        rotations.append(Rotation(block=block, signs=signs) if block else None)
    return RngState(bound_codecs, rotations)


def kinds_of(codec: Codec) -> Values:
    """Return numbers whose groups hold every kind in turn."""
    kinds = cycle(sorted(KINDS))
    group_size = getattr(codec, "group_size", 128)

    def values(numel: int) -> torch.Tensor:
        kinds_of_groups = list(islice(kinds, ceil_div(numel, group_size)))
        return awkward(numel, group_size, kinds_of_groups, seed=numel)

    return values


class Program:
    """Operations with their places in the buffers, one after the other.

    Every buffer ends where readable memory ends. Operations of equal size lie at equal distances.

    skews: instead, the first item of every operation's values, counted from a multiple of 128.
    used: items of every buffer.
    tasks: operations with their offsets.
    """

    def __init__(self, operations: Sequence[Operation], skews: Sequence[int] = ()) -> None:
        self.skews = skews
        self.used: list[int] = []
        self.tasks: list[tuple[Operation, Offsets]] = []
        self._lay_out(operations, starts=[0] * NUM_BUFFERS)
        if not skews:
            self._lay_out(operations, starts=[-end % 64 for end in self.used])

    def _lay_out(self, operations: Sequence[Operation], starts: list[int]) -> None:
        """Place the operations, in every buffer from ``starts`` on."""
        self.used = starts
        self.tasks = []
        for operation in operations:
            self.tasks.append((operation, self._offsets(operation)))
        self.used[ARRIVED] = round_up(self.used[ARRIVED], 64)
        bytes_of_a_source = self.used[ARRIVED]
        for index, (operation, offsets) in enumerate(self.tasks):
            if isinstance(operation, Sum | Recode):
                self.tasks[index] = operation._replace(stride=bytes_of_a_source), offsets

    def _offsets(self, op: Operation) -> Offsets:
        match op:
            case Encode():
                values = self._take(X, op.numel, gap=12)
                wire = self._take_message(WIRE, op.codec, op.on_wire)
                base = 0 if op.base is None else self._take(BASE, op.numel, gap=13)
                return Offsets(values=values, base=base, wire=wire, vector=16 * values)
            case Decode():
                wire = self._take_message(ARRIVED, op.codec, op.numel)
                return Offsets(wire=wire, values=self._take(OUT, op.numel))
            case Rotate():
                values = self._take(X, op.numel)
                rotated = self._take(SUMS, round_up(op.padded, 8))
                return Offsets(values=values, rotated=rotated)
            case Sum():
                own = self._take(OWN, round_up(op.on_wire, 8))
                numel = round_up(op.numel, 8) if op.values == SUMS else op.numel
                values = self._take(op.values, numel)
                wire_in = self._take_message(ARRIVED, op.codec, op.on_wire)
                return Offsets(wire_in=wire_in, values=values, own=own)
            case Recode():
                own = self._take(OWN, round_up(op.on_wire, 8))
                wire_in = self._take_message(ARRIVED, op.source, op.on_wire)
                wire = self._take_message(WIRE, op.codec, op.on_wire)
                return Offsets(wire_in=wire_in, wire=wire, own=own, vector=16 * own)

    def _take(self, buffer: int, numel: int, gap: int = 0) -> int:
        """Return the first item of ``numel`` new ones. gap: unused items before them."""
        start = self.used[buffer] + gap
        if self.skews:
            start = round_up(start, 128)
            if buffer != OWN:
                start += self.skews[len(self.tasks)]
        self.used[buffer] = start + numel
        return start

    def _take_message(self, buffer: int, codec: Codec, numel: int) -> int:
        """Return the first byte of a new message."""
        start = self.used[buffer]
        self.used[buffer] += codec.wire_bytes(numel)
        return start

    def buffers(
        self, dtype: torch.dtype, base: torch.dtype, values: Values, streams: RngState
    ) -> list[torch.Tensor]:
        """Return the buffers before the program runs.

        dtype, base: of X and OUT, and of BASE.
        values: the numbers that are encoded, here or by the sources of the messages.
        """
        reading = [task for task in self.tasks if isinstance(task[0], Decode | Sum | Recode)]
        sources = max([getattr(op, "sources", 1) for op, _ in reading], default=0)
        sizes = [*self.used]
        sizes[ARRIVED] *= sources
        dtypes = [dtype, base, torch.uint8, torch.float32, torch.uint8, dtype, torch.float32]
        buffers = [_untouched(*each) for each in zip(sizes, dtypes, strict=True)]
        for op, offsets in self.tasks:
            if isinstance(op, Encode | Rotate):
                _write_new_values(op, offsets, buffers, values(op.numel))
        for source in range(sources):
            for op, offsets in reading:
                message = _message_of_source(op, source, streams, values)
                wire = offsets.wire if isinstance(op, Decode) else offsets.wire_in
                start = source * self.used[ARRIVED] + wire
                buffers[ARRIVED][start : start + len(message)] = message
        return buffers


def _untouched(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a buffer on guarded memory; what a program leaves alone is not zero."""
    buffer = guarded(numel, dtype)
    if dtype == torch.uint8:
        return buffer.copy_(torch.full((numel,), 0x55))
    return buffer.copy_(torch.randn(numel))


def _write_new_values(
    op: Encode | Rotate, offsets: Offsets, buffers: list[torch.Tensor], values: torch.Tensor
) -> None:
    """Write the values of an operation, and a base that differs little from them."""
    new = buffers[X][offsets.values :][: op.numel].copy_(values)
    if isinstance(op, Encode) and op.base is not None:
        buffers[BASE][offsets.base :][: op.numel] = new.float() * 1.001 + 0.01


def _message_of_source(
    op: Decode | Sum | Recode, source: int, streams: RngState, values: Values
) -> torch.Tensor:
    """Return the message that an operation reads from a source."""
    codec = codec_of_source(op)
    numel = op.numel if isinstance(op, Decode) else op.on_wire
    address = streams.address(op.stream, source)
    return bytes_of(values(numel).numpy(), codec, address, table_of(codec, streams, op))


# ---- as the page says ----


def table_of(codec: Codec, streams: RngState, op: Operation) -> np.ndarray | None:
    """Return the levels of an operation's messages, None for a codec that learns none."""
    if getattr(codec, "levels", "") != "learned":
        return None
    return codec.table(streams.bound_codecs[op.stream].levels, torch.device("cpu")).numpy()


def bytes_of(
    x: np.ndarray, codec: Codec, address: Address, table: np.ndarray | None
) -> torch.Tensor:
    """Return the message of x, (bytes,) uint8."""
    key, step, first = address[:3]
    with np.errstate(all="ignore"):
        row = oracle.row_of(x, format_of(codec), (key, step), first, table)
    filled = bytearray(row.ljust(codec.wire_bytes(len(x)), b"\0"))
    return torch.frombuffer(filled, dtype=torch.uint8)


def codec_of_source(op: Decode | Sum | Recode) -> Codec:
    """Return the codec of the messages that an operation reads."""
    return op.source if isinstance(op, Recode) else op.codec


class TaskOfPage(NamedTuple):
    """A task with its buffers and streams, in the words of the page, docs/wire_format.md."""

    op: Operation
    offsets: Offsets
    buffers: list[torch.Tensor]
    streams: RngState

    # - What it reads

    def values(self) -> np.ndarray:
        """Return the numbers that are encoded or rotated, (numel,) fp32."""
        op, offsets = self.op, self.offsets
        x = self.buffers[X][offsets.values :][: op.numel].float().numpy()
        if isinstance(op, Encode) and op.base is not None:
            x = x - self.buffers[BASE][offsets.base :][: op.numel].float().numpy()
        if not op.block:
            return x
        return oracle.rotate(x * self.signs(len(x)), op.block)

    def signs(self, numel: int, sender: int | None = None) -> np.ndarray | int:
        """Return the factors of the sign flips of ``numel`` elements."""
        op = self.op
        if not op.flips:
            return 1
        key, step = self.streams.rotations[op.stream].signs[:2]
        return np.resize(oracle.signs_of(key, step, op.block, sender), numel)

    def decoded(self, start: int, numel: int) -> np.ndarray:
        """Return the numbers of a message that begins at byte ``start``."""
        codec = codec_of_source(self.op)
        row = self.buffers[ARRIVED][start:][: codec.wire_bytes(numel)].numpy().tobytes()
        table = table_of(codec, self.streams, self.op)
        return oracle.read(row, format_of(codec), numel, table)

    def rows(self) -> list[np.ndarray]:
        """Return the rows of a sum in their order, (numel on the wire,) fp32 each."""
        op, offsets = self.op, self.offsets
        starts = [offsets.wire_in + source * op.stride for source in range(op.sources)]
        rows = [self.decoded(start, op.on_wire) for start in starts]
        if op.own_row is not None:
            own = self.buffers[OWN][offsets.own :][: op.on_wire]
            rows.insert(op.own_row, own.numpy())
        return rows

    # - What it writes

    def write(self, buffer: int, start: int, values: np.ndarray) -> None:
        """Write values from item ``start`` of a buffer on, rounded to its dtype."""
        self.buffers[buffer][start : start + len(values)] = torch.from_numpy(values)

    def write_message(self, x: np.ndarray) -> None:
        """Encode x as the page says, without a kernel, and write the message to its place."""
        op, offsets = self.op, self.offsets
        table = table_of(op.codec, self.streams, op)
        address = self.streams.address(op.stream, offsets.vector)
        message = bytes_of(x, op.codec, address, table)
        self.buffers[op.wire][offsets.wire :][: len(message)] = message


def added_up(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum in the order of the rows."""
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


def final_sum(page: TaskOfPage) -> np.ndarray:
    """Return the sum of a Sum, rotated back and scaled."""
    op = page.op
    rows = page.rows()
    if op.flips == OWN_SIGNS:
        turned_back = [oracle.unrotate(row, op.block, op.block) for row in rows]
        rows = [row * page.signs(len(row), k) for k, row in enumerate(turned_back)]
        return added_up(rows) * np.float32(op.scale / op.block)
    total = added_up(rows)
    if op.block:
        return oracle.unrotate(total, op.block, op.scale) * page.signs(len(total))
    return total * np.float32(op.scale)


def decoded_values(page: TaskOfPage) -> np.ndarray:
    """Return the values of a Decode, added to those that are there if it adds."""
    op, offsets = page.op, page.offsets
    values = page.decoded(offsets.wire, op.numel)
    if op.add:
        values = values + page.buffers[op.values][offsets.values :][: op.numel].float().numpy()
    return values


def carry_out(
    op: Operation, offsets: Offsets, buffers: list[torch.Tensor], streams: RngState
) -> None:
    """Do a task as docs/wire_format.md says."""
    page = TaskOfPage(op, offsets, buffers, streams)
    match op:
        case Encode():
            page.write_message(page.values())
        case Recode():
            page.write_message(added_up(page.rows()))
        case Rotate():
            page.write(op.rotated, offsets.rotated, page.values())
        case Sum():
            page.write(op.values, offsets.values, final_sum(page)[: op.numel])
        case Decode():
            page.write(op.values, offsets.values, decoded_values(page))


# ---- comparisons ----


def check(
    kernels,
    program: Program,
    streams: RngState,
    dtype: torch.dtype = torch.bfloat16,
    base: torch.dtype = torch.bfloat16,
    values: Values = torch.randn,
) -> list[torch.Tensor]:
    """Compare every buffer with the page, and return them. NaN may have any sign and payload."""
    torch.manual_seed(1)
    buffers = program.buffers(dtype, base, values, streams)
    wanted = [buffer.clone() for buffer in buffers]
    with np.errstate(all="ignore"):
        for op, offsets in program.tasks:
            carry_out(op, offsets, wanted, streams)
    found = [kernels.put(buffer) for buffer in buffers]
    bound_codecs: list[BoundCodec] = []
    for bound in streams.bound_codecs:
        levels = None if bound.levels is None else kernels.put(bound.levels)
        bound_codecs.append(bound._replace(levels=levels))
    Operations(program.tasks).run(found, RngState(bound_codecs, streams.rotations))
    for number in range(NUM_BUFFERS):
        assert_values(found[number], wanted[number], f"buffer {number}")
    return wanted


def assert_values(found: torch.Tensor, wanted: torch.Tensor, name: str = "") -> None:
    """Compare bits, except that a NaN may have any sign and payload."""
    found = found.cpu().contiguous()
    wanted = wanted.to(found.dtype).contiguous()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    is_equal = found.view(integers) == wanted.view(integers)
    is_equal |= found.isnan() & wanted.isnan()
    differing = (~is_equal).nonzero().tolist()
    assert not differing, f"{name}: {differing[:8]} of {tuple(wanted.shape)} differ"


ADDRESS = Address(key=0x0123456789ABCDEF, step=(1 << 33) + 1, first_vector=11)


def expected(codec: Codec, x: torch.Tensor, address: Address = ADDRESS) -> torch.Tensor:
    """Return the messages of x (rows, numel); learned levels are those of ``inputs.learned``."""
    key, step, first_vector = address[:3]
    table = _learned_table(codec)
    messages = []
    for index, row in enumerate(x.float().numpy()):
        vector = first_vector + index * address.vectors_per_row(x.shape[1])
        messages.append(bytes_of(row, codec, Address(key, step, vector), table))
    return torch.stack(messages)


def decoded(codec: Codec, wire: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the numbers of messages that ``expected`` has made, (rows, numel) fp32."""
    table = _learned_table(codec)
    rows = []
    for message in wire:
        rows.append(oracle.read(message.numpy().tobytes(), format_of(codec), numel, table))
    return torch.from_numpy(np.stack(rows))


def _learned_table(codec: Codec) -> np.ndarray | None:
    table = learned(codec)
    return None if table is None else table.numpy()
