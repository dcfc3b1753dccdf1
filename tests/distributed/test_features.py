"""DeepSpeed's features with quantized communication: each trains as without it, to within noise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import ds_quant
from tests.distributed.features import ALL_FEATURES
from tests.distributed.harness import on_ranks
from tests.distributed.models import (
    QSDP,
    Run,
    engine_of,
    evaluate,
    exact,
    forward,
    train_steps,
    watch,
)
from tests.distributed.rows import Table, Way, same_weights
from tests.thin import thinned

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

STAGES = (1, 2, 3)

# [Note: noise] Weights start uniform in [-a, a], with root mean square a / sqrt(3). An 8-bit code
# is off by 2a / 255 / sqrt(12) rms: 0.4 % of the weights' rms, so about 0.7 % of the outputs' after
# three layers. The loss is a mean over n = 2 ranks * 16 * 61 outputs, in which an error of relative
# size e changes by 2e / sqrt(n), here 0.03 %, plus e^2. Gradients add unbiased noise of one code, a
# few per cent of an element, of which plain descent makes a few per cent of a step. 0.2 % of the
# first loss is twice what was measured, and 2-bit codes exceed it several times over; so does a
# gradient that is a hundredth too long, as six steps take more than half of the loss away. With
# 4-bit gradients 0.8 % were measured.
NOISE, NOISE_OF_4_BITS = 0.002, 0.01
TABLE = Table(__name__)
# Two ranks as two nodes, so that weights are kept and gradients cross in the outer codec.
OWN = {
    name: {"scheme": name, "node_size": 1, "allow_full_replica": True}
    for name in ("sdp4bit", "zeropp")
}
FULL_PRECISION, LOSSLESS = (
    {"scheme": name, "node_size": 1, "allow_full_replica": True}
    for name in ("full_precision", "lossless")
)
QUANTIZED = Way()
SDP4BIT, ZEROPP = (Way(block=block) for block in OWN.values())


def near(run: Run, other: Run) -> None:
    report, scheme = other.report, other.report["scheme"]
    allowed = NOISE_OF_4_BITS if scheme in OWN else NOISE
    np.testing.assert_allclose(
        other.losses, run.losses, rtol=0, atol=allowed * run.losses[0], err_msg=scheme
    )
    if scheme != "lossless":
        assert other.losses != run.losses
    exact_gradients = "gradients stay exact" in report["line"]
    assert report["collectives"]["weights"] > 0
    assert (report["collectives"]["gradients"] == 0) == exact_gradients


for name, feature in ALL_FEATURES.items():
    # make test trains every feature at its riskiest stage, with the riskiest scheme: its nodes keep
    # weights that a missed write would leave behind, and its gradients have the fewest bits.
    for stage in feature.stages:
        is_riskiest = stage == feature.riskiest_stage
        how = {"feature": replace(feature, stages=(stage,)), "steps": 6}
        other_ways = (Way(block=LOSSLESS), QUANTIZED)
        TABLE.add(
            f"ZeRO-{stage}, {name}", Way(block=None), *((SDP4BIT,) if is_riskiest else other_ways),
            holds=near, of_mean=True, quick=(stage,) if is_riskiest else (), **how,
        )  # fmt: skip
        if is_riskiest:
            TABLE.add(
                f"others ZeRO-{stage}, {name}", Way(block=None), *other_ways, ZEROPP, holds=near,
                of_mean=True, quick=(), **how,
            )  # fmt: skip
        TABLE.add(
            f"exact ZeRO-{stage}, {name}", Way(block=FULL_PRECISION), Way(block=LOSSLESS),
            holds=same_weights, quick=(), **how,
        )  # fmt: skip


PARAMS = TABLE.params()


@pytest.mark.parametrize(("title", "stage"), PARAMS)
def test_feature_trains_as_without_quantization(title: str, stage: int) -> None:
    feature = TABLE.rows[title].feature
    for plain, *quantized in TABLE.check(title, stage):
        assert plain.losses[-1] < (0.95 if "clipping" in title else 0.75) * plain.losses[0]
        for run in quantized:
            assert feature.said in run.report["line"]
            assert ("gradients stay exact" in run.report["line"]) == bool(feature.said)


# ---- fp16 with dynamic loss scale, on any processor: torch computes it on all of them ----

# Scheme -> how far a loss may be off, in first losses: about twice what was measured.
FP16 = {
    "full_precision": 5e-5, "qsdp": 0.0006, "sdp4bit": 0.003, "lossless": 5e-5,
    "lossless_w_g3": 0.004, "eden3": 0.004, "zeropp": 0.006,
}  # fmt: skip
SCALING = {"initial_scale_power": 10, "hysteresis": 1, "loss_scale_window": 4}


@contextmanager
def with_fp16() -> Iterator[None]:
    """DeepSpeed believes that the processor computes in fp16."""
    from deepspeed.accelerator import get_accelerator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
        yield


def overflowing(engine: DeepSpeedEngine, step: int, _: int) -> list[float]:
    """The loss, its scale, and steps skipped. Gradients of step 3 are infinite on rank 1."""
    loss = forward(engine, step)
    engine.backward(loss * 1e30 if step == 3 and engine.global_rank == 1 else loss)
    engine.step()
    return [float(loss.detach()), float(engine.optimizer.loss_scale), engine.skipped_steps]


def scaled_alike(run: Run, other: Run) -> None:
    expected, found = (np.reshape(each.losses, (-1, 3)).T for each in (run, other))
    assert expected[2][-1] == 1 and expected[0][-1] < 0.95 * expected[0][0]
    assert expected[1][2:4].tolist() == [1024, 512] and expected[1][-1] > 512, "not dynamic"
    assert (found[1:] == expected[1:]).all()
    atol = FP16[other.report["scheme"]] * expected[0][0]
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=atol)


QUICK = ["qsdp", "sdp4bit"]  # that make test trains, under ZeRO-2
FP16_RUNS = {
    (2, "quick"): QUICK,
    (2, "others"): [scheme for scheme in FP16 if scheme not in QUICK],
    (3, "all"): list(FP16),
}
for (stage, schemes), names in FP16_RUNS.items():
    blocks = [None, *({"scheme": name, "node_size": 2} for name in names)]
    TABLE.add(
        f"fp16, ZeRO-{stage}, {schemes}",
        *(Way(block=block, inside=with_fp16) for block in blocks),
        holds=scaled_alike, of_mean=True, world=4, block={}, steps=10, dtype="fp16",
        stages=(stage,), step=overflowing, top={"fp16": SCALING},
        quick=(stage,) if names is QUICK else (),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "schemes"), thinned(FP16_RUNS, lambda _, schemes: schemes == "quick")
)
def test_schemes_train_in_fp16_as_without_the_plugin(stage: int, schemes: str) -> None:
    TABLE.check(f"fp16, ZeRO-{stage}, {schemes}", stage)


# ---- excluded parameters ----


@pytest.mark.parametrize("stage", STAGES)
@on_ranks()
def test_excluded_parameters_travel_exactly_and_others_do_not(stage: int) -> None:
    """A forward sees decoded values of quantized parameters alone."""
    engine = engine_of(stage, {**QSDP, "exclude": ["sec*.weight", "nothing*"]})
    train_steps(engine, 3)
    wanted = exact(engine, "bf16")
    with watch(engine) as seen:
        evaluate(engine)
    assert {s.name for s in seen if s.bits != wanted[s.name]} == {"first.weight", "last.weight"}
    assert "1 excluded" in ds_quant.report(engine)["line"]
