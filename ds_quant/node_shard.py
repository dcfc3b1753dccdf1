"""Weights that every node keeps, sharded over its ranks: how they are exchanged and gathered.

[Note: strided layout] With G ranks per node, ZeRO-3's shard r of a parameter belongs to rank
(node, local) = (r // G, r % G). Local rank g of every node keeps the shards {r : r % G = g} as rows
(nodes, width), row n being shard n * G + g. The owner's shard is then in the owner's own rows, and
new weights cross between nodes by one all-gather among the ranks of equal g: each byte enters a
node once. A gather inside the node brings [G][nodes][width]; shard order is [nodes][G][width].

May import: torch, codec, coding, collectives, kernels, layout, link, operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from ds_quant.codec import Codec
from ds_quant.coding import Coding
from ds_quant.collectives import Slot, lay_out, new_values
from ds_quant.kernels.batch import Decode, Task
from ds_quant.kernels.dispatch import together
from ds_quant.layout import ceil_div, shard_range
from ds_quant.link import Link
from ds_quant.operations import Operations, Streams


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
        """Rows of zeros."""
        width = ceil_div(numel, nodes * node_size)
        rows = torch.zeros(nodes, width, dtype=dtype, device=device)
        return cls(numel=numel, node_size=node_size, local=local, rows=rows)

    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """(first node, nodes, length): this rank's rows that hold shards of equal length."""
        return _runs(self.numel, self.rows.shape[0], self.node_size, self.local)


@lru_cache(maxsize=4096)
def _runs(numel: int, nodes: int, node_size: int, local: int) -> tuple[tuple[int, int, int], ...]:
    """Runs of nodes whose shards of a local rank are equally long, empty ones left out."""
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
    """Bring all rows of every parameter to the decoded values of their owners.

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
    with inter.encoding("weights") as notes, together():
        for item, shard, coding, slot in zip(kept, shards, codings, slots, strict=True):
            own = item.rows[inter.rank, : shard.numel()]
            wire = message[slot.start :][: coding.codec.wire_bytes(shard.numel())]
            coding.encode(shard, wire, held=own)
            notes.note(coding, shard, wire, held=own)
    arriving = inter.all_gather(message, role="weights")

    def decode() -> None:
        with inter.decoding(), together():
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
    """Full parameters from the rows of the ranks of a node.

    Asynchronous; the returned function waits and decodes, (numel,) each, in shard order. Every
    rank uses decoded values, of its own rows too. ``intra`` is None with one rank per node.
    """
    if intra is None:
        return lambda: [item.rows.view(-1)[: item.numel].clone() for item in kept]
    sizes = [(c.codec, k.numel, k.rows.shape[0]) for c, k in zip(codings, kept, strict=True)]
    slots, nbytes = _lay_out(tuple(sizes), intra.size)
    message = intra.empty(nbytes, device=kept[0].rows.device)
    with intra.encoding("weights") as notes, together():
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
def _lay_out(sizes: tuple[tuple[Codec, int, int], ...], node_size: int) -> tuple[list[Slot], int]:
    """Of every (codec, numel, nodes) the slot of its first row, whose others follow; all bytes."""
    slots, end = [], 0
    for codec, numel, nodes in sizes:
        slots.append(Slot(end, codec.wire_bytes(ceil_div(numel, nodes * node_size))))
        end += nodes * slots[-1].nbytes
    return slots, end


@lru_cache(maxsize=1024)
def _decoding(sizes: tuple[tuple[Codec, int, int], ...], node_size: int) -> Operations:
    """What decodes the messages of a node, buffer 0, to full parameters, the buffers behind it:
    (codec, numel, nodes) each.
    """
    slots, nbytes = _lay_out(sizes, node_size)
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
