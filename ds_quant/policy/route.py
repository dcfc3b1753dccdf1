"""Decide which codec a tensor takes on every hop of its collective, and how often a hop runs.

The only place that decides it: what sends (zero), what prices (cost, memory, autotune) and what
compiles kernels (zero/warmup.py) read it here. It knows nothing but facts that all ranks share, so
that the ranks agree without asking each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from ds_quant.codec.bound import Rotation
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.kernels.batch import OWN_SIGNS
from ds_quant.policy.scheme import Scheme

Level = Literal["intra", "inter", "flat"]
Per = Literal["gather", "micro_step", "step"]

# Nodes have signs of their own with so few bits, and from so many nodes on: errors of fewer
# messages have little to average out, and each is rotated back by itself.
OWN_SIGNS_BITS, OWN_SIGNS_NODES = 3, 4


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One exchange of a collective.

    level: among the ranks of a node, those of one place in every node, or all of a process group.
    codec: None for full precision, which is the dtype that is sent.
    per: the hop runs once per gather of ZeRO-3, micro-step or optimizer step.
    inner: whether ``codec`` is the scheme's for exchanges inside a node.
    full_precision_own: a rank adds its own contribution as it is, which needs no place in a
        message.
    forwards: rows are sent on as the hop before has brought them.
    difference: what is sent is added to what every receiver holds; lossless: exactly, in as many
        bits as that takes.
    """

    level: Level
    codec: Codec | None
    per: Per
    inner: bool = False
    full_precision_own: bool = False
    forwards: bool = False
    difference: bool = False
    lossless: bool = False

    @property
    def is_full_precision(self) -> bool:
        """Whether it sends values in their own dtype."""
        return self.codec is None and not self.lossless

    def sends(self, dtype: torch.dtype) -> Codec:
        """Codec of values of ``dtype``. Raises ``ValueError`` unless that is fp32, bf16 or fp16."""
        return CastCodec(dtype) if self.codec is None else self.codec


@dataclass(frozen=True, kw_only=True)
class Route:
    """The hops of one collective, in their order; none where DeepSpeed's own is used, and for
    frozen weights that every rank keeps.

    rotation: of gradients, around all hops; its sign flips are left out.
    flips: whether there are any; OWN_SIGNS: every sender of the last hop has its own.
    delivery: of gradients under ZeRO-1 and 2, brings sums to an owner that did not add them up.
    """

    hops: tuple[Hop, ...]
    rotation: Rotation | None = None
    flips: int = 0
    delivery: Hop | None = None

    @property
    def is_full_precision(self) -> bool:
        """Whether everything is sent in full precision."""
        return all(hop.is_full_precision for hop in self.hops)

    @property
    def waits(self) -> bool:
        """Whether what the first hop has summed waits for the last micro-step."""
        return len({hop.per for hop in self.hops}) > 1


@dataclass(frozen=True, kw_only=True)
class Routes:
    """The routes of one run. stock_gradients: they take DeepSpeed's own collective."""

    scheme: Scheme
    stage: int
    nodes: int
    node_size: int
    stock_gradients: bool = False

    @property
    def ranks(self) -> int:
        return self.nodes * self.node_size

    @property
    def two_levels(self) -> bool:
        """Whether there are several nodes of several ranks."""
        return self.nodes > 1 and self.node_size > 1

    @property
    def keeps_shard(self) -> bool:
        """Whether every node keeps the weights, sharded over its ranks."""
        return self.stage == 3 and self.scheme.block.keeps_node_shard and self.nodes > 1

    def weights(
        self,
        *,
        dtype: torch.dtype | None = None,
        quantized: bool = True,
        trained: bool = True,
        full_world: bool = True,
    ) -> Route:
        """Gather of a parameter's weights.

        dtype: lossless differences depend on it, nothing else does. quantized: False for what the
        scheme leaves in full precision. whole: whether the parameter's ranks are the world.
        """
        scheme, outer, inner = self.scheme, None, None
        if quantized:
            outer, inner = scheme.weights, scheme.weights_intra
        per = weights_per(self.stage)
        differs = scheme.difference and outer is not None
        sends_lossless = dtype is not None and scheme.sends_lossless(dtype)
        if self.keeps_shard and full_world:
            level = "inter" if self.two_levels else "flat"
            cross = Hop(
                level=level, codec=outer, per="step", difference=differs, lossless=sends_lossless
            )
            spread = Hop(level="intra", codec=inner, per=per, inner=True)
            hops = (cross,) if trained else ()
            return Route(hops=(*hops, spread) if self.two_levels else hops)
        # Nobody to exchange with: as from a node shard.
        if self.stage == 3 and scheme.block.keeps_node_shard:
            return Route(hops=(Hop(level="flat", codec=inner, per=per, inner=True),))
        sends_lossless = sends_lossless and self.stage < 3  # elsewhere no reference is kept
        hop = Hop(level="flat", codec=outer, per=per, difference=differs, lossless=sends_lossless)
        if not (self.two_levels and full_world):
            return Route(hops=(hop,))
        return Route(hops=(replace(hop, level="inter"), replace(hop, level="intra", forwards=True)))

    def sends_lossless(self, dtype: torch.dtype) -> bool:
        """Whether weights of this dtype are sent as lossless differences."""
        return any(hop.lossless for hop in self.weights(dtype=dtype).hops)

    def gradients(self, *, quantized: bool = True, full_world: bool = True) -> Route:
        """Reduction of a gradient; arguments as of ``weights``. With one level ``whole`` makes
        no difference.
        """
        if self.stock_gradients:
            return Route(hops=())
        scheme, outer, inner = self.scheme, None, None
        if quantized and scheme.gradients is not None:
            outer, inner = scheme.gradients, scheme.gradients_intra or scheme.gradients
        per = gradients_per(self.stage)
        if self.two_levels and full_world:
            once = self.stage > 1 and scheme.block.gradients.cross == "step"
            first = Hop(level="intra", codec=inner, per=per, inner=True, full_precision_own=True)
            last = Hop(
                level="inter", codec=outer, per="step" if once else per, full_precision_own=True
            )
            hops: tuple[Hop, ...] = (first, last)
        else:
            # As published: SDP4Bit's variants gain from exact own contributions, QSDP has none.
            full_precision_own, one_node = scheme.gradients_intra is not None, self.nodes == 1
            codec = inner if one_node else outer
            hops = (
                Hop(
                    level="flat",
                    codec=codec,
                    per=per,
                    inner=one_node,
                    full_precision_own=full_precision_own,
                ),
            )
        block = scheme.block.gradients.rotation if outer is not None else 0
        turned = {"rotation": Rotation(block=block), "flips": self._flips()} if block else {}
        return Route(hops=hops, **turned, delivery=self._delivery(hops[-1]))

    def _flips(self) -> int:
        gradients = self.scheme.block.gradients
        given, few = gradients.rotation_signs, gradients.bits <= OWN_SIGNS_BITS
        own = given == "node" and self.nodes > 1
        if given is True and gradients.range == "gaussian" and few:
            own = self.nodes >= OWN_SIGNS_NODES
        return OWN_SIGNS if own else int(bool(given))

    def _delivery(self, last: Hop) -> Hop | None:
        if self.stage == 3:
            return None
        return Hop(level="flat", codec=delivery_codec(last.codec), per=last.per)


def delivery_codec(codec: Codec | None) -> Codec | None:
    """Return the codec of sums on their way to an owner: at least 8 bits, as its error is not
    averaged over ranks. Gaussian levels need a rotation, and sums are no longer rotated.
    """
    if not isinstance(codec, GroupCodec):
        return codec
    if codec.is_gaussian:
        return replace(codec, bits=8, range="absmax", rounding="stochastic")
    return replace(codec, bits=8)


def weights_per(stage: int) -> Per:
    """Return what weights are gathered once per; a node shard needs them less often."""
    return "gather" if stage == 3 else "step"


def gradients_per(stage: int) -> Per:
    """Return what gradients are reduced once per; they may wait between the nodes."""
    return "step" if stage == 1 else "micro_step"


def times(per: Per, *, micro_steps: int, gathers: float) -> float:
    """Return how often a hop runs in an optimizer step. gathers: of ZeRO-3 in a micro-step."""
    return {"step": 1.0, "micro_step": micro_steps, "gather": gathers * micro_steps}[per]
