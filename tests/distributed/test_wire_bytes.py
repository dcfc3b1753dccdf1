"""Bytes that real engines move, against the formula of ds_quant.policy.cost, whose figures
tests/unit/test_cost.py adds up by hand.

The model holds 2-D matrices only (no biases, no norms).

ZeRO-1/2: ``reduce_bucket_size`` is larger than the model, so one bucket covers all owners evenly
and every gradient takes the direct exchange. Buckets that belong to few ranks cost more; what they
cost is the subject of tests/unit/test_owner_plan.py.
"""

from __future__ import annotations

import functools
import re
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ds_quant
from tests.distributed.harness import on_ranks, run, scratch
from tests.distributed.models import engine_of
from tests.thin import thinned

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

STAGES = (1, 2, 3)
WIDTH, LAYERS = 512, 2
NUMEL = LAYERS * WIDTH * WIDTH
WARM = 2  # ZeRO-3 records its trace in step 2; every later step is alike
MEASURED = 2

SCHEMES = (
    "full_precision", "qsdp", "qsdp_w4g4", "sdp4bit", "zeropp", "eden3", "hybrid", "qsdp_shard",
)  # fmt: skip
KEEPING = SCHEMES[3:]
Topology = tuple[int, int]  # nodes, ranks per node
Case = tuple[int, str, int]  # stage, scheme, micro-steps
TOPOLOGIES: dict[Topology, tuple[str, ...]] = {
    (1, 3): SCHEMES[:3], (2, 2): SCHEMES, (4, 1): SCHEMES, (2, 1): SCHEMES,
}  # fmt: skip


def cases_of(topology: Topology) -> list[Case]:
    """Every stage and scheme, with 1 and several micro-steps in turns; with both on two nodes of
    two ranks.
    """
    cases = enumerate(product(STAGES, TOPOLOGIES[topology]))
    both = topology == (2, 2)
    return [(*case, k) for place, case in cases for k in (1, 3) if both or k == 1 + 2 * (place % 2)]


class Matrices(nn.Module):
    """512 -> 512 -> 512 without biases: 524,288 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.bfloat16()).float().square().mean()


def _step(engine: DeepSpeedEngine) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.randn(1, WIDTH)))
        engine.step()


def _rank(topology: Topology, cases: list[Case], bucket_numel: int) -> dict[Case, dict[str, Any]]:
    """Bytes received and collectives per step, and the report."""
    results = {}
    for stage, scheme, accumulation in cases:
        block = {"scheme": scheme, "node_size": topology[1], "allow_full_replica": True}
        zero = {"reduce_bucket_size": bucket_numel}
        engine = engine_of(stage, block, Matrices, accumulation=accumulation, zero=zero)
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
        run = engine.ds_quant_attached.run
        results[stage, scheme, accumulation] = {
            "received": received, "calls": calls, "report": after,
            "formula": run.received_by_formula(run.comm_volume()),
        }  # fmt: skip
        engine.destroy()
    return results


def is_quick(topology: Topology, case: Case) -> bool:
    """``make test`` measures every scheme under ZeRO-3 with several micro-steps, and every stage
    with two schemes: one that keeps weights and one that does not.
    """
    stage, scheme, micro_steps = case
    return topology == (2, 2) and micro_steps > 1 and (stage == 3 or scheme in ("qsdp", "sdp4bit"))


@functools.cache
def measured(topology: Topology, *, quick: bool) -> list[dict[Case, dict[str, Any]]]:
    """Results by rank."""
    world = topology[0] * topology[1]
    cases = [case for case in cases_of(topology) if is_quick(topology, case) == quick]
    return run(_rank, world, topology, cases, 4 * NUMEL, timeout=280)


@pytest.mark.parametrize(
    ("topology", "case"),
    thinned([(t, case) for t in TOPOLOGIES for case in cases_of(t)], is_quick),
)
def test_counted_bytes_are_those_of_the_formula(topology: Topology, case: Case) -> None:
    """All ranks get as many; codes and scales share a message."""
    (nodes, node_size), (stage, scheme, micro_steps) = topology, case
    ranks = [result[case] for result in measured(topology, quick=is_quick(topology, case))]
    report = ranks[0]["report"]
    assert report["params"] == NUMEL and report["node_size"] == node_size
    for result in ranks:
        for role, links in result["formula"].items():
            assert result["received"][role] == pytest.approx(links, rel=0.01), role
    assert said_to_be_received(report, micro_steps) == pytest.approx(
        received_per_node(ranks, nodes, node_size), rel=0.01, abs=0.006
    )
    assert report["kept_bytes"] == pytest.approx(report["expected_kept_bytes"], rel=0.05)
    assert (report["kept_bytes"] > 0) == (stage == 3 and nodes > 1 and scheme in KEEPING)
    waits = report["expected_held_bytes"] > 0
    assert ("gradients are sent between nodes once" in report["line"]) == waits
    assert ('scheme "lossless" is also exact' in report["line"]) == (scheme == "hybrid")
    assert report["held_bytes"] == pytest.approx(report["expected_held_bytes"], rel=0.05)
    if nodes == 1:
        most = 2 * LAYERS * micro_steps  # in forward and in backward
        for calls in (result["calls"] for result in ranks):
            assert calls["gradients"] == (1 if stage == 1 else micro_steps)
            assert 1 <= calls["weights"] <= (1 if stage < 3 else most)


def received_per_node(ranks: list[dict[str, Any]], nodes: int, node_size: int) -> float:
    """Bytes per parameter and step that enter the first node; on one node, the first rank."""
    link, own = ("inter", ranks[:node_size]) if nodes > 1 else ("intra", ranks[:1])
    return sum(links[link] for rank in own for links in rank["received"].values()) / NUMEL


def said_to_be_received(report: dict[str, Any], micro_steps: int) -> float:
    """The same by the start-up line."""
    figure, per, _ = re.search(
        r"; ([\d.]+) B/param/(\S+) received per (node|rank)", report["line"]
    ).groups()
    return float(figure) * (micro_steps if per == "micro-step" else 1)


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


def totals(engine: DeepSpeedEngine) -> np.ndarray:
    """Bytes and collectives of both roles."""
    report = ds_quant.report(engine)
    received = [n for links in report["received_bytes"].values() for n in links.values()]
    return np.array([sum(received), sum(report["collectives"].values())])


@pytest.mark.parametrize(("stage", "world"), [(1, 3), (2, 3), (3, 3), (3, 2)])
@on_ranks()
def test_the_counters_see_all_that_moves_but_scalars(stage: int, world: int) -> None:
    """Nothing of the exact path is left: DeepSpeed's own collectives carry the norm and flags."""
    zero = {"reduce_bucket_size": 4 * NUMEL}
    engine = engine_of(stage, {"scheme": "qsdp"}, Matrices, accumulation=2, zero=zero)
    _step(engine)
    _step(engine)
    before = totals(engine)
    with Tap(engine.global_rank, world) as tap:
        _step(engine)
    counted, calls = totals(engine) - before
    ours = [n for name, dtype, n in tap.seen if name == "recv_" and dtype == torch.uint8]
    theirs = [n for name, _, n in tap.seen if name != "recv_"]
    assert sum(ours) == counted > NUMEL
    assert len(ours) == (world - 1) * calls  # one message per peer and collective
    assert all(n <= 16 for n in theirs), tap.seen  # ZeRO-1/2 also compare buckets


# ---- saved bytes ----


@pytest.mark.parametrize(
    ("stage", "scheme"), [(1, "eden4"), (2, "qsdp"), (2, "lossless"), (3, "eden4"), (3, "lossless")]
)
@on_ranks()
def test_what_is_received_and_saved_adds_up_to_full_precision(stage: int, scheme: str) -> None:
    """Also beside exact gathers between steps, which full precision does not need."""
    block = {"scheme": scheme, "node_size": 1, "allow_full_replica": True}
    engine = engine_of(stage, block, Matrices)

    def total() -> dict[str, float]:
        report = ds_quant.report(engine)
        return {
            role: sum(links.values()) + sum(report["saved_bytes"][role].values())
            for role, links in report["received_bytes"].items()
        }

    def save() -> None:
        engine.save_checkpoint(scratch())

    def load() -> None:
        engine.load_checkpoint(scratch())

    _step(engine)
    totals = []
    for between in (lambda: None, save, load, lambda: ds_quant.resync(engine)):
        before = total()
        between()
        _step(engine)
        totals.append({role: value - before[role] for role, value in total().items()})
    for found in totals:
        assert found == pytest.approx(totals[0], rel=0.01)
    assert min(totals[0].values()) == pytest.approx(NUMEL, rel=0.01)  # half of bf16, each role
