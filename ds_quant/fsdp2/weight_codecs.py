"""The codecs of a sharded module's weights on one hop, and the message that they make up.

Both are remembered: a gather costs no call per parameter but in the first one of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds_quant.codec.bound import BoundCodec, full_precision
from ds_quant.codec.codec import CastCodec
from ds_quant.comm.message import Message
from ds_quant.fsdp2.context import Context
from ds_quant.fsdp2.sharded_module import ShardedModule
from ds_quant.runtime.param import Param


class WeightCodecs:
    """The codecs of one hop; ``hop`` is the index of the hop in a parameter's route."""

    def __init__(self, context: Context, sharded: ShardedModule, *, hop: int) -> None:
        self._context = context
        self._sharded = sharded
        self._hop = hop
        self._version = (-1, -1)  # ``Context.weights_version`` of the codecs; none yet
        self._bound_codecs: list[BoundCodec] = []
        self.are_exact = False  # the codecs of the current step
        self._message: Message | None = None
        # By parameter: trained; and True if the step is in full precision.
        self._messages: dict[tuple[tuple[bool, ...], bool], Message] = {}

    def of_step(
        self, plan: Callable[[Sequence[BoundCodec]], Message]
    ) -> tuple[list[BoundCodec], Message]:
        """Return the codecs of the current optimizer step, and their message.

        plan: makes the message of the codecs, once.
        """
        if self._message is None or self._version != self._context.weights_version:
            self._version = self._context.weights_version
            self._message = self._bind(plan)
        return self._bound_codecs, self._message

    def _bind(self, plan: Callable[[Sequence[BoundCodec]], Message]) -> Message:
        """Bind the codecs to the current step, and return their message."""
        params = self._sharded.params
        run = self._context.run
        full = run.is_full_precision(run.step)
        if full:
            exact = full_precision(self._sharded.dtype)
            self._bound_codecs = [exact for _ in params]
        else:
            self._bound_codecs = [self._bound(param) for param in params]
        exact_codec = CastCodec(self._sharded.dtype)
        self.are_exact = all(bound.codec == exact_codec for bound in self._bound_codecs)
        key = tuple([param.trained for param in params]), full
        if key not in self._messages:
            self._messages[key] = plan(self._bound_codecs)
        return self._messages[key]

    def _bound(self, param: Param) -> BoundCodec:
        """Return the codec of a parameter on this hop, bound to this step."""
        level, dtype = self._sharded.level, self._sharded.dtype
        if self._hop == 0 and not param.trained and level.routes.keeps_shard:
            # The exchange between the nodes, which frozen weights take no part in: never used.
            return full_precision(dtype)
        hop_codecs = param.weight_codecs(dtype, rank=level.shards.rank)
        return param.bound_codec(hop_codecs[self._hop], dtype, self._context.run.step)
