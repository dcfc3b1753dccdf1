"""Reduce gradients over one or two hops, each with a codec of its own.

Which rank sums what is decided in owners.py.

[Note: two hops] Ranks are numbered node by node, r = node * node_size + local. The first hop sums
over the ranks of a node: rank (n, g) collects from its node what is bound for any (n', g). The
second hop sums those partial sums over the nodes: each byte enters a node once. Between the two a
segment is decoded, added in fp32 and encoded again (`Recode`); a rotation spans both hops. Signs
of a node's own are those of all its ranks, so only the last sum sees different ones.
Own contributions are exact where a hop says so: nobody else sees them, so they need no bits and no
place in a message, and with two nodes that halves the variance of the inter-node hop.

[Note: slices] Large reductions over two hops are cut into slices. While slice i crosses between
the nodes, slice i + 1 is inside them.

[Note: waiting sums] Several micro-steps can cross between the nodes once. The first hop then runs
in every micro-step; what it brings is added, in fp32 and in micro-step order, to what this rank
holds for every node: a rank of a node of G holds one G-th of a bucket. The second hop takes the
whole at the last micro-step. Sums are linear and so is a rotation, so what waits stays rotated; its
signs must then be those of one optimizer step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from ds_quant.codec.bound import VECTORS_PER_ELEMENT, Coding, Rotation
from ds_quant.codec.codec import Codec
from ds_quant.comm import owners
from ds_quant.comm.message import is_tight, lay_out, pack, unpack
from ds_quant.comm.owners import Piece, Shape
from ds_quant.comm.profiling import profiler_range
from ds_quant.comm.reduction_plan import Form, LinkHop, ReductionPlan, Segment, SlicePlan
from ds_quant.comm.transport import Link
from ds_quant.kernels.batch import Decode, Encode
from ds_quant.kernels.dispatch import Operations, Streams
from ds_quant.kernels.wire import VECTOR_NUMEL, round_up

# ---- over one or two hops ----


class Reduction:
    """A running reduction of every segment of a plan over all ranks: see [Note: two hops].

    Sums are fp32 in rank order within a hop, nodes in order across hops; the plan's scale is
    applied once at the end. Once this is made, values may change.

    Args:
        tensors: those of the plan's segments, 1-D contiguous; None: only what waits crosses.
        codings: per gradient one for each hop; the addresses are this rank's own.
        rotations: per gradient.
        sums: (elements,) fp32, or a dtype that the kernels cast to, where the segments that this
            rank reduces have their places; None: only add to what waits.
        waiting: (plan.waiting_numel,) fp32, see [Note: waiting sums]; None if the hops follow
            each other.
        fresh: whether nothing waits yet; then the first hop overwrites.
        then: called when all slices are done.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        tensors: Sequence[Tensor] | None,
        codings: Sequence[tuple[Coding, ...]],
        rotations: Sequence[Rotation | None],
        sums: Tensor | None,
        *,
        waiting: Tensor | None = None,
        fresh: bool = False,
        then: Callable[[], None] | None = None,
    ) -> None:
        self._plan, self._sums, self._waiting, self._fresh = plan, sums, waiting, fresh
        self._then = then
        by_hop = list(zip(*codings, strict=True))
        self._streams = [Streams(hop, rotations) for hop in by_hop]
        first, stop = int(tensors is None), len(plan.hops) if sums is not None else 1
        self._hops = range(first, stop)
        self._running: deque[tuple[Iterator[None], int]] = deque()  # and exchanges still to post
        for part in plan.slices if waiting is None else plan.waiting:
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
        if self._then is not None:
            then, self._then = self._then, None
            then()

    def _finish_oldest(self) -> None:
        steps, _ = self._running.popleft()
        for _ in steps:
            pass

    def _reduce(self, part: SlicePlan, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Reduce one slice; yields after every exchange that it has posted.

        On each hop 1. encode the message, and make what this rank adds up as it is  2. post it.
        After the last one add up what has arrived, rotated back and scaled.
        """
        waiting = None if self._waiting is None else self._waiting[part.start : part.stop]
        nothing = (self._sums if waiting is None else waiting)[:0]
        sums = nothing if self._sums is None else self._sums
        arrived, before = nothing, nothing if waiting is None else waiting
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
            del buffers, wire
            yield
            arrived = arriving.wait()
            if waiting is None:
                before = kept
            elif depth == 0:
                self._hold(part, arrived, kept, waiting)
                arrived = nothing
        if self._sums is not None:
            unpack(
                link, "gradients", part.total, [nothing, nothing, arrived, before, sums], streams
            )

    def _hold(self, part: SlicePlan, arrived: Tensor, kept: Tensor, waiting: Tensor) -> None:
        """Add what the first hop has brought to what waits."""
        link, nothing = self._plan.hops[0].link, waiting[:0]
        with profiler_range("sum", "gradients", link.hop), link.decoding():
            into = waiting
            if not self._fresh:
                into = link.empty(waiting.numel(), dtype=torch.float32, device=waiting.device)
            buffers = [nothing, into, arrived, kept, nothing]
            part.partial.run(buffers, self._streams[0], backend=link.backend)
            if not self._fresh:
                waiting.add_(into)


# ---- to owners ----


class GradientSums:
    """Sums shares of gradients over the ranks for their owners, in every step.

    1. reduce every share over the hops of ``route``: whole by its owner, or ``balanced`` in the
       pieces of owners.py
    2. encode sums that another rank than the owner has made, all-to-all over ``link``, the whole
       group.

    shares: segments whose reducer is their owner. forms: of every gradient. ``scale`` multiplies
    the sums. own: by place, the first element of the sum of each share of this rank.
    """

    def __init__(
        self,
        shares: Sequence[Segment],
        forms: Sequence[Form],
        route: Sequence[LinkHop],
        link: Link,
        scale: float,
        *,
        balanced: bool = False,
    ) -> None:
        self._link, self._numel = link, 0
        self.own = {i: self._room(s.numel) for i, s in enumerate(shares) if s.reducer == link.rank}
        pieces = [Piece(i, 0, share.numel, share.reducer) for i, share in enumerate(shares)]
        if balanced:
            pieces = list(_pieces(shares, forms, route, link.size))
        segments = [self._segment(shares[p.part], p) for p in pieces]
        self.plan = ReductionPlan(segments, forms, route, scale=scale)
        moved = [
            (segment, shares[piece.part].reducer)
            for segment, piece in zip(segments, pieces, strict=True)
            if piece.reducer != shares[piece.part].reducer
        ]
        self._deliver = _delivery(moved, forms, link) if moved else None

    def _room(self, numel: int) -> int:
        """Return where each of these sums begins."""
        start = self._numel
        self._numel += round_up(numel, VECTOR_NUMEL)
        return start

    def _segment(self, share: Segment, piece: Piece) -> Segment:
        total = 0
        if share.reducer == self._link.rank:
            total = self.own[piece.part] + piece.start
        elif piece.reducer == self._link.rank:
            total = self._room(piece.stop - piece.start)
        return share.part(piece.start, piece.stop)._replace(reducer=piece.reducer, total=total)

    def begin(
        self,
        tensors: Sequence[Tensor] | None,
        codings: Sequence[tuple[Coding, ...]],
        rotations: Sequence[Rotation | None],
        *,
        into: Tensor,
        waiting: Tensor | None = None,
    ) -> Reduction:
        """Begin to fill ``into``, of ``room``, where ``own`` says. Arguments are those of
        ``Reduction``.
        """
        then = None
        if self._deliver is not None:
            then = partial(self._deliver, into, [hops[-1] for hops in codings])
        return Reduction(self.plan, tensors, codings, rotations, into, waiting=waiting, then=then)

    def room(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate the sums."""
        return self._link.empty(self._numel, dtype=dtype, device=device)

    def waiting_room(self, device: torch.device) -> Tensor:
        """Allocate what waits between the two hops."""
        return self._link.empty(self.plan.waiting_numel, dtype=torch.float32, device=device)


def _pieces(
    shares: Sequence[Segment], forms: Sequence[Form], route: Sequence[LinkHop], ranks: int
) -> Iterator[Piece]:
    """Cut the shares as is cheapest, small ones that follow each other as one."""
    runs: list[list[int]] = []
    shapes: list[Shape] = []
    before = None
    for place, share in enumerate(shares):
        form, alike = forms[share.gradient], (share.gradient, share.reducer)
        if alike == before and is_tight(form.delivery):
            runs[-1].append(place)
            shapes[-1] = shapes[-1]._replace(numel=shapes[-1].numel + share.numel)
            continue
        runs.append([place])
        inner = form.codecs[0] if len(form.codecs) > 1 else None
        codecs = map(_padded, (form.codecs[-1], form.delivery, inner))
        shapes.append(Shape(share.reducer, share.numel, *codecs))
        before = alike
    for piece in owners.plan(tuple(shapes), ranks, route[0].link.size if len(route) > 1 else None):
        begin = 0
        for place in runs[piece.part]:
            numel = shares[place].numel
            start, stop = max(piece.start - begin, 0), min(piece.stop - begin, numel)
            if start < stop:
                yield Piece(place, start, stop, piece.reducer)
            begin += numel


def _padded(codec: Codec | None) -> Codec | None:
    return replace(codec, tight=False) if is_tight(codec) else codec


def _delivery(
    moved: Sequence[tuple[Segment, int]], forms: Sequence[Form], link: Link
) -> Callable[[Tensor, Sequence[Coding]], None]:
    """Plan the move of sums from their reducers to the owners, which are given with them."""
    outgoing: list[list[Segment]] = [[] for _ in range(link.size)]  # by owner
    incoming: list[list[Segment]] = [[] for _ in range(link.size)]  # by reducer
    for segment, owner in moved:
        if segment.reducer == link.rank:
            outgoing[owner].append(segment)
        elif owner == link.rank:
            incoming[segment.reducer].append(segment)
    codecs = [form.delivery for form in forms]
    sent, leaving = _placed(outgoing, codecs)
    received, arriving = _placed(incoming, codecs)
    encode = Operations(
        (
            Encode(codecs[s.gradient], s.numel, values=1, wire=0, stream=s.gradient),
            (s.total, place, _DELIVERED + VECTORS_PER_ELEMENT * s.first),
        )
        for s, place in leaving
    )
    decode = Operations(
        (Decode(codecs[s.gradient], s.numel, 0, 1, s.gradient), (place, s.total))
        for s, place in arriving
    )

    def deliver(sums: Tensor, codings: Sequence[Coding]) -> None:
        """Fill what this rank's shares lack in ``sums``."""
        own = [c._replace(codec=d) for c, d in zip(codings, codecs, strict=True)]
        streams = Streams(own, [None] * len(own))
        payload = pack(link, "gradients", sum(sent), encode, [sums], streams)
        exchange = link.all_to_all(payload, sent=sent, received=received, role="gradients")
        unpack(link, "gradients", decode, [exchange.wait(), sums], streams)

    return deliver


# Vectors of delivered pieces: far from those of the hops.
_DELIVERED = 1 << 62


def _placed(
    rows: Sequence[Sequence[Segment]], codecs: Sequence[Codec]
) -> tuple[list[int], list[tuple[Segment, int]]]:
    """Return the bytes of every row, and where each segment begins in the message."""
    layouts = [lay_out((codecs[s.gradient], s.numel) for s in row) for row in rows]
    sent = [nbytes for _, nbytes in layouts]
    placed = [
        (segment, begin + slot)
        for row, (slots, _), begin in zip(rows, layouts, accumulate(sent, initial=0), strict=False)
        for segment, slot in zip(row, slots, strict=True)
    ]
    return sent, placed
