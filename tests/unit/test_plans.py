"""Plans that are remembered: whatever decides what a plan is, another value of it makes another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_quant.comm.reduction_plan import LinkHop
from ds_quant.zero import gradients
from ds_quant.zero.gradients import GradientReducer, Layout, OwnerReduction, ShardReduction
from ds_quant.zero.param import GradientStreams, exact_gradient
from ds_quant.zero.replica import Replica

BF16, FP32 = torch.bfloat16, torch.float32


class Ranks:
    """A link."""

    process_group, is_gloo = None, False

    def __init__(self, size: int) -> None:
        self.size, self.rank, self.process_group = size, 0, None


class Tracked:
    """A parameter in full precision."""

    def __init__(self, numel: int) -> None:
        self.shape = torch.Size([numel])

    def gradient_streams(self, dtype: torch.dtype, *, rank: int, hops: int) -> GradientStreams:
        return exact_gradient(dtype, hops)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of one hop; sums hold nothing, and a reduction is its layout."""
    monkeypatch.setattr(gradients, "GradientSums", lambda *args, **how: SimpleNamespace(own={}))
    monkeypatch.setattr(GradientReducer, "_begin", lambda self, layout, *args: layout)
    monkeypatch.setattr(gradients, "Bucket", lambda params, shards, sums, noted: sums)
    tracked: dict[int, Tracked] = {}
    made = SimpleNamespace(asked=set(), step=0, noted=None)
    made.param_of = lambda p: tracked.setdefault(id(p), Tracked(p.numel()))
    made.route = lambda group: (LinkHop(link=None),)
    return made


ALPHA, BETA = torch.empty(64), torch.empty(64)


def shard_layouts(plugin: Any) -> Any:
    """A function that begins the reduction of a ZeRO-3 bucket of one gradient."""
    reduction, usual = ShardReduction(plugin), {"param": ALPHA, "dtype": BF16, "exact": False}
    usual["link"] = Ranks(2)

    def begin(**other: Any) -> Layout:
        facts = usual | other
        plugin.link, plugin.is_exact = lambda _: facts["link"], lambda _: facts["exact"]
        gradient = torch.empty(facts["param"].numel(), dtype=facts["dtype"])
        return reduction.begin([facts["param"]], [gradient], None)

    return begin


OTHER_SHARDS = {"param": BETA, "dtype": FP32, "exact": True, "link": Ranks(3)}


@pytest.mark.parametrize("fact", OTHER_SHARDS)
def test_equal_buckets_of_zero3_share_a_plan_and_others_do_not(plugin: Any, fact: str) -> None:
    begin = shard_layouts(plugin)
    usual = begin()
    assert begin() is usual
    other = begin(**{fact: OTHER_SHARDS[fact]})
    assert other is not usual
    assert (other.sums is usual.sums) == (fact in ("param", "exact")), "layers are alike"
    assert begin() is usual


def owner_layouts(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same of a bucket of ZeRO-1/2."""
    reduction = OwnerReduction(plugin, None)
    found: list[Layout] = []
    monkeypatch.setattr(
        GradientReducer,
        "_begin",
        lambda self, layout, *args: found.append(layout) or SimpleNamespace(wait=lambda: None),
    )
    usual = {
        "range": (0, 64), "owner": 1, "dtype": BF16, "divisor": 2.0, "link": Ranks(2),
        "param": ALPHA, "exact": False,
    }  # fmt: skip

    def reduce(**other: Any) -> Layout:
        facts = usual | other
        plugin.is_exact = lambda _: facts["exact"]
        bucket, (start, stop) = torch.empty(64), facts["range"]
        call = {"communication_data_type": facts["dtype"], "bucket_ranks": [facts["owner"]]}
        with reduction.bucket(bucket, [facts["param"]], facts["divisor"]):
            reduction._reduce_to_owners(
                call | {"small_bucket": [bucket[start:stop]]}, facts["link"]
            )
        return found.pop()

    return reduce


OTHER_OWNERS = {
    "range": (0, 32),
    "owner": 2,
    "dtype": FP32,
    "divisor": 1.0,
    "link": Ranks(3),
    "param": BETA,
    "exact": True,
}


@pytest.mark.parametrize("fact", OTHER_OWNERS)
def test_equal_buckets_of_zero2_share_a_plan_and_others_do_not(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, fact: str
) -> None:
    reduce = owner_layouts(plugin, monkeypatch)
    usual = reduce()
    assert reduce() is usual
    assert reduce(**{fact: OTHER_OWNERS[fact]}) is not usual
    assert reduce() is usual


def gather_plans() -> Any:
    """The same of the weights of ZeRO-1/2."""
    replica, fabric = object.__new__(Replica), SimpleNamespace(rank=0, size=2, node_size=None)
    replica._plans = {}
    usual = {"group": 0, "window": range(8), "exact": False, "from_master": False}

    def plan(**other: Any) -> object:
        facts = usual | other
        group = SimpleNamespace(index=facts["group"], flat=torch.empty(16), params=[])
        return replica._plan(group, fabric, *(facts[n] for n in ("window", "exact", "from_master")))

    return plan


OTHER_GATHERS = {"group": 1, "window": range(8, 16), "exact": True, "from_master": True}


@pytest.mark.parametrize("fact", OTHER_GATHERS)
def test_equal_windows_of_weights_share_a_plan_and_others_do_not(fact: str) -> None:
    plan = gather_plans()
    usual = plan()
    assert plan() is usual
    assert plan(**{fact: OTHER_GATHERS[fact]}) is not usual
