"""Updated weights that are on their way into the node shard while the next forward computes.

[Note: first needed first] The exchange after an optimizer step is cut into chunks of parameters, in
the order in which the last step gathered them. They are posted at once, and each is waited for when
a parameter of it is gathered. Chunks are finished in the order of their posting, whichever is asked
for: over one link they arrive in that order, and a forward that takes another way than the last
one changes nothing of what the ranks post.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

_IN_FLIGHT = 16  # chunks; bounds the memory of messages, the others are posted as these arrive


class Chunk(NamedTuple):
    """Parameters by index, and what posts their exchange; that returns what waits and decodes."""

    indices: Collection[int]
    post: Callable[[], Callable[[], None]]


class Spread:
    """The chunks of one exchange."""

    def __init__(self) -> None:
        self._ahead: deque[Chunk] = deque()
        self._posted: deque[tuple[Collection[int], Callable[[], None]]] = deque()
        self._missing: set[int] = set()

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """Post the first chunks; the exchange before must be finished."""
        assert not self._missing
        self._ahead.extend(chunks)
        self._missing.update(index for chunk in self._ahead for index in chunk.indices)
        for _ in range(_IN_FLIGHT):
            self._post_next()

    def misses(self, indices: Iterable[int]) -> bool:
        """Whether a parameter of these is still to arrive. Equal on all ranks: it tells what was
        finished here, not what the network has brought.
        """
        return not self._missing.isdisjoint(indices)

    def finish(self, indices: Iterable[int] | None = None) -> None:
        """Wait until these parameters have arrived, or all if None.

        Raises:
            RuntimeError: a rank does not answer; also at every later call.
        """
        while self._missing if indices is None else self.misses(indices):
            if not self._posted:
                raise RuntimeError(
                    "quantized_comm: an exchange of weights has failed before: resume from the "
                    "last checkpoint"
                )
            arrived, decode = self._posted.popleft()
            try:
                decode()
            except BaseException:
                self._ahead.clear()
                self._posted.clear()  # nobody waits for a lost rank twice
                raise
            self._missing.difference_update(arrived)
            self._post_next()

    def close(self) -> None:
        """Wait for what was posted, since others may use the same link later; post no more."""
        self._ahead.clear()
        self._missing = {index for arriving, _ in self._posted for index in arriving}
        self.finish()

    def _post_next(self) -> None:
        if self._ahead:
            chunk = self._ahead.popleft()
            self._posted.append((chunk.indices, chunk.post()))
