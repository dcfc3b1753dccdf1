"""Operations of batch.py by the CUDA kernels: one launch for all of a kind that share their macros.

The arguments of a launch are a table of jobs; a run fills in its part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ds_quant.kernels import launch
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
from ds_quant.kernels.launch import FIELDS, NO_SOURCE, Launch, Table, merge
from ds_quant.kernels.wire import ALIGNMENT, Cast, Format, layout_of

_FP32_BYTES = 4

Buffers = Sequence[torch.Tensor]
RunTables = Callable[[Sequence[Table]], None]


class _Job(NamedTuple):
    """A launch without addresses. points: field -> (buffer, bytes behind its address)."""

    launch: Launch
    stream: int
    points: dict[str, tuple[int, int]]
    vector: int | None = None  # of random bits
    tables: tuple[tuple[str, Format], ...] = ()  # fields of learned levels, and whose


def covers(operation: Operation, buffers: Buffers) -> bool:
    """Whether the kernels take its codecs, and messages begin where they may."""
    codecs = [getattr(operation, name, None) for name in ("codec", "source")]
    wires = [getattr(operation, name, None) for name in ("wire", "wire_in", "rotated")]
    dtypes = [getattr(operation, name, None) for name in ("values", "base")]
    return (
        _takes([codec for codec in codecs if codec is not None], operation)
        and all(w is None or buffers[w].data_ptr() % ALIGNMENT == 0 for w in wires)
        and all(v is None or buffers[v].dtype in launch.DTYPES for v in dtypes)
    )


def _takes(codecs: Sequence[Format | Cast], operation: Operation) -> bool:
    """Whether there is a kernel for these codecs; casts are done alone."""
    if any(codec.kind == "cast" for codec in codecs):
        others = [getattr(operation, name, 0) or 0 for name in ("block", "add")]
        base = getattr(operation, "base", None) is not None
        return all(codec.kind == "cast" for codec in codecs) and not (any(others) or base)
    return all(launch.supports(codec, _turn(operation)[0]) for codec in codecs)


def compile_tasks(tasks: Sequence[Task], buffers: Buffers, run_tables: RunTables) -> Runnable:
    """Compile tasks for buffers of the same dtypes and alignment."""
    device = buffers[0].device
    tables = [(table, _arguments(table, jobs, device)) for table, jobs in _tables(tasks, buffers)]

    def run(addresses: np.ndarray, streams: StreamArrays) -> None:
        filled = []
        for table, arguments in tables:
            arguments.fill(addresses, streams)
            filled.append(table._replace(jobs=arguments.records.tobytes()))
        run_tables(filled)

    return run


def _tables(tasks: Sequence[Task], buffers: Buffers) -> list[tuple[Table, list[_Job]]]:
    rows = rows_of((task for task in tasks if isinstance(task[0], Encode | Decode)), 1)
    rows += [Rows(*task) for task in tasks if not isinstance(task[0], Encode | Decode)]
    alike: dict[tuple, list[_Job]] = {}
    for row in rows:
        job = (_cast if _is_cast(row.operation) else _jobs[type(row.operation)])(row, buffers)
        rest = [macro for macro in job.launch.macros if macro[0] != "DSQ_WHOLE"]
        alike.setdefault((job.launch.kernel, *rest), []).append(job)
    found = []
    for jobs in alike.values():
        macros = min(job.launch.macros for job in jobs)  # whole blocks only if all have them
        (table,) = merge([job.launch._replace(macros=macros) for job in jobs])
        found.append((table, jobs))
    return found


def _arguments(table: Table, jobs: Sequence[_Job], device: torch.device) -> Arguments:
    """What a run fills in of a table."""
    first, fields = jobs[0], np.dtype([(name, "<u8") for name in FIELDS[table.kernel]])
    arguments = Arguments(fields, table.jobs, [job.stream for job in jobs])
    for field in first.points:
        arguments.point(field, [job.points[field] for job in jobs])
    if first.vector is not None:
        arguments.take_randomness([job.vector for job in jobs])
    flips = dict(table.macros).get("DSQ_FLIPS")
    if flips:
        arguments.take_flips(own=flips == OWN_SIGNS)
    for place, (field, _) in enumerate(first.tables):
        codecs = [job.tables[place][1] for job in jobs]
        arguments.take_levels(codecs, device, field)
    return arguments


def _turn(operation: Operation) -> tuple[int, int]:
    """What an operation rotates; values that are recoded stay as they are."""
    if isinstance(operation, Decode | Recode) or not operation.block:
        return launch.NOT_TURNED
    return operation.block, int(operation.flips)


_NOTHING: Mapping[str, int] = {}
_STAYS = {"wire.end": 0}  # of rows that stay fp32


def _encode(rows: Rows, buffers: Buffers, more: Mapping[str, int] = _NOTHING) -> _Job:
    op, places, (count,), ((values, wire, vectors, *strides),) = rows
    at, dtype = _at(buffers, op.values, places[0]), buffers[op.values].dtype
    is_easy = _is_easy(buffers, at, count, values * dtype.itemsize)
    points = {"values": at, "wire.bytes": (op.wire, places[1])}
    fields = {"values_stride": values * dtype.itemsize, "wire.stride": wire}
    base = None
    if op.base is not None:
        base, points["base"] = buffers[op.base].dtype, _at(buffers, op.base, places[3])
        fields["base_stride"] = strides[0] * base.itemsize
        is_easy = is_easy and _is_easy(buffers, points["base"], count, fields["base_stride"])
    plan = launch.encode_plan(op.codec, op.numel, dtype, base, _turn(op), is_easy)
    work = plan.launch(count, {**fields, "row_vectors": vectors, **more})
    return _Job(work, op.stream, points, places[2], (("levels", op.codec),))


def _decode(rows: Rows, buffers: Buffers) -> _Job:
    op, places, (count,), ((wire, values),) = rows
    at, dtype = _at(buffers, op.values, places[1]), buffers[op.values].dtype
    is_easy = _is_easy(buffers, at, count, values * dtype.itemsize)
    shape = (op.numel, 1, dtype)
    plan = launch.sum_plan(op.codec, *shape, 1.0, False, launch.NOT_TURNED, op.add, is_easy)
    fields = {"values_stride": values * dtype.itemsize, "wire.stride": wire, "source_stride": wire}
    points = {"wire.bytes": (op.wire, places[0]), "values": at}
    return _Job(plan.launch(count, fields), op.stream, points, tables=(("levels", op.codec),))


def _sum(rows: Rows, buffers: Buffers) -> _Job:
    op, places, *_ = rows
    at, sources = _at(buffers, op.values, places[1]), op.sources + (op.place is not None)
    is_easy, beside = _is_easy(buffers, at, 1, 0), op.beside
    if is_easy and beside and beside.kind == "groups" and launch.supports(beside):
        how = op.sources, op.stride, op.place, op.own
        recoded = Recode(op.codec, beside, op.numel, op.wire_in, op.values, op.stream, *how)
        return _recode(Rows(recoded, (places[0], at[1], places[2], 0)), buffers, _STAYS)
    shape, turn = (op.numel, sources, buffers[op.values].dtype), _turn(op)
    has_own = op.place is not None
    plan = launch.sum_plan(op.codec, *shape, op.scale, has_own, turn, False, is_easy)
    work = plan.launch(1, _source_fields(op))
    points = {"wire.bytes": (op.wire_in, places[0]), "values": at}
    points["own_values"] = _at(buffers, op.own, places[2])
    return _Job(work, op.stream, points, tables=(("levels", op.codec),))


def _recode(rows: Rows, buffers: Buffers, more: Mapping[str, int] = _NOTHING) -> _Job:
    op, places, *_ = rows
    sources = op.sources + (op.place is not None)
    plan = launch.recode_plan(op.source, op.codec, op.on_wire, sources, op.place is not None)
    work = plan.launch(1, {**_source_fields(op), **more})
    points = {"source.bytes": (op.wire_in, places[0]), "wire.bytes": (op.wire, places[1])}
    points["own_values"] = _at(buffers, op.own, places[2])
    tables = (("levels", op.codec), ("source_levels", op.source))
    return _Job(work, op.stream, points, places[3], tables)


def _rotate(rows: Rows, buffers: Buffers) -> _Job:
    """As if encoded, but for the end."""
    op, (values, rotated) = rows.operation, rows.places
    encoded = Encode(op.codec, op.numel, op.values, op.rotated, op.stream, op.block, op.flips)
    places = values, rotated * _FP32_BYTES, 0
    return _encode(Rows(encoded, places, (1,), (places,)), buffers, _STAYS)


def _is_cast(op: Operation) -> bool:
    return not op.block if isinstance(op, Rotate) else op.codec.kind == "cast"


def _cast(rows: Rows, buffers: Buffers) -> _Job:
    """An operation that only changes the dtype of numbers and adds them up."""
    op, places = rows.operation, rows.places
    count, steps = (rows.shape[0], rows.steps[0]) if rows.shape else (1, places)
    if isinstance(op, Encode | Rotate):
        source, read = buffers[op.values].dtype, steps[0] * buffers[op.values].element_size()
        points = {"source": _at(buffers, op.values, places[0])}
    else:
        source, read = (op.source if isinstance(op, Recode) else op.codec).dtype, steps[0]
        points = {"source": (op.wire if isinstance(op, Decode) else op.wire_in, places[0])}
    if isinstance(op, Encode | Recode):
        dtype, written = op.codec.dtype, steps[1]
        points["values"] = op.wire, places[1]
        padded = layout_of(op.codec, op.numel).nbytes // dtype.itemsize
    else:
        into = op.rotated if isinstance(op, Rotate) else op.values
        dtype, padded = buffers[into].dtype, op.numel
        points["values"], written = _at(buffers, into, places[1]), steps[1] * dtype.itemsize
    fields, how = {"source_row": read, "values_stride": written}, {}
    points["own_values"] = points["source"]  # of jobs that have none, not read
    if isinstance(op, Sum | Recode):
        fields |= _source_fields(op)
        points["own_values"] = _at(buffers, op.own, places[2])
        how = {"sources": op.sources + (op.place is not None), "has_own": op.place is not None}
        how["scale"] = getattr(op, "scale", 1.0)
    plan = launch.cast_plan(source, dtype, op.numel, padded, **how)
    return _Job(plan.launch(count, fields), op.stream, points)


def _source_fields(op: Sum | Recode) -> dict[str, int]:
    return {"source_stride": op.stride, "own": NO_SOURCE if op.place is None else op.place}


def _at(buffers: Buffers, buffer: int, start: int) -> tuple[int, int]:
    return buffer, start * buffers[buffer].element_size()


def _is_easy(buffers: Buffers, at: tuple[int, int], count: int, stride: int) -> bool:
    """Whether every row begins at a multiple of 16 bytes."""
    first = buffers[at[0]].data_ptr() + at[1]
    return first % ALIGNMENT == 0 and (count == 1 or stride % ALIGNMENT == 0)


_jobs: dict[type, Callable[[Rows, Buffers], _Job]] = {
    Encode: _encode,
    Decode: _decode,
    Sum: _sum,
    Recode: _recode,
    Rotate: _rotate,
}
