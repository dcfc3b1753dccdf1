"""Reduced gradients in the dtype that DeepSpeed wants: written by kernels that can, else cast."""

from __future__ import annotations

import types
from collections.abc import Sequence

import pytest
import torch

from ds_quant.codec.bound import Coding
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.comm.buffers import Buffers
from ds_quant.comm.reduce import Reduction, ShardSums
from ds_quant.comm.reduction_plan import Form, LinkHop
from ds_quant.comm.traffic import Meter
from ds_quant.kernels import dispatch
from ds_quant.kernels.random_bits import Address
from ds_quant.zero.held import HeldGradients
from ds_quant.zero.stage3 import ShardReduction, _cast, _Sent
from tests.kernels.conftest import shim  # noqa: F401
from tests.kernels.test_cuda_launcher import cupy, runner  # noqa: F401

RANKS = 4


class Alone:
    """A link whose other ranks send what this one sends."""

    size, rank = RANKS, 1

    def __init__(self) -> None:
        pool, meter, self.casts = Buffers(), Meter(), []
        self.empty, self._empties = pool.empty, pool.empties
        self.encoding = lambda role: meter.encoding(role, "inter")
        self.decoding = lambda: meter.section("decode")

    def empties(self, numels, *, dtype, device):
        """Memory for what is cast."""
        self.casts.append(dtype)
        return self._empties(numels, dtype=dtype, device=device)

    def all_to_all(self, payload, *, sent, received, role):
        mine = payload.view(RANKS, -1)[self.rank]
        return types.SimpleNamespace(wait=lambda: mine.repeat(RANKS))


class Engine:
    """At the boundary of its first step."""

    global_steps, is_gradient_accumulation_boundary = 0, staticmethod(lambda: True)


def reduced(
    codecs: Sequence[Codec], gradients: list[torch.Tensor], *, crosses_once: bool = False
) -> tuple[list[torch.Tensor], list[torch.dtype]]:
    """This rank's shards as a bucket returns them, and the dtypes that sums were cast to."""
    link, codings = Alone(), []
    for codec in codecs:
        is_random = getattr(codec, "rounding", "") == "stochastic"
        codings.append((Coding(codec, Address(key=1, step=1) if is_random else None),))
    dtypes = tuple(g.dtype for g in gradients)
    flat = [g.reshape(-1) for g in gradients]
    numels, forms = [g.numel() for g in gradients], [Form((codec,)) for codec in codecs]
    alone = list(range(len(codecs)))
    sent = _Sent(alone, [], dtypes, tuple(forms), codings, [None] * len(codecs))
    how = {"scale": 1 / RANKS, "dtype": sent.sum_dtype(flat[0].device)}
    plan = ShardSums(numels, forms, (LinkHop(link=link),), link, **how)
    if crosses_once:
        binding = types.SimpleNamespace(engine=Engine(), held=HeldGradients(Engine()))
        tracked = [types.SimpleNamespace(index=index) for index in alone]
        under_way, take = ShardReduction(binding)._begin_held(flat, sent, plan, tracked, link)
        under_way.wait()
        return take(), link.casts
    sums = plan.room(flat[0].device, plan.dtype)
    Reduction(plan.plan, flat, codings, sent.rotations, sums).wait()
    return _cast(plan.shards(sums), dtypes, link), link.casts


def gradients() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(5000).bfloat16(), torch.randn(777), torch.randn(64, 130).bfloat16()]


CODEC = GroupCodec(bits=4, group_size=128, range="absmax", rounding="stochastic")
BF16 = CastCodec(torch.bfloat16)


@pytest.mark.parametrize("once", (False, True), ids=("every micro-step", "once"))
def test_kernels_write_the_dtype_of_the_gradients(runner, monkeypatch, once) -> None:  # noqa: F811
    """Beside one in full precision, whose sum is rounded once too."""
    codecs, narrow = (CODEC, BF16, CODEC), [g.bfloat16() for g in gradients()]
    wanted, casts = reduced(codecs, narrow, crosses_once=once)
    assert casts == [torch.bfloat16]
    monkeypatch.setattr(dispatch, "runner_for", lambda *_: runner)
    monkeypatch.setattr(dispatch, "cuda_runner", lambda *_: runner)
    found, casts = reduced(codecs, narrow, crosses_once=once)
    assert casts == []
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


@pytest.mark.parametrize("codec", (CODEC, BF16), ids=("torch", "cast"))
def test_without_kernels_sums_are_cast_at_once(codec) -> None:
    found, casts = reduced([codec] * 3, gradients())
    assert casts == [torch.bfloat16]
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
