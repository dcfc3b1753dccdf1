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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ds_quant.comm.transport import Communicator
from ds_quant.kernels.wire import ceil_div

_WORD = 8  # bytes
# Words that are fingerprinted at once: temporary memory is four times as much. On the CPU they stay
# in its cache.
_RUN_WORDS_CPU = 1 << 16
_RUN_WORDS = 1 << 21
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
    """

    dtype: torch.dtype
    pieces: tuple[_Piece, ...]
    numels: tuple[int, ...]

    def fingerprints(self, shards: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return (pieces,) int64."""
        buffer = torch.zeros(sum(self.numels), dtype=self.dtype, device=device)
        targets = []
        sources = []
        for target, piece in zip(buffer.split(self.numels), self.pieces, strict=True):
            targets.append(target[: piece.stop - piece.start])
            sources.append(shards[piece.shard].detach().view(-1)[piece.start : piece.stop])
        torch._foreach_copy_(targets, sources)
        words = buffer.view(torch.int64)
        factors = torch.arange(1, 2 * words.numel(), 2, device=device).mul_(_ODD_FACTOR)
        mixed = words.mul_(factors)
        mixed ^= mixed >> 32
        if len(self.pieces) == 1:
            return mixed.sum().view(1)
        ends = torch.tensor(list(accumulate(self.numels)), device=device)
        ends = ends * self.dtype.itemsize // _WORD - 1
        totals = mixed.cumsum(0)[ends]
        return torch.diff(totals, prepend=totals.new_zeros(1))


class WrittenWeights:
    """Fingerprints of this rank's shards: see [Note: written weights].

    Args:
        dtypes: by shard, the dtype in which it is sent. A write that this dtype does not show
            counts as none.
        device: of the fingerprints, where collectives are posted.
    """

    def __init__(self, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        self._dtypes = tuple(dtypes)
        self._device = device
        self._numels: tuple[int, ...] = ()
        self._runs: list[_Run] = []
        self._shard_of_piece: list[int] = []
        self._taken: Tensor | None = None
        self._noted: Tensor | None = None  # by piece, True if a write was noted
        self._marked: set[int] = set()
        self._ignored: set[int] = set()

    def take(self, shards: Sequence[Tensor]) -> None:
        """Take the fingerprints of what was sent. Writes that were noted or marked stay so.

        shards: in the order of ``dtypes``.
        """
        self._taken = self._fingerprints(shards)
        self._ignored.clear()

    def note(self, shards: Sequence[Tensor]) -> None:
        """Note the writes since ``take`` until the next vote. Does not wait for the device.

        For the moment before an optimizer step, after which they cannot be told from the step.
        """
        if self._taken is not None:
            self._noted = self._differs(self._fingerprints(shards))

    def mark(self, shard: int) -> None:
        """Count a shard as written in the next vote, whatever it holds."""
        self._marked.add(shard)

    def ignore(self, shard: int) -> None:
        """Do not compare a shard until the next ``take``: its write is known."""
        self._ignored.add(shard)

    def forget(self) -> None:
        """Compare nothing until the next ``take``."""
        self._taken = None
        self._noted = None

    def written(self, shards: Sequence[Tensor], communicator: Communicator) -> list[int]:
        """Return the shards that any rank of ``communicator`` has written or marked.

        They count as sent afterwards. A collective of one byte, and of one byte per shard if there
        are any. The host waits for its answer.
        """
        if not self._dtypes:
            return []
        now = self._fingerprints(shards)
        differs = self._differs(now)
        is_equal = (~differs.any()).to(torch.uint8).view(1)
        if self._marked:
            is_equal.zero_()
        self._noted = None
        written: list[int] = []
        if not communicator.least(is_equal).item():
            by_piece = torch.tensor(self._shard_of_piece, dtype=torch.int64, device=self._device)
            equal = torch.ones(len(self._dtypes), dtype=torch.uint8, device=self._device)
            equal[by_piece[differs]] = 0
            if self._marked:
                equal[torch.tensor(sorted(self._marked), device=self._device)] = 0
            flags = communicator.least(equal).tolist()
            written = [shard for shard, flag in enumerate(flags) if not flag]
            self._taken = now
        self._marked.clear()
        return written

    def _differs(self, now: Tensor) -> Tensor:
        """Return True for each piece that is not what was taken, or was noted before."""
        if self._taken is None:
            differs = torch.zeros(len(now), dtype=torch.bool, device=self._device)
        elif now.shape == self._taken.shape:
            differs = now != self._taken
        else:  # a shard has another size
            differs = torch.ones(len(now), dtype=torch.bool, device=self._device)
        if self._ignored:
            ignored = [shard in self._ignored for shard in self._shard_of_piece]
            differs = differs & ~torch.tensor(ignored, device=self._device)
        if self._noted is not None and self._noted.shape == differs.shape:
            differs = differs | self._noted
        return differs

    def _fingerprints(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the fingerprints of all pieces, (pieces,) int64."""
        numels = tuple([shard.numel() for shard in shards])
        if numels != self._numels:
            self._plan(numels)
        parts = [run.fingerprints(shards, self._device) for run in self._runs]
        if not parts:
            return torch.zeros(0, dtype=torch.int64, device=self._device)
        return torch.cat(parts)

    def _plan(self, numels: tuple[int, ...]) -> None:
        """Cut shards into pieces, and collect pieces of equal dtype in runs of bounded size."""
        most_words = _RUN_WORDS_CPU if self._device.type == "cpu" else _RUN_WORDS
        self._numels = numels
        self._runs = []
        for dtype in dict.fromkeys(self._dtypes):
            most_numel = most_words * _WORD // dtype.itemsize
            pieces: list[_Piece] = []
            sizes: list[int] = []
            run_numel = 0
            for shard, numel in enumerate(numels):
                if self._dtypes[shard] != dtype:
                    continue
                for start in range(0, numel, most_numel):
                    stop = min(start + most_numel, numel)
                    size = ceil_div((stop - start) * dtype.itemsize, _WORD)
                    size = size * _WORD // dtype.itemsize
                    if pieces and run_numel + size > most_numel:
                        self._runs.append(_run(dtype, pieces, sizes))
                        pieces, sizes = [], []
                        run_numel = 0
                    run_numel += size
                    pieces.append(_Piece(shard=shard, start=start, stop=stop))
                    sizes.append(size)
            if pieces:
                self._runs.append(_run(dtype, pieces, sizes))
        self._shard_of_piece = [piece.shard for run in self._runs for piece in run.pieces]


def _run(dtype: torch.dtype, pieces: Sequence[_Piece], sizes: Sequence[int]) -> _Run:
    return _Run(dtype=dtype, pieces=tuple(pieces), numels=tuple(sizes))
