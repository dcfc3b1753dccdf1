"""benchmarks/simulated.py: ranks of one process end with the bits of real ones."""

from __future__ import annotations

import pytest
import torch
from simulated import Simulation

from ds_quant.comm.topology import Topology
from ds_quant.config.schema import parse_block
from tests.distributed import golden_runs, models
from tests.distributed.exact_model import ExactModel, sgd
from tests.distributed.test_golden_runs import same_versions

# The simulation cuts nothing into slices, and each slice has random bits of its own.
GOLDEN = [
    row
    for row in golden_runs.ROWS
    if row.stage == 3
    and row.dtype == "bf16"
    and row.name in golden_runs.recorded()["rows"]
    and (row.slices == 1 or row.topology != "2x2" or row.scheme in ("full_precision", "zeropp"))
]


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
        loss, _ = simulation.step(
            lambda micro, rank, step=step: ((step * 10 + micro) * 10 + rank,)
        )  # fmt: skip
    weights = {name: values.numpy() for name, values in simulation.named_masters()}
    found, recorded = models.digests(weights), golden_runs.recorded()["rows"][row.name]
    assert golden_runs._digest_of(found) == recorded["weights"]
    if row.accumulation == 1:  # else it is the mean of the micro-steps
        assert loss == pytest.approx(recorded["first and last loss"][1], rel=1e-6)
