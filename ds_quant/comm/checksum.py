"""Checksums of messages: 16 bytes behind each, by which its receiver finds a changed bit.

[Note: what is found] Two sums over the 64-bit words of a message, modulo 2^64, one of them weighted
by odd numbers that grow with the place. A change inside one word changes the first sum, exchanged
words the second; the length and the sender are added, so that zeros, a message cut short or one of
another rank do not pass. This is against accidents, not against an enemy.

[Note: when it is told] The comparison stays on the device, because reading its outcome would wait
for the device in every message. Outcomes are collected in ``MessageErrors`` and read once per step,
by all ranks together; so are those of lossless differences that could not be decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant.kernels.wire import ALIGNMENT, round_up

TRAILER_BYTES = 16
_OF_LENGTH = 0x1E3779B97F4A7C15
_OF_SENDER = 0x3F58476D


def sealed_bytes(nbytes: int) -> int:
    """Bytes of a message of ``nbytes`` with its checksum; an empty one is not sent and has none."""
    return round_up(nbytes, ALIGNMENT) + TRAILER_BYTES if nbytes else 0


def _checksums(words: Tensor, nbytes: int, sender: int | Tensor) -> Tensor:
    """words (rows, words) int64, each row a message of ``nbytes`` from ``sender``, one or (rows,)
    -> (rows, 2) int64.
    """
    weights = torch.arange(1, 2 * words.shape[1], 2, device=words.device)
    plain = words.sum(1) + (_OF_LENGTH + nbytes)
    ordered = (words * weights).sum(1) + (sender + 1) * _OF_SENDER
    return torch.stack([plain, ordered], dim=1)


def seal(payload: Tensor, sizes: Sequence[int], *, sender: int) -> Tensor:
    """payload (sum(sizes),) uint8 -> the same messages, each filled up with zeros to a multiple of
    16 bytes and followed by its checksum. ``sender`` is this rank's place in the process group.
    """
    sealed = payload.new_zeros(sum(map(sealed_bytes, sizes)))
    for _, count, nbytes, inside, place in _runs(sizes):
        rows = sealed[place].view(count, -1)
        rows[:, :nbytes] = payload[inside].view(count, -1)
        words = rows.view(torch.int64)
        words[:, -2:] = _checksums(words[:, :-2], nbytes, sender)
    return sealed


def unseal(sealed: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return what ``seal`` was given on the ranks of a process group, one message of each, in
    order.

    Returns:
        payload (sum(sizes),) uint8, and (ranks,) bool: whether a rank's message was changed.
    """
    payload = sealed.new_empty(sum(sizes))
    changed = torch.zeros(len(sizes), dtype=torch.bool, device=sealed.device)
    for first, count, nbytes, inside, place in _runs(sizes):
        rows = sealed[place].view(count, -1)
        payload[inside].view(count, -1).copy_(rows[:, :nbytes])
        words, ranks = rows.view(torch.int64), slice(first, first + count)
        senders = torch.arange(first, first + count, device=sealed.device)
        expected = _checksums(words[:, :-2], nbytes, senders)
        changed[ranks] = (words[:, -2:] != expected).any(1)
    return payload, changed


def _runs(sizes: Sequence[int]) -> Iterator[tuple[int, int, int, slice, slice]]:
    """Group neighbours of equal size, which one operation serves; empty messages are in no run.

    Yield the first one, how many they are, their bytes, where they lie in all, and where sealed.
    """
    first = plain = sealed = 0
    for nbytes, members in groupby(sizes):
        count = sum(1 for _ in members)
        plain_end, sealed_end = plain + count * nbytes, sealed + count * sealed_bytes(nbytes)
        if nbytes:
            yield first, count, nbytes, slice(plain, plain_end), slice(sealed, sealed_end)
        first, plain, sealed = first + count, plain_end, sealed_end


class MessageError(NamedTuple):
    """A message that cannot be used: its role, its sender, and what is wrong with it, with {} for
    its receiver.
    """

    role: str
    sender: int
    problem: str


Describe = Callable[[Sequence[int]], str | None]


class MessageErrors:
    """Collect which messages cannot be used. See [Note: when it is told].

    ``at_once``: called with such a finding when it is noted, which waits for the device; for
    engines that never step.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[str, Sequence[int], Tensor, Describe]] = []  # as ``note`` is told
        self._streams: set[torch.cuda.Stream] = set()  # those that the outcomes are written on
        self.at_once: Callable[[MessageError], None] | None = None

    def note(self, role: str, senders: Sequence[int], outcomes: Tensor, describe: Describe) -> None:
        """Note messages that carry ``role``, one of each sender.

        ``outcomes``: (senders, numbers) bool or int32, all 0 where nothing is wrong. ``say`` makes
        a sentence of the numbers of one.
        """
        self._noted.append((role, senders, outcomes, describe))
        if outcomes.is_cuda:
            self._streams.add(torch.cuda.current_stream(outcomes.device))
        if self.at_once is not None and (found := self.first()) is not None:
            self.at_once(found)

    def any_error(self, device: torch.device) -> Tensor:
        """Whether anything is wrong, () bool on the device, which is not waited for."""
        for stream in self._streams:
            torch.cuda.current_stream(device).wait_stream(stream)
        if not self._noted:
            return torch.zeros((), dtype=torch.bool, device=device)
        return torch.cat([outcomes.reshape(-1).int() for _, _, outcomes, _ in self._noted]).any()

    def forget(self) -> None:
        """Begin anew."""
        self._noted = []
        self._streams.clear()

    def first(self) -> MessageError | None:
        """Return what was found first since the last call, and forget all. Waits for the device."""
        noted = self._noted
        self.forget()
        for role, senders, outcomes, describe in noted:
            for sender, numbers in zip(senders, outcomes.tolist(), strict=True):
                if any(numbers):
                    return MessageError(role, sender, describe(numbers))
        return None


def describe_changed(_: Sequence[int]) -> str:
    """For ``MessageErrors.note``, of what ``unseal`` has found."""
    return "were changed on their way to rank {}: their checksum is wrong"
