"""Training runs give the bits, bytes and messages that ``golden_runs.json`` has of them; ranks of
one process, as in benchmarks/simulated.py, end with the bits of real ones.
"""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from simulated import Simulation

from ds_quant.comm.topology import Topology
from ds_quant.config.presets import preset_names
from ds_quant.config.schema import parse_block
from tests.distributed import golden_runs, models
from tests.distributed.exact_model import ExactModel, sgd
from tests.distributed.golden_runs import (
    FACTORS,
    ROWS,
    TOPOLOGIES,
    ZERO_ROWS,
    differences,
    recorded,
)
from tests.pairwise import all_pairs, pairs_of

REPAIR = "if that is what was meant: python -m tests.distributed.golden_runs --write"
# Both hops, one of them with a rotation, without a reference, and to nearest; and plain messages.
ALSO_IN_TORCH = tuple(
    row
    for row in ROWS
    if row.topology == "2x2" and row.scheme in ("full_precision", "qsdp", "sdp4bit", "zeropp")
)

same_versions = pytest.mark.skipif(
    recorded()["versions"] != golden_runs.versions(),
    reason=f"golden_runs.json was recorded with {recorded()['versions']}",
)


# A row of every stage and front.
QUICK = (
    "sdp4bit zero1 2x2 bf16 k1 slices3 bucket20000",
    "qsdp zero2 2x2 bf16 k3 slices3 bucket20000",
    "sdp4bit zero3 2x2 bf16 k3 slices3 bucket20000",
    "lossless_w_g3 fsdp2 2x2 bf16 k2 slices1",
    "eden4 hsdp 2x2 bf16 k2 slices1",
    "eden4 ddp 2x2 bf16 k2 slices3",
)


@same_versions
def test_a_run_of_every_front_equals_the_recorded_one() -> None:
    rows = [row for row in ROWS if row.name in QUICK]
    assert len(rows) == len(QUICK)
    now = golden_runs.run_topology("2x2", rows)
    assert not list(differences({name: recorded()["rows"][name] for name in now}, now)), REPAIR


@same_versions
@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_runs_equal_the_recorded_ones(topology: str) -> None:
    now = golden_runs.run_topology(topology)
    before = {name: recorded()["rows"][name] for name in now}
    assert not list(differences(before, now)), REPAIR


@same_versions
@pytest.mark.slow
def test_torch_kernels_give_the_recorded_runs() -> None:
    now = golden_runs.run_topology("2x2", ALSO_IN_TORCH, "torch")
    assert not list(differences({name: recorded()["rows"][name] for name in now}, now))


def test_file_has_a_line_for_every_row() -> None:
    assert list(recorded()["rows"]) == [row.name for row in ROWS], REPAIR


def test_every_preset_is_in_the_table() -> None:
    assert set(FACTORS["scheme"]) == set(preset_names()), "append the new ones to FACTORS"


def test_every_pair_of_values_occurs() -> None:
    covered = set().union(*map(pairs_of, ZERO_ROWS))
    for (i, ours), (j, theirs) in combinations(enumerate(FACTORS.values()), 2):
        assert all((i, a, j, b) in covered for a in ours for b in theirs)


def test_a_new_preset_adds_rows_and_leaves_the_others() -> None:
    """Else it would replace recorded runs, and a change of their bits would hide among new ones."""
    rows = all_pairs(FACTORS)
    longer = all_pairs({**FACTORS, "scheme": (*FACTORS["scheme"], "new")})
    assert longer[: len(rows)] == rows
    schemes_of_new_rows = {scheme for scheme, *_ in longer[len(rows) :]}
    assert schemes_of_new_rows == {"new"}


def test_differences_name_row_and_value() -> None:
    before = {"a": {"losses": "1", "weights": "2"}, "b": {}}
    now = {"a": {"losses": "1", "weights": "3"}, "c": {}}
    assert list(differences(before, now)) == ["a: weights: 2 -> 3", "- b", "+ c"]


# ---- ranks of one process ----

# The simulation cuts nothing into slices, and each slice has random bits of its own.
GOLDEN = [
    row
    for row in ZERO_ROWS
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
