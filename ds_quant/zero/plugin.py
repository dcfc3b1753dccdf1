"""One engine's scheme, links, parameters and counters.

Everything is per engine, so that two engines of one process may run two schemes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ds_quant.comm.checksum import MessageErrors
from ds_quant.comm.reduction_plan import ReductionHop, Slicing, presumed_pace
from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Buffers, Communicator, HierarchicalCommunicator
from ds_quant.config.schema import parse_block
from ds_quant.policy.cost import CommVolume, ParamSpec, comm_volume
from ds_quant.policy.memory import BUCKETS_AHEAD, Sizes, peak_bytes
from ds_quant.policy.route import Routes
from ds_quant.policy.scheme import Scheme, is_packed
from ds_quant.zero import hooks, offload, sharded_params
from ds_quant.zero.param import Param, learn
from ds_quant.zero.world import backend, level_groups

# ---- state between steps ----


@dataclass
class SchemeState:
    """Counters of one engine. Learned levels are in ``Param``.

    ``learned_at`` is the last optimizer step at which their schedule was consulted, ``resyncs``
    counts refills after checksums that differed.

    Of ``fallback``: steps below ``exact_until`` travel in full precision, and all while ``killed``;
    ``nonfinite_steps`` and ``exact_steps`` count what it has found and caused.
    """

    learned_at: int = 0
    resyncs: int = 0
    exact_until: int = 0
    killed: bool = False
    nonfinite_steps: int = 0
    exact_steps: int = 0

    def due(self, schedule: Sequence[int], step: int) -> bool:
        """Whether an entry of ``schedule`` was reached since the last call; remembers ``step``."""
        due = any(self.learned_at < entry <= step for entry in schedule)
        self.learned_at = max(self.learned_at, step)
        return due


# ---- the plugin ----


class Plugin:
    """Scheme, topology, counters and state of one engine; the ``zero`` modules share it."""

    def __init__(self, engine: Any, scheme: Scheme, topology: Topology) -> None:
        self.engine, self.topology = engine, topology
        self.stage: int = engine.zero_optimization_stage()
        self.routes = Routes(
            scheme=scheme, stage=self.stage, nodes=topology.nodes, node_size=topology.node_size
        )
        self._params: dict[int, Param] = {}  # by id of the tensor
        self._hops: dict[int, tuple[ReductionHop, ...]] = {}  # by id of the process group
        self.traffic, self.buffers = Traffic(), Buffers()
        self.state = SchemeState()
        pace = presumed_pace(hooks.device(), backend())
        self.slicing = Slicing(count=scheme.block.slices, pace=pace)
        self.notices: list[str] = []  # what the start-up line must add
        self.asked: set[str] = set()  # roles for which DeepSpeed has called the plugin
        self.has_few_ranks = False  # some parameters belong to part of the world
        # Because of which setting gradients take DeepSpeed's own collectives, if they do.
        self.stock_gradients: str | None = None
        self.served: Sequence[tuple[Any, Any]] = ()  # parameters with their process groups
        self.hooks: Any = None  # zero.hooks.Hooks
        self.replica: Any = None  # zero.replica.Replica under ZeRO-1/2
        self.node: Any = None  # zero.node_shard.NodeShard under ZeRO-3, if the scheme keeps one
        self.message_errors = MessageErrors()
        self.telemetry: Any = None  # zero.telemetry.Telemetry, if steps are sampled
        # Whether sums of gradients were finite, if that is looked for: see safety.first_nonfinite.
        self.noted: list[tuple[Param, Tensor]] | None = None
        self.partial_gradients: Any = (
            None  # zero.partial_gradients.PartialGradients, if gradients wait
        )
        self.gather_count: Any = None  # zero.fetch.GatherCount, until it has counted
        self.gathers = 1.0  # of the weights in a micro-step
        self._communicators: dict[int, Communicator] = {}
        self._hierarchies: dict[int, HierarchicalCommunicator] = {}
        self._levels = self._make_levels() if self.routes.two_levels else ()
        self._backwards: dict[int, int] = {}  # those done in the current optimizer step
        modules = dict(engine.module.named_modules())
        for index, (name, p) in enumerate(engine.module.named_parameters()):
            self._params[id(p)] = Param(
                index=index, name=name, shape=sharded_params.shape_of(p), trained=p.requires_grad,
                packed=is_packed(p, modules.get(name.rpartition(".")[0])), tensor=p,
                routes=self.routes,
            )  # fmt: skip

    @property
    def scheme(self) -> Scheme:
        return self.routes.scheme

    def param_of(self, parameter: torch.Tensor) -> Param | None:
        """Return the engine's record of a parameter, None if it was created after the engine."""
        return self._params.get(id(parameter))

    def all_params(self) -> Iterable[Param]:
        """Every parameter of the module when the engine was built."""
        return self._params.values()

    def serve(self, parameters: Sequence[tuple[Any, Any]]) -> None:
        """Take the parameters, each with its process group; adds a start-up notice for those on a
        subset of ranks (experts, pipeline, tensor parallel).
        """
        self.served = parameters
        few = sum(not self.is_world(group) for _, group in parameters)
        self.has_few_ranks = few > 0
        if few:
            self.notices.append(
                f"{few} of {len(parameters)} parameters live on a subset of ranks: "
                "single-level collectives, no node shard"
            )

    def communicator(self, process_group: Any) -> Communicator:
        """Return the byte collectives of a process group."""
        key = id(process_group)
        if key not in self._communicators:
            self._communicators[key] = Communicator(
                process_group,
                topology=self.topology,
                traffic=self.traffic,
                message_errors=self.message_errors,
                sealed=self.scheme.block.payload_checksum,
                buffers=self.buffers,
                backend=self.scheme.block.backend,
            )
        return self._communicators[key]

    def is_world(self, process_group: Any) -> bool:
        """Whether a process group has all ranks."""
        return self.communicator(process_group).ranks == list(range(self.topology.world))

    def communicators(self) -> list[Communicator]:
        """All so far, in an order that is the same on the ranks of each."""
        return list(self._communicators.values())

    def _make_levels(self) -> tuple[Communicator, ...]:
        """Make the links of ``LevelGroups``."""
        return tuple([self.communicator(group) for group in level_groups(self.topology)])

    def hierarchy(self, process_group: Any) -> HierarchicalCommunicator:
        """Return the links of a process group; two levels if it is the world and that has them."""
        key = id(process_group)
        if key not in self._hierarchies:
            levels = self._levels if self.is_world(process_group) else ()
            self._hierarchies[key] = HierarchicalCommunicator(
                self.communicator(process_group), *levels
            )
        return self._hierarchies[key]

    def route(self, process_group: Any) -> tuple[ReductionHop, ...]:
        """Return the hops of a gradient reduction over a process group."""
        key = id(process_group)
        if key not in self._hops:
            hierarchy, hops, divisor = self.hierarchy(process_group), [], 1
            communicators = {
                "flat": hierarchy.flat,
                "intra": hierarchy.gradients,
                "inter": hierarchy.inter,
            }
            for hop in self.routes.gradients(full_world=hierarchy.intra is not None).hops:
                communicator, how = (
                    communicators[hop.level],
                    {"full_precision_own": hop.full_precision_own, "slicing": self.slicing},
                )
                hops.append(ReductionHop(communicator=communicator, divisor=divisor, **how))
                divisor *= communicator.size
            self._hops[key] = tuple(hops)
        return self._hops[key]

    def crosses_once(self, route: Sequence[ReductionHop]) -> bool:
        """Whether gradients that take ``route`` cross between nodes once per optimizer step."""
        return self.partial_gradients is not None and len(route) == 2

    @property
    def step(self) -> int:
        """Optimizer steps taken, restored by DeepSpeed from a checkpoint. Steps that it skipped
        (overflow) changed no weight and do not count: equal step, equal weights.
        """
        return self.engine.global_steps - self.engine.skipped_steps

    def is_full_precision(self, step: int) -> bool:
        """Whether an optimizer step sends everything in full precision."""
        until = max(self.routes.scheme.block.warmup_steps, self.state.exact_until)
        return self.state.killed or step < until

    @property
    def gradient_step(self) -> int:
        """Address of the current backward: unique within a run, equal after a resume."""
        step = self.engine.global_steps  # with skipped ones: their gradients were new
        return (step << 24) + self._backwards.get(step, 0)

    def after_backward(self) -> None:
        """Count a backward whose last gradient is reduced. Counted here, because accelerate
        advances ``engine.micro_steps`` once per optimizer step only.
        """
        step = self.engine.global_steps
        self._backwards = {step: self._backwards.get(step, 0) + 1}

    def learn_levels(
        self, step: int, own_values: Iterable[tuple[Tensor, Tensor, Communicator]]
    ) -> None:
        """Learn the levels of all parameters (QSDP's learned levels), if the schedule says so.

        ``own_values``: parameter, this rank's elements, 1-D, possibly empty, and the link of those
        that share it; the same parameters in the same order on all ranks.
        """
        if not self.state.due(self.scheme.level_steps, step):
            return
        by_communicator: dict[Communicator, list[tuple[Param, Tensor]]] = {}
        for parameter, values, communicator in own_values:
            param = self.param_of(parameter)
            if param and param.shape.numel() and param.is_quantized(values.dtype):
                by_communicator.setdefault(communicator, []).append((param, values))
        for communicator, shards in by_communicator.items():
            learn(shards, communicator, self.scheme)

    @property
    def weight_cache(self) -> Any:
        """What keeps weights between steps on several ranks, None if nothing does.

        Its ``copies()`` are (who, weights): ranks that report equal ``who`` in the same place hold
        equal weights. ``resync()`` brings back exact ones, and is called by all ranks.
        """
        return self.node or (self.replica if self.scheme.block.weights.reference else None)

    def resync(self) -> None:
        """Bring back exact weights on all ranks. A collective."""
        for holder in (self.replica, self.node):
            if holder is not None:
                holder.resync()

    def peak_bytes(self, comm_volume: CommVolume) -> float:
        """Predict the peak bytes of messages and sums on this rank in a step."""
        engine = self.engine
        late = self.stage == 3 and engine.zero_overlap_comm() and hooks.device().type == "cpu"
        sizes = Sizes(
            trained=sharded_params.elements(engine.module)[1],
            largest=max((param.shape.numel() for param in self.all_params()), default=0),
            bucket=engine.zero_reduce_bucket_size(),
            window=engine.zero_allgather_bucket_size(),
            prefetch=min(engine.zero_prefetch_bucket_size(), engine.zero_max_live_parameters()),
            itemsize=engine.communication_data_type.itemsize,
            under_way=1 + BUCKETS_AHEAD if late else 1,
            offloaded=offload.offloads_parameters(engine),
            slicing=self.slicing,
        )
        return peak_bytes(comm_volume, sizes)

    def received_in_full_precision(self) -> dict[str, dict[str, float]]:
        """Bytes that this plugin would bring to a rank per optimizer step, were nothing quantized,
        by role and link as ``Traffic`` counts them.
        """
        cross = {"cross": self.scheme.block.gradients.cross}
        plain = parse_block({"scheme": "full_precision", "gradients": cross}).to_scheme()
        found = self.received_by_formula(self.comm_volume(plain))
        if self.stock_gradients is not None:
            found["gradients"] = {"intra": 0.0, "inter": 0.0}  # DeepSpeed's, which nobody counts
        return found

    def received_by_formula(self, comm_volume: CommVolume) -> dict[str, dict[str, float]]:
        """Bytes that come to a rank per optimizer step, by role and link as in ``Traffic``."""
        return comm_volume.received(
            self.stage, micro_steps=self.engine.gradient_accumulation_steps()
        )

    def comm_volume(self, scheme: Scheme | None = None) -> CommVolume:
        """Price a step of the engine's scheme, or of another, in bytes per parameter."""
        priced = attrgetter(
            "name",
            "shape",
            "tensor.dtype",
            "tensor.requires_grad",
            "packed",
            "needs_full_gradient",
            "boundary",
        )
        param_specs = [ParamSpec(*priced(param)) for param in self.all_params()]
        return comm_volume(
            scheme or self.scheme, self.stage, param_specs, ranks=self.topology.world,
            node_size=self.topology.node_size, gathers=self.gathers,
            gradient_dtype=self.engine.communication_data_type,
            stock_gradients=self.stock_gradients is not None,
        )  # fmt: skip
