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


def engine_method(name: str) -> pytest.MarkDecorator:
    """A method that the engines of older versions of DeepSpeed lack."""
    return pytest.mark.skipif(
        f"def {name}(" not in _source_of_deepspeed("runtime/engine.py"),
        reason=f"DeepSpeed {version('deepspeed')} has no engine.{name}",
    )


def adds_up_micro_steps(*, offloaded: bool = False) -> bool:
    """Whether DeepSpeed's own ZeRO-2 does. Where gradients cross between nodes once per step, it is
    given them in the last micro-step.
    """
    return Version(version("deepspeed")) >= Version("0.19" if offloaded else "0.18.3")
