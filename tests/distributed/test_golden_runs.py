"""Training runs give the bits, bytes and messages that ``golden_runs.json`` has of them."""

from __future__ import annotations

from itertools import combinations

import pytest

from ds_quant.config.presets import preset_names
from tests.distributed import golden_runs
from tests.distributed.golden_runs import FACTORS, ROWS, TOPOLOGIES, differences, recorded
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
    covered = set().union(*map(pairs_of, ROWS))
    for (i, ours), (j, theirs) in combinations(enumerate(FACTORS.values()), 2):
        assert all((i, a, j, b) in covered for a in ours for b in theirs)


def test_a_new_preset_adds_rows_and_leaves_the_others() -> None:
    rows = all_pairs(FACTORS)
    longer = all_pairs({**FACTORS, "scheme": (*FACTORS["scheme"], "new")})
    assert longer[: len(rows)] == rows
    assert {row[0] for row in longer[len(rows) :]} == {"new"}


def test_differences_name_row_and_value() -> None:
    before = {"a": {"losses": "1", "weights": "2"}, "b": {}}
    now = {"a": {"losses": "1", "weights": "3"}, "c": {}}
    assert list(differences(before, now)) == ["a: weights: 2 -> 3", "- b", "+ c"]
