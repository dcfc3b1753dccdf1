"""Scheme state in DeepSpeed's checkpoint: resumed runs, other versions, runs without the plugin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.harness import on_ranks, scratch
from tests.distributed.models import (
    QSDP,
    engine_of,
    master_bits,
    save,
    train_steps,
)
from tests.thin import thinned

LEARNED = {
    "scheme": "qsdp",
    "weights": {"bits": 4, "rounding": "nearest", "levels": "learned", "level_steps": [2, 5]},
}
SDP4BIT = {"scheme": "sdp4bit", "allow_full_replica": True}


@pytest.mark.parametrize(
    ("saving", "loading"),
    [(None, LEARNED), (LEARNED, None), (QSDP, SDP4BIT), (SDP4BIT, QSDP), (LEARNED, SDP4BIT)],
    ids=["plain to learned", "learned to plain", "to sdp4bit", "from sdp4bit", "learned away"],
)
@pytest.mark.parametrize("stage", thinned([2, 3], lambda stage: stage == 3))
@on_ranks()
def test_checkpoints_cross_between_schemes(stage: int, saving: Any, loading: Any) -> None:
    engine = engine_of(stage, saving)
    train_steps(engine, 3)
    save(engine)
    engine.destroy()
    engine = engine_of(stage, loading, seed=7)
    engine.load_checkpoint(str(scratch()), tag="middle")
    assert train_steps(engine, 3, 3)[-1] < 0.9


@pytest.mark.parametrize("stage", thinned([2, 3], lambda stage: stage == 3))
@on_ranks()
def test_a_checkpoint_without_state_resets_learned_levels(stage: int) -> None:
    """An engine that has learned some goes on as a fresh one."""
    engine = engine_of(stage, None)
    save(engine)
    engine.destroy()
    outcomes = []
    for learned in (0, 3):
        engine = engine_of(stage, LEARNED, seed=7)
        train_steps(engine, learned)
        engine.load_checkpoint(str(scratch()), tag="middle")
        outcomes.append((train_steps(engine, 2), master_bits(engine)))
        engine.destroy()
    assert outcomes[0] == outcomes[1]


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


@on_ranks(timeout=120)
def test_a_state_of_another_version_or_a_damaged_one_is_refused_by_name() -> None:
    from ds_quant.zero import checkpoint

    dump = checkpoint.dump
    for state, wanted in FOREIGN:
        changed = state if callable(state) else lambda _, state=state: state
        checkpoint.dump = lambda plugin, changed=changed: changed(dump(plugin))
        engine = engine_of(2, QSDP, dtype="fp32")
        save(engine)
        engine.destroy()
        engine = engine_of(2, QSDP, dtype="fp32")
        with pytest.raises(Exception, match="remove the key 'ds_quant'") as caught:
            engine.load_checkpoint(str(scratch()), tag="middle")
        assert wanted in str(caught.value)
        engine.destroy()
