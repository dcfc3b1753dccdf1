"""One rank of collectives.py: gathers and reductions of every scheme, in turns, at every rate.

Started like speed_worker.py. The collectives are those of the engine, without an engine: the same
links, routes and codecs, on random numbers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from netlab import lab
from torch import Tensor

from ds_quant.codec.bound import Coding
from ds_quant.comm.gather import all_gather
from ds_quant.comm.reduce import Reduction, ShardSums
from ds_quant.comm.reduction_plan import Form, Slicing
from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Fabric, Link
from ds_quant.config.schema import parse_block
from ds_quant.kernels.random_bits import Role, address
from ds_quant.kernels.wire import shard_range
from ds_quant.policy.route import Hop, Routes
from ds_quant.zero.engine import linked


def fabric_of(topology: Topology, traffic: Traffic) -> Fabric:
    """The links of the world, on two levels where it has them."""

    def link(group: Any) -> Link:
        return Link(group, topology=topology, traffic=traffic)

    if 1 in (topology.nodes, topology.node_size):
        return Fabric(link(None))
    own = []
    for level in topology.levels():
        groups = [(ranks, dist.new_group(ranks)) for ranks in level]
        own += [link(group) for ranks, group in groups if dist.get_rank() in ranks]
    return Fabric(link(None), *own)


def coding(hop: Hop, role: Role, rank: int, place: int = 0) -> Coding:
    where = address(seed=0, role=role, step=1, parameter=0, rank=rank, hop=place)
    return Coding(codec=hop.sends(torch.bfloat16), address=where)


def gather(routes: Routes, values: Tensor, fabric: Fabric) -> Callable[[], object]:
    """All-gather of one parameter, from this rank's shard to decoded values."""
    start, stop = shard_range(values.numel(), fabric.size, fabric.rank)
    codings = [coding(routes.weights().hops[0], Role.WEIGHTS, fabric.rank)]
    shards = [values[start:stop]]
    return lambda: all_gather(shards, [values.numel()], codings, fabric).wait()


def reduction(routes: Routes, values: Tensor, fabric: Fabric) -> Callable[[], object]:
    """Reduce-scatter of one gradient, to this rank's fp32 shard."""
    route = routes.gradients()
    codings = tuple(
        [coding(hop, Role.GRADIENTS, fabric.rank, place) for place, hop in enumerate(route.hops)]
    )
    block = 0 if route.rotation is None else route.rotation.block
    form = Form(tuple([coding.codec for coding in codings]), block)
    hops, scale = linked(route, fabric, Slicing()), 1.0 / fabric.size
    plan = ShardSums([values.numel()], [form], hops, fabric.whole, scale=scale)
    sums = plan.room(values.device)
    return lambda: Reduction(plan.plan, [values], [codings], [route.rotation], sums).wait()


def seconds_of(work: Callable[[], object]) -> float:
    """From one barrier to the next: of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def measure(
    plan: dict[str, Any], numel: int, topology: Topology, fabric: Fabric, traffic: Traffic
) -> list[dict]:
    """A row per operation and scheme at one rate and size."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    values = values.bfloat16()
    places = {"nodes": topology.nodes, "node_size": topology.node_size}
    works = {}
    for name in plan["schemes"]:
        scheme = parse_block({"scheme": name}).to_scheme()
        routes = Routes(scheme=scheme, stage=2, **places)
        works["gather", name] = gather(routes, values, fabric)
        works["reduce", name] = reduction(routes, values, fabric)
    received = {}
    for key, work in works.items():  # also the warm-up
        before = traffic.total()
        work()
        received[key] = traffic.total() - before
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in works}
    for _ in range(plan["blocks"]):
        for key, work in works.items():
            seconds[key].append(seconds_of(work))
    return [
        {"operation": operation, "scheme": name, "numel": numel, "received": received[key],
         "seconds": median(seconds[key]), "fastest": min(seconds[key]),
         "slowest": max(seconds[key])}
        for key in works
        for operation, name in (key,)
    ]  # fmt: skip


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would bypass the network
    dist.init_distributed("gloo", verbose=False)
    first, traffic = dist.get_rank() == 0, Traffic()
    world = dist.get_world_size()
    topology = Topology(world=world, node_size=int(os.environ["LOCAL_SIZE"]))
    fabric, rows = fabric_of(topology, traffic), []
    for rate in plan["rates"]:
        if first and plan["lab"]:
            lab.set_rate(plan["nodes"], rate or None, name=plan["lab"])
        for numel in plan["numels"]:
            # bf16 through one host's link; what takes too long says nothing new
            if rate and 2 * numel * 8 / (rate * 1e6) > plan["limit"]:
                continue
            rows += [
                {"rate": rate, **row} for row in measure(plan, numel, topology, fabric, traffic)
            ]
        if first:
            print("\n".join([f"rate {rate} done"] * plan["blocks"]), flush=True)
    if first:
        Path(sys.argv[2]).write_text(json.dumps({"rows": rows}), "utf-8")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed on CPU may abort in a normal interpreter exit


if __name__ == "__main__":
    main()
