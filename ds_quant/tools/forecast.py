"""Predict a step of a model on a cluster under every scheme.

No GPU, no files, no printing: settings in, rows out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from ds_quant.comm.reduction_plan import Slicing, presumed_pace
from ds_quant.config.presets import RESEARCH, YOURS, group_of, preset_names
from ds_quant.config.schema import QuantizedCommConfig, parse_block
from ds_quant.policy import choosing, cost, memory
from ds_quant.policy.cost import Cluster
from ds_quant.policy.model import FetchSettings, Model
from ds_quant.policy.refusals import starts

# ---- the plan ----


GIGABIT = 1e9 / 8  # bytes per second
_SIZES = "reduce", "allgather"  # of buckets; the second one under ZeRO-1/2
_ON_GPUS = Slicing(pace=presumed_pace(torch.device("cuda"), "nccl"))
SMALL_BUCKET = 5 * 10**7  # elements: enough for a fast link, and a tenth of DeepSpeed's default


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """DeepSpeed's bucket sizes, in elements."""

    reduce: int = 5 * 10**8
    allgather: int = 5 * 10**8
    fetch: FetchSettings = FetchSettings()


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
    def place(self) -> choosing.Place:
        """What the advice depends on, apart from the link."""
        nodes, node_size = self.cluster.nodes, self.cluster.node_size
        return choosing.Place(self.stage, nodes, node_size, self.allow_full_replica)

    @property
    def advised(self) -> str:
        """The scheme of the table, ``choosing.NOTHING`` for none."""
        cluster = self.cluster
        link = cluster.link if cluster.nodes > 1 else cluster.intra_link
        return choosing.recommended(self.place, link / GIGABIT)

    @property
    def gathers(self) -> float:
        """Of the weights in a micro-step."""
        if self.stage < 3:
            return 1.0
        return self.buckets.fetch.gathers(self.model.numel, self.model.modules)

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
        model, size, fetch = self.model, self.dtype.itemsize, self.buckets.fetch
        part = {1: (1, 1), 2: (1, self.ranks), 3: (self.ranks, self.ranks)}[self.stage]
        held = 0.0 if self.offloads_shard else size * model.numel / part[0]
        if "optimizer" not in self.offloads:
            held += (12 if size == 2 else 8) * model.trained / self.ranks
        if "optimizer" not in self.offloads or self.stage == 1:
            held += size * model.trained / part[1]
        if self.stage == 3:
            live = fetch.stay(model.numel, model.modules) + fetch.prefetch_bucket_size
            held += size * min(model.numel, live + model.largest)
        return held + size * min(model.trained, self.buckets.reduce)

    def at(self, *, link: float | None = None, micro_steps: int | None = None) -> Plan:
        """Return the plan with another link between nodes, in Gb/s, or other micro-steps."""
        cluster = replace(self.cluster, link=self.cluster.link if link is None else link * GIGABIT)
        return replace(self, cluster=cluster, micro_steps=micro_steps or self.micro_steps)


# ---- the forecast ----


SHIPPED = "deepspeed as shipped"
WORTH_IT = 1.05  # speed-ups below are not worth a change


@dataclass(frozen=True, kw_only=True)
class Row:
    """One scheme. Bytes per parameter and step as volumes, see cost.py; times in seconds.

    step_overlapped, step_serial: communication hidden behind compute entirely, or not at all.
    speedup_*: over DeepSpeed as shipped, of these two. memory: bytes more on every rank, between
    steps; peak: besides, in a step, of messages and sums; gpu_memory: all that a GPU holds;
    host_memory: all that is offloaded from it, the node shard too.
    limit: what takes longest. note: why it is not advised; empty if it may be.
    most_bytes: inter_bytes at most, where they depend on the learning rate, else None.
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

    @property
    def speedups(self) -> tuple[float, float]:
        """The lowest and the highest speed-up."""
        both = self.speedup_overlapped, self.speedup_serial
        return min(both), max(both)


def forecast(plan: Plan) -> list[Row]:
    """A row for DeepSpeed as shipped, for the user's block and for every preset."""
    replica = {"allow_full_replica": plan.allow_full_replica}
    blocks = {name: parse_block({"scheme": name, **replica}) for name in preset_names()}
    if plan.block is not None:
        blocks = {f"your block ({plan.block.scheme})": plan.block, **blocks}
    plain = _bill(blocks["full_precision"], plan)
    two_levels = plan.cluster.nodes > 1 and plan.cluster.node_size > 1
    nbytes = cost.stock_bytes(
        plan.stage, plan.dtype, micro_steps=plan.micro_steps, gathers=plan.gathers,
        trained=plain.trained,
    )  # fmt: skip
    shipped = _row(
        SHIPPED, plan, plain, nbytes, nbytes * two_levels, gpu_memory=plan.shipped_memory,
        host_memory=plan.shipped_host_memory,
    )  # fmt: skip
    return [shipped, *(_priced(name, block, plan, shipped) for name, block in blocks.items())]


def _priced(name: str, block: QuantizedCommConfig, plan: Plan, base: Row) -> Row:
    costs, steps = _bill(block, plan), {"micro_steps": plan.micro_steps}
    kept, peak = costs.memory * plan.counted, _peak(costs, plan)
    if plan.micro_steps > 1:
        peak += costs.partial_sums * plan.counted
    sent = costs.step_bytes(plan.stage, **steps), costs.intra_bytes(plan.stage, **steps)
    most = costs.step_bytes(plan.stage, **steps, most=True) if costs.varies else None
    needed, note = base.gpu_memory + kept * (not plan.offloads_shard) + peak, ""
    if plan.gpu_memory is not None and needed > plan.gpu_memory:
        note = f"needs {needed / 1e9:.3g} GB"
    row = _row(
        name, plan, costs, *sent, memory=kept, peak=peak, most_bytes=most, gpu_memory=needed,
        host_memory=base.host_memory + kept * plan.offloads_shard,
        note=_against(name, block, plan) or note,
    )  # fmt: skip
    return replace(
        row, speedup_overlapped=base.step_overlapped / row.step_overlapped,
        speedup_serial=base.step_serial / row.step_serial,
    )  # fmt: skip


def _against(name: str, block: QuantizedCommConfig, plan: Plan) -> str:
    """Return why start-up would refuse the scheme, or why another one is advised."""
    nodes = {"world": plan.ranks, "node_size": plan.cluster.node_size}
    if not starts(block, stage=plan.stage, **nodes):
        return "start-up refuses it: needs allow_full_replica"
    group = group_of(name)
    if group == RESEARCH:
        return group
    advised = *choosing.candidates(plan.place), *["hybrid"] * (plan.stage == 3)
    known = name in preset_names() and group != YOURS
    return "others are advised here" if known and name not in advised else ""


def _row(
    scheme: str, plan: Plan, costs: cost.CommVolume, inter: float, intra: float, **more: object
) -> Row:
    """One collective per layer and exchange; encoded is what has a codec."""
    steps = plan.stage, plan.micro_steps
    exchanges = costs.step_gathers(*steps) + costs.reductions(*steps)
    encoded = 0.0 if costs.full_precision_share == 1 else exchanges
    parts = cost.seconds(
        plan.cluster, plan.counted, inter=inter, intra=intra, encoded=encoded,
        collectives=exchanges * plan.model.layers,
    )  # fmt: skip
    communication, compute = sum(parts.values()), plan.compute
    limits = {**parts, "compute": compute}
    return Row(
        scheme=scheme, inter_bytes=inter, intra_bytes=intra, communication=communication,
        step_overlapped=max(communication, compute), step_serial=communication + compute,
        limit=max(limits, key=limits.__getitem__), **more,
    )  # fmt: skip


def _peak(costs: cost.CommVolume, plan: Plan) -> float:
    buckets, model, fetch = plan.buckets, plan.model, plan.buckets.fetch
    sizes = memory.Sizes(
        trained=model.trained, largest=model.largest, bucket=buckets.reduce,
        window=buckets.allgather,
        prefetch=min(fetch.prefetch_bucket_size, fetch.max_live_parameters),
        itemsize=plan.dtype.itemsize, offloaded=plan.offloads_shard, slicing=_ON_GPUS,
    )  # fmt: skip
    return memory.peak_bytes(replace(costs, numel=plan.counted), sizes)


def _bill(block: QuantizedCommConfig, plan: Plan) -> cost.CommVolume:
    cluster = plan.cluster
    return cost.comm_volume(
        block.to_scheme(), plan.stage, plan.model.param_specs, ranks=plan.ranks,
        node_size=cluster.node_size, gradient_dtype=plan.dtype, gathers=plan.gathers,
        stock_gradients=plan.exact_gradients,
    )  # fmt: skip


# ---- the answer ----


def answer(plan: Plan, rows: list[Row]) -> tuple[Row, list[str]]:
    """Return what to take, DeepSpeed as shipped for nothing, and why in sentences."""
    shipped, room = rows[0], plan.gpu_memory or float("inf")
    sizes = {name: min(SMALL_BUCKET, getattr(plan.buckets, name)) for name in _SIZES}
    small = replace(plan, buckets=replace(plan.buckets, **sizes))
    if small.shipped_memory > room:
        return shipped, [
            f"the model itself does not fit: DeepSpeed needs {_gb(small.shipped_memory)} GB of "
            f"{_gb(room)} per GPU without ds_quant, without activations: take more GPUs, a higher "
            "stage or offloading"
        ]
    if not plan.advised:
        return shipped, ["leave the block out: on one node links are too fast for it to gain"]
    fit = (row for row in rows[1:] if not row.note or row.note.startswith("needs "))
    gaining = [row for row in fit if row.speedup_serial >= WORTH_IT]
    gaining.sort(key=lambda row: (row.scheme != plan.advised, row.step_serial))
    if not gaining:
        return shipped, [f"leave the block out: nothing gains 5 %, {shipped.limit} limits the step"]
    first = gaining[0]
    gains = f"{span(*first.speedups, '.1f')} x"
    (less,) = (row for row in forecast(small) if row.scheme == first.scheme)
    keys = " and ".join(f"{name}_bucket_size" for name in _SIZES[: 2 - (plan.stage == 3)])
    saved = first.gpu_memory - less.gpu_memory
    set_them = f"set {keys} to 5e7, -{_gb(saved)} GB"
    if first.gpu_memory > room >= less.gpu_memory:
        return less, [f"{first.scheme} gains {gains} but does not fit: {set_them}"]
    taken = next((row for row in gaining if row.gpu_memory <= room), None)
    needs = f"{first.scheme} gains {gains} but needs {_gb(first.gpu_memory)} GB per GPU"
    if taken is None:
        return shipped, [f"leave the block out: {needs}"]
    said = [f"take {taken.scheme}: {span(*taken.speedups, '.1f')} x as fast as DeepSpeed as "
            f"shipped, +{_gb(taken.gpu_memory - shipped.gpu_memory)} GB per GPU"]  # fmt: skip
    if taken is not first:
        return taken, [*said, needs]
    return taken, said + [f"to save memory {set_them}"] * (saved > 1e9)


def other_stage(plan: Plan, taken: Row) -> list[str]:
    """Say which other ZeRO stage has a shorter step, with a block or without, if one has."""
    room, found = plan.gpu_memory or float("inf"), []
    for stage in sorted({2, 3, 1} - {plan.stage}, key=(2, 3, 1).index):
        other = replace(plan, stage=stage, block=None)
        rows = forecast(other)
        best, _ = answer(other, rows)
        if rows[0].step_serial <= WORTH_IT * best.step_serial:
            best = rows[0]
        if best.gpu_memory <= room:
            found.append((stage, best))
    stage, best = min(found, default=(0, taken), key=lambda f: f[1].step_serial)
    fits = taken.gpu_memory > room and stage
    if not fits and WORTH_IT * best.step_serial > taken.step_serial:
        return []
    plain = best.scheme == SHIPPED
    what = f"plain ZeRO-{stage} without the block" if plain else f"ZeRO-{stage} with {best.scheme}"
    steps = [span(row.step_overlapped, row.step_serial) for row in (best, taken)]
    than = "fits" if fits else f"is shorter than {steps[1]} s"
    return [f"{what} {than}: {steps[0]} s a step, {_gb(best.gpu_memory)} GB per GPU"]


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2g}" if abs(nbytes) < 1e10 else f"{nbytes / 1e9:.3g}"


def span(low: float, high: float, form: str = ".2g") -> str:
    """Format a range; one number if both look alike."""
    return "-".join(dict.fromkeys((format(low, form), format(high, form))))
