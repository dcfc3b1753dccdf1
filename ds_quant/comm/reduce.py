"""Reduce gradients over one or two hops, each with a codec of its own.

Which rank sums what is decided in owners.py.

[Note: two hops] Ranks are numbered node by node, r = node * node_size + local. The first hop sums
over the ranks of a node: rank (n, g) collects from its node what is bound for any (n', g). The
second hop sums those partial sums over the nodes: each byte enters a node once. Between the two a
segment is decoded, added in fp32 and encoded again (`Recode`); a rotation spans both hops.
Own contributions are exact where a hop says so: nobody else sees them, so they need no bits and no
place in a message, and with two nodes that halves the variance of the inter-node hop.

[Note: slices] Large reductions over two hops are cut into slices. While slice i crosses between
the nodes, slice i + 1 is inside them.

[Note: held sums] Several micro-steps can cross between the nodes once. The first hop then runs in
every micro-step; what it brings is added, in fp32 and in micro-step order, to what this rank holds
for every node: a rank of a node of G holds one G-th of a bucket. The second hop takes the whole at
the last micro-step. Sums are linear and so is a rotation, so what is held stays rotated; its signs
must then be those of one optimizer step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ds_quant.codec.bound import VECTORS_PER_ELEMENT, Coding, Rotation
from ds_quant.codec.codec import Codec
from ds_quant.comm.message import pack, row_vector, unpack
from ds_quant.comm.operations import Operations, Streams
from ds_quant.comm.owners import Piece
from ds_quant.comm.reduction_plan import (
    Form,
    LinkHop,
    ReductionPlan,
    Segment,
    SlicePlan,
    own_totals,
)
from ds_quant.comm.transport import Link
from ds_quant.kernels.batch import Decode, Encode
from ds_quant.kernels.wire import VECTOR_NUMEL, ceil_div, round_up, shard_range

# ---- over one or two hops ----


class Reduction:
    """A running reduction of every segment of a plan over all ranks: see [Note: two hops].

    Sums are fp32 in rank order within a hop, nodes in order across hops; the plan's scale is
    applied once at the end. Once this is made, values may change.

    Args:
        tensors: those of the plan's segments, 1-D contiguous; None: only what is held crosses.
        codings: per gradient one for each hop; the addresses are this rank's own.
        rotations: per gradient.
        sums: (elements,) fp32, or a dtype that the kernels cast to, where the segments that this
            rank reduces have their places; None: only add to what is held.
        held: (plan.held_numel,) fp32, see [Note: held sums]; None for a reduction without a rest.
        fresh: whether nothing is held yet; then the first hop overwrites.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        tensors: Sequence[Tensor] | None,
        codings: Sequence[tuple[Coding, ...]],
        rotations: Sequence[Rotation | None],
        sums: Tensor | None,
        *,
        held: Tensor | None = None,
        fresh: bool = False,
    ) -> None:
        self._plan, self._sums, self._held, self._fresh = plan, sums, held, fresh
        by_hop = list(zip(*codings, strict=True))
        self._streams = [
            Streams(hop, rotations, by_hop[max(depth - 1, 0)]) for depth, hop in enumerate(by_hop)
        ]
        first, stop = int(tensors is None), len(plan.hops) if sums is not None else 1
        self._hops = range(first, stop)
        self._running: deque[tuple[Iterator[None], int]] = deque()  # and exchanges still to post
        for part in plan.slices if held is None else plan.held:
            steps = self._reduce(part, tensors or ())
            next(steps)
            self.advance()
            if len(self._running) > 1:
                self._finish_oldest()
            self._running.append((steps, len(self._hops) - 1))

    def advance(self) -> None:
        """Post the last exchange of every slice, waiting for those before."""
        for _ in range(len(self._running)):
            steps, exchanges = self._running.popleft()
            for _ in range(exchanges):
                next(steps)
            self._running.append((steps, 0))

    def wait(self) -> None:
        """Return when every slice is done."""
        self.advance()
        while self._running:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        steps, _ = self._running.popleft()
        for _ in steps:
            pass

    def _reduce(self, part: SlicePlan, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Reduce one slice; yields after every exchange that it has posted.

        On each hop 1. encode the message  2. post it  3. make what this rank adds up as it is.
        After the last one add up what has arrived, rotated back and scaled.
        """
        held = None if self._held is None else self._held[part.start : part.stop]
        nothing = (self._sums if held is None else held)[:0]
        sums = nothing if self._sums is None else self._sums
        arrived, before = nothing, nothing if held is None else held
        for depth in self._hops:
            link, step = self._plan.hops[depth].link, part.steps[depth]
            streams, kept = self._streams[depth], nothing
            if step.kept:
                kept = link.empty(step.kept, dtype=torch.float32, device=nothing.device)
            buffers = [kept, arrived, before, sums, *tensors]
            tensors = ()
            wire = pack(link, "gradients", sum(step.sent), step.encode, buffers, streams)
            sizes = {"sent": step.sent, "received": step.received}
            arriving = link.all_to_all(wire, **sizes, role="gradients")
            unpack(link, step.own, [wire, *buffers], self._streams[max(depth - 1, 0)])
            del buffers, wire
            yield
            arrived = arriving.wait()
            if held is None:
                before = kept
            elif depth == 0:
                self._hold(part, arrived, kept, held)
                arrived = nothing
        if self._sums is not None:
            unpack(link, part.total, [nothing, nothing, arrived, before, sums], streams)

    def _hold(self, part: SlicePlan, arrived: Tensor, kept: Tensor, held: Tensor) -> None:
        """Add what the first hop has brought to what is held."""
        link, nothing = self._plan.hops[0].link, held[:0]
        with link.decoding():
            into = held
            if not self._fresh:
                into = link.empty(held.numel(), dtype=torch.float32, device=held.device)
            part.partial.run([nothing, into, arrived, kept, nothing], self._streams[0])
            if not self._fresh:
                held.add_(into)


# ---- to the shards of all ranks ----


class ShardSums:
    """Plan for summing tensors over the ranks, each rank its ceil-division shards.

    ``shard_numels``: of this rank. ``dtype``: what the sums should have, if nothing is to be added
    to them. Without rotations and exact own contributions, over one hop,
    all slots of a tensor have room for a full shard.
    """

    def __init__(
        self,
        numels: Sequence[int],
        forms: Sequence[Form],
        route: Sequence[LinkHop],
        link: Link,
        *,
        scale: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        is_plain = len(route) == 1 and not route[0].exact_own and not any(f.block for f in forms)
        segments = []
        for tensor, numel in enumerate(numels):
            width = ceil_div(numel, link.size)
            for rank in range(link.size):
                start, stop = shard_range(numel, link.size, rank)
                segment = Segment(tensor, start, stop - start, tensor, start, rank)
                if is_plain:
                    vector = row_vector(rank, stop - start, width)
                    segment = segment._replace(vector=vector, slot=width)
                segments.append(segment)
        placed, self._numel = own_totals(segments, route)
        self.plan = ReductionPlan(placed, forms, route, scale=scale)
        self.shard_numels = [s.numel for s in segments if s.reducer == link.rank]
        self._link, self.dtype = link, dtype

    def room(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate the sums."""
        return self._link.empty(self._numel, dtype=dtype, device=device)

    def shards(self, sums: Tensor) -> list[Tensor]:
        """View this rank's shards in the sums, without padding."""
        rooms = [round_up(numel, VECTOR_NUMEL) for numel in self.shard_numels]
        parts = zip(sums.split(rooms), self.shard_numels, strict=True)
        return [part if part.numel() == n else part[:n] for part, n in parts]


# ---- to single owners ----


class OwnerSums:
    """Sums shares over the ranks for their owners, in every step.

    1. reduce each of ``pieces``, as ``owners.plan`` gives them, over the hops of ``route``
    2. balanced only: encode the sums for the owners, all-to-all over ``link``, the whole group.

    shares: segments whose reducer is their owner. forms: of every gradient. ``scale`` multiplies
    the sums. totals: where each sum of this rank begins, None for those of others.
    """

    def __init__(
        self,
        shares: Sequence[Segment],
        pieces: Sequence[Piece],
        forms: Sequence[Form],
        route: Sequence[LinkHop],
        link: Link,
        *,
        scale: float,
    ) -> None:
        self._link, self._numel = link, 0
        self.totals = [self._room(s.numel) if s.reducer == link.rank else None for s in shares]
        segments = [self._segment(shares[p.part], self.totals[p.part], p) for p in pieces]
        self.plan = ReductionPlan(segments, forms, route, scale=scale)
        moved = [
            (segment, shares[piece.part].reducer)
            for segment, piece in zip(segments, pieces, strict=True)
            if piece.reducer != shares[piece.part].reducer
        ]
        self._delivery = _Delivery(moved, forms, link) if moved else None

    def _room(self, numel: int) -> int:
        """Return where each of these sums begins."""
        start = self._numel
        self._numel += round_up(numel, VECTOR_NUMEL)
        return start

    def _segment(self, share: Segment, total: int | None, piece: Piece) -> Segment:
        if total is not None:
            total += piece.start
        elif piece.reducer == self._link.rank:
            total = self._room(piece.stop - piece.start)
        part = share.part(piece.start, piece.stop)
        return part._replace(reducer=piece.reducer, total=total or 0)

    def add_up(
        self,
        tensors: Sequence[Tensor] | None,
        codings: Sequence[tuple[Coding, ...]],
        rotations: Sequence[Rotation | None],
        held: Tensor | None = None,
    ) -> Tensor:
        """Add up this rank's shares, fp32; ``totals`` says where each begins. Arguments are those
        of ``Reduction``.
        """
        sums = self.room((held if tensors is None else tensors[0]).device)
        Reduction(self.plan, tensors, codings, rotations, sums, held=held).wait()
        if self._delivery is not None:  # fill what this rank's shares lack
            self._delivery.run(sums, [hops[-1] for hops in codings])
        return sums

    def room(self, device: torch.device) -> Tensor:
        """Allocate the sums."""
        return self._link.empty(self._numel, dtype=torch.float32, device=device)

    def held_room(self, device: torch.device) -> Tensor:
        """Allocate what is held between the two hops."""
        return self._link.empty(self.plan.held_numel, dtype=torch.float32, device=device)


class _Delivery:
    """Moves sums from their reducers to the owners."""

    def __init__(
        self, moved: Sequence[tuple[Segment, int]], forms: Sequence[Form], link: Link
    ) -> None:
        self._link = link
        outgoing: list[list[Segment]] = [[] for _ in range(link.size)]  # by owner
        incoming: list[list[Segment]] = [[] for _ in range(link.size)]  # by reducer
        for segment, owner in moved:
            if segment.reducer == link.rank:
                outgoing[owner].append(segment)
            elif owner == link.rank:
                incoming[segment.reducer].append(segment)
        codecs = self._codecs = [form.delivery for form in forms]
        self._sent, sent = _placed(outgoing, codecs)
        self._received, received = _placed(incoming, codecs)
        self._encode = Operations(
            (
                Encode(codecs[s.gradient], s.numel, values=1, wire=0, stream=s.gradient),
                (s.total, place, _DELIVERED + VECTORS_PER_ELEMENT * s.first),
            )
            for s, place in sent
        )
        self._decode = Operations(
            (Decode(codecs[s.gradient], s.numel, 0, 1, s.gradient), (place, s.total))
            for s, place in received
        )

    def run(self, sums: Tensor, codings: Sequence[Coding]) -> None:
        """Fill what this rank's shares lack in ``sums``."""
        link = self._link
        own = [c._replace(codec=d) for c, d in zip(codings, self._codecs, strict=True)]
        streams = Streams(own, [None] * len(own))
        payload = pack(link, "gradients", sum(self._sent), self._encode, [sums], streams)
        sizes = {"sent": self._sent, "received": self._received}
        exchange = link.all_to_all(payload, **sizes, role="gradients")
        unpack(link, self._decode, [exchange.wait(), sums], streams)


# Vectors of delivered pieces: far from those of the hops.
_DELIVERED = 1 << 62


def _placed(
    rows: Sequence[Sequence[Segment]], codecs: Sequence[Codec]
) -> tuple[list[int], list[tuple[Segment, int]]]:
    """Return the bytes of every row, and where each segment begins in the message."""
    sizes = [[codecs[s.gradient].wire_bytes(s.numel) for s in row] for row in rows]
    starts = accumulate((nbytes for row in sizes for nbytes in row), initial=0)
    segments = (segment for row in rows for segment in row)
    return [sum(row) for row in sizes], list(zip(segments, starts, strict=False))
