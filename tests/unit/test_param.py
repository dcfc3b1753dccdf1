"""The record of one parameter: its streams follow the routes of the scheme."""

from __future__ import annotations

import torch

from ds_quant.codec.bound import exactly
from ds_quant.config.schema import parse_block
from ds_quant.policy.route import Routes
from ds_quant.zero.param import Param, exact_gradient

BF16 = torch.bfloat16


def routes(scheme: str, stage: int) -> Routes:
    scheme = parse_block({"scheme": scheme}).to_scheme()
    return Routes(scheme=scheme, stage=stage, nodes=2, node_size=2)


def param(scheme: str, stage: int, *, trained: bool = True) -> Param:
    return following(routes(scheme, stage), trained=trained)


def following(routes: Routes, *, trained: bool = True) -> Param:
    return Param(
        index=3, name="a.weight", shape=torch.Size((64, 64)), trained=trained, tensor=None,
        routes=routes,
    )  # fmt: skip


def test_frozen_weights_of_a_node_shard_are_exact() -> None:
    """They are filled exactly and never exchanged, so that nothing has to fetch them again."""
    assert any(param("sdp4bit", 3).weight_streams(BF16, rank=0))
    assert not any(param("sdp4bit", 3, trained=False).weight_streams(BF16, rank=0))


def test_streams_are_cached() -> None:
    found = param("qsdp", 2)
    (weights,), gradients = (
        found.weight_streams(BF16, rank=0), found.gradient_streams(BF16, rank=0, hops=2)
    )  # fmt: skip
    assert found.weight_streams(BF16, rank=0)[0] is weights
    assert found.gradient_streams(BF16, rank=0, hops=2) is gradients
    exact = param("full_precision", 2)
    assert exact.weight_streams(BF16, rank=0) == (None,)
    assert exact.gradient_streams(BF16, rank=0, hops=2) is exact_gradient(BF16, 2)


def test_codings_have_the_random_bits_of_their_step_and_the_levels_of_the_outer_codec() -> None:
    found = param("qsdp", 3)
    found.levels = torch.arange(256.0)
    ((sent,), (received,)) = (found.weight_streams(BF16, rank=rank) for rank in (1, None))
    codings = [found.coding(sent, BF16, step) for step in (5, 6)]
    assert [coding.address.step for coding in codings] == [5, 6]
    assert codings[0].levels is found.levels and codings[0].codec == received.codec
    assert found.coding(received, BF16, 5).address is None
    assert found.coding(None, BF16, 5) == exactly(BF16)
    between, inside = param("qsdp_shard", 3).weight_streams(BF16, rank=1)
    assert between.learned and inside is None


def test_ranks_shift_together() -> None:
    """A shift is QSDP's, of one parameter."""
    (first,), (second,) = (param("qsdp", 2).weight_streams(BF16, rank=rank) for rank in (0, 1))
    assert first.key == second.key is not None


def test_streams_are_those_of_their_dtype_rank_and_hops() -> None:
    found = param("sdp4bit", 3)
    usual = found.gradient_streams(BF16, rank=0, hops=2)
    others = [
        found.gradient_streams(torch.float32, rank=0, hops=2),
        found.gradient_streams(BF16, rank=1, hops=2),
        found.gradient_streams(BF16, rank=0, hops=1),
    ]
    assert len(others[2].hops) == 1 and others[1].hops[0].key != usual.hops[0].key
    assert all(other is not usual for other in others)
    assert found.gradient_streams(BF16, rank=0, hops=2) is usual
    between = found.weight_streams(BF16, rank=0)
    assert found.weight_streams(BF16, rank=0, whole=False) != between
