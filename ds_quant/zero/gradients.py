"""Reduce gradients: buckets of DeepSpeed become sums at their owners, under every stage.

[Note: one reduction] A bucket holds parts of gradients, *shares*, each of which one rank gets the
mean of: under ZeRO-3 every rank its shard of every gradient, under ZeRO-1 and 2 the rank that owns
the part of the flat partition. What a bucket is reduced by, its ``Layout``, follows from its
parameters alone and is planned when the bucket is first seen; plans of equal sizes are shared,
as layers are alike.

[Note: equal buckets] Under ZeRO-1 and 2 ranks that leave out different layers (LayerDrop) fill
different buckets. gloo's messages from peer to peer would then wait for ever, or bring sums of
different parameters. So ranks compare one number before every bucket, and one before the optimizer
steps, where a rank with fewer buckets meets the others. NCCL's collectives end by their watchdog,
and an answer would have to wait for the device: there nothing is compared.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from torch import Tensor

from ds_quant.codec.bound import BoundCodec, Rotation, full_precision
from ds_quant.codec.codec import CastCodec
from ds_quant.comm.message import SMALL_NUMEL, is_tight, small_last, small_together
from ds_quant.comm.reduce import GradientSums, Reduction
from ds_quant.comm.reduction_plan import ReductionHop, Segment, shards_of
from ds_quant.comm.transport import Communicator
from ds_quant.kernels.batch import Decode
from ds_quant.kernels.dispatch import Operations, RngState
from ds_quant.kernels.wire import VECTOR_NUMEL, round_up
from ds_quant.zero import hooks, optimizer_hooks
from ds_quant.zero.optimizer_hooks import owners_of
from ds_quant.zero.param import GradientCodecs, Param, full_precision_gradient
from ds_quant.zero.partial_gradients import Member, PartialBucket
from ds_quant.zero.plugin import Plugin

# ---- any stage ----


_PLANS = 1000  # remembered: a parameter without a gradient makes another bucket


class GradientSlice(NamedTuple):
    """Elements of a gradient whose mean one rank gets, as ``segment`` says; ``member`` names them
    among what waits for the boundary.
    """

    member: Member
    streams: GradientCodecs
    segment: Segment  # its ``gradient`` is set by the layout


@dataclass(frozen=True, eq=False, kw_only=True)
class Layout:
    """How a bucket is reduced in every step.

    streams: of each gradient. own: this rank's shares in the order of their sums, each with its
    member and the first element of its sum; a member may have two, as a parameter that is used
    twice may be in a bucket twice. dtype: of the sums, unless others are added to them.
    """

    streams: Sequence[GradientCodecs]
    sums: GradientSums
    members: tuple[Member, ...]
    own: Sequence[tuple[Member, Segment, int]]
    dtype: torch.dtype

    def shards(self, total: Tensor) -> list[Tensor]:
        """View the sums by tensor, under ZeRO-3, where this rank has a share of each."""
        found = {}
        for (_, share, _), part in zip(self.own, total.split(self._rooms), strict=True):
            found[share.tensor] = part if part.numel() == share.numel else part[: share.numel]
        return [found[tensor] for tensor in range(len(found))]

    @cached_property
    def _rooms(self) -> list[int]:
        return [round_up(share.numel, VECTOR_NUMEL) for _, share, _ in self.own]

    @cached_property
    def places(self) -> dict[Member, slice]:
        """Where the sum of a member lies, the first one of two."""
        backwards = reversed(self.own)
        return {member: slice(start, start + share.numel) for member, share, start in backwards}

    @cached_property
    def digest(self) -> int:
        """An int64 that is equal on ranks whose bucket has the same members in the same order."""
        text = repr([(param.index, owner) for param, owner in self.members])
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    @cached_property
    def copies(self) -> Operations:
        """Write the sums, as bytes, over the shares: of the tensors that are the next buffers."""
        sums = CastCodec(torch.float32)
        return Operations(
            (Decode(sums, share.numel, 0, 1 + share.tensor, 0), (4 * start, share.start))
            for _, share, start in self.own
        )


class Sums(NamedTuple):
    """Sums of a bucket on their way; ``crossed`` ones are added to them, see waiting.py."""

    layout: Layout
    under_way: Reduction | None
    total: Tensor | None
    crossed: Mapping[Member, Tensor]

    def advance(self) -> None:
        """Post what was not posted yet, waiting for what comes before it."""
        if self.under_way is not None:
            self.under_way.advance()

    def wait(self) -> Tensor | None:
        """Return the sums where the layout says, None if they wait for the boundary."""
        if self.under_way is not None:
            self.under_way.wait()
        for member, values in self.crossed.items():
            if member in self.layout.places:  # else another rank's, and empty
                self.total[self.layout.places[member]].add_(values)
        return self.total


_How = tuple[Sequence[tuple[BoundCodec, ...]], Sequence[Rotation | None]]


class GradientReducer:
    """Plans and begins the reductions of one engine."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._layouts: dict[tuple, Layout] = {}
        self._sums: dict[tuple, GradientSums] = {}

    def _plan(
        self,
        key: tuple,
        shares: Sequence[GradientSlice],
        communicator: Communicator,
        scale: float,
        dtypes: tuple = (),
    ) -> Layout:
        """Plan the reduction of a bucket, and remember it by ``key``: all that the shares depend
        on. ``dtypes``: under ZeRO-3, of gradients whose sums may have theirs.
        """
        if len(self._layouts) >= _PLANS:
            self._layouts.clear()
            self._sums.clear()
        streams, segments = _by_gradient(shares)
        route = self._plugin.route(communicator.process_group)
        alike = segments, tuple([s.spec for s in streams]), route, communicator, scale
        if alike not in self._sums:
            self._sums[alike] = GradientSums(*alike, balanced=not dtypes)
        sums = self._sums[alike]
        self._layouts[key] = layout = Layout(
            streams=streams,
            sums=sums,
            members=tuple(dict.fromkeys(share.member for share in shares)),
            own=[(shares[i].member, segments[i], start) for i, start in sums.own.items()],
            dtype=dtypes[0] if len(set(dtypes)) == 1 else torch.float32,
        )
        return layout

    def _streams(
        self, param: Param, dtype: torch.dtype, numel: int, route: Sequence[ReductionHop], rank: int
    ) -> GradientCodecs:
        hops = len(route)
        if self._plugin.is_full_precision(self._plugin.step):
            streams = full_precision_gradient(dtype, hops)
        else:
            streams = param.gradient_codecs(dtype, rank=rank, hops=hops)
        if numel <= SMALL_NUMEL and isinstance(streams.spec.codecs[-1], CastCodec):
            return full_precision_gradient(dtype, hops, tight=True)
        return streams

    def _begin(
        self, layout: Layout, tensors: Sequence[Tensor], route: Sequence[ReductionHop]
    ) -> Sums:
        """Post a reduction; afterwards the tensors may change."""
        plugin, sums, device = self._plugin, layout.sums, tensors[0].device
        step, once = plugin.gradient_step, plugin.crosses_once(route)
        # One pattern of signs for all micro-steps whose rotated values are added up.
        signed = plugin.engine.global_steps << 24 if once else step
        bound_codecs, rotations = zip(
            *[s.bound_codecs(step, signed) for s in layout.streams], strict=True
        )
        how, partial_sums, crossed = (bound_codecs, rotations), None, {}
        if once:
            store, members = plugin.partial_gradients, layout.members
            if store.are_left(members):  # what waits of them takes the second hop alone
                store.take(None, members)
                return Sums(layout, None, sums.room(device).zero_(), store.take_crossed(members))
            kept = store.take(layout, members)
            if kept is not None:
                kept.added.wait()
                partial_sums = kept.values
            if not plugin.engine.is_gradient_accumulation_boundary():
                bucket = _accumulate(layout, tensors, how, partial_sums)
                store.put(layout, bucket)
                return Sums(layout, bucket.added, None, {})
            crossed = store.take_crossed(members)
        total = sums.room(device, torch.float32 if crossed else layout.dtype)
        return Sums(
            layout, sums.begin(tensors, *how, into=total, partial_sums=partial_sums), total, crossed
        )


def _by_gradient(
    shares: Sequence[GradientSlice],
) -> tuple[list[GradientCodecs], tuple[Segment, ...]]:
    """Return the streams of every gradient, and the segments of the shares by their numbers."""
    streams: list[GradientCodecs] = []
    numbers: dict[tuple[int, int], int] = {}
    segments = []
    for _, own, segment in shares:
        number = numbers.setdefault((id(own), segment.tensor), len(streams))
        if number == len(streams):
            streams.append(own)
        segments.append(segment._replace(gradient=number))
    return streams, tuple(segments)


def _accumulate(
    layout: Layout, tensors: Sequence[Tensor], how: _How, partial_sums: Tensor | None
) -> PartialBucket:
    """Begin to add the tensors, summed inside the node, to what waits of them."""
    device, fresh = tensors[0].device, partial_sums is None
    values = layout.sums.new_partial_sums(device) if fresh else partial_sums
    added = Reduction(layout.sums.plan, tensors, *how, None, partial_sums=values, fresh=fresh)

    def cross() -> Iterator[tuple[Member, Tensor]]:
        added.wait()
        total = layout.sums.room(device)
        layout.sums.begin(None, *how, into=total, partial_sums=values).wait()
        yield from ((member, total[:0]) for member in layout.members if member not in layout.places)
        for member, share, start in layout.own:
            yield member, total[start : start + share.numel]

    return PartialBucket(members=layout.members, values=values, added=added, cross=cross)


def _note(noted: list[tuple[Param, Tensor]], param: Param, reduced: Tensor) -> None:
    noted.append((param, torch.isfinite(reduced).all()))


# ---- ZeRO-3 ----


class ShardReduction(GradientReducer):
    """ZeRO-3: replace ``reduce_scatter_coalesced``."""

    def __call__(
        self, params: Sequence[Any], tensors: list[Tensor], group: Any
    ) -> list[Tensor] | None:
        """Mean over ``group`` of each tensor: this rank's unpadded shard, in its dtype. None if the
        reduction is DeepSpeed's own.
        """
        bucket = self.begin(params, tensors, group)
        return None if bucket is None else bucket.finish()

    def begin(self, params: Sequence[Any], tensors: list[Tensor], group: Any) -> Bucket | None:
        """Post the reduction; None if it is DeepSpeed's own. Afterwards the tensors may change."""
        plugin = self._plugin
        plugin.requested_roles.add("gradients")
        communicator = plugin.communicator(group)
        if communicator.size == 1 or not tensors:
            return None
        dtypes = tuple([tensor.dtype for tensor in tensors])
        key = tuple(map(id, params)), dtypes, communicator, plugin.is_full_precision(plugin.step)
        layout = self._layouts.get(key)
        if layout is None:
            tracked = [plugin.param_of(p) for p in params]
            if None in tracked:
                return None
            shares = self._shares(tracked, dtypes, communicator)
            layout = self._plan(key, shares, communicator, 1 / communicator.size, dtypes)
        sums = self._begin(layout, [tensor.reshape(-1) for tensor in tensors], plugin.route(group))
        return Bucket([g.new_empty(0) for g in tensors], sums, plugin.finite_flags)

    def _shares(
        self, tracked: Sequence[Param], dtypes: Sequence[torch.dtype], communicator: Communicator
    ) -> list[GradientSlice]:
        """Shards of all gradients, small ones last, by dtype."""
        route = self._plugin.route(communicator.process_group)
        numels = [param.shape.numel() for param in tracked]
        streams = [
            self._streams(param, dtype, numel, route, communicator.rank)
            for param, dtype, numel in zip(tracked, dtypes, numels, strict=True)
        ]
        plain = len(route) == 1 and not route[0].full_precision_own
        plain = plain and not any(s.spec.block for s in streams)
        last = [s.spec.codecs[-1] for s in streams]
        shares = []
        for i in small_last(last):
            how = {"plain": plain, "small": is_tight(last[i])}
            for shard in shards_of(i, numels[i], communicator.size, **how):
                shares.append(GradientSlice((tracked[i], -1), streams[i], shard))
        return shares


@dataclass(eq=False)
class Bucket:
    """A running reduction of some gradients to this rank's shards.

    shards: (length,) each, in the gradients' dtype; valid once ``finish`` has returned them.
    noted: see ``Plugin``.
    """

    shards: list[Tensor]
    sums: Sums
    noted: list[tuple[Param, Tensor]] | None
    finished: bool = False

    def finish(self) -> list[Tensor]:
        """Wait for the shards."""
        total = self.sums.wait()
        found = self._zeros() if total is None else self._taken(total)
        for shard, values in zip(self.shards, found, strict=True):
            shard.data = values
        for (param, _), share, _ in self.sums.layout.own if self.noted is not None else ():
            _note(self.noted, param, self.shards[share.tensor])
        self.finished = True
        return self.shards

    def _taken(self, total: Tensor) -> list[Tensor]:
        """Views of the sums, cast if they have another dtype."""
        dtypes = {shard.dtype for shard in self.shards}
        if dtypes != {total.dtype} and len(dtypes) == 1:
            total = self.sums.layout.sums.room(total.device, *dtypes).copy_(total)
        parts = self.sums.layout.shards(total)
        return [part.to(shard.dtype) for part, shard in zip(parts, self.shards, strict=True)]

    def _zeros(self) -> list[Tensor]:
        """Shards of zeros, which share memory."""
        numels = {share.tensor: share.numel for _, share, _ in self.sums.layout.own}
        memory = {shard.dtype: shard.new_zeros(max(numels.values())) for shard in self.shards}
        return [memory[shard.dtype][: numels[i]] for i, shard in enumerate(self.shards)]


# ---- ZeRO-1 and 2 ----


_COPY = RngState([full_precision(torch.float32)], [None])


class OwnerReduction(GradientReducer):
    """ZeRO-1/2: replace ``allreduce_and_copy_with_multiple_ranks``.

    DeepSpeed hands over slices of its bucket by owner, with parameters run together. Where one
    parameter ends is read off the bucket, so that no group of a codec straddles two.
    """

    def __init__(self, plugin: Plugin, optimizer: Any) -> None:
        super().__init__(plugin)
        self._optimizer = optimizer
        self._bucket: Tensor | None = None
        self._divisor = 1.0
        self._params: list[Tensor] = []
        self._starts: list[int] = []

    @contextmanager
    def bucket(self, tensor: Tensor, params: list[Tensor], divisor: float) -> Iterator[None]:
        """Inside, ``tensor`` is reduced, the sum divided by ``divisor``: ``params``, end to end.
        DeepSpeed frees its buffer at the end of a backward, so nothing may hold on to it.
        """
        self._bucket, self._params, self._divisor = tensor.view(-1), params, divisor
        self._starts = list(accumulate((p.numel() for p in params), initial=0))
        try:
            yield
        finally:
            self._bucket = None

    def reduce(self, original: Callable[..., None], call: dict[str, Any]) -> None:
        """Sum every slice for its owner, in place; other ranks' slices keep their old values."""
        if self._bucket is None:
            raise hooks.moved(optimizer_hooks.BUCKET)
        self._plugin.requested_roles.add("gradients")
        communicator = self._plugin.communicator(
            call["process_group"] or self._optimizer.dp_process_group
        )
        whole, single = optimizer_hooks.sorted_out(call, alone=communicator.size == 1)
        if whole is not None:
            self._all_reduce(original, whole, communicator)
        if single is not None:
            self._reduce_to_owners(single, communicator)

    def _all_reduce(
        self, original: Callable[..., None], call: dict[str, Any], communicator: Communicator
    ) -> None:
        """Leave slices of which several ranks need all (Muon's split matrices) to DeepSpeed."""
        slices, dtype = call["small_bucket"], call["communication_data_type"]
        for values in slices if self._divisor != 1 else ():
            values.div_(self._divisor)
        original(**call)
        nbytes = sum(s.numel() for s in slices) * dtype.itemsize
        communicator.count_ring(nbytes, role="gradients", passes=2)
        own = [
            s
            for s, ranks in zip(slices, owners_of(call), strict=True)
            if communicator.rank in ranks
        ]
        self._watch(cut for a, b in self._ranges(own) for _, *cut in self._cuts(a, b))

    def _reduce_to_owners(self, call: dict[str, Any], communicator: Communicator) -> None:
        """Sum every slice for the one rank that owns it."""
        owners = [owner for (owner,) in owners_of(call)]
        slices, dtype = call["small_bucket"], call["communication_data_type"]
        plugin, route = self._plugin, self._plugin.route(communicator.process_group)
        ranges, params = self._ranges(slices), tuple(map(id, self._params))
        exact = plugin.is_full_precision(plugin.step)
        key = tuple(ranges), tuple(owners), params, dtype, exact, communicator, self._divisor
        layout = self._layouts.get(key)
        if layout is None:
            shares = self._shares(zip(owners, ranges, strict=True), dtype, communicator)
            layout = self._plan(key, shares, communicator, 1 / self._divisor)
        if communicator.is_gloo:
            require_equal(plugin, communicator, layout)
        sums = self._begin(layout, [self._bucket], route).wait()
        if sums is None:
            for owner, values in zip(owners, slices, strict=True):
                if owner == communicator.rank:
                    values.zero_()
            return
        layout.copies.run(
            [sums.view(torch.uint8), self._bucket], _COPY, backend=communicator.backend
        )
        self._watch((m[0], s.start, s.start + s.numel) for m, s, _ in layout.own)
        outputs = call.get("output_bucket") or [None] * len(slices)
        for owner, values, output in zip(owners, slices, outputs, strict=True):
            if owner == communicator.rank:
                optimizer_hooks.add_to_partition(self._optimizer, output, values)

    def _watch(self, cuts: Iterable[tuple[Param, int, int]]) -> None:
        if self._plugin.finite_flags is not None:
            for param, start, stop in cuts:
                _note(self._plugin.finite_flags, param, self._bucket[start:stop])

    def _shares(
        self,
        owned: Iterable[tuple[int, tuple[int, int]]],
        dtype: torch.dtype,
        communicator: Communicator,
    ) -> list[GradientSlice]:
        """Cut ranges of the bucket, each with its owner; small ones of an owner follow each other,
        where the first of them is.
        """
        route, shares = self._plugin.route(communicator.process_group), []
        for owner, whole in owned:
            for first, param, start, stop in self._cuts(*whole):
                streams = self._streams(param, dtype, stop - start, route, communicator.rank)
                segment = Segment(0, start, stop - start, 0, first, owner)
                small = is_tight(streams.spec.codecs[-1])
                shares.append(
                    (GradientSlice((param, owner), streams, segment), owner if small else None)
                )
        return small_together(shares)

    def _cuts(self, position: int, end: int) -> Iterator[tuple[int, Param, int, int]]:
        """Cut elements of the bucket at parameter borders: the first element in the parameter, the
        parameter, and the range of the bucket.
        """
        place = bisect_right(self._starts, position) - 1
        while position < end:
            start, stop = self._starts[place], min(end, self._starts[place + 1])
            if position < stop:  # else a parameter of no elements
                param = self._plugin.param_of(self._params[place])
                yield position - start, param, position, stop
            position, place = stop, place + 1

    def _ranges(self, slices: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Return the first element of every slice in the bucket and the one behind its last."""
        begin, itemsize = self._bucket.data_ptr(), self._bucket.element_size()
        found = []
        for values in slices:
            first, numel = (values.data_ptr() - begin) // itemsize, values.numel()
            if not 0 <= first <= self._bucket.numel() - numel:
                raise RuntimeError("quantized_comm: a gradient slice lies outside its bucket")
            found.append((first, first + numel))
        return found


_SHOWN = 4  # names in a message


def require_equal(plugin: Plugin, communicator: Communicator, layout: Layout | None) -> None:
    """Run before a bucket is reduced, and without one before the optimizer steps: see
    [Note: equal buckets].

    Raises:
        RuntimeError: on all ranks, if one has another bucket or none.
    """
    digest, members = (-1, ()) if layout is None else (layout.digest, layout.members)
    if not communicator.differs(digest ^ plugin.gradient_step):
        return
    found: list[list[str]] = [[]] * communicator.size
    names = list(dict.fromkeys(param.name for param, _ in members))
    torch_dist.all_gather_object(found, names, group=communicator.process_group)
    first = found[0]
    other = next((rank for rank, names in enumerate(found) if names != first), 0)
    only = [n for n in (*first, *found[other]) if (n in first) != (n in found[other])]
    shown = ", ".join(only[:_SHOWN]) + (", ..." if len(only) > _SHOWN else "")
    raise RuntimeError(
        f"quantized_comm: step {plugin.engine.global_steps}: ranks reduce different "
        f"gradients: rank {communicator.ranks[0]} those of {len(first)} parameter(s) now, rank "
        f"{communicator.ranks[other]} those of {len(found[other])}; one of them lacks "
        f"{shown or 'none, but they come in another order'}. Under ZeRO-1 and 2 every rank "
        "must have gradients of the same parameters, with and without this plugin. Draw what "
        "is left out (LayerDrop) alike on all ranks, or add 0 * parameter.sum() of what is "
        "left out to the loss"
    )
