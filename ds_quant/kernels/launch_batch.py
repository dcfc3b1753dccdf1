"""Operations of batch.py by the CUDA kernels: one launch for all of a kind that share their macros.

The arguments of a launch are a table of jobs; a run fills in its part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from ds_quant.kernels import launch
from ds_quant.kernels.batch import (
    FLIPS,
    RANDOM,
    Arguments,
    Decode,
    Encode,
    Job,
    Operation,
    Recode,
    RngArrays,
    Rotate,
    Rows,
    Runnable,
    Sum,
    Task,
    at,
    rows_of,
)
from ds_quant.kernels.launch import NO_SOURCE, Table
from ds_quant.kernels.lossless import HEADER, PROBLEMS, blocks_of
from ds_quant.kernels.wire import ALIGNMENT, Cast, Format, layout_of

_FP32_BYTES = 4

Buffers = Sequence[torch.Tensor]
RunTables = Callable[[Sequence[Table]], None]


_Work = tuple[launch.Plan, int, Job]  # and its rows


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
    rows = rows_of((task for task in tasks if isinstance(task[0], Encode | Decode)), 1)
    rows += [Rows(*task) for task in tasks if not isinstance(task[0], Encode | Decode)]
    alike: dict[tuple, list[_Work]] = {}
    for row in rows:
        work = (_cast if _is_cast(row.operation) else _works[type(row.operation)])(row, buffers)
        rest = [macro for macro in work[0].macros if macro[0] != "DSQ_WHOLE"]
        alike.setdefault((work[0].kernel, *rest), []).append(work)
    tables, filled = [], []
    for (kernel, *_), works in alike.items():
        plans, counts, jobs = zip(*works, strict=True)
        filled.append(Arguments(launch.fields_of(kernel), jobs, buffers[0].device))
        tables.append(launch.table_of(plans, counts, filled[-1].records))

    def run(addresses: np.ndarray, streams: RngArrays) -> None:
        for arguments in filled:
            arguments.fill(addresses, streams)
        run_tables(tables)

    return run


def _turn(operation: Operation) -> tuple[int, int]:
    """What an operation rotates; values that are recoded stay as they are."""
    if isinstance(operation, Decode | Recode) or not operation.block:
        return launch.NOT_TURNED
    return operation.block, int(operation.flips)


_NOTHING: Mapping[str, int] = {}
_STAYS = {"wire.end": 0}  # of rows that stay fp32
# By DSQ_FLIPS.
_FLIPS = ({}, FLIPS, {"flips_low": "signs_key", "flips_high": "signs_step"})


def _encode(rows: Rows, buffers: Buffers, more: Mapping[str, int] = _NOTHING) -> _Work:
    op, places, (count,), ((values, wire, vectors, *strides),) = rows
    into, dtype = at(buffers, op.values, places[0]), buffers[op.values].dtype
    is_easy = _is_easy(buffers, into, count, values * dtype.itemsize)
    pointers = {"values": into, "wire.bytes": (op.wire, places[1])}
    fields = {"values_stride": values * dtype.itemsize, "wire.stride": wire}
    base = None
    if op.base is not None:
        base, pointers["base"] = buffers[op.base].dtype, at(buffers, op.base, places[3])
        fields["base_stride"] = strides[0] * base.itemsize
        is_easy = is_easy and _is_easy(buffers, pointers["base"], count, fields["base_stride"])
    turn = _turn(op)
    plan = launch.encode_plan(op.codec, op.numel, dtype, base, turn, is_easy)
    numbers = {**plan.fields, **fields, "row_vectors": vectors, **more}
    rng_fields, levels = RANDOM | _FLIPS[turn[1]], {"levels": op.codec}
    return plan, count, Job(numbers, op.stream, pointers, rng_fields, levels, places[2])


def _decode(rows: Rows, buffers: Buffers) -> _Work:
    op, places, (count,), ((wire, values),) = rows
    into, dtype = at(buffers, op.values, places[1]), buffers[op.values].dtype
    is_easy = _is_easy(buffers, into, count, values * dtype.itemsize)
    shape = (op.numel, 1, dtype)
    plan = launch.sum_plan(op.codec, *shape, 1.0, False, launch.NOT_TURNED, op.add, is_easy)
    fields = {"values_stride": values * dtype.itemsize, "wire.stride": wire, "source_stride": wire}
    pointers = {"wire.bytes": (op.wire, places[0]), "values": into}
    return plan, count, Job(plan.fields | fields, op.stream, pointers, {}, {"levels": op.codec})


def _sum(rows: Rows, buffers: Buffers) -> _Work:
    op, places, *_ = rows
    into, sources = at(buffers, op.values, places[1]), op.sources + (op.place is not None)
    is_easy, fuse_with = _is_easy(buffers, into, 1, 0), op.fuse_with
    if is_easy and fuse_with and fuse_with.kind == "groups" and launch.supports(fuse_with):
        how = op.sources, op.stride, op.place, op.own
        recoded = Recode(op.codec, fuse_with, op.numel, op.wire_in, op.values, op.stream, *how)
        return _recode(Rows(recoded, (places[0], into[1], places[2], 0)), buffers, _STAYS)
    shape, turn = (op.numel, sources, buffers[op.values].dtype), _turn(op)
    has_own = op.place is not None
    plan = launch.sum_plan(op.codec, *shape, op.scale, has_own, turn, False, is_easy)
    numbers = {**plan.fields, **_source_fields(op)}
    pointers = {"wire.bytes": (op.wire_in, places[0]), "values": into}
    pointers["own_values"] = at(buffers, op.own, places[2])
    return plan, 1, Job(numbers, op.stream, pointers, _FLIPS[turn[1]], {"levels": op.codec})


def _recode(rows: Rows, buffers: Buffers, more: Mapping[str, int] = _NOTHING) -> _Work:
    op, places, *_ = rows
    sources = op.sources + (op.place is not None)
    plan = launch.recode_plan(op.source, op.codec, op.on_wire, sources, op.place is not None)
    numbers = {**plan.fields, **_source_fields(op), **more}
    pointers = {"source.bytes": (op.wire_in, places[0]), "wire.bytes": (op.wire, places[1])}
    pointers["own_values"] = at(buffers, op.own, places[2])
    levels = {"levels": op.codec, "source_levels": op.source}
    return plan, 1, Job(numbers, op.stream, pointers, RANDOM, levels, places[3])


def _rotate(rows: Rows, buffers: Buffers) -> _Work:
    """As if encoded, but for the end."""
    op, (values, rotated) = rows.operation, rows.places
    encoded = Encode(op.codec, op.numel, op.values, op.rotated, op.stream, op.block, op.flips)
    places = values, rotated * _FP32_BYTES, 0
    return _encode(Rows(encoded, places, (1,), (places,)), buffers, _STAYS)


def _is_cast(op: Operation) -> bool:
    return not op.block if isinstance(op, Rotate) else op.codec.kind == "cast"


def _cast(rows: Rows, buffers: Buffers) -> _Work:
    """An operation that only changes the dtype of numbers and adds them up."""
    op, places = rows.operation, rows.places
    count, steps = (rows.shape[0], rows.steps[0]) if rows.shape else (1, places)
    if isinstance(op, Encode | Rotate):
        source, read = buffers[op.values].dtype, steps[0] * buffers[op.values].element_size()
        pointers = {"source": at(buffers, op.values, places[0])}
    else:
        source, read = (op.source if isinstance(op, Recode) else op.codec).dtype, steps[0]
        pointers = {"source": (op.wire if isinstance(op, Decode) else op.wire_in, places[0])}
    if isinstance(op, Encode | Recode):
        dtype, written = op.codec.dtype, steps[1]
        pointers["values"] = op.wire, places[1]
        padded = layout_of(op.codec, op.numel).nbytes // dtype.itemsize
    else:
        into = op.rotated if isinstance(op, Rotate) else op.values
        dtype, padded = buffers[into].dtype, op.numel
        pointers["values"], written = at(buffers, into, places[1]), steps[1] * dtype.itemsize
    fields, how = {"source_row": read, "values_stride": written}, {}
    pointers["own_values"] = pointers["source"]  # of jobs that have none, not read
    if isinstance(op, Sum | Recode):
        fields |= _source_fields(op)
        pointers["own_values"] = at(buffers, op.own, places[2])
        how = {"sources": op.sources + (op.place is not None), "has_own": op.place is not None}
        how["scale"] = getattr(op, "scale", 1.0)
    plan = launch.cast_plan(source, dtype, op.numel, padded, **how)
    return plan, count, Job({**plan.fields, **fields}, op.stream, pointers, {}, {})


def _source_fields(op: Sum | Recode) -> dict[str, int]:
    return {"source_stride": op.stride, "own": NO_SOURCE if op.place is None else op.place}


def _is_easy(buffers: Buffers, place: tuple[int, int], count: int, stride: int) -> bool:
    """Whether every row begins at a multiple of 16 bytes."""
    first = buffers[place[0]].data_ptr() + place[1]
    return first % ALIGNMENT == 0 and (count == 1 or stride % ALIGNMENT == 0)


_works: dict[type, Callable[[Rows, Buffers], _Work]] = {
    Encode: _encode,
    Decode: _decode,
    Sum: _sum,
    Recode: _recode,
    Rotate: _rotate,
}


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
    jobs, numels = np.zeros(len(messages), dtype=_LOSSLESS), [len(m[0]) for m in messages]
    for column, name in enumerate(("values", "reference", "wire")):
        jobs[name] = [message[column].data_ptr() for message in messages]
    jobs["nbytes"] = nbytes.data_ptr() + 8 * np.arange(len(messages), dtype=np.uint64)
    jobs["numel"], dtype = numels, messages[0][0].dtype
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
