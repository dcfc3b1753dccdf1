"""Crossing once per optimizer step changes nothing but the order of fp32 additions, whatever else
a training does: features of DeepSpeed, loops of their own, and what can go wrong in between.

Nothing is quantized, in fp32 where the feature does not ask for bf16; plain descent, so that a
gradient that is lost, doubled or stale shows in the weights.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests import needs
from tests.distributed.harness import run
from tests.distributed.models import (
    Regression,
    batch,
    build,
    forward,
    masters,
    plain_descent,
    settings,
    train_step,
)
from tests.thin import thinned

pytestmark = pytest.mark.distributed

WORLD, NODE_SIZE, STAGES = 4, 2, (2, 3)
CROSSINGS = ("step", "micro_step")
SMALL = {"reduce_bucket_size": 20_000}
Weights = dict[str, np.ndarray]


def block(cross: str, scheme: str = "full_precision") -> dict[str, Any]:
    quiet = {"metrics": {"interval": 0}}
    return {"scheme": scheme, "node_size": NODE_SIZE, "gradients": {"cross": cross}, **quiet}


class Maker:
    """Builds engines of one stage that cross in one way; closes them at the end."""

    def __init__(self, stage: int, cross: str) -> None:
        self.stage, self.cross, self._engines = stage, cross, []

    def __call__(self, model: Callable[[], nn.Module] = Regression, **changes: Any) -> Any:
        cross, dtype = changes.pop("cross", self.cross), changes.pop("dtype", "fp32")
        accumulation, zero = changes.pop("accumulation", 3), {**SMALL, **changes.pop("zero", {})}
        made = block(cross)
        config = settings(
            self.stage, made, dtype=dtype, accumulation=accumulation, zero=zero, **changes
        )
        self._engines.append(build(config, model, optimizer=plain_descent))
        return self._engines[-1]

    def close(self) -> None:
        """The end of a scenario: nothing waits any more."""
        for engine in self._engines:
            waiting = engine.ds_quant_plugin.waiting
            assert (waiting is not None) == (
                engine.ds_quant_plugin.scheme.block.gradients.cross == "step"
            )
            assert waiting is None or waiting.nbytes == 0
            engine.destroy()


def compare(found: list[dict[str, Any]], name: Any, *, atol: float = 2e-6) -> None:
    """Of every rank: equal results for both crossings, and something was learned."""
    for rank in found:
        once, often = (rank[name, cross] for cross in CROSSINGS)
        for result in (once, often):
            assert not isinstance(result, str), result
        assert once.keys() == often.keys()
        for key, values in once.items():
            np.testing.assert_allclose(values, often[key], rtol=2e-5, atol=atol, err_msg=key)


def skip_what_deepspeed_forgets(*, offloaded: bool) -> None:
    """Where gradients cross in every micro-step, ZeRO-2 itself adds them up."""
    since = "0.19" if offloaded else "0.18.3"
    needs.deepspeed(since, "forgets gradients of ZeRO-2: see test_cross.py")


# ---- loops ----


class Routed(Regression):
    """``route`` says which of three layers are used: "b" leaves the middle's gradient out."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(self.first.in_features, self.first.out_features)
        self.extra = nn.Linear(self.norm.normalized_shape[0], self.norm.normalized_shape[0])

    def forward(self, x: Tensor, y: Tensor, route: str = "a") -> Tensor:
        hidden = self.first(x) if "a" in route else self.other(x)
        hidden = self.norm(self.second(torch.tanh(hidden)))
        if "c" in route:
            hidden = self.extra(hidden)
        return (self.last(hidden).float() - y).square().mean()


def routed_step(engine: Any, step: int, routes: tuple[str, ...]) -> None:
    rank = torch.distributed.get_rank()
    for micro, route in enumerate(routes):
        x, y = batch(0, step, micro, rank)
        engine.backward(engine(x, y, route))
        engine.step()


def routed(make: Maker) -> Weights:
    """Parameters come and go: none in the last micro-step, buckets made up in other ways."""
    engine = make(Routed)
    for step, routes in enumerate((("ac", "b", "a"), ("a", "bc", "b"), ("a", "b", "ac"))):
        routed_step(engine, step, routes)
    return masters(engine)


def left_out_alone(make: Maker) -> Weights:
    """As ``routed``, in one bucket: a whole bucket is left in the last micro-step."""
    engine = make(Routed, zero={"reduce_bucket_size": 10**6})
    routed_step(engine, 0, ("bc", "b", "a"))
    return masters(engine)


def zero_grad(make: Maker) -> Weights:
    """Abandoned after the first micro-step. ZeRO-2 of DeepSpeed keeps what it has added up."""
    engine = make()
    for micro in range(3):
        engine.backward(forward(engine, 0, micro))
        engine.step()
        if micro == 0:
            engine.optimizer.zero_grad()
    train_step(engine, 1)
    return masters(engine)


class Failing(Regression):
    fails = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("bad batch")
        return super().forward(x, y)


def exception(make: Maker) -> Weights:
    """A micro-step fails; its user drops the gradients and goes on."""
    engine = make(Failing)
    engine.backward(forward(engine, 0, 0))
    engine.step()
    engine.module.fails = True
    with pytest.raises(ValueError):
        forward(engine, 0, 1)
    engine.module.fails = False
    engine.optimizer.zero_grad()
    for micro in (1, 2):
        engine.backward(forward(engine, 0, micro))
        engine.step()
    return masters(engine)


def unmanaged(make: Maker, **changes: Any) -> Weights:
    """The caller alone says when to step; another number of micro-steps every time."""
    zero = {"overlap_comm": False, **changes}
    top = {"zero_force_ds_cpu_optimizer": False} if changes else {}
    engine = make(accumulation=1, managed_gradient_accumulation=False, zero=zero, **top)
    for step, count in enumerate((1, 3, 2)):
        for micro in range(count):
            engine.backward(forward(engine, step, micro) / count)
        engine.step()
    return masters(engine)


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def unmanaged_offload(make: Maker) -> Weights:
    return unmanaged(make, **OFFLOAD)


def offload(make: Maker) -> Weights:
    engine = make(zero=OFFLOAD, zero_force_ds_cpu_optimizer=False)
    for step in range(2):
        train_step(engine, step)
    return masters(engine)


def boundary_of_accelerate(make: Maker) -> Weights:
    """Said before every backward, as accelerate does: not where the engine would have put it."""
    engine = make(accumulation=2)
    for step, count in enumerate((3, 1, 2)):
        for micro in range(count):
            engine.set_gradient_accumulation_boundary(micro == count - 1)
            engine.backward(forward(engine, step, micro))
        engine.step()
    return masters(engine)


def boundary_after_backward(make: Maker) -> Weights:
    """Said when the last backward is over: nothing may be lost."""
    engine = make(accumulation=2)
    engine.set_gradient_accumulation_boundary(False)
    for micro in range(3):
        engine.backward(forward(engine, 0, micro))
    if engine.zero_optimization_stage() < 3:  # of DeepSpeed itself, which would find no gradient
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(forward(engine, 0, 3))
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    return masters(engine)


def coalesced(make: Maker) -> Weights:
    engine = make(accumulation=2)
    for step in range(2):
        with engine.coalesce_grad_reduction():
            for micro in range(2):
                engine.backward(forward(engine, step, micro))
        engine.step()
    return masters(engine)


def several_engines(make: Maker) -> Weights:
    """Micro-steps in turns, one engine of each crossing."""
    engines = [make(), make(cross="micro_step"), make()]
    for micro in range(3):
        for place, engine in enumerate(engines):
            engine.backward(forward(engine, place, micro))
            engine.step()
    return {f"{i} {n}": w for i, engine in enumerate(engines) for n, w in masters(engine).items()}


def frozen_between(make: Maker) -> Weights:
    """A layer is frozen after the first micro-step: what it has is used."""
    engine = make()
    for micro in range(3):
        engine.backward(forward(engine, 0, micro))
        engine.step()
        engine.module.first.weight.requires_grad_(False)
    engine.module.first.weight.requires_grad_(True)
    train_step(engine, 1)
    return masters(engine)


def read_between(make: Maker) -> Weights:
    """Gradients that a user reads; under ZeRO-3 between micro-steps too, where they are zeros.
    DeepSpeed's ZeRO-2 has none to show before the boundary.
    """
    from deepspeed.utils import safe_get_full_grad

    engine, found = make(), {}
    for micro in range(3):
        engine.backward(forward(engine, 0, micro))
        last = micro == 2
        if last or make.stage == 3:
            seen = {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
            assert last or make.cross == "micro_step" or not any(s.any() for s in seen.values())
            if last:
                found = {f"gradient {n}": s.numpy().copy() for n, s in seen.items()}
        engine.step()
    return found | masters(engine)


# Methods of engines that some versions of DeepSpeed lack.
NEEDS = {
    "unmanaged": needs.engine_method("managed_gradient_accumulation"),
    "unmanaged_offload": needs.engine_method("managed_gradient_accumulation"),
    "coalesced": needs.engine_method("coalesce_grad_reduction"),
}
LOOPS: dict[str, Callable[[Maker], Weights]] = {
    function.__name__: function
    for function in (
        routed, left_out_alone, zero_grad, exception, unmanaged, unmanaged_offload, offload,
        boundary_of_accelerate, boundary_after_backward, coalesced, several_engines,
        frozen_between, read_between,
    )
}  # fmt: skip


def _loops_rank(stage: int) -> dict[Any, Any]:
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    found: dict[Any, Any] = {}
    for name, loop in LOOPS.items():
        for cross in CROSSINGS:
            try:
                make = Maker(stage, cross)
                found[name, cross] = loop(make)
                make.close()
            except Exception:
                found[name, cross] = traceback.format_exc()
    return found


@cache
def loops(stage: int) -> list[dict[Any, Any]]:
    return run(_loops_rank, WORLD, stage, timeout=400)


@pytest.mark.parametrize("stage", thinned(STAGES, lambda stage: stage == 3))
@pytest.mark.parametrize("name", [pytest.param(n, marks=NEEDS.get(n, ())) for n in LOOPS])
def test_a_loop_ends_with_the_same_weights(name: str, stage: int) -> None:
    if stage == 2:
        skip_what_deepspeed_forgets(offloaded="offload" in name)
    compare(loops(stage), name)
