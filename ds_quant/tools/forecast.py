"""Predict a step of a model on a cluster under every scheme.

No GPU, no files, no printing: settings in, rows out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from ds_quant.config.presets import (
    BY_HAND,
    CANDIDATES,
    RESEARCH,
    YOURS,
    group_of,
    preset_names,
)
from ds_quant.config.schema import QuantizedCommConfig, parse_block
from ds_quant.kernels.wire import ceil_div
from ds_quant.policy import cost, gathers, memory
from ds_quant.policy.cost import Cluster, PricedParam, Volume, predict
from ds_quant.policy.refusals import starts

# ---- the model ----


@dataclass(frozen=True, kw_only=True)
class Model:
    """``cargo`` stands for the whole model: its bytes per parameter are taken for all ``numel``.

    trained: parameters that are trained. root: modules in the order of forward. hidden: the width.
    """

    name: str
    numel: int
    layers: int
    cargo: tuple[PricedParam, ...]
    trained: int
    root: gathers.Module
    hidden: int

    @property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(unit.numel for unit in self.root.all_units())

    def outline(self, persistent: float) -> gathers.Module:
        """``root``; parameters of at most ``persistent`` elements stay gathered."""
        return _marked(self.root, persistent)


def _marked(module: gathers.Module, persistent: float) -> gathers.Module:
    units = (unit._replace(persistent=unit.numel <= persistent) for unit in module.units)
    return gathers.Module(tuple(units), tuple(_marked(c, persistent) for c in module.children))


def block_cargo(hidden: int, *, dtype: torch.dtype) -> tuple[PricedParam, ...]:
    """One transformer block of width ``hidden``."""
    shapes = {"qkv": (3 * hidden, hidden), "out": (hidden, hidden), "up": (4 * hidden, hidden),
              "down": (hidden, 4 * hidden), "norm1": (hidden,), "norm2": (hidden,)}  # fmt: skip
    return tuple(PricedParam(f"block.{name}.weight", s, dtype, True) for name, s in shapes.items())


def of_size(numel: int, *, dtype: torch.dtype, trained: float = 1.0) -> Model:
    """A transformer of ``numel`` parameters, 128 times as wide as it is deep: 12 h^2 per block.
    ``trained``: the share of adapters beside frozen weights; 1 for all weights.
    """
    hidden = max(128, round((numel * 128 / 12) ** (1 / 3) / 128) * 128)
    layers = max(1, round(numel / (12 * hidden**2)))
    cargo = tuple(_with_adapters(block_cargo(hidden, dtype=dtype), trained))
    name = f"{numel / 1e9:.3g} B parameters, {layers} blocks of width {hidden}"
    block = [(item.name, torch.Size(item.shape).numel()) for item in cargo]
    blocks = (
        gathers.Module(
            (), tuple(gathers.Module((gathers.Unit((i, part), n),)) for part, n in block)
        )
        for i in range(layers)
    )
    return Model(
        name=_named(name, trained), numel=numel, layers=layers, cargo=cargo,
        trained=round(numel * trained), root=gathers.Module((), tuple(blocks)), hidden=hidden,
    )  # fmt: skip


def _named(name: str, trained: float) -> str:
    return name if trained == 1 else f"{name}, {trained:.3g} of them trained"


def _with_adapters(cargo: tuple[PricedParam, ...], trained: float) -> Iterator[PricedParam]:
    """Frozen parameters and, per matrix, an adapter; together ``trained`` of all elements."""
    if trained == 1:
        yield from cargo
        return
    share = trained / (1 - trained)
    for item in cargo:
        yield item._replace(trainable=False)
        if len(item.shape) > 1:
            rows = ceil_div(round(torch.Size(item.shape).numel() * share), item.shape[1])
            yield PricedParam(
                f"{item.name}.adapter", (max(1, rows), item.shape[1]), item.dtype, True
            )


def of_config(path: Path, *, dtype: torch.dtype, trained: float = 1.0) -> Model:
    """The model of a Hugging Face config.json, built without memory for its weights.

    Raises:
        ValueError: transformers is missing, or the file is no config of a causal language model.
    """
    settings = json.loads(path.read_text("utf-8"))
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise ValueError("no model_type, allowed: a Hugging Face config")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**settings)
        if not 1 <= config.num_hidden_layers <= 1000:  # which are built one by one
            raise ValueError(f"num_hidden_layers={config.num_hidden_layers}: allowed: 1 to 1000")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a wrong field may raise anything
        missing = isinstance(error, ImportError)
        fix = ": pip install 'ds_quant[hf]', or give --params" if missing else ""
        raise ValueError(shorten(f"{type(error).__name__}: {error}", 200) + fix) from error
    cargo = tuple(
        PricedParam(name, tuple(p.shape), dtype, True) for name, p in model.named_parameters()
    )
    numel = sum(p.numel() for p in model.parameters())
    name = f"{settings['model_type']} of {numel / 1e9:.3g} B parameters"
    return Model(
        name=_named(name, trained), numel=numel, layers=config.num_hidden_layers,
        cargo=tuple(_with_adapters(cargo, trained)), trained=round(numel * trained),
        root=_outline(model), hidden=config.hidden_size,
    )  # fmt: skip


def _outline(module: torch.nn.Module) -> gathers.Module:
    units = (gathers.Unit(id(p), p.numel()) for p in module.parameters(recurse=False))
    return gathers.Module(tuple(units), tuple(map(_outline, module.children())))


# ---- the forecast ----


SHIPPED = "deepspeed as shipped"
HYBRID = "HSDP {}, crossing once"
WORTH_IT = 1.02  # speed-ups below are not worth a change
TYPICAL_LINKS = (10, 25, 100, 200, 400)  # Gb/s into a node
TYPICAL_MICRO_STEPS = (1, 4, 16)
GIGABIT = 1e9 / 8  # bytes per second


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """DeepSpeed's bucket sizes, in elements."""

    reduce: int = 5 * 10**8
    allgather: int = 5 * 10**8
    fetch: gathers.FetchSettings = gathers.FetchSettings()
    persistence: int = 10**5


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run to predict. compute: seconds of an optimizer step without communication.

    exact_gradients: they take DeepSpeed's own path. gpu_memory: bytes of a GPU, if they matter.
    offloads: what DeepSpeed keeps in host memory, of "param" and "optimizer".
    """

    model: Model
    dtype: torch.dtype
    stage: int
    micro_steps: int
    compute: float
    cluster: Cluster
    block: QuantizedCommConfig | None = None  # of the user's own config
    allow_full_replica: bool = False
    exact_gradients: bool = False
    gpu_memory: float | None = None
    offloads: frozenset[str] = frozenset()
    buckets: Buckets = field(default_factory=Buckets)

    @property
    def ranks(self) -> int:
        return self.cluster.nodes * self.cluster.node_size

    @property
    def counted(self) -> int:
        """Parameters that figures per parameter are of: frozen ones travel under ZeRO-3 only."""
        return self.model.numel if self.stage == 3 else self.model.trained

    @property
    def priced_cluster(self) -> Cluster:
        """The cluster with a rate of computing that gives ``compute`` for one token."""
        return replace(self.cluster, flops=6.0 * self.counted / self.compute)

    @cached_property
    def gathers(self) -> float:
        """Of the weights in a micro-step."""
        if self.stage < 3:
            return 1.0
        root = self.model.outline(self.buckets.persistence)
        return gathers.mean_gathers(root, self.buckets.fetch, micro_steps=self.micro_steps)

    @property
    def offloads_shard(self) -> bool:
        """Whether a node shard is in host memory."""
        return self.stage == 3 and "param" in self.offloads

    @cached_property
    def shipped_host_memory(self) -> float:
        """Host bytes per GPU of what DeepSpeed offloads: weights, and under Adam fp32 gradients,
        masters and two states.
        """
        states = (16 if self.dtype.itemsize == 2 else 12) * self.model.trained / self.ranks
        weights = self.dtype.itemsize * self.model.numel / self.ranks
        return states * ("optimizer" in self.offloads) + weights * self.offloads_shard

    @cached_property
    def shipped_memory(self) -> float:
        """Bytes per GPU of DeepSpeed with Adam and without activations: weights, gradients, fp32
        masters and two states, less what is offloaded; under ZeRO-3 what is gathered at once.
        """
        model, size = self.model, self.dtype.itemsize
        part = {1: (1, 1), 2: (1, self.ranks), 3: (self.ranks, self.ranks)}[self.stage]
        held = 0.0 if self.offloads_shard else size * model.numel / part[0]
        if "optimizer" not in self.offloads:
            held += (12 if size == 2 else 8) * model.trained / self.ranks
        if "optimizer" not in self.offloads or self.stage == 1:
            held += size * model.trained / part[1]
        if self.stage == 3:
            root = model.outline(self.buckets.persistence)
            held += size * gathers.most_live(root, self.buckets.fetch)
        return held + size * min(model.trained, self.buckets.reduce)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One scheme. Bytes per parameter and step as volumes, see cost.py; times in seconds.

    step_overlapped, step_serial: communication hidden behind compute entirely, or not at all.
    speedup_*: over DeepSpeed as shipped, of these two. memory: bytes more on every rank, between
    steps; peak: besides, in a step, of messages and sums; gpu_memory: all that a GPU holds;
    host_memory: all that is offloaded from it, the node shard too.
    limit: what takes longest. note: why it is not recommended; empty if it may be.
    most_bytes: inter_bytes at most, where they depend on the learning rate, else None.
    """

    scheme: str
    inter_bytes: float
    intra_bytes: float
    communication: float
    step_overlapped: float
    step_serial: float
    speedup_overlapped: float
    speedup_serial: float
    memory: float
    limit: str
    peak: float = 0.0
    gpu_memory: float = 0.0
    host_memory: float = 0.0
    note: str = ""
    most_bytes: float | None = None

    @property
    def speedups(self) -> tuple[float, float]:
        """The lowest and the highest speed-up."""
        both = self.speedup_overlapped, self.speedup_serial
        return min(both), max(both)


def forecast(plan: Plan) -> list[Row]:
    """A row for DeepSpeed as shipped, for the user's block and for every preset."""
    more = {"allow_full_replica": True} if plan.allow_full_replica else {}
    blocks = {name: parse_block({"scheme": name, **more}) for name in preset_names()}
    if plan.block is not None:
        blocks = {f"your block ({plan.block.scheme})": plan.block, **blocks}
    shipped = _row(SHIPPED, _shipped(plan), plan, None)
    held = {"gpu_memory": plan.shipped_memory, "host_memory": plan.shipped_host_memory}
    rows = [_fitted(replace(shipped, **held), plan)]
    for name, block in blocks.items():
        costs = _bill(block, plan)
        kept, peak = costs.memory * plan.counted, _peak(costs, plan)
        if plan.micro_steps > 1:
            peak += costs.held * plan.counted
        row = replace(
            _row(name, _volume(costs, plan), plan, rows[0]), memory=kept, peak=peak,
            gpu_memory=plan.shipped_memory + kept * (not plan.offloads_shard) + peak,
            host_memory=plan.shipped_host_memory + kept * plan.offloads_shard,
            note=_against(name, block, plan), most_bytes=_most(costs, plan),
        )  # fmt: skip
        rows.append(_fitted(row, plan))
    if plan.stage == 3 and plan.cluster.nodes > 1 < plan.cluster.node_size and not plan.offloads:
        rows.append(_hybrid(plan, rows[0]))
    return rows


def _most(costs: cost.Costs, plan: Plan) -> float | None:
    if not costs.varies:
        return None
    return costs.step_bytes(plan.stage, micro_steps=plan.micro_steps, most=True)


def _hybrid(plan: Plan, shipped: Row) -> Row:
    """Hybrid sharding: every node has all states, and gradients are all-reduced between nodes at
    the last micro-step. FSDP2 and Megatron-FSDP have it, DeepSpeed has not.
    """
    costs, size = _bill(parse_block({"scheme": "full_precision"}), plan), plan.dtype.itemsize
    inside = plan.micro_steps * size * (plan.gathers + costs.trained)
    volume = replace(_volume(costs, plan), inter=2.0 * size * costs.trained, intra=inside)
    row = _row(HYBRID.format(cost.LABELS[plan.dtype]), volume, plan, shipped)
    states = size * plan.model.numel + (size + (12 if size == 2 else 8)) * plan.model.trained
    memory = states * (1 / plan.cluster.node_size - 1 / plan.ranks)
    return replace(
        row, memory=memory, gpu_memory=plan.shipped_memory + memory,
        note="not this plugin's: FSDP2 and Megatron-FSDP",
    )  # fmt: skip


def _against(name: str, block: QuantizedCommConfig, plan: Plan) -> str:
    """Return why start-up would refuse the scheme, or why a user has to choose it."""
    nodes = {"world": plan.ranks, "node_size": plan.cluster.node_size}
    if not starts(block, stage=plan.stage, **nodes):
        return "start-up refuses it: needs allow_full_replica"
    group = group_of(name)
    if group == RESEARCH:
        return group
    if group == YOURS or name not in preset_names() or name in (*CANDIDATES, *BY_HAND):
        return ""
    varies = block.weights.exactly_differ
    return "bytes depend on the learning rate" if varies else "weigh its loss: docs/choosing.md"


def _fitted(row: Row, plan: Plan) -> Row:
    if row.note or plan.gpu_memory is None or row.gpu_memory <= plan.gpu_memory:
        return row
    return replace(row, note=f"needs {row.gpu_memory / 1e9:.3g} GB per GPU")


def best(rows: list[Row]) -> Row:
    """Return the allowed scheme with the shortest step without overlap;
    DeepSpeed as shipped if little is won.
    """
    fastest = min((row for row in rows if not row.note), key=lambda row: row.step_serial,
                  default=rows[0])  # fmt: skip
    return fastest if fastest.speedup_serial >= WORTH_IT else rows[0]


def variants(plan: Plan) -> tuple[dict[int, list[Row]], dict[int, list[Row]]]:
    """Return rows by usual links between nodes, in Gb/s, and by usual micro-steps of an optimizer
    step; none with one node.
    """
    if plan.cluster.nodes == 1:
        return {}, {}
    links = {link: forecast(at_link(plan, link)) for link in TYPICAL_LINKS}
    counts = {k: forecast(replace(plan, micro_steps=k)) for k in TYPICAL_MICRO_STEPS}
    return links, counts


def at_link(plan: Plan, gigabits: float) -> Plan:
    """Return the plan with another link between nodes, in Gb/s."""
    return replace(plan, cluster=replace(plan.cluster, link=gigabits * GIGABIT))


def as_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows as JSON types."""
    return [asdict(row) for row in rows]


def _peak(costs: cost.Costs, plan: Plan) -> float:
    buckets, model, fetch = plan.buckets, plan.model, plan.buckets.fetch
    sizes = memory.Sizes(
        ranks=plan.ranks, node_size=plan.cluster.node_size, trained=model.trained,
        largest=model.largest, bucket=buckets.reduce, window=buckets.allgather,
        prefetch=min(fetch.prefetch_bucket_size, fetch.max_live_parameters),
        itemsize=plan.dtype.itemsize, offloaded=plan.offloads_shard,
    )  # fmt: skip
    exact = plan.exact_gradients
    whole = replace(costs, numel=plan.counted)
    return memory.peak_bytes(whole, plan.stage, sizes, shipped_gradients=exact)


def _bill(block: QuantizedCommConfig, plan: Plan) -> cost.Costs:
    cluster = plan.cluster
    return cost.bill(
        block.to_scheme(), plan.stage, plan.model.cargo, ranks=cluster.nodes * cluster.node_size,
        node_size=cluster.node_size, gradient_dtype=plan.dtype, gathers=plan.gathers,
        shipped_gradients=plan.exact_gradients,
    )  # fmt: skip


def _volume(costs: cost.Costs, plan: Plan) -> Volume:
    layers = plan.model.layers
    return cost.volume(costs, plan.stage, micro_steps=plan.micro_steps, layers=layers)


def _shipped(plan: Plan) -> Volume:
    """DeepSpeed's own collectives: rings, which bring each byte into a node once."""
    costs = _bill(parse_block({"scheme": "full_precision"}), plan)
    nbytes = cost.shipped_bytes(
        plan.stage, plan.dtype, micro_steps=plan.micro_steps, gathers=plan.gathers,
        trained=costs.trained,
    )  # fmt: skip
    two_levels = plan.cluster.nodes > 1 and plan.cluster.node_size > 1
    return replace(_volume(costs, plan), inter=nbytes, intra=nbytes if two_levels else 0.0)


def _row(scheme: str, volume: Volume, plan: Plan, base: Row | None) -> Row:
    time = predict(volume, plan.priced_cluster, numel=plan.counted, tokens=1)
    overlapped, serial = time.full_overlap, time.no_overlap
    return Row(
        scheme=scheme, inter_bytes=volume.inter, intra_bytes=volume.intra,
        communication=time.communication, step_overlapped=overlapped, step_serial=serial,
        speedup_overlapped=1.0 if base is None else base.step_overlapped / overlapped,
        speedup_serial=1.0 if base is None else base.step_serial / serial,
        memory=0.0, limit=_limit(volume, plan),
    )  # fmt: skip


def _limit(volume: Volume, plan: Plan) -> str:
    """The part of a step that takes longest, each priced alone by ``predict``."""
    one_node = plan.cluster.nodes == 1
    alone = {
        "links inside a node" if one_node else "link between nodes": Volume(inter=volume.inter),
        "encoding": Volume(inter=0.0, encoded=volume.encoded),
        "latency": Volume(inter=0.0, collectives=volume.collectives),
    }
    if not one_node:
        alone["links inside a node"] = Volume(inter=0.0, intra=volume.intra)
    parts = {name: predict(v, plan.priced_cluster, numel=plan.counted, tokens=1)
             for name, v in alone.items()}  # fmt: skip
    seconds = {name: time.communication for name, time in parts.items()}
    seconds["compute"] = plan.compute
    return max(seconds, key=seconds.__getitem__)
