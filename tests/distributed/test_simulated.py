"""benchmarks/simulated.py: ranks of one process end with the bits of real ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_quant.comm.topology import Topology
from ds_quant.config.schema import parse_block
from tests import needs
from tests.distributed import golden_runs, harness, models
from tests.distributed.exact_model import ExactModel, sgd
from tests.distributed.test_golden_runs import same_versions

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from simulated import Simulation  # noqa: E402

TWO_NODES = Topology(world=4, node_size=2)
STEPS = 3
# The simulation cuts nothing into slices, and each slice has random bits of its own.
GOLDEN = [
    row
    for row in golden_runs.ROWS
    if row.stage == 3
    and row.dtype == "bf16"
    and row.name in golden_runs.recorded()["rows"]
    and (row.slices == 1 or row.topology != "2x2" or row.scheme in ("full_precision", "zeropp"))
]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=2e-3)


def block_of(scheme: str) -> dict[str, Any]:
    block = {"scheme": scheme.split()[0], "node_size": 2, "seed": 5}
    if scheme.endswith(" learned"):
        block["weights"] = {"levels": "learned", "rounding": "nearest", "level_steps": [1, 2]}
    return block


def model_of(scheme: str) -> Callable[[], models.Regression]:
    return models.Regression if not scheme.endswith(" frozen") else partly_frozen


def partly_frozen() -> models.Regression:
    model = models.Regression()
    model.second.requires_grad_(False)
    return model


def train_for_real(scheme: str, accumulation: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """On a gloo rank: its losses, and the master weights."""
    block = block_of(scheme)
    config = models.settings(3, block, dtype="bf16", accumulation=accumulation)
    engine = models.build(config, model_of(scheme), optimizer=adam)
    losses = [loss for step in range(STEPS) for loss in models.train_step(engine, step)]
    return losses, models.masters(engine)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("scheme", "accumulation"),
    [("sdp4bit", 2), ("qsdp_w4g4 learned", 1), ("sdp4bit frozen", 1), ("qsdp frozen", 1)],
)
def test_a_simulated_step_ends_with_the_bits_of_a_real_one(scheme: str, accumulation: int) -> None:
    needs.deepspeed("0.19", "takes other ZeRO-3 steps than the simulation, plugin or not")
    real = harness.run(train_for_real, 4, scheme, accumulation)
    torch.manual_seed(0)
    simulation = Simulation(
        model_of(scheme)().bfloat16(),
        parse_block(block_of(scheme)).to_scheme(),
        adam,
        topology=TWO_NODES,
        micro_steps=accumulation,
    )
    for step in range(STEPS):

        def batch(micro: int, rank: int, step: int = step) -> Any:
            x, y = models.batch(0, step, micro, rank)
            return x.bfloat16(), y

        loss, _ = simulation.step(batch)
        here = slice(step * accumulation, (step + 1) * accumulation)
        assert loss == pytest.approx(np.mean([losses[here] for losses, _ in real]), rel=1e-6)
    for name, values in simulation.named_masters():
        assert np.array_equal(real[0][1].pop(name), values.numpy()), name
    assert not real[0][1]


@same_versions
@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row.name)
def test_simulated_runs_equal_the_recorded_ones(row: golden_runs.Row) -> None:
    nodes, node_size = golden_runs.TOPOLOGIES[row.topology]
    torch.manual_seed(0)
    simulation = Simulation(
        ExactModel().bfloat16(),
        parse_block(row.config("auto")["quantized_comm"]).to_scheme(),
        sgd,
        topology=Topology(world=nodes * node_size, node_size=node_size),
        micro_steps=row.accumulation,
        clip=0.0,
    )
    for step in range(golden_runs.STEPS):
        simulation.step(lambda micro, rank, step=step: ((step * 10 + micro) * 10 + rank,))
    weights = {name: values.numpy() for name, values in simulation.named_masters()}
    found = golden_runs._digest_of(models.digests(weights))
    assert found == golden_runs.recorded()["rows"][row.name]["weights"]
