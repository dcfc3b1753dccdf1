"""DeepSpeed's features with quantized communication: each trains as without it, to within noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ds_quant.zero.report import start_line
from tests.distributed.features import ALL_FEATURES
from tests.distributed.harness import run_all
from tests.distributed.models import QSDP, Run, build, evaluate, exact, settings, train_step, watch
from tests.distributed.rows import Table, Way, same_weights

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
KEPT = {
    name: {"scheme": name, "node_size": 1, "allow_full_replica": True}
    for name in ("sdp4bit", "zeropp")
}
EXACT = {
    name: {"scheme": name, "node_size": 1, "allow_full_replica": True}
    for name in ("full_precision", "lossless")
}


def near(run: Run, other: Run) -> None:
    report, scheme = other.report, other.report["scheme"]
    allowed = NOISE_OF_4_BITS if scheme in KEPT else NOISE
    np.testing.assert_allclose(
        other.losses, run.losses, rtol=0, atol=allowed * run.losses[0], err_msg=scheme
    )
    assert scheme in EXACT or other.losses != run.losses
    exact_gradients = "gradients stay exact" in report["line"]
    assert report["collectives"]["weights"] > 0
    assert (report["collectives"]["gradients"] == 0) == exact_gradients


for place, (name, feature) in enumerate(ALL_FEATURES.items()):
    # make test trains one stage each, in turns. There it also meets a scheme that keeps weights.
    quick = feature.stages[place % len(feature.stages)]
    for stage in feature.stages:
        kept = [Way(block=list(KEPT.values())[place // 2 % 2])] if stage == quick else []
        TABLE.add(
            f"ZeRO-{stage}, {name}", Way(block=None), *(Way(block=b) for b in EXACT.values()),
            Way(), *kept, holds=near, of_mean=True, feature=replace(feature, stages=(stage,)),
            steps=6, quick=(quick,),
        )  # fmt: skip


@pytest.mark.parametrize(("title", "stage"), TABLE.params())
def test_feature_trains_as_without_quantization(title: str, stage: int) -> None:
    feature = TABLE.rows[title].feature
    for plain, *quantized in TABLE.check(title, stage):
        assert plain.losses[-1] < (0.95 if "clipping" in title else 0.75) * plain.losses[0]
        for run in quantized:
            assert feature.said in run.report["line"]
            assert ("gradients stay exact" in run.report["line"]) == bool(feature.said)
    for _, full_precision, lossless, *_ in TABLE.runs(title, stage):
        same_weights(full_precision, lossless)


def excluding(stage: int) -> tuple[set[str], str]:
    """The parameters that a forward sees decoded, and the start-up line."""
    engine = build(settings(stage, {**QSDP, "exclude": ["sec*.weight", "nothing*"]}, dtype="bf16"))
    for step in range(3):
        train_step(engine, step)
    wanted = exact(engine, "bf16")
    with watch(engine) as seen:
        evaluate(engine)
    decoded = {s.name for s in seen if s.bits != wanted[s.name]}
    return decoded, start_line(engine.ds_quant_plugin)


@pytest.mark.parametrize("stage", STAGES)
def test_excluded_parameters_travel_exactly_and_others_do_not(stage: int) -> None:
    for decoded, line in run_all(excluding, 2, ((1,), (2,), (3,)))[stage,]:
        assert decoded == {"first.weight", "last.weight"}
        assert "1 excluded" in line
