"""Scheme state in DeepSpeed's checkpoint: resumed runs, other versions, runs without the plugin."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.distributed.harness import run
from tests.distributed.models import build, digests, masters, settings, train_step
from tests.thin import thinned

LEARNED = {
    "scheme": "qsdp",
    "weights": {"bits": 4, "rounding": "nearest", "levels": "learned", "level_steps": [2, 5]},
}
QSDP = {"scheme": "qsdp"}


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


def _without_ranks(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in ("ranks", "learned_at")}


def _one_rank_number(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"ranks": (2,)}


def _short_table(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"levels": {"first.weight": torch.arange(15.0)}}


def _no_number(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"levels": {"last.weight": torch.full((16,), float("nan"))}}


VERSION = "the state in the checkpoint has version {}, this ds_quant reads 1"
DAMAGED = "the state in the checkpoint has no usable {}: it is incomplete"
# A state, or what has gone wrong with a good one -> what is said.
FOREIGN: list[tuple[Any, str]] = [
    ({"version": 2}, VERSION.format(2)),
    ({"version": None}, VERSION.format(None)),
    ("text", VERSION.format("'str'")),
    (_without_ranks, DAMAGED.format("ranks, learned_at")),
    (_one_rank_number, DAMAGED.format("ranks")),
    (_short_table, DAMAGED.format("levels['first.weight']")),
    (_no_number, DAMAGED.format("levels['last.weight']")),
]


def _foreign() -> list[str]:
    """What is said of a checkpoint with each of these states."""
    from ds_quant.zero import checkpoint

    folder, dump, said = os.environ["TEST_SCRATCH"], checkpoint.dump, []
    for place, (state, _) in enumerate(FOREIGN):
        changed = state if callable(state) else lambda _, state=state: state
        checkpoint.dump = lambda plugin, changed=changed: changed(dump(plugin))
        engine = build(settings(2, QSDP))
        engine.save_checkpoint(folder, f"tag {place}")
        engine.destroy()
        engine = build(settings(2, QSDP))
        try:
            engine.load_checkpoint(folder, tag=f"tag {place}")
        except Exception as error:
            said.append(str(error))
        engine.destroy()
    return said


def test_a_state_of_another_version_or_a_damaged_one_is_refused_by_name() -> None:
    for said in run(_foreign, 2, timeout=120):
        assert len(said) == len(FOREIGN)
        for message, (_, wanted) in zip(said, FOREIGN, strict=True):
            assert wanted in message and "remove the key 'ds_quant'" in message
