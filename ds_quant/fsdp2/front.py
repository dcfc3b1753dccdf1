"""One model under FSDP2: its scheme, communicators, sharded modules and counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

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
from ds_quant.comm.transport import Communicator
from ds_quant.fsdp2.gradients import QuantizedReduceScatter
from ds_quant.fsdp2.node_shard import NodeShard
from ds_quant.fsdp2.sharded_module import root_state, sharded_modules
from ds_quant.fsdp2.weights import QuantizedAllGather
from ds_quant.policy.cost import CommVolume, ParamSpec, comm_volume
from ds_quant.policy.route import Routes
from ds_quant.policy.scheme import Scheme, is_packed
from ds_quant.runtime import log
from ds_quant.runtime.copies import brought_back, differing_ranks, replicas_differ
from ds_quant.runtime.message_error import end_of_run
from ds_quant.runtime.param import Param

STAGE = 3  # FSDP2 shards weights, gradients and optimizer states, as ZeRO-3 does


class Front:
    """Scheme, topology, communicators and state of one model.

    A ``torch.distributed.checkpoint`` Stateful: ``state_dict`` holds the number of optimizer steps,
    which names the random bits, so that a resumed run repeats them.
    """

    def __init__(
        self,
        model: nn.Module,
        scheme: Scheme,
        topology: Topology,
        process_groups: Sequence[Any],
        device: torch.device,
        *,
        has_replicas: bool = False,
    ) -> None:
        # - What is sent, and where
        self.model = model
        self.scheme = scheme
        self.topology = topology
        self.device = device
        self.replicas = topology.nodes if has_replicas else 1
        self.routes = Routes(
            scheme=scheme,
            stage=STAGE,
            nodes=topology.nodes,
            node_size=topology.node_size,
            replicas=has_replicas,
        )

        # - Communicators
        self.traffic = Traffic()
        self.message_errors = MessageErrors()
        self.buffers = Buffers()
        communicators = [self._communicator(group) for group in process_groups]
        self.hierarchy = HierarchicalCommunicator(*communicators)
        # The ranks among which a parameter is sharded.
        self.shards = self.hierarchy
        if has_replicas:
            self.shards = HierarchicalCommunicator(communicators[1])
        self.route = self._route()
        self._gradient_sums: dict[
            tuple[tuple[Segment, ...], tuple[GradientSpec, ...], float], GradientSums
        ] = {}

        # - State between steps
        self.step = 0
        self.notices: list[str] = []
        self.line = ""
        self._root = root_state(model)

        # - Parameters and collectives
        self.params = _records(model, self.routes)
        self.sharded_modules = sharded_modules(model, self.params, self.shards.size)
        self.node_shards: list[NodeShard] = []
        self.reductions: list[QuantizedReduceScatter] = []

    def connect(self) -> None:
        """Replace the collectives of every sharded module. A collective, if nodes keep weights."""
        for sharded in self.sharded_modules:
            node_shard = None
            if self.routes.keeps_shard:
                node_shard = NodeShard(self, sharded)
                self.node_shards.append(node_shard)
            sharded.reduce_between_nodes()
            reduction = QuantizedReduceScatter(self, sharded)
            self.reductions.append(reduction)
            sharded.module.set_custom_all_gather(QuantizedAllGather(self, sharded, node_shard))
            sharded.module.set_custom_reduce_scatter(reduction)

    def gradient_sums(
        self, segments: tuple[Segment, ...], specs: tuple[GradientSpec, ...], scale: float
    ) -> GradientSums:
        """Plan a reduction; layers of equal shapes share one plan."""
        key = segments, specs, scale
        if key not in self._gradient_sums:
            self._gradient_sums[key] = GradientSums(
                segments, specs, self.route, self.hierarchy.flat, scale
            )
        return self._gradient_sums[key]

    @property
    def defers_inter_node(self) -> bool:
        """True if gradients cross between nodes in the last backward of a step only."""
        return self.routes.gradients().waits

    @property
    def is_last_backward(self) -> bool:
        """True unless the user has called ``set_is_last_backward(False)``."""
        return self._root.is_last_backward

    def is_full_precision(self, step: int) -> bool:
        """Return True if an optimizer step sends everything in full precision."""
        return step < self.scheme.block.warmup_steps

    # - Events of an optimizer step

    def before_step(self, *_: Any) -> None:
        """Run before the optimizer steps.

        Raises:
            RuntimeError: gradients wait for a backward that was declared the last one, or a
                message arrived corrupted on any rank.
        """
        waiting = [
            sharded.name or "the root"
            for sharded, reduction in zip(self.sharded_modules, self.reductions, strict=True)
            if reduction.holds_partial_sums
        ]
        if waiting:
            raise RuntimeError(
                f"quantized_comm: the optimizer steps while gradients of {len(waiting)} module(s), "
                f"such as {waiting[0]}, are summed inside their nodes only: call "
                "model.set_is_last_backward(True), and set_requires_all_reduce(True) if you have "
                "called it, before the last backward of a step, in which every module needs a "
                'gradient; or set quantized_comm.gradients.cross="micro_step"'
            )
        if self.scheme.block.payload_checksum:
            self._check_messages()

    def after_step(self, *_: Any) -> None:
        """Run after the optimizer has stepped: the next forward uses the new weights."""
        self.step += 1
        for reduction in self.reductions:
            reduction.after_step()
        for node_shard in self.node_shards:
            node_shard.after_step()
        self._compare_copies()

    def discard_gradients(self) -> None:
        """Forget partial sums of an accumulation that was abandoned."""
        for reduction in self.reductions:
            reduction.discard()

    def resync(self) -> None:
        """Fill the weights that nodes keep, exactly. A collective."""
        for node_shard in self.node_shards:
            node_shard.refill()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a checkpoint: the number of optimizer steps."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint's state; weights that nodes keep are filled anew. A collective."""
        self.step = int(state["step"])
        self.resync()

    # - Figures

    def comm_volume(self) -> CommVolume:
        """Price a step by formula, in bytes per parameter."""
        specs = [
            ParamSpec(
                name=param.name,
                shape=tuple(param.shape),
                dtype=sharded.dtype,
                trainable=param.trained,
                packed=param.packed,
            )
            for sharded in self.sharded_modules
            for param in sharded.params
        ]
        return comm_volume(
            self.scheme,
            STAGE,
            specs,
            ranks=self.topology.world,
            node_size=self.topology.node_size,
            gradient_dtype=self.gradient_dtype,
            replicas=self.replicas > 1,
        )

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Dtype in which FSDP2 reduces gradients, of the first module with parameters."""
        for sharded in self.sharded_modules:
            return sharded.gradient_dtype
        return torch.float32

    # - Internals

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
        backend = torch.distributed.get_backend()
        slicing = Slicing(count=self.scheme.block.slices, pace=presumed_pace(self.device, backend))
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
            held = [node_shard.rows() for node_shard in self.node_shards]
        if not held:
            return
        local = self.hierarchy.rank % self.topology.node_size
        differing = differing_ranks(
            [(local, held)],
            self.hierarchy.flat,
            self.device,
            step=self.step,
            check_messages=self._check_messages,
        )
        if not differing:
            return
        if self.replicas > 1:
            raise replicas_differ(self.step, differing)
        log.log_rank0(brought_back(self.step, differing, "model"))
        self.resync()

    def _check_messages(self) -> None:
        """End the run on all ranks if any of them received a corrupted message."""
        flat = self.hierarchy.flat
        found = self.message_errors.any_error(self.device)
        vote = torch.where(found, flat.rank, flat.size)
        (receiver,) = flat.least(vote.view(1).to(self.device)).tolist()
        if receiver == flat.size:
            self.message_errors.forget()
            return
        errors: list[MessageError | None] = [self.message_errors.first()]
        torch.distributed.broadcast_object_list(errors, src=receiver)
        error = errors[0]
        assert error is not None, "the receiver has voted for it"
        raise end_of_run(error, receiver=receiver, step=self.step, sealed=True, lossless=False)


def _records(model: nn.Module, routes: Routes) -> dict[int, Param]:
    """Return a record of every parameter by its id; numbered as ``named_parameters`` has them."""
    modules = dict(model.named_modules())
    return {
        id(parameter): Param(
            index=index,
            name=name,
            shape=parameter.shape,
            trained=parameter.requires_grad,
            packed=is_packed(parameter.to_local(), modules.get(name.rpartition(".")[0])),
            tensor=parameter,
            routes=routes,
        )
        for index, (name, parameter) in enumerate(model.named_parameters())
        if hasattr(parameter, "to_local")
    }
