"""The C++ kernels for CPU tensors: native.cpp, built with the wheel where a compiler exists.

Signatures are those of reference.py, and so are the bytes. Without the library, or
with one of another version, the torch reference does the work; ``unavailable_reason()`` says why.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ds_quant.kernels.batch import DTYPES, rounding_of
from ds_quant.kernels.wire import Format, layout_of, round_up

VERSION = 7  # of the jobs, as dsq_version() of native.cpp

_CODES = -1  # `cast` of rows of codes
_NUMEL_PER_THREAD = 1 << 18  # starting a thread costs as much as a tenth of this work
COPIED_NUMEL = 4096  # unit of casts, a multiple of every rotation block


# Arguments of a kernel; the fields of Job in native.cpp.
JOB = np.dtype(
    [
        *((name, np.uint64) for name in ("values", "wire", "base")),
        *((name, np.int64) for name in ("values_stride", "wire_stride", "base_stride")),
        *((name, np.int64) for name in ("rows", "numel", "valid", "dtype", "base_dtype", "add")),
        *((name, np.int64) for name in ("cast", "bits", "group", "has_offset", "rounding")),
        *(("rotation", np.int64), ("planes", np.int64, 3)),
        *((name, np.int64) for name in ("scales", "offsets", "nbytes")),
        *((name, np.uint64) for name in ("key", "step", "first_vector", "row_vectors")),
        *((name, np.uint64) for name in ("flips_low", "flips_high", "levels", "own_values")),
        *((name, np.int64) for name in ("own", "own_signs")),
        *((name, np.float32) for name in ("factor", "unused")),
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
def function(name: str) -> ctypes._CFuncPtr:
    """A kernel: takes the address of jobs, their number, and how many threads may work on them."""
    library = ctypes.CDLL(find_spec("ds_quant.kernels._native").origin)
    found = getattr(library, name)
    found.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    found.restype = None
    return found


def numbers_of(
    fmt: Format, rows: int, numel: int, dtype: torch.dtype, block: int = 0
) -> dict[str, Any]:
    """The fields of a job that codec and shape decide; ``block``: of a rotation, 0 for none."""
    layout = layout_of(fmt, round_up(numel, block) if block else numel)
    found = {
        "rows": rows, "numel": layout.numel, "valid": numel, "dtype": DTYPES[dtype],
        "rotation": block, "planes": (*layout.plane_offsets, 0, 0)[:3],
        "scales": layout.scale_offset, "offsets": layout.offset_offset or 0,
        "nbytes": layout.nbytes, "own": -1, "factor": 1.0,
    }  # fmt: skip
    if fmt.kind == "cast":
        return found | {"cast": DTYPES[fmt.dtype], "group": COPIED_NUMEL}
    codes = {"bits": fmt.bits, "group": fmt.group_size, "has_offset": fmt.has_offset}
    return found | codes | {"cast": _CODES, "rounding": rounding_of(fmt)}


def threads_for(numel: int) -> int:
    """Threads for work on so many elements."""
    return max(1, min(torch.get_num_threads(), numel // _NUMEL_PER_THREAD))
