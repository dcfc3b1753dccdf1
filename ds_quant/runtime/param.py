"""One parameter of the engine's module: its codecs, random bits, learned levels and node rows.

[Note: codecs of a parameter] A *hop codec* is a parameter on one hop: a codec and the key of its
random bits. It stays the same in all steps, so it is made once. A *bound codec* is a hop codec in
one step: it adds the step to the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_quant.codec.bound import BoundCodec, Rotation, full_precision
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.codec.levels import merge_levels, update_levels
from ds_quant.comm.node_rows import ShardRows
from ds_quant.comm.reduction_plan import GradientSpec
from ds_quant.comm.small_tensors import SMALL_NUMEL
from ds_quant.comm.transport import Communicator
from ds_quant.kernels.batch import OWN_SIGNS
from ds_quant.kernels.random_bits import Address, Role, key_of
from ds_quant.policy.route import Hop, Route, Routes
from ds_quant.policy.scheme import Scheme

# Hop numbers in random keys: the sign flips of a rotation, and sums on their way back.
_SIGNS = 99
_RETURNED, _RETURNED_SIGNS = 97, 98


# ---- codecs ----


class HopCodec(NamedTuple):
    """A parameter on one hop: see [Note: codecs of a parameter].

    key: of the random bits; None if the codec takes none.
    learned: the codec uses the learned levels of the parameter.
    difference: differences from the receivers' values are sent.
    """

    codec: Codec
    key: int | None
    learned: bool = False
    difference: bool = False


class GradientCodecs(NamedTuple):
    """A gradient on all its hops.

    spec: the same without random bits.
    rotation: around all hops; the step of its sign flips is set by ``bound_codecs``.
    """

    hops: tuple[HopCodec, ...]
    spec: GradientSpec
    rotation: Rotation | None = None

    def bound_codecs(
        self, step: int, signs_step: int
    ) -> tuple[tuple[BoundCodec, ...], Rotation | None]:
        """Return one bound codec per hop and the rotation.

        step: address of the random bits.
        signs_step: address of the sign flips.
        """
        rotation = self.rotation
        if rotation is not None and rotation.signs is not None:
            signs = rotation.signs._replace(step=signs_step)
            rotation = Rotation(block=rotation.block, signs=signs)
        bound_codecs = []
        for hop in self.hops:
            address = None if hop.key is None else Address(hop.key, step)
            bound_codecs.append(BoundCodec(hop.codec, address))
        return tuple(bound_codecs), rotation


@cache
def full_precision_gradient(
    dtype: torch.dtype, hops: int, *, tight: bool = False
) -> GradientCodecs:
    """Return the codecs of a gradient that is sent in ``dtype``.

    tight: without padding, as small tensors are sent: [Note: small tensors] of
        comm/small_tensors.py.
    """
    codec = CastCodec(dtype, tight)
    hop_codecs = (HopCodec(codec, key=None),) * hops
    return GradientCodecs(hop_codecs, GradientSpec((codec,) * hops, delivery=codec))


# ---- one parameter ----


class RowState(Enum):
    """State of a parameter's rows in the node shard, a node's copy of the weights."""

    # The node shard does not serve the parameter.
    ABSENT = auto()
    # Weights were written outside the optimizer step. The next gather fills the rows in full
    # precision first.
    STALE = auto()
    # The rows hold the weights of the last step, or their exchange is running.
    CURRENT = auto()


class GatheredValues(Enum):
    """Origin of the values of a gathered ZeRO-3 parameter."""

    # The master shards, unchanged.
    EXACT = auto()
    # A quantized message. They must not reach exports or master shards.
    DECODED = auto()


# Python 3.11 runs a function at every access to a member through its class.
ABSENT, STALE, CURRENT = RowState
EXACT, DECODED = GatheredValues


@dataclass(kw_only=True, eq=False, slots=True)
class Param:
    """A parameter of the engine's module.

    index: position in ``named_parameters()``.
    shape: full shape, also under ZeRO-3.
    trained: its ``requires_grad`` when the engine was built; momentum and weight decay still move
        the parameter after ``requires_grad`` is turned off. Under FSDP2: in the last optimizer
        steps.
    tensor: the parameter itself. The reference keeps its id from being used again.
    packed: its values may be bit patterns, see ``scheme.is_packed``.
    needs_full_gradient, boundary: for Muon, see ``cost.ParamSpec``.
    levels: learned levels, (2^bits,) fp32, equal on all ranks; None while they are uniform.
    row_state: state of ``node_rows``.
    node_rows: its rows in the node shard; unset while ``row_state`` is ABSENT.
    gathered: origin of the gathered values, under ZeRO-3.
    """

    index: int
    name: str
    shape: torch.Size
    trained: bool
    tensor: Any  # DeepSpeed's ZeroParameter, a DTensor of FSDP2, or a plain parameter
    routes: Routes
    packed: bool = False
    needs_full_gradient: bool = False
    boundary: float = 0.0
    levels: Tensor | None = None
    row_state: RowState = ABSENT
    node_rows: ShardRows = field(init=False, repr=False)
    gathered: GatheredValues = EXACT
    _weights: dict[tuple[torch.dtype, int | None, bool], tuple[HopCodec | None, ...]] = field(
        default_factory=dict, repr=False
    )
    _gradients: dict[tuple[torch.dtype, int, int], GradientCodecs] = field(
        default_factory=dict, repr=False
    )

    def set_trained(self, trained: bool) -> None:
        """Set ``trained`` after the parameter was frozen or thawed."""
        if trained != self.trained:
            self.trained = trained
            self._weights.clear()  # frozen weights have another route

    def is_quantized(self, dtype: torch.dtype) -> bool:
        """Return True if the scheme quantizes its weights or gradients of this dtype."""
        reason = self.routes.scheme.skip_reason(
            self.name,
            self.shape,
            dtype,
            packed=self.packed,
        )
        return reason is None

    def weight_codecs(
        self, dtype: torch.dtype, *, rank: int | None, full_world: bool = True
    ) -> tuple[HopCodec | None, ...]:
        """Return one codec per hop of a gather, without hops that only forward rows.

        None in place of a codec: the hop sends full precision.

        rank: of the sender; None for a rank that only receives and draws no random bits.
        full_world: the parameter's ranks are the world, see ``Routes``.
        """
        key = dtype, rank, full_world
        if key not in self._weights:
            route = self.routes.weights(
                dtype=dtype,
                quantized=self.is_quantized(dtype),
                trained=self.trained,
                full_world=full_world,
            )
            hop_codecs = [self._weight_codec(hop, rank) for hop in route.hops if not hop.forwards]
            self._weights[key] = tuple(hop_codecs)
        return self._weights[key]

    def bound_codec(self, hop_codec: HopCodec | None, dtype: torch.dtype, step: int) -> BoundCodec:
        """Bind a codec of weights to a step; None gives full precision.

        step: the optimizer step whose forward uses the weights.
        """
        if hop_codec is None:
            return full_precision(dtype)
        levels = self.levels if hop_codec.learned else None
        address = None if hop_codec.key is None else Address(hop_codec.key, step)
        return BoundCodec(hop_codec.codec, address, levels, hop_codec.difference)

    def gradient_codecs(self, dtype: torch.dtype, *, rank: int, hops: int) -> GradientCodecs:
        """Return the codecs of a reduction over one or two hops, for the sender ``rank``."""
        key = dtype, rank, hops
        if key not in self._gradients:
            self._gradients[key] = self._make_gradient_codecs(dtype, rank, hops)
        return self._gradients[key]

    def returned_codecs(self, dtype: torch.dtype, *, rank: int) -> GradientCodecs:
        """Return the codec with which ``rank`` sends sums back to all nodes or ranks, as one hop.

        Its rotation has other signs than that of the reduction, so that the errors of the two are
        independent.
        """
        route = self.routes.gradients(quantized=self.is_quantized(dtype))
        assert route.returned is not None  # with a replica in every node or on every rank
        codec = route.returned.codec
        if codec is None:
            return full_precision_gradient(dtype, 1)
        rotation = route.rotation
        if rotation is not None and route.flips:
            signs = Address(self._rank_key(Role.GRADIENTS, 0, _RETURNED_SIGNS), 0)
            rotation = Rotation(block=rotation.block, signs=signs)
        block = 0 if rotation is None else rotation.block
        spec = GradientSpec((codec,), block, int(bool(route.flips)))
        hop_codec = HopCodec(codec, self._key(Role.GRADIENTS, codec, rank, _RETURNED))
        return GradientCodecs((hop_codec,), spec, rotation)

    def _weight_codec(self, hop: Hop, rank: int | None) -> HopCodec | None:
        if hop.codec is None:
            return None
        key = None
        if rank is not None:
            key = self._key(Role.WEIGHTS, hop.codec, rank, int(hop.is_intra_codec))
        return HopCodec(
            hop.codec,
            key,
            learned=not hop.is_intra_codec,
            difference=hop.difference,
        )

    def _make_gradient_codecs(self, dtype: torch.dtype, rank: int, hops: int) -> GradientCodecs:
        route = self.routes.gradients(quantized=self.is_quantized(dtype), full_world=hops > 1)
        if route.is_full_precision:
            return full_precision_gradient(dtype, hops)
        codecs = tuple([hop.codec for hop in route.hops if hop.codec is not None])
        assert len(codecs) == hops  # a scheme quantizes all hops of gradients or none
        delivery = None if route.delivery is None else route.delivery.codec
        # The random bits of the last hop also serve the delivery, which may be the only one of the
        # two whose codec takes some.
        rounding_codecs = list(codecs)
        if delivery is not None:
            rounding_codecs[-1] = delivery
        hop_codecs = [
            HopCodec(codec, self._key(Role.GRADIENTS, rounding_codec, rank, hop))
            for hop, (codec, rounding_codec) in enumerate(zip(codecs, rounding_codecs, strict=True))
        ]
        rotation = self._rotation(route, rank, hops)
        block = 0 if rotation is None else rotation.block
        spec = GradientSpec(codecs, block, route.flips, delivery)
        return GradientCodecs(tuple(hop_codecs), spec, rotation)

    def _rotation(self, route: Route, rank: int, hops: int) -> Rotation | None:
        """Add the keys of the sign flips to the rotation of a route."""
        rotation = route.rotation
        if rotation is None or not route.flips:
            return rotation
        signs = Address(self._rank_key(Role.GRADIENTS, 0, _SIGNS), 0)
        rotation = Rotation(block=rotation.block, signs=signs)
        if route.flips != OWN_SIGNS:
            return rotation
        # Over two hops a node is the sender of the last hop.
        sender = rank // self.routes.node_size if hops > 1 else rank
        return rotation.of(sender)

    def _key(self, role: Role, codec: Codec, rank: int, hop: int) -> int | None:
        """Return the key of the random bits of a codec, None if it takes none."""
        rounding = codec.rounding if isinstance(codec, GroupCodec) else None
        if rounding == "nearest" or isinstance(codec, CastCodec):
            return None
        # QSDP: one shift per parameter and step, which all shards share. Everything else differs by
        # rank.
        return self._rank_key(role, 0 if rounding == "random_shift" else rank + 1, hop)

    def _rank_key(self, role: Role, rank_number: int, hop: int) -> int:
        """Return a random key. rank_number: 0 if all ranks share it, else the rank + 1."""
        return key_of(
            seed=self.routes.scheme.block.seed,
            role=role,
            parameter=self.index,
            rank=rank_number,
            hop=hop,
        )


# ---- gradients of a message ----


def tight_if_small(numel: int, codecs: GradientCodecs, dtype: torch.dtype) -> GradientCodecs:
    """Return codecs without padding for a small tensor in full precision."""
    if numel <= SMALL_NUMEL and isinstance(codecs.spec.codecs[-1], CastCodec):
        return full_precision_gradient(dtype, len(codecs.hops), tight=True)
    return codecs


def bind(
    gradient_codecs: Sequence[GradientCodecs], step: int, signs_step: int
) -> tuple[Sequence[tuple[BoundCodec, ...]], Sequence[Rotation | None]]:
    """Return the codecs of every gradient on all hops, and its rotation."""
    bound = [codecs.bound_codecs(step, signs_step) for codecs in gradient_codecs]
    return [codecs for codecs, _ in bound], [rotation for _, rotation in bound]


# ---- learned levels ----


def learn(
    shards: Sequence[tuple[Param, Tensor]], communicator: Communicator, scheme: Scheme
) -> None:
    """Learn the levels of parameters, equal on all ranks of ``communicator``. A collective.

    1. Every rank moves its copy of each table over its own shard.
    2. All-gather the tables.
    3. Average them, weighted by shard size, in rank order.

    shards: parameters with this rank's elements of each.
    """
    codec = scheme.weights
    assert isinstance(codec, GroupCodec)  # other codecs have no levels
    device = shards[0][1].device
    own_tables = []
    for param, values in shards:
        table = codec.table(param.levels, device)
        assert table is not None
        own_tables.append(
            update_levels(
                table,
                values.float(),
                group_size=codec.group_size,
                rate=scheme.block.weights.level_rate,
            )
        )
    counts = torch.tensor([float(values.numel()) for _, values in shards], device=device)
    # (parameters, levels + 1) fp32
    own = torch.cat([torch.stack(own_tables), counts[:, None]], dim=1)
    payload = own.contiguous().view(torch.uint8).view(-1)
    received = communicator.all_gather(payload, role="weights").wait()
    by_rank = received.view(torch.float32).view(communicator.size, *own.shape)
    for index, (param, _) in enumerate(shards):
        tables = by_rank[:, index, :-1]
        numels = by_rank[:, index, -1]
        param.levels = merge_levels(tables, numels)
