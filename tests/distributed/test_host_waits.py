"""How often a step of lossless differences waits for the device, in a fake world of 2 x 2 ranks."""

from __future__ import annotations

from typing import Any

import fake_world
import pytest

from tests.distributed import counting
from tests.distributed.harness import run
from tests.distributed.models import build, settings, train_step
from tests.distributed.test_spread import small_chunks


def _waits(stage: int, block: dict[str, Any]) -> tuple[dict[str, int], int]:
    """By function, in one step of two micro-steps; and its messages of weights between nodes."""
    from ds_quant.comm.lossless import Outbox

    posted, post = [], Outbox.post
    Outbox.post = lambda *args: posted.append(args[1]) or post(*args)
    fake_world.join(fake_world.World(2, 2))
    config = settings(
        stage, {"node_size": 2, "metrics": {"interval": 0}, "checksum_steps": 0, **block},
        dtype="bf16", accumulation=2, zero={"allgather_bucket_size": 16_384},
    )  # fmt: skip
    with fake_world.without_handshake(), fake_world.faked_cuda(), small_chunks(streams=True):
        engine = build(config)
        for step in range(2):
            train_step(engine, step)
        posted.clear()
        with counting.waits() as counts:
            train_step(engine, 2)
    return dict(counts), len(posted)


@pytest.mark.parametrize("stage", [2, 3])
def test_lossless_differences_wait_twice_per_step_whatever_the_messages(stage: int) -> None:
    ((waits, messages),) = run(
        _waits, 1, stage, {"scheme": "lossless_g3"}, environment={"TEST_PROCESS_GROUP": "own"}
    )
    assert messages > 3
    assert {name.rpartition(".")[2]: count for name, count in waits.items()} == {
        "_agree": 1,  # the lengths
        "minimum": 1,  # whether any rank could not decode
    }


@pytest.mark.parametrize("scheme", ["full_precision", "qsdp", "sdp4bit", "eden3"])
def test_nothing_else_waits(scheme: str) -> None:
    environment = {"TEST_PROCESS_GROUP": "own"}
    for stage in (2, 3):
        ((waits, _),) = run(_waits, 1, stage, {"scheme": scheme}, environment=environment)
        assert waits == {}
