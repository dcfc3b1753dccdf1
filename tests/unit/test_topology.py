"""Topology: nodes of consecutive ranks, whose size is never guessed from devices."""

from __future__ import annotations

import pytest

from ds_quant.comm.topology import PlacementError, Topology, default_node_size, place


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
        ({"LOCAL_SIZE": "\u00b2"}, 8),  # a digit, but no number
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


# ---- hosts ----

EIGHTS = ["a"] * 8 + ["b"] * 8
CYCLIC = ["a", "b"] * 8


def launcher(size: int | None, world: int) -> list[tuple[str, int] | None]:
    return [None if size is None else ("LOCAL_SIZE", size)] * world


@pytest.mark.parametrize(
    ("hosts", "given", "launched", "expected"),
    [
        (EIGHTS, None, None, 8),  # srun, mpirun: nobody says, hosts do
        (list("abcdefgh"), None, None, 1),
        (["a"] * 8, None, None, 8),
        (EIGHTS, None, 8, 8),
        (EIGHTS, 8, 8, 8),
        # Several declared nodes on one host: namespaces, demos, tests.
        (["a"] * 4, 2, None, 2),
        (["a"] * 4, 2, 4, 2),
        (["a"] * 4, None, 2, 2),
        (EIGHTS, 4, 8, 4),
        (EIGHTS, 1, None, 1),
        (CYCLIC, 1, None, 1),
    ],
)
def test_nodes_that_lie_on_one_host_each_are_taken_silently(
    hosts: list[str], given: int | None, launched: int | None, expected: int
) -> None:
    found = place(hosts, given=given, launched=launcher(launched, len(hosts)))
    assert found == (expected, "")


@pytest.mark.parametrize(
    ("hosts", "parts"),
    [
        (EIGHTS, ["ranks 0 to 15", "8 on a, 8 on b", "set it to 8 or leave it out", "NVLink"]),
        (CYCLIC, ["ranks 0 to 15", "1 on a, 1 on b, 1 on a, ...", "srun --distribution=block"]),
    ],
    ids=["two hosts", "cyclic"],
)
def test_a_given_node_on_several_hosts_is_warned_of(hosts: list[str], parts: list[str]) -> None:
    size, message = place(hosts, given=16, launched=launcher(None, 16))
    assert size == 16
    assert [p for p in ["node_size=16", *parts] if p not in message] == [], message


@pytest.mark.parametrize("launched", [None, 2, 16])
def test_cyclic_placement_is_refused_with_its_fix(launched: int | None) -> None:
    with pytest.raises(PlacementError) as error:
        place(CYCLIC, given=None, launched=launcher(launched, 16))
    parts = (
        "host a are not consecutive: rank 0 lies there, rank 1 on b, rank 2 there again",
        "srun --distribution=block", "mpirun --map-by slot", "quantized_comm.node_size=1",
    )  # fmt: skip
    assert [part for part in parts if part not in str(error.value)] == []


def test_a_launcher_that_puts_several_hosts_into_a_node_is_refused() -> None:
    with pytest.raises(PlacementError) as error:
        place(EIGHTS, given=None, launched=launcher(16, 16))
    parts = ("LOCAL_SIZE=16", "8 on a, 8 on b", "unset it", "quantized_comm.node_size=8")
    assert [part for part in parts if part not in str(error.value)] == []


@pytest.mark.parametrize(
    ("runs", "expected"), [((8, 4), 4), ((8, 8, 4), 4), ((8, 7), 1), ((6, 4), 2)]
)
@pytest.mark.parametrize("told", [False, True])
def test_uneven_hosts_get_the_largest_nodes_that_fit_and_a_warning(
    runs: tuple[int, ...], expected: int, told: bool
) -> None:
    """As torchrun tells them: every rank the number of ranks on its own host, if that divides."""
    hosts = [host for host, count in zip("abc", runs, strict=False) for _ in range(count)]
    sizes = [count for count in runs for _ in range(count)]
    launched = [("LOCAL_WORLD_SIZE", n) if told and len(hosts) % n == 0 else None for n in sizes]
    size, warning = place(hosts, given=None, launched=launched)
    assert size == expected
    assert f"hosts hold {', '.join(map(str, runs))} ranks" in warning


def test_launchers_that_contradict_each_other_are_not_believed() -> None:
    told = [("LOCAL_SIZE", 2), *launcher(1, 3)]
    assert place(["a"] * 4, given=None, launched=told)[0] == 4


def test_hosts_of_one_name_are_told_apart_by_their_id() -> None:
    clones = ["node 11aa"] * 2 + ["node 22bb"] * 2
    assert place(clones, given=None, launched=launcher(None, 4))[0] == 2
    assert "2 on node 11aa, 2 on node 22bb" in place(clones, given=4, launched=[None] * 4)[1]
    named = ["a 11aa"] * 2 + ["b 22bb"] * 2
    assert "2 on a, 2 on b" in place(named, given=4, launched=[None] * 4)[1]
