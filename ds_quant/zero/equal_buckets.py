"""ZeRO-1 and 2 over gloo: all ranks must fill their buckets with the same gradients.

[Note: equal buckets] Ranks that leave out different layers (LayerDrop) fill different buckets.
gloo's messages from peer to peer would then wait for ever, or bring sums of different parameters.
So ranks compare one number before every bucket, and one before the optimizer steps, where a rank
with fewer buckets meets the others. NCCL's collectives end by their watchdog, and an answer would
have to wait for the device: there nothing is compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch.distributed as torch_dist

from ds_quant.comm.transport import Link
from ds_quant.zero.plugin import Plugin
from ds_quant.zero.waiting import Member

_SHOWN = 4  # names in a message


def digest_of(members: Sequence[Member]) -> int:
    """An int64 that is equal on ranks whose bucket has the same members in the same order."""
    text = repr([(param.index, owner) for param, owner in members])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


NO_BUCKET: tuple[int, Sequence[Member]] = (-1, ())  # before the optimizer steps


def require_equal(plugin: Plugin, link: Link, digest: int, members: Sequence[Member]) -> None:
    """Run before a bucket is reduced, and with ``NO_BUCKET`` before the optimizer steps.

    Raises:
        RuntimeError: on all ranks, if one has another bucket or none.
    """
    if link.differs(digest ^ plugin.gradient_step):
        names = list(dict.fromkeys(param.name for param, _ in members))
        raise _error(plugin.engine.global_steps, link, names)


def _error(step: int, link: Link, names: list[str]) -> RuntimeError:
    """The same error on all ranks, whose collective it is. names: of this rank's bucket."""
    found: list[list[str]] = [[]] * link.size
    torch_dist.all_gather_object(found, names, group=link.process_group)
    first = found[0]
    other = next((rank for rank, names in enumerate(found) if names != first), 0)
    only = [n for n in (*first, *found[other]) if (n in first) != (n in found[other])]
    shown = ", ".join(only[:_SHOWN]) + (", ..." if len(only) > _SHOWN else "")
    return RuntimeError(
        f"quantized_comm: step {step}: ranks reduce different "
        f"gradients: rank {link.ranks[0]} those of {len(first)} parameter(s) now, rank "
        f"{link.ranks[other]} those of {len(found[other])}; one of them lacks "
        f"{shown or 'none, but they come in another order'}. Under ZeRO-1 and 2 every rank "
        "must have gradients of the same parameters, with and without this plugin. Draw what "
        "is left out (LayerDrop) alike on all ranks, or add 0 * parameter.sum() of what is "
        "left out to the loss"
    )
