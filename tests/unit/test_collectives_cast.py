"""Reduced gradients in the dtype that DeepSpeed wants: written by kernels that can, else cast."""

from __future__ import annotations

import types
from contextlib import nullcontext

import pytest
import torch

from ds_quant.codec.bound import Coding
from ds_quant.codec.codec import CastCodec, GroupCodec
from ds_quant.comm.buffers import Buffers
from ds_quant.comm.gather import reduce_scatter
from ds_quant.kernels import dispatch
from ds_quant.kernels.random_bits import Address
from ds_quant.zero.stage3 import _cast
from tests.kernels.conftest import shim  # noqa: F401

RANKS = 4


class Alone:
    """A link whose other ranks send what this one sends."""

    size, rank = RANKS, 1

    def __init__(self) -> None:
        pool, self.dtypes = Buffers(), []
        self.empty = pool.empty
        self._empties = pool.empties

    def empties(self, numels, *, dtype, device):
        self.dtypes.append(dtype)
        return self._empties(numels, dtype=dtype, device=device)

    def encoding(self, role):
        return nullcontext(types.SimpleNamespace(note=lambda *_, **__: None))

    def decoding(self):
        return nullcontext()

    def all_to_all(self, payload, *, sent, received, role):
        mine = payload.view(RANKS, -1)[self.rank]
        return types.SimpleNamespace(wait=lambda: mine.repeat(RANKS))


def reduced(codec, gradients: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.dtype]]:
    """This rank's shards as `reduce` returns them, and the dtypes that memory was taken for."""
    link = Alone()
    address = Address(key=1, step=1) if getattr(codec, "rounding", "") == "stochastic" else None
    codings = [Coding(codec=codec, address=address) for _ in gradients]
    sums = reduce_scatter(gradients, codings, link, scale=1 / RANKS).wait()
    return _cast(sums, [g.dtype for g in gradients], link), link.dtypes


def gradients() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(5000).bfloat16(), torch.randn(777), torch.randn(64, 130).bfloat16()]


CODEC = GroupCodec(bits=4, group_size=128, range="absmax", rounding="stochastic")


def test_kernels_write_the_dtype_of_the_gradients(shim, monkeypatch) -> None:  # noqa: F811
    wanted, dtypes = reduced(CODEC, gradients())
    assert dtypes == [torch.float32, torch.bfloat16]  # sums, and what they are cast to
    monkeypatch.setattr(dispatch, "runner_for", lambda fmt, device: shim)
    found, dtypes = reduced(CODEC, gradients())
    assert dtypes == [torch.bfloat16, torch.float32]  # memory for the sums, nothing is cast
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


@pytest.mark.parametrize("codec", (CODEC, CastCodec(torch.bfloat16)), ids=("torch", "cast"))
def test_without_kernels_sums_are_cast_at_once(codec) -> None:
    found, dtypes = reduced(codec, gradients())
    assert dtypes == [torch.float32, torch.bfloat16]
    assert [shard.dtype for shard in found] == [g.dtype for g in gradients()]


def test_sums_in_another_dtype_are_rounded_once() -> None:
    wire = torch.empty(3, CODEC.wire_bytes(999), dtype=torch.uint8)
    CODEC.encode(torch.randn(3, 999), wire, address=Address(key=1, step=1))
    whole, narrow = torch.empty(999), torch.empty(999, dtype=torch.bfloat16)
    for out in (whole, narrow):
        CODEC.decode_sum(wire, out, scale=1 / 3)
    assert torch.equal(whole.bfloat16(), narrow)
    with pytest.raises(ValueError, match=r"float64, must be \(numel,\) bf16 or fp16 or fp32"):
        CODEC.decode_sum(wire, torch.empty(999, dtype=torch.float64))
