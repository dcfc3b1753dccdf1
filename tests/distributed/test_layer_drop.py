"""Ranks that leave out different layers (LayerDrop) end together under ZeRO-1 and 2, where gloo
alone aborts or mixes gradients of different parameters; ranks that leave out the same ones train.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.distributed.harness import on_ranks
from tests.distributed.models import QSDP, engine_of

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


def train_without(
    stage: int,
    block: dict[str, Any] | None,
    bucket: int,
    accumulation: int,
    plan: tuple[Dropped, ...],
) -> list[float]:
    """Train two whole steps, then two in which rank i leaves out ``plan[i]``. Return the losses of
    this rank, one for each micro-step.
    """
    zero = {"reduce_bucket_size": bucket}
    engine = engine_of(stage, block, Residual, accumulation=accumulation, zero=zero)
    rank = torch.distributed.get_rank()
    data = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(4):
        dropped = plan[rank % len(plan)] if step > 1 else ()
        for _ in range(accumulation):
            x = torch.randn(4, WIDTH, generator=data)
            loss = engine(x.bfloat16(), dropped)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


SDP4BIT = {"scheme": "sdp4bit", "node_size": 2}


@pytest.mark.parametrize(
    ("world", "case", "said"),
    [
        (2, (1, QSDP, ONE, 1, ((0,), (1,))), r"those of 10 parameter\(s\) now"),  # of equal sizes
        (2, (1, QSDP, SEVERAL, 1, ((5,), ())), r"those of 0 parameter\(s\) now"),  # at its step
        (2, (2, QSDP, ONE, 1, ((), (3, 4))), "rank 1 those of 8"),
        # which waits until the last one
        (4, (2, SDP4BIT, SEVERAL, 2, ((), (), (2,), ())), r"layers\.2\."),
    ],
)  # fmt: skip
@on_ranks(timeout=30)
def test_ranks_that_leave_out_different_layers_end_together(
    world: int, case: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(RuntimeError, match=said) as caught:
        train_without(*case)
    assert "quantized_comm: step 2: ranks reduce different" in str(caught.value)
    assert "one of them lacks layers." in str(caught.value)


@pytest.mark.parametrize(("stage", "accumulation"), [(1, 2), (2, 1)])
@on_ranks()
def test_ranks_that_leave_out_the_same_layers_train(stage: int, accumulation: int) -> None:
    plain, ours = (
        train_without(stage, block, SEVERAL, accumulation, ((0, 3),)) for block in (None, QSDP)
    )
    assert ours != plain
    np.testing.assert_allclose(ours, plain, rtol=0.005)  # twice what was measured
