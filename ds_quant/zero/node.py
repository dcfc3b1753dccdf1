"""The node shard of one ZeRO-3 engine: filled exactly, then brought along by every optimizer step.

[Note: what keeps it right] The exchange after a step serves every trained parameter. Everything
else that writes weights (a loaded checkpoint, GatheredParameters with a modifier rank) marks its
parameters stale on all ranks alike, and the next fetch fills those exactly. Saving a checkpoint
marks all of them, so that a run that saves continues like one that loads. The primary shard is not
the node shard's row: it stays exact, because exports and GatheredParameters read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ds_quant.codec import CastCodec
from ds_quant.coding import Coding
from ds_quant.node_shard import Kept, exchange, gather
from ds_quant.zero import parameters
from ds_quant.zero.binding import Binding

_SLICE_NUMEL = 1 << 22  # own elements per message; one is encoded while another travels


class NodeShard:
    """Weights of the parameters it serves, by their index in the module."""

    def __init__(self, binding: Binding, params: Iterable[Any]) -> None:
        self._binding = binding
        fabric, topology = binding.fabric(None), binding.topology  # None: the world
        # One rank per node: all links are between nodes.
        self._inter, self._intra = fabric.inter or fabric.whole, fabric.intra
        self._rank = fabric.whole.rank
        self._params: dict[int, Any] = {}
        self._kept: dict[int, Kept] = {}
        for p in params:
            if not self._belongs(p):
                continue
            index = binding.tracked(p).index
            self._params[index] = p
            self._kept[index] = Kept.allocate(
                p.ds_numel,
                nodes=topology.nodes,
                node_size=topology.node_size,
                local=self._rank % topology.node_size,
                dtype=p.ds_tensor.dtype,
                device=parameters.device(),
            )
        self._stale = set(self._kept)

    def _belongs(self, p: Any) -> bool:
        """Rank-invariant. Persistent parameters stay gathered; expert groups are not the world."""
        ranks = self._binding.link(p.ds_process_group).ranks
        world = list(range(self._binding.topology.world))
        return parameters.travels(p) and not p.ds_persist and ranks == world

    def serves(self, parameter: Any) -> bool:
        """Whether ``gather`` knows the parameter."""
        tracked = self._binding.tracked(parameter)
        return tracked is not None and tracked.index in self._kept

    def nbytes(self) -> int:
        """Memory of the node shard on this rank."""
        return sum(item.rows.nbytes for item in self._kept.values())

    def mark_stale(self, params: Iterable[Any] | None = None) -> None:
        """Weights were written outside the optimizer step, of all parameters if None."""
        if params is None:
            self._stale = set(self._kept)
        else:
            self._stale.update(self._binding.tracked(p).index for p in params if self.serves(p))

    def copies(self) -> Iterable[tuple[int, list[torch.Tensor]]]:
        """See Holder. Ranks of equal place in their nodes hold equal rows."""
        # Stale rows are about to be refilled; the set is the same on all ranks.
        rows = [item.rows for index, item in self._kept.items() if index not in self._stale]
        yield self._rank % self._binding.topology.node_size, rows

    def resync(self) -> None:
        """See Holder: the next fetches fill all parameters exactly."""
        self.mark_stale()

    def after_step(self) -> None:
        """Exchange what the optimizer has changed, slice by slice."""
        step = self._binding.step + 1  # DeepSpeed counts the step only after it
        trained = [
            index
            for index, p in self._params.items()
            if p.requires_grad and index not in self._stale
        ]
        decode: Callable[[], None] = _nothing
        for indices in self._slices(trained):
            codings = [self._between(index, step) for index in indices]
            previous, decode = decode, self._exchange(indices, codings)
            previous()
        decode()

    def gather(self, params: Sequence[Any]) -> tuple[Callable[[], list[torch.Tensor]], list[bool]]:
        """Full weights of served parameters, and which of them may differ from the exact ones."""
        indices = [self._binding.tracked(p).index for p in params]
        stale = [index for index in indices if index in self._stale]
        if stale:
            exact = [Coding(codec=CastCodec(self._kept[index].rows.dtype)) for index in stale]
            self._exchange(stale, exact)()
            self._stale.difference_update(stale)
        step = self._binding.step
        codings = [self._inside(index, step) for index in indices]
        lossy = [
            not isinstance(coding.codec, CastCodec)
            or not isinstance(self._between(index, step).codec, CastCodec)
            for index, coding in zip(indices, codings, strict=True)
        ]
        return gather([self._kept[index] for index in indices], codings, self._intra), lossy

    def _slices(self, indices: Sequence[int]) -> Iterable[list[int]]:
        """Runs of parameters of bounded size; at least one each."""
        run: list[int] = []
        numel = 0
        for index in indices:
            width = self._kept[index].rows.shape[1]
            if run and numel + width > _SLICE_NUMEL:
                yield run
                run, numel = [], 0
            run.append(index)
            numel += width
        if run:
            yield run

    def _exchange(self, indices: Sequence[int], codings: Sequence[Coding]) -> Callable[[], None]:
        device = parameters.device()
        shards = [parameters.valid_shard(self._params[i], self._rank).to(device) for i in indices]
        return exchange([self._kept[i] for i in indices], shards, codings, self._inter)

    def _between(self, index: int, step: int) -> Coding:
        return self._coding(index, step, intra=False)

    def _inside(self, index: int, step: int) -> Coding:
        return self._coding(index, step, intra=True)

    def _coding(self, index: int, step: int, *, intra: bool) -> Coding:
        tracked, dtype = self._binding.tracked(self._params[index]), self._kept[index].rows.dtype
        return self._binding.weight_coding(tracked, dtype, step=step, rank=self._rank, intra=intra)


def _nothing() -> None:
    """Stands for the decoding that precedes the first slice."""
