"""An exchange of weights in chunks, which continues during the next forward.

[Note: first needed first] The exchange after an optimizer step is cut into *chunks* of parameters,
in the order in which the last step gathered them. Some chunks are posted at once, the others as
these arrive. A gather waits for the chunks of its own parameters. Chunks complete in posting order,
because messages on one link arrive in that order; so the order of posts does not depend on the
order of the forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

from ds_quant.comm.transport import Pending
from ds_quant.policy.in_flight import EXCHANGED_AT_ONCE

# Parameters and a function that posts their exchange.
Chunk = tuple[Collection[Hashable], Callable[[], Pending[Any]]]


class ChunkedExchange:
    """The chunks of one exchange: see [Note: first needed first]."""

    def __init__(self) -> None:
        self._ahead: deque[Chunk] = deque()  # to be posted
        # Messages in memory, of at most EXCHANGED_AT_ONCE chunks: each until it was waited for.
        self._posted: deque[tuple[Collection[Hashable], Pending[Any]]] = deque()
        self._missing: set[Hashable] = set()  # parameters of all chunks that have not arrived

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """Post the first chunks. The exchange before must be finished."""
        assert not self._missing
        self._ahead.extend(chunks)
        for params, _ in self._ahead:
            self._missing.update(params)
        for _ in range(EXCHANGED_AT_ONCE):
            self._post_next()

    def awaits(self, params: Iterable[Hashable]) -> bool:
        """Return True if one of these parameters has not arrived.

        Equal on all ranks: it depends on the chunks that were waited for, not on the network.
        """
        return not self._missing.isdisjoint(params)

    def finish(self, params: Iterable[Hashable] | None = None) -> None:
        """Wait until these parameters have arrived, or all if None.

        Raises:
            RuntimeError: a rank does not answer; also at every later call.
        """
        while self._missing if params is None else self.awaits(params):
            if not self._posted:
                raise RuntimeError(
                    "quantized_comm: an exchange of weights has failed before: resume from the "
                    "last checkpoint"
                )
            arriving, pending = self._posted.popleft()
            try:
                pending.wait()
            except BaseException:
                self._ahead.clear()
                self._posted.clear()  # so that nothing waits for a lost rank twice
                raise
            self._missing.difference_update(arriving)
            self._post_next()

    def close(self) -> None:
        """Wait for the posted chunks, since others may use the same link later. Drop the others."""
        self._ahead.clear()
        self._missing = {param for params, _ in self._posted for param in params}
        self.finish()

    def _post_next(self) -> None:
        if self._ahead:
            params, post = self._ahead.popleft()
            self._posted.append((params, post()))
