"""The facts of a DeepSpeed engine that its run and the parts of this room ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from torch import Tensor

from ds_quant.comm.topology import Topology
from ds_quant.policy.in_flight import BUCKETS_AHEAD
from ds_quant.policy.memory import Sizes
from ds_quant.policy.route import Routes
from ds_quant.policy.scheme import Scheme, is_packed
from ds_quant.runtime.front import SentParam, Workload
from ds_quant.runtime.param import Param
from ds_quant.runtime.run import Run
from ds_quant.zero import accelerator, offload, sharded_params
from ds_quant.zero.deepspeed_types import Engine, ZeroParameter
from ds_quant.zero.gather_count import GatherCount


class EngineFront:
    """The front of one DeepSpeed engine. Holds its run, and knows none of the parts.

    Args:
        served_params: parameters that this engine communicates, each with its process group.
        gather_count: of ZeRO-3. None: a micro-step gathers every weight once.
        stock_gradients_reason: setting because of which DeepSpeed reduces gradients itself, or
            None. ``Routes`` does not know of it, so callers look here first.

    requested_roles: roles for which DeepSpeed has called the plugin.
    """

    def __init__(
        self,
        engine: Engine,
        topology: Topology,
        scheme: Scheme,
        *,
        served_params: Sequence[tuple[Tensor, object]] = (),
        gather_count: GatherCount | None = None,
        stock_gradients_reason: str | None = None,
    ) -> None:
        self.engine = engine
        self.served_params = served_params
        self.gather_count = gather_count
        self.stock_gradients_reason = stock_gradients_reason
        self.requested_roles: set[str] = set()
        self._backwards: dict[int, int] = {}  # finished in the current optimizer step
        routes = Routes.over(topology, scheme, stage=engine.zero_optimization_stage())
        self.run = self._make_run(routes, topology)

    def _make_run(self, routes: Routes, topology: Topology) -> Run:
        return Run(
            self,
            routes,
            topology,
            params_of(self.engine, routes),
            device=accelerator.device(),
            has_streams=accelerator.has_streams(),
        )

    @property
    def stage(self) -> int:
        """ZeRO stage, 1 to 3."""
        return self.run.routes.stage

    @property
    def has_few_ranks(self) -> bool:
        """True if some of ``served_params`` belong to part of the world."""
        return not all(self.run.is_world(group) for _, group in self.served_params)

    # ---- steps ----

    @property
    def step(self) -> int:
        """Optimizer steps taken, restored by DeepSpeed from a checkpoint.

        Steps that DeepSpeed skipped (overflow) changed no weight and do not count: equal step,
        equal weights.
        """
        return self.engine.global_steps - self.engine.skipped_steps

    @property
    def counted_steps(self) -> int:
        """Optimizer steps with those that DeepSpeed skipped."""
        return self.engine.global_steps

    @property
    def gradient_step(self) -> int:
        """Address of the current backward: unique within a run, equal after a resume."""
        step = self.engine.global_steps  # skipped ones count: their gradients were new
        return (step << 24) + self._backwards.get(step, 0)

    def after_backward(self) -> None:
        """Count a backward whose last gradient is reduced.

        Counted here, because accelerate advances ``engine.micro_steps`` once per optimizer step.
        """
        step = self.engine.global_steps
        self._backwards = {step: self._backwards.get(step, 0) + 1}

    # ---- prices ----

    @property
    def gathers(self) -> float:
        """Gathers of an element per micro-step."""
        return 1.0 if self.gather_count is None else self.gather_count.gathers

    def workload(self) -> Workload:
        """Return the communication of an optimizer step."""
        engine = self.engine
        params = [
            SentParam(
                param=param,
                dtype=param.tensor.dtype,
                gradient_dtype=engine.communication_data_type,
                trained=param.tensor.requires_grad,
            )
            for param in self.run.params
        ]
        gather = engine.zero_allgather_bucket_size()
        if self.gather_count is not None:
            gather = self.gather_count.mean_numel
        return Workload(
            params=[params],
            gathers=[self.gathers],
            gather_numel=gather,
            micro_steps=engine.gradient_accumulation_steps(),
            stock_gradients=self.stock_gradients_reason is not None,
        )

    def sizes(self) -> list[Sizes]:
        """Return the sizes that decide the peak memory of a step."""
        params = self.run.params
        engine = self.engine
        overlaps_on_cpu = (
            self.stage == 3 and engine.zero_overlap_comm() and self.run.device.type == "cpu"
        )
        sizes = Sizes(
            trained=sharded_params.elements(engine.module)[1],
            largest=max((param.shape.numel() for param in params), default=0),
            bucket=engine.zero_reduce_bucket_size(),
            window=engine.zero_allgather_bucket_size(),
            prefetch=min(engine.zero_prefetch_bucket_size(), engine.zero_max_live_parameters()),
            under_way=1 + BUCKETS_AHEAD if overlaps_on_cpu else 1,
            offloaded=offload.offloads_parameters(engine),
            slicing=self.run.slicing,
        )
        return [sizes]


def params_of(engine: Engine, routes: Routes) -> Iterator[Param]:
    """Yield the record of every parameter of the engine's module."""
    modules = dict(engine.module.named_modules())
    for index, (name, p) in enumerate(engine.module.named_parameters()):
        module = modules.get(name.rpartition(".")[0])
        yield Param(
            index=index,
            name=name,
            shape=sharded_params.shape_of(p),
            trained=p.requires_grad,
            packed=is_packed(p, module),
            tensor=cast("ZeroParameter", p),
            routes=routes,
        )
