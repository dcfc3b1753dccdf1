"""Predict the peak memory of the plugin's messages and sums in a step.

[Note: what is counted] Buffers of one rank that DeepSpeed alone would not have, apart from what a
scheme keeps between steps. Of gradients: the messages of a bucket on every hop, fp32 copies of the
own contributions and the fp32 sums; under ZeRO-1/2 a rank may own all of a bucket, whose sums are
then delivered. Of weights: under ZeRO-1/2 two windows of ``allgather_bucket_size``, one being
decoded and one on its way; under ZeRO-3 the message of the largest gather, and what is under way
into the node shard. Buffers are added up as if none was used again within its phase; the phase that
takes most counts. CUDA's allocator holds somewhat more.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_quant.comm.lossless_gather import MOST_NUMEL as MOST_EXACT_NUMEL
from ds_quant.comm.reduction_plan import Slicing
from ds_quant.kernels.wire import FP32_BYTES, ceil_div
from ds_quant.policy.cost import CommVolume
from ds_quant.policy.in_flight import CHUNKS, EXCHANGED_AT_ONCE, LEAST_NUMEL, MOST_NUMEL


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Elements that decide. bucket, window, prefetch: DeepSpeed's reduce_bucket_size,
    allgather_bucket_size and stage3_prefetch_bucket_size.

    trained, largest: parameters that are trained, and the largest of all. under_way: buckets at
    once. offloaded: the node shard is in host memory, and what a gather sends of it is copied.
    """

    trained: int
    largest: int
    bucket: int = 5 * 10**8
    window: int = 5 * 10**8
    prefetch: int = 5 * 10**7
    itemsize: int = 2
    under_way: int = 1
    offloaded: bool = False
    slicing: Slicing = Slicing()


def peak_bytes(comm_volume: CommVolume, sizes: Sizes) -> float:
    """See [Note: what is counted]."""
    routes = comm_volume.routes
    if routes.ranks == 1 or not comm_volume.numel:
        return 0.0
    gradients = 0.0 if routes.stock_gradients else _gradients(comm_volume, sizes)
    if routes.stage < 3:
        return max(gradients, _window(comm_volume, sizes))
    return _gather(comm_volume, sizes) + max(gradients, _exchange(comm_volume, sizes))


def _gradients(comm_volume: CommVolume, sizes: Sizes) -> float:
    """Bytes of the largest bucket, times the buckets in flight."""
    trained, routes = sizes.trained, comm_volume.routes
    ranks, nodes, node_size = routes.ranks, routes.nodes, routes.node_size
    if not trained:
        return 0.0
    bucket = min(trained, max(sizes.bucket, sizes.largest))
    outer = comm_volume.gradients * comm_volume.numel / trained
    first = (
        comm_volume.gradients_intra * comm_volume.numel / trained if routes.two_levels else outer
    )
    # The most that one rank owns of it and that one rank sums: evenly over the ranks or, under
    # ZeRO-1/2, over those of one node.
    even = bucket / ranks
    owned = even if routes.stage == 3 else min(bucket, trained / ranks)
    summed = even
    if routes.stage < 3 and routes.two_levels:
        summed = min(bucket, trained / nodes) / node_size
    if routes.two_levels:
        near, share = 1 - 1 / node_size, bucket / node_size
        hops = 2 * near * bucket * first + share * FP32_BYTES
        hops += (1 - 1 / nodes) * share * outer + (nodes - 1) * summed * outer
        hops += summed * FP32_BYTES
        hops *= min(1.0, 2 / sizes.slicing.slices(bucket))
    elif any(hop.full_precision_own for hop in routes.gradients().hops):
        hops = 2 * (1 - 1 / ranks) * bucket * first + summed * FP32_BYTES
    else:
        hops = 2 * bucket * first
    sums = owned * FP32_BYTES
    if owned > summed:  # delivered in 8 bits at least
        sums += summed * FP32_BYTES + (owned + summed) * max(1.0, outer)
    in_all = min(sizes.under_way, ceil_div(trained, bucket))
    return in_all * (hops + sums)


def _window(comm_volume: CommVolume, sizes: Sizes) -> float:
    forwarded = 1 / comm_volume.routes.node_size if comm_volume.routes.two_levels else 0.0
    if (
        comm_volume.varies
    ):  # all own messages stand encoded; see [Note: lengths] of comm/lossless_gather.py
        window = min(comm_volume.numel, sizes.window, MOST_EXACT_NUMEL * comm_volume.routes.ranks)
        messages = window * (1 + forwarded) * min(2, ceil_div(comm_volume.numel, window))
        return (comm_volume.numel / comm_volume.routes.ranks + messages) * comm_volume.weights_most
    window = min(comm_volume.numel, sizes.window)
    message = window * comm_volume.weights * (1 + 1 / comm_volume.routes.ranks + forwarded)
    return message * min(2, ceil_div(comm_volume.numel, window))


def _gather(comm_volume: CommVolume, sizes: Sizes) -> float:
    gathered = max(sizes.largest, min(sizes.prefetch, comm_volume.numel))
    if comm_volume.routes.keeps_shard:
        copies = comm_volume.memory if sizes.offloaded else 0.0
        return gathered * (
            comm_volume.weights_intra * (1 + 1 / comm_volume.routes.node_size) + copies
        )
    forwarded = 1 / comm_volume.routes.node_size if comm_volume.routes.two_levels else 0.0
    return gathered * comm_volume.weights * (1 + 1 / comm_volume.routes.ranks + forwarded)


def _exchange(comm_volume: CommVolume, sizes: Sizes) -> float:
    """Bytes of the exchange into the node shard: own elements sent, and as many from every node."""
    if not comm_volume.routes.keeps_shard:
        return 0.0
    own = sizes.trained / comm_volume.routes.ranks
    message = min(max(own / CHUNKS, LEAST_NUMEL), MOST_NUMEL)
    at_once = min(own, EXCHANGED_AT_ONCE * message)
    if comm_volume.varies:
        return (own + at_once * comm_volume.routes.nodes) * comm_volume.weights_most
    return at_once * (1 + comm_volume.routes.nodes) * comm_volume.weights
