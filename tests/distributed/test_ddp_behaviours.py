"""The cells of DDP in the table of behaviours: see ddp_trials.py."""

from __future__ import annotations

import traceback
from functools import cache

import pytest
import torch.distributed as dist

from tests.distributed.behaviours import TABLE
from tests.distributed.cells import Plays
from tests.distributed.ddp_trials import TRIALS, Differs
from tests.distributed.harness import run_each
from tests.distributed.test_behaviours import FINISHED, ends_of_all_ranks
from tests.thin import thinned


def test_every_trial_is_of_a_row_and_every_row_has_its_trial() -> None:
    rows = [name for name, row in TABLE.items() if any(isinstance(c, Plays) for c in row.of("ddp"))]
    assert sorted(rows) == sorted(TRIALS)


def play(rows: list[str]) -> dict[str, str]:
    """Run trials on this rank. Return the causes of failures, "" for none.

    No trial follows one that some ranks have not finished: they may wait for each other.
    """
    causes: dict[str, str] = {}
    for place, row in enumerate(rows):
        end = FINISHED
        try:
            trial = TRIALS[row]
            on_two_ranks = dist.get_world_size() == 2
            trial.compare(trial.quick_schemes if on_two_ranks else trial.schemes)
            causes[row] = ""
        except Differs as error:
            causes[row] = str(error)
        except BaseException as error:  # pytest's own, too
            causes[row] = traceback.format_exc()
            end = repr(error)
        if len(set(ends_of_all_ranks(place, end))) > 1:
            dist.destroy_process_group()  # else the end of the run waits for all ranks
            break
    return causes


@cache
def outcomes(world: int) -> list[dict[str, str]]:
    """Run all trials in one start. Return causes of failures by rank."""
    rows = list(TRIALS)
    limits = {"TEST_COLLECTIVE_TIMEOUT": "60"}
    found = []
    for causes, error in run_each(play, world, rows, timeout=1200, environment=limits):
        found.append(dict.fromkeys(rows, error) if error is not None else causes)
    return found


@pytest.mark.parametrize(
    ("row", "world"),
    thinned([(r, w) for w in (2, 4) for r in TRIALS], lambda row, world: world == 2),
)
def test_ddp_does_with_the_block_what_it_does_alone(row: str, world: int) -> None:
    found = []
    for rank, causes in enumerate(outcomes(world)):
        cause = causes.get(row, "not run: ranks have ended an earlier trial in different ways")
        if cause:
            found.append(f"rank {rank}: {cause}")
    if found:
        listed = "\n".join(found)
        pytest.fail(
            f"row: {row}\nfront: DDP, on {world} ranks\na user would notice: {TABLE[row].broken}\n"
            f"cause: {listed}",
            pytrace=False,
        )
