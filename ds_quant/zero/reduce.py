"""Gradient reduction under ZeRO-3, to shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ds_quant.bundle import sort_out
from ds_quant.coding import Coding
from ds_quant.collectives import reduce_scatter
from ds_quant.hops import Reduction
from ds_quant.layout import VECTOR_NUMEL, round_up, shard_range
from ds_quant.link import Link
from ds_quant.reduction_plan import Form, Hop, ReductionPlan, Segment, own_totals
from ds_quant.rotation import Rotation
from ds_quant.zero.binding import Binding
from ds_quant.zero.streams import Tracked, codings_of

_PLANS = 1000  # remembered

# What posts the rest, and what waits for this rank's shards of the means.
Posted = tuple[Callable[[], None], Callable[[], list[torch.Tensor]]]


class ShardReduction:
    """ZeRO-3: replaces ``reduce_scatter_coalesced``."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._plans: dict[tuple, _Plan] = {}  # by sizes: buckets of equal layers share one

    def __call__(
        self,
        original: Callable[..., Any],
        params: Sequence[Any],
        tensors: list[torch.Tensor],
        group: Any = None,
    ) -> list[torch.Tensor]:
        """Mean over ``group`` of each tensor; returns this rank's unpadded shard, input dtype."""
        bucket = self.begin(params, tensors, group)
        return original(tensors, group) if bucket is None else bucket.finish()

    def begin(
        self, params: Sequence[Any], tensors: list[torch.Tensor], group: Any
    ) -> Bucket | None:
        """Post the reduction; None if it is DeepSpeed's own. Then the tensors may change."""
        binding = self._binding
        binding.asked.add("gradients")
        link = binding.link(group)
        tracked = [binding.tracked(p) for p in params]
        if link.size == 1 or not tensors or None in tracked:
            return None
        route = binding.route(group)
        exact, step, hops = binding.is_exact(binding.step), binding.gradient_step, len(route)
        codings, rotations = [], []
        for parameter, gradient in zip(tracked, tensors, strict=True):
            streams, dtype = None, gradient.dtype
            if not exact:
                streams = binding.gradient_streams(parameter, dtype, rank=link.rank, route=route)
            coding, rotation = codings_of(streams, dtype, hops=hops, step=step)
            codings.append(coding)
            rotations.append(rotation)
        # See [Note: bundles].
        alone, bundles = sort_out([g.numel() for g in tensors], [c[-1] for c in codings], link.size)
        sent = [tensors[i] for i in alone]
        sent += [bundle.pack([tensors[i] for i in members]) for bundle, members in bundles]
        first = [*alone, *(members[0] for _, members in bundles)]
        codings, rotations = [codings[i] for i in first], [rotations[i] for i in first]
        advance, sums = self._post(sent, codings, rotations, route, link)
        dtypes = [g.dtype for g in sent]

        def shards() -> list[torch.Tensor]:
            cast = _cast(sums(), dtypes, link)
            reduced = dict(zip(alone, cast, strict=False))
            for (bundle, members), shard in zip(bundles, cast[len(alone) :], strict=True):
                reduced |= zip(members, bundle.unpack_shard(shard, link.rank), strict=True)
            return [reduced[index] for index in range(len(tracked))]

        return Bucket(binding, tracked, tensors, advance, shards)

    def _post(
        self,
        tensors: Sequence[torch.Tensor],
        codings: Sequence[tuple[Coding, ...]],
        rotations: Sequence[Rotation | None],
        route: tuple[Hop, ...],
        link: Link,
    ) -> Posted:
        if len(route) == 1 and not route[0].exact_own and not any(rotations):
            handle = reduce_scatter(tensors, [c for (c,) in codings], link, scale=1.0 / link.size)
            return _nothing, handle.wait
        numels = tuple([t.numel() for t in tensors])
        forms = tuple(map(Form.of, codings, rotations))
        key = numels, forms, route, link
        if key not in self._plans:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[key] = _Plan.make(numels, forms, route, link)
        return self._plans[key].post(tensors, codings, rotations, link)


def _cast(
    sums: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], link: Link
) -> list[torch.Tensor]:
    """Every sum in its dtype; most are, where kernels write it."""
    found = list(sums)
    different = [i for i, wanted in enumerate(dtypes) if sums[i].dtype != wanted]
    for dtype in {dtypes[place] for place in different}:
        places = [place for place in different if dtypes[place] == dtype]
        whole = [sums[place] for place in places]
        numels, device = [values.numel() for values in whole], whole[0].device
        narrow = link.empties(numels, dtype=dtype, device=device)
        torch._foreach_copy_(narrow, whole)
        for place, values in zip(places, narrow, strict=True):
            found[place] = values
    return found


class Bucket:
    """The gradients of some parameters, on their way to this rank's shards.

    shards: (length,) each, in the gradients' dtype; valid once ``finish`` has returned them.
    ``advance`` posts what was not posted yet, waiting for what comes before it.
    """

    def __init__(
        self,
        binding: Binding,
        tracked: Sequence[Tracked],
        tensors: Sequence[torch.Tensor],
        advance: Callable[[], None],
        reduced: Callable[[], list[torch.Tensor]],
    ) -> None:
        self._binding, self._tracked = binding, tracked
        self.advance, self._reduced = advance, reduced
        self.shards = [g.new_empty(0) for g in tensors]
        self.finished = False

    def finish(self) -> list[torch.Tensor]:
        """Wait for them."""
        watch = self._binding.watch
        reduced = self._reduced()
        for parameter, shard, values in zip(self._tracked, self.shards, reduced, strict=True):
            shard.data = values
            if watch is not None:
                watch.note(parameter.index, shard)
        self.finished = True
        return self.shards


class _Plan(NamedTuple):
    """The reduction of some tensors to ceil-division shards, and the elements of this rank's."""

    reduction: ReductionPlan
    own: list[int]

    @classmethod
    def make(
        cls, numels: Sequence[int], forms: Sequence[Form], route: Sequence[Hop], link: Link
    ) -> _Plan:
        segments = []
        for tensor, numel in enumerate(numels):
            for rank in range(link.size):
                start, stop = shard_range(numel, link.size, rank)
                segments.append(Segment(tensor, start, stop - start, tensor, start, rank))
        placed, _ = own_totals(segments, route)
        own = [segment.numel for segment in segments if segment.reducer == link.rank]
        return cls(ReductionPlan(placed, forms, route, scale=1.0 / link.size), own)

    def post(
        self,
        tensors: Sequence[torch.Tensor],
        codings: Sequence[tuple[Coding, ...]],
        rotations: Sequence[Rotation | None],
        link: Link,
    ) -> Posted:
        """Begin to reduce."""
        rooms = [round_up(numel, VECTOR_NUMEL) for numel in self.own]
        sums = link.empty(sum(rooms), dtype=torch.float32, device=tensors[0].device)
        flat = [tensor.reshape(-1) for tensor in tensors]
        under_way = Reduction(self.reduction, flat, codings, rotations, sums)

        def shards() -> list[torch.Tensor]:
            under_way.wait()
            parts = zip(sums.split(rooms), self.own, strict=True)
            return [part if part.numel() == n else part[:n] for part, n in parts]

        return under_way.advance, shards


def _nothing() -> None:
    """A reduction over one hop has posted everything."""
