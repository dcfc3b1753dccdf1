"""Reduce gradients of FSDP2: the custom reduce-scatter of every sharded module.

[Note: one backward, one step] With several nodes of several ranks a reduction has two hops. Where
the user says that a backward is not the last one of the optimizer step
(``set_is_last_backward(False)`` or ``set_requires_all_reduce(False)``), only the hop inside the
node runs: the ranks of a node keep its *partial sums*, and FSDP2 gets zeros, which it adds to the
gradient. The last backward reduces the partial sums between the nodes. A user who says nothing has
every backward cross between the nodes.

[Note: which gradients] FSDP2 reduces the gradients that a backward has made. These may be some of a
module's parameters, and others in the next backward: parameters are frozen and thawed, and a loss
in chunks runs backward through part of a module. The custom reduce-scatter gets a flat tensor, so
the parameters that have gradients are noted before. Partial sums are kept for each set of such
parameters. In the last backward a parameter that has partial sums but no gradient gets one of
zeros, so FSDP2 reduces it, and the sums of all sets are added to the reduced gradients.

[Note: an accumulation that is given up] A loop that drops its gradients drops the partial sums,
too. ``zero_grad`` tells the front, see optimizers.py. A gradient that is None again has been
dropped. Anything else that writes a gradient between two backwards has written zeros, so it is an
error: of the optimizer step, because an exception inside a backward would leave FSDP2 with
gradients that no method drops.

[Note: gradients of replicas] With a replica in every node a rank of a node sums its part of a row
over the nodes, and sends it back to them: see comm/returned_sums.py. FSDP2 gets the sum over all
ranks.

[Note: replicated modules] On a mesh of ``replicate()``, or of replicas of one rank, every rank
holds all parameters, and FSDP2 calls no custom collective. The all-reduce hook is left: it sends
the gradients of a module to the ranks that sum them and back, as under DDP. FSDP2 calls it in every
backward. Where the user declares that another backward follows, FSDP2 is asked to keep the whole
gradients, as ``set_requires_gradient_sync(False)`` does.

[Note: all-reduce stream] With replicas the custom reduce-scatter posts the messages between the
nodes and does not wait for them. FSDP2's all-reduce hook waits, on FSDP2's all-reduce stream. That
stream waits for the reduce-scatter before, and no later reduce-scatter waits for that stream. So
the next modules' backward runs while this module's sums cross between the nodes. On the CPU there
are no streams, and the hook blocks the host until the sums are there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_quant.codec.bound import BoundCodec, Rotation
from ds_quant.comm.profiling import profiler_range
from ds_quant.comm.reduce import Reduction
from ds_quant.comm.transport import keep_for_current_stream
from ds_quant.fsdp2 import torch_names
from ds_quant.fsdp2.context import Context
from ds_quant.fsdp2.module_reductions import BegunReduction, PartialSums, ReductionPlan
from ds_quant.fsdp2.segments import segments_of
from ds_quant.fsdp2.sharded_module import ShardedModule
from ds_quant.fsdp2.torch_names import FsdpParam, ReduceScatter
from ds_quant.runtime.param import bind
from ds_quant.runtime.plan_cache import PlanCache
from ds_quant.runtime.reductions import (
    ReturnedGradients,
    plan_return,
    reduced_codecs,
)

_REDUCTION_BITS = 24  # of an address, for the number of a reduction in its optimizer step


class QuantizedReduceScatter(ReduceScatter):
    """The reduce-scatter of one sharded module: see [Note: one backward, one step].

    has_written_gradients: a gradient was written between two backwards of this optimizer step.
    has_changed_factor: the user's divisor was changed between two of them.
    """

    def __init__(self, context: Context, sharded: ShardedModule) -> None:
        self._context = context
        self._run = context.run
        self.sharded = sharded
        self._level = sharded.level
        group = sharded.group
        self._fsdp_reduce_scatter = group._reduce_scatter_comm
        self._mesh_records = group.mesh_info, group.post_forward_mesh_info
        # Plans, which hold no tensors but small tables: emptied when they are full.
        self._plans: PlanCache[tuple[torch.dtype, bool, float, tuple[bool, ...]], ReductionPlan]
        self._plans = PlanCache()
        self._has_gradient: tuple[bool, ...] = ()  # by parameter, in this backward
        # The last backward of a step frees them, or ``discard``, if the accumulation is given up.
        self._partial_sums: dict[ReductionPlan, PartialSums] = {}
        self._has_users_hook = False  # of set_all_reduce_hook, in this backward
        self._keeps_gradients = False  # for the last backward: see [Note: replicated modules]
        # With replicas: messages and sums, which the all-reduce hook of the same backward frees.
        self._begun: BegunReduction | None = None
        self._reductions = 0  # in this optimizer step: one per backward, more for a loss in chunks
        self.last_reductions = 0  # in the last one
        self.has_written_gradients = False
        self.has_changed_factor = False
        self._divide_factor: float | None = None  # the user's, in the last backward
        # Address of the signs with which the sums that wait are rotated.
        self._signs = 0

    # ---- FSDP2's calls ----

    def connect(self) -> None:
        """Replace FSDP2's reduce-scatter, and note the gradients of every backward ahead of it."""
        group = self.sharded.group
        group._reduce_scatter_comm = self
        if not self.sharded.reduces:
            return
        has_replicas = self.sharded.reduce_between_nodes()
        reduce = group.post_backward
        if self.sharded.is_replicated:
            reduce = partial(self._reduce_or_keep, reduce)

        def post_backward(*unused: Any) -> None:
            self._before_reduction()
            with profiler_range("reduce", self.sharded.title):
                users_hook = group._all_reduce_hook
                self._has_users_hook = users_hook is not None
                if has_replicas:
                    # For this call only: the user may set another one at any time.
                    group._all_reduce_hook = partial(self.all_reduce, users_hook)
                try:
                    reduce(*unused)
                finally:
                    group._all_reduce_hook = users_hook
            for partial_sums in self._partial_sums.values():
                partial_sums.note_versions()

        group.post_backward = post_backward

    def _reduce_or_keep(self, reduce: Callable[..., None], *unused: Any) -> None:
        """Let FSDP2 reduce or keep gradients: see [Note: replicated modules]."""
        group = self.sharded.group
        if not group.reduce_grads or self.sharded.is_last_backward:
            self._keeps_gradients = False
            reduce(*unused)
            return
        kept = self._reduced(self.sharded.members)
        self._keeps_gradients = bool(kept)
        group.reduce_grads = False
        try:
            reduce(*unused)
        finally:
            group.reduce_grads = True
        if torch_names.reduces_unused(group):
            self._keep_zeros(kept)

    def _keep_zeros(self, members: Sequence[FsdpParam]) -> None:
        """Keep gradients of zeros of parameters that this rank has not used. Other ranks may have,
        and all must reduce them with the last backward, even if they are frozen until then.
        """
        for member in members:
            if torch_names.waiting_gradient(member) is None:
                torch_names.give_zero_gradient(member, self.sharded.gradient_dtype)

    def disconnect(self) -> None:
        """Give FSDP2 its reduce-scatter back."""
        group = self.sharded.group
        group._reduce_scatter_comm = self._fsdp_reduce_scatter
        group.mesh_info, group.post_forward_mesh_info = self._mesh_records
        vars(group).pop("post_backward", None)

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return uninitialized memory."""
        return self._fsdp_reduce_scatter.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor``, (ranks * row,), to this rank's row in ``output_tensor``.

        Encode the gradients and reduce them over the hops, with the sums written over the row. Its
        padding is zero if a hook of the user will see it, else it stays as it is. With replicas
        post the last hop only: the all-reduce hook writes the row. Before the last backward reduce
        inside the node, and return zeros.
        """
        self._run.refuse_capture()
        if not self.sharded.reduces:
            self._level.shards.flat.count_ring(input_tensor.nbytes, role="gradients")
            return self._fsdp_reduce_scatter(output_tensor, input_tensor, group, op, async_op)
        self._context.after_reduction()
        self._note_signs()
        plan = self._plan(input_tensor, self._scale(op))
        if self._has_users_hook:
            output_tensor.zero_()  # the padding, which FSDP2's own sums leave zero
        self._begun = None
        if not self._crosses:
            self._accumulate(plan, input_tensor)
            output_tensor.zero_()
            return None
        own_sums = self._partial_sums.pop(plan, None)
        begun = self._begin(plan, input_tensor, own_sums, output_tensor)
        if plan.returned is None:
            self._finish(begun, output_tensor)
            return None
        if self._partial_sums:
            self._context.partial_sums.wait()  # on this stream, which has begun to add to them
        begun.reduction.advance()
        self._begun = begun
        return None

    def all_reduce(self, users_hook: Callable[[Tensor], None] | None, row: Tensor) -> None:
        """Run as FSDP2's all-reduce hook: wait for the reduction that ``__call__`` has begun, and
        write the sums of all nodes over this rank's row. See [Note: all-reduce stream].

        FSDP2 calls no reduce-scatter for a replicated module: the row holds its gradients, and the
        reduction begins here.

        users_hook: of ``set_all_reduce_hook``. Not called in a backward that stays inside the node.
        """
        keep_for_current_stream(row)
        if self.sharded.is_replicated:
            self._run.refuse_capture()
            self._context.after_reduction()
            self._note_signs()
            plan = self._plan(row, self._scale_of_replicated)
            self._begun = self._begin(plan, gradients=row, partial_sums=None, row=row)
        begun = self._begun
        if begun is None:  # a backward that stays inside the node
            return
        self._begun = None
        self._finish(begun, row)
        if users_hook is not None:
            users_hook(row)

    def _finish(self, begun: BegunReduction, row: Tensor) -> None:
        """Finish a reduction, and those of partial sums of other parameters."""
        begun.finish(row)
        while self._partial_sums:
            _, other_sums = self._partial_sums.popitem()
            self._add(other_sums, begun.plan, row)
        watched = self._context.watched
        if watched is not None:
            watched.note(self.sharded.title, begun.plan.rows, row)

    # ---- events of a step ----

    @property
    def holds_partial_sums(self) -> bool:
        """True if gradients of an earlier backward wait for the last one."""
        self._drop_abandoned()
        return self._keeps_gradients or bool(self._partial_sums)

    def after_step(self) -> None:
        """Begin the next optimizer step."""
        self.last_reductions = self._reductions
        self.begin_step()

    def begin_step(self) -> None:
        """Begin an optimizer step anew, whose random bits are then those of a resumed run."""
        self._reductions = 0
        self.has_written_gradients = False
        self.has_changed_factor = False

    def discard(self, parameters: Collection[int] | None = None) -> None:
        """Drop the partial sums of parameters, given by their ids; None for all.

        See [Note: an accumulation that is given up].
        """
        own = {id(member.sharded_param) for member in self.sharded.members}
        if self._keeps_gradients:
            self._drop_kept_gradients(parameters)
        if parameters is None or not own.isdisjoint(parameters):
            self.has_written_gradients = False
            self.has_changed_factor = False
        if parameters is None or own.issubset(parameters):
            self.begin_step()
        for plan, partial_sums in list(self._partial_sums.items()):
            members = plan.rows.members
            dropped = [
                index
                for index, member in enumerate(members)
                if parameters is None or id(member.sharded_param) in parameters
            ]
            if len(dropped) == len(members):
                self._pop(plan)
            elif dropped:
                partial_sums.drop(dropped)
                partial_sums.note_versions()

    def waiting_parameters(self) -> set[int]:
        """Return the ids of parameters whose gradients wait for the last backward."""
        rows = [partial_sums.plan.rows for partial_sums in self._partial_sums.values()]
        found = {id(member.sharded_param) for each in rows for member in each.members}
        return found.union(self.kept_gradients())

    def kept_gradients(self) -> list[int]:
        """Return the ids of parameters whose gradients FSDP2 keeps for the last backward."""
        if not self._keeps_gradients:
            return []
        return [id(member.sharded_param) for member in self._reduced(self.sharded.members)]

    def _drop_kept_gradients(self, parameters: Collection[int] | None) -> None:
        """Drop the gradients that FSDP2 keeps: see [Note: replicated modules]."""
        kept = self._reduced(self.sharded.members)
        for member in kept:
            if parameters is None or id(member.sharded_param) in parameters:
                torch_names.drop_gradient(member)
        self._keeps_gradients = bool(self._reduced(kept))

    # ---- which gradients ----

    @property
    def _crosses(self) -> bool:
        """True if this backward sends gradients between the nodes.

        A user's hook sees the gradients of every backward, as under FSDP2 alone. With replicas
        FSDP2 calls it in backwards that reduce over the replicas only.
        """
        if not self.sharded.defers_inter_node or self.sharded.is_last_backward:
            return True
        has_replicas = self.sharded.level.replicas > 1
        return not has_replicas and self.sharded.group._all_reduce_hook is not None

    def _before_reduction(self) -> None:
        """Note the parameters that have gradients: see [Note: which gradients]."""
        group = self.sharded.group
        if not group.reduce_grads:
            return
        if self._partial_sums:
            self._drop_abandoned()
            written = [each for each in self._partial_sums.values() if each.was_written()]
            self.has_written_gradients |= bool(written)
        if self._partial_sums or self._keeps_gradients:
            self.has_changed_factor |= group.gradient_divide_factor != self._divide_factor
        self._divide_factor = group.gradient_divide_factor
        if self._partial_sums and self._crosses:
            self._give_zero_gradients()
        self.note_gradients(torch_names.will_reduce(group, self.sharded.members))

    def note_gradients(self, has_gradient: Sequence[bool]) -> None:
        """Note by parameter the gradients that the next reduction has."""
        self._has_gradient = tuple(has_gradient)

    def _reduced(self, members: Sequence[FsdpParam]) -> list[FsdpParam]:
        """Return those of the parameters whose gradients FSDP2 will reduce."""
        return list(compress(members, torch_names.will_reduce(self.sharded.group, members)))

    def _give_zero_gradients(self) -> None:
        """Give parameters with partial sums a gradient of zeros, if this backward made none."""
        members = {
            id(member): member
            for partial_sums in self._partial_sums.values()
            for member in partial_sums.plan.rows.members
        }
        has_sums = list(members.values())
        has_gradient = torch_names.will_reduce(self.sharded.group, has_sums)
        if all(has_gradient):
            return
        dtype = self._dtype_of_gradients()
        for member, is_there in zip(has_sums, has_gradient, strict=True):
            if not is_there:
                torch_names.give_zero_gradient(member, dtype)

    def _dtype_of_gradients(self) -> torch.dtype:
        """Return the dtype of this backward's gradients."""
        gathered = [m for m in self.sharded.members if hasattr(m, "_unsharded_param")]
        for member in gathered:
            gradient = torch_names.waiting_gradient(member)
            if gradient is not None:
                return gradient.dtype
        return gathered[0]._unsharded_param.dtype

    def _drop_abandoned(self) -> None:
        """Drop the partial sums of gradients that are None again."""
        for plan, partial_sums in list(self._partial_sums.items()):
            dropped = partial_sums.members_without_gradient()
            if len(dropped) == len(plan.rows.members):
                self._pop(plan)
            elif dropped:
                partial_sums.drop(dropped)

    # ---- one reduction ----

    def _begin(
        self,
        plan: ReductionPlan,
        gradients: Tensor | None,
        partial_sums: PartialSums | None,
        row: Tensor,
    ) -> BegunReduction:
        """Begin to reduce gradients over all hops, with earlier partial sums, to this rank's row.

        gradients: None to reduce the partial sums alone.
        """
        address = self._next_address()
        bound_codecs, rotations = self._bind(plan, address)
        values: Tensor | None = None
        if partial_sums is not None:
            values = self._context.partial_sums.release(partial_sums.values, partial_sums.last)
        has_replicas = plan.returned is not None
        sums = plan.sums.new_sums(row.device) if has_replicas else row
        reduction = plan.sums.begin(
            None if gradients is None else [gradients],
            bound_codecs,
            rotations,
            into=sums,
            partial_sums=values,
            ends_elsewhere=has_replicas and not self.sharded.is_replicated,
        )
        return BegunReduction(plan=plan, reduction=reduction, sums=sums, address=address)

    def _add(self, other: PartialSums, plan: ReductionPlan, output: Tensor) -> None:
        """Reduce partial sums of other parameters than those of ``plan``, and add them to its row.

        All of them that still have a gradient are parameters of ``plan``, too.
        """
        rows = other.plan.rows
        row = torch.zeros(rows.row_numel, dtype=output.dtype, device=output.device)
        self._begin(other.plan, None, other, row).finish(row)
        offsets = dict(zip(map(id, plan.rows.members), plan.rows.offsets, strict=True))
        for member, start, width in zip(rows.members, rows.offsets, rows.widths, strict=True):
            target = offsets.get(id(member))
            if target is not None:
                output[target : target + width] += row[start : start + width]

    def _accumulate(self, plan: ReductionPlan, gradients: Tensor) -> None:
        """Add the gradients, summed inside the node, to the partial sums."""
        bound_codecs, rotations = self._bind(plan, self._next_address())
        sums = self._context.partial_sums
        earlier = self._partial_sums.get(plan)
        sums.wait()
        if earlier is None:
            values = plan.sums.new_partial_sums(gradients.device)
            sums.hold(values)
        else:
            values = earlier.values
        last = Reduction(
            plan.sums.plan,
            [gradients],
            bound_codecs,
            rotations,
            None,
            partial_sums=values,
            fresh=earlier is None,
        )
        sums.running = last
        self._partial_sums[plan] = PartialSums(plan=plan, values=values, last=last)

    def _pop(self, plan: ReductionPlan) -> None:
        """Drop the partial sums of a plan."""
        partial_sums = self._partial_sums.pop(plan)
        self._context.partial_sums.release(partial_sums.values, partial_sums.last)

    def _next_address(self) -> int:
        """Return the address of the random bits of a reduction, unique in a run."""
        address = (self._run.step << _REDUCTION_BITS) + self._reductions
        self._reductions += 1
        return address

    def _note_signs(self) -> None:
        """Begin a new pattern of signs, unless sums wait that an earlier one has rotated.

        They may wait for longer than a step, of optimizers that do not hold their parameters.
        """
        if not self._partial_sums:
            self._signs = self._run.step << _REDUCTION_BITS

    def _scale(self, op: Any) -> float:
        """Return the factor of the plugin's sum over all ranks.

        After ``SUM`` FSDP2 divides the result: by the user's factor, else by the ranks of a shard
        group. It knows of no replicas: see ``ShardedModule.reduce_between_nodes``.
        """
        factor = self.sharded.group.gradient_divide_factor
        if op == dist.ReduceOp.SUM:
            return 1 / self._level.replicas if factor is None else 1.0
        # A mean, or a sum premultiplied by the inverse of the user's factor.
        return 1 / (factor or self._level.hierarchy.size)

    @property
    def _scale_of_replicated(self) -> float:
        """Return the factor of the sum over all ranks; FSDP2 divides by the user's factor."""
        return 1.0 if self.sharded.group.gradient_divide_factor else 1 / self._level.replicas

    def _bind(
        self, plan: ReductionPlan, address: int
    ) -> tuple[Sequence[tuple[BoundCodec, ...]], Sequence[Rotation | None]]:
        """Return the codecs of this reduction on every hop, and the rotation of each gradient."""
        signs = self._signs if self.sharded.defers_inter_node else address
        return bind(plan.gradient_codecs, address, signs)

    # ---- plans ----

    def _plan(self, gradients: Tensor, scale: float) -> ReductionPlan:
        full_precision = self._run.is_full_precision(self._run.step)
        key = (gradients.dtype, full_precision, scale, self._has_gradient)
        plan = self._plans.get(key)
        if plan is None:
            rows = self.sharded.reduced_part(self._has_gradient)
            new_plan = self._new_plan(rows, gradients.dtype, full_precision, scale)
            plan = self._plans.add(key, new_plan)
        numel = self._level.num_shards * plan.rows.row_numel
        if gradients.numel() != numel:
            raise RuntimeError(
                f"quantized_comm: FSDP2 reduces {gradients.numel()} elements of "
                f"{self.sharded.title} where {numel} were expected, of its parameters that have "
                "gradients: please report this with the release of torch"
            )
        return plan

    def _new_plan(
        self, rows: ShardedModule, dtype: torch.dtype, full_precision: bool, scale: float
    ) -> ReductionPlan:
        """Plan the reduction of gradients and, with replicas, the way back of their sums.

        rows: the part of the module that has gradients.
        full_precision: nothing is quantized in this step.
        scale: factor of the sums.
        """
        level = self._level
        gradient_codecs = reduced_codecs(level, rows.params, dtype, full_precision=full_precision)
        specs = [codecs.spec for codecs in gradient_codecs]
        segments = segments_of(rows, gradient_codecs)
        sums = self._context.gradient_sums(level, tuple(segments), tuple(specs), scale)
        returned: ReturnedGradients | None = None
        if level.replicas > 1:
            returned = plan_return(
                level,
                rows.params,
                dtype,
                segments,
                sums,
                full_precision=full_precision,
                first=level.shard * rows.row_numel,  # this rank's row
            )
        return ReductionPlan(
            rows=rows, gradient_codecs=gradient_codecs, sums=sums, returned=returned
        )
