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
for: over one link they arrive in that order. So the order of posts does not depend on the order
of the forward.

[Note: when a gather is posted] A gather inside the node needs the chunks that hold its parameters.
On a device with streams it is posted when it is asked for, behind them on DeepSpeed's stream of
gathers. On the CPU to wait for a chunk keeps the host, so it is posted when it is waited for.

[Note: in host memory] Where DeepSpeed keeps its shards on the host (``offload_param``), the rows
are there too, page-locked. A gather copies its rows to the device when it is posted, as far ahead
of their use as DeepSpeed fetches. An exchange copies a chunk to the device when it has arrived,
changes it there and copies it back; differences are taken from a copy, too. Copies take their turn
on the stream that asks for them: the device holds one chunk and what is being gathered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ds_quant.codec.bound import BoundCodec, full_precision
from ds_quant.comm.message import Room, ShardRows, exchange, gather, rows_of
from ds_quant.comm.transport import Pending
from ds_quant.kernels.wire import ceil_div
from ds_quant.policy.memory import CHUNKS, EXCHANGED_AT_ONCE, LEAST_NUMEL, MOST_NUMEL
from ds_quant.zero import hooks, lossless, offload, sharded_params
from ds_quant.zero.param import HopCodec, Param
from ds_quant.zero.plugin import Plugin

# ---- spread over the next forward ----


# Parameters and a function that posts their exchange.
Chunk = tuple[Collection[Hashable], Callable[[], Pending[Any]]]


class Spread:
    """The chunks of one exchange."""

    def __init__(self) -> None:
        self._ahead: deque[Chunk] = deque()
        self._posted: deque[tuple[Collection[Hashable], Pending[Any]]] = deque()
        self._missing: set[Hashable] = set()

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """Post the first chunks; the exchange before must be finished."""
        assert not self._missing
        self._ahead.extend(chunks)
        self._missing.update(param for params, _ in self._ahead for param in params)
        for _ in range(EXCHANGED_AT_ONCE):  # the others are posted as these arrive
            self._post_next()

    def misses(self, params: Iterable[Hashable]) -> bool:
        """Whether one of these parameters is still to arrive. Equal on all ranks: it depends on
        what was finished here, not on what the network has delivered.
        """
        return not self._missing.isdisjoint(params)

    def finish(self, params: Iterable[Hashable] | None = None) -> None:
        """Wait until these parameters have arrived, or all if None.

        Raises:
            RuntimeError: a rank does not answer; also at every later call.
        """
        while self._missing if params is None else self.misses(params):
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
        self._missing = {param for arriving, _ in self._posted for param in arriving}
        self.finish()

    def _post_next(self) -> None:
        if self._ahead:
            params, post = self._ahead.popleft()
            self._posted.append((params, post()))


# ---- the node shard ----


_KNOWN = 1000  # gathers and exchanges whose streams are remembered


@dataclass
class _RequestedGather:
    """A requested gather, ``posted`` or not yet."""

    params: Sequence[Param]
    posted: Pending[list[torch.Tensor]] | None = None


class NodeShard:
    """Weights of the parameters that it serves; ``Param`` has the rows of each."""

    def __init__(self, plugin: Plugin, params: Iterable[Any], barrier: hooks.StepBarrier) -> None:
        self._plugin, self._barrier = plugin, barrier
        hierarchy, topology = plugin.hierarchy(None), plugin.topology  # None: the world
        # One rank per node: all links are between nodes.
        self._inter, self._intra = hierarchy.inter or hierarchy.flat, hierarchy.intra
        self._rank = hierarchy.flat.rank
        self.served = [plugin.param_of(p) for p in params if self._belongs(p)]
        self._stays_on_host, self._is_away = offload.offloads_parameters(plugin.engine), False
        where = {
            "nodes": topology.nodes, "node_size": topology.node_size,
            "local": self._rank % topology.node_size,
            "room": self._room(on_host=self._stays_on_host),
            "device": hooks.device() if self._stays_on_host else None,
        }  # fmt: skip
        for param in self.served:
            p, param.stale = param.tensor, True
            param.node_rows = ShardRows.allocate(p.ds_numel, dtype=p.ds_tensor.dtype, **where)
        self._spread = Spread()
        self._gathered: dict[Param, None] = {}  # since the last step, in order of first gather
        self._asked: deque[_RequestedGather] = deque()  # not posted yet
        self._at_once = hooks.has_streams()
        self._known: dict[tuple[Param, ...], list[tuple[HopCodec | None, ...]]] = {}

    def _belongs(self, p: Any) -> bool:
        """Rank-invariant. Persistent parameters stay gathered; expert groups are not the world."""
        in_world = self._plugin.is_world(p.ds_process_group)
        return sharded_params.is_sendable(p) and not p.ds_persist and in_world

    def _room(self, *, on_host: bool, pin: bool = True) -> Room:
        """Return room for all rows, on the device or the host."""
        nbytes = sum(param.tensor.ds_tensor.nbytes for param in self.served)
        device = "cpu" if on_host else hooks.device()

        def zeros(nbytes: int) -> torch.Tensor:
            block = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            return offload.pin(block) if on_host and pin else block

        return Room(self._plugin.topology.nodes * nbytes, zeros)

    def leave_device(self, *, pin: bool) -> None:
        """See ``offload.follow_states``. From here gathers take copies: [Note: in host memory]."""
        self.finish()
        if not (self._stays_on_host or self._is_away):
            hooks.synchronize()  # what has written rows on other streams
            self._move(self._room(on_host=True, pin=pin), hooks.device())

    def return_to_device(self) -> None:
        """See ``offload.follow_states``."""
        self.finish()
        if self._is_away:
            self._move(self._room(on_host=False), None)
            self._barrier.record()

    def _move(self, room: Room, away_from: torch.device | None) -> None:
        """Copy all rows into ``room``."""
        self._is_away = away_from is not None
        for param in self.served:
            rows = room.zeros(*param.node_rows.rows.shape, dtype=param.node_rows.rows.dtype)
            rows.copy_(param.node_rows.rows, non_blocking=not self._is_away)
            param.node_rows = replace(param.node_rows, rows=rows, device=away_from)

    def nbytes(self) -> int:
        """Bytes of the node shard on this rank."""
        return sum(param.node_rows.rows.nbytes for param in self.served)

    def resync(self, params: Iterable[Any] | None = None) -> None:
        """Weights were written outside the optimizer step, of all parameters if None: the next
        fetches fill them exactly. A collective: what is on its way must arrive first.
        """
        self.finish()
        for param in self.served if params is None else map(self._plugin.param_of, params):
            if param is not None:
                param.stale = param.node_rows is not None

    def copies(self) -> Iterable[tuple[int, Iterable[torch.Tensor]]]:
        """See ``Plugin.keeper``. Ranks of equal place in their nodes hold equal rows."""
        self.finish()
        # Stale rows are about to be refilled; they are the same ones on all ranks.
        rows = (rows_of([param.node_rows])[0] for param in self.served if not param.stale)
        yield self._rank % self._plugin.topology.node_size, rows

    def after_step(self) -> None:
        """Start to exchange what the optimizer has changed."""
        self.finish()  # also what no forward has asked for
        step = self._plugin.step + 1  # DeepSpeed counts the step only after it
        order, self._gathered = self._gathered | dict.fromkeys(self.served), {}
        moved = [param for param in order if param.trained and not param.stale]
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
        for param in self.served:
            param.node_rows = None
        self.served = []

    def gather(self, params: Sequence[Param]) -> tuple[Pending[list[torch.Tensor]], list[bool]]:
        """Gather full weights of served parameters; also returns which may differ from the exact
        ones. See [Note: when a gather is posted].
        """
        asked = _RequestedGather(params)
        self._gathered |= dict.fromkeys(params)
        quantized = not self._plugin.is_full_precision(self._plugin.step)
        lossy = [quantized and any(streams) for streams in self._streams(params)]
        at_once = self._at_once or not (self._asked or self._spread.misses(params))
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
            params = first.params
            self._spread.finish(params)
            self._fill_stale([param for param in params if param.stale])
            bound_codecs: list[BoundCodec] = []
            if self._intra is not None:  # else nothing is sent
                bound_codecs = self._codings(params, -1, self._plugin.step)
            first.posted = gather([param.node_rows for param in params], bound_codecs, self._intra)

    def _fill_stale(self, stale: Sequence[Param]) -> None:
        """Fill the rows of these exactly, on all ranks."""
        if stale:
            exact = [full_precision(param.node_rows.rows.dtype) for param in stale]
            self._exchange(stale, exact).wait()
            for param in stale:
                param.stale = False

    def _streams(self, params: Sequence[Param]) -> list[tuple[HopCodec | None, ...]]:
        """Return the codecs of each between the nodes, if it is trained, and inside them, if they
        have ranks. Remembered by the parameters of a gather or an exchange, which repeat in every
        step.
        """
        key = tuple(params)
        if key not in self._known:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[key] = [
                param.weight_codecs(param.node_rows.rows.dtype, rank=self._rank) for param in params
            ]
        return self._known[key]

    def _codings(self, params: Sequence[Param], place: int, step: int) -> list[BoundCodec]:
        """Return their codings in one step; place 0 is between the nodes, -1 inside them."""
        if self._plugin.is_full_precision(step):
            return [full_precision(param.node_rows.rows.dtype) for param in params]
        return [
            param.bound_codec(streams[place], param.node_rows.rows.dtype, step)
            for param, streams in zip(params, self._streams(params), strict=True)
        ]

    def _runs(self, params: Sequence[Param]) -> Iterator[list[Param]]:
        """Split parameters into consecutive runs of bounded size, at least one each."""
        widths = [param.node_rows.rows.shape[1] for param in params]
        most = min(max(ceil_div(sum(widths), CHUNKS), LEAST_NUMEL), MOST_NUMEL)
        run: list[Param] = []
        numel = 0
        for param, width in zip(params, widths, strict=True):
            if run and numel + width > most:
                yield run
                run, numel = [], 0
            run.append(param)
            numel += width
        if run:
            yield run

    def _chunks(self, params: Sequence[Param], step: int) -> Iterator[Chunk]:
        """Cut the exchange: lossless differences are encoded at once, see [Note: lengths] of
        comm/lossless_gather.py, the others when they are posted.
        """
        differs: set[torch.dtype] = set()
        if self._plugin.scheme.lossless and not self._plugin.is_full_precision(step):
            dtypes = {param.node_rows.rows.dtype for param in params}
            differs = set(filter(self._plugin.routes.sends_lossless, dtypes))
        left: list[Param] = []
        alike: dict[torch.dtype, list[Param]] = {}  # served by lossless differences
        for param in params:
            dtype = param.node_rows.rows.dtype
            (alike.setdefault(dtype, []) if dtype in differs else left).append(param)
        runs = [run for served in alike.values() for run in self._runs(served)]
        if runs:
            yield from zip(runs, self._lossless_differences(runs), strict=True)
        for run in self._runs(left):
            yield run, partial(self._exchange, run, self._codings(run, 0, step))

    def _lossless_differences(self, runs: Sequence[Sequence[Param]]) -> Iterator[lossless.Post]:
        inter, traffic = self._inter, self._plugin.traffic
        messages = [
            lossless.NodeRows([p.node_rows for p in run], partial(self._shards, run), inter.rank)
            for run in runs
        ]
        how = {"device": hooks.device(), "traffic": traffic}
        return lossless.posts(messages, inter, inter, **how)

    def _shards(self, params: Sequence[Param]) -> list[torch.Tensor]:
        """Return this rank's own shards, as the optimizer has left them."""
        return sharded_params.valid_shards([param.tensor for param in params], self._rank)

    def _exchange(
        self, params: Sequence[Param], bound_codecs: Sequence[BoundCodec]
    ) -> Pending[Any]:
        kept = [param.node_rows for param in params]
        return exchange(kept, self._shards(params), bound_codecs, self._inter)
