"""Gradient reduction under ZeRO-3, to shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_quant.bundle import sort_out
from ds_quant.coding import Coding
from ds_quant.collectives import reduce_scatter
from ds_quant.hops import Hop, Piece, Reduction, are_read_late
from ds_quant.layout import shard_range
from ds_quant.link import Link
from ds_quant.rotation import Rotation
from ds_quant.zero.binding import Binding
from ds_quant.zero.streams import Tracked, codings_of


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
        advance, sums = _post(sent, codings, rotations, route, link, late=late)
        dtypes = [g.dtype for g in sent]

        def shards() -> list[torch.Tensor]:
            cast = _cast(sums(), dtypes, link)
            reduced = dict(zip(alone, cast, strict=False))
            for (bundle, members), shard in zip(bundles, cast[len(alone) :], strict=True):
                reduced |= zip(members, bundle.unpack_shard(shard, link.rank), strict=True)
            return [reduced[index] for index in range(len(tracked))]

        return Bucket(binding, tracked, tensors, advance, shards)


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


def _post(
    tensors: Sequence[torch.Tensor],
    codings: Sequence[tuple[Coding, ...]],
    rotations: Sequence[Rotation | None],
    route: Sequence[Hop],
    link: Link,
    *,
    late: bool,
) -> tuple[Callable[[], None], Callable[[], list[torch.Tensor]]]:
    """Begin to reduce; what posts the rest, and what waits for this rank's shards of the means."""
    scale = 1.0 / link.size
    if len(route) == 1 and not route[0].exact_own and not any(rotations):
        handle = reduce_scatter(tensors, [c for (c,) in codings], link, scale=scale)
        return _nothing, handle.wait
    pieces, kept = _pieces(tensors, codings, rotations, link)
    if late:
        pieces = [_with_own_values(p, link) if are_read_late(p, route[0]) else p for p in pieces]
    under_way = Reduction(pieces, route, scale=scale)

    def sums() -> list[torch.Tensor]:
        every = under_way.wait()
        return [every[place] for place in kept]

    return under_way.advance, sums


def _nothing() -> None:
    """A reduction over one hop has posted everything."""


def _with_own_values(piece: Piece, link: Link) -> Piece:
    """The piece with a copy of its values: those of the bucket may change before they are read."""
    values = piece.values
    kept = link.empty(values.numel(), dtype=values.dtype, device=values.device)
    return piece._replace(values=kept.copy_(values))


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
