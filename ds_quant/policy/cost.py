"""Bytes of a step by formula, from the same codecs that do the work.

[Note: bytes per parameter] There are two units, which are named wherever a figure is shown.
*Volume* does not depend on the number of nodes: what would enter a node from the others if there
were infinitely many (one node: a rank from the others). *Received* is what really enters, and what
``Traffic`` counts. A node of N receives (N - 1) / N of a volume that enters it once, a rank of one
node of W ranks (W - 1) / W. Collectives of DeepSpeed's own are flat rings over all ranks: of those
a node of N receives (W - 1) / W, because one of its ranks hears from another node.

[Note: lossless differences] How many bits they take is up to the training: more at a higher
learning rate, fewer the more weights stay as they are. ``LOSSLESS_BITS`` is what the codec takes
for bf16 differences under Adam at a learning rate of 3e-4 (1e-3: 3.6, 1e-4: 1.6, 1e-5: 0.54;
benchmarks/results/lossless_bits_cpu.json). A message is never longer than the weights themselves:
that is the most, which is given beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ds_quant.kernels.wire import FP32_BYTES, ceil_div, round_up
from ds_quant.policy.route import Route, Routes, gradients_per, times, weights_per
from ds_quant.policy.scheme import FLOATS, Scheme

LOSSLESS_BITS = 2.36  # see [Note: lossless differences]

_MORE = "weights_most", "weights_intra", "gradients_intra", "memory"


class ParamSpec(NamedTuple):
    """One parameter, as the formula counts it.

    needs_full_gradient: several ranks need all of its gradient, which DeepSpeed therefore
        all-reduces: a matrix that Muon updates and that lies on several of them.
    boundary: bytes per element that DeepSpeed gathers for Muon once per optimizer step, padding
        included.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    packed: bool = False  # see ``scheme.is_packed``
    needs_full_gradient: bool = False
    boundary: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CommVolume:
    """Volumes in bytes per parameter. See [Note: bytes per parameter].

    weights: one exchange of all weights between nodes, or of a gather over all ranks.
    weights_most: the same at most, more only where the length of messages depends on the weights.
    gradients: one reduction of all gradients between nodes, or over all ranks (direct).
    summed: one reduction of the gradients that DeepSpeed all-reduces itself, in every micro-step.
    boundary: what DeepSpeed gathers for Muon once per optimizer step, exactly.
    weights_intra: one gather from the node shard. gradients_intra: the hop inside the nodes.
    routes: what was priced.
    kept: why parameters are not quantized, reason -> number of tensors.
    full_precision_share: part of weights + gradients bytes that no quantizer touches.
    memory: what the scheme keeps on every rank between steps. partial_sums: what it keeps besides
        while gradients accumulate, if they cross once.
    gathers: of an element under ZeRO-3, in a micro-step. trained: share of the elements.
    """

    numel: int
    weights: float
    gradients: float
    summed: float = 0.0
    boundary: float = 0.0
    weights_intra: float = 0.0
    gradients_intra: float = 0.0
    routes: Routes
    full_precision_share: float
    kept: dict[str, int]
    memory: float = 0.0
    partial_sums: float = 0.0
    gathers: float = 2.0
    trained: float = 1.0
    weights_most: float = 0.0

    @property
    def crosses_once(self) -> bool:
        """Whether gradients cross between nodes once per optimizer step, not per micro-step."""
        return self.routes.gradients().waits

    @property
    def varies(self) -> bool:
        """Whether the length of messages depends on the weights."""
        return self.weights_most > self.weights

    def volumes(
        self, stage: int, *, micro_steps: int, most: bool = False
    ) -> dict[str, tuple[float, float]]:
        """Bytes per parameter and optimizer step by role: between nodes, or over all ranks with one
        level, and those that stay inside a node (gathers from the node shard, the first hop).

        ZeRO-3 gathers and reduces in every micro-step; ZeRO-2 reduces per micro-step and ZeRO-1
        once per step, both gather the updated weights once. ``most``: at most.
        """
        gathers = self.step_gathers(stage, micro_steps)
        reductions = self.reductions(stage, micro_steps)
        weights = self.weights_most if most and self.varies else self.weights
        exchanges = 1.0 if self.routes.keeps_shard else gathers
        crossings = 1 if self.crosses_once else reductions
        return {
            "weights": (exchanges * weights, gathers * self.weights_intra),
            "gradients": (crossings * self.gradients, reductions * self.gradients_intra),
        }

    def step_bytes(self, stage: int, *, micro_steps: int = 1, most: bool = False) -> float:
        """Bytes per parameter and optimizer step between nodes, or over all ranks with one level;
        ``most``: at most.
        """
        volumes = self.volumes(stage, micro_steps=micro_steps, most=most).values()
        return sum(outer for outer, _ in volumes) + self.exact_bytes(stage, micro_steps)

    def intra_bytes(self, stage: int, *, micro_steps: int = 1) -> float:
        """Bytes per parameter and optimizer step that stay inside a node."""
        volumes = self.volumes(stage, micro_steps=micro_steps).values()
        return sum(inner for _, inner in volumes)

    def exact_bytes(self, stage: int, micro_steps: int) -> float:
        """What DeepSpeed sends itself of gradients and for Muon, in an optimizer step."""
        return self.reductions(stage, micro_steps) * self.summed + self.boundary

    def step_gathers(self, stage: int, micro_steps: int) -> float:
        """How often an optimizer step gathers the weights."""
        return times(weights_per(stage), micro_steps=micro_steps, gathers=self.gathers)

    def reductions(self, stage: int, micro_steps: int) -> float:
        """How often an optimizer step reduces gradients."""
        return times(gradients_per(stage), micro_steps=micro_steps, gathers=self.gathers)

    def received(self, stage: int, *, micro_steps: int) -> dict[str, dict[str, float]]:
        """Bytes into one rank per step, on average over the ranks, by role and link."""
        nodes, node_size = self.routes.nodes, self.routes.node_size
        away, near = (1 - 1 / nodes) / node_size, 1 - 1 / node_size
        found = {}
        volumes = self.volumes(stage, micro_steps=micro_steps)
        flat = self.exact_bytes(stage, micro_steps)
        if self.routes.stock_gradients:  # DeepSpeed's all-reduce
            flat += volumes["gradients"][0]
            volumes["gradients"] = (0.0, 0.0)
        for role, (outer, inner) in volumes.items():
            if nodes == 1:  # then the volume over all ranks stays inside
                outer, inner = 0.0, outer
            found[role] = {"intra": inner * near * self.numel, "inter": outer * away * self.numel}
        ring = flat * (1 - 1 / (nodes * node_size)) * self.numel
        crossing = ring / node_size if nodes > 1 else 0.0  # one rank of a node hears from another
        found["gradients"]["intra"] += ring - crossing
        found["gradients"]["inter"] += crossing
        return found

    def received_per_node(self, stage: int, *, micro_steps: int) -> float:
        """Bytes per parameter and step into one node from the others; into a rank of one node."""
        link, ranks = ("intra", 1) if self.routes.nodes == 1 else ("inter", self.routes.node_size)
        roles = self.received(stage, micro_steps=micro_steps).values()
        return ranks * sum(links[link] for links in roles) / max(1, self.numel)


def comm_volume(
    scheme: Scheme,
    stage: int,
    param_specs: Iterable[ParamSpec],
    *,
    ranks: int,
    gradient_dtype: torch.dtype,
    node_size: int | None = None,
    stock_gradients: bool = False,
    gathers: float = 2.0,
) -> CommVolume:
    """Add up the wire bytes of every parameter under ``scheme``, scales and padding included.

    ``node_size``: ranks per node, None for one node. ``stock_gradients``: gradients take
    DeepSpeed's own exact path, an all-reduce. ``gathers``: under ZeRO-3, in a micro-step.
    """
    node_size = node_size or ranks
    routes = Routes(
        scheme=scheme, stage=stage, nodes=ranks // node_size, node_size=node_size,
        stock_gradients=stock_gradients,
    )  # fmt: skip
    total: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for item in param_specs:
        if stage < 3 and not item.trainable:
            continue
        total["numel"] += torch.Size(item.shape).numel()
        reason = _kept_reason(scheme, item)
        if reason is not None:
            kept[reason] += 1
        elif item.needs_full_gradient:
            kept["Muon gradients on several ranks"] += 1
        total.update(_weight_bytes(routes, item))
        if item.trainable:
            total.update(_gradient_bytes(routes, item, gradient_dtype))
            exact = item.boundary * torch.Size(item.shape).numel()
            total.update(boundary=exact, plain=exact)
        trained = torch.Size(item.shape).numel() * item.trainable
        total.update(trained=trained, partial_sums=0 if item.needs_full_gradient else trained)
    numel = max(1, total["numel"])
    sent = ("weights", "gradients", "summed", "boundary")
    return CommVolume(
        numel=total["numel"],
        **{field: total[field] / numel for field in (*sent, *_MORE)},
        routes=routes,
        partial_sums=FP32_BYTES * total["partial_sums"] / numel / node_size
        if routes.gradients().waits
        else 0.0,
        full_precision_share=total["plain"] / max(1, sum(total[field] for field in sent)),
        kept=dict(kept),
        gathers=gathers,
        trained=total["trained"] / numel if total["numel"] else 1.0,
    )


def _kept_reason(scheme: Scheme, item: ParamSpec) -> str | None:
    """Why a parameter stays in full precision in a role that has a codec."""
    reason = scheme.skip_reason(item.name, item.shape, item.dtype, packed=item.packed)
    if not scheme.lossless or item.dtype not in FLOATS:
        return reason
    if not scheme.sends_lossless(item.dtype):
        return "fp32 weights"
    return None if scheme.gradients is None else reason  # lossless differences leave none out


def _weight_bytes(routes: Routes, item: ParamSpec) -> Counter[str]:
    numel, dtype = torch.Size(item.shape).numel(), item.dtype
    if dtype not in FLOATS:  # such as an int8 base: DeepSpeed gathers it
        nbytes = numel * dtype.itemsize
        return Counter(weights=nbytes, weights_most=nbytes, plain=nbytes)
    reason = routes.scheme.skip_reason(item.name, item.shape, dtype, packed=item.packed)
    quantized = reason is None
    route = routes.weights(dtype=dtype, quantized=quantized, trained=item.trainable)
    found = _hop_bytes("weights", routes, route, numel, dtype)
    if routes.keeps_shard:
        found["memory"] = routes.nodes * ceil_div(numel, routes.ranks) * dtype.itemsize
    return found


def _gradient_bytes(routes: Routes, item: ParamSpec, dtype: torch.dtype) -> Counter[str]:
    numel = torch.Size(item.shape).numel()
    reason = routes.scheme.skip_reason(item.name, item.shape, dtype, packed=item.packed)
    route = routes.gradients(quantized=reason is None)
    if item.needs_full_gradient or not route.hops:  # DeepSpeed's all-reduce
        nbytes = 2 * numel * dtype.itemsize
        return Counter(
            {"summed" if item.needs_full_gradient else "gradients": nbytes, "plain": nbytes}
        )
    return _hop_bytes("gradients", routes, route, numel, dtype)


def _hop_bytes(
    role: str, routes: Routes, route: Route, numel: int, dtype: torch.dtype
) -> Counter[str]:
    """Bytes of a parameter on all hops, in as many rows as it has shards."""
    shards = routes.ranks if routes.stage == 3 else 1
    width = ceil_div(numel, shards)
    if route.rotation is not None:
        width = round_up(width, route.rotation.block)
    found: Counter[str] = Counter()
    for hop in route.hops:
        most = nbytes = shards * hop.sends(dtype).wire_bytes(width)
        if hop.lossless:
            nbytes = ceil_div(round(numel * LOSSLESS_BITS), 8)
        if hop.level == "intra":
            found[f"{role}_intra"] += nbytes
            continue
        found.update({role: nbytes, f"{role}_most": most, "plain": nbytes * hop.is_full_precision})
    return found


def stock_bytes(
    stage: int,
    dtype: torch.dtype,
    *,
    micro_steps: int = 1,
    gathers: float = 2.0,
    trained: float = 1,
) -> float:
    """The same volume for DeepSpeed as shipped, which all-reduces gradients under ZeRO-1 and 2."""
    if stage == 3:
        return (gathers + trained) * dtype.itemsize * micro_steps
    return dtype.itemsize * (1.0 + 2.0 * (micro_steps if stage == 2 else 1))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where a step runs. Rates in bytes per second: ``link`` into one node, ``intra_link`` into
    one rank from its node; ``encode``: parameters that a rank encodes or decodes per second;
    ``latency``: seconds of one collective.
    """

    nodes: int
    node_size: int
    link: float
    intra_link: float
    encode: float = float("inf")
    latency: float = 0.0


def seconds(
    cluster: Cluster, numel: int, *, inter: float, intra: float, encoded: float, collectives: float
) -> dict[str, float]:
    """Seconds of a step's messages, nothing hidden, by what takes them.

    A link carries its volume less the share that is already there, see [Note: bytes per parameter];
    hops do not overlap each other. encoded: how often every parameter is.
    """
    if cluster.nodes == 1:  # then the volume over all ranks stays inside
        inter, intra = 0.0, inter
    return {
        "link between nodes": numel * inter * (1 - 1 / cluster.nodes) / cluster.link,
        "links inside a node": numel * intra * (1 - 1 / cluster.node_size) / cluster.intra_link,
        "encoding": numel * encoded / cluster.encode,
        "latency": collectives * cluster.latency,
    }
