"""Links, full precision and prices of one run, as one of 2 x 2 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_quant.runtime.figures import saved_bytes
from ds_quant.runtime.run import SchemeState
from tests.world import SimulatedRank, World


def world(**keys: Any) -> World:
    """Of two micro-steps under ZeRO-2, with a weight of 64 x 64."""
    module = nn.ParameterDict({"w": nn.Parameter(torch.empty(64, 64))})
    return World(2, 2, module=module, stage=2, micro_steps=2, scheme="full_precision", **keys)


def rank_of(**keys: Any) -> SimulatedRank:
    return world(**keys).ranks[0]


@pytest.mark.parametrize(
    ("warmup", "until", "killed", "exact"),
    [(0, 0, False, 0), (3, 0, False, 3), (0, 2, False, 2), (2, 4, False, 4), (4, 2, False, 4),
     (0, 0, True, 6)],
)  # fmt: skip
def test_full_precision_lasts_for_the_warm_up_the_fallback_and_the_kill_file(
    warmup: int, until: int, killed: bool, exact: int
) -> None:
    made = rank_of(warmup_steps=warmup)
    made.run.state.exact_until, made.run.state.killed = until, killed
    assert [made.run.is_full_precision(step) for step in range(6)] == [
        step < exact for step in range(6)
    ]


def test_an_entry_of_a_schedule_is_due_once() -> None:
    state = SchemeState()
    due = [state.due((2, 5), step) for step in (1, 2, 3, 6, 7, 4)]  # step 5 is loaded over
    assert due == [False, True, False, True, False, False]
    assert state.learned_at == 7


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [0, 2]])
def test_the_world_has_two_levels_and_a_part_of_it_one(
    ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world()
    first, part = made.ranks[0], made.communicator(ranks, 0)
    monkeypatch.setattr(first.run, "communicator", lambda group: part)
    hierarchy = first.run.level(object()).hierarchy
    assert (hierarchy.intra is None) == (hierarchy.inter is None) == (len(ranks) < 4)


@pytest.mark.parametrize("cross", ["step", "micro_step"])
def test_what_is_saved_is_compared_with_full_precision_that_crosses_as_often(
    cross: str,
) -> None:
    """64 x 64 in fp32 over 2 x 2 ranks: half of a node's gradients comes from the other one."""
    made = rank_of(gradients={"cross": cross})
    made.engine.communication_data_type = torch.float32
    found = made.run.received_in_full_precision()["gradients"]
    own = made.run.received_by_formula(made.run.comm_volume())
    steps = {role: {at: 3 * n for at, n in links.items()} for role, links in own.items()}
    saved = saved_bytes(steps, own, made.run.received_in_full_precision())["gradients"]
    for at in ("inter", "intra"):
        assert saved[at] == pytest.approx(3 * (found[at] - own["gradients"][at]))
    crossings = 1 if cross == "step" else 2
    assert found["inter"] == crossings * 4 * 64 * 64 / 2 / 2
    assert found["intra"] == 2 * 4 * 64 * 64 / 2
