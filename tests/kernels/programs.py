"""Lists of tasks on guarded memory, by a back end and as docs/wire_format.md has them."""

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

# Buffers: values, and what is subtracted of them; messages that have arrived, and values in place
# of one; messages that are written; values of a dtype that are, and fp32 ones.
X, BASE, ARRIVED, OWN, WIRE, OUT, SUMS = range(7)
FIRST_VECTORS = (3, (1 << 32) - 3, 1 << 40, (1 << 63) + 7)
Values = Callable[[int], torch.Tensor]  # that many numbers, fp32


def streams_of(codecs: Sequence[Codec], *, block: int = 0, flips: int = 0) -> RngState:
    """A stream per codec; every second one has learned levels of its own."""
    bound_codecs, rotations = [], []
    for place, codec in enumerate(codecs):
        address = Address(0x0123456789ABCDEF + place, (1 << 33) + 1, FIRST_VECTORS[place % 4])
        group = isinstance(codec, GroupCodec) and place % 2 == 1
        bound_codecs.append(BoundCodec(codec, address, learned(codec) if group else None))
        signs = Address(key=place, step=5) if flips else None
        rotations.append(Rotation(block=block, signs=signs) if block else None)
    return RngState(bound_codecs, rotations)


def kinds_of(codec: Codec) -> Values:
    """Numbers whose groups hold every kind in turn."""
    kinds, size = cycle(sorted(KINDS)), getattr(codec, "group_size", 128)
    return lambda n: awkward(n, size, list(islice(kinds, ceil_div(n, size))), seed=n)


class Program:
    """Operations whose places follow each other in every buffer, up to where readable memory ends;
    equal sizes lie at equal distances.

    skews: where the values of each begin instead, from a multiple of 16 bytes on.
    """

    def __init__(self, operations: Sequence[Operation], skews: Sequence[int] = ()) -> None:
        self.skews = skews
        self._lay_out(operations, [0] * 7)
        if not skews:
            self._lay_out(operations, [-used % 64 for used in self.used])

    def _lay_out(self, operations: Sequence[Operation], begin: list[int]) -> None:
        self.used, self.tasks = begin, []
        for operation in operations:
            self.tasks.append((operation, self._offsets(operation)))
        row = self.used[ARRIVED] = round_up(self.used[ARRIVED], 64)
        for index, (operation, offsets) in enumerate(self.tasks):
            if isinstance(operation, Sum | Recode):
                self.tasks[index] = operation._replace(stride=row), offsets

    def _offsets(self, op: Operation) -> Offsets:
        if isinstance(op, Encode):
            values, wire = self._take(X, op.numel, 12), self._bytes(WIRE, op.codec, op.on_wire)
            base = 0 if op.base is None else self._take(BASE, op.numel, 13)
            return Offsets(values=values, base=base, wire=wire, vector=16 * values)
        if isinstance(op, Decode):
            wire = self._bytes(ARRIVED, op.codec, op.numel)
            return Offsets(wire=wire, values=self._take(OUT, op.numel))
        if isinstance(op, Rotate):
            values = self._take(X, op.numel)
            return Offsets(values=values, rotated=self._take(SUMS, round_up(op.padded, 8)))
        own = self._take(OWN, round_up(op.on_wire, 8))
        if isinstance(op, Sum):
            values = self._take(op.values, round_up(op.numel, 8 if op.values == SUMS else 1))
            wire_in = self._bytes(ARRIVED, op.codec, op.on_wire)
            return Offsets(wire_in=wire_in, values=values, own=own)
        wire_in = self._bytes(ARRIVED, op.source, op.on_wire)
        wire = self._bytes(WIRE, op.codec, op.on_wire)
        return Offsets(wire_in=wire_in, wire=wire, own=own, vector=16 * own)

    def _take(self, buffer: int, items: int, gap: int = 0) -> int:
        start = self.used[buffer] + gap
        if self.skews:
            start = round_up(start, 128) + (self.skews[len(self.tasks)] if buffer != OWN else 0)
        self.used[buffer] = start + items
        return start

    def _bytes(self, buffer: int, codec: Codec, numel: int) -> int:
        start = self.used[buffer]
        self.used[buffer] += codec.wire_bytes(numel)
        return start

    def buffers(
        self, dtype: torch.dtype, base: torch.dtype, values: Values, streams: RngState
    ) -> list[torch.Tensor]:
        """Filled: new values and those that arrive are ``values``."""
        dtypes = dtype, base, torch.uint8, torch.float32, torch.uint8, dtype, torch.float32
        reading = [task for task in self.tasks if isinstance(task[0], Decode | Sum | Recode)]
        sources = max([getattr(op, "sources", 1) for op, _ in reading], default=0)
        row, used = self.used[ARRIVED], [*self.used]
        used[ARRIVED] *= sources
        found = [guarded(n, dtype) for n, dtype in zip(used, dtypes, strict=True)]
        for buffer, n in enumerate(used):
            byte = found[buffer].dtype == torch.uint8
            found[buffer].copy_(torch.full((n,), 0x55) if byte else torch.randn(n))
        for op, offsets in self.tasks:
            if isinstance(op, Encode | Rotate):
                new = found[X][offsets.values :][: op.numel].copy_(values(op.numel))
                if isinstance(op, Encode) and op.base is not None:
                    found[BASE][offsets.base :][: op.numel] = new.float() * 1.001 + 0.01
        for source in range(sources):
            for op, offsets in reading:
                x = values(getattr(op, "on_wire", op.numel))
                codec = codec_of_source(op)
                table = table_of(codec, streams, op)
                wire = bytes_of(x.numpy(), codec, streams.address(op.stream, source), table)
                first = offsets.wire if isinstance(op, Decode) else offsets.wire_in
                start = source * row + first
                found[ARRIVED][start:][: len(wire)] = wire
        return found


# ---- as the page says ----


def table_of(codec: Codec, streams: RngState, op: Operation) -> np.ndarray | None:
    if getattr(codec, "levels", "") != "learned":
        return None
    return codec.table(streams.bound_codecs[op.stream].levels, torch.device("cpu")).numpy()


def bytes_of(
    x: np.ndarray, codec: Codec, address: Address, table: np.ndarray | None
) -> torch.Tensor:
    key, step, first = address[:3]
    with np.errstate(all="ignore"):
        row = oracle.row_of(x, format_of(codec), (key, step), first, table)
    filled = bytearray(row.ljust(codec.wire_bytes(len(x)), b"\0"))
    return torch.frombuffer(filled, dtype=torch.uint8)


def codec_of_source(op: Decode | Sum | Recode) -> Codec:
    """Codec of the messages that an operation reads."""
    return op.source if isinstance(op, Recode) else op.codec


class Page(NamedTuple):
    """A task with its buffers and streams, in the words of the page."""

    op: Operation
    offsets: Offsets
    buffers: list[torch.Tensor]
    streams: RngState

    def values(self) -> np.ndarray:
        """The numbers that are encoded or rotated, (numel,) fp32."""
        op, offsets = self.op, self.offsets
        x = self.buffers[X][offsets.values :][: op.numel].float().numpy()
        if isinstance(op, Encode) and op.base is not None:
            x = x - self.buffers[BASE][offsets.base :][: op.numel].float().numpy()
        return oracle.rotate(x * self.signs(len(x)), op.block) if op.block else x

    def signs(self, numel: int, sender: int | None = None) -> np.ndarray | int:
        """Factors of the sign flips of `numel` elements."""
        op = self.op
        if not op.flips:
            return 1
        key, step = self.streams.rotations[op.stream].signs[:2]
        return np.resize(oracle.signs_of(key, step, op.block, sender), numel)

    def decoded(self, start: int, numel: int) -> np.ndarray:
        """The numbers of a message that begins at byte `start`."""
        codec = codec_of_source(self.op)
        row = self.buffers[ARRIVED][start:][: codec.wire_bytes(numel)].numpy().tobytes()
        table = table_of(codec, self.streams, self.op)
        return oracle.read(row, format_of(codec), numel, table)

    def rows(self) -> list[np.ndarray]:
        """The rows of a sum in their order, (numel on the wire,) fp32 each."""
        op, offsets = self.op, self.offsets
        starts = [offsets.wire_in + source * op.stride for source in range(op.sources)]
        rows = [self.decoded(start, op.on_wire) for start in starts]
        if op.own_row is not None:
            own = self.buffers[OWN][offsets.own :][: op.on_wire]
            rows.insert(op.own_row, own.numpy())
        return rows

    def encode(self, x: np.ndarray) -> None:
        """Write the message of x."""
        op, offsets = self.op, self.offsets
        table = table_of(op.codec, self.streams, op)
        address = self.streams.address(op.stream, offsets.vector)
        wire = bytes_of(x, op.codec, address, table)
        self.buffers[op.wire][offsets.wire :][: len(wire)] = wire


def added_up(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Sum in the order of the rows."""
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


def final_sum(page: Page) -> np.ndarray:
    """The sum of a Sum, rotated back and scaled."""
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


def carry_out(
    op: Operation, offsets: Offsets, buffers: list[torch.Tensor], streams: RngState
) -> None:
    """Do a task as the page says."""
    page = Page(op, offsets, buffers, streams)
    if isinstance(op, Encode):
        page.encode(page.values())
    elif isinstance(op, Recode):
        page.encode(added_up(page.rows()))
    elif isinstance(op, Rotate):
        buffers[op.rotated][offsets.rotated :][: op.padded] = torch.from_numpy(page.values())
    else:
        out = buffers[op.values][offsets.values :][: op.numel]
        if isinstance(op, Sum):
            out.copy_(torch.from_numpy(final_sum(page)[: op.numel]))
        else:
            found = torch.from_numpy(page.decoded(offsets.wire, op.numel))
            out.copy_(found + out.float() if op.add else found)


def check(
    kernels,
    program: Program,
    streams: RngState,
    dtype: torch.dtype = torch.bfloat16,
    base: torch.dtype = torch.bfloat16,
    values: Values = torch.randn,
) -> list[torch.Tensor]:
    """Every buffer is what the page says; return them. NaN may have any sign and payload."""
    torch.manual_seed(1)
    buffers = program.buffers(dtype, base, values, streams)
    wanted = [buffer.clone() for buffer in buffers]
    with np.errstate(all="ignore"):
        for task in program.tasks:
            carry_out(*task, wanted, streams)
    found = [kernels.put(buffer) for buffer in buffers]
    tables = [c.levels if c.levels is None else kernels.put(c.levels) for c in streams.bound_codecs]
    there = [c._replace(levels=t) for c, t in zip(streams.bound_codecs, tables, strict=True)]
    Operations(program.tasks).run(found, RngState(there, streams.rotations))
    for number, pair in enumerate(zip(found, wanted, strict=True)):
        assert_values(*pair, f"buffer {number}")
    return wanted


def assert_values(found: torch.Tensor, wanted: torch.Tensor, what: str = "") -> None:
    """Equal bits, except that a NaN may have any sign and payload."""
    found, wanted = found.cpu(), wanted.to(found.dtype)
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    same = found.contiguous().view(as_int) == wanted.contiguous().view(as_int)
    places = (~(same | (found.isnan() & wanted.isnan()))).nonzero().tolist()
    assert not places, f"{what}: {places[:8]} of {tuple(wanted.shape)} differ"


ADDRESS = Address(key=0x0123456789ABCDEF, step=(1 << 33) + 1, first_vector=11)


def expected(codec: Codec, x: torch.Tensor, address: Address = ADDRESS) -> torch.Tensor:
    """Wire rows of x (rows, numel); learned levels are those of ``inputs.learned``."""
    table, (key, step, first), rows = learned(codec), address[:3], []
    for place, row in enumerate(x.float().numpy()):
        at = Address(key, step, first + place * address.vectors_per_row(x.shape[1]))
        rows.append(bytes_of(row, codec, at, None if table is None else table.numpy()))
    return torch.stack(rows)


def decoded(codec: Codec, wire: torch.Tensor, numel: int) -> torch.Tensor:
    """(rows, numel) fp32 of what ``expected`` gives."""
    table, fmt = learned(codec), format_of(codec)
    levels = None if table is None else table.numpy()
    rows = [oracle.read(row.numpy().tobytes(), fmt, numel, levels) for row in wire]
    return torch.from_numpy(np.stack(rows))
