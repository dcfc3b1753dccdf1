"""Bytes against those added up by hand, and gathers against counts of real engines;
golden/commands.yaml has what estimate makes of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_quant.comm.reduction_plan import Slicing
from ds_quant.config.schema import parse_block
from ds_quant.kernels.wire import ceil_div
from ds_quant.policy.cost import CommVolume, ParamSpec, comm_volume, stock_bytes
from ds_quant.policy.memory import Sizes, peak_bytes
from ds_quant.policy.model import FetchSettings
from ds_quant.policy.route import Routes
from ds_quant.policy.scheme import Scheme

BF16, FP32 = torch.bfloat16, torch.float32


def scheme(name: str, **fields: Any) -> Scheme:
    return parse_block({"scheme": name, **fields}).to_scheme()


G4 = {"bits": 4, "group_size": 128, "range": "absmax"}
W8G4 = scheme("qsdp", gradients=G4, exclude=["*.head"])
FULL, LOSSLESS = scheme("full_precision"), scheme("sdp4bit", weights={"lossless": True})
MATRIX = ParamSpec("a.weight", (1024, 96), BF16, True)
FROZEN = ParamSpec("f.weight", (64, 64), BF16, False)
# 96 groups: one byte per code, 8 per min-max group; 4 bits per code, 4 bytes per absmax group.
W, G = 98304 + 96 * 8, 98304 // 2 + 768 * 4


def priced(found: Scheme, stage: int, param_specs: list[ParamSpec], **how: Any) -> CommVolume:
    return comm_volume(found, stage, param_specs, **{"ranks": 4, "gradient_dtype": BF16, **how})


def bytes_of(result: CommVolume) -> tuple[float, float]:
    return result.weights * result.numel, result.gradients * result.numel


def in_shards(ranks: int) -> tuple[int, int]:
    """Every shard pays for its own padding and last group."""
    codecs = W8G4.weights, W8G4.gradients
    return tuple(ranks * codec.wire_bytes(ceil_div(98304, ranks)) for codec in codecs)


@pytest.mark.parametrize(
    ("found", "stage", "param_specs", "options", "expected"),
    [
        (W8G4, 1, [MATRIX], {}, (W, G)),  # replicated weights travel in one row
        (W8G4, 2, [MATRIX], {}, (W, G)),
        *((W8G4, 3, [MATRIX], {"ranks": r}, in_shards(r)) for r in (1, 3, 7)),
        # of 33 elements one of four ranks has 9: 18 bytes, filled up to 32
        (FULL, 3, [ParamSpec("bias", (33,), BF16, True)], {}, (4 * 32, 4 * 32)),
        # gradients in the dtype that travels
        (W8G4, 1, [ParamSpec("bias", (4096,), FP32, True)], {}, (4 * 4096, 2 * 4096)),
        # frozen parameters travel under ZeRO-3 only, as weights only
        (FULL, 2, [MATRIX, FROZEN], {}, (2 * 98304, 2 * 98304)),
        (FULL, 3, [MATRIX, FROZEN], {}, (2 * (98304 + 4096), 2 * 98304)),
        # DeepSpeed's own gradients are an all-reduce in full precision
        (W8G4, 1, [MATRIX], {"stock_gradients": True}, (W, 4 * 98304)),
        # DeepSpeed gathers a frozen int8 base one byte per element
        (W8G4, 3, [ParamSpec("base", (64, 32), torch.int8, False)], {}, (2048, 0)),
        (W8G4, 1, [FROZEN], {}, (0, 0)),
    ],
)
def test_bytes_are_those_added_up_by_hand(
    found: Scheme, stage: int, param_specs: list, options: dict, expected: tuple[float, float]
) -> None:
    result = priced(found, stage, param_specs, **options)
    assert bytes_of(result) == pytest.approx(expected)
    assert result.numel == sum(
        torch.Size(item.shape).numel() for item in param_specs if item.trainable or stage == 3
    )


def test_a_rank_receives_its_share_of_every_hop() -> None:
    """With 1.5 gathers in each of 3 micro-steps, and gradients that cross once.

    Half of the elements come from the other node, which two ranks share.
    """
    result = priced(FULL, 3, [MATRIX], node_size=2, gathers=1.5)
    half = 98304  # bytes of half of the elements
    assert result.received(stage=3, micro_steps=3) == {
        "weights": {"intra": 4.5 * half, "inter": 4.5 * half / 2},
        "gradients": {"intra": 3 * half, "inter": half / 2},
    }


@pytest.mark.parametrize(("bits", "back"), [(None, 5), (4, 4), (5, 5), (8, 8)])
def test_replicas_pay_for_the_bits_of_the_sums_that_go_back(bits: int | None, back: int) -> None:
    """A matrix of 768 groups: codes of both ways, a bf16 scale each, fp32 with 8 bits."""
    found = scheme("eden4", gradients={"returned_bits": bits})
    volume = priced(found, 3, [MATRIX], node_size=2, replicas=True)
    scales = 768 * (2 + (4 if back == 8 else 2))
    assert volume.gradients * volume.numel == 98304 * (4 + back) // 8 + scales
    assert volume.weights == 0
    alone = priced(found, 3, [MATRIX], node_size=2)
    assert alone.gradients * alone.numel == 98304 * 4 // 8 + 768 * 2


def test_what_deepspeed_sends_for_muon_is_a_ring_of_its_own() -> None:
    """A whole gradient in each of 3 micro-steps, though others cross once; 8 bytes once."""
    param_specs = [MATRIX, MATRIX._replace(needs_full_gradient=True), MATRIX._replace(boundary=8)]
    ours = priced(W8G4, 2, param_specs, node_size=2)
    alone = priced(W8G4, 2, [MATRIX] * 2, node_size=2)
    assert ours.crosses_once and ours.partial_sums == pytest.approx(alone.partial_sums * 2 / 3)
    assert ours.kept == {"Muon gradients on several ranks": 1}
    own = 3 * 2 * 2 + 8  # bytes per element of a matrix
    assert ours.stock_volume_of_step(2, 3) * 3 == own
    received = [costs.received(2, micro_steps=3)["gradients"] for costs in (ours, alone)]
    for link in ("intra", "inter"):  # every second rank of the ring hears from the other node
        assert received[0][link] - received[1][link] == pytest.approx(98304 * own * 3 / 4 / 2)


@pytest.mark.parametrize(
    ("stage", "values"),
    [
        (1, 1 + 2),  # weights once, and gradients by an all-reduce
        (2, 1 + 3 * 2),  # in each of 3 micro-steps
        (3, 3 * (1.5 + 0.5)),  # 1.5 gathers, and a reduce-scatter of the half that is trained
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_deepspeed_as_shipped_sends_what_is_added_up_by_hand(
    stage: int, values: float, dtype: torch.dtype
) -> None:
    found = stock_bytes(stage, dtype, micro_steps=3, gathers=1.5, trained=0.5)
    assert found == dtype.itemsize * values


def test_what_stays_in_full_precision_is_counted_with_its_reason() -> None:
    param_specs = [
        MATRIX,
        ParamSpec("a.bias", (1024,), BF16, True),
        ParamSpec("b.norm", (96,), FP32, True),
        ParamSpec("b.tiny", (4, 4), BF16, True),
        ParamSpec("b.head", (64, 64), BF16, True),
    ]
    result = priced(W8G4, 2, param_specs)
    assert result.kept == {"1-D": 2, "small": 1, "excluded": 1}
    weights, gradients = 2 * (1024 + 16 + 4096) + 4 * 96, 2 * (1024 + 96 + 16 + 4096)
    assert bytes_of(result) == pytest.approx((W + weights, G + gradients))
    share = (weights + gradients) / (W + G + weights + gradients)
    assert result.full_precision_share == pytest.approx(share)
    base = priced(W8G4, 3, [ParamSpec("x", (64, 32), torch.int8, False)])
    assert base.full_precision_share == 1 and base.kept == {"int8": 1}


def test_buckets_under_way_take_memory_each() -> None:
    routes = Routes(scheme=W8G4, stage=3, nodes=1, node_size=4)
    plain = {"weights": 0, "gradients": 1, "full_precision_share": 0, "kept": {}}
    comm_volume = CommVolume(numel=10**6, routes=routes, **plain)
    sizes = Sizes(trained=10**6, largest=10**4, bucket=10**5)
    one, three = (peak_bytes(comm_volume, replace(sizes, under_way=n)) for n in (1, 3))
    # What is sent and arrives, a byte per element, and fp32 sums of a quarter.
    assert one == 2 * 10**5 + 10**5 and three == 3 * one


def test_gradients_that_cross_at_once_keep_what_they_need_between_the_nodes() -> None:
    """A bucket keeps both messages of an exchange, the own part of a row and its sums in fp32."""
    routes = Routes(scheme=W8G4, stage=3, nodes=2, node_size=4, replicas=True)
    plain = {"weights": 0, "gradients": 1, "full_precision_share": 0, "kept": {}}  # 1/2 each way
    comm_volume = CommVolume(numel=10**6, routes=routes, gradients_intra=1, returned=0.5, **plain)
    sizes = Sizes(
        trained=10**6, largest=10**4, bucket=10**5, slicing=Slicing(count=1), crossing_at_once=True
    )
    row = 10**5 // 4
    inside = 2 * (3 / 4 * 10**5) + row * 4  # bytes that a module has inside its node
    crossing = row / 2 * (2 * 0.5 + 2 * 4)
    returned = (row / 2 + row) * 0.5
    assert peak_bytes(comm_volume, sizes) == inside + 10 * crossing + returned


@pytest.mark.parametrize(("nodes", "share"), [(1, 1 + 1 / 4), (2, 1 + 1 / 4 + 1 / 2)])
@pytest.mark.parametrize(
    ("stage", "sizes", "elements"),
    [
        (2, {"window": 10**5}, 2 * 10**5),  # one is decoded, one on its way
        (2, {"window": 10**7}, 10**6),
        (3, {"prefetch": 10**5}, 10**5),
        (3, {"prefetch": 10**5, "largest": 3 * 10**5}, 3 * 10**5),
        (3, {"prefetch": 10**7}, 10**6),
    ],
)
def test_messages_of_weights_take_memory(
    stage: int, sizes: dict, elements: int, nodes: int, share: float
) -> None:
    """Rows of all ranks and the own one, a byte an element; over two levels those of a node too."""
    routes = Routes(scheme=W8G4, stage=stage, nodes=nodes, node_size=4 // nodes)
    plain = {"weights": 1, "gradients": 0, "full_precision_share": 0, "kept": {}}
    comm_volume = CommVolume(numel=10**6, routes=routes, **plain)
    assert (
        peak_bytes(comm_volume, Sizes(**{"trained": 0, "largest": 0} | sizes)) == elements * share
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_lossless_differences_are_priced_at_a_learning_rate_and_at_most(stage: int) -> None:
    """2.36 bits of every 16-bit weight of any shape; 16 at most; fp32 weights as they are."""
    param_specs = [
        MATRIX,
        ParamSpec("a.bias", (1024,), BF16, True),
        ParamSpec("b.weight", (64, 64), FP32, True),
        ParamSpec("frozen", (4096, 8), BF16, False),
    ]
    result = priced(LOSSLESS, stage, param_specs, node_size=2)
    sent, plain = 98304 + 1024, 4 * 4096
    expected = -(-round(98304 * 2.36) // 8) + -(-round(1024 * 2.36) // 8) + plain
    assert result.weights * result.numel == expected
    assert result.weights_most * result.numel == 2 * sent + plain
    assert result.varies and result.routes.keeps_shard == (stage == 3)
    assert result.kept == {"1-D": 1, "fp32 weights": 1}
    low, most = (result.step_bytes(stage, micro_steps=8, most=most) for most in (False, True))
    assert result.step_bytes(stage, micro_steps=8) == low
    assert (most - low) * result.numel == pytest.approx(2 * sent + plain - expected)
    assert result.partial_sums * result.numel == pytest.approx(
        4 * (sent + 4096) / 2
    )  # of trained ones
    if stage == 2:
        assert result.weights_intra == result.weights  # forwarded as they came


def test_lossless_differences_need_nodes_under_zero3() -> None:
    """Where nothing is kept, weights are gathered in full precision."""
    result = priced(LOSSLESS, 3, [MATRIX])
    assert result.weights * result.numel == 2 * 98304 and not result.varies
    assert priced(scheme("lossless"), 2, [MATRIX]).kept == {}


# ---- how often ZeRO-3 gathers weights ----

N = 64 * 64
ALL = 10**9
# (reuse distance, prefetch) in layers -> gathers counted with room for all layers, of a model of 8
# equal layers on DeepSpeed 0.19.8, steps 2 to 5, which are alike.
COUNTED = {
    (0, 0): 2, (0, 1): 1.75, (0, 3): 1, (0, ALL): 1, (1, 0): 1.875, (1, 1): 1.75, (1, 3): 1,
    (1, ALL): 1, (4, 0): 1.75, (4, 1): 1.75, (4, 3): 1, (6, 0): 1.625, (6, 1): 1.625, (6, 3): 1,
    (ALL, 0): 1, (ALL, 1): 1, (ALL, 3): 1, (ALL, ALL): 1,
}  # fmt: skip


@pytest.mark.parametrize(("reuse", "prefetch"), COUNTED)
def test_the_rule_is_close_to_what_was_counted(reuse: int, prefetch: int) -> None:
    """One layer more or less is an eighth of so few."""
    settings = FetchSettings(
        max_reuse_distance=reuse * N, prefetch_bucket_size=prefetch * N, max_live_parameters=ALL * N
    )
    expected = COUNTED[reuse, prefetch]
    assert expected <= settings.gathers(8 * N, 8) <= expected + 2 / 8


def test_by_default_a_small_model_is_gathered_once_and_a_large_one_nearly_twice() -> None:
    assert FetchSettings().gathers(10**8, 10) == 1
    assert FetchSettings().gathers(7 * 10**9, 198) == pytest.approx(2 - 1 / 7)
    assert FetchSettings().gathers(0, 0) == 1
