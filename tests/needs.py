"""What a test needs that a machine may lack. A skip says what is missing."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

from ds_quant.kernels import native

native_kernels = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason=f"the C++ kernels {native.unavailable_reason()}"
)


@cache
def _source_of_deepspeed(path: str) -> str:
    """Read instead of imported, which takes seconds."""
    return (Path(find_spec("deepspeed").origin).parent / path).read_text("utf-8")


def has_engine_method(name: str) -> bool:
    return f"def {name}(" in _source_of_deepspeed("runtime/engine.py")


def has_deepspeed(since: str) -> bool:
    """Whether the installed one is this version or a newer one."""
    return Version(version("deepspeed")) >= Version(since)


def deepspeed(since: str, otherwise: str) -> None:
    """Skip the test that calls it under an older version, which does what ``otherwise`` says."""
    if not has_deepspeed(since):
        pytest.skip(f"DeepSpeed {version('deepspeed')} {otherwise}")
