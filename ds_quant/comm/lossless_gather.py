"""Gather lossless differences of 16-bit weights, in messages of variable length.

1. Encode all messages of an optimizer step.
2. All-gather their lengths, 8 bytes each.
3. All-gather every message alone, padded to the longest of any rank.
4. Decode them all.

[Note: lengths] A rank knows its lengths once everything is encoded, and needs those of the others
to post the first gather. So a step exchanges lengths once, for any number of messages; until then
the messages stand in one buffer, which has room for the longest possible length of each.
Received lengths are not trusted: each is checked against that room before anything is received, so
a corrupted length ends in an error, never in an access past a buffer. Later messages depend on the
lengths, so all ranks must take the same decision: they first compare the lengths they received.

[Note: status] Messages that cannot be decoded are noted on the device and read by all ranks before
the next optimizer step, see ``checksum.MessageErrors``. If one rank raised alone, the others would
hang, and reading the status of every message would wait for the device each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ds_quant.codec.bound import squares
from ds_quant.comm.hierarchy import HierarchicalCommunicator
from ds_quant.comm.profiling import profiler_range
from ds_quant.comm.slots import row_index
from ds_quant.comm.traffic import LosslessDifferences, Traffic
from ds_quant.comm.transport import Communicator, Pending
from ds_quant.kernels.dispatch import decode_lossless, encode_lossless
from ds_quant.kernels.lossless import max_bytes, problem_of
from ds_quant.kernels.wire import ALIGNMENT

# Most elements of one rank in a message: a larger message would only be decoded later. Also of the
# messages that are encoded together, whose values are in memory together.
MOST_NUMEL = 1 << 24


class LosslessMessage(NamedTuple):
    """A message of ``numel`` elements from every rank.

    values: returns (new values, reference values) of this rank's elements, (numel,) each. The
        reference is what every rank holds.
    """

    numel: int
    values: Callable[[], tuple[Tensor, Tensor]]


def _error(backend: str, values: Tensor, wire: Tensor, *, reference: Tensor) -> Tensor:
    """As ``BoundCodec.error``; the squared error must be 0."""
    decoded = torch.empty_like(values)
    status = torch.zeros(1, 2, dtype=torch.int32, device=wire.device)
    decode_lossless(
        wire,
        starts=np.zeros(1, dtype=np.int64),
        lengths=np.array([wire.numel()]),
        reference=reference[None],
        out=decoded[None],
        status=status,
        backend=backend,
    )
    return squares(decoded, values)


_CORRUPTED = (
    ". An announcement of weights was changed on its way; look for faulty memory or a faulty "
    "network, and resume from the last checkpoint"
)


def counters_of_gather(
    numel: int, lengths: np.ndarray, *, rows: dict[str, int], rows_of_lengths: dict[str, int]
) -> LosslessDifferences:
    """Return the counters of a gather.

    Args:
        numel: weights of one rank, in all messages.
        lengths: of the messages, (ranks, messages) int64.
        rows: of each message that this rank receives, by link.
        rows_of_lengths: of the lengths.
    """
    ranks, messages = lengths.shape
    moved = int(lengths.max(axis=0).sum())
    received = {}
    for link, count in rows.items():
        received[link] = count * moved + rows_of_lengths[link] * messages * lengths.itemsize
    return LosslessDifferences(
        numel=ranks * numel,
        used=int(lengths.sum()),
        moved=ranks * moved,
        received_numel={link: count * numel for link, count in rows.items()},
        received=received,
    )


class LosslessGather:
    """The messages of one optimizer step; every rank has equally many, in the same order.

    communicator: the ranks that exchange them.
    transport: carries the messages, ``communicator`` itself or the two-level communicator.
    """

    def __init__(
        self,
        messages: Sequence[LosslessMessage],
        communicator: Communicator,
        transport: Communicator | HierarchicalCommunicator,
        *,
        device: torch.device,
        traffic: Traffic,
    ) -> None:
        """Encode all messages and exchange their lengths: a collective."""
        self._communicator = communicator
        self._transport = transport
        self._rooms = [max_bytes(message.numel) for message in messages]
        buffer = communicator.empty(sum(self._rooms), device=device)
        self._made_on = torch.cuda.current_stream(device) if buffer.is_cuda else None
        self._payloads = buffer.split(self._rooms)
        own_lengths = torch.empty(len(messages), dtype=torch.int64, device=device)
        with (
            profiler_range("encode", "weights", communicator.hop),
            communicator.encoding("weights"),
        ):
            for batch in _batches([message.numel for message in messages]):
                encode_lossless(
                    [(*messages[i].values(), self._payloads[i]) for i in batch],
                    own_lengths[batch.start : batch.stop],
                    backend=communicator.backend,
                )
        self._lengths = self._agree(own_lengths)
        self._check()
        traffic.count_lossless(
            counters_of_gather(
                sum([message.numel for message in messages]),
                self._lengths,
                rows=transport.rows_of_gather(),
                rows_of_lengths=communicator.rows_of_gather(),
            )
        )
        self._measure(messages)

    def _agree(self, own: Tensor) -> np.ndarray:
        """Lengths of this rank's messages, (messages,) int64 -> of all ranks, (ranks, messages).

        RuntimeError on all ranks alike unless all have received the same lengths.
        """
        gathered = self._communicator.all_gather(own.view(torch.uint8), role="weights").wait()
        received = gathered.view(torch.int64)
        minimum = self._communicator.least(torch.cat([received, ~received])).cpu().numpy()
        lengths, inverted = np.split(minimum, 2)
        if (lengths != ~inverted).any():
            raise RuntimeError(f"quantized_comm: ranks have received different lengths{_CORRUPTED}")
        return lengths.reshape(self._communicator.size, -1)

    def _check(self) -> None:
        """RuntimeError for a length that no message can have."""
        lengths = self._lengths
        longest = np.array(self._rooms, dtype=np.int64)
        shortest = np.minimum(longest, ALIGNMENT)
        wrong = (lengths < shortest) | (lengths > longest) | (lengths % ALIGNMENT != 0)
        for rank, index in np.argwhere(wrong):
            raise RuntimeError(
                f"quantized_comm: rank {self._communicator.ranks[rank]} announces "
                f"{lengths[rank, index]} bytes of weights: allowed here are multiples of "
                f"{ALIGNMENT} up to {longest[index]}{_CORRUPTED}"
            )

    def _measure(self, messages: Sequence[LosslessMessage]) -> None:
        """In a sampled step, note this rank's messages: their lengths are known only now."""
        with self._communicator.encoding("weights") as note:
            if note is None:
                return
            own_lengths = self._lengths[self._communicator.rank].tolist()
            for message, payload, nbytes in zip(messages, self._payloads, own_lengths, strict=True):
                values, reference = message.values()
                error = partial(_error, self._communicator.backend)
                note(error, values, payload[:nbytes], reference=reference)

    def post(self, place: int, reference: Callable[[], Tensor]) -> Pending[Tensor]:
        """Begin to gather message number ``place``.

        reference: called when the message has arrived; returns this rank's values of all ranks'
            elements, (ranks, numel). They are updated in place and are the result.
        """
        lengths = self._lengths[:, place]
        longest = int(lengths.max())
        if not longest:  # no elements
            return Pending(reference)
        payload = self._payloads[place][:longest]
        if self._made_on is not None:
            sending_stream = torch.cuda.current_stream(payload.device)
            if sending_stream != self._made_on:  # which may be far ahead when all have been sent
                payload.record_stream(sending_stream)
        pending = self._transport.all_gather(payload, role="weights")

        def decoded() -> Tensor:
            communicator = self._communicator
            wire = pending.wait()
            ranks = np.arange(communicator.size)
            starts = row_index(ranks, len(ranks), self._transport.node_size) * longest
            if wire.dim() == 3:  # as it arrived, without a copy
                wire = wire.transpose(0, 1).reshape(-1)
            with profiler_range("decode", "weights", communicator.hop), communicator.decoding():
                rows = reference()
                status = torch.zeros(len(rows), 2, dtype=torch.int32, device=rows.device)
                decode_lossless(
                    wire, starts, lengths, rows, rows, status, backend=communicator.backend
                )
            communicator.message_errors.note("weights", communicator.ranks, status, _describe)
            return rows

        return Pending(decoded)


Post = Callable[[], Pending[Any]]  # posts a gather


class Source(Protocol):
    """Weights of one message."""

    @property
    def numel(self) -> int:
        """Elements that one rank sends."""

    def values(self) -> tuple[Tensor, Tensor]:
        """Return this rank's new values, and the old ones that all receivers hold."""

    def post(self, gathers: LosslessGather, index: int) -> Pending[Any]:
        """Post the gather of message ``index``, which updates the weights."""


def posts(
    sources: Sequence[Source],
    communicator: Communicator,
    transport: Communicator | HierarchicalCommunicator,
    *,
    device: torch.device,
    traffic: Traffic,
) -> Iterator[Post]:
    """Yield per message a function that posts its gather, which updates the weights.

    All messages are encoded, and their lengths exchanged, before the first one is yielded.
    Arguments are those of ``LosslessGather``.
    """
    messages = [LosslessMessage(source.numel, source.values) for source in sources]
    gathers = LosslessGather(messages, communicator, transport, device=device, traffic=traffic)
    for index, source in enumerate(sources):
        yield partial(source.post, gathers, index)


def joined(rows: Sequence[Tensor]) -> Tensor:
    """Concatenate rows of one dtype. A single row is returned without a copy."""
    return rows[0] if len(rows) == 1 else torch.cat(tuple(rows), dim=-1)


def _batches(numels: Sequence[int]) -> list[range]:
    """Group consecutive messages that are encoded together, about ``MOST_NUMEL`` elements each."""
    batch_numbers = [end // MOST_NUMEL for end in accumulate(numels)]
    batches = []
    start = 0
    for _, members in groupby(batch_numbers):
        stop = start + len(list(members))
        batches.append(range(start, stop))
        start = stop
    return batches


def _describe(status: Sequence[int]) -> str:
    return f"cannot be decoded on rank {{}} ({problem_of(status)})"
