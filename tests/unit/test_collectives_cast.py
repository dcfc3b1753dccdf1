"""Reduced gradients in the dtype that DeepSpeed wants: written by kernels that can, else cast."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch

from ds_quant.codec.bound import Rotation, decode_sum, encode
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.comm.reduction_plan import Form, LinkHop
from ds_quant.kernels import dispatch
from ds_quant.kernels.random_bits import Address
from ds_quant.zero.gradients import ShardReduction
from ds_quant.zero.held import HeldGradients
from ds_quant.zero.param import GradientStreams, Stream
from tests.kernels.conftest import shim  # noqa: F401
from tests.kernels.test_cuda_launcher import cupy, runner  # noqa: F401
from tests.unit.links import Echo

RANKS = 4


@dataclass(frozen=True)
class Tracked:
    """A parameter whose gradient takes the codecs, one for each hop."""

    index: int
    shape: torch.Size
    codecs: tuple[Codec, ...]
    rotation: Rotation | None = None

    def gradient_streams(self, dtype: torch.dtype, *, rank: int, hops: int) -> GradientStreams:
        streams = [
            Stream(c, 1 + self.index if getattr(c, "rounding", "") == "stochastic" else None)
            for c in self.codecs
        ]
        rotation = self.rotation if isinstance(self.codecs[0], GroupCodec) else None
        form = Form(self.codecs, rotation.block if rotation else 0)
        return GradientStreams(tuple(streams), form, rotation)


def bucket_of(
    codecs: Sequence[tuple[Codec, ...]],
    gradients: list[torch.Tensor],
    link: Echo,
    route: tuple[LinkHop, ...],
    *,
    micro_steps: int = 0,
    rotation: Rotation | None = None,
    crossed: Mapping[int, torch.Tensor] = MappingProxyType({}),
    indices: Sequence[int] | None = None,
) -> tuple[list[torch.Tensor], bool]:
    """This rank's shards as a bucket returns them, and whether they were cast from fp32.
    micro_steps: how many cross between nodes once, 0 for none. crossed: sums of some that wait.
    indices: of the parameters.
    """
    engine = Engine()
    held = HeldGradients(engine) if micro_steps else None
    tracked = {
        id(g): Tracked(i, g.shape, hops, rotation)
        for i, g, hops in zip(indices or range(len(codecs)), gradients, codecs, strict=True)
    }
    binding = types.SimpleNamespace(
        engine=engine, held=held, asked=set(), watch=None,
        routes=None, step=1, gradient_step=1, link=lambda _: link, route=lambda _: route,
        is_exact=lambda _: False, signed_step=lambda _: 1, crosses_once=lambda _: micro_steps > 0,
        param_of=lambda p: tracked[id(p)],
    )  # fmt: skip
    if crossed:
        held._step = engine.global_steps
        held._crossed = {(tracked[id(gradients[i])], -1): sums for i, sums in crossed.items()}
    reduction = ShardReduction(binding)
    for micro_step in range(max(1, micro_steps)):
        engine.boundary = micro_step == micro_steps - 1
        shards = reduction(None, gradients, gradients)
    return shards, link.rooms.count(torch.float32) > (micro_steps > 1)  # partial sums are


def reduced(
    codecs: Sequence[Codec], gradients: list[torch.Tensor]
) -> tuple[list[torch.Tensor], bool]:
    """As ``bucket_of``, over one hop."""
    link = Echo(RANKS)
    return bucket_of([(codec,) for codec in codecs], gradients, link, (LinkHop(link=link),))


def gradients() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(5000).bfloat16(), torch.randn(777), torch.randn(64, 130).bfloat16()]


CODEC = GroupCodec(bits=4, group_size=128, range="absmax", rounding="stochastic")
INT8 = GroupCodec(bits=8, group_size=128, range="absmax")
BF16 = CastCodec(torch.bfloat16)


def test_kernels_write_the_dtype_of_the_gradients(runner, monkeypatch) -> None:  # noqa: F811
    """Beside one in full precision, whose sum is rounded once too."""
    codecs, narrow = (CODEC, BF16, CODEC), [g.bfloat16() for g in gradients()]
    wanted, cast = reduced(codecs, narrow)
    assert not cast
    on(runner, monkeypatch)
    assert_found(reduced(codecs, narrow), wanted)


def on(runner, monkeypatch) -> None:  # noqa: F811
    """As on a GPU."""
    monkeypatch.setattr(dispatch, "cuda_runner", lambda *_: runner)


def assert_found(found: tuple[list[torch.Tensor], bool], wanted: list[torch.Tensor]) -> None:
    """Nothing was cast, and every bit is as it was."""
    shards, cast = found
    assert not cast
    for mine, theirs in zip(shards, wanted, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


class Engine:
    """In its first step of several micro-steps."""

    global_steps = 0

    def __init__(self) -> None:
        self.boundary = False

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.boundary


def accumulated(micro_steps: int) -> tuple[list[torch.Tensor], bool]:
    """As ``reduced``, in two nodes of two ranks, where sums cross between nodes once."""
    whole = Echo(4, rank=3)
    route = LinkHop(link=Echo(2)), LinkHop(link=Echo(2), divisor=2, exact_own=True)
    codecs = (INT8, CODEC), (BF16, BF16), (INT8, CODEC)
    narrow = [g.view(-1)[: g.numel() // 4 * 4].bfloat16() for g in gradients()]  # equal shards
    how = {"micro_steps": micro_steps, "rotation": Rotation(block=32)}
    return bucket_of(codecs, narrow, whole, route, **how)


@pytest.mark.parametrize("micro_steps", (1, 3))
def test_kernels_write_it_of_sums_that_cross_once(runner, monkeypatch, micro_steps) -> None:  # noqa: F811
    wanted, cast = accumulated(micro_steps)
    assert not cast
    on(runner, monkeypatch)
    assert_found(accumulated(micro_steps), wanted)


def test_three_equal_micro_steps_add_up_to_three() -> None:
    """Of the gradient that is sent in full precision, to the rounding of its parts to bf16."""
    once, thrice = (accumulated(micro_steps)[0][1].float() for micro_steps in (1, 3))
    torch.testing.assert_close(thrice, 3 * once, rtol=2**-7, atol=0.05)


def test_sums_that_crossed_are_added_in_fp32_to_those_of_their_parameter() -> None:
    """193 of at most 200 is decoded to 193.7, which is 194 in bf16."""
    gradient, found = torch.full((300,), 193.0).bfloat16(), []
    gradient[::100] = 200  # the first element of every shard
    for crossed in ({}, {0: torch.full((100,), 1.6)}):
        link, how = Echo(3), {"micro_steps": 1, "crossed": crossed}
        (shard,), _ = bucket_of([(INT8,)], [gradient], link, (LinkHop(link=link),), **how)
        found.append(set(shard[1:].tolist()))
    assert found == [{194.0}, {195.0}]


@pytest.mark.parametrize("micro_steps", (0, 1, 2))
def test_a_parameter_that_is_in_a_bucket_twice_gets_both_sums(micro_steps: int) -> None:
    """As of a module that is used twice under reentrant checkpointing."""
    link, route = Echo(4, rank=3), [LinkHop(link=Echo(2)), LinkHop(link=Echo(2), divisor=2)]
    twice = [torch.full((64,), value).bfloat16() for value in (1.0, 2.0)]
    how = {"micro_steps": micro_steps, "indices": [0, 0]}
    shards, _ = bucket_of([(BF16, BF16)] * 2, twice, link, tuple(route), **how)
    assert [set(shard.tolist()) for shard in shards] == [
        {value * max(1, micro_steps)} for value in (1.0, 2.0)
    ]


@pytest.mark.parametrize("codec", (CODEC, BF16), ids=("torch", "cast"))
def test_sums_of_several_dtypes_are_cast_at_once(codec) -> None:
    found, cast = reduced([codec] * 3, gradients())
    assert cast
    assert [shard.dtype for shard in found] == [g.dtype for g in gradients()]


def test_sums_in_another_dtype_are_rounded_once() -> None:
    wire = torch.empty(3, CODEC.wire_bytes(999), dtype=torch.uint8)
    encode(CODEC, torch.randn(3, 999), wire, address=Address(key=1, step=1))
    whole, narrow = torch.empty(999), torch.empty(999, dtype=torch.bfloat16)
    for out in (whole, narrow):
        decode_sum(CODEC, wire, out, scale=1 / 3)
    assert torch.equal(whole.bfloat16(), narrow)
    with pytest.raises(ValueError, match=r"float64, must be \(numel,\) bf16 or fp16 or fp32"):
        decode_sum(CODEC, wire, torch.empty(999, dtype=torch.float64))
