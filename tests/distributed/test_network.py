"""Over a slow or lossy network a run completes, with the same losses."""

from __future__ import annotations

from functools import cache

import pytest

from tests.distributed.cable import obstacle
from tests.distributed.network import PHASES, RUNS, STEPS, Measured, measure

pytestmark = [pytest.mark.distributed, pytest.mark.alone, pytest.mark.slow]


@cache
def measured() -> Measured:
    return measure()


@pytest.fixture(autouse=True)
def needs_a_cable() -> None:
    if (reason := obstacle()) is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "undisturbed"])
def test_a_bad_network_changes_no_bit_of_the_losses(phase: str, run: str) -> None:
    losses, seconds, _ = measured()[run][phase]
    expected, undisturbed, _ = measured()[run]["undisturbed"]
    assert losses == expected
    assert all(len(of_rank) == STEPS and of_rank[-1] < of_rank[0] for of_rank in losses)
    if "delay" in phase:  # else the network was not disturbed at all
        assert seconds > undisturbed + STEPS * 0.1
    if "loss" in phase:  # of about ten
        assert sum(measured()[name][phase][2] for name in RUNS) > 0
