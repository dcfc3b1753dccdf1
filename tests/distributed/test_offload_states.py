"""``offload_states`` and ``reload_states``, which RL frameworks call around every step."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.distributed.harness import run, run_each
from tests.distributed.host_memory import on_host, separate_host_memory
from tests.distributed.models import (
    build,
    digest,
    digests,
    evaluate,
    forward,
    masters,
    settings,
    train_step,
)

STEPS = 2
# Of ZeRO-3, DeepSpeed moves masters and states of its own FusedAdam only.
INCLUDE = {1: None, 2: None, 3: ["lp_params", "lp_grads", "contiguous_grad_buffer"]}
CASES = [(3, "sdp4bit"), (3, "lossless"), (2, "sdp4bit"), (2, "lossless"), (1, "qsdp")]


def moved(engine: Any) -> dict[str, list[torch.Tensor]]:
    """What must leave the device: of the plugin, and the replica of ZeRO-1 and 2."""
    plugin = engine.ds_quant_plugin
    return {
        "rows": [param.kept.rows for param in plugin.node.served] if plugin.node else [],
        "sums": list(plugin.waiting._sums()) if plugin.waiting else [],
        "replica": list(engine.optimizer.bit16_groups_flat) if plugin.replica else [],
    }


def there_and_back(engine: Any, *, stepped: bool) -> dict[str, int]:
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


def trained(stage: int, scheme: str, *, moves: bool) -> tuple[list[float], Any, list[Any]]:
    """Losses, masters, and what has left the device after every micro-step."""
    block = {"scheme": scheme, "node_size": 2}
    losses, seen = [], []
    with separate_host_memory(offloads=False) if moves else nullcontext():
        engine = build(settings(stage, block, dtype="bf16", accumulation=2))
        for step in range(STEPS):
            for micro in range(2):
                loss = forward(engine, step, micro)
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
                if moves:
                    seen.append(there_and_back(engine, stepped=micro == 1))
        losses.append(evaluate(engine))
        return losses, digests(masters(engine)), seen


def both(cases: list[tuple[int, str]]) -> list[Any]:
    return [[trained(*case, moves=moves) for moves in (False, True)] for case in cases]


def test_what_leaves_the_device_comes_back_with_the_same_bits() -> None:
    """After every micro-step, so also with waiting sums and while an exchange is on its way."""
    for rank in run(both, 4, CASES, timeout=200):
        for (stage, scheme), (alone, away) in zip(CASES, rank, strict=True):
            assert away[:2] == alone[:2], (stage, scheme)
            held, stepped = away[2][:2]
            assert (held["rows"] > 0, held["replica"] > 0) == (stage == 3, stage < 3)
            assert (held["sums"] > 0, stepped["sums"]) == (stage > 1, 0)


def saved_while_away(scheme: str) -> None:
    engine = build(settings(2, {"scheme": scheme, "node_size": 2}, dtype="bf16"))
    train_step(engine, 0)
    engine.optimizer.offload_states()
    engine.save_16bit_model(tempfile.mkdtemp())


def test_a_save_while_the_replica_is_away_asks_for_it_on_all_ranks() -> None:
    """It must be gathered exactly first. What is exact anyway is saved as without the plugin."""
    for _, error in run_each(saved_while_away, 4, "sdp4bit"):
        assert error is not None and "call reload_states before" in error
    run(saved_while_away, 4, "full_precision")
