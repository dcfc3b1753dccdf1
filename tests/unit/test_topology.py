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
FOUR = ["a"] * 4
CLONES = ["n 11aa"] * 2 + ["n 22bb"] * 2


def told(size: int | None, world: int) -> list[tuple[str, int] | None]:
    return [None if size is None else ("LOCAL_SIZE", size)] * world


@pytest.mark.parametrize(
    ("hosts", "given", "launched", "expected", "words"),
    [
        (EIGHTS, None, None, 8, ""),  # srun, mpirun: nobody says, hosts do
        (list("abcdefgh"), None, None, 1, ""),
        (["a"] * 8, None, None, 8, ""),
        (EIGHTS, None, 8, 8, ""),
        (EIGHTS, 8, 8, 8, ""),
        # Several declared nodes on one host: namespaces, demos, tests.
        (FOUR, 2, None, 2, ""),
        (FOUR, 2, 4, 2, ""),
        (FOUR, None, 2, 2, ""),
        (EIGHTS, 4, 8, 4, ""),
        (EIGHTS, 1, None, 1, ""),
        (CYCLIC, 1, None, 1, ""),
        # A node on several hosts.
        (EIGHTS, 16, None, 16, "node_size=16; ranks 0 to 15; 8 on a, 8 on b; NVLink"),
        (EIGHTS, 16, None, 16, "set it to 8 or leave it out"),
        (CYCLIC, 16, None, 16, "1 on a, 1 on b, 1 on a, ...; srun --distribution=block"),
        (EIGHTS, None, 16, None, "LOCAL_SIZE=16; 8 on a, 8 on b; unset it"),
        (EIGHTS, None, 16, None, "quantized_comm.node_size=8"),
        *(
            (CYCLIC, None, launched, None, words)
            for launched in (None, 2, 16)
            for words in (
                "host a are not consecutive: rank 0 lies there, rank 1 on b, rank 2 there again",
                "srun --distribution=block; mpirun --map-by slot; quantized_comm.node_size=1",
            )
        ),
        # Hosts of one name are told apart by their id.
        (CLONES, None, None, 2, ""),
        (CLONES, 4, None, 4, "2 on n 11aa, 2 on n 22bb"),
        (["a 11aa"] * 2 + ["b 22bb"] * 2, 4, None, 4, "2 on a, 2 on b"),
    ],
)
def test_nodes_are_what_is_given_or_told_or_a_host_each(
    hosts: list[str], given: int | None, launched: int | None, expected: int | None, words: str
) -> None:
    """words: of the warning, or of the refusal where no size is expected."""
    how = {"given": given, "launched": told(launched, len(hosts))}
    if expected is None:
        with pytest.raises(PlacementError) as error:
            place(hosts, **how)
        said = str(error.value)
    else:
        size, said = place(hosts, **how)
        assert size == expected and bool(said) == bool(words)
    assert [word for word in words.split("; ") if word not in said] == [], said


@pytest.mark.parametrize(
    ("runs", "expected"), [((8, 4), 4), ((8, 8, 4), 4), ((8, 7), 1), ((6, 4), 2)]
)
@pytest.mark.parametrize("is_told", [False, True])
def test_uneven_hosts_get_the_largest_nodes_that_fit_and_a_warning(
    runs: tuple[int, ...], expected: int, is_told: bool
) -> None:
    """As torchrun tells them: every rank the number of ranks on its own host, if that divides."""
    sizes = [count for count in runs for _ in range(count)]
    hosts = [host for host, count in zip("abc", runs, strict=False) for _ in range(count)]
    launched = [("LOCAL_WORLD_SIZE", n) if is_told and len(hosts) % n == 0 else None for n in sizes]
    size, warning = place(hosts, given=None, launched=launched)
    assert size == expected
    assert f"hosts hold {', '.join(map(str, runs))} ranks" in warning


@pytest.mark.parametrize(("count", "is_cut"), [(8, False), (9, True)])
def test_a_warning_lists_the_ranks_of_eight_hosts_at_most(count: int, is_cut: bool) -> None:
    runs = [8, *[4] * (count - 1)]
    hosts = [f"host{index}" for index, ranks in enumerate(runs) for _ in range(ranks)]
    _, warning = place(hosts, given=None, launched=[None] * len(hosts))
    assert f"hosts hold {', '.join(map(str, runs[:8]))}{' ...' if is_cut else ''} ranks" in warning


def test_launchers_that_contradict_each_other_are_not_believed() -> None:
    assert place(FOUR, given=None, launched=[("LOCAL_SIZE", 2), *told(1, 3)])[0] == 4
