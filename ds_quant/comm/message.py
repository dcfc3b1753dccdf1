"""Bundle small tensors in full precision into one tensor of a message.

[Note: bundles] What a tensor costs beyond its bytes, slots, views and calls, is the same for ten
elements as for ten million. So the small ones of a collective over ranks are laid side by side:
each as rows (ranks, width) of its ceil-division shards, filled up at the end. The whole is again a
tensor whose ceil-division shards are its rows, and takes any collective. Full precision has no
groups that could straddle two tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_quant.codec.bound import Coding
from ds_quant.codec.codec import CastCodec
from ds_quant.kernels.wire import ceil_div, shard_range

# Bundling costs two more copies of a tensor, a tensor of its own about 50 us: 16,384 elements are
# copied in a tenth of that.
MAX_NUMEL = 1 << 14


@dataclass(frozen=True)
class Bundle:
    """Tensors of ``numels`` elements over ``ranks``; ``widths``: of their shards."""

    numels: tuple[int, ...]
    ranks: int
    widths: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the bundle, padding included."""
        return self.ranks * sum(self.widths)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Whole tensors, contiguous and of any shape -> (numel,), padding zero."""
        rows = []
        for tensor, numel, width in zip(tensors, self.numels, self.widths, strict=True):
            flat, missing = tensor.view(-1), self.ranks * width - numel
            rows.append((pad(flat, (0, missing)) if missing else flat).view(self.ranks, width))
        return torch.cat(rows, dim=1).view(-1)

    def unpack(self, bundle: Tensor) -> list[Tensor]:
        """(numel,) -> whole tensors, 1-D and contiguous, that share no memory."""
        columns = bundle.view(self.ranks, -1).split(self.widths, dim=1)
        return [
            column.clone(memory_format=torch.contiguous_format).view(-1)[:numel]
            for column, numel in zip(columns, self.numels, strict=True)
        ]

    def unpack_shard(self, shard: Tensor, rank: int) -> list[Tensor]:
        """The row of ``rank``, (numel / ranks,) -> its shards without padding, as views."""
        return [
            part[: len(range(*shard_range(numel, self.ranks, rank)))]
            for part, numel in zip(shard.split(self.widths), self.numels, strict=True)
        ]


@lru_cache(maxsize=256)
def bundle_of(numels: tuple[int, ...], ranks: int) -> Bundle:
    """Return the bundle of tensors of these sizes, cached."""
    return Bundle(numels, ranks, tuple(ceil_div(numel, ranks) for numel in numels))


class Cuts:
    """Locate the tensors of a message in a flat one, each in ranges [start, stop) of elements.

    One call makes all views: sliced one by one they cost microseconds each.
    """

    def __init__(self, tensors: Sequence[Sequence[tuple[int, int]]]) -> None:
        places: dict[tuple[int, int], int] = {}
        self._sizes: list[int] = []
        self._end = 0
        for start, stop in sorted(piece for ranges in tensors for piece in ranges):
            if start > self._end:
                self._sizes.append(start - self._end)  # belongs to none
            places[start, stop] = len(self._sizes)
            self._sizes.append(stop - start)
            self._end = stop
        self._places = [[places[piece] for piece in ranges] for ranges in tensors]

    def views(self, flat: Tensor) -> list[list[Tensor]]:
        """Per tensor its ranges of ``flat``, (numel,) or (1, numel)."""
        parts = flat[..., : self._end].split(self._sizes, dim=-1)
        return [[parts[i] for i in places] for places in self._places]


class Scattered:
    """Ranges [start, stop) of a flat tensor that are to lie end to end."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._cuts = Cuts([ranges]) if ranges else None

    def joined(self, flat: Tensor) -> list[Tensor]:
        """Copy them into one tensor; nothing if there are none."""
        return [] if self._cuts is None else [torch.cat(self._cuts.views(flat)[0])]


class Copies:
    """Copies of parts of one flat tensor over ranges of another: (ranges, first element of what is
    laid end to end over them).
    """

    def __init__(self, pairs: Iterable[tuple[Sequence[tuple[int, int]], int]]) -> None:
        into: list[tuple[int, int]] = []
        parts: list[tuple[int, int]] = []
        for ranges, place in pairs:
            for start, stop in ranges:
                into.append((start, stop))
                parts.append((place, place + stop - start))
                place += stop - start
        self._into, self._parts = (Cuts([into]), Cuts([parts])) if into else (None, None)

    def copy(self, flat: Tensor, values: Tensor) -> None:
        """Make all copies in one call, cast to the dtype of ``flat``."""
        if self._into is not None:
            torch._foreach_copy_(self._into.views(flat)[0], self._parts.views(values)[0])


def joined(views: Sequence[Tensor]) -> Tensor:
    """Concatenate rows of one dtype; a single row is returned without a copy."""
    return views[0] if len(views) == 1 else torch.cat(tuple(views), dim=-1)


def is_small(numel: int, coding: Coding) -> bool:
    """Whether a tensor is to be bundled: see [Note: bundles]."""
    return numel <= MAX_NUMEL and isinstance(coding.codec, CastCodec)


def sort_out(
    numels: Sequence[int], codings: Sequence[Coding], ranks: int
) -> tuple[list[int], list[tuple[Bundle, list[int]]]]:
    """Split tensors into those sent alone and bundles of the others with their members."""
    alone: list[int] = []
    small: dict[torch.dtype, list[int]] = {}
    for index, (numel, coding) in enumerate(zip(numels, codings, strict=True)):
        if is_small(numel, coding):
            small.setdefault(coding.codec.dtype, []).append(index)
        else:
            alone.append(index)
    bundles = [
        (bundle_of(tuple(numels[i] for i in members), ranks), members) for members in small.values()
    ]
    return alone, bundles
