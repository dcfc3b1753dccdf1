"""A plan under FSDP2: its memory, and HSDP beside it.

[Note: FSDP2 in a plan] Every block of the model is wrapped and gathered for forward and again for
backward. Shards are fp32 with mixed precision, which takes as many bytes as the 16-bit weights,
gradients, masters and states of ZeRO-3. Of whole blocks a GPU holds ``HELD_BLOCKS`` at once: two of
weights, the message that the second one is copied from, one of gradients, and their message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from ds_quant.kernels.wire import ceil_div
from ds_quant.policy import memory
from ds_quant.policy.autotune import WORTH_IT
from ds_quant.policy.cost import CommVolume
from ds_quant.tools.forecast import Plan, Row, row_of

HELD_BLOCKS = 5
_HSDP = "fsdp2 hsdp as shipped"


@dataclass(frozen=True, kw_only=True)
class Fsdp2Plan(Plan):
    """A run to predict under FSDP2. See [Note: FSDP2 in a plan]."""

    stock: ClassVar[str] = "FSDP2 as shipped"
    assumptions: ClassVar[tuple[str, ...]] = (
        "fully_shard wraps every block; the last backward is declared",
        "(set_is_last_backward), HSDP reduces in it only (set_requires_all_reduce).",
    )
    more_gpus: ClassVar[str] = "take more GPUs or CPUOffloadPolicy, which the block refuses"

    @property
    def front(self) -> str:
        """FSDP2 has no stages."""
        return "FSDP2"

    @property
    def facts(self) -> dict[str, Any]:
        """The front as JSON types."""
        return {"front": "fsdp2"}

    @property
    def gathers(self) -> float:
        """Gathers of the weights in a micro-step: for forward and for backward."""
        return 2.0

    @property
    def block_numel(self) -> int:
        """Elements that are gathered and reduced together."""
        return max(self.model.largest, ceil_div(self.model.numel, self.model.layers))

    @cached_property
    def stock_memory(self) -> float:
        """Bytes per GPU with Adam and without the plugin and activations."""
        return self._memory(self.ranks)

    @property
    def sizes(self) -> memory.Sizes:
        """The sizes that decide how much memory messages take."""
        numel = self.block_numel
        return replace(
            super().sizes, largest=numel, bucket=numel, prefetch=numel, exchanged_at_once=True
        )

    def other_rows(self, full_precision: CommVolume) -> list[Row]:
        """Return the row of HSDP: sharded inside the nodes, replicated between them.

        Gradients are all-reduced between nodes once per optimizer step; sums of the micro-steps
        before it wait on the rank that owns them.
        """
        cluster, model, itemsize = self.cluster, self.model, self.dtype.itemsize
        if cluster.nodes == 1 or cluster.node_size == 1:
            return []
        trained = full_precision.trained
        gpu_memory = self._memory(cluster.node_size)
        if self.micro_steps > 1:
            gpu_memory += itemsize * model.trained / cluster.node_size
        row = row_of(
            _HSDP,
            self,
            full_precision,
            inter_bytes=2 * itemsize * trained,
            intra_bytes=(self.gathers + trained) * itemsize * self.micro_steps,
            gpu_memory=gpu_memory,
            host_memory=0.0,
            more_exchanges=1,
            note=self.too_large(gpu_memory),
        )
        return [row]

    def preferred(self, rows: list[Row]) -> str:
        """Return HSDP, which needs no plugin, unless the advised scheme is clearly faster."""
        steps = {row.scheme: row.step_serial for row in rows}
        to_beat = steps.get(self.advised, min(steps.values()))
        hsdp = steps.get(_HSDP, float("inf"))
        return _HSDP if hsdp < WORTH_IT * to_beat else self.advised

    def reason(self, taken: Row, faster: list[Row]) -> str:
        """Return the reason why HSDP is preferred to faster schemes."""
        if taken.scheme != _HSDP:
            return super().reason(taken, faster)
        names = " and ".join(row.scheme for row in faster)
        return f"{names}: less than 5 % faster than HSDP, which needs no plugin"

    def with_small_buckets(self) -> Plan:
        """Return the plan: messages are as large as the blocks that are wrapped."""
        return self

    def _memory(self, shards: int) -> float:
        """Return bytes per GPU, of a model that is split into ``shards``."""
        model, itemsize = self.model, self.dtype.itemsize
        states = (12 if itemsize == 2 else 8) + itemsize  # and gradients
        sharded = itemsize * model.numel + states * model.trained
        return sharded / shards + HELD_BLOCKS * itemsize * self.block_numel
