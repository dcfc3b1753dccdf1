"""The compiler's output, executed: cases of test_numbers.py on the PTX of every architecture."""

from __future__ import annotations

import pytest
import torch

from ds_quant.kernels import dispatch
from tests.kernels import compiler
from tests.kernels.backends import Kernels
from tests.kernels.ptx.runner import Runner
from tests.kernels.test_numbers import *  # noqa: F403

pytestmark = pytest.mark.skipif(
    compiler.nvrtc_version() is None, reason="needs NVRTC: pip install ds_quant[nvrtc]"
)


@pytest.fixture(scope="session", params=compiler.ARCHITECTURES)
def runner(request) -> Runner:
    return Runner(request.param)


@pytest.fixture
def cuda_kernels(runner, monkeypatch) -> Kernels:
    found = Kernels("ptx", torch.device("cpu"), runner)
    monkeypatch.setattr(dispatch, "cuda_runner", found.runner)
    return found


@pytest.fixture
def kernels(cuda_kernels) -> Kernels:
    return cuda_kernels


@pytest.fixture
def all_kernels(cuda_kernels, nothing_left) -> Kernels:
    return cuda_kernels
