"""ZeRO-3: fetch weights.

[Note: two gathers] DeepSpeed fetches for computation through ``all_gather_coalesced``. It gathers
everything that must be exact (GatheredParameters, checkpoints, persistent parameters) through
``all_gather``. Only the first is quantized. After an evaluation a parameter can stay gathered with
decoded values, so the second drops such values and gathers exact ones; else GatheredParameters with
a modifier rank would write decoded weights into the master shards.

External parameters, which a module borrows from another one, arrive through ``all_gather`` in the
first forward, though they are computed with. They are rerouted to the quantized gather, so that
this forward equals later ones.

[Note: several engines on one module] Engines for evaluation may share parameters with an engine
that trains. One engine serves the fetches of all: its *host*. An engine that trains is the host;
the others are its *guests*, whichever was built first. The node shard of a guest would be refreshed
by the guest's own steps, which never come. When the host is destroyed, a guest takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_quant.codec.bound import BoundCodec, full_precision
from ds_quant.codec.codec import CastCodec
from ds_quant.comm.profiling import profiler_range
from ds_quant.comm.rows import all_gather
from ds_quant.comm.small_tensors import SMALL_NUMEL, small_tensors_last
from ds_quant.comm.transport import Communicator, Pending
from ds_quant.runtime.param import ABSENT, DECODED, EXACT, Param
from ds_quant.zero import accelerator, sharded_params
from ds_quant.zero.deepspeed_types import GatherHandle, ZeroParameter
from ds_quant.zero.front import EngineFront
from ds_quant.zero.hooks import Hooks
from ds_quant.zero.node_shard import NodeShard

# A posted gather: its parameters, per parameter True if its values may differ from the exact ones,
# and the values.
_Gather = tuple[Sequence[Param], list[bool], Pending[list[Tensor]]]


class Fetch:
    """Serves the parameter fetches of one engine and its guests.

    Args:
        updated: parameters that the engine's optimizer updates; None without an optimizer.

    node_shard: None if the scheme keeps none, or another engine serves the fetches. ``close`` frees
        it, and so does another engine that takes over.
    """

    def __init__(self, front: EngineFront, updated: Sequence[ZeroParameter] | None) -> None:
        assert front.gather_count is not None  # of ZeRO-3
        self._front = front
        self._run = front.run
        self._gather_count = front.gather_count
        self._updated = updated
        self.node_shard: NodeShard | None = None
        self.barrier = accelerator.StepBarrier()
        self._parameters: list[ZeroParameter] = []  # of the engine's module
        self._hooked: dict[int, ZeroParameter] = {}  # wrapped parameters by ds_id
        self._is_closed = False  # hooks of DeepSpeed's coordinator may still call afterwards
        # See [Note: several engines on one module].
        self._host: Fetch | None = None
        self._guests: list[Fetch] = []

    # ---- life of an engine ----

    def attach(self, params: Iterable[ZeroParameter], events: Hooks) -> None:
        """Serve the parameters of a module, and parameters that are fetched with them."""
        self._parameters = list(params)
        sharded_params.before_fetch(events, self._before_fetch)
        # A node shard looks for writes in every forward. An engine that only evaluates may become
        # a guest, whose forwards disturb the gather count of its host.
        if self._run.routes.keeps_shard or not self._trains:
            sharded_params.around_forward(events, self._before_forward, self._after_forward)
        sharded_params.mark_external_parameters()
        self._find_host_or_serve()

    @property
    def _trains(self) -> bool:
        return self._updated is not None

    @property
    def is_guest(self) -> bool:
        """True if another engine on the same module serves the fetches of this one."""
        return self._host is not None

    def _find_host_or_serve(self) -> None:
        """Become the guest of an engine that serves the parameters, or serve them."""
        owners: list[Fetch] = []
        for owner in dict.fromkeys(sharded_params.owner_of(p) for p in self._parameters):
            if isinstance(owner, Fetch):
                owners.append(owner)
        for owner in owners:
            includes_owner = owner.ids() <= self.ids()
            if not self._trains and (owner._trains or not includes_owner):
                self._join(owner)
                return
        for owner in owners:
            if owner.ids() <= self.ids() or not owner._trains:
                owner._give_way(self)
        self.hook_parameters(self._parameters)

    def _join(self, host: Fetch) -> None:
        self._host = host
        host._guests.append(self)

    def _give_way(self, successor: Fetch) -> None:
        """Let another engine on the module serve it. An engine that trains was not destroyed."""
        self._stop_serving()
        for guest in self._guests:
            guest._join(successor)
        self._guests = []
        if self._trains:
            self._is_closed = True
        else:
            self._join(successor)

    def _before_fetch(self, params: Iterable[ZeroParameter]) -> None:
        (self._host or self).hook_parameters(params)

    def _before_forward(self, module: torch.nn.Module) -> None:
        """Let the node shard notice writes: see [Note: when shards are compared] of node_shard.py.

        A host and its guests have hooks on the same modules, and all of them run in a forward. Only
        those of the host reach the node shard, so it sees every forward once.
        """
        if self._host is not None:
            # This may be a forward for evaluation: the gathers of this step are not counted.
            self._host._gather_count.disturb()
        elif self.node_shard is not None:
            self.node_shard.before_forward(module)

    def _after_forward(self, module: torch.nn.Module) -> None:
        if self._host is None and self.node_shard is not None:
            self.node_shard.after_forward(module)

    def hook_parameters(self, params: Iterable[ZeroParameter]) -> None:
        """Wrap the gathers of parameters, also of those created later or never quantized.

        DeepSpeed calls the method of an arbitrary member of each fetch, another one on every rank.
        """
        for p in params:
            if p.ds_id not in self._hooked and not self._is_closed:
                self._hooked[p.ds_id] = p
                sharded_params.wrap_fetch(p, self.fetch, self.gather_exactly, owner=self)

    def make_node_shard(self) -> None:
        """Make the node shard, if these ranks keep one, and serve gathers from it from now on."""
        if not self._run.routes.keeps_shard:
            return
        node = NodeShard(self._front, self._parameters, self._updated or (), self.barrier)
        self.node_shard = node
        # Values that other code changes while they are gathered make the shard's rows stale.
        for parameter in self._parameters:
            sharded_params.wrap_partition(parameter, node.resync, owner=self)

    def ids(self) -> set[int]:
        """Return the ids of the module's parameters."""
        return {p.ds_id for p in self._parameters}

    def close(self) -> None:
        """Restore the parameters, with exact values, when the engine is destroyed.

        A guest takes over.
        """
        self._is_closed = True
        if self._host is not None:
            self._host._guests.remove(self)
            self._host = None
        self._stop_serving()
        guests, self._guests = self._guests, []
        for guest in guests:
            guest._host = None
        for guest in guests:
            guest._find_host_or_serve()
            if not guest.is_guest:
                guest.make_node_shard()
        self._parameters = []

    def _stop_serving(self) -> None:
        if self.node_shard is not None:
            self.node_shard.close()
            self.node_shard = None
        for p in self._hooked.values():
            sharded_params.unwrap(p, owner=self)
            if self._pop_decoded(p) and sharded_params.is_available(p):
                p.ds_active_sub_modules.clear()  # left by a forward that was not finished
                p.partition()
        self._hooked.clear()

    # ---- learned levels ----

    def learn_levels(self) -> None:
        """Learn from the updated shards. DeepSpeed counts the step only after it."""
        self._run.learn_levels(self._front.step + 1, self._own_values())

    def _own_values(self) -> Iterator[tuple[Param | None, Tensor, Communicator]]:
        """Yield every parameter, this rank's shard, and the ranks that share it."""
        for p in self._parameters:
            communicator = self._run.communicator(p.ds_process_group)
            (shard,) = sharded_params.valid_shards([p], communicator.rank)
            yield self._run.param_of(p), shard, communicator

    # ---- gathers for forward and backward ----

    def fetch(
        self,
        original: Callable[..., GatherHandle],
        params: Iterable[ZeroParameter],
        *args: object,
        **kwargs: object,
    ) -> GatherHandle:
        """Replace ``all_gather_coalesced``: post one gather per process group.

        DeepSpeed gathers parameters that this engine does not know (created later) or that hold no
        floats. Split and order are equal on all ranks.
        """
        self._front.requested_roles.add("weights")
        params = sorted(params, key=lambda p: p.ds_id)  # the caller's order comes from a set
        if self._gather_count.is_counting:
            self._gather_count.fetched(params)
        by_group: dict[int, list[Param]] = {}
        in_node: list[Param] = []
        foreign: list[ZeroParameter] = []
        for p in params:
            param = self._run.param_of(p)
            if param is not None and param.row_state is not ABSENT:
                in_node.append(param)
            elif param is not None and sharded_params.is_sendable(p):
                by_group.setdefault(id(p.ds_process_group), []).append(param)
            else:
                foreign.append(p)
        self.barrier.wait()
        gathers: list[_Gather] = []
        for group_params in by_group.values():
            tensors = [param.tensor for param in group_params]
            if self._run.communicator(tensors[0].ds_process_group).size == 1:  # DeepSpeed copies
                foreign += tensors
                continue
            with profiler_range("gather", group_params[0].name):
                gathers.append(self._gather(group_params))
        if in_node:
            with profiler_range("gather", in_node[0].name):
                gathers.append(self._gather_in_node(in_node))
        if not foreign:
            return _FetchHandle(gathers)
        for p in foreign:
            self._pop_decoded(p)
        foreign_handle = original(foreign, *args, **kwargs)
        return _FetchHandle(gathers, foreign_handle) if gathers else foreign_handle

    def _gather(self, params: list[Param]) -> _Gather:
        """Post the gather of parameters that share a process group."""
        tensors = [param.tensor for param in params]
        hierarchy = self._run.level(tensors[0].ds_process_group).hierarchy
        sharded_params.begin_fetch(tensors)
        step = self._front.step
        is_full_precision = self._run.is_full_precision(step)
        bound_codecs = [
            self._bound_codec(param, hierarchy.rank, step, is_full_precision) for param in params
        ]
        order = small_tensors_last([bound_codec.codec for bound_codec in bound_codecs])
        params = [params[i] for i in order]
        bound_codecs = [bound_codecs[i] for i in order]
        tensors = [tensors[i] for i in order]
        pending = all_gather(
            sharded_params.valid_shards(tensors, hierarchy.rank),
            [p.ds_numel for p in tensors],
            bound_codecs,
            hierarchy,
        )
        is_lossy = [not isinstance(bound_codec.codec, CastCodec) for bound_codec in bound_codecs]
        return params, is_lossy, pending

    def _gather_in_node(self, params: list[Param]) -> _Gather:
        """Post the gather of parameters that the node shard serves."""
        sharded_params.begin_fetch([param.tensor for param in params])
        assert self.node_shard is not None
        pending, is_lossy = self.node_shard.gather(params)
        return params, is_lossy, pending

    def _bound_codec(
        self, param: Param, rank: int, step: int, is_full_precision: bool
    ) -> BoundCodec:
        dtype = param.tensor.ds_tensor.dtype
        # Persistent parameters stay gathered between steps, so they must be exact.
        if not (is_full_precision or param.tensor.ds_persist):
            # A node shard serves all parameters whose ranks are the world. Beside it only those of
            # fewer ranks come here.
            full_world = self.node_shard is None
            # Only the first hop encodes: a second one forwards its rows.
            hop_codec, *_ = param.weight_codecs(dtype, rank=rank, full_world=full_world)
            if hop_codec is not None:
                return param.bound_codec(hop_codec, dtype, step)
        return full_precision(dtype, tight=param.tensor.ds_numel <= SMALL_NUMEL)

    # ---- exact gathers ----

    def gather_exactly(
        self,
        parameter: ZeroParameter,
        original: Callable[..., object],
        param_list: Sequence[ZeroParameter] | None = None,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Replace ``all_gather``. See [Note: two gathers]."""
        if param_list is None and sharded_params.take_external(parameter):
            if sharded_params.is_unavailable(parameter):
                parameter.all_gather_coalesced([parameter]).wait()
            return None
        for p in [parameter] if param_list is None else param_list:
            if sharded_params.is_available(p) and self._pop_decoded(p):
                sharded_params.drop_values(p)
        # DeepSpeed's own ``all_gather`` may wait for the last parameter only. A call with options
        # stays as it is.
        has_options = bool(args or kwargs)
        if param_list is not None and not has_options and accelerator.awaits_last_gather_only():
            for p in param_list:
                original([p])
            return None
        return original(param_list, *args, **kwargs)

    def _pop_decoded(self, parameter: ZeroParameter) -> bool:
        """Return and clear the flag that gathered values are decoded."""
        param = self._run.param_of(parameter)
        if param is None or param.gathered is not DECODED:
            return False
        param.gathered = EXACT
        return True


class _FetchHandle:
    """DeepSpeed's gather handle, for our gathers and DeepSpeed's own.

    ``wait`` is called once per parameter. DeepSpeed keeps the handle until the last parameter is
    used, so the first ``wait`` frees the values.
    """

    def __init__(self, gathers: list[_Gather], foreign_handle: GatherHandle | None = None) -> None:
        self._gathers = gathers
        self._foreign_handle = foreign_handle

    def wait(self, **kwargs: Any) -> None:
        """Wait for the values and fill the parameters."""
        while self._gathers:
            params, is_lossy, pending = self._gathers[0]
            sharded_params.fill([param.tensor for param in params], pending.wait())
            for param, lossy in zip(params, is_lossy, strict=True):
                param.gathered = DECODED if lossy else EXACT
            del self._gathers[0]
        if self._foreign_handle is not None:
            self._foreign_handle.wait(**kwargs)
