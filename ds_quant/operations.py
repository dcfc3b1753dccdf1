"""Operations on pieces of many tensors of a collective: see [Note: operations] of kernels/batch.py.

May import: numpy, torch, codec, coding, kernels, meter, pieces, rotation.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ds_quant.codec import GroupCodec
from ds_quant.coding import Coding
from ds_quant.kernels import batch, dispatch
from ds_quant.kernels.batch import Encode, Recode, Runnable, Task
from ds_quant.meter import Notes
from ds_quant.pieces import Cast, encoded, is_cast, recoded, run_piece
from ds_quant.rotation import Rotation

_WORD = (1 << 64) - 1
_NO_ADDRESS = (0, 0, 0)
_VARIANTS = 64  # kept: dtypes and alignments of a run's buffers hardly ever change


class Streams:
    """Coding and rotation of every stream in one step; ``sources``: codings of what is recoded."""

    def __init__(
        self,
        codings: Sequence[Coding],
        rotations: Sequence[Rotation | None],
        sources: Sequence[Coding] = (),
    ) -> None:
        self.codings, self.rotations, self.sources = codings, rotations, sources

    def coding(self, stream: int, vector: int) -> Coding:
        """Of a piece whose random bits begin ``vector`` vectors after its stream."""
        coding = self.codings[stream]
        if coding.address is None or vector == 0:
            return coding
        first = coding.address.first_vector + vector
        return coding._replace(address=coding.address._replace(first_vector=first))

    @cached_property
    def numbers(self) -> batch.Streams:
        """As the kernels take them."""
        addresses = [c.address or _NO_ADDRESS for c in self.codings]
        numbers = np.array([a[:3] for a in addresses], dtype=np.uint64).T
        levels = [c.levels for c in self.codings]
        pointers = [0 if table is None else table.data_ptr() for table in levels]
        flips = [0 if r is None or r.signs is None else r.kernel.flips for r in self.rotations]
        halves = [f & _WORD for f in flips], [f >> 64 for f in flips]
        more = np.array([pointers, *halves], dtype=np.uint64)
        return batch.Streams(*numbers, *more, tensors=levels)


class Operations:
    """Tasks that are carried out in every step, on other buffers and streams.

    Those that the kernels cover take one call for each kind of operation, casts of equal sizes at
    equal distances one; codecs of the user's own and the torch reference go piece by piece.

    A run fills in the arguments of the kernels, which equal collectives of all engines share, and
    kernels run without Python's lock: runs in several threads take turns.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = tuple(tasks)
        self._compiled: dict[Hashable, _Compiled] = {}
        self._turn = threading.Lock()

    def run(self, buffers: Sequence[Tensor], streams: Streams, notes: Notes | None = None) -> None:
        """Carry them out. None reads what another writes. ``notes``: of what is encoded."""
        if not self.tasks:
            return
        variant = dispatch.variant_of(buffers)
        with self._turn:
            if variant not in self._compiled:
                if len(self._compiled) >= _VARIANTS:
                    self._compiled.clear()
                self._compiled[variant] = _compile(self.tasks, buffers)
            self._compiled[variant].run(buffers, streams)
        if notes is not None and notes.are_read:
            for task in self.tasks:
                _note(task, buffers, streams, notes)


class _Compiled(NamedTuple):
    """What the kernels do, casts in rows, and the pieces that are left."""

    runnables: list[Runnable]
    casts: list[Cast]
    pieces: list[Task]

    def run(self, buffers: Sequence[Tensor], streams: Streams) -> None:
        for run in self.runnables:
            run(buffers, streams.numbers)
        for cast in self.casts:
            cast.run(buffers)
        if self.pieces:
            with dispatch.together():
                for operation, places in self.pieces:
                    run_piece(operation, places, buffers, streams)


def _compile(tasks: Sequence[Task], buffers: Sequence[Tensor]) -> _Compiled:
    kinds: dict[tuple[type, bool], list[Task]] = {}
    runnables, casts, pieces = [], [], []
    for task in tasks:
        codecs = [getattr(task[0], name, None) for name in ("codec", "source")]
        if all(codec is None or isinstance(codec, GroupCodec) for codec in codecs):
            # Apart, because CUDA kernels take no casts and would refuse what comes with them.
            kinds.setdefault((type(task[0]), is_cast(task[0])), []).append(task)
        else:
            (casts if is_cast(task[0]) else pieces).append(task)
    for alike in kinds.values():
        run = dispatch.compile_tasks(alike, buffers)
        if run is not None:
            runnables.append(run)
            continue
        for task in alike:
            (casts if is_cast(task[0]) else pieces).append(task)
    return _Compiled(runnables, [Cast(rows) for rows in batch.rows_of(casts, 2)], pieces)


def _note(task: Task, buffers: Sequence[Tensor], streams: Streams, notes: Notes) -> None:
    operation, places = task
    if isinstance(operation, Encode):
        values, wire, rotation = encoded(operation, places, buffers, streams)
    elif isinstance(operation, Recode):
        values, wire, rotation = recoded(operation, places, buffers, streams)
    else:
        return
    coding = streams.codings[operation.stream]
    numel = operation.numel  # of values that are made only when they are read
    notes.note(coding, values, wire, numel=numel, rotation=rotation)
