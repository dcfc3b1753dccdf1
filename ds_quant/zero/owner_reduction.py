"""Gradient reduction under ZeRO-1/2, to the owners of a bucket's slices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ds_quant.bundle import Cuts, is_small, joined, spread_
from ds_quant.coding import exactly
from ds_quant.hops import Hop
from ds_quant.link import Link
from ds_quant.owner_plan import Piece, Shape, plan
from ds_quant.owners import Share, reduce_to_owners
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
    """The tensors of a message, where they lie in the bucket, and who sums what of them."""

    runs: list[_Run]
    cuts: Cuts
    pieces: tuple[Piece, ...]


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
        runs, cuts, pieces = self._plan(ranges, owners, dtype, route, link)
        views, shares = cuts.views(self._bucket), []
        step = self._binding.gradient_step
        for run, parts in zip(runs, views, strict=True):
            codings, rotation = codings_of(run.streams, dtype, hops=len(route), step=step)
            if run.first:
                codings = tuple([c.at(run.first) for c in codings])
            shares.append(Share(run.owner, joined(parts), codings, rotation))
        sums = reduce_to_owners(shares, pieces, route, link, scale=1 / self._divisor)
        spread_((p, total) for p, total in zip(views, sums, strict=True) if total is not None)
        self._watch(run for run, total in zip(runs, sums, strict=True) if total is not None)
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
        route: Sequence[Hop],
        link: Link,
    ) -> _Plan:
        """Cut ranges of the bucket at parameter borders. Buckets come in the same order in every
        step, unless a parameter is without a gradient: what few there are is remembered.
        """
        exact = self._binding.is_exact(self._binding.step)
        key = tuple(ranges), tuple(owners), tuple(map(id, self._params)), dtype, exact, link
        if key not in self._plans:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            runs = self._runs(ranges, owners, dtype, route, link.rank, exact)
            shapes = tuple(run.shape(dtype, hops=len(route)) for run in runs)
            pieces = plan(shapes, link.size, route[0].link.size if len(route) > 1 else None)
            self._plans[key] = _Plan(runs, Cuts([run.ranges for run in runs]), pieces)
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
