"""Muon: only what it needs whole travels whole, and what DeepSpeed sends for it is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ds_quant
from tests.distributed.harness import of_all_ranks, on_ranks
from tests.distributed.models import FEATURES, TARGETS, engine_of, train_steps
from tests.distributed.scenarios import matrices_apart, muon
from tests.thin import thinned

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
def deepspeeds_own(least: int = 1000) -> Iterator[Counter[str]]:
    """Bytes into this rank by DeepSpeed's own sums and gathers of at least so many elements."""
    from deepspeed import comm

    counts = Counter[str]()

    def counted(name: str, original: Any, whole: Any, *args: Any, **keywords: Any) -> Any:
        tensors = whole if isinstance(whole, list) else [whole]
        if sum(t.numel() for t in tensors) >= least:
            ranks = comm.get_world_size(keywords.get("group"))
            nbytes = sum(t.numel() * t.element_size() for t in tensors)
            counts[name] += RINGS[name] * nbytes * (ranks - 1) / ranks
        return original(whole, *args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        for name in RINGS:
            patch.setattr(comm, name, partial(counted, name, getattr(comm, name)))
        yield counts


def build(stage: int, scheme: str | None, dtype: str = "bf16") -> Any:
    block = None if scheme is None else {"scheme": scheme, "node_size": 2}
    return engine_of(
        stage, block, Deep, groups=matrices_apart, optimizer=muon, dtype=dtype,
        accumulation=2, zero={"reduce_scatter": stage < 3},
    )  # fmt: skip


def train(*settings: Any) -> tuple[list[float], dict[str, Any], Counter[str]]:
    """Losses, the report, and bytes that DeepSpeed itself has brought."""
    engine = build(*settings)
    with deepspeeds_own() as own:
        losses = train_steps(engine, STEPS)
    return losses, ds_quant.report(engine), own


@pytest.mark.parametrize("stage", thinned([1, 2], lambda stage: stage == 2))
@on_ranks(4)
def test_only_matrices_on_several_ranks_are_left_to_deepspeed(stage: int) -> None:
    """22 equal matrices and two smaller ones on four ranks: three lie on two ranks."""
    reductions = STEPS * (2 if stage == 2 else 1)
    split = 3 * WIDTH**2
    _, report, own = train(stage, "sdp4bit")
    assert own["all_reduce"] == reductions * split * 2 * 2 * 3 / 4
    assert "3 Muon gradients on several ranks" in report["line"]
    assert f"{100 * split / report['params']:.1f} % of the elements" in report["line"]
    assert report["expected_held_bytes"] <= (report["params"] - split) * 4 / 2
    received = of_all_ranks(sum(report["received_bytes"]["gradients"].values()))
    assert min(received) > own["all_reduce"]
    whole_model = reductions * report["params"] * 2 * 2 * 3 / 4
    assert sum(received) / 4 < 0.4 * whole_model


@on_ranks(4)
def test_zero3_reduces_by_the_scheme_and_counts_what_muon_gathers() -> None:
    """Gradients and momentum twice each, in bf16, of matrices padded to equal shards."""
    _, report, own = train(3, "sdp4bit")
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


@pytest.mark.parametrize(
    ("world", "stage"),
    thinned([(2, 1), (2, 2), (2, 3), (4, 2), (4, 3)], lambda *case: case in ((2, 2), (2, 3))),
)
@on_ranks()
def test_in_full_precision_it_trains_as_without_the_plugin(world: int, stage: int) -> None:
    """On two ranks sums have one order, over two levels another one, which Muon makes larger."""
    plain, _, shipped = train(stage, None, "fp32")
    ours, _, own = train(stage, "full_precision" if world == 2 else "hybrid", "fp32")
    np.testing.assert_allclose(ours, plain, rtol=0 if world == 2 else 1e-5)
    assert own["all_reduce"] < 0.2 * shipped["all_reduce"]


@on_ranks()
def test_where_muon_runs_on_buckets_gradients_stay_exact() -> None:
    """As in an older DeepSpeed."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Optimizer

    del Optimizer._apply_muon_to_accumulated_grads
    engine = build(3, "qsdp")
    report = ds_quant.report(engine)
    assert "gradients stay exact: Muon of DeepSpeed" in report["line"]
    assert "needs it whole" in report["line"] and "do not count them" in report["line"]
    assert report["not_counted"] == ["gradients"]
    assert not engine.optimizer.reduce_scatter
