"""cost.bill against bytes added up by hand, and the table of what crosses the wire per stage."""

from __future__ import annotations

import pytest
import torch

from ds_quant.codec.codec import CastCodec, GroupCodec
from ds_quant.kernels.wire import ceil_div
from ds_quant.policy.cost import (
    Cluster,
    Costs,
    PricedParam,
    Volume,
    bill,
    predict,
    shipped_bytes,
    volume,
)
from ds_quant.policy.scheme import Scheme

BF16, FP32 = torch.bfloat16, torch.float32
W8 = GroupCodec(bits=8, group_size=1024, range="minmax", rounding="random_shift")
G4 = GroupCodec(bits=4, group_size=128, range="absmax", rounding="stochastic")
SCHEME = Scheme(name="w8g4", weights=W8, gradients=G4, exclude=("*.head",))
FULL = Scheme(name="full", weights=None, gradients=None)
MATRIX = PricedParam("a.weight", (1024, 96), BF16, True)


def bytes_of(result: Costs) -> tuple[float, float]:
    return result.weights * result.numel, result.gradients * result.numel


@pytest.mark.parametrize("stage", [1, 2])
def test_replicated_weights_travel_in_one_row(stage: int) -> None:
    result = bill(SCHEME, stage, [MATRIX], ranks=4, gradient_dtype=BF16)
    # 96 groups: one byte per code, 8 per min-max group; 4 bits per code, 4 bytes per absmax group.
    assert bytes_of(result) == (98304 + 96 * 8, 98304 / 2 + 768 * 4)
    assert result.full_precision_share == 0 and result.kept == {}


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_shards_pay_for_their_own_padding_and_last_group(ranks: int) -> None:
    result = bill(SCHEME, 3, [MATRIX], ranks=ranks, gradient_dtype=BF16)
    shard = ceil_div(98304, ranks)
    assert bytes_of(result) == (ranks * W8.wire_bytes(shard), ranks * G4.wire_bytes(shard))


def test_what_stays_in_full_precision_is_counted_with_its_reason() -> None:
    cargo = [
        MATRIX,
        PricedParam("a.bias", (1024,), BF16, True),
        PricedParam("b.norm", (96,), FP32, True),
        PricedParam("b.tiny", (4, 4), BF16, True),
        PricedParam("b.head", (64, 64), BF16, True),
    ]
    result = bill(SCHEME, 2, cargo, ranks=2, gradient_dtype=BF16)
    assert result.kept == {"1-D": 2, "small": 1, "excluded": 1}
    assert result.numel == 98304 + 1024 + 96 + 16 + 4096
    weights, gradients = 2 * (1024 + 16 + 4096) + 4 * 96, 2 * (1024 + 96 + 16 + 4096)
    quantized = 98304 + 96 * 8, 98304 / 2 + 768 * 4
    assert bytes_of(result) == pytest.approx((quantized[0] + weights, quantized[1] + gradients))
    share = (weights + gradients) / (sum(quantized) + weights + gradients)
    assert result.full_precision_share == pytest.approx(share)


def test_gradients_are_priced_in_the_dtype_that_travels() -> None:
    """fp32 weights, gradients sent in bf16 (communication_data_type)."""
    cargo = [PricedParam("bias", (4096,), FP32, True)]
    result = bill(SCHEME, 1, cargo, ranks=2, gradient_dtype=BF16)
    assert (result.weights, result.gradients) == (4, 2)


def test_frozen_parameters_travel_only_under_zero3_and_only_as_weights() -> None:
    frozen = PricedParam("f.weight", (64, 64), BF16, False)
    replicated = bill(FULL, 2, [MATRIX, frozen], ranks=2, gradient_dtype=BF16)
    assert (replicated.numel, replicated.weights, replicated.gradients) == (98304, 2, 2)
    sharded = bill(FULL, 3, [MATRIX, frozen], ranks=2, gradient_dtype=BF16)
    assert sharded.numel == 98304 + 4096
    assert bytes_of(sharded) == pytest.approx((2 * (98304 + 4096), 2 * 98304))


@pytest.mark.parametrize(("gathers", "volume"), [(1.0, 4), (1.5, 5), (2.0, 6)])
def test_weights_that_stay_gathered_travel_once(gathers: float, volume: float) -> None:
    result = bill(FULL, 3, [MATRIX], ranks=4, gradient_dtype=BF16, gathers=gathers)
    assert result.step_bytes(3) == volume == shipped_bytes(3, BF16, gathers=gathers)
    assert result.step_bytes(3, micro_steps=3) == 3 * volume
    assert sum(
        sum(links.values())
        for links in result.received(3, micro_steps=3, nodes=1, node_size=4).values()
    ) == pytest.approx(3 * volume * 0.75 * result.numel)


def test_gradients_of_frozen_parameters_are_not_shipped() -> None:
    cargo = [MATRIX, MATRIX._replace(name="b.weight", trainable=False)]
    result = bill(FULL, 3, cargo, ranks=4, gradient_dtype=BF16)
    assert result.trained == 0.5
    assert result.step_bytes(3) == 5 == shipped_bytes(3, BF16, trained=result.trained)


def test_shipped_gradients_are_priced_as_an_all_reduce_in_full_precision() -> None:
    result = bill(SCHEME, 1, [MATRIX], ranks=2, gradient_dtype=BF16, shipped_gradients=True)
    assert bytes_of(result) == (98304 + 96 * 8, 2 * 2 * 98304)
    assert result.full_precision_share == pytest.approx(4 / (4 + 1 + 8 / 1024))


def test_nothing_trainable_costs_nothing() -> None:
    result = bill(SCHEME, 1, [MATRIX._replace(trainable=False)], ranks=2, gradient_dtype=BF16)
    assert result == Costs(numel=0, weights=0, gradients=0, full_precision_share=0, kept={})


QSDP = Scheme(
    name="qsdp", weights=W8, gradients=GroupCodec(bits=8, group_size=1024, rounding="stochastic")
)
LARGE = PricedParam("large.weight", (4096, 4096), BF16, True)


@pytest.mark.parametrize(
    ("scheme", "stage", "micro_steps", "volume"),
    [
        # architecture.md: bytes into one node per parameter and step, without beta
        (FULL, 3, 1, 6), (FULL, 3, 4, 24), (FULL, 2, 1, 4), (FULL, 1, 1, 4),
        (FULL, 2, 4, 2 + 4 * 2), (FULL, 1, 4, 4),
        (QSDP, 3, 1, 3.02), (QSDP, 3, 4, 4 * 3.02), (QSDP, 1, 1, 2.02), (QSDP, 1, 4, 2.02),
        (QSDP, 2, 1, 2.02), (QSDP, 2, 4, 5 * 1.008),
    ],
)  # fmt: skip
def test_step_bytes_are_the_table_of_the_architecture(
    scheme: Scheme, stage: int, micro_steps: int, volume: float
) -> None:
    result = bill(scheme, stage, [LARGE], ranks=4, gradient_dtype=BF16)
    assert result.step_bytes(stage, micro_steps=micro_steps) == pytest.approx(volume, rel=0.003)


@pytest.mark.parametrize(
    ("stage", "micro_steps", "volume"),
    [(3, 1, 6), (3, 4, 24), (2, 1, 6), (1, 1, 6), (2, 4, 2 + 4 * 4), (1, 4, 6)],
)
def test_shipped_deepspeed_all_reduces_under_stages_1_and_2(
    stage: int, micro_steps: int, volume: float
) -> None:
    assert shipped_bytes(stage, BF16, micro_steps=micro_steps) == volume
    assert shipped_bytes(stage, FP32, micro_steps=micro_steps) == 2 * volume


def test_the_bill_uses_the_codecs_that_do_the_work() -> None:
    """Any codec: the price of one row is its wire_bytes."""
    for codec in (W8, G4, GroupCodec(bits=3, group_size=32), GroupCodec(bits=7, group_size=96)):
        scheme = Scheme(name="s", weights=codec, gradients=None)
        result = bill(scheme, 1, [MATRIX], ranks=2, gradient_dtype=FP32)
        expected = codec.wire_bytes(98304), CastCodec(FP32).wire_bytes(98304)
        assert bytes_of(result) == expected


def test_a_frozen_int8_weight_is_gathered_by_deepspeed_one_byte_per_element() -> None:
    base = PricedParam("base.weight", (64, 32), torch.int8, False)
    result = bill(SCHEME, 3, [base], ranks=4, gradient_dtype=BF16)
    assert bytes_of(result) == (2048, 0)
    assert result.full_precision_share == 1 and result.kept == {"not floating point": 1}


def test_every_collective_pays_the_latency() -> None:
    cluster = Cluster(nodes=2, node_size=1, link=1e9, intra_link=1e9, flops=1e9, latency=0.5)
    time = predict(Volume(inter=0.0, collectives=12), cluster, numel=1000, tokens=0)
    assert time.communication == 12 * 0.5


@pytest.mark.parametrize(
    ("stage", "micro_steps", "collectives"),
    # per layer: two gathers and a reduction per micro-step; one gather, a reduction per micro-step
    # under ZeRO-2 and one per step under ZeRO-1
    [(3, 1, 3 * 10), (3, 4, 12 * 10), (2, 1, 2 * 10), (2, 4, 5 * 10), (1, 4, 2 * 10)],
)
def test_every_layer_has_collectives_of_its_own(
    stage: int, micro_steps: int, collectives: int
) -> None:
    costs = bill(QSDP, stage, [LARGE], ranks=4, gradient_dtype=BF16)
    found = volume(costs, stage, micro_steps=micro_steps, layers=10)
    assert found.collectives == collectives


LOSSLESS = Scheme(name="lossless", weights=None, gradients=G4, lossless=True, node_shard=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_exact_differences_are_priced_at_a_learning_rate_and_at_most(stage: int) -> None:
    """2.9 bits of every 16-bit weight, whatever its shape; 16 at most; fp32 weights as they are."""
    cargo = [
        MATRIX,
        PricedParam("a.bias", (1024,), BF16, True),
        PricedParam("b.weight", (64, 64), FP32, True),
        PricedParam("frozen", (4096, 8), BF16, False),
    ]
    result = bill(LOSSLESS, stage, cargo, ranks=4, node_size=2, gradient_dtype=BF16)
    sent, plain = 98304 + 1024, 4 * 4096
    expected = -(-round(98304 * 2.9) // 8) + -(-round(1024 * 2.9) // 8) + plain
    assert result.weights * result.numel == expected
    assert result.weights_most * result.numel == 2 * sent + plain
    assert result.varies and result.once_per_step == (stage == 3)
    assert result.kept == {"1-D": 1, "fp32 weights": 1}
    low, most = (result.step_bytes(stage, micro_steps=8, most=most) for most in (False, True))
    assert (most - low) * result.numel == pytest.approx(2 * sent + plain - expected)
    if stage == 2:
        assert result.weights_intra == result.weights  # forwarded as they came


def test_exact_differences_need_nodes_under_zero3() -> None:
    """Where nothing is kept, weights are gathered in full precision."""
    result = bill(LOSSLESS, 3, [MATRIX], ranks=4, gradient_dtype=BF16)
    assert result.weights * result.numel == 2 * 98304 and not result.varies
    exact = Scheme(name="exact", weights=None, gradients=None, lossless=True)
    assert bill(exact, 2, [MATRIX], ranks=4, gradient_dtype=BF16).kept == {}
