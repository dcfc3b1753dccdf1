"""Operations of batch.py by the C++ kernels: one call for all of a kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ds_quant.kernels import native
from ds_quant.kernels.batch import (
    Arguments,
    Decode,
    Encode,
    Operation,
    Places,
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
_FP32_BYTES = 4
_CPU, _FP32 = torch.device("cpu"), torch.float32
_KERNELS = {
    Encode: "dsq_encode",
    Decode: "dsq_decode",
    Sum: "dsq_decode_sum",
    Recode: "dsq_recode",
    Rotate: "dsq_rotate",
}


def covers(operation: Operation, buffers: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels read and write the dtypes of its values."""
    places = [getattr(operation, name, None) for name in ("values", "held")]
    return all(buffers[place].dtype in native.DTYPES for place in places if place is not None)


def compile_tasks(tasks: Sequence[Task], buffers: Sequence[torch.Tensor]) -> Runnable:
    """Compile tasks of one kind for buffers of the same dtypes."""
    return _compilers[type(tasks[0][0])](tasks, buffers)


def _runnable(arguments: Arguments, kernel: type, count: int, numel: int) -> Runnable:
    function, where = native.function(_KERNELS[kernel]), arguments.records.ctypes.data

    def run(addresses: np.ndarray, streams: StreamArrays) -> None:
        arguments.fill(addresses, streams)
        function(where, count, native.threads_for(numel))

    return run


def _arguments(jobs: Sequence[native.Job], streams: Sequence[int]) -> Arguments:
    return Arguments(_FIELDS, b"".join(map(bytes, jobs)), streams)


def _encode(tasks: Sequence[Task], buffers: Sequence[torch.Tensor]) -> Runnable:
    rows, jobs = rows_of(tasks, 1), []
    for operation, _, (count,), ((values, wire, vectors, *held),) in rows:
        dtype = buffers[operation.values].dtype
        job = native.job_of(operation.codec, count, operation.numel, dtype, operation.block)
        job.values_stride, job.wire_stride = values * dtype.itemsize, wire
        job.row_vectors = vectors
        if operation.held is not None:
            dtype = buffers[operation.held].dtype
            job.base_stride, job.base_dtype = held[0] * dtype.itemsize, native.DTYPES[dtype]
        jobs.append(job)
    arguments = _arguments(jobs, [row.operation.stream for row in rows])
    _point(arguments, rows, buffers, "values", place=0)
    if rows[0].operation.held is not None:
        _point(arguments, rows, buffers, "held", place=3, field="base")
    arguments.point("wire", [(row.operation.wire, row.places[1]) for row in rows])
    arguments.take_randomness([row.places[2] for row in rows])
    arguments.take_flips()
    arguments.take_levels([row.operation.codec for row in rows], _CPU)
    return _runnable(arguments, Encode, len(jobs), _numel(tasks))


def _decode(tasks: Sequence[Task], buffers: Sequence[torch.Tensor]) -> Runnable:
    rows, jobs = rows_of(tasks, 1), []
    for operation, _, (count,), ((wire, values),) in rows:
        dtype = buffers[operation.values].dtype
        job = native.job_of(operation.codec, count, operation.numel, dtype, 0)
        job.values_stride, job.wire_stride = values * dtype.itemsize, wire
        job.add = operation.add
        jobs.append(job)
    arguments = _arguments(jobs, [row.operation.stream for row in rows])
    arguments.point("wire", [(row.operation.wire, row.places[0]) for row in rows])
    _point(arguments, rows, buffers, "values", place=1)
    arguments.take_levels([row.operation.codec for row in rows], _CPU)
    return _runnable(arguments, Decode, len(jobs), _numel(tasks))


def _sum(tasks: Sequence[Task], buffers: Sequence[torch.Tensor]) -> Runnable:
    jobs = []
    for operation, _ in tasks:
        dtype = buffers[operation.values].dtype
        job = _source_job(operation, operation.codec, operation.numel, operation.block, dtype)
        job.factor = operation.scale / operation.block if operation.block else operation.scale
        jobs.append(job)
    arguments = _arguments(jobs, [operation.stream for operation, _ in tasks])
    arguments.point("wire", [(op.wire_in, places[0]) for op, places in tasks])
    _point(arguments, [Rows(*task) for task in tasks], buffers, "values", place=1)
    arguments.point("own_values", [(op.own, places[2] * _FP32_BYTES) for op, places in tasks])
    arguments.take_flips()
    arguments.take_levels([operation.codec for operation, _ in tasks], _CPU)
    return _runnable(arguments, Sum, len(jobs), _numel(tasks))


def _recode(tasks: Sequence[Task], buffers: Sequence[torch.Tensor]) -> Runnable:
    jobs = []
    for operation, _ in tasks:
        source, codec, numel = operation.source, operation.codec, operation.on_wire
        pair = [_source_job(operation, source, numel), native.job_of(codec, 1, numel, _FP32, 0)]
        for job, other in (pair, pair[::-1]):
            if job.cast >= 0:  # in runs of the other's groups
                job.group = other.group
        jobs += pair
    arguments = _arguments(jobs, [operation.stream for operation, _ in tasks for _ in range(2)])
    sums, encodes = slice(0, None, 2), slice(1, None, 2)
    arguments.point("wire", [(op.wire_in, places[0]) for op, places in tasks], sums)
    own = [(op.own, places[2] * _FP32_BYTES) for op, places in tasks]
    arguments.point("own_values", own, sums)
    arguments.point("wire", [(op.wire, places[1]) for op, places in tasks], encodes)
    arguments.take_randomness([places[3] for _, places in tasks], encodes)
    codecs = [codec for op, _ in tasks for codec in (op.source, op.codec)]
    arguments.take_levels(codecs, _CPU)
    return _runnable(arguments, Recode, len(tasks), _numel(tasks))


def _rotate(tasks: Sequence[Task], buffers: Sequence[torch.Tensor]) -> Runnable:
    jobs = []
    for operation, _ in tasks:
        dtype = native.DTYPES[buffers[operation.values].dtype]
        job = native.Job(valid=operation.numel, dtype=dtype, rotation=operation.block)
        job.group = operation.block or native.COPIED_NUMEL
        jobs.append(job)
    arguments = _arguments(jobs, [operation.stream for operation, _ in tasks])
    rows = [Rows(*task) for task in tasks]
    _point(arguments, rows, buffers, "values", place=0)
    arguments.point("wire", [(op.rotated, places[1] * _FP32_BYTES) for op, places in tasks])
    arguments.take_flips()
    return _runnable(arguments, Rotate, len(jobs), _numel(tasks))


def _source_job(
    operation: Sum | Recode, codec: Format, numel: int, block: int = 0, dtype: torch.dtype = _FP32
) -> native.Job:
    rows = operation.sources + (operation.place is not None)
    job = native.job_of(codec, rows, numel, dtype, block)
    job.wire_stride = operation.stride
    job.own = -1 if operation.place is None else operation.place
    return job


def _point(
    arguments: Arguments,
    rows: Sequence[Rows],
    buffers: Sequence[torch.Tensor],
    name: str,
    *,
    place: int,
    field: str | None = None,
) -> None:
    """Point ``field`` at elements of the buffer that an operation has as ``name``."""
    to = []
    for op, places, *_ in rows:
        buffer = getattr(op, name)
        to.append((buffer, places[place] * buffers[buffer].element_size()))
    arguments.point(field or name, to)


def _numel(tasks: Sequence[tuple[Operation, Places]]) -> int:
    return sum(operation.numel * getattr(operation, "sources", 1) for operation, _ in tasks)


_compilers = {Encode: _encode, Decode: _decode, Sum: _sum, Recode: _recode, Rotate: _rotate}
