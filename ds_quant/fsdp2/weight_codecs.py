"""The codecs of a sharded module's weights on one hop, and the message that they make up.

Both are remembered: a gather costs no call per parameter but in the first one of a step, which
binds the codecs to the random bits of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ds_quant.codec.bound import BoundCodec
from ds_quant.codec.codec import CastCodec
from ds_quant.comm.message import Message
from ds_quant.fsdp2.context import Context
from ds_quant.fsdp2.sharded_module import ShardedModule
from ds_quant.runtime.param import HopCodec, Param


@dataclass(frozen=True)
class _HopCodecs:
    """The codecs of a hop in all steps that train the same parameters.

    by_param: codecs without random bits; None: full precision.
    """

    by_param: Sequence[HopCodec | None]
    message: Message
    are_exact: bool


class WeightCodecs:
    """The codecs of one hop; ``hop`` is the index of the hop in a parameter's route."""

    def __init__(self, context: Context, sharded: ShardedModule, *, hop: int) -> None:
        self._context = context
        self._sharded = sharded
        self._hop = hop
        self._version = (-1, -1)  # ``Context.weights_version`` of the codecs; none yet
        self._bound_codecs: list[BoundCodec] = []
        self._current: _HopCodecs | None = None
        # By parameter: trained; and True if the step is in full precision.
        self._known: dict[tuple[tuple[bool, ...], bool], _HopCodecs] = {}

    @property
    def are_exact(self) -> bool:
        """True if all codecs of the current step send weights as they are."""
        return self._current is not None and self._current.are_exact

    def of_step(
        self, plan: Callable[[Sequence[BoundCodec]], Message]
    ) -> tuple[list[BoundCodec], Message]:
        """Return the codecs of the current optimizer step, and their message.

        plan: makes the message of the codecs, once.
        """
        current = self._current
        if current is None or self._version != self._context.weights_version:
            self._version = self._context.weights_version
            self._current = current = self._bind(plan)
        return self._bound_codecs, current.message

    def _bind(self, plan: Callable[[Sequence[BoundCodec]], Message]) -> _HopCodecs:
        """Bind the codecs to the current step."""
        params = self._sharded.params
        dtype = self._sharded.dtype
        step = self._context.run.step
        is_full_precision = self._context.run.is_full_precision(step)
        key = tuple([param.trained for param in params]), is_full_precision
        known = self._known.get(key)
        if known is not None:
            by_param = known.by_param
        elif is_full_precision:
            by_param = [None] * len(params)
        else:
            by_param = [self._hop_codec(param, dtype) for param in params]
        self._bound_codecs = [
            param.bound_codec(hop_codec, dtype, step)
            for param, hop_codec in zip(params, by_param, strict=True)
        ]
        if known is None:
            exact = CastCodec(dtype)
            are_exact = all(bound.codec == exact for bound in self._bound_codecs)
            known = _HopCodecs(by_param, plan(self._bound_codecs), are_exact)
            self._known[key] = known
        return known

    def _hop_codec(self, param: Param, dtype: torch.dtype) -> HopCodec | None:
        """Return the codec of a parameter on this hop."""
        level = self._sharded.level
        if self._hop == 0 and not param.trained and level.routes.keeps_shard:
            # The exchange between the nodes, which frozen weights take no part in: never used.
            return None
        return param.weight_codecs(dtype, rank=level.shards.rank)[self._hop]
