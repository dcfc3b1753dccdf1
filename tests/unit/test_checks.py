"""Memory that a scheme takes, and messages that a rank cannot use, end a run on all ranks."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ds_quant.comm.checksum import MessageErrors, describe_changed
from ds_quant.config.schema import parse_block
from ds_quant.runtime.memory_check import Free, require_memory
from ds_quant.runtime.message_check import check_messages, checked_messages

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
