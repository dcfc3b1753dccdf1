"""Operations of batch.py by the C++ kernels: one call for all of a kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ds_quant.kernels import native
from ds_quant.kernels.batch import (
    OWN_SIGNS,
    Arguments,
    Decode,
    Encode,
    Operation,
    Recode,
    Rotate,
    Rows,
    Runnable,
    StreamArrays,
    Sum,
    Task,
    rows_of,
)
from ds_quant.kernels.wire import Format

_FIELDS = np.dtype(native.Job)
_CPU, _FP32 = torch.device("cpu"), torch.float32
_KERNELS = {
    Encode: "dsq_encode",
    Decode: "dsq_decode",
    Sum: "dsq_decode_sum",
    Recode: "dsq_recode",
    Rotate: "dsq_rotate",
}
# Addresses in a job: the field, the operation's name of the buffer, and its place there.
_POINTERS = {
    Encode: (("values", "values", 0), ("wire", "wire", 1), ("base", "base", 3)),
    Decode: (("wire", "wire", 0), ("values", "values", 1)),
    Sum: (("wire", "wire_in", 0), ("values", "values", 1), ("own_values", "own", 2)),
    Rotate: (("values", "values", 0), ("wire", "rotated", 1)),
}
_SUMS = ("wire", "wire_in", 0), ("own_values", "own", 2)  # of the first job of a Recode
_ENCODES = (("wire", "wire", 1),)  # and of its second one

Buffers = Sequence[torch.Tensor]


def covers(operation: Operation, buffers: Buffers) -> bool:
    """Whether the kernels read and write the dtypes of its values."""
    places = [getattr(operation, name, None) for name in ("values", "base")]
    return all(buffers[place].dtype in native.DTYPES for place in places if place is not None)


def compile_tasks(tasks: Sequence[Task], buffers: Buffers) -> Runnable:
    """Compile tasks of one kind for buffers of the same dtypes."""
    kind = type(tasks[0][0])
    arguments = _recode(tasks, buffers) if kind is Recode else _alike(kind, tasks, buffers)
    function, where = native.function(_KERNELS[kind]), arguments.records.ctypes.data
    count = len(arguments.records) // (2 if kind is Recode else 1)
    numel = sum(operation.numel * getattr(operation, "sources", 1) for operation, _ in tasks)

    def run(addresses: np.ndarray, streams: StreamArrays) -> None:
        arguments.fill(addresses, streams)
        function(where, count, native.threads_for(numel))

    return run


def _alike(kind: type, tasks: Sequence[Task], buffers: Buffers) -> Arguments:
    """A job for every operation, or for rows of them."""
    rows = rows_of(tasks, 1) if kind in (Encode, Decode) else [Rows(*task) for task in tasks]
    jobs, streams = [_jobs[kind](row, buffers) for row in rows], [r.operation.stream for r in rows]
    arguments = Arguments(_FIELDS, b"".join(map(bytes, jobs)), streams)
    _point(arguments, rows, buffers, _POINTERS[kind])
    if kind is Encode:
        arguments.take_randomness([row.places[2] for row in rows])
    if kind is not Decode:
        arguments.take_flips()
    if kind is Sum:
        arguments.take_flips("key", "step", own=True)
    if kind is not Rotate:
        arguments.take_levels([row.operation.codec for row in rows], _CPU)
    return arguments


def _point(
    arguments: Arguments,
    rows: Sequence[Rows],
    buffers: Buffers,
    pointers: Sequence[tuple[str, str, int]],
    part: slice = slice(None),
) -> None:
    for field, name, place in pointers:
        if getattr(rows[0].operation, name) is not None:
            places = [(getattr(row.operation, name), row.places[place]) for row in rows]
            to = [(buffer, start * buffers[buffer].element_size()) for buffer, start in places]
            arguments.point(field, to, part)


def _encode(rows: Rows, buffers: Buffers) -> native.Job:
    operation, _, (count,), ((values, wire, vectors, *strides),) = rows
    dtype = buffers[operation.values].dtype
    job = native.job_of(operation.codec, count, operation.numel, dtype, operation.block)
    job.values_stride, job.wire_stride = values * dtype.itemsize, wire
    job.row_vectors = vectors
    if operation.base is not None:
        dtype = buffers[operation.base].dtype
        job.base_stride, job.base_dtype = strides[0] * dtype.itemsize, native.DTYPES[dtype]
    return job


def _decode(rows: Rows, buffers: Buffers) -> native.Job:
    operation, _, (count,), ((wire, values),) = rows
    dtype = buffers[operation.values].dtype
    job = native.job_of(operation.codec, count, operation.numel, dtype, 0)
    job.values_stride, job.wire_stride = values * dtype.itemsize, wire
    job.add = operation.add
    return job


def _sum(rows: Rows, buffers: Buffers) -> native.Job:
    op = rows.operation
    job = _source_job(op, op.codec, op.numel, op.block, buffers[op.values].dtype)
    job.factor = op.scale / op.block if op.block else op.scale
    job.own_signs = op.flips == OWN_SIGNS
    return job


def _rotate(rows: Rows, buffers: Buffers) -> native.Job:
    op = rows.operation
    dtype = native.DTYPES[buffers[op.values].dtype]
    job = native.Job(valid=op.numel, dtype=dtype, rotation=op.block)
    job.group = op.block or native.COPIED_NUMEL
    return job


def _recode(tasks: Sequence[Task], buffers: Buffers) -> Arguments:
    """Two jobs each: of a sum, and of encoding it."""
    jobs = []
    for op, _ in tasks:
        encoding = native.job_of(op.codec, 1, op.on_wire, _FP32, 0)
        pair = [_source_job(op, op.source, op.on_wire), encoding]
        for job, other in (pair, pair[::-1]):
            if job.cast >= 0:  # in runs of the other's groups
                job.group = other.group
        jobs += pair
    streams = [operation.stream for operation, _ in tasks for _ in range(2)]
    arguments = Arguments(_FIELDS, b"".join(map(bytes, jobs)), streams)
    sums, encodes = slice(0, None, 2), slice(1, None, 2)
    rows = [Rows(*task) for task in tasks]
    _point(arguments, rows, buffers, _SUMS, sums)
    _point(arguments, rows, buffers, _ENCODES, encodes)
    arguments.take_randomness([places[3] for _, places in tasks], encodes)
    arguments.take_levels([codec for op, _ in tasks for codec in (op.source, op.codec)], _CPU)
    return arguments


def _source_job(
    operation: Sum | Recode, codec: Format, numel: int, block: int = 0, dtype: torch.dtype = _FP32
) -> native.Job:
    rows = operation.sources + (operation.place is not None)
    job = native.job_of(codec, rows, numel, dtype, block)
    job.wire_stride = operation.stride
    job.own = -1 if operation.place is None else operation.place
    return job


_jobs = {Encode: _encode, Decode: _decode, Sum: _sum, Rotate: _rotate}
