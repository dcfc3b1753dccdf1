"""Gradient reduction under ZeRO-1/2, to the owners of a bucket's slices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ds_quant.bundle import is_small, joined, spread_
from ds_quant.coding import Coding
from ds_quant.hops import Hop
from ds_quant.owners import Share, reduce_to_owners
from ds_quant.rotation import Rotation
from ds_quant.zero import replica_seams
from ds_quant.zero.binding import Binding


class _Run(NamedTuple):
    """What is one tensor of the message: elements [start, stop) of a bucket, one parameter or, in
    full precision, several small ones of one owner.

    members: (index of a parameter, its first and last element in the bucket).
    """

    owner: int
    codings: tuple[Coding, ...]
    rotation: Rotation | None
    members: list[tuple[int, int, int]]

    def views(self, bucket: torch.Tensor) -> list[torch.Tensor]:
        """Its elements of the bucket; members side by side are one."""
        ranges: list[tuple[int, int]] = []
        for _, start, stop in self.members:
            if ranges and ranges[-1][1] == start:
                ranges[-1] = ranges[-1][0], stop
            else:
                ranges.append((start, stop))
        return [bucket[start:stop] for start, stop in ranges]


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
        runs = self._runs(slices, owners, dtype, route, link.rank)
        views = [run.views(self._bucket) for run in runs]
        shares = [
            Share(owner=r.owner, values=joined(v), codings=r.codings, rotation=r.rotation)
            for r, v in zip(runs, views, strict=True)
        ]
        sums = reduce_to_owners(shares, route, link, scale=1 / self._divisor)
        for run, parts, total in zip(runs, views, sums, strict=True):
            if total is not None:
                spread_(parts, total)
                self._watch(run)
        outputs = call.get("output_bucket") or [None] * len(slices)
        for owner, values, output in zip(owners, slices, outputs, strict=True):
            if owner == link.rank:
                replica_seams.add_to_partition(self._optimizer, output, values)

    def _watch(self, run: _Run) -> None:
        if self._binding.watch is not None:
            for index, start, stop in run.members:
                self._binding.watch.note(index, self._bucket[start:stop])

    def _runs(
        self,
        slices: Sequence[torch.Tensor],
        owners: Sequence[int],
        dtype: torch.dtype,
        route: Sequence[Hop],
        rank: int,
    ) -> list[_Run]:
        """Cut slices of the bucket at parameter borders."""
        runs: list[_Run] = []
        bundles: dict[int, _Run] = {}  # by owner
        for values, owner in zip(slices, owners, strict=True):
            position, end = self._range(values)
            place = bisect_right(self._starts, position) - 1
            while position < end:
                start, stop = self._starts[place], min(end, self._starts[place + 1])
                tracked = self._binding.tracked(self._params[place])
                codings, rotation = self._binding.gradient_codings(
                    tracked, dtype, rank=rank, route=route
                )
                member = tracked.index, position, stop
                small = is_small(stop - position, codings[-1])
                if small and owner in bundles:
                    bundles[owner].members.append(member)
                elif position < stop:
                    if position > start:
                        codings = tuple(c.at(position - start) for c in codings)
                    run = _Run(owner=owner, codings=codings, rotation=rotation, members=[member])
                    runs.append(run)
                    if small:
                        bundles[owner] = run
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
