"""Plans that are remembered: whatever decides what a plan is, another value of it makes another."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_quant.comm.transport import Communicator
from ds_quant.runtime.plan_cache import PlanCache
from ds_quant.zero import shard_gradients
from ds_quant.zero.gradients import BucketLayout, GradientReducer
from ds_quant.zero.lossless import Window
from ds_quant.zero.owner_gradients import OwnerReduction
from ds_quant.zero.replica import Replica, SentWeights
from ds_quant.zero.shard_gradients import ShardReduction
from tests.world import World

BF16, FP32 = torch.bfloat16, torch.float32
ALPHA, BETA = (nn.Parameter(torch.empty(64)) for _ in range(2))
WORLD = World(1, 3, module=nn.ParameterList([ALPHA, BETA]), scheme="full_precision")
Found = Callable[..., object]


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a front with one hop, whose reductions are their layouts."""
    monkeypatch.setattr(GradientReducer, "_begin", lambda self, layout, *args: layout)
    monkeypatch.setattr(shard_gradients, "ShardBucket", lambda shards, sums, noted: sums)
    return WORLD.ranks[0]


def shard_layouts(front: Any, monkeypatch: pytest.MonkeyPatch) -> Found:
    """Find the layouts of a ZeRO-3 bucket of one gradient."""
    reduction = ShardReduction(front, None)

    def begin(
        *, param: torch.Tensor, dtype: torch.dtype, exact: bool, link: Communicator
    ) -> BucketLayout:
        monkeypatch.setattr(front.run, "communicator", lambda _: link)
        monkeypatch.setattr(front.run, "is_full_precision", lambda _: exact)
        return reduction.begin([param], [torch.empty(param.numel(), dtype=dtype)], None)

    return begin


def owner_layouts(front: Any, monkeypatch: pytest.MonkeyPatch) -> Found:
    """Find the layouts of a bucket of ZeRO-1/2."""
    reduction, found = OwnerReduction(front, None, None), list[BucketLayout]()
    monkeypatch.setattr(
        GradientReducer,
        "_begin",
        lambda self, layout, *args: found.append(layout) or SimpleNamespace(wait=lambda: None),
    )

    def reduce(
        *, param: torch.Tensor, dtype: torch.dtype, exact: bool, link: Communicator, range: slice,
        owner: int, divisor: float,
    ) -> BucketLayout:  # fmt: skip
        monkeypatch.setattr(front.run, "communicator", lambda _: link)
        monkeypatch.setattr(front.run, "is_full_precision", lambda _: exact)
        bucket = torch.empty(64)
        call = {"communication_data_type": dtype, "bucket_ranks": [owner]}
        with reduction.bucket(bucket, [param], divisor):
            arguments = call | {"small_bucket": [bucket[range]]}
            reduction._reduce_to_owners(bucket, arguments, link)
        return found.pop()

    return reduce


def gather_plans(front: Any, monkeypatch: pytest.MonkeyPatch) -> Found:
    """Find the plans of gathers of the weights of ZeRO-1/2."""
    replica, hierarchy = object.__new__(Replica), SimpleNamespace(rank=0, size=2, node_size=None)
    replica._plans, replica._offsets = PlanCache(), {}

    def plan(
        *, group: int, window: range, exact: bool, from_master: bool, written: frozenset
    ) -> object:
        group = SimpleNamespace(
            group_index=group, flat=torch.empty(16), owned_ranges=lambda *_: iter(())
        )
        sent = SentWeights(step=0, exact=exact, from_master=from_master, written=written)
        return replica._plan(Window(group, hierarchy, window), sent)

    return plan


# What a plan follows from, each with another value.
BUCKET = {
    "param": (ALPHA, BETA), "dtype": (BF16, FP32), "exact": (False, True),
    "link": (WORLD.communicator([0, 1, 2], 0), WORLD.communicator([0, 1], 0)),
}  # fmt: skip
OWNERS = {"range": (slice(64), slice(32)), "owner": (1, 2), "divisor": (2.0, 1.0)}
WINDOW = {
    "group": (0, 1), "window": (range(8), range(8, 16)), "exact": (False, True),
    "from_master": (False, True), "written": (frozenset(), frozenset({ALPHA})),
}  # fmt: skip
FACTS = {shard_layouts: BUCKET, owner_layouts: BUCKET | OWNERS, gather_plans: WINDOW}


@pytest.mark.parametrize(("make", "fact"), [(make, fact) for make in FACTS for fact in FACTS[make]])
def test_equal_work_shares_a_plan_and_other_work_does_not(
    front: Any, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Found], fact: str
) -> None:
    plan_of = make(front, monkeypatch)
    usual = {name: values[0] for name, values in FACTS[make].items()}
    plan = plan_of(**usual)
    assert plan_of(**usual) is plan
    other = plan_of(**usual | {fact: FACTS[make][fact][1]})
    assert other is not plan
    if make is not gather_plans:
        assert (other.reduction is plan.reduction) == (fact in ("param", "exact")), (
            "layers are alike"
        )
    assert plan_of(**usual) is plan


def test_a_cache_of_a_thousand_plans_begins_anew() -> None:
    plans: PlanCache[int, str] = PlanCache()
    assert [plans.add(key, f"plan {key}") for key in range(3)] == ["plan 0", "plan 1", "plan 2"]
    for key in range(3, 1000):
        plans.add(key, "another plan")
    assert list(plans) == list(range(1000)) and plans[2] == "plan 2"
    assert plans.add(1000, "the next") == "the next" and dict(plans) == {1000: "the next"}
