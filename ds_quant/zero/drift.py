"""Compare the cached copies of weights between ranks, and refill copies that have drifted.

Differences are added to the values that a rank holds. One lost or changed bit would therefore stay
in the weights, and no error would show it. All ranks exchange the checksums of all copies, so that
all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ds_quant.runtime import log
from ds_quant.zero import accelerator
from ds_quant.zero.message_check import check_messages
from ds_quant.zero.plugin import Plugin, WeightCache
from ds_quant.zero.world import minimum

_ROW = 4096  # elements of equal weight in the position-dependent sum


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """Return (2,) int64: the sum of all bit patterns, and one that depends on their order.

    Both wrap around.
    """
    plain = torch.zeros((), dtype=torch.int64)
    ordered = torch.zeros((), dtype=torch.int64)
    for tensor in tensors:
        bits = tensor.detach().reshape(-1)
        bits = bits.view(torch.int16 if bits.element_size() == 2 else torch.int32)
        in_rows = bits.numel() // _ROW * _ROW
        rows = bits[:in_rows].view(-1, _ROW).sum(1, dtype=torch.int64)
        rows = torch.cat([rows, bits[in_rows:].to(torch.int64)])
        plain = plain.to(bits.device) + rows.sum()
        positions = torch.arange(1, rows.numel() + 1, device=bits.device)
        ordered = ordered.to(bits.device) * 1_000_003 + (rows * positions).sum()
    return torch.stack([plain, ordered])


def compare_copies(plugin: Plugin, cache: WeightCache) -> None:
    """Compare the copies every ``checksum_steps`` optimizer steps; refill all if any differ.

    Runs after the optimizer step, once the copies have the new weights.
    """
    step = plugin.step + 1
    if step % plugin.scheme.block.checksum_steps != 0:
        return
    differing = _differing(plugin, cache)
    if differing:
        plugin.state.resyncs += 1
        log.log_rank0(
            f"quantized_comm: step {step}: the weights that rank(s) {differing} keep differ from "
            "those of the other holders; all are brought back exactly. Something writes weights "
            "outside the optimizer: call ds_quant.resync(engine) after it"
        )
        cache.resync()


def _differing(plugin: Plugin, cache: WeightCache) -> list[int]:
    """Return the ranks whose checksum differs from that of most holders of the same weights."""
    copies = [
        torch.cat([torch.tensor([owner]), checksum(tensors).cpu()])
        for owner, tensors in cache.comparable_weights()
    ]
    own = torch.stack(copies).to(accelerator.device())  # (copies, 3) int64
    communicator = plugin.hierarchy(None).flat
    received = communicator.all_gather(own.view(torch.uint8).view(-1), role="weights").wait()
    _require_equal(plugin, received)
    by_rank = received.view(torch.int64).view(communicator.size, len(copies), 3).tolist()
    # (index of the copy, owner) -> checksum -> ranks that hold it
    holders: dict[tuple[int, int], dict[tuple[int, ...], list[int]]] = {}
    for rank, rows in enumerate(by_rank):
        for index, (owner, *sums) in enumerate(rows):
            versions = holders.setdefault((index, owner), {})
            versions.setdefault(tuple(sums), []).append(rank)
    outvoted: set[int] = set()
    for versions in holders.values():
        outvoted.update(_outvoted(versions))
    return sorted(outvoted)


def _require_equal(plugin: Plugin, received: Tensor) -> None:
    """End all ranks if their checksums arrived differently: some would refill, others would not.

    Raises:
        RuntimeError: on all ranks.
    """
    sums = checksum([received.view(torch.int64)]).tolist()
    inverted = [~total for total in sums]
    least = minimum([*sums, *inverted])
    if least[:2] == [~total for total in least[2:]]:
        return
    check_messages(plugin)  # may name sender and receiver
    raise RuntimeError(
        f"quantized_comm: step {plugin.step + 1}: ranks have received different checksums of the "
        "weights that they keep, so a message was changed on its way. Look for faulty memory or a "
        "faulty network, and resume from the last checkpoint; quantized_comm.payload_checksum=true "
        "names sender and receiver of such a message"
    )


def _outvoted(versions: dict[tuple[int, ...], list[int]]) -> list[int]:
    """Return the holders of any version but the most frequent one; all holders if two tie.

    versions: checksum -> ranks that hold it.
    """
    sizes = sorted((len(ranks) for ranks in versions.values()), reverse=True)
    has_majority = len(sizes) == 1 or sizes[0] > sizes[1]
    outvoted: list[int] = []
    for ranks in versions.values():
        if not has_majority or len(ranks) != sizes[0]:
            outvoted += ranks
    return outvoted
