"""Holders of weights that are kept between steps compare checksums, and refill where they differ.

Differences are added to what a rank holds, so one lost or changed bit would stay for ever and
nobody would see it. All ranks learn all checksums and decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from ds_quant.zero import parameters, seams
from ds_quant.zero.binding import Binding

_ROW = 4096  # elements of equal weight in the position-dependent sum


class Holder(Protocol):
    """Something that keeps weights."""

    def copies(self) -> Iterable[tuple[int, list[Tensor]]]:
        """(who, weights): ranks that report equal ``who`` in the same place hold equal weights."""

    def resync(self) -> None:
        """Exact weights everywhere. All ranks call it."""


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """(2,) int64: sum of all bit patterns, and one that depends on their order. Wraps."""
    plain, ordered = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    for tensor in tensors:
        bits = tensor.detach().reshape(-1)
        bits = bits.view(torch.int16 if bits.element_size() == 2 else torch.int32)
        whole = bits.numel() // _ROW * _ROW
        rows = bits[:whole].view(-1, _ROW).sum(1, dtype=torch.int64)
        rows = torch.cat([rows, bits[whole:].to(torch.int64)])
        plain = plain.to(bits.device) + rows.sum()
        places = torch.arange(1, rows.numel() + 1, device=bits.device)
        ordered = ordered.to(bits.device) * 1_000_003 + (rows * places).sum()
    return torch.stack([plain, ordered])


class Agreement:
    """Compares every ``checksum_steps`` optimizer steps."""

    def __init__(self, binding: Binding, holder: Holder) -> None:
        self._binding, self._holder = binding, holder

    def after_step(self) -> None:
        """The optimizer step is done, kept weights are brought along."""
        every, step = self._binding.scheme.checksum_steps, self._binding.step + 1
        if every and step % every == 0 and (differing := self._differing()):
            self._binding.state.resyncs += 1
            seams.log_rank0(
                f"quantized_comm: step {step}: the weights that rank(s) {differing} keep differ "
                "from those of the other holders; all are brought back exactly. Something writes "
                "weights outside the optimizer: call ds_quant.resync(engine) after it"
            )
            self._holder.resync()

    def _differing(self) -> list[int]:
        """Ranks whose checksum is not that of most holders of the same weights."""
        copies = [(who, checksum(tensors)) for who, tensors in self._holder.copies()]
        device = parameters.device()
        own = torch.stack(
            [torch.cat([torch.tensor([who]), sums.cpu()]) for who, sums in copies]
        ).to(device)  # (copies, 3) int64
        link = self._binding.fabric(None).whole
        received = link.all_gather(own.view(torch.uint8).view(-1), role="weights").wait()
        by_rank = received.view(torch.int64).view(link.size, len(copies), 3).tolist()
        holders: dict[tuple[int, int], dict[tuple[int, int], list[int]]] = {}
        for rank, rows in enumerate(by_rank):
            for place, (who, *sums) in enumerate(rows):
                versions = holders.setdefault((place, who), {})
                versions.setdefault(tuple(sums), []).append(rank)
        return sorted({rank for versions in holders.values() for rank in _minority(versions)})


def _minority(versions: dict[tuple[int, int], list[int]]) -> list[int]:
    """Holders of another version than most have; all of them where there is no majority."""
    sizes = sorted((len(ranks) for ranks in versions.values()), reverse=True)
    common = sizes[0] if len(sizes) == 1 or sizes[0] > sizes[1] else 0
    return [rank for ranks in versions.values() if len(ranks) != common for rank in ranks]
