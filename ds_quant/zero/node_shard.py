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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_quant.comm.node_rows import on_device
from ds_quant.comm.transport import Pending
from ds_quant.runtime import log
from ds_quant.runtime.param import ABSENT, CURRENT, STALE, Param
from ds_quant.runtime.written_weights import WrittenWeights
from ds_quant.zero import accelerator, offload, sharded_params
from ds_quant.zero.accelerator import StepBarrier
from ds_quant.zero.chunked_exchange import ChunkedExchange
from ds_quant.zero.deepspeed_types import ZeroParameter
from ds_quant.zero.front import EngineFront
from ds_quant.zero.node_messages import NodeMessages, NodePlan
from ds_quant.zero.row_memory import RowMemory


@dataclass
class _RequestedGather:
    """A gather that DeepSpeed has requested.

    step: optimizer step whose weights it gathers.
    posted: None before it is posted.
    """

    plan: NodePlan
    step: int
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
        self._messages = NodeMessages(self._run)
        self._world = self._run.world.hierarchy.flat
        self._rank = self._world.rank

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
        nodes = self._run.topology.nodes
        crossing_bytes = nbytes * (nodes - 1) / nodes
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
        step = self._front.step
        plan = self._messages.plan(params, step)
        request = _RequestedGather(plan, step)
        self._gathered |= dict.fromkeys(params)
        must_wait = bool(self._requested) or self._exchange.awaits(params)
        self._requested.append(request)
        if self._posts_at_once or not must_wait:
            self._post_until(request)

        def gathered() -> list[Tensor]:
            self._post_until(request)
            assert request.posted is not None
            return request.posted.wait()

        return Pending(gathered), plan.is_lossy

    def _post_until(self, request: _RequestedGather) -> None:
        """Post the requested gathers up to this one, in the order of the requests.

        DeepSpeed waits for gathers in another order on every rank: it reads them from sets.
        """
        while request.posted is None:
            first = self._requested.popleft()
            params = first.plan.params
            self._exchange.finish(params)
            self._fill_stale([param for param in params if param.row_state is STALE])
            first.posted = self._messages.gather(first.plan, first.step)

    def _fill_stale(self, stale: Sequence[Param]) -> None:
        """Fill the rows of these parameters in full precision, on all ranks."""
        if stale:
            self._messages.fill(stale)
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
        self._run.begin_step(step)
        order = self._gathered | dict.fromkeys(self.served)
        self._gathered = {}
        for param in self._written_since_step:
            param.row_state = STALE
        self._written_since_step.clear()
        changed = [param for param in order if param.trained and param.row_state is CURRENT]
        self._exchange.begin(self._messages.chunks(changed, step))
        self._writes.take(self._stored_shards(), only=self._updated)
        self._compares_next_gather = True
