"""Decide which codec a tensor takes on every hop of its collective, and how often a hop runs.

level  the ranks of one exchange: "intra" (of a node), "inter" (of equal local rank in every node),
       "flat" (of the process group)
hop    one exchange of a collective on one level, with its codec
route  the hops of one collective

The decision is made only here; communication (the fronts), prices (cost, memory, autotune) and the
compilation of kernels (runtime/warmup.py) read it. It depends on facts that all ranks share, so the
ranks agree without communication.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from ds_quant.codec.bound import Rotation
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.codec.rules import range_of_width
from ds_quant.comm.topology import Topology
from ds_quant.kernels.batch import OWN_SIGNS
from ds_quant.policy.scheme import Scheme

Level = Literal["intra", "inter", "flat"]
Per = Literal["gather", "micro_step", "step"]

# Nodes have signs of their own with at most so many bits, and from so many nodes on. The error of
# few bits is large; over fewer nodes it averages out too little to pay for rotating back each
# message alone.
OWN_SIGNS_BITS = 3
OWN_SIGNS_NODES = 4


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One exchange of a collective.

    codec: None for full precision, in the dtype of the values.
    per: the hop runs once per gather of ZeRO-3, micro-step or optimizer step.
    is_intra_codec: True if ``codec`` is the scheme's codec for exchanges inside a node: its levels
        are never learned, and it has random bits of its own.
    full_precision_own: True if a rank adds its own contribution as it is, without a message.
    forwards: True if the hop forwards the rows of the hop before, still encoded.
    difference: True if receivers add the values that ``codec`` decodes to those that they hold.
    lossless: True if exact differences are sent without a codec, in as many bits as they take;
        ``difference`` is then False.
    """

    level: Level
    codec: Codec | None
    per: Per
    is_intra_codec: bool = False
    full_precision_own: bool = False
    forwards: bool = False
    difference: bool = False
    lossless: bool = False

    @property
    def is_full_precision(self) -> bool:
        """Return True if values are sent in their own dtype."""
        return self.codec is None and not self.lossless

    def sends(self, dtype: torch.dtype) -> Codec:
        """Return the codec of values of ``dtype``; ValueError for one that codecs do not take."""
        if self.codec is None:
            return CastCodec(dtype)
        return self.codec


@dataclass(frozen=True, kw_only=True)
class Route:
    """The hops of one collective, in order.

    There are none if DeepSpeed's own collective is used, and for frozen weights of which every rank
    keeps a copy.

    rotation: of gradients, around all hops; without its sign flips.
    flips: 0 for no sign flips, 1 for the same signs on all ranks, OWN_SIGNS for signs of every
        sender of the last hop.
    delivery: of gradients under ZeRO-1 and 2, sends sums to an owner that did not add them up.
    returned: of gradients with a replica in every node or on every rank, sends the sums back,
        rotated anew.
    forwarded: of gradients with a replica on every rank and two levels, forwards the returned sums
        inside the node, still encoded.
    """

    hops: tuple[Hop, ...]
    rotation: Rotation | None = None
    flips: int = 0
    delivery: Hop | None = None
    returned: Hop | None = None
    forwarded: Hop | None = None

    @property
    def is_full_precision(self) -> bool:
        """Return True if all hops send full precision."""
        return all(hop.is_full_precision for hop in self.hops)

    @property
    def keeps_partial_sums(self) -> bool:
        """Return True if the sums of the first hop are kept until the last micro-step."""
        return len({hop.per for hop in self.hops}) > 1


@dataclass(frozen=True, kw_only=True)
class Routes:
    """The routes of one run.

    stage: of ZeRO; 0 without sharding (DDP): every rank holds the model, no weights are sent, and
        all ranks get the sums of gradients.
    stock_gradients: True if gradients take DeepSpeed's own collective.
    replicas: True if every node holds a replica of the model, sharded over its ranks (HSDP): no
        weights are sent between nodes, and all nodes get the sums of gradients.
    """

    scheme: Scheme
    stage: int
    nodes: int
    node_size: int
    stock_gradients: bool = False
    replicas: bool = False

    @classmethod
    def over(
        cls, topology: Topology, scheme: Scheme, *, stage: int, replicas: bool = False
    ) -> Routes:
        """Return the routes between the ranks of a topology."""
        nodes, node_size = topology.nodes, topology.node_size
        return cls(scheme=scheme, stage=stage, nodes=nodes, node_size=node_size, replicas=replicas)

    @property
    def ranks(self) -> int:
        return self.nodes * self.node_size

    @property
    def two_levels(self) -> bool:
        """Return True if there are several nodes of several ranks."""
        return self.nodes > 1 and self.node_size > 1

    @property
    def sends_weights(self) -> bool:
        """Return True unless every rank updates all weights itself."""
        return self.stage > 0

    @property
    def keeps_shard(self) -> bool:
        """Return True if every node keeps a copy of the weights, split over its ranks."""
        keeps = self.stage == 3 and self.scheme.block.keeps_node_shard
        return keeps and self.nodes > 1 and not self.replicas

    def weights(
        self,
        *,
        dtype: torch.dtype | None = None,
        quantized: bool = True,
        trained: bool = True,
        full_world: bool = True,
    ) -> Route:
        """Return the route of a gather of weights.

        dtype: of the weights; only lossless differences depend on it.
        quantized: False for a parameter that the scheme leaves in full precision.
        trained: False for frozen weights.
        full_world: True if the parameter's ranks are the world.
        """
        if not self.sends_weights:
            return Route(hops=())
        codec: Codec | None = None
        intra_codec: Codec | None = None
        if quantized:
            codec = self.scheme.weights
            intra_codec = self.scheme.weights_intra
        if self.keeps_shard and full_world:
            return self._node_shard_weights(codec, intra_codec, dtype, trained)
        per = weights_per(self.stage)
        level: Level = "intra" if self.replicas else "flat"
        if self.stage == 3 and self.scheme.block.keeps_node_shard:
            # One node: gather with the intra codec, as from a node shard.
            return Route(hops=(Hop(level=level, codec=intra_codec, per=per, is_intra_codec=True),))
        if self.replicas:
            return Route(hops=(Hop(level=level, codec=codec, per=per),))
        difference = self.scheme.difference and codec is not None
        # Lossless differences need a reference, which ZeRO-1 and 2 keep.
        lossless = self._is_lossless(dtype) and self.stage < 3
        hop = Hop(level="flat", codec=codec, per=per, difference=difference, lossless=lossless)
        if not (self.two_levels and full_world):
            return Route(hops=(hop,))
        inter_node = replace(hop, level="inter")
        return Route(hops=(inter_node, replace(hop, level="intra", forwards=True)))

    def _node_shard_weights(
        self,
        codec: Codec | None,
        intra_codec: Codec | None,
        dtype: torch.dtype | None,
        trained: bool,
    ) -> Route:
        """Return the route of weights in a node shard: an exchange between the nodes after every
        step, for trained weights, and gathers inside the node.
        """
        hops: list[Hop] = []
        if trained:
            exchange = Hop(
                level="inter" if self.two_levels else "flat",
                codec=codec,
                per="step",
                difference=self.scheme.difference and codec is not None,
                lossless=self._is_lossless(dtype),
            )
            hops.append(exchange)
        if self.two_levels:
            gather = Hop(
                level="intra",
                codec=intra_codec,
                per=weights_per(self.stage),
                is_intra_codec=True,
            )
            hops.append(gather)
        return Route(hops=tuple(hops))

    def _is_lossless(self, dtype: torch.dtype | None) -> bool:
        return dtype is not None and self.scheme.sends_lossless(dtype)

    def sends_lossless(self, dtype: torch.dtype) -> bool:
        """Return True if weights of this dtype are sent as lossless differences."""
        return any(hop.lossless for hop in self.weights(dtype=dtype).hops)

    def gradients(self, *, quantized: bool = True, full_world: bool = True) -> Route:
        """Return the route of a reduction of a gradient; arguments as of ``weights``.

        With one level ``full_world`` makes no difference.
        """
        if self.stock_gradients:
            return Route(hops=())
        codec: Codec | None = None
        intra_codec: Codec | None = None
        if quantized and self.scheme.gradients is not None:
            codec = self.scheme.gradients
            intra_codec = self.scheme.gradients_intra or self.scheme.gradients
        hops: tuple[Hop, ...]
        if self.two_levels and full_world:
            hops = self._two_level_gradients(codec, intra_codec)
        else:
            hops = (self._flat_gradients(codec, intra_codec),)
        delivery = self._delivery(hops[-1])
        returned = forwarded = None
        if self.replicas or self.stage == 0:
            bits = self.scheme.block.gradients.bits_of_returned_sums
            last = hops[-1]
            returned = Hop(level=last.level, codec=_of_width(codec, bits), per=last.per)
        if self.stage == 0 and returned is not None and returned.level == "inter":
            forwarded = replace(returned, level="intra", forwards=True)
        block = 0 if codec is None else self.scheme.block.gradients.rotation
        rotation = Rotation(block=block) if block else None
        return Route(
            hops=hops,
            rotation=rotation,
            flips=self._flips() if block else 0,
            delivery=delivery,
            returned=returned,
            forwarded=forwarded,
        )

    def _two_level_gradients(
        self, codec: Codec | None, intra_codec: Codec | None
    ) -> tuple[Hop, Hop]:
        per = gradients_per(self.stage)
        once = self.stage > 1 and self.scheme.block.gradients.cross == "step"
        intra_node = Hop(
            level="intra",
            codec=intra_codec,
            per=per,
            is_intra_codec=True,
            full_precision_own=True,
        )
        inter_node = Hop(
            level="inter",
            codec=codec,
            per="step" if once else per,
            full_precision_own=True,
        )
        return intra_node, inter_node

    def _flat_gradients(self, codec: Codec | None, intra_codec: Codec | None) -> Hop:
        # Of a DDP model on one node the slow link is inside the node.
        one_node = self.nodes == 1 and self.stage > 0
        return Hop(
            level="flat",
            codec=intra_codec if one_node else codec,
            per=gradients_per(self.stage),
            is_intra_codec=one_node,
            # As published: SDP4Bit's variants gain from own contributions in full precision, QSDP
            # has none.
            full_precision_own=self.scheme.gradients_intra is not None,
        )

    def _flips(self) -> int:
        """Return ``Route.flips``: 0 without signs, 1 with shared ones, or OWN_SIGNS."""
        gradients = self.scheme.block.gradients
        if gradients.rotation_signs is False:
            return 0
        has_own_signs = False
        if gradients.rotation_signs == "node":
            has_own_signs = self.nodes > 1
        elif gradients.rotation_signs is True and gradients.range == "gaussian":
            # Signs of its own for each node pay with few bits and many nodes.
            has_few_bits = gradients.bits <= OWN_SIGNS_BITS
            has_own_signs = has_few_bits and self.nodes >= OWN_SIGNS_NODES
        return OWN_SIGNS if has_own_signs else 1

    def _delivery(self, last: Hop) -> Hop | None:
        if self.stage in (0, 3):  # the ranks that sum are those that need the sums
            return None
        return Hop(level="flat", codec=delivery_codec(last.codec), per=last.per)


def delivery_codec(codec: Codec | None) -> Codec | None:
    """Return the codec of sums on their way to an owner.

    It has at least 8 bits, because its error is not averaged over ranks. Gaussian levels need
    rotated values, and sums are no longer rotated.
    """
    return _of_width(codec, 8)


def _of_width(codec: Codec | None, bits: int) -> Codec | None:
    """Return a codec of groups with other bits, every other codec as it is."""
    if not isinstance(codec, GroupCodec):
        return codec
    value_range = range_of_width(codec.range, bits)
    if value_range == codec.range:
        return replace(codec, bits=bits)
    return replace(codec, bits=bits, range=value_range, rounding="stochastic")


def weights_per(stage: int) -> Per:
    """Return how often weights are gathered; a node shard exchanges them less often."""
    return "gather" if stage == 3 else "step"


def gradients_per(stage: int) -> Per:
    """Return how often gradients are reduced; partial sums may cross between nodes less often."""
    return "step" if stage == 1 else "micro_step"


def times(per: Per, *, micro_steps: int, gathers: float) -> float:
    """Return how often a hop runs in an optimizer step.

    gathers: gathers of every element in a micro-step, under ZeRO-3.
    """
    if per == "step":
        return 1.0
    if per == "micro_step":
        return micro_steps
    return gathers * micro_steps
