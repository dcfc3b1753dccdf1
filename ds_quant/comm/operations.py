"""Run an operation on pieces of many tensors: [Note: operations] of kernels/batch.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_quant.codec.bound import Coding, Rotation
from ds_quant.codec.codec import CastCodec, GroupCodec
from ds_quant.comm.traffic import Notes
from ds_quant.kernels import batch, dispatch, scratch
from ds_quant.kernels.batch import (
    Decode,
    Encode,
    Operation,
    Places,
    Recode,
    Rotate,
    Rows,
    Runnable,
    Sum,
    Task,
)
from ds_quant.kernels.dispatch import launch_in_order

# ---- piece by piece ----


Buffers = Sequence[Tensor]


def view(
    buffer: Tensor,
    start: int,
    numel: int,
    shape: tuple[int, ...] = (),
    steps: tuple[int, ...] = (),
) -> Tensor:
    """View rows of ``numel`` items in the memory of a buffer."""
    return buffer.as_strided((*shape, numel), (*steps, 1), buffer.storage_offset() + start)


def is_cast(operation: Operation) -> bool:
    """Whether the operation only changes the dtype of numbers and adds them up."""
    codecs = [getattr(operation, name, None) for name in ("codec", "source")]
    plain = all(codec is None or isinstance(codec, CastCodec) for codec in codecs)
    others = (getattr(operation, name, None) for name in ("block", "add", "held"))
    return plain and not any(others)


def _row(buffer: Tensor, start: int, nbytes: int) -> Tensor:
    return view(buffer, start, nbytes, (1,), (nbytes,))


def _rotation(operation: Any, streams: Streams) -> Rotation | None:
    return streams.rotations[operation.stream] if operation.block else None


def encoded(
    op: Encode, places: Places, buffers: Buffers, streams: Streams
) -> tuple[Coding, Tensor, Tensor, dict[str, Any]]:
    """Return coding, values, their bytes (1, bytes) and what else ``Coding.encode`` takes."""
    coding = streams.coding(op.stream, places[2])._replace(difference=op.held is not None)
    wire = _row(buffers[op.wire], places[1], op.codec.wire_bytes(op.on_wire))
    how: dict[str, Any] = {"rotation": _rotation(op, streams)}
    if op.held is not None:
        how["held"] = view(buffers[op.held], places[3], op.numel)
    return coding, view(buffers[op.values], places[0], op.numel), wire, how


def recoded(
    op: Recode, places: Places, buffers: Buffers, streams: Streams
) -> tuple[Callable[[], Tensor], Tensor, Rotation | None]:
    """Return a function that makes the values, rotated back, then their bytes (1, bytes) and
    rotation.
    """
    rotation = _rotation(op, streams)
    wire = _row(buffers[op.wire], places[1], op.codec.wire_bytes(op.on_wire))
    sources, own = _sources(op, op.source, places[0], places[2], buffers)

    def restored() -> Tensor:
        total = torch.empty(op.numel, dtype=torch.float32, device=wire.device)
        with launch_in_order():
            streams.sources[op.stream].decode_sum(sources, total, own=own, rotation=rotation)
        return total

    return restored, wire, rotation


def _sources(
    op: Sum | Recode, codec: Any, start: int, own: int, buffers: Buffers
) -> tuple[Tensor, tuple[int, Tensor] | None]:
    nbytes = codec.wire_bytes(op.on_wire)
    wire = view(buffers[op.wire_in], start, nbytes, (op.sources,), (op.stride,))
    if op.place is None:
        return wire, None
    return wire, (op.place, view(buffers[op.own], own, op.on_wire))


def run_piece(op: Operation, places: Places, buffers: Buffers, streams: Streams) -> None:
    """Carry out one operation with its codec."""
    if isinstance(op, Encode):
        coding, values, wire, how = encoded(op, places, buffers, streams)
        coding.encode(values, wire[0], **how)
    elif isinstance(op, Decode):
        wire = view(buffers[op.wire], places[0], op.codec.wire_bytes(op.numel))
        coding = streams.codings[op.stream]._replace(difference=op.add)
        coding.decode(wire, view(buffers[op.values], places[1], op.numel))
    elif isinstance(op, Sum):
        wire, own = _sources(op, op.codec, places[0], places[2], buffers)
        out = view(buffers[op.values], places[1], op.numel)
        options = {"own": own, "scale": op.scale, "rotation": _rotation(op, streams)}
        streams.codings[op.stream].decode_sum(wire, out, **options)
    elif isinstance(op, Recode):
        wire, own = _sources(op, op.source, places[0], places[2], buffers)
        out = view(buffers[op.wire], places[1], op.codec.wire_bytes(op.on_wire))
        coding, source = streams.coding(op.stream, places[3]), streams.sources[op.stream]
        coding.recode(source, wire, out, numel=op.on_wire, own=own)
    else:
        out = view(buffers[op.rotated], places[1], op.padded)
        values = view(buffers[op.values], places[0], op.numel)
        streams.rotations[op.stream].forward(values, out=out)


# --- casts


class _View(NamedTuple):
    """Rows of a buffer, or of its bytes as numbers of ``dtype``."""

    buffer: int
    start: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    dtype: torch.dtype | None = None

    def of(self, buffers: Buffers) -> Tensor:
        memory = buffers[self.buffer]
        if self.dtype is not None:
            memory = memory.view(self.dtype)
        start = memory.storage_offset() + self.start
        return memory.as_strided(self.shape, self.steps, start)


class Cast:
    """An operation whose codecs are casts, without a rotation, on rows of one or two dimensions."""

    def __init__(self, rows: Rows) -> None:
        self._rows, op = rows, rows.operation
        self._from: _View | None = None
        self._own: _View | None = None
        if isinstance(op, Encode | Rotate):
            self._from = self._view(0, op.values)
        elif isinstance(op, Decode):
            self._from = self._view(0, op.wire, op.codec.dtype)
        else:
            dtype = op.codec.dtype if isinstance(op, Sum) else op.source.dtype
            self._sources = self._all_sources(self._view(0, op.wire_in, dtype), op.stride)
            if op.place is not None:
                self._own = self._view(2, op.own)
        self._padding: _View | None = None
        if isinstance(op, Encode | Recode):
            self._into = self._view(1, op.wire, op.codec.dtype)
            used, nbytes = op.numel * op.codec.dtype.itemsize, op.codec.wire_bytes(op.numel)
            if used < nbytes:
                whole = self._view(1, op.wire, torch.uint8)
                shape = (*whole.shape[:-1], nbytes - used)
                self._padding = whole._replace(start=whole.start + used, shape=shape)
        else:
            self._into = self._view(1, op.rotated if isinstance(op, Rotate) else op.values)

    def _view(self, number: int, buffer: int, dtype: torch.dtype | None = None) -> _View:
        """View the rows at place ``number``."""
        rows, size = self._rows, 1 if dtype is None else dtype.itemsize
        steps = (*(step[number] // size for step in rows.steps), 1)
        shape = (*rows.shape, rows.operation.numel)
        return _View(buffer, rows.places[number] // size, shape, steps, dtype)

    def _all_sources(self, view: _View, stride: int) -> _View:
        step = stride // view.dtype.itemsize
        shape = (self._rows.operation.sources, *view.shape)
        return view._replace(shape=shape, steps=(step, *view.steps))

    def run(self, buffers: Buffers) -> None:
        """Carry it out."""
        into, op = self._into.of(buffers), self._rows.operation
        if self._from is not None:
            into.copy_(self._from.of(buffers))
        else:
            total = into
            if into.dtype != torch.float32 or isinstance(op, Recode):
                shape, device = tuple(into.shape), into.device
                total = scratch.take("temporary", shape, dtype=torch.float32, device=device)
            self._add_up(total, buffers)
            if isinstance(op, Sum) and op.scale != 1.0:
                total.mul_(op.scale)
            if total is not into:
                into.copy_(total)
        if self._padding is not None:
            self._padding.of(buffers).zero_()

    def _add_up(self, total: Tensor, buffers: Buffers) -> None:
        """Add up the rows of all sources in order, the own ones in their place."""
        sources = list(self._sources.of(buffers).unbind(0))
        if self._own is not None:
            sources.insert(self._rows.operation.place, self._own.of(buffers))
        for index, values in enumerate(sources):
            total.copy_(values) if index == 0 else total.add_(values)


# ---- all pieces at once ----


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
        """Return the coding of a piece whose random bits begin at ``vector`` of its stream."""
        coding = self.codings[stream]
        if coding.address is None or vector == 0:
            return coding
        first = coding.address.first_vector + vector
        return coding._replace(address=coding.address._replace(first_vector=first))

    @cached_property
    def arrays(self) -> batch.StreamArrays:
        """The streams as the kernels take them."""
        addresses = [c.address or _NO_ADDRESS for c in self.codings]
        numbers = np.array([a[:3] for a in addresses], dtype=np.uint64).T
        levels = [c.levels for c in self.codings]
        pointers = [0 if table is None else table.data_ptr() for table in levels]
        flips = [0 if r is None or r.signs is None else r.kernel.flips for r in self.rotations]
        halves = [f & _WORD for f in flips], [f >> 64 for f in flips]
        more = np.array([pointers, *halves], dtype=np.uint64)
        return batch.StreamArrays(*numbers, *more, tensors=levels)


class Operations:
    """Tasks that are carried out in every step, on other buffers and streams.

    Those that the kernels cover take one call for each kind of operation, casts of equal sizes at
    equal distances one; codecs of the user's own and the torch reference go piece by piece.

    A run fills in the arguments of the kernels, which equal collectives of all engines share, and
    kernels run without Python's lock: runs in several threads take turns.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = tuple(tasks)
        self._compiled: dict[Hashable, _Compiled] = {}  # by variant of the buffers
        self._turn = threading.Lock()

    def run(self, buffers: Sequence[Tensor], streams: Streams, notes: Notes | None = None) -> None:
        """Carry out all tasks; none reads what another writes. ``notes``: told what is encoded."""
        if not self.tasks:
            return
        variant = dispatch.variant_of(buffers)
        with self._turn:
            if variant not in self._compiled:
                if len(self._compiled) >= _VARIANTS:
                    self._compiled.clear()
                self._compiled[variant] = _compile(self.tasks, buffers)
            kernels, casts, pieces = self._compiled[variant]
            for run in kernels:
                run(buffers, streams.arrays)
            for cast in casts:
                cast.run(buffers)
            if pieces:
                with dispatch.batch_launches():
                    for operation, places in pieces:
                        run_piece(operation, places, buffers, streams)
        if notes is not None and notes.are_read:
            for task in self.tasks:
                _note(task, buffers, streams, notes)


# Calls of kernels, casts of rows, and single pieces.
_Compiled = tuple[list[Runnable], list[Cast], list[Task]]


def _compile(tasks: Sequence[Task], buffers: Sequence[Tensor]) -> _Compiled:
    kinds: dict[Hashable, list[Task]] = {}
    kernels, casts, pieces = [], [], []
    for task in tasks:
        codecs = [getattr(task[0], name, None) for name in ("codec", "source")]
        if all(codec is None or isinstance(codec, GroupCodec) for codec in codecs):
            # Apart, because CUDA kernels take no casts and would refuse what comes with them.
            held = getattr(task[0], "held", None) is None
            kind = type(task[0]), is_cast(task[0]), held, task[0].backend
            kinds.setdefault(kind, []).append(task)
        else:
            (casts if is_cast(task[0]) else pieces).append(task)
    for alike in kinds.values():
        run = dispatch.compile_tasks(alike, buffers)
        if run is not None:
            kernels.append(run)
            continue
        for task in alike:
            (casts if is_cast(task[0]) else pieces).append(task)
    return kernels, [Cast(rows) for rows in batch.rows_of(casts, 2)], pieces


def _note(task: Task, buffers: Sequence[Tensor], streams: Streams, notes: Notes) -> None:
    operation, places = task
    numel = operation.numel  # of values that are made only when they are read
    if isinstance(operation, Encode):
        coding, values, wire, how = encoded(operation, places, buffers, streams)
        notes.note(coding, values, wire, numel=numel, **how)
    elif isinstance(operation, Recode):
        values, wire, rotation = recoded(operation, places, buffers, streams)
        coding = streams.codings[operation.stream]
        notes.note(coding, values, wire, numel=numel, rotation=rotation)
