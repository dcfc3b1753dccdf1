"""Send sums of gradients back to all nodes or ranks, the second half of an all-reduce.

[Note: equal bits] A rank that has made a sum encodes it, and all receivers decode the same bytes,
the sender too. So all replicas get gradients of equal bits, whatever the codec. Over two levels the
ranks of a node forward the bytes that they have received. Values are rotated anew: the signs of the
reduction would make the errors of both halves depend on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ds_quant.codec.bound import VECTORS_PER_ELEMENT, BoundCodec, Rotation
from ds_quant.codec.codec import Codec
from ds_quant.comm.hierarchy import HierarchicalCommunicator
from ds_quant.comm.message import pack, unpack
from ds_quant.comm.reduction_plan import GradientSpec
from ds_quant.comm.slots import lay_out, row_index
from ds_quant.comm.transport import Communicator, Pending
from ds_quant.kernels.batch import Encode, Offsets, Sum, Task
from ds_quant.kernels.dispatch import Operations, RngState
from ds_quant.kernels.wire import round_up


class Piece(NamedTuple):
    """Consecutive elements of one gradient, summed by one rank.

    sender: index in the communicator of the rank that has the sum.
    gradient: index of its spec and codec.
    numel: elements.
    first: its first element in the gradient, by which random bits are addressed.
    source: its first element in the sums of that rank.
    target: its first element in the result, on all receivers.
    """

    sender: int
    gradient: int
    numel: int
    first: int
    source: int
    target: int


class ReturnedSums:
    """An all-gather of encoded sums, planned once. See [Note: equal bits].

    pieces: of all senders, in the order of a message.
    specs: of every gradient, with the one codec of this hop.
    communicator: the ranks that share the result, over one level or two.

    nbytes: of a message. encode: makes it of the sums. decode: makes the result of all messages.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        specs: Sequence[GradientSpec],
        communicator: Communicator | HierarchicalCommunicator,
    ) -> None:
        self._communicator = communicator
        ranks, node_size = communicator.size, communicator.node_size
        rows: list[list[Piece]] = [[] for _ in range(ranks)]  # by sender
        for piece in pieces:
            rows[piece.sender].append(piece)
        layouts = [lay_out(_size(piece, specs) for piece in row) for row in rows]
        self.nbytes = max(nbytes for _, nbytes in layouts)
        encode: list[Task] = []
        decode: list[Task] = []
        for sender, (row, (slots, _)) in enumerate(zip(rows, layouts, strict=True)):
            row_start = row_index(sender, ranks, node_size) * self.nbytes
            for piece, slot in zip(row, slots, strict=True):
                if piece.numel == 0:
                    continue
                spec = specs[piece.gradient]
                if sender == communicator.rank:
                    encode.append(_encode_task(piece, spec, slot))
                decode.append(_decode_task(piece, spec, row_start + slot))
        self.encode = Operations(encode)
        self.decode = Operations(decode)

    def send(
        self,
        sums: Tensor,
        output: Tensor,
        bound_codecs: Sequence[BoundCodec],
        rotations: Sequence[Rotation | None],
    ) -> Pending[None]:
        """Begin to fill ``output`` with the sums of all senders, equal bits on all receivers.

        1. Encode this rank's sums.
        2. Post the all-gather.
        3. When the result is waited for, decode the messages of all senders.

        sums: (elements,) fp32, those that this rank has made.
        output: (elements,) of the dtype of the result.
        bound_codecs, rotations: per gradient; the addresses are this rank's own.
        """
        communicator = self._communicator
        if self.nbytes == 0:  # shards without elements
            return Pending(lambda: None)
        rng_state = RngState(bound_codecs, rotations)
        wire = pack(communicator, "gradients", self.nbytes, self.encode, [sums], rng_state)
        gather = communicator.all_gather(wire, role="gradients")
        unused = sums.new_empty(0)  # a view would keep the sums

        def decoded() -> None:
            buffers = [gather.wait(), output, unused]
            unpack(communicator, "gradients", self.decode, buffers, rng_state)

        return Pending(decoded)


def _size(piece: Piece, specs: Sequence[GradientSpec]) -> tuple[Codec, int]:
    """Return the codec of a piece and its elements on the wire."""
    spec = specs[piece.gradient]
    (codec,) = spec.codecs  # that of this hop
    return codec, round_up(piece.numel, spec.block or 1)


# Buffers of the operations: the message; the sums when encoding, the result when decoding.
_WIRE, _VALUES, _UNUSED = 0, 1, 2


def _encode_task(piece: Piece, spec: GradientSpec, slot: int) -> Task:
    """Plan the encoding of a piece into the message, from byte ``slot`` on."""
    (codec,) = spec.codecs  # that of this hop
    operation = Encode(
        codec,
        piece.numel,
        values=_VALUES,
        wire=_WIRE,
        stream=piece.gradient,
        block=spec.block,
        flips=bool(spec.flips),
    )
    vector = VECTORS_PER_ELEMENT * piece.first
    return operation, Offsets(values=piece.source, wire=slot, vector=vector)


def _decode_task(piece: Piece, spec: GradientSpec, slot: int) -> Task:
    """Plan the decoding of a piece from the received rows, from byte ``slot`` on."""
    (codec,) = spec.codecs  # that of this hop
    operation = Sum(
        codec,
        piece.numel,
        wire_in=_WIRE,
        values=_VALUES,
        stream=piece.gradient,
        sources=1,
        stride=0,
        own_row=None,
        own=_UNUSED,
        block=spec.block,
        flips=spec.flips,
    )
    return operation, Offsets(wire_in=slot, values=piece.target)
