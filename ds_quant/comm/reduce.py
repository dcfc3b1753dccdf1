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

[Note: partial sums] Several micro-steps can cross between the nodes once. The first hop then runs
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

from ds_quant.codec.bound import VECTORS_PER_ELEMENT, BoundCodec, Rotation
from ds_quant.codec.codec import Codec
from ds_quant.comm import owners
from ds_quant.comm.message import pack, unpack
from ds_quant.comm.owners import OwnedPiece, OwnedRange
from ds_quant.comm.profiling import profiler_range
from ds_quant.comm.reduction_plan import (
    GradientSpec,
    ReductionHop,
    ReductionPlan,
    Segment,
    SlicePlan,
)
from ds_quant.comm.slots import lay_out
from ds_quant.comm.small_tensors import is_tight
from ds_quant.comm.transport import Communicator
from ds_quant.kernels.batch import Decode, Encode
from ds_quant.kernels.dispatch import Operations, RngState
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
        waiting: (plan.partial_numel,) fp32, see [Note: partial sums]; None if the hops follow
            each other.
        fresh: whether nothing waits yet; then the first hop overwrites.
        then: called when all slices are done.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        tensors: Sequence[Tensor] | None,
        bound_codecs: Sequence[tuple[BoundCodec, ...]],
        rotations: Sequence[Rotation | None],
        sums: Tensor | None,
        *,
        partial_sums: Tensor | None = None,
        fresh: bool = False,
        then: Callable[[], None] | None = None,
    ) -> None:
        self._plan, self._sums, self._partial_sums, self._fresh = plan, sums, partial_sums, fresh
        self._then = then
        by_hop = list(zip(*bound_codecs, strict=True))
        self._streams = [RngState(hop, rotations) for hop in by_hop]
        first, stop = int(tensors is None), len(plan.hops) if sums is not None else 1
        self._hops = range(first, stop)
        self._running: deque[tuple[Iterator[None], int]] = deque()  # and exchanges still to post
        for part in plan.slices if partial_sums is None else plan.deferred_slices:
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
        partial_sums = (
            None if self._partial_sums is None else self._partial_sums[part.start : part.stop]
        )
        nothing = (self._sums if partial_sums is None else partial_sums)[:0]
        sums = nothing if self._sums is None else self._sums
        arrived, before = nothing, nothing if partial_sums is None else partial_sums
        for depth in self._hops:
            communicator, step = self._plan.hops[depth].communicator, part.steps[depth]
            streams, own = self._streams[depth], nothing
            if step.own:
                own = communicator.empty(step.own, dtype=torch.float32, device=nothing.device)
            buffers = [own, arrived, before, sums, *tensors]
            tensors = ()
            wire = pack(communicator, "gradients", sum(step.sent), step.encode, buffers, streams)
            sizes = {"sent": step.sent, "received": step.received}
            arriving = communicator.all_to_all(wire, **sizes, role="gradients")
            del buffers, wire
            yield
            arrived = arriving.wait()
            if partial_sums is None:
                before = own
            elif depth == 0:
                self._accumulate(part, arrived, own, partial_sums)
                arrived = nothing
        if self._sums is not None:
            unpack(
                communicator,
                "gradients",
                part.total,
                [nothing, nothing, arrived, before, sums],
                streams,
            )

    def _accumulate(
        self, part: SlicePlan, arrived: Tensor, own: Tensor, partial_sums: Tensor
    ) -> None:
        """Add what the first hop has brought to what waits."""
        communicator, nothing = self._plan.hops[0].communicator, partial_sums[:0]
        with profiler_range("sum", "gradients", communicator.hop), communicator.decoding():
            into = partial_sums
            if not self._fresh:
                into = communicator.empty(
                    partial_sums.numel(), dtype=torch.float32, device=partial_sums.device
                )
            buffers = [nothing, into, arrived, own, nothing]
            part.partial.run(buffers, self._streams[0], backend=communicator.backend)
            if not self._fresh:
                partial_sums.add_(into)


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
        specs: Sequence[GradientSpec],
        route: Sequence[ReductionHop],
        communicator: Communicator,
        scale: float,
        *,
        balanced: bool = False,
    ) -> None:
        self._communicator, self._numel = communicator, 0
        self.own = {
            i: self._room(s.numel) for i, s in enumerate(shares) if s.reducer == communicator.rank
        }
        pieces = [OwnedPiece(i, 0, share.numel, share.reducer) for i, share in enumerate(shares)]
        if balanced:
            pieces = list(_pieces(shares, specs, route, communicator.size))
        segments = [self._segment(shares[p.part], p) for p in pieces]
        self.plan = ReductionPlan(segments, specs, route, scale=scale)
        moved = [
            (segment, shares[piece.part].reducer)
            for segment, piece in zip(segments, pieces, strict=True)
            if piece.reducer != shares[piece.part].reducer
        ]
        self._deliver = _delivery(moved, specs, communicator) if moved else None

    def _room(self, numel: int) -> int:
        """Return where each of these sums begins."""
        start = self._numel
        self._numel += round_up(numel, VECTOR_NUMEL)
        return start

    def _segment(self, share: Segment, piece: OwnedPiece) -> Segment:
        total = 0
        if share.reducer == self._communicator.rank:
            total = self.own[piece.part] + piece.start
        elif piece.reducer == self._communicator.rank:
            total = self._room(piece.stop - piece.start)
        return share.part(piece.start, piece.stop)._replace(reducer=piece.reducer, total=total)

    def begin(
        self,
        tensors: Sequence[Tensor] | None,
        bound_codecs: Sequence[tuple[BoundCodec, ...]],
        rotations: Sequence[Rotation | None],
        *,
        into: Tensor,
        partial_sums: Tensor | None = None,
    ) -> Reduction:
        """Begin to fill ``into``, of ``room``, where ``own`` says. Arguments are those of
        ``Reduction``.
        """
        then = None
        if self._deliver is not None:
            then = partial(self._deliver, into, [hops[-1] for hops in bound_codecs])
        return Reduction(
            self.plan, tensors, bound_codecs, rotations, into, partial_sums=partial_sums, then=then
        )

    def room(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate the sums."""
        return self._communicator.empty(self._numel, dtype=dtype, device=device)

    def new_partial_sums(self, device: torch.device) -> Tensor:
        """Allocate what waits between the two hops."""
        return self._communicator.empty(self.plan.partial_numel, dtype=torch.float32, device=device)


def _pieces(
    shares: Sequence[Segment],
    specs: Sequence[GradientSpec],
    route: Sequence[ReductionHop],
    ranks: int,
) -> Iterator[OwnedPiece]:
    """Cut the shares as is cheapest, small ones that follow each other as one."""
    runs: list[list[int]] = []
    shapes: list[OwnedRange] = []
    before = None
    for place, share in enumerate(shares):
        spec, alike = specs[share.gradient], (share.gradient, share.reducer)
        if alike == before and is_tight(spec.delivery):
            runs[-1].append(place)
            shapes[-1] = shapes[-1]._replace(numel=shapes[-1].numel + share.numel)
            continue
        runs.append([place])
        inner = spec.codecs[0] if len(spec.codecs) > 1 else None
        codecs = map(_padded, (spec.codecs[-1], spec.delivery, inner))
        shapes.append(OwnedRange(share.reducer, share.numel, *codecs))
        before = alike
    for piece in owners.plan(
        tuple(shapes), ranks, route[0].communicator.size if len(route) > 1 else None
    ):
        begin = 0
        for place in runs[piece.part]:
            numel = shares[place].numel
            start, stop = max(piece.start - begin, 0), min(piece.stop - begin, numel)
            if start < stop:
                yield OwnedPiece(place, start, stop, piece.reducer)
            begin += numel


def _padded(codec: Codec | None) -> Codec | None:
    return replace(codec, tight=False) if is_tight(codec) else codec


def _delivery(
    moved: Sequence[tuple[Segment, int]], specs: Sequence[GradientSpec], communicator: Communicator
) -> Callable[[Tensor, Sequence[BoundCodec]], None]:
    """Plan the move of sums from their reducers to the owners, which are given with them."""
    outgoing: list[list[Segment]] = [[] for _ in range(communicator.size)]  # by owner
    incoming: list[list[Segment]] = [[] for _ in range(communicator.size)]  # by reducer
    for segment, owner in moved:
        if segment.reducer == communicator.rank:
            outgoing[owner].append(segment)
        elif owner == communicator.rank:
            incoming[segment.reducer].append(segment)
    codecs = [spec.delivery for spec in specs]
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

    def deliver(sums: Tensor, bound_codecs: Sequence[BoundCodec]) -> None:
        """Fill what this rank's shares lack in ``sums``."""
        own = [c._replace(codec=d) for c, d in zip(bound_codecs, codecs, strict=True)]
        streams = RngState(own, [None] * len(own))
        payload = pack(communicator, "gradients", sum(sent), encode, [sums], streams)
        exchange = communicator.all_to_all(payload, sent=sent, received=received, role="gradients")
        unpack(communicator, "gradients", decode, [exchange.wait(), sums], streams)

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
