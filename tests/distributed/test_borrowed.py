"""ZeRO-3: weights that a module takes from another one, or hands out, when a run begins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.distributed.features import Borrowed
from tests.distributed.harness import run
from tests.distributed.models import (
    QSDP,
    Regression,
    build,
    digest,
    evaluate,
    masters,
    settings,
    train_step,
    watch,
)


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


def handed_out(model: type) -> tuple[list[str], list[str], bool]:
    """Bits of the weight in every forward and in the fetches of its own module; whether
    GatheredParameters still sees the exact one after ``Module.apply``, which writes what it reads.
    """
    import deepspeed

    engine = build(settings(3, QSDP), model)
    name = "first.bias" if model is TakesIn else "embed.weight"
    weight = engine.module.get_parameter(name)
    with watch(engine) as seen:
        for step in range(3):
            train_step(engine, step)
    fetched = {s.step: s.bits for s in seen if s.name == name}
    evaluate(engine), evaluate(engine)
    engine.module.apply(lambda _: None)
    exact = masters(engine)[name]
    with deepspeed.zero.GatheredParameters([weight]):
        is_exact = np.array_equal(weight.detach().numpy(), exact)
    return engine.module.used, [fetched[step] for step in range(3)], is_exact


@pytest.mark.parametrize("model", [Borrowed, TakesIn])
def test_all_forwards_use_what_is_fetched_and_exact_reads_stay_exact(model: type) -> None:
    """Also the first one, in which DeepSpeed learns of such a use and gathers the weight on the
    spot. From then on it fetches it for the other module too.
    """
    for used, fetched, is_exact in run(handed_out, 2, model):
        assert len(used) == 5 and used[:3] == fetched and used[3] == used[4]
        assert len(set(used)) == 4 and is_exact


def evaluated_first(model: type) -> list[str]:
    engine = build(settings(3, QSDP), model)
    first = digest(torch.from_numpy(masters(engine)["embed.weight"]))
    evaluate(engine), evaluate(engine)
    return [*engine.module.used, first]


def test_a_first_forward_that_only_evaluates_uses_what_later_ones_use() -> None:
    for first, second, exact in run(evaluated_first, 2, Borrowed):
        assert first == second != exact
