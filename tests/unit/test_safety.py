"""Comparisons and votes of all ranks, without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from ds_quant.config.schema import FallbackConfig
from ds_quant.runtime import handshake, log
from ds_quant.runtime.copies import checksum, outvoted
from ds_quant.runtime.fallback import Fallback, first_nonfinite
from ds_quant.runtime.run import SchemeState
from ds_quant.zero.first_step import check_first_step


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
    [({"a": [0, 1, 2]}, []), ({"a": [0, 2], "b": [1]}, [1]), ({"a": [0], "b": [1]}, [0, 1])],
)
def test_holders_of_the_rarer_version_are_outvoted(versions: dict, expected: list[int]) -> None:
    assert sorted(outvoted(versions)) == expected


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
