"""The records of a sharded module's reductions: plan, begun reduction, partial sums of a node."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from ds_quant.comm.reduce import GradientSums, Reduction
from ds_quant.fsdp2.sharded_module import ShardedModule
from ds_quant.runtime.param import GradientCodecs
from ds_quant.runtime.reductions import ReturnedGradients


@dataclass(frozen=True, eq=False, kw_only=True)
class ReductionPlan:
    """The reduction of some gradients of a sharded module, the same in every step.

    rows: the parameters that have gradients.
    returned: with replicas, writes the sums of all nodes over the row.
    """

    rows: ShardedModule
    gradient_codecs: Sequence[GradientCodecs]
    sums: GradientSums
    returned: ReturnedGradients | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class BegunReduction:
    """A reduction over all hops, whose last messages are posted.

    sums: this rank's row; with replicas the part of it that this rank sums.
    address: of the random bits.
    """

    plan: ReductionPlan
    reduction: Reduction
    sums: Tensor
    address: int

    def finish(self, row: Tensor) -> None:
        """Wait for the sums; with replicas write those of all nodes over ``row``."""
        self.reduction.wait()
        if self.plan.returned is not None:
            self.plan.returned.send(self.sums, row, self.address).wait()


@dataclass(eq=False, kw_only=True)
class PartialSums:
    """Sums of this node, between two backwards of an optimizer step.

    last: the reduction that still adds to them.
    versions: by parameter, the version of the gradient that FSDP2 has added zeros to.
    """

    plan: ReductionPlan
    values: Tensor
    last: Reduction
    versions: tuple[int, ...] = ()

    def members_without_gradient(self) -> list[int]:
        """Return the indices of parameters whose gradient was dropped."""
        members = self.plan.rows.members
        return [i for i, member in enumerate(members) if member.sharded_param.grad is None]

    def drop(self, indices: Collection[int]) -> None:
        """Drop the sums of some parameters."""
        self.last.wait()
        self.plan.sums.drop_partial_sums(self.values, indices)

    def note_versions(self) -> None:
        """Note the versions of the gradients."""
        self.versions = self._versions()

    def was_written(self) -> bool:
        """Return True if code outside of FSDP2 has written a gradient since."""
        pairs = zip(self.versions, self._versions(), strict=False)
        return any(noted != now and now >= 0 for noted, now in pairs)

    def _versions(self) -> tuple[int, ...]:
        """Return the version of every gradient, -1 where there is none."""
        gradients = [member.sharded_param.grad for member in self.plan.rows.members]
        return tuple([-1 if gradient is None else gradient._version for gradient in gradients])
