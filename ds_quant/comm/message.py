"""Messages: rows of slots, packed and unpacked, and the gathers of weights that they make up.

[Note: one message] The payload for one peer is a *row*: one slot per tensor, codes and scales
together, every slot at a 16-byte boundary. A slot's place depends on the tensors' sizes alone, so
all ranks agree on it, and a short or empty last shard uses the front of its slot: padding is never
encoded. Where everything lies, and so the operations of the kernels, is planned once; a step hands
over the tensors and the streams of random bits.

[Note: small tensors] Small tensors in full precision follow each other in a row without padding,
and are never cut into slices: a norm's shard on 64 ranks is shorter than the padding. They have no
groups that could straddle two tensors.

[Note: strided layout] With G ranks per node, ZeRO-3's shard r of a parameter belongs to rank
(node, local) = (r // G, r % G). Local rank g of every node keeps the shards {r : r % G = g} as rows
(nodes, width), row n being shard n * G + g. The owner's shard is then in the owner's own rows, and
new weights cross between nodes by one all-gather among the ranks of equal g: each byte enters a
node once. A gather inside the node brings [G][nodes][width]; shard order is [nodes][G][width].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ds_quant.codec.bound import VECTORS_PER_ELEMENT, BoundCodec
from ds_quant.codec.codec import CastCodec, Codec
from ds_quant.comm.profiling import profiler_range
from ds_quant.comm.transport import Communicator, HierarchicalCommunicator, Pending
from ds_quant.kernels.batch import Decode, Encode, Task
from ds_quant.kernels.dispatch import Operations, RngState
from ds_quant.kernels.wire import ALIGNMENT, VECTOR_NUMEL, ceil_div, round_up, shard_range

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
    each other, a short last one begins where ``BoundCodec.at`` has its first element.
    """
    if numel == width:
        return row * ceil_div(width, VECTOR_NUMEL)
    return VECTORS_PER_ELEMENT * row * width


def pack(
    communicator: Communicator | HierarchicalCommunicator,
    role: str,
    nbytes: int,
    encode: Operations,
    buffers: Sequence[Tensor],
    streams: RngState,
    wire: Tensor | None = None,
) -> Tensor:
    """Encode a message of ``nbytes``, which is buffer 0 of the operations; the others follow.
    ``wire``: the message, if it is there already; a sampled step encodes it all the same.
    """
    with profiler_range("encode", role, communicator.hop), communicator.encoding(role) as note:
        if wire is None or note is not None:
            wire = communicator.empty(nbytes, device=buffers[0].device)
            encode.run([wire, *buffers], streams, note, backend=communicator.backend)
    return wire


def unpack(
    communicator: Communicator | HierarchicalCommunicator,
    role: str,
    decode: Operations,
    buffers: Sequence[Tensor],
    streams: RngState,
) -> None:
    """Decode received weights, or decode and add up received gradients.

    buffers: the buffers of the operations, the received message among them.
    """
    action = "sum" if role == "gradients" else "decode"
    with profiler_range(action, role, communicator.hop), communicator.decoding():
        decode.run(buffers, streams, backend=communicator.backend)


# ---- gathers ----


class GatherSlice(NamedTuple):
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
        self, parts: Iterable[GatherSlice], *, rank: int, ranks: int, node_size: int | None = None
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
        communicator: Communicator | HierarchicalCommunicator,
        values: Sequence[Tensor],
        bound_codecs: Sequence[BoundCodec],
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
        streams = RngState(bound_codecs, [None] * len(bound_codecs))
        lying = self._row_in_place(values) if stays else None
        wire = pack(communicator, "weights", self.nbytes, self._encode, values, streams, lying)
        arriving = communicator.all_gather(wire, role="weights")

        def decoded() -> list[Tensor]:
            arrived = arriving.wait()
            tensors = into()
            unpack(communicator, "weights", self._decode, [arrived, *tensors], streams)
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


# ---- of ZeRO-3's shards ----


def all_gather(
    shards: Sequence[Tensor],
    numels: Sequence[int],
    bound_codecs: Sequence[BoundCodec],
    communicator: Communicator | HierarchicalCommunicator,
) -> Pending[list[Tensor]]:
    """Gather tensors that are split over the ranks in DeepSpeed's ceil-division shards.

    The result is the full tensors, (numel,) each in the dtype of its shard, decoded from the wire
    on all ranks, this one's own shards too: all hold equal bits.

    Args:
        shards: per tensor this rank's shard, 1-D and without padding (possibly empty), on the
            device of the collective.
        numels: per tensor its full number of elements.
        codings: per tensor; the addresses are this rank's own.
    """
    sizes = tuple([(c.codec, n) for c, n in zip(bound_codecs, numels, strict=True)])
    message = _shard_message(sizes, communicator.size, communicator.rank, communicator.node_size)
    shapes, device = [(n, s.dtype) for n, s in zip(numels, shards, strict=True)], shards[0].device
    into = partial(new_values, shapes, device)
    return message.gather(communicator, shards, bound_codecs, into, stays=True)


def new_values(
    shapes: Sequence[tuple[int, torch.dtype]], device: torch.device | str
) -> list[Tensor]:
    """Allocate tensors (numel,) outside the pool: DeepSpeed frees them as it would without us."""
    return [torch.empty(numel, dtype=dtype, device=device) for numel, dtype in shapes]


@lru_cache(maxsize=1024)
def _shard_message(
    sizes: tuple[tuple[Codec, int], ...], ranks: int, rank: int, node_size: int | None
) -> Message:
    """Plan the gather of tensors (codec, numel) from their shards, in slots of full ones."""
    parts = []
    for tensor, (codec, numel) in enumerate(sizes):
        for peer in range(ranks):
            start, stop = shard_range(numel, ranks, peer)
            places, width = ((tensor, 0), (tensor, start)), ceil_div(numel, ranks)
            parts.append(GatherSlice(peer, codec, stop - start, tensor, *places, room=width))
    return Message(parts, rank=rank, ranks=ranks, node_size=node_size)


# ---- of the node shard ----


class Room:
    """Memory for tensors that stay, ``nbytes`` in all, end to end: they can be sent as they lie.

    They are cut out of large blocks, because torch rounds page-locked ones up to powers of two.
    zeros: makes a block of so many bytes, (bytes,) uint8.
    """

    _BLOCK = 1 << 28

    def __init__(self, nbytes: int, zeros: Callable[[int], torch.Tensor]) -> None:
        self._to_come, self._zeros = nbytes, zeros
        self._left = torch.empty(0, dtype=torch.uint8)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return contiguous zeros, at a multiple of 16 bytes."""
        nbytes = math.prod(shape) * dtype.itemsize
        taken = round_up(nbytes, ALIGNMENT)
        if taken > self._left.numel():
            self._left = self._zeros(max(taken, min(self._BLOCK, self._to_come)))
        self._to_come -= taken
        room, self._left = self._left[:nbytes], self._left[taken:]
        return room.view(dtype).view(shape)


@dataclass(frozen=True, kw_only=True)
class ShardRows:
    """One parameter of ``numel`` elements in the node shard of a rank with place ``local``.

    rows: (nodes, width), in the dtype of the weights; what lies past a shard's end stays zero.
    device: where collectives run; None if the rows are there.
    """

    numel: int
    node_size: int
    local: int
    rows: Tensor
    device: torch.device | None = None

    @classmethod
    def allocate(
        cls,
        numel: int,
        *,
        nodes: int,
        node_size: int,
        local: int,
        dtype: torch.dtype,
        room: Room,
        device: torch.device | None = None,
    ) -> ShardRows:
        """Allocate rows of zeros in ``room``."""
        rows = room.zeros(nodes, ceil_div(numel, nodes * node_size), dtype=dtype)
        return cls(numel=numel, node_size=node_size, local=local, rows=rows, device=device)


def rows_of(node_rows: Sequence[ShardRows], node: int | None = None) -> list[Tensor]:
    """Return their rows, or those of one node, on the device; of what is kept elsewhere a copy,
    made in order of the current stream. Parameters are all kept on the device or none.
    """
    rows = [item.rows if node is None else item.rows[node] for item in node_rows]
    device = node_rows[0].device
    return rows if device is None else [own.to(device, non_blocking=True) for own in rows]


def copy_into_rows(node_rows: Sequence[ShardRows], rows: Sequence[Tensor]) -> None:
    """Take over what was made of ``rows_of(kept)``, or of copies."""
    torch._foreach_copy_([item.rows for item in node_rows], rows, non_blocking=True)


def exchange(
    node_rows: Sequence[ShardRows],
    shards: Sequence[Tensor],
    bound_codecs: Sequence[BoundCodec],
    inter: Communicator,
) -> Pending[Any]:
    """Update all rows of every parameter to the decoded values of their owners, of this rank's own
    too; the ranks of ``inter`` have equal places in their nodes.

    Args:
        shards: per parameter this rank's new weights without padding, (length,), on the device.
        codings: per parameter; the addresses are this rank's own.
    """
    sizes = tuple(
        [(c.codec, k.numel, c.difference) for c, k in zip(bound_codecs, node_rows, strict=True)]
    )
    on_host, differs = node_rows[0].device is not None, any([c.difference for c in bound_codecs])
    rows = shards if on_host and not differs else rows_of(node_rows)  # which differences alone read
    # Differences are of rounded values: see docs/wire_format.md.
    of = zip(shards, rows, bound_codecs, strict=True)
    values = [shard.to(r.dtype) if c.difference else shard for shard, r, c in of]
    message = _exchange_message(
        sizes, inter.size, node_rows[0].node_size, inter.rank, node_rows[0].local
    )
    tensors = [*rows, *values]
    if not on_host:
        return message.gather(inter, tensors, bound_codecs, lambda: rows)
    arrived = message.gather(inter, tensors, bound_codecs, partial(rows_of, node_rows))
    return arrived.then(partial(copy_into_rows, node_rows))


@lru_cache(maxsize=1024)
def _exchange_message(
    sizes: tuple[tuple[Codec, int, bool], ...], nodes: int, node_size: int, node: int, local: int
) -> Message:
    """(codec, numel, whether differences are sent) each; the rows are the first tensors."""
    parts = []
    for place, (codec, numel, differs) in enumerate(sizes):
        width = ceil_div(numel, nodes * node_size)
        for row in range(nodes):
            start, stop = shard_range(numel, nodes * node_size, row * node_size + local)
            places = (len(sizes) + place, 0), (place, row * width)
            how = {"differs": differs, "room": width}
            parts.append(GatherSlice(row, codec, stop - start, place, *places, **how))
    return Message(parts, rank=node, ranks=nodes)


def gather(
    node_rows: Sequence[ShardRows], bound_codecs: Sequence[BoundCodec], intra: Communicator | None
) -> Pending[list[Tensor]]:
    """Gather full parameters, (numel,) each, in shard order, from the rows of the ranks of a node.

    Every rank uses decoded values, of its own rows too. ``intra`` is None with one rank per node.
    """
    if intra is None:
        # Copies to the device begin now, ahead of their use.
        full = [r.view(-1)[: k.numel] for r, k in zip(rows_of(node_rows), node_rows, strict=True)]
        is_copied = node_rows[0].device is not None
        return Pending(lambda: full if is_copied else [values.clone() for values in full])
    sizes = tuple(
        [(c.codec, k.numel, k.rows.shape[0]) for c, k in zip(bound_codecs, node_rows, strict=True)]
    )
    rows, shapes = rows_of(node_rows), [(item.numel, item.rows.dtype) for item in node_rows]
    message = _node_message(sizes, intra.size, intra.rank)
    into = partial(new_values, shapes, rows[0].device)
    return message.gather(intra, rows, bound_codecs, into, stays=True)


@lru_cache(maxsize=1024)
def _node_message(sizes: tuple[tuple[Codec, int, int], ...], node_size: int, local: int) -> Message:
    """(codec, numel, nodes) each; a slot for every row of a parameter, one behind the other."""
    parts = []
    for place, (codec, numel, nodes) in enumerate(sizes):
        width = ceil_div(numel, nodes * node_size)
        for rank in range(nodes * node_size):
            row, peer = divmod(rank, node_size)
            start, stop = shard_range(numel, nodes * node_size, rank)
            places = (place, row * width), (place, start)
            how = {"vector": row_vector(row, stop - start, width), "room": width}
            parts.append(GatherSlice(peer, codec, stop - start, place, *places, **how))
    return Message(parts, rank=local, ranks=node_size)
