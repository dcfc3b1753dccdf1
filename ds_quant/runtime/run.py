"""One run: its scheme, ranks, parameters, counters and prices, whichever front trains.

Everything is per run, so that two engines or models of one process may run two schemes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_quant.codec.codec import CAST_NAMES
from ds_quant.comm.buffers import Buffers
from ds_quant.comm.checksum import MessageErrors
from ds_quant.comm.hierarchy import HierarchicalCommunicator
from ds_quant.comm.reduction_plan import ReductionHop, Slicing, presumed_pace
from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Communicator, carries
from ds_quant.config.errors import KEY
from ds_quant.config.schema import parse_block
from ds_quant.policy.cost import comm_volume
from ds_quant.policy.memory import Sizes
from ds_quant.policy.model_volume import ModelVolume
from ds_quant.policy.route import Routes
from ds_quant.policy.scheme import Scheme
from ds_quant.runtime import groups, log
from ds_quant.runtime.front import Front, Workload
from ds_quant.runtime.param import Param, learn
from ds_quant.runtime.savings import Received, Savings

# ---- state between steps ----


@dataclass
class SchemeState:
    """Counters of one run. Learned levels are in ``Param``.

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


# ---- ranks ----


@dataclass(frozen=True, eq=False, kw_only=True)
class Level:
    """The communicators of one set of ranks.

    topology: the ranks in their nodes. routes: of messages between them. Under DeepSpeed those of
        all ranks, also for a process group that is smaller.
    hierarchy: all of them. shards: those that share one copy of the weights; the same without
        replicas, and where every rank holds all weights.
    hops: of a gradient reduction.
    returning: the ranks to which sums of gradients go back; None if they stay where they are made.
    traffic: counters of these communicators.
    """

    topology: Topology
    routes: Routes
    hierarchy: HierarchicalCommunicator
    shards: HierarchicalCommunicator
    hops: tuple[ReductionHop, ...]
    traffic: Traffic
    returning: Communicator | HierarchicalCommunicator | None = None

    @property
    def replicas(self) -> int:
        """Number of copies of the weights that these ranks hold."""
        return self.hierarchy.size // self.num_shards

    @property
    def num_shards(self) -> int:
        """Number of ranks that share one copy of the weights."""
        return self.shards.size if self.routes.sends_weights else 1

    @property
    def shard(self) -> int:
        """Index of this rank among those that share its copy of the weights."""
        return self.shards.rank if self.routes.sends_weights else 0

    @property
    def between_nodes(self) -> Communicator:
        """The ranks of equal place in all nodes; with one rank per node, all ranks."""
        return self.hierarchy.inter or self.hierarchy.flat


@dataclass(frozen=True, kw_only=True)
class ProcessGroups:
    """The process groups of a level's ranks, None for the world.

    shards: of the ranks that share one copy of the weights. replicas: of the ranks of equal place
        in all copies, if there are several.
    """

    shards: Any = None
    replicas: Any = None


_WORLD = ProcessGroups()

# ---- the run ----


class Run:
    """One training under one scheme, whichever front trains.

    Args:
        front: answers what only the front's library knows.
        routes, topology, process_groups: of the first level.
        params: of the model.
        device: of the collectives. has_streams: it works on streams; None: unless it is the CPU.
        dist: module with the collectives, DeepSpeed's if None.

    notices: sentences that the start-up line adds.
    topology: all ranks of the run in their nodes.
    votes: all ranks of the run. Errors end all of them.
    world: the first level. Under DeepSpeed it has all ranks.
    levels: sets of ranks that share parameters. Under DeepSpeed the first one alone.
    """

    def __init__(
        self,
        front: Front,
        routes: Routes,
        topology: Topology,
        params: Iterable[Param],
        *,
        device: torch.device,
        has_streams: bool | None = None,
        process_groups: ProcessGroups = _WORLD,
        dist: Any = None,
    ) -> None:
        # - Scheme, ranks and parameters
        self._front = front
        self.routes = routes
        self.scheme: Scheme = routes.scheme
        self.topology = topology
        self.device = device
        self.params: list[Param] = []
        self._param_by_id: dict[int, Param] = {}
        self.add_params(params)
        self.state = SchemeState()
        self.notices: list[str] = []

        # - Counters and checks of the messages
        self.traffic = Traffic()
        self.savings = Savings(self.traffic)
        self.buffers = Buffers()  # as many as the largest step needs, freed with the run
        self.message_errors = MessageErrors()
        # Names of parameters or modules, each with a flag on the device: True if the received part
        # of its gradient is finite. Every vote frees them, and so does ``discard_gradients`` of
        # FSDP2. None if nobody reads the flags: see fallback.py.
        self.finite_flags: list[tuple[str, Tensor]] | None = None
        if self.scheme.block.fallback.on_nonfinite != "skip":
            self.finite_flags = []

        # - Communicators by id of the process group, which they keep alive, and nodes of its ranks
        self._dist = dist
        self._has_streams = device.type != "cpu" if has_streams is None else has_streams
        self._communicators: dict[tuple[int, Topology], Communicator] = {}
        self._level_of_group: dict[int, Level] = {}
        pace = presumed_pace(device, carries(process_groups.shards, device))
        self.slicing = Slicing(count=self.scheme.block.slices, pace=pace)
        self.levels: list[Level] = []
        self.world = self.add_level(routes, topology, process_groups)
        self.votes = self.world.hierarchy.flat

    # ---- the scheme and the step ----

    @property
    def step(self) -> int:
        """See ``Front.step``."""
        return self._front.step

    @property
    def counted_steps(self) -> int:
        """See ``Front.counted_steps``."""
        return self._front.counted_steps

    def is_full_precision(self, step: int) -> bool:
        """Return True if an optimizer step sends everything in full precision."""
        until = max(self.scheme.block.warmup_steps, self.state.exact_until)
        return self.state.killed or step < until

    def begin_step(self, step: int | None = None) -> None:
        """Note if a step is in full precision, before its first message.

        Called between optimizer steps, and when their number has jumped.

        step: None for the current one.
        """
        self.traffic.is_exact = self.is_full_precision(self.step if step is None else step)

    def refuse_capture(self) -> None:
        """Refuse to run while a CUDA graph is captured.

        Raises:
            RuntimeError: a replay would run none of the Python code that draws random bits, counts
                steps and checks messages.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{KEY}: a CUDA graph is captured here, and its replays would repeat one random "
                "rounding and skip all checks: capture no forward, backward or optimizer step of "
                "this model (torchtitan: leave cudagraphs out of --compile; torch.compile: no "
                'mode="reduce-overhead" and no "max-autotune"), or leave the block out'
            )

    def log(self, message: str) -> None:
        """Warn on the first rank of the run."""
        log.log_rank0(message, first=self._first_rank)

    def info(self, message: str) -> None:
        """Log at level INFO on the first rank of the run."""
        log.info_rank0(message, first=self._first_rank)

    @property
    def _first_rank(self) -> int:
        return self.topology.all_ranks[0]

    def add_params(self, params: Iterable[Param]) -> None:
        """Add parameters of the model."""
        for param in params:
            self.params.append(param)
            self._param_by_id[id(param.tensor)] = param

    def param_of(self, parameter: Tensor) -> Param | None:
        """Return the record of a parameter, None if the model did not have it at the start."""
        return self._param_by_id.get(id(parameter))

    def known_param(self, parameter: Tensor) -> Param:
        """Return the record of a parameter that the model had at the start."""
        return self._param_by_id[id(parameter)]

    # ---- communicators ----

    def communicator(
        self,
        process_group: Any,
        topology: Topology | None = None,
        traffic: Traffic | None = None,
    ) -> Communicator:
        """Return the communicator of a process group; None is the world.

        topology, traffic: nodes of its ranks and counters, where they are not those of the run.
        """
        topology = topology or self.topology
        key = id(process_group), topology
        if key not in self._communicators:
            self._communicators[key] = Communicator(
                process_group,
                topology=topology,
                traffic=traffic or self.traffic,
                message_errors=self.message_errors,
                sealed=self.scheme.block.payload_checksum,
                buffers=self.buffers,
                backend=self.scheme.block.backend,
                dist=self._dist,
            )
        return self._communicators[key]

    def communicators(self) -> list[Communicator]:
        """Return all communicators so far, in an order that is the same on the ranks of each."""
        return list(self._communicators.values())

    def uncounted(self, communicator: Communicator) -> Communicator:
        """Return a communicator of the same ranks whose messages are not counted."""
        return Communicator(
            communicator.process_group,
            topology=self.topology,
            traffic=Traffic(),
            backend=communicator.backend,
            dist=self._dist,
        )

    def is_world(self, process_group: Any) -> bool:
        """Return True if a process group has all ranks of the run."""
        return self.communicator(process_group).ranks == list(self.topology.all_ranks)

    def level(self, process_group: Any) -> Level:
        """Return the level of a process group under DeepSpeed; None is the world.

        A group smaller than the run has one hop.
        """
        key = id(process_group)
        if key not in self._level_of_group:
            level = self.world
            if not self.is_world(process_group):
                hierarchy = HierarchicalCommunicator(self.communicator(process_group))
                level = self._level(
                    self.routes, self.topology, hierarchy, hierarchy, self.world.traffic
                )
            self._level_of_group[key] = level
        return self._level_of_group[key]

    def add_level(self, routes: Routes, topology: Topology, process_groups: ProcessGroups) -> Level:
        """Add a set of ranks that share parameters. A collective of them."""
        level = self._make_level(routes, topology, process_groups, self.traffic.part())
        self.levels.append(level)
        return level

    def vote_with(self, topology: Topology, process_groups: Sequence[Any]) -> None:
        """Let the ranks of all levels vote together. A collective of them.

        topology: of all these ranks. process_groups: of this rank; a vote of one after the other is
            one of all ranks.
        """
        communicators = [self.communicator(group, topology) for group in process_groups]
        flat = groups.group_of(
            topology.all_ranks, device=self.device, least=self._least_of(communicators)
        )
        self.topology = topology
        self.votes = self.communicator(flat)

    def _make_level(
        self,
        routes: Routes,
        topology: Topology,
        process_groups: ProcessGroups,
        traffic: Traffic,
    ) -> Level:
        """Return the level of the ranks of a topology. A collective of them."""

        def communicator(process_group: Any) -> Communicator:
            return self.communicator(process_group, topology, traffic)

        shards = communicator(process_groups.shards)
        if process_groups.replicas is None:
            inside_and_between = self._inside_and_between(routes, topology, shards)
            hierarchy = HierarchicalCommunicator(shards, *map(communicator, inside_and_between))
            return self._level(routes, topology, hierarchy, hierarchy, traffic)
        inter = communicator(process_groups.replicas)
        least = self._least_of([shards, inter])
        flat = groups.group_of(topology.all_ranks, device=self.device, least=least)
        hierarchy = HierarchicalCommunicator(communicator(flat), shards, inter)
        return self._level(routes, topology, hierarchy, HierarchicalCommunicator(shards), traffic)

    def _inside_and_between(
        self, routes: Routes, topology: Topology, flat: Communicator
    ) -> Sequence[Any]:
        """Return the process groups of ``groups.LevelGroups``; none where there is one level."""
        if not routes.two_levels:
            return ()
        return groups.level_groups(
            topology,
            device=self.device,
            has_streams=self._has_streams,
            least=self._least_of([flat]),
        )

    def _least_of(self, communicators: Sequence[Communicator]) -> groups.Vote:
        """Return a vote of all ranks that these communicators connect."""

        def least(numbers: list[int]) -> list[int]:
            votes = torch.tensor(numbers, device=self.device)
            for communicator in communicators:
                votes = communicator.least(votes)
            minimum: list[int] = votes.tolist()
            return minimum

        return least

    def _level(
        self,
        routes: Routes,
        topology: Topology,
        hierarchy: HierarchicalCommunicator,
        shards: HierarchicalCommunicator,
        traffic: Traffic,
    ) -> Level:
        """Return a level with the hops of a gradient reduction."""
        communicators = {
            "flat": hierarchy.flat,
            "intra": hierarchy.gradients,
            "inter": hierarchy.inter,
        }
        hops: list[ReductionHop] = []
        divisor = 1
        for hop in routes.gradients(full_world=hierarchy.intra is not None).hops:
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
        returning: Communicator | HierarchicalCommunicator | None = None
        if routes.replicas:
            returning = hierarchy.inter
        elif not routes.sends_weights:
            returning = hierarchy
        return Level(
            topology=topology,
            routes=routes,
            hierarchy=hierarchy,
            shards=shards,
            hops=tuple(hops),
            traffic=traffic,
            returning=returning,
        )

    # ---- learned levels ----

    def learn_levels(
        self, step: int, own_values: Iterable[tuple[Param | None, Tensor, Communicator]]
    ) -> None:
        """Learn the levels of all parameters (QSDP's learned levels), if the schedule says so.

        own_values: parameter, this rank's elements (1-D, may be empty), and the communicator of
            the ranks that share the parameter; equal parameters in equal order on all ranks.
        """
        if not self.state.due(self.scheme.level_steps, step):
            return
        by_communicator: dict[Communicator, list[tuple[Param, Tensor]]] = {}
        for param, values, communicator in own_values:
            if param and param.shape.numel() and param.is_quantized(values.dtype):
                by_communicator.setdefault(communicator, []).append((param, values))
        for communicator, shards in by_communicator.items():
            learn(shards, communicator, self.scheme)

    # ---- prices ----

    @property
    def workload(self) -> Workload:
        """See ``Front.workload``."""
        return self._front.workload()

    @property
    def sizes(self) -> Sequence[Sizes]:
        """See ``Front.sizes``."""
        return self._front.sizes()

    def comm_volume(self, scheme: Scheme | None = None) -> ModelVolume:
        """Price a step of the run's scheme, or of another one, in bytes per parameter."""
        workload = self.workload
        parts = [
            comm_volume(
                scheme or self.scheme,
                level.routes.stage,
                [sent.spec for sent in params],
                ranks=level.topology.world,
                node_size=level.topology.node_size,
                gathers=gathers,
                gradient_dtype=workload.gradient_dtype,
                stock_gradients=workload.stock_gradients,
                replicas=level.routes.replicas,
            )
            for level, params, gathers in zip(
                self.levels, workload.params, workload.gathers, strict=True
            )
        ]
        return ModelVolume(tuple(parts))

    def received_by_formula(self, volume: ModelVolume) -> Received:
        """Return bytes that a rank receives per optimizer step, by role and link as ``Traffic``."""
        micro_steps = self.workload.micro_steps
        return volume.received(self.routes.stage, micro_steps=micro_steps)

    def received_in_full_precision(self) -> Received:
        """Return bytes that a rank would receive per optimizer step, were nothing quantized.

        By role and link as ``Traffic`` counts them.
        """
        cross = {"cross": self.scheme.block.gradients.cross}
        same_way = parse_block({"scheme": "full_precision", "gradients": cross}).to_scheme()
        received = self.received_by_formula(self.comm_volume(same_way))
        if self.workload.stock_gradients:
            received["gradients"] = {"intra": 0.0, "inter": 0.0}  # the library's are not counted
        return received

    def stock_volume(self, volume: ModelVolume) -> StockVolume:
        """Return the volume without the block under FSDP2 or DDP.

        Replicas all-reduce gradients, and gather no weights.
        """
        nbytes = 0.0
        names: dict[str, None] = {}
        workload = self.workload
        for level, params, gathers in zip(
            self.levels, workload.params, workload.gathers, strict=True
        ):
            passes = 1 if level.returning is None else 2
            for sent in params:
                numel = sent.param.shape.numel()
                if level.returning is None:
                    nbytes += gathers * numel * sent.dtype.itemsize
                    names[_dtype_name(sent.dtype)] = None
                if sent.trained:
                    nbytes += passes * numel * sent.gradient_dtype.itemsize
                    names[_dtype_name(sent.gradient_dtype)] = None
        return StockVolume(nbytes / max(1, volume.numel), " + ".join(names))

    def peak_bytes(self, volume: ModelVolume) -> float:
        """Predict the peak bytes of messages and sums on this rank in a step."""
        return volume.peak_bytes(self.sizes)


class StockVolume(NamedTuple):
    """Bytes per parameter and step without the block.

    dtypes: in which they are sent, as "bf16" or "bf16 + fp32".
    """

    bytes_per_param: float
    dtypes: str


def _dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bf16"."""
    return CAST_NAMES.get(dtype, str(dtype).removeprefix("torch."))
