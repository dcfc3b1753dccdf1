"""Gather lossless differences of 16-bit weights, in messages of variable length.

1. encode all messages of an optimizer step  2. all-gather their lengths, 8 bytes each
3. all-gather every message by itself, padded to the longest of any rank  4. decode them all.

[Note: lengths] A rank knows its lengths once everything is encoded, and needs those of the others
to post the first gather. So a step has one exchange of lengths, whatever the number of messages;
until it is over the messages stand in one buffer, with room for the longest that each may be.
Lengths come from outside: each is checked against that room before anything is received, so that a
changed one ends in an error and never in a read or a write past a buffer. On all ranks: what they
send next follows from the lengths, so they first compare what they have received.

[Note: status] What cannot be decoded is noted on the device and read by all ranks before the next
optimizer step, see ``checksum.MessageErrors``: a rank that raised by itself would leave the others
waiting, and to look at every message would wait for the device in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_quant.codec.bound import squares
from ds_quant.comm.message import row_place
from ds_quant.comm.profiling import profiler_range
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Communicator, HierarchicalCommunicator, Pending
from ds_quant.kernels.dispatch import decode_lossless, encode_lossless
from ds_quant.kernels.lossless import max_bytes, problem_of
from ds_quant.kernels.wire import ALIGNMENT

# Elements of one rank in a message: more would only be decoded later; and in messages that are
# encoded together, whose values are in memory together.
MOST_NUMEL = 1 << 24


class LosslessMessage(NamedTuple):
    """A message of ``numel`` elements from every rank. ``values()``: what this rank wants its
    elements to be, and what every holder has of them, (numel,) each.
    """

    numel: int
    values: Callable[[], tuple[Tensor, Tensor]]


def _error(backend: str, values: Tensor, wire: Tensor, *, reference: Tensor) -> Tensor:
    """As ``BoundCodec.error``; the squared error must be 0."""
    found, status = torch.empty_like(values), torch.zeros(1, 2, dtype=torch.int32)
    whole = np.zeros(1, dtype=np.int64), np.array([wire.numel()])
    rows = reference[None], found[None], status.to(wire.device)
    decode_lossless(wire, *whole, *rows, backend=backend)
    return squares(found, values)


_CHANGED = (
    ". An announcement of weights was changed on its way; look for faulty memory or a faulty "
    "network, and resume from the last checkpoint"
)


class LosslessGather:
    """The messages of one optimizer step; on every rank as many, in the same order.

    link: the ranks that exchange them. road: what carries them, the link itself or its two levels.
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
        """Encode all messages and agree on their lengths: a collective."""
        self._communicator, self._transport = communicator, transport
        self._rooms = [max_bytes(message.numel) for message in messages]
        buffer = communicator.empty(sum(self._rooms), device=device)
        self._made_on = torch.cuda.current_stream(device) if buffer.is_cuda else None
        self._payloads = buffer.split(self._rooms)
        own = torch.empty(len(messages), dtype=torch.int64, device=device)
        with (
            profiler_range("encode", "weights", communicator.hop),
            communicator.encoding("weights"),
        ):
            turns = [end // MOST_NUMEL for end in accumulate(p.numel for p in messages)]
            for _, places in groupby(range(len(messages)), turns.__getitem__):
                first, *more = places
                batch = [(*messages[i].values(), self._payloads[i]) for i in (first, *more)]
                nbytes = own[first : first + len(batch)]
                encode_lossless(batch, nbytes, backend=communicator.backend)
        self._lengths = self._agree(own)
        self._check()
        self._count(messages, traffic)
        with communicator.encoding("weights") as note:
            if note is not None:
                mine = zip(
                    messages, self._payloads, self._lengths[communicator.rank].tolist(), strict=True
                )
                for message, payload, nbytes in mine:
                    values, reference = message.values()
                    error = partial(_error, communicator.backend)
                    note(error, values, payload[:nbytes], reference=reference)

    def _agree(self, own: Tensor) -> np.ndarray:
        """Lengths of this rank (messages,) int64 -> those of all, (ranks, messages).

        RuntimeError on all ranks alike if not all have received the same.
        """
        arriving = self._communicator.all_gather(own.view(torch.uint8), role="weights").wait()
        arrived = arriving.view(torch.int64)
        least = self._communicator.least(torch.cat([arrived, ~arrived])).cpu().numpy()
        lengths, inverted = np.split(least, 2)
        if (lengths != ~inverted).any():
            raise RuntimeError(f"quantized_comm: ranks have received different lengths{_CHANGED}")
        return lengths.reshape(self._communicator.size, -1)

    def _check(self) -> None:
        lengths, rooms = self._lengths, np.array(self._rooms, dtype=np.int64)
        least = np.minimum(rooms, ALIGNMENT)
        wrong = (lengths < least) | (lengths > rooms) | (lengths % ALIGNMENT != 0)
        for rank, place in np.argwhere(wrong):
            raise RuntimeError(
                f"quantized_comm: rank {self._communicator.ranks[rank]} announces "
                f"{lengths[rank, place]} bytes of weights: allowed here are multiples of "
                f"{ALIGNMENT} up to {rooms[place]}{_CHANGED}"
            )

    def _count(self, messages: Sequence[LosslessMessage], traffic: Traffic) -> None:
        traffic.lossless.numel += self._communicator.size * sum(
            message.numel for message in messages
        )
        traffic.lossless.used += int(self._lengths.sum())
        traffic.lossless.moved += self._communicator.size * int(self._lengths.max(axis=0).sum())

    def post(self, place: int, reference: Callable[[], Tensor]) -> Pending[Tensor]:
        """Begin to gather a message. The result is ``reference()``, asked for when everything has
        arrived: row r, (numel,), is what this rank has of rank r's elements and becomes their new
        values.
        """
        lengths = self._lengths[:, place]
        most = int(lengths.max())
        if not most:  # of parameters without elements
            return Pending(reference)
        payload = self._payloads[place][:most]
        if self._made_on is not None:
            sending = torch.cuda.current_stream(payload.device)
            if sending != self._made_on:  # which may be far ahead when all have been sent
                payload.record_stream(sending)
        arriving = self._transport.all_gather(payload, role="weights")

        def decoded() -> Tensor:
            wire, ranks = arriving.wait(), np.arange(self._communicator.size)
            starts = row_place(ranks, len(ranks), self._transport.node_size) * most
            if wire.dim() == 3:  # as it arrived, without a copy
                wire = wire.transpose(0, 1).reshape(-1)
            with (
                profiler_range("decode", "weights", self._communicator.hop),
                self._communicator.decoding(),
            ):
                rows = reference()
                status = torch.zeros(len(rows), 2, dtype=torch.int32, device=rows.device)
                how = {"backend": self._communicator.backend}
                decode_lossless(wire, starts, lengths, rows, rows, status, **how)
            self._communicator.message_errors.note(
                "weights", self._communicator.ranks, status, _describe
            )
            return rows

        return Pending(decoded)


def _describe(status: Sequence[int]) -> str:
    return f"cannot be decoded on rank {{}} ({problem_of(status)})"
