"""Decide which rank sums which piece of a bucket whose parts single ranks own (ZeRO-1 and 2).

[Note: direct or balanced] A bucket of ZeRO-1/2 usually belongs to one or two owners. Sending every
owner its part at once (*direct*) then makes one rank receive the whole bucket from everybody,
which can cost more than the 16-bit all-reduce it replaces. *Balanced* cuts the bucket evenly over
the ranks, reduces each cut on its rank and delivers the sums to the owners in 8 bits. With two
levels there is a third way: to cut what a node owns evenly over the ranks of that node, so that
the delivery stays inside it. Which one is used is decided per bucket by the bytes that enter the
busiest node and then by those that enter the busiest rank: sizes only, so that all ranks decide
alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ds_quant.codec.codec import Codec
from ds_quant.kernels.wire import ceil_div


class OwnedRange(NamedTuple):
    """The facts about a share that all ranks know: its owner, its elements, and the codecs of its
    last hop, of its delivery and of the first of two hops.
    """

    owner: int
    numel: int
    codec: Codec
    delivery: Codec
    inner: Codec | None = None


class OwnedPiece(NamedTuple):
    """Elements [start, stop) of share ``part``, summed by rank ``reducer``."""

    part: int
    start: int
    stop: int
    reducer: int


@lru_cache(maxsize=4096)
def plan(
    shapes: tuple[OwnedRange, ...], ranks: int, node_size: int | None = None
) -> tuple[OwnedPiece, ...]:
    """Return the pieces of the cheapest exchange: see [Note: direct or balanced].

    ``node_size``: ranks per node of a reduction over two hops, None for one hop.
    """
    teams = [[(rank,) for rank in range(ranks)], [tuple(range(ranks))] * ranks]
    if node_size is not None:
        teams.insert(1, [_node(rank, node_size) for rank in range(ranks)])
    candidates = [_cut_evenly(shapes, team_of) for team_of in teams]
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
    """Bytes from others into the busiest node and rank, of reduction and delivery together."""
    size = node_size or ranks
    nodes, into_node, into_rank = ranks // size, [0] * (ranks // size), [0] * ranks
    for piece in pieces:
        owner, _, codec, delivery, inner = shapes[piece.part]
        numel, reducer = piece.stop - piece.start, piece.reducer
        across = codec.wire_bytes(numel) * ((nodes if inner else ranks) - 1)
        into_rank[reducer] += across
        if inner is not None:
            into_node[reducer // size] += across
            inside = inner.wire_bytes(numel) * (size - 1)
            for colleague in range(reducer % size, ranks, size):
                into_rank[colleague] += inside
        if reducer != owner:
            delivered = delivery.wire_bytes(numel)
            into_rank[owner] += delivered
            if reducer // size != owner // size:
                into_node[owner // size] += delivered
    return max(into_node, default=0), max(into_rank, default=0)


def _cut_evenly(
    shapes: Sequence[OwnedRange], team_of: Sequence[tuple[int, ...]]
) -> tuple[OwnedPiece, ...]:
    """Cut what each team owns, laid end to end, into runs of equal length, one per member.

    ``team_of``: by owner the ranks that reduce for it.
    """
    pieces: list[OwnedPiece] = []
    for team in dict.fromkeys(team_of):
        members = [i for i, s in enumerate(shapes) if team_of[s.owner] == team]
        width = ceil_div(sum(shapes[i].numel for i in members), len(team))
        position = 0
        for index in members:
            start, numel = 0, shapes[index].numel
            while start < numel:
                turn = (position + start) // width
                stop = min(numel, (turn + 1) * width - position)
                pieces.append(OwnedPiece(index, start, stop, team[turn]))
                start = stop
            position += numel
    return tuple(sorted(pieces))
