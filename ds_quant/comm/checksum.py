"""Checksums of messages: 16 bytes behind each, by which its receiver detects a changed bit.

sealed   with its checksum
changed  with bytes that do not fit its checksum

[Note: detected changes] A checksum is two sums over the 64-bit words of a message, modulo 2^64; the
second weights each word by an odd number that grows with its position. A change inside one word
changes the first sum, exchanged words change the second. Length and sender are added, so zeroed,
truncated and misrouted messages are detected. Guards against corruption, not attackers.

[Note: when errors are read] The comparison stays on the device, because reading its result would
wait for the device in every message. Results are collected in ``MessageErrors`` and read once per
step, by all ranks together; so are those of lossless differences that could not be decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant.kernels.wire import ALIGNMENT, round_up

TRAILER_BYTES = 16
_LENGTH_OFFSET = 0x1E3779B97F4A7C15
_SENDER_FACTOR = 0x3F58476D

# ---- sealed messages ----


def sealed_bytes(nbytes: int) -> int:
    """Return the bytes of a message of ``nbytes`` with its checksum; an empty one has none."""
    if nbytes == 0:
        return 0
    return round_up(nbytes, ALIGNMENT) + TRAILER_BYTES


def _checksums(words: Tensor, nbytes: int, sender: int | Tensor) -> Tensor:
    """Return the checksums of messages, (messages, 2) int64.

    words: (messages, words) int64.
    nbytes: length of each message.
    sender: rank index of the sender, one for all or (messages,).
    """
    weights = torch.arange(1, 2 * words.shape[1], 2, device=words.device)
    plain = words.sum(1) + (_LENGTH_OFFSET + nbytes)
    weighted = (words * weights).sum(1) + (sender + 1) * _SENDER_FACTOR
    return torch.stack([plain, weighted], dim=1)


def seal(payload: Tensor, sizes: Sequence[int], *, sender: int) -> Tensor:
    """Return messages with their checksums, each padded with zeros to a multiple of 16 bytes.

    payload: (sum(sizes),) uint8, the messages end to end.
    sender: index of this rank in the process group.
    """
    sealed = payload.new_zeros(sum(map(sealed_bytes, sizes)))
    for run in _runs(sizes):
        rows = sealed[run.in_sealed].view(run.messages, -1)
        rows[:, : run.nbytes] = payload[run.in_payload].view(run.messages, -1)
        words = rows.view(torch.int64)
        words[:, -2:] = _checksums(words[:, :-2], run.nbytes, sender)
    return sealed


def unseal(sealed: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Remove the checksums of one message of every rank, in rank order.

    Returns:
        payload (sum(sizes),) uint8, and (ranks,) bool: True for ranks whose message was changed.
    """
    payload = sealed.new_empty(sum(sizes))
    changed = torch.zeros(len(sizes), dtype=torch.bool, device=sealed.device)
    for run in _runs(sizes):
        rows = sealed[run.in_sealed].view(run.messages, -1)
        payload[run.in_payload].view(run.messages, -1).copy_(rows[:, : run.nbytes])
        words = rows.view(torch.int64)
        senders = torch.arange(run.first, run.first + run.messages, device=sealed.device)
        expected = _checksums(words[:, :-2], run.nbytes, senders)
        changed[run.first : run.first + run.messages] = (words[:, -2:] != expected).any(1)
    return payload, changed


class _Run(NamedTuple):
    """Consecutive messages of equal size, which one operation handles.

    first: index of the first. messages: number of them. nbytes: bytes of each.
    in_payload, in_sealed: their bytes without and with checksums.
    """

    first: int
    messages: int
    nbytes: int
    in_payload: slice
    in_sealed: slice


def _runs(sizes: Sequence[int]) -> Iterator[_Run]:
    """Group consecutive messages of equal size; empty messages are in no run."""
    first = payload_start = sealed_start = 0
    for nbytes, members in groupby(sizes):
        count = sum(1 for _ in members)
        payload_stop = payload_start + count * nbytes
        sealed_stop = sealed_start + count * sealed_bytes(nbytes)
        if nbytes:
            yield _Run(
                first,
                count,
                nbytes,
                in_payload=slice(payload_start, payload_stop),
                in_sealed=slice(sealed_start, sealed_stop),
            )
        first += count
        payload_start = payload_stop
        sealed_start = sealed_stop


# ---- errors ----


class MessageError(NamedTuple):
    """A corrupted message.

    sender: global rank.
    problem: description with a {} for the receiving rank.
    """

    role: str
    sender: int
    problem: str


Describe = Callable[[Sequence[int]], str]  # numbers of a message -> its problem


class _Note(NamedTuple):
    """The arguments of one ``MessageErrors.note``."""

    role: str
    senders: Sequence[int]
    outcomes: Tensor
    describe: Describe


class MessageErrors:
    """Collects messages that cannot be used. See [Note: when errors are read].

    at_once: called with an error as soon as it is noted, and raises. It waits for the device in
        every message. None except in inference engines, which never step.
    """

    def __init__(self) -> None:
        self._noted: list[_Note] = []
        self._streams: set[torch.cuda.Stream] = set()  # that write outcomes
        self.at_once: Callable[[MessageError], None] | None = None

    def note(self, role: str, senders: Sequence[int], outcomes: Tensor, describe: Describe) -> None:
        """Note the outcomes of messages of one role, one message of each sender.

        senders: global ranks.
        outcomes: (senders, numbers) bool or int32 on the device. The numbers of a usable message
            are all 0; others tell its problem.
        describe: returns the sentence about the numbers of a message, see ``MessageError.problem``.
        """
        self._noted.append(_Note(role, senders, outcomes, describe))
        if outcomes.is_cuda:
            self._streams.add(torch.cuda.current_stream(outcomes.device))
        if self.at_once is not None:
            error = self.first()
            if error is not None:
                self.at_once(error)

    def any_error(self, device: torch.device) -> Tensor:
        """Return True if any message cannot be used, () bool on the device. Does not wait."""
        for stream in self._streams:
            torch.cuda.current_stream(device).wait_stream(stream)
        if not self._noted:
            return torch.zeros((), dtype=torch.bool, device=device)
        return torch.cat([note.outcomes.reshape(-1).int() for note in self._noted]).any()

    def forget(self) -> None:
        """Drop all notes."""
        self._noted = []
        self._streams.clear()

    def first(self) -> MessageError | None:
        """Return the first error noted since the last call, and drop all notes. Waits for the
        device.
        """
        notes = self._noted
        self.forget()
        for note in notes:
            for sender, numbers in zip(note.senders, note.outcomes.tolist(), strict=True):
                if any(numbers):
                    return MessageError(note.role, sender, note.describe(numbers))
        return None


def describe_changed(_: Sequence[int]) -> str:
    """Describe a message whose checksum ``unseal`` found wrong, for ``MessageErrors.note``."""
    return "were changed on their way to rank {}: their checksum is wrong"
