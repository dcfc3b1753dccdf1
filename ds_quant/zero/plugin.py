"""The front of one DeepSpeed engine: see ``Plugin``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor

from ds_quant.comm.reduction_plan import ReductionHop
from ds_quant.comm.topology import Topology
from ds_quant.policy.cost import ParamSpec
from ds_quant.policy.in_flight import BUCKETS_AHEAD
from ds_quant.policy.memory import Sizes
from ds_quant.policy.route import Routes
from ds_quant.policy.scheme import Scheme, is_packed
from ds_quant.runtime.copies import WeightCache
from ds_quant.runtime.front import Workload
from ds_quant.runtime.param import Param
from ds_quant.runtime.run import ProcessGroups, Run
from ds_quant.runtime.warmup import MessageKinds
from ds_quant.zero import accelerator, offload, sharded_params

if TYPE_CHECKING:  # these modules import this one
    from ds_quant.zero.deepspeed_types import Engine, ZeroParameter
    from ds_quant.zero.gather_count import GatherCount
    from ds_quant.zero.hooks import Hooks
    from ds_quant.zero.node_shard import NodeShard
    from ds_quant.zero.partial_gradients import PartialGradients
    from ds_quant.zero.replica import Replica


class Plugin:
    """The front of one DeepSpeed engine; the ``zero`` modules share it.

    Args:
        stock_gradients_reason: setting because of which DeepSpeed reduces gradients itself, or
            None. ``routes`` does not know of it, so callers look here first.
        gathers: predicted gathers of the weights per micro-step.
        notices: sentences that the start-up line adds.
    """

    def __init__(
        self,
        engine: Engine,
        scheme: Scheme,
        topology: Topology,
        *,
        stock_gradients_reason: str | None = None,
        gathers: float = 1.0,
        notices: Sequence[str] = (),
    ) -> None:
        # - The engine and its run
        self.engine = engine
        routes = Routes(
            scheme=scheme,
            stage=engine.zero_optimization_stage(),
            nodes=topology.nodes,
            node_size=topology.node_size,
        )
        self.stock_gradients_reason = stock_gradients_reason
        self.gathers = gathers  # predicted, then counted by ``gather_count``
        self.run = self._make_run(routes, topology, notices)
        # Parameters that this engine communicates, each with its process group.
        self.served_params: Sequence[tuple[Tensor, object]] = ()

        # - State between steps
        self._backwards: dict[int, int] = {}  # finished in the current optimizer step
        self.requested_roles: set[str] = set()  # roles for which DeepSpeed called the plugin

        # - Parts that ``attach`` and ``fetch`` make with this plugin; None if not needed
        self.hooks: Hooks
        self.replica: Replica | None = None  # ZeRO-1/2
        self.node_shard: NodeShard | None = None  # ZeRO-3
        self.partial_gradients: PartialGradients | None = None
        self.gather_count: GatherCount | None = None  # ZeRO-3, until it has counted

    def _make_run(self, routes: Routes, topology: Topology, notices: Sequence[str]) -> Run:
        return Run(
            self,
            routes,
            topology,
            params_of(self.engine, routes),
            process_groups=ProcessGroups(),
            device=accelerator.device(),
            has_streams=accelerator.has_streams(),
            notices=notices,
        )

    @property
    def stage(self) -> int:
        """ZeRO stage, 1 to 3."""
        return self.run.routes.stage

    # ---- parameters ----

    @property
    def has_few_ranks(self) -> bool:
        """True if some of ``served_params`` belong to part of the world."""
        return not all(self.run.is_world(group) for _, group in self.served_params)

    def set_served_params(self, parameters: Sequence[tuple[Tensor, object]]) -> None:
        """Set ``served_params``.

        Adds a start-up notice for those on a subset of ranks (experts, pipeline, tensor parallel).
        """
        self.served_params = parameters
        few = sum(not self.run.is_world(group) for _, group in parameters)
        if few:
            self.run.notices.append(
                f"{few} of {len(parameters)} parameters live on a subset of ranks: "
                "single-level collectives, no node shard"
            )

    def crosses_once(self, hops: Sequence[ReductionHop]) -> bool:
        """Return True if gradients over these hops cross between nodes once per optimizer step."""
        return self.partial_gradients is not None and len(hops) == 2

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

    # ---- cached weights ----

    @property
    def weight_cache(self) -> WeightCache | None:
        """The node shard, or the replica if differences are added to it; else None."""
        if self.node_shard is not None:
            return self.node_shard
        if self.run.scheme.block.weights.difference_key:
            return self.replica
        return None

    def resync(self) -> None:
        """Refill the replica or node shard with exact weights on all ranks. A collective."""
        if self.replica is not None:
            self.replica.resync()
        if self.node_shard is not None:
            self.node_shard.resync()

    # ---- prices ----

    def workload(self) -> Workload:
        """Return the communication of an optimizer step."""
        param_specs = [
            ParamSpec(
                name=param.name,
                shape=param.shape,
                dtype=param.tensor.dtype,
                trainable=param.tensor.requires_grad,
                packed=param.packed,
                needs_full_gradient=param.needs_full_gradient,
                boundary=param.boundary,
            )
            for param in self.run.params
        ]
        engine = self.engine
        return Workload(
            param_specs=param_specs,
            gathers=self.gathers,
            micro_steps=engine.gradient_accumulation_steps(),
            gradient_dtype=engine.communication_data_type,
            stock_gradients=self.stock_gradients_reason is not None,
        )

    def sizes(self) -> Sizes:
        """Return the sizes that decide the peak memory of a step."""
        params = self.run.params
        engine = self.engine
        overlaps_on_cpu = (
            self.stage == 3 and engine.zero_overlap_comm() and self.run.device.type == "cpu"
        )
        return Sizes(
            trained=sharded_params.elements(engine.module)[1],
            largest=max((param.shape.numel() for param in params), default=0),
            bucket=engine.zero_reduce_bucket_size(),
            window=engine.zero_allgather_bucket_size(),
            prefetch=min(engine.zero_prefetch_bucket_size(), engine.zero_max_live_parameters()),
            itemsize=engine.communication_data_type.itemsize,
            under_way=1 + BUCKETS_AHEAD if overlaps_on_cpu else 1,
            offloaded=offload.offloads_parameters(engine),
            slicing=self.run.slicing,
        )

    def message_kinds(self) -> MessageKinds:
        """Return dtypes and levels of the messages, for ``warm_up``."""
        levels = list(dict.fromkeys(self.run.level(group) for _, group in self.served_params))
        params = self.engine.module.parameters()
        dtypes = {p.dtype for p in params if p.is_floating_point()}
        return MessageKinds(
            weight_dtypes=sorted(dtypes, key=str),
            gradient_dtype=self.engine.communication_data_type,
            reducing=levels if self.stock_gradients_reason is None else [],
            all_levels=levels,
            crosses_once=self.partial_gradients is not None,
            has_few_ranks=self.has_few_ranks,
        )


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
