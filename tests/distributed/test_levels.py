"""Schemes of several levels on real engines: node shard, weight differences, two-hop gradients.

Topologies are nodes x ranks per node, all on this machine. One start of the ranks per topology
plays all schemes, each under one stage, so that every scheme meets every stage and topology.
"""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.harness import run, run_all
from tests.distributed.models import batch, build, digest, plain_descent, settings, train_step

STAGES = (1, 2, 3)


def block_of(scheme: str, node_size: int, **keys: Any) -> dict[str, Any]:
    return {"scheme": scheme, "node_size": node_size, "allow_full_replica": True, **keys}


# ---- several engines in a process ----


def _held_by_process() -> tuple[int, int]:
    """Threads and open files."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def _one_after_the_other() -> list[tuple[int, int]]:
    """What the process holds after each of five engines."""
    config = settings(3, block_of("sdp4bit", 2), dtype="bf16")
    held = []
    for _ in range(5):
        engine = build(config)
        train_step(engine, 0)
        engine.destroy()
        held.append(_held_by_process())
    return held


def test_engines_of_a_process_share_its_process_groups() -> None:
    for held in run(_one_after_the_other, 4):
        assert held[-1] == held[0], held


def _joined_again() -> bool:
    """Whether groups are new after torch.distributed has ended and begun again."""
    from ds_quant.comm.topology import Topology
    from ds_quant.zero.world import level_groups

    topology = Topology(world=1, node_size=1)
    first = level_groups(topology)
    assert level_groups(topology) is first
    torch.distributed.destroy_process_group()
    where = f"file://{os.environ['TEST_SCRATCH']}/again"
    torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    again = level_groups(topology)
    return all(torch.distributed.get_rank(group) == 0 for group in again)


def test_groups_that_were_destroyed_are_made_again() -> None:
    assert run(_joined_again, 1) == [True]


# ---- weights changed outside the optimizer step ----


def _corrupted(stage: int, node_size: int) -> tuple[list[float], int]:
    """One holder changes one weight before step 4; checksums are compared every second step."""
    import ds_quant

    engine = build(settings(stage, block_of("sdp4bit", node_size, checksum_steps=2), dtype="bf16"))
    losses = []
    for step in range(8):
        if step == 3 and torch.distributed.get_rank() == 1:
            if stage == 3:
                engine.ds_quant_plugin.node.served[0].kept.rows[0, 0] += 1
            else:
                next(engine.module.parameters()).data.view(-1)[3] += 1
        losses += train_step(engine, step)
    return losses, ds_quant.report(engine)["resyncs"]


@pytest.mark.parametrize(
    ("stage", "topology"), [(1, (2, 1)), (2, (2, 2)), (3, (2, 2)), (3, (2, 1))]
)
def test_a_holder_that_drifts_is_found_and_brought_back(
    stage: int, topology: tuple[int, int]
) -> None:
    nodes, node_size = topology
    ranks = run(_corrupted, nodes * node_size, stage, node_size)
    assert [resyncs for _, resyncs in ranks] == [1] * len(ranks)
    assert all(losses[-1] < 0.5 * losses[0] for losses, _ in ranks)


def _surgery(stage: int, scheme: str) -> tuple[list[float], bool]:
    """Halves a weight matrix after step 3, and reads what the next forward computes with."""
    import deepspeed

    import ds_quant

    config = settings(stage, block_of(scheme, 2), dtype="bf16")
    engine = build(config, optimizer=plain_descent)
    losses = [loss for step in range(3) for loss in train_step(engine, step)]
    weight = engine.module.second.weight
    if stage == 3:
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                weight.data.mul_(0.5)
        part = deepspeed.utils.safe_get_local_fp32_param(weight) / 2
        deepspeed.utils.safe_set_local_fp32_param(weight, part)
    else:
        full = deepspeed.utils.safe_get_full_fp32_param(weight) / 2
        deepspeed.utils.safe_set_full_fp32_param(weight, full)
    ds_quant.resync(engine)
    expected = digest(deepspeed.utils.safe_get_full_fp32_param(weight).bfloat16())
    seen = [digest(weights) for weights in _computed_with(engine)]
    losses += [loss for step in range(3, 6) for loss in train_step(engine, step)]
    return losses, seen == [expected]


def _computed_with(engine: Any) -> list[torch.Tensor]:
    """Weights of the second layer as one forward uses them."""
    seen: list[torch.Tensor] = []
    layer = engine.module.second
    hook = layer.register_forward_pre_hook(lambda m, _: seen.append(m.weight.detach().clone()))
    engine.eval()
    x, y = batch(5, 5, 0, torch.distributed.get_rank())
    with torch.no_grad():
        engine(x.bfloat16(), y)
    engine.train()
    hook.remove()
    return seen


def test_weight_surgery_is_seen_at_once_and_costs_no_accuracy() -> None:
    cases = tuple(product(STAGES, ("sdp4bit", "full_precision", "lossless")))
    ranks = run_all(_surgery, 4, cases)
    outcomes = {stage: ranks[stage, "sdp4bit"] for stage in STAGES}
    for stage in STAGES:
        assert ranks[stage, "lossless"] == ranks[stage, "full_precision"]
    assert all(seen for outcome in outcomes.values() for _, seen in outcome)
    losses = [np.mean([losses for losses, _ in outcomes[stage]], axis=0) for stage in STAGES]
    assert losses[0][-1] < 0.6 * losses[0][0]
    for of_stage in losses[1:]:
        np.testing.assert_allclose(of_stage, losses[0], rtol=0.01)
