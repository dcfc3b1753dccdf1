"""Choose a scheme by measuring, where the block asks for "autotune".

All ranks measure at once, so that communicators and codecs see the load of a real step; the first
rank decides for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_quant.comm.hierarchy import HierarchicalCommunicator
from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Communicator
from ds_quant.config.presets import AUTOTUNE
from ds_quant.config.schema import QuantizedCommConfig
from ds_quant.policy import autotune, choosing, refusals
from ds_quant.policy.route import Routes
from ds_quant.runtime import groups


def tuned(
    config: QuantizedCommConfig,
    topology: Topology,
    work: Callable[[], autotune.Work],
    *,
    stage: int,
    process_group: Any,
    device: torch.device,
    has_streams: bool,
    dist: Any = None,
    stock_gradients: bool = False,
) -> tuple[QuantizedCommConfig, list[str]]:
    """Return the block with the chosen scheme, and notices that say why. A collective.

    A block that names its scheme is returned as it is.

    Args:
        work: returns the sizes of a step's messages.
        process_group: of all ranks; None for the world.
        dist: module with the collectives, DeepSpeed's if None.
        stock_gradients: the front's library reduces gradients itself.
    """
    if config.scheme != AUTOTUNE:
        return config, []
    if topology.world == 1:
        return config.with_scheme("full_precision"), []
    hierarchy = _hierarchy(config, topology, process_group, device, has_streams, dist)
    sizes = work()
    nodes, node_size = topology.nodes, topology.node_size
    seconds: dict[str, float] = {}
    place = choosing.Place(stage, nodes, node_size, config.allow_full_replica)
    for name in choosing.autotune_candidates(place):
        candidate = config.with_scheme(name)
        if refusals.can_start(candidate, stage=stage, world=topology.world, node_size=node_size):
            routes = Routes(
                scheme=candidate.to_scheme(),
                stage=stage,
                nodes=nodes,
                node_size=node_size,
                stock_gradients=stock_gradients,
            )
            seconds[name] = autotune.step_seconds(routes, hierarchy, sizes, device)
    flat = hierarchy.flat
    of_first_rank = [seconds]
    torch.distributed.broadcast_object_list(
        of_first_rank, src=flat.ranks[0], group=flat.process_group
    )
    seconds = of_first_rank[0]
    return config.with_scheme(autotune.choose(seconds)), [autotune.reason(seconds)]


def _hierarchy(
    config: QuantizedCommConfig,
    topology: Topology,
    process_group: Any,
    device: torch.device,
    has_streams: bool,
    dist: Any,
) -> HierarchicalCommunicator:
    """Return the communicators of all ranks and of the two levels.

    Their messages are not those of the run: the report leaves them out.
    """
    traffic = Traffic()

    def communicator(group: Any) -> Communicator:
        return Communicator(
            group, topology=topology, traffic=traffic, backend=config.backend, dist=dist
        )

    flat = communicator(process_group)
    if topology.node_size in (1, topology.world):
        return HierarchicalCommunicator(flat)

    def least(numbers: list[int]) -> list[int]:
        minimum: list[int] = flat.least(torch.tensor(numbers, device=device)).tolist()
        return minimum

    level_groups = groups.level_groups(
        topology, device=device, has_streams=has_streams, least=least
    )
    return HierarchicalCommunicator(flat, *map(communicator, level_groups))
