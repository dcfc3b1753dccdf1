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
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ds_quant.codec.bound import Coding
from ds_quant.codec.codec import Codec
from ds_quant.comm.buffers import Room
from ds_quant.comm.message import Message, Part, row_vector
from ds_quant.comm.transport import Fabric, Link, Pending
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
    message = _shard_message(sizes, link.size, link.rank, link.node_size)
    shapes, device = [(n, s.dtype) for n, s in zip(numels, shards, strict=True)], shards[0].device
    into = partial(new_values, shapes, device)
    return message.gather(link, shards, codings, into, stays=True)


def new_values(
    shapes: Sequence[tuple[int, torch.dtype]], device: torch.device | str
) -> list[Tensor]:
    """Allocate tensors (numel,) outside the pool: DeepSpeed frees them as it would without us."""
    return [torch.empty(numel, dtype=dtype, device=device) for numel, dtype in shapes]


@lru_cache(maxsize=1024)
def _shard_message(
    sizes: tuple[tuple[Codec, int], ...], ranks: int, rank: int, node_size: int | None
) -> Message:
    """Plan the gather of tensors (codec, numel) from their shards, in slots of full ones."""
    parts = []
    for tensor, (codec, numel) in enumerate(sizes):
        for peer in range(ranks):
            start, stop = shard_range(numel, ranks, peer)
            places, width = ((tensor, 0), (tensor, start)), ceil_div(numel, ranks)
            parts.append(Part(peer, codec, stop - start, tensor, *places, room=width))
    return Message(parts, rank=rank, ranks=ranks, node_size=node_size)


# ---- of the node shard ----


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One parameter of ``numel`` elements in the node shard of a rank with place ``local``.

    rows: (nodes, width), in the dtype of the weights; what lies past a shard's end stays zero.
    device: where collectives run; None if the rows are there.
    """

    numel: int
    node_size: int
    local: int
    rows: Tensor
    device: torch.device | None = None

    @classmethod
    def allocate(
        cls,
        numel: int,
        *,
        nodes: int,
        node_size: int,
        local: int,
        dtype: torch.dtype,
        room: Room,
        device: torch.device | None = None,
    ) -> Kept:
        """Allocate rows of zeros in ``room``."""
        rows = room.zeros(nodes, ceil_div(numel, nodes * node_size), dtype=dtype)
        return cls(numel=numel, node_size=node_size, local=local, rows=rows, device=device)


def rows_of(kept: Sequence[Kept], node: int | None = None) -> list[Tensor]:
    """Return their rows, or those of one node, on the device; of what is kept elsewhere a copy,
    made in order of the current stream. Parameters are all kept on the device or none.
    """
    rows = [item.rows if node is None else item.rows[node] for item in kept]
    device = kept[0].device
    return rows if device is None else [own.to(device, non_blocking=True) for own in rows]


def take_rows(kept: Sequence[Kept], rows: Sequence[Tensor]) -> None:
    """Take over what was made of ``rows_of(kept)``, or of copies."""
    torch._foreach_copy_([item.rows for item in kept], rows, non_blocking=True)


def exchange(
    kept: Sequence[Kept], shards: Sequence[Tensor], codings: Sequence[Coding], inter: Link
) -> Pending[Any]:
    """Update all rows of every parameter to the decoded values of their owners, of this rank's own
    too; the ranks of ``inter`` have equal places in their nodes.

    Args:
        shards: per parameter this rank's new weights without padding, (length,), on the device.
        codings: per parameter; the addresses are this rank's own.
    """
    sizes = tuple([(c.codec, k.numel, c.difference) for c, k in zip(codings, kept, strict=True)])
    on_host, differs = kept[0].device is not None, any([c.difference for c in codings])
    rows = shards if on_host and not differs else rows_of(kept)  # which differences alone read
    # Differences are of rounded values: see ``Coding.encode``.
    of = zip(shards, rows, codings, strict=True)
    values = [shard.to(r.dtype) if c.difference else shard for shard, r, c in of]
    message = _exchange_message(sizes, inter.size, kept[0].node_size, inter.rank, kept[0].local)
    tensors = [*rows, *values]
    if not on_host:
        return message.gather(inter, tensors, codings, lambda: rows)
    arrived = message.gather(inter, tensors, codings, partial(rows_of, kept))
    return arrived.then(partial(take_rows, kept))


@lru_cache(maxsize=1024)
def _exchange_message(
    sizes: tuple[tuple[Codec, int, bool], ...], nodes: int, node_size: int, node: int, local: int
) -> Message:
    """(codec, numel, whether differences are sent) each; the rows are the first tensors."""
    parts = []
    for place, (codec, numel, differs) in enumerate(sizes):
        width = ceil_div(numel, nodes * node_size)
        for row in range(nodes):
            start, stop = shard_range(numel, nodes * node_size, row * node_size + local)
            places = (len(sizes) + place, 0), (place, row * width)
            how = {"differs": differs, "room": width}
            parts.append(Part(row, codec, stop - start, place, *places, **how))
    return Message(parts, rank=node, ranks=nodes)


def gather(
    kept: Sequence[Kept], codings: Sequence[Coding], intra: Link | None
) -> Pending[list[Tensor]]:
    """Gather full parameters, (numel,) each, in shard order, from the rows of the ranks of a node.

    Every rank uses decoded values, of its own rows too. ``intra`` is None with one rank per node.
    """
    if intra is None:
        # Copies to the device begin now, ahead of their use.
        full = [r.view(-1)[: k.numel] for r, k in zip(rows_of(kept), kept, strict=True)]
        is_copied = kept[0].device is not None
        return Pending(lambda: full if is_copied else [values.clone() for values in full])
    sizes = tuple([(c.codec, k.numel, k.rows.shape[0]) for c, k in zip(codings, kept, strict=True)])
    rows, shapes = rows_of(kept), [(item.numel, item.rows.dtype) for item in kept]
    message = _node_message(sizes, intra.size, intra.rank)
    into = partial(new_values, shapes, rows[0].device)
    return message.gather(intra, rows, codings, into, stays=True)


@lru_cache(maxsize=1024)
def _node_message(sizes: tuple[tuple[Codec, int, int], ...], node_size: int, local: int) -> Message:
    """(codec, numel, nodes) each; a slot for every row of a parameter, one behind the other."""
    parts = []
    for place, (codec, numel, nodes) in enumerate(sizes):
        width = ceil_div(numel, nodes * node_size)
        for rank in range(nodes * node_size):
            row, peer = divmod(rank, node_size)
            start, stop = shard_range(numel, nodes * node_size, rank)
            places = (place, row * width), (place, start)
            how = {"vector": row_vector(row, stop - start, width), "room": width}
            parts.append(Part(peer, codec, stop - start, place, *places, **how))
    return Message(parts, rank=local, ranks=node_size)
