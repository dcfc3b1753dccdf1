"""The chunks of an exchange: where it is cut, and when each is posted, awaited and given up."""

from __future__ import annotations

import pytest

from ds_quant.comm.node_rows import chunk_ranges
from ds_quant.comm.transport import Pending
from ds_quant.policy.in_flight import LEAST_NUMEL, MOST_NUMEL, chunk_numel
from ds_quant.zero.chunked_exchange import Chunk, ChunkedExchange

# ---- where an exchange is cut ----


def test_a_chunk_ends_before_the_tensor_that_would_exceed_the_limit() -> None:
    assert chunk_ranges([3, 2, 4, 1, 5], most_numel=5) == [range(2), range(2, 4), range(4, 5)]


def test_a_tensor_above_the_limit_is_a_chunk_of_its_own() -> None:
    assert chunk_ranges([9, 1, 9], most_numel=5) == [range(1), range(1, 2), range(2, 3)]


def test_tensors_without_elements_join_the_chunk_before_them() -> None:
    assert chunk_ranges([5, 0, 0], most_numel=5) == [range(3)]


def test_an_exchange_of_nothing_has_no_chunks() -> None:
    assert chunk_ranges([], most_numel=5) == []


@pytest.mark.parametrize(
    ("numel", "expected"),
    [
        (8 * 1_000_000, 1_000_000),
        (8 * 1_000_000 + 1, 1_000_001),  # eight chunks, not nine
        (100, LEAST_NUMEL),
        (1 << 32, MOST_NUMEL),
    ],
)
def test_a_chunk_is_an_eighth_of_the_exchange_within_limits(numel: int, expected: int) -> None:
    assert chunk_numel(numel) == expected


# ---- when a chunk is posted ----


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
