"""The node-level copy of the ZeRO-3 weights, updated after every optimizer step.

[Note: node shard] Every node holds all weights, split over its ranks: its *node shard*. A rank
holds *rows* of every parameter, see [Note: strided layout] of comm/rows.py. A gather of full
weights then stays inside the node; only the changes of an optimizer step cross between nodes.

[Note: stale rows] The exchange after a step serves every parameter that was trained when the engine
was built, because the optimizer may still move it. Everything else that writes weights marks its
parameters stale on all ranks alike, and the next fetch fills their rows in full precision. A loaded
checkpoint and GatheredParameters with a modifier rank do so at once. Saving a checkpoint marks all
parameters, so that a run that saves continues like one that loads. The primary shard is not the
node shard's row: it stays exact, because exports and GatheredParameters read it.

[Note: when shards are compared] User code may also write a shard (``ds_tensor``) directly, or let
DeepSpeed's optimizer load a state. Such writes are noticed by content: see runtime/written_weights.
Fingerprints are taken after an optimizer step. They are compared before the first gather after the
step, and before the first gather of every forward. A forward begins with a module that no other
module calls, or that was called before in this forward. DeepSpeed may fetch a parameter long before
its own module is called, so the gather that follows compares, whichever it is. A backward does not
compare. All ranks compare at the same gathers, and vote.

A write before the comparison may have reached the exchange in part: later chunks read their shards
during the next forward. Stale rows are filled after the exchange, so they are exact either way. A
write during a forward is noticed by the next one.

A parameter that was written is filled exactly once more after the next step, because the step may
take the write back (a perturbation, an average): the difference would be large, or not finite.

[Note: when a gather is posted] The exchange continues during the next forward, see
``ChunkedExchange``. A gather inside the node needs the chunks that hold its parameters. On a device
with streams it is posted at once, behind these chunks on DeepSpeed's stream of gathers. On the CPU
a wait for a chunk blocks the host, so a gather is posted when it is waited for. Other reads and
writes of rows finish the exchange first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_quant.codec.bound import BoundCodec, full_precision
from ds_quant.comm.lossless_gather import Post, posts
from ds_quant.comm.node_rows import LosslessRows, exchange, gather, on_device
from ds_quant.comm.transport import Pending
from ds_quant.kernels.wire import ceil_div
from ds_quant.policy.in_flight import CHUNKS, LEAST_NUMEL, MOST_NUMEL
from ds_quant.runtime import log
from ds_quant.runtime.param import ABSENT, CURRENT, STALE, HopCodec, Param
from ds_quant.runtime.plan_cache import PlanCache
from ds_quant.runtime.written_weights import WrittenWeights
from ds_quant.zero import accelerator, offload, sharded_params
from ds_quant.zero.accelerator import StepBarrier
from ds_quant.zero.chunked_exchange import Chunk, ChunkedExchange
from ds_quant.zero.deepspeed_types import ZeroParameter
from ds_quant.zero.front import EngineFront
from ds_quant.zero.row_memory import RowMemory

# Index of a hop among the codecs of a parameter's weights.
_INTER_NODE = 0
_INTRA_NODE = -1


@dataclass
class _RequestedGather:
    """A gather that DeepSpeed has requested.

    posted: None before it is posted.
    """

    params: Sequence[Param]
    posted: Pending[list[Tensor]] | None = None


class NodeShard:
    """The rows of the parameters that it serves: see [Note: node shard].

    Args:
        params: of the engine's module.
        updated: parameters that the optimizer updates; none for an engine without optimizer.
        barrier: orders gathers behind writes of the rows.

    served: parameters whose ranks are the world, which DeepSpeed does not keep gathered.
    """

    def __init__(
        self,
        front: EngineFront,
        params: Iterable[ZeroParameter],
        updated: Iterable[ZeroParameter],
        barrier: StepBarrier,
    ) -> None:
        self._front = front
        self._run = front.run
        self._barrier = barrier
        hierarchy = self._run.world.hierarchy  # None: the world
        # With one rank per node every message crosses between nodes.
        self._inter = hierarchy.inter or hierarchy.flat
        self._intra = hierarchy.intra
        self._world = hierarchy.flat
        self._rank = hierarchy.flat.rank

        # - Rows: the first gathers fill them, ``close`` frees them when the engine is destroyed
        self.served: list[Param] = []
        for p in params:
            param = self._run.param_of(p)
            if param is not None and self._is_served(p):
                param.row_state = STALE
                self.served.append(param)
        self._memory = RowMemory(
            self.served,
            self._run.topology,
            local=self._rank % self._run.topology.node_size,
            stays_on_host=offload.offloads_parameters(front.engine),
        )

        # - Gathers and the exchange after a step
        self._exchange = ChunkedExchange()
        self._gathered: dict[Param, None] = {}  # since the last step, in order of first gather
        self._requested: deque[_RequestedGather] = deque()  # not posted: no memory yet
        self._posts_at_once = accelerator.has_streams()
        self._hop_codecs: PlanCache[tuple[Param, ...], list[tuple[HopCodec | None, ...]]]
        self._hop_codecs = PlanCache()

        # - Writes outside the optimizer step: see [Note: when shards are compared]
        # Fingerprints, 8 bytes per piece of a shard, which live as long as the node shard.
        dtypes = [param.tensor.ds_tensor.dtype for param in self.served]
        self._writes = WrittenWeights(dtypes, accelerator.device())
        updated_ids = {id(p) for p in updated}
        # Indices of the served parameters whose shards a step overwrites.
        self._updated = {
            index for index, param in enumerate(self.served) if id(param.tensor) in updated_ids
        }
        self._modules_with_params: dict[torch.nn.Module, bool] = {}  # see ``_holds_served``
        self._called_modules: set[torch.nn.Module] = set()  # in this forward
        self._forward_depth = 0  # modules whose forward has begun and not ended
        self._compares_next_gather = True
        self._written_since_step: set[Param] = set()
        self._has_logged_writes = False

    # ---- rows ----

    def _is_served(self, p: ZeroParameter) -> bool:
        """Return True if the node shard serves a parameter, equal on all ranks.

        Persistent parameters stay gathered. The ranks of an expert are not the world.
        """
        in_world = self._run.is_world(p.ds_process_group)
        return sharded_params.is_sendable(p) and not p.ds_persist and in_world

    def leave_device(self, *, pin: bool) -> None:
        """Move all rows to the host: see ``offload.follow_states``."""
        self.finish()
        self._memory.leave_device(pin=pin)

    def return_to_device(self) -> None:
        """Move all rows back: see ``offload.follow_states``."""
        self.finish()
        self._memory.return_to_device()
        self._barrier.record()

    def nbytes(self) -> int:
        """Return the bytes of the node shard on this rank."""
        return self._memory.nbytes

    def resync(self, params: Iterable[ZeroParameter] | None = None) -> None:
        """Mark rows stale: weights were written outside the optimizer step.

        A collective, because it finishes the exchange.

        params: None for all.
        """
        self.finish()
        written: Iterable[Param | None] = self.served
        if params is None:
            self._writes.forget()
        else:
            written = map(self._run.param_of, params)
        for param in written:
            if param is not None and param.row_state is not ABSENT:
                param.row_state = STALE
        self._compares_next_gather = True  # before the rows are filled, so that none is reported

    def comparable_weights(self) -> Iterable[tuple[int, Iterable[Tensor]]]:
        """See ``copies.WeightCache``. Ranks of equal place in their nodes hold equal rows."""
        self.finish()
        # Stale rows are about to be filled. They are the same ones on all ranks.
        rows = (
            on_device([param.node_rows.rows], param.node_rows.device)[0]
            for param in self.served
            if param.row_state is not STALE
        )
        yield self._rank % self._run.topology.node_size, rows

    def close(self) -> None:
        """Free the rows when the engine is destroyed."""
        self._exchange.close()
        self._requested.clear()
        for param in self.served:
            param.row_state = ABSENT
        self._memory.free()
        self.served = []

    # ---- writes by other code ----

    def before_forward(self, module: torch.nn.Module) -> None:
        """Note the module whose forward is about to begin: see [Note: when shards are compared]."""
        holds_served = self._modules_with_params.get(module)
        if holds_served is None:
            holds_served = self._modules_with_params[module] = self._holds_served(module)
        if not holds_served:
            return
        if self._forward_depth == 0 or module in self._called_modules:
            self._called_modules.clear()
            self._forward_depth = 0  # an exception may have left modules
            self._compares_next_gather = True
        self._called_modules.add(module)
        self._forward_depth += 1

    def after_forward(self, module: torch.nn.Module) -> None:
        """Note that the forward of a module has ended."""
        if self._modules_with_params.get(module) and self._forward_depth:
            self._forward_depth -= 1

    def _holds_served(self, module: torch.nn.Module) -> bool:
        """Return True if the node shard serves a parameter of the module or of one inside.

        Other modules may run on some of the ranks only.
        """
        params = map(self._run.param_of, sharded_params.parameters_of(module))
        return any(p is not None and p.row_state is not ABSENT for p in params)

    def _mark_written(self) -> None:
        """Mark the rows of parameters stale that any rank has written. A collective."""
        self._compares_next_gather = False
        shards = self._stored_shards()
        if not self._writes.is_taken:
            self._writes.take(shards)
            return
        written = [self.served[index] for index in self._writes.written(shards, self._world)]
        if not written:
            return
        self._writes.take(shards)
        self._written_since_step.update(written)
        unknown = [param for param in written if param.row_state is CURRENT]
        if unknown:
            self.finish()
            for param in unknown:
                param.row_state = STALE
            self._log_writes(unknown)

    def _log_writes(self, written: Sequence[Param]) -> None:
        """Log the first write that was noticed, and its price."""
        if self._has_logged_writes:
            return
        self._has_logged_writes = True
        nbytes = sum(param.tensor.ds_numel * param.node_rows.rows.itemsize for param in written)
        crossing_bytes = nbytes * (self._inter.size - 1) / self._inter.size
        log.log_rank0(
            f"quantized_comm: your code has written {len(written)} parameter(s) outside the "
            f"optimizer step, such as {written[0].name}. The next forward uses them, as without "
            f"this plugin: {crossing_bytes / 1e6:.3g} MB of exact values enter every node now, and "
            "again after the next step (logged once)"
        )

    def _stored_shards(self) -> list[Tensor]:
        return sharded_params.stored_shards([param.tensor for param in self.served], self._rank)

    # ---- gathers ----

    def gather(self, params: Sequence[Param]) -> tuple[Pending[list[Tensor]], list[bool]]:
        """Gather full weights of served parameters: see [Note: when a gather is posted].

        Returns:
            the weights, and per parameter True if they may differ from the exact ones.
        """
        if self._compares_next_gather and not sharded_params.is_in_backward():
            self._mark_written()
        request = _RequestedGather(params)
        self._gathered |= dict.fromkeys(params)
        quantized = not self._run.is_full_precision(self._front.step)
        is_lossy = [quantized and any(hop_codecs) for hop_codecs in self._hop_codecs_of(params)]
        must_wait = bool(self._requested) or self._exchange.awaits(params)
        self._requested.append(request)
        if self._posts_at_once or not must_wait:
            self._post_until(request)

        def gathered() -> list[Tensor]:
            self._post_until(request)
            assert request.posted is not None
            return request.posted.wait()

        return Pending(gathered), is_lossy

    def _post_until(self, request: _RequestedGather) -> None:
        """Post the requested gathers up to this one, in the order of the requests.

        DeepSpeed waits for gathers in another order on every rank: it reads them from sets.
        """
        while request.posted is None:
            first = self._requested.popleft()
            params = first.params
            self._exchange.finish(params)
            self._fill_stale([param for param in params if param.row_state is STALE])
            bound_codecs: list[BoundCodec] = []
            if self._intra is not None:  # else nothing is sent
                bound_codecs = self._bound_codecs(params, _INTRA_NODE, self._front.step)
            first.posted = gather([param.node_rows for param in params], bound_codecs, self._intra)

    def _fill_stale(self, stale: Sequence[Param]) -> None:
        """Fill the rows of these parameters in full precision, on all ranks."""
        if stale:
            bound_codecs = [full_precision(param.node_rows.rows.dtype) for param in stale]
            self._post_exchange(stale, bound_codecs).wait()
            for param in stale:
                param.row_state = CURRENT

    def finish(self) -> None:
        """Wait until all rows hold the weights of the last step, and post requested gathers."""
        if self._requested:
            self._post_until(self._requested[-1])
        self._exchange.finish()
        self._barrier.record()

    # ---- the exchange after a step ----

    def after_step(self) -> None:
        """Begin to exchange the weights that the optimizer has changed."""
        self.finish()  # a forward may have skipped some parameters
        step = self._front.step + 1  # DeepSpeed counts the step only after it
        order = self._gathered | dict.fromkeys(self.served)
        self._gathered = {}
        for param in self._written_since_step:
            param.row_state = STALE
        self._written_since_step.clear()
        changed = [param for param in order if param.trained and param.row_state is CURRENT]
        self._exchange.begin(self._cut_into_chunks(changed, step))
        self._writes.take(self._stored_shards(), only=self._updated)
        self._compares_next_gather = True

    def _cut_into_chunks(self, params: Sequence[Param], step: int) -> Iterator[Chunk]:
        """Cut the exchange into chunks, lossless differences first.

        Lossless differences are all encoded here, see [Note: lengths] of comm/lossless_gather.py;
        the others when they are posted.
        """
        lossless_dtypes: set[torch.dtype] = set()
        if self._run.scheme.lossless and not self._run.is_full_precision(step):
            dtypes = {param.node_rows.rows.dtype for param in params}
            lossless_dtypes = set(filter(self._run.routes.sends_lossless, dtypes))
        quantized: list[Param] = []
        lossless_by_dtype: dict[torch.dtype, list[Param]] = {}
        for param in params:
            dtype = param.node_rows.rows.dtype
            if dtype in lossless_dtypes:
                lossless_by_dtype.setdefault(dtype, []).append(param)
            else:
                quantized.append(param)
        lossless_parts: list[list[Param]] = []
        for same_dtype in lossless_by_dtype.values():
            lossless_parts += self._parts(same_dtype)
        if lossless_parts:
            yield from zip(lossless_parts, self._lossless_differences(lossless_parts), strict=True)
        for part in self._parts(quantized):
            bound_codecs = self._bound_codecs(part, _INTER_NODE, step)
            yield part, partial(self._post_exchange, part, bound_codecs)

    def _parts(self, params: Sequence[Param]) -> Iterator[list[Param]]:
        """Split parameters into consecutive parts of bounded size, of at least one each."""
        widths = [param.node_rows.rows.shape[1] for param in params]
        most_numel = min(max(ceil_div(sum(widths), CHUNKS), LEAST_NUMEL), MOST_NUMEL)
        part: list[Param] = []
        numel = 0
        for param, width in zip(params, widths, strict=True):
            if part and numel + width > most_numel:
                yield part
                part = []
                numel = 0
            part.append(param)
            numel += width
        if part:
            yield part

    def _lossless_differences(self, parts: Sequence[Sequence[Param]]) -> Iterator[Post]:
        messages = [
            LosslessRows(
                [param.node_rows.rows for param in part],
                self._inter.rank,
                partial(self._shards, part),
                part[0].node_rows.device,
            )
            for part in parts
        ]
        return posts(
            messages,
            self._inter,
            self._inter,
            device=accelerator.device(),
            traffic=self._run.traffic,
        )

    def _post_exchange(
        self, params: Sequence[Param], bound_codecs: Sequence[BoundCodec]
    ) -> Pending[Any]:
        """Send this rank's new shards to the ranks of equal place in other nodes."""
        node_rows = [param.node_rows for param in params]
        return exchange(node_rows, self._shards(params), bound_codecs, self._inter)

    def _shards(self, params: Sequence[Param]) -> list[Tensor]:
        """Return this rank's own shards, as the optimizer has left them."""
        return sharded_params.valid_shards([param.tensor for param in params], self._rank)

    # ---- codecs ----

    def _hop_codecs_of(self, params: Sequence[Param]) -> list[tuple[HopCodec | None, ...]]:
        """Return the codecs of each parameter: between the nodes, then inside them.

        Frozen parameters have no codec between the nodes, nodes of one rank none inside. The
        parameters of a gather or exchange repeat in every step, so their codecs are remembered.
        """
        key = tuple(params)
        hop_codecs = self._hop_codecs.get(key)
        if hop_codecs is None:
            hop_codecs = [
                param.weight_codecs(param.node_rows.rows.dtype, rank=self._rank) for param in params
            ]
            self._hop_codecs.add(key, hop_codecs)
        return hop_codecs

    def _bound_codecs(self, params: Sequence[Param], hop: int, step: int) -> list[BoundCodec]:
        """Bind the codecs of one hop to a step."""
        if self._run.is_full_precision(step):
            return [full_precision(param.node_rows.rows.dtype) for param in params]
        return [
            param.bound_codec(hop_codecs[hop], param.node_rows.rows.dtype, step)
            for param, hop_codecs in zip(params, self._hop_codecs_of(params), strict=True)
        ]
