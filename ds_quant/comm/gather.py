"""Quantized all-gather of lists of tensors, and the gathers of the node shard.

Each is one message per rank, see [Note: one message] of message.py: what it holds follows from
sizes alone and is planned once.

[Note: strided layout] With G ranks per node, ZeRO-3's shard r of a parameter belongs to rank
(node, local) = (r // G, r % G). Local rank g of every node keeps the shards {r : r % G = g} as rows
(nodes, width), row n being shard n * G + g. The owner's shard is then in the owner's own rows, and
new weights cross between nodes by one all-gather among the ranks of equal g: each byte enters a
node once. A gather inside the node brings [G][nodes][width]; shard order is [nodes][G][width].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant.codec.bound import VECTORS_PER_ELEMENT, Coding
from ds_quant.codec.codec import Codec
from ds_quant.comm.message import Message, lay_out, row_place, row_vector
from ds_quant.comm.transport import Fabric, Link, Pending
from ds_quant.kernels.batch import Decode, Encode, Task
from ds_quant.kernels.wire import ceil_div, shard_range

# ---- of ZeRO-3's shards ----


def all_gather(
    shards: Sequence[Tensor], numels: Sequence[int], codings: Sequence[Coding], link: Link | Fabric
) -> Pending[list[Tensor]]:
    """Gather tensors that are split over the ranks in DeepSpeed's ceil-division shards.

    The result is the full tensors, (numel,) each in the dtype of its shard, decoded from the wire
    on all ranks, this one's own shards too: all hold equal bits.

    Args:
        shards: per tensor this rank's shard, 1-D and without padding (possibly empty), on the
            device of the collective.
        numels: per tensor its full number of elements.
        codings: per tensor; the addresses are this rank's own.
    """
    sizes = tuple([(c.codec, n) for c, n in zip(codings, numels, strict=True)])
    message = shard_message(sizes, link.size, link.rank, link.node_size)
    shapes, device = [(n, s.dtype) for n, s in zip(numels, shards, strict=True)], shards[0].device
    return message.gather(link, shards, codings, lambda: new_values(shapes, device))


def new_values(
    shapes: Sequence[tuple[int, torch.dtype]], device: torch.device | str
) -> list[Tensor]:
    """Allocate tensors (numel,) outside the pool: DeepSpeed frees them as it would without us."""
    values = []
    for numel, dtype in shapes:
        values.append(torch.empty(numel, dtype=dtype, device=device))
    return values


@lru_cache(maxsize=1024)
def shard_message(
    sizes: tuple[tuple[Codec, int], ...], ranks: int, rank: int, node_size: int | None
) -> Message:
    """Plan the gather of tensors (codec, numel) from their shards; a slot has room for a full one.
    How the rows arrive: see ``row_place``.
    """
    slots, nbytes = lay_out((codec, ceil_div(numel, ranks)) for codec, numel in sizes)
    encode: list[Task] = []
    decode: list[Task] = []
    for tensor, ((codec, numel), slot) in enumerate(zip(sizes, slots, strict=True)):
        for peer in range(ranks):
            start, stop = shard_range(numel, ranks, peer)
            if start == stop:
                continue
            if peer == rank:
                operation = Encode(codec, stop - start, 1 + tensor, 0, tensor)
                encode.append((operation, (0, slot, 0)))
            place = row_place(peer, ranks, node_size) * nbytes + slot
            decode.append((Decode(codec, stop - start, 0, 1 + tensor, tensor), (place, start)))
    return Message(nbytes, encode, decode)


# ---- of parts that single ranks own ----


class Part(NamedTuple):
    """Consecutive elements of one parameter that belong to rank ``owner``, to be gathered.

    source: where the owner has their new values, a tensor and its first element; None for where
    they are to be. Tensors that only hold values follow those that are written.
    """

    owner: int
    tensor: int  # where they are to be, from element ``start`` on
    start: int
    numel: int
    weight: int  # its codec
    first: int = 0  # of its elements: names the random bits
    source: tuple[int, int] | None = None


def owner_message(
    parts: Sequence[Part], weights: Sequence[tuple[Codec, bool]], fabric: Fabric
) -> Message:
    """Plan a gather that sets every part, on all ranks and the owner too, to its owner's decoded
    values. Until then only the owner's are read, except that a difference is added to what every
    rank holds.

    weights: per weight its codec, and whether differences are sent.
    """
    rows: list[list[Part]] = [[] for _ in range(fabric.size)]
    for part in parts:
        if part.numel:
            rows[part.owner].append(part)
    layouts = [lay_out([(weights[p.weight][0], p.numel) for p in row]) for row in rows]
    nbytes = max(used for _, used in layouts)
    encode: list[Task] = []
    decode: list[Task] = []
    for owner, (row, (slots, _)) in enumerate(zip(rows, layouts, strict=True)):
        begin = row_place(owner, fabric.size, fabric.node_size) * nbytes
        for part, slot in zip(row, slots, strict=True):
            (codec, differs), into = weights[part.weight], 1 + part.tensor
            if owner == fabric.rank:
                tensor, start = part.source or (part.tensor, part.start)
                operation = Encode(
                    codec, part.numel, 1 + tensor, 0, part.weight, held=into if differs else None
                )
                vector = VECTORS_PER_ELEMENT * part.first
                encode.append((operation, (start, slot, vector, part.start)))
            operation = Decode(codec, part.numel, 0, into, part.weight, differs)
            decode.append((operation, (begin + slot, part.start)))
    return Message(nbytes, encode, decode)


# ---- of the node shard ----


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


def exchange(
    kept: Sequence[Kept], shards: Sequence[Tensor], codings: Sequence[Coding], inter: Link
) -> Pending[list[Tensor]]:
    """Update all rows of every parameter to the decoded values of their owners, of this rank's own
    too; the ranks of ``inter`` have equal places in their nodes.

    Args:
        shards: per parameter this rank's new weights without padding, (length,), on the device.
        codings: per parameter; the addresses are this rank's own.
    """
    sizes = tuple([(c.codec, k.numel, c.difference) for c, k in zip(codings, kept, strict=True)])
    rows = [item.rows for item in kept]
    # Differences are of rounded values: see ``Coding.encode``.
    of = zip(shards, rows, codings, strict=True)
    values = [shard.to(r.dtype) if c.difference else shard for shard, r, c in of]
    message = _exchange_message(sizes, inter.size, kept[0].node_size, inter.rank, kept[0].local)
    return message.gather(inter, [*rows, *values], codings, lambda: rows)


@lru_cache(maxsize=1024)
def _exchange_message(
    sizes: tuple[tuple[Codec, int, bool], ...], nodes: int, node_size: int, node: int, local: int
) -> Message:
    """(codec, numel, whether differences are sent) each; the rows are the first tensors."""
    ranks, count = nodes * node_size, len(sizes)
    slots, nbytes = lay_out((codec, ceil_div(numel, ranks)) for codec, numel, _ in sizes)
    encode: list[Task] = []
    decode: list[Task] = []
    for place, ((codec, numel, differs), slot) in enumerate(zip(sizes, slots, strict=True)):
        for row in range(nodes):
            start, stop = shard_range(numel, ranks, row * node_size + local)
            if start == stop:
                continue
            first, into = row * ceil_div(numel, ranks), 1 + place
            if row == node:
                operation = Encode(
                    codec, stop - start, into + count, 0, place, held=into if differs else None
                )
                encode.append((operation, (0, slot, 0, first)))
            operation = Decode(codec, stop - start, 0, into, place, differs)
            decode.append((operation, (row * nbytes + slot, first)))
    return Message(nbytes, encode, decode)


def gather(
    kept: Sequence[Kept], codings: Sequence[Coding], intra: Link | None
) -> Pending[list[Tensor]]:
    """Gather full parameters, (numel,) each, in shard order, from the rows of the ranks of a node.

    Every rank uses decoded values, of its own rows too. ``intra`` is None with one rank per node.
    """
    if intra is None:
        return Pending(lambda: [item.rows.view(-1)[: item.numel].clone() for item in kept])
    sizes = tuple([(c.codec, k.numel, k.rows.shape[0]) for c, k in zip(codings, kept, strict=True)])
    rows, shapes = [item.rows for item in kept], [(item.numel, item.rows.dtype) for item in kept]
    message = _node_message(sizes, intra.size, intra.rank)
    return message.gather(intra, rows, codings, lambda: new_values(shapes, rows[0].device))


@lru_cache(maxsize=1024)
def _node_message(sizes: tuple[tuple[Codec, int, int], ...], node_size: int, local: int) -> Message:
    """(codec, numel, nodes) each; a slot for every row of a parameter, one behind the other."""
    rows = [(codec, ceil_div(numel, nodes * node_size), nodes) for codec, numel, nodes in sizes]
    slots, nbytes = lay_out((codec, width) for codec, width, nodes in rows for _ in range(nodes))
    encode: list[Task] = []
    decode: list[Task] = []
    left = iter(slots)
    for place, ((codec, numel, nodes), (_, width, _)) in enumerate(zip(sizes, rows, strict=True)):
        of_rows = [next(left) for _ in range(nodes)]
        for rank in range(nodes * node_size):
            start, stop = shard_range(numel, nodes * node_size, rank)
            (row, peer), count = divmod(rank, node_size), stop - start
            if not count:
                continue
            if peer == local:
                vector = row_vector(row, count, width)
                operation = Encode(codec, count, 1 + place, 0, place)
                encode.append((operation, (row * width, of_rows[row], vector)))
            wire = peer * nbytes + of_rows[row]
            decode.append((Decode(codec, count, 0, 1 + place, place), (wire, start)))
    return Message(nbytes, encode, decode)
