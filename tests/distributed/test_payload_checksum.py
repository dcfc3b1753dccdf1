"""``payload_checksum``: a changed message ends all ranks by name, and nothing else changes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tests.distributed.harness import on_ranks, run_each
from tests.distributed.messages import MessageDamage
from tests.distributed.models import Regression, engine_of, evaluate, save, settings, train_steps
from tests.thin import thinned

BLOCKS = {
    "qsdp": {"scheme": "qsdp"},
    "sdp4bit": {"scheme": "sdp4bit", "allow_full_replica": True},
}


def hit(stage: int, block: dict[str, Any], role: str) -> tuple[Any, MessageDamage]:
    """Train an engine for two steps; rank 1 gets a changed message next."""
    damage = MessageDamage(role, sender=0)
    engine = engine_of(stage, block)
    train_steps(engine, 2)
    damage.armed = engine.global_rank == 1
    return engine, damage


@pytest.mark.parametrize(
    ("stage", "scheme", "role"),
    thinned(
        product((1, 2, 3), BLOCKS, ("weights", "gradients")),
        lambda stage, scheme, role: (scheme == "qsdp") == (role == "weights") and stage > 1,
    ),
)
@on_ranks()
def test_a_changed_message_ends_all_ranks_naming_role_sender_and_step(
    stage: int, scheme: str, role: str
) -> None:
    engine, _ = hit(stage, BLOCKS[scheme] | {"node_size": 1, "payload_checksum": True}, role)
    # What a step sends after its check (updated weights) is found by that of the next one.
    late = role == "weights" and (stage < 3 or scheme == "sdp4bit")
    said = f"step {3 if late else 2}: {role} from rank 0 were changed on their way.* to rank 1: "
    with pytest.raises(RuntimeError, match=f"{said}their checksum is wrong.*payload_checksum=true"):
        train_steps(engine, 2, 2)


@on_ranks()
def test_without_checksums_nobody_notices() -> None:
    """Else the test above would be content with an error of another kind. The changed gradients
    move the weights, which the loss of the next step shows on both ranks.
    """
    block = {"scheme": "qsdp"}
    wanted = train_steps(engine_of(2, block), 4)[2:]
    engine, damage = hit(2, block, "gradients")
    was_armed = damage.armed
    losses = train_steps(engine, 2, 2)
    assert was_armed == (engine.global_rank == 1)
    assert not damage.armed  # the message was changed
    assert losses[0] == wanted[0]
    assert losses[1] != wanted[1]


@on_ranks()
def test_weights_changed_on_their_way_into_a_checkpoint_are_found_by_the_save() -> None:
    """Not only by the step after it."""
    engine, _ = hit(2, {"scheme": "qsdp", "payload_checksum": True}, "weights")
    with pytest.raises(RuntimeError, match="step 2: weights from rank 0 were changed"):
        save(engine)


@pytest.mark.parametrize(("stage", "sealed"), [(2, False), (3, False), (3, True)])
@on_ranks()
def test_a_changed_comparison_ends_all_ranks_together(stage: int, sealed: bool) -> None:
    """Rank 1 gets a changed message while checksums of the kept weights are compared. Else one rank
    refills kept weights, which is a collective, and the other does not.
    """
    from ds_quant.runtime import copies

    damage = MessageDamage("weights", sender=0)
    compare = copies.differing_ranks

    def changed(*who: Any) -> list[int]:
        damage.armed = torch.distributed.get_rank() == 1
        return compare(*who)

    copies.differing_ranks = changed
    block = {"node_size": 1, "checksum_steps": 2, "payload_checksum": sealed}
    reason = (
        "step 1: weights from rank 0 were changed on their way to rank 1"
        if sealed
        else "step 2: ranks have received different checksums of the weights that they keep"
    )
    with pytest.raises(RuntimeError, match=f"quantized_comm: {reason}"):
        train_steps(engine_of(stage, BLOCKS["sdp4bit"] | block), 3)


def _inference() -> None:
    import deepspeed

    damage = MessageDamage("weights", sender=0)
    config = settings(3, {"scheme": "qsdp", "payload_checksum": True}, dtype="bf16")
    engine = deepspeed.initialize(model=Regression(), config=config)[0]
    evaluate(engine)
    damage.armed = engine.global_rank == 1
    evaluate(engine)


def test_an_engine_without_optimizer_checks_every_message_at_once() -> None:
    _, error = run_each(_inference, 2, timeout=60, environment={"TEST_COLLECTIVE_TIMEOUT": "20"})[1]
    assert "step 0: weights from rank 0 were changed on their way to rank 1" in error
