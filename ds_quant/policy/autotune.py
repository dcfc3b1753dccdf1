"""Time one gather and one bucket of each candidate on the links of the run; choose the fastest.

candidate  a scheme that autotune may choose
gather     the weights that DeepSpeed gathers in one message
bucket     the gradients that DeepSpeed reduces together

[Note: the ladder] Candidates are ordered by their loss of precision. A scheme replaces a more
precise one only if it shortens the step by 5 %: measurements are not more accurate than that.

[Note: compute] The compute time of a step is unknown at start-up. It is assumed equal to
full-precision communication; it only scales the 5 % threshold.

[Note: what is timed] Every hop of the routes, alone: encoding, message and decoding of the elements
of a gather or a bucket, or of fewer if it is large. A step takes as many of them as have all
elements. All ranks of the world measure at once, so nodes send as they do in a step. Several short
messages in place of a large one would count its fixed cost several times: on a GPU a message of
less than 10 ms is timed again with more elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch

from ds_quant.codec.bound import BoundCodec
from ds_quant.codec.codec import CastCodec
from ds_quant.comm.hierarchy import HierarchicalCommunicator
from ds_quant.comm.reduce import GradientSums
from ds_quant.comm.reduction_plan import GradientSpec, ReductionHop, Segment
from ds_quant.comm.rows import all_gather
from ds_quant.comm.transport import Communicator
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.wire import ceil_div, round_up, shard_range
from ds_quant.policy.route import Hop, Level, Routes, times
from ds_quant.policy.timing import slowest

WORTH_IT = 1.05  # see [Note: the ladder]
# Elements of a timed message. A GPU needs more of them to be busy.
NUMEL_CPU = 1 << 18
NUMEL_GPU = 1 << 22
MOST_NUMEL_GPU = 1 << 26  # if messages are short and memory allows it
_SHORT_SECONDS = 0.01  # of a message; a fixed cost of 0.2 ms is 2 % of it
_BYTES = 24  # per element: the timed values and all buffers that are made of them
_GROUP = 128  # elements: Gaussian levels are for whole groups
_ADDRESS = Address(key=0, step=0)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The communication of one optimizer step of an engine.

    numel: elements of the model. trained: elements of it that are trained.
    gather: elements of one gather. bucket: elements of one bucket.
    dtype: of the weights. gradients: dtype of the gradients.
    gathers: gathers of every element in a micro-step, under ZeRO-3.
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
    """Return the seconds of a step's messages under a scheme, nothing hidden. A collective."""
    most_numel = _most_numel(device)
    total = 0.0
    hops = routes.weights(dtype=work.dtype).hops
    for hop, next_hop in zip_longest(hops, hops[1:]):
        if hop.forwards:
            continue
        if next_hop is not None and next_hop.forwards:
            communicator: Communicator | HierarchicalCommunicator = hierarchy
        else:
            communicator = _communicator_of(hierarchy, hop.level)
        numel: float = work.numel
        if routes.keeps_shard and hop.per == "step":  # a rank's own rows, trained ones
            numel = work.trained / routes.node_size
        make = partial(_gather, hop, communicator, dtype=work.dtype, device=device)
        seconds = _seconds(make, work.gather, most_numel, device)
        total += _times(hop, work) * numel * seconds
    share = 1.0  # of the trained elements, that a rank reduces on a hop
    for hop in routes.gradients().hops:
        communicator = _communicator_of(hierarchy, hop.level)
        make = partial(_reduce, routes, hop, communicator, dtype=work.gradients, device=device)
        seconds = _seconds(make, work.bucket, most_numel, device)
        total += _times(hop, work) * share * work.trained * seconds
        share /= communicator.size
    return total + _returned_seconds(routes, hierarchy, work, device)


def _returned_seconds(
    routes: Routes, hierarchy: HierarchicalCommunicator, work: Work, device: torch.device
) -> float:
    """Return the seconds of a step's sums on their way back to all ranks. A collective."""
    route = routes.gradients()
    if route.returned is None:
        return 0.0
    communicator: Communicator | HierarchicalCommunicator = hierarchy
    if route.forwarded is None:
        communicator = _communicator_of(hierarchy, route.returned.level)
    whole_groups = _GROUP * communicator.size

    returned = route.returned

    def make(numel: int) -> Callable[[], object]:
        numel = round_up(numel, whole_groups)
        return _gather(returned, communicator, numel, dtype=work.gradients, device=device)

    seconds = _seconds(make, work.bucket, _most_numel(device), device)
    return _times(returned, work) * work.trained * seconds


def _communicator_of(hierarchy: HierarchicalCommunicator, level: Level) -> Communicator:
    communicator = {
        "flat": hierarchy.flat,
        "intra": hierarchy.intra,
        "inter": hierarchy.inter,
    }[level]
    assert communicator is not None, f"no communicator of the level {level}"
    return communicator


def _times(hop: Hop, work: Work) -> float:
    return times(hop.per, micro_steps=work.micro_steps, gathers=work.gathers)


def _most_numel(device: torch.device) -> int:
    """Return the most elements to time in one message, equal on all ranks. A collective on CUDA."""
    if device.type != "cuda":
        return NUMEL_CPU
    free_bytes, _ = torch.cuda.mem_get_info(device)
    fitting = torch.tensor([free_bytes // (4 * _BYTES)], device=device)
    torch.distributed.all_reduce(fitting, op=torch.distributed.ReduceOp.MIN)
    return max(NUMEL_GPU, min(int(fitting), MOST_NUMEL_GPU))


def _seconds(
    make: Callable[[int], Callable[[], object]],
    wanted_numel: int,
    most_numel: int,
    device: torch.device,
) -> float:
    """Return the seconds per element of a message. See [Note: what is timed]. A collective.

    make: returns the function that sends a message of a number of elements.
    wanted_numel: elements of a gather or a bucket.
    """
    target_numel = min(wanted_numel, most_numel)
    numel = max(1, min(target_numel, NUMEL_GPU))
    seconds = slowest(make(numel), device)
    while numel < target_numel and seconds < _SHORT_SECONDS:  # alike on all ranks
        numel = min(target_numel, 4 * numel)
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
    """Return the function that gathers ``numel`` weights."""
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
    """Return the function that reduces ``numel`` gradients over one hop."""
    codec = hop.sends(dtype)
    rotation = None if isinstance(codec, CastCodec) else routes.gradients().rotation
    spec = GradientSpec((codec,), 0 if rotation is None else rotation.block)
    width = round_up(ceil_div(numel, communicator.size), spec.unit)
    segments = [
        Segment(
            tensor=0,
            start=rank * width,
            numel=width,
            gradient=0,
            first=rank * width,
            reducer=rank,
        )
        for rank in range(communicator.size)
    ]
    single_hop = ReductionHop(communicator=communicator, full_precision_own=hop.full_precision_own)
    gradient_sums = GradientSums(segments, [spec], (single_hop,), communicator, scale=1.0)
    values = _values(width * communicator.size, dtype, device)
    sums = gradient_sums.new_sums(device)
    bound_codecs = [(BoundCodec(codec, _ADDRESS),)]
    return lambda: gradient_sums.begin([values], bound_codecs, [rotation], into=sums).wait()


# ---- the choice ----


def choose(seconds: dict[str, float]) -> str:
    """Return the chosen candidate. See [Note: the ladder] and [Note: compute].

    seconds: communication time by candidate, the most precise candidate first.
    """
    chosen, *others = seconds
    compute = seconds[chosen]
    for name in others:
        if seconds[chosen] + compute > WORTH_IT * (seconds[name] + compute):
            chosen = name
    return chosen


def reason(seconds: dict[str, float]) -> str:
    """Return the reason of the choice, for the start-up line."""
    measured = ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items())
    most_precise = next(iter(seconds))
    verdict = ""
    if choose(seconds) == most_precise:
        verdict = (
            "nothing else gains 5 % of a step whose compute takes as long as its messages in full "
            "precision: "
        )
    return f"chosen by autotune: {verdict}messages of a step take {measured}"
