"""A plan under DDP: its memory, and torch's own 16-bit hook beside it.

[Note: DDP in a plan] Every rank holds weights, gradients, states, and DDP's buckets, a second copy
of the gradients. Gradients have the dtype of the weights. All micro-steps of an optimizer step but
the last one run inside ``no_sync()``, so gradients are sent once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from ds_quant.ddp.gradients import RUN_NUMEL
from ds_quant.policy import memory
from ds_quant.policy.model_volume import ModelVolume
from ds_quant.tools.forecast import Plan, Row, Sent, row_of

_HOOK_ITEMSIZE = 2  # bytes of bf16
_HOOK = "ddp with bf16_compress_hook"


@dataclass(frozen=True, kw_only=True)
class DdpPlan(Plan):
    """A run to predict under DDP. See [Note: DDP in a plan]."""

    stock: ClassVar[str] = "DDP as shipped"
    assumptions: ClassVar[tuple[str, ...]] = (
        "all micro-steps but the last one run inside no_sync(); with the block under ZeRO-1",
        "(--stage 1) weights are exact, too, and optimizer states take less memory.",
    )
    more_gpus: ClassVar[str] = "take ZeRO or FSDP2, which split the model"

    @property
    def front(self) -> str:
        """DDP has no stages."""
        return "DDP"

    @property
    def facts(self) -> dict[str, Any]:
        """The front as JSON types."""
        return {"front": "ddp"}

    @cached_property
    def stock_memory(self) -> float:
        """Bytes per GPU with Adam and without the plugin and activations."""
        model, itemsize = self.model, self.dtype.itemsize
        states = 2 * itemsize  # Adam's have the dtype of the weights
        return itemsize * model.numel + (states + 2 * itemsize) * model.trained

    @property
    def sizes(self) -> memory.Sizes:
        """The sizes that decide how much memory messages take."""
        return replace(super().sizes, bucket=RUN_NUMEL, under_way=3 if self.has_two_levels else 2)

    def other_rows(self, full_precision: ModelVolume) -> list[Row]:
        """Return the row of torch's hook that sends fp32 gradients in 16 bits."""
        if self.dtype.itemsize <= _HOOK_ITEMSIZE:
            return []
        nbytes = 2.0 * _HOOK_ITEMSIZE * self.micro_steps
        row = row_of(
            _HOOK,
            self,
            full_precision,
            sent=[Sent(nbytes, nbytes if self.has_two_levels else 0.0)],
            gpu_memory=self.stock_memory,
            host_memory=0.0,
            note=self.too_large(self.stock_memory),
        )
        return [row]

    def with_small_buckets(self) -> Plan:
        """Return the plan: memory of messages does not depend on DDP's buckets."""
        return self
