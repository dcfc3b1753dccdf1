"""The state of an engine after a load, in a warm-up, and with values that may be decoded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from ds_quant.comm.node_rows import ShardRows
from ds_quant.comm.transport import Pending
from ds_quant.runtime import log
from ds_quant.runtime.param import DECODED, EXACT
from ds_quant.runtime.step_events import StepEvents
from ds_quant.zero import checkpoint, fetch, optimizer_hooks, sharded_params
from ds_quant.zero.engine import AttachedEngine
from ds_quant.zero.node_messages import NodeMessages
from ds_quant.zero.replica import Replica
from tests.world import SimulatedRank, World

LEARNED = {"weights": {"bits": 4, "rounding": "nearest", "levels": "learned", "level_steps": [2]}}


def rank_of(scheme: str, *, stage: int = 2, step: int = 0, **block: Any) -> SimulatedRank:
    """The first rank of 2 x 2, after some steps, with two weights."""
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(64, 64)) for name in "ab"})
    world = World(2, 2, module=module, stage=stage, scheme=scheme, allow_full_replica=True, **block)
    world.engine.global_steps, world.engine.device = step, torch.device("cpu")
    return world.ranks[0]


# ---- the state of a checkpoint ----


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(log, "log_rank0", said.append)
    return said


def test_a_state_is_restored_whole(logged: list[str]) -> None:
    """And what the engine had learned of weights that the state does not name is forgotten."""
    first, second = (rank_of("qsdp", **LEARNED) for _ in range(2))
    a, _ = first.run.params
    a.levels = torch.linspace(-1, 1, 16)
    first.run.state.learned_at, first.run.state.exact_until = 7, 12
    fake_fetch, fake_replica = Mock(), Mock()
    a, b = second.run.params
    a.levels, b.levels = torch.zeros(16), torch.ones(16)
    attached = AttachedEngine(front=second, events=Mock(), fetch=fake_fetch, replica=fake_replica)
    checkpoint.restore(attached, checkpoint.dump(first.run))
    assert torch.equal(a.levels, torch.linspace(-1, 1, 16)) and b.levels is None
    assert (second.run.state.learned_at, second.run.state.exact_until) == (7, 12)
    fake_fetch.node_shard.resync.assert_called_once_with()
    fake_replica.after_load.assert_called_once_with()
    assert logged == []


def test_a_state_without_a_fallback_ends_full_precision() -> None:
    """It was saved where no vote sends steps in full precision."""
    run = rank_of("qsdp").run
    run.state.exact_until = 12
    assert StepEvents(run).load_state_dict({"step": 3}) == 3
    assert run.state.exact_until == 0


@pytest.mark.parametrize(
    ("saved", "said"),
    [("lossless_g4", None), ("lossless_w_g4", None), ("lossless_g3", "lossless_w_g3"),
     ("qsdp", "qsdp")],
)  # fmt: skip
def test_a_renamed_scheme_is_not_another_one(
    saved: str, said: str | None, logged: list[str]
) -> None:
    rank = rank_of("lossless_w_g4")
    attached = AttachedEngine(front=rank, events=Mock())
    checkpoint.restore(attached, checkpoint.dump(rank.run) | {"scheme": saved})
    ranks = "of 2 x 2 ranks as lossless_w_g4 on 2 x 2"
    wanted = [] if said is None else [f"quantized_comm: resuming {said} {ranks}"]
    assert [line.partition(";")[0] for line in logged] == wanted


# ---- the replica of ZeRO-1 and 2 ----


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Replica:
    """One whose gathers send nothing; ``posted``: step of each, and whether it is exact."""
    monkeypatch.setattr(optimizer_hooks, "require_replica", lambda _: None)
    monkeypatch.setattr(optimizer_hooks, "finish_background_save", lambda _: None)
    monkeypatch.setattr(optimizer_hooks, "refresh_replica", lambda _, gather: gather())
    made = object.__new__(Replica)
    made._optimizer, made._always_exact, made._has_reference = None, False, False
    made._writes, made.posted = Mock(written_here=lambda: []), []
    made._posts = lambda sent: made.posted.append((sent.step, sent.exact)) or iter(())
    return made


def serve(replica: Replica, rank: SimulatedRank) -> None:
    """Make it the replica of a rank."""
    replica.front, replica._run = rank, rank.run


@pytest.mark.parametrize(
    ("scheme", "warmup", "step", "decodes"),
    [
        ("qsdp", 0, 3, True),
        ("qsdp", 3, 3, True),  # the warm-up is over
        ("qsdp", 4, 3, False),
        ("qsdp", 0, 0, False),  # nothing was gathered yet
        ("sdp4bit", 0, 3, False),  # the next difference is taken from exact weights
    ],
)
@pytest.mark.parametrize("by", ["a load", "an export"])
def test_weights_are_decoded_again_where_the_last_step_has_decoded_them(
    replica: Replica, scheme: str, warmup: int, step: int, decodes: bool, by: str
) -> None:
    serve(replica, rank_of(scheme, step=step, warmup_steps=warmup))
    replica.holds_exact = False
    if by == "a load":
        replica.after_load()
        replica._writes.forget.assert_called_once_with()
    else:
        with replica.exact():
            assert replica.holds_exact and replica.posted.pop() == (step, True)
    assert replica.holds_exact != decodes
    assert replica.posted == [(step, False)] * decodes


@pytest.mark.parametrize("warmup", [0, 3, 9])
def test_an_export_in_the_warm_up_sends_nothing(replica: Replica, warmup: int) -> None:
    """Weights of step 3 are exact if it is one of the warm-up."""
    serve(replica, rank_of("qsdp", step=3, warmup_steps=warmup))
    replica._gather(3)
    assert replica.holds_exact == (warmup > 3)
    replica.posted.clear()
    replica.show_exact()
    assert replica.posted == [(3, True)] * (warmup <= 3)


# ---- which values may be decoded, under ZeRO-3 ----


EIGHT_BITS_INSIDE = {"weights": {"intra": {"bits": 8}}}


def gathered_weights_are_lossy(
    *, scheme: str, trained: bool = True, step: int = 5, **block: Any
) -> bool:
    """Return the answer of the node shard of 2 x 2 ranks for a gather of one parameter."""
    run = rank_of(scheme, stage=3, **block).run
    param = run.params[0]
    param.set_trained(trained)
    param.node_rows = ShardRows(
        numel=64, node_size=2, local=0, rows=torch.zeros(2, 16, dtype=torch.bfloat16)
    )
    (is_lossy,) = NodeMessages(run).plan([param], step).is_lossy
    return is_lossy


def test_weights_quantized_between_nodes_are_kept_out_of_exports() -> None:
    assert gathered_weights_are_lossy(scheme="sdp4bit")


def test_weights_quantized_inside_a_node_are_kept_out_of_exports() -> None:
    assert gathered_weights_are_lossy(scheme="lossless", **EIGHT_BITS_INSIDE)


def test_weights_that_no_hop_quantizes_are_exact() -> None:
    assert not gathered_weights_are_lossy(scheme="lossless")


def test_frozen_weights_are_quantized_inside_a_node_only() -> None:
    assert not gathered_weights_are_lossy(scheme="sdp4bit", trained=False)
    assert gathered_weights_are_lossy(scheme="sdp4bit", trained=False, **EIGHT_BITS_INSIDE)


def test_weights_of_the_warm_up_are_exact() -> None:
    assert not gathered_weights_are_lossy(scheme="sdp4bit", step=5, warmup_steps=6)
    assert gathered_weights_are_lossy(scheme="sdp4bit", step=6, warmup_steps=6)


def test_every_parameter_of_a_gather_is_marked_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was decoded before and is exact now."""
    filled: list[Any] = []
    monkeypatch.setattr(sharded_params, "fill", lambda tensors, values: filled.extend(values))
    params = [SimpleNamespace(tensor=None, gathered=before) for before in (EXACT, DECODED)]
    theirs = Mock()
    handle = fetch._FetchHandle([(params, [True, False], Pending(lambda: [1, 2]))], theirs)
    handle.wait()
    assert filled == [1, 2] and [param.gathered for param in params] == [DECODED, EXACT]
    theirs.wait.assert_called_once_with()
