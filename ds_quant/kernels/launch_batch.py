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
    RANDOM,
    Arguments,
    Decode,
    Encode,
    Job,
    Operation,
    Places,
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
from ds_quant.kernels.wire import (
    ALIGNMENT,
    FP32_BYTES,
    cast_of,
    groups_of,
    layout_of,
    without_user_codec,
)

Buffers = Sequence[torch.Tensor]
RunTables = Callable[[Sequence[Table]], None]


class _Work(NamedTuple):
    """Rows of an operation as one job."""

    plan: launch.Plan
    rows: int
    job: Job


def covers(operation: Operation, buffers: Buffers) -> bool:
    """Return True if kernels take its codecs and dtypes, and its messages are aligned."""
    if not _takes_codecs(operation):
        return False
    if not all(buffers[wire].data_ptr() % ALIGNMENT == 0 for wire in _wires(operation)):
        return False
    if isinstance(operation, Recode):
        return True
    if isinstance(operation, Encode) and operation.base is not None:
        if buffers[operation.base].dtype not in launch.DTYPES:
            return False
    return buffers[operation.values].dtype in launch.DTYPES


def _wires(operation: Operation) -> tuple[int, ...]:
    """Buffers that kernels access in whole vectors."""
    if isinstance(operation, Recode):
        return operation.wire, operation.wire_in
    if isinstance(operation, Sum):
        return (operation.wire_in,)
    if isinstance(operation, Rotate):
        return (operation.rotated,)
    return (operation.wire,)


def _takes_codecs(operation: Operation) -> bool:
    """Return True if there is a kernel for the codecs; casts do nothing else."""
    codecs = [without_user_codec(operation.codec)]
    if isinstance(operation, Recode):
        codecs.append(without_user_codec(operation.source))
    formats = [codec for codec in codecs if codec.kind == "groups"]
    if len(formats) == len(codecs):
        block = _rotation(operation)[0]
        return all(launch.supports(fmt, block) for fmt in formats)
    return not formats and _only_casts(operation)


def _only_casts(operation: Operation) -> bool:
    """Return True if numbers are neither rotated nor added to others."""
    if isinstance(operation, Decode):
        return not operation.add
    if isinstance(operation, Encode) and operation.base is not None:
        return False
    return not operation.block


def compile_tasks(tasks: Sequence[Task], buffers: Buffers, run_tables: RunTables) -> Runnable:
    """Compile tasks for buffers of the same dtypes and alignment."""
    rows = rows_of((task for task in tasks if isinstance(task[0], Encode | Decode)), 1)
    rows += [Rows(*task) for task in tasks if not isinstance(task[0], Encode | Decode)]
    alike: dict[Hashable, list[_Work]] = {}
    for row in rows:
        work = _work_of(row, buffers)
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
    op = rows.operation
    if not op.block if isinstance(op, Rotate) else op.codec.kind == "cast":
        return _cast(rows, buffers)
    if isinstance(op, Encode):
        return _encode(op, rows, buffers)
    if isinstance(op, Decode):
        return _decode(op, rows, buffers)
    if isinstance(op, Sum):
        return _sum(op, rows.places, buffers)
    if isinstance(op, Recode):
        return _recode(op, rows.places, buffers)
    return _rotate(op, rows.places, buffers)


def _rotation(operation: Operation) -> tuple[int, int]:
    """Block and flips of the rotation; values that are recoded stay as they are."""
    if isinstance(operation, Decode | Recode) or not operation.block:
        return launch.NOT_TURNED
    return operation.block, int(operation.flips)


_NO_FIELDS: Mapping[str, int] = {}
_STAYS = {"wire.end": 0}  # of rows that stay fp32
# By DSQ_FLIPS.
_FLIPS: tuple[Mapping[str, str], ...] = (
    {},
    FLIPS,
    {"flips_low": "signs_key", "flips_high": "signs_step"},
)


def _encode(
    op: Encode, rows: Rows, buffers: Buffers, extra_fields: Mapping[str, int] = _NO_FIELDS
) -> _Work:
    _, places, (count,), ((values, wire, vectors, *strides),) = rows
    dtype = buffers[op.values].dtype
    values_at = at(buffers, op.values, places[0])
    values_stride = values * dtype.itemsize
    is_easy = _is_easy(buffers, values_at, count, values_stride)
    pointers = {"values": values_at, "wire.bytes": (op.wire, places[1])}
    fields = {"values_stride": values_stride, "wire.stride": wire}
    base_dtype = None
    if op.base is not None:
        base_dtype = buffers[op.base].dtype
        base_at = at(buffers, op.base, places[3])
        base_stride = strides[0] * base_dtype.itemsize
        is_easy = is_easy and _is_easy(buffers, base_at, count, base_stride)
        pointers["base"] = base_at
        fields["base_stride"] = base_stride
    rotation = _rotation(op)
    codec = groups_of(op.codec)
    plan = launch.encode_plan(codec, op.numel, dtype, base_dtype, rotation, is_easy)
    numbers = {**plan.fields, **fields, "row_vectors": vectors, **extra_fields}
    rng_fields = {**RANDOM, **_FLIPS[rotation[1]]}
    job = Job(numbers, op.stream, pointers, rng_fields, {"levels": codec}, places[2])
    return _Work(plan, count, job)


def _decode(op: Decode, rows: Rows, buffers: Buffers) -> _Work:
    _, places, (count,), ((wire, values),) = rows
    dtype = buffers[op.values].dtype
    values_at = at(buffers, op.values, places[1])
    values_stride = values * dtype.itemsize
    codec = groups_of(op.codec)
    plan = launch.sum_plan(
        codec,
        op.numel,
        1,
        dtype,
        1.0,
        False,
        launch.NOT_TURNED,
        op.add,
        _is_easy(buffers, values_at, count, values_stride),
    )
    fields = {"values_stride": values_stride, "wire.stride": wire, "source_stride": wire}
    pointers = {"wire.bytes": (op.wire, places[0]), "values": values_at}
    job = Job({**plan.fields, **fields}, op.stream, pointers, {}, {"levels": codec})
    return _Work(plan, count, job)


def _sum(op: Sum, places: Places, buffers: Buffers) -> _Work:
    values_at = at(buffers, op.values, places[1])
    is_easy = _is_easy(buffers, values_at, 1, 0)
    fuse_with = op.fuse_with
    if is_easy and fuse_with and fuse_with.kind == "groups" and launch.supports(fuse_with):
        recoded = Recode(
            source=op.codec,
            codec=fuse_with,
            numel=op.numel,
            wire_in=op.wire_in,
            wire=op.values,
            stream=op.stream,
            sources=op.sources,
            stride=op.stride,
            own_row=op.own_row,
            own=op.own,
        )
        return _recode(recoded, (places[0], values_at[1], places[2], 0), buffers, _STAYS)
    codec = groups_of(op.codec)
    rotation = _rotation(op)
    plan = launch.sum_plan(
        codec,
        op.numel,
        _rows_added(op),
        buffers[op.values].dtype,
        op.scale,
        op.own_row is not None,
        rotation,
        False,
        is_easy,
    )
    numbers = {**plan.fields, **_source_fields(op)}
    pointers = {
        "wire.bytes": (op.wire_in, places[0]),
        "values": values_at,
        "own_values": at(buffers, op.own, places[2]),
    }
    job = Job(numbers, op.stream, pointers, _FLIPS[rotation[1]], {"levels": codec})
    return _Work(plan, 1, job)


def _recode(
    op: Recode, places: Places, buffers: Buffers, extra_fields: Mapping[str, int] = _NO_FIELDS
) -> _Work:
    source, codec = groups_of(op.source), groups_of(op.codec)
    has_own = op.own_row is not None
    plan = launch.recode_plan(source, codec, op.on_wire, _rows_added(op), has_own)
    numbers = {**plan.fields, **_source_fields(op), **extra_fields}
    pointers = {
        "source.bytes": (op.wire_in, places[0]),
        "wire.bytes": (op.wire, places[1]),
        "own_values": at(buffers, op.own, places[2]),
    }
    levels = {"levels": codec, "source_levels": source}
    return _Work(plan, 1, Job(numbers, op.stream, pointers, RANDOM, levels, places[3]))


def _rotate(op: Rotate, places: Places, buffers: Buffers) -> _Work:
    """Reuse the encode kernel, which stops before quantizing."""
    encoded = Encode(op.codec, op.numel, op.values, op.rotated, op.stream, op.block, op.flips)
    values, rotated = places
    encode_places = values, rotated * FP32_BYTES, 0
    rows = Rows(encoded, encode_places, (1,), (encode_places,))
    return _encode(encoded, rows, buffers, _STAYS)


def _cast(rows: Rows, buffers: Buffers) -> _Work:
    """Change the dtype of numbers and add them up, nothing else."""
    op, places = rows.operation, rows.places
    count, steps = (rows.shape[0], rows.steps[0]) if rows.shape else (1, places)
    if isinstance(op, Encode | Rotate):
        source = buffers[op.values].dtype
        source_row = steps[0] * source.itemsize
        source_at = at(buffers, op.values, places[0])
    else:
        source = cast_of(op.source if isinstance(op, Recode) else op.codec).dtype
        source_row = steps[0]
        source_at = op.wire if isinstance(op, Decode) else op.wire_in, places[0]
    if isinstance(op, Encode | Recode):
        codec = cast_of(op.codec)
        dtype = codec.dtype
        padded = layout_of(codec, op.numel).nbytes // dtype.itemsize
        values_stride = steps[1]
        values_at = op.wire, places[1]
    else:
        into = op.rotated if isinstance(op, Rotate) else op.values
        dtype = buffers[into].dtype
        padded = op.numel
        values_stride = steps[1] * dtype.itemsize
        values_at = at(buffers, into, places[1])
    fields = {"source_row": source_row, "values_stride": values_stride}
    own_at = source_at  # of jobs that have none, not read
    sources, has_own, scale = 1, False, 1.0
    if isinstance(op, Sum | Recode):
        fields |= _source_fields(op)
        own_at = at(buffers, op.own, places[2])
        sources = _rows_added(op)
        has_own = op.own_row is not None
    if isinstance(op, Sum):
        scale = op.scale
    plan = launch.cast_plan(
        source, dtype, op.numel, padded, sources=sources, has_own=has_own, scale=scale
    )
    pointers = {"source": source_at, "values": values_at, "own_values": own_at}
    return _Work(plan, count, Job({**plan.fields, **fields}, op.stream, pointers, {}, {}))


def _rows_added(op: Sum | Recode) -> int:
    """Rows of a sum, those of the wire and this rank's own."""
    return op.sources + (op.own_row is not None)


def _source_fields(op: Sum | Recode) -> dict[str, int]:
    return {"source_stride": op.stride, "own": NO_SOURCE if op.own_row is None else op.own_row}


def _is_easy(buffers: Buffers, place: tuple[int, int], count: int, stride: int) -> bool:
    """Return True if every row begins at a multiple of 16 bytes."""
    first = buffers[place[0]].data_ptr() + place[1]
    return first % ALIGNMENT == 0 and (count == 1 or stride % ALIGNMENT == 0)


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
