"""Comparisons and votes of all ranks, without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore

from ds_quant.config.schema import FallbackConfig
from ds_quant.runtime import copies, handshake, log
from ds_quant.runtime.copies import (
    checksum,
    compare_copies,
    compare_replicas,
    compares_copies,
    compares_replicas,
    differing_ranks,
    outvoted,
)
from ds_quant.runtime.fallback import Fallback, first_nonfinite
from ds_quant.runtime.run import SchemeState
from ds_quant.zero.first_step import check_first_step
from tests.world import SimulatedRank, World


def test_checksums_see_every_bit_and_its_place() -> None:
    weights = torch.arange(10_000, dtype=torch.float32)
    usual = checksum([weights]).tolist()
    assert checksum(weights.split(7000)).tolist() != usual  # other tensors
    for first, second in ((0, 9000), (8192, 9999)):  # rows, and single elements behind them
        other = weights.clone()
        other[[first, second]] = weights[[second, first]]
        assert checksum([other]).tolist() != usual
    assert checksum([-torch.zeros(1)]).tolist() != checksum([torch.zeros(1)]).tolist()


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"a": [0, 1, 2]}, []),
        ({"a": [0, 2], "b": [1]}, [1]),
        ({"b": [1], "a": [0, 2]}, [1]),
        ({"a": [0], "b": [1]}, [0, 1]),
        ({"a": [0, 3], "b": [1], "c": [2]}, [1, 2]),
        ({"a": [0, 3], "b": [1], "c": [2, 4]}, [0, 1, 2, 3, 4]),
    ],
)
def test_holders_of_the_rarer_version_are_outvoted(versions: dict, expected: list[int]) -> None:
    assert sorted(outvoted(versions)) == expected


# The sum of all bits as integers, and the sum of each multiplied by its position, from 1 on. 4096
# elements count as one. Positions of the next tensor start anew, after a factor of 1,000,003.
@pytest.mark.parametrize(
    ("tensors", "plain", "ordered"),
    [
        ([], 0, 0),
        ([torch.tensor([3, 4, -5])], 2, 3 + 2 * 4 - 3 * 5),
        ([torch.tensor([3, 4]).int(), torch.tensor([5]).int()], 12, 11 * 1_000_003 + 5),
        ([torch.full((4098,), 2).short()], 2 * 4098, 4096 * 2 + 2 * 2 + 3 * 2),
        ([torch.full((2, 4096), 200, dtype=torch.uint8)], 200 * 8192, 3 * 200 * 4096),
        ([torch.tensor([[1, 2], [3, 4]]).t()], 10, 1 + 2 * 3 + 3 * 2 + 4 * 4),
        ([torch.tensor(1.0, requires_grad=True)], 127 << 23, 127 << 23),
        ([torch.tensor([1.0, -0.0]).bfloat16()], (127 << 7) - (1 << 15), (127 << 7) - (1 << 16)),
        ([torch.tensor([2.0]).double()], 1 << 62, 1 << 62),
        ([torch.tensor([2.0 + 0j], dtype=torch.complex128)], 64, 8 * 64),  # bytes
    ],
)
def test_checksums_are_sums_of_bits(tensors: list[Tensor], plain: int, ordered: int) -> None:
    found = checksum(tensors)
    assert found.dtype == torch.int64 and found.tolist() == [plain, ordered]


@pytest.mark.parametrize(
    ("every", "kept", "replicated"),
    [(0, [], []), (1, [0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]), (3, [0, 3, 6], [1, 3, 6])],
)
def test_weights_are_compared_every_few_steps_and_replicas_after_the_first(
    every: int, kept: list[int], replicated: list[int]
) -> None:
    run: Any = SimpleNamespace(scheme=SimpleNamespace(block=SimpleNamespace(checksum_steps=every)))
    assert [step for step in range(7) if compares_copies(run, step)] == kept
    assert [step for step in range(7) if compares_replicas(run, step)] == replicated


def held(*values: float) -> list[Tensor]:
    return [torch.full((3,), value) for value in values]


@pytest.mark.parametrize(
    ("copies_of_rank", "differing"),
    [
        # two owners, whose weights are others
        (lambda rank: [(rank % 2, held(rank % 2)), (rank % 2, held(5, rank % 2))], []),
        (lambda rank: [(rank % 2, held(rank % 2)), (rank % 2, held(5, rank == 2))], [0, 2]),
        # one owner, and one rank that differs in each copy
        (lambda rank: [(0, held(rank == 3)), (0, held(rank == 1)), (0, held(7))], [1, 3]),
        (lambda rank: [(0, held(0, 1) if rank else held(1, 0))], [0]),
        (lambda rank: [], []),
    ],
)  # fmt: skip
def test_all_ranks_find_those_whose_weights_differ(
    copies_of_rank: Any, differing: list[int]
) -> None:
    world = World(2, 2)
    found = world.all(lambda rank: differing_ranks(rank.run, copies_of_rank(rank.number), 7))
    assert found == [differing] * 4


def test_a_changed_message_of_checksums_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some would refill their copies, and others would not."""
    checked: list[Any] = []
    monkeypatch.setattr(copies, "check_messages", checked.append)
    world = World(2, 2)
    votes = world.ranks[2].run.votes
    gather = votes.all_gather

    def garbled(received: Tensor) -> Tensor:
        received[40] ^= 1
        return received

    votes.all_gather = lambda *args, **how: gather(*args, **how).then(garbled)  # type: ignore

    def compare(rank: SimulatedRank) -> str:
        with pytest.raises(RuntimeError) as error:
            differing_ranks(rank.run, [(0, held(1)), (0, held(2))], 7)
        return str(error.value)

    said = (
        "quantized_comm: step 7: ranks have received different checksums of the weights that they "
        "keep, so a message was changed on its way. Look for faulty memory or a faulty network, "
        "and resume from the last checkpoint; quantized_comm.payload_checksum=true names sender "
        "and receiver of such a message"
    )
    assert world.all(compare) == [said] * 4
    assert {id(run) for run in checked} == {id(rank.run) for rank in world.ranks}


@pytest.mark.parametrize("differing", [[], [1, 3]])
def test_copies_that_differ_are_refilled_and_reported(
    differing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    run = Mock(state=SchemeState(resyncs=2), log=logged.append)
    cache = Mock()
    given = {(run, cache.comparable_weights(), 7): differing}
    monkeypatch.setattr(copies, "differing_ranks", lambda *found: given[found])
    compare_copies(run, cache, 7)
    assert cache.resync.call_count == bool(differing)
    assert run.state == SchemeState(resyncs=3 if differing else 2)
    assert logged == [
        "quantized_comm: step 7: the weights that rank(s) [1, 3] keep differ from those of the "
        "other holders; all are brought back exactly. If it happens again, look for faulty memory "
        "or a faulty network"
    ] * bool(differing)


def test_replicas_that_differ_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = object()
    replicas = [(0, held(1))]
    found: list[int] = []
    given = {(id(run), id(replicas), 7): found}
    monkeypatch.setattr(copies, "differing_ranks", lambda a, b, step: given[id(a), id(b), step])
    compare_replicas(run, replicas, 7)
    found += [1, 3]
    with pytest.raises(RuntimeError) as error:
        compare_replicas(run, replicas, 7)
    assert str(error.value) == (
        "quantized_comm: step 7: the weights of rank(s) [1, 3] differ from those of the other "
        "replicas, so these train models of their own. Begin with the same weights on all nodes "
        "(the same seed or checkpoint), write weights on all nodes alike, or look for faulty "
        "memory; then resume from the last checkpoint"
    )


def test_the_first_gradient_that_is_not_finite_is_named_once() -> None:
    noted = [("a", torch.tensor(True)), ("b", torch.tensor(False)), ("c", torch.tensor(False))]
    assert first_nonfinite(noted) == "b"
    assert first_nonfinite(noted) is None


def test_a_fallback_begins_with_the_next_step() -> None:
    run: Any = SimpleNamespace(
        state=SchemeState(), step=7, counted_steps=9, finite_flags=None, log=lambda message: None
    )
    settings = FallbackConfig(on_nonfinite="full_precision", steps=3)
    Fallback(run, settings, resync=lambda: None)._apply_policy(0, None)
    assert run.state.exact_until == 11 and run.state.nonfinite_steps == 1


@pytest.mark.parametrize(("lossless", "warned"), [(True, []), (False, ["weights"])])
def test_lossless_differences_of_a_first_step_may_be_short(
    lossless: bool, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that changes nothing sends nearly nothing, and nothing is wrong."""
    expected = {role: {"intra": 0.0, "inter": 1000.0} for role in ("weights", "gradients")}
    arrived = {"weights": {"inter": 499}, "gradients": {"inter": 501}}
    run = SimpleNamespace(
        comm_volume=lambda: SimpleNamespace(received=lambda *args, **how: expected),
        topology=SimpleNamespace(nodes=2, node_size=1),
        scheme=SimpleNamespace(lossless=lossless),
        traffic=SimpleNamespace(received=arrived),
    )
    front: Any = SimpleNamespace(
        run=run,
        has_few_ranks=False,
        requested_roles={"weights", "gradients"},
    )
    logged: list[str] = []
    monkeypatch.setattr(log, "log_rank0", logged.append)
    events: Any = SimpleNamespace(after_step=[], before_last_buckets=[])
    check_first_step(front, events, ["weights", "gradients"])
    (check,) = events.after_step
    check(True)  # skipped: the next one counts
    check(False)
    assert [role for role in expected for line in logged if f"bytes of {role} to" in line] == warned
    assert all("and 1000 or more were expected" in line for line in logged)
    assert events.after_step == []


def test_a_step_that_is_skipped_without_a_policy_changes_nothing() -> None:
    """As with a kill file alone: the loss scale of fp16 overflows."""
    run: Any = SimpleNamespace(
        state=SchemeState(),
        step=7,
        counted_steps=9,
        finite_flags=None,
        log=lambda message: None,
        is_full_precision=lambda step: False,
    )
    fallback = Fallback(run, FallbackConfig(on_nonfinite="skip"), resync=lambda: None)
    fallback.after_step(skipped=True)
    assert run.state == SchemeState()


def test_the_first_verdict_of_a_handshake_holds() -> None:
    """Else a rank that gives up a moment late would leave the others, which start without it."""
    store = PrefixStore("handshake", HashStore())
    started = {"node_size": 2, "warnings": []}
    assert handshake._decide(store, started) == started
    assert handshake._decide(store, {"error": "no answer", "given_up": True}) == started
