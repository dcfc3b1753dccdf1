"""Run tasks on the buffers of a step: CuPy kernels on CUDA, the C++ library on the CPU, else torch.

See [Note: operations] of batch.py.

C++ and CUDA take all tasks of a kind in one call. Tasks with a codec of the user, and others that
no kernel covers, run one by one in torch. So do all tasks on machines where CuPy or the library
does not work; that is reported once. Same bytes everywhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache, cached_property, partial
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ds_quant.kernels import cuda, launch_batch, lossless, native, reference
from ds_quant.kernels.batch import Buffers, Encode, Operation, Recode, RngArrays, Runnable, Task
from ds_quant.kernels.launch import MAX_GROUP
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.reference import Rotation
from ds_quant.kernels.torch_tasks import TorchTask
from ds_quant.kernels.wire import ALIGNMENT

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "torch")  # by the device of the tensors, or always the reference

_WORD = (1 << 64) - 1
_NO_ADDRESS = Address(key=0, step=0)
_VARIANTS = 64  # kept: dtypes and alignments of a run's buffers hardly ever change


def name_of_kernels(device: torch.device, backend: str = "auto") -> str:
    """Name the kernels that a backend uses on a device for the log: CuPy, C++ or torch kernels."""
    if device.type == "cuda" and backend == "auto":
        return "torch kernels" if cuda.runner_of(device) is None else "CuPy kernels"
    if device.type == "cpu" and backend == "auto" and native.unavailable_reason() is None:
        return "C++ kernels"
    return "torch kernels"


def why_no_native(device: torch.device, backend: str = "auto") -> str:
    """Return the reason why a CPU has torch kernels though ``backend`` allows C++ ones; else ""."""
    if device.type != "cpu" or backend != "auto":
        return ""
    reason = native.unavailable_reason()
    return "" if reason is None else f"C++ ones {reason}"


def describe(device: torch.device, backend: str = "auto") -> str:
    """Name the kernels, and give the reason of ``why_no_native`` in parentheses."""
    reason = why_no_native(device, backend)
    name = name_of_kernels(device, backend)
    return f"{name} ({reason})" if reason else name


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
    tasks: Sequence[Task], buffers: Buffers, backend: str
) -> tuple[list[Runnable], list[Task]]:
    """Return kernel calls (C++: one per task type, CUDA: one) and the tasks no kernel supports."""
    device = buffers[0].device
    runner = cuda_runner(device, backend)
    if runner is not None:
        covered, left = _split(tasks, buffers, launch_batch.covers)
        for operation, _ in left:
            _report_large_groups(operation)
        if not covered:
            return [], left
        return [launch_batch.compile_tasks(covered, buffers, runner.run_tables)], left
    if on_host(device, backend) is not native:
        return [], list(tasks)
    covered, left = _split(tasks, buffers, native.covers)
    kinds: dict[Hashable, list[Task]] = {}
    for task in covered:
        operation, _ = task
        kinds.setdefault((type(operation), *operation.reads()), []).append(task)
    return [native.compile_tasks(alike, buffers) for alike in kinds.values()], left


def _split(
    tasks: Sequence[Task], buffers: Buffers, covers: Callable[[Operation, Buffers], bool]
) -> tuple[list[Task], list[Task]]:
    """Split tasks into those that kernels cover and the others."""
    covered: list[Task] = []
    left: list[Task] = []
    for task in tasks:
        operation, _ = task
        is_covered = not _has_user_codec(operation) and covers(operation, buffers)
        (covered if is_covered else left).append(task)
    return covered, left


def _has_user_codec(operation: Operation) -> bool:
    """Return True if a codec of the operation is written in Python by the user."""
    return any(codec.kind == "module" for codec in operation.codecs().values())


def _report_large_groups(operation: Operation) -> None:
    """Warn once if groups of the operation's codec are too large for the kernels."""
    codec = operation.codec
    if codec.kind == "groups" and codec.group_size > MAX_GROUP:
        _warn_of_group_size(codec.group_size)


@cache
def _warn_of_group_size(group_size: int) -> None:
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


# ---- inputs of a step ----


class RngSource(Protocol):
    """The part of a BoundCodec that runs read."""

    @property
    def address(self) -> Address | None: ...

    @property
    def levels(self) -> Tensor | None: ...  # (2^bits,) fp32, learned

    @property
    def difference(self) -> bool: ...

    @property
    def error(self) -> Callable[..., Tensor]: ...  # of a message, for a Note

    def _replace(self, *, difference: bool) -> RngSource: ...


class RngState:
    """Random bits, levels and rotation of every stream in one step.

    A stream is a tensor of the step, by its index. Its rotation is None if it is not rotated.
    """

    def __init__(
        self, bound_codecs: Sequence[RngSource], rotations: Sequence[Rotation | None]
    ) -> None:
        self.bound_codecs = bound_codecs
        self.rotations = rotations

    def address(self, stream: int, vector: int) -> Address | None:
        """Address of the random bits of a piece that begins at ``vector`` of its stream."""
        address = self.bound_codecs[stream].address
        if address is None:
            return None
        return Address(address.key, address.step, address.first_vector + vector)

    @cached_property
    def arrays(self) -> RngArrays:
        """The streams as the kernels take them."""
        rows = []
        tables = []
        for bound_codec, rotation in zip(self.bound_codecs, self.rotations, strict=True):
            address = bound_codec.address or _NO_ADDRESS
            table = bound_codec.levels
            flips = 0
            signs = _NO_ADDRESS
            if rotation is not None and rotation.signs is not None:
                flips = rotation.flips or 0
                signs = rotation.signs
            row = (
                address.key,
                address.step,
                address.first_vector,
                0 if table is None else table.data_ptr(),
                flips & _WORD,
                flips >> 64,
                signs.key,
                signs.step,
            )
            rows.append(row)
            tables.append(table)
        columns = np.array(rows, dtype=np.uint64).reshape(-1, 8).T
        key, step, first_vector, levels, flips_low, flips_high, signs_key, signs_step = columns
        return RngArrays(
            key=key,
            step=step,
            first_vector=first_vector,
            levels=levels,
            flips_low=flips_low,
            flips_high=flips_high,
            signs_key=signs_key,
            signs_step=signs_step,
            tensors=tables,
        )


Note = Callable[..., None]  # called with every encoded message: ``comm.traffic.Tally.add``

# ---- a program ----


class Operations:
    """Tasks that are carried out in every step, on other buffers and RNG states.

    A run fills in the arguments of the kernels, which equal collectives of all engines share, and
    kernels run without Python's lock: runs in several threads take turns.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = tuple(tasks)
        # Kernel calls and tasks for torch, by back end and variant of the buffers.
        self._compiled: dict[Hashable, tuple[list[Runnable], list[Task]]] = {}
        self._turn = threading.Lock()

    def run(
        self,
        buffers: Buffers,
        rng_state: RngState,
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
                    run(addresses, rng_state.arrays)
            for operation, offsets in left:
                TorchTask(operation, offsets, buffers, rng_state).run()
        if note is not None:
            for task in self.tasks:
                _note(task, buffers, rng_state, note, backend)


def _note(task: Task, buffers: Buffers, rng_state: RngState, note: Note, backend: str) -> None:
    """Report the message of a task, if it writes one, with the values that were encoded."""
    operation, offsets = task
    if not isinstance(operation, Encode | Recode):  # writes no message
        return
    piece = TorchTask(operation, offsets, buffers, rng_state)
    bound_codec = rng_state.bound_codecs[operation.stream]
    reference_values = None
    values: Tensor | Callable[[], Tensor]
    if isinstance(operation, Recode):
        values = partial(piece.restored, operation)  # made only when it is read
    else:
        values = piece.elements(operation.values, offsets.values)
        if operation.base is not None:
            reference_values = piece.elements(operation.base, offsets.base)
        is_difference = operation.base is not None
        if bound_codec.difference != is_difference:
            bound_codec = bound_codec._replace(difference=is_difference)
    note(
        bound_codec.error,
        values,
        piece.message(operation),
        numel=operation.numel,
        rotation=piece.rotation,
        backend=backend,
        reference=reference_values,
    )


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
    device = wire.device
    rows = (wire, starts, lengths, reference, out, status)
    if (runner := cuda_runner(device, backend)) is not None:
        launch_batch.decode_lossless(*rows, run_tables=runner.run_tables)
    elif on_host(device, backend) is native:
        native.decode_lossless(*rows)
    else:
        lossless.decode_rows(*rows)
