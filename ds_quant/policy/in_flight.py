"""Limits on the messages in flight at once.

The run and the prediction of its peak memory (memory.py) read the same limits here.
"""

from __future__ import annotations

import math

# Gradient buckets in flight on the CPU beside the current one: one between nodes, one inside.
BUCKETS_AHEAD = 2

# An exchange with the node shard is sent in chunks of an eighth of this rank's elements. Smaller
# chunks would cost a message's latency too often, larger ones too much memory.
CHUNKS = 8
LEAST_NUMEL = 1 << 18
MOST_NUMEL = 1 << 21
EXCHANGED_AT_ONCE = 16  # chunks in flight


def chunk_numel(numel: float) -> int:
    """Return the most elements of a chunk. numel: own elements of the whole exchange."""
    return min(max(math.ceil(numel / CHUNKS), LEAST_NUMEL), MOST_NUMEL)
