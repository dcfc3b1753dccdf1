"""Weights that every node keeps, sharded over its ranks: how they are exchanged and gathered.

[Note: strided layout] With G ranks per node, ZeRO-3's shard r of a parameter belongs to rank
(node, local) = (r // G, r % G). Local rank g of every node keeps the shards {r : r % G = g} as rows
(nodes, width), row n being shard n * G + g. The owner's shard is then in the owner's own rows, and
new weights cross between nodes by one all-gather among the ranks of equal g: each byte enters a
node once. A gather inside the node brings [G][nodes][width]; shard order is [nodes][G][width].

May import: torch, coding, collectives, kernels, layout, link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_quant.coding import Coding
from ds_quant.collectives import lay_out
from ds_quant.kernels.dispatch import together
from ds_quant.layout import ceil_div, shard_range
from ds_quant.link import Link


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

    def length(self, node: int, local: int) -> int:
        """Elements of the shard of a rank."""
        ranks = self.rows.shape[0] * self.node_size
        start, stop = shard_range(self.numel, ranks, node * self.node_size + local)
        return stop - start

    def runs(self, local: int) -> list[tuple[int, int, int]]:
        """(first node, nodes, length): shards of equal length in the rows of a local rank."""
        lengths = [self.length(node, local) for node in range(self.rows.shape[0])]
        return _runs(lengths)


def _runs(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first, count, length) of runs of equal lengths, empty ones left out."""
    runs: list[tuple[int, int, int]] = []
    for place, length in enumerate(lengths):
        if length and runs and runs[-1][2] == length and sum(runs[-1][:2]) == place:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, length)
        elif length:
            runs.append((place, 1, length))
    return runs


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
                for first, count, length in item.runs(item.local):
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
    nodes = [item.rows.shape[0] for item in kept]
    sizes = [(c.codec, k.rows.shape[1]) for c, k in zip(codings, kept, strict=True)]
    slots, nbytes = lay_out([size for size, n in zip(sizes, nodes, strict=True) for _ in range(n)])
    starts = [slots[sum(nodes[:i])] for i in range(len(kept))]  # of row 0; the others follow
    message = intra.empty(nbytes, device=kept[0].rows.device)
    with intra.encoding("weights") as notes, together():
        for item, coding, slot in zip(kept, codings, starts, strict=True):
            places = message[slot.start :][: slot.nbytes * item.rows.shape[0]].view(-1, slot.nbytes)
            for first, count, length in item.runs(item.local):
                wire = places[first : first + count, : coding.codec.wire_bytes(length)]
                moved = coding.at(first * item.rows.shape[1])
                values = item.rows[first : first + count, :length]
                moved.encode(values, wire)
                notes.note(moved, values, wire)
    arriving = intra.all_gather(message, role="weights") if nbytes else None

    def decode() -> list[Tensor]:
        with intra.decoding(), together():
            received = message.new_empty(intra.size, 0)
            if arriving is not None:
                received = arriving.wait().view(intra.size, nbytes)
            return [
                _in_shard_order(item, coding, received[:, slot.start :], slot.nbytes)
                for item, coding, slot in zip(kept, codings, starts, strict=True)
            ]

    return decode


def _in_shard_order(item: Kept, coding: Coding, messages: Tensor, row_bytes: int) -> Tensor:
    """messages (G, >= nodes * row_bytes) uint8 -> (numel,) in the dtype of the rows."""
    nodes, width = item.rows.shape
    full = torch.empty(item.numel, dtype=item.rows.dtype, device=item.rows.device)
    for node in range(nodes):
        lengths = [item.length(node, local) for local in range(item.node_size)]
        for first, count, length in _runs(lengths):
            used = coding.codec.wire_bytes(length)
            wire = messages[first : first + count, node * row_bytes : node * row_bytes + used]
            start = (node * item.node_size + first) * width
            values = full[start : start + count * length].view(count, length)
            coding.decode(wire, values)
    return full
