"""Ranks that leave out different layers (LayerDrop) end together under ZeRO-1 and 2, where gloo
alone aborts or mixes gradients of different parameters; ranks that leave out the same ones train.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.harness import run, run_each
from tests.distributed.models import build, settings

WIDTH, LAYERS = 64, 6
ONE, SEVERAL = 10**6, 5000  # elements of a bucket; a layer has 4160
Dropped = tuple[int, ...]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, dropped: Dropped) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            if place not in dropped:
                x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def descend(
    stage: int, block: dict[str, Any], bucket: int, accumulation: int, plan: tuple[Dropped, ...]
) -> int:
    """Two whole steps, then two in which rank i leaves out ``plan[i]``; the steps taken."""
    zero = {"reduce_bucket_size": bucket}
    config = settings(stage, block, dtype="bf16", accumulation=accumulation, zero=zero)
    engine, mine = build(config, Residual), plan[torch.distributed.get_rank() % len(plan)]
    for step in range(4):
        for _ in range(accumulation):
            engine.backward(engine(torch.randn(4, WIDTH).bfloat16(), mine if step > 1 else ()))
            engine.step()
    return engine.global_steps


QSDP, SDP4BIT = {"scheme": "qsdp"}, {"scheme": "sdp4bit", "node_size": 2}


@pytest.mark.parametrize(
    ("stage", "block", "bucket", "accumulation", "plan", "said"),
    [
        (1, QSDP, ONE, 1, ((0,), (1,)), "those of 10 parameter(s) now"),  # of equal sizes
        (1, QSDP, SEVERAL, 1, ((5,), ()), "those of 0 parameter(s) now"),  # at its step
        (2, QSDP, ONE, 1, ((), (3, 4)), "rank 1 those of 8"),
        (2, SDP4BIT, SEVERAL, 2, ((), (), (2,), ()), "layers.2."),  # which waits until the last one
    ],
)  # fmt: skip
def test_ranks_that_leave_out_different_layers_end_together(
    stage: int, block: dict[str, Any], bucket: int, accumulation: int, plan: Any, said: str
) -> None:
    for steps, error in run_each(
        descend, len(plan), stage, block, bucket, accumulation, plan, timeout=30
    ):
        assert steps is None and "quantized_comm: step 2: ranks reduce different" in error, error
        assert said in error and "one of them lacks layers." in error


@pytest.mark.parametrize(("stage", "accumulation"), [(1, 2), (2, 1)])
def test_ranks_that_leave_out_the_same_layers_train(stage: int, accumulation: int) -> None:
    assert run(descend, 2, stage, QSDP, SEVERAL, accumulation, ((0, 3),)) == [4, 4]
