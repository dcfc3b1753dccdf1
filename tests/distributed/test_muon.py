"""Muon: only what it needs whole travels whole, and what DeepSpeed sends for it is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ds_quant
from tests.distributed.harness import on_ranks, run
from tests.distributed.models import FEATURES, TARGETS, engine_of, train_steps
from tests.distributed.scenarios import matrices_apart, muon

STEPS, LAYERS, WIDTH = 3, 22, 67


class Deep(nn.Module):
    """22 matrices of 67 x 67 between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, TARGETS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (self.last(x).float() - y).square().mean()


MATRICES = sum(p.numel() for p in Deep().parameters() if p.dim() == 2)
# Sums and gathers over W ranks bring a rank so many times (W - 1) / W of their length.
RINGS = {"all_reduce": 2, "all_gather": 1, "all_gather_into_tensor": 1}


@contextmanager
def deepspeeds_own(least: int = 1000) -> Iterator[dict[str, float]]:
    """Bytes into this rank by DeepSpeed's own sums and gathers of at least so many elements."""
    from deepspeed import comm

    counts = dict.fromkeys(RINGS, 0.0)

    def counted(name: str, original: Any, whole: Any, *args: Any, **keywords: Any) -> Any:
        tensors = whole if isinstance(whole, list) else [whole]
        if sum(t.numel() for t in tensors) >= least:
            ranks = comm.get_world_size(keywords.get("group"))
            nbytes = sum(t.numel() * t.element_size() for t in tensors)
            counts[name] += RINGS[name] * nbytes * (ranks - 1) / ranks
        return original(whole, *args, **keywords)

    originals = {name: getattr(comm, name) for name in RINGS}
    for name, original in originals.items():
        setattr(comm, name, partial(counted, name, original))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(comm, name, original)


def made(stage: int, scheme: str | None, accumulation: int, dtype: str, node_size: int) -> Any:
    block = None if scheme is None else {"scheme": scheme, "node_size": node_size}
    return engine_of(
        stage, block, Deep, dtype=dtype, accumulation=accumulation,
        zero={"reduce_scatter": stage < 3}, groups=matrices_apart, optimizer=muon,
    )  # fmt: skip


def train(stage: int, scheme: str | None, accumulation: int, dtype: str, node_size: int) -> Any:
    """Losses, the report, and bytes that DeepSpeed itself has brought."""
    engine = made(stage, scheme, accumulation, dtype, node_size)
    with deepspeeds_own() as own:
        losses = train_steps(engine, STEPS)
    return losses, ds_quant.report(engine), own


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_only_matrices_on_several_ranks_are_left_to_deepspeed(stage: int) -> None:
    """22 equal matrices and two smaller ones on four ranks: three lie on two ranks."""
    reductions = STEPS * (2 if stage == 2 else 1)
    split = 3 * WIDTH**2
    ranks = run(train, 4, stage, "sdp4bit", 2, "bf16", 2)
    for _, report, own in ranks:
        assert own["all_reduce"] == reductions * split * 2 * 2 * 3 / 4
        assert "3 Muon gradients on several ranks" in report["line"]
        assert f"{100 * split / report['params']:.1f} % of the elements" in report["line"]
        assert report["expected_held_bytes"] <= (report["params"] - split) * 4 / 2
    received = [sum(report["received_bytes"]["gradients"].values()) for _, report, _ in ranks]
    assert min(received) > ranks[0][2]["all_reduce"]
    whole_model = reductions * ranks[0][1]["params"] * 2 * 2 * 3 / 4
    assert sum(received) / 4 < 0.4 * whole_model


def test_zero3_reduces_by_the_scheme_and_counts_what_muon_gathers() -> None:
    """Gradients and momentum twice each, in bf16, of matrices padded to equal shards."""
    for _, report, own in run(train, 4, 3, "sdp4bit", 2, "bf16", 2):
        assert own["all_reduce"] == 0
        gathered = own["all_gather"] + own["all_gather_into_tensor"]
        assert gathered == pytest.approx(STEPS * 8 * MATRICES * 3 / 4, rel=0.02)
        received = sum(report["received_bytes"]["gradients"].values()) - gathered
        # 0.5 B per parameter between nodes once per step, and 1 B inside them per micro-step
        assert 0 < received < STEPS * report["params"] * (0.3 + 2 * 0.6)
        assert report["not_counted"] == []
        share = MATRICES / report["params"]
        assert f"itself, exactly: {8 * share:.2f} B/param/step" in report["line"]
        assert report["expected_bytes_per_param"] > 8 * share


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_in_full_precision_it_trains_as_without_the_plugin(stage: int) -> None:
    """On two ranks sums have one order."""
    plain = run(train, 2, stage, None, 2, "fp32", 2)
    ours = run(train, 2, stage, "full_precision", 2, "fp32", 2)
    assert [losses for losses, *_ in ours] == [losses for losses, *_ in plain]
    assert ours[0][2]["all_reduce"] < 0.1 * plain[0][2]["all_reduce"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_exact_sums_over_two_levels_differ_in_their_order_alone(stage: int) -> None:
    plain = [losses for losses, *_ in run(train, 4, stage, None, 2, "fp32", 2)]
    ours = [losses for losses, *_ in run(train, 4, stage, "hybrid", 2, "fp32", 2)]
    np.testing.assert_allclose(ours, plain, rtol=1e-5)


@on_ranks()
def test_where_muon_runs_on_buckets_gradients_stay_exact() -> None:
    """In an older DeepSpeed."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Optimizer

    del Optimizer._apply_muon_to_accumulated_grads
    engine = made(3, "qsdp", 1, "bf16", 1)
    report = ds_quant.report(engine)
    line = report["line"]
    assert "gradients stay exact: Muon of DeepSpeed" in line and "needs it whole" in line
    assert "do not count them" in line and report["not_counted"] == ["gradients"]
    assert not engine.optimizer.reduce_scatter
