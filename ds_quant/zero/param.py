"""All that is known of one parameter: its codecs, random streams and levels, what is kept of it.

Codecs are cached: only the step number changes between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_quant.codec.bound import BoundCodec, Rotation, full_precision
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.codec.levels import merge_levels, update_levels
from ds_quant.comm.message import ShardRows
from ds_quant.comm.reduction_plan import GradientSpec
from ds_quant.comm.transport import Communicator
from ds_quant.kernels.batch import OWN_SIGNS
from ds_quant.kernels.random_bits import Address, Role, key_of
from ds_quant.policy.route import Hop, Routes
from ds_quant.policy.scheme import Scheme

_SIGNS = 99  # the "hop" of the sign flips of a rotation


class HopCodec(NamedTuple):
    """A parameter on one hop: its codec, the key of its random bits (None where it
    takes none), whether the learned levels are the codec's, and whether differences are sent.
    """

    codec: Codec
    key: int | None
    learned: bool = False
    difference: bool = False


class GradientCodecs(NamedTuple):
    """A gradient on all its hops: a stream for each, and the rotation around them, whose sign flips
    differ by step. ``form``: the same without random bits.
    """

    hops: tuple[HopCodec, ...]
    spec: GradientSpec
    rotation: Rotation | None = None

    def bound_codecs(
        self, step: int, signed: int
    ) -> tuple[tuple[BoundCodec, ...], Rotation | None]:
        """One coding per hop and the rotation, in one step; ``signed``: that of the sign flips."""
        rotation = self.rotation
        if rotation is not None and rotation.signs is not None:
            rotation = Rotation(block=rotation.block, signs=rotation.signs._replace(step=signed))
        keys = [
            (codec, None if key is None else Address(key, step)) for codec, key, *_ in self.hops
        ]
        return tuple([BoundCodec(*key) for key in keys]), rotation


@cache
def full_precision_gradient(
    dtype: torch.dtype, hops: int, *, tight: bool = False
) -> GradientCodecs:
    """Return the streams of a gradient that is sent unchanged; ``tight``: as a small tensor."""
    codec = CastCodec(dtype, tight)
    return GradientCodecs(
        (HopCodec(codec, None),) * hops, GradientSpec((codec,) * hops, delivery=codec)
    )


@dataclass(kw_only=True, eq=False, slots=True)
class Param:
    """A parameter of the engine's module: its index in ``named_parameters()``, name and shape.

    trained: when the engine was built. Momentum and weight decay move it also once its
        ``requires_grad`` is turned off.
    packed: its values may be bit patterns, see ``scheme.is_packed``.
    needs_full_gradient, boundary: what Muon needs of it, see ``cost.ParamSpec``.
    tensor: the parameter itself; while it lives, its id names nothing else.
    levels: learned ones, (2^bits,) fp32, identical on all ranks; None as long as they are uniform.
    kept: its rows in the node shard, None if that does not serve it. stale: they are to be
        filled exactly before they are used.
    decoded: its gathered values are decoded ones, under ZeRO-3.
    """

    index: int
    name: str
    shape: torch.Size
    trained: bool
    tensor: Any
    routes: Routes
    packed: bool = False
    needs_full_gradient: bool = False
    boundary: float = 0.0
    levels: Tensor | None = None
    node_rows: ShardRows | None = None
    stale: bool = False
    decoded: bool = False
    _weights: dict[tuple, tuple[HopCodec | None, ...]] = field(default_factory=dict, repr=False)
    _gradients: dict[tuple, GradientCodecs] = field(default_factory=dict, repr=False)

    def is_quantized(self, dtype: torch.dtype) -> bool:
        """Whether the scheme quantizes its weights or gradients of this dtype."""
        how = {"packed": self.packed}
        return self.routes.scheme.skip_reason(self.name, self.shape, dtype, **how) is None

    def weight_codecs(
        self, dtype: torch.dtype, *, rank: int | None, full_world: bool = True
    ) -> tuple[HopCodec | None, ...]:
        """One stream per hop of a gather that encodes; None for full precision. Does not change
        between steps. rank=None: receive only, no random bits are drawn. ``whole``: see ``Routes``.
        """
        key = dtype, rank, full_world
        if key not in self._weights:
            quantized = self.is_quantized(dtype)
            how = {"quantized": quantized, "trained": self.trained, "full_world": full_world}
            hops = self.routes.weights(dtype=dtype, **how).hops
            self._weights[key] = tuple(
                [self._weight_stream(hop, rank) for hop in hops if not hop.forwards]
            )
        return self._weights[key]

    def bound_codec(self, stream: HopCodec | None, dtype: torch.dtype, step: int) -> BoundCodec:
        """Return the coding of a stream of weights for `step`, in full precision if it is None.

        ``step`` is the optimizer step whose forward uses them.
        """
        if stream is None:
            return full_precision(dtype)
        levels = self.levels if stream.learned else None
        address = None if stream.key is None else Address(stream.key, step)
        return BoundCodec(stream.codec, address, levels, stream.difference)

    def gradient_codecs(self, dtype: torch.dtype, *, rank: int, hops: int) -> GradientCodecs:
        """Return the codecs of a reduction over one or two hops. Does not change between steps."""
        key = dtype, rank, hops
        if key not in self._gradients:
            self._gradients[key] = self._gradient_streams(dtype, rank, hops)
        return self._gradients[key]

    def _weight_stream(self, hop: Hop, rank: int | None) -> HopCodec | None:
        if hop.codec is None:
            return None
        key = None if rank is None else self._key(Role.WEIGHTS, hop.codec, rank, int(hop.inner))
        return HopCodec(hop.codec, key, not hop.inner, hop.difference)

    def _gradient_streams(self, dtype: torch.dtype, rank: int, hops: int) -> GradientCodecs:
        route = self.routes.gradients(quantized=self.is_quantized(dtype), full_world=hops > 1)
        if route.is_full_precision:
            return full_precision_gradient(dtype, hops)
        rotation = route.rotation
        if route.flips:
            signs = Address(self._stream_key(Role.GRADIENTS, 0, _SIGNS), 0)
            rotation = Rotation(block=rotation.block, signs=signs)
        if route.flips == OWN_SIGNS:
            rotation = rotation.of(rank // self.routes.node_size if hops > 1 else rank)
        codecs = tuple([hop.codec for hop in route.hops])
        delivery = None if route.delivery is None else route.delivery.codec
        # Random bits of the last hop also serve the delivery, whose codec may need some alone.
        rounds = codecs if delivery is None else (*codecs[:-1], delivery)
        streams = [
            HopCodec(codec, self._key(Role.GRADIENTS, rounded, rank, place))
            for place, (codec, rounded) in enumerate(zip(codecs, rounds, strict=True))
        ]
        spec = GradientSpec(codecs, rotation.block if rotation else 0, route.flips, delivery)
        return GradientCodecs(tuple(streams), spec, rotation)

    def _key(self, role: Role, codec: Codec, rank: int, hop: int) -> int | None:
        """Key of the random bits that ``codec`` takes, None if it takes none."""
        rounding = codec.rounding if isinstance(codec, GroupCodec) else None
        if rounding == "nearest" or isinstance(codec, CastCodec):
            return None
        # QSDP: one shift per parameter and step, shared by all shards; all else differs by rank.
        return self._stream_key(role, 0 if rounding == "random_shift" else rank + 1, hop)

    def _stream_key(self, role: Role, stream: int, hop: int) -> int:
        """Key that is the same on all ranks whose ``stream`` is."""
        seed = self.routes.scheme.block.seed
        return key_of(seed=seed, role=role, parameter=self.index, rank=stream, hop=hop)


def learn(
    shards: Sequence[tuple[Param, Tensor]], communicator: Communicator, scheme: Scheme
) -> None:
    """Learn the levels of parameters from this rank's elements of each, the same on all ranks of
    ``link``.

    Until then a parameter has no table and its levels are uniform. Every rank moves its copy of
    each table over its own shard, then all take the mean of the tables, weighted by shard size
    and added in rank order.
    """
    codec, device = scheme.weights, shards[0][1].device
    how = {"group_size": codec.group_size, "rate": scheme.block.weights.level_rate}
    tables = [update_levels(codec.table(p.levels, device), v.float(), **how) for p, v in shards]
    counts = torch.tensor([float(values.numel()) for _, values in shards], device=device)
    own = torch.cat([torch.stack(tables), counts[:, None]], dim=1)  # (parameters, levels + 1) fp32
    payload = own.contiguous().view(torch.uint8).view(-1)
    received = communicator.all_gather(payload, role="weights").wait()
    rows = received.view(torch.float32).view(communicator.size, *own.shape)
    for place, (param, _) in enumerate(shards):
        param.levels = merge_levels(rows[:, place, :-1], rows[:, place, -1])
