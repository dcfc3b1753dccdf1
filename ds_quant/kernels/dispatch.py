"""Run tasks on the buffers of a step: CuPy kernels on CUDA, the C++ library on the CPU, else torch.

See [Note: operations] of batch.py.

C++ and CUDA take all tasks of a kind in one call. Codecs of the user's own, and what no kernel
covers, go one by one through the torch reference, which also serves machines where CuPy or the
library does not work; that is reported once. Same bytes everywhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache, cached_property
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ds_quant.kernels import cuda, launch_batch, lossless, native, reference
from ds_quant.kernels.batch import (
    OWN_SIGNS,
    Decode,
    Encode,
    Operation,
    Places,
    Recode,
    RngArrays,
    Rotate,
    Runnable,
    Sum,
    Task,
)
from ds_quant.kernels.launch import MAX_GROUP
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.reference import Rotation
from ds_quant.kernels.wire import ALIGNMENT

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "torch")  # by the device of the tensors, or always the reference
Buffers = Sequence[Tensor]

_WORD = (1 << 64) - 1
_NO_ADDRESS = (0, 0, 0)
_VARIANTS = 64  # kept: dtypes and alignments of a run's buffers hardly ever change


def describe(device: torch.device, backend: str = "auto") -> str:
    """Name the kernels that a backend uses on a device for the log: CuPy, C++ or torch kernels."""
    if device.type == "cuda" and backend == "auto":
        return "torch kernels" if cuda.runner_of(device) is None else "CuPy kernels"
    if device.type == "cpu" and backend == "auto":
        why = native.unavailable_reason()
        return "C++ kernels" if why is None else f"torch kernels (C++ ones {why})"
    return "torch kernels"


def on_host(device: torch.device, backend: str) -> ModuleType:
    """Return the module for tensors that no CuPy kernel takes."""
    if device.type != "cpu" or backend == "torch" or native.unavailable_reason() is not None:
        return reference
    return native


def variant_of(buffers: Sequence[torch.Tensor]) -> Hashable:
    """Key of ``compile_tasks`` besides the tasks."""
    device = buffers[0].device
    if device.type == "cpu":
        return device, tuple([b.dtype for b in buffers])
    return device, tuple([(b.dtype, b.data_ptr() % ALIGNMENT) for b in buffers])


def compile_tasks(
    tasks: Sequence[Task], buffers: Sequence[torch.Tensor], backend: str
) -> tuple[list[Runnable], list[Task]]:
    """Compile tasks for such buffers: one call of a kernel for all tasks of a kind that it covers,
    or of any kind on CUDA, and the tasks that are left.
    """
    device, kernels, how = buffers[0].device, None, ()
    runner = cuda_runner(device, backend)
    if runner is not None:
        kernels, how = launch_batch, (runner.run_tables,)
    elif on_host(device, backend) is native:
        kernels = native
    kinds: dict[Hashable, list[Task]] = {}
    left = []
    for task in tasks:
        operation = task[0]
        codecs = (getattr(operation, name, None) for name in ("codec", "source"))
        own = any(codec is not None and codec.kind == "module" for codec in codecs)
        if kernels is None or own or not kernels.covers(operation, buffers):
            size = getattr(getattr(operation, "codec", None), "group_size", 0)
            if runner is not None and size > MAX_GROUP:
                _report_large_groups(size)
            left.append(task)
        else:
            kind = type(operation), getattr(operation, "base", None) is None
            kinds.setdefault(kind if runner is None else "any", []).append(task)
    return [kernels.compile_tasks(alike, buffers, *how) for alike in kinds.values()], left


@cache
def _report_large_groups(group_size: int) -> None:
    logger.warning(
        "ds_quant: group_size = %d takes the slower torch path, CUDA kernels go up to %d",
        group_size,
        MAX_GROUP,
    )


def cuda_runner(device: torch.device, backend: str) -> cuda.Runner | None:
    """Return the launcher of CuPy kernels on a device; None where there is none."""
    if device.type != "cuda" or backend == "torch":
        return None
    return cuda.runner_of(device)


# ---- what a step brings ----


class RngSource(Protocol):
    """The part of a coding that the kernels read."""

    address: Address | None
    levels: Tensor | None  # (2^bits,) fp32, learned


class RngState:
    """Random bits and levels of every stream in one step, and rotations; None for none."""

    def __init__(
        self, bound_codecs: Sequence[RngSource], rotations: Sequence[Rotation | None]
    ) -> None:
        self.bound_codecs, self.rotations = bound_codecs, rotations

    def address(self, stream: int, vector: int) -> Address | None:
        """Where random bits of a piece begin that has ``vector`` in its stream."""
        address = self.bound_codecs[stream].address
        if address is None:
            return None
        return Address(address.key, address.step, address.first_vector + vector)

    @cached_property
    def arrays(self) -> RngArrays:
        """The streams as the kernels take them."""
        rows, levels = [], []
        for bound_codec, rotation in zip(self.bound_codecs, self.rotations, strict=True):
            address, table = bound_codec.address or _NO_ADDRESS, bound_codec.levels
            pointer, flips, signs = 0 if table is None else table.data_ptr(), 0, _NO_ADDRESS
            if rotation is not None and rotation.signs is not None:
                flips, signs = rotation.flips, rotation.signs
            rows.append((*address[:3], pointer, flips & _WORD, flips >> 64, *signs[:2]))
            levels.append(table)
        columns = np.array(rows, dtype=np.uint64).reshape(-1, 8).T
        return RngArrays(*columns, tensors=levels)


Note = Callable[..., None]  # told what is encoded: see ``comm.traffic.Tally.add``

# ---- a program ----


class Operations:
    """Tasks that are carried out in every step, on other buffers and streams.

    A run fills in the arguments of the kernels, which equal collectives of all engines share, and
    kernels run without Python's lock: runs in several threads take turns.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = tuple(tasks)
        # Calls of kernels and what is left, by back end and variant of the buffers.
        self._compiled: dict[Hashable, tuple[list[Runnable], list[Task]]] = {}
        self._turn = threading.Lock()

    def run(
        self,
        buffers: Buffers,
        streams: RngState,
        note: Note | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        """Carry out all tasks; none reads what another writes.

        backend: one of ``BACKENDS``.
        """
        if not self.tasks:
            return
        variant = backend, variant_of(buffers)
        with self._turn:
            if variant not in self._compiled:
                if len(self._compiled) >= _VARIANTS:
                    self._compiled.clear()
                self._compiled[variant] = compile_tasks(self.tasks, buffers, backend)
            kernels, left = self._compiled[variant]
            if kernels:
                addresses = np.array([b.data_ptr() for b in buffers], dtype=np.uint64)
                for run in kernels:
                    run(addresses, streams.arrays)
            for operation, places in left:
                _Piece(operation, places, buffers, streams).run()
        if note is not None:
            for task in self.tasks:
                _note(task, buffers, streams, note, backend)


def _note(task: Task, buffers: Buffers, streams: RngState, note: Note, backend: str) -> None:
    piece = _Piece(*task, buffers, streams)
    if isinstance(piece.op, Encode | Recode):
        bound_codec = streams.bound_codecs[piece.op.stream]
        how: dict[str, Any] = {"numel": piece.op.numel, "rotation": piece.rotation}
        how["backend"] = backend
        if isinstance(piece.op, Recode):
            values: Any = piece.restored  # made only when it is read
        else:
            values = piece.at("values", 0)
            if piece.op.base is not None:
                how["reference"] = piece.at("base", 3)
                bound_codec = bound_codec._replace(difference=True)
            elif getattr(bound_codec, "difference", False):
                bound_codec = bound_codec._replace(difference=False)
        note(bound_codec.error, values, piece.written, **how)


# ---- lossless differences ----


LosslessTask = launch_batch.LosslessTask


def encode_lossless(
    messages: Sequence[LosslessTask], nbytes: torch.Tensor, *, backend: str = "auto"
) -> None:
    """Write messages of lossless differences, in few launches: of each its values (numel,) in
    bf16 or fp16, the reference (numel,) of the same dtype, and (lossless.max_bytes(numel),) uint8
    for it, whose bytes past the message hold nothing of use. All contiguous, of one dtype.
    nbytes: (messages,) int64, receives the bytes used, multiples of 16.
    """
    device = nbytes.device
    if (runner := cuda_runner(device, backend)) is not None:
        launch_batch.encode_lossless(messages, nbytes, run_tables=runner.run_tables)
        return
    encode = native.encode_lossless if on_host(device, backend) is native else lossless.encode
    for place, message in enumerate(messages):
        encode(*message, nbytes[place : place + 1])


def decode_lossless(
    wire: torch.Tensor,  # (bytes,) uint8: the messages, each at a multiple of 16 bytes
    starts: np.ndarray,  # (rows,) int64, first byte of each
    lengths: np.ndarray,  # (rows,) int64, its bytes
    reference: torch.Tensor,  # (rows, numel) bf16 or fp16, each row contiguous
    out: torch.Tensor,  # (rows, numel) of the same dtype; may be the reference
    status: torch.Tensor,  # (rows, 2) int32, zeros
    *,
    backend: str = "auto",
) -> None:
    """Decode a message into every row of `out`, with host calls that do not grow with the rows.

    `status` tells of messages that cannot be or were made against another reference, see
    ``lossless.problem_of``; their rows then hold nothing of use. CuPy kernels do not
    wait for the device.
    """
    device, rows = wire.device, (wire, starts, lengths, reference, out, status)
    if (runner := cuda_runner(device, backend)) is not None:
        launch_batch.decode_lossless(*rows, run_tables=runner.run_tables)
    elif on_host(device, backend) is native:
        native.decode_lossless(*rows)
    else:
        lossless.decode_rows(*rows)


# ---- one task in torch ----


class _Piece(NamedTuple):
    """A task and what it works on."""

    op: Operation
    places: Places
    buffers: Buffers
    streams: RngState

    def run(self) -> None:
        """Carry it out by the torch reference or the user's module."""
        op, levels = self.op, self.streams.bound_codecs[self.op.stream].levels
        if op.numel == 0:
            return
        if isinstance(op, Encode):
            values = self.at("values", 0).detach()[None]
            base = None if op.base is None else self.at("base", 3).detach()[None]
            self._encode(values, self.places[2], base, self.rotation)
        elif isinstance(op, Decode):
            wire = _rows(self.buffers[op.wire], self.places[0], op.codec.wire_bytes(op.numel))
            out = self.at("values", 1).detach()
            _decode(op.codec, wire, out[None], levels, op.add)
        elif isinstance(op, Sum):
            self._add_up(op.codec, self.at("values", 1), op.scale, self.rotation)
        elif isinstance(op, Recode):
            total = self._empty(op.on_wire)
            self._add_up(op.source, total, 1.0, None)
            self._encode(total[None], self.places[3], None, None)
        elif isinstance(op, Rotate):
            rotated = _view(self.buffers[op.rotated], self.places[1], op.padded)
            values = self.at("values", 0).detach()
            if self.rotation is None:
                rotated.copy_(values)
            else:
                reference.rotate(values, rotated, self.rotation)

    @property
    def rotation(self) -> Rotation | None:
        return self.streams.rotations[self.op.stream] if self.op.block else None

    @property
    def written(self) -> Tensor:
        """The bytes that are encoded, (1, bytes)."""
        nbytes = self.op.codec.wire_bytes(self.op.on_wire)
        return _rows(self.buffers[self.op.wire], self.places[1], nbytes)

    def at(self, name: str, place: int) -> Tensor:
        """The operation's elements in the buffer that it has as ``name``."""
        return _view(self.buffers[getattr(self.op, name)], self.places[place], self.op.numel)

    def restored(self) -> Tensor:
        """What is recoded, rotated back."""
        total = self._empty(self.op.numel)
        self._add_up(self.op.source, total, 1.0, self.rotation)
        return total

    def _empty(self, numel: int) -> Tensor:
        """Of fp32; zero.Init would give torch.empty the dtype of the parameters."""
        device = self.buffers[self.op.wire_in].device
        return torch.empty(4 * numel, dtype=torch.uint8, device=device).view(torch.float32)

    def _encode(
        self, x: Tensor, vector: int, base: Tensor | None, rotation: Rotation | None
    ) -> None:
        codec, wire = self.op.codec, self.written
        address = self.streams.address(self.op.stream, vector)
        if codec.kind == "groups":
            table = codec.table(self.streams.bound_codecs[self.op.stream].levels, x.device)
            how = {"address": address, "levels": table, "base": base, "rotation": rotation}
            reference.encode(x, wire, codec, **how)
            return
        x = x if base is None else x.float() - base.float()
        if rotation is not None:
            turned = x.new_empty(self.op.on_wire, dtype=torch.float32)
            reference.rotate(x[0], turned, rotation)
            x = turned[None]
        if codec.kind == "module":
            codec.write(x, wire, address)
            return
        nbytes = x.shape[1] * codec.dtype.itemsize
        wire[:, nbytes:].zero_()
        wire[:, :nbytes].copy_(x.to(codec.dtype).contiguous().view(torch.uint8))

    def _add_up(self, codec: Any, out: Tensor, scale: float, rotation: Rotation | None) -> None:
        op, levels = self.op, self.streams.bound_codecs[self.op.stream].levels
        wire = _rows(
            self.buffers[op.wire_in], self.places[0], codec.wire_bytes(op.on_wire), op.sources,
            op.stride,
        )  # fmt: skip
        own = None
        if op.place is not None:
            own = op.place, _view(self.buffers[op.own], self.places[2], op.on_wire)
        out = out.detach()
        if codec.kind == "groups":
            how = {"own": own, "levels": codec.table(levels, wire.device), "rotation": rotation}
            how["own_signs"] = getattr(op, "flips", 0) == OWN_SIGNS
            reference.decode_sum(wire, out, codec, scale=scale, **how)
            return
        rows = [_decoded(codec, row[None], op.on_wire)[0] for row in wire]
        if own is not None:
            rows.insert(*own)
        total = rows[0].float().clone()
        for row in rows[1:]:
            total += row
        if rotation is not None:
            reference.unrotate_(total, rotation, scale=scale)
        elif scale != 1.0:
            total *= scale
        out.copy_(total[: len(out)])


def _decode(codec: Any, wire: Tensor, out: Tensor, levels: Tensor | None, add: bool) -> None:
    if codec.kind == "groups":
        reference.decode(wire, out, codec, levels=codec.table(levels, wire.device), add=add)
        return
    values = _decoded(codec, wire, out.shape[1])
    out.copy_(values + out if add else values)


def _decoded(codec: Any, wire: Tensor, numel: int) -> Tensor:
    """Rows (rows, numel) of numbers that are no codes of groups."""
    if codec.kind == "module":
        return codec.read(wire, numel)
    used = wire[:, : numel * codec.dtype.itemsize]
    return used.clone(memory_format=torch.contiguous_format).view(codec.dtype)


def _view(buffer: Tensor, start: int, numel: int) -> Tensor:
    return buffer.as_strided((numel,), (1,), buffer.storage_offset() + start)


def _rows(buffer: Tensor, start: int, nbytes: int, rows: int = 1, stride: int = 0) -> Tensor:
    step = stride if rows > 1 else nbytes  # 0 if all are the same row
    return buffer.as_strided((rows, nbytes), (step, 1), buffer.storage_offset() + start)
