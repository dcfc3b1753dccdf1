"""Quantized all-gather and reduce-scatter of lists of tensors, and gathers of the node shard.

[Note: strided layout] With G ranks per node, ZeRO-3's shard r of a parameter belongs to rank
(node, local) = (r // G, r % G). Local rank g of every node keeps the shards {r : r % G = g} as rows
(nodes, width), row n being shard n * G + g. The owner's shard is then in the owner's own rows, and
new weights cross between nodes by one all-gather among the ranks of equal g: each byte enters a
node once. A gather inside the node brings [G][nodes][width]; shard order is [nodes][G][width].

[Note: one message per peer] The payload for one peer is a *row*: one slot per tensor, codes and
scales together, every slot at a 16-byte boundary. A slot's place depends on the tensors' sizes
alone, so all ranks agree on it, and a short or empty last shard uses the front of its slot:
padding is never encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant.codec.bound import Coding
from ds_quant.codec.codec import Codec
from ds_quant.comm.operations import Operations, Streams
from ds_quant.comm.traffic import Notes
from ds_quant.comm.transport import Exchange, Fabric, Link, PendingGather
from ds_quant.kernels.batch import Decode, Task
from ds_quant.kernels.dispatch import batch_launches
from ds_quant.kernels.wire import ceil_div, shard_range


class Slot(NamedTuple):
    """Place of one tensor's codes and scales in a row: first byte and bytes."""

    start: int
    nbytes: int


Layout = tuple[tuple[Slot, ...], int]  # slots of a row, and its bytes


def lay_out(sizes: Iterable[tuple[Codec, int]]) -> Layout:
    """Lay out a row that holds one (codec, numel) after the other. Cached: every step asks."""
    return _lay_out(tuple(sizes))


@lru_cache(maxsize=1024)
def _lay_out(sizes: tuple[tuple[Codec, int], ...]) -> Layout:
    slots, start = [], 0
    for codec, numel in sizes:
        slots.append(Slot(start, codec.wire_bytes(numel)))
        start += slots[-1].nbytes
    return tuple(slots), start


def cut(payload: Tensor, rows: Sequence[Layout]) -> Iterator[Tensor]:
    """Cut consecutive rows of a message into their slots, (1, bytes) each.

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
    with link.encoding("weights") as notes, batch_launches():
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
        exchange: PendingGather | None,
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
    """Allocate tensors (numel,) outside the pool: DeepSpeed frees them as it would without us."""
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
    """Index of a rank's row in a gather's result; (local, node) over two levels."""
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
    """Split the ranks into those with full shards and the one with a short shard; empty ones are
    left out.
    """
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
    with link.encoding("gradients") as notes, batch_launches():
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
            with self._link.decoding(), batch_launches():
                for wire, shard, (_, _, coding) in zip(
                    columns, self._shards, self._tensors, strict=True
                ):
                    used = between(wire, 0, coding.codec.wire_bytes(shard.numel()))
                    coding.decode_sum(used, shard, own=None, scale=self._scale)
            self._exchange = None
        return self._shards

    def _room(self, device: torch.device) -> list[Tensor]:
        """Allocate the shards, one buffer per dtype."""
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


# ---- the node shard ----


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One parameter of ``numel`` elements in the node shard of a rank with place ``local``.

    rows: (nodes, width), in the dtype of the weights; what lies past a shard's end stays zero.
    """

    numel: int
    node_size: int
    local: int
    rows: Tensor

    @classmethod
    def allocate(
        cls, numel: int, *, nodes: int, node_size: int, local: int, dtype: torch.dtype, device: str
    ) -> Kept:
        """Allocate rows of zeros."""
        width = ceil_div(numel, nodes * node_size)
        rows = torch.zeros(nodes, width, dtype=dtype, device=device)
        return cls(numel=numel, node_size=node_size, local=local, rows=rows)

    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """(first node, nodes, length): this rank's rows that hold shards of equal length."""
        return _runs(self.numel, self.rows.shape[0], self.node_size, self.local)


@lru_cache(maxsize=4096)
def _runs(numel: int, nodes: int, node_size: int, local: int) -> tuple[tuple[int, int, int], ...]:
    """Group nodes whose shards of a local rank are equally long; empty ones are left out."""
    ranks, runs = range(local, nodes * node_size, node_size), []
    lengths = [len(range(*shard_range(numel, nodes * node_size, rank))) for rank in ranks]
    for length, members in groupby(range(nodes), key=lengths.__getitem__):
        places = list(members)
        if length:
            runs.append((places[0], len(places), length))
    return tuple(runs)


def exchange(
    kept: Sequence[Kept], shards: Sequence[Tensor], codings: Sequence[Coding], inter: Link
) -> Callable[[], None]:
    """Update all rows of every parameter to the decoded values of their owners.

    1. encode this rank's shards, or what they differ from its own rows, into one message
    2. all-gather among the ranks of equal place, asynchronously  3. the returned function waits and
    decodes, this rank's own row too.

    Args:
        shards: per parameter this rank's new weights without padding, (length,), on the device.
        codings: per parameter; the addresses are this rank's own.
    """
    sizes = [(c.codec, k.rows.shape[1]) for c, k in zip(codings, kept, strict=True)]
    slots, nbytes = lay_out(sizes)
    if nbytes == 0:
        return lambda: None
    message = inter.empty(nbytes, device=kept[0].rows.device)
    with inter.encoding("weights") as notes, batch_launches():
        for item, shard, coding, slot in zip(kept, shards, codings, slots, strict=True):
            own = item.rows[inter.rank, : shard.numel()]
            wire = message[slot.start :][: coding.codec.wire_bytes(shard.numel())]
            coding.encode(shard, wire, held=own)
            notes.note(coding, shard, wire, held=own)
    arriving = inter.all_gather(message, role="weights")

    def decode() -> None:
        with inter.decoding(), batch_launches():
            messages = arriving.wait().view(inter.size, nbytes)
            for item, coding, slot in zip(kept, codings, slots, strict=True):
                for first, count, length in item.runs():
                    used = coding.codec.wire_bytes(length)
                    wire = messages[first : first + count, slot.start : slot.start + used]
                    coding.decode(wire, item.rows[first : first + count, :length])

    return decode


def gather(
    kept: Sequence[Kept], codings: Sequence[Coding], intra: Link | None
) -> Callable[[], list[Tensor]]:
    """Gather full parameters from the rows of the ranks of a node.

    Asynchronous; the returned function waits and decodes, (numel,) each, in shard order. Every
    rank uses decoded values, of its own rows too. ``intra`` is None with one rank per node.
    """
    if intra is None:
        return lambda: [item.rows.view(-1)[: item.numel].clone() for item in kept]
    sizes = [(c.codec, k.numel, k.rows.shape[0]) for c, k in zip(codings, kept, strict=True)]
    slots, nbytes = _lay_out_rows(tuple(sizes), intra.size)
    message = intra.empty(nbytes, device=kept[0].rows.device)
    with intra.encoding("weights") as notes, batch_launches():
        for item, coding, slot in zip(kept, codings, slots, strict=True):
            places = message[slot.start :][: slot.nbytes * item.rows.shape[0]].view(-1, slot.nbytes)
            for first, count, length in item.runs():
                wire = places[first : first + count, : coding.codec.wire_bytes(length)]
                moved = coding.at(first * item.rows.shape[1])
                values = item.rows[first : first + count, :length]
                moved.encode(values, wire)
                notes.note(moved, values, wire)
    arriving = intra.all_gather(message, role="weights") if nbytes else None

    def decode() -> list[Tensor]:
        received = message.new_empty(0) if arriving is None else arriving.wait()
        full = new_values([(k.numel, k.rows.dtype) for k in kept], message.device)
        with intra.decoding():
            decoding = _decoding(tuple(sizes), intra.size)
            decoding.run([received, *full], Streams(codings, [None] * len(codings)))
        return full

    return decode


@lru_cache(maxsize=1024)
def _lay_out_rows(
    sizes: tuple[tuple[Codec, int, int], ...], node_size: int
) -> tuple[list[Slot], int]:
    """Return the slot of the first row of every (codec, numel, nodes), and all bytes; other rows
    follow.
    """
    slots, end = [], 0
    for codec, numel, nodes in sizes:
        slots.append(Slot(end, codec.wire_bytes(ceil_div(numel, nodes * node_size))))
        end += nodes * slots[-1].nbytes
    return slots, end


@lru_cache(maxsize=1024)
def _decoding(sizes: tuple[tuple[Codec, int, int], ...], node_size: int) -> Operations:
    """Plan the decoding of a node's messages, buffer 0, to full parameters, the buffers behind it:
    (codec, numel, nodes) each.
    """
    slots, nbytes = _lay_out_rows(sizes, node_size)
    tasks: list[Task] = []
    for place, ((codec, numel, nodes), slot) in enumerate(zip(sizes, slots, strict=True)):
        for rank in range(nodes * node_size):
            start, stop = shard_range(numel, nodes * node_size, rank)
            node, local = divmod(rank, node_size)
            wire = local * nbytes + slot.start + node * slot.nbytes
            if start < stop:
                operation = Decode(codec, stop - start, 0, 1 + place, place)
                tasks.append((operation, (wire, start)))
    return Operations(tasks)
