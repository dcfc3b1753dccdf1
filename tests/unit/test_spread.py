"""The order in which chunks are posted, awaited and given up; no process group."""

from __future__ import annotations

import pytest

from ds_quant.comm.transport import Pending
from ds_quant.zero.chunked_exchange import Chunk, ChunkedExchange


def chunks(events: list[str], count: int, fails: int = -1) -> list[Chunk]:
    """Chunk i holds the parameters 2 i and 2 i + 1."""

    def post(i: int) -> Pending[None]:
        events.append(f"post {i}")

        def decode() -> None:
            events.append(f"decode {i}")
            if i == fails:
                raise RuntimeError("rank 1 does not answer")

        return Pending(decode)

    return [((2 * i, 2 * i + 1), lambda i=i: post(i)) for i in range(count)]


def test_chunks_are_finished_in_order_and_only_as_far_as_needed() -> None:
    spread, events = ChunkedExchange(), []
    spread.begin(chunks(events, 4))
    assert events == [f"post {i}" for i in range(4)]
    events.clear()
    spread.finish([2])
    assert events == ["decode 0", "decode 1"]
    assert [i for i in range(8) if spread.awaits([i])] == [4, 5, 6, 7]
    spread.finish([0, 3])
    assert events == ["decode 0", "decode 1"]
    spread.finish()
    spread.finish()
    assert events == [f"decode {i}" for i in range(4)]


def test_sixteen_travel_and_the_next_is_posted_when_the_first_has_arrived() -> None:
    spread, events = ChunkedExchange(), []
    spread.begin(chunks(events, 18))
    assert events == [f"post {i}" for i in range(16)]
    spread.finish([0])
    assert events[16:] == ["decode 0", "post 16"]
    spread.finish([34])
    assert events[-1] == "decode 17" and events.count("post 17") == 1


def test_after_a_failure_nothing_is_awaited_again() -> None:
    spread, events = ChunkedExchange(), []
    spread.begin(chunks(events, 18, fails=1))
    with pytest.raises(RuntimeError, match="rank 1 does not answer"):
        spread.finish()
    seen = list(events)
    with pytest.raises(RuntimeError, match="has failed before"):
        spread.finish([4])
    spread.finish([0])  # has arrived
    spread.close()
    assert events == seen


def test_closing_awaits_what_was_posted_and_posts_no_more() -> None:
    spread, events = ChunkedExchange(), []
    spread.begin(chunks(events, 18))
    spread.close()
    assert events[16:] == [f"decode {i}" for i in range(16)]
    spread.close()
    assert len(events) == 32


def test_an_exchange_of_nothing_is_finished() -> None:
    spread = ChunkedExchange()
    spread.begin([])
    assert not spread.awaits(range(9))
    spread.finish()
