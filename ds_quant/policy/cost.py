"""Bytes of a step by formula, from the codecs of the run.

volume    bytes per parameter that would enter a node from infinitely many others; on one node, a
          rank from infinitely many others
received  bytes that really enter a node or a rank, as ``Traffic`` counts them
spec      a parameter as the formulas need it, see ``ParamSpec``

[Note: bytes per parameter] Every figure is shown with its unit, volume or received bytes. A volume
does not depend on the number of nodes. One of N nodes receives (N - 1) / N of a volume that enters
it once, a rank of one node of W ranks (W - 1) / W. DeepSpeed's own collectives are flat rings over
all W ranks: of those a node receives (W - 1) / W, because one of its ranks receives from another
node.

[Note: lossless differences] Their bits depend on the training: more at a higher learning rate,
fewer the more weights stay equal. ``LOSSLESS_BITS`` are the bits of bf16 differences under Adam at
a learning rate of 3e-4 (1e-3: 3.6, 1e-4: 1.6, 1e-5: 0.54;
benchmarks/results/lossless_bits_cpu.json). A message is never longer than the weights themselves,
which is the maximum given beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ds_quant.kernels.wire import FP32_BYTES, ceil_div, round_up
from ds_quant.policy.route import Hop, Route, Routes, gradients_per, times, weights_per
from ds_quant.policy.scheme import FLOATS, Scheme

LOSSLESS_BITS = 2.36  # per weight, see [Note: lossless differences]


class ParamSpec(NamedTuple):
    """One parameter, as the formulas need it.

    packed: see ``scheme.is_packed``.
    needs_full_gradient: True if several ranks need its full gradient, which DeepSpeed therefore
        all-reduces: a matrix that Muon updates and that lies on several ranks.
    boundary: bytes per element that DeepSpeed gathers for Muon once per optimizer step, with
        padding.
    stock_weights, stock_gradients: True if FSDP2 or DDP gathers its weights or reduces its
        gradients itself.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    packed: bool = False
    needs_full_gradient: bool = False
    boundary: float = 0.0
    stock_weights: bool = False
    stock_gradients: bool = False


@dataclass(frozen=True, kw_only=True)
class CommVolume:
    """The volume of a scheme, in bytes per parameter. See [Note: bytes per parameter].

    numel: elements of the model.
    weights: one exchange of all weights between nodes, or one gather over all ranks.
    gradients: one reduction of all gradients between nodes, or over all ranks.
    returned: the part of ``gradients`` that sums take on their way back to all nodes or ranks.
    summed: one reduction of the gradients that DeepSpeed all-reduces itself, in every micro-step.
    boundary: gathers of DeepSpeed for Muon, in full precision, once per optimizer step.
    weights_intra: one gather from the node shard.
    gradients_intra: one reduction inside the nodes.
    routes: the routes that have this volume.
    full_precision_share: share of the weights and gradients bytes in full precision.
    kept: number of tensors that are not quantized, by reason.
    memory: bytes that every rank keeps between steps.
    partial_sums: bytes that every rank keeps while gradients accumulate, if they cross once.
    gathers: gathers of every element in a micro-step, under ZeRO-3.
    trained: share of the elements that are trained.
    weights_most: maximum of ``weights``; larger only if message lengths depend on the weights.
    """

    numel: int
    weights: float
    gradients: float
    returned: float = 0.0
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
        """Return True if gradients cross between nodes once per optimizer step."""
        return self.routes.gradients().keeps_partial_sums

    @property
    def varies(self) -> bool:
        """Return True if message lengths depend on the weights."""
        return self.weights_most > self.weights

    def volumes(
        self, stage: int, *, micro_steps: int, most: bool = False
    ) -> dict[str, tuple[float, float]]:
        """Return (inter-node, intra-node) bytes per parameter and optimizer step by role.

        With one level the first are those over all ranks. ZeRO-3 gathers and reduces in every
        micro-step; ZeRO-2 reduces per micro-step and ZeRO-1 once per step, both gather the updated
        weights once.

        most: True for the maximum, if message lengths depend on the weights.
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
        """Return the bytes per parameter and optimizer step between nodes, or over all ranks with
        one level. ``most`` as of ``volumes``.
        """
        volumes = self.volumes(stage, micro_steps=micro_steps, most=most).values()
        return sum(outer for outer, _ in volumes) + self.stock_volume_of_step(stage, micro_steps)

    def intra_bytes(self, stage: int, *, micro_steps: int = 1) -> float:
        """Return the bytes per parameter and optimizer step inside a node."""
        volumes = self.volumes(stage, micro_steps=micro_steps).values()
        return sum(inner for _, inner in volumes)

    def stock_volume_of_step(self, stage: int, micro_steps: int) -> float:
        """Return the bytes per parameter and optimizer step of gradients that DeepSpeed sends
        itself, and of its gathers for Muon.
        """
        return self.reductions(stage, micro_steps) * self.summed + self.boundary

    def step_gathers(self, stage: int, micro_steps: int) -> float:
        """Return how often an optimizer step gathers the weights."""
        return times(weights_per(stage), micro_steps=micro_steps, gathers=self.gathers)

    def reductions(self, stage: int, micro_steps: int) -> float:
        """Return how often an optimizer step reduces gradients."""
        return times(gradients_per(stage), micro_steps=micro_steps, gathers=self.gathers)

    def received(self, stage: int, *, micro_steps: int) -> dict[str, dict[str, float]]:
        """Return the bytes into one rank per step, on average over the ranks, by role and link."""
        nodes = self.routes.nodes
        node_size = self.routes.node_size
        inter_share = (1 - 1 / nodes) / node_size
        intra_share = 1 - 1 / node_size
        volumes = self.volumes(stage, micro_steps=micro_steps)
        stock_volume = self.stock_volume_of_step(stage, micro_steps)
        if self.routes.stock_gradients:
            stock_volume += volumes["gradients"][0]
            volumes["gradients"] = (0.0, 0.0)
        received: dict[str, dict[str, float]] = {}
        for role, (outer, inner) in volumes.items():
            if nodes == 1:  # the volume over all ranks stays inside the node
                inner = outer
                outer = 0.0
            received[role] = {
                "intra": inner * intra_share * self.numel,
                "inter": outer * inter_share * self.numel,
            }
        ring = stock_volume * (1 - 1 / (nodes * node_size)) * self.numel
        ring_inter = 0.0
        if nodes > 1:  # one rank of a node receives from another node
            ring_inter = ring / node_size
        received["gradients"]["intra"] += ring - ring_inter
        received["gradients"]["inter"] += ring_inter
        return received

    def received_per_node(self, stage: int, *, micro_steps: int) -> float:
        """Return the bytes per parameter and step into one node from the others; on one node, into
        one rank.
        """
        if self.routes.nodes == 1:
            link = "intra"
            ranks = 1
        else:
            link = "inter"
            ranks = self.routes.node_size
        by_role = self.received(stage, micro_steps=micro_steps).values()
        return ranks * sum(by_link[link] for by_link in by_role) / max(1, self.numel)


# ---- volume of a model ----


@dataclass
class _Totals:
    """Sums over the parameters of a model: elements, and wire bytes as in ``CommVolume``.

    reduced_numel: elements of gradients that this plugin reduces.
    full_precision: bytes in full precision, of those that cross between nodes.
    """

    numel: int = 0
    trained_numel: int = 0
    reduced_numel: int = 0
    weights: int = 0
    weights_most: int = 0
    weights_intra: int = 0
    gradients: int = 0
    returned: int = 0
    gradients_intra: int = 0
    summed: int = 0
    boundary: float = 0
    full_precision: float = 0
    memory: int = 0

    def add(self, other: _Totals, times: int) -> None:
        """Add the totals of parameters that occur ``times`` times."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + times * value)


def comm_volume(
    scheme: Scheme,
    stage: int,
    param_specs: Iterable[ParamSpec],
    *,
    ranks: int,
    gradient_dtype: torch.dtype,
    node_size: int | None = None,
    stock_gradients: bool = False,
    replicas: bool = False,
    gathers: float = 2.0,
) -> CommVolume:
    """Add up the wire bytes of every parameter under ``scheme``, scales and padding included.

    gradient_dtype: in which gradients are reduced; under stage 0 it is that of each parameter.
    node_size: ranks per node, None for one node.
    stock_gradients: True if gradients take DeepSpeed's own full-precision all-reduce.
    replicas: True if every node holds a replica, see ``Routes``.
    gathers: gathers of every element in a micro-step, under ZeRO-3.
    """
    node_size = node_size or ranks
    routes = Routes(
        scheme=scheme,
        stage=stage,
        nodes=ranks // node_size,
        node_size=node_size,
        stock_gradients=stock_gradients,
        replicas=replicas,
    )
    totals = _Totals()
    kept: Counter[str] = Counter()
    for spec, count in _counted_alike(scheme, param_specs):
        if stage < 3 and not spec.trainable:
            continue
        reason = _kept_reason(routes, spec)
        if reason is not None:
            kept[reason] += count
        elif spec.needs_full_gradient:
            kept["Muon gradients on several ranks"] += count
        of_one = _Totals()
        _add_param(of_one, routes, spec, gradient_dtype)
        totals.add(of_one, count)
    numel = max(1, totals.numel)
    sent = totals.weights + totals.gradients + totals.summed + totals.boundary
    partial_sums = 0.0
    if routes.gradients().keeps_partial_sums:
        partial_sums = FP32_BYTES * totals.reduced_numel / numel / node_size
    return CommVolume(
        numel=totals.numel,
        weights=totals.weights / numel,
        gradients=totals.gradients / numel,
        returned=totals.returned / numel,
        summed=totals.summed / numel,
        boundary=totals.boundary / numel,
        weights_intra=totals.weights_intra / numel,
        gradients_intra=totals.gradients_intra / numel,
        routes=routes,
        full_precision_share=totals.full_precision / max(1, sent),
        kept=dict(kept),
        memory=totals.memory / numel,
        partial_sums=partial_sums,
        gathers=gathers,
        trained=totals.trained_numel / numel if totals.numel else 1.0,
        weights_most=totals.weights_most / numel,
    )


def _counted_alike(scheme: Scheme, specs: Iterable[ParamSpec]) -> Iterator[tuple[ParamSpec, int]]:
    """Yield one of the parameters whose messages are alike, and their number.

    A model has thousands of parameters and a dozen shapes.
    """
    first: dict[tuple[object, ...], ParamSpec] = {}
    counts: Counter[tuple[object, ...]] = Counter()
    for spec in specs:
        key = (*spec._replace(name=""), scheme.excludes(spec.name))
        first.setdefault(key, spec)
        counts[key] += 1
    for alike, spec in first.items():
        yield spec, counts[alike]


def _add_param(
    totals: _Totals, routes: Routes, spec: ParamSpec, gradient_dtype: torch.dtype
) -> None:
    """Add the bytes of one parameter, in all roles, to the totals."""
    numel = torch.Size(spec.shape).numel()
    totals.numel += numel
    if routes.sends_weights:
        _add_weights(totals, routes, spec, numel)
    if not spec.trainable:
        return
    totals.trained_numel += numel
    if routes.stage == 0:
        gradient_dtype = spec.dtype
    if spec.stock_gradients:
        passes = 2 if routes.stage == 0 else 1  # an all-reduce, a reduce-scatter
        totals.summed += passes * numel * spec.dtype.itemsize
        totals.full_precision += passes * numel * spec.dtype.itemsize
        return
    _add_gradients(totals, routes, spec, numel, gradient_dtype)
    if not spec.needs_full_gradient:
        totals.reduced_numel += numel
    boundary = spec.boundary * numel
    totals.boundary += boundary
    totals.full_precision += boundary


def _kept_reason(routes: Routes, spec: ParamSpec) -> str | None:
    """Return why a parameter stays in full precision in a role that has a codec, or None."""
    scheme = routes.scheme
    reason = scheme.skip_reason(spec.name, spec.shape, spec.dtype, packed=spec.packed)
    if not (scheme.lossless and routes.sends_weights) or spec.dtype not in FLOATS:
        return reason
    if not scheme.sends_lossless(spec.dtype):
        return "fp32 weights"
    if scheme.gradients is None:
        return None  # lossless differences skip no parameter
    return reason


def _is_quantized(routes: Routes, spec: ParamSpec, dtype: torch.dtype) -> bool:
    scheme = routes.scheme
    return scheme.skip_reason(spec.name, spec.shape, dtype, packed=spec.packed) is None


def _add_weights(totals: _Totals, routes: Routes, spec: ParamSpec, numel: int) -> None:
    dtype = spec.dtype
    # Such as int8 weights of a frozen base, which DeepSpeed gathers.
    if dtype not in FLOATS or spec.stock_weights:
        nbytes = numel * dtype.itemsize
        totals.weights += nbytes
        totals.weights_most += nbytes
        totals.full_precision += nbytes
        return
    route = routes.weights(
        dtype=dtype, quantized=_is_quantized(routes, spec, dtype), trained=spec.trainable
    )
    for hop in route.hops:
        most = nbytes = _hop_bytes(routes, route, hop, numel, dtype)
        if hop.lossless:
            nbytes = ceil_div(round(numel * LOSSLESS_BITS), 8)
        if hop.level == "intra":
            totals.weights_intra += nbytes
            continue
        totals.weights += nbytes
        totals.weights_most += most
        if hop.is_full_precision:
            totals.full_precision += nbytes
    if routes.keeps_shard:
        totals.memory += routes.nodes * ceil_div(numel, routes.ranks) * dtype.itemsize


def _add_gradients(
    totals: _Totals, routes: Routes, spec: ParamSpec, numel: int, dtype: torch.dtype
) -> None:
    route = routes.gradients(quantized=_is_quantized(routes, spec, dtype))
    if spec.needs_full_gradient or not route.hops:  # DeepSpeed's all-reduce
        nbytes = 2 * numel * dtype.itemsize
        totals.full_precision += nbytes
        if spec.needs_full_gradient:
            totals.summed += nbytes
        else:
            totals.gradients += nbytes
        return
    for hop in (*route.hops, route.returned, route.forwarded):
        if hop is None:
            continue
        nbytes = _hop_bytes(routes, route, hop, numel, dtype)
        if hop.level == "intra":
            totals.gradients_intra += nbytes
            continue
        totals.gradients += nbytes
        if hop is route.returned:
            totals.returned += nbytes
        if hop.is_full_precision:
            totals.full_precision += nbytes


def _hop_bytes(routes: Routes, route: Route, hop: Hop, numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of a parameter on a hop, in as many rows as it has shards."""
    shards = routes.ranks if routes.stage == 3 else 1
    width = ceil_div(numel, shards)
    if route.rotation is not None:
        width = round_up(width, route.rotation.block)
    return shards * hop.sends(dtype).wire_bytes(width)


def stock_bytes(
    stage: int,
    dtype: torch.dtype,
    *,
    micro_steps: int = 1,
    gathers: float = 2.0,
    trained: float = 1,
) -> float:
    """Return the volume of DeepSpeed without the plugin, which all-reduces gradients under ZeRO-1
    and 2; of DDP under stage 0. Bytes per parameter and optimizer step.
    """
    if stage == 3:
        return (gathers + trained) * dtype.itemsize * micro_steps
    if stage == 0:
        return 2.0 * dtype.itemsize * micro_steps
    return dtype.itemsize * (1.0 + 2.0 * (micro_steps if stage == 2 else 1))


# ---- seconds ----


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes and links of a step.

    link: bytes per second into one node.
    intra_link: bytes per second into one rank from its node.
    encode: parameters that a rank encodes or decodes per second.
    latency: seconds of one collective.
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
    """Return the seconds of a step's messages by cause, nothing hidden.

    A link carries the volume less the share that is already there, see [Note: bytes per parameter].
    Hops do not overlap each other.

    inter, intra: volumes between nodes and inside them.
    encoded: how often every parameter is encoded or decoded.
    """
    if cluster.nodes == 1:  # the volume over all ranks stays inside the node
        intra = inter
        inter = 0.0
    return {
        "link between nodes": numel * inter * (1 - 1 / cluster.nodes) / cluster.link,
        "links inside a node": numel * intra * (1 - 1 / cluster.node_size) / cluster.intra_link,
        "encoding": numel * encoded / cluster.encode,
        "latency": collectives * cluster.latency,
    }
