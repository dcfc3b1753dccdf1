"""A link over a process group of this process alone, without DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Link


@contextmanager
def alone(backend: str) -> Iterator[Link]:
    """``backend``: of torch.distributed, such as "nccl"."""
    dist = torch.distributed
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Link(None, topology=Topology(world=1, node_size=1), traffic=Traffic(), dist=dist)
    finally:
        dist.destroy_process_group()
