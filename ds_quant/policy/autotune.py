"""Measure links and codecs and choose the scheme with the shortest step.

[Note: the ladder] Candidates are ordered by what they lose. A scheme is taken instead of a more
exact one only if the step becomes 5 % shorter: predictions are not better than that.

[Note: compute] How long a step computes is not known at start-up. Unless it is given, it is taken
to be as long as the messages in full precision; that decides nothing but what 5 % is of.

A launch on CUDA returns before its kernel has run, so a clock read on the host would time launches.

All ranks of the world measure at once, each its own link, so that nodes send as they do in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median

import torch

from ds_quant.codec.bound import Rotation, decode, decode_sum, encode
from ds_quant.codec.codec import CastCodec, Codec
from ds_quant.comm.reduction_plan import slice_seconds
from ds_quant.comm.transport import Link
from ds_quant.kernels.random_bits import Address
from ds_quant.policy.cost import Cluster, Costs, Volume, predict
from ds_quant.policy.route import Routes, gradient_codecs, times, weights_per
from ds_quant.policy.scheme import Scheme


def device_clock(device: torch.device) -> Callable[[], float]:
    """Return a clock that waits for the device before it is read."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


# ---- rates of the links ----


SMALL, FIRST, LARGEST = 1 << 10, 1 << 16, 1 << 24  # bytes from each rank, in a short measurement
RECEIVED = 1 << 28  # bytes at most that one rank receives, however many send
ENOUGH = 0.1  # seconds of a gather that a short measurement does not go beyond


@dataclass(frozen=True, kw_only=True)
class Rate:
    """bytes_per_second: into one rank inside a node, or into one node. latency: seconds."""

    bytes_per_second: float
    latency: float


def rate_from(received: Sequence[int], seconds: Sequence[float]) -> Rate:
    """Fit latency to the smallest message, and the rate to the largest one without that latency.

    Where noise or latency make up most of the largest message's time, nothing is taken off it:
    the rate is then too low rather than absurd.
    """
    latency, longest = seconds[0], seconds[-1]
    if latency > longest / 2:
        return Rate(bytes_per_second=received[-1] / longest, latency=latency)
    moved = received[-1] - received[0]
    return Rate(bytes_per_second=moved / (longest - latency), latency=latency)


def measure(
    link: Link,
    sizes: Sequence[int],
    device: torch.device,
    *,
    show: Callable[[int], None] = lambda nbytes: None,
) -> Rate:
    """Rate into one rank from gathers of ``sizes`` bytes per rank, the smallest first."""
    seconds = []
    for nbytes in sizes:
        show(nbytes)
        seconds.append(_seconds(link, nbytes, device, repeats=20 if nbytes < 1 << 20 else 5))
    return rate_from([nbytes * (link.size - 1) for nbytes in sizes], seconds)


def measure_shortly(link: Link, device: torch.device) -> Rate:
    """Measure a rate within about a second: messages grow until one takes long enough."""
    sizes, nbytes = [SMALL], FIRST
    seconds = [_seconds(link, SMALL, device, repeats=5)]
    while nbytes <= min(LARGEST, RECEIVED // link.size) and seconds[-1] < ENOUGH:
        sizes.append(nbytes)
        seconds.append(_seconds(link, nbytes, device, repeats=3))
        nbytes *= 4
    return rate_from([n * (link.size - 1) for n in sizes], seconds)


def _seconds(link: Link, nbytes: int, device: torch.device, *, repeats: int) -> float:
    """Median seconds of a gather of ``nbytes`` from every rank of the link, on the slowest rank of
    the world: all ranks get the same number, and decide alike.
    """
    payload = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    clock, found = device_clock(device), []
    for _ in range(repeats + 1):
        torch.distributed.barrier()
        start = clock()
        link.all_gather(payload, role="weights").wait()
        found.append(clock() - start)
    slowest = torch.tensor([median(found[1:])], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
    return slowest.item()


# ---- speeds of the codecs ----


NUMEL_CPU, NUMEL_GPU = 1 << 18, 1 << 22  # a GPU needs more to be busy at all
REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds per element."""

    encode: float
    decode: float


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Speeds of a scheme's codecs; a role without one has the speed of its cast."""

    weights: Speed
    weights_intra: Speed
    gradients: Speed
    gradients_intra: Speed


def speeds_of(
    scheme: Scheme, *, weights: torch.dtype, gradients: torch.dtype, device: torch.device
) -> Speeds:
    """Measure the codecs of a scheme; ``weights`` and ``gradients`` are what is encoded."""
    outer, inner = gradient_codecs(scheme)
    rotation = scheme.gradient_rotation
    return Speeds(
        weights=_weights(scheme.weights, weights, device, difference=scheme.difference),
        weights_intra=_weights(scheme.weights_intra, weights, device),
        gradients=_gradients(outer, gradients, device, rotation),
        gradients_intra=_gradients(inner, gradients, device, rotation),
    )


def _weights(
    codec: Codec | None, dtype: torch.dtype, device: torch.device, *, difference: bool = False
) -> Speed:
    if codec is None:
        codec, difference = CastCodec(dtype), False
    values = _values(dtype, device)[None]
    held = torch.zeros_like(values)
    wire = torch.empty(1, codec.wire_bytes(held.numel()), dtype=torch.uint8, device=device)
    how = {"address": Address(key=0, step=0), "base": held if difference else None}
    return Speed(
        encode=_per_element(values, lambda: encode(codec, values, wire, **how)),
        decode=_per_element(values, lambda: decode(codec, wire, held, add=difference)),
    )


def _gradients(
    codec: Codec | None, dtype: torch.dtype, device: torch.device, rotation: Rotation | None
) -> Speed:
    if codec is None:
        codec, rotation = CastCodec(dtype), None
    values = _values(dtype, device)[None]
    total = torch.empty_like(values[0], dtype=torch.float32)
    wire = torch.empty(1, codec.wire_bytes(total.numel()), dtype=torch.uint8, device=device)
    where, how = Address(key=0, step=0), {"rotation": rotation}
    return Speed(
        encode=_per_element(values, lambda: encode(codec, values, wire, address=where, **how)),
        decode=_per_element(values, lambda: decode_sum(codec, wire, total, **how)),
    )


def _per_element(values: torch.Tensor, operation: Callable[[], None]) -> float:
    """Median seconds of an operation on values; the first run compiles kernels, uncounted."""
    clock, seconds = device_clock(values.device), []
    for _ in range(REPEATS + 1):
        start = clock()
        operation()
        seconds.append(clock() - start)
    return median(seconds[1:]) / values.numel()


def _values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Not random: drawing would change the random numbers that the user's program draws."""
    numel = NUMEL_CPU if device.type == "cpu" else NUMEL_GPU
    return torch.linspace(-1, 1, numel, device=device).to(dtype)


# ---- the choice ----


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
        """How often an optimizer step gathers the weights."""
        return times(weights_per(self.stage), micro_steps=self.micro_steps, gathers=self.gathers)


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
    bill: Costs
    codec: float


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The scheme, and seconds of messages and codecs of a step for every candidate."""

    scheme: str
    seconds: dict[str, float]

    def reason(self, links: Links) -> str:
        """The reason for the start-up line."""
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


def _latency_of_gathers(bill: Costs, place: Place, links: Links) -> float:
    """Latency of ZeRO-3's gathers in a step; those from a node shard stay in the node.

    Reductions are as many under every scheme.
    """
    if place.stage < 3:
        return 0.0
    passed = (links.intra,) if bill.once_per_step else (links.inter, links.intra)
    latency = sum(rate.latency for rate in passed if rate is not None)
    return place.step_gathers * place.modules * latency


def slice_pace(
    candidate: Candidate, place: Place, links: Links, device: torch.device
) -> float | None:
    """For ``Slicing``: seconds that an element of a reduction takes on the shorter of its two
    hops, over those that a slice costs beyond its bytes; None without two levels.
    """
    if links.intra is None or links.inter is None:
        return None
    inside = candidate.bill.gradients_intra * (1 - 1 / place.node_size)
    between = candidate.bill.gradients * (1 - 1 / place.nodes)
    per_element = min(inside / links.intra.bytes_per_second, between / links.inter.bytes_per_second)
    return per_element / (slice_seconds(device) + links.intra.latency + links.inter.latency)


def codec_seconds(
    scheme: Scheme, speeds: Speeds, place: Place, *, shipped_gradients: bool = False
) -> float:
    """Seconds per parameter that a rank encodes and decodes in a step.

    A gather encodes what a rank has and decodes what it gets; a reduction encodes what a rank has
    and decodes as much, less its own contribution where that stays exact. ``shipped_gradients``:
    they take DeepSpeed's own path.
    """
    routes = Routes(
        scheme=scheme, stage=place.stage, nodes=place.nodes, node_size=place.node_size,
        shipped_gradients=shipped_gradients,
    )  # fmt: skip
    world = place.nodes * place.node_size
    ranks_of = {"intra": place.node_size, "inter": place.nodes, "whole": world}
    often = {"micro_steps": place.micro_steps, "gathers": place.gathers}
    seconds, share = 0.0, 1 / world  # of the weights that a rank has
    gather = routes.weights().hops
    for hop, following in zip_longest(gather, gather[1:]):
        speed = speeds.weights_intra if hop.inner else speeds.weights
        encoded = 0.0 if hop.forwards else share
        share *= ranks_of[hop.level]
        decoded = 0.0 if following is not None and following.forwards else share
        once = encoded * speed.encode + decoded * speed.decode
        seconds += times(hop.per, **often) * once
    share = 1.0  # of the gradients
    for hop in routes.gradients().hops:
        speed = speeds.gradients_intra if hop.inner else speeds.gradients
        ranks = ranks_of[hop.level]
        coded = share * (1 - hop.exact_own / ranks)
        seconds += times(hop.per, **often) * coded * (speed.encode + speed.decode)
        share /= ranks
    return seconds
