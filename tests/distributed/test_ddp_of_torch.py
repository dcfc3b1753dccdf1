"""torch's own tests of DDP, with a block that quantizes nothing: see torch_ddp.py."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import torch_ddp
from tests.distributed.harness import run_each, scratch

WORLD = 2
# Tests that pass without a block only: the reason.
EXPLAINED = {
    "test_ddp_comm_hook_logging": "it registers hooks of its own, and expects none before",
    "test_ddp_grad_div_uneven_inputs": "join(divide_by_initial_world_size=False): DDP does not "
    "tell a hook",
}


def play_and_read(tests: list[str], with_block: bool) -> list[str]:
    """Run tests on this rank. Return the outcomes of those that have ended on it."""
    rank = dist.get_rank()
    torch_ddp.play(tests, with_block)
    files = [Path(scratch()) / f"{i} on rank {rank}.end" for i in range(len(tests))]
    return [file.read_text() for file in files if file.exists()]


@cache
def outcomes(with_block: bool) -> dict[str, str]:
    """Return the outcome of every test on rank 0, or the error of a rank that has died."""
    left = torch_ddp.names()
    found: dict[str, str] = {}
    limits = {"TEST_COLLECTIVE_TIMEOUT": "30"}
    while left:
        ended = run_each(play_and_read, WORLD, left, with_block, timeout=600, environment=limits)
        read = ended[0][0] or ended[1][0] or [f"failed: {ended[0][1] or ended[1][1]}"[:400]]
        found |= dict(zip(left, read, strict=False))
        left = left[max(1, len(read)) :]
    return found


@pytest.mark.slow
@pytest.mark.skipif(find_spec("expecttest") is None, reason="needs expecttest, as torch's tests do")
def test_what_passes_with_ddp_alone_passes_with_the_hook() -> None:
    plain, hooked = outcomes(False), outcomes(True)
    passing = [name for name, outcome in plain.items() if outcome.startswith(torch_ddp.PASSED)]
    assert len(passing) >= 40
    surprises: dict[str, str] = {}
    for name in passing:
        outcome = hooked[name]
        is_expected = outcome.startswith((torch_ddp.PASSED, torch_ddp.REFUSED))
        if is_expected == (name in EXPLAINED):
            surprises[name] = outcome
    assert surprises == {}
    attached = [name for name in passing if int(_count(hooked[name])) > 0]
    assert len(attached) >= 25


def _count(outcome: str) -> str:
    words = outcome.split()
    return words[1] if outcome.startswith(torch_ddp.PASSED) else "0"
