"""A rank dies, stalls or loses its connections: the others end in time and the run can resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.faults import FAULTS, TIMEOUT, aftermath, stall
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
def test_survivors_end_in_time_with_a_clear_error(name: str) -> None:
    after, fault = aftermath(name), FAULTS[name]
    for rank, error in after.errors.items():
        assert "Error" in error and any(text in error for text in CLEAR), (rank, error)
        assert after.seconds[rank] < fault.within, rank
    if fault.role != "save":
        assert any("quantized_comm: rank" in error for error in after.errors.values())
    if fault.act is stall:  # nobody gives up early on a rank that is slow
        assert max(after.seconds.values()) > TIMEOUT - 1


@pytest.mark.parametrize("name", thinned(FAULTS, QUICK.__contains__))
def test_the_last_checkpoint_continues_as_the_undisturbed_run(name: str) -> None:
    after = aftermath(name)
    assert after.resumed == after.undisturbed
    assert len(after.resumed[0][0]) == 5


def test_the_page_has_a_row_of_every_fault() -> None:
    rows = PAGE.read_text("utf-8").splitlines()
    for name, fault in FAULTS.items():
        (row,) = [line for line in rows if line.startswith(f"| {name} |")]
        *_, seconds, resumed, _ = row.split("|")
        assert float(seconds) < fault.within and resumed.strip() == "equal"
