"""The node-level copy of the ZeRO-3 weights: filled exactly, updated after every step.

[Note: what keeps it right] The exchange after a step serves every parameter that was trained when
the engine was built, because the optimizer may still move it, and goes on during the next forward
(``Spread``): a gather waits for its own parameters, and what else reads or writes rows finishes it
first. Everything else that writes weights (a loaded checkpoint, GatheredParameters with a modifier
rank) marks its parameters stale on all ranks alike, and the next fetch fills those exactly. Saving
a checkpoint marks all of them, so that a run that saves continues like one that loads. The primary
shard is not the node shard's row: it stays exact, because exports and GatheredParameters read it.

[Note: first needed first] The exchange after an optimizer step is cut into chunks of parameters, in
the order in which the last step gathered them. They are posted at once, and each is waited for when
a parameter of it is gathered. Chunks are finished in the order of their posting, whichever is asked
for: over one link they arrive in that order, and a forward that takes another way than the last
one changes nothing of what the ranks post.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ds_quant.codec.bound import Coding
from ds_quant.codec.codec import CastCodec
from ds_quant.comm.gather import Kept, exchange, gather
from ds_quant.comm.pending import Pending
from ds_quant.kernels.wire import ceil_div
from ds_quant.zero import hooks, lossless
from ds_quant.zero.engine import QuantizedEngine

# ---- spread over the next forward ----


_IN_FLIGHT = 16  # chunks; bounds the memory of messages, the others are posted as these arrive


class Chunk(NamedTuple):
    """Parameters by index and a function that posts their exchange."""

    indices: Collection[int]
    post: Callable[[], Pending[Any]]


class Spread:
    """The chunks of one exchange."""

    def __init__(self) -> None:
        self._ahead: deque[Chunk] = deque()
        self._posted: deque[tuple[Collection[int], Pending[Any]]] = deque()
        self._missing: set[int] = set()

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """Post the first chunks; the exchange before must be finished."""
        assert not self._missing
        self._ahead.extend(chunks)
        self._missing.update(index for chunk in self._ahead for index in chunk.indices)
        for _ in range(_IN_FLIGHT):
            self._post_next()

    def misses(self, indices: Iterable[int]) -> bool:
        """Whether a parameter of these is still to arrive. Equal on all ranks: it tells what was
        finished here, not what the network has brought.
        """
        return not self._missing.isdisjoint(indices)

    def finish(self, indices: Iterable[int] | None = None) -> None:
        """Wait until these parameters have arrived, or all if None.

        Raises:
            RuntimeError: a rank does not answer; also at every later call.
        """
        while self._missing if indices is None else self.misses(indices):
            if not self._posted:
                raise RuntimeError(
                    "quantized_comm: an exchange of weights has failed before: resume from the "
                    "last checkpoint"
                )
            brought, pending = self._posted.popleft()
            try:
                pending.wait()
            except BaseException:
                self._ahead.clear()
                self._posted.clear()  # nobody waits for a lost rank twice
                raise
            self._missing.difference_update(brought)
            self._post_next()

    def close(self) -> None:
        """Wait for what was posted, since others may use the same link later; post no more."""
        self._ahead.clear()
        self._missing = {index for arriving, _ in self._posted for index in arriving}
        self.finish()

    def _post_next(self) -> None:
        if self._ahead:
            chunk = self._ahead.popleft()
            self._posted.append((chunk.indices, chunk.post()))


# ---- the node shard ----


# Own elements per message of an exchange: an eighth of them, as far as that is neither so little
# that a message's latency counts nor more than memory should hold.
_CHUNKS, _LEAST_NUMEL, _MOST_NUMEL = 8, 1 << 18, 1 << 21


@dataclass
class _RequestedGather:
    """A requested gather, ``posted`` or not yet."""

    indices: Sequence[int]
    posted: Pending[list[torch.Tensor]] | None = None


class NodeShard:
    """Weights of the parameters it serves, by their index in the module."""

    def __init__(
        self, binding: QuantizedEngine, params: Iterable[Any], barrier: hooks.StepBarrier
    ) -> None:
        self._binding, self._barrier = binding, barrier
        fabric, topology = binding.fabric(None), binding.topology  # None: the world
        # One rank per node: all links are between nodes.
        self._inter, self._intra = fabric.inter or fabric.whole, fabric.intra
        self._rank = fabric.whole.rank
        self._params: dict[int, Any] = {}
        self._trained: set[int] = set()
        self._kept: dict[int, Kept] = {}
        for p in params:
            if not self._belongs(p):
                continue
            tracked = binding.param_of(p)
            index = tracked.index
            self._params[index] = p
            if tracked.trained:
                self._trained.add(index)
            self._kept[index] = Kept.allocate(
                p.ds_numel,
                nodes=topology.nodes,
                node_size=topology.node_size,
                local=self._rank % topology.node_size,
                dtype=p.ds_tensor.dtype,
                device=hooks.device(),
            )
        self._stale = set(self._kept)
        self._spread = Spread()
        self._gathered: dict[int, None] = {}  # since the last step, in order of their first gather
        self._asked: deque[_RequestedGather] = deque()  # not posted yet

    def _belongs(self, p: Any) -> bool:
        """Rank-invariant. Persistent parameters stay gathered; expert groups are not the world."""
        ranks = self._binding.link(p.ds_process_group).ranks
        world = list(range(self._binding.topology.world))
        return hooks.is_sendable(p) and not p.ds_persist and ranks == world

    def serves(self, parameter: Any) -> bool:
        """Whether ``gather`` knows the parameter."""
        tracked = self._binding.param_of(parameter)
        return tracked is not None and tracked.index in self._kept

    def nbytes(self) -> int:
        """Bytes of the node shard on this rank."""
        return sum(item.rows.nbytes for item in self._kept.values())

    def mark_stale(self, params: Iterable[Any] | None = None) -> None:
        """Weights were written outside the optimizer step, of all parameters if None. A collective:
        what is on its way must arrive first.
        """
        self.finish()
        if params is None:
            self._stale = set(self._kept)
        else:
            self._stale.update(self._binding.param_of(p).index for p in params if self.serves(p))

    def copies(self) -> Iterable[tuple[int, list[torch.Tensor]]]:
        """See Holder. Ranks of equal place in their nodes hold equal rows."""
        self.finish()
        # Stale rows are about to be refilled; the set is the same on all ranks.
        rows = [item.rows for index, item in self._kept.items() if index not in self._stale]
        yield self._rank % self._binding.topology.node_size, rows

    def resync(self) -> None:
        """See Holder: the next fetches fill all parameters exactly."""
        self.mark_stale()

    def after_step(self) -> None:
        """Start to exchange what the optimizer has changed."""
        self.finish()  # also what no forward has asked for
        step = self._binding.step + 1  # DeepSpeed counts the step only after it
        order, self._gathered = self._gathered | dict.fromkeys(self._params), {}
        moved = [i for i in order if i in self._trained and i not in self._stale]
        self._spread.begin(self._chunks(moved, step))

    def finish(self) -> None:
        """Wait until every row is that of the last step, and post what was asked for."""
        if self._asked:
            self._post_until(self._asked[-1])
        self._spread.finish()
        self._barrier.record()

    def close(self) -> None:
        """Free the rows when the engine is destroyed."""
        self._spread.close()
        self._asked.clear()
        self._kept, self._params, self._stale = {}, {}, set()

    def gather(self, params: Sequence[Any]) -> tuple[Pending[list[torch.Tensor]], list[bool]]:
        """Gather full weights of served parameters; also returns which may differ from the exact
        ones.

        What has not arrived yet is not waited for before the gather is.
        """
        asked = _RequestedGather([self._binding.param_of(p).index for p in params])
        self._gathered |= dict.fromkeys(asked.indices)
        step = self._binding.step
        lossy = [
            not isinstance(self._inside(index, step).codec, CastCodec)
            or not isinstance(self._between(index, step).codec, CastCodec)
            for index in asked.indices
        ]
        at_once = not self._asked and not self._spread.misses(asked.indices)
        self._asked.append(asked)
        if at_once:
            self._post_until(asked)

        def gathered() -> list[torch.Tensor]:
            self._post_until(asked)
            return asked.posted.wait()

        return Pending(gathered), lossy

    def _post_until(self, asked: _RequestedGather) -> None:
        """Post gathers up to this one, in the order in which they were asked for. DeepSpeed's waits
        come from sets, in another order on every rank.
        """
        while asked.posted is None:
            first = self._asked.popleft()
            first.posted = self._post(first.indices)

    def _post(self, indices: Sequence[int]) -> Pending[list[torch.Tensor]]:
        self._spread.finish(indices)
        stale = [index for index in indices if index in self._stale]
        if stale:
            exact = [Coding(codec=CastCodec(self._kept[index].rows.dtype)) for index in stale]
            self._exchange(stale, exact).wait()
            self._stale.difference_update(stale)
        codings = [self._inside(index, self._binding.step) for index in indices]
        return gather([self._kept[index] for index in indices], codings, self._intra)

    def _runs(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Split parameters into consecutive runs of bounded size, at least one each."""
        widths = [self._kept[index].rows.shape[1] for index in indices]
        most = min(max(ceil_div(sum(widths), _CHUNKS), _LEAST_NUMEL), _MOST_NUMEL)
        run: list[int] = []
        numel = 0
        for index, width in zip(indices, widths, strict=True):
            if run and numel + width > most:
                yield run
                run, numel = [], 0
            run.append(index)
            numel += width
        if run:
            yield run

    def _chunks(self, indices: Sequence[int], step: int) -> Iterator[Chunk]:
        """Those of exact differences are encoded at once, see [Note: lengths] of comm/lossless.py,
        the others when they are posted.
        """
        exact = self._binding.is_exact(step)
        left: list[int] = []
        alike: dict[torch.dtype, list[int]] = {}  # served by exact differences
        for index in indices:
            dtype = self._kept[index].rows.dtype
            served = self._binding.scheme.differs_exactly(dtype)
            (alike.setdefault(dtype, []) if served and not exact else left).append(index)
        runs = [run for served in alike.values() for run in self._runs(served)]
        yield from map(Chunk._make, zip(runs, self._exact_differences(runs), strict=True))
        for run in self._runs(left):
            codings = [self._between(index, step) for index in run]
            yield Chunk(run, partial(self._exchange, run, codings))

    def _exact_differences(self, runs: Sequence[Sequence[int]]) -> Iterator[lossless.Post]:
        node = self._inter.rank
        messages = [
            lossless.Rows([self._kept[i] for i in run], partial(self._shards, run), node)
            for run in runs
        ]
        traffic = self._binding.traffic
        return lossless.shard_posts(messages, self._inter, device=hooks.device(), traffic=traffic)

    def _shards(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """This rank's own, as the optimizer has left them."""
        device = hooks.device()
        return [hooks.valid_shard(self._params[i], self._rank).to(device) for i in indices]

    def _exchange(self, indices: Sequence[int], codings: Sequence[Coding]) -> Pending[Any]:
        kept = [self._kept[i] for i in indices]
        return exchange(kept, self._shards(indices), codings, self._inter)

    def _between(self, index: int, step: int) -> Coding:
        return self._coding(index, step, intra=False)

    def _inside(self, index: int, step: int) -> Coding:
        return self._coding(index, step, intra=True)

    def _coding(self, index: int, step: int, *, intra: bool) -> Coding:
        tracked, dtype = self._binding.param_of(self._params[index]), self._kept[index].rows.dtype
        return self._binding.weight_coding(tracked, dtype, step=step, rank=self._rank, intra=intra)
