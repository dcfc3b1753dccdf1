"""Messages: a row of slots is packed, sent and unpacked; gathers of weights are made of them.

message  one row of slots per peer (slots.py), planned once: the slots and the kernels' operations
         follow from sizes alone. A step adds the tensors and the RNG state.
gather   an all-gather of the same row to all peers, decoded by all of them; ``Message`` plans it

The gathers of shards, and the places of their rows in memory, are in rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant.codec.bound import BoundCodec
from ds_quant.codec.codec import CastCodec, Codec
from ds_quant.comm.hierarchy import HierarchicalCommunicator
from ds_quant.comm.profiling import profiler_range
from ds_quant.comm.slots import lay_out, row_index
from ds_quant.comm.transport import Communicator, Pending
from ds_quant.kernels.batch import Decode, Encode, Offsets, Task
from ds_quant.kernels.dispatch import Operations, RngState
from ds_quant.kernels.wire import ALIGNMENT

# ---- encode and decode ----


def pack(
    communicator: Communicator | HierarchicalCommunicator,
    role: str,
    nbytes: int,
    encode: Operations,
    buffers: Sequence[Tensor],
    rng_state: RngState,
    encoded: Tensor | None = None,
) -> Tensor:
    """Return a message of ``nbytes``, encoded.

    buffers: buffers of the operations from number 1 on; buffer 0 is the message.
    encoded: a message that needs no encoding; sampled steps encode it anyway, to measure.
    """
    wire = encoded
    with profiler_range("encode", role, communicator.hop), communicator.encoding(role) as note:
        if wire is None or note is not None:
            wire = communicator.empty(nbytes, device=buffers[0].device)
            encode.run([wire, *buffers], rng_state, note, backend=communicator.backend)
    return wire


def unpack(
    communicator: Communicator | HierarchicalCommunicator,
    role: str,
    decode: Operations,
    buffers: Sequence[Tensor],
    rng_state: RngState,
) -> None:
    """Decode received weights, or decode and add up received gradients.

    buffers: the buffers of the operations, the received message among them.
    """
    action = "sum" if role == "gradients" else "decode"
    with profiler_range(action, role, communicator.hop), communicator.decoding():
        decode.run(buffers, rng_state, backend=communicator.backend)


# ---- gathers ----


class GatherSlice(NamedTuple):
    """Consecutive elements of a tensor that one rank of a gather sends to all.

    peer: index of the sender.
    stream: index of the tensor among the bound codecs.
    source: (tensor, first element) of the values, on the sender.
    target: (tensor, first element) of the decoded values, on all ranks.
    vector: first vector of their random bits, in the stream.
    is_difference: True if the decoded difference is added to the values at ``target``; the tensors
        of ``targets`` are then the first of the values given to ``gather``.
    slot_numel: elements that the slot has room for, if more than ``numel``.
    """

    peer: int
    codec: Codec
    numel: int
    stream: int
    source: tuple[int, int]
    target: tuple[int, int]
    vector: int = 0
    is_difference: bool = False
    slot_numel: int = 0


class Message:
    """The plan of a gather: one row of ``nbytes`` from every rank. Every step runs it.

    slices: of all ranks; rank ``rank`` of ``ranks`` sends its own, all ranks decode all. Indices of
        tensors are those of the lists given to ``gather``.
    node_size: ranks per node of a gather over two levels, see ``slots.row_index``.
    """

    def __init__(
        self, slices: Iterable[GatherSlice], *, rank: int, ranks: int, node_size: int | None = None
    ) -> None:
        slices = list(slices)
        rows: list[list[tuple[Codec, int]]] = [[] for _ in range(ranks)]  # by sender
        for item in slices:
            rows[item.peer].append((item.codec, max(item.slot_numel, item.numel)))
        # Dtypes in which this rank's row is sent; None stands for encoded values.
        self._dtypes: set[torch.dtype | None] = {
            codec.dtype if isinstance(codec, CastCodec) else None for codec, _ in rows[rank]
        }
        layouts = [lay_out(row) for row in rows]
        self.nbytes = max(nbytes for _, nbytes in layouts)
        row_starts = [row_index(peer, ranks, node_size) * self.nbytes for peer in range(ranks)]
        slots = [iter(starts) for starts, _ in layouts]
        encode: list[Task] = []
        decode: list[Task] = []
        for item in slices:
            slot = next(slots[item.peer])
            if item.numel == 0:
                continue
            if item.peer == rank:
                encode.append(_encode_task(item, slot))
            decode.append(_decode_task(item, row_starts[item.peer] + slot))
        self._encode = Operations(encode)
        self._decode = Operations(decode)

    def gather(
        self,
        communicator: Communicator | HierarchicalCommunicator,
        values: Sequence[Tensor],
        bound_codecs: Sequence[BoundCodec],
        targets: Callable[[], list[Tensor]],
        *,
        values_stay: bool = False,
    ) -> Pending[list[Tensor]]:
        """Begin to gather weights; the result is the tensors of ``targets()``, decoded.

        1. Encode this rank's row.
        2. Post the all-gather of the rows.
        3. When the result is waited for, allocate ``targets()`` and decode all rows.

        values_stay: True if no value changes before the result is waited for. Full-precision
            values already laid out as the row are then sent without a copy.
        """
        if self.nbytes == 0:
            return Pending(targets)
        rng_state = RngState(bound_codecs, [None] * len(bound_codecs))
        encoded = self._row_in_place(values) if values_stay else None
        wire = pack(communicator, "weights", self.nbytes, self._encode, values, rng_state, encoded)
        pending = communicator.all_gather(wire, role="weights")

        def decoded() -> list[Tensor]:
            received = pending.wait()
            tensors = targets()
            unpack(communicator, "weights", self._decode, [received, *tensors], rng_state)
            return tensors

        return Pending(decoded)

    def _row_in_place(self, values: Sequence[Tensor]) -> Tensor | None:
        """Return this rank's row, (nbytes,) uint8, if full-precision values lie end to end in one
        block of memory. None also if the block is not 16-byte aligned, which is slow with NCCL.
        """
        first = values[0]
        if self._dtypes != {first.dtype}:
            return None  # checked first, because it needs no look at every tensor
        starts = [tensor.data_ptr() for tensor in values]
        ends = [start + tensor.nbytes for start, tensor in zip(starts, values, strict=True)]
        expected_ends = [*starts[1:], starts[0] + self.nbytes]
        blocks = {(tensor.dtype, tensor.untyped_storage().data_ptr()) for tensor in values}
        if len(blocks) > 1 or starts[0] % ALIGNMENT or ends != expected_ends:
            return None
        return first.as_strided((self.nbytes // first.element_size(),), (1,)).view(torch.uint8)


# Buffers of the operations: the message (its own when encoding, the received rows when decoding),
# then the tensors.
_WIRE, _TENSORS = 0, 1


def _encode_task(item: GatherSlice, slot: int) -> Task:
    """Plan the encoding of a slice into the row, from byte ``slot`` on."""
    tensor, start = item.source
    target, target_start = item.target
    operation = Encode(
        item.codec,
        item.numel,
        values=_TENSORS + tensor,
        wire=_WIRE,
        stream=item.stream,
        base=_TENSORS + target if item.is_difference else None,
    )
    base_start = target_start if item.is_difference else 0
    return operation, Offsets(values=start, base=base_start, wire=slot, vector=item.vector)


def _decode_task(item: GatherSlice, slot: int) -> Task:
    """Plan the decoding of a slice from the received rows, from byte ``slot`` on."""
    target, target_start = item.target
    operation = Decode(
        item.codec,
        item.numel,
        wire=_WIRE,
        values=_TENSORS + target,
        stream=item.stream,
        add=item.is_difference,
    )
    return operation, Offsets(wire=slot, values=target_start)
