"""Codec and random-stream key of every parameter, cached.

Remembered, because thousands of parameters ask in every step: only the step is filled in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ds_quant.codec.bound import Coding, Rotation, exactly
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.comm.owners import delivery_codec
from ds_quant.kernels.random_bits import Address, Role, key_of
from ds_quant.policy.scheme import Scheme

_SIGNS = 99  # the "hop" of the sign flips of a rotation


@dataclass(frozen=True, kw_only=True)
class Param:
    """A parameter of the engine's module: its index in ``named_parameters()``, name and shape.

    trained: when the engine was built. Momentum and weight decay move it also once its
    ``requires_grad`` is turned off.
    """

    index: int
    name: str
    shape: torch.Size
    trained: bool


class Stream(NamedTuple):
    """A codec and the key of its random bits; None where it takes none."""

    codec: Codec
    key: int | None

    def address(self, step: int) -> Address | None:
        """Random-bit address for `step`; None for deterministic codecs."""
        return None if self.key is None else Address(self.key, step)


class GradientStreams(NamedTuple):
    """One stream per hop, and the rotation around the whole reduction, with sign flips that
    differ by step if ``signs`` names them.
    """

    hops: list[Stream]
    rotation: Rotation | None
    signs: int | None

    def codings(self, step: int, signed: int) -> tuple[tuple[Coding, ...], Rotation | None]:
        """One coding per hop and the rotation, in one step; ``signed``: that of the sign flips."""
        rotation = self.rotation
        if rotation is not None and self.signs is not None:
            signs, backend = Address(self.signs, signed), rotation.backend
            rotation = Rotation(block=rotation.block, signs=signs, backend=backend)
        return tuple([Coding(hop.codec, hop.address(step)) for hop in self.hops]), rotation


def codings_of(
    streams: GradientStreams | None,
    dtype: torch.dtype,
    *,
    hops: int,
    step: int,
    signed: int | None = None,
) -> tuple[tuple[Coding, ...], Rotation | None]:
    """Return the coding of a gradient on each hop for `step`, and the rotation around all hops.

    ``signed``: the step of its sign flips, if it is another one.
    """
    if streams is None:
        return (exactly(dtype),) * hops, None
    return streams.codings(step, step if signed is None else signed)


def by_hop(inner: Codec, outer: Codec, *, hops: int, one_node: bool) -> list[Codec]:
    """Assign codecs to hops: ``inner`` inside nodes, ``outer`` between them."""
    if hops > 1:
        return [inner, outer]
    return [inner if one_node else outer]


class Streams:
    """The streams of one scheme; None for what is sent in full precision."""

    def __init__(self, scheme: Scheme, *, one_node: bool) -> None:
        self._scheme, self._one_node = scheme, one_node
        self._weights: dict[tuple, Stream | None] = {}
        self._gradients: dict[tuple, GradientStreams | None] = {}

    def of_weights(
        self, tracked: Param, dtype: torch.dtype, *, rank: int | None, intra: bool
    ) -> Stream | None:
        """Stream of a gather. rank=None: receive only, no random bits are drawn."""
        key = tracked.index, dtype, rank, intra
        if key not in self._weights:
            choose = self._scheme.intra_codec_for if intra else self._scheme.codec_for
            codec = choose(Role.WEIGHTS, tracked.name, tracked.shape, dtype)
            exact = isinstance(codec, CastCodec)
            self._weights[key] = (
                None if exact else self._stream(Role.WEIGHTS, tracked, codec, rank, hop=int(intra))
            )
        return self._weights[key]

    def of_gradient(
        self, tracked: Param, dtype: torch.dtype, *, rank: int, hops: int
    ) -> GradientStreams | None:
        """Streams of a reduction over one or two hops."""
        key = tracked.index, dtype, rank, hops
        if key not in self._gradients:
            self._gradients[key] = self._of_gradient(tracked, dtype, rank, hops)
        return self._gradients[key]

    def _of_gradient(
        self, tracked: Param, dtype: torch.dtype, rank: int, hops: int
    ) -> GradientStreams | None:
        scheme, facts = self._scheme, (Role.GRADIENTS, tracked.name, tracked.shape, dtype)
        outer = inner = scheme.codec_for(*facts)
        if isinstance(outer, CastCodec):
            return None
        if scheme.gradients_intra is not None:
            inner = scheme.intra_codec_for(*facts)
        rotation, signs = scheme.gradient_rotation, None
        if rotation is not None and scheme.rotation_signs:
            # The same on all ranks: sums are taken of rotated values.
            signs = self._key(Role.GRADIENTS, tracked, hop=_SIGNS)
        codecs = by_hop(inner, outer, hops=hops, one_node=self._one_node)
        streams = [
            self._stream(Role.GRADIENTS, tracked, codec, rank, hop=hop)
            for hop, codec in enumerate(codecs)
        ]
        return GradientStreams(streams, rotation, signs)

    def _stream(
        self, role: Role, tracked: Param, codec: Codec, rank: int | None, *, hop: int
    ) -> Stream:
        rounding = None
        if isinstance(codec, GroupCodec):  # sums may be rounded once more, on their way to owners
            rounding = delivery_codec(codec).rounding
        if rank is None or isinstance(codec, CastCodec) or rounding == "nearest":
            return Stream(codec, None)
        # QSDP: one shift per parameter and step, shared by all shards; all else differs by rank.
        stream = 0 if rounding == "random_shift" else rank + 1
        return Stream(codec, self._key(role, tracked, rank=stream, hop=hop))

    def _key(self, role: Role, tracked: Param, *, rank: int = 0, hop: int) -> int:
        return key_of(
            seed=self._scheme.seed, role=role, parameter=tracked.index, rank=rank, hop=hop
        )
