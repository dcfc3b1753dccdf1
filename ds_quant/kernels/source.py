"""One string per CUDA kernel: its ``.cu`` file with our own headers put in place.

CuPy's disk cache hashes the source text, not the files behind ``-I``, so an edited header would
silently run the old binary. May import resources.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from ds_quant.resources import resource_dir

KERNELS = ("encode", "decode_sum", "recode", "rotate")

_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)


@cache
def source(kernel: str) -> str:
    """Source text of a kernel without includes; ValueError for a name not in KERNELS."""
    if kernel not in KERNELS:
        raise ValueError(f"kernel = {kernel!r}: allowed are {', '.join(KERNELS)}")
    return _flatten(resource_dir("cuda") / f"{kernel}.cu", set())


def _flatten(path: Path, seen: set[Path]) -> str:
    """Text of a file; every header once, where it is first included."""

    def text_of(match: re.Match[str]) -> str:
        header = (path.parent / match[1]).resolve()
        if header in seen:
            return ""
        seen.add(header)
        return _flatten(header, seen)

    return _INCLUDE.sub(text_of, path.read_text("ascii"))
