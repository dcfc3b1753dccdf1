"""Reduced gradients in the dtype that DeepSpeed wants: written by kernels that can, else cast."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from ds_quant.codec.bound import Coding, Rotation
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

    def __init__(self, size: int = RANKS, rank: int = 1) -> None:
        self.size, self.rank = size, rank
        pool, meter, self.casts = Buffers(), Meter(), []
        self.empty, self._empties = pool.empty, pool.empties
        self.encoding = lambda role: meter.encoding(role, "inter")
        self.decoding = lambda: meter.section("decode")

    def empties(self, numels, *, dtype, device):
        """Memory for what is cast."""
        self.casts.append(dtype)
        return self._empties(numels, dtype=dtype, device=device)

    def all_to_all(self, payload, *, sent, received, role):
        rows = payload.split(sent)
        row = rows[self.rank] if sent[self.rank] else rows[0]  # what is kept exact is not sent
        return types.SimpleNamespace(wait=lambda: row.repeat(sum(map(bool, received))))


def reduced(
    codecs: Sequence[Codec], gradients: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.dtype]]:
    """This rank's shards as a bucket returns them, and the dtypes that sums were cast to."""
    link = Alone()
    one_hop = [(codec,) for codec in codecs]
    flat, sent, plan = planned(link, one_hop, gradients, [LinkHop(link=link)])
    sums = plan.room(flat[0].device, plan.dtype)
    Reduction(plan.plan, flat, sent.codings, sent.rotations, sums).wait()
    return _cast(plan.shards(sums), sent.dtypes, link), link.casts


def planned(
    link: Alone,
    codecs: Sequence[tuple[Codec, ...]],
    gradients: list[torch.Tensor],
    route: Sequence[LinkHop],
    rotation: Rotation | None = None,
) -> tuple[list[torch.Tensor], _Sent, ShardSums]:
    """What a bucket of these gradients makes before it is sent; codecs of every hop."""
    codings = []
    for hops in codecs:
        random = [getattr(codec, "rounding", "") == "stochastic" for codec in hops]
        addresses = [Address(key=1 + i, step=1) if r else None for i, r in enumerate(random)]
        codings.append(tuple(map(Coding, hops, addresses)))
    coded = [isinstance(hops[0], GroupCodec) for hops in codecs]
    rotations = [rotation if is_coded else None for is_coded in coded]
    forms = tuple(
        Form(hops, rotation.block if rotation and is_coded else 0)
        for hops, is_coded in zip(codecs, coded, strict=True)
    )
    flat = [g.reshape(-1) for g in gradients]
    dtypes, numels = tuple(g.dtype for g in gradients), [g.numel() for g in gradients]
    sent = _Sent(list(range(len(codecs))), [], dtypes, forms, codings, rotations)
    how = {"scale": 1 / RANKS, "dtype": sent.sum_dtype(flat[0].device)}
    return flat, sent, ShardSums(numels, forms, route, link, **how)


def gradients() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(5000).bfloat16(), torch.randn(777), torch.randn(64, 130).bfloat16()]


CODEC = GroupCodec(bits=4, group_size=128, range="absmax", rounding="stochastic")
INT8 = GroupCodec(bits=8, group_size=128, range="absmax")
BF16 = CastCodec(torch.bfloat16)


def test_kernels_write_the_dtype_of_the_gradients(runner, monkeypatch) -> None:  # noqa: F811
    """Beside one in full precision, whose sum is rounded once too."""
    codecs, narrow = (CODEC, BF16, CODEC), [g.bfloat16() for g in gradients()]
    wanted, casts = reduced(codecs, narrow)
    assert casts == [torch.bfloat16]
    on(runner, monkeypatch)
    assert_found(reduced(codecs, narrow), wanted)


def on(runner, monkeypatch) -> None:  # noqa: F811
    """As on a GPU."""
    monkeypatch.setattr(dispatch, "runner_for", lambda *_: runner)
    monkeypatch.setattr(dispatch, "cuda_runner", lambda *_: runner)


def assert_found(
    found: tuple[list[torch.Tensor], list[torch.dtype]], wanted: list[torch.Tensor]
) -> None:
    """Nothing was cast, and every bit is as it was."""
    shards, casts = found
    assert casts == []
    for mine, theirs in zip(shards, wanted, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


@dataclass(frozen=True)
class Tracked:
    """A parameter."""

    index: int


class Engine:
    """In its first step of several micro-steps."""

    global_steps = 0

    def __init__(self) -> None:
        self.boundary = False

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.boundary


def accumulated(micro_steps: int) -> tuple[list[torch.Tensor], list[torch.dtype]]:
    """As ``reduced``, in two nodes of two ranks, where sums cross between nodes once."""
    whole, engine = Alone(4, rank=3), Engine()
    route = LinkHop(link=Alone(2)), LinkHop(link=Alone(2), divisor=2, exact_own=True)
    codecs = (INT8, CODEC), (BF16, BF16), (INT8, CODEC)
    narrow = [g.view(-1)[: g.numel() // 4 * 4].bfloat16() for g in gradients()]  # equal shards
    flat, sent, plan = planned(whole, codecs, narrow, route, Rotation(block=32))
    binding = types.SimpleNamespace(engine=engine, held=HeldGradients(engine))
    tracked = list(map(Tracked, range(3)))
    reduction = ShardReduction(binding)
    for micro_step in range(micro_steps):
        engine.boundary = micro_step == micro_steps - 1
        under_way, take = reduction._begin_held(flat, sent, plan, tracked, whole)
        under_way.wait()
        shards = take()
    return shards, whole.casts


@pytest.mark.parametrize("micro_steps", (1, 3))
def test_kernels_write_it_of_sums_that_cross_once(runner, monkeypatch, micro_steps) -> None:  # noqa: F811
    wanted, casts = accumulated(micro_steps)
    assert casts == [torch.bfloat16]
    on(runner, monkeypatch)
    assert_found(accumulated(micro_steps), wanted)


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
