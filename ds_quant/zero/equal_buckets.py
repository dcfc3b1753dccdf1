"""Check that all ranks reduce the same gradients, under ZeRO-1 and 2 with gloo.

[Note: equal buckets] Ranks that leave out different layers (LayerDrop) fill different buckets.
gloo's point-to-point messages would then hang, or bring sums of other parameters. So ranks compare
one number before every bucket, and once more before the optimizer steps, where a rank with fewer
buckets meets the others. With NCCL nothing is compared: its watchdog ends such collectives, and
reading the answer would make the host wait for the device.
"""

from __future__ import annotations

import torch.distributed as torch_dist

from ds_quant.comm.transport import Communicator
from ds_quant.zero.front import EngineFront
from ds_quant.zero.gradients import BucketLayout

_MOST_NAMES = 4  # in a message
_NO_BUCKET = -1  # stands for a digest


def require_equal(
    front: EngineFront, communicator: Communicator, layout: BucketLayout | None
) -> None:
    """Compare this rank's bucket with the others': see [Note: equal buckets]. A collective.

    layout: the bucket that is about to be reduced; None before the optimizer steps.

    Raises:
        RuntimeError: on all ranks, if one has another bucket or none.
    """
    digest = _NO_BUCKET if layout is None else layout.digest
    if not communicator.differs(digest ^ front.gradient_step):
        return
    names: list[str] = []
    if layout is not None:
        names = list(dict.fromkeys(param.name for param, _ in layout.members))
    names_by_rank: list[list[str]] = [[]] * communicator.size
    torch_dist.all_gather_object(names_by_rank, names, group=communicator.process_group)
    raise RuntimeError(_describe(front.engine.global_steps, communicator, names_by_rank))


def _describe(step: int, communicator: Communicator, names_by_rank: list[list[str]]) -> str:
    """Name two ranks that differ, and the parameters that one of them lacks."""
    first = names_by_rank[0]
    differing = (rank for rank, names in enumerate(names_by_rank) if names != first)
    other_rank = next(differing, 0)
    other = names_by_rank[other_rank]
    missing = [name for name in (*first, *other) if (name in first) != (name in other)]
    shown = ", ".join(missing[:_MOST_NAMES])
    if len(missing) > _MOST_NAMES:
        shown += ", ..."
    return (
        f"quantized_comm: step {step}: ranks reduce different gradients: rank "
        f"{communicator.ranks[0]} those of {len(first)} parameter(s) now, rank "
        f"{communicator.ranks[other_rank]} those of {len(other)}; one of them lacks "
        f"{shown or 'none, but they come in another order'}. Under ZeRO-1 and 2 every rank "
        "must have gradients of the same parameters, with and without this plugin. Leave out the "
        "same layers on all ranks (LayerDrop), or add 0 * parameter.sum() of every parameter "
        "that is left out to the loss"
    )
