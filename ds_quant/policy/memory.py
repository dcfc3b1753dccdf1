"""Predict the peak memory of the plugin's messages and sums in a step.

[Note: counted buffers] Buffers of one rank that DeepSpeed alone would not have, without the memory
that a scheme keeps between steps.
Gradients: the messages of a bucket on every hop, fp32 copies of the own contributions and the fp32
sums. Where buckets do not wait for each other between the nodes, those of all buckets there. Under
ZeRO-1/2 a rank may own all of a bucket, whose sums are then delivered. Under DDP a bucket is sent
in runs: while one is on its way out, the sums of the run before go back.
Weights under ZeRO-1/2: two windows of ``allgather_bucket_size``, one being decoded and one in
flight. Under ZeRO-3: the message of the largest gather, and the messages in flight into the node
shard.
No reuse within a phase is assumed; the peak is the maximum over the phases. CUDA's allocator holds
somewhat more.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_quant.comm.lossless_gather import MOST_NUMEL as MOST_EXACT_NUMEL
from ds_quant.comm.reduction_plan import Slicing
from ds_quant.kernels.wire import FP32_BYTES, ceil_div
from ds_quant.policy.cost import CommVolume
from ds_quant.policy.in_flight import EXCHANGED_AT_ONCE, chunk_numel


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that decide the peak, in elements.

    trained: of all trained parameters. largest: of the largest parameter.
    bucket, window, prefetch: DeepSpeed's reduce_bucket_size, allgather_bucket_size and
        stage3_prefetch_bucket_size. bucket under DDP: a run, the part of a bucket that is sent
        together.
    under_way: buckets in flight at once.
    offloaded: True if the node shard is in host memory; a gather then copies its rows.
    exchanged_at_once: True if all own weights are in flight into the node shard at once.
    crossing_at_once: True if the messages of all gradients are in flight between the nodes at once.
    """

    trained: int
    largest: int
    bucket: int = 5 * 10**8
    window: int = 5 * 10**8
    prefetch: int = 5 * 10**7
    under_way: int = 1
    offloaded: bool = False
    exchanged_at_once: bool = False
    crossing_at_once: bool = False
    slicing: Slicing = Slicing()


def peak_bytes(comm_volume: CommVolume, sizes: Sizes) -> float:
    """Return the peak in bytes. See [Note: counted buffers]."""
    routes = comm_volume.routes
    if routes.ranks == 1 or not comm_volume.numel:
        return 0.0
    gradients = 0.0 if routes.stock_gradients else _gradients(comm_volume, sizes)
    if routes.stage < 3:
        return max(gradients, _window(comm_volume, sizes))
    return _gather(comm_volume, sizes) + max(gradients, _exchange(comm_volume, sizes))


def _gradients(comm_volume: CommVolume, sizes: Sizes) -> float:
    """Return the bytes of the largest bucket, times the buckets in flight."""
    trained = sizes.trained
    if not trained:
        return 0.0
    routes = comm_volume.routes
    ranks = routes.ranks
    nodes = routes.nodes
    node_size = routes.node_size
    bucket = min(trained, max(sizes.bucket, sizes.largest))
    # Bytes per element on the way back, on the last and on the first hop.
    returned = comm_volume.returned * comm_volume.numel / trained
    last_hop = comm_volume.gradients * comm_volume.numel / trained - returned
    first_hop = last_hop
    if routes.two_levels:
        first_hop = comm_volume.gradients_intra * comm_volume.numel / trained
        if routes.stage == 0:  # the sums go back on both levels
            first_hop -= returned
    # Most elements of the bucket that one rank owns, and that one rank sums: evenly over the ranks
    # or, under ZeRO-1/2, over those of one node.
    even = bucket / ranks
    owned = min(bucket, trained / ranks) if routes.stage in (1, 2) else even
    summed = even
    if routes.stage in (1, 2) and routes.two_levels:
        summed = min(bucket, trained / nodes) / node_size
    if routes.two_levels:
        near = 1 - 1 / node_size
        share = bucket / node_size
        running_slices = min(1.0, 2 / sizes.slicing.slices(bucket))
        inside = 2 * near * bucket * first_hop + share * FP32_BYTES
        if sizes.crossing_at_once:
            crossing = summed * (2 * (nodes - 1) * last_hop + 2 * FP32_BYTES)
            back = (summed + share) * returned
            return inside * running_slices + crossing * trained / bucket + back
        if routes.replicas:  # one bucket after the other: its sums follow its gradients
            last_hop += returned
            returned = 0.0
        crossing = (1 - 1 / nodes) * share * last_hop + (nodes - 1) * summed * last_hop
        crossing += summed * FP32_BYTES
        messages = (inside + crossing) * running_slices
    elif any(hop.full_precision_own for hop in routes.gradients().hops):
        messages = 2 * (1 - 1 / ranks) * bucket * first_hop + summed * FP32_BYTES
    else:
        messages = 2 * bucket * first_hop
    sums = owned * FP32_BYTES
    if owned > summed:  # delivered in 8 bits at least
        sums += summed * FP32_BYTES + (owned + summed) * max(1.0, last_hop)
    count = ceil_div(trained, bucket)
    peak = min(sizes.under_way, count) * (messages + sums)
    on_the_way_back = returned * bucket * (1 + _forwarded_share(comm_volume))
    if count > sizes.under_way:
        return peak + on_the_way_back
    return max(peak, peak - messages + on_the_way_back)


def _window(comm_volume: CommVolume, sizes: Sizes) -> float:
    """Return the bytes of two windows of weights, under ZeRO-1/2.

    A window takes its own size for what is received, a part in ``ranks`` of it for the own message,
    and the share that is forwarded.
    """
    numel = comm_volume.numel
    ranks = comm_volume.routes.ranks
    forwarded = _forwarded_share(comm_volume)
    if comm_volume.varies:
        # A message holds at most MOST_EXACT_NUMEL elements of each rank. The own messages of all
        # windows are in memory: see [Note: lengths] of comm/lossless_gather.py.
        window = min(numel, sizes.window, MOST_EXACT_NUMEL * ranks)
        received_numel = window * (1 + forwarded) * min(2, ceil_div(numel, window))
        return (numel / ranks + received_numel) * comm_volume.weights_most
    window = min(numel, sizes.window)
    window_bytes = window * comm_volume.weights * (1 + 1 / ranks + forwarded)
    return window_bytes * min(2, ceil_div(numel, window))


def _gather(comm_volume: CommVolume, sizes: Sizes) -> float:
    """Return the bytes of the largest gather of ZeRO-3."""
    routes = comm_volume.routes
    gathered = max(sizes.largest, min(sizes.prefetch, comm_volume.numel))
    if routes.keeps_shard or routes.replicas:
        copies = comm_volume.memory if sizes.offloaded else 0.0
        return gathered * (comm_volume.weights_intra * (1 + 1 / routes.node_size) + copies)
    forwarded = _forwarded_share(comm_volume)
    return gathered * comm_volume.weights * (1 + 1 / routes.ranks + forwarded)


def _forwarded_share(comm_volume: CommVolume) -> float:
    """Return the share of a gather that a rank receives from other nodes and forwards."""
    routes = comm_volume.routes
    return 1 / routes.node_size if routes.two_levels else 0.0


def _exchange(comm_volume: CommVolume, sizes: Sizes) -> float:
    """Return the bytes of the exchange into the node shard: a rank sends own elements and receives
    as many from every node.
    """
    routes = comm_volume.routes
    if not routes.keeps_shard:
        return 0.0
    own = sizes.trained / routes.ranks
    in_flight = own if sizes.exchanged_at_once else min(own, EXCHANGED_AT_ONCE * chunk_numel(own))
    if comm_volume.varies:
        return (own + in_flight * routes.nodes) * comm_volume.weights_most
    return in_flight * (1 + routes.nodes) * comm_volume.weights
