"""A model under FSDP2 that a block is attached to: its run, collectives and events."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median_low
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from ds_quant.codec.codec import GroupCodec
from ds_quant.comm.transport import Communicator
from ds_quant.config.errors import KEY, another_block
from ds_quant.config.schema import QuantizedCommConfig
from ds_quant.fsdp2 import torch_names
from ds_quant.fsdp2.context import Context
from ds_quant.fsdp2.dropped_gradients import Undo, drop_with_module
from ds_quant.fsdp2.forwards import Forwards
from ds_quant.fsdp2.gradients import QuantizedReduceScatter
from ds_quant.fsdp2.node_copies import NodeCopies
from ds_quant.fsdp2.node_shard import NodeShard
from ds_quant.fsdp2.optimizers import OptimizerSteps
from ds_quant.fsdp2.prices import line_parts_of, sizes_of, workload_of
from ds_quant.fsdp2.ranks import STAGE, RanksOfModel, run_of
from ds_quant.fsdp2.sharded_module import ShardedModule, groups_of
from ds_quant.fsdp2.waiting_gradients import (
    require_one_divide_factor,
    require_reduced,
    require_unwritten,
)
from ds_quant.fsdp2.watched_gradients import WatchedGradients
from ds_quant.fsdp2.weights import QuantizedAllGather
from ds_quant.policy.memory import Sizes
from ds_quant.policy.scheme import Scheme
from ds_quant.runtime.copies import (
    compare_copies,
    compare_replicas,
    compares_copies,
    compares_replicas,
)
from ds_quant.runtime.figures import figures
from ds_quant.runtime.front import Workload
from ds_quant.runtime.message_check import check_messages
from ds_quant.runtime.param import Param
from ds_quant.runtime.savings import Received
from ds_quant.runtime.start_line import LineParts, full_line
from ds_quant.runtime.step_events import StepEvents
from ds_quant.runtime.written_weights import UnequalSteps


class ServedModule(NamedTuple):
    """A sharded module and its two collectives."""

    sharded: ShardedModule
    gather: QuantizedAllGather
    reduction: QuantizedReduceScatter

    @property
    def is_served(self) -> bool:
        """True unless the user has set collectives since."""
        group = self.sharded.group
        return (
            group._all_gather_comm is self.gather and group._reduce_scatter_comm is self.reduction
        )


@dataclass(frozen=True, kw_only=True)
class AttachArguments:
    """The arguments of a call of ``attach``.

    block: perhaps with "autotune".
    has_optimizer: False for a model that is only evaluated.
    groups: ids of the parameter groups of the model.
    """

    block: QuantizedCommConfig
    has_optimizer: bool
    groups: frozenset[int]

    @classmethod
    def of(
        cls, model: nn.Module, block: QuantizedCommConfig, optimizers: Sequence[Optimizer]
    ) -> AttachArguments:
        """Return the record of a call."""
        groups = frozenset(id(group) for _, _, group in groups_of(model))
        return cls(block=block, has_optimizer=bool(optimizers), groups=groups)

    def difference(self, second: AttachArguments) -> str | None:
        """Return the reason why a second call cannot return the front of this one, or None."""
        if second.groups != self.groups:
            return "as a part of a larger model, or in part"
        if second.has_optimizer and not self.has_optimizer:
            return "without an optimizer"
        return another_block(self.block, second.block)


class AttachedModel:
    """One model under FSDP2.

    A ``torch.distributed.checkpoint`` Stateful: ``state_dict`` holds the number of optimizer steps,
    which names the random bits, so that a resumed run repeats them.

    The model's collectives hold it, so it lives as long as the model.

    arguments: of ``attach``; None before ``connect``.
    copies: of the weights in every node, if the scheme keeps some; freed by ``detach``.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: RanksOfModel,
        scheme: Scheme,
    ) -> None:
        self.step = 0
        self.arguments: AttachArguments | None = None
        self.run, modules = run_of(self, model, scheme, ranks)
        self._modules = modules
        self._forwards = Forwards(self.run)
        self._optimizers = OptimizerSteps(self)
        watched: WatchedGradients | None = None
        if self.run.finite_flags is not None:
            flags = self.run.finite_flags
            watched = WatchedGradients(flags, model, modules, self._optimizers)
        self.context = Context(
            run=self.run,
            before_gather=self._before_gather,
            after_reduction=self._after_reduction,
            watched=watched,
        )
        self.copies: NodeCopies | None = None
        node_shards: dict[ShardedModule, NodeShard] = {}
        for sharded in modules:
            if sharded.level.routes.keeps_shard and not sharded.fsdp_gathers:
                node_shards[sharded] = NodeShard(self.context, sharded)
        if any(level.routes.keeps_shard for level in self.run.levels):
            self.copies = NodeCopies(self.context, list(node_shards.values()))
        self.served = [
            ServedModule(
                sharded,
                QuantizedAllGather(self, self.context, sharded, node_shards.get(sharded)),
                QuantizedReduceScatter(self.context, sharded),
            )
            for sharded in modules
        ]
        self.events = StepEvents(self.run, None if watched is None else watched.first_nonfinite)
        self._has_unchecked_messages = False
        # Of ``connect``, with FSDP2's own collectives; ``detach`` frees them. None: not connected.
        self._undo: list[Undo] | None = None

    # ---- life ----

    def connect(
        self, model: nn.Module, optimizers: Iterable[Optimizer], arguments: AttachArguments
    ) -> None:
        """Replace the collectives of every sharded module, and follow the optimizers."""
        undo: list[Undo] = []
        for _, gather, reduction in self.served:
            gather.connect()
            reduction.connect()
            undo += [gather.disconnect, reduction.disconnect]
        undo += drop_with_module(model, self)
        for module in model.modules():
            if not isinstance(module, FSDPModule):
                continue
            undo.append(torch_names.before_forwards(module, self._before_forward))
            if module is not model:
                undo += drop_with_module(module, self)
        self._undo = undo
        self.arguments = arguments
        self._optimizers.follow(optimizers)

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Follow optimizers that were made since ``connect``."""
        self._optimizers.know(optimizers)

    def detach(self) -> None:
        """Give FSDP2 its collectives back: the model trains on without the block.

        Weights, optimizer states and gradients are exact and stay. Call it on all ranks between
        optimizer steps.

        Raises:
            RuntimeError: gradients wait for a backward that was declared the last one; or ranks
                have stepped alone.
        """
        require_reduced(self._reductions(), "the model is detached")
        if self._undo is None:
            return
        self._forwards.refuse_ended()
        if self.copies is not None:
            self.copies.finish()
        self._optimizers.stop()
        for undo in self._undo:
            undo()
        self._undo = None
        if self.run.device.type != "cpu":
            torch.accelerator.synchronize(self.run.device)  # streams may still read the copies
        self.copies = None

    def __del__(self) -> None:
        """Wait for messages of this rank that are under way: later models use the same groups."""
        if self._forwards.ended_by:
            return  # they never arrive
        with suppress(Exception):  # of a model that was not made, or of a lost rank
            self.context.partial_sums.wait()
            if self.copies is not None:
                self.copies.finish()

    # ---- events of a forward ----

    def _before_forward(self) -> None:
        """Run before the forward of the root, or of a module that no other calls."""
        self._forwards.expect()
        if all(sharded.is_replicated for sharded in self._modules):  # FSDP2 gathers nothing
            self._begin_forward()
            self._forwards.begin_with(None)

    def _before_gather(self, sharded: ShardedModule) -> None:
        """Run before a module is gathered."""
        if torch_names.in_backward() or not self._forwards.begins_with(sharded):
            return
        self._begin_forward()
        self._forwards.begin_with(sharded)

    def _begin_forward(self) -> None:
        """Finish the optimizer step and compare the weights with the nodes' copies.

        A collective, if nodes keep copies or random bits depend on the step.
        """
        self._forwards.refuse_ended()
        self._optimizers.before_forward()
        self._compare_steps()

    def _compare_steps(self, *, now: bool = False) -> None:
        """Compare the optimizer steps of all ranks, and fill copies of written weights.

        A collective, as of ``_begin_forward``. now: as of ``Forwards.compare_steps``.

        Raises:
            RuntimeError: on all ranks, if some have stepped alone.
        """
        try:
            if self.copies is not None:
                self.copies.fill_written()
            else:
                self._forwards.compare_steps(now=now)
        except UnequalSteps as unequal:
            raise self._forwards.error_of(unequal, has_copies=self.copies is not None) from None

    # ---- events of an optimizer step ----

    def parameter_ids(self) -> Iterable[int]:
        """Yield the ids of the sharded parameters, as they are now."""
        for sharded, _, _ in self.served:
            for member in sharded.members:
                yield id(member.sharded_param)

    def _reductions(self) -> list[QuantizedReduceScatter]:
        return [reduction for _, _, reduction in self.served]

    def before_step(self, optimizer: Optimizer, *, has_moved: bool) -> None:
        """Run before an optimizer steps.

        has_moved: True if another one has stepped since the weights were sent.

        Raises:
            RuntimeError: gradients of the optimizer wait for a backward that is declared the last
                one, or were written or divided otherwise before it; or a message arrived corrupted
                on any rank.
        """
        self.run.refuse_capture()
        self._forwards.refuse_ended()
        reductions = self._reductions()
        require_reduced(reductions, "the optimizer steps", optimizer)
        require_unwritten(reductions)
        require_one_divide_factor(reductions)
        self._require_own_collectives()
        scheme = self.run.scheme
        self._has_unchecked_messages = scheme.block.payload_checksum or scheme.lossless
        if torch_names.in_backward():
            return  # an optimizer per parameter: all are checked after the step
        self._check_messages()
        self._vote()
        if self.copies is not None and not has_moved:
            self.copies.note_writes()

    def after_step(self, *, is_new: bool) -> None:
        """Run after optimizers have stepped: the next forward uses the new weights. A collective.

        is_new: False if an optimizer step goes on that was counted already.
        """
        self._check_messages()
        if self._optimizers.have_stepped_in_backward:
            self._vote()  # late, but on all ranks: a kill file switches the next step
        if self.context.watched is not None:
            self.context.watched.clear()
        if is_new:
            self.step += 1
            self._forwards.after_step()
            for _, _, reduction in self.served:
                reduction.after_step()
        ratios = self._ratios_of_step()
        self._follow_training()
        if self.run.scheme.level_steps:
            self.run.learn_levels(self.step, self._own_values())
        self._bind_anew()
        was_exact = self.run.traffic.is_exact
        self.run.begin_step()
        if self.copies is not None:
            self.copies.exchange()
            if self.run.traffic.is_exact and not was_exact:
                self.copies.resync_frozen()
        self.run.savings.settle(ratios)
        if is_new:
            self._compare_copies()
            self.events.after_step()

    def _ratios_of_step(self) -> Received:
        """Return the ratios of this step, for ``Savings``: the next one may train other parameters.

        The exchange that ends this step stands for the gathers of as many micro-steps as it had.
        """
        run = self.run

        def prices() -> tuple[Received, Received]:
            return run.received_by_formula(run.comm_volume()), run.received_in_full_precision()

        return run.savings.ratios(self.micro_steps, prices)

    def _after_reduction(self) -> None:
        self.events.gradients_changed()
        self._optimizers.after_reduction()

    def found_nonfinite(self) -> bool:
        """Return True on all ranks if gradients of this step hold NaN or Inf on any rank.

        Call it on all ranks before the optimizer steps, and skip the step then: drop the gradients
        with ``zero_grad``. The block's ``fallback`` sends the next steps in full precision. The
        gradients of all parameters are looked at, when they have been reduced over all ranks. The
        answer stays the same until a backward or ``zero_grad`` changes them.

        Raises:
            RuntimeError: nothing is watched.
            FloatingPointError: on all ranks, with ``fallback.on_nonfinite="raise"``.
        """
        fallback = self.events.watched_gradients()
        watched = self.context.watched
        assert watched is not None
        if not fallback.has_voted:
            was_noted = watched.are_noted
            watched.found = fallback.vote(is_noted=was_noted)
            if watched.found and not was_noted:
                watched.note_found()
                fallback.after_step(skipped=True)
                self.run.begin_step()  # the step is repeated, perhaps in full precision
                self._bind_anew()
        return watched.found and not watched.are_dropped

    def _vote(self) -> None:
        """Vote with all ranks, unless they have voted on these gradients."""
        watched = self.context.watched
        self.events.before_step(is_noted=watched is not None and watched.are_noted)

    def _bind_anew(self) -> None:
        """Let the next gathers bind the codecs of the weights to the step as it is now."""
        _, exchanges = self.context.weights_version
        self.context.weights_version = self.step, exchanges + 1

    def _follow_training(self) -> None:
        """Note the parameters that are trained now, and say so if they are others than before."""
        changed: list[Param] = []
        for sharded, _, _ in self.served:
            changed += sharded.follow_training()
        if changed:
            self.run.savings.forget_prices()
            params = self.run.params
            count = sum(param.trained for param in params)
            volume = self.run.comm_volume().step_bytes(STAGE)
            self.run.info(
                f"{KEY}: {count} of {len(params)} parameters are trained now, "
                f"{changed[0].name} {'too' if changed[0].trained else 'no longer'}: volume "
                f"{volume:.2f} B/param/step"
            )

    def discard_gradients(self, parameters: Collection[int] | None = None) -> None:
        """Drop the partial sums of an accumulation that is given up, as ``zero_grad`` does.

        parameters: ids of parameters, None for all.
        """
        if self.context.watched is not None:
            self.context.watched.drop(parameters)
            self.events.gradients_changed()
        for _, _, reduction in self.served:
            reduction.discard(parameters)
        if self._optimizers.has_reduced and self._covers_trained(parameters):
            self._optimizers.has_reduced = False

    def kept_gradients(self) -> set[int]:
        """Return the ids of parameters whose gradients FSDP2 keeps outside of ``.grad``."""
        return {kept for _, _, reduction in self.served for kept in reduction.kept_gradients()}

    def _covers_trained(self, parameters: Collection[int] | None) -> bool:
        """Return True if no trained parameter is missing from ``parameters``, None for all."""
        members = [member for sharded, _, _ in self.served for member in sharded.members]
        trained = {id(m.sharded_param) for m in members if m.sharded_param.requires_grad}
        return parameters is None or trained <= set(parameters)

    def _own_values(self) -> Iterator[tuple[Param, Tensor, Communicator]]:
        """Yield every parameter, this rank's shard as it is sent, and the ranks that share it."""
        for sharded in self._modules:
            if sharded.fsdp_gathers or sharded.is_replicated:
                continue
            shards = sharded.level.shards
            rows = zip(sharded.params, sharded.shards(), sharded.lengths, strict=True)
            for param, shard, lengths in rows:
                yield param, shard[: lengths[shards.rank]].to(sharded.dtype), shards.flat

    def has_waiting_gradients(self) -> bool:
        """Return True if gradients wait for a backward that is declared the last one."""
        return any([reduction.holds_partial_sums for _, _, reduction in self.served])

    def _require_own_collectives(self) -> None:
        """Raise RuntimeError if the user has replaced a collective since ``connect``."""
        others = [each.sharded.title for each in self.served if not each.is_served]
        if others:
            raise RuntimeError(
                f"{KEY}: set_custom_all_gather or set_custom_reduce_scatter was called on "
                f"{len(others)} attached module(s), such as {others[0]}: nothing of them is "
                "quantized. Leave that out, or call front.detach() first"
            )

    # ---- checks ----

    def _check_messages(self) -> None:
        """End the run on all ranks if any of them received a corrupted message. A collective."""
        if self._has_unchecked_messages:
            self._has_unchecked_messages = False
            check_messages(self.run)

    def _compare_copies(self) -> None:
        """Compare the weights that several nodes hold, every ``checksum_steps`` optimizer steps.

        Raises:
            RuntimeError: on all ranks, if replicas differ, or if some have stepped alone.
        """
        # A rank that has not stepped takes no part in what follows ``_compare_steps``.
        if self.copies is not None and compares_copies(self.run, self.step):
            self._compare_steps(now=True)
            compare_copies(self.run, self.copies, self.step)
        if compares_replicas(self.run, self.step):
            self._compare_steps(now=True)
            compare_replicas(self.run, self._replicated_weights(), self.step)

    def _replicated_weights(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield this rank's shards of every level with replicas. The first rank that holds the same
        ones stands for their owner.
        """
        for level in self.run.levels:
            if level.replicas > 1:
                own = [sharded for sharded in self._modules if sharded.level is level]
                held = [shard for sharded in own for shard in sharded.shards()]
                holders = level.between_nodes if level.routes.replicas else level.hierarchy.flat
                yield holders.ranks[0], held

    # ---- state ----

    def resync(self) -> None:
        """Let the next forward fill the nodes' copies exactly."""
        if self.copies is not None:
            self.copies.resync()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a checkpoint: the number of optimizer steps, and learned levels.

        The keys of one scheme are always the same. Nodes receive exact weights in the next forward,
        so that this run goes on as one that loads the checkpoint.
        """
        self.resync()
        state = self.events.state_dict(self.step + self._optimizers.begun)
        if self.run.scheme.level_steps:
            state["learned_at"] = self.run.state.learned_at
            state["levels"] = self._levels()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint's state; the next forward fills weights that nodes keep.

        Raises:
            ValueError: a state without a number of steps.
            RuntimeError: ranks have stepped alone, with copies of the weights in the nodes.
        """
        self._forwards.refuse_ended()
        self.step = self.events.load_state_dict(state)
        for _, _, reduction in self.served:
            reduction.begin_step()
        self.run.state.learned_at = int(state.get("learned_at", 0))
        levels: dict[str, Tensor] = state.get("levels", {})
        for param in self.run.params:
            table = levels.get(param.name)
            param.levels = None if table is None else table.to(self.run.device)
        self._bind_anew()
        self.resync()
        self.events.rearm()

    def _levels(self) -> dict[str, Tensor]:
        """Return the levels of all parameters that have some, by name: (2^bits,) fp32 each."""
        codec = self.run.scheme.weights
        assert isinstance(codec, GroupCodec)  # other codecs have no levels
        levels: dict[str, Tensor] = {}
        for sharded, _, _ in self.served:
            for param in sharded.params:
                if param.is_quantized(sharded.dtype):
                    table = codec.table(param.levels, torch.device("cpu"))
                    assert table is not None
                    levels[param.name] = table.cpu().clone()
        return levels

    # ---- figures ----

    @property
    def counted_steps(self) -> int:
        """Optimizer steps; FSDP2 skips none."""
        return self.step

    @property
    def micro_steps(self) -> int:
        """Backwards of the last optimizer step."""
        counts = [r.last_reductions for _, _, r in self.served if r.last_reductions]
        # Most modules are reduced once per backward; some more often, for a loss in chunks.
        return median_low(counts) if counts else 1

    def workload(self) -> Workload:
        """Return the communication of an optimizer step."""
        return workload_of(self.run, self._modules, micro_steps=self.micro_steps)

    def sizes(self) -> list[Sizes]:
        """Return the sizes that decide the peak memory of a step."""
        return sizes_of(self.run, self._modules)

    @property
    def line(self) -> str:
        """What the start-up lines say, and all that they leave out, in one line."""
        return full_line(self.run, self.line_parts())

    def line_parts(self) -> LineParts:
        """Return the part of the start-up lines that FSDP2 knows."""
        volume = self.run.comm_volume()
        return line_parts_of(self.run, self._modules, volume, kept_bytes=self._kept_bytes)

    @property
    def _kept_bytes(self) -> int:
        return 0 if self.copies is None else self.copies.nbytes

    def figures(self) -> dict[str, Any]:
        """Return the figures of ``ds_quant.report``."""
        return {
            "front": "fsdp2",
            "replicas": max(level.replicas for level in self.run.levels),
            **figures(
                self.run,
                kept_bytes=self._kept_bytes,
                held_bytes=self.context.partial_sums.most_nbytes,
                accumulates=True,
            ),
            "line": self.line,
        }
