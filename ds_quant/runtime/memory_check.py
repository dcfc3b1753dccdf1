"""Refuse a scheme whose memory does not fit on every rank, before training begins."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ds_quant.runtime.run import Run

_GB = 1e9


class Free(NamedTuple):
    """Bytes that this rank can still allocate, on the device and in host memory."""

    on_device: int
    on_host: int


def require_memory(
    run: Run, free_here: Free, *, on_host: bool, holds_gradients: bool, way_out: str
) -> None:
    """Compare the memory that the scheme keeps with the free memory of the fullest rank.

    Counts the node shard between steps, and the partial sums of gradients within a step. A
    collective if the scheme keeps either.

    Args:
        on_host: the node shard is kept in host memory.
        holds_gradients: an optimizer step has several micro-steps.
        way_out: a setting under which nothing is kept.

    Raises:
        RuntimeError: on all ranks, if it does not fit on one.
    """
    comm_volume = run.comm_volume()
    node_shard = comm_volume.memory * comm_volume.numel
    partial_sums = 0.0
    if holds_gradients:
        partial_sums = comm_volume.partial_sums * comm_volume.numel
    if not (node_shard or partial_sums):
        return
    votes = torch.tensor(free_here, device=run.device)
    free, free_on_host = run.votes.least(votes).tolist()
    smaller = f'use more ranks per node, {way_out}, or a scheme without a node shard such as "qsdp"'
    if on_host:
        _require_on_host(node_shard * run.topology.node_size, free_on_host, smaller)
        node_shard = 0.0  # takes no memory of the device
    else:
        _require_node_shard(node_shard, free, smaller)
    _require_partial_sums(partial_sums, node_shard, free)
    messages = run.peak_bytes(comm_volume)
    if node_shard + partial_sums + messages > free:
        sizes = {
            "node shard": node_shard,
            "waiting gradients": partial_sums,
            "messages": messages,
        }
        needed = [f"{size / _GB:.3g} GB of {name}" for name, size in sizes.items() if size]
        run.notices.append(
            f"may run out of memory: {' and '.join(needed)} are needed, {_free_on_device(free)}"
        )


def _free_on_device(free: int) -> str:
    return f"{free / _GB:.3g} GB of memory are free on the fullest device"


def _require_on_host(node_shards: float, free: int, smaller: str) -> None:
    """node_shards: bytes of all ranks of a node together."""
    if node_shards > free:
        raise RuntimeError(
            f"quantized_comm: the node shard takes {node_shards / _GB:.3g} GB of host memory in "
            f"every node, but {free / _GB:.3g} GB are free in the fullest one; {smaller}"
        )


def _require_node_shard(node_shard: float, free: int, smaller: str) -> None:
    if node_shard > free:
        raise RuntimeError(
            f"quantized_comm: the node shard takes {node_shard / _GB:.3g} GB on every rank, but "
            f"{_free_on_device(free)}; {smaller}"
        )


def _require_partial_sums(partial_sums: float, node_shard: float, free: int) -> None:
    if node_shard + partial_sums > free:
        beside = f" beside {node_shard / _GB:.3g} GB of node shard" if node_shard else ""
        raise RuntimeError(
            "quantized_comm: gradients that wait for the last micro-step take "
            f"{partial_sums / _GB:.3g} GB on every rank{beside}, but {_free_on_device(free)}; set "
            'quantized_comm.gradients.cross: "micro_step", which holds none and sends them in '
            "every micro-step, or use more ranks per node"
        )
