"""A result is waited for once, whoever asks and how often."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_quant.comm.transport import Fabric, Pending


def test_a_result_is_made_once_and_only_when_it_is_asked_for() -> None:
    calls: list[str] = []

    def finish() -> list[int]:
        calls.append("finish")
        return [1, 2]

    pending = Pending(finish)
    changed = pending.then(lambda found: calls.append("change") or sum(found))
    assert calls == []
    assert changed.wait() == changed.wait() == 3
    assert calls == ["finish", "change"]
    assert pending.wait() is pending.wait()
    assert calls == ["finish", "change"]


def test_a_failure_is_raised_again() -> None:
    def fail() -> None:
        raise RuntimeError("rank 1 does not answer")

    pending = Pending(fail)
    for waiting in (pending, pending.then(str), pending):
        with pytest.raises(RuntimeError, match="rank 1"):
            waiting.wait()


class Buffer:
    """Something large."""


def test_what_a_result_was_made_of_is_freed_with_the_wait() -> None:
    def message() -> tuple[Pending[int], weakref.ref[Buffer]]:
        buffer = Buffer()
        return Pending(lambda: buffer).then(lambda found: 7), weakref.ref(buffer)

    pending, buffer = message()
    gc.collect()
    assert buffer() is not None
    assert pending.wait() == 7
    gc.collect()
    assert buffer() is None


def test_gathers_over_two_levels_go_on_in_the_order_in_which_they_were_posted() -> None:
    """DeepSpeed waits for them in another order on every rank."""
    sent: list[str] = []

    def level(name: str) -> SimpleNamespace:
        def all_gather(payload: torch.Tensor, role: str) -> Pending[torch.Tensor]:
            sent.append(f"{name} {role}")
            return Pending(lambda: payload.repeat(2))

        return SimpleNamespace(size=2, all_gather=all_gather)

    whole: Any = SimpleNamespace(
        size=4, rank=0, encoding=None, decoding=None, empty=None, backend="auto"
    )
    fabric = Fabric(whole, level("inside"), level("between"))
    first, second = (fabric.all_gather(torch.zeros(1), role=role) for role in ("a", "b"))
    assert second.wait().shape == first.wait().shape == (2, 2, 1)
    assert sent == ["between a", "between b", "inside a", "inside b"]
