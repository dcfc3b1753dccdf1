"""Weights that ranks keep between steps: what they follow, what changes them outside a step, and
what an engine leaves behind.
"""

from __future__ import annotations

import gc
import os
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import ds_quant
from tests.distributed.harness import of_all_ranks, on_ranks, run, run_each, scratch
from tests.distributed.models import (
    PREFETCH,
    Regression,
    build,
    digest,
    engine_of,
    evaluate,
    exact,
    gathered,
    live,
    master_bits,
    masters,
    plain_descent,
    save,
    settings,
    train_step,
    train_steps,
)
from tests.thin import thinned

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

STAGES = (1, 2, 3)


def block_of(scheme: str, node_size: int, **keys: Any) -> dict[str, Any]:
    return {"scheme": scheme, "allow_full_replica": True, "node_size": node_size, **keys}


@pytest.mark.parametrize(
    "scheme", thinned(["sdp4bit", "zeropp"], lambda scheme: scheme == "sdp4bit")
)
@on_ranks()
def test_a_parameter_frozen_during_training_goes_on_following_its_master(scheme: str) -> None:
    """Momentum and weight decay move it still, as they do in DeepSpeed alone."""
    engine = build(
        settings(3, block_of(scheme, 1), dtype="bf16"),
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-2, weight_decay=0.5),
    )
    layer, used = engine.module.second, []
    layer.register_forward_hook(lambda module, *_: used.append(module.weight.detach().float()))
    train_steps(engine, 2)
    layer.weight.requires_grad_(False)
    train_steps(engine, 6, 2)
    evaluate(engine)
    layer.weight.requires_grad_(True)  # DeepSpeed shows no other masters
    master = torch.from_numpy(masters(engine)["second.weight"])
    assert (used[-1] - master).norm() < 0.02 * master.norm()


# ---- weights changed outside the optimizer step ----


def drift(engine: DeepSpeedEngine) -> None:
    """Rank 1 damages one of the weights that it keeps; a replica after it was compared."""
    attached = engine.ds_quant_attached
    if torch.distributed.get_rank() != 1:
        return
    if engine.zero_optimization_stage() == 3:
        attached.node_shard.finish()
        attached.node_shard.served[0].node_rows.rows[0, 0] += 1
        return
    writes = attached.replica._writes
    compare = writes.written

    def damage() -> Any:
        written = compare()
        writes.written = compare
        engine.module.first.weight.data.view(-1)[3] += 1
        return written

    writes.written = damage


@pytest.mark.parametrize(
    ("stage", "world", "node_size"),
    thinned(
        [(3, 4, 2), (2, 4, 2), (1, 2, 1), (3, 2, 1)],
        lambda *case: case in ((3, 4, 2), (2, 4, 2)),  # a node shard, and a replica
    ),
)
@on_ranks()
def test_a_holder_that_drifts_is_found_and_brought_back(
    stage: int, world: int, node_size: int
) -> None:
    """Before step 4; checksums are compared every second step."""
    engine = engine_of(stage, block_of("sdp4bit", node_size, checksum_steps=2))
    losses = train_steps(engine, 3)
    drift(engine)
    losses += train_steps(engine, 5, 3)
    assert ds_quant.report(engine)["resyncs"] == 1 and losses[-1] < 0.5 * losses[0]


def lossless(stage: int, **keys: Any) -> Any:
    """An engine of several windows."""
    zero = {"allgather_bucket_size": 50_000} if stage < 3 else {}
    return engine_of(stage, block_of("lossless", 2, **keys), zero=zero)


def _drifted(stage: int, then: str) -> None:
    engine = lossless(stage)
    train_step(engine, 0)
    drift(engine)
    train_step(engine, 1)  # with the next difference
    if then == "save":
        save(engine)
    elif then == "read":
        with ds_quant.exact_weights(engine):
            pass
    else:
        train_step(engine, 2)


@pytest.mark.parametrize(
    ("stage", "then"),
    thinned(
        [*((stage, "step") for stage in STAGES), (2, "save"), (2, "read")],
        lambda *case: case in ((3, "step"), (2, "save")),
    ),
)
def test_a_holder_that_drifts_is_told_to_all_ranks_before_its_lossless_weights_count(
    stage: int, then: str
) -> None:
    environment = {"TEST_COLLECTIVE_TIMEOUT": "20"}
    for _, error in run_each(_drifted, 4, stage, then, environment=environment):
        assert "step 2: weights from rank" in error
        finder = 3 if stage == 3 else 1  # of a row of rank 1's own, who receives its difference
        assert f"cannot be decoded on rank {finder} (lossless message: wrong checksum" in error
        assert "different references" in error and "writes weights outside the optimizer" in error


@pytest.mark.parametrize("stage", thinned(STAGES, lambda stage: stage == 3))
@on_ranks(4)
def test_what_is_always_exact_is_not_brought_back(stage: int) -> None:
    """Weights that are shown, saved and compared between steps take no messages, and bytes between
    nodes stay those of the steps before.
    """
    engine = lossless(stage, checksum_steps=2)

    def nbytes_of(first: int) -> int:
        """Return the bytes of two steps."""
        before = ds_quant.report(engine)["received_bytes"]["weights"]["inter"]
        train_steps(engine, 2, first)
        return ds_quant.report(engine)["received_bytes"]["weights"]["inter"] - before

    train_steps(engine, 3)
    nbytes, bits = nbytes_of(3), exact(engine, "bf16")
    messages = ds_quant.report(engine)["collectives"]["weights"]
    with ds_quant.exact_weights(engine):
        if stage < 3:  # else every rank has but a part of each
            assert live(engine) == bits
    engine.save_16bit_model(str(scratch()))
    save(engine)
    after = ds_quant.report(engine)
    assert (after["collectives"]["weights"], after["resyncs"]) == (messages, 0)
    assert nbytes_of(5) == pytest.approx(nbytes, rel=0.15)


def _surgery(stage: int, scheme: str) -> list[float]:
    """Losses; after step 3 a weight matrix is halved, and the next forward computes with that."""
    from deepspeed import utils

    engine = engine_of(stage, block_of(scheme, 2), optimizer=plain_descent)
    losses, layer = train_steps(engine, 3), engine.module.second
    if stage == 3:
        with gathered([layer.weight], modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                layer.weight.data.mul_(0.5)
        part = utils.safe_get_local_fp32_param(layer.weight) / 2
        utils.safe_set_local_fp32_param(layer.weight, part)
    else:
        full = utils.safe_get_full_fp32_param(layer.weight) / 2
        utils.safe_set_full_fp32_param(layer.weight, full)
    ds_quant.resync(engine)
    expected, seen = digest(utils.safe_get_full_fp32_param(layer.weight).bfloat16()), []
    hook = layer.register_forward_pre_hook(lambda m, _: seen.append(digest(m.weight)))
    evaluate(engine)
    hook.remove()
    assert seen == [expected]
    return losses + train_steps(engine, 3, 3)


@pytest.mark.slow
@on_ranks(4, timeout=200)
def test_weight_surgery_is_seen_at_once_and_costs_no_accuracy() -> None:
    losses = {
        case: _surgery(*case) for case in product(STAGES, ("sdp4bit", "full_precision", "lossless"))
    }
    for stage in STAGES:
        assert losses[stage, "lossless"] == losses[stage, "full_precision"]
    first, *others = (np.mean(of_all_ranks(losses[stage, "sdp4bit"]), axis=0) for stage in STAGES)
    assert first[-1] < 0.6 * first[0]
    for of_stage in others:
        np.testing.assert_allclose(of_stage, first, rtol=0.01)


# ---- engines that follow each other ----


def nested(method: Any) -> int:
    """How many wrappers of this plugin a parameter's method has."""
    original = getattr(method, "ds_quant_wraps", None)
    return 0 if original is None else 1 + nested(original)


def node_shards() -> list[int]:
    """Bytes of every node shard alive in this process, of those that have any."""
    from ds_quant.zero.node_shard import NodeShard

    gc.collect()
    nbytes = [o.nbytes() for o in gc.get_objects() if isinstance(o, NodeShard)]
    return list(filter(None, nbytes))


# Without destroy() the engine that goes leaves its hooks to the next one.
@pytest.mark.parametrize("destroys", thinned((True, False), lambda destroys: not destroys))
@on_ranks()
def test_an_engine_rebuilt_on_one_module_leaves_nothing_of_the_last(destroys: bool) -> None:
    module, engine, used = Regression(), None, []

    def depths() -> set[int]:
        methods = ("all_gather_coalesced", "all_gather", "partition")
        return {nested(getattr(p, m)) for p in module.parameters() for m in methods}

    for _ in range(3):
        if engine is not None and destroys:
            engine.destroy()
        engine = engine_of(3, block_of("sdp4bit", 1), lambda: module)
        used.append(evaluate(engine))
        train_step(engine, 0)
        assert depths() == {1}
    assert used[0] > used[1] > used[2] and len(node_shards()) == 1
    engine.destroy()
    assert depths() == {0} and node_shards() == []


@on_ranks()
def test_a_destroyed_engine_leaves_no_decoded_weights_behind() -> None:
    alive = {"stage3_max_reuse_distance": 10**9, "stage3_max_live_parameters": 10**9}
    engine = engine_of(3, {"scheme": "qsdp_w4g4"}, zero=alive, dtype="fp32")
    train_step(engine, 0)
    expected, weight = masters(engine)["second.weight"], engine.module.second.weight
    evaluate(engine)
    engine.destroy()
    with gathered([weight]):
        assert (weight.detach().numpy() == expected).all()


@on_ranks(4)
def test_engines_of_a_process_share_its_process_groups() -> None:
    """No more threads and open files after five engines than after one."""
    held = []
    for _ in range(5):
        engine = engine_of(3, block_of("sdp4bit", 2))
        train_step(engine, 0)
        engine.destroy()
        held.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")])
    assert held[-1] == held[0], held


@on_ranks(1)
def test_groups_that_were_destroyed_are_made_again() -> None:
    from ds_quant.comm.topology import Topology
    from ds_quant.runtime.groups import level_groups

    topology = Topology(world=1, node_size=1)

    def made() -> Any:
        how = {"device": torch.device("cpu"), "has_streams": False}
        return level_groups(topology, **how, least=lambda numbers: numbers)

    first = made()
    assert made() is first
    torch.distributed.destroy_process_group()
    where = f"file://{scratch()}/again"
    torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    assert all(torch.distributed.get_rank(group) == 0 for group in made())


# ---- communicators inside a node ----


def _posted(stage: int, streams: bool) -> tuple[dict[str, str], list[tuple[str, int, str]]]:
    """Digests of the weights, and what was posted inside the node, in order: role, process group
    and collective.
    """
    from ds_quant.comm.transport import Communicator
    from ds_quant.zero import front

    front.accelerator = SimpleNamespace(
        **vars(front.accelerator) | {"has_streams": lambda: streams}
    )
    seen, groups = [], []

    def noting(name: str) -> None:
        original = getattr(Communicator, name)

        def noted(link: Communicator, payload: torch.Tensor, *, role: str, **how: Any) -> Any:
            if link.size == 2 and not link._far:
                if link.process_group not in groups:
                    groups.append(link.process_group)
                seen.append((role, groups.index(link.process_group), name))
            return original(link, payload, role=role, **how)

        setattr(Communicator, name, noted)

    noting("all_gather")
    noting("all_to_all")
    zero = PREFETCH if stage == 3 else {"reduce_bucket_size": 20_000}
    block = block_of("sdp4bit", 2, metrics={"interval": 0})
    engine = engine_of(stage, block, accumulation=2, zero=zero)
    train_steps(engine, 3)
    return master_bits(engine), seen


@pytest.mark.parametrize("stage", thinned((2, 3), lambda stage: stage == 3))
def test_gradients_have_a_communicator_inside_the_node_and_one_order(stage: int) -> None:
    """On devices with streams."""
    apart, together = (run(_posted, 4, stage, streams) for streams in (True, False))
    for (weights, seen), (other_weights, other_seen) in zip(apart, together, strict=True):
        assert weights == other_weights
        used = [{group for r, group, _ in seen if r == role} for role in ("weights", "gradients")]
        assert all(len(groups) == 1 for groups in used) and used[0] != used[1]
        assert {group for _, group, _ in other_seen} == {0}
    for one, other in ((0, 1), (2, 3)):  # of a node
        assert apart[one][1] == apart[other][1]
