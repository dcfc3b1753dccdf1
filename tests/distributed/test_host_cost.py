"""A budget of what a training step costs the host as one rank of 4, 16 and 64.

The figures are those of the code as it is; python -m tests.distributed.host_cost prints them again.
A change that needs less lowers them here.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest

from tests import needs
from tests.distributed.host_cost import World as W
from tests.distributed.host_cost import main, measure, small_layers

pytestmark = pytest.mark.distributed


class Budget(NamedTuple):
    calls: int  # of the plugin's Python functions, per parameter; all else per step
    views: int  # of tensors, made by the plugin
    kernels: int  # launches on CUDA: the plugin's own kernels and torch's
    messages: int


# 24 parameters. Nodes x ranks per node.
BUDGETS = {
    ("qsdp", 2, W(2, 2)): Budget(calls=14, views=154, kernels=30, messages=4),
    ("qsdp", 2, W(4, 4)): Budget(calls=17, views=136, kernels=56, messages=4),
    ("qsdp", 2, W(8, 8)): Budget(calls=19, views=224, kernels=117, messages=4),
    ("qsdp", 3, W(2, 2)): Budget(calls=50, views=347, kernels=93, messages=10),
    ("qsdp", 3, W(4, 4)): Budget(calls=50, views=371, kernels=117, messages=10),
    ("qsdp", 3, W(8, 8)): Budget(calls=50, views=419, kernels=165, messages=10),
    ("sdp4bit", 2, W(2, 2)): Budget(calls=14, views=151, kernels=28, messages=4),
    ("sdp4bit", 2, W(4, 4)): Budget(calls=16, views=123, kernels=51, messages=4),
    ("sdp4bit", 2, W(8, 8)): Budget(calls=18, views=209, kernels=111, messages=4),
    ("sdp4bit", 3, W(2, 2)): Budget(calls=65, views=628, kernels=150, messages=10),
    ("sdp4bit", 3, W(4, 4)): Budget(calls=65, views=652, kernels=174, messages=10),
    ("sdp4bit", 3, W(8, 8)): Budget(calls=66, views=796, kernels=254, messages=10),
}
GROWTH = 1.5  # of calls from 4 to 64 ranks, at most; 1.0 would be independent of the ranks


@functools.cache
def spent(scheme: str, stage: int, world: W) -> dict[str, float]:
    return measure(small_layers(world, stage, scheme))


@pytest.mark.parametrize(("scheme", "stage", "world"), BUDGETS, ids=str)
def test_a_step_stays_within_its_budget(scheme: str, stage: int, world: W) -> None:
    budget, counts = BUDGETS[scheme, stage, world], spent(scheme, stage, world)
    found = Budget(
        calls=counts["calls"] / counts["parameters"],
        views=counts["views"],
        kernels=counts["launches"] + counts["torch"],
        messages=counts["messages"],
    )
    if not needs.has_deepspeed("0.19"):  # a replica that autograd follows, exact gathers one by one
        calls, views, kernels, messages = budget
        more = (1, 2, 4) if stage == 3 else (0, 1, 0)
        budget = Budget(calls + more[0], views + more[1], kernels + more[2], messages)
    assert all(0 < now <= most for now, most in zip(found, budget, strict=True)), found


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("scheme", ["qsdp", "sdp4bit"])
def test_growth_of_calls_with_the_ranks_is_bounded(scheme: str, stage: int) -> None:
    few, many = (spent(scheme, stage, W(n, n))["calls"] for n in (2, 8))
    assert many <= GROWTH * few


@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_of_deepspeed_alone_is_counted(stage: int) -> None:
    counts = measure(small_layers(W(2, 2), stage, None))
    ours = [counts.get(key, 0) for key in ("calls", "views", "torch", "launches", "messages")]
    assert ours == [0] * 5
    assert counts["all views"] > 0 and counts["all torch"] > 0


def test_figures_of_a_llama_layer_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--llama-layer", "--schemes", "none", "qsdp", "--slices", "2"]) == 0
    alone, ours = capsys.readouterr().out.splitlines()
    assert alone.startswith("none ZeRO-3 4x8: ") and " 0 calls " in alone
    assert ours.startswith("qsdp ZeRO-3 4x8: ") and " 0 calls " not in ours
