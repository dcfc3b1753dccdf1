"""Which scheme has the shortest step on measured links: the choice behind "autotune".

[Note: the ladder] Candidates are ordered by what they lose. A scheme is taken instead of a more
exact one only if the step becomes 5 % shorter: predictions are not better than that.

[Note: compute] How long a step computes is not known at start-up. Unless it is given, it is taken
to be as long as the messages in full precision; that decides nothing but what 5 % is of.

May import bandwidth, codec_speed, cost, scheme, slicing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_quant.bandwidth import Rate
from ds_quant.codec_speed import Speeds
from ds_quant.cost import Bill, Cluster, Volume, predict
from ds_quant.scheme import Scheme
from ds_quant.slicing import SLICE_SECONDS

WORTH_IT = 1.05  # see [Note: the ladder]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a step runs: ZeRO stage, micro-steps per optimizer step, nodes and ranks per node.

    modules: those whose own parameters ZeRO-3 gathers. gathers: of each in a micro-step.
    """

    stage: int
    micro_steps: int
    nodes: int
    node_size: int
    modules: int = 0
    gathers: float = 2.0

    @property
    def step_gathers(self) -> float:
        """Times that an optimizer step gathers the weights."""
        return self.gathers * self.micro_steps if self.stage == 3 else 1.0


@dataclass(frozen=True, kw_only=True)
class Links:
    """Measured rates; None for a level that the ranks do not have. ``inter`` is into a node."""

    intra: Rate | None
    inter: Rate | None

    def __str__(self) -> str:
        levels = ((self.inter, "into a node"), (self.intra, "into a rank inside a node"))
        return " and ".join(
            f"{rate.bytes_per_second * 8 / 1e9:.3g} Gb/s {where}" for rate, where in levels if rate
        )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A scheme, its bytes, and seconds per parameter that a rank encodes and decodes in a step."""

    name: str
    bill: Bill
    codec: float


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The scheme, and seconds of messages and codecs of a step for every candidate."""

    scheme: str
    seconds: dict[str, float]

    def reason(self, links: Links) -> str:
        """What the start-up line says."""
        found = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in self.seconds.items())
        exact = self.scheme == next(iter(self.seconds))
        verdict = "nothing else gains 5 %: " if exact else ""
        return f"chosen by autotune: {verdict}messages of a step take {found} at {links}"


def choose(
    candidates: Sequence[Candidate], place: Place, links: Links, *, compute: float | None = None
) -> Choice:
    """The choice among candidates in the order of what they lose, the most exact one first.

    ``compute``: seconds of a step without messages, see [Note: compute].
    """
    seconds = {c.name: messages(c, place, links) for c in candidates}
    chosen, *others = seconds
    besides = seconds[chosen] if compute is None else compute
    for name in others:
        if seconds[chosen] + besides > WORTH_IT * (seconds[name] + besides):
            chosen = name
    return Choice(scheme=chosen, seconds=seconds)


def messages(candidate: Candidate, place: Place, links: Links) -> float:
    """Seconds of a step that a rank encodes, sends and decodes, nothing hidden."""
    bill = candidate.bill
    volume = Volume(
        inter=bill.step_bytes(place.stage, micro_steps=place.micro_steps),
        intra=bill.intra_bytes(place.stage, micro_steps=place.micro_steps),
        encoded=1.0,
    )
    none = float("inf")
    cluster = Cluster(
        nodes=place.nodes,
        node_size=place.node_size,
        link=none if links.inter is None else links.inter.bytes_per_second,
        intra_link=none if links.intra is None else links.intra.bytes_per_second,
        flops=none,
        encode=1 / candidate.codec if candidate.codec else none,
    )
    seconds = predict(volume, cluster, numel=bill.numel, tokens=0).communication
    return seconds + _latency_of_gathers(bill, place, links)


def _latency_of_gathers(bill: Bill, place: Place, links: Links) -> float:
    """What the gathers of ZeRO-3 take beyond their bytes; those from a node shard stay in the node.

    Reductions are as many under every scheme.
    """
    if place.stage < 3:
        return 0.0
    passed = (links.intra,) if bill.once_per_step else (links.inter, links.intra)
    latency = sum(rate.latency for rate in passed if rate is not None)
    return place.step_gathers * place.modules * latency


def slice_pace(candidate: Candidate, place: Place, links: Links) -> float | None:
    """For ``Slicing``: seconds that an element of a reduction takes on the shorter of its two
    hops, over those that a slice costs beyond its bytes; None without two levels.
    """
    if links.intra is None or links.inter is None:
        return None
    inside = candidate.bill.gradients_intra * (1 - 1 / place.node_size)
    between = candidate.bill.gradients * (1 - 1 / place.nodes)
    per_element = min(inside / links.intra.bytes_per_second, between / links.inter.bytes_per_second)
    return per_element / (SLICE_SECONDS + links.intra.latency + links.inter.latency)


def codec_seconds(scheme: Scheme, speeds: Speeds, place: Place) -> float:
    """Seconds per parameter that a rank encodes and decodes in a step.

    A gather encodes the own shard and decodes all; a reduction encodes all and decodes as much, in
    as many rows as there are ranks, less its own row where that stays exact. With two levels the
    second hop handles the node's share.
    """
    world, size = place.nodes * place.node_size, place.node_size
    gathers = place.step_gathers
    reductions = 1 if place.stage == 1 else place.micro_steps
    outer, inner = speeds.weights, speeds.weights_intra
    kept = place.stage == 3 and scheme.node_shard
    if kept and place.nodes > 1:
        weights = outer.encode / world + outer.decode / size
        if size > 1:
            weights += gathers * (inner.encode / size + inner.decode)
    else:
        used = inner if kept else outer
        weights = gathers * (used.encode / world + used.decode)
    first = speeds.gradients if size == 1 else speeds.gradients_intra
    gradients = first.encode + first.decode
    if place.nodes > 1 and size > 1:
        gradients *= 1 - 1 / size
        second = speeds.gradients.encode + speeds.gradients.decode
        gradients += second * (1 - 1 / place.nodes) / size
    elif scheme.gradients_intra is not None:
        gradients *= 1 - 1 / world
    return weights + reductions * gradients
