"""The C++ kernels for CPU tensors, one call for all tasks of a kind.

native.cpp and lossless.cpp are built with the wheel where a compiler exists. The bytes are those of
reference.py and lossless.py, which do the work without the library, or with one of another version;
``unavailable_reason()`` says why.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ds_quant.kernels import lossless
from ds_quant.kernels.batch import (
    DTYPES,
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
    RngArrays,
    Rotate,
    Rows,
    Runnable,
    Sum,
    Task,
    at,
    rounding_of,
    rows_of,
)
from ds_quant.kernels.wire import Codec, layout_of, round_up, without_user_codec

VERSION = 7  # of the jobs, as dsq_version() of native.cpp

_CODES = -1  # `cast` of rows of codes
_NUMEL_PER_THREAD = 1 << 18  # starting a thread costs as much as a tenth of this work
COPIED_NUMEL = 4096  # unit of casts, a multiple of every rotation block

# Arguments of a kernel; the fields of Job in native.cpp.
JOB = np.dtype(
    [
        (name, kind)
        for kind, names in (
            ("u8", "values wire base"),
            ("i8", "values_stride wire_stride base_stride rows numel valid dtype base_dtype add"),
            ("i8", "cast bits group has_offset rounding rotation"),
            ("3i8", "planes"),
            ("i8", "scales offsets nbytes"),
            ("u8", "key step first_vector row_vectors flips_low flips_high levels own_values"),
            ("i8", "own own_signs"),
            ("f4", "factor unused"),
        )
        for name in names.split()
    ]
)


@cache
def unavailable_reason() -> str | None:
    """Say why the kernels cannot be used, as the rest of a sentence; None if they can."""
    spec = find_spec("ds_quant.kernels._native")
    if spec is None or spec.origin is None:
        return "are not built: install ds_quant where there is a C++ compiler"
    try:
        version = ctypes.CDLL(spec.origin).dsq_version()
    except (OSError, AttributeError) as error:
        return f"cannot be loaded: {error}"
    if version != VERSION:
        return f"have version {version}, needed is {VERSION}: install ds_quant again"
    return None


@cache
def function(name: str) -> Callable[[int, int, int], None]:
    """Return a kernel: takes the address of jobs, their number and the number of threads."""
    spec = find_spec("ds_quant.kernels._native")
    if spec is None or spec.origin is None:
        raise RuntimeError(f"C++ kernels {unavailable_reason()}")
    kernel = getattr(ctypes.CDLL(spec.origin), name)
    kernel.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    kernel.restype = None
    return kernel


def threads_for(numel: int) -> int:
    """Threads for work on so many elements."""
    return max(1, min(torch.get_num_threads(), numel // _NUMEL_PER_THREAD))


# ---- tasks ----


Buffers = Sequence[torch.Tensor]


def covers(operation: Operation, buffers: Buffers) -> bool:
    """Return True if the kernels read and write the dtypes of its values."""
    if isinstance(operation, Recode):
        return True
    if isinstance(operation, Encode) and operation.base is not None:
        if buffers[operation.base].dtype not in DTYPES:
            return False
    return buffers[operation.values].dtype in DTYPES


def compile_tasks(tasks: Sequence[Task], buffers: Buffers) -> Runnable:
    """Compile tasks of one kind for buffers of the same dtypes."""
    kind = type(tasks[0][0])
    rows = rows_of(tasks, 1) if kind in (Encode, Decode) else [Rows(*task) for task in tasks]
    jobs = []
    for row in rows:
        jobs += _jobs_of(row, buffers)
    arguments = Arguments(JOB, jobs, torch.device("cpu"))
    kernel = function(_KERNELS[kind])
    jobs_address = arguments.records.ctypes.data
    count = len(rows)
    numel = sum(_numel_read(operation) for operation, _ in tasks)

    def run(addresses: np.ndarray, streams: RngArrays) -> None:
        arguments.fill(addresses, streams)
        kernel(jobs_address, count, threads_for(numel))

    return run


def _numel_read(operation: Operation) -> int:
    """Elements that an operation reads, of all its sources."""
    sources = operation.sources if isinstance(operation, Sum | Recode) else 1
    return operation.numel * sources


def numbers_of(
    fmt: Codec, rows: int, numel: int, dtype: torch.dtype, block: int = 0
) -> dict[str, Any]:
    """Return the fields of a job that codec and shape decide.

    block: block of the rotation; 0: no rotation.
    """
    fmt = without_user_codec(fmt)
    layout = layout_of(fmt, round_up(numel, block) if block else numel)
    fields: dict[str, Any] = {
        "rows": rows,
        "numel": layout.numel,
        "valid": numel,
        "dtype": DTYPES[dtype],
        "rotation": block,
        "planes": (*layout.plane_offsets, 0, 0)[:3],
        "scales": layout.scale_offset,
        "offsets": layout.offset_offset or 0,
        "nbytes": layout.nbytes,
        "own": -1,
        "factor": 1.0,
    }
    if fmt.kind == "cast":
        fields |= {"cast": DTYPES[fmt.dtype], "group": COPIED_NUMEL}
        return fields
    fields |= {
        "bits": fmt.bits,
        "group": fmt.group_size,
        "has_offset": fmt.has_offset,
        "cast": _CODES,
        "rounding": rounding_of(fmt),
    }
    return fields


def _jobs_of(rows: Rows, buffers: Buffers) -> list[Job]:
    op = rows.operation
    if isinstance(op, Encode):
        return [_encode(op, rows, buffers)]
    if isinstance(op, Decode):
        return [_decode(op, rows, buffers)]
    if isinstance(op, Sum):
        return [_sum(op, rows.places, buffers)]
    if isinstance(op, Recode):
        return _recode(op, rows.places, buffers)
    return [_rotate(op, rows.places, buffers)]


def _encode(op: Encode, rows: Rows, buffers: Buffers) -> Job:
    _, places, (count,), ((values, wire, vectors, *strides),) = rows
    dtype = buffers[op.values].dtype
    numbers = numbers_of(op.codec, count, op.numel, dtype, op.block)
    numbers |= {"values_stride": values * dtype.itemsize, "wire_stride": wire}
    numbers |= {"row_vectors": vectors}
    pointers = {"values": at(buffers, op.values, places[0]), "wire": (op.wire, places[1])}
    if op.base is not None:
        dtype, pointers["base"] = buffers[op.base].dtype, at(buffers, op.base, places[3])
        numbers |= {"base_stride": strides[0] * dtype.itemsize, "base_dtype": DTYPES[dtype]}
    return Job(numbers, op.stream, pointers, RANDOM | FLIPS, {"levels": op.codec}, places[2])


def _decode(op: Decode, rows: Rows, buffers: Buffers) -> Job:
    _, places, (count,), ((wire, values),) = rows
    dtype = buffers[op.values].dtype
    numbers = numbers_of(op.codec, count, op.numel, dtype)
    numbers |= {"values_stride": values * dtype.itemsize, "wire_stride": wire, "add": op.add}
    pointers = {"wire": (op.wire, places[0]), "values": at(buffers, op.values, places[1])}
    return Job(numbers, op.stream, pointers, {}, {"levels": op.codec})


def _sum(op: Sum, places: Places, buffers: Buffers) -> Job:
    numbers = _source_numbers(op, op.codec, op.numel, buffers[op.values].dtype, op.block)
    factor = op.scale / op.block if op.block else op.scale
    numbers |= {"factor": factor, "own_signs": op.flips == OWN_SIGNS}
    pointers = _source_pointers(op, places, buffers)
    pointers["values"] = at(buffers, op.values, places[1])
    rng_fields = FLIPS | {"key": "signs_key", "step": "signs_step"}
    return Job(numbers, op.stream, pointers, rng_fields, {"levels": op.codec})


def _rotate(op: Rotate, places: Places, buffers: Buffers) -> Job:
    numbers = {"valid": op.numel, "dtype": DTYPES[buffers[op.values].dtype]}
    numbers |= {"rotation": op.block, "group": op.block or COPIED_NUMEL}
    pointers = {"values": at(buffers, op.values, places[0])}
    pointers["wire"] = at(buffers, op.rotated, places[1])
    return Job(numbers, op.stream, pointers, FLIPS, {})


def _recode(op: Recode, places: Places, buffers: Buffers) -> list[Job]:
    """Return two jobs: a sum, and its encoding."""
    adding = _source_numbers(op, op.source, op.on_wire, torch.float32)
    encoding = numbers_of(op.codec, 1, op.on_wire, torch.float32)
    if adding["cast"] >= 0:  # in runs of the other's groups
        adding |= {"group": encoding["group"]}
    elif encoding["cast"] >= 0:
        encoding |= {"group": adding["group"]}
    sources = _source_pointers(op, places, buffers)
    pointers = sources | {"wire": (op.wire, places[1])}
    return [
        Job(adding, op.stream, sources, RANDOM, {"levels": op.source}),
        Job(encoding, op.stream, pointers, RANDOM, {"levels": op.codec}, places[3]),
    ]


def _source_numbers(
    op: Sum | Recode, codec: Codec, numel: int, dtype: torch.dtype, block: int = 0
) -> dict[str, Any]:
    rows = op.sources + (op.own_row is not None)
    numbers = numbers_of(codec, rows, numel, dtype, block)
    return numbers | {"wire_stride": op.stride, "own": -1 if op.own_row is None else op.own_row}


def _source_pointers(
    op: Sum | Recode, places: Places, buffers: Buffers
) -> dict[str, tuple[int, int]]:
    return {"wire": (op.wire_in, places[0]), "own_values": at(buffers, op.own, places[2])}


_KERNELS: dict[type[Operation], str] = {
    Encode: "dsq_encode",
    Decode: "dsq_decode",
    Sum: "dsq_decode_sum",
    Recode: "dsq_recode",
    Rotate: "dsq_rotate",
}


# ---- lossless differences ----


# Arguments of a kernel; LosslessJob in lossless.cpp.
_NUMBERS = "numel", "exponent_at", "nbytes", "problem"
_LOSSLESS_JOB = np.dtype(
    [*((name, "u8") for name in ("reference", "values", "wire")), *((n, "i8") for n in _NUMBERS)]
)


def encode_lossless(
    values: torch.Tensor,  # (numel,) bf16 or fp16
    reference: torch.Tensor,  # (numel,) of the same dtype
    out: torch.Tensor,  # (max_bytes(numel),) uint8
    nbytes: torch.Tensor,  # (1,) int64, receives the bytes used
) -> None:
    """Write a message."""
    jobs = _lossless_jobs(values.view(1, -1), reference.view(1, -1))
    jobs["wire"] = out.data_ptr()
    _call("dsq_lossless_encode", jobs, values)
    nbytes.fill_(int(jobs["nbytes"][0]))


def decode_lossless(
    wire: torch.Tensor,  # (bytes,) uint8: the messages
    starts: np.ndarray,  # (rows,) int64, first byte of each
    lengths: np.ndarray,  # (rows,) int64, its bytes
    reference: torch.Tensor,  # (rows, numel) bf16 or fp16
    out: torch.Tensor,  # (rows, numel) of the same dtype; may be the reference
    status: torch.Tensor,  # (rows, 2) int32, zeros
) -> None:
    """Decode a message into every row of `out`, in one call; `status` tells which cannot be."""
    jobs = _lossless_jobs(out, reference)
    jobs["wire"] = wire.data_ptr() + starts.astype(np.uint64)
    jobs["nbytes"] = lengths
    _call("dsq_lossless_decode", jobs, out)
    status[:, 0] = torch.from_numpy(jobs["problem"])


def _lossless_jobs(values: torch.Tensor, reference: torch.Tensor) -> np.ndarray:
    """Jobs on the rows of tensors that the caller keeps alive."""
    rows, numel = values.shape
    jobs, places = np.zeros(rows, dtype=_LOSSLESS_JOB), np.arange(rows, dtype=np.uint64)
    for name, tensor in (("values", values), ("reference", reference)):
        jobs[name] = tensor.data_ptr() + places * np.uint64(2 * tensor.stride(0))
    jobs["numel"], (jobs["exponent_at"], _) = numel, lossless.EXPONENT[values.dtype]
    return jobs


def _call(name: str, jobs: np.ndarray, values: torch.Tensor) -> None:
    function(name)(jobs.ctypes.data, len(jobs), threads_for(values.numel()))
