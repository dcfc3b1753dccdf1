"""Decide which rank sums which piece of a bucket whose parts single ranks own (ZeRO-1 and 2).

owner    the rank whose optimizer needs the sum of a part
reducer  the rank that sums a piece of a part
team     the ranks that reduce for an owner

[Note: direct or balanced] A bucket of ZeRO-1/2 usually belongs to one or two owners. Sending every
owner its part at once (*direct*) then makes one rank receive the whole bucket from all others,
which can cost more than the 16-bit all-reduce it replaces. *Balanced* cuts the bucket evenly over
the ranks, reduces each cut on its rank and delivers the sums to the owners in 8 bits. With two
levels there is a third way: cut the parts of a node's owners evenly over the ranks of that node,
so the delivery stays inside it. The way is chosen per bucket by the bytes that enter the busiest
node, then by those that enter the busiest rank: by sizes alone, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ds_quant.codec.codec import Codec
from ds_quant.kernels.wire import ceil_div


class OwnedRange(NamedTuple):
    """Consecutive elements of a bucket that one rank owns, as all ranks know them.

    codec: of the last hop.
    delivery: of sums on their way to the owner.
    inner: of the first of two hops; None: one hop.
    """

    owner: int
    numel: int
    codec: Codec
    delivery: Codec
    inner: Codec | None = None


class OwnedPiece(NamedTuple):
    """Elements [start, stop) of owned range number ``part``, summed by rank ``reducer``."""

    part: int
    start: int
    stop: int
    reducer: int


@lru_cache(maxsize=4096)
def plan(
    shapes: tuple[OwnedRange, ...], ranks: int, node_size: int | None = None
) -> tuple[OwnedPiece, ...]:
    """Return the pieces of the cheapest exchange: see [Note: direct or balanced].

    node_size: ranks per node of a reduction over two hops, None for one hop.
    """
    direct = [(rank,) for rank in range(ranks)]
    balanced = [tuple(range(ranks))] * ranks
    team_choices = [direct, balanced]
    if node_size is not None:
        balanced_in_nodes = [_node(rank, node_size) for rank in range(ranks)]
        team_choices = [direct, balanced_in_nodes, balanced]
    candidates = [_cut_evenly(shapes, team_of) for team_of in team_choices]
    return min(candidates, key=lambda pieces: inbound(shapes, pieces, ranks, node_size))


def _node(rank: int, node_size: int) -> tuple[int, ...]:
    first = rank // node_size * node_size
    return tuple(range(first, first + node_size))


def inbound(
    shapes: Sequence[OwnedRange],
    pieces: Sequence[OwnedPiece],
    ranks: int,
    node_size: int | None = None,
) -> tuple[int, int]:
    """Return the bytes that others send into the busiest node and into the busiest rank, by
    reduction and delivery together.
    """
    size = node_size or ranks
    nodes = ranks // size
    into_node = [0] * nodes
    into_rank = [0] * ranks
    for piece in pieces:
        owned = shapes[piece.part]
        owner = owned.owner
        reducer = piece.reducer
        numel = piece.stop - piece.start
        senders = (ranks if owned.inner is None else nodes) - 1
        last_hop = owned.codec.wire_bytes(numel) * senders
        into_rank[reducer] += last_hop
        if owned.inner is not None:
            into_node[reducer // size] += last_hop
            first_hop = owned.inner.wire_bytes(numel) * (size - 1)
            for same_local_rank in range(reducer % size, ranks, size):
                into_rank[same_local_rank] += first_hop
        if reducer != owner:
            delivered = owned.delivery.wire_bytes(numel)
            into_rank[owner] += delivered
            if reducer // size != owner // size:
                into_node[owner // size] += delivered
    return max(into_node, default=0), max(into_rank, default=0)


def _cut_evenly(
    shapes: Sequence[OwnedRange], team_of: Sequence[tuple[int, ...]]
) -> tuple[OwnedPiece, ...]:
    """Cut the ranges of each team's owners, end to end, into runs of equal length, one per member.

    team_of: by owner the ranks that reduce for it.
    """
    pieces: list[OwnedPiece] = []
    for team in dict.fromkeys(team_of):
        parts = [part for part, owned in enumerate(shapes) if team_of[owned.owner] == team]
        width = ceil_div(sum(shapes[part].numel for part in parts), len(team))
        position = 0  # of the range among those of the team
        for part in parts:
            start = 0
            numel = shapes[part].numel
            while start < numel:
                member = (position + start) // width
                stop = min(numel, (member + 1) * width - position)
                pieces.append(OwnedPiece(part, start, stop, team[member]))
                start = stop
            position += numel
    return tuple(sorted(pieces))
