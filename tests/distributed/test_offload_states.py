"""``offload_states`` and ``reload_states``, which RL frameworks call around every step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.distributed.harness import on_ranks
from tests.distributed.host_memory import on_host, separate_host_memory
from tests.distributed.models import (
    Run,
    digest,
    digests,
    engine_of,
    evaluate,
    forward,
    saved,
    train_steps,
)
from tests.distributed.rows import Table, Way

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

# Of ZeRO-3, DeepSpeed moves masters and states of its own FusedAdam only.
INCLUDE = {1: None, 2: None, 3: ["lp_params", "lp_grads", "contiguous_grad_buffer"]}


def moved(engine: DeepSpeedEngine) -> dict[str, list[torch.Tensor]]:
    """Return the tensors that must leave the device, with the replica of ZeRO-1 and 2."""
    attached = engine.ds_quant_attached
    return {
        "rows": [param.node_rows.rows for param in attached.node_shard.served]
        if attached.node_shard
        else [],
        "sums": list(attached.partial_gradients._all_sums()) if attached.partial_gradients else [],
        "replica": list(engine.optimizer.bit16_groups_flat) if attached.replica else [],
    }


def there_and_back(engine: DeepSpeedEngine, *, stepped: bool) -> dict[str, int]:
    """How many tensors of each kind have left. ``stepped``: an exchange of rows may be on its way,
    whose bits the training must show.
    """
    kinds = moved(engine)
    bits = {kind: list(map(digest, tensors)) for kind, tensors in kinds.items()}
    places = [StorageWeakRef(t.untyped_storage()) for own in kinds.values() for t in own]
    del kinds
    stage = engine.zero_optimization_stage()
    engine.optimizer.offload_states(include=INCLUDE[stage])
    assert [place.expired() for place in places] == [True] * len(places)
    kinds = moved(engine)
    assert all(map(on_host, kinds["rows"] + kinds["sums"]))
    if stage == 3:
        evaluate(engine)  # DeepSpeed copies its shards to the device for each gather
    engine.optimizer.reload_states()
    after = moved(engine)
    for kind in ("sums", "replica") if stepped else after:
        assert list(map(digest, after[kind])) == bits[kind]
    assert not any(map(on_host, after["rows"]))
    return {kind: len(tensors) for kind, tensors in kinds.items()}


def away_and_back(engine: DeepSpeedEngine, step: int, _: int) -> list[float]:
    """After every micro-step, so also with waiting sums and while an exchange is on its way."""
    losses, stage = [], engine.zero_optimization_stage()
    for micro in range(2):
        loss = forward(engine, step, micro)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        left = there_and_back(engine, stepped=micro == 1)
        assert (left["rows"] > 0, left["replica"] > 0) == (stage == 3, stage < 3)
        assert (left["sums"] > 0) == (stage > 1 and micro == 0)
    return losses


def trained_alike(run: Run, other: Run) -> None:
    assert other.losses == run.losses and digests(other.weights) == digests(run.weights)


TABLE = Table(__name__)
AWAY = Way(inside=partial(separate_host_memory, offloads=False), step=away_and_back)
for scheme, stages in (("sdp4bit", (2, 3)), ("lossless", (2, 3)), ("qsdp", (1,))):
    TABLE.add(
        scheme, Way(), AWAY,
        holds=trained_alike, block={"scheme": scheme, "node_size": 2}, world=4, stages=stages,
        accumulation=2, quick=(3,) if scheme == "sdp4bit" else (),
    )  # fmt: skip


@pytest.mark.parametrize(("title", "stage"), TABLE.params())
def test_what_leaves_the_device_comes_back_with_the_same_bits(title: str, stage: int) -> None:
    TABLE.check(title, stage)


@pytest.mark.parametrize("scheme", ["sdp4bit", "full_precision"])
@on_ranks(4)
def test_a_save_while_the_replica_is_away_asks_for_it_on_all_ranks(scheme: str) -> None:
    """It must be gathered exactly first. What is exact anyway is saved as without the plugin."""
    engine = engine_of(2, {"scheme": scheme, "node_size": 2})
    train_steps(engine, 1)
    engine.optimizer.offload_states()
    if scheme == "full_precision":
        saved(engine)
    else:
        with pytest.raises(RuntimeError, match="call reload_states before"):
            saved(engine)
