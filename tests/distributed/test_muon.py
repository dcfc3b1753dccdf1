"""Muon: only what it needs whole travels whole, and what DeepSpeed sends for it is counted."""

from __future__ import annotations

import re
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
SQUARE = 64


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


class Square(nn.Module):
    """Equal square matrices, and nothing else."""

    def __init__(self, matrices: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SQUARE, SQUARE, bias=False) for _ in range(matrices))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = nn.functional.pad(x, (0, SQUARE - FEATURES))
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return (hidden[:, :TARGETS].float() - y).square().mean()


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


@pytest.mark.slow
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
    price = gathered / (3 / 4) / STEPS / report["params"]
    assert f"itself, exactly: volume {price:.2f} B/param/step" in report["line"]
    assert report["expected_bytes_per_param"] > price


@pytest.mark.parametrize(
    ("matrices", "in_bucket", "price"),
    thinned(
        [(40, 40, 8.0), (6, 6, 9.33), (6, 2, 12.0), (6, 1, 20.0)],
        lambda matrices, in_bucket, _: in_bucket == 2,
    ),
)
@on_ranks(4)
def test_the_padding_of_rounds_is_priced(matrices: int, in_bucket: int, price: float) -> None:
    """A round has a row for each of four ranks, however many matrices are left in the bucket."""
    found = {bucket: gathers_of_muon(matrices, bucket) for bucket in (in_bucket, 4)}
    counted, line = found[in_bucket]
    assert counted == pytest.approx(price, rel=0.05)
    assert f"itself, exactly: volume {price:.2f} B/param/step" in line
    least = f"with reduce_bucket_size={4 * SQUARE**2})"
    assert (least in line) == (in_bucket < 4)
    if in_bucket < 4:
        at_least, _ = found[4]
        assert f" B/param/step ({at_least:.2f} {least}" in line


def gathers_of_muon(matrices: int, in_bucket: int) -> tuple[float, str]:
    """Bytes per parameter and step that DeepSpeed gathers itself, as the line counts them."""
    engine = engine_of(
        3, {"scheme": "sdp4bit", "node_size": 2}, partial(Square, matrices), groups=one_group,
        optimizer=muon, zero={"reduce_scatter": False, "reduce_bucket_size": in_bucket * SQUARE**2},
    )  # fmt: skip
    train_steps(engine, 1)  # the first one sends all weights
    before = entered(ds_quant.report(engine))
    with deepspeeds_own() as own:
        train_steps(engine, 1)
    report = ds_quant.report(engine)
    into_node = sum(of_all_ranks(entered(report) - before)[:2]) / report["params"]
    assert f"; {into_node:.2f} B/param/step received per node" in report["line"]
    gathered = own["all_gather"] + own["all_gather_into_tensor"]
    return gathered / (3 / 4) / report["params"], report["line"]


def entered(report: dict[str, Any]) -> int:
    """Bytes from other nodes to this rank."""
    return sum(links["inter"] for links in report["received_bytes"].values())


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    return matrices_apart(model)[:1]


@on_ranks(4)
def test_a_smaller_bucket_is_advised_only_if_every_rank_has_a_matrix_of_it() -> None:
    """Four matrices are one round; an eighth of 6 is less than a round, of 40 more."""
    advised = {}
    for matrices in (4, 6, 40):
        engine = engine_of(
            3, {"scheme": "sdp4bit", "node_size": 2}, partial(Square, matrices), groups=one_group,
            optimizer=muon, zero={"reduce_scatter": False, "overlap_comm": True},
        )  # fmt: skip
        advised[matrices] = re.findall(r"\(try (\d+)\)", ds_quant.report(engine)["line"])
    assert advised == {4: [], 6: [str(4 * SQUARE**2)], 40: [str(8 * SQUARE**2)]}


@pytest.mark.parametrize(
    ("world", "stage"),
    thinned([(2, 1), (2, 2), (2, 3), (4, 2), (4, 3)], lambda *case: case == (2, 2)),
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
