"""Exact weight differences train like full precision, bit for bit, and their bytes are counted.

Both schemes send gradients alike, so every loss and every master weight must be equal, not close.
"""

from __future__ import annotations

import functools
import os
from itertools import product
from typing import Any

import pytest
import torch

import ds_quant
from tests import needs
from tests.distributed import scenarios
from tests.distributed.features import DEEPSPEED_FEATURES
from tests.distributed.harness import run, run_all, run_each
from tests.distributed.models import (
    batch,
    build,
    digest,
    digests,
    masters,
    settings,
    train_step,
)
from tests.distributed.test_exactness import live
from tests.distributed.test_levels import _surgery
from tests.thin import thinned

pytestmark = pytest.mark.distributed

STAGES = (1, 2, 3)
TOPOLOGIES = ((2, 2), (4, 1), (2, 1))
SCHEMES = ("full_precision", "lossless")


def block_of(scheme: str, node_size: int, **keys: Any) -> dict[str, Any]:
    return {"scheme": scheme, "node_size": node_size, "allow_full_replica": True, **keys}


def config_of(
    scheme: str,
    stage: int,
    node_size: int,
    *,
    accumulation: int = 1,
    dtype: str = "bf16",
    **keys: Any,
) -> dict[str, Any]:
    zero = {"allgather_bucket_size": 50_000} if stage < 3 else {}  # several windows
    block = block_of(scheme, node_size, **keys)
    config = settings(stage, block, dtype=dtype, accumulation=accumulation, zero=zero)
    if dtype == "bf16":
        config["bf16"]["check_grad_overflow"] = True
    return config


def skipped_step(engine: Any, step: int) -> None:
    """The loss is NaN on one rank: DeepSpeed skips the update."""
    x, y = batch(0, step, 0, torch.distributed.get_rank())
    bad = torch.distributed.get_rank() == 1
    engine.backward(engine(x.to(engine.get_data_types()[0]), y) * (float("nan") if bad else 1.0))
    engine.step()


def needs_skipped_steps(stage: int) -> None:
    if stage == 3:
        needs.deepspeed("0.19", "takes a bf16 step with NaN under ZeRO-3")


# ---- trained like full precision ----


def _replica(engine: Any) -> dict[str, str]:
    """Digests of what this rank computes with between steps; nothing under ZeRO-3."""
    return live(engine) if engine.zero_optimization_stage() < 3 else {}


def _eventful(scheme: str, stage: int, node_size: int, steps: int) -> dict[str, Any]:
    """Train with a skipped step, a save and a resume, and surgery in between."""
    import ds_quant

    folder = os.path.join(os.environ["TEST_SCRATCH"], scheme)
    engine = build(config_of(scheme, stage, node_size))
    losses = []
    for step in range(steps):
        if step == steps // 3:
            skipped_step(engine, step)
        losses += train_step(engine, step)
        if step == steps // 2:
            engine.save_checkpoint(folder, tag="middle")
            torch.distributed.barrier()
    found = {"losses": losses, "masters": digests(masters(engine)), "live": _replica(engine)}
    found["skipped"], found["report"] = engine.skipped_steps, ds_quant.report(engine)
    engine.destroy()
    engine = build(config_of(scheme, stage, node_size), seed=7)
    engine.load_checkpoint(folder, tag="middle")
    resumed = [loss for step in range(steps // 2 + 1, steps) for loss in train_step(engine, step)]
    found["resumed"] = resumed, digests(masters(engine)), _replica(engine)
    engine.destroy()
    return found


def _both(stage: int, node_size: int, steps: int) -> list[dict[str, Any]]:
    return [_eventful(scheme, stage, node_size, steps) for scheme in SCHEMES]


def _require_equal(ranks: list[list[dict[str, Any]]], *, kept: bool) -> None:
    for plain, exact in ranks:
        for key in ("losses", "masters", "live", "resumed", "skipped"):
            assert exact[key] == plain[key], key
        went_on = exact["losses"][len(exact["losses"]) // 2 + 1 :], exact["masters"], exact["live"]
        assert exact["resumed"] == went_on
        assert plain["report"]["lossless_bits"] is None
        if kept:  # something to differ from
            assert 0 < exact["report"]["lossless_bits"] < 12
            assert 0 <= exact["report"]["lossless_padding"] < 0.1


@pytest.mark.parametrize(
    ("stage", "topology"),
    thinned(
        product(STAGES, TOPOLOGIES),
        lambda *case: case in ((1, (2, 1)), (2, (2, 2)), (3, (2, 2))),
    ),
)
def test_twelve_steps_equal_full_precision(stage: int, topology: tuple[int, int]) -> None:
    needs_skipped_steps(stage)
    nodes, node_size = topology
    ranks = run(_both, nodes * node_size, stage, node_size, 12, timeout=280)
    _require_equal(ranks, kept=True)


@pytest.mark.parametrize("stage", thinned(STAGES, lambda stage: stage == 2))
def test_one_node_equals_full_precision(stage: int) -> None:
    needs_skipped_steps(stage)
    _require_equal(run(_both, 2, stage, 2, 6, timeout=280), kept=stage < 3)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_two_hundred_steps_equal_full_precision(stage: int) -> None:
    needs_skipped_steps(stage)
    _require_equal(run(_both, 4, stage, 2, 200, timeout=1200), kept=True)


# ---- settings: one start of the ranks per stage plays all of them ----

BESIDE_LOW_BITS = ({"scheme": "tlq_hs"}, {"scheme": "sdp4bit", "weights": {"lossless": True}})
FALLBACK = {"fallback": {"on_nonfinite": "full_precision", "steps": 2}}
# Settings -> what is added to both blocks, or the blocks of both, and to the DeepSpeed config.
SETTINGS: dict[str, dict[str, Any]] = {
    "warm-up": {"warmup_steps": 2},
    "checksums": {"payload_checksum": True},
    "accumulation": {"accumulation": 4},
    "fp32 weights": {"dtype": "fp32"},
    "low-bit gradients": {"blocks": BESIDE_LOW_BITS},
    "fallback": {"skips": True, **FALLBACK},
}
Trained = tuple[list[float], dict[str, str], dict[str, Any]]


def _trained(stage: int, block: dict[str, Any], *, skips: bool = False, **keys: Any) -> Trained:
    import ds_quant

    engine = build(config_of(stage=stage, node_size=2, **block, **keys))
    losses = []
    for step in range(7 if skips else 4):
        if skips and step == 2:
            skipped_step(engine, step)
        losses += train_step(engine, step)
    found = losses, digests(masters(engine)), ds_quant.report(engine)
    engine.destroy()
    return found


def _all_settings(stage: int) -> dict[str, list[Any]]:
    """Of full precision, then of lossless differences."""
    found: dict[str, list[Any]] = {}
    for name, keys in SETTINGS.items():
        keys = dict(keys)
        blocks = keys.pop("blocks", [{"scheme": scheme} for scheme in SCHEMES])
        found[name] = [_trained(stage, block, **keys) for block in blocks]
    found["surgery"] = [_surgery(stage, scheme) for scheme in SCHEMES]
    return found


@functools.cache
def played(stage: int) -> list[dict[str, list[Any]]]:
    return run(_all_settings, 4, stage, timeout=200)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("stage", thinned(STAGES, lambda stage: stage > 1))
def test_settings_change_no_bit(stage: int, name: str) -> None:
    if name == "fallback":
        needs_skipped_steps(stage)
    for plain, exact in (rank[name] for rank in played(stage)):
        assert exact[:2] == plain[:2]
        report = exact[2]
        if name == "fp32 weights":  # travel in full precision
            assert report["lossless_bits"] is None and "fp32 weights" in report["line"]
            assert "depends on the learning rate" not in report["line"]
        else:
            assert report["lossless_bits"] < 12
        assert report["exact_steps"] == plain[2]["exact_steps"] == 2 * (name == "fallback")


@pytest.mark.parametrize("stage", thinned(STAGES, lambda stage: stage > 1))
def test_weights_changed_by_hand_are_used_at_once(stage: int) -> None:
    for plain, exact in (rank["surgery"] for rank in played(stage)):
        assert exact == plain and exact[1]


def _experts(ep_size: int) -> list[list[float]]:
    blocks = [{"scheme": scheme} for scheme in SCHEMES]
    return [scenarios.experts(2, block, ep_size)[0] for block in blocks]


@pytest.mark.parametrize("ep_size", [2, 4])  # in groups of two ranks, and of one
def test_experts_equal_full_precision(ep_size: int) -> None:
    for plain, exact in run(_experts, 4, ep_size):
        assert exact == plain


def _features(stage: int) -> dict[str, list[tuple]]:
    found = {}
    for name, feature in DEEPSPEED_FEATURES.items():
        if stage in feature.stages and needs.has_deepspeed(feature.since):
            both = [feature.train(stage, block_of(scheme, 1), 4) for scheme in SCHEMES]
            found[name] = [(one.losses, digests(one.weights), one.seen) for one in both]
    return found


@pytest.mark.parametrize("stage", thinned(STAGES, lambda stage: stage == 2))
def test_features_of_deepspeed_equal_full_precision(stage: int) -> None:
    """Every weight that a forward or a backward sees, too."""
    for found in run(_features, 2, stage, timeout=280):
        assert len(found) > 15
        for name, (plain, exact) in found.items():
            assert exact == plain, name


# ---- what is exact needs no refill ----


def _looked_at(stage: int) -> dict[str, Any]:
    """Weights that are shown, saved and compared between steps, messages that this takes, and bytes
    between nodes of the steps before and after.
    """
    import ds_quant

    engine = build(config_of("lossless", stage, 2, checksum_steps=2))

    def bytes_of(step: int) -> int:
        before = ds_quant.report(engine)["received_bytes"]["weights"]["inter"]
        train_step(engine, step)
        return ds_quant.report(engine)["received_bytes"]["weights"]["inter"] - before

    counts = [bytes_of(step) for step in range(5)]
    exact = {n: digest(torch.from_numpy(a).bfloat16()) for n, a in masters(engine).items()}
    before = ds_quant.report(engine)
    with ds_quant.exact_weights(engine):
        inside = live(engine)
    engine.save_16bit_model(os.environ["TEST_SCRATCH"], "model.bin")
    engine.save_checkpoint(os.environ["TEST_SCRATCH"], tag="here")
    after = ds_quant.report(engine)
    return {
        "bytes": (counts[3:], [bytes_of(step) for step in (5, 6)]),
        "exact": exact,
        "live": inside,
        "messages": after["collectives"]["weights"] - before["collectives"]["weights"],
        "resyncs": after["resyncs"],
    }


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_always_exact_is_not_brought_back(stage: int) -> None:
    for found in run_all(_looked_at, 4, ((1,), (2,), (3,)))[stage,]:
        if stage < 3:
            assert found["live"] == found["exact"]
        assert found["messages"] == 0
        assert found["resyncs"] == 0
        before, after = map(sum, found["bytes"])
        assert after == pytest.approx(before, rel=0.15)


def _drifted(stage: int, then: str) -> None:
    engine = build(config_of("lossless", stage, 2))
    train_step(engine, 0)
    if torch.distributed.get_rank() == 1:
        if stage == 3:
            engine.ds_quant_plugin.node.finish()
            engine.ds_quant_plugin.node.served[0].kept.rows[0, 0] += 1
        else:
            engine.module.first.weight.data.view(-1)[3] += 1
    train_step(engine, 1)  # with the next difference
    if then == "save":
        engine.save_checkpoint(os.environ["TEST_SCRATCH"])
    elif then == "read":
        with ds_quant.exact_weights(engine):
            pass
    else:
        train_step(engine, 2)


@pytest.mark.parametrize(
    ("stage", "then"),
    thinned(
        [*((stage, "step") for stage in STAGES), (2, "save"), (2, "read")],
        lambda *case: case in ((3, "step"), (2, "save")),
    ),
)
def test_a_holder_that_drifts_is_told_to_all_ranks_before_its_weights_count(
    stage: int, then: str
) -> None:
    environment = {"TEST_COLLECTIVE_TIMEOUT": "20"}
    for _, error in run_each(_drifted, 4, stage, then, environment=environment):
        assert "step 2: weights from rank" in error
        finder = 3 if stage == 3 else 1  # of a row of rank 1's own, who receives its difference
        assert f"cannot be decoded on rank {finder} (lossless message: wrong checksum" in error
        assert "different references" in error and "writes weights outside the optimizer" in error
