"""Notice weights that were written outside of an optimizer step, by their content.

[Note: written weights] Nodes that keep a copy of the weights receive what an optimizer step has
changed, and nothing else. A write by other code (a loaded checkpoint, an average that is swapped
in, a clamp) must reach them, too. torch does not count a write to ``.data``. So each rank takes
*fingerprints* of its own shards when an exchange has read them, and takes them again before the
next forward. All ranks vote on the parameters whose fingerprints differ.

[Note: fingerprints] A fingerprint is 64 bits of a *piece*, a part of a shard of bounded size. Each
64-bit word of the piece is multiplied by an odd number of its own, its upper half is added to its
lower half modulo 2, and the results are summed modulo 2^64. One changed word always changes the
sum: both operations are invertible. Several changed words leave it as it was by accident only,
about once in 2^32.

A large piece is *folded* first, because memory is the bottleneck: its words are laid out in rows,
and the sums of all rows and of all columns modulo 2^64 take their place. Changed words escape these
sums only if they cancel in every row and in every column. Numbers of rows and columns are odd, so
that not even a change of all sign bits cancels.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ds_quant.comm.transport import Communicator
from ds_quant.kernels.wire import ceil_div

_WORD = 8  # bytes
# Words that are fingerprinted at once: temporary memory is up to four times as much. The factors of
# a run are kept. On the CPU both stay in its cache.
_RUN_WORDS_CPU = 1 << 16
_RUN_WORDS = 1 << 21
_COLUMNS = 255  # of a folded piece
_LEAST_FOLDED = 1 << 13  # words
_ODD_FACTOR = -0x61C8864680B583EB  # 2^64 divided by the golden ratio, as int64


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Elements [start, stop) of a shard."""

    shard: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Pieces of one dtype that are fingerprinted at once.

    numels: elements of every piece in the buffer, a whole number of words.
    last_words: (pieces,) int64, index of the last word of every piece.
    """

    dtype: torch.dtype
    pieces: tuple[_Piece, ...]
    numels: tuple[int, ...]
    last_words: Tensor

    def fingerprints(self, shards: Sequence[Tensor], factors: Tensor) -> Tensor:
        """Return (pieces,) int64. factors: of the words, on the device of the result."""
        words = self._words_in_place(shards, factors.device)
        if words is None:
            words = self._copied_words(shards, factors.device)
        if len(self.pieces) == 1:
            words = _folded(words)
        mixed = words * factors[: words.numel()]
        mixed ^= mixed >> 32
        if len(self.pieces) == 1:
            return mixed.sum().view(1)
        totals = mixed.cumsum(0)[self.last_words]
        return torch.diff(totals, prepend=totals.new_zeros(1))

    def _words_in_place(self, shards: Sequence[Tensor], device: torch.device) -> Tensor | None:
        """Return a single piece as words, without a copy; None if it does not lie so."""
        if len(self.pieces) > 1:
            return None
        (piece,) = self.pieces
        shard = shards[piece.shard]
        if shard.dtype != self.dtype or shard.device != device or not shard.is_contiguous():
            return None
        values = shard.detach().view(-1)[piece.start : piece.stop]
        if values.nbytes % _WORD or values.storage_offset() * values.element_size() % _WORD:
            return None
        return values.view(torch.int64)

    def _copied_words(self, shards: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the words of all pieces, each filled with zeros to a whole number of words."""
        buffer = torch.zeros(sum(self.numels), dtype=self.dtype, device=device)
        targets = []
        sources = []
        for target, piece in zip(buffer.split(self.numels), self.pieces, strict=True):
            targets.append(target[: piece.stop - piece.start])
            sources.append(shards[piece.shard].detach().reshape(-1)[piece.start : piece.stop])
        torch._foreach_copy_(targets, sources)
        return buffer.view(torch.int64)


def _folded(words: Tensor) -> Tensor:
    """Return the sums that stand for the words of a piece, (sums,) int64."""
    if words.numel() < _LEAST_FOLDED:
        return words
    rows = (words.numel() // _COLUMNS - 1) | 1  # the largest odd number that fits
    table_numel = rows * _COLUMNS
    table = words[:table_numel].view(rows, _COLUMNS)
    return torch.cat([table.sum(0), table.sum(1), words[table_numel:]])


class Fingerprints:
    """Computes the fingerprints of shards: see [Note: fingerprints].

    Args:
        dtypes: by shard, the dtype in which it is compared.
        device: of the fingerprints.

    shard_of_piece: (pieces,) int64 on the device, the shard of each fingerprint.
    """

    def __init__(self, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        self.dtypes = tuple(dtypes)
        self.device = device
        self.shard_of_piece = torch.zeros(0, dtype=torch.int64, device=device)
        self._numels: tuple[int, ...] | None = None
        self._runs: list[_Run] = []
        self._factors = torch.zeros(0, dtype=torch.int64, device=device)

    def of(self, shards: Sequence[Tensor], only: Collection[int] | None = None) -> Tensor:
        """Return the fingerprints of all pieces, (pieces,) int64.

        Args:
            shards: in the order of ``dtypes``.
            only: indices of the shards that are needed, None for all. The fingerprints of others
                may be zeros.
        """
        numels = tuple([shard.numel() for shard in shards])
        if numels != self._numels:
            self._plan(numels)
        parts = []
        for run in self._runs:
            if only is None or any([piece.shard in only for piece in run.pieces]):
                parts.append(run.fingerprints(shards, self._factors))
            else:
                parts.append(self._factors.new_zeros(len(run.pieces)))
        if not parts:
            return self._factors.new_zeros(0)
        return torch.cat(parts)

    def pieces_of(self, shards: Collection[int]) -> Tensor:
        """Return a mask of the pieces of some shards, (pieces,) bool."""
        is_meant = torch.zeros(len(self.dtypes), dtype=torch.bool, device=self.device)
        is_meant[list(shards)] = True
        return is_meant[self.shard_of_piece]

    def _plan(self, numels: tuple[int, ...]) -> None:
        """Cut shards into pieces, and collect pieces of equal dtype in runs of bounded size."""
        most_words = _RUN_WORDS_CPU if self.device.type == "cpu" else _RUN_WORDS
        self._numels = numels
        self._runs = []
        for dtype in dict.fromkeys(self.dtypes):
            most_numel = most_words * _WORD // dtype.itemsize
            pieces: list[_Piece] = []
            sizes: list[int] = []
            run_numel = 0
            for shard, numel in enumerate(numels):
                if self.dtypes[shard] != dtype:
                    continue
                for start in range(0, numel, most_numel):
                    stop = min(start + most_numel, numel)
                    size = ceil_div((stop - start) * dtype.itemsize, _WORD)
                    size = size * _WORD // dtype.itemsize
                    if pieces and run_numel + size > most_numel:
                        self._runs.append(self._run(dtype, pieces, sizes))
                        pieces, sizes = [], []
                        run_numel = 0
                    run_numel += size
                    pieces.append(_Piece(shard=shard, start=start, stop=stop))
                    sizes.append(size)
            if pieces:
                self._runs.append(self._run(dtype, pieces, sizes))
        shard_of_piece = [piece.shard for run in self._runs for piece in run.pieces]
        self.shard_of_piece = torch.tensor(shard_of_piece, dtype=torch.int64, device=self.device)
        longest = max([sum(run.numels) * run.dtype.itemsize for run in self._runs], default=0)
        self._factors = torch.arange(1, 2 * (longest // _WORD) + 1, 2, device=self.device)
        self._factors.mul_(_ODD_FACTOR)

    def _run(self, dtype: torch.dtype, pieces: Sequence[_Piece], sizes: Sequence[int]) -> _Run:
        last_words = [end * dtype.itemsize // _WORD - 1 for end in accumulate(sizes)]
        return _Run(
            dtype=dtype,
            pieces=tuple(pieces),
            numels=tuple(sizes),
            last_words=torch.tensor(last_words, device=self.device),
        )


class UnequalSteps(Exception):
    """Ranks have taken other numbers of steps: the least and the largest one."""


class WrittenWeights:
    """Fingerprints of this rank's shards: see [Note: written weights].

    They take 8 bytes per piece of a shard, one more between ``note`` and the next vote, and live
    as long as this.

    Args:
        dtypes: by shard, the dtype in which it is compared. A write that this dtype does not show
            counts as none.
        device: of the fingerprints, where collectives are posted.
    """

    def __init__(self, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        self._fingerprints = Fingerprints(dtypes, device)
        self._taken: Tensor | None = None
        self._noted: Tensor | None = None  # by piece, True if a write was noted
        self._marked: set[int] = set()

    @property
    def is_taken(self) -> bool:
        """True if there are fingerprints to compare with."""
        return self._taken is not None

    def take(self, shards: Sequence[Tensor], only: Collection[int] | None = None) -> None:
        """Take the fingerprints of what was sent. Writes that were noted or marked stay so.

        Args:
            shards: in the order of ``dtypes``.
            only: indices of the shards that were sent, None for all. Others keep their
                fingerprints, if they have any.
        """
        if self._taken is None or only is None:
            self._taken = self._fingerprints.of(shards)
            return
        now = self._fingerprints.of(shards, only)
        if now.shape != self._taken.shape:  # a shard has another size
            self._taken = self._fingerprints.of(shards)
        else:
            self._taken = torch.where(self._fingerprints.pieces_of(only), now, self._taken)

    def note(self, shards: Sequence[Tensor]) -> None:
        """Note the writes since ``take`` until the next vote. Does not wait for the device.

        For the moment before an optimizer step, after which they cannot be told from the step.
        """
        if self._taken is not None:
            self._noted = self._differs(self._fingerprints.of(shards))

    def mark(self, shard: int) -> None:
        """Count a shard as written in the next vote, whatever it holds."""
        self._marked.add(shard)

    def forget(self) -> None:
        """Compare nothing until the next ``take``."""
        self._taken = None
        self._noted = None

    def written(
        self, shards: Sequence[Tensor], communicator: Communicator, *, steps: int = 0
    ) -> list[int]:
        """Return the shards that any rank of ``communicator`` has written or marked.

        They count as sent afterwards. A collective of three numbers, and of one byte per shard if
        there are any. The host waits for its answer.

        steps: a number that must be equal on all ranks.

        Raises:
            UnequalSteps: on all ranks, if it is not.
        """
        fingerprints = self._fingerprints
        if not fingerprints.dtypes:
            return []
        now = fingerprints.of(shards)
        differs = self._differs(now)
        is_equal = (~differs.any()).to(torch.int64).view(1)
        if self._marked:
            is_equal.zero_()
        self._noted = None
        number = torch.tensor([steps, ~steps], device=fingerprints.device)
        all_equal, least, inverted = communicator.least(torch.cat([is_equal, number])).tolist()
        if least != ~inverted:
            raise UnequalSteps(least, ~inverted)
        written: list[int] = []
        if not all_equal:
            numel = len(fingerprints.dtypes)
            equal = torch.ones(numel, dtype=torch.uint8, device=fingerprints.device)
            equal[fingerprints.shard_of_piece[differs]] = 0
            equal[list(self._marked)] = 0
            flags = communicator.least(equal).tolist()
            written = [shard for shard, flag in enumerate(flags) if not flag]
            self._taken = now
        self._marked.clear()
        return written

    def _differs(self, now: Tensor) -> Tensor:
        """Return True for each piece that is not what was taken, or was noted before."""
        if self._taken is None:
            differs = torch.zeros_like(now, dtype=torch.bool)
        elif now.shape == self._taken.shape:
            differs = now != self._taken
        else:  # a shard has another size
            differs = torch.ones_like(now, dtype=torch.bool)
        if self._noted is not None and self._noted.shape == differs.shape:
            differs = differs | self._noted
        return differs
