"""DeepSpeed's features with schemes that keep weights and send gradients in 4 bits: every feature
once, stages and schemes in turn. And ways to train that need a loop of their own.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests import needs
from tests.distributed.features import DEEPSPEED_FEATURES, Feature
from tests.distributed.harness import run_each
from tests.distributed.models import (
    HIDDEN,
    WIDTH,
    Regression,
    build,
    digest,
    evaluate,
    forward,
    mean_losses,
    settings,
    train_step,
    watch,
)

pytestmark = pytest.mark.distributed

STEPS = 4
# Two ranks as two nodes, so that weights are kept and gradients cross in the outer codec.
SCHEMES = {
    name: {"scheme": name, "node_size": 1, "allow_full_replica": True}
    for name in ("sdp4bit", "zeropp")
}


class Tiled(Regression):
    """The middle is DeepSpeed's linear layer of tiles."""

    def __init__(self) -> None:
        import deepspeed

        super().__init__()
        self.second = deepspeed.zero.TiledLinear(
            HIDDEN, WIDTH, in_splits=2, out_splits=2, init_linear=self.second
        )


FEATURES = {
    **DEEPSPEED_FEATURES,
    "tiled linear": Feature(stages=(3,), model=Tiled),
    "small sub-groups": Feature(stages=(3,), zero={"sub_group_size": 10_000}),
}


def pairs() -> Iterator[tuple[str, int, str]]:
    """Every feature with a stage and a scheme, in turn."""
    for place, (name, feature) in enumerate(FEATURES.items()):
        stage = feature.stages[-1 - place // 2 % len(feature.stages)]
        yield name, stage, list(SCHEMES)[place % 2]


PAIRS = list(pairs())


def all_features() -> dict[str, Any]:
    """Feature -> (without the block, quantized), or the traceback; all ranks fail alike."""
    found: dict[str, Any] = {}
    for name, stage, scheme in PAIRS:
        try:
            blocks = (None, SCHEMES[scheme])
            found[name] = [FEATURES[name].train(stage, block, STEPS) for block in blocks]
        except Exception:
            found[name] = traceback.format_exc()
    return found


@cache
def featured() -> list[tuple[dict[str, Any], str | None]]:
    return run_each(all_features, 2, timeout=240)


# Of the first loss, in 4 steps; measured: up to 0.8 %.
NOISE = 0.01


@pytest.mark.parametrize("name, stage, scheme", PAIRS)
def test_feature_trains_as_without_the_plugin(name: str, stage: int, scheme: str) -> None:
    FEATURES[name].skip_if_too_old()
    ranks = []
    for found, error in featured():
        assert error is None, error
        assert not isinstance(found[name], str), found[name]
        ranks.append(found[name])
    plain, quantized = ([rank[i] for rank in ranks] for i in (0, 1))
    wanted = mean_losses(plain)
    np.testing.assert_allclose(mean_losses(quantized), wanted, rtol=0, atol=NOISE * wanted[0])
    assert quantized[0].losses != plain[0].losses
    assert quantized[0].report["scheme"] == scheme and quantized[0].report["stage"] == stage
    assert quantized[0].report["collectives"]["gradients"] > 0
    assert quantized[1].seen == quantized[0].seen


# ---- loops of their own ----


def coalesced(engine: Any, step: int) -> float:
    """One reduction for two backwards."""
    with engine.coalesce_grad_reduction():
        for micro in range(2):
            loss = forward(engine, step, micro)
            engine.backward(loss)
    engine.step()
    return float(loss)


def unmanaged(engine: Any, step: int) -> float:
    """The caller alone says when to step."""
    for micro in range(2):
        loss = forward(engine, step, micro)
        engine.backward(loss)
    engine.step()
    return float(loss)


def bare(engine: Any, step: int) -> float:
    """``loss.backward()`` instead of ``engine.backward(loss)``."""
    loss = forward(engine, step)
    loss.backward()
    engine.step()
    return float(loss)


def between_evaluations(engine: Any, step: int) -> float:
    """Evaluations in inference mode before and after."""
    losses = []
    for _ in range(2):
        engine.eval()
        with torch.inference_mode():
            losses.append(float(forward(engine, 999)))
        engine.train()
    assert losses[0] == losses[1]
    return train_step(engine, step)[0]


Loop = Callable[[Any, int], float]
# Methods of engines that some versions of DeepSpeed lack.
NEEDS = {
    "unmanaged": needs.engine_method("managed_gradient_accumulation"),
    "coalesced": needs.engine_method("coalesce_grad_reduction"),
}
NO_OVERLAP = {"overlap_comm": False}
LOOPS: dict[str, tuple[Loop, dict[str, Any]]] = {
    "coalesced": (coalesced, {"accumulation": 2}),
    "unmanaged": (unmanaged, {"managed_gradient_accumulation": False, "zero": NO_OVERLAP}),
    "bare": (bare, {}),
    "between evaluations": (between_evaluations, {}),
}
LOOP_PAIRS = [
    (name, stage, scheme)
    for place, (name, stage) in enumerate((n, s) for n in LOOPS for s in (2, 3))
    for scheme in [list(SCHEMES)[place // 2 % 2]]
]


def all_loops() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, stage, scheme in LOOP_PAIRS:
        loop, options = LOOPS[name]
        try:
            runs = []
            for block in (None, SCHEMES[scheme]):
                engine = build(settings(stage, block, dtype="bf16", **options))
                runs.append([loop(engine, step) for step in range(STEPS)])
                engine.destroy()
            found[name, stage] = runs
        except Exception:
            found[name, stage] = traceback.format_exc()
    return found


@cache
def looped() -> list[tuple[dict[str, Any], str | None]]:
    return run_each(all_loops, 2, timeout=120)


@pytest.mark.parametrize(
    "name, stage, scheme",
    [pytest.param(*pair, marks=NEEDS.get(pair[0], ())) for pair in LOOP_PAIRS],
)
def test_loop_trains_as_without_the_plugin(name: str, stage: int, scheme: str) -> None:
    if name == "bare":
        needs.deepspeed("0.18.3", "needs engine.backward")
    for found, error in looped():
        assert error is None, error
        assert not isinstance(found[name, stage], str), found[name, stage]
        plain, quantized = found[name, stage]
        np.testing.assert_allclose(quantized, plain, rtol=2 * NOISE)  # of one rank, not the mean
        assert quantized != plain


# ---- weights written by the user ----


def written(scheme: str) -> tuple[str, set[str]]:
    """Bits of a weight that rank 0 has set: as meant, and in the next forward."""
    import deepspeed

    engine = build(settings(3, SCHEMES[scheme], dtype="bf16"))
    train_step(engine, 0)
    weight = engine.module.second.weight
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        if engine.global_rank == 0:
            nn.init.eye_(weight)
    with watch(engine) as seen:
        evaluate(engine)
    used = {s.bits for s in seen if s.name == "second.weight"}
    return digest(torch.eye(WIDTH, HIDDEN).bfloat16()), used


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_a_modifier_rank_writes_is_used_at_once_without_a_resync(scheme: str) -> None:
    for results, error in run_each(written, 2, scheme):
        assert error is None, error
        meant, used = results
        assert used == {meant}
