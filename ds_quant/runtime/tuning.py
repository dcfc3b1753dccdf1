"""Choose a scheme by measuring, where the block asks for "autotune".

All ranks measure at once, so that communicators and codecs see the load of a real step; the first
rank decides for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

import torch

from ds_quant.config.presets import AUTOTUNE
from ds_quant.config.schema import QuantizedCommConfig
from ds_quant.policy import autotune, choosing, refusals
from ds_quant.policy.scheme import Scheme
from ds_quant.runtime.run import Run


class HasRun(Protocol):
    """A front, with the run that it holds."""

    @property
    def run(self) -> Run:
        """The run of the front."""


F = TypeVar("F", bound=HasRun)


def tuned_front(config: QuantizedCommConfig, make: Callable[[Scheme], F]) -> F:
    """Return the front with the block's scheme. A collective.

    For "autotune" a first front in full precision measures; its messages are in no report.

    make: returns a front that is not connected to its model.
    """
    if config.scheme != AUTOTUNE:
        return make(config.to_scheme())
    front = make(config.with_scheme("full_precision").to_scheme())
    if front.run.topology.world == 1:
        return front
    seconds = _seconds_by_scheme(config, front.run)
    front = make(config.with_scheme(autotune.choose(seconds)).to_scheme())
    front.run.notices.insert(0, autotune.reason(seconds))
    return front


def _seconds_by_scheme(config: QuantizedCommConfig, run: Run) -> dict[str, float]:
    """Return the seconds of a step's messages under every candidate, as the first rank has them."""
    routes, topology, hierarchy = run.routes, run.topology, run.world.hierarchy
    nodes, node_size = topology.nodes, topology.node_size
    place = choosing.Place(routes.stage, nodes, node_size, config.allow_full_replica)
    work = _work(run)
    seconds: dict[str, float] = {}
    for name in choosing.autotune_candidates(place):
        candidate = config.with_scheme(name)
        if refusals.can_start(
            candidate, stage=routes.stage, world=topology.world, node_size=node_size
        ):
            routes_of_candidate = replace(
                routes,
                scheme=candidate.to_scheme(),
                stock_gradients=run.workload.stock_gradients,
            )
            seconds[name] = autotune.step_seconds(routes_of_candidate, hierarchy, work, run.device)
    of_first_rank = [seconds]
    torch.distributed.broadcast_object_list(
        of_first_rank, src=hierarchy.flat.ranks[0], group=hierarchy.flat.process_group
    )
    return of_first_rank[0]


def _work(run: Run) -> autotune.Work:
    """Return the sizes of a step's messages on the first level."""
    workload = run.workload
    params = workload.params[0]
    numel = sum(sent.param.shape.numel() for sent in params)
    trained = sum(sent.param.shape.numel() for sent in params if sent.trained)
    if run.routes.stage < 3:  # frozen weights are not sent
        numel = trained
    dtypes = [sent.dtype for sent in params if sent.dtype.is_floating_point]
    return autotune.Work(
        numel=numel,
        trained=trained,
        gather=min(workload.gather_numel, numel),
        bucket=min(run.sizes[0].bucket, trained),
        dtype=dtypes[0] if dtypes else torch.float32,
        gradients=workload.gradient_dtype,
        micro_steps=workload.micro_steps,
        gathers=workload.gathers[0],
    )
