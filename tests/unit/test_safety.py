"""Comparisons and votes of all ranks, without ranks."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore

from ds_quant.comm.checksum import MessageErrors, describe_changed
from ds_quant.config.schema import FallbackConfig, parse_block
from ds_quant.runtime import handshake, log
from ds_quant.runtime.copies import checksum, outvoted
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
from ds_quant.runtime.memory_check import Free, require_memory
from ds_quant.runtime.message_check import check_messages, checked_messages
from ds_quant.config.schema import FallbackConfig
from ds_quant.runtime import handshake, log, step_events
from ds_quant.runtime import start as start_module
from ds_quant.runtime.copies import checksum, outvoted
from ds_quant.runtime.fallback import (
    Fallback,
    Finding,
    fallback_of,
    first_nonfinite,
    kill_file,
)
from ds_quant.runtime.run import SchemeState
from ds_quant.runtime.step_events import StepEvents
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


# ---- memory that a scheme takes ----

SMALLER = 'use more ranks per node, set less, or a scheme without a node shard such as "qsdp"'
ON_HOST = (
    "quantized_comm: the node shard takes 8 GB of host memory in every node, but {} GB are free in "
    f"the fullest one; {SMALLER}"
)
ON_DEVICE = (
    "quantized_comm: the node shard takes 2 GB on every rank, but {} GB of memory are free on the "
    f"fullest device; {SMALLER}"
)
WAITING = (
    "quantized_comm: gradients that wait for the last micro-step take 0.5 GB on every rank{}, but "
    "{} GB of memory are free on the fullest device; set quantized_comm.gradients.cross: "
    '"micro_step", which holds none and sends them in every micro-step, or use more ranks per node'
)
BESIDE = " beside 2 GB of node shard"
MAY = "may run out of memory: {} are needed, {} GB of memory are free on the fullest device"
MB = 10**6


def checked_memory(
    free: Free, *, on_host: bool, holds: bool, memory: float = 2.0, sums: float = 0.5
) -> tuple[list[str], list[list[int]]]:
    """Check the memory of 1e9 parameters on 4 ranks per node, with messages of 0.25 GB.

    free: of the fullest rank; this one has more. Returns the notices and the votes.
    """
    votes = []

    def least(numbers: torch.Tensor) -> torch.Tensor:
        votes.append(numbers.tolist())
        return torch.tensor(free)

    volume = SimpleNamespace(memory=memory, partial_sums=sums, numel=10**9)
    run: Any = SimpleNamespace(
        device=torch.device("cpu"),
        topology=SimpleNamespace(node_size=4),
        votes=SimpleNamespace(least=least),
        comm_volume=lambda: volume,
        peak_bytes=lambda of: 0.25e9 if of is volume else None,
        notices=[],
    )
    more = Free(on_device=10**12, on_host=10**13)
    require_memory(run, more, on_host=on_host, holds_gradients=holds, way_out="set less")
    return run.notices, votes


@pytest.mark.parametrize(
    ("on_host", "holds", "free", "error"),
    [
        (True, False, Free(10**10, 8000 * MB - 1), ON_HOST.format(8)),
        (True, False, Free(10**10, 5 * MB), ON_HOST.format(0.005)),
        (True, True, Free(500 * MB - 1, 8000 * MB), WAITING.format("", 0.5)),
        (False, False, Free(1500 * MB, 0), ON_DEVICE.format(1.5)),
        (False, False, Free(2000 * MB - 1, 0), ON_DEVICE.format(2)),
        (False, True, Free(2250 * MB, 0), WAITING.format(BESIDE, 2.25)),
        (False, True, Free(2500 * MB - 1, 0), WAITING.format(BESIDE, 2.5)),
    ],
)
def test_what_a_scheme_keeps_must_fit_on_the_fullest_rank(
    on_host: bool, holds: bool, free: Free, error: str
) -> None:
    """2 GB of node shard per rank, 4 x 2 GB in host memory, and 0.5 GB of waiting gradients."""
    with pytest.raises(RuntimeError) as caught:
        checked_memory(free, on_host=on_host, holds=holds)
    assert str(caught.value) == error


SHARD, SUMS, MESSAGES = "2 GB of node shard", "0.5 GB of waiting gradients", "0.25 GB of messages"


@pytest.mark.parametrize(
    ("on_host", "holds", "needed", "parts"),
    [
        (False, True, 2750 * MB, f"{SHARD} and {SUMS} and {MESSAGES}"),
        (False, False, 2250 * MB, f"{SHARD} and {MESSAGES}"),
        (True, True, 750 * MB, f"{SUMS} and {MESSAGES}"),
        (True, False, 250 * MB, MESSAGES),
    ],
)
def test_memory_that_is_short_with_messages_is_warned_of(
    on_host: bool, holds: bool, needed: int, parts: str
) -> None:
    how = {"on_host": on_host, "holds": holds}
    assert checked_memory(Free(needed, 8000 * MB), **how) == ([], [[10**12, 10**13]])
    notices, _ = checked_memory(Free(needed - 1, 8000 * MB), **how)
    assert notices == [MAY.format(parts, f"{needed / 1e9:.3g}")]


@pytest.mark.parametrize(
    ("holds", "free", "parts"),
    [
        (False, 2000 * MB, f"{SHARD} and {MESSAGES}"),
        (True, 2500 * MB, f"{SHARD} and {SUMS} and {MESSAGES}"),
    ],
)
def test_what_just_fits_without_messages_is_not_refused(holds: bool, free: int, parts: str) -> None:
    notices, _ = checked_memory(Free(free, 0), on_host=False, holds=holds)
    assert notices == [MAY.format(parts, f"{free / 1e9:.3g}")]


def test_ranks_that_keep_nothing_do_not_vote() -> None:
    nothing = Free(0, 0)
    assert checked_memory(nothing, on_host=False, holds=False, memory=0.0) == ([], [])
    assert checked_memory(nothing, on_host=False, holds=True, memory=0.0, sums=0.0) == ([], [])
    only_sums = checked_memory(Free(10**9, 0), on_host=False, holds=True, memory=0.0)
    assert only_sums == ([], [[10**12, 10**13]])


def test_ranks_vote_on_memory_on_their_device() -> None:
    votes: list[torch.Tensor] = []
    volume = SimpleNamespace(memory=2.0, partial_sums=0.5, numel=10)
    run: Any = SimpleNamespace(
        device=torch.device("meta"),
        votes=SimpleNamespace(least=lambda numbers: votes.append(numbers) or torch.tensor([99, 0])),
        comm_volume=lambda: volume,
        peak_bytes=lambda of: 0,
        notices=[],
    )
    require_memory(run, Free(99, 0), on_host=False, holds_gradients=False, way_out="")
    (vote,) = votes
    assert vote.device == run.device and vote.shape == (2,)


# ---- messages that a rank cannot use ----


class Voting:
    """Rank 5 of ranks 4, 5 and 6. lowest: its index is the minimum of the votes, 3: of none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lowest: int, **block: Any) -> None:
        self.votes: list[list[int]] = []
        self.lowest, self.broadcasts = lowest, Mock()
        scheme = parse_block({"scheme": "qsdp", **block}).to_scheme()
        flat = SimpleNamespace(
            rank=1, size=3, ranks=[4, 5, 6], process_group="group", least=self.least
        )
        self.run: Any = SimpleNamespace(
            votes=flat,
            device=torch.device("cpu"),
            scheme=scheme,
            counted_steps=7,
            message_errors=MessageErrors(),
        )
        monkeypatch.setattr(torch.distributed, "broadcast_object_list", self.broadcasts)

    def least(self, numbers: torch.Tensor) -> torch.Tensor:
        self.votes.append(numbers.tolist())
        return torch.tensor([self.lowest])

    def note(self, *changed: bool) -> None:
        """Note gradients from ranks 4, 5 and 6."""
        outcomes = torch.tensor(changed).view(-1, 1)
        self.run.message_errors.note("gradients", [4, 5, 6], outcomes, describe_changed)


ENDS = "; look for faulty memory or a faulty network on the hosts of these two"
RESUME = ", and resume from a checkpoint that was saved before this step"
CHANGED = "gradients from rank 6 were changed on their way to rank 5: their checksum is wrong"


@pytest.mark.parametrize(
    ("block", "why", "code"),
    [
        ({}, "", ""),
        ({"payload_checksum": True}, " because quantized_comm.payload_checksum=true", ""),
        ({"scheme": "lossless"}, "", " and for code that writes weights outside the optimizer"),
    ],
)
def test_a_message_that_this_rank_cannot_use_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, block: dict[str, Any], why: str, code: str
) -> None:
    voting = Voting(monkeypatch, 1, **block)
    voting.note(False, False, True)
    with pytest.raises(RuntimeError) as caught:
        check_messages(voting.run)
    assert str(caught.value) == (
        f"quantized_comm: step 7: {CHANGED}. Training ends{why}{ENDS}{code}{RESUME}"
    )
    (call,) = voting.broadcasts.call_args_list
    (sent,) = call.args[0]
    assert (sent.sender, call.kwargs) == (6, {"src": 5, "group": "group"})
    assert voting.votes == [[1]]


def test_the_message_of_the_lowest_rank_is_told_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    voting = Voting(monkeypatch, 0)
    told = MessageErrors()
    told.note("weights", [6], torch.tensor([[True]]), describe_changed)

    def receive(errors: list[Any], src: int, group: object) -> None:
        assert (errors, src, group) == ([None], 4, "group")
        errors[:] = [told.first()]

    voting.broadcasts.side_effect = receive
    with pytest.raises(
        RuntimeError, match="^quantized_comm: step 7: weights from rank 6 were .* 4:"
    ):
        check_messages(voting.run)
    assert voting.votes == [[3]]


def test_outcomes_of_good_messages_are_freed_when_they_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    voting = Voting(monkeypatch, 3)
    outcomes = torch.zeros(3, 1, dtype=torch.bool)
    freed = weakref.ref(outcomes)
    voting.run.message_errors.note("gradients", [4, 5, 6], outcomes, describe_changed)
    del outcomes
    with checked_messages(voting.run):
        assert (voting.votes, freed()) == ([[3]], None)
    assert not voting.broadcasts.called


def test_ranks_vote_on_messages_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the outcomes are in host memory."""
    voting, devices = Voting(monkeypatch, 3), list[torch.device]()
    voting.run.device = torch.device("meta")
    voting.run.votes.least = lambda numbers: devices.append(numbers.device) or torch.tensor([3])
    voting.note(False, False, False)
    check_messages(voting.run)
    assert devices == [voting.run.device]


def test_weights_are_not_read_after_a_message_that_a_rank_cannot_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    voting = Voting(monkeypatch, 1)
    voting.note(True, False, False)
    with pytest.raises(RuntimeError, match="gradients from rank 4"), checked_messages(voting.run):
        raise AssertionError("the context is entered")
# ---- the vote of a step ----


class Voting:
    """The run of rank 6 among ranks 4, 6 and 8, at step 7, which a training loop counts as 9.

    others: the least numbers of the other ranks: by default none found NaN or saw a kill file.
    """

    rank, size, ranks, process_group = 1, 3, [4, 6, 8], "the group"

    def __init__(self) -> None:
        self.state, self.step, self.counted_steps = SchemeState(), 7, 9
        self.finite_flags: list[tuple[str, Any]] | None = None
        self.device, self.votes, self.others = torch.device("cpu"), self, [6, 3]
        self.logged: list[str] = []
        self.voted: list[list[int]] = []
        self.notices: list[str] = []
        self.log = self.logged.append

    def is_full_precision(self, step: int) -> bool:
        return self.state.killed or step < self.state.exact_until

    def least(self, numbers: torch.Tensor) -> torch.Tensor:
        self.voted.append(numbers.tolist())
        return torch.minimum(numbers, torch.tensor(self.others))


def voter(policy: str = "full_precision", **how: Any) -> tuple[Any, Fallback, Mock]:
    """Return a run, its fallback for three steps, and the calls of ``resync``."""
    run, resync = Voting(), Mock()
    settings = FallbackConfig(on_nonfinite=policy, steps=3)
    return run, Fallback(run, settings, resync, **how), resync


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kill file that is watched and is not there."""
    path = tmp_path / "stop"
    monkeypatch.setenv("DS_QUANT_KILL_FILE", f" {path}\n")
    return path


@pytest.mark.parametrize(
    ("value", "path"), [(None, None), ("", None), ("  ", None), (" /a/b ", Path("/a/b"))]
)
def test_a_kill_file_is_watched_if_it_is_named(
    value: str | None, path: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DS_QUANT_KILL_FILE", raising=False)
    if value is not None:
        monkeypatch.setenv("DS_QUANT_KILL_FILE", value)
    assert kill_file() == path


@pytest.mark.parametrize(
    ("finding", "is_there", "voted"),
    [
        # A rank without a finding gives 2 x 3, a rank without the file 3.
        (None, False, [6, 3]),
        (None, True, [6, 1]),
        # Those that know the origin come first.
        (Finding("w", is_origin=True), False, [1, 3]),
        (Finding("w", is_origin=False), True, [3 + 1, 1]),
    ],
)
def test_a_rank_votes_with_its_index(
    finding: Finding | None, is_there: bool, voted: list[int], file: Path
) -> None:
    if is_there:
        file.touch()
    run, fallback, _ = voter(find=lambda: finding)
    assert (fallback.has_voted, fallback.found_nonfinite) == (False, False)
    assert fallback.vote() is fallback.found_nonfinite is (finding is not None)
    assert run.voted == [voted] and fallback.has_voted is True
    assert run.state.killed is is_there


def test_the_flags_of_a_run_are_read_and_freed() -> None:
    run, fallback, _ = voter()
    assert fallback.vote() is False
    run.finite_flags = [("a", torch.tensor(True)), ("b", torch.tensor(False))]
    assert fallback.vote() is True
    assert run.voted == [[6, 3], [1, 3]] and run.finite_flags == []
    assert fallback.vote() is False


@pytest.mark.parametrize("theirs", [2, 3 + 2])
def test_full_precision_follows_what_another_rank_has_found(theirs: int) -> None:
    run, fallback, _ = voter()
    run.others = [theirs, 3]
    assert fallback.vote() is True
    said = (
        "quantized_comm: step 9: gradients hold NaN or Inf; the next 3 steps travel in full "
        "precision (logged once, ds_quant.report counts)"
    )
    assert (run.state.nonfinite_steps, run.state.exact_until) == (1, 7 + 1 + 3)
    fallback.after_step(skipped=False)
    run.step, run.counted_steps = 8, 10
    assert fallback.vote() is True
    assert (run.state.nonfinite_steps, run.state.exact_until) == (2, 8 + 1 + 3)
    assert run.logged == [said]
    # Noted before: the policy has followed.
    assert fallback.vote(is_noted=True) is True
    assert run.state.nonfinite_steps == 2
    run.others = [6, 3]
    assert fallback.vote() is False and fallback.found_nonfinite is False
    assert run.state.nonfinite_steps == 2


RAISED = (
    "quantized_comm: step 9: NaN or Inf in the gradient of {}. Training ends because "
    'quantized_comm.fallback.on_nonfinite="raise"; resume from the last checkpoint, or set it to '
    '"skip" or "full_precision"'
)


@pytest.mark.parametrize(
    ("theirs", "own", "finder", "sent"),
    [
        (6, Finding("own", is_origin=True), 6, "own"),
        (6, Finding("own", is_origin=False), 6, "own"),
        (0, None, 4, None),
        (3 + 2, None, 8, None),
        (0, Finding("own", is_origin=True), 4, "own"),
    ],
)
def test_the_policy_raise_names_the_gradient_of_the_first_finder(
    theirs: int, own: Finding | None, finder: int, sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, fallback, _ = voter("raise", find=lambda: own)
    run.others = [theirs, 3]

    def broadcast(names: list[str | None], *, src: int, group: object) -> None:
        assert (names, src, group) == ([sent], finder, "the group")
        names[0] = names[0] if finder == 6 else "theirs"

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    with pytest.raises(FloatingPointError) as raised:
        fallback.vote()
    name = "own" if finder == 6 else "theirs"
    assert str(raised.value) == RAISED.format(f"{name}, on rank {finder}")
    assert run.state.nonfinite_steps == 1 and run.logged == []


def test_a_kill_file_on_another_rank_switches_until_it_is_gone(file: Path) -> None:
    run, fallback, _ = voter("skip")
    run.others = [6, 2]
    for _ in range(2):
        assert fallback.vote() is False
        assert run.state.killed is True
    run.counted_steps, run.others = 12, [6, 3]
    for _ in range(2):
        fallback.vote()
        assert run.state.killed is False
    assert run.logged == [
        "quantized_comm: step 9: DS_QUANT_KILL_FILE names a file that exists on rank 8: full "
        "precision from the next step on, as long as it does",
        "quantized_comm: step 12: the file of DS_QUANT_KILL_FILE is gone on all ranks: quantized "
        "again",
    ]


@pytest.mark.parametrize("saw", [False, True])
def test_a_rank_that_cannot_look_for_the_kill_file_repeats_its_vote(
    saw: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "log_here", said.append)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 6)
    if saw:
        file.touch()
    run, fallback, _ = voter("skip")
    fallback.vote()

    def fails(path: Path) -> bool:
        raise OSError("Stale file handle")

    monkeypatch.setattr(Path, "exists", fails)
    fallback.vote()
    fallback.vote()
    assert run.voted == [[6, 1 if saw else 3]] * 3
    assert said == [
        "quantized_comm: rank 6 cannot look for the file of DS_QUANT_KILL_FILE: Stale file "
        "handle; until it can, its last vote stands (logged once)"
    ]


@pytest.mark.parametrize(
    ("until", "killed", "exact"),
    [(0, False, [0, 0]), (7, False, [0, 0]), (8, False, [1, 1]), (9, False, [1, 2]),
     (0, True, [1, 2])],
)  # fmt: skip
def test_a_step_in_full_precision_is_counted_once(
    until: int, killed: bool, exact: list[int], file: Path
) -> None:
    if killed:
        file.touch()
    run, fallback, _ = voter()
    run.state.exact_until, run.state.killed = until, killed
    counted = []
    for _ in range(2):
        fallback.vote()
        fallback.vote()  # on other gradients of the same step
        fallback.after_step(skipped=False)
        counted.append(run.state.exact_steps)
        run.step += 1
    assert counted == exact


@pytest.mark.parametrize(
    ("found", "until", "skipped", "ends_at", "resyncs"),
    [
        # Taken: 3 steps follow step 7.
        (True, 0, False, 7 + 1 + 3, 0),
        (False, 0, False, 0, 0),
        # Repeated as the first of 3.
        (True, 0, True, 7 + 3, 1),
        (True, 8, True, 7 + 3, 0),  # the weights were sent in full precision
    ],
)
def test_a_step_that_is_skipped_is_the_first_of_those_in_full_precision(
    found: bool, until: int, skipped: bool, ends_at: int, resyncs: int
) -> None:
    run, fallback, resync = voter(find=lambda: Finding("w", True) if found else None)
    run.state.exact_until = until
    fallback.vote()
    fallback.after_step(skipped=skipped)
    assert (run.state.exact_until, run.state.nonfinite_steps) == (ends_at, int(found))
    assert resync.call_count == resyncs


def test_steps_that_deepspeed_skips_itself_count_as_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run, fallback, resync = voter()
    for count in (1, 2):
        if count == 2:  # the first one was skipped before a vote
            fallback.vote()
        fallback.after_step(skipped=True)
        assert (run.state.exact_until, run.state.nonfinite_steps) == (7 + 3, count)
    resync.assert_called_once_with()  # the second one was sent in full precision
    _, fallback, _ = voter("raise")
    fallback.vote()
    with pytest.raises(FloatingPointError) as raised:
        fallback.after_step(skipped=True)
    assert str(raised.value) == RAISED.format("a parameter that DeepSpeed reduces itself")


def test_a_kill_file_that_comes_in_a_skipped_step_refills_the_weights(file: Path) -> None:
    run, fallback, resync = voter("skip")
    file.touch()
    fallback.vote()
    assert resync.call_count == 0 and run.state.killed
    fallback.after_step(skipped=True)
    resync.assert_called_once_with()
    assert run.state == SchemeState(killed=True)


@pytest.mark.parametrize(
    ("policy", "watches", "votes"), [("skip", False, None), ("raise", False, 0), ("skip", True, 1)]
)
def test_there_is_a_vote_where_something_is_watched(
    policy: str, watches: bool, votes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DS_QUANT_KILL_FILE", raising=False)
    if watches:
        monkeypatch.setenv("DS_QUANT_KILL_FILE", str(tmp_path))
    run, finds, resync = Voting(), Mock(return_value=None), Mock()
    block = SimpleNamespace(fallback=FallbackConfig(on_nonfinite=policy, steps=2))
    run.scheme = SimpleNamespace(block=block)
    made = fallback_of(run, resync, finds)
    assert run.notices == (["DS_QUANT_KILL_FILE watched"] if watches else [])
    assert len(run.voted) == finds.call_count == (votes or 0)
    assert (made is None) == (votes is None)
    if made is not None:
        assert made.has_voted is False and run.state.killed is watches
        made.vote()
        assert finds.call_count == len(run.voted) == votes + 1
        run.state.killed = True
        made.after_step(skipped=policy == "skip")
        assert resync.call_count == 0


# ---- the votes and metrics of a front ----


def events_of(
    monkeypatch: pytest.MonkeyPatch,
    *,
    rank: int = 0,
    file: str | None = "metrics.jsonl",
    interval: int = 10,
) -> tuple[Any, StepEvents]:
    """Return the events of a run that neither votes nor writes, and notes all calls in order."""
    noted = Mock()
    noted.fallback.has_voted = False
    noted.fallback_of.return_value = noted.fallback
    noted.telemetry_of.return_value = noted.telemetry
    noted.run.scheme.block.metrics = SimpleNamespace(file=file, interval=interval)
    monkeypatch.setattr(step_events, "fallback_of", noted.fallback_of)
    monkeypatch.setattr(step_events, "StepTelemetry", noted.telemetry_of)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    return noted, StepEvents(noted.run, noted.find)


WRITES = [("metrics.jsonl", 10, 0, True), ("metrics.jsonl", 10, 1, False),
          ("metrics.jsonl", 0, 0, False), (None, 10, 0, False)]  # fmt: skip


@pytest.mark.parametrize(("file", "interval", "rank", "writes"), WRITES)
@pytest.mark.parametrize("trains", [False, True])
def test_votes_and_metrics_begin_where_they_are_asked_for(
    file: str | None, interval: int, rank: int, writes: bool, trains: bool, monkeypatch
) -> None:
    noted, events = events_of(monkeypatch, rank=rank, file=file, interval=interval)
    events.begin(noted.resync if trains else None)
    wanted = [call.fallback_of(noted.run, noted.resync, noted.find)] if trains else []
    wanted.append(call.run.begin_step())
    if writes:
        wanted += [
            call.telemetry_of(noted.run, noted.run.scheme.block.metrics),
            call.telemetry.arm(),
        ]
    assert noted.mock_calls == wanted
    noted.reset_mock()
    events.before_step(is_noted=True)
    assert noted.mock_calls == [call.fallback.vote(is_noted=True)] * trains
    noted.reset_mock()
    events.after_step()
    wanted = [call.fallback.after_step(skipped=False)] * trains + [call.run.begin_step()]
    assert noted.mock_calls == wanted + [call.telemetry.after_step()] * writes
    noted.reset_mock()
    events.rearm()
    assert noted.mock_calls == [call.run.begin_step()] + [call.telemetry.arm()] * writes


def test_nothing_happens_before_the_begin(monkeypatch) -> None:
    noted, events = events_of(monkeypatch)
    events.before_step()
    events.gradients_changed()
    events.after_step()
    events.rearm()
    assert noted.mock_calls == [call.run.begin_step()] * 2


def test_gradients_are_voted_on_once_until_they_change(monkeypatch) -> None:
    noted, events = events_of(monkeypatch)
    events.begin(noted.resync)
    events.before_step()
    noted.fallback.has_voted = True
    events.before_step()
    assert noted.fallback.vote.mock_calls == [call(is_noted=False)]
    events.gradients_changed()
    assert noted.fallback.has_voted is False
    events.before_step()
    assert noted.fallback.vote.call_count == 2


@pytest.mark.parametrize(
    ("begins", "flags", "watches"), [(True, [], True), (True, None, False), (False, [], False)]
)
def test_gradients_that_nothing_looks_at_are_told(
    begins: bool, flags: list | None, watches: bool, monkeypatch
) -> None:
    """As with a kill file alone, or a model that is only evaluated."""
    noted, events = events_of(monkeypatch)
    noted.run.finite_flags = flags
    if begins:
        events.begin(noted.resync)
    if watches:
        assert events.watched_gradients() is noted.fallback
        return
    with pytest.raises(RuntimeError) as raised:
        events.watched_gradients()
    assert str(raised.value) == (
        'quantized_comm.fallback.on_nonfinite="skip": nothing looks at the gradients: allowed for '
        'front.found_nonfinite(): "full_precision", "raise"'
    )


def test_the_state_of_a_front_holds_the_end_of_full_precision_where_it_votes(monkeypatch) -> None:
    noted, events = events_of(monkeypatch)
    noted.run.state.exact_until, noted.run.finite_flags = 12, None
    assert events.state_dict(5) == {"step": 5}
    noted.run.finite_flags = []
    assert events.state_dict(5) == {"step": 5, "exact_until": 12}
    assert events.load_state_dict({"step": 5, "exact_until": 14}) == 5
    assert noted.run.state.exact_until == 14
    assert events.load_state_dict({"step": 6}) == 6
    assert noted.run.state.exact_until == 0


# ---- the begin of a run under FSDP2 and DDP ----


@pytest.mark.parametrize(("world", "kind"), [(1, "cuda"), (2, "cpu"), (2, "cuda"), (3, "cpu")])
def test_a_run_begins_its_votes_and_compiles_its_kernels(
    world: int, kind: str, monkeypatch
) -> None:
    noted, notices = Mock(), list[str]()
    run: Any = SimpleNamespace(
        topology=SimpleNamespace(world=world),
        notices=notices,
        device=torch.device(kind),
        levels=["a level"],
    )
    for name in ("message_kinds", "warm_up"):
        monkeypatch.setattr(start_module, name, getattr(noted, name))
    noted.message_kinds.return_value = "kinds"
    start_module.start(run, noted.events, resync=noted.resync)
    if world == 1:
        assert noted.mock_calls == []
        assert notices == ["single rank: nothing to communicate"]
        return
    compiles = [call.message_kinds(run, ["a level"]), call.warm_up(run, "kinds")]
    assert noted.mock_calls == [call.events.begin(noted.resync)] + compiles * (kind == "cuda")
    assert notices == []
