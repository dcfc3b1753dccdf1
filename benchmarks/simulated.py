"""Train on R ranks in one process: ZeRO-3 with the plugin's own plans, codecs and random bits.

Every rank has a plugin of its own, as in a real run, and links whose messages stay in memory. All
ranks do a part of a step before any does the next one, so a message is there when somebody waits.
What ranks would compute alike is computed once: the weights that they decode, and the optimizer
step, over whole parameters instead of shards. A step ends with the same bits as on real ranks. May
import torch, DeepSpeed (which the plugin needs) and the plugin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ds_quant.codec.bound import BoundCodec, full_precision
from ds_quant.comm.message import all_gather
from ds_quant.comm.node_rows import Room, ShardRows, exchange, gather
from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import normalised
from ds_quant.comm.transport import Communicator, Pending
from ds_quant.kernels.wire import shard_range
from ds_quant.policy.scheme import Scheme
from ds_quant.zero.partial_gradients import PartialGradients
from ds_quant.zero.plugin import Plugin
from ds_quant.zero.shard_gradients import ShardReduction

Batch = Callable[[int, int], Sequence[Tensor]]  # micro-step and rank -> what the module takes
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

PATIENCE = 60  # seconds; a message that has not come by then was not sent

# ---- messages that stay in memory ----


@dataclass
class Round:
    """One collective of a group: what every rank sends, and how much of it to whom."""

    payloads: dict[int, Tensor] = field(default_factory=dict)
    sent: dict[int, Sequence[int]] = field(default_factory=dict)
    complete: threading.Event = field(default_factory=threading.Event)

    def bound_for(self, rank: int) -> list[Tensor]:
        """What every rank sends to this one."""
        payloads = [self.payloads[source] for source in range(len(self.payloads))]
        if self.sent:
            payloads = [p.split(list(self.sent[r]))[rank] for r, p in enumerate(payloads)]
        return payloads


@dataclass(frozen=True, kw_only=True)
class Arriving:
    """What a rank receives in a round that others may still have to join."""

    round: Round
    rank: int
    into: Tensor

    def wait(self) -> None:
        """Fill ``into``, whose size is that of what has arrived."""
        if not self.round.complete.wait(PATIENCE):
            raise RuntimeError(f"rank {self.rank} of its group waits, and others have not sent")
        torch.cat(self.round.bound_for(self.rank), out=self.into)


class Group:
    """The ranks of a process group and the rounds that some of them have not joined yet."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self._open: list[Round] = []
        self._lock = threading.Lock()

    def join(
        self, rank: int, payload: Tensor, into: Tensor, sent: Sequence[int] | None = None
    ) -> Arriving:
        """Send in the first round that this rank has not joined."""
        with self._lock:
            found = next((one for one in self._open if rank not in one.payloads), None)
            if found is None:
                found = Round()
                self._open.append(found)
            found.payloads[rank] = payload
            if sent is not None:
                found.sent[rank] = sent
            if len(found.payloads) == len(self.ranks):
                self._open.remove(found)
                self.completed(found)
                found.complete.set()
        return Arriving(round=found, rank=rank, into=into)

    def completed(self, one: Round) -> None:
        """Called once for every round, in their order."""


@dataclass(frozen=True)
class Collectives:
    """What a link asks of torch.distributed, for one rank of a group."""

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


_MAKING = threading.Lock()


class SimulatedCommunicator(Communicator):
    """A communicator of one rank whose peers are in this process."""

    def __init__(self, group: Group, rank: int, **how: Any) -> None:
        backend = patch.object(torch.distributed, "get_backend", lambda _: "simulated")
        with _MAKING, backend:
            super().__init__(group, dist=Collectives(group, rank), **how)

    def least(self, numbers: Tensor) -> Tensor:
        rows = numbers.new_empty(self.size * numbers.numel())
        self.process_group.join(self.rank, numbers.clone(), rows).wait()
        return numbers.copy_(rows.view(self.size, -1).amin(0))


class Network:
    """The groups of a topology: the world, the nodes, and the ranks of equal place."""

    def __init__(self, topology: Topology, group: Callable[[Sequence[int]], Group] = Group) -> None:
        nodes, places = topology.levels()
        self.topology, self.world = topology, group(range(topology.world))
        self._nodes, self._places = [group(ranks) for ranks in nodes], [group(r) for r in places]

    def groups(self, rank: int) -> tuple[tuple[Group, int], tuple[Group, int]]:
        """The node of a rank and the ranks of its place, with its number in each."""
        node, local = divmod(rank, self.topology.node_size)
        return (self._nodes[node], local), (self._places[local], node)


# ---- ranks ----


@dataclass
class EngineOfNobody:
    """What a plugin asks of a DeepSpeed engine."""

    module: nn.Module
    micro_steps: int
    global_steps: int = 0
    skipped_steps: int = 0
    is_last_micro_step: bool = True
    stage: int = 3

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.is_last_micro_step

    def zero_optimization_stage(self) -> int:
        return self.stage

    def gradient_accumulation_steps(self) -> int:
        return self.micro_steps


class SimulatedRank(Plugin):
    """The plugin of one rank, with links to the others of this process."""

    def __init__(self, engine: EngineOfNobody, scheme: Scheme, rank: int, network: Network) -> None:
        self.number, self._network = rank, network
        super().__init__(engine, scheme, network.topology)
        self.reduction = ShardReduction(self)
        if self.routes.gradients().waits:
            self.partial_gradients = PartialGradients(engine)

    def communicator(self, process_group: Any) -> Communicator:
        if 0 not in self._communicators:
            self._communicators[0] = self._communicator(self._network.world, self.number)
        return self._communicators[0]

    def _communicator(self, group: Group, rank: int) -> Communicator:
        how = {
            "traffic": self.traffic,
            "buffers": self.buffers,
            "message_errors": self.message_errors,
        }
        return SimulatedCommunicator(group, rank, topology=self.topology, **how)

    def _make_levels(self) -> tuple[Communicator, Communicator]:
        inside, between = self._network.groups(self.number)
        return self._communicator(*inside), self._communicator(*between)


# ---- training ----


class Simulation:
    """Data-parallel training of a module, whose parameters hold what the ranks compute with.

    The master weights are those of the module when this is made, or those that are ``load``-ed;
    weights and gradients travel in the module's dtype.
    ``clip`` is DeepSpeed's ``gradient_clipping``, whose default is 1; 0 leaves gradients alone.

    master: all parameters end to end, fp32, the only parameter of ``optimizer``.
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
    ) -> None:
        self.module, self._topology, self._micro_steps = module, topology, micro_steps
        self._clip = clip
        block = scheme.block.model_copy(update={"slices": 1})  # each has random bits of its own
        self.scheme = replace(scheme, block=block)
        self._parameters = list(module.parameters())
        self._sizes = [p.numel() for p in self._parameters]
        flat = torch.cat([p.detach().reshape(-1).float() for p in self._parameters])
        self.master = nn.Parameter(flat)
        self.optimizer = make_optimizer([self.master])
        self._engine = EngineOfNobody(module, micro_steps)
        network = Network(topology)
        self._ranks = [
            SimulatedRank(self._engine, self.scheme, rank, network)
            for rank in range(topology.world)
        ]
        self._gradient = torch.zeros_like(flat, dtype=self._dtype)
        self._kept: list[list[ShardRows]] = []  # by rank and parameter, with a node shard

    @property
    def _dtype(self) -> torch.dtype:
        return self._parameters[0].dtype

    def load(self, state: dict[str, Any], *, weights_only: bool = False) -> None:
        """Go on from what ``state`` returned; nothing is quantized in it, steps count from 0."""
        with torch.no_grad():
            self.master.copy_(state["master"])
        if weights_only:
            return
        self.optimizer.load_state_dict(deepcopy(state["optimizer"]))  # else it is stepped in place

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"master": self.master.detach().clone(), "optimizer": self.optimizer.state_dict()}

    def set_rate(self, rate: float) -> None:
        """The learning rate of the steps that follow."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's name and master weight, in its shape."""
        flat = self.master.detach().split(self._sizes)
        for (name, parameter), values in zip(self.module.named_parameters(), flat, strict=True):
            yield name, values.view(parameter.shape)

    def exact_weights(self) -> list[Tensor]:
        """The master weights in the module's dtype, as a checkpoint exports them; 1-D each."""
        return list(self.master.detach().to(self._dtype).split(self._sizes))

    def compute_with(self, weights: Sequence[Tensor]) -> None:
        """Put weights, 1-D, into the module."""
        for parameter, values in zip(self._parameters, weights, strict=True):
            parameter.data = values.view(parameter.shape)

    def step(self, batch: Batch, *, measure: bool = False) -> tuple[float, float | None]:
        """One optimizer step. The loss, mean over ranks and micro-steps, and if asked for the
        normalised error of the reduced gradients.
        """
        self.compute_with(self.travelled_weights())
        loss, exact = 0.0, self.master.new_zeros(self.master.shape) if measure else None
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
        if self._kept:
            self._exchange(partial(self._codings, hop=0, ahead=1))
        self._engine.global_steps += 1
        return loss, error

    def _backward(
        self, micro_step: int, batch: Batch, exact: Tensor | None
    ) -> tuple[float, Tensor]:
        """Mean loss, and the mean gradient as it was reduced; ``exact`` takes it unreduced, too."""
        total, buckets = 0.0, []
        for rank in self._ranks:
            loss = self.module(*batch(micro_step, rank.number))
            gradients = torch.autograd.grad(loss / self._micro_steps, self._parameters)
            total += loss.item() / len(self._ranks)
            if exact is not None:
                flat = torch.cat([g.reshape(-1).float() for g in gradients])
                exact.add_(flat, alpha=1 / len(self._ranks))
            buckets.append(rank.reduction.begin(self._parameters, list(gradients), None))
        for bucket in buckets:
            bucket.sums.advance()
        shards = [bucket.finish() for bucket in buckets]
        for rank in self._ranks:
            rank.after_backward()
        pieces = [shard for of_ranks in zip(*shards, strict=True) for shard in of_ranks]
        return total, torch.cat(pieces)

    def _clipped(self, gradient: Tensor) -> Tensor:
        """As DeepSpeed does it: by the norm of all gradients."""
        if not self._clip:
            return gradient
        norm = gradient.double().norm()
        return gradient.mul_(1 / ((norm + 1e-6) / self._clip).clamp(min=1.0))

    def _error(self, exact: Tensor) -> float:
        """Squared error over squared norm of what is quantized."""
        norms = torch.zeros(2, dtype=torch.float64)
        pairs = zip(exact.split(self._sizes), self._gradient.split(self._sizes), strict=True)
        for tracked, (want, got) in zip(self._ranks[0].all_params(), pairs, strict=True):
            if self.scheme.skip_reason(tracked.name, tracked.shape, self._dtype) is None:
                squares = [(got.float() - want).square(), want.square()]
                norms += torch.stack([s.sum(dtype=torch.float64) for s in squares])
        return normalised(*norms.tolist())

    # ---- weights ----

    def travelled_weights(self) -> list[Tensor]:
        """The weights that every rank computes with in the current step, 1-D each."""
        if self._ranks[0].routes.keeps_shard:
            return self._node_weights()
        return self._each(
            lambda rank, shards: all_gather(
                shards, self._sizes, self._codings(rank, hop=0), rank.communicator(None)
            )
        )[0].wait()

    def _each(self, post: Callable[[SimulatedRank, list[Tensor]], Any]) -> list[Any]:
        """What is posted on every rank, which gets its shards of the exact weights."""
        exact, world = self.exact_weights(), self._topology.world
        posted = []
        for rank in self._ranks:
            places = [shard_range(numel, world, rank.number) for numel in self._sizes]
            shards = [w[start:stop] for w, (start, stop) in zip(exact, places, strict=True)]
            posted.append(post(rank, shards))
        return posted

    def _codings(self, rank: SimulatedRank, *, hop: int, ahead: int = 0) -> list[BoundCodec]:
        """Of all weights on a hop of their route, in the current step or in one ``ahead``."""
        dtype, step = self._dtype, rank.step + ahead
        if rank.is_full_precision(step):
            return [full_precision(dtype)] * len(self._sizes)
        return [
            param.bound_codec(param.weight_codecs(dtype, rank=rank.number)[hop], dtype, step)
            for param in rank.all_params()
        ]

    def _learn_levels(self) -> None:
        """Ranks wait for each other in the middle of it, so that each has a thread."""
        if not self.scheme.level_steps:
            return

        def learn(rank: SimulatedRank, shards: list[Tensor]) -> Future[None]:
            values = [
                (p, s, rank.communicator(None))
                for p, s in zip(self._parameters, shards, strict=True)
            ]
            return pool.submit(rank.learn_levels, rank.step + 1, iter(values))

        with ThreadPoolExecutor(len(self._ranks)) as pool:
            for learnt in self._each(learn):
                learnt.result()

    def _node_weights(self) -> list[Tensor]:
        """From the rows that the ranks of the first node keep; those of the others are equal."""
        if not self._kept:
            self._kept = [self._rows(rank) for rank in self._ranks]
            self._exchange(lambda _: [full_precision(self._dtype)] * len(self._sizes))
        waits = []
        for rank, kept in zip(self._ranks[: self._topology.node_size], self._kept, strict=False):
            hierarchy = rank.hierarchy(None)
            communicator = hierarchy.intra if self._topology.node_size > 1 else None
            bound_codecs = [] if communicator is None else self._codings(rank, hop=-1)
            waits.append(gather(kept, bound_codecs, communicator))
        return waits[0].wait()

    def _rows(self, rank: SimulatedRank) -> list[ShardRows]:
        nodes, size = self._topology.nodes, self._topology.node_size
        where = {"nodes": nodes, "node_size": size, "local": rank.number % size}
        room = Room(0, partial(torch.zeros, dtype=torch.uint8))
        make = partial(ShardRows.allocate, **where, dtype=self._dtype, room=room)
        return [make(numel) for numel in self._sizes]

    def _exchange(self, bound_codecs: Callable[[SimulatedRank], list[BoundCodec]]) -> None:
        """Bring the exact weights of every rank into the rows of all nodes."""

        def post(rank: SimulatedRank, shards: list[Tensor]) -> Pending[list[Tensor]]:
            hierarchy = rank.hierarchy(None)
            communicator = hierarchy.inter or hierarchy.flat  # whole: one rank per node
            return exchange(self._kept[rank.number], shards, bound_codecs(rank), communicator)

        for pending in self._each(post):
            pending.wait()

    def drift(self) -> float:
        """Normalised squared distance of what ranks compute with to the master weights.

        Raises:
            RuntimeError: nodes keep different weights, which is an error of the plugin.
        """
        for rank, kept in zip(self._ranks, self._kept, strict=False):
            first = self._kept[rank.number % self._topology.node_size]
            if not all(torch.equal(a.rows, b.rows) for a, b in zip(kept, first, strict=True)):
                raise RuntimeError(f"the weights of rank {rank.number} differ from its peers'")
        found = torch.cat(self.travelled_weights()).double()
        want = self.master.detach().double()
        return float((found - want).square().sum() / want.square().sum())
