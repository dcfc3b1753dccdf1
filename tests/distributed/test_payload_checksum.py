"""``payload_checksum``: a changed message ends all ranks by name, and nothing else changes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

from tests.distributed.harness import run, run_each
from tests.distributed.models import build, evaluate, settings, train_step
from tests.thin import thinned

BLOCKS = {
    "qsdp": {"scheme": "qsdp"},
    "sdp4bit": {"scheme": "sdp4bit", "allow_full_replica": True},
}


@dataclass
class Flip:
    """A transport that changes one bit of what it brings, after it has arrived."""

    work: Any
    received: torch.Tensor
    byte: int

    def wait(self) -> None:
        self.work.wait()
        self.received[self.byte] ^= 4


class Fault:
    """From now on the next message of ``role`` on this rank, from ``sender`` of two, is changed."""

    def __init__(self, role: str, sender: int) -> None:
        from ds_quant.comm.transport import Link

        self.role, self.sender, self.armed = role, sender, False
        self._posting = ""
        Link._count, Link._posted = self._noting(Link._count), self._changing(Link._posted)

    def _noting(self, count: Any) -> Any:
        def counted(link: Any, role: str, received: Any) -> None:
            self._posting = role
            count(link, role, received)

        return counted

    def _changing(self, post: Any) -> Any:
        def posted(link: Any, payload: Any, received: torch.Tensor, work: Any) -> Any:
            if self.armed and self._posting == self.role:
                self.armed = False
                work = Flip(work, received, self.sender * received.numel() // 2 + 3)
            return post(link, payload, received, work)

        return posted


def _hit(stage: int, block: dict, role: str, when: str) -> str:
    """Rank 1 gets a changed message in step 2, while saving, or in an engine without optimizer."""
    from deepspeed import comm as dist

    fault = Fault(role, sender=0)
    engine = build(settings(stage, block, dtype="bf16"))
    for step in range(2):
        train_step(engine, step)
    fault.armed = dist.get_rank() == 1
    if when == "save":
        engine.save_checkpoint(os.environ["TEST_SCRATCH"], "here")
    train_step(engine, 2)
    train_step(engine, 3)
    return "went on"


ROLES = ("weights", "gradients")


@pytest.mark.parametrize(
    ("stage", "scheme", "role"),
    thinned(
        product((1, 2, 3), BLOCKS, ROLES),
        lambda stage, scheme, role: (scheme == "qsdp") == (role == "weights") and stage > 1,
    ),
)
def test_a_changed_message_ends_all_ranks_naming_role_sender_and_step(
    stage: int, scheme: str, role: str
) -> None:
    block = BLOCKS[scheme] | {"node_size": 1, "payload_checksum": True}
    # What a step sends after its check (updated weights) is found by that of the next one.
    late = role == "weights" and (stage < 3 or scheme == "sdp4bit")
    for result, error in run_each(_hit, 2, stage, block, role, "step"):
        assert result is None
        last = error.strip().splitlines()[-1]
        assert f"step {3 if late else 2}: {role} from rank 0 were changed on their way" in last
        assert "to rank 1: their checksum is wrong" in last
        assert "payload_checksum=true" in last


def test_without_checksums_nobody_notices() -> None:
    """Else the test above would be content with an error of another kind."""
    assert run(_hit, 2, 2, {"scheme": "qsdp"}, "gradients", "step") == ["went on"] * 2


def test_weights_changed_on_their_way_into_a_checkpoint_are_found_by_the_save() -> None:
    block = {"scheme": "qsdp", "payload_checksum": True}
    for _, error in run_each(_hit, 2, 2, block, "weights", "save"):
        assert "save_checkpoint" in error  # not only the step after it
        assert "step 2: weights from rank 0 were changed" in error


def _hit_in_comparison(stage: int, more: dict) -> None:
    """Rank 1 gets a changed message while checksums of the kept weights are compared."""
    from ds_quant.zero import safety

    fault, compare = Fault("weights", sender=0), safety._differing

    def hit(*who: Any) -> list[int]:
        fault.armed = torch.distributed.get_rank() == 1
        return compare(*who)

    safety._differing = hit
    block = BLOCKS["sdp4bit"] | {"node_size": 1, "checksum_steps": 2} | more
    engine = build(settings(stage, block, dtype="bf16"))
    for step in range(3):
        train_step(engine, step)


@pytest.mark.parametrize(("stage", "sealed"), [(2, False), (3, False), (3, True)])
def test_a_changed_comparison_ends_all_ranks_together(stage: int, sealed: bool) -> None:
    """Else one rank refills kept weights, which is a collective, and the other does not."""
    reason = (
        "step 1: weights from rank 0 were changed on their way to rank 1"
        if sealed
        else "step 2: ranks have received different checksums of the weights that they keep"
    )
    for result, error in run_each(_hit_in_comparison, 2, stage, {"payload_checksum": sealed}):
        assert result is None and f"quantized_comm: {reason}" in error, error


def _inference() -> float:
    import deepspeed
    from deepspeed import comm as dist

    from tests.distributed.models import Regression

    fault = Fault("weights", sender=0)
    torch.manual_seed(0)
    block = {"scheme": "qsdp", "payload_checksum": True}
    config = settings(3, block, dtype="bf16")
    engine = deepspeed.initialize(model=Regression(), config=config)[0]
    loss = evaluate(engine)
    fault.armed = dist.get_rank() == 1
    return loss + evaluate(engine)


def test_an_engine_without_optimizer_checks_every_message_at_once() -> None:
    _, error = run_each(_inference, 2, timeout=60, environment={"TEST_COLLECTIVE_TIMEOUT": "20"})[1]
    assert "step 0: weights from rank 0 were changed on their way to rank 1" in error
