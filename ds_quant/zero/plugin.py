"""The plugin of one engine: its scheme, communicators, parameters and counters.

Everything is per engine, so that two engines of one process may run two schemes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from torch import Tensor

from ds_quant.comm.buffers import Buffers
from ds_quant.comm.checksum import MessageErrors
from ds_quant.comm.hierarchy import HierarchicalCommunicator
from ds_quant.comm.reduction_plan import ReductionHop, Slicing, presumed_pace
from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Communicator
from ds_quant.policy.cost import CommVolume, ParamSpec, comm_volume
from ds_quant.policy.in_flight import BUCKETS_AHEAD
from ds_quant.policy.memory import Sizes, peak_bytes
from ds_quant.policy.route import Routes
from ds_quant.policy.scheme import Scheme, is_packed
from ds_quant.runtime.figures import in_full_precision
from ds_quant.runtime.param import Param, learn
from ds_quant.zero import accelerator, offload, sharded_params
from ds_quant.zero.world import backend, level_groups

if TYPE_CHECKING:  # these modules import this one
    from ds_quant.zero.deepspeed_types import Engine, ZeroParameter
    from ds_quant.zero.gather_count import GatherCount
    from ds_quant.zero.hooks import Hooks
    from ds_quant.zero.node_shard import NodeShard
    from ds_quant.zero.partial_gradients import PartialGradients
    from ds_quant.zero.replica import Replica
    from ds_quant.zero.telemetry import Telemetry

# ---- state between steps ----


@dataclass
class SchemeState:
    """Counters of one engine. Learned levels are in ``Param``.

    learned_at: optimizer step at which the schedule of learned levels was last consulted.
    resyncs: refills of cached weights whose checksums differed.
    exact_until: steps below it are sent in full precision, by ``fallback``.
    killed: all steps are sent in full precision, because a kill file exists.
    nonfinite_steps: steps in which ``fallback`` found NaN or Inf.
    exact_steps: steps in full precision because of ``exact_until`` or ``killed``.
    """

    learned_at: int = 0
    resyncs: int = 0
    exact_until: int = 0
    killed: bool = False
    nonfinite_steps: int = 0
    exact_steps: int = 0

    def due(self, schedule: Sequence[int], step: int) -> bool:
        """Return True if an entry of ``schedule`` was reached since the last call."""
        due = any(self.learned_at < entry <= step for entry in schedule)
        self.learned_at = max(self.learned_at, step)
        return due


class WeightCache(Protocol):
    """Copies of the weights that several ranks keep between steps: a replica or a node shard."""

    def comparable_weights(self) -> Iterable[tuple[int, Iterable[Tensor]]]:
        """Yield (owner, weights). Copies of equal index and owner are equal on all ranks."""

    def resync(self) -> None:
        """Refill the copies from the exact weights. A collective."""


# ---- the plugin ----


class Plugin:
    """The part of ds_quant that belongs to one DeepSpeed engine; the ``zero`` modules share it.

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
        # - The engine, and how its tensors are sent
        self.engine = engine
        self.topology = topology
        self.stage: int = engine.zero_optimization_stage()
        self.routes = Routes(
            scheme=scheme, stage=self.stage, nodes=topology.nodes, node_size=topology.node_size
        )
        self.stock_gradients_reason = stock_gradients_reason
        pace = presumed_pace(accelerator.device(), backend())
        self.slicing = Slicing(count=scheme.block.slices, pace=pace)

        # - The parameters of the module
        self._params = _params_of(engine, self.routes)  # by id of the tensor
        # Parameters that this engine communicates, each with its process group.
        self.served_params: Sequence[tuple[Tensor, object]] = ()
        self.has_few_ranks = False  # some of them belong to part of the world

        # - State between steps
        self.state = SchemeState()
        self._backwards: dict[int, int] = {}  # finished in the current optimizer step

        # - Counters and checks of the messages
        self.traffic = Traffic()
        self.buffers = Buffers()
        self.message_errors = MessageErrors()
        self.requested_roles: set[str] = set()  # roles for which DeepSpeed called the plugin
        self.gathers = gathers  # predicted, then counted by ``gather_count``
        # Parameters, each with a flag on the device: True if the received part of its gradient is
        # finite. None if nobody reads the flags: see ``fallback.first_nonfinite``.
        self.finite_flags: list[tuple[Param, Tensor]] | None = None
        if scheme.block.fallback.on_nonfinite != "skip":
            self.finite_flags = []
        self.notices = list(notices)

        # - Communicators, made when first asked for; by id of the process group
        self._communicators: dict[int, Communicator] = {}
        self._hierarchies: dict[int, HierarchicalCommunicator] = {}
        self._hops: dict[int, tuple[ReductionHop, ...]] = {}
        self._levels: tuple[Communicator, ...] = ()
        if self.routes.two_levels:
            self._levels = self._make_levels()

        # - Parts that ``attach`` and ``fetch`` make with this plugin; None if not needed
        self.hooks: Hooks
        self.replica: Replica | None = None  # ZeRO-1/2
        self.node_shard: NodeShard | None = None  # ZeRO-3
        self.partial_gradients: PartialGradients | None = None
        self.telemetry: Telemetry | None = None
        self.gather_count: GatherCount | None = None  # ZeRO-3, until it has counted

    # ---- the scheme and the parameters ----

    @property
    def scheme(self) -> Scheme:
        return self.routes.scheme

    def param_of(self, parameter: Tensor) -> Param | None:
        """Return the engine's record of a parameter, None if it was created after the engine."""
        return self._params.get(id(parameter))

    def all_params(self) -> Iterable[Param]:
        """Return every parameter that the module had when the engine was built."""
        return self._params.values()

    def set_served_params(self, parameters: Sequence[tuple[Tensor, object]]) -> None:
        """Set ``served_params``.

        Adds a start-up notice for those on a subset of ranks (experts, pipeline, tensor parallel).
        """
        self.served_params = parameters
        few = sum(not self.is_world(group) for _, group in parameters)
        self.has_few_ranks = few > 0
        if few:
            self.notices.append(
                f"{few} of {len(parameters)} parameters live on a subset of ranks: "
                "single-level collectives, no node shard"
            )

    # ---- communicators ----

    def communicator(self, process_group: object) -> Communicator:
        """Return the communicator of a process group; None is the world."""
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

    def communicators(self) -> list[Communicator]:
        """Return all communicators so far, in an order that is the same on the ranks of each."""
        return list(self._communicators.values())

    def is_world(self, process_group: object) -> bool:
        """Return True if a process group has all ranks."""
        return self.communicator(process_group).ranks == list(range(self.topology.world))

    def _make_levels(self) -> tuple[Communicator, ...]:
        """Make the communicators of ``LevelGroups``."""
        return tuple([self.communicator(group) for group in level_groups(self.topology)])

    def hierarchy(self, process_group: object) -> HierarchicalCommunicator:
        """Return the communicators of both levels; a group smaller than the world has one level."""
        key = id(process_group)
        if key not in self._hierarchies:
            levels: tuple[Communicator, ...] = ()
            if self.is_world(process_group):
                levels = self._levels
            self._hierarchies[key] = HierarchicalCommunicator(
                self.communicator(process_group), *levels
            )
        return self._hierarchies[key]

    def reduction_hops(self, process_group: object) -> tuple[ReductionHop, ...]:
        """Return the hops of a gradient reduction over a process group."""
        key = id(process_group)
        if key not in self._hops:
            self._hops[key] = self._make_hops(self.hierarchy(process_group))
        return self._hops[key]

    def _make_hops(self, hierarchy: HierarchicalCommunicator) -> tuple[ReductionHop, ...]:
        communicators = {
            "flat": hierarchy.flat,
            "intra": hierarchy.gradients,
            "inter": hierarchy.inter,
        }
        hops: list[ReductionHop] = []
        divisor = 1
        for hop in self.routes.gradients(full_world=hierarchy.intra is not None).hops:
            communicator = communicators[hop.level]
            assert communicator is not None, f"no communicator for the level {hop.level}"
            hops.append(
                ReductionHop(
                    communicator=communicator,
                    divisor=divisor,
                    full_precision_own=hop.full_precision_own,
                    slicing=self.slicing,
                )
            )
            divisor *= communicator.size
        return tuple(hops)

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

    def is_full_precision(self, step: int) -> bool:
        """Return True if an optimizer step sends everything in full precision."""
        until = max(self.routes.scheme.block.warmup_steps, self.state.exact_until)
        return self.state.killed or step < until

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

    def learn_levels(
        self, step: int, own_values: Iterable[tuple[Tensor, Tensor, Communicator]]
    ) -> None:
        """Learn the levels of all parameters (QSDP's learned levels), if the schedule says so.

        own_values: parameter, this rank's elements (1-D, may be empty), and the communicator of
            the ranks that share the parameter; equal parameters in equal order on all ranks.
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

    # ---- cached weights ----

    @property
    def weight_cache(self) -> WeightCache | None:
        """The node shard, or the replica if differences are added to it; else None."""
        if self.node_shard is not None:
            return self.node_shard
        if self.scheme.block.weights.difference_key:
            return self.replica
        return None

    def resync(self) -> None:
        """Refill the replica or node shard with exact weights on all ranks. A collective."""
        if self.replica is not None:
            self.replica.resync()
        if self.node_shard is not None:
            self.node_shard.resync()

    # ---- predictions ----

    def comm_volume(self, scheme: Scheme | None = None) -> CommVolume:
        """Price a step of the engine's scheme, or of another one, in bytes per parameter."""
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
            for param in self.all_params()
        ]
        return comm_volume(
            scheme or self.scheme,
            self.stage,
            param_specs,
            ranks=self.topology.world,
            node_size=self.topology.node_size,
            gathers=self.gathers,
            gradient_dtype=self.engine.communication_data_type,
            stock_gradients=self.stock_gradients_reason is not None,
        )

    def received_by_formula(self, comm_volume: CommVolume) -> dict[str, dict[str, float]]:
        """Return bytes that a rank receives per optimizer step, by role and link as ``Traffic``."""
        return comm_volume.received(
            self.stage, micro_steps=self.engine.gradient_accumulation_steps()
        )

    def received_in_full_precision(self) -> dict[str, dict[str, float]]:
        """Return bytes that a rank would receive per optimizer step, were nothing quantized.

        By role and link as ``Traffic`` counts them.
        """
        full_precision = self.comm_volume(in_full_precision(self.scheme))
        received = self.received_by_formula(full_precision)
        if self.stock_gradients_reason is not None:
            received["gradients"] = {"intra": 0.0, "inter": 0.0}  # DeepSpeed's are not counted
        return received

    def peak_bytes(self, comm_volume: CommVolume) -> float:
        """Predict the peak bytes of messages and sums on this rank in a step."""
        engine = self.engine
        overlaps_on_cpu = (
            self.stage == 3 and engine.zero_overlap_comm() and accelerator.device().type == "cpu"
        )
        sizes = Sizes(
            trained=sharded_params.elements(engine.module)[1],
            largest=max((param.shape.numel() for param in self.all_params()), default=0),
            bucket=engine.zero_reduce_bucket_size(),
            window=engine.zero_allgather_bucket_size(),
            prefetch=min(engine.zero_prefetch_bucket_size(), engine.zero_max_live_parameters()),
            itemsize=engine.communication_data_type.itemsize,
            under_way=1 + BUCKETS_AHEAD if overlaps_on_cpu else 1,
            offloaded=offload.offloads_parameters(engine),
            slicing=self.slicing,
        )
        return peak_bytes(comm_volume, sizes)


def _params_of(engine: Engine, routes: Routes) -> dict[int, Param]:
    """Return the record of every parameter of the engine's module, by id of the tensor."""
    modules = dict(engine.module.named_modules())
    params: dict[int, Param] = {}
    for index, (name, p) in enumerate(engine.module.named_parameters()):
        module = modules.get(name.rpartition(".")[0])
        params[id(p)] = Param(
            index=index,
            name=name,
            shape=sharded_params.shape_of(p),
            trained=p.requires_grad,
            packed=is_packed(p, module),
            tensor=cast("ZeroParameter", p),
            routes=routes,
        )
    return params
