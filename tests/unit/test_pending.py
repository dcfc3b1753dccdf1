"""A result is waited for once, whoever asks and how often."""

from __future__ import annotations

import gc
import weakref

import pytest

from ds_quant.comm.transport import Pending


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
