"""Host cost of a training step as one rank of 4, 16 and 64: calls, kernel launches, messages.

``python -m tests.distributed.host_cost`` prints the figures. A count may exceed its budget by 5 %.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import pytest

from ds_quant.config.presets import preset_names
from ds_quant.config.schema import parse_block
from tests import needs
from tests.distributed.host_cost import World as W
from tests.distributed.host_cost import (
    llama_layer,
    main,
    measure,
    measure_fsdp2,
    small_layers,
)
from tests.thin import thinned


class Budget(NamedTuple):
    calls: int  # of the plugin's Python functions, per parameter; all else per step
    kernels: int  # launches on CUDA: the plugin's own kernels and torch's
    messages: int


# 24 parameters. Nodes x ranks per node. Most kernels of schemes that keep weights between steps
# take fingerprints of them, in runs of the CPU's size: on CUDA a run is 32 times as long.
BUDGETS = {
    ("qsdp", 2, W(2, 2)): Budget(calls=10, kernels=24, messages=4),
    ("qsdp", 2, W(4, 4)): Budget(calls=10, kernels=24, messages=4),
    ("qsdp", 2, W(8, 8)): Budget(calls=10, kernels=24, messages=4),
    ("qsdp", 3, W(2, 2)): Budget(calls=29, kernels=28, messages=10),
    ("qsdp", 3, W(4, 4)): Budget(calls=29, kernels=28, messages=10),
    ("qsdp", 3, W(8, 8)): Budget(calls=29, kernels=28, messages=10),
    ("sdp4bit", 2, W(2, 2)): Budget(calls=11, kernels=71, messages=4),
    ("sdp4bit", 2, W(4, 4)): Budget(calls=11, kernels=71, messages=4),
    ("sdp4bit", 2, W(8, 8)): Budget(calls=11, kernels=71, messages=4),
    ("sdp4bit", 3, W(2, 2)): Budget(calls=32, kernels=61, messages=10),
    ("sdp4bit", 3, W(4, 4)): Budget(calls=32, kernels=61, messages=10),
    ("sdp4bit", 3, W(8, 8)): Budget(calls=32, kernels=62, messages=10),
}
# The same in all of one layer of Llama-7B under ZeRO-3, 4 nodes of 8 ranks.
LAYER = {
    "full_precision": Budget(calls=432, kernels=7, messages=10),
    "lossless": Budget(calls=654, kernels=83, messages=9),
    "lossless_w_g3": Budget(calls=737, kernels=86, messages=9),
    "qsdp": Budget(calls=461, kernels=14, messages=10),
    "sdp4bit": Budget(calls=576, kernels=66, messages=8),
    "eden3": Budget(calls=660, kernels=66, messages=8),
}
QUICK = ("full_precision", "qsdp", "sdp4bit")
GROWTH = 1.05  # of calls from 4 to 64 ranks, at most; 1.0 would be independent of the ranks


MARGIN = 1.05  # of a budget, so that a helper function does not fail the test


def check(found: Budget, budget: Budget) -> None:
    for field in Budget._fields:
        count, limit = getattr(found, field), getattr(budget, field)
        assert 0 < count <= MARGIN * limit, f"{field}: {count}, budget {limit}"


@functools.cache
def spent(scheme: str, stage: int, world: W) -> dict[str, float]:
    return measure(small_layers(world, stage, scheme))


@pytest.mark.parametrize(
    ("scheme", "stage", "world"),
    thinned(BUDGETS, lambda scheme, stage, world: world == W(8, 8)),
    ids=str,
)
def test_a_step_stays_within_its_budget(scheme: str, stage: int, world: W) -> None:
    budget, counts = BUDGETS[scheme, stage, world], spent(scheme, stage, world)
    found = Budget(
        calls=counts["calls"] / counts["parameters"],
        kernels=counts["launches"] + counts.get("torch", 0),
        messages=counts["messages"],
    )
    if not needs.has_deepspeed("0.19"):  # a replica that autograd follows, exact gathers one by one
        extra_calls, extra_kernels = (1, 4) if stage == 3 else (0, 0)
        budget = Budget(
            calls=budget.calls + extra_calls,
            kernels=budget.kernels + extra_kernels,
            messages=budget.messages,
        )
    check(found, budget)


@pytest.mark.parametrize("scheme", thinned(LAYER, lambda scheme: scheme in QUICK))
def test_a_layer_of_a_large_model_stays_within_its_budget(scheme: str) -> None:
    needs.deepspeed("0.19", "fetches in another way")
    counts = measure(llama_layer(scheme))
    kernels = counts["launches"] + counts.get("torch", 0)
    found = Budget(counts["calls"], kernels, counts["messages"])
    check(found, LAYER[scheme])


# ---- under FSDP2 ----

# The layer of Llama-7B with a replica in each of 4 nodes.
REPLICAS = {
    "full_precision": Budget(calls=283, kernels=5, messages=5),
    "eden4": Budget(calls=446, kernels=11, messages=5),
}
NOTICING = 61


def check_fsdp2(scheme: str, zero: Budget) -> None:
    """Compare a Llama layer under FSDP2 with the same layer under ZeRO-3.

    Nodes that keep weights exchange 16-bit copies of the masters. FSDP2 has no such copies: one
    more kernel casts all of a module, which is not compared. DeepSpeed casts its own after every
    optimizer step. FSDP2 compares fp32 masters, once more before an optimizer step: ``NOTICING``
    kernels more for runs of weights of half a megabyte (16 MB on CUDA), not per parameter.
    """
    counts = measure_fsdp2(llama_layer(scheme))
    others = counts.get("torch", 0)
    if parse_block({"scheme": scheme}).keeps_node_shard:
        others -= NOTICING
    casts = min(1, others)
    kernels = counts["launches"] + others - casts
    check(Budget(counts["calls"], kernels, counts["messages"]), zero)


@pytest.mark.parametrize("scheme", QUICK)
def test_a_layer_under_fsdp2_stays_within_the_budget_of_zero3(scheme: str) -> None:
    check_fsdp2(scheme, LAYER[scheme])


@pytest.mark.parametrize("scheme", REPLICAS)
def test_a_layer_with_replicas_stays_within_its_budget(scheme: str) -> None:
    counts = measure_fsdp2(replace(llama_layer(scheme), replicas=True))
    kernels = counts["launches"] + counts.get("torch", 0)
    check(Budget(counts["calls"], kernels, counts["messages"]), REPLICAS[scheme])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", sorted(set(preset_names()) - set(QUICK)))
def test_a_layer_under_fsdp2_costs_the_host_no_more_than_under_zero3(scheme: str) -> None:
    needs.deepspeed("0.19", "fetches in another way")
    zero = measure(llama_layer(scheme))
    kernels = zero["launches"] + zero.get("torch", 0)
    check_fsdp2(scheme, Budget(zero["calls"], kernels, zero["messages"]))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["qsdp", "sdp4bit"])
def test_growth_of_calls_with_the_ranks_is_bounded_under_fsdp2(scheme: str) -> None:
    few, many = (measure_fsdp2(small_layers(W(n, n), 3, scheme)) for n in (2, 8))
    assert many["calls"] <= GROWTH * few["calls"]
    assert many["launches"] <= few["launches"] + 1  # very small shards are launched apart


# ---- all ----


@pytest.mark.parametrize(
    ("scheme", "stage"),
    thinned(
        [("qsdp", 2), ("qsdp", 3), ("sdp4bit", 3), ("sdp4bit", 2)],
        lambda *case: case in (("qsdp", 2), ("sdp4bit", 3)),
    ),
)
def test_growth_of_calls_with_the_ranks_is_bounded(scheme: str, stage: int) -> None:
    few, many = (spent(scheme, stage, W(n, n))["calls"] for n in (2, 8))
    assert many <= GROWTH * few


@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_of_deepspeed_alone_is_counted(stage: int) -> None:
    counts = measure(small_layers(W(2, 2), stage, None))
    ours = [counts.get(key, 0) for key in ("calls", "views", "torch", "launches", "messages")]
    assert ours == [0] * 5
    assert counts["all views"] > 0 and counts["all torch"] > 0


@pytest.mark.slow
def test_figures_of_a_llama_layer_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--llama-layer", "--schemes", "none", "qsdp"]) == 0
    alone, ours = capsys.readouterr().out.splitlines()
    assert alone.startswith("none ZeRO-3 4x8: ") and " 0 calls " in alone
    assert ours.startswith("qsdp ZeRO-3 4x8: ") and " 0 calls " not in ours
