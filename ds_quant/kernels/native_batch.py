"""Operations of batch.py by the C++ kernels: one call for all of a kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ds_quant.kernels import native
from ds_quant.kernels.batch import (
    FLIPS,
    OWN_SIGNS,
    RANDOM,
    Arguments,
    Decode,
    Encode,
    Job,
    Operation,
    Places,
    Recode,
    Rotate,
    Rows,
    Runnable,
    StreamArrays,
    Sum,
    Task,
    at,
    rows_of,
)
from ds_quant.kernels.wire import Format

_FP32 = torch.float32

Buffers = Sequence[torch.Tensor]


def covers(operation: Operation, buffers: Buffers) -> bool:
    """Whether the kernels read and write the dtypes of its values."""
    places = [getattr(operation, name, None) for name in ("values", "base")]
    return all(buffers[place].dtype in native.DTYPES for place in places if place is not None)


def compile_tasks(tasks: Sequence[Task], buffers: Buffers) -> Runnable:
    """Compile tasks of one kind for buffers of the same dtypes."""
    kind = type(tasks[0][0])
    name, jobs_of = _KERNELS[kind]
    rows = rows_of(tasks, 1) if kind in (Encode, Decode) else [Rows(*task) for task in tasks]
    jobs = [job for row in rows for job in jobs_of(row, buffers)]
    arguments = Arguments(native.JOB, jobs, torch.device("cpu"))
    function, where, count = native.function(name), arguments.records.ctypes.data, len(rows)
    numel = sum(operation.numel * getattr(operation, "sources", 1) for operation, _ in tasks)

    def run(addresses: np.ndarray, streams: StreamArrays) -> None:
        arguments.fill(addresses, streams)
        function(where, count, native.threads_for(numel))

    return run


def _encode(rows: Rows, buffers: Buffers) -> list[Job]:
    op, places, (count,), ((values, wire, vectors, *strides),) = rows
    dtype = buffers[op.values].dtype
    numbers = native.numbers_of(op.codec, count, op.numel, dtype, op.block)
    numbers |= {"values_stride": values * dtype.itemsize, "wire_stride": wire}
    numbers |= {"row_vectors": vectors}
    points = {"values": at(buffers, op.values, places[0]), "wire": (op.wire, places[1])}
    if op.base is not None:
        dtype, points["base"] = buffers[op.base].dtype, at(buffers, op.base, places[3])
        numbers |= {"base_stride": strides[0] * dtype.itemsize, "base_dtype": native.DTYPES[dtype]}
    return [Job(numbers, op.stream, points, RANDOM | FLIPS, {"levels": op.codec}, places[2])]


def _decode(rows: Rows, buffers: Buffers) -> list[Job]:
    op, places, (count,), ((wire, values),) = rows
    dtype = buffers[op.values].dtype
    numbers = native.numbers_of(op.codec, count, op.numel, dtype)
    numbers |= {"values_stride": values * dtype.itemsize, "wire_stride": wire, "add": op.add}
    points = {"wire": (op.wire, places[0]), "values": at(buffers, op.values, places[1])}
    return [Job(numbers, op.stream, points, {}, {"levels": op.codec})]


def _sum(rows: Rows, buffers: Buffers) -> list[Job]:
    op, places, *_ = rows
    numbers = _source_numbers(op, op.codec, op.numel, buffers[op.values].dtype, op.block)
    factor = op.scale / op.block if op.block else op.scale
    numbers |= {"factor": factor, "own_signs": op.flips == OWN_SIGNS}
    points = _source_points(op, places, buffers)
    points["values"] = at(buffers, op.values, places[1])
    takes = FLIPS | {"key": "signs_key", "step": "signs_step"}
    return [Job(numbers, op.stream, points, takes, {"levels": op.codec})]


def _rotate(rows: Rows, buffers: Buffers) -> list[Job]:
    op, places, *_ = rows
    numbers = {"valid": op.numel, "dtype": native.DTYPES[buffers[op.values].dtype]}
    numbers |= {"rotation": op.block, "group": op.block or native.COPIED_NUMEL}
    points = {"values": at(buffers, op.values, places[0])}
    points["wire"] = at(buffers, op.rotated, places[1])
    return [Job(numbers, op.stream, points, FLIPS, {})]


def _recode(rows: Rows, buffers: Buffers) -> list[Job]:
    """Two jobs: of a sum, and of encoding it."""
    op, places, *_ = rows
    adding = _source_numbers(op, op.source, op.on_wire, _FP32)
    encoding = native.numbers_of(op.codec, 1, op.on_wire, _FP32)
    if adding["cast"] >= 0:  # in runs of the other's groups
        adding |= {"group": encoding["group"]}
    elif encoding["cast"] >= 0:
        encoding |= {"group": adding["group"]}
    sources = _source_points(op, places, buffers)
    points = sources | {"wire": (op.wire, places[1])}
    return [
        Job(adding, op.stream, sources, RANDOM, {"levels": op.source}),
        Job(encoding, op.stream, points, RANDOM, {"levels": op.codec}, places[3]),
    ]


def _source_numbers(
    op: Sum | Recode, codec: Format, numel: int, dtype: torch.dtype, block: int = 0
) -> dict[str, Any]:
    rows = op.sources + (op.place is not None)
    numbers = native.numbers_of(codec, rows, numel, dtype, block)
    return numbers | {"wire_stride": op.stride, "own": -1 if op.place is None else op.place}


def _source_points(
    op: Sum | Recode, places: Places, buffers: Buffers
) -> dict[str, tuple[int, int]]:
    return {"wire": (op.wire_in, places[0]), "own_values": at(buffers, op.own, places[2])}


_KERNELS = {
    Encode: ("dsq_encode", _encode),
    Decode: ("dsq_decode", _decode),
    Sum: ("dsq_decode_sum", _sum),
    Recode: ("dsq_recode", _recode),
    Rotate: ("dsq_rotate", _rotate),
}
