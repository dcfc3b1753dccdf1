"""Quantized all-gather and reduce-scatter of lists of tensors.

[Note: one message per peer] The payload for one peer is a *row*: one slot per tensor, codes and
scales together, every slot at a 16-byte boundary. A slot's place depends on the tensors' sizes
alone, so all ranks agree on it, and a short or empty last shard uses the front of its slot:
padding is never encoded.

May import: torch, codec, coding, kernels, layout, link, meter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def lay_out(sizes: Sequence[tuple[Codec, int]]) -> tuple[list[Slot], int]:
    """Slots of a row that holds one (codec, numel) after the other, and the bytes of the row."""
    slots, start = [], 0
    for codec, numel in sizes:
        slots.append(Slot(start, codec.wire_bytes(numel)))
        start += slots[-1].nbytes
    return slots, start


def cut(payload: Tensor, rows: Sequence[tuple[Sequence[Slot], int]]) -> Iterator[Tensor]:
    """The slots of rows that follow each other in a message, (1, bytes) each.

    One call makes all views: sliced one by one they cost microseconds each.
    """
    sizes = [slot.nbytes for slots, _ in rows for slot in slots]
    return iter(payload.view(1, -1)[:, : sum(sizes)].split(sizes, dim=1))


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
        for shard, coding, slot in zip(shards, codings, slots, strict=True):
            used = row[slot.start : slot.start + coding.codec.wire_bytes(shard.numel())]
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
        slots: list[Slot],
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
                self._full = [
                    _decode_shards(rows[..., slot.start :], numel, coding, dtype)
                    for slot, (numel, coding, dtype) in zip(self._slots, self._tensors, strict=True)
                ]
            self._exchange = None
        return self._full


def _decode_shards(rows: Tensor, numel: int, coding: Coding, dtype: torch.dtype) -> Tensor:
    """rows (nodes, ranks of a node, >= slot bytes) uint8 -> (numel,) in ``dtype``."""
    nodes, node_size = rows.shape[:2]
    # Not of the pool: the values are DeepSpeed's, which frees them where it would without us.
    full = torch.empty(numel, dtype=dtype, device=rows.device)
    for block in _blocks(numel, nodes * node_size, node_size):
        used = coding.codec.wire_bytes(block.width)
        node, first = divmod(block.first, node_size)
        coding.codec.decode(
            rows[node, first : first + block.count, :used],
            full[block.start : block.stop].view(block.count, block.width),
            levels=coding.levels,
        )
    return full


class _Block(NamedTuple):
    """``count`` shards of equal ``width`` from rank ``first`` on: elements [start, stop)."""

    first: int
    count: int
    width: int
    start: int
    stop: int


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
        for tensor, coding, slot in zip(tensors, codings, slots, strict=True):
            place = rows[:, slot.start : slot.start + slot.nbytes]
            _encode_shards(tensor.reshape(-1), coding, place, notes)
    exchange = None
    if nbytes:
        sent = [nbytes] * link.size
        exchange = link.all_to_all(rows.view(-1), sent=sent, received=sent, role="gradients")
    return ReduceHandle(exchange, slots, list(zip(numels, codings, strict=True)), link, scale)


def _encode_shards(flat: Tensor, coding: Coding, rows: Tensor, notes: Notes) -> None:
    """flat (numel,) -> rows (ranks, slot bytes) uint8, row r holding shard r."""
    ranks = rows.shape[0]
    for block in _blocks(flat.numel(), ranks, ranks):
        values = flat[block.start : block.stop].view(block.count, block.width)
        used = coding.codec.wire_bytes(block.width)
        wire = rows[block.first : block.first + block.count, :used]
        moved = coding.at(block.start)
        moved.encode(values, wire)
        notes.note(moved, values, wire)


class ReduceHandle:
    """Result of ``reduce_scatter``; ``wait`` is idempotent."""

    def __init__(
        self,
        exchange: Exchange | None,
        slots: list[Slot],
        tensors: list[tuple[int, Coding]],
        link: Link,
        scale: float,
    ) -> None:
        self._exchange, self._slots, self._tensors = exchange, slots, tensors
        self._link, self._scale = link, scale
        self._shards: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        """This rank's shards, each 1-D fp32 without padding (possibly empty)."""
        if self._shards is None:
            rows = torch.empty(self._link.size, 0, dtype=torch.uint8)
            if self._exchange is not None:
                rows = self._exchange.wait().view(self._link.size, -1)
            with self._link.decoding(), together():
                self._shards = [
                    self._sum(rows[:, slot.start :], numel, coding)
                    for slot, (numel, coding) in zip(self._slots, self._tensors, strict=True)
                ]
            self._exchange = None
        return self._shards

    def _sum(self, rows: Tensor, numel: int, coding: Coding) -> Tensor:
        start, stop = shard_range(numel, self._link.size, self._link.rank)
        shard = self._link.empty(stop - start, dtype=torch.float32, device=rows.device)
        used = coding.codec.wire_bytes(shard.numel())
        coding.codec.decode_sum(rows[:, :used], shard, scale=self._scale, levels=coding.levels)
        return shard
