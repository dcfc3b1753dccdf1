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

import numpy as np
import torch

from ds_quant.kernels import lossless
from ds_quant.kernels.batch import (
    DTYPES,
    MESSAGES,
    NUMBERS,
    OWN_SIGNS,
    Arguments,
    Buffers,
    Decode,
    Encode,
    Field,
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
    job_of,
    operands_of,
    rounding_of,
    rows_of,
)
from ds_quant.kernels.wire import Codec, layout_of, without_user_codec

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


# Fields of JOB by operand and by number of the stream.
_JOB_FIELDS = Struct(
    addresses={
        "values": "values",
        "base": "base",
        "wire": "wire",
        "wire_in": "wire",
        "rotated": "wire",
        "own": "own_values",
    },
    strides={
        "values": "values_stride",
        "base": "base_stride",
        "wire": "wire_stride",
        "vector": "row_vectors",
    },
    levels={"wire": "levels", "wire_in": "levels"},
    rng={
        "key": "key",
        "step": "step",
        "first_vector": "first_vector",
        "flips_low": "flips_low",
        "flips_high": "flips_high",
        "signs_key": "key",
        "signs_step": "step",
    },
)
# A recode takes two jobs; both have the messages that arrive and this rank's own row.
_SUM_FIELDS = _JOB_FIELDS._replace(
    addresses={"wire_in": "wire", "own": "own_values"},
    strides={},
    levels={"wire_in": "levels"},
)
_RECODED_FIELDS = _JOB_FIELDS._replace(
    addresses={"wire": "wire", "own": "own_values"},
    strides={},
    levels={"wire": "levels"},
)
_DTYPE_FIELDS = {"values": "dtype", "base": "base_dtype"}


def covers(operation: Operation, buffers: Buffers) -> bool:
    """Return True if the kernels read and write the dtypes of its values."""
    return has_dtypes_of_kernels(operation, buffers)


def compile_tasks(tasks: Sequence[Task], buffers: Buffers) -> Runnable:
    """Compile tasks of one kind for buffers of the same dtypes."""
    kernel_name, jobs_of = _KERNELS[type(tasks[0][0])]
    rows = rows_of(tasks)
    jobs = [job for each in rows for job in jobs_of(each, buffers)]
    arguments = Arguments(JOB, jobs, torch.device("cpu"))
    kernel = function(kernel_name)
    jobs_address = arguments.records.ctypes.data
    count = len(rows)
    numel = sum(_numel_read(each) for each in rows)

    def run(addresses: np.ndarray, streams: RngArrays) -> None:
        arguments.fill(addresses, streams)
        kernel(jobs_address, count, threads_for(numel))

    return run


def _numel_read(rows: Rows) -> int:
    """Elements that rows read, of all their messages."""
    numbers = rows.operation.numbers()
    return rows.num_rows * numbers.numel * numbers.sources


def _job_of(rows: Rows, buffers: Buffers) -> list[Job]:
    """Return the one job of rows of an operation."""
    operation = rows.operation
    numbers = operation.numbers()
    codecs = operation.codecs()
    fields = _number_fields(numbers, rows.num_rows * numbers.rows_added)
    for name, codec in codecs.items():
        if name in MESSAGES:
            fields |= _codec_fields(codec, numbers.wire_numel)
    for name, buffer in operands_of(operation).items():
        if name in NUMBERS:
            fields[_DTYPE_FIELDS[name]] = DTYPES[buffers[buffer].dtype]
    return [job_of(rows, buffers, _JOB_FIELDS, fields, codecs)]


def _recode_jobs(rows: Rows, buffers: Buffers) -> list[Job]:
    """Return two jobs: a sum, and its encoding."""
    numbers = rows.operation.numbers()
    codecs = rows.operation.codecs()
    adding = _number_fields(numbers, numbers.rows_added)
    adding |= _codec_fields(codecs["wire_in"], numbers.wire_numel)
    encoding = _number_fields(Numbers(numbers.numel, numbers.wire_numel), 1)
    encoding |= _codec_fields(codecs["wire"], numbers.wire_numel)
    if codecs["wire_in"].kind == "cast":  # in runs of the other's groups
        adding["group"] = encoding["group"]
    elif codecs["wire"].kind == "cast":
        encoding["group"] = adding["group"]
    return [
        job_of(rows, buffers, _SUM_FIELDS, adding, codecs),
        job_of(rows, buffers, _RECODED_FIELDS, encoding, codecs),
    ]


def _number_fields(numbers: Numbers, rows: int) -> dict[str, Field]:
    """Return the fields of the numbers of an operation; casts and rotations read its group."""
    return {
        "rows": rows,
        "valid": numbers.numel,
        "rotation": numbers.block,
        "group": numbers.block or COPIED_NUMEL,
        "wire_stride": numbers.stride,
        "own": -1 if numbers.own_row is None else numbers.own_row,
        "own_signs": numbers.flips == OWN_SIGNS,
        "factor": numbers.scale / (numbers.block or 1),
        "add": numbers.add,
    }


def _codec_fields(codec: Codec, numel: int) -> dict[str, Field]:
    """Return the fields of a codec and the layout of its messages of ``numel`` elements."""
    fmt = without_user_codec(codec)
    layout = layout_of(fmt, numel)
    fields: dict[str, Field] = {
        "numel": layout.numel,
        "planes": (*layout.plane_offsets, 0, 0)[:3],
        "scales": layout.scale_offset,
        "offsets": layout.offset_offset or 0,
        "nbytes": layout.nbytes,
    }
    if fmt.kind == "cast":
        return fields | {"cast": DTYPES[fmt.dtype], "group": COPIED_NUMEL}
    return fields | {
        "bits": fmt.bits,
        "group": fmt.group_size,
        "has_offset": fmt.has_offset,
        "cast": _CODES,
        "rounding": rounding_of(fmt),
    }


# The function of an operation, and the jobs that it takes.
_KERNELS: dict[type[Operation], tuple[str, Callable[[Rows, Buffers], list[Job]]]] = {
    Encode: ("dsq_encode", _job_of),
    Decode: ("dsq_decode", _job_of),
    Sum: ("dsq_decode_sum", _job_of),
    Recode: ("dsq_recode", _recode_jobs),
    Rotate: ("dsq_rotate", _job_of),
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
