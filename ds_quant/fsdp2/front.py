"""One model under FSDP2: its scheme, communicators, sharded modules and counters."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from statistics import median_low
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from ds_quant.comm.buffers import Buffers
from ds_quant.comm.checksum import MessageError, MessageErrors
from ds_quant.comm.hierarchy import HierarchicalCommunicator
from ds_quant.comm.reduce import GradientSums
from ds_quant.comm.reduction_plan import (
    GradientSpec,
    ReductionHop,
    Segment,
    Slicing,
    presumed_pace,
)
from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Communicator, carries
from ds_quant.config.errors import KEY
from ds_quant.fsdp2 import torch_names
from ds_quant.fsdp2.dropped_gradients import Undo, drop_with_module
from ds_quant.fsdp2.gradients import QuantizedReduceScatter
from ds_quant.fsdp2.node_copies import NodeCopies
from ds_quant.fsdp2.node_shard import NodeShard
from ds_quant.fsdp2.optimizers import OptimizerSteps
from ds_quant.fsdp2.sharded_module import Mesh, ShardedModule, gathered_by_fsdp, sharded_modules
from ds_quant.fsdp2.steps_vote import StepsVote
from ds_quant.fsdp2.telemetry import Telemetry
from ds_quant.fsdp2.weights import QuantizedAllGather
from ds_quant.policy.cost import CommVolume, ParamSpec, comm_volume
from ds_quant.policy.memory import Sizes, peak_bytes
from ds_quant.policy.route import Routes
from ds_quant.policy.scheme import Scheme
from ds_quant.runtime import log
from ds_quant.runtime.copies import brought_back, differing_ranks, replicas_differ
from ds_quant.runtime.figures import in_full_precision
from ds_quant.runtime.groups import group_of, level_groups
from ds_quant.runtime.message_error import end_of_run
from ds_quant.runtime.param import Param
from ds_quant.runtime.partial_sums import PartialSumsMemory
from ds_quant.runtime.plan_cache import PlanCache
from ds_quant.runtime.written_weights import UnequalSteps

STAGE = 3  # FSDP2 shards weights, gradients and optimizer states, as ZeRO-3 does
_MANY_FORWARDS = 1000  # without an optimizer step


class Front:
    """Scheme, topology, communicators and state of one model.

    A ``torch.distributed.checkpoint`` Stateful: ``state_dict`` holds the number of optimizer steps,
    which names the random bits, so that a resumed run repeats them.

    The model's collectives hold the front, so it lives as long as the model.
    """

    def __init__(self, model: nn.Module, scheme: Scheme, topology: Topology, mesh: Mesh) -> None:
        # - What is sent, and where
        self.scheme = scheme
        self.topology = topology
        self.mesh = mesh
        self.device = mesh.device
        self.replicas = mesh.replicas
        self.routes = Routes(
            scheme=scheme,
            stage=STAGE,
            nodes=topology.nodes,
            node_size=topology.node_size,
            replicas=mesh.replicas > 1,
        )
        # True if gradients cross between nodes in the last backward of a step only.
        self.defers_inter_node = self.routes.gradients().keeps_partial_sums

        # - Communicators
        self.traffic = Traffic()
        self.message_errors = MessageErrors()
        self.buffers = Buffers()
        self.hierarchy, self.shards = self._communicators()
        self.route = self._route()
        self._gradient_sums: PlanCache[
            tuple[tuple[Segment, ...], tuple[GradientSpec, ...], float], GradientSums
        ] = PlanCache()

        # - State between steps
        self.step = 0
        self._steps_vote: StepsVote | None = None  # where nothing depends on the step
        if scheme.weights is not None or scheme.gradients is not None:
            self._steps_vote = StepsVote(self.hierarchy.flat, self.device)
        self.micro_steps = 1  # backwards of the last optimizer step
        self.weights_version = (0, 0)  # grows with every exchange of weights
        self.sums = PartialSumsMemory()
        self.notices: list[str] = []
        self.line = ""
        self.telemetry: Telemetry | None = None
        self._forward_begins = True  # nothing has been gathered in this forward
        self._gathered: set[ShardedModule] = set()  # in this forward
        self._forwards = 0  # with gradients, since the last optimizer step
        self._has_unchecked_messages = False
        self._is_detached = False
        self._undo: list[Undo] = []  # of what ``connect`` has wrapped, for ``detach``

        # - Parameters and collectives
        self.sharded_modules = sharded_modules(model, self.routes, mesh)
        self.notices += gathered_by_fsdp(self.sharded_modules)
        self.copies: NodeCopies | None = None  # of the weights in every node
        self.gathers: list[QuantizedAllGather] = []
        self.reductions: list[QuantizedReduceScatter] = []
        self.optimizers = OptimizerSteps(self)
        # By module and parameter: trained in the last optimizer step.
        self._was_trained = [sharded.is_trained() for sharded in self.sharded_modules]

    def connect(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Replace the collectives of every sharded module, and follow the optimizers."""
        node_shards: dict[ShardedModule, NodeShard] = {}
        if self.routes.keeps_shard:
            served = [sharded for sharded in self.sharded_modules if not sharded.fsdp_gathers]
            node_shards = {sharded: NodeShard(self, sharded) for sharded in served}
            self.copies = NodeCopies(self, list(node_shards.values()))
        for sharded in self.sharded_modules:
            gather = QuantizedAllGather(self, sharded, node_shards.get(sharded))
            gather.connect()
            self.gathers.append(gather)
            reduction = QuantizedReduceScatter(self, sharded)
            reduction.connect()
            self.reductions.append(reduction)
        self._undo += drop_with_module(model, self)
        for module in model.modules():
            if not isinstance(module, FSDPModule):
                continue
            self._undo.append(torch_names.before_forwards(module, self._begin_forward))
            if module is not model:
                self._undo += drop_with_module(module, self)
        self.optimizers.follow(optimizers)

    def detach(self) -> None:
        """Give FSDP2 its collectives back: the model trains on without the block.

        Weights, optimizer states and gradients are exact and stay. Call it on all ranks between
        optimizer steps.

        Raises:
            RuntimeError: gradients wait for a backward that was declared the last one.
        """
        self._require_no_partial_sums("the model is detached")
        if self._is_detached:
            return
        self._is_detached = True
        if self.copies is not None:
            self.copies.finish()
        self.optimizers.stop()
        for gather in self.gathers:
            gather.disconnect()
        for reduction in self.reductions:
            reduction.disconnect()
        for undo in self._undo:
            undo()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # streams may still read the copies
        self.copies = None

    def __del__(self) -> None:
        """Wait for messages of this rank that are under way: later models use the same groups."""
        with suppress(Exception):  # of a front that was not made, or of a lost rank
            self.sums.wait()
            if self.copies is not None:
                self.copies.finish()

    # ---- facts ----

    @property
    def params(self) -> list[Param]:
        """The parameters of all sharded modules."""
        return [param for sharded in self.sharded_modules for param in sharded.params]

    def parameter_ids(self) -> Iterable[int]:
        """Yield the ids of the sharded parameters, as they are now."""
        for sharded in self.sharded_modules:
            for member in sharded.members:
                yield id(member.sharded_param)

    def is_full_precision(self, step: int) -> bool:
        """Return True if an optimizer step sends everything in full precision."""
        return step < self.scheme.block.warmup_steps

    def gradient_sums(
        self, segments: tuple[Segment, ...], specs: tuple[GradientSpec, ...], scale: float
    ) -> GradientSums:
        """Plan a reduction; layers of equal shapes share one plan."""
        key = segments, specs, scale
        known = self._gradient_sums.get(key)
        if known is not None:
            return known
        sums = GradientSums(
            segments,
            specs,
            self.route,
            self.hierarchy.flat,
            scale,
            in_place=self.replicas == 1,
        )
        return self._gradient_sums.add(key, sums)

    def log(self, message: str) -> None:
        """Warn on the first rank of the model."""
        log.log_rank0(message, first=self.mesh.ranks[0])

    def info(self, message: str) -> None:
        """Log at level INFO on the first rank of the model."""
        log.info_rank0(message, first=self.mesh.ranks[0])

    # ---- events of a forward ----

    def _begin_forward(self) -> None:
        self._forward_begins = True

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

    def before_gather(self, sharded: ShardedModule) -> None:
        """Run before a module is gathered.

        With the first gather of a forward, finish the optimizer step and compare the weights with
        the nodes' copies. A collective, if nodes keep copies. A module that is gathered again, or
        outside of any forward, counts as a forward of its own.
        """
        if torch_names.in_backward():
            return
        begins = self._forward_begins or sharded in self._gathered
        if not begins and torch_names.in_forward(sharded.module):
            self._gathered.add(sharded)
            return
        self.optimizers.before_forward()
        try:
            if self.copies is not None:
                self.copies.fill_written()
            elif self._steps_vote is not None:
                self._steps_vote.compare(self.step)
        except UnequalSteps as unequal:
            least, most = unequal.args
            raise RuntimeError(
                f"{KEY}: optimizers of this model have taken {least} steps on some ranks and "
                f"{most} on others. Random bits and the nodes' copies of the weights need steps of "
                "all ranks alike: let all ranks decide together, such as by torch.distributed."
                "all_reduce of the flag that skips a step, and call front.load_state_dict on all"
            ) from None
        self._forward_begins = False
        self._gathered = {sharded}
        if torch.is_grad_enabled():
            self._forwards += 1
            if self._forwards == _MANY_FORWARDS:
                self.log(
                    f"{KEY}: {_MANY_FORWARDS} forwards without a step of an optimizer of "
                    "torch.optim.Optimizer that holds this model's parameters: random bits repeat, "
                    "and warmup_steps do not end (logged once)"
                )

    # ---- events of an optimizer step ----

    def before_step(self, *, has_moved: bool) -> None:
        """Run before an optimizer steps.

        has_moved: True if another one has stepped since the weights were sent.

        Raises:
            RuntimeError: gradients wait for a backward that was declared the last one, or a
                message arrived corrupted on any rank.
        """
        self.refuse_capture()
        self._require_no_partial_sums("the optimizer steps")
        self._has_unchecked_messages = self.scheme.block.payload_checksum or self.scheme.lossless
        if torch_names.in_backward():
            return  # an optimizer per parameter: all are checked after the step
        self._check_messages()
        if self.copies is not None and not has_moved:
            self.copies.note_writes()

    def after_step(self, *, is_new: bool) -> None:
        """Run after optimizers have stepped: the next forward uses the new weights. A collective.

        is_new: False if an optimizer step goes on that was counted already.
        """
        self._check_messages()
        if is_new:
            self.step += 1
            self._forwards = 0
            counts = [r.reductions for r in self.reductions if r.reductions]
            # Most modules are reduced once per backward; some more often, for a loss in chunks.
            self.micro_steps = median_low(counts) if counts else 1
            for reduction in self.reductions:
                reduction.after_step()
        self._follow_training()
        step, exchanges = self.weights_version
        self.weights_version = self.step, exchanges + 1
        if self.copies is not None:
            self.copies.exchange()
        if is_new:
            self._compare_copies()
            if self.telemetry is not None:
                self.telemetry.after_step()

    def _follow_training(self) -> None:
        """Note the parameters that are trained now, and say so if they are others than before.

        One that was frozen since the last step counts as trained once more: this step may have
        moved it.
        """
        changed: list[Param] = []
        for sharded, was_trained in zip(self.sharded_modules, self._was_trained, strict=True):
            now = sharded.is_trained()
            for index, param in enumerate(sharded.params):
                trained = now[index] or was_trained[index]
                if trained != param.trained:
                    param.set_trained(trained)
                    changed.append(param)
            was_trained[:] = now
        if changed:
            count = sum(param.trained for param in self.params)
            volume = self.comm_volume().step_bytes(STAGE)
            self.info(
                f"{KEY}: {count} of {len(self.params)} parameters are trained now, "
                f"{changed[0].name} {'too' if changed[0].trained else 'no longer'}: volume "
                f"{volume:.2f} B/param/step"
            )

    def discard_gradients(self, parameters: Collection[int] | None = None) -> None:
        """Drop the partial sums of an accumulation that is given up.

        ``optimizer.zero_grad`` and ``model.zero_grad`` call this.

        parameters: ids of parameters, None for all.
        """
        for reduction in self.reductions:
            reduction.discard(parameters)

    def resync(self) -> None:
        """Let the next forward fill the nodes' copies exactly."""
        if self.copies is not None:
            self.copies.mark_all()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a checkpoint: the number of optimizer steps.

        Nodes receive exact weights in the next forward, so that this run goes on as one that loads
        the checkpoint.
        """
        self.resync()
        return {"step": self.step + self.optimizers.begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint's state; the next forward fills weights that nodes keep."""
        self.step = int(state["step"])
        self.weights_version = self.step, self.weights_version[1] + 1
        self.resync()
        if self.telemetry is not None:
            self.telemetry.arm()  # the step has jumped

    # ---- figures ----

    def comm_volume(self, scheme: Scheme | None = None) -> CommVolume:
        """Price a step of the model's scheme, or of another one, in bytes per parameter."""
        specs = [
            ParamSpec(
                name=param.name,
                shape=tuple(param.shape),
                dtype=dtype,
                trainable=param.trained,
                packed=param.packed,
                stock_weights=bool(sharded.fsdp_gathers),
                stock_gradients=not sharded.reduces,
            )
            for sharded in self.sharded_modules
            for param, dtype in zip(sharded.params, sharded.dtypes, strict=True)
        ]
        return comm_volume(
            scheme or self.scheme,
            STAGE,
            specs,
            ranks=self.topology.world,
            node_size=self.topology.node_size,
            gradient_dtype=self.gradient_dtype,
            replicas=self.replicas > 1,
        )

    def received_by_formula(self, comm_volume: CommVolume) -> dict[str, dict[str, float]]:
        """Return bytes that a rank receives per optimizer step, by role and link as ``Traffic``."""
        return comm_volume.received(STAGE, micro_steps=self.micro_steps)

    def received_in_full_precision(self) -> dict[str, dict[str, float]]:
        """Return bytes that a rank would receive per optimizer step, were nothing quantized."""
        return self.received_by_formula(self.comm_volume(in_full_precision(self.scheme)))

    def peak_bytes(self, comm_volume: CommVolume) -> float:
        """Predict the peak bytes of messages and sums on this rank in a step."""
        largest = max((sharded.row_numel for sharded in self.sharded_modules), default=0)
        largest *= self.shards.size
        sizes = Sizes(
            trained=sum(param.shape.numel() for param in self.params if param.trained),
            largest=largest,
            bucket=largest,
            prefetch=largest,
            itemsize=self.gradient_dtype.itemsize,
            exchanged_at_once=True,
            slicing=self.route[-1].slicing,
        )
        return peak_bytes(comm_volume, sizes)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Dtype in which gradients are reduced, of the first module whose gradients are sent."""
        for sharded in self.sharded_modules:
            if sharded.reduces:
                return sharded.gradient_dtype
        return torch.float32

    # ---- internals ----

    def _communicators(self) -> tuple[HierarchicalCommunicator, HierarchicalCommunicator]:
        """Return the communicators of all ranks, and those of the ranks of one replica."""
        mesh = self.mesh
        shards = self._communicator(mesh.shard_group)
        if mesh.replicas == 1:
            levels = self._levels(shards) if self.routes.two_levels else ()
            hierarchy = HierarchicalCommunicator(shards, *levels)
            return hierarchy, hierarchy
        inter = self._communicator(mesh.replica_group)

        def least(numbers: list[int]) -> list[int]:
            votes = torch.tensor(numbers, device=self.device)
            minimum: list[int] = inter.least(shards.least(votes)).tolist()
            return minimum

        flat = group_of(mesh.ranks, device=self.device, least=least)
        hierarchy = HierarchicalCommunicator(self._communicator(flat), shards, inter)
        return hierarchy, HierarchicalCommunicator(shards)

    def _levels(self, flat: Communicator) -> tuple[Communicator, ...]:
        """Return the communicators inside the node, between nodes, and of gradients in the node."""

        def least(numbers: list[int]) -> list[int]:
            minimum: list[int] = flat.least(torch.tensor(numbers, device=self.device)).tolist()
            return minimum

        groups = level_groups(
            self.topology,
            device=self.device,
            has_streams=self.device.type != "cpu",
            least=least,
        )
        intra, inter, gradients = groups
        if gradients is intra:
            return self._communicator(intra), self._communicator(inter)
        return tuple([self._communicator(group) for group in groups])

    def _communicator(self, process_group: Any) -> Communicator:
        return Communicator(
            process_group,
            topology=self.topology,
            traffic=self.traffic,
            message_errors=self.message_errors,
            sealed=self.scheme.block.payload_checksum,
            buffers=self.buffers,
            backend=self.scheme.block.backend,
            dist=torch.distributed,
        )

    def _route(self) -> tuple[ReductionHop, ...]:
        """Return the hops of a gradient reduction."""
        flat = self.hierarchy.flat
        by_level = {
            "flat": flat,
            "intra": self.hierarchy.gradients or flat,
            "inter": self.hierarchy.inter or flat,
        }
        pace = presumed_pace(self.device, carries(flat.process_group, self.device))
        slicing = Slicing(count=self.scheme.block.slices, pace=pace)
        hops = []
        divisor = 1
        for hop in self.routes.gradients(full_world=self.hierarchy.intra is not None).hops:
            communicator = by_level[hop.level]
            hops.append(
                ReductionHop(
                    communicator=communicator,
                    divisor=divisor,
                    full_precision_own=hop.full_precision_own,
                    slicing=slicing,
                )
            )
            divisor *= communicator.size
        return tuple(hops)

    def _require_no_partial_sums(self, event: str) -> None:
        """Raise RuntimeError if gradients wait for a backward that was declared the last one."""
        waiting = [
            sharded.title
            for sharded, reduction in zip(self.sharded_modules, self.reductions, strict=True)
            if reduction.holds_partial_sums
        ]
        if waiting:
            raise RuntimeError(
                f"{KEY}: {event} while gradients of {len(waiting)} module(s), such as "
                f"{waiting[0]}, are summed inside their nodes only: call "
                "model.set_is_last_backward(True), and set_requires_all_reduce(True) if you have "
                "called it, before the last backward of a step; or drop the gradients with "
                f'front.discard_gradients(); or set {KEY}.gradients.cross="micro_step"'
            )

    def _compare_copies(self) -> None:
        """Compare the weights that several nodes hold, every ``checksum_steps`` optimizer steps.

        Replicas are compared after the first step, too: they may have begun with other weights.

        Raises:
            RuntimeError: on all ranks, if replicas differ.
        """
        every = self.scheme.block.checksum_steps
        begins = self.replicas > 1 and self.step == 1
        if not every or (self.step % every and not begins):
            return
        if self.replicas > 1:
            held = [shard for sharded in self.sharded_modules for shard in sharded.shards()]
        else:
            held = [] if self.copies is None else self.copies.rows()
        if not held:
            return
        local = self.hierarchy.rank % self.topology.node_size
        self._has_unchecked_messages = True
        differing = differing_ranks(
            [(local, held)],
            self.hierarchy.flat,
            self.device,
            step=self.step,
            check_messages=self._check_messages,
        )
        self._has_unchecked_messages = False
        if not differing:
            return
        if self.replicas > 1:
            raise replicas_differ(self.step, differing)
        self.log(brought_back(self.step, differing, "model"))
        self.resync()

    def _check_messages(self) -> None:
        """End the run on all ranks if any of them received a corrupted message. A collective."""
        if not self._has_unchecked_messages:
            return
        self._has_unchecked_messages = False
        flat = self.hierarchy.flat
        found = self.message_errors.any_error(self.device)
        vote = torch.where(found, flat.rank, flat.size)
        (receiver,) = flat.least(vote.view(1).to(self.device)).tolist()
        if receiver == flat.size:
            self.message_errors.forget()
            return
        errors: list[MessageError | None] = [self.message_errors.first()]
        torch.distributed.broadcast_object_list(
            errors, src=flat.ranks[receiver], group=flat.process_group
        )
        error = errors[0]
        assert error is not None, "the receiver has voted for it"
        raise end_of_run(
            error,
            receiver=flat.ranks[receiver],
            step=self.step,
            sealed=self.scheme.block.payload_checksum,
            lossless=self.scheme.lossless,
        )
