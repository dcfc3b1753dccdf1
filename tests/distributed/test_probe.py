"""ds_quant probe on real process groups."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from ds_quant.tools import probe
from ds_quant.tools.cli import main
from tests.distributed.harness import of_all_ranks, on_ranks, scratch
from tests.distributed.test_autotune import simulate
from tests.integration.processes import free_port, run

SIZES = (1 << 10, 1 << 16, 1 << 20)  # small: four processes on two cores


# Of the simulated links: bytes per second into a rank, and seconds per message.
INSIDE, BETWEEN = (8e8, 1e-4), (1e8, 2e-3)


@pytest.mark.parametrize(
    ("world", "node_size", "levels"),
    [(4, 2, (True, True)), (2, 1, (False, True)), (2, None, (True, False))],
)
@on_ranks()
def test_probe_measures_the_levels_that_exist(
    world: int, node_size: int | None, levels: tuple[bool, bool]
) -> None:
    probe.SIZES = SIZES
    simulate(BETWEEN, node_size or world, inside=INSIDE)
    out = scratch() / "probe.json"
    found = probe.measure_and_write(argparse.Namespace(out=out, node_size=node_size))
    assert of_all_ranks(found) == [found] * world, "the slowest rank counts, for all"
    assert probe.load(out) == found
    assert (found.intra is not None, found.inter is not None) == levels
    assert found.nodes * found.node_size == world and found.backend == "gloo"
    links = (found.intra, INSIDE, 1), (found.inter, BETWEEN, found.node_size)
    for rate, (bytes_per_second, latency), ranks_at_once in links:
        if rate is not None:
            into_node = ranks_at_once * bytes_per_second / world
            assert rate.bytes_per_second == pytest.approx(into_node, rel=1e-6)
            smallest = latency + SIZES[0] / bytes_per_second
            assert rate.latency == pytest.approx(world * smallest, rel=1e-6)


CHECKOUT = {
    "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "DS_ACCELERATOR": "cpu",
}  # fmt: skip
OURS = (sys.executable, "-m", "ds_quant", "probe")


@pytest.mark.slow
def test_probe_runs_under_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("# this machine\nlocalhost slots=2\n")
    launcher = (sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "hostfile")
    here = ("--no_ssh_check", "--master_addr", "127.0.0.1", "--master_port", free_port())
    ours = ("--no_local_rank", "--module", "ds_quant", "probe", "--node-size", "1")
    printed = run(*launcher, *here, *ours, cwd=tmp_path, **CHECKOUT)
    found = probe.load(tmp_path / "probe.json")
    assert (found.nodes, found.node_size) == (2, 1)
    assert "2 x 1 ranks over gloo" in printed


@pytest.mark.slow
def test_probe_runs_under_torchrun(tmp_path: Path) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python")
    ours = (*OURS, "--out", "links.json")
    run(*launcher, "--nproc-per-node", "2", *ours, cwd=tmp_path, **CHECKOUT)
    assert probe.load(tmp_path / "links.json").node_size == 2


def test_probe_outside_a_launcher_names_both_ways(monkeypatch, capsys) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["probe"]) == 1
    printed = capsys.readouterr().err
    assert "deepspeed --hostfile" in printed and "torchrun" in printed
