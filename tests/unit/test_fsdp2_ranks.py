"""FSDP2's ranks: the nodes of a mesh, and the schemes whose ranks compare their steps."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from ds_quant.comm.topology import Topology
from ds_quant.fsdp2 import forwards
from ds_quant.fsdp2.forwards import Forwards
from ds_quant.fsdp2.meshes import Mesh, Meshes
from ds_quant.fsdp2.ranks import ranks_of_model
from tests.world import World

CPU = torch.device("cpu")


def topologies(*meshes: tuple[tuple[int, ...], int], node_size: int) -> list[Topology]:
    """Return the nodes of meshes of ``(ranks, shards)`` in a job of 8 ranks."""
    made = [
        Mesh(ranks=ranks, shards=shards, shard_group=Mock(), replica_group=Mock(), device=CPU)
        for ranks, shards in meshes
    ]
    all_ranks = tuple(sorted({rank for mesh in made for rank in mesh.ranks}))
    all_meshes = Meshes(each=made, ranks=all_ranks, process_groups=[])
    return list(ranks_of_model(all_meshes, node_size=node_size).topologies)


@pytest.fixture(autouse=True)
def _job_of_eight_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)


def test_replicas_of_the_whole_job_are_nodes_that_its_groups_can_split() -> None:
    """A topology that names its ranks gets new process groups, where NCCL could split one."""
    assert topologies((tuple(range(8)), 4), node_size=4) == [Topology(world=8, node_size=4)]
    assert topologies((tuple(range(8)), 2), node_size=4) == [Topology(world=8, node_size=2)]


def test_replicas_on_some_ranks_are_nodes_of_these_ranks() -> None:
    whole, experts = topologies((tuple(range(8)), 8), ((0, 1, 4, 5), 2), node_size=4)
    assert whole == Topology(world=8, node_size=4)
    assert experts == Topology(world=4, node_size=2, ranks=(0, 1, 4, 5))


def test_replicas_in_one_half_of_the_job_know_their_ranks() -> None:
    (half,) = topologies(((4, 5, 6, 7), 2), node_size=2)
    assert half == Topology(world=4, node_size=2, ranks=(4, 5, 6, 7))


@pytest.mark.parametrize(
    ("block", "compares"),
    [
        ({"scheme": "full_precision"}, False),
        ({"scheme": "lossless"}, False),
        ({"scheme": "qsdp"}, True),
        ({"scheme": "qsdp", "gradients": {"enabled": False}}, True),
        ({"scheme": "qsdp", "weights": {"enabled": False}}, True),
    ],
)
def test_ranks_compare_their_steps_where_random_bits_depend_on_them(
    block: dict[str, Any], compares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock()
    monkeypatch.setattr(forwards, "StepsVote", made)
    module = nn.ParameterDict({"w": nn.Parameter(torch.empty(64, 64))})
    run = World(2, 2, module=module, stage=3, **block).ranks[0].run
    Forwards(run).compare_steps()
    assert made.return_value.compare.call_count == int(compares)
