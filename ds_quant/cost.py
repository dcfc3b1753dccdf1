"""Bytes of a step by formula, from the same codecs that do the work. May import: scheme, layout,
codec, rng.

[Note: bytes per parameter] All figures are volumes: what would enter one rank from the others if
there were infinitely many ranks. A rank of W really receives (W - 1) / W of them, a node of N
nodes (N - 1) / N, if each byte enters once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ds_quant.codec import CastCodec, GroupCodec
from ds_quant.layout import ceil_div
from ds_quant.rng import Role
from ds_quant.scheme import Scheme


class Cargo(NamedTuple):
    """A parameter as the formula sees it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True, kw_only=True)
class Bill:
    """Volumes in bytes per parameter. See [Note: bytes per parameter].

    weights: one gather of all weights. gradients: one reduction of all gradients (direct).
    full_precision_share: part of weights + gradients bytes that no quantizer touches.
    kept: why parameters are not quantized, reason -> number of tensors.
    """

    numel: int
    weights: float
    gradients: float
    full_precision_share: float
    kept: dict[str, int]

    def step_bytes(self, stage: int, *, micro_steps: int = 1) -> float:
        """Bytes per parameter and optimizer step: architecture's table of what crosses the wire.

        ZeRO-3 gathers twice and reduces once per micro-step; ZeRO-2 reduces per micro-step and
        ZeRO-1 once per step, both gather the updated weights once.
        """
        if stage == 3:
            return micro_steps * (2 * self.weights + self.gradients)
        return self.weights + self.gradients * (micro_steps if stage == 2 else 1)


def bill(
    scheme: Scheme,
    stage: int,
    cargo: Iterable[Cargo],
    *,
    ranks: int,
    gradient_dtype: torch.dtype,
    shipped_gradients: bool = False,
) -> Bill:
    """Add up the wire bytes of every parameter under ``scheme``, scales and padding included.

    ``shipped_gradients``: gradients take DeepSpeed's own exact path, an all-reduce.
    """
    numel, weights, gradients, plain = 0, 0, 0, 0
    kept: dict[str, int] = {}
    for item in cargo:
        count = torch.Size(item.shape).numel()
        if stage < 3 and not item.trainable:
            continue
        numel += count
        reason = scheme.skip_reason(item.name, item.shape, item.dtype)
        if reason is not None:
            kept[reason] = kept.get(reason, 0) + 1
        for role, dtype in ((Role.WEIGHTS, item.dtype), (Role.GRADIENTS, gradient_dtype)):
            if role is Role.GRADIENTS and not item.trainable:
                continue
            shards = ranks if stage == 3 else 1
            codec = scheme.codec_for(role, item.name, item.shape, dtype)
            size = shards * codec.wire_bytes(ceil_div(count, shards))
            if role is Role.GRADIENTS and shipped_gradients:
                codec, size = CastCodec(dtype), 2 * count * dtype.itemsize
            weights += size if role is Role.WEIGHTS else 0
            gradients += size if role is Role.GRADIENTS else 0
            plain += 0 if isinstance(codec, GroupCodec) else size
    total = max(1, numel)
    return Bill(
        numel=numel,
        weights=weights / total,
        gradients=gradients / total,
        full_precision_share=plain / max(1, weights + gradients),
        kept=kept,
    )


def shipped_bytes(stage: int, dtype: torch.dtype, *, micro_steps: int = 1) -> float:
    """The same volume for DeepSpeed as shipped, which all-reduces gradients under ZeRO-1 and 2."""
    if stage == 3:
        return 3.0 * dtype.itemsize * micro_steps
    return dtype.itemsize * (1.0 + 2.0 * (micro_steps if stage == 2 else 1))
