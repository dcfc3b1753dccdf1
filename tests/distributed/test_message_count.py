"""Messages of a step: one per DeepSpeed bucket (or fetch), hop and slice, however many parameters.

What DeepSpeed hands over is counted where it does: buckets of gradients, fetches of parameters.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import ds_quant
from ds_quant.zero.fetch import Fetch
from tests.distributed.harness import run_all
from tests.distributed.models import build, settings
from tests.thin import thinned

pytestmark = pytest.mark.distributed

WIDTH, LAYERS, BATCH = 24, 20, 4
BUCKETS = {"one bucket": 10**6, "buckets": 4000}  # elements
TOPOLOGIES = {"one hop": (2, 2), "two hops": (4, 2)}  # world, node size
HANDED_OVER = ("average_tensor", "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads")


class Many(nn.Module):
    """20 blocks of a matrix, a bias and a norm: 80 parameters of 24 or 576 elements."""

    def __init__(self) -> None:
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))  # noqa: E731
        self.layers = nn.Sequential(*(block() for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


def step(engine: Any) -> None:
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
    engine.backward(engine(x.bfloat16()))
    engine.step()


def counted(owner: Any, name: str, key: str, counts: Counter[str]) -> None:
    """Count the calls of ``owner.name``."""
    original = getattr(owner, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[key] += 1
        return original(*args, **kwargs)

    setattr(owner, name, counting)


def messages(
    stage: int, scheme: str, node_size: int, bucket_numel: int, slices: int
) -> Counter[str]:
    """Of one steady step: buckets and fetches of DeepSpeed, collectives by role."""
    counts: Counter[str] = Counter()
    counted(Fetch, "fetch", "fetches", counts)  # of this process
    block = {"scheme": scheme, "node_size": node_size, "min_numel": 100, "slices": slices}
    zero: dict[str, Any] = {"reduce_bucket_size": bucket_numel}
    if stage == 3:
        # With prefetch: many parameters in a fetch.
        zero |= {"stage3_prefetch_bucket_size": 9000, "stage3_max_live_parameters": 9000}
    engine = build(settings(stage, block, dtype="bf16", zero=zero), Many)
    for name in HANDED_OVER:
        if hasattr(engine.optimizer, name):
            counted(engine.optimizer, name, "buckets", counts)
    for _ in range(3):  # ZeRO-3 records its trace in the second one
        step(engine)
    counts.clear()
    before = ds_quant.report(engine)["collectives"]
    step(engine)
    counts.update(ds_quant.report(engine)["collectives"])
    counts.subtract(before)
    return counts


@pytest.mark.parametrize(
    ("scheme", "topology", "buckets"),
    [  # every two of them
        ("qsdp", "one hop", "buckets"),
        ("qsdp", "two hops", "one bucket"),
        ("sdp4bit", "one hop", "one bucket"),
        ("sdp4bit", "two hops", "buckets"),
    ],
)
@pytest.mark.parametrize("stage", thinned([1, 2, 3], lambda stage: stage > 1))
def test_one_message_per_bucket_and_hop(
    stage: int, scheme: str, topology: str, buckets: str
) -> None:
    world, node_size = TOPOLOGIES[topology]
    levels = world // node_size
    cases = tuple((s, scheme, node_size, BUCKETS[buckets], 1) for s in (2, 3))
    case = (stage, *cases[0][1:])
    for counts in run_all(messages, world, cases if case in cases else (case,))[case]:
        assert counts["buckets"] == 1 if buckets == "one bucket" else 2 < counts["buckets"] < LAYERS
        if stage == 3:
            assert counts["gradients"] == levels * counts["buckets"]
            assert 1 <= counts["fetches"] < 2 * LAYERS  # of 160 gathers of a parameter
            in_node = scheme == "sdp4bit" and levels == 2  # gathers from the node shard, one hop
            expected = 1 + counts["fetches"] if in_node else levels * counts["fetches"]
            assert counts["weights"] == expected
        else:
            # A bucket that belongs to few ranks takes one more hop: sums to their owners.
            least = levels * counts["buckets"]
            assert least <= counts["gradients"] <= least + counts["buckets"]
            assert counts["weights"] == levels


@pytest.mark.parametrize("stage", [2, 3])
def test_one_message_per_slice_and_hop(stage: int) -> None:
    cases = tuple((s, "sdp4bit", 2, 10**6, 2) for s in (2, 3))
    for counts in run_all(messages, 4, cases)[(stage, *cases[0][1:])]:
        assert counts["buckets"] == 1
        assert 2 * 2 <= counts["gradients"] <= 2 * 2 + 1
