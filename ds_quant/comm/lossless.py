"""Gather exact differences of 16-bit weights, whose messages are as long as the values ask for.

1. encode all messages of an optimizer step  2. all-gather their lengths, 8 bytes each
3. all-gather every message by itself, filled up to the longest of any rank  4. decode them all.

[Note: lengths] A rank knows its lengths once everything is encoded, and needs those of the others
to post the first gather. So a step has one exchange of lengths, whatever the number of messages;
until it is over the messages stand in one buffer, with room for the longest that each may be.
Lengths come from outside: each is checked against that room before anything is received, so that a
changed one ends in an error and never in a read or a write past a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant.codec.bound import squares
from ds_quant.codec.lossless import LosslessCodec
from ds_quant.comm.gather import node_size_of
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Fabric, Link
from ds_quant.kernels.wire import ALIGNMENT

MOST_NUMEL = 1 << 24  # elements of one rank in a message: more would only be decoded later


# (rank, wire, status): decodes what a rank has sent; ``status`` is for the codec.
Decode = Callable[[int, Tensor, Tensor], None]


class Parcel(NamedTuple):
    """A message of ``numel`` elements from every rank. ``values()``: what this rank wants its
    elements to be, and what every holder has of them, (numel,) each.
    """

    numel: int
    values: Callable[[], tuple[Tensor, Tensor]]


class Reading(NamedTuple):
    """Reads a message back, for metrics: see ``traffic.Measures``."""

    codec: LosslessCodec

    def error(self, values: Tensor, wire: Tensor, *, held: Tensor) -> Tensor:
        """Squared error, which must be 0, and squared norm, (2,) fp64 on the device."""
        found = torch.empty_like(values)
        self.codec.decode(wire, held, found)
        return squares(found, values)


class Outbox:
    """The messages of one optimizer step; on every rank as many, in the same order.

    link: the ranks that exchange them. road: what carries them, the link itself or its two levels.
    """

    def __init__(
        self,
        parcels: Sequence[Parcel],
        link: Link,
        road: Link | Fabric,
        *,
        codec: LosslessCodec,
        device: torch.device,
        traffic: Traffic,
    ) -> None:
        """Encode all messages and agree on their lengths: a collective."""
        self._link, self._road, self._codec = link, road, codec
        self._rooms = [codec.max_bytes(parcel.numel) for parcel in parcels]
        ends = list(accumulate(self._rooms, initial=0))
        buffer = link.empty(ends[-1], device=device)
        self._messages = [buffer[start:end] for start, end in pairwise(ends)]
        own = torch.empty(len(parcels), dtype=torch.int64, device=device)
        with link.encoding("weights"):
            for place, (parcel, out) in enumerate(zip(parcels, self._messages, strict=True)):
                codec.encode(*parcel.values(), out, own[place : place + 1])
        arriving = link.all_gather(own.view(torch.uint8), role="weights")
        self._lengths: list[list[int]] = (
            arriving.wait().view(torch.int64).view(link.size, -1).tolist()
        )
        self._check()
        self._count(parcels, traffic)
        with link.encoding("weights") as notes:
            if notes.are_read:
                mine = zip(parcels, self._messages, self._lengths[link.rank], strict=True)
                for parcel, message, nbytes in mine:
                    values, held = parcel.values()
                    notes.note(Reading(codec), values, message[:nbytes], held=held)

    def _check(self) -> None:
        for rank, lengths in zip(self._link.ranks, self._lengths, strict=True):
            for nbytes, room in zip(lengths, self._rooms, strict=True):
                if not min(ALIGNMENT, room) <= nbytes <= room or nbytes % ALIGNMENT:
                    raise RuntimeError(
                        f"quantized_comm: rank {rank} announces {nbytes} bytes of weights: allowed "
                        f"here are multiples of {ALIGNMENT} up to {room}. The announcement was "
                        "changed on its way; look for faulty memory or a faulty network, and "
                        "resume from the last checkpoint"
                    )

    def _count(self, parcels: Sequence[Parcel], traffic: Traffic) -> None:
        traffic.exact.numel += self._link.size * sum(parcel.numel for parcel in parcels)
        traffic.exact.used += sum(map(sum, self._lengths))
        traffic.exact.moved += self._link.size * sum(map(max, *self._lengths))

    def post(self, place: int, decode: Decode) -> Callable[[], None]:
        """Begin to gather a message; the returned function waits for it and calls ``decode`` for
        every rank, this one too.
        """
        lengths = [of_rank[place] for of_rank in self._lengths]
        if not max(lengths):  # of parameters without elements
            return lambda: None
        payload = self._messages[place][: max(lengths)]
        arriving = self._road.all_gather(payload, role="weights")

        def arrived() -> None:
            rows = arriving.wait()
            node_size = node_size_of(rows)
            if node_size is None:
                rows = rows.view(self._link.size, -1)
            status = torch.zeros(len(lengths), 2, dtype=torch.int32, device=rows.device)
            with self._link.decoding():
                for rank, nbytes in enumerate(lengths):
                    row = rows[rank] if node_size is None else rows[divmod(rank, node_size)]
                    with self._named(rank):
                        decode(rank, row[:nbytes], status[rank])
                for rank, found in enumerate(status.tolist()):  # waits for the device once
                    with self._named(rank):
                        self._codec.check(found)

        return arrived

    @contextmanager
    def _named(self, rank: int) -> Iterator[None]:
        """Names the rank whose message cannot be."""
        try:
            yield
        except ValueError as error:
            raise RuntimeError(
                f"quantized_comm: weights from rank {self._link.ranks[rank]} cannot be decoded "
                f"({error}): they, or what this rank holds of those weights, were changed; look "
                "for code that writes weights outside the optimizer, faulty memory or a faulty "
                "network, and resume from the last checkpoint"
            ) from error
