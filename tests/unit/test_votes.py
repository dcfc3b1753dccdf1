"""The votes of a step, and the events of a front around it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from ds_quant.config.schema import FallbackConfig
from ds_quant.runtime import log, step_events
from ds_quant.runtime import start as start_module
from ds_quant.runtime.fallback import (
    Fallback,
    Finding,
    fallback_of,
    kill_file,
)
from ds_quant.runtime.run import SchemeState
from ds_quant.runtime.step_events import StepEvents

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
    file: str | None,
    interval: int,
    rank: int,
    writes: bool,
    trains: bool,
    monkeypatch: pytest.MonkeyPatch,
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


def test_nothing_happens_before_the_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, events = events_of(monkeypatch)
    events.before_step()
    events.gradients_changed()
    events.after_step()
    events.rearm()
    assert noted.mock_calls == [call.run.begin_step()] * 2


def test_gradients_are_voted_on_once_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
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
    begins: bool, flags: list | None, watches: bool, monkeypatch: pytest.MonkeyPatch
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


def test_the_state_of_a_front_holds_the_end_of_full_precision_where_it_votes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    world: int, kind: str, monkeypatch: pytest.MonkeyPatch
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
