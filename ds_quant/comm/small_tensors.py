"""Small tensors in full precision share the padding of a message.

[Note: small tensors] A slot of a message begins at a multiple of 16 bytes. A norm's shard on 64
ranks is shorter than that padding. So small tensors in full precision follow each other in a row
without padding: their codec is ``CastCodec(dtype, tight=True)``. Three things follow from it.

1. Tight tensors of one dtype and receiver stand next to each other, behind larger tensors.
2. Reductions do not cut them into slices.
3. Their shards have slots of a full shard's length, like those of larger tensors.

They have no groups, so no group straddles two tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from ds_quant.codec.codec import CastCodec, Codec

T = TypeVar("T")

SMALL_NUMEL = 1 << 14  # the largest small tensor; for larger ones padding is negligible


def is_tight(codec: Codec | None) -> bool:
    """Return True if the codec sends small tensors, without padding."""
    return isinstance(codec, CastCodec) and codec.tight


def padded(codec: Codec) -> Codec:
    """Return the codec with padding, to count the bytes of small tensors that are one range."""
    if isinstance(codec, CastCodec) and codec.tight:
        return replace(codec, tight=False)
    return codec


def group_small_tensors(items: Iterable[tuple[T, Hashable | None]]) -> list[T]:
    """Move the small items of each owner behind the owner's first one.

    items: (item, owner); the owner of a larger item is None.
    """
    runs: list[list[T]] = []
    small_runs: dict[Hashable, list[T]] = {}
    for item, owner in items:
        if owner in small_runs:
            small_runs[owner].append(item)
            continue
        run = [item]
        runs.append(run)
        if owner is not None:
            small_runs[owner] = run
    return [item for run in runs for item in run]


def small_tensors_last(codecs: Sequence[Codec]) -> list[int]:
    """Return the indices of tensors in the order of a message: larger ones, then the small ones of
    each dtype together.
    """
    large: list[int] = []
    small: list[tuple[int, Codec]] = []
    for index, codec in enumerate(codecs):
        if is_tight(codec):
            small.append((index, codec))
        else:
            large.append(index)
    return large + group_small_tensors(small)
