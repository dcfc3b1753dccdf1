"""The node shard in host memory, with ``offload_param``: the same bits, fewer on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ds_quant
from tests.distributed import golden_runs, host_memory
from tests.distributed.golden_runs import ROWS, Row, recorded
from tests.distributed.harness import on_ranks, run
from tests.distributed.host_memory import device_bytes, separate_host_memory
from tests.distributed.models import engine_of
from tests.distributed.test_golden_runs import same_versions
from tests.distributed.test_spread import small_chunks
from tests.distributed.test_steady import Stack, step

KEEPS = ("sdp4bit", "zeropp", "hybrid", "qsdp_shard", "lossless")
GOLDEN = [row for row in ROWS if row.stage == 3 and row.scheme.startswith(KEEPS)]


def in_host_memory(rows: list[Row]) -> dict[str, golden_runs.Outcome]:
    with separate_host_memory():
        found = golden_runs.train_rows(rows, "auto")
    assert host_memory.COPIED.most > 0
    return found


@same_versions
@pytest.mark.parametrize("topology", ["2x1", "2x2", "4x1"])
def test_runs_equal_the_recorded_ones(topology: str) -> None:
    """Their messages, too. Kernels never meet a tensor in host memory, else it raises."""
    rows = [row for row in GOLDEN if row.topology == topology]
    assert rows
    nodes, node_size = golden_runs.TOPOLOGIES[topology]
    ranks = run(in_host_memory, nodes * node_size, rows, timeout=120)
    for row in rows:
        now = golden_runs._summary([rank[row.name] for rank in ranks])
        assert now == recorded()["rows"][row.name], row.name


OFFLOADED = {"offload_param": {"device": "cpu"}, "stage3_prefetch_bucket_size": 0}


def on_the_device(scheme: str, offloads: bool) -> dict[str, Any]:
    """Bytes between two steps, and the most that copies of the shard have taken at once."""
    with separate_host_memory(offloads=offloads), small_chunks():
        block = {"scheme": scheme, "node_size": 2}
        engine = engine_of(3, block, lambda: Stack(256, 12), zero=OFFLOADED)
        for _ in range(2):
            step(engine)
        engine.ds_quant_plugin.node.finish()
        report = ds_quant.report(engine)
        return {
            "bytes": device_bytes(), "copies": host_memory.COPIED.most,
            "shard": report["kept_bytes"], "line": report["line"],
        }  # fmt: skip


@pytest.mark.parametrize("scheme", ["sdp4bit", "lossless"])
def test_the_device_has_all_bytes_of_the_shard_to_itself(scheme: str) -> None:
    before, after = (run(on_the_device, 4, scheme, offloads) for offloads in (False, True))
    for on_device, on_host in zip(before, after, strict=True):
        assert on_device["bytes"] - on_host["bytes"] == on_host["shard"] > 0
        assert 0 < on_host["copies"] < on_host["shard"] / 4  # a layer of 12, a chunk of 8
        assert "more on every rank" in on_device["line"]
        assert "more in host memory on every rank" in on_host["line"]


@pytest.mark.parametrize("world", [2, 4])
@on_ranks()
def test_a_gather_copies_when_it_is_asked_for_ahead_of_its_use(world: int) -> None:
    """Rows, of two parameters."""
    with separate_host_memory():
        block = {"scheme": "sdp4bit", "node_size": world // 2, "allow_full_replica": True}
        engine = engine_of(3, block, lambda: Stack(256, 2), zero=OFFLOADED)
        step(engine)
        node = engine.ds_quant_plugin.node
        node.finish()
        before = host_memory.COPIED.count
        gathered, _ = node.gather(node.served[:2])
        assert host_memory.COPIED.count == before + 2
        gathered.wait()
        assert host_memory.COPIED.count == before + 2


@on_ranks(4)
def test_without_room_in_host_memory_all_ranks_are_told() -> None:
    """It is that of a machine, which the ranks of a node share."""
    from ds_quant.zero import hooks, offload

    hooks.free_memory = lambda: 4 * 10**5

    def line(*free: int) -> str:
        """``free`` bytes are left to the ranks."""
        offload.free_host_memory = lambda: free[torch.distributed.get_rank()]
        block = {"scheme": "sdp4bit", "node_size": 2}
        engine = engine_of(3, block, lambda: Stack(256, 12), zero=OFFLOADED)
        return ds_quant.report(engine)["line"]

    with separate_host_memory():
        said = "takes 0.00158 GB of host memory in every node, but 0.001 GB"
        with pytest.raises(RuntimeError, match=f"node shard {said}"):
            line(10**12, 10**12, 10**6, 10**6)
        found = line(*[10**12] * 4)
        assert "may run out of memory: " in found and "node shard" not in found.split("may run")[1]
