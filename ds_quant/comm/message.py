"""Pack messages and unpack them: rows of slots.

[Note: one message] The payload for one peer is a *row*: one slot per tensor, codes and scales
together, every slot at a 16-byte boundary. A slot's place depends on the tensors' sizes alone, so
all ranks agree on it, and a short or empty last shard uses the front of its slot: padding is never
encoded. Where everything lies, and so the operations of the kernels, is planned once; a step hands
over the tensors and the streams of random bits.

[Note: small tensors] Small tensors in full precision follow each other in a row without padding,
and are never cut into slices: a norm's shard on 64 ranks is shorter than the padding. They have no
groups that could straddle two tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ds_quant.codec.bound import VECTORS_PER_ELEMENT, Coding
from ds_quant.codec.codec import CastCodec, Codec
from ds_quant.comm.transport import Fabric, Link, Pending
from ds_quant.kernels.batch import Decode, Encode, Task
from ds_quant.kernels.dispatch import Operations, Streams
from ds_quant.kernels.wire import ALIGNMENT, VECTOR_NUMEL, ceil_div, round_up

T = TypeVar("T")

# ---- rows of slots ----


SMALL_NUMEL = 1 << 14  # at most; padding is nothing to larger ones


def is_tight(codec: Codec | None) -> bool:
    """Whether tensors of this codec are small: see [Note: small tensors]."""
    return isinstance(codec, CastCodec) and codec.tight


def small_together(items: Iterable[tuple[T, Hashable | None]]) -> list[T]:
    """Put small tensors of an owner behind the first of them; the owner is None of larger ones."""
    runs: list[list[T]] = []
    small: dict[Hashable, list[T]] = {}
    for item, owner in items:
        if owner in small:
            small[owner].append(item)
        else:
            runs.append([item] if owner is None else small.setdefault(owner, [item]))
    return [item for run in runs for item in run]


def small_last(codecs: Sequence[Codec]) -> list[int]:
    """Return the order in which small tensors of one dtype follow each other, behind the others."""
    owned = [(i, codec if is_tight(codec) else None) for i, codec in enumerate(codecs)]
    return small_together(sorted(owned, key=lambda one: one[1] is not None))


def lay_out(sizes: Iterable[tuple[Codec, int]]) -> tuple[list[int], int]:
    """Lay out a row that holds one (codec, numel) after the other: first byte of each slot, and the
    bytes of the row.
    """
    starts, end, before = [], 0, None
    for codec, numel in sizes:
        if codec != before:
            end, before = round_up(end, ALIGNMENT), codec
        starts.append(end)
        end += codec.wire_bytes(numel)
    return starts, round_up(end, ALIGNMENT)


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
    wire: Tensor | None = None,
) -> Tensor:
    """Encode a message of ``nbytes``, which is buffer 0 of the operations; the others follow.
    ``wire``: the message, if it is there already; a sampled step encodes it all the same.
    """
    with link.encoding(role) as note:
        if wire is None or note is not None:
            wire = link.empty(nbytes, device=buffers[0].device)
            encode.run([wire, *buffers], streams, note, backend=link.backend)
    return wire


def unpack(
    link: Link | Fabric, decode: Operations, buffers: Sequence[Tensor], streams: Streams
) -> None:
    """Decode, or add up, what has arrived: one of the operations' buffers."""
    with link.decoding():
        decode.run(buffers, streams, backend=link.backend)


# ---- gathers ----


class Part(NamedTuple):
    """Consecutive elements that one rank of a gather sends to all.

    source: the sender's tensor and its first element; into: where all ranks decode them, alike.
    vector: of their random bits. differs: what is decoded is added to what ``into`` holds; then the
    tensors of ``into`` come first among the values. room: elements that the slot has room for, if
    more.
    """

    peer: int
    codec: Codec
    numel: int
    stream: int
    source: tuple[int, int]
    into: tuple[int, int]
    vector: int = 0
    differs: bool = False
    room: int = 0


class Message:
    """A gather, planned once: of one row of ``nbytes`` from every rank.

    Rank ``rank`` of ``ranks`` sends its parts, all ranks decode all; ``node_size``: how the rows
    arrive, see ``row_place``. Tensors are those given to ``gather``.
    """

    def __init__(
        self, parts: Iterable[Part], *, rank: int, ranks: int, node_size: int | None = None
    ) -> None:
        parts, rows = list(parts), [[] for _ in range(ranks)]
        for part in parts:
            rows[part.peer].append((part.codec, max(part.room, part.numel)))
        self._dtypes = {c.dtype if c.kind == "cast" else None for c, _ in rows[rank]}  # None: lossy
        layouts = [lay_out(row) for row in rows]
        self.nbytes = max(used for _, used in layouts)
        begins = [row_place(peer, ranks, node_size) * self.nbytes for peer in range(ranks)]
        left = [iter(slots) for slots, _ in layouts]
        encode: list[Task] = []
        decode: list[Task] = []
        for part in parts:
            slot, (tensor, start), (into, place) = next(left[part.peer]), part.source, part.into
            if part.numel == 0:
                continue
            if part.peer == rank:
                base = 1 + into if part.differs else None
                op = Encode(part.codec, part.numel, 1 + tensor, 0, part.stream, base=base)
                encode.append((op, (start, slot, part.vector, *([place] if part.differs else []))))
            op = Decode(part.codec, part.numel, 0, 1 + into, part.stream, part.differs)
            decode.append((op, (begins[part.peer] + slot, place)))
        self._encode, self._decode = Operations(encode), Operations(decode)

    def gather(
        self,
        link: Link | Fabric,
        values: Sequence[Tensor],
        codings: Sequence[Coding],
        into: Callable[[], list[Tensor]],
        *,
        stays: bool = False,
    ) -> Pending[list[Tensor]]:
        """Begin to gather weights; the result is the tensors of ``into()``, decoded.

        1. encode this rank's row  2. all-gather the rows, asynchronously  3. when it is waited for,
        decode them all. ``stays``: no value changes until then; exact values that lie in memory as
        in the row are sent from there.
        """
        if self.nbytes == 0:
            return Pending(into)
        streams = Streams(codings, [None] * len(codings))
        lying = self._row_in_place(values) if stays else None
        wire = pack(link, "weights", self.nbytes, self._encode, values, streams, lying)
        arriving = link.all_gather(wire, role="weights")

        def decoded() -> list[Tensor]:
            arrived = arriving.wait()
            tensors = into()
            unpack(link, self._decode, [arrived, *tensors], streams)
            return tensors

        return Pending(decoded)

    def _row_in_place(self, values: Sequence[Tensor]) -> Tensor | None:
        """Return this rank's row, (nbytes,) uint8, if it lies in memory: exact values end to end in
        one block. None also where NCCL would be slow, between 16 bytes.
        """
        first = values[0]
        if self._dtypes != {first.dtype}:
            return None  # before each tensor is asked
        begins = [v.data_ptr() for v in values]
        ends = [begin + v.nbytes for begin, v in zip(begins, values, strict=True)]
        blocks = {(v.dtype, v.untyped_storage().data_ptr()) for v in values}
        row = [*begins[1:], begins[0] + self.nbytes]
        if len(blocks) > 1 or begins[0] % ALIGNMENT or row != ends:
            return None
        return first.as_strided((self.nbytes // first.element_size(),), (1,)).view(torch.uint8)
