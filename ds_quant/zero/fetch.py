"""ZeRO-3 parameter fetch: encoded shards in, decoded parameters out.

[Note: two gathers] DeepSpeed fetches for computation through ``all_gather_coalesced`` and gathers
everything that must be exact (GatheredParameters, checkpoints, persistent parameters) through
``all_gather``. Only the first is quantized. A parameter can stay gathered with decoded values
after an evaluation, so the second drops such values and fetches exactly; else GatheredParameters
with a modifier rank would write decoded weights into the master shards. A parameter that a module
borrows from another one comes through the second in the first forward of a run, though it is
computed with: it is sent to the first, so that this forward equals later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ds_quant.bundle import sort_out
from ds_quant.codec import CastCodec
from ds_quant.coding import Coding
from ds_quant.collectives import all_gather
from ds_quant.link import Link
from ds_quant.zero import parameters, seams
from ds_quant.zero.binding import Binding
from ds_quant.zero.node import NodeShard


class Fetch:
    """Serves the parameter fetches of one engine."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._decoded: set[int] = set()  # ds_id of parameters whose last gather was quantized
        self._barrier = parameters.StepBarrier()
        self._parameters: list[torch.Tensor] = []
        self._met: dict[int, Any] = {}  # wrapped parameters by ds_id
        self._is_closed = False  # then hooks that nobody has removed may still call
        self.node: NodeShard | None = None

    def attach(self, params: Iterable[torch.Tensor], optimizer: Any) -> None:
        """Serve the parameters of a module, and what is fetched together with them."""
        self._parameters = list(params)
        for before in dict.fromkeys(parameters.owner_of(p) for p in self._parameters):
            if before is not None and before.serves_only(self._parameters):
                before.close()  # an engine on the same module that nobody has destroyed
        self.meet(self._parameters)
        seams.before_fetch(optimizer, self.meet)
        seams.note_borrowed()

    def meet(self, params: Iterable[Any]) -> None:
        """Wrap every parameter, also those that were made later and that nobody quantizes: which
        one of a fetch DeepSpeed calls, the first of a set, differs from rank to rank.
        """
        for p in params:
            if p.ds_id not in self._met and not self._is_closed:
                self._met[p.ds_id] = p
                parameters.wrap_fetch(p, self.fetch, self.gather_exactly, owner=self)

    def keep_in_node(self) -> NodeShard:
        """From now on gathers come from a node shard."""
        self.node = NodeShard(self._binding, self._parameters, self._barrier)
        for parameter in self._parameters:
            parameters.wrap_partition(parameter, self.node.mark_stale, owner=self)
        return self.node

    def serves_only(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether all parameters of its module are among these."""
        return {p.ds_id for p in self._parameters} <= {p.ds_id for p in params}

    def close(self) -> None:
        """The engine is destroyed: its parameters are DeepSpeed's alone, and none is decoded."""
        self._is_closed = True
        if self.node is not None:
            self.node.close()
        for p in self._met.values():
            parameters.unwrap(p, owner=self)
            if p.ds_id in self._decoded and parameters.is_available(p):
                p.partition()
        self._met.clear()
        self._decoded.clear()
        self._parameters = []

    def after_step(self) -> None:
        """The optimizer has written new shards (DeepSpeed counts the step only after it)."""
        self._binding.learn_levels(self._binding.step + 1, self._own_values())
        if self.node is not None:
            self.node.after_step()
        self._barrier.record()

    def _own_values(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, Link]]:
        """(parameter, this rank's shard, link) of every parameter."""
        for p in self._parameters:
            link = self._binding.link(p.ds_process_group)
            yield p, parameters.valid_shard(p, link.rank).to(parameters.device()), link

    def fetch(
        self, original: Callable[..., Any], params: Iterable[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Replaces ``all_gather_coalesced``: posts one gather per process group.

        Parameters that this engine does not know (created later) or that hold no floats go to
        DeepSpeed. The split and the order depend on rank-invariant facts only.
        """
        self._binding.asked.add("weights")
        params = sorted(params, key=lambda p: p.ds_id)  # the caller's order comes from a set
        if self._binding.gather_count is not None:
            self._binding.gather_count.fetched(params)
        groups: dict[int, list[Any]] = {}
        kept, others = [], []
        for p in params:
            if self.node is not None and self.node.serves(p):
                kept.append(p)
            elif self._is_ours(p):
                groups.setdefault(id(p.ds_process_group), []).append(p)
            else:
                others.append(p)
        self._barrier.wait()
        handles: list[Any] = [self._gather(group) for group in groups.values()]
        if kept:
            handles.append(self._gather_in_node(kept))
        if others:
            self._decoded.difference_update(p.ds_id for p in others)
            handles.append(original(others, *args, **kwargs))
        return handles[0] if len(handles) == 1 else _JointHandle(handles)

    def _is_ours(self, parameter: Any) -> bool:
        return (
            self._binding.tracked(parameter) is not None
            and parameters.travels(parameter)
            and self._binding.link(parameter.ds_process_group).size > 1
        )

    def _gather(self, params: list[Any]) -> _FetchHandle:
        fabric = self._binding.fabric(params[0].ds_process_group)
        for p in params:
            _begin(p)
        codings = [self._coding(p, fabric.rank) for p in params]
        lossy = [not isinstance(c.codec, CastCodec) for c in codings]
        alone, bundles = sort_out([p.ds_numel for p in params], codings, fabric.size)
        shards = [parameters.valid_shard(params[i], fabric.rank) for i in alone]
        shards += [torch.cat([params[i].ds_tensor.data for i in members]) for _, members in bundles]
        device = parameters.device()
        handle = all_gather(
            [s.to(device, non_blocking=True) for s in shards],
            [params[i].ds_numel for i in alone] + [bundle.numel for bundle, _ in bundles],
            [codings[i] for i in (*alone, *(members[0] for _, members in bundles))],
            fabric,
        )

        def gathered() -> list[torch.Tensor]:
            tensors = handle.wait()
            values = tensors[: len(alone)]
            for (bundle, _), packed in zip(bundles, tensors[len(alone) :], strict=True):
                values += bundle.unpack(packed)
            return values

        order = [*alone, *(i for _, members in bundles for i in members)]
        params, lossy = [params[i] for i in order], [lossy[i] for i in order]
        return _FetchHandle(params, gathered, lossy, self._decoded)

    def _gather_in_node(self, params: list[Any]) -> _FetchHandle:
        for p in params:
            _begin(p)
        wait, lossy = self.node.gather(params)
        return _FetchHandle(params, wait, lossy, self._decoded)

    def _coding(self, parameter: Any, rank: int) -> Coding:
        dtype = parameter.ds_tensor.dtype
        if parameter.ds_persist:  # stays gathered between steps and is refreshed exactly
            return Coding(codec=CastCodec(dtype))
        tracked = self._binding.tracked(parameter)
        # What a node shard does not serve is gathered as it would be inside a node.
        return self._binding.weight_coding(
            tracked,
            dtype,
            step=self._binding.step,
            rank=rank,
            intra=self._binding.scheme.node_shard,
        )

    def gather_exactly(
        self,
        original: Callable[..., Any],
        parameter: Any,
        param_list: Sequence[Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Replaces ``all_gather``. See [Note: two gathers]."""
        if param_list is None and parameters.take_borrowed(parameter):
            if parameters.is_unavailable(parameter):
                parameter.all_gather_coalesced([parameter]).wait()
            return None
        for p in [parameter] if param_list is None else param_list:
            if p.ds_id in self._decoded and parameters.is_available(p):
                parameters.forget_values(p)
                self._decoded.discard(p.ds_id)
        return original(param_list, *args, **kwargs)


def _begin(parameter: Any) -> None:
    """Checks DeepSpeed's contract and marks the parameter as on its way."""
    if not parameters.is_unavailable(parameter):
        raise RuntimeError(
            f"fetch of a parameter that is not partitioned: {parameter.ds_summary()}"
        )
    parameters.set_inflight(parameter)


class _FetchHandle:
    """DeepSpeed's gather handle: ``wait`` is called once per parameter and must be idempotent."""

    def __init__(
        self,
        params: list[Any],
        gathered: Callable[[], list[torch.Tensor]],
        lossy: list[bool],
        decoded: set[int],
    ) -> None:
        self._params, self._lossy, self._decoded = params, lossy, decoded
        self._gathered: Callable[[], list[torch.Tensor]] | None = gathered

    def wait(self, **_: Any) -> None:
        if self._gathered is None:
            return
        for p, values, lossy in zip(self._params, self._gathered(), self._lossy, strict=True):
            parameters.fill(p, values)
            if lossy:
                self._decoded.add(p.ds_id)
            else:
                self._decoded.discard(p.ds_id)
        # It holds the values of all parameters, while DeepSpeed, which keeps this handle until the
        # last one is used, releases them one by one.
        self._gathered = None


class _JointHandle:
    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def wait(self, **kwargs: Any) -> None:
        for handle in self._handles:
            handle.wait(**kwargs)
