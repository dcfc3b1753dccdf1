"""Quantized all-gather and reduce-scatter of lists of tensors.

[Note: one message per peer] The payload for one peer is a *row*: one slot per tensor, codes and
scales together, every slot at a 16-byte boundary. A slot's place depends on the tensors' sizes
alone, so all ranks agree on it, and a short or empty last shard uses the front of its slot:
padding is never encoded.

May import: torch, codec, coding, kernels, layout, link, meter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant.codec import Codec
from ds_quant.coding import Coding
from ds_quant.kernels.dispatch import together
from ds_quant.layout import ceil_div, shard_range
from ds_quant.link import Exchange, Fabric, Link, Waiting, by_node
from ds_quant.meter import Notes


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
            rows = torch.empty(1, self._link.size, 0, dtype=torch.uint8)
            if self._exchange is not None:
                rows = by_node(self._exchange.wait(), self._link.size)
            with self._link.decoding(), together():
                sizes = [slot.nbytes for slot in self._slots]
                columns = zip(*(node.split(sizes, dim=1) for node in rows), strict=True)
                self._full = [
                    _decode_shards(nodes, numel, coding, dtype)
                    for nodes, (numel, coding, dtype) in zip(columns, self._tensors, strict=True)
                ]
            self._exchange = None
        return self._full


def _decode_shards(
    nodes: Sequence[Tensor], numel: int, coding: Coding, dtype: torch.dtype
) -> Tensor:
    """nodes: of each its rows, (ranks of a node, slot bytes) uint8 -> (numel,) in ``dtype``."""
    node_size = nodes[0].shape[0]
    # Not of the pool: the values are DeepSpeed's, which frees them where it would without us.
    full = torch.empty(numel, dtype=dtype, device=nodes[0].device)
    for block in _blocks(numel, len(nodes) * node_size, node_size):
        values = between(full, block.start, block.stop).view(block.count, block.width)
        node, first = divmod(block.first, node_size)
        wire = _rows_of(block, nodes[node], first, coding)
        coding.codec.decode(wire, values, levels=coding.levels)
    return full


class _Block(NamedTuple):
    """``count`` shards of equal ``width`` from rank ``first`` on: elements [start, stop)."""

    first: int
    count: int
    width: int
    start: int
    stop: int


def _rows_of(block: _Block, rows: Tensor, first: int, coding: Coding) -> Tensor:
    """What of rows (ranks, slot bytes), from row ``first`` on, holds a block."""
    if block.count != rows.shape[0]:
        rows = rows[first : first + block.count]
    return between(rows, 0, coding.codec.wire_bytes(block.width))


@lru_cache(maxsize=4096)
def _blocks(numel: int, ranks: int, node_size: int) -> tuple[_Block, ...]:
    """The full shards of every node in one block, then the short one; empty shards are in none."""
    width = ceil_div(numel, ranks)
    full = numel // width if width else 0
    blocks = []
    for first in range(0, full, node_size):
        count = min(node_size, full - first)
        blocks.append(_Block(first, count, width, first * width, (first + count) * width))
    if full * width < numel:
        blocks.append(_Block(full, 1, numel - full * width, full * width, numel))
    return tuple(blocks)


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
    ranks = rows.shape[0]
    for block in _blocks(flat.numel(), ranks, ranks):
        values = between(flat, block.start, block.stop).view(block.count, block.width)
        wire = _rows_of(block, rows, block.first, coding)
        moved = coding.at(block.start)
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
