"""ZeRO-3: fetch weights, and count how often: predicted at start-up, then measured.

[Note: two gathers] DeepSpeed fetches for computation through ``all_gather_coalesced`` and gathers
everything that must be exact (GatheredParameters, checkpoints, persistent parameters) through
``all_gather``. Only the first is quantized. A parameter can stay gathered with decoded values
after an evaluation, so the second drops such values and fetches exactly; else GatheredParameters
with a modifier rank would write decoded weights into the master shards. A parameter that a module
borrows from another one comes through the second in the first forward of a run, though it is
computed with: it is sent to the first, so that this forward equals later ones.

[Note: what is counted] DeepSpeed records the order of modules in a first pass and decides by it
from then on; an evaluation in between makes it record again. What counts is the first optimizer
step that began after two undisturbed micro-steps and was not disturbed itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ds_quant.codec.bound import BoundCodec, full_precision
from ds_quant.codec.codec import CastCodec
from ds_quant.comm.message import SMALL_NUMEL, all_gather, small_last
from ds_quant.comm.transport import Communicator, Pending
from ds_quant.policy.model import FetchSettings
from ds_quant.zero import hooks, log, sharded_params
from ds_quant.zero.node_shard import NodeShard
from ds_quant.zero.param import Param
from ds_quant.zero.plugin import Plugin

# A posted gather: its parameters, which values may differ from the exact ones, and the values.
_Gather = tuple[list[Param], list[bool], Pending[list[torch.Tensor]]]


class Fetch:
    """Serve the parameter fetches of one engine."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self.barrier = hooks.StepBarrier()
        self._parameters: list[torch.Tensor] = []
        self._hooked: dict[int, Any] = {}  # wrapped parameters by ds_id
        self._is_closed = False  # then hooks that nobody has removed may still call

    def attach(self, params: Iterable[torch.Tensor]) -> None:
        """Serve the parameters of a module, and what is fetched together with them."""
        self._parameters = list(params)
        for before in dict.fromkeys(sharded_params.owner_of(p) for p in self._parameters):
            if before is not None and before.ids() <= self.ids():
                before.close()  # an engine on the same module that nobody has destroyed
        self.hook_parameters(self._parameters)
        sharded_params.before_fetch(self._plugin.hooks, self.hook_parameters)
        sharded_params.note_borrowed()

    def hook_parameters(self, params: Iterable[Any]) -> None:
        """Hook all parameters, also those created later or never quantized: which
        one of a fetch DeepSpeed calls, the first of a set, differs from rank to rank.
        """
        for p in params:
            if p.ds_id not in self._hooked and not self._is_closed:
                self._hooked[p.ds_id] = p
                sharded_params.wrap_fetch(p, self.fetch, self.gather_exactly, owner=self)

    def keep_in_node(self) -> None:
        """Serve gathers from a node shard from now on."""
        node = self._plugin.node_shard = NodeShard(self._plugin, self._parameters, self.barrier)
        for parameter in self._parameters:
            sharded_params.wrap_partition(parameter, node.resync, owner=self)

    def ids(self) -> set[int]:
        """Of the parameters of its module."""
        return {p.ds_id for p in self._parameters}

    def close(self) -> None:
        """Give the parameters back to DeepSpeed when the engine is destroyed, all exact."""
        self._is_closed = True
        if self._plugin.node_shard is not None:
            self._plugin.node_shard.close()
        for p in self._hooked.values():
            sharded_params.unwrap(p, owner=self)
            if self._pop_decoded(p) and sharded_params.is_available(p):
                p.ds_active_sub_modules.clear()  # a forward that was not finished has left them
                p.partition()
        self._hooked.clear()
        self._parameters = []

    def _pop_decoded(self, parameter: Any) -> bool:
        """Whether the values of the last gather may be decoded ones, which is forgotten."""
        param = self._plugin.param_of(parameter)
        if param is None or not param.decoded:
            return False
        param.decoded = False
        return True

    def learn_levels(self) -> None:
        """Learn from the shards that the optimizer has written. DeepSpeed counts its step later."""
        self._plugin.learn_levels(self._plugin.step + 1, self._own_values())

    def _own_values(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, Communicator]]:
        """(parameter, this rank's shard, link) of every parameter."""
        for p in self._parameters:
            communicator = self._plugin.communicator(p.ds_process_group)
            (own,) = sharded_params.valid_shards([p], communicator.rank)
            yield p, own, communicator

    def fetch(
        self, original: Callable[..., Any], params: Iterable[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Replace ``all_gather_coalesced``: post one gather per process group.

        Parameters that this engine does not know (created later) or that hold no floats go to
        DeepSpeed. The split and the order depend on rank-invariant facts only.
        """
        self._plugin.requested_roles.add("weights")
        params = sorted(params, key=lambda p: p.ds_id)  # the caller's order comes from a set
        if self._plugin.gather_count is not None:
            self._plugin.gather_count.fetched(params)
        groups: dict[int, list[Param]] = {}
        kept, others = [], []
        for p in params:
            param = self._plugin.param_of(p)
            if param is not None and param.node_rows is not None:
                kept.append(param)
            elif param is not None and self._is_sent(p):
                groups.setdefault(id(p.ds_process_group), []).append(param)
            else:
                others.append(p)
                self._pop_decoded(p)
        self.barrier.wait()
        ours = [self._gather(group) for group in groups.values()]
        if kept:
            ours.append(self._gather_in_node(kept))
        if not others:
            return _FetchHandle(ours)
        theirs = original(others, *args, **kwargs)
        return _FetchHandle(ours, theirs) if ours else theirs

    def _is_sent(self, parameter: Any) -> bool:
        communicator = self._plugin.communicator(parameter.ds_process_group)
        return sharded_params.is_sendable(parameter) and communicator.size > 1

    def _gather(self, params: list[Param]) -> _Gather:
        tensors = [param.tensor for param in params]
        hierarchy = self._plugin.hierarchy(tensors[0].ds_process_group)
        sharded_params.begin_fetch(tensors)
        step = self._plugin.step
        exact = self._plugin.is_full_precision(step)
        bound_codecs = [self._coding(param, hierarchy.rank, step, exact) for param in params]
        order = small_last([c.codec for c in bound_codecs])
        params, bound_codecs = [params[i] for i in order], [bound_codecs[i] for i in order]
        tensors = [tensors[i] for i in order]
        shards = sharded_params.valid_shards(tensors, hierarchy.rank)
        pending = all_gather(shards, [p.ds_numel for p in tensors], bound_codecs, hierarchy)
        return params, [not isinstance(c.codec, CastCodec) for c in bound_codecs], pending

    def _gather_in_node(self, params: list[Param]) -> _Gather:
        sharded_params.begin_fetch([param.tensor for param in params])
        pending, lossy = self._plugin.node_shard.gather(params)
        return params, lossy, pending

    def _coding(self, param: Param, rank: int, step: int, exact: bool) -> BoundCodec:
        dtype, bound_codec = param.tensor.ds_tensor.dtype, None
        if not (exact or param.tensor.ds_persist):  # stays gathered between steps: exact
            # The node shard serves all that the whole world shares.
            stream, *_ = param.weight_codecs(
                dtype, rank=rank, full_world=self._plugin.node_shard is None
            )
            bound_codec = None if stream is None else param.bound_codec(stream, dtype, step)
        return bound_codec or full_precision(dtype, tight=param.tensor.ds_numel <= SMALL_NUMEL)

    def gather_exactly(
        self,
        parameter: Any,
        original: Callable[..., Any],
        param_list: Sequence[Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Replace ``all_gather``. See [Note: two gathers]."""
        if param_list is None and sharded_params.take_borrowed(parameter):
            if sharded_params.is_unavailable(parameter):
                parameter.all_gather_coalesced([parameter]).wait()
            return None
        for p in [parameter] if param_list is None else param_list:
            if sharded_params.is_available(p) and self._pop_decoded(p):
                sharded_params.drop_values(p)
        if param_list is not None and not (args or kwargs) and hooks.awaits_last_gather_only():
            for p in param_list:
                original([p])
            return None
        return original(param_list, *args, **kwargs)


class _FetchHandle:
    """DeepSpeed's gather handle, for our gathers and what it gathers itself.

    ``wait`` is called once per parameter, and DeepSpeed keeps the handle until the last one is
    used: so it keeps no values.
    """

    def __init__(self, ours: list[_Gather], theirs: Any = None) -> None:
        self._ours, self._theirs = ours, theirs

    def wait(self, **kwargs: Any) -> None:
        while self._ours:
            params, lossy, pending = self._ours[0]
            sharded_params.fill([param.tensor for param in params], pending.wait())
            for param, is_lossy in zip(params, lossy, strict=True):
                param.decoded = is_lossy
            del self._ours[0]
        if self._theirs is not None:
            self._theirs.wait(**kwargs)


# ---- how often ----


_RECORDING = 2  # micro-steps, see [Note: what is counted]
_CLOSE = 0.03  # a relative error that is not logged


def predicted_gathers(engine: Any) -> float:
    """Predict gathers of an element per micro-step by the rule of ``policy.model``."""
    settings = FetchSettings(
        max_reuse_distance=engine.zero_max_reuse_distance(),
        max_live_parameters=engine.zero_max_live_parameters(),
        prefetch_bucket_size=engine.zero_prefetch_bucket_size(),
    )
    numel, _ = sharded_params.elements(engine.module)
    return settings.gathers(numel, gathered_modules(engine.module))


def gathered_modules(module: torch.nn.Module) -> int:
    """Count the modules whose own parameters ZeRO-3 gathers, each by itself."""
    whole = sharded_params.is_gathered_whole(module)
    own = any(not getattr(p, "ds_persist", True) for p in module.parameters(recurse=whole))
    return own + (0 if whole else sum(map(gathered_modules, module.children())))


class GatherCount:
    """Count fetched elements until an optimizer step in a steady state gives the number.

    line: makes the start-up line, which is logged again if the number was predicted wrongly.
    """

    def __init__(self, plugin: Plugin, line: Callable[[], str]) -> None:
        self._plugin, self._line = plugin, line
        module = plugin.engine.module
        self._numel, _ = sharded_params.elements(module)
        self._persistent = sum(p.ds_numel for p in module.parameters() if p.ds_persist)
        self._fetched = 0
        self._undisturbed = 0  # micro-steps before this optimizer step
        self._disturbed = False

    def fetched(self, params: Iterable[Any]) -> None:
        """Count parameters that DeepSpeed gathers for forward or backward."""
        self._fetched += sum(p.ds_numel for p in params if not p.ds_persist)
        self._disturbed |= not self._plugin.engine.module.training

    def after_step(self) -> None:
        """End an optimizer step: take its count if DeepSpeed was in a steady state."""
        plugin, micro_steps = self._plugin, self._plugin.engine.gradient_accumulation_steps()
        if self._disturbed or self._undisturbed < _RECORDING:
            self._undisturbed = 0 if self._disturbed else self._undisturbed + micro_steps
            self._fetched, self._disturbed = 0, False
            return
        counted = (self._fetched + self._persistent) / micro_steps / max(1, self._numel)
        predicted, plugin.gathers, plugin.gather_count = plugin.gathers, counted, None
        plugin.hooks.after_count.remove(self.after_step)
        if abs(counted - predicted) > _CLOSE * predicted:
            log.log_rank0(
                f"quantized_comm: weights are fetched {counted:.3g} times per micro-batch, not "
                f"{predicted:.3g} as predicted; corrected start-up line: {self._line()}"
            )
