"""The codecs of a sharded module's weights on one hop, and the message that they make up.

Both are remembered: a gather costs no call per parameter but in the first one of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ds_quant.codec.bound import BoundCodec, full_precision
from ds_quant.comm.message import Message
from ds_quant.fsdp2.sharded_module import ShardedModule

if TYPE_CHECKING:
    from ds_quant.fsdp2.front import Front


class WeightCodecs:
    """The codecs of one hop; ``hop`` is the index of the hop in a parameter's route."""

    def __init__(self, front: Front, sharded: ShardedModule, *, hop: int) -> None:
        self._front = front
        self._sharded = sharded
        self._hop = hop
        self._step = -1
        self._bound_codecs: list[BoundCodec] = []
        self._messages: dict[bool, Message] = {}  # by whether the step is in full precision

    def of_step(
        self, plan: Callable[[Sequence[BoundCodec]], Message]
    ) -> tuple[list[BoundCodec], Message]:
        """Return the codecs of the current optimizer step, and their message.

        plan: makes the message of the codecs, once.
        """
        front, dtype = self._front, self._sharded.dtype
        full = front.is_full_precision(front.step)
        if self._step != front.step:
            self._step = front.step
            if full:
                self._bound_codecs = [full_precision(dtype) for _ in self._sharded.params]
            else:
                self._bound_codecs = self._quantized()
        if full not in self._messages:
            self._messages[full] = plan(self._bound_codecs)
        return self._bound_codecs, self._messages[full]

    def _quantized(self) -> list[BoundCodec]:
        front, dtype = self._front, self._sharded.dtype
        return [
            param.bound_codec(
                param.weight_codecs(dtype, rank=front.shards.rank)[self._hop], dtype, front.step
            )
            for param in self._sharded.params
        ]
