"""Predict a step of a model on a cluster under every scheme.

No GPU, no files, no printing: settings in, rows out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch

from ds_quant.comm.reduction_plan import Slicing, presumed_pace
from ds_quant.config.presets import RESEARCH, YOURS, group_of, preset_names
from ds_quant.config.schema import QuantizedCommConfig, parse_block
from ds_quant.policy import choosing, cost, memory
from ds_quant.policy.autotune import WORTH_IT
from ds_quant.policy.cost import Cluster, CommVolume
from ds_quant.policy.model import FetchSettings, Model
from ds_quant.policy.model_volume import ModelVolume
from ds_quant.policy.refusals import can_start

# ---- the plan ----


GIGABIT = 1e9 / 8  # bytes per second
_GPU_SLICING = Slicing(pace=presumed_pace(torch.device("cuda"), "nccl"))
SMALL_BUCKET = 5 * 10**7  # elements: enough for a fast link, and a tenth of DeepSpeed's default


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """DeepSpeed's bucket sizes, in elements."""

    reduce: int = 5 * 10**8
    allgather: int = 5 * 10**8
    fetch: FetchSettings = FetchSettings()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run to predict, under DeepSpeed; ``fsdp2_plan.Fsdp2Plan`` is one under FSDP2.

    stock: the name of a run without the plugin.
    assumptions: sentences below the table.
    more_gpus: the way out of a model that does not fit.
    compute: seconds of an optimizer step without communication.
    block: the user's own, or None.
    exact_gradients: True if DeepSpeed reduces gradients itself.
    gpu_memory: bytes of a GPU; None if any scheme fits.
    offloads: the parts that DeepSpeed keeps in host memory, of "param" and "optimizer".
    presumed: settings that were not given, each with its value and the option that sets it.
    """

    stock: ClassVar[str] = "DeepSpeed as shipped"
    assumptions: ClassVar[tuple[str, ...]] = ()
    more_gpus: ClassVar[str] = "take more GPUs, a higher stage or offloading"

    model: Model
    dtype: torch.dtype
    stage: int
    micro_steps: int
    compute: float
    cluster: Cluster
    block: QuantizedCommConfig | None = None
    allow_full_replica: bool = False
    exact_gradients: bool = False
    gpu_memory: float | None = None
    offloads: frozenset[str] = frozenset()
    presumed: tuple[str, ...] = ()
    buckets: Buckets = field(default_factory=Buckets)

    @property
    def front(self) -> str:
        """The front and its stage in words."""
        return f"ZeRO-{self.stage}"

    @property
    def facts(self) -> dict[str, Any]:
        """The front and its stage as JSON types."""
        return {"stage": self.stage}

    @property
    def parts(self) -> Sequence[Plan]:
        """Plans of the parts of the model that GPUs of their own share, as each GPU has them."""
        return (self,)

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return self.cluster.nodes * self.cluster.node_size

    @property
    def counted(self) -> int:
        """Parameters behind figures per parameter: frozen ones are sent under ZeRO-3 only."""
        return self.model.numel if self.stage == 3 else self.model.trained

    @property
    def has_two_levels(self) -> bool:
        """True if there are several nodes of several GPUs."""
        return self.cluster.nodes > 1 and self.cluster.node_size > 1

    @property
    def place(self) -> choosing.Place:
        """Stage and nodes, by which schemes are advised."""
        return choosing.Place(
            self.stage, self.cluster.nodes, self.cluster.node_size, self.allow_full_replica
        )

    @property
    def advised(self) -> str:
        """The scheme that the table advises; ``choosing.NOTHING`` to leave the block out."""
        link = self.cluster.intra_link
        if self.cluster.nodes > 1:
            link = self.cluster.link
        return choosing.recommended(self.place, link / GIGABIT)

    @property
    def gathers(self) -> float:
        """Gathers of the weights in a micro-step."""
        if self.stage < 3:
            return 1.0
        return self.buckets.fetch.gathers(self.model.numel, self.model.modules)

    @property
    def offloads_shard(self) -> bool:
        """True if a node shard is in host memory."""
        return self.stage == 3 and "param" in self.offloads

    @cached_property
    def stock_host_memory(self) -> float:
        """Host bytes per GPU of the parts that DeepSpeed offloads, with Adam.

        Offloaded optimizer: fp32 gradients, masters and two states. Offloaded weights: the shard.
        """
        nbytes = 0.0
        if "optimizer" in self.offloads:
            nbytes += (16 if self.dtype.itemsize == 2 else 12) * self.model.trained / self.ranks
        if self.offloads_shard:
            nbytes += self.dtype.itemsize * self.model.numel / self.ranks
        return nbytes

    @cached_property
    def stock_memory(self) -> float:
        """Bytes per GPU with Adam and without the plugin and activations.

        Weights, gradients, fp32 masters and two states, as far as they are not offloaded, a bucket
        of gradients, and the elements that ZeRO-3 gathers at once.
        """
        model = self.model
        itemsize = self.dtype.itemsize
        weight_shards = self.ranks if self.stage == 3 else 1
        gradient_shards = self.ranks if self.stage >= 2 else 1
        offloads_optimizer = "optimizer" in self.offloads
        nbytes = 0.0
        if not self.offloads_shard:
            nbytes += itemsize * model.numel / weight_shards
        if not offloads_optimizer:
            nbytes += (12 if itemsize == 2 else 8) * model.trained / self.ranks
        if not offloads_optimizer or self.stage == 1:
            nbytes += itemsize * model.trained / gradient_shards
        if self.stage == 3:
            fetch = self.buckets.fetch
            live = fetch.stay(model.numel, model.modules) + fetch.prefetch_bucket_size
            nbytes += itemsize * min(model.numel, live + model.largest)
        return nbytes + itemsize * min(model.trained, self.buckets.reduce)

    @property
    def sizes(self) -> memory.Sizes:
        """The sizes that decide how much memory messages take."""
        fetch = self.buckets.fetch
        return memory.Sizes(
            trained=self.model.trained,
            largest=self.model.largest,
            bucket=self.buckets.reduce,
            window=self.buckets.allgather,
            prefetch=min(fetch.prefetch_bucket_size, fetch.max_live_parameters),
            offloaded=self.offloads_shard,
            slicing=_GPU_SLICING,
        )

    def other_rows(self, full_precision: ModelVolume) -> list[Row]:
        """Return rows of other ways to train without the plugin.

        full_precision: volume of the scheme of this name.
        """
        return []

    def too_large(self, gpu_memory: float) -> str:
        """Return a note if a GPU has less memory, or ""."""
        if self.gpu_memory is None or gpu_memory <= self.gpu_memory:
            return ""
        return f"{NEEDS}{gpu_memory / 1e9:.3g} GB"

    def preferred(self, rows: list[Row]) -> str:
        """Return the scheme to take of ``rows``, if it is one of them."""
        return self.advised

    def reason(self, taken: Row, faster: list[Row]) -> str:
        """Return the reason why ``taken`` is advised, and not the fastest row.

        faster: rows with a shorter step, not empty.
        """
        names = " and ".join(row.scheme for row in faster)
        below = choosing.advised_below(self.place, faster[0].scheme)
        if len(faster) == 1 and faster[0].most_bytes is not None and below is not None:
            return (
                f"{names} is faster in this table, which counts the same time to encode for every "
                "scheme. Lossless weights take longer to encode, so it is advised below "
                f"{below:g} Gb/s only"
            )
        verb = "is" if len(faster) == 1 else "are"
        return (
            f"{names} {verb} faster, and {taken.scheme} is what docs/choosing.md advises for this "
            "stage and link, where loss counts, too"
        )

    def with_link(self, gigabits: float) -> Plan:
        """Return the plan with another link between nodes, in Gb/s."""
        return replace(self, cluster=replace(self.cluster, link=gigabits * GIGABIT))

    def with_small_buckets(self) -> Plan:
        """Return the plan with buckets of at most ``SMALL_BUCKET`` elements."""
        buckets = replace(
            self.buckets,
            reduce=min(SMALL_BUCKET, self.buckets.reduce),
            allgather=min(SMALL_BUCKET, self.buckets.allgather),
        )
        return replace(self, buckets=buckets)


# ---- the forecast ----


NEEDS = "needs "  # begins the note of a scheme that needs more memory than there is


@dataclass(frozen=True, kw_only=True)
class Row:
    """Prediction of one scheme: volumes in bytes per parameter and step, see cost.py; times in
    seconds; memory in bytes per rank.

    step_overlapped, step_serial: a step whose communication is fully hidden behind compute, or
        not hidden at all.
    speedup_overlapped, speedup_serial: over DeepSpeed as shipped, of these two.
    memory: kept between steps by the scheme.
    peak: messages and sums in a step, at most.
    gpu_memory: all that a GPU holds, without activations.
    host_memory: all that is offloaded from a GPU, with the node shard.
    limit: the part that takes longest.
    note: the reason why the scheme is not advised, or empty.
    most_bytes: inter_bytes at most if they depend on the learning rate, else None.
    by_part: inter_bytes of every part of the model, by its name; empty for one part.
    """

    scheme: str
    inter_bytes: float
    intra_bytes: float
    communication: float
    step_overlapped: float
    step_serial: float
    speedup_overlapped: float = 1.0
    speedup_serial: float = 1.0
    memory: float = 0.0
    limit: str
    peak: float = 0.0
    gpu_memory: float = 0.0
    host_memory: float = 0.0
    note: str = ""
    most_bytes: float | None = None
    by_part: dict[str, float] = field(default_factory=dict)

    @property
    def speedups(self) -> tuple[float, float]:
        """The lowest and the highest speed-up."""
        lowest = min(self.speedup_overlapped, self.speedup_serial)
        highest = max(self.speedup_overlapped, self.speedup_serial)
        return lowest, highest

    @property
    def may_be_taken(self) -> bool:
        """True if the scheme is advised or only needs more memory."""
        return not self.note or self.note.startswith(NEEDS)


def forecast(plan: Plan) -> list[Row]:
    """Return a row for DeepSpeed as shipped, one for the user's block and one per preset."""
    blocks = {}
    if plan.block is not None:
        blocks[f"your block ({plan.block.scheme})"] = plan.block
    for name in preset_names():
        block = {"scheme": name, "allow_full_replica": plan.allow_full_replica}
        blocks[name] = parse_block(block)
    full_precision = _comm_volume(blocks["full_precision"], plan)
    stock = _stock_row(plan, full_precision)
    others = [_compared(row, stock) for row in plan.other_rows(full_precision)]
    schemes = [_scheme_row(name, block, plan, stock) for name, block in blocks.items()]
    return [stock, *others, *schemes]


def volume_of_block(block: QuantizedCommConfig, plan: Plan) -> tuple[float, CommVolume]:
    """Return the bytes per parameter and step without the plugin, and the volume of a block."""
    (volume,) = _comm_volume(block, plan).parts
    return _stock_bytes(plan, volume.trained), volume


def _stock_bytes(plan: Plan, trained: float) -> float:
    """Return the bytes per parameter and step of a run without the plugin."""
    return cost.stock_bytes(
        plan.stage,
        plan.dtype,
        micro_steps=plan.micro_steps,
        gathers=plan.gathers,
        trained=trained,
    )


def _stock_row(plan: Plan, full_precision: ModelVolume) -> Row:
    """Return the row of DeepSpeed as shipped.

    full_precision: volume of the scheme of this name, which has as many collectives.
    """
    nbytes = _stock_bytes(plan, full_precision.trained)
    return row_of(
        plan.stock.lower(),
        plan,
        full_precision,
        sent=[Sent(nbytes, nbytes if part.has_two_levels else 0.0) for part in plan.parts],
        gpu_memory=plan.stock_memory,
        host_memory=plan.stock_host_memory,
    )


def _scheme_row(name: str, block: QuantizedCommConfig, plan: Plan, stock: Row) -> Row:
    """Return the row of a block.

    stock: the row of DeepSpeed as shipped, to which speed-up and memory are relative.
    """
    volume = _comm_volume(block, plan)
    memory_kept = volume.memory * volume.numel
    peak = volume.peak_bytes([part.sizes for part in plan.parts])
    if plan.micro_steps > 1:
        peak += volume.partial_sums * volume.numel
    gpu_memory = stock.gpu_memory
    host_memory = stock.host_memory
    if plan.offloads_shard:
        host_memory += memory_kept
    else:
        gpu_memory += memory_kept
    gpu_memory += peak
    note = _objection(name, block, plan) or plan.too_large(gpu_memory)
    most_bytes = None
    if volume.varies:
        most_bytes = volume.step_bytes(plan.stage, micro_steps=plan.micro_steps, most=True)
    row = row_of(
        name,
        plan,
        volume,
        sent=[
            Sent(
                part.step_bytes(plan.stage, micro_steps=plan.micro_steps),
                part.intra_bytes(plan.stage, micro_steps=plan.micro_steps),
            )
            for part in volume.parts
        ],
        memory=memory_kept,
        peak=peak,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        note=note,
        most_bytes=most_bytes,
    )
    return _compared(row, stock)


def _compared(row: Row, stock: Row) -> Row:
    """Return a row with its speed-up over the row of a run without the plugin."""
    return replace(
        row,
        speedup_overlapped=stock.step_overlapped / row.step_overlapped,
        speedup_serial=stock.step_serial / row.step_serial,
    )


def _objection(name: str, block: QuantizedCommConfig, plan: Plan) -> str:
    """Return the reason why start-up refuses a scheme or another one is advised, or ""."""
    for part in plan.parts:
        node_size = part.cluster.node_size
        if not can_start(block, stage=plan.stage, world=part.ranks, node_size=node_size):
            return "start-up refuses it: needs 2 GPUs per node, or allow_full_replica"
    group = group_of(name)
    if group == RESEARCH:
        return group
    if name not in preset_names() or group == YOURS:
        return ""  # the user's own
    advised = list(choosing.candidates(plan.place))
    if plan.stage == 3:
        advised.append("hybrid")
    return "" if name in advised else "others are advised here"


class Sent(NamedTuple):
    """Volumes of a part between nodes, or over all ranks on one node, and inside them."""

    inter: float
    intra: float


def row_of(
    scheme: str,
    plan: Plan,
    volume: ModelVolume,
    *,
    sent: Sequence[Sent],
    gpu_memory: float,
    host_memory: float,
    memory: float = 0.0,
    peak: float = 0.0,
    note: str = "",
    most_bytes: float | None = None,
    more_exchanges: int = 0,
) -> Row:
    """Return a row with the times of its bytes.

    One collective is counted per layer and exchange. Parts are sent one after the other.

    sent: of every part. more_exchanges: besides those of ``volume``.
    """
    seconds: Counter[str] = Counter()
    inter_bytes = intra_bytes = 0.0
    has_several_nodes = any(part.cluster.nodes > 1 for part in plan.parts)
    for part, own, part_sent in zip(plan.parts, volume.parts, sent, strict=True):
        exchanges = own.step_gathers(plan.stage, plan.micro_steps)
        exchanges += own.reductions(plan.stage, plan.micro_steps) + more_exchanges
        of_part = cost.seconds(
            part.cluster,
            part.counted,
            inter=part_sent.inter,
            intra=part_sent.intra,
            encoded=0.0 if own.full_precision_share == 1 else exchanges,
            collectives=exchanges * part.model.layers,
        )
        seconds.update(of_part)
        share = own.numel / volume.numel
        if part.cluster.nodes == 1 and has_several_nodes:
            intra_bytes += share * (part_sent.inter + part_sent.intra)
        else:
            inter_bytes += share * part_sent.inter
            intra_bytes += share * part_sent.intra
    by_part: dict[str, float] = {}
    if len(plan.parts) > 1:
        pairs = zip(plan.parts, sent, strict=True)
        by_part = {part.model.name: part_sent.inter for part, part_sent in pairs}
    communication = sum(seconds.values())
    limits = {**seconds, "compute": plan.compute}
    return Row(
        scheme=scheme,
        inter_bytes=inter_bytes,
        intra_bytes=intra_bytes,
        communication=communication,
        step_overlapped=max(communication, plan.compute),
        step_serial=communication + plan.compute,
        memory=memory,
        limit=max(limits, key=limits.__getitem__),
        peak=peak,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        note=note,
        most_bytes=most_bytes,
        by_part=by_part,
    )


def _comm_volume(block: QuantizedCommConfig, plan: Plan) -> ModelVolume:
    """Return the volume of a block's messages."""
    scheme = block.to_scheme()
    volumes = [
        cost.comm_volume(
            scheme,
            part.stage,
            part.model.param_specs,
            ranks=part.ranks,
            node_size=part.cluster.node_size,
            gradient_dtype=part.dtype,
            gathers=part.gathers,
            stock_gradients=part.exact_gradients,
        )
        for part in plan.parts
    ]
    # The specs stand for more parameters.
    pairs = zip(volumes, plan.parts, strict=True)
    return ModelVolume(tuple([replace(volume, numel=part.counted) for volume, part in pairs]))


# ---- the answer ----

_ALIKE = 1.01  # steps whose lengths differ less count as equal


def answer(plan: Plan, rows: list[Row]) -> tuple[Row, list[str]]:
    """Return the row to take and the reasons in sentences.

    The row of DeepSpeed as shipped means to leave the block out.
    """
    stock = rows[0]
    room = plan.gpu_memory or float("inf")
    small = plan.with_small_buckets()
    if small.stock_memory > room:
        return stock, [
            f"the model itself does not fit: {plan.stock.partition(' ')[0]} needs "
            f"{_gb(small.stock_memory)} GB of {_gb(room)} per GPU without ds_quant, without "
            f"activations: {plan.more_gpus}"
        ]
    if not plan.advised:
        return stock, ["leave the block out: on one node links are too fast for it to gain"]
    gaining = [row for row in rows[1:] if row.may_be_taken and row.speedup_serial >= WORTH_IT]
    if not gaining:
        return stock, [f"leave the block out: nothing gains 5 %, {stock.limit} limits the step"]
    # The preferred scheme first, then the shortest step.
    preferred = plan.preferred(gaining)
    gaining.sort(key=lambda row: (row.scheme != preferred, row.step_serial))
    best = gaining[0]
    gain = f"{best.scheme} gains {span(*best.speedups, '.1f')} x"
    with_small_buckets = next(row for row in forecast(small) if row.scheme == best.scheme)
    saved = best.gpu_memory - with_small_buckets.gpu_memory
    keys = "reduce_bucket_size"
    if plan.stage < 3:
        keys += " and allgather_bucket_size"
    smaller_buckets = f"set {keys} to 5e7, -{_gb(saved)} GB"
    if best.gpu_memory > room >= with_small_buckets.gpu_memory:
        return with_small_buckets, [f"{gain} but does not fit: {smaller_buckets}"]
    fitting = [row for row in gaining if row.gpu_memory <= room]
    if not fitting:
        return stock, [f"leave the block out: {gain} but needs {_gb(best.gpu_memory)} GB per GPU"]
    taken = fitting[0]
    sentences = [
        f"take {taken.scheme}: {span(*taken.speedups, '.1f')} x as fast as {plan.stock}, "
        f"+{_gb(taken.gpu_memory - stock.gpu_memory)} GB per GPU"
    ]
    faster = [row for row in fitting if row.step_serial < taken.step_serial / _ALIKE]
    if faster:
        sentences.append(plan.reason(taken, faster))
    if taken is not best:
        sentences.append(f"{gain} but needs {_gb(best.gpu_memory)} GB per GPU")
    elif saved > 1e9:
        sentences.append(f"to save memory {smaller_buckets}")
    return taken, sentences


def _gb(nbytes: float) -> str:
    if abs(nbytes) < 1e10:
        return f"{nbytes / 1e9:.2g}"
    return f"{nbytes / 1e9:.3g}"


def span(low: float, high: float, form: str) -> str:
    """Format a range; one number if both look alike."""
    first = format(low, form)
    last = format(high, form)
    return first if first == last else f"{first}-{last}"
