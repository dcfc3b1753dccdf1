"""Notice writes of user code into the replica of ZeRO-1 and 2, by content.

[Note: written replica] After a gather all ranks hold the same replica. So a rank takes the
fingerprints (see runtime/written_weights.py) of its own partition only, right after the gather. A
comparison takes those of the whole replica, and reads the fingerprints of each partition from its
owner. Steps that send differences compare before the gather: a write on one rank and a write on
all ranks are both found, since ranks differ from each other or owners from their fingerprints.
Exports compare on each rank for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_quant.comm.transport import Communicator
from ds_quant.runtime.run import Run
from ds_quant.runtime.written_weights import Fingerprints
from ds_quant.zero import accelerator, optimizer_hooks
from ds_quant.zero.deepspeed_types import OwnerOptimizer, ZeroParameter
from ds_quant.zero.optimizer_hooks import ReplicaGroup

_INT64 = torch.iinfo(torch.int64)


@dataclass(kw_only=True)
class _Slices:
    """The parameters of one group, cut at the borders of the partitions.

    sizes: elements of consecutive slices of the flat replica, with the gaps between parameters.
    indices: of the slices that belong to parameters, in ``sizes``.
    params: parameter of each of these slices.
    own: places in ``indices`` of the slices of this rank's partition.
    taken: fingerprints of the own slices, (pieces,); others are not meant. None before the first.
    """

    sizes: list[int]
    indices: list[int]
    params: list[ZeroParameter]
    own: set[int]
    fingerprints: Fingerprints
    taken: Tensor | None = None

    def of(self, flat: Tensor) -> list[Tensor]:
        """Return the slices that belong to parameters."""
        slices = flat.view(-1).split(self.sizes)
        return [slices[index] for index in self.indices]

    def params_of(self, pieces: Tensor) -> list[ZeroParameter]:
        """Return the parameters of some pieces. pieces: (pieces,) bool."""
        slices = self.fingerprints.shard_of_piece[pieces].tolist()
        by_id = {id(self.params[index]): self.params[index] for index in slices}
        return list(by_id.values())


class WrittenReplica:
    """Fingerprints of the replica of one engine: see [Note: written replica]."""

    def __init__(self, run: Run, optimizer: OwnerOptimizer, offsets: dict[int, int]) -> None:
        """offsets: first element of each parameter in its flat replica, by id."""
        self._run = run
        self._optimizer = optimizer
        # With fingerprints, 8 bytes per piece of the replica. Each ``take`` replaces them.
        self._slices = [
            _cut(group, self._communicator(group), offsets)
            for group in optimizer_hooks.replica_groups(optimizer)
        ]

    def take(self) -> None:
        """Take the fingerprints of this rank's partitions. All ranks hold the same replica."""
        for group, slices in self._groups():
            slices.taken = slices.fingerprints.of(slices.of(group.flat), slices.own)

    def forget(self) -> None:
        """Compare nothing until the next ``take``."""
        for slices in self._slices:
            slices.taken = None

    def written(self) -> list[ZeroParameter]:
        """Return the parameters that any rank has written since ``take``.

        A collective of 16 bytes per piece. The host waits for its answer.
        """

        def votes(now: Tensor, taken: Tensor, is_own: Tensor, communicator: Communicator) -> Tensor:
            # Ranks agree on a piece if its smallest and its largest fingerprint are equal. An owner
            # who has another one than before disagrees with all.
            disagrees = is_own & (now != taken)
            smallest = torch.where(disagrees, _INT64.min, now)
            inverted = torch.where(disagrees, _INT64.min, ~now)
            smallest, inverted = communicator.least(torch.cat([smallest, inverted])).chunk(2)
            return smallest != ~inverted

        return self._differing(votes)

    def written_here(self) -> list[ZeroParameter]:
        """Return the parameters that this rank has written since ``take``.

        A collective of 8 bytes per piece.
        """

        def differs(
            now: Tensor, taken: Tensor, is_own: Tensor, communicator: Communicator
        ) -> Tensor:
            return now != communicator.least(torch.where(is_own, taken, _INT64.max))

        return self._differing(differs)

    def _differing(
        self, compare: Callable[[Tensor, Tensor, Tensor, Communicator], Tensor]
    ) -> list[ZeroParameter]:
        """Return the parameters of the pieces that ``compare`` finds."""
        params: list[ZeroParameter] = []
        for group, slices in self._groups():
            if slices.taken is None:
                continue
            now = slices.fingerprints.of(slices.of(group.flat))
            is_own = slices.fingerprints.pieces_of(slices.own)
            differs = compare(now, slices.taken, is_own, self._communicator(group))
            if differs.any().item():
                params += slices.params_of(differs)
        return params

    def _groups(self) -> Iterator[tuple[ReplicaGroup, _Slices]]:
        groups = optimizer_hooks.replica_groups(self._optimizer)
        return zip(groups, self._slices, strict=True)

    def _communicator(self, group: ReplicaGroup) -> Communicator:
        return self._run.communicator(group.process_group)


def _cut(group: ReplicaGroup, communicator: Communicator, offsets: dict[int, int]) -> _Slices:
    """Cut the flat replica of a group at the borders of parameters and partitions."""
    width = group.flat.numel() // communicator.size
    sizes: list[int] = []
    indices: list[int] = []
    params: list[ZeroParameter] = []
    own: set[int] = set()
    end = 0
    parts = group.owned_ranges(offsets, width, range(width))
    for p, owner, start, stop in sorted(parts, key=lambda part: part.start):
        if start > end:
            sizes.append(start - end)
        if owner == communicator.rank:
            own.add(len(indices))
        indices.append(len(sizes))
        params.append(p)
        sizes.append(stop - start)
        end = stop
    if group.flat.numel() > end:
        sizes.append(group.flat.numel() - end)
    fingerprints = Fingerprints([group.flat.dtype] * len(indices), accelerator.device())
    return _Slices(sizes=sizes, indices=indices, params=params, own=own, fingerprints=fingerprints)
