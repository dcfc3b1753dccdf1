"""DeepSpeed's features with quantized communication: each trains as without it, to within noise."""

from __future__ import annotations

import traceback
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch

from ds_quant.zero.attach import start_line
from tests.distributed.features import DEEPSPEED_FEATURES, Borrowed
from tests.distributed.harness import run, run_each
from tests.distributed.models import (
    FULL,
    QSDP,
    Run,
    Sighting,
    build,
    digest,
    digests,
    evaluate,
    masters,
    mean_losses,
    plain_descent,
    settings,
    train,
    train_step,
    watch,
)
from tests.thin import thinned

pytestmark = pytest.mark.distributed

STAGES = (1, 2, 3)
STEPS = 6

# [Note: noise] Weights start uniform in [-a, a], with root mean square a / sqrt(3). An 8-bit code
# is off by 2a / 255 / sqrt(12) rms: 0.4 % of the weights' rms, so about 0.7 % of the outputs' after
# three layers. The loss is a mean over n = 2 ranks * 16 * 61 outputs, in which an error of relative
# size e changes by 2e / sqrt(n), here 0.03 %, plus e^2. Gradients add unbiased noise of one code, a
# few per cent of an element, of which plain descent makes a few per cent of a step. 0.2 % of the
# first loss is twice what was measured, and 2-bit codes exceed it several times over; so does a
# gradient that is a hundredth too long, as six steps take more than half of the loss away.
NOISE = 0.002


def is_quick(stage: int, name: str) -> bool:
    """Whether make test trains a feature at this stage: one stage each, in turns."""
    stages = tuple(DEEPSPEED_FEATURES[name].stages)
    return stages[list(DEEPSPEED_FEATURES).index(name) % len(stages)] == stage


def all_features(stage: int, quick: bool) -> dict[str, Any]:
    """Feature -> (without the block, quantized), or the traceback; all ranks fail alike."""
    found: dict[str, Any] = {}
    for name, feature in DEEPSPEED_FEATURES.items():
        if stage in feature.stages and is_quick(stage, name) == quick:
            try:
                found[name] = [feature.train(stage, block, STEPS) for block in (None, QSDP)]
            except Exception:
                found[name] = traceback.format_exc()
    return found


@cache
def featured(stage: int, quick: bool) -> list[tuple[dict[str, Any], str | None]]:
    """(features, error of the whole run) by rank; cached also when the run failed."""
    return run_each(all_features, 2, stage, quick, timeout=240)


@pytest.mark.parametrize(
    ("stage", "name"),
    thinned(
        [(stage, n) for n, f in DEEPSPEED_FEATURES.items() for stage in f.stages],
        is_quick,
    ),
)
def test_feature_trains_as_without_quantization(stage: int, name: str) -> None:
    DEEPSPEED_FEATURES[name].skip_if_too_old()
    ranks = []
    for found, error in featured(stage, is_quick(stage, name)):
        assert error is None, error
        assert not isinstance(found[name], str), found[name]
        ranks.append(found[name])
    plain, quantized = ([rank[i] for rank in ranks] for i in (0, 1))
    expected, losses = mean_losses(plain), mean_losses(quantized)
    assert expected[-1] < (0.95 if name == "clipping" else 0.75) * expected[0]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=NOISE * expected[0])
    assert quantized[0].losses != plain[0].losses
    assert quantized[0].report["collectives"]["gradients"] > 0
    assert quantized[0].report["collectives"]["weights"] > 0
    assert quantized[1].seen == quantized[0].seen
    assert unsteady(quantized[0].seen) == []


def unsteady(seen: list[Sighting]) -> list[tuple[str, int]]:
    """(parameter, step) that were fetched with different bits within the step."""
    order = sorted(seen, key=lambda s: (s.name, s.step))
    by_step = groupby(order, key=lambda s: (s.name, s.step))
    return [key for key, sightings in by_step if len({s.bits for s in sightings}) > 1]


def two_bits(stage: int) -> tuple[Run, Run]:
    block = {"weights": {"bits": 2}, "gradients": {"bits": 2}}
    plain, coarse = (
        train(settings(stage, b, dtype="bf16"), STEPS, optimizer=plain_descent)
        for b in (None, block)
    )
    return plain, coarse


@pytest.mark.parametrize("stage", STAGES)
def test_two_bits_exceed_the_noise_allowed_above(stage: int) -> None:
    plain, coarse = (mean_losses(runs) for runs in zip(*run(two_bits, 2, stage), strict=True))
    assert np.abs(coarse - plain).max() > 3 * NOISE * plain[0]


def borrowed() -> tuple[list[str], list[str], str]:
    engine = build(settings(3, QSDP), Borrowed)
    first = digest(torch.from_numpy(masters(engine)["embed.weight"]))
    with watch(engine) as seen:
        for step in range(4):
            train_step(engine, step)
    fetched = {s.step: s.bits for s in seen if s.name == "embed.weight"}
    return engine.module.used, [fetched[step] for step in range(4)], first


def test_weight_used_by_another_module_is_the_one_its_own_module_uses() -> None:
    """Also in the first forward, in which DeepSpeed learns of such a use and gathers the weight on
    the spot. From then on it fetches it for that module too.
    """
    for used, fetched, first in run(borrowed, 2):
        assert used == fetched
        assert first not in fetched


def persistent() -> list[Run]:
    zero = {"stage3_param_persistence_threshold": 100_000}
    blocks = (QSDP, {"weights": {"enabled": False}})
    return [train(settings(3, block, zero=zero), 4, watched=True) for block in blocks]


def test_persistent_parameters_are_exact_in_every_step() -> None:
    """DeepSpeed refreshes them exactly after a step, but fetches them in the first two."""
    for quantized, gradients_only in run(persistent, 2):
        assert quantized.seen == gradients_only.seen
        assert quantized.losses == gradients_only.losses


# ---- settings that keep gradients exact ----


def exact_gradients(stage: int) -> dict[str, Run]:
    blocks = {"plain": None, "quantized": QSDP, "gradients only": {"weights": {"enabled": False}}}
    return {
        name: train(
            settings(stage, block, zero={"reduce_scatter": False}, gradient_predivide_factor=2.0),
            STEPS,
            optimizer=plain_descent,
        )
        for name, block in blocks.items()
    }


@pytest.mark.parametrize("stage", STAGES)
def test_without_reduce_scatter_gradients_stay_exact_and_the_line_says_why(stage: int) -> None:
    ranks = run(exact_gradients, 2, stage)
    for found in ranks:
        reason = "gradients stay exact: zero_optimization.reduce_scatter is false"
        assert reason in found["quantized"].report["line"]
        assert found["quantized"].report["collectives"]["gradients"] == 0
        assert found["quantized"].report["collectives"]["weights"] > 0
        assert found["gradients only"].losses == found["plain"].losses
        assert digests(found["gradients only"].weights) == digests(found["plain"].weights)
        assert found["quantized"].losses != found["plain"].losses
    losses = {n: mean_losses([found[n] for found in ranks]) for n in ("plain", "quantized")}
    allowed = NOISE * losses["plain"][0]
    np.testing.assert_allclose(losses["quantized"], losses["plain"], rtol=0, atol=allowed)


# ---- the block's own settings ----


def warm_up(stage: int) -> tuple[Run, Run]:
    blocks = (FULL, {**QSDP, "warmup_steps": 2})
    full, warmed = (
        train(settings(stage, b, dtype="bf16", accumulation=2), 4, watched=True) for b in blocks
    )
    return full, warmed


@pytest.mark.parametrize("stage", STAGES)
def test_warm_up_is_bit_identical_to_full_precision_and_then_ends(stage: int) -> None:
    for full, warmed in run(warm_up, 2, stage):
        until = [[s for s in r.seen if s.step < 2] for r in (full, warmed)]
        assert until[0] == until[1] != []
        assert warmed.losses[:4] == full.losses[:4]
        third = [
            {s.bits for s in r.seen if s.step == 2 and s.name == "first.weight"}
            for r in (full, warmed)
        ]
        assert third[0] != third[1]
        assert warmed.losses[4:] != full.losses[4:]


def excluding(stage: int) -> dict[str, Any]:
    everything = [train(settings(stage, block), 3) for block in (FULL, {**QSDP, "exclude": ["*"]})]
    engine = build(settings(stage, {**QSDP, "exclude": ["sec*.weight", "nothing*"]}, dtype="bf16"))
    for step in range(3):
        train_step(engine, step)
    exact = {n: digest(torch.from_numpy(a).bfloat16()) for n, a in masters(engine).items()}
    with watch(engine) as seen:
        evaluate(engine)
    return {
        "everything": everything,
        "used": {s.name: s.bits for s in seen},
        "exact": exact,
        "line": start_line(engine.ds_quant_engine),
    }


@pytest.mark.parametrize("stage", STAGES)
def test_excluded_parameters_travel_exactly_and_others_do_not(stage: int) -> None:
    for found in run(excluding, 2, stage):
        full, all_excluded = found["everything"]
        assert all_excluded.losses == full.losses
        assert digests(all_excluded.weights) == digests(full.weights)
        decoded = {n for n, bits in found["used"].items() if bits != found["exact"][n]}
        assert decoded == {"first.weight", "last.weight"}
        assert "1 excluded" in found["line"]


def with_evaluations(stage: int) -> list[list[list[float]]]:
    runs = []
    for evaluations in (False, True):
        engine = build(settings(stage, QSDP, dtype="bf16", accumulation=2))
        losses = []
        for step in range(5):
            losses.append(train_step(engine, step))
            if evaluations:
                assert evaluate(engine) == evaluate(engine)
        runs.append(losses)
    return runs


@pytest.mark.parametrize("stage", STAGES)
def test_evaluations_between_steps_do_not_change_training(stage: int) -> None:
    for without, with_them in run(with_evaluations, 2, stage):
        assert with_them == without
