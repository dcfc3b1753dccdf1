"""What an engine's scheme remembers between steps. Pure data; ``learn`` fills in the levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_quant.codec import GroupCodec
from ds_quant.levels import initial_levels, merge_levels, update_levels
from ds_quant.link import Link


@dataclass
class SchemeState:
    """Learned levels by parameter index, (2^bits,) fp32, identical on all ranks.

    ``learned_at`` is the last optimizer step at which the schedule was consulted, ``resyncs``
    counts refills after checksums that differed.

    Of ``fallback``: steps below ``exact_until`` travel in full precision, and all while ``killed``;
    ``nonfinite_steps`` and ``exact_steps`` count what it has found and caused.
    """

    levels: dict[int, Tensor] = field(default_factory=dict)
    learned_at: int = 0
    resyncs: int = 0
    exact_until: int = 0
    killed: bool = False
    nonfinite_steps: int = 0
    exact_steps: int = 0

    def due(self, schedule: Sequence[int], step: int) -> bool:
        """True once per entry of ``schedule`` that lies behind ``step``; remembers ``step``."""
        due = any(self.learned_at < entry <= step for entry in schedule)
        self.learned_at = max(self.learned_at, step)
        return due


def learn(
    state: SchemeState,
    shards: Sequence[tuple[int, Tensor]],
    *,
    codec: GroupCodec,
    rate: float,
    link: Link,
) -> None:
    """Learn the levels of all parameters anew (QSDP's learned levels), the same on all ranks.

    Until then a parameter has no table and its levels are uniform. Every rank moves its copy of
    each table over its own shard, then all take the mean of the tables, weighted by shard size and
    added in rank order.

    Args:
        shards: (parameter index, this rank's elements, 1-D, possibly empty), the same indices in
            the same order on all ranks.
    """
    if not shards:
        return
    device = shards[0][1].device
    tables, counts = [], []
    for index, values in shards:
        table = state.levels.get(index)
        table = initial_levels(codec.bits).to(device) if table is None else table
        tables.append(update_levels(table, values.float(), group_size=codec.group_size, rate=rate))
        counts.append(float(values.numel()))
    own = torch.cat(
        [torch.stack(tables), torch.tensor(counts, device=device).unsqueeze(1)], dim=1
    )  # (parameters, levels + 1) fp32
    payload = own.contiguous().view(torch.uint8).view(-1)
    received = link.all_gather(payload, role="weights").wait()
    rows = received.view(torch.float32).view(link.size, *own.shape)
    for place, (index, _) in enumerate(shards):
        state.levels[index] = merge_levels(rows[:, place, :-1], rows[:, place, -1])
