"""Scheme state in DeepSpeed's checkpoint: resumed runs, other versions, runs without the plugin."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.features import Borrowed
from tests.distributed.harness import run, run_each
from tests.distributed.models import Regression, build, digests, masters, settings, train_step
from tests.thin import thinned

pytestmark = pytest.mark.distributed

LEARNED = {
    "scheme": "qsdp",
    "weights": {"bits": 4, "rounding": "nearest", "levels": "learned", "level_steps": [2, 5]},
}
QSDP = {"scheme": "qsdp"}


LEVELS = {"scheme": "sdp4bit", "node_size": 2, "allow_full_replica": True}


def _went_on_and_resumed(
    stage: int, block: dict, dtype: str, accumulation: int, model: type[nn.Module]
) -> list[tuple]:
    """(losses, bits, client state) after step 3 of a run that saves there and of one that loads."""
    from deepspeed import comm as dist

    folder = os.environ["TEST_SCRATCH"]
    config = settings(stage, block, dtype=dtype, accumulation=accumulation)
    outcomes = []
    for resumed in (False, True):
        engine = build(config, model, seed=7 if resumed else 0)
        losses, state = [], {}
        if resumed:
            _, state = engine.load_checkpoint(folder, tag="middle")
        for step in range(3 if resumed else 0, 7):
            losses += train_step(engine, step)
            if step == 2:
                engine.save_checkpoint(folder, "middle", {"epoch": 4})
                dist.barrier()
                losses = []
        outcomes.append((losses, digests(masters(engine)), state))
        engine.destroy()
    return outcomes


@pytest.mark.parametrize(
    ("stage", "block", "dtype", "accumulation", "model"),
    [
        (1, LEARNED, "fp32", 2, Regression), (1, QSDP, "bf16", 2, Regression),
        (2, LEARNED, "bf16", 2, Regression), (2, QSDP, "fp32", 2, Regression),
        (3, LEARNED, "fp32", 2, Regression), (3, LEARNED, "bf16", 2, Regression),
        (3, QSDP, "bf16", 2, Regression), (3, QSDP, "bf16", 1, Borrowed),
        (1, LEVELS, "bf16", 2, Regression), (2, LEVELS, "bf16", 1, Regression),
        (3, LEVELS, "bf16", 1, Borrowed), (3, LEVELS, "bf16", 2, Regression),
    ],
)  # fmt: skip
def test_a_resumed_run_equals_the_one_that_saved(
    stage: int, block: dict, dtype: str, accumulation: int, model: type[nn.Module]
) -> None:
    """Learned levels, the steps that address random bits, kept weights, which both saving and
    loading make exact, a weight that another module borrows, and the user's own client state.
    """
    world = 4 if block is LEVELS else 3
    outcomes = run(_went_on_and_resumed, world, stage, block, dtype, accumulation, model)
    for went_on, resumed in outcomes:
        assert went_on[:2] == resumed[:2]
        assert resumed[2]["epoch"] == 4 and "ds_quant" not in resumed[2]


def _across(stage: int, saving: dict | None, loading: dict | None) -> list[float]:
    """Losses of a run that loads what a run with another block, or none, has saved."""
    from deepspeed import comm as dist

    folder = os.environ["TEST_SCRATCH"]
    engine = build(settings(stage, saving, dtype="bf16"))
    for step in range(3):
        train_step(engine, step)
    engine.save_checkpoint(folder, "middle")
    dist.barrier()
    engine.destroy()
    engine = build(settings(stage, loading, dtype="bf16"), seed=7)
    engine.load_checkpoint(folder, tag="middle")
    return [loss for step in range(3, 6) for loss in train_step(engine, step)]


SDP4BIT = {"scheme": "sdp4bit", "allow_full_replica": True}


@pytest.mark.parametrize(
    ("saving", "loading"),
    [(None, LEARNED), (LEARNED, None), (QSDP, SDP4BIT), (SDP4BIT, QSDP), (LEARNED, SDP4BIT)],
    ids=["plain to learned", "learned to plain", "to sdp4bit", "from sdp4bit", "learned away"],
)
@pytest.mark.parametrize("stage", thinned([2, 3], lambda stage: stage == 3))
def test_checkpoints_cross_between_schemes(stage: int, saving: Any, loading: Any) -> None:
    for losses in run(_across, 2, stage, saving, loading):
        assert losses[-1] < 0.9


def _reloaded(stage: int) -> list[tuple]:
    """(losses, bits) after a plain checkpoint was loaded, into a fresh engine with learned levels
    and into one that has learned some.
    """
    from deepspeed import comm as dist

    folder = os.environ["TEST_SCRATCH"]
    engine = build(settings(stage, None, dtype="bf16"))
    engine.save_checkpoint(folder, "plain")
    dist.barrier()
    engine.destroy()
    outcomes = []
    for learned in (False, True):
        engine = build(settings(stage, LEARNED, dtype="bf16"), seed=7)
        if learned:
            for step in range(3):
                train_step(engine, step)
        engine.load_checkpoint(folder, tag="plain")
        losses = [train_step(engine, step) for step in range(2)]
        outcomes.append((losses, digests(masters(engine))))
        engine.destroy()
    return outcomes


@pytest.mark.parametrize("stage", thinned([2, 3], lambda stage: stage == 3))
def test_a_checkpoint_without_state_resets_learned_levels(stage: int) -> None:
    for fresh, had_learned in run(_reloaded, 2, stage):
        assert had_learned == fresh


def _foreign(state: Any) -> None:
    """Loads a checkpoint with that state; with what has gone wrong with a good one if callable."""
    from ds_quant.zero import checkpoint

    folder, dump = os.environ["TEST_SCRATCH"], checkpoint.dump
    checkpoint.dump = lambda binding: state(dump(binding)) if callable(state) else state
    engine = build(settings(2, QSDP))
    engine.save_checkpoint(folder, "middle")
    engine = build(settings(2, QSDP))
    engine.load_checkpoint(folder, tag="middle")


@pytest.mark.parametrize(
    ("state", "found"), [({"version": 2}, "2"), ({"version": None}, "None"), ("text", "'str'")]
)
def test_state_of_another_version_is_refused_by_name(state: Any, found: str) -> None:
    for _, error in run_each(_foreign, 2, state):
        assert f"the state in the checkpoint has version {found}, this ds_quant reads 1" in error
        assert "remove the key 'ds_quant'" in error


def _without_ranks(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in ("ranks", "learned_at")}


def _one_rank_number(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"ranks": (2,)}


def _short_table(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"levels": {"first.weight": torch.arange(15.0)}}


def _no_number(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"levels": {"last.weight": torch.full((16,), float("nan"))}}


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_without_ranks, "ranks, learned_at"),
        (_one_rank_number, "ranks"),
        (_short_table, "levels['first.weight']"),
        (_no_number, "levels['last.weight']"),
    ],
)
def test_a_damaged_state_is_refused_by_name(damage: Any, named: str) -> None:
    for _, error in run_each(_foreign, 2, damage):
        assert f"the state in the checkpoint has no usable {named}: it is incomplete" in error
        assert "remove the key 'ds_quant'" in error
