"""Time one gather and one bucket of each candidate on the links of the run; take the fastest.

[Note: the ladder] Candidates are ordered by what they lose. A scheme is taken instead of a more
exact one only if the step becomes 5 % shorter: measurements are not better than that.

[Note: compute] How long a step computes is not known at start-up. It is taken to be as long as the
messages in full precision; that decides nothing but what 5 % is of.

[Note: what is timed] Every hop of the routes, by itself: encoding, the message and decoding of as
many elements as a gather or a bucket has, fewer where it is large. A step takes as many of them as
bring all elements. All ranks of the world measure at once, so that nodes send as they do in a step.
Several short messages in place of a large one would count its fixed cost several times: on a GPU a
message that takes less than 10 ms is timed again with more elements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from statistics import median

import torch

from ds_quant.codec.bound import BoundCodec
from ds_quant.codec.codec import CastCodec
from ds_quant.comm.message import all_gather
from ds_quant.comm.reduce import GradientSums
from ds_quant.comm.reduction_plan import GradientSpec, ReductionHop, Segment
from ds_quant.comm.transport import Communicator, HierarchicalCommunicator
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.wire import round_up, shard_range
from ds_quant.policy.route import Hop, Routes, times

WORTH_IT = 1.05  # see [Note: the ladder]
NUMEL_CPU, NUMEL_GPU = 1 << 18, 1 << 22  # timed at once; a GPU needs more to be busy at all
MOST_NUMEL_GPU = 1 << 26  # where messages are short and memory allows it
_SHORT = 0.01  # seconds of a message, of which a fixed cost of 0.2 ms is 2 %
_BYTES = 24  # per element, of what is timed and all that is made of it
_ADDRESS = Address(key=0, step=0)


def device_clock(device: torch.device) -> Callable[[], float]:
    """Return a clock that waits for the device before it is read: a launch on CUDA returns before
    its kernel has run.
    """
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def slowest(run: Callable[[], object], device: torch.device, *, repeats: int = 3) -> float:
    """Median seconds of ``run`` on the slowest rank of the world, so that all ranks decide alike.
    A first run, which compiles kernels, does not count. A collective.
    """
    clock, found = device_clock(device), []
    for _ in range(repeats + 1):
        torch.distributed.barrier()
        start = clock()
        run()
        found.append(clock() - start)
    seconds = torch.tensor([median(found[1:])], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(seconds, op=torch.distributed.ReduceOp.MAX)
    return seconds.item()


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


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step of an engine sends. numel, trained: elements of the model, and trained ones.
    gather, bucket: elements of one gather and of one bucket. dtype, gradients: of both roles.
    """

    numel: int
    trained: int
    gather: int
    bucket: int
    dtype: torch.dtype
    gradients: torch.dtype
    micro_steps: int
    gathers: float


def step_seconds(
    routes: Routes, hierarchy: HierarchicalCommunicator, work: Work, device: torch.device
) -> float:
    """Seconds that the messages of a step take under a scheme, nothing hidden. A collective."""
    often = {"micro_steps": work.micro_steps, "gathers": work.gathers}
    most = _most_numel(device)
    total, share = 0.0, 1.0
    hops = routes.weights(dtype=work.dtype).hops
    for hop, following in zip_longest(hops, hops[1:]):
        if hop.forwards:
            continue
        communicator = (
            hierarchy
            if following is not None and following.forwards
            else getattr(hierarchy, hop.level)
        )
        crosses_alone = routes.keeps_shard and hop.per == "step"  # a rank's rows, trained ones
        numel = work.trained / routes.node_size if crosses_alone else work.numel
        make = partial(_gather, hop, communicator, dtype=work.dtype, device=device)
        total += times(hop.per, **often) * numel * _seconds(make, work.gather, most, device)
    for hop in routes.gradients().hops:
        communicator = getattr(hierarchy, hop.level)
        make = partial(_reduce, routes, hop, communicator, dtype=work.gradients, device=device)
        seconds = _seconds(make, work.bucket, most, device)
        total += times(hop.per, **often) * share * work.trained * seconds
        share /= communicator.size
    return total


def _most_numel(device: torch.device) -> int:
    """Return how many elements may be timed at once, as many on all ranks. A collective on CUDA."""
    if device.type != "cuda":
        return NUMEL_CPU
    free, _ = torch.cuda.mem_get_info(device)
    room = torch.tensor([free // (4 * _BYTES)], device=device)
    torch.distributed.all_reduce(room, op=torch.distributed.ReduceOp.MIN)
    return max(NUMEL_GPU, min(int(room), MOST_NUMEL_GPU))


def _seconds(
    make: Callable[[int], Callable[[], object]], wanted: int, most: int, device: torch.device
) -> float:
    """Return the seconds per element of messages of ``wanted`` elements, of which ``make`` makes
    one: see [Note: what is timed]. A collective.
    """
    numel = max(1, min(wanted, most, NUMEL_GPU))
    seconds = slowest(make(numel), device)
    while numel < min(wanted, most) and seconds < _SHORT:  # alike on all ranks
        numel = min(wanted, most, 4 * numel)
        seconds = slowest(make(numel), device)
    return seconds / numel


def _values(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Not random: drawing would change the random numbers that the user's program draws."""
    return torch.linspace(-1, 1, numel, device=device).to(dtype)


def _gather(
    hop: Hop,
    communicator: Communicator | HierarchicalCommunicator,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[], object]:
    start, stop = shard_range(numel, communicator.size, communicator.rank)
    shard = _values(numel, dtype, device)[start:stop]
    bound_codec = BoundCodec(hop.sends(dtype), _ADDRESS)
    return lambda: all_gather([shard], [numel], [bound_codec], communicator).wait()


def _reduce(
    routes: Routes,
    hop: Hop,
    communicator: Communicator,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[], object]:
    codec = hop.sends(dtype)
    rotation = None if isinstance(codec, CastCodec) else routes.gradients().rotation
    spec = GradientSpec((codec,), 0 if rotation is None else rotation.block)
    width = round_up(-(-numel // communicator.size), spec.unit)
    shares = [
        Segment(0, r * width, width, 0, r * width, reducer=r) for r in range(communicator.size)
    ]
    alone = (ReductionHop(communicator=communicator, full_precision_own=hop.full_precision_own),)
    sums = GradientSums(shares, [spec], alone, communicator, scale=1.0)
    values, into = _values(width * communicator.size, dtype, device), sums.room(device)
    bound_codecs = [(BoundCodec(codec, _ADDRESS),)]
    return lambda: sums.begin([values], bound_codecs, [rotation], into=into).wait()


def choose(seconds: dict[str, float]) -> str:
    """Choose from candidates in the order of what they lose, the most exact one first: see
    [Note: the ladder] and [Note: compute].
    """
    chosen, *others = seconds
    besides = seconds[chosen]
    for name in others:
        if seconds[chosen] + besides > WORTH_IT * (seconds[name] + besides):
            chosen = name
    return chosen


def reason(seconds: dict[str, float]) -> str:
    """Give the reason of the choice, for the start-up line."""
    found = ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items())
    verdict = "nothing else gains 5 %: " if choose(seconds) == next(iter(seconds)) else ""
    return f"chosen by autotune: {verdict}messages of a step take {found}"
