"""DeepSpeed's features with quantized communication: each trains as without it, to within noise."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch

from ds_quant.zero.report import start_line
from tests.distributed.features import ALL_FEATURES
from tests.distributed.harness import run, run_each
from tests.distributed.models import (
    FULL,
    QSDP,
    Run,
    Sighting,
    build,
    digests,
    evaluate,
    exact,
    forward,
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
# gradient that is a hundredth too long, as six steps take more than half of the loss away. With
# 4-bit gradients 0.8 % were measured.
NOISE, NOISE_OF_4_BITS = 0.002, 0.01
# Two ranks as two nodes, so that weights are kept and gradients cross in the outer codec.
KEPT = {
    name: {"scheme": name, "node_size": 1, "allow_full_replica": True}
    for name in ("sdp4bit", "zeropp")
}


def is_quick(stage: int, name: str) -> bool:
    """Whether make test trains a feature at this stage: one stage each, in turns. There it also
    meets a scheme that keeps weights.
    """
    stages = tuple(ALL_FEATURES[name].stages)
    return stages[list(ALL_FEATURES).index(name) % len(stages)] == stage


def blocks_of(stage: int, name: str) -> dict[str | None, dict[str, Any] | None]:
    blocks = {None: None, "qsdp": QSDP}
    if is_quick(stage, name):
        kept = list(KEPT)[list(ALL_FEATURES).index(name) // 2 % 2]
        blocks[kept] = KEPT[kept]
    return blocks


def all_features(stage: int, quick: bool) -> dict[str, Any]:
    """Feature -> runs by scheme, or the traceback; all ranks fail alike."""
    found: dict[str, Any] = {}
    for name, feature in ALL_FEATURES.items():
        if stage in feature.stages and is_quick(stage, name) == quick:
            try:
                found[name] = {
                    scheme: feature.train(stage, block, STEPS)
                    for scheme, block in blocks_of(stage, name).items()
                }
            except Exception:
                found[name] = traceback.format_exc()
    return found


@cache
def featured(stage: int, quick: bool) -> list[tuple[dict[str, Any], str | None]]:
    """(features, error of the whole run) by rank; cached also when the run failed."""
    return run_each(all_features, 2, stage, quick, timeout=240)


@pytest.mark.parametrize(
    ("stage", "name"),
    thinned([(stage, n) for n, f in ALL_FEATURES.items() for stage in f.stages], is_quick),
)
def test_feature_trains_as_without_quantization(stage: int, name: str) -> None:
    ALL_FEATURES[name].skip_if_too_old()
    ranks = []
    for found, error in featured(stage, is_quick(stage, name)):
        assert error is None, error
        assert not isinstance(found[name], str), found[name]
        ranks.append(found[name])
    plain = [rank.pop(None) for rank in ranks]
    expected = mean_losses(plain)
    assert expected[-1] < (0.95 if name == "clipping" else 0.75) * expected[0]
    for scheme in ranks[0]:
        first, second = (rank[scheme] for rank in ranks)
        allowed = (NOISE if scheme == "qsdp" else NOISE_OF_4_BITS) * expected[0]
        losses = mean_losses([first, second])
        np.testing.assert_allclose(losses, expected, rtol=0, atol=allowed, err_msg=scheme)
        assert first.losses != plain[0].losses
        assert (first.report["scheme"], first.report["stage"]) == (scheme, stage)
        assert min(first.report["collectives"].values()) > 0
        assert second.seen == first.seen and unsteady(first.seen) == []


def unsteady(seen: list[Sighting]) -> list[tuple[str, int]]:
    """(parameter, step) that were fetched with different bits within the step."""
    order = sorted(seen, key=lambda s: (s.name, s.step))
    by_step = groupby(order, key=lambda s: (s.name, s.step))
    return [key for key, sightings in by_step if len({s.bits for s in sightings}) > 1]


# ---- the block's own settings: one start of the ranks per stage plays all of them ----


def two_bits(stage: int) -> list[Run]:
    block = {"weights": {"bits": 2}, "gradients": {"bits": 2}}
    configs = (settings(stage, b, dtype="bf16") for b in (None, block))
    return [train(config, STEPS, optimizer=plain_descent) for config in configs]


def exact_gradients(stage: int) -> dict[str, Run]:
    blocks = {"plain": None, "quantized": QSDP, "gradients only": {"weights": {"enabled": False}}}
    more = {"zero": {"reduce_scatter": False}, "gradient_predivide_factor": 2.0}
    return {
        name: train(settings(stage, block, **more), STEPS, optimizer=plain_descent)
        for name, block in blocks.items()
    }


def warm_up(stage: int) -> list[Run]:
    configs = (
        settings(stage, block, dtype="bf16", accumulation=2)
        for block in (FULL, {**QSDP, "warmup_steps": 2})
    )
    return [train(config, 4, watched=True) for config in configs]


def excluding(stage: int) -> dict[str, Any]:
    everything = [train(settings(stage, block), 3) for block in (FULL, {**QSDP, "exclude": ["*"]})]
    engine = build(settings(stage, {**QSDP, "exclude": ["sec*.weight", "nothing*"]}, dtype="bf16"))
    for step in range(3):
        train_step(engine, step)
    wanted = exact(engine, "bf16")
    with watch(engine) as seen:
        evaluate(engine)
    decoded = {s.name for s in seen if s.bits != wanted[s.name]}
    return {
        "everything": everything, "decoded": decoded, "line": start_line(engine.ds_quant_plugin)
    }  # fmt: skip


def evaluations(stage: int) -> list[bool]:
    """Whether a run with evaluations between its steps is one without, for two schemes."""
    return [_is_undisturbed(stage, block) for block in (QSDP, KEPT["sdp4bit"])]


def _is_undisturbed(stage: int, block: dict[str, Any]) -> bool:
    runs, generator = [], torch.get_rng_state()
    for disturbs in (False, True):
        engine = build(settings(stage, block, dtype="bf16", accumulation=2))
        generator = torch.get_rng_state()
        losses = []
        for step in range(5):
            losses.append(train_step(engine, step))
            if disturbs:
                assert evaluate(engine) == evaluate(engine) == inferred(engine)
        assert torch.equal(generator, torch.get_rng_state()), "the user's generator is left alone"
        runs.append(losses)
    return runs[0] == runs[1]


def inferred(engine: Any) -> float:
    engine.eval()
    with torch.inference_mode():
        loss = float(forward(engine, 999))
    engine.train()
    return loss


SETTINGS = (two_bits, exact_gradients, warm_up, excluding, evaluations)


def _all_settings(stage: int) -> dict[str, Any]:
    return {play.__name__: play(stage) for play in SETTINGS}


@cache
def _played(stage: int) -> list[dict[str, Any]]:
    return run(_all_settings, 2, stage)


def played(play: Callable[[int], Any], stage: int) -> list[Any]:
    return [found[play.__name__] for found in _played(stage)]


@pytest.mark.parametrize("stage", STAGES)
def test_two_bits_exceed_the_noise_allowed_above(stage: int) -> None:
    plain, coarse = (mean_losses(runs) for runs in zip(*played(two_bits, stage), strict=True))
    assert np.abs(coarse - plain).max() > 3 * NOISE * plain[0]


@pytest.mark.parametrize("stage", STAGES)
def test_without_reduce_scatter_gradients_stay_exact_and_the_line_says_why(stage: int) -> None:
    ranks = played(exact_gradients, stage)
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


@pytest.mark.parametrize("stage", STAGES)
def test_warm_up_is_bit_identical_to_full_precision_and_then_ends(stage: int) -> None:
    for runs in played(warm_up, stage):
        full, warmed = ([s for s in r.seen if s.step < 2] for r in runs)
        assert full == warmed != []
        full, warmed = (
            {s.bits for s in r.seen if s.step == 2 and s.name == "first.weight"} for r in runs
        )
        assert full != warmed
        full, warmed = (r.losses for r in runs)
        assert warmed[:4] == full[:4] and warmed[4:] != full[4:]


@pytest.mark.parametrize("stage", STAGES)
def test_excluded_parameters_travel_exactly_and_others_do_not(stage: int) -> None:
    for found in played(excluding, stage):
        full, all_excluded = found["everything"]
        assert all_excluded.losses == full.losses
        assert digests(all_excluded.weights) == digests(full.weights)
        assert found["decoded"] == {"first.weight", "last.weight"}
        assert "1 excluded" in found["line"]


@pytest.mark.parametrize("stage", STAGES)
def test_evaluations_between_steps_do_not_change_training(stage: int) -> None:
    assert played(evaluations, stage) == [[True, True]] * 2


def persistent() -> list[Run]:
    zero = {"stage3_param_persistence_threshold": 100_000}
    blocks = (QSDP, {"weights": {"enabled": False}})
    return [train(settings(3, block, zero=zero), 4, watched=True) for block in blocks]


def test_persistent_parameters_are_exact_in_every_step() -> None:
    """DeepSpeed refreshes them exactly after a step, but fetches them in the first two."""
    for quantized, gradients_only in run(persistent, 2):
        assert quantized.seen == gradients_only.seen
        assert quantized.losses == gradients_only.losses
