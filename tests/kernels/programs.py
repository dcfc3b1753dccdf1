"""Lists of tasks on guarded memory, by a back end and as docs/wire_format.md has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice

import numpy as np
import torch

from ds_quant.codec.bound import BoundCodec, Rotation
from ds_quant.codec.codec import Codec, GroupCodec
from ds_quant.kernels.batch import OWN_SIGNS, Decode, Encode, Operation, Places, Recode, Rotate, Sum
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
            self.tasks.append((operation, self._places(operation)))
        row = self.used[ARRIVED] = round_up(self.used[ARRIVED], 64)
        for place, (op, places) in enumerate(self.tasks):
            if isinstance(op, Sum | Recode):
                self.tasks[place] = op._replace(stride=row), places

    def _places(self, op: Operation) -> Places:
        if isinstance(op, Encode):
            first, wire = self._take(X, op.numel, 12), self._bytes(WIRE, op.codec, op.on_wire)
            base = () if op.base is None else (self._take(BASE, op.numel, 13),)
            return first, wire, 16 * first, *base
        if isinstance(op, Decode):
            return self._bytes(ARRIVED, op.codec, op.numel), self._take(OUT, op.numel)
        if isinstance(op, Rotate):
            return self._take(X, op.numel), self._take(SUMS, round_up(op.padded, 8))
        own = self._take(OWN, round_up(op.on_wire, 8))
        if isinstance(op, Sum):
            values = self._take(op.values, round_up(op.numel, 8 if op.values == SUMS else 1))
            return self._bytes(ARRIVED, op.codec, op.on_wire), values, own
        read = self._bytes(ARRIVED, op.source, op.on_wire)
        return read, self._bytes(WIRE, op.codec, op.on_wire), own, 16 * own

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
        for op, places in self.tasks:
            if isinstance(op, Encode | Rotate):
                new = found[X][places[0] :][: op.numel].copy_(values(op.numel))
                if isinstance(op, Encode) and op.base is not None:
                    found[BASE][places[3] :][: op.numel] = new.float() * 1.001 + 0.01
        for source in range(sources):
            for op, places in reading:
                codec = op.source if isinstance(op, Recode) else op.codec
                x, table = values(getattr(op, "on_wire", op.numel)), table_of(codec, streams, op)
                wire = bytes_of(x.numpy(), codec, streams.address(op.stream, source), table)
                found[ARRIVED][source * row + places[0] :][: len(wire)] = wire
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


def carry_out(
    op: Operation, places: Places, buffers: list[torch.Tensor], streams: RngState
) -> None:
    """Do a task as the page says."""
    block, flips, rotation = getattr(op, "block", 0), getattr(op, "flips", 0), None
    rotation = streams.rotations[op.stream]

    def signs(n: int, sender: int | None = None) -> np.ndarray | int:
        if not flips:
            return 1
        return np.resize(oracle.signs_of(*rotation.signs[:2], block, sender), n)

    def write(x: np.ndarray, vector: int) -> None:
        table = table_of(op.codec, streams, op)
        wire = bytes_of(x, op.codec, streams.address(op.stream, vector), table)
        buffers[op.wire][places[1] :][: len(wire)] = wire

    def read(codec: Codec, n: int, source: int = 0) -> np.ndarray:
        start = places[0] + source * getattr(op, "stride", 0)
        row = buffers[ARRIVED][start:][: codec.wire_bytes(n)].numpy().tobytes()
        return oracle.read(row, format_of(codec), n, table_of(codec, streams, op))

    if isinstance(op, Encode | Rotate):
        x = buffers[X][places[0] :][: op.numel].float().numpy()
        if getattr(op, "base", None) is not None:
            x = x - buffers[BASE][places[3] :][: op.numel].float().numpy()
        x = oracle.rotate(x * signs(len(x)), block) if block else x
        if isinstance(op, Encode):
            write(x, places[2])
        else:
            buffers[op.rotated][places[1] :][: op.padded] = torch.from_numpy(x)
    elif isinstance(op, Decode):
        out = buffers[op.values][places[1] :][: op.numel]
        found = torch.from_numpy(read(op.codec, op.numel))
        out.copy_(found + out.float() if op.add else found)
    else:
        codec, own = op.source if isinstance(op, Recode) else op.codec, buffers[OWN][places[2] :]
        rows = [read(codec, op.on_wire, source) for source in range(op.sources)]
        if op.own_row is not None:
            rows.insert(op.own_row, own[: op.on_wire].numpy())
        if flips == OWN_SIGNS:
            rows = [oracle.unrotate(r, block, block) * signs(len(r), k) for k, r in enumerate(rows)]
        total = rows[0].copy()
        for row in rows[1:]:
            total += row
        if isinstance(op, Recode):
            write(total, places[3])
            return
        if block and flips != OWN_SIGNS:
            total = oracle.unrotate(total, block, op.scale) * signs(len(total))
        else:
            total *= np.float32(op.scale / (block or 1))
        out = buffers[op.values][places[1] :][: op.numel]
        out.copy_(torch.from_numpy(total[: op.numel]))


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
