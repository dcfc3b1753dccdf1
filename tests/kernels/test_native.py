"""Which kernels CPU tensors take, and in how many threads; test_numbers.py has their numbers."""

from __future__ import annotations

import ctypes

import pytest
import torch

from ds_quant.codec.bound import decode_sum, encode
from ds_quant.kernels import dispatch, native
from tests import needs
from tests.kernels.inputs import absmax
from tests.kernels.programs import ADDRESS, assert_values, expected

INT4 = absmax(4, 128, "stochastic")


@needs.native_kernels
def test_number_of_threads_changes_nothing(threads) -> None:
    x = torch.randn(3, native._NUMEL_PER_THREAD + 77)
    wires, sums = [], []
    for count in (1, 3):
        threads(count)
        wire = torch.empty(3, INT4.wire_bytes(x.shape[1]), dtype=torch.uint8)
        encode(INT4, x, wire, address=ADDRESS)
        total = torch.empty(x.shape[1])
        decode_sum(INT4, wire, total)
        wires.append(wire), sums.append(total)
    for first, second in (wires, sums):
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    "version, reason", [(None, "not built"), (0, "have version 0"), (OSError("no"), "no")]
)
def test_a_library_that_does_not_fit_is_not_used(monkeypatch, version, reason: str) -> None:
    def load(path: str):
        if isinstance(version, OSError):
            raise version
        return type("Library", (), {"dsq_version": staticmethod(lambda: version)})

    spec = None if version is None else type("Spec", (), {"origin": "/somewhere/_native.so"})
    monkeypatch.setattr(native, "find_spec", lambda _: spec)
    monkeypatch.setattr(ctypes, "CDLL", load)
    native.unavailable_reason.cache_clear()
    try:
        assert reason in native.unavailable_reason()
        assert dispatch.describe(torch.device("cpu")).startswith("torch kernels (C++")
    finally:
        native.unavailable_reason.cache_clear()


@needs.native_kernels
def test_backend_torch_takes_the_reference_and_auto_the_library(monkeypatch) -> None:
    used, found = [], native.function
    monkeypatch.setattr(native, "function", lambda name: used.append(name) or found(name))
    x = torch.randn(1, 300)
    wire = torch.empty(1, INT4.wire_bytes(300), dtype=torch.uint8)
    encode(INT4, x, wire, address=ADDRESS)
    assert used == ["dsq_encode"] and dispatch.describe(x.device) == "C++ kernels"
    encode(INT4, x, wire, address=ADDRESS, backend="torch")
    assert used == ["dsq_encode"] and dispatch.describe(x.device, "torch") == "torch kernels"
    assert_values(wire, expected(INT4, x))
