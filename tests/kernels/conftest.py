"""The kernels that tests of numbers run on: C++, and CUDA on the host; and the torch reference.

The shim is made once per session: every variant of a kernel is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from ds_quant.kernels import dispatch, native, reference
from tests.kernels.backends import Kernels
from tests.kernels.shim import Shim
from tests.torch_kernels import only_torch


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    """Runner of launches on the CPU."""
    return Shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def cuda_kernels(shim, monkeypatch) -> Kernels:
    """Tasks take the CUDA kernels; test_gpu.py has those of a GPU instead."""
    found = Kernels("shim", torch.device("cpu"), shim)
    monkeypatch.setattr(dispatch, "cuda_runner", found.runner)
    return found


@pytest.fixture(params=("torch", "native", "cuda"))
def kernels(request, monkeypatch) -> Iterator[Kernels]:
    """Every back end: the reference in short runs, and kernels, which leave little to it."""
    if request.param == "cuda":
        yield request.getfixturevalue("cuda_kernels")
        return
    if request.param == "native":
        if native.unavailable_reason() is not None:
            pytest.skip(native.unavailable_reason())
        yield Kernels("native", torch.device("cpu"))
        return
    monkeypatch.setitem(reference._RUN_NUMEL, "cpu", 1000)
    with only_torch():
        yield Kernels("torch", torch.device("cpu"))


@pytest.fixture
def all_kernels(kernels, request) -> Kernels:
    """The same; kernels take every task."""
    if kernels.name != "torch":
        request.getfixturevalue("nothing_left")
    return kernels


@pytest.fixture
def nothing_left(monkeypatch) -> None:
    """No task may be left for the torch reference."""
    compile_tasks = dispatch.compile_tasks

    def all_of(tasks, buffers, backend):
        found, left = compile_tasks(tasks, buffers, backend)
        assert not left, "no kernel takes it"
        return found, left

    monkeypatch.setattr(dispatch, "compile_tasks", all_of)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads, which the kernels take over, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
