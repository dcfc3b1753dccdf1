"""Operations of batch.py by the CUDA kernels: one launch for all of a kind that share their macros.

The arguments of a launch are a table of jobs; a run fills in its part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from ds_quant.kernels import launch
from ds_quant.kernels.batch import (
    FLIPS,
    MESSAGES,
    NUMBERS,
    RANDOM_BITS,
    Arguments,
    Buffers,
    Decode,
    Encode,
    Job,
    Numbers,
    Operation,
    Recode,
    RngArrays,
    Rotate,
    Rows,
    Runnable,
    Struct,
    Sum,
    Task,
    has_dtypes_of_kernels,
    is_single,
    job_of,
    operands_of,
    pointer,
    rows_of,
    source_of,
    target_of,
)
from ds_quant.kernels.launch import NO_SOURCE, Table
from ds_quant.kernels.lossless import HEADER, PROBLEMS, blocks_of
from ds_quant.kernels.wire import (
    ALIGNMENT,
    Codec,
    GroupFormat,
    as_cast,
    as_groups,
    without_user_codec,
)

RunTables = Callable[[Sequence[Table]], None]


# ---- operations that kernels carry out ----


_IN_VECTORS = (*MESSAGES, "rotated")  # operands that kernels access in whole vectors


def covers(operation: Operation, buffers: Buffers) -> bool:
    """Return True if kernels take its codecs and dtypes, and its messages are aligned."""
    if not _takes_codecs(operation) or not has_dtypes_of_kernels(operation, buffers):
        return False
    operands = operands_of(operation)
    in_vectors = [buffers[operands[name]] for name in _IN_VECTORS if name in operands]
    return all(buffer.data_ptr() % ALIGNMENT == 0 for buffer in in_vectors)


def _takes_codecs(operation: Operation) -> bool:
    """Return True if there is a kernel for the codecs. Casts are neither rotated nor added."""
    numbers = operation.numbers()
    codecs = [without_user_codec(codec) for codec in operation.codecs().values()]
    formats = [codec for codec in codecs if codec.kind == "groups"]
    if len(formats) == len(codecs):
        return all(launch.supports(fmt, numbers.block) for fmt in formats)
    is_plain = not numbers.block and not numbers.add and "base" not in operation.reads()
    return not formats and is_plain


def _is_cast(operation: Operation) -> bool:
    """Return True for numbers that are cast, or added up in fp32: nothing is encoded."""
    messages = [codec for name, codec in operation.codecs().items() if name in MESSAGES]
    return not operation.numbers().block and all(codec.kind == "cast" for codec in messages)


def _fused_codec(operation: Operation) -> GroupFormat | None:
    """Return the codec of the Recode tasks that a sum is launched with; None for others."""
    codec = operation.fuse_with if isinstance(operation, Sum) else None
    if codec is None or codec.kind != "groups" or not launch.supports(codec):
        return None
    return codec


def _is_aligned(rows: Rows, buffers: Buffers) -> bool:
    """Return True if all rows of numbers begin at multiples of 16 bytes."""
    for name, buffer in operands_of(rows.operation).items():
        if name not in NUMBERS:
            continue
        _, first = pointer(buffers, buffer, getattr(rows.first, name))
        _, stride = pointer(buffers, buffer, getattr(rows.step, name))
        if (buffers[buffer].data_ptr() + first) % ALIGNMENT or stride % ALIGNMENT:
            return False
    return True


# ---- tables of jobs ----


class _Work(NamedTuple):
    """Rows of an operation as one job."""

    plan: launch.Plan
    rows: int
    job: Job


def compile_tasks(tasks: Sequence[Task], buffers: Buffers, run_tables: RunTables) -> Runnable:
    """Compile tasks for buffers of the same dtypes and alignment."""
    alike: dict[Hashable, list[_Work]] = {}
    for rows in rows_of(sorted(tasks, key=is_single)):
        work = _work_of(rows, buffers)
        macros = tuple(macro for macro in work.plan.macros if macro[0] != "DSQ_WHOLE")
        alike.setdefault((work.plan.kernel, macros), []).append(work)
    tables, filled = [], []
    for works in alike.values():
        fields = launch.fields_of(works[0].plan.kernel)
        arguments = Arguments(fields, [work.job for work in works], buffers[0].device)
        filled.append(arguments)
        plans = [work.plan for work in works]
        tables.append(launch.table_of(plans, [work.rows for work in works], arguments.records))

    def run(addresses: np.ndarray, streams: RngArrays) -> None:
        for arguments in filled:
            arguments.fill(addresses, streams)
        run_tables(tables)

    return run


def _work_of(rows: Rows, buffers: Buffers) -> _Work:
    """Plan the kernel of rows of an operation, and its arguments."""
    operation = rows.operation
    if _is_cast(operation):
        return _cast(rows, buffers)
    codecs = operation.codecs()
    kernel = _KERNELS[type(operation)]
    is_aligned = _is_aligned(rows, buffers)
    fused_codec = _fused_codec(operation)
    if fused_codec is not None and is_aligned:
        codecs["values"] = fused_codec
        kernel = _RECODE
    plan = kernel.plan_of(operation, buffers, codecs, is_aligned)
    fields = dict(plan.fields)
    if kernel is not _ENCODE:
        fields |= _source_fields(operation.numbers())
    if kernel is not _DECODE_SUM and target_of(operation) not in MESSAGES:
        fields["wire.end"] = 0  # the values stay fp32
    job = job_of(rows, buffers, kernel.struct, fields, codecs)
    return _Work(plan, rows.num_rows, job)


def _source_fields(numbers: Numbers) -> dict[str, int]:
    """Return the fields of the rows of a sum."""
    return {
        "source_stride": numbers.stride,
        "own": NO_SOURCE if numbers.own_row is None else numbers.own_row,
    }


def _rotation(numbers: Numbers) -> tuple[int, int]:
    """Return block and sign flips as plans have them."""
    return (numbers.block, numbers.flips) if numbers.block else launch.NO_ROTATION


# ---- kernels ----


Codecs = Mapping[str, Codec]  # by operand


class _Kernel(NamedTuple):
    """How operations take a kernel.

    plan_of: makes the plan of an operation; the last argument: all rows of numbers are aligned.
    """

    plan_of: Callable[[Operation, Buffers, Codecs, bool], launch.Plan]
    struct: Struct


def _encode_plan(
    operation: Operation, buffers: Buffers, codecs: Codecs, is_aligned: bool
) -> launch.Plan:
    """Plan an encode. A rotation alone takes the same kernel, which stops before quantizing."""
    numbers = operation.numbers()
    dtypes = {name: buffers[buffer].dtype for name, buffer in operation.reads().items()}
    return launch.encode_plan(
        as_groups(codecs[target_of(operation)]),
        numbers.numel,
        dtypes["values"],
        dtypes.get("base"),
        _rotation(numbers),
        is_aligned,
    )


def _sum_plan(
    operation: Operation, buffers: Buffers, codecs: Codecs, is_aligned: bool
) -> launch.Plan:
    """Plan a sum, or the decoding of one message."""
    numbers = operation.numbers()
    return launch.sum_plan(
        as_groups(codecs[source_of(operation)]),
        numbers.numel,
        numbers.rows_added,
        buffers[operation.writes()["values"]].dtype,
        numbers.scale,
        numbers.own_row is not None,
        _rotation(numbers),
        numbers.add,
        is_aligned,
    )


def _recode_plan(
    operation: Operation, buffers: Buffers, codecs: Codecs, is_aligned: bool
) -> launch.Plan:
    """Plan a recode. A sum alone takes the same kernel, which stops before quantizing."""
    numbers = operation.numbers()
    return launch.recode_plan(
        as_groups(codecs["wire_in"]),
        as_groups(codecs[target_of(operation)]),
        numbers.numel,
        numbers.rows_added,
        numbers.own_row is not None,
    )


_RANDOM_FIELDS = {name: name for name in RANDOM_BITS}
_ENCODE = _Kernel(
    _encode_plan,
    Struct(
        addresses={
            "values": "values",
            "base": "base",
            "wire": "wire.bytes",
            "rotated": "wire.bytes",
        },
        strides={
            "values": "values_stride",
            "base": "base_stride",
            "wire": "wire.stride",
            "vector": "row_vectors",
        },
        levels={"wire": "levels", "rotated": "levels"},
        rng=_RANDOM_FIELDS | {name: name for name in FLIPS},
    ),
)
_DECODE_SUM = _Kernel(
    _sum_plan,
    Struct(
        addresses={
            "wire": "wire.bytes",
            "wire_in": "wire.bytes",
            "own": "own_values",
            "values": "values",
        },
        strides={"wire": "wire.stride", "values": "values_stride"},
        levels={"wire": "levels", "wire_in": "levels"},
        # Kernels whose sources have sign flips of their own draw them.
        rng={name: name for name in FLIPS} | {"signs_key": "flips_low", "signs_step": "flips_high"},
    ),
)
_RECODE = _Kernel(
    _recode_plan,
    Struct(
        addresses={
            "wire_in": "source.bytes",
            "own": "own_values",
            "wire": "wire.bytes",
            "values": "wire.bytes",
        },
        strides={},
        levels={"wire_in": "source_levels", "wire": "levels", "values": "levels"},
        rng=_RANDOM_FIELDS,
    ),
)
_KERNELS: dict[type[Operation], _Kernel] = {
    Encode: _ENCODE,
    Rotate: _ENCODE,
    Decode: _DECODE_SUM,
    Sum: _DECODE_SUM,
    Recode: _RECODE,
}


def _cast(rows: Rows, buffers: Buffers) -> _Work:
    """Plan a cast of numbers, or of a sum of rows, by the one kernel of all dtypes."""
    operation = rows.operation
    numbers = operation.numbers()
    source, target = source_of(operation), target_of(operation)
    dtype = _dtype_of(operation, target, buffers)
    padded = numbers.numel
    if target in MESSAGES:
        padded = operation.codecs()[target].wire_bytes(numbers.numel) // dtype.itemsize
    plan = launch.cast_plan(
        _dtype_of(operation, source, buffers),
        dtype,
        numbers.numel,
        padded,
        sources=numbers.rows_added,
        has_own=numbers.own_row is not None,
        scale=numbers.scale,
    )
    struct = Struct(
        addresses={source: "source", target: "values", "own": "own_values"},
        strides={source: "source_row", target: "values_stride"},
        levels={},
        rng={},
    )
    fields = {**plan.fields, **_source_fields(numbers)}
    job = job_of(rows, buffers, struct, fields, {})
    job.pointers.setdefault("own_values", job.pointers["source"])  # not read
    return _Work(plan, rows.num_rows, job)


def _dtype_of(operation: Operation, name: str, buffers: Buffers) -> torch.dtype:
    """Return the dtype of the numbers of an operand: of the codec for a message."""
    if name in MESSAGES:
        return as_cast(operation.codecs()[name]).dtype
    return buffers[operands_of(operation)[name]].dtype


# ---- lossless differences: signatures and bytes of lossless.py ----


# Messages are three launches that read what the one before wrote; decoded ones are checked before
# anybody uses them.
PLAN, SCAN, WRITE, READ = range(4)  # DSQ_PHASE
LENGTH = PROBLEMS.index("length") + 1
LosslessTask = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # see ``dispatch.encode_lossless``
_LOSSLESS = launch.fields_of("lossless")


def encode_lossless(
    messages: Sequence[LosslessTask], nbytes: torch.Tensor, *, run_tables: RunTables
) -> None:
    """Write messages of values of one dtype; nbytes, (messages,) int64, receives the bytes of each.
    Three launches for all of them.
    """
    nbytes.zero_()  # a checksum is added up there first
    jobs = np.zeros(len(messages), dtype=_LOSSLESS)
    numels = [len(values) for values, _, _ in messages]
    for column, name in enumerate(("values", "reference", "wire")):
        jobs[name] = [message[column].data_ptr() for message in messages]
    jobs["nbytes"] = nbytes.data_ptr() + 8 * np.arange(len(messages), dtype=np.uint64)
    jobs["numel"] = numels
    dtype = messages[0][0].dtype
    jobs = jobs[jobs["numel"] > 0]
    for phase in (PLAN, SCAN, WRITE) if len(jobs) else ():
        plans = [lossless_plan(phase, numel, dtype) for numel in filter(None, numels)]
        run_tables([launch.table_of(plans, [1] * len(jobs), jobs)])


def decode_lossless(
    wire: torch.Tensor,  # (bytes,) uint8: the messages, each at a multiple of 16 bytes
    starts: np.ndarray,  # (rows,) int64, first byte of each
    lengths: np.ndarray,  # (rows,) int64, its bytes
    reference: torch.Tensor,  # (rows, numel) bf16 or fp16
    out: torch.Tensor,  # (rows, numel) of the same dtype; may be the reference
    status: torch.Tensor,  # (rows, 2) int32, zeros
    *,
    run_tables: RunTables,
) -> None:
    """Decode a message into every row of `out`, in one launch; `status` tells which cannot be."""
    rows, numel = out.shape
    sound = (lengths % ALIGNMENT == 0) & (lengths >= HEADER if numel else lengths == 0)
    if not sound.all():
        status[torch.from_numpy(~sound).to(status.device), 0] = LENGTH
    jobs = np.zeros(rows, dtype=_LOSSLESS)
    for name, tensor in (("values", out), ("reference", reference), ("status", status)):
        nbytes = np.uint64(tensor.stride(0) * tensor.element_size())
        jobs[name] = tensor.data_ptr() + np.arange(rows, dtype=np.uint64) * nbytes
    jobs["wire"] = wire.data_ptr() + starts.astype(np.uint64)
    jobs["nbytes"], jobs["numel"] = lengths, numel
    if numel and sound.any():
        jobs, plan = jobs[sound], lossless_plan(READ, numel, out.dtype)
        run_tables([launch.table_of([plan] * len(jobs), [1] * len(jobs), jobs)])


@lru_cache(maxsize=4096)
def lossless_plan(phase: int, numel: int, dtype: torch.dtype) -> launch.Plan:
    """What all launches of a phase on so many elements have in common."""
    macros = ("DSQ_PHASE", phase), ("DSQ_VALUES", launch.DTYPES[dtype])
    blocks = 1 if phase == SCAN else blocks_of(numel)
    return launch.Plan("lossless", macros, blocks, launch.THREADS, {"numel": numel})
