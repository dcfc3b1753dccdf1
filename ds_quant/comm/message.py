"""Pack messages and unpack them: rows of slots, and bundles of what is small.

[Note: one message] The payload for one peer is a *row*: one slot per tensor, codes and scales
together, every slot at a 16-byte boundary. A slot's place depends on the tensors' sizes alone, so
all ranks agree on it, and a short or empty last shard uses the front of its slot: padding is never
encoded. Where everything lies, and so the operations of the kernels, is planned once; a step hands
over the tensors and the streams of random bits.

[Note: bundles] What a tensor costs beyond its bytes, slots, views and calls, is the same for ten
elements as for ten million. So the small ones of a collective over ranks are laid side by side:
each as rows (ranks, width) of its ceil-division shards, filled up at the end. The whole is again a
tensor whose ceil-division shards are its rows, and takes any collective. Full precision has no
groups that could straddle two tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_quant.codec.bound import VECTORS_PER_ELEMENT, Coding
from ds_quant.codec.codec import CastCodec, Codec
from ds_quant.comm.operations import Operations, Streams
from ds_quant.comm.transport import Fabric, Link, Pending
from ds_quant.kernels.batch import Task
from ds_quant.kernels.wire import VECTOR_NUMEL, ceil_div, shard_range

# ---- rows of slots ----


def lay_out(sizes: Iterable[tuple[Codec, int]]) -> tuple[list[int], int]:
    """Lay out a row that holds one (codec, numel) after the other: first byte of each slot, and the
    bytes of the row.
    """
    ends = list(accumulate((codec.wire_bytes(numel) for codec, numel in sizes), initial=0))
    return ends[:-1], ends[-1]


def row_place(rank: int, ranks: int, node_size: int | None) -> int:
    """Index of a rank's row in what a gather brings, of the rows of all ranks if ``rank`` is an
    array; over two levels, ``node_size`` ranks per node, they come as (local, node).
    """
    if node_size is None:
        return rank
    node, local = divmod(rank, node_size)
    return local * (ranks // node_size) + node


def row_vector(row: int, numel: int, width: int) -> int:
    """First vector of random bits of a row of ``numel`` elements: rows of full ``width`` follow
    each other, a short last one begins where ``Coding.at`` has its first element.
    """
    if numel == width:
        return row * ceil_div(width, VECTOR_NUMEL)
    return VECTORS_PER_ELEMENT * row * width


def pack(
    link: Link | Fabric,
    role: str,
    nbytes: int,
    encode: Operations,
    buffers: Sequence[Tensor],
    streams: Streams,
) -> Tensor:
    """Encode a message of ``nbytes``, which is buffer 0 of the operations; the others follow."""
    wire = link.empty(nbytes, device=buffers[0].device)
    with link.encoding(role) as notes:
        encode.run([wire, *buffers], streams, notes)
    return wire


def unpack(
    link: Link | Fabric, decode: Operations, buffers: Sequence[Tensor], streams: Streams
) -> None:
    """Decode, or add up, what has arrived: one of the operations' buffers."""
    with link.decoding():
        decode.run(buffers, streams)


class Message:
    """A gather, planned once: of one row of ``nbytes`` from every rank.

    encode: what this rank sends; buffer 0 is its row, the others are given to ``gather``.
    decode: buffer 0 is what has arrived, the others are the tensors that it becomes.
    """

    def __init__(self, nbytes: int, encode: Iterable[Task], decode: Iterable[Task]) -> None:
        self.nbytes, self._encode, self._decode = nbytes, Operations(encode), Operations(decode)

    def gather(
        self,
        link: Link | Fabric,
        values: Sequence[Tensor],
        codings: Sequence[Coding],
        into: Callable[[], list[Tensor]],
    ) -> Pending[list[Tensor]]:
        """Begin to gather weights; the result is the tensors of ``into()``, decoded.

        1. encode this rank's row  2. all-gather the rows, asynchronously  3. when it is waited for,
        decode them all
        """
        if self.nbytes == 0:
            return Pending(into)
        streams = Streams(codings, [None] * len(codings))
        wire = pack(link, "weights", self.nbytes, self._encode, values, streams)
        arriving = link.all_gather(wire, role="weights")

        def decoded() -> list[Tensor]:
            arrived = arriving.wait()
            tensors = into()
            unpack(link, self._decode, [arrived, *tensors], streams)
            return tensors

        return Pending(decoded)


# ---- bundles ----


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
    """Ranges [start, stop) of a flat tensor.

    One call makes all views: sliced one by one they cost microseconds each.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        places: dict[tuple[int, int], int] = {}
        self._sizes: list[int] = []
        self._end = 0
        for start, stop in sorted(ranges):
            if start > self._end:
                self._sizes.append(start - self._end)  # in no range
            places[start, stop] = len(self._sizes)
            self._sizes.append(stop - start)
            self._end = stop
        self._places = [places[piece] for piece in ranges]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Every range of ``flat``, (numel,)."""
        if not self._places:
            return []
        parts = flat[: self._end].split(self._sizes)
        return [parts[place] for place in self._places]

    def joined(self, flat: Tensor) -> list[Tensor]:
        """Copy them end to end into one tensor; nothing if there are none."""
        views = self.views(flat)
        return [torch.cat(views)] if views else []


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
        self._into, self._parts = Cuts(into), Cuts(parts)

    def copy(self, flat: Tensor, values: Tensor) -> None:
        """Make all copies in one call, cast to the dtype of ``flat``."""
        if into := self._into.views(flat):
            torch._foreach_copy_(into, self._parts.views(values))


def joined(views: Sequence[Tensor]) -> Tensor:
    """Concatenate rows of one dtype; a single row is returned without a copy."""
    return views[0] if len(views) == 1 else torch.cat(tuple(views), dim=-1)


def is_small(numel: int, codec: Codec) -> bool:
    """Whether a tensor is to be bundled: see [Note: bundles]."""
    return numel <= MAX_NUMEL and isinstance(codec, CastCodec)


def sort_out(
    numels: Sequence[int], codecs: Sequence[Codec], ranks: int
) -> tuple[list[int], list[tuple[Bundle, list[int]]]]:
    """Split tensors into those sent alone and bundles of the others with their members."""
    alone: list[int] = []
    small: dict[torch.dtype, list[int]] = {}
    for index, (numel, codec) in enumerate(zip(numels, codecs, strict=True)):
        if is_small(numel, codec):
            small.setdefault(codec.dtype, []).append(index)
        else:
            alone.append(index)
    bundles = [
        (bundle_of(tuple(numels[i] for i in members), ranks), members) for members in small.values()
    ]
    return alone, bundles
