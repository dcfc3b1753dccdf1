"""Reduce gradients over one or two hops, each with a codec of its own.

owners.py decides which rank sums which elements; reduction_plan.py has the words of a plan.

[Note: two hops] Ranks are numbered node by node, r = node * node_size + local. The first hop sums
over the ranks of a node: rank (n, g) collects from its node the data bound for any (n', g). The
second hop sums those partial sums over the nodes: each byte enters a node once. Between the two a
segment is decoded, added in fp32 and encoded again (`Recode`); a rotation spans both hops. If nodes
have signs of their own, all ranks of a node share them, so only the last sum sees different signs.
Own contributions are in full precision where a hop says so: nobody else receives them, so they need
no message, and with two nodes that halves the variance of the inter-node hop.

[Note: slices] Large reductions over two hops are cut into slices. While slice i crosses between
the nodes, slice i + 1 is inside them.

[Note: partial sums] Several micro-steps can cross between the nodes once. The first hop then runs
in every micro-step; its sums are added, in fp32 and in micro-step order, to the partial sums that
this rank holds for every node: a rank of a node of G holds one G-th of a bucket. The second hop
sends the partial sums at the last micro-step. Sums are linear and so is a rotation, so partial sums
stay rotated; the signs must then be the same in all micro-steps of an optimizer step.

[Note: two streams] The stream that begins a reduction may leave the wait for its last hop to
another stream, so that its own later work does not wait for the link between the nodes. Before that
the other stream waits for the first one. Memory of the first stream that the other one uses is
recorded on it: the allocator must not give it to the first stream, which runs ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
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
from ds_quant.comm.small_tensors import is_tight, padded
from ds_quant.comm.transport import Communicator, keep_for_current_stream
from ds_quant.kernels.batch import Decode, Encode, Offsets
from ds_quant.kernels.dispatch import Operations, RngState
from ds_quant.kernels.wire import VECTOR_NUMEL, round_up

# ---- over one or two hops ----


class Reduction:
    """A running reduction of every segment of a plan over all ranks: see [Note: two hops].

    Sums are fp32 in rank order within a hop, nodes in order across hops; the plan's scale is
    applied once at the end. The tensors may change as soon as the reduction is made.

    Args:
        tensors: of the plan's segments, 1-D contiguous; None: run only the inter-node hop, on the
            accumulated partial sums.
        bound_codecs: per gradient one for each hop; the addresses are this rank's own.
        rotations: per gradient.
        sums: output, (elements,) fp32 or a dtype that the kernels cast to; segments that this rank
            reduces lie at their ``total``. None: run only the first hop, into the partial sums.
        partial_sums: (plan.partial_numel,) fp32, see [Note: partial sums]; None if the hops follow
            each other.
        fresh: True to overwrite the partial sums instead of adding to them.
        ends_elsewhere: True if another stream calls ``wait``, see [Note: two streams].
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
        ends_elsewhere: bool = False,
        then: Callable[[], None] | None = None,
    ) -> None:
        self._plan = plan
        self._sums = sums
        self._partial_sums = partial_sums
        self._fresh = fresh
        self._ends_elsewhere = ends_elsewhere
        self._then = then
        self._rng_states = [RngState(hop, rotations) for hop in zip(*bound_codecs, strict=True)]
        first_hop = 1 if tensors is None else 0
        last_hop = 0 if sums is None else len(plan.hops) - 1
        self._hops = range(first_hop, last_hop + 1)
        # Running slices, oldest first: an iterator that posts one exchange at a time and then
        # finishes the slice, and the number of exchanges that it has not posted.
        self._running: deque[tuple[Iterator[None], int]] = deque()
        for slice_plan in plan.slices if partial_sums is None else plan.deferred_slices:
            exchanges = self._reduce(slice_plan, tensors or ())
            next(exchanges)
            if self._running:
                self.advance()
            if len(self._running) > 1 and not ends_elsewhere:
                self._finish_oldest()
            self._running.append((exchanges, len(self._hops) - 1))

    def advance(self) -> None:
        """Post the last exchange of every slice, waiting for those before."""
        for _ in range(len(self._running)):
            exchanges, unposted = self._running.popleft()
            for _ in range(unposted):
                next(exchanges)
            self._running.append((exchanges, 0))

    def wait(self) -> None:
        """Return when every slice is done.

        1. Post the remaining exchanges.
        2. Finish the slices in order: wait for the last exchange, add up, rotate back and scale.
        3. Call ``then``, once.
        """
        self.advance()
        while self._running:
            self._finish_oldest()
        if self._then is not None:
            then = self._then
            self._then = None
            then()

    def _finish_oldest(self) -> None:
        exchanges, _ = self._running.popleft()
        for _ in exchanges:
            pass

    def _reduce(self, plan: SlicePlan, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Reduce one slice; yields after every exchange that it has posted.

        On each hop:
        1. Encode the message, and make the own contributions.
        2. Post the all-to-all.
        3. Wait for it. A deferred reduction adds the messages of its first hop to the partial sums.

        After the last hop decode and add up its messages, rotated back and scaled.

        Buffers are in the order of reduction_plan.py: ``all_to_all_output`` is ARRIVED,
        ``previous_own`` is OWN_BEFORE. The partial sums are read as own contributions.
        """
        if self._partial_sums is not None:
            partial_sums: Tensor | None = self._partial_sums[plan.start : plan.stop]
            empty = self._partial_sums[:0]
        else:
            assert self._sums is not None  # a reduction without partial sums has an output
            partial_sums = None
            empty = self._sums[:0]
        sums = empty if self._sums is None else self._sums
        previous_own = empty if partial_sums is None else partial_sums
        all_to_all_output = empty
        for depth in self._hops:
            communicator = self._plan.hops[depth].communicator
            slice_hop = plan.hops[depth]
            rng_state = self._rng_states[depth]
            own = empty
            if slice_hop.own_numel:
                own = communicator.empty(
                    slice_hop.own_numel, dtype=torch.float32, device=empty.device
                )
            buffers = [own, all_to_all_output, previous_own, sums, *tensors]
            tensors = ()  # only the first hop reads them
            all_to_all_input = pack(
                communicator, "gradients", sum(slice_hop.sent), slice_hop.encode, buffers, rng_state
            )
            pending = communicator.all_to_all(
                all_to_all_input, sent=slice_hop.sent, received=slice_hop.received, role="gradients"
            )
            del buffers, all_to_all_input  # free for the next slice
            if self._ends_elsewhere:  # all slices are in flight at once
                all_to_all_output = empty
                if partial_sums is None:
                    previous_own = empty
            yield
            all_to_all_output = pending.wait()
            if partial_sums is None:
                previous_own = own
            elif depth == 0:
                self._accumulate(plan, all_to_all_output, own, partial_sums)
                all_to_all_output = empty
        if self._sums is not None:
            if self._ends_elsewhere:
                keep_for_current_stream(previous_own, sums)
            buffers = [empty, empty, all_to_all_output, previous_own, sums]
            # Of the last hop: ``communicator`` and ``rng_state``.
            unpack(communicator, "gradients", plan.final_sums, buffers, rng_state)

    def _accumulate(
        self, plan: SlicePlan, all_to_all_output: Tensor, own: Tensor, partial_sums: Tensor
    ) -> None:
        """Add the messages of the first hop to the partial sums."""
        communicator = self._plan.hops[0].communicator
        empty = partial_sums[:0]
        with profiler_range("sum", "gradients", communicator.hop), communicator.decoding():
            micro_step_sums = partial_sums
            if not self._fresh:
                micro_step_sums = communicator.empty(
                    partial_sums.numel(), dtype=torch.float32, device=partial_sums.device
                )
            buffers = [empty, micro_step_sums, all_to_all_output, own, empty]
            plan.partial_sums.run(buffers, self._rng_states[0], backend=communicator.backend)
            if not self._fresh:
                partial_sums.add_(micro_step_sums)


# ---- to owners ----


class GradientSums:
    """The reduction of gradient slices to their owners, planned once and run in every step.

    1. Reduce every gradient slice over the hops, to its owner or, if ``balanced``, in the pieces of
       owners.py.
    2. Deliver sums that another rank than the owner has made: encode them, all-to-all over
       ``communicator``, decode them.

    shares: the gradient slices as segments, whose reducer is their owner.
    specs: of every gradient.
    communicator: the whole group.
    scale: factor of the sums.
    in_place: True if the sums lie at ``total`` of the slices, in a buffer of the caller's.

    own: by index in ``shares``, the first element of the sum of each one that this rank owns.
    """

    def __init__(
        self,
        shares: Sequence[Segment],
        specs: Sequence[GradientSpec],
        hops: Sequence[ReductionHop],
        communicator: Communicator,
        scale: float,
        *,
        balanced: bool = False,
        in_place: bool = False,
    ) -> None:
        self._communicator = communicator
        self._numel = 0
        self.own: dict[int, int] = {}
        for index, share in enumerate(shares):
            if share.reducer == communicator.rank:
                self.own[index] = share.total if in_place else self._new_offset(share.numel)
        if balanced:
            pieces = list(_balanced_pieces(shares, specs, hops, communicator.size))
        else:
            pieces = [
                OwnedPiece(index, 0, share.numel, share.reducer)
                for index, share in enumerate(shares)
            ]
        segments = [self._segment(shares[piece.part], piece) for piece in pieces]
        self.plan = ReductionPlan(segments, specs, hops, scale=scale)
        deliveries: list[tuple[Segment, int]] = []  # (sum, owner)
        for segment, piece in zip(segments, pieces, strict=True):
            owner = shares[piece.part].reducer
            if piece.reducer != owner:
                deliveries.append((segment, owner))
        self._deliver = _delivery(deliveries, specs, communicator) if deliveries else None

    def _new_offset(self, numel: int) -> int:
        """Return the first element of the next sum."""
        start = self._numel
        self._numel += round_up(numel, VECTOR_NUMEL)
        return start

    def _segment(self, share: Segment, piece: OwnedPiece) -> Segment:
        """Return the segment of a piece, with the place of its sum on this rank."""
        rank = self._communicator.rank
        total = 0
        if share.reducer == rank:
            total = self.own[piece.part] + piece.start
        elif piece.reducer == rank:
            total = self._new_offset(piece.stop - piece.start)
        part = share.part(piece.start, piece.stop, reducer=piece.reducer)
        return part._replace(total=total)

    def begin(
        self,
        tensors: Sequence[Tensor] | None,
        bound_codecs: Sequence[tuple[BoundCodec, ...]],
        rotations: Sequence[Rotation | None],
        *,
        into: Tensor,
        partial_sums: Tensor | None = None,
        ends_elsewhere: bool = False,
    ) -> Reduction:
        """Begin to sum into ``into``. The sum of gradient slice i begins at element ``own[i]``.

        ``Reduction.wait`` ends it, and delivers sums that another rank has made.

        into: the buffer of the caller with ``in_place``, else one that ``new_sums`` allocates.

        Other arguments are those of ``Reduction``.
        """
        then = None
        if self._deliver is not None:
            codecs_of_last_hop = [codecs[-1] for codecs in bound_codecs]
            then = partial(self._deliver, into, codecs_of_last_hop)
        return Reduction(
            self.plan,
            tensors,
            bound_codecs,
            rotations,
            into,
            partial_sums=partial_sums,
            ends_elsewhere=ends_elsewhere,
            then=then,
        )

    def new_sums(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate the sums."""
        return self._communicator.empty(self._numel, dtype=dtype, device=device)

    def new_partial_sums(self, device: torch.device) -> Tensor:
        """Allocate the partial sums."""
        return self._communicator.empty(self.plan.partial_numel, dtype=torch.float32, device=device)

    def drop_partial_sums(self, partial_sums: Tensor, gradients: Collection[int]) -> None:
        """Set the partial sums of some gradients to zero. gradients: their indices in ``specs``."""
        for slice_plan in self.plan.deferred_slices:
            for gradient, start, stop in slice_plan.partial_ranges:
                if gradient in gradients:
                    partial_sums[start:stop].zero_()


def _balanced_pieces(
    shares: Sequence[Segment],
    specs: Sequence[GradientSpec],
    hops: Sequence[ReductionHop],
    ranks: int,
) -> Iterator[OwnedPiece]:
    """Cut the shares by ``owners.plan``. ``part`` of a yielded piece is the index of a share.

    Small shares of one gradient and owner that follow each other are planned as one run. Small
    gradients share a number, so a run can hold those of many parameters.
    """
    runs: list[list[int]] = []  # of indices in shares
    ranges: list[OwnedRange] = []  # of every run
    previous = None
    for index, share in enumerate(shares):
        spec = specs[share.gradient]
        gradient_and_owner = share.gradient, share.reducer
        if gradient_and_owner == previous and is_tight(spec.delivery):
            runs[-1].append(index)
            ranges[-1] = ranges[-1]._replace(numel=ranges[-1].numel + share.numel)
            continue
        runs.append([index])
        ranges.append(
            OwnedRange(
                owner=share.reducer,
                numel=share.numel,
                codec=padded(spec.codecs[-1]),
                delivery=padded(_delivery_codec(spec)),
                inner=padded(spec.codecs[0]) if len(spec.codecs) > 1 else None,
            )
        )
        previous = gradient_and_owner
    node_size = hops[0].communicator.size if len(hops) > 1 else None
    # Cut the pieces of runs at the borders of shares.
    for piece in owners.plan(tuple(ranges), ranks, node_size):
        run_offset = 0
        for index in runs[piece.part]:
            numel = shares[index].numel
            start = max(piece.start - run_offset, 0)
            stop = min(piece.stop - run_offset, numel)
            if start < stop:
                yield OwnedPiece(index, start, stop, piece.reducer)
            run_offset += numel


def _delivery_codec(spec: GradientSpec) -> Codec:
    assert spec.delivery is not None  # balanced: ZeRO-1/2 only
    return spec.delivery


# First vector of delivered sums: far from those of the hops.
_DELIVERED = 1 << 62


def _delivery(
    deliveries: Sequence[tuple[Segment, int]],
    specs: Sequence[GradientSpec],
    communicator: Communicator,
) -> Callable[[Tensor, Sequence[BoundCodec]], None]:
    """Plan the move of sums from their reducers to the owners, given as (sum, owner)."""
    outgoing: list[list[Segment]] = [[] for _ in range(communicator.size)]  # by owner
    incoming: list[list[Segment]] = [[] for _ in range(communicator.size)]  # by reducer
    for segment, owner in deliveries:
        if segment.reducer == communicator.rank:
            outgoing[owner].append(segment)
        elif owner == communicator.rank:
            incoming[segment.reducer].append(segment)
    codecs = [_delivery_codec(spec) for spec in specs]
    sent, outgoing_slots = _slots(outgoing, codecs)
    received, incoming_slots = _slots(incoming, codecs)
    # Buffers: the message, the sums.
    encode = Operations(
        (
            Encode(codecs[s.gradient], s.numel, values=1, wire=0, stream=s.gradient),
            Offsets(values=s.total, wire=slot, vector=_DELIVERED + VECTORS_PER_ELEMENT * s.first),
        )
        for s, slot in outgoing_slots
    )
    decode = Operations(
        (
            Decode(codecs[s.gradient], s.numel, wire=0, values=1, stream=s.gradient),
            Offsets(wire=slot, values=s.total),
        )
        for s, slot in incoming_slots
    )

    def deliver(sums: Tensor, bound_codecs: Sequence[BoundCodec]) -> None:
        """Fill the sums of this rank that other ranks have made."""
        bound = [b._replace(codec=codec) for b, codec in zip(bound_codecs, codecs, strict=True)]
        rng_state = RngState(bound, [None] * len(bound))
        payload = pack(communicator, "gradients", sum(sent), encode, [sums], rng_state)
        pending = communicator.all_to_all(payload, sent=sent, received=received, role="gradients")
        unpack(communicator, "gradients", decode, [pending.wait(), sums], rng_state)

    return deliver


def _slots(
    rows: Sequence[Sequence[Segment]], codecs: Sequence[Codec]
) -> tuple[list[int], list[tuple[Segment, int]]]:
    """Return the bytes of every row, and (segment, first byte in the message) of all segments."""
    layouts = [lay_out((codecs[s.gradient], s.numel) for s in row) for row in rows]
    row_bytes = [nbytes for _, nbytes in layouts]
    row_starts = accumulate(row_bytes, initial=0)
    slots: list[tuple[Segment, int]] = []
    for row, (row_slots, _), row_start in zip(rows, layouts, row_starts, strict=False):
        for segment, slot in zip(row, row_slots, strict=True):
            slots.append((segment, row_start + slot))
    return row_bytes, slots
