"""Bytes that real engines move, against the formula of ds_quant.policy.cost and architecture.md.

The model holds 2-D matrices only (no biases, no norms), so that the published figures apply as
they stand. What is compared: bytes received per parameter and optimizer step, averaged over the
ranks, divided by beta = (W - 1) / W, against the volume of ``Costs.step_bytes``.

ZeRO-1/2: ``reduce_bucket_size`` is larger than the model, so one bucket covers all owners evenly
and every gradient takes the direct exchange. Buckets that belong to few ranks cost more; what they
cost is the subject of tests/unit/test_owner_plan.py and test_owners.py.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests import needs
from tests.distributed.harness import run
from tests.distributed.models import build, settings

pytestmark = pytest.mark.distributed

STAGES, WORLDS = (1, 2, 3), (2, 3, 4)
SCHEMES = ("full_precision", "qsdp", "qsdp_w4g4")
WIDTH, LAYERS = 512, 2
NUMEL = LAYERS * WIDTH * WIDTH
WARM = 2  # ZeRO-3 records its trace in step 2; every later step is alike
MEASURED = 2

# Volumes per parameter: bf16 moves 2 bytes a time; 8 bits with groups of 1024 move 1 + 8 / 1024,
# 4 bits half a byte and the same scale and offset.
PER_PASS = {"full_precision": 2.0, "qsdp": 1 + 8 / 1024, "qsdp_w4g4": 0.5 + 8 / 1024}


class Matrices(nn.Module):
    """512 -> 512 -> 512 without biases: 524,288 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.bfloat16()).float().square().mean()


def _step(engine: Any) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.randn(1, WIDTH)))
        engine.step()


def _rank(
    stage: int, cases: tuple[tuple[str, int], ...], node_size: int | None, bucket_numel: int
) -> dict[tuple[str, int], dict[str, Any]]:
    """By scheme and accumulation: bytes received and collectives per step, and the report."""
    import ds_quant

    results = {}
    for scheme, accumulation in cases:
        block: dict[str, Any] = {"scheme": scheme}
        if node_size is not None:
            block["node_size"] = node_size
        zero = {"reduce_bucket_size": bucket_numel}
        config = settings(stage, block, dtype="bf16", accumulation=accumulation, zero=zero)
        engine = build(config, Matrices)
        for _ in range(WARM):
            _step(engine)
        before = ds_quant.report(engine)
        for _ in range(MEASURED):
            _step(engine)
        after = ds_quant.report(engine)
        received = {
            role: {k: (n - before["received_bytes"][role][k]) / MEASURED for k, n in links.items()}
            for role, links in after["received_bytes"].items()
        }
        calls = {
            k: (n - before["collectives"][k]) / MEASURED for k, n in after["collectives"].items()
        }
        results[scheme, accumulation] = {"received": received, "calls": calls, "report": after}
        engine.destroy()
    return results


def cases_of(world: int) -> tuple[tuple[str, int], ...]:
    """Every scheme with an accumulation, every stage and scheme with both in some world."""
    return tuple((scheme, 1 + (world + i + 1) % 2) for i, scheme in enumerate(SCHEMES))


@functools.cache
def measured(
    stage: int,
    world: int,
    *,
    cases: tuple[tuple[str, int], ...] | None = None,
    node_size: int | None = None,
    bucket_numel: int = 4 * NUMEL,
) -> list[dict]:
    """Results by rank."""
    cases = cases or cases_of(world)
    return run(_rank, world, stage, cases, node_size, bucket_numel, timeout=280)


def gathers_of(accumulation: int) -> float:
    """Of the weights, in a step of ZeRO-3: before 0.19 DeepSpeed keeps the first layer from one
    micro-step to the next.
    """
    kept = 0 if needs.has_deepspeed("0.19") else (accumulation - 1) / LAYERS
    return 2 * accumulation - kept


def per_parameter(results: list[dict], case: tuple[str, int], role: str) -> float:
    """Bytes per parameter and step, mean over the ranks."""
    received = [sum(result[case]["received"][role].values()) for result in results]
    return sum(received) / len(received) / NUMEL


CASES = [
    (stage, world, case) for stage, world in product(STAGES, WORLDS) for case in cases_of(world)
]


@pytest.mark.parametrize(("stage", "world", "case"), CASES)
def test_counted_bytes_are_beta_times_the_volume(
    stage: int, world: int, case: tuple[str, int]
) -> None:
    results, (scheme, accumulation) = measured(stage, world), case
    beta, one = (world - 1) / world, PER_PASS[scheme]
    passes = {
        1: (1, 1), 2: (1, accumulation), 3: (gathers_of(accumulation), accumulation)
    }[stage]  # fmt: skip
    counted = {role: per_parameter(results, case, role) for role in ("weights", "gradients")}
    assert counted["weights"] == pytest.approx(beta * passes[0] * one, rel=0.01)
    assert counted["gradients"] == pytest.approx(beta * passes[1] * one, rel=0.01)
    for result in results:
        volume = result[case]["report"]["expected_bytes"]
        assert sum(counted.values()) == pytest.approx(beta * volume, rel=0.01)
        assert result[case]["report"]["params"] == NUMEL


@pytest.mark.parametrize("world", WORLDS)
def test_qsdp_zero3_moves_three_and_two_hundredths_bytes_per_micro_step(world: int) -> None:
    """architecture.md: QSDP W8G8, 3.02 beta k."""
    accumulation = dict(cases_of(world))["qsdp"]
    results, case = measured(3, world), ("qsdp", accumulation)
    total = sum(per_parameter(results, case, role) for role in ("weights", "gradients"))
    passes = gathers_of(accumulation) + accumulation  # 3 where every gather is made
    assert total == pytest.approx((world - 1) / world * 3.02 * passes / 3, rel=0.01)


@pytest.mark.parametrize(("stage", "world", "case"), CASES)
def test_no_rank_receives_more_than_the_others(
    stage: int, world: int, case: tuple[str, int]
) -> None:
    """Balanced by the even model; a short last shard may save that rank a little."""
    totals = [
        sum(sum(links.values()) for links in result[case]["received"].values())
        for result in measured(stage, world)
    ]
    assert max(totals) <= 1.01 * min(totals)


@pytest.mark.parametrize(("stage", "world", "case"), CASES)
def test_collectives_per_step_do_not_depend_on_the_scheme(
    stage: int, world: int, case: tuple[str, int]
) -> None:
    """Codes and scales share a message. ZeRO-3 gathers each layer in forward and in backward."""
    accumulation = case[1]
    passes = 1 if stage == 1 else accumulation
    weights = 1 if stage < 3 else 2 * LAYERS * accumulation
    for result in measured(stage, world):
        calls = result[case]["calls"]
        assert calls["gradients"] == passes
        assert calls["weights"] <= weights if stage == 3 else calls["weights"] == weights


QSDP_ONCE = ("qsdp", 1)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("node_size", [1, 2])
def test_bytes_are_split_by_node_size(stage: int, node_size: int) -> None:
    """Bytes cross between nodes once and are forwarded or summed inside, so of the 3 shards that a
    rank gets, one per other node comes from there; the sum is that of a run in one node.
    """
    results = measured(stage, 4, cases=(QSDP_ONCE,), node_size=node_size)
    for role in ("weights", "gradients"):
        for result in results:
            links = result[QSDP_ONCE]["received"][role]
            share = links["intra"] / (links["intra"] + links["inter"])
            assert share == pytest.approx(1 - (4 // node_size - 1) / 3, rel=0.01)
            assert result[QSDP_ONCE]["report"]["node_size"] == node_size
        total = per_parameter(results, QSDP_ONCE, role)
        assert total == pytest.approx(per_parameter(measured(stage, 4), QSDP_ONCE, role), rel=0.01)


@pytest.mark.parametrize("stage", [1, 2])
def test_buckets_of_two_owners_bring_the_planned_bytes(stage: int) -> None:
    """One bucket per matrix: ranks 0 and 1 own the first, 2 and 3 the second. Even the slowest
    rank gets at most 0.6 of the 4 beta that the bf16 all-reduce would bring.
    """
    world = 4
    piece = NUMEL // 8  # a quarter of a bucket: every rank sums one of each, in rank order
    nbytes = piece + 8 * (piece // 1024)
    results = measured(stage, world, cases=(QSDP_ONCE,), bucket_numel=NUMEL // 2)
    counted = [sum(r[QSDP_ONCE]["received"]["gradients"].values()) for r in results]
    # Two pieces from three ranks each; then the sums of what is owned: ranks 0 and 3 sum one of
    # their two pieces themselves, 1 and 2 none.
    assert counted == [(2 * 3 + delivered) * nbytes for delivered in (1, 2, 2, 1)]
    assert max(counted) <= 0.6 * 4 * (world - 1) / world * NUMEL


class Tap(TorchDispatchMode):
    """Every collective of torch.distributed on this rank: (name, dtype, bytes it brings here)."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self._rank, self._world = rank, world
        self.seen: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.namespace == "c10d":
            name, output = func._opname, args[0]
            if name == "send":
                return func(*args, **(kwargs or {}))
            tensors = output if isinstance(output, list | tuple) else [output]
            received = sum(t.nbytes for t in tensors)
            if name == "_allgather_base_":
                received -= args[1].nbytes
            elif name == "alltoall_base_":
                splits = args[3] or [received // self._world] * self._world
                received -= splits[self._rank] * output.itemsize
            self.seen.append((name, tensors[0].dtype, received))
        return func(*args, **(kwargs or {}))


def _totals(report: dict[str, Any]) -> tuple[int, int]:
    """Bytes and collectives of both roles."""
    received = [n for links in report["received_bytes"].values() for n in links.values()]
    return sum(received), sum(report["collectives"].values())


def _tapped_rank(stage: int) -> tuple[list[tuple[str, str, int]], int, int]:
    """What a tap saw in one step, what the engine counted, and in how many collectives."""
    import ds_quant

    zero = {"reduce_bucket_size": 4 * NUMEL}
    engine = build(
        settings(stage, {"scheme": "qsdp"}, dtype="bf16", accumulation=2, zero=zero), Matrices
    )
    _step(engine)
    _step(engine)
    before = _totals(ds_quant.report(engine))
    with Tap(torch.distributed.get_rank(), torch.distributed.get_world_size()) as tap:
        _step(engine)
    after = _totals(ds_quant.report(engine))
    counted, calls = after[0] - before[0], after[1] - before[1]
    return [(name, str(dtype), n) for name, dtype, n in tap.seen], counted, calls


@pytest.mark.parametrize(("stage", "world"), [(1, 3), (2, 3), (3, 3), (3, 2)])
def test_the_counters_see_all_that_moves_but_scalars(stage: int, world: int) -> None:
    """Nothing of the exact path is left: DeepSpeed's own collectives carry the norm and flags."""
    for seen, counted, calls in run(_tapped_rank, world, stage):
        ours = [n for name, dtype, n in seen if name == "recv_" and dtype == "torch.uint8"]
        theirs = [n for name, _, n in seen if name != "recv_"]
        assert sum(ours) == counted > NUMEL
        assert len(ours) == (world - 1) * calls  # one message per peer and collective
        assert all(n <= 8 for n in theirs), seen
