"""Train on R ranks in one process: ZeRO-3 with the plugin's own plans, codecs and random bits.

simulated_replicas.py has the ways of summing of HSDP and DDP.

Every rank has its own plugin, as in a real run, and communicators whose messages stay in memory.
All ranks finish one part of a step before any begins the next, so a message has been sent when its
receiver waits. Results that are equal on all ranks are computed once: decoded weights, and the
optimizer step, over whole parameters instead of shards. A step ends with the same bits as on real
ranks. On CUDA forward and backward run under autocast in bf16.
May import torch, DeepSpeed (which the plugin needs) and the plugin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ds_quant.codec.bound import BoundCodec, full_precision
from ds_quant.comm import transport
from ds_quant.comm.buffers import Buffers
from ds_quant.comm.checksum import MessageErrors
from ds_quant.comm.hierarchy import HierarchicalCommunicator
from ds_quant.comm.node_rows import RowArena, ShardRows, exchange, gather
from ds_quant.comm.rows import all_gather
from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic, normalised
from ds_quant.comm.transport import Communicator, Pending
from ds_quant.kernels.wire import shard_range
from ds_quant.policy.route import Routes
from ds_quant.policy.scheme import Scheme
from ds_quant.runtime.front import Front
from ds_quant.runtime.param import Param
from ds_quant.runtime.run import Level, ProcessGroups, Run
from ds_quant.zero.deepspeed_types import Engine
from ds_quant.zero.front import EngineFront, params_of
from ds_quant.zero.partial_gradients import PartialGradients
from ds_quant.zero.shard_gradients import ShardReduction

T = TypeVar("T")
Batch = Callable[[int, int], Sequence[Tensor]]  # micro-step and rank -> inputs of the module
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

PATIENCE = 60  # seconds to wait for a message

# ---- messages that stay in memory ----


@dataclass
class Round:
    """One collective of a group.

    payloads: message by rank.
    sent: split sizes by rank, in bytes per receiver; empty for an all-gather.
    complete: set once all ranks have joined.
    """

    payloads: dict[int, Tensor] = field(default_factory=dict)
    sent: dict[int, Sequence[int]] = field(default_factory=dict)
    complete: threading.Event = field(default_factory=threading.Event)

    def bound_for(self, rank: int) -> list[Tensor]:
        """Return the message of every rank to this one."""
        payloads = [self.payloads[source] for source in range(len(self.payloads))]
        if not self.sent:
            return payloads
        return [
            payload.split(list(self.sent[source]))[rank] for source, payload in enumerate(payloads)
        ]


@dataclass(frozen=True, kw_only=True)
class Arriving:
    """The receive of one rank in a round that other ranks may not have joined yet."""

    round: Round
    rank: int
    into: Tensor

    def wait(self) -> None:
        """Wait for all ranks, then fill ``into``, which has the size of all messages together."""
        if not self.round.complete.wait(PATIENCE):
            raise RuntimeError(
                f"rank {self.rank} of its group waited {PATIENCE} s for ranks that have not sent"
            )
        torch.cat(self.round.bound_for(self.rank), out=self.into)


class Group:
    """The ranks of a process group and its open rounds: those that some ranks have not joined."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self._open: list[Round] = []
        self._lock = threading.Lock()

    def join(
        self, rank: int, payload: Tensor, into: Tensor, sent: Sequence[int] | None = None
    ) -> Arriving:
        """Send in the first round that this rank has not joined.

        into: receives the messages to this rank.
        sent: split sizes of the payload, None for an all-gather.
        """
        with self._lock:
            round = self._round_of(rank)
            round.payloads[rank] = payload
            if sent is not None:
                round.sent[rank] = sent
            if len(round.payloads) == len(self.ranks):
                self._open.remove(round)
                self.completed(round)
                round.complete.set()
        return Arriving(round=round, rank=rank, into=into)

    def _round_of(self, rank: int) -> Round:
        for round in self._open:
            if rank not in round.payloads:
                return round
        round = Round()
        self._open.append(round)
        return round

    def completed(self, round: Round) -> None:
        """Called once per round, in order, before the ranks go on."""


@dataclass(frozen=True)
class Collectives:
    """The part of torch.distributed that a communicator calls, for one rank of a group."""

    group: Group
    rank: int

    def get_world_size(self, *, group: Group) -> int:
        return len(group.ranks)

    def get_rank(self, *, group: Group) -> int:
        return self.rank

    def get_global_rank(self, group: Group, rank: int) -> int:
        return group.ranks[rank]

    def all_gather_into_tensor(
        self, into: Tensor, payload: Tensor, *, group: Group, async_op: bool
    ) -> Arriving:
        return group.join(self.rank, payload, into)

    def all_to_all_single(
        self,
        into: Tensor,
        payload: Tensor,
        *,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        group: Group,
        async_op: bool,
    ) -> Arriving:
        return group.join(self.rank, payload, into, input_split_sizes)


_PATCHING = threading.Lock()  # torch.distributed is patched by one thread at a time


class SimulatedCommunicator(Communicator):
    """A communicator of one rank whose peers are in this process."""

    def __init__(
        self,
        group: Group,
        rank: int,
        *,
        topology: Topology,
        traffic: Traffic,
        buffers: Buffers | None = None,
        message_errors: MessageErrors | None = None,
    ) -> None:
        self._group = group
        backend = patch.object(transport, "carries", lambda group, device: "simulated")
        with _PATCHING, backend:
            super().__init__(
                group,
                topology=topology,
                traffic=traffic,
                message_errors=message_errors,
                buffers=buffers,
                dist=Collectives(group, rank),
            )

    def least(self, numbers: Tensor) -> Tensor:
        rows = numbers.new_empty(self.size * numbers.numel())
        self._group.join(self.rank, numbers.clone(), rows).wait()
        return numbers.copy_(rows.view(self.size, -1).amin(0))


class Network:
    """The process groups of a topology: the world, every node, and ranks of equal local rank.

    make_group: makes a group of some ranks.
    """

    def __init__(
        self, topology: Topology, make_group: Callable[[Sequence[int]], Group] = Group
    ) -> None:
        nodes, across_nodes = topology.levels()
        self.topology = topology
        self.world = make_group(range(topology.world))
        self._nodes = [make_group(ranks) for ranks in nodes]
        self._across_nodes = [make_group(ranks) for ranks in across_nodes]

    def groups(self, rank: int) -> tuple[tuple[Group, int], tuple[Group, int]]:
        """Return the groups of a rank inside its node and between nodes, with its index in each."""
        node, local = divmod(rank, self.topology.node_size)
        return (self._nodes[node], local), (self._across_nodes[local], node)


# ---- ranks ----


@dataclass
class EngineOfNobody:
    """The part of a DeepSpeed engine that a front without DeepSpeed's hooks reads."""

    module: nn.Module
    micro_steps: int
    global_steps: int = 0
    skipped_steps: int = 0
    is_last_micro_step: bool = True
    stage: int = 3

    def __post_init__(self) -> None:
        parameter = next(self.module.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.is_last_micro_step

    def zero_optimization_stage(self) -> int:
        return self.stage

    def gradient_accumulation_steps(self) -> int:
        return self.micro_steps

    def zero_allgather_bucket_size(self) -> int:
        return 5 * 10**8


class SimulatedRank(EngineFront):
    """The front of one rank, with communicators to the other ranks of this process."""

    def __init__(self, engine: EngineOfNobody, scheme: Scheme, rank: int, network: Network) -> None:
        self.number = rank
        self.network = network
        super().__init__(cast(Engine, engine), network.topology, scheme)
        self.partial_gradients: PartialGradients | None = None
        if self.run.routes.gradients().keeps_partial_sums:
            self.partial_gradients = PartialGradients(cast(Engine, engine))
        self.reduction = ShardReduction(self, self.partial_gradients)

    def _make_run(self, routes: Routes, topology: Topology) -> Run:
        return SimulatedRun(
            self,
            routes,
            params_of(self.engine, routes),
            rank=self.number,
            network=self.network,
            device=self.engine.device,
        )


class SimulatedRun(Run):
    """The run of one rank, with communicators to the other ranks of this process."""

    def __init__(
        self,
        front: Front,
        routes: Routes,
        params: Iterable[Param],
        *,
        rank: int,
        network: Network,
        device: torch.device,
    ) -> None:
        self._number = rank
        self._network = network
        self._flat: Communicator | None = None
        super().__init__(
            front,
            routes,
            network.topology,
            params,
            process_groups=ProcessGroups(),
            device=device,
            has_streams=False,
        )

    def _make_level(
        self,
        routes: Routes,
        topology: Topology,
        process_groups: ProcessGroups,
        traffic: Traffic,
    ) -> Level:
        flat = self.communicator(None)
        levels: list[Communicator] = []
        if routes.two_levels:
            intra, inter = self._network.groups(self._number)
            levels = [self._simulated(*intra), self._simulated(*inter)]
        hierarchy = HierarchicalCommunicator(flat, *levels)
        shards = HierarchicalCommunicator(levels[0]) if routes.replicas else hierarchy
        return self._level(routes, topology, hierarchy, shards, traffic)

    def communicator(
        self,
        process_group: Any,
        topology: Topology | None = None,
        traffic: Traffic | None = None,
    ) -> Communicator:
        if self._flat is None:
            self._flat = self._simulated(self._network.world, self._number)
        return self._flat

    def _simulated(self, group: Group, rank: int) -> Communicator:
        return SimulatedCommunicator(
            group,
            rank,
            topology=self.topology,
            traffic=self.traffic,
            buffers=self.buffers,
            message_errors=self.message_errors,
        )


# ---- training ----


class Sums(Protocol):
    """A way to sum gradients in place of that of ZeRO-3, on all ranks."""

    def reduce(self, gradients: Sequence[Sequence[Tensor]], *, is_last: bool) -> Tensor:
        """Return the mean gradient, 1-D, of all parameters end to end.

        gradients: of every rank, in the shape of the parameters.
        is_last: True in the last backward of an optimizer step.
        """

    def decoded_weights(self, exact: Sequence[Tensor]) -> list[Tensor]:
        """Return the weights that the ranks compute with, 1-D each.

        exact: the exact weights in their shapes.
        """

    def end_step(self) -> None:
        """Go on to the next optimizer step."""

    def state(self) -> dict[str, Any]:
        """Return the state that the next step begins with."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a ``state``."""


class Simulation:
    """Data-parallel training of a module. Its parameters hold the decoded weights of a step.

    Training begins with the module's weights, or with a state that is ``load``-ed. Weights and
    gradients are sent in the module's dtype.

    clip: DeepSpeed's ``gradient_clipping``; 0: gradients are not clipped.
    sums: how gradients are summed, and so which weights are sent: "zero3" or one of
        simulated_replicas.WAYS.
    own_sums: sums the gradients, whatever ``sums`` is.
    master: master weights of all parameters end to end, 1-D fp32; the one parameter of
        ``optimizer``.
    """

    def __init__(
        self,
        module: nn.Module,
        scheme: Scheme,
        make_optimizer: MakeOptimizer,
        *,
        topology: Topology,
        micro_steps: int = 1,
        clip: float = 1.0,
        sums: str = "zero3",
        own_sums: Sums | None = None,
    ) -> None:
        self.module = module
        self._topology = topology
        self._micro_steps = micro_steps
        self._clip = clip
        block = scheme.block.model_copy(update={"slices": 1})  # slices have different random bits
        self.scheme = replace(scheme, block=block)
        self._parameters = list(module.parameters())
        self._sizes = [p.numel() for p in self._parameters]
        flat = torch.cat([p.detach().reshape(-1).float() for p in self._parameters])
        self._device = flat.device
        self.master = nn.Parameter(flat)
        self.optimizer = make_optimizer([self.master])
        self._engine = EngineOfNobody(module, micro_steps)
        network = Network(topology)
        self._ranks = [
            SimulatedRank(self._engine, self.scheme, rank, network)
            for rank in range(topology.world)
        ]
        self._sums: Sums | None = own_sums
        if own_sums is None and sums != "zero3":
            from simulated_replicas import Replicas  # imports this module

            self._sums = Replicas(module, self.scheme, network, sums)
        self._gradient = torch.zeros_like(flat, dtype=self._dtype)
        self._node_rows: list[list[ShardRows]] = []  # by rank and parameter, with a node shard

    @property
    def _dtype(self) -> torch.dtype:
        return self._parameters[0].dtype

    def load(self, state: dict[str, Any], *, weights_only: bool = False) -> None:
        """Continue from a ``state``, which holds exact weights. Steps count from 0."""
        with torch.no_grad():
            self.master.copy_(state["master"])
        if weights_only:
            return
        # A copy, because the optimizer updates its state in place.
        self.optimizer.load_state_dict(deepcopy(state["optimizer"]))

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint."""
        return {"master": self.master.detach().clone(), "optimizer": self.optimizer.state_dict()}

    def progress(self) -> dict[str, Any]:
        """Return all state between two steps: a simulation that ``resume``-s it ends alike."""
        return {
            **self.state(),
            "step": self._engine.global_steps,
            "sums": None if self._sums is None else self._sums.state(),
            "node_rows": [[item.rows.clone() for item in rows] for rows in self._node_rows],
            "levels": [param.levels for param in self._ranks[0].run.params],
            "learned_at": self._ranks[0].run.state.learned_at,
        }

    def resume(self, progress: dict[str, Any]) -> None:
        """Continue from ``progress`` of a simulation with the same arguments."""
        self.load(progress)
        self._engine.global_steps = progress["step"]
        if self._sums is not None:
            self._sums.load_state(progress["sums"])
        if progress["node_rows"]:
            self._node_rows = [self._new_rows(rank) for rank in self._ranks]
            for node_rows, saved in zip(self._node_rows, progress["node_rows"], strict=True):
                for item, rows in zip(node_rows, saved, strict=True):
                    item.rows.copy_(rows)
        for rank in self._ranks:
            rank.run.state.learned_at = progress["learned_at"]
            for param, levels in zip(rank.run.params, progress["levels"], strict=True):
                param.levels = levels

    def loss(self, *batch: Any) -> Tensor:
        """Return the loss of the module with its present weights, a scalar.

        batch: inputs of the module; tensors may be on any device.
        """
        inputs = [
            values.to(self._device) if isinstance(values, Tensor) else values for values in batch
        ]
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            return self.module(*inputs)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the following steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """Return the name and the master weights of every parameter, in its shape."""
        flat = self.master.detach().split(self._sizes)
        for (name, parameter), values in zip(self.module.named_parameters(), flat, strict=True):
            yield name, values.view(parameter.shape)

    def exact_weights(self) -> list[Tensor]:
        """Return the weights that a checkpoint exports: in the module's dtype, 1-D each."""
        return list(self.master.detach().to(self._dtype).split(self._sizes))

    def compute_with(self, weights: Sequence[Tensor]) -> None:
        """Put weights, 1-D, into the module."""
        for parameter, values in zip(self._parameters, weights, strict=True):
            parameter.data = values.view(parameter.shape)

    def step(self, batch: Batch, *, measure: bool = False) -> tuple[float, float | None]:
        """Run one optimizer step.

        measure: True to compare the reduced gradients with exact ones.

        Returns:
            The loss, mean over ranks and micro-steps, and the normalised squared error of the
            reduced gradients, None unless measured.
        """
        self.compute_with(self.decoded_weights())
        loss = 0.0
        exact = self.master.new_zeros(self.master.shape) if measure else None
        for micro_step in range(self._micro_steps):
            self._engine.is_last_micro_step = micro_step == self._micro_steps - 1
            mean, reduced = self._backward(micro_step, batch, exact)
            loss += mean / self._micro_steps
            if micro_step == 0:
                self._gradient.copy_(reduced)
            else:
                self._gradient.add_(reduced)
        error = None if exact is None else self._error(exact)
        self.master.grad = self._clipped(self._gradient.float())
        self.optimizer.step()
        self._learn_levels()
        if self._node_rows:
            self._exchange(partial(self._bound_codecs, hop=0, ahead=1))
        self._engine.global_steps += 1
        if self._sums is not None:
            self._sums.end_step()
        return loss, error

    def _backward(
        self, micro_step: int, batch: Batch, exact: Tensor | None
    ) -> tuple[float, Tensor]:
        """Return the mean loss and the reduced mean gradient, 1-D.

        exact: to which the exact mean gradient is added, fp32.
        """
        mean_loss = 0.0
        buckets = []
        gradients_of_ranks = []
        for rank in self._ranks:
            loss = self.loss(*batch(micro_step, rank.number))
            gradients = torch.autograd.grad(loss / self._micro_steps, self._parameters)
            mean_loss += loss.item() / len(self._ranks)
            if exact is not None:
                flat = torch.cat([g.reshape(-1).float() for g in gradients])
                exact.add_(flat, alpha=1 / len(self._ranks))
            if self._sums is not None:
                gradients_of_ranks.append(gradients)
                continue
            bucket = rank.reduction.begin(self._parameters, list(gradients), None)
            if bucket is None:
                raise RuntimeError("one rank: nothing is reduced; simulate at least two")
            buckets.append(bucket)
        if self._sums is not None:
            is_last = self._engine.is_last_micro_step
            return mean_loss, self._sums.reduce(gradients_of_ranks, is_last=is_last)
        for bucket in buckets:
            bucket.sums.advance()
        shards = [bucket.finish() for bucket in buckets]
        for rank in self._ranks:
            rank.after_backward()
        reduced: list[Tensor] = []  # shards by parameter and rank
        for shards_of_param in zip(*shards, strict=True):
            reduced.extend(shards_of_param)
        return mean_loss, torch.cat(reduced)

    def _clipped(self, gradient: Tensor) -> Tensor:
        """Clip by the norm of all gradients, as DeepSpeed does."""
        if not self._clip:
            return gradient
        norm = gradient.double().norm()
        return gradient.mul_(1 / ((norm + 1e-6) / self._clip).clamp(min=1.0))

    def _error(self, exact: Tensor) -> float:
        """Return squared error over squared norm of the quantized gradients."""
        error = 0.0
        norm = 0.0
        for param, exact_gradient, gradient in zip(
            self._ranks[0].run.params,
            exact.split(self._sizes),
            self._gradient.split(self._sizes),
            strict=True,
        ):
            if self.scheme.skip_reason(param.name, param.shape, self._dtype) is None:
                difference = gradient.float() - exact_gradient
                error += difference.square().sum(dtype=torch.float64).item()
                norm += exact_gradient.square().sum(dtype=torch.float64).item()
        return normalised(error, norm)

    # ---- weights ----

    def decoded_weights(self) -> list[Tensor]:
        """Return the weights that every rank computes with in the current step, 1-D each."""
        if self._sums is not None:
            shaped = zip(self._parameters, self.exact_weights(), strict=True)
            return self._sums.decoded_weights([w.view(p.shape) for p, w in shaped])
        if self._ranks[0].run.routes.keeps_shard:
            return self._node_weights()

        def post(rank: SimulatedRank, shards: list[Tensor]) -> Pending[list[Tensor]]:
            bound_codecs = self._bound_codecs(rank, hop=0)
            return all_gather(shards, self._sizes, bound_codecs, rank.run.communicator(None))

        return self._post(post)[0].wait()

    def _post(self, post: Callable[[SimulatedRank, list[Tensor]], T]) -> list[T]:
        """Call ``post`` for every rank with its shards of the exact weights. Return the results."""
        exact = self.exact_weights()
        results = []
        for rank in self._ranks:
            shards = []
            for weights, numel in zip(exact, self._sizes, strict=True):
                start, stop = shard_range(numel, self._topology.world, rank.number)
                shards.append(weights[start:stop])
            results.append(post(rank, shards))
        return results

    def _bound_codecs(self, rank: SimulatedRank, *, hop: int, ahead: int = 0) -> list[BoundCodec]:
        """Return the bound codec of every weight on a hop of its route.

        ahead: steps from the current one.
        """
        dtype = self._dtype
        step = rank.step + ahead
        if rank.run.is_full_precision(step):
            return [full_precision(dtype)] * len(self._sizes)
        return [
            param.bound_codec(param.weight_codecs(dtype, rank=rank.number)[hop], dtype, step)
            for param in rank.run.params
        ]

    def _learn_levels(self) -> None:
        """Learn levels, each rank in a thread of its own because ranks wait for each other."""
        if not self.scheme.level_steps:
            return

        def learn(rank: SimulatedRank, shards: list[Tensor]) -> Future[None]:
            values = [
                (param, shard, rank.run.communicator(None))
                for param, shard in zip(rank.run.params, shards, strict=True)
            ]
            return pool.submit(rank.run.learn_levels, rank.step + 1, iter(values))

        with ThreadPoolExecutor(len(self._ranks)) as pool:
            for future in self._post(learn):
                future.result()

    def _node_weights(self) -> list[Tensor]:
        """Return the weights gathered from the node rows of the first node; all nodes are equal."""
        if not self._node_rows:
            self._node_rows = [self._new_rows(rank) for rank in self._ranks]
            self._exchange(lambda _: [full_precision(self._dtype)] * len(self._sizes))
        gathers = []
        for rank in self._ranks[: self._topology.node_size]:
            communicator = None
            bound_codecs: list[BoundCodec] = []
            if self._topology.node_size > 1:
                communicator = rank.run.world.hierarchy.intra
                bound_codecs = self._bound_codecs(rank, hop=-1)
            gathers.append(gather(self._node_rows[rank.number], bound_codecs, communicator))
        return gathers[0].wait()

    def _new_rows(self, rank: SimulatedRank) -> list[ShardRows]:
        arena = RowArena(0, partial(torch.zeros, dtype=torch.uint8, device=self._device))
        return [
            ShardRows.allocate(
                numel,
                nodes=self._topology.nodes,
                node_size=self._topology.node_size,
                local=rank.number % self._topology.node_size,
                dtype=self._dtype,
                arena=arena,
            )
            for numel in self._sizes
        ]

    def _exchange(self, bound_codecs: Callable[[SimulatedRank], list[BoundCodec]]) -> None:
        """Update the node rows of all ranks to the exact weights, sent by their owners."""

        def post(rank: SimulatedRank, shards: list[Tensor]) -> Pending[Any]:
            hierarchy = rank.run.world.hierarchy
            inter = hierarchy.inter or hierarchy.flat  # flat: there is one rank per node
            return exchange(self._node_rows[rank.number], shards, bound_codecs(rank), inter)

        for pending in self._post(post):
            pending.wait()

    def drift(self) -> float:
        """Return the normalised squared distance between decoded weights and master weights.

        Raises:
            RuntimeError: nodes hold different weights, which is an error of the plugin.
        """
        for rank, node_rows in zip(self._ranks, self._node_rows, strict=False):
            first_node = self._node_rows[rank.number % self._topology.node_size]
            for ours, theirs in zip(node_rows, first_node, strict=True):
                if not torch.equal(ours.rows, theirs.rows):
                    raise RuntimeError(f"the weights of rank {rank.number} differ from its peers'")
        decoded = torch.cat(self.decoded_weights()).double()
        exact = self.master.detach().double()
        return float((decoded - exact).square().sum() / exact.square().sum())
