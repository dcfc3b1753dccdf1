"""The C++ kernels for CPU tensors: native.cpp, built with the wheel where a compiler exists.

Signatures are those of reference.py, and so are the bytes. Without the library, or
with one of another version, the torch reference does the work; ``unavailable_reason()`` says why.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from importlib.util import find_spec

import torch

from ds_quant.kernels.batch import DTYPES, rounding_of
from ds_quant.kernels.wire import Format, layout_of, round_up

VERSION = 7  # of the jobs, as dsq_version() of native.cpp

_CODES = -1  # `cast` of rows of codes
_NUMEL_PER_THREAD = 1 << 18  # starting a thread costs as much as a tenth of this work
_WORD = (1 << 64) - 1
COPIED_NUMEL = 4096  # unit of casts, a multiple of every rotation block


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Job(ctypes.Structure):
    """Arguments of a kernel; the fields of Job in native.cpp."""

    _fields_ = (
        _fields(ctypes.c_uint64, "values wire base")
        + _fields(ctypes.c_int64, "values_stride wire_stride base_stride rows numel valid")
        + _fields(
            ctypes.c_int64, "dtype base_dtype add cast bits group has_offset rounding rotation"
        )
        + _fields(ctypes.c_int64 * 3, "planes")
        + _fields(ctypes.c_int64, "scales offsets nbytes")
        + _fields(ctypes.c_uint64, "key step first_vector row_vectors")
        + _fields(ctypes.c_uint64, "flips_low flips_high levels own_values")
        + _fields(ctypes.c_int64, "own own_signs")
        + _fields(ctypes.c_float, "factor unused")
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
def function(name: str) -> ctypes._CFuncPtr:
    """A kernel: takes the address of jobs, their number, and how many threads may work on them."""
    library = ctypes.CDLL(find_spec("ds_quant.kernels._native").origin)
    found = getattr(library, name)
    found.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    found.restype = None
    return found


def job_of(fmt: Format, rows: int, numel: int, dtype: torch.dtype, block: int) -> Job:
    """A job without addresses; ``block``: of a rotation, 0 for none."""
    return Job.from_buffer_copy(_template(fmt, rows, numel, dtype, block))


@lru_cache(maxsize=4096)
def _template(fmt: Format, rows: int, numel: int, dtype: torch.dtype, block: int) -> bytes:
    """Build the part of a job that codec and shape decide, cached: a run repeats few."""
    layout = layout_of(fmt, round_up(numel, block) if block else numel)
    job = Job(rows=rows, numel=layout.numel, valid=numel, dtype=DTYPES[dtype])
    job.rotation = block
    job.planes[: len(layout.plane_offsets)] = layout.plane_offsets
    job.scales, job.offsets = layout.scale_offset, layout.offset_offset or 0
    job.nbytes, job.own, job.factor, job.cast = layout.nbytes, -1, 1.0, _CODES
    if fmt.kind == "cast":
        job.cast, job.group = DTYPES[fmt.dtype], COPIED_NUMEL
        return bytes(job)
    job.bits, job.group, job.has_offset = fmt.bits, fmt.group_size, fmt.has_offset
    job.rounding = rounding_of(fmt)
    return bytes(job)


def threads_for(numel: int) -> int:
    """Threads for work on so many elements."""
    return max(1, min(torch.get_num_threads(), numel // _NUMEL_PER_THREAD))
