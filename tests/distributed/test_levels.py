"""Schemes of several levels on real engines: node shard, weight differences, two-hop gradients.

Topologies are nodes x ranks per node, all on this machine. One start of the ranks per topology
plays all schemes, each under one stage, so that every scheme meets every stage and topology.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.harness import run, run_each
from tests.distributed.models import (
    batch,
    build,
    digest,
    digests,
    evaluate,
    masters,
    plain_descent,
    settings,
    train,
    train_step,
)
from tests.distributed.test_wire_bytes import MEASURED, NUMEL, WARM, Matrices, _step, gathers_of
from tests.thin import thinned

pytestmark = pytest.mark.distributed

STAGES = (1, 2, 3)
TOPOLOGIES = ((1, 4), (2, 2), (4, 1), (2, 1))


def thinned_by(topologies: Iterable[tuple[int, int]]) -> list[Any]:
    quick = ((2, 2),)
    return thinned([(topology,) for topology in topologies], quick.__contains__)


SCHEMES = (
    "full_precision", "sdp4bit", "qsdp", "sdp4bit_paper", "qwd", "qw4", "tlq", "tlq_hs", "ulq",
    "zeropp", "eden4", "eden3", "eden2", "lossless",
    "lossless_g3",
)  # fmt: skip
# A node shard under ZeRO-3.
KEEPING = (
    "sdp4bit",
    "sdp4bit_paper",
    "qwd",
    "zeropp",
    "eden4",
    "eden3",
    "eden2",
    "lossless",
    "lossless_g3",
)
STEPS = 4


def block_of(scheme: str, node_size: int, **keys: Any) -> dict[str, Any]:
    return {"scheme": scheme, "node_size": node_size, "allow_full_replica": True, **keys}


def stage_of(scheme: str, topology: tuple[int, int]) -> int:
    return STAGES[(SCHEMES.index(scheme) + TOPOLOGIES.index(topology)) % len(STAGES)]


# ---- training ----


def _train_all(topology: tuple[int, int]) -> dict[str, tuple[list[float], dict, dict]]:
    """By scheme: losses, the bits seen of every weight in every step, the report."""
    outcomes = {}
    for scheme in SCHEMES:
        block = block_of(scheme, topology[1])
        config = settings(stage_of(scheme, topology), block, dtype="bf16", accumulation=2)
        result = train(config, STEPS, watched=True, optimizer=plain_descent)
        bits = defaultdict(set)
        for sighting in result.seen:
            bits[sighting.step, sighting.name].add(sighting.bits)
        outcomes[scheme] = result.losses, {k: sorted(v) for k, v in bits.items()}, result.report
    return outcomes


@functools.cache
def trained(topology: tuple[int, int]) -> list[dict[str, tuple]]:
    return run(_train_all, topology[0] * topology[1], topology, timeout=280)


@pytest.mark.parametrize("topology", thinned_by(TOPOLOGIES))
def test_all_holders_see_equal_bits_in_every_step(topology: tuple[int, int]) -> None:
    """Forward and backward of all micro-steps, on all ranks."""
    ranks = trained(topology)
    for scheme in SCHEMES:
        first = ranks[0][scheme][1]
        assert first and all(len(seen) == 1 for seen in first.values()), scheme
        assert all(rank[scheme][1] == first for rank in ranks), scheme


@pytest.mark.parametrize("topology", thinned_by(TOPOLOGIES))
def test_losses_follow_full_precision(topology: tuple[int, int]) -> None:
    """Four steps from 1.35 to 0.65. Measured: 0.3 % at most; 1 % for 4-bit weights without
    differences and for 2-bit gradients.
    """
    ranks = trained(topology)

    def losses(scheme: str) -> np.ndarray:
        return np.mean([rank[scheme][0] for rank in ranks], axis=0)

    def forgets(scheme: str) -> bool:
        """Whether DeepSpeed itself does, in some versions: see test_cross.py."""
        return "forgets the gradients" in ranks[0][scheme][2]["line"]

    exact = losses("full_precision")
    assert exact[-1] < 0.8 * exact[0]
    for scheme in SCHEMES:
        if forgets(scheme) != forgets("full_precision"):
            continue
        limit = 0.03 if scheme in ("qw4", "eden2") else 0.01
        np.testing.assert_allclose(losses(scheme), exact, rtol=limit, err_msg=scheme)


@pytest.mark.parametrize("topology", thinned_by(TOPOLOGIES))
def test_memory_is_what_the_report_says(topology: tuple[int, int]) -> None:
    """2 / ranks per node bytes per bf16 parameter under ZeRO-3, nothing elsewhere."""
    nodes, node_size = topology
    for scheme in SCHEMES:
        keeps = stage_of(scheme, topology) == 3 and nodes > 1 and scheme in KEEPING
        for rank in trained(topology):
            report = rank[scheme][2]
            formula = 2 / node_size * report["params"] if keeps else 0
            assert report["kept_bytes"] == pytest.approx(formula, rel=0.05)
            assert report["kept_bytes"] == pytest.approx(report["expected_kept_bytes"], rel=0.05)


# ---- bytes ----

# Between nodes, per parameter: sdp4bit.md 5.4. 4 bits in groups of 2048 and one fp32 scale each
# are 0.502, in groups of 128 0.531; ZeRO++'s 8 and 4 bits 1.0005 and 0.501. EDEN's 3 bits and one
# bf16 scale per 128 are 0.391.
BETWEEN = {
    "sdp4bit": (0.502, 0.531), "zeropp": (1.0005, 0.501), "qsdp": (1.008, 1.008),
    "full_precision": (2, 2), "eden3": (0.502, 0.391),
}  # fmt: skip
ONCE_PER_STEP = ("sdp4bit", "zeropp", "eden3")  # under ZeRO-3, thanks to the node shard
EVERY_MICRO_STEP = ("zeropp",)  # as published; other gradients wait inside nodes of several ranks
SEVERAL_NODES = ((2, 2), (4, 1), (2, 1))


def accumulation_of(stage: int, scheme: str, topology: tuple[int, int]) -> int:
    """Every pair of stage, scheme and topology with 1 or 4, every two of them with both."""
    return (1, 4)[(stage + list(BETWEEN).index(scheme) + SEVERAL_NODES.index(topology)) % 2]


def _bytes_rank(topology: tuple[int, int]) -> dict[tuple[int, str], tuple[dict, dict]]:
    """By stage and scheme: bytes received per step by link, and the report."""
    import ds_quant

    results = {}
    for stage, scheme in product(STAGES, BETWEEN):
        config = settings(
            stage,
            block_of(scheme, topology[1]),
            dtype="bf16",
            accumulation=accumulation_of(stage, scheme, topology),
            zero={"reduce_bucket_size": 4 * NUMEL},
        )
        engine = build(config, Matrices)
        for _ in range(WARM):
            _step(engine)
        before = ds_quant.report(engine)["received_bytes"]
        for _ in range(MEASURED):
            _step(engine)
        report = ds_quant.report(engine)
        after = report["received_bytes"]
        received = {
            link: sum(after[role][link] - before[role][link] for role in after) / MEASURED
            for link in ("intra", "inter")
        }
        results[stage, scheme] = received, report
        engine.destroy()
    return results


@functools.cache
def bytes_of(topology: tuple[int, int]) -> list[dict]:
    return run(_bytes_rank, topology[0] * topology[1], topology, timeout=280)


@pytest.mark.parametrize("topology", thinned_by(SEVERAL_NODES))
@pytest.mark.parametrize("scheme", BETWEEN)
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_between_nodes(stage: int, scheme: str, topology: tuple[int, int]) -> None:
    """beta (w + g k) into every node, or beta (2 w + g) k under ZeRO-3 without a node shard; ZeRO-1
    and nodes of several ranks let gradients cross once per step, whatever k. Each byte enters a
    node once.
    """
    nodes, node_size = topology
    accumulation = accumulation_of(stage, scheme, topology)
    ranks = [result[stage, scheme] for result in bytes_of(topology)]
    weights, gradients = BETWEEN[scheme]
    if stage == 3 and scheme not in ONCE_PER_STEP:
        weights *= gathers_of(accumulation)
    once = stage == 1 or (node_size > 1 and scheme not in EVERY_MICRO_STEP)
    volume = weights + gradients * (1 if once else accumulation)
    for node in range(nodes):
        into = [r for r, _ in ranks[node * node_size : (node + 1) * node_size]]
        inter = sum(received["inter"] for received in into) / NUMEL
        assert inter == pytest.approx((nodes - 1) / nodes * volume, rel=0.01)
        intra = sum(received["intra"] for received in into) / node_size / NUMEL
        report = ranks[0][1]
        assert report["expected_bytes"] == pytest.approx(volume, rel=0.01)
        inside = (node_size - 1) / node_size * report["expected_intra_bytes"]
        assert intra == pytest.approx(inside, rel=0.01)


# ---- weights changed outside the optimizer step ----


def _corrupted(stage: int, node_size: int) -> tuple[list[float], int]:
    """One holder changes one weight before step 4; checksums are compared every second step."""
    import ds_quant

    engine = build(settings(stage, block_of("sdp4bit", node_size, checksum_steps=2), dtype="bf16"))
    losses = []
    for step in range(8):
        if step == 3 and torch.distributed.get_rank() == 1:
            if stage == 3:
                engine.ds_quant_engine.node.served[0].kept.rows[0, 0] += 1
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


def _saved_and_resumed(stage: int, node_size: int, accumulation: int) -> tuple[list, list, list]:
    """Losses and final bits of a run that saves after step 3, and of one that loads that."""
    from deepspeed import comm as dist

    folder = os.environ["TEST_SCRATCH"]
    config = settings(
        stage, block_of("sdp4bit", node_size), dtype="bf16", accumulation=accumulation
    )
    outcomes = []
    for resumed in (False, True):
        engine = build(config, seed=7 if resumed else 0)
        losses = []
        if resumed:
            engine.load_checkpoint(folder, tag="middle")
        for step in range(3 if resumed else 0, 6):
            losses += train_step(engine, step)
            if step == 2:
                engine.save_checkpoint(folder, tag="middle")
                dist.barrier()
                losses = []
        outcomes.append((losses, digests(masters(engine))))
        engine.destroy()
    return outcomes


@pytest.mark.parametrize(("stage", "accumulation"), [(1, 2), (2, 1), (3, 1), (3, 2)])
def test_a_resumed_run_equals_the_one_that_saved(stage: int, accumulation: int) -> None:
    """Saving makes kept weights exact, loading too: both go on from the same bits."""
    for went_on, resumed in run(_saved_and_resumed, 4, stage, 2, accumulation):
        assert went_on == resumed


def _surgery(stage: int, scheme: str = "sdp4bit") -> tuple[list[float], bool]:
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
    outcomes = {stage: run(_surgery, 4, stage) for stage in STAGES}
    assert all(seen for outcome in outcomes.values() for _, seen in outcome)
    losses = [np.mean([losses for losses, _ in outcomes[stage]], axis=0) for stage in STAGES]
    assert losses[0][-1] < 0.6 * losses[0][0]
    for of_stage in losses[1:]:
        np.testing.assert_allclose(of_stage, losses[0], rtol=0.01)


def _skipped(stage: int) -> tuple[bool, int]:
    """The fourth step's loss is infinite on one rank: DeepSpeed skips the update. Whether an
    evaluation after it computes what one before it did.
    """
    config = settings(stage, block_of("sdp4bit", 2), dtype="bf16")
    config["bf16"]["check_grad_overflow"] = True
    engine = build(config)
    for step in range(3):
        train_step(engine, step)
    before = evaluate(engine)
    x, y = batch(0, 3, 0, torch.distributed.get_rank())
    bad = torch.distributed.get_rank() == 1
    engine.backward(engine(x.bfloat16(), y) * (float("inf") if bad else 1.0))
    engine.step()
    return evaluate(engine) == before, engine.skipped_steps


@pytest.mark.parametrize("stage", STAGES)
def test_a_skipped_step_leaves_the_kept_weights_alone(stage: int) -> None:
    ranks = run(_skipped, 4, stage)
    if all(skipped == 0 for _, skipped in ranks):
        pytest.skip("this DeepSpeed skips no bf16 step: 0.19 does")
    assert ranks == [(True, 1)] * 4


# ---- refusals ----


def _refused(block: dict[str, Any]) -> None:
    build(settings(3, block, dtype="bf16"))


def test_a_full_replica_is_refused_with_its_size_unless_it_is_accepted() -> None:
    outcomes = run_each(_refused, 2, {"scheme": "sdp4bit", "node_size": 1})
    for _, error in outcomes:
        assert "weights.difference=true with one rank per node" in error
        assert "0.000194 GB more on every rank" in error
        assert "allow_full_replica to true" in error


def test_a_node_size_that_does_not_divide_the_world_is_refused() -> None:
    for _, error in run_each(_refused, 3, {"scheme": "sdp4bit", "node_size": 2}):
        assert "quantized_comm.node_size=2: allowed with 3 ranks: 1, 3" in error


def _mixed_rank() -> list[float]:
    """Learned QSDP weights from a node shard: another scheme that may keep one."""
    block = block_of("qsdp", 2, node_shard=True)
    engine = build(settings(3, block, dtype="bf16"))
    return [loss for step in range(4) for loss in train_step(engine, step)]


def test_qsdp_may_use_the_node_shard_too() -> None:
    losses = np.mean(run(_mixed_rank, 4), axis=0)
    assert losses[-1] < 0.7 * losses[0]


def _eight_bits_inside(node_size: int) -> list[float]:
    block = block_of("sdp4bit", node_size, weights={"intra": {"bits": 8, "group_size": 256}})
    engine = build(settings(3, block, dtype="bf16"))
    return [loss for step in range(STEPS) for loss in train_step(engine, step)]


@pytest.mark.parametrize("node_size", [2, 4])
def test_gathers_inside_a_node_may_take_eight_bits(node_size: int) -> None:
    losses = np.mean(run(_eight_bits_inside, 4, node_size), axis=0)
    assert losses[-1] < 0.6 * losses[0]
