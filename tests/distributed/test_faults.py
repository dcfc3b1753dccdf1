"""A rank dies, stalls or loses its connections: the others end in time and the run can resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.faults import (
    FAULTS,
    RANKS,
    SAVED_STEP,
    STEPS,
    TIMEOUT,
    VICTIM,
    cut,
    stall,
    struck,
    trained_on,
)
from tests.distributed.harness import run, run_each
from tests.thin import thinned

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"

QUICK = (
    "rank killed while weights travel, qsdp, ZeRO-3",
    "rank killed while gradients travel, sdp4bit, ZeRO-3",
    "rank cut off while weights travel, sdp4bit, ZeRO-2",
    "rank killed while it saves a checkpoint, qsdp, ZeRO-2",
)

# What gloo says, below our sentence or, in DeepSpeed's own collectives, alone.
CLEAR = ("does not answer", "Timed out", "Connection closed", "Connection reset", "closed by peer")


@pytest.mark.parametrize("name", thinned(FAULTS, QUICK.__contains__))
def test_survivors_end_in_time_with_a_clear_error_and_the_run_resumes(
    name: str, tmp_path: Path
) -> None:
    fault, folder = FAULTS[name], str(tmp_path)
    patience = 15 if fault.act is stall else 60  # the stopped rank never answers
    environment = {"TEST_COLLECTIVE_TIMEOUT": str(TIMEOUT)}
    outcomes = run_each(struck, RANKS, fault, folder, timeout=patience, environment=environment)
    when, errors, seconds = float((tmp_path / "struck").read_text()), [], []
    for rank, (_, error) in enumerate(outcomes):
        if rank == VICTIM and fault.act is not cut:
            continue
        assert "Error" in error and any(text in error for text in CLEAR), (rank, error)
        errors.append(error)
        seconds.append(float((tmp_path / f"ended {rank}").read_text()) - when)
    assert max(seconds) < fault.within
    assert fault.role == "save" or any("quantized_comm: rank" in error for error in errors)
    if fault.act is stall:  # nobody gives up early on a rank that is slow
        assert max(seconds) > TIMEOUT - 1
    resumed = run(trained_on, RANKS, fault, folder, True)
    (tmp_path / "other").mkdir()
    assert resumed == run(trained_on, RANKS, fault, str(tmp_path / "other"), False)
    assert len(resumed[0][0]) == STEPS - SAVED_STEP


def test_the_page_has_a_row_of_every_fault() -> None:
    rows = PAGE.read_text("utf-8").splitlines()
    for name, fault in FAULTS.items():
        (row,) = [line for line in rows if line.startswith(f"| {name} |")]
        *_, seconds, resumed, _ = row.split("|")
        assert float(seconds) < fault.within and resumed.strip() == "equal"
