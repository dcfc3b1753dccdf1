"""Requirements of tests that a machine may lack. A skip names the missing one."""

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


def _makes_streams() -> bool:
    """Return False for a build of torch for CUDA without a driver."""
    import torch

    try:
        torch.Stream()
    except RuntimeError:
        return False
    return True


streams = pytest.mark.skipif(
    not _makes_streams(), reason="torch.Stream() of this build of torch needs a CUDA driver"
)


@cache
def _source_of_deepspeed(path: str) -> str:
    """Return a source file of DeepSpeed. It is read, because an import takes seconds."""
    return (Path(find_spec("deepspeed").origin).parent / path).read_text("utf-8")


def has_engine_method(name: str) -> bool:
    return f"def {name}(" in _source_of_deepspeed("runtime/engine.py")


def libraries(*names: str, extra: str) -> None:
    """Skip the calling module unless these libraries are installed, without importing them.

    extra: the extra of this package that installs them.
    """
    for name in names:
        if find_spec(name) is None:
            pytest.skip(f"needs {name}: pip install 'ds_quant[{extra}]'", allow_module_level=True)


def has_deepspeed(since: str) -> bool:
    """Return True if DeepSpeed is this version or newer."""
    return Version(version("deepspeed")) >= Version(since)


def has_torch(since: str) -> bool:
    """Return True if torch is this version or newer."""
    return Version(version("torch")) >= Version(since)


def torch(since: str, otherwise: str) -> None:
    """Skip the calling test under an older torch. otherwise: the reason."""
    if not has_torch(since):
        pytest.skip(f"torch {version('torch')} {otherwise}")


def deepspeed(since: str, otherwise: str) -> None:
    """Skip the calling test under an older DeepSpeed. otherwise: the reason."""
    if not has_deepspeed(since):
        pytest.skip(f"DeepSpeed {version('deepspeed')} {otherwise}")
