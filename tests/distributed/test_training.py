"""Training under every stage, dtype, world size and accumulation: what must always hold."""

from __future__ import annotations

from itertools import groupby, product
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.harness import run, run_all
from tests.distributed.models import (
    FULL,
    PREFETCH,
    QSDP,
    Run,
    Sighting,
    build,
    digests,
    forward,
    masters,
    plain_descent,
    settings,
    train,
    train_step,
)
from tests.thin import thinned

pytestmark = pytest.mark.distributed

STAGES = (1, 2, 3)
DTYPES = ("fp32", "bf16")

# ---- the full-precision scheme against DeepSpeed as shipped ----


def shipped_and_full(stage: int, dtype: str, plain_sgd: bool) -> dict[int, tuple[Run, Run]]:
    return {
        accumulation: tuple(
            train(
                settings(stage, block, dtype=dtype, accumulation=accumulation),
                steps=4,
                optimizer=plain_descent if plain_sgd else None,
            )
            for block in (None, FULL)
        )
        for accumulation in (1, 2)
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
def test_full_precision_on_two_ranks_is_bit_identical_to_deepspeed(stage: int, dtype: str) -> None:
    """DeepSpeed divides by 2 before a sum of two terms, the plugin after it: both are exact."""
    cases = tuple(product(STAGES, DTYPES, [False]))
    for rank in run_all(shipped_and_full, 2, cases)[stage, dtype, False]:
        for shipped, full in rank.values():
            assert full.report is not None and shipped.report is None
            assert full.report["received_bytes"]["weights"]["intra"] > 0
            assert full.report["received_bytes"]["gradients"]["intra"] > 0
            assert full.losses == shipped.losses
            assert digests(full.weights) == digests(shipped.weights)


@pytest.mark.parametrize("stage", STAGES)
def test_full_precision_on_three_ranks_equals_deepspeed_to_fp32_rounding(stage: int) -> None:
    """With SGD, as Adam's first update is the sign of the gradient whatever its size.

    Per optimizer step a weight's update may differ by the roundings of three divisions, two
    additions, up to two accumulations and the update itself: 8 roundings of quantities below 2,
    2^-24 each. A loss is a mean over outputs of such weights.
    """
    tolerance = 4 * 8 * 2.0**-24
    cases = tuple(product(STAGES, ["fp32"], [True]))
    for rank in run_all(shipped_and_full, 3, cases)[stage, "fp32", True]:
        for shipped, full in rank.values():
            np.testing.assert_allclose(full.losses, shipped.losses, rtol=0, atol=tolerance)
            for name, weights in shipped.weights.items():
                assert np.abs(weights).max() < 2
                np.testing.assert_allclose(full.weights[name], weights, rtol=0, atol=tolerance)


# ---- the matrix ----


Matrix = dict[tuple[str, int], Run]  # by dtype and accumulation


def matrix(stage: int, keys: list[tuple[str, int]]) -> Matrix:
    """ZeRO-3 fetches every tensor anew for backward; with accumulation it also prefetches, from
    the third micro-step on.
    """
    zero = {1: {}, 3: PREFETCH if stage == 3 else {}}
    return {
        (dtype, accumulation): train(
            settings(stage, QSDP, dtype=dtype, accumulation=accumulation, zero=zero[accumulation]),
            steps=5 if accumulation == 1 else 3,
            watched=True,
        )
        for dtype, accumulation in keys
    }


@pytest.fixture(
    scope="module",
    params=thinned(
        [(case,) for case in product(STAGES, (1, 2, 3, 4))],
        {(1, 2), (2, 3), (3, 2), (3, 4)}.__contains__,
    ),
    ids=lambda p: f"zero{p[0]}-world{p[1]}",
)
def trained(request: pytest.FixtureRequest) -> list[Matrix]:
    """By rank. Every stage and world with both dtypes and both accumulations, in turns together."""
    stage, world = request.param
    once, often = DTYPES[:: 1 if (stage + world) % 2 else -1]
    return run(matrix, world, stage, [(once, 1), (often, 3)])


def test_loss_falls(trained: list[Matrix]) -> None:
    for key in trained[0]:
        losses = np.array([rank[key].losses for rank in trained])  # (ranks, micro-steps)
        by_step = losses.reshape(len(trained), -1, key[1]).mean(axis=(0, 2))
        assert np.isfinite(losses).all(), key
        assert by_step[-1] < 0.95 * by_step[0], key


def test_all_ranks_compute_with_equal_bits(trained: list[Matrix]) -> None:
    for key, of_first in trained[0].items():
        names = {s.name for s in of_first.seen}
        assert names >= {"first.weight", "second.bias", "norm.weight", "last.weight"}
        assert all(rank[key].seen == of_first.seen for rank in trained), key


def test_all_fetches_of_a_step_return_equal_bits(trained: list[Matrix]) -> None:
    """Forward, backward and all micro-steps of an accumulation window."""
    for key, of_first in trained[0].items():
        check_fetches(key, of_first)


def check_fetches(key: tuple[str, int], found: Run) -> None:
    seen: list[Sighting] = found.seen
    order = sorted(seen, key=lambda s: (s.name, s.step))
    for (name, step), group in groupby(order, key=lambda s: (s.name, s.step)):
        sightings = list(group)
        assert len({s.bits for s in sightings}) == 1, f"{name} in step {step}"
        fetches = key[1] * len({s.forward for s in seen})
        assert len(sightings) == fetches, f"{name} in step {step}"
    report = found.report
    if report["stage"] == 3 and report["world"] > 1:  # the bits were gathered twice, not kept
        micro_steps, modules = report["micro_steps"], 4
        gathers = report["collectives"]["weights"]
        most = 2 * modules * micro_steps
        assert gathers == most if key[1] == 1 else gathers < most


def test_weights_change_in_every_step(trained: list[Matrix]) -> None:
    """Guards the two tests above against watching something that never moves."""
    for of_first in trained[0].values():
        by_name: dict[str, set[str]] = {}
        for s in of_first.seen:
            by_name.setdefault(s.name, set()).add(s.bits)
        steps = 1 + max(s.step for s in of_first.seen)
        for name in ("first.weight", "second.weight", "last.weight"):
            assert len(by_name[name]) == steps


# ---- non-finite gradients ----


POISONED = "second.weight"


BAD = {"nan": float("nan"), "inf": float("inf")}


def poisoned(stage: int, dtype: str) -> dict[str, dict[str, Any]]:
    return {
        f"{name} {bad}": _poisoned_run(settings(stage, block, dtype=dtype), BAD[bad])
        for name, block in (("full", FULL), ("quantized", QSDP))
        for bad in BAD
    }


def _poisoned_run(config: dict[str, Any], value: float) -> dict[str, Any]:
    """One good step, one with ``value`` in one element of rank 1's gradient, one more good one."""
    from deepspeed import comm as dist
    from deepspeed.utils import safe_get_full_grad

    engine = build(config)
    parameters = dict(engine.module.named_parameters())
    train_step(engine, 0)
    before = digests(masters(engine))

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[gradient.numel() // 3] = value
        return gradient

    hook = parameters[POISONED].register_hook(poison) if dist.get_rank() == 1 else None
    engine.backward(forward(engine, 1))
    gradients = {n: safe_get_full_grad(p).float().numpy().copy() for n, p in parameters.items()}
    engine.step()
    if hook is not None:
        hook.remove()
    return {
        "gradients": gradients,
        "overflow": bool(engine.optimizer.overflow),
        "before": before,
        "after": masters(engine),
        "next_loss": train_step(engine, 2)[0],
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
def test_non_finite_gradient_of_one_rank_stays_visible(stage: int, dtype: str) -> None:
    """The owner sees it, DeepSpeed treats it as in full precision, nothing else is touched."""
    for rank in run_all(poisoned, 2, tuple(product(STAGES, DTYPES)))[stage, dtype]:
        for bad in BAD:
            _check_poisoned(rank[f"full {bad}"], rank[f"quantized {bad}"])


def _check_poisoned(full: dict[str, Any], quantized: dict[str, Any]) -> None:
    element = full["gradients"][POISONED].size // 3
    for outcome in (full, quantized):
        assert not np.isfinite(outcome["gradients"][POISONED].reshape(-1)[element])
        others = [g for n, g in outcome["gradients"].items() if n != POISONED]
        assert all(np.isfinite(g).all() for g in others)
    group_size = 1024
    assert np.count_nonzero(~np.isfinite(full["gradients"][POISONED])) == 1
    assert np.count_nonzero(~np.isfinite(quantized["gradients"][POISONED])) <= group_size
    assert quantized["overflow"] == full["overflow"]
    if full["overflow"]:  # the step is skipped
        assert digests(quantized["after"]) == quantized["before"]
        assert np.isfinite(quantized["next_loss"])
        return
    for outcome in (full, quantized):
        broken = ~np.isfinite(outcome["after"][POISONED])
        assert (broken == ~np.isfinite(outcome["gradients"][POISONED])).all()
        assert np.isnan(outcome["next_loss"])


# ---- a replica that autograd follows ----


def followed(stage: int, scheme: str) -> list[tuple[list[float], dict[str, str]]]:
    found = []
    for follows in (False, True):
        engine = build(settings(stage, {"scheme": scheme}, dtype="bf16"))
        for flat in engine.optimizer.bit16_groups_flat if follows else ():
            flat.requires_grad_(True)
        losses = [loss for step in range(2) for loss in train_step(engine, step)]
        found.append((losses, digests(masters(engine))))
        engine.destroy()
    return found


def test_a_replica_that_autograd_follows_is_filled_as_any() -> None:
    """As DeepSpeed 0.18.9 makes it, which forbids to write into several of its slices."""
    for ranks in run_all(followed, 2, ((1, "sdp4bit"), (2, "qsdp"))).values():
        assert all(made_with_autograd == plain for plain, made_with_autograd in ranks)
