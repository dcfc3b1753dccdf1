"""ZeRO-3: weights that a module takes from another one, or hands out, when a run begins."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.distributed.features import Borrowed
from tests.distributed.harness import run
from tests.distributed.models import (
    Regression,
    build,
    digest,
    digests,
    evaluate,
    masters,
    settings,
    train_step,
)

pytestmark = pytest.mark.distributed

BLOCKS = {"qsdp": {"scheme": "qsdp"}, "sdp4bit": {"scheme": "sdp4bit", "node_size": 2}}


class HandsOut(nn.Linear):
    """Returns its bias instead of adding it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return nn.functional.linear(x, self.weight), self.bias


class TakesIn(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.first = HandsOut(self.first.in_features, self.first.out_features)
        self.first.bias = nn.Parameter(torch.randn(self.first.out_features, 40))
        self.used: list[str] = []

    def body(self, x: Tensor) -> Tensor:
        hidden, bias = self.first(x)
        self.used.append(digest(bias.data))
        return self.second(torch.tanh(hidden + bias.mean(1)))


def went_on_and_resumed(block: dict) -> list[tuple]:
    from deepspeed import comm as dist

    folder = os.environ["TEST_SCRATCH"]
    outcomes = []
    for resumed in (False, True):
        engine = build(settings(3, block, dtype="bf16"), Borrowed, seed=7 if resumed else 0)
        losses = []
        if resumed:
            engine.load_checkpoint(folder, tag="middle")
        for step in range(2 if resumed else 0, 4):
            losses += train_step(engine, step)
            if step == 1:
                engine.save_checkpoint(folder, "middle")
                dist.barrier()
                losses = []
        outcomes.append((losses, digests(masters(engine))))
        engine.destroy()
    return outcomes


@pytest.mark.parametrize("scheme", BLOCKS)
def test_a_run_with_a_borrowed_weight_resumes_bit_for_bit(scheme: str) -> None:
    for went_on, resumed in run(went_on_and_resumed, 4, BLOCKS[scheme]):
        assert went_on == resumed


def handed_out(model: type) -> tuple[list[str], bool]:
    """Bits of the weight in two evaluations, and whether GatheredParameters still sees the exact
    one after them and after ``Module.apply``, which writes what it gathers.
    """
    import deepspeed

    engine = build(settings(3, BLOCKS["qsdp"]), model)
    weight = engine.module.first.bias if model is TakesIn else engine.module.embed.weight
    name = "first.bias" if model is TakesIn else "embed.weight"
    evaluate(engine), evaluate(engine)
    engine.module.apply(lambda _: None)
    exact = masters(engine)[name]
    with deepspeed.zero.GatheredParameters([weight]):
        return engine.module.used, np.array_equal(weight.detach().numpy(), exact)


@pytest.mark.parametrize("model", [Borrowed, TakesIn])
def test_the_first_forward_uses_what_later_ones_use_and_exact_reads_stay_exact(model: type) -> None:
    for used, is_exact in run(handed_out, 2, model):
        assert len(used) == 2 and used[0] == used[1]
        assert is_exact
