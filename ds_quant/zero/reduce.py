"""Gradient reduction: to shards under ZeRO-3, to the owners of a bucket's slices under ZeRO-1/2."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_quant.collectives import reduce_scatter
from ds_quant.owners import Part, reduce_to_owners
from ds_quant.rng import Role
from ds_quant.zero import seams
from ds_quant.zero.binding import Binding


class ShardReduction:
    """ZeRO-3: replaces ``reduce_scatter_coalesced``."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding

    def __call__(
        self,
        original: Callable[..., Any],
        params: Sequence[Any],
        tensors: list[torch.Tensor],
        group: Any = None,
    ) -> list[torch.Tensor]:
        """Mean over ``group`` of each tensor; returns this rank's unpadded shard, input dtype."""
        link = self._binding.link(group)
        tracked = [self._binding.tracked(p) for p in params]
        if link.size == 1 or not tensors or None in tracked:
            return original(tensors, group)
        step = self._binding.gradient_step
        codings = [
            self._binding.coding(Role.GRADIENTS, t, g.dtype, step=step, rank=link.rank)
            for t, g in zip(tracked, tensors, strict=True)
        ]
        shards = reduce_scatter(tensors, codings, link, scale=1.0 / link.size).wait()
        return [s.to(g.dtype) for s, g in zip(shards, tensors, strict=True)]


class OwnerReduction:
    """ZeRO-1/2: replaces ``allreduce_and_copy_with_multiple_ranks``.

    DeepSpeed hands over slices of its bucket by owner, with parameters run together. Where one
    parameter ends is read off the bucket, so that no group of a codec straddles two.
    """

    def __init__(self, binding: Binding, optimizer: Any) -> None:
        self._binding, self._optimizer = binding, optimizer
        self._bucket: torch.Tensor | None = None
        self._params: list[torch.Tensor] = []
        self._starts: list[int] = []

    def begin(self, tensor: torch.Tensor, params: list[torch.Tensor]) -> None:
        """Remember the bucket about to be reduced: ``tensor`` is its params, end to end."""
        self._bucket, self._params, self._starts = tensor, params, []
        start = 0
        for p in params:
            self._starts.append(start)
            start += p.numel()

    def reduce(self, original: Callable[[], None], call: dict[str, Any]) -> None:
        """Sum every slice for its owner, in place; other ranks' slices keep their old values."""
        owners = [_single(owner) for owner in call["bucket_ranks"]]
        slices: list[torch.Tensor] = call["small_bucket"]
        group = call["process_group"] or self._optimizer.dp_process_group
        link = self._binding.link(group)
        if link.size == 1 or None in owners:  # several owners (Muon) need a full all-reduce
            original()
            return
        dtype = call["communication_data_type"]
        cut = [self._parts(s, o, dtype, link.rank) for s, o in zip(slices, owners, strict=True)]
        sums = iter(
            reduce_to_owners(
                [p for parts in cut for p in parts], link, scale=self._scale(call, link.size)
            )
        )
        outputs = call.get("output_bucket") or [None] * len(slices)
        for parts, values, output in zip(cut, slices, outputs, strict=True):
            reduced = [next(sums) for _ in parts]
            if parts and parts[0].owner == link.rank:
                for part, total in zip(parts, reduced, strict=True):
                    part.values.copy_(total)
                seams.add_to_partition(self._optimizer, output, values)

    def _scale(self, call: dict[str, Any], ranks: int) -> float:
        if call["divide"] and self._optimizer.gradient_average:
            return self._optimizer.sequence_parallel_size / ranks
        return 1.0

    def _parts(self, values: torch.Tensor, owner: int, dtype: torch.dtype, rank: int) -> list[Part]:
        """Cut a slice of the bucket at parameter borders."""
        first = (values.data_ptr() - self._bucket.data_ptr()) // values.element_size()
        if not 0 <= first <= self._bucket.numel() - values.numel():
            raise RuntimeError("quantized_comm: a gradient slice lies outside its bucket")
        parts, position, end = [], first, first + values.numel()
        while position < end:
            place = bisect_right(self._starts, position) - 1
            start = self._starts[place]
            parameter = self._params[place]
            stop = min(end, start + parameter.numel())
            parts.append(
                Part(
                    owner=owner,
                    values=values.view(-1)[position - first : stop - first],
                    coding=self._coding(parameter, position - start, dtype, rank),
                )
            )
            position = stop
        return parts

    def _coding(self, parameter: torch.Tensor, start: int, dtype: torch.dtype, rank: int) -> Any:
        tracked = self._binding.tracked(parameter)
        step = self._binding.gradient_step
        coding = self._binding.coding(Role.GRADIENTS, tracked, dtype, step=step, rank=rank)
        return coding.at(start)


def _single(owner: Any) -> int | None:
    """DeepSpeed names an owner by rank or, from 0.19.3 on, by a set of ranks."""
    if isinstance(owner, frozenset):
        return next(iter(owner)) if len(owner) == 1 else None
    return owner
