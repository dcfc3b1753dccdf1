"""Compare copies of weights between the ranks that hold them, by checksums.

All ranks exchange the checksums of all copies, so that all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from ds_quant.comm.transport import Communicator
from ds_quant.runtime.message_check import check_messages
from ds_quant.runtime.run import Run

_ROW = 4096  # elements of equal weight in the position-dependent sum
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element

Copies = Iterable[tuple[int, Iterable[Tensor]]]


class WeightCache(Protocol):
    """Copies of the weights that several ranks keep between steps.

    Differences are added to them. One lost or changed bit would therefore stay in the weights, and
    no error would show it.
    """

    def comparable_weights(self) -> Copies:
        """Yield (owner, weights). Copies of equal index and owner are equal on all ranks."""

    def resync(self) -> None:
        """Refill the copies from the exact weights. A collective."""


def compares_copies(run: Run, step: int) -> bool:
    """Return True if copies are compared after this step: every ``checksum_steps``."""
    every = run.scheme.block.checksum_steps
    return bool(every) and step % every == 0


def compare_copies(run: Run, cache: WeightCache, step: int) -> None:
    """Compare the copies, and refill all if any differ.

    step: the number of optimizer steps that the copies follow.
    """
    differing = differing_ranks(run, cache.comparable_weights(), step)
    if differing:
        run.state.resyncs += 1
        run.log(
            f"quantized_comm: step {step}: the weights that rank(s) {differing} keep differ from "
            "those of the other holders; all are brought back exactly. If it happens again, look "
            "for faulty memory or a faulty network"
        )
        cache.resync()


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """Return (2,) int64: the sum of all bit patterns, and one that depends on their order.

    Both wrap around.
    """
    plain = torch.zeros((), dtype=torch.int64)
    ordered = torch.zeros((), dtype=torch.int64)
    for tensor in tensors:
        bits = tensor.detach().reshape(-1)
        bits = bits.view(_BITS.get(bits.element_size(), torch.uint8))
        in_rows = bits.numel() // _ROW * _ROW
        rows = bits[:in_rows].view(-1, _ROW).sum(1, dtype=torch.int64)
        rows = torch.cat([rows, bits[in_rows:].to(torch.int64)])
        plain = plain.to(bits.device) + rows.sum()
        positions = torch.arange(1, rows.numel() + 1, device=bits.device)
        ordered = ordered.to(bits.device) * 1_000_003 + (rows * positions).sum()
    return torch.stack([plain, ordered])


def differing_ranks(run: Run, copies: Copies, step: int) -> list[int]:
    """Return the ranks whose checksum differs from that of most holders of the same weights.

    copies: (owner, tensors) of every copy that this rank holds, as many on all ranks. Copies of
        equal place and owner are the same weights.
    step: for the error.

    Raises:
        RuntimeError: on all ranks, if they have received different checksums: some would refill
            their copies, others would not.
    """
    communicator = run.votes
    sums = [torch.cat([torch.tensor([owner]), checksum(held).cpu()]) for owner, held in copies]
    if not sums:
        return []
    own = torch.stack(sums).to(run.device)  # (copies, 3) int64
    received = communicator.all_gather(own.view(torch.uint8).view(-1), role="weights").wait()
    if not _arrived_alike(received, communicator):
        check_messages(run)  # names sender and receiver, if messages carry checksums
        raise RuntimeError(
            f"quantized_comm: step {step}: ranks have received different checksums of the "
            "weights that they keep, so a message was changed on its way. Look for faulty memory "
            "or a faulty network, and resume from the last checkpoint; "
            "quantized_comm.payload_checksum=true names sender and receiver of such a message"
        )
    by_rank = received.view(torch.int64).view(communicator.size, len(sums), 3).tolist()
    # (index of the copy, owner) -> checksum -> ranks that hold it
    holders: dict[tuple[int, int], dict[tuple[int, ...], list[int]]] = {}
    for rank, rows in enumerate(by_rank):
        for index, (owner, *totals) in enumerate(rows):
            versions = holders.setdefault((index, owner), {})
            versions.setdefault(tuple(totals), []).append(communicator.ranks[rank])
    differing: set[int] = set()
    for versions in holders.values():
        differing.update(outvoted(versions))
    return sorted(differing)


def _arrived_alike(received: Tensor, communicator: Communicator) -> bool:
    """Return True on all ranks if all of them have received the same. A collective."""
    own = checksum([received.view(torch.int64)])
    least = communicator.least(torch.cat([own, ~own])).tolist()
    return least[:2] == [~total for total in least[2:]]


def outvoted(versions: dict[tuple[int, ...], list[int]]) -> list[int]:
    """Return the holders of any version but the most frequent one; all holders if two tie.

    versions: checksum -> ranks that hold it.
    """
    sizes = sorted((len(ranks) for ranks in versions.values()), reverse=True)
    has_majority = len(sizes) == 1 or sizes[0] > sizes[1]
    ranks_outvoted: list[int] = []
    for ranks in versions.values():
        if not has_majority or len(ranks) != sizes[0]:
            ranks_outvoted += ranks
    return ranks_outvoted


def compare_replicas(run: Run, replicas: Copies, step: int) -> None:
    """Compare weights that several ranks should hold alike, as ``differing_ranks`` does.

    Raises:
        RuntimeError: on all ranks, if they differ; no rank knows the right ones.
    """
    ranks = differing_ranks(run, replicas, step)
    if ranks:
        raise RuntimeError(
            f"quantized_comm: step {step}: the weights of rank(s) {ranks} differ from those of the "
            "other replicas, so these train models of their own. Begin with the same weights on "
            "all nodes (the same seed or checkpoint), write weights on all nodes alike, or look "
            "for faulty memory; then resume from the last checkpoint"
        )


def compares_replicas(run: Run, step: int) -> bool:
    """Return True if replicas are compared after this step: every ``checksum_steps``, and after the
    first one, because they may have begun with other weights.
    """
    every = run.scheme.block.checksum_steps
    return bool(every) and (step == 1 or (step > 0 and step % every == 0))
