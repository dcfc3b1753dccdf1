"""Gradient reduction under ZeRO-1/2, to the owners of a bucket's slices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ds_quant.bundle import Copies, Scattered, is_small
from ds_quant.coding import exactly
from ds_quant.link import Link
from ds_quant.owner_plan import Shape, plan
from ds_quant.owners import OwnerSums, Share
from ds_quant.reduction_plan import Form, Hop
from ds_quant.zero import replica_seams
from ds_quant.zero.binding import Binding
from ds_quant.zero.streams import GradientStreams, codings_of

_PLANS = 1000  # remembered


class _Run(NamedTuple):
    """What is one tensor of the message: elements [start, stop) of a bucket, of one parameter from
    ``first`` on or, in full precision, of several small ones of one owner.

    streams: None in full precision. members: (index of a parameter, first element in the bucket,
    last one exclusive).
    """

    owner: int
    streams: GradientStreams | None
    first: int
    members: list[tuple[int, int, int]]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Its elements of the bucket; members side by side are one."""
        ranges: list[tuple[int, int]] = []
        for _, start, stop in self.members:
            if ranges and ranges[-1][1] == start:
                ranges[-1] = ranges[-1][0], stop
            else:
                ranges.append((start, stop))
        return ranges

    def shape(self, dtype: torch.dtype, *, hops: int) -> Shape:
        """What decides who sums it."""
        codings, _ = codings_of(self.streams, dtype, hops=hops, step=0)
        numel = sum(stop - start for _, start, stop in self.members)
        inner = codings[0].codec if hops > 1 else None
        return Shape(self.owner, numel, codings[-1].codec, inner)


class _Plan(NamedTuple):
    """How a bucket is reduced: the gradients in it (None for what stays in full precision), what
    must be laid end to end first, and where this rank's runs and their sums lie.
    """

    gradients: list[GradientStreams | None]
    sums: OwnerSums
    scattered: Scattered
    own: Copies
    own_runs: list[_Run]

    @classmethod
    def make(
        cls,
        runs: list[_Run],
        dtype: torch.dtype,
        route: Sequence[Hop],
        link: Link,
        *,
        scale: float,
    ) -> _Plan:
        shapes = tuple([run.shape(dtype, hops=len(route)) for run in runs])
        pieces = plan(shapes, link.size, route[0].link.size if len(route) > 1 else None)
        places: dict[int, int] = {}  # of streams among the gradients
        shares, gradients, moved, end = [], [], [], 0
        for run, shape in zip(runs, shapes, strict=True):
            if id(run.streams) not in places:
                places[id(run.streams)] = len(gradients)
                gradients.append(run.streams)
            tensor, start = 0, run.ranges[0][0]
            if len(run.ranges) > 1:
                tensor, start, end = 1, end, end + shape.numel
                moved += run.ranges
            place = places[id(run.streams)]
            shares.append(Share(run.owner, tensor, start, shape.numel, place, run.first))
        forms = [_form(streams, dtype, hops=len(route)) for streams in gradients]
        sums = OwnerSums(shares, pieces, forms, route, link, scale=scale)
        own = [(r, total) for r, total in zip(runs, sums.totals, strict=True) if total is not None]
        into = [(run.ranges, total) for run, total in own]
        return cls(gradients, sums, Scattered(moved), Copies(into), [run for run, _ in own])


def _form(streams: GradientStreams | None, dtype: torch.dtype, *, hops: int) -> Form:
    return Form.of(*codings_of(streams, dtype, hops=hops, step=0))


class OwnerReduction:
    """ZeRO-1/2: replaces ``allreduce_and_copy_with_multiple_ranks``.

    DeepSpeed hands over slices of its bucket by owner, with parameters run together. Where one
    parameter ends is read off the bucket, so that no group of a codec straddles two. See [Note:
    bundles] for small ones in full precision, which have no groups.
    """

    def __init__(self, binding: Binding, optimizer: Any) -> None:
        self._binding, self._optimizer = binding, optimizer
        self._bucket: torch.Tensor | None = None
        self._divisor = 1.0
        self._params: list[torch.Tensor] = []
        self._starts: list[int] = []
        self._plans: dict[tuple, _Plan] = {}

    @contextmanager
    def bucket(
        self, tensor: torch.Tensor, params: list[torch.Tensor], divisor: float
    ) -> Iterator[None]:
        """Inside, ``tensor`` is reduced, the sum divided by ``divisor``: ``params``, end to end.
        DeepSpeed frees its buffer at the end of a backward, so nothing may hold on to it.
        """
        self._bucket, self._params, self._divisor = tensor.view(-1), params, divisor
        self._starts = list(accumulate((p.numel() for p in params), initial=0))
        try:
            yield
        finally:
            self._bucket = None

    def reduce(self, original: Callable[[], None], call: dict[str, Any]) -> None:
        """Sum every slice for its owner, in place; other ranks' slices keep their old values."""
        self._binding.asked.add("gradients")
        owners = [_single(owner) for owner in call["bucket_ranks"]]
        slices: list[torch.Tensor] = call["small_bucket"]
        group = call["process_group"] or self._optimizer.dp_process_group
        link = self._binding.link(group)
        if link.size == 1 or None in owners:  # several owners (Muon) need a full all-reduce
            for values in slices if self._divisor != 1 else ():
                values.div_(self._divisor)
            original()
            return
        dtype = call["communication_data_type"]
        route = self._binding.route(group)
        ranges = [self._range(values) for values in slices]
        plan = self._plan(ranges, owners, dtype, route, link)
        step = self._binding.gradient_step
        coded = [codings_of(s, dtype, hops=len(route), step=step) for s in plan.gradients]
        tensors = [self._bucket, *plan.scattered.joined(self._bucket)]
        sums = plan.sums.add_up(tensors, *zip(*coded, strict=True))
        plan.own.copy(self._bucket, sums)
        self._watch(plan.own_runs)
        outputs = call.get("output_bucket") or [None] * len(slices)
        for owner, values, output in zip(owners, slices, outputs, strict=True):
            if owner == link.rank:
                replica_seams.add_to_partition(self._optimizer, output, values)

    def _watch(self, runs: Iterable[_Run]) -> None:
        if self._binding.watch is not None:
            for index, start, stop in (member for run in runs for member in run.members):
                self._binding.watch.note(index, self._bucket[start:stop])

    def _plan(
        self,
        ranges: Sequence[tuple[int, int]],
        owners: Sequence[int],
        dtype: torch.dtype,
        route: tuple[Hop, ...],
        link: Link,
    ) -> _Plan:
        """Cut ranges of the bucket at parameter borders. Buckets come in the same order in every
        step, unless a parameter is without a gradient: what few there are is remembered.
        """
        exact = self._binding.is_exact(self._binding.step)
        params = tuple(map(id, self._params))
        key = tuple(ranges), tuple(owners), params, dtype, exact, link, route, self._divisor
        if key not in self._plans:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            runs = self._runs(ranges, owners, dtype, route, link.rank, exact)
            scale = 1 / self._divisor
            self._plans[key] = _Plan.make(runs, dtype, route, link, scale=scale)
        return self._plans[key]

    def _runs(
        self,
        ranges: Sequence[tuple[int, int]],
        owners: Sequence[int],
        dtype: torch.dtype,
        route: Sequence[Hop],
        rank: int,
        exact: bool,
    ) -> list[_Run]:
        runs: list[_Run] = []
        bundles: dict[int, _Run] = {}  # by owner
        for (position, end), owner in zip(ranges, owners, strict=True):
            place = bisect_right(self._starts, position) - 1
            while position < end:
                start, stop = self._starts[place], min(end, self._starts[place + 1])
                tracked = self._binding.tracked(self._params[place])
                streams = None
                if not exact:
                    streams = self._binding.gradient_streams(tracked, dtype, rank=rank, route=route)
                member = tracked.index, position, stop
                small = streams is None and is_small(stop - position, exactly(dtype))
                if small and owner in bundles:
                    bundles[owner].members.append(member)
                elif position < stop:
                    runs.append(_Run(owner, streams, position - start, [member]))
                    if small:
                        bundles[owner] = runs[-1]
                position, place = stop, place + 1
        return runs

    def _range(self, values: torch.Tensor) -> tuple[int, int]:
        """First and last element of a slice in the bucket."""
        first = (values.data_ptr() - self._bucket.data_ptr()) // values.element_size()
        if not 0 <= first <= self._bucket.numel() - values.numel():
            raise RuntimeError("quantized_comm: a gradient slice lies outside its bucket")
        return first, first + values.numel()


def _single(owner: Any) -> int | None:
    """DeepSpeed names an owner by rank or, from 0.19.3 on, by a set of ranks."""
    if isinstance(owner, frozenset):
        return next(iter(owner)) if len(owner) == 1 else None
    return owner
