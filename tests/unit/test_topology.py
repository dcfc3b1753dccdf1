"""Topology: nodes of consecutive ranks, whose size is never guessed from devices."""

from __future__ import annotations

import pytest

from ds_quant.topology import Topology, default_node_size


@pytest.mark.parametrize(
    ("world", "node_size", "nodes"),
    [
        (4, 1, [0, 1, 2, 3]), (4, 2, [0, 0, 1, 1]), (4, 4, [0, 0, 0, 0]),
        (6, 3, [0, 0, 0, 1, 1, 1]), (1, 1, [0]),
    ],
)  # fmt: skip
def test_nodes_are_runs_of_consecutive_ranks(world: int, node_size: int, nodes: list[int]) -> None:
    topology = Topology(world=world, node_size=node_size)
    assert [topology.node_of(rank) for rank in range(world)] == nodes


@pytest.mark.parametrize(
    ("world", "node_size", "allowed"),
    [
        (3, 2, [1, 3]),
        (4, 3, [1, 2, 4]),
        (4, 8, [1, 2, 4]),
        (4, 0, [1, 2, 4]),
        (6, -1, [1, 2, 3, 6]),
    ],
)
def test_a_node_size_that_does_not_divide_the_world_is_refused(
    world: int, node_size: int, allowed: list[int]
) -> None:
    with pytest.raises(ValueError) as error:
        Topology(world=world, node_size=node_size)
    assert f"quantized_comm.node_size={node_size}" in str(error.value)
    assert f"world size {world}" in str(error.value) and str(allowed) in str(error.value)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 8),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),  # torchrun
        ({"LOCAL_SIZE": "2"}, 2),  # deepspeed launcher
        ({"LOCAL_WORLD_SIZE": "1", "LOCAL_SIZE": "2"}, 2),  # accelerate on CPU under deepspeed's
        ({"LOCAL_WORLD_SIZE": "3"}, 8),  # uneven hosts
        ({"LOCAL_WORLD_SIZE": "3", "LOCAL_SIZE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "16"}, 8),
        ({"LOCAL_WORLD_SIZE": "0"}, 8),
        ({"LOCAL_SIZE": "-2"}, 8),
        ({"LOCAL_SIZE": "two"}, 8),
        ({"LOCAL_SIZE": ""}, 8),
    ],
)
def test_the_launcher_says_how_many_ranks_share_a_node(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: int
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert default_node_size(8) == expected
