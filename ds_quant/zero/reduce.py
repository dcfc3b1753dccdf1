"""Gradient reduction: to shards under ZeRO-3, to the owners of a bucket's slices under ZeRO-1/2."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ds_quant.coding import Coding
from ds_quant.collectives import reduce_scatter
from ds_quant.hops import Hop, Piece, Reduction
from ds_quant.layout import shard_range
from ds_quant.link import Link
from ds_quant.owners import Share, reduce_to_owners
from ds_quant.rotation import Rotation
from ds_quant.zero import replica_seams
from ds_quant.zero.binding import Binding, Tracked


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
        bucket = self.begin(params, tensors, group)
        return original(tensors, group) if bucket is None else bucket.finish()

    def begin(
        self, params: Sequence[Any], tensors: list[torch.Tensor], group: Any, *, late: bool = False
    ) -> Bucket | None:
        """Post the reduction; None if it is DeepSpeed's own. ``late``: the tensors may change
        before it is finished.
        """
        binding = self._binding
        link = binding.link(group)
        tracked = [binding.tracked(p) for p in params]
        if link.size == 1 or not tensors or None in tracked:
            return None
        route, scale = binding.route(group), 1.0 / link.size
        codings, rotations = zip(
            *(
                binding.gradient_codings(t, g.dtype, rank=link.rank, route=route)
                for t, g in zip(tracked, tensors, strict=True)
            ),
            strict=True,
        )
        if len(route) == 1 and not route[0].exact_own and not any(rotations):
            handle = reduce_scatter(tensors, [c for (c,) in codings], link, scale=scale)
            return Bucket(binding, tracked, tensors, _nothing, handle.wait)
        pieces, kept = _pieces(tensors, codings, rotations, link)
        if late:
            pieces = [_with_own_values(piece, route[0]) for piece in pieces]
        under_way = Reduction(pieces, route, scale=scale)

        def sums() -> list[torch.Tensor]:
            every = under_way.wait()
            return [every[place] for place in kept]

        return Bucket(binding, tracked, tensors, under_way.advance, sums)


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
        sums: Callable[[], list[torch.Tensor]],
    ) -> None:
        self._binding, self._tracked = binding, tracked
        self.advance, self._sums = advance, sums
        self.shards = [g.new_empty(0) for g in tensors]
        self.finished = False

    def finish(self) -> list[torch.Tensor]:
        """Wait for the sums."""
        watch = self._binding.watch
        for parameter, shard, total in zip(self._tracked, self.shards, self._sums(), strict=True):
            shard.data = total.to(shard.dtype)
            if watch is not None:
                watch.note(parameter.index, shard)
        self.finished = True
        return self.shards


def _nothing() -> None:
    """A reduction over one hop has posted everything."""


def _with_own_values(piece: Piece, hop: Hop) -> Piece:
    """What this rank adds up exactly is not encoded at once, so it needs a copy."""
    own = hop.place(piece.reducer) == hop.link.rank
    return replace(piece, values=piece.values.clone()) if own else piece


def _pieces(
    tensors: Sequence[torch.Tensor],
    codings: Sequence[tuple[Coding, ...]],
    rotations: Sequence[Rotation | None],
    link: Link,
) -> tuple[list[Piece], list[int]]:
    """Every rank's ceil-division shard of every tensor, and which ones are this rank's."""
    pieces, kept = [], []
    for tensor, coding, rotation in zip(tensors, codings, rotations, strict=True):
        flat = tensor.reshape(-1)
        kept.append(len(pieces) + link.rank)
        for rank in range(link.size):
            start, stop = shard_range(flat.numel(), link.size, rank)
            moved = tuple(c.at(start) for c in coding)
            values = flat[start:stop]
            pieces.append(Piece(reducer=rank, values=values, codings=moved, rotation=rotation))
    return pieces, kept


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

    @contextmanager
    def bucket(self, tensor: torch.Tensor, params: list[torch.Tensor]) -> Iterator[None]:
        """Inside, ``tensor`` is reduced: ``params``, end to end. DeepSpeed frees its buffer at the
        end of a backward, so nothing may hold on to it.
        """
        self._bucket, self._params, self._starts = tensor, params, []
        start = 0
        for p in params:
            self._starts.append(start)
            start += p.numel()
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
            original()
            return
        dtype = call["communication_data_type"]
        route = self._binding.route(group)
        cut = [
            self._shares(s, o, dtype, route, link.rank) for s, o in zip(slices, owners, strict=True)
        ]
        scale = self._scale(call, link.size)
        every = [share for shares in cut for _, share in shares]
        sums = iter(reduce_to_owners(every, route, link, scale=scale))
        outputs = call.get("output_bucket") or [None] * len(slices)
        for shares, values, output in zip(cut, slices, outputs, strict=True):
            reduced = [next(sums) for _ in shares]
            if shares and shares[0][1].owner == link.rank:
                for (index, share), total in zip(shares, reduced, strict=True):
                    share.values.copy_(total)
                    if self._binding.watch is not None:
                        self._binding.watch.note(index, share.values)
                replica_seams.add_to_partition(self._optimizer, output, values)

    def _scale(self, call: dict[str, Any], ranks: int) -> float:
        if call["divide"] and self._optimizer.gradient_average:
            return self._optimizer.sequence_parallel_size / ranks
        return 1.0

    def _shares(
        self,
        values: torch.Tensor,
        owner: int,
        dtype: torch.dtype,
        route: Sequence[Hop],
        rank: int,
    ) -> list[tuple[int, Share]]:
        """Cut a slice of the bucket at parameter borders: (index of the parameter, share)."""
        first = (values.data_ptr() - self._bucket.data_ptr()) // values.element_size()
        if not 0 <= first <= self._bucket.numel() - values.numel():
            raise RuntimeError("quantized_comm: a gradient slice lies outside its bucket")
        shares, position, end = [], first, first + values.numel()
        while position < end:
            place = bisect_right(self._starts, position) - 1
            start = self._starts[place]
            parameter = self._params[place]
            stop = min(end, start + parameter.numel())
            tracked = self._binding.tracked(parameter)
            codings, rotation = self._binding.gradient_codings(
                tracked, dtype, rank=rank, route=route
            )
            share = Share(
                owner=owner,
                values=values.view(-1)[position - first : stop - first],
                codings=tuple(c.at(position - start) for c in codings),
                rotation=rotation,
            )
            shares.append((tracked.index, share))
            position = stop
        return shares


def _single(owner: Any) -> int | None:
    """DeepSpeed names an owner by rank or, from 0.19.3 on, by a set of ranks."""
    if isinstance(owner, frozenset):
        return next(iter(owner)) if len(owner) == 1 else None
    return owner
