"""Quantized all-gather and reduce-scatter of lists of tensors.

[Note: one message per peer] The payload for one peer is a *row*: one slot per tensor, codes and
scales together, every slot at a 16-byte boundary. A slot's place depends on the tensors' sizes
alone, so all ranks agree on it, and a short or empty last shard uses the front of its slot:
padding is never encoded.

May import: torch, codec, coding, kernels, layout, link, meter, operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant.codec import Codec
from ds_quant.coding import Coding
from ds_quant.kernels.batch import Decode, Task
from ds_quant.kernels.dispatch import together
from ds_quant.layout import ceil_div, shard_range
from ds_quant.link import Exchange, Fabric, Link, Waiting
from ds_quant.meter import Notes
from ds_quant.operations import Operations, Streams


class Slot(NamedTuple):
    """Place of one tensor's codes and scales in a row: first byte and bytes."""

    start: int
    nbytes: int


Layout = tuple[tuple[Slot, ...], int]  # slots of a row, and its bytes


def lay_out(sizes: Iterable[tuple[Codec, int]]) -> Layout:
    """Layout of a row that holds one (codec, numel) after the other. Every step asks again."""
    return _lay_out(tuple(sizes))


@lru_cache(maxsize=1024)
def _lay_out(sizes: tuple[tuple[Codec, int], ...]) -> Layout:
    slots, start = [], 0
    for codec, numel in sizes:
        slots.append(Slot(start, codec.wire_bytes(numel)))
        start += slots[-1].nbytes
    return tuple(slots), start


def cut(payload: Tensor, rows: Sequence[Layout]) -> Iterator[Tensor]:
    """The slots of rows that follow each other in a message, (1, bytes) each.

    One call makes all views: sliced one by one they cost microseconds each.
    """
    sizes = [slot.nbytes for slots, _ in rows for slot in slots]
    return iter(payload.view(1, -1)[:, : sum(sizes)].split(sizes, dim=1))


def between(values: Tensor, start: int, stop: int) -> Tensor:
    """Elements [start, stop) along the last dimension; a view is made only if these are not all:
    making one costs a microsecond.
    """
    return values if stop - start == values.shape[-1] else values[..., start:stop]


def all_gather(
    shards: Sequence[Tensor], numels: Sequence[int], codings: Sequence[Coding], link: Link | Fabric
) -> GatherHandle:
    """Gather tensors that are split over the ranks in DeepSpeed's ceil-division shards.

    1. encode this rank's shards into one row  2. all-gather the rows, asynchronously
    3. ``wait()`` decodes all rows, this rank's own too, so that all ranks hold equal bits.

    Args:
        shards: per tensor this rank's shard, 1-D and without padding (possibly empty), on the
            device of the collective.
        numels: per tensor its full number of elements.
        codings: per tensor; the addresses are this rank's own.
    """
    sizes = [(c.codec, ceil_div(n, link.size)) for c, n in zip(codings, numels, strict=True)]
    slots, nbytes = lay_out(sizes)
    row = link.empty(nbytes, device=shards[0].device)
    with link.encoding("weights") as notes, together():
        for shard, coding, room in zip(shards, codings, cut(row, [(slots, nbytes)]), strict=True):
            used = between(room, 0, coding.codec.wire_bytes(shard.numel()))
            coding.encode(shard, used)
            notes.note(coding, shard, used)
    exchange = link.all_gather(row, role="weights") if nbytes else None
    dtypes = [s.dtype for s in shards]
    return GatherHandle(exchange, slots, list(zip(numels, codings, dtypes, strict=True)), link)


class GatherHandle:
    """Result of ``all_gather``; ``wait`` is idempotent."""

    def __init__(
        self,
        exchange: Waiting | None,
        slots: Sequence[Slot],
        tensors: list[tuple[int, Coding, torch.dtype]],
        link: Link | Fabric,
    ) -> None:
        self._exchange, self._slots, self._tensors, self._link = exchange, slots, tensors, link
        self._full: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        """Full tensors, each (numel,) in the dtype of its shard."""
        if self._full is None:
            rows = torch.empty(0, dtype=torch.uint8)
            if self._exchange is not None:
                rows = self._exchange.wait()
            self._full = new_values([(n, dtype) for n, _, dtype in self._tensors], rows.device)
            codings = [coding for _, coding, _ in self._tensors]
            sizes = tuple([(c.codec, numel) for numel, c, _ in self._tensors])
            with self._link.decoding():
                decode = shard_decoding(sizes, self._link.size, node_size_of(rows))
                decode.run([rows, *self._full], Streams(codings, [None] * len(codings)))
            self._exchange = None
        return self._full


def new_values(shapes: Iterable[tuple[int, torch.dtype]], device: torch.device) -> list[Tensor]:
    """Tensors (numel,), not of the pool: DeepSpeed frees them where it would without us."""
    values = []
    for numel, dtype in shapes:
        values.append(torch.empty(numel, dtype=dtype, device=device))
    return values


def node_size_of(gathered: Tensor) -> int | None:
    """Ranks per node of a gather over two levels, None over one."""
    return gathered.shape[1] if gathered.dim() == 3 else None


@lru_cache(maxsize=1024)
def shard_decoding(
    sizes: tuple[tuple[Codec, int], ...], ranks: int, node_size: int | None
) -> Operations:
    """What decodes the rows of a gather, buffer 0, to whole tensors, the buffers behind it; how
    the rows lie: see ``row_place``.
    """
    slots, nbytes = lay_out((codec, ceil_div(numel, ranks)) for codec, numel in sizes)
    tasks: list[Task] = []
    for tensor, ((codec, numel), slot) in enumerate(zip(sizes, slots, strict=True)):
        for rank in range(ranks):
            start, stop = shard_range(numel, ranks, rank)
            if start < stop:
                operation = Decode(codec, stop - start, 0, 1 + tensor, tensor)
                place = row_place(rank, ranks, node_size) * nbytes + slot.start
                tasks.append((operation, (place, start)))
    return Operations(tasks)


def row_place(rank: int, ranks: int, node_size: int | None) -> int:
    """Which row of what a gather brings is that of a rank: over two levels (local, node) ones."""
    if node_size is None:
        return rank
    node, local = divmod(rank, node_size)
    return local * (ranks // node_size) + node


class _Block(NamedTuple):
    """``count`` shards of equal ``width`` from rank ``first`` on."""

    first: int
    count: int
    width: int


def _blocks(numel: int, ranks: int) -> Iterator[_Block]:
    """The full shards, then the short one; empty shards are in none."""
    width = ceil_div(numel, ranks)
    full = numel // width if width else 0
    if full:
        yield _Block(0, full, width)
    if full * width < numel:
        yield _Block(full, 1, numel - full * width)


def reduce_scatter(
    tensors: Sequence[Tensor], codings: Sequence[Coding], link: Link, *, scale: float
) -> ReduceHandle:
    """Sum tensors over the ranks, leaving each rank its ceil-division shard, times ``scale``.

    1. encode one row per destination  2. all-to-all the rows, asynchronously  3. ``wait()``
    decodes and adds the rows in fp32 in source-rank order. Each contribution is quantized once.
    Where kernels cast for nothing, a shard has the dtype of its tensor, else fp32.

    Args:
        tensors: contiguous, any shape, on the device of the collective.
        codings: per tensor; the addresses are this rank's own.
        scale: factor applied once to the fp32 sum (1/ranks for the mean).
    """
    numels = [t.numel() for t in tensors]
    sizes = [(c.codec, ceil_div(n, link.size)) for c, n in zip(codings, numels, strict=True)]
    slots, nbytes = lay_out(sizes)
    rows = link.empty(link.size, nbytes, device=tensors[0].device)
    with link.encoding("gradients") as notes, together():
        places = rows.split([slot.nbytes for slot in slots], dim=1)
        for tensor, coding, place in zip(tensors, codings, places, strict=True):
            _encode_shards(tensor.reshape(-1), coding, place, notes)
    exchange = None
    if nbytes:
        sent = [nbytes] * link.size
        exchange = link.all_to_all(rows.view(-1), sent=sent, received=sent, role="gradients")
    wanted = [(t.numel(), t.dtype, c) for t, c in zip(tensors, codings, strict=True)]
    return ReduceHandle(exchange, slots, wanted, link, scale)


def _encode_shards(flat: Tensor, coding: Coding, rows: Tensor, notes: Notes) -> None:
    """flat (numel,) -> rows (ranks, slot bytes) uint8, row r holding shard r."""
    numel, ranks = flat.numel(), rows.shape[0]
    for first, count, width in _blocks(numel, ranks):
        start = first * ceil_div(numel, ranks)
        values = between(flat, start, start + count * width).view(count, width)
        wire = rows if count == ranks else rows[first : first + count]
        wire = between(wire, 0, coding.codec.wire_bytes(width))
        moved = coding.at(start)
        moved.encode(values, wire)
        notes.note(moved, values, wire)


class ReduceHandle:
    """Result of ``reduce_scatter``; ``wait`` is idempotent."""

    def __init__(
        self,
        exchange: Exchange | None,
        slots: Sequence[Slot],
        tensors: list[tuple[int, torch.dtype, Coding]],
        link: Link,
        scale: float,
    ) -> None:
        self._exchange, self._slots, self._tensors = exchange, slots, tensors
        self._link, self._scale = link, scale
        self._shards: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        """This rank's shards, each 1-D without padding (possibly empty); fp32, or see above."""
        if self._shards is None:
            rows = torch.empty(self._link.size, 0, dtype=torch.uint8)
            if self._exchange is not None:
                rows = self._exchange.wait().view(self._link.size, -1)
            self._shards = self._room(rows.device)
            columns = rows.split([slot.nbytes for slot in self._slots], dim=1)
            with self._link.decoding(), together():
                for wire, shard, (_, _, coding) in zip(
                    columns, self._shards, self._tensors, strict=True
                ):
                    used = between(wire, 0, coding.codec.wire_bytes(shard.numel()))
                    coding.decode_sum(used, shard, own=None, scale=self._scale)
            self._exchange = None
        return self._shards

    def _room(self, device: torch.device) -> list[Tensor]:
        """For the shards, one buffer per dtype."""
        ranges = [shard_range(n, self._link.size, self._link.rank) for n, *_ in self._tensors]
        dtypes = [coding.sum_dtype(dtype, device) for _, dtype, coding in self._tensors]
        room: list[Tensor | None] = [None] * len(ranges)
        for dtype in dict.fromkeys(dtypes):
            lengths = [
                stop - start if mine == dtype else None
                for (start, stop), mine in zip(ranges, dtypes, strict=True)
            ]
            made = self._link.empties(lengths, dtype=dtype, device=device)
            room = [old if new is None else new for old, new in zip(room, made, strict=True)]
        return room
