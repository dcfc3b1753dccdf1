"""ds_quant probe on real process groups."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ds_quant.tools import probe
from tests.distributed.harness import run

pytestmark = pytest.mark.distributed
SIZES = (1 << 10, 1 << 16, 1 << 20)  # small: four processes on two cores


def _probe(folder: str, node_size: int | None) -> probe.Found:
    probe.SIZES = SIZES
    arguments = argparse.Namespace(out=Path(folder, "probe.json"), node_size=node_size)
    return probe.measure_and_write(arguments)


@pytest.mark.parametrize(
    ("world", "node_size", "levels"),
    [(4, 2, (True, True)), (2, 1, (False, True)), (2, None, (True, False))],
)
def test_probe_measures_the_levels_that_exist(
    tmp_path: Path, world: int, node_size: int | None, levels: tuple[bool, bool]
) -> None:
    ranks = run(_probe, world, str(tmp_path), node_size)
    assert all(found == ranks[0] for found in ranks), "the slowest rank counts, for all"
    found = ranks[0]
    assert probe.load(tmp_path / "probe.json") == found
    assert (found.intra is not None, found.inter is not None) == levels
    assert found.nodes * found.node_size == world and found.backend == "gloo"
    for rate in (found.intra, found.inter):
        if rate is not None:
            assert 1e5 < rate.bytes_per_second < 1e12 and 0 < rate.latency < 5
