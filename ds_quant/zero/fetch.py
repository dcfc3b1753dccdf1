"""ZeRO-3 parameter fetch: encoded shards in, decoded parameters out.

[Note: two gathers] DeepSpeed fetches for computation through ``all_gather_coalesced`` and gathers
everything that must be exact (GatheredParameters, checkpoints, persistent parameters) through
``all_gather``. Only the first is quantized. A parameter can stay gathered with decoded values
after an evaluation, so the second drops such values and fetches exactly; else GatheredParameters
with a modifier rank would write decoded weights into the master shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ds_quant.codec import CastCodec
from ds_quant.collectives import Coding, GatherHandle, all_gather
from ds_quant.link import Link
from ds_quant.rng import Role
from ds_quant.zero import parameters, seams
from ds_quant.zero.binding import Binding

_TRAVELS = (torch.float32, torch.bfloat16, torch.float16)


class Fetch:
    """Serves the parameter fetches of one engine."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._decoded: set[int] = set()  # ds_id of parameters whose last gather was quantized
        self._barrier = parameters.StepBarrier()
        self._parameters: list[torch.Tensor] = []

    def attach(self, params: Iterable[torch.Tensor]) -> None:
        """Wrap every parameter: which one DeepSpeed calls differs from rank to rank."""
        self._parameters = list(params)
        for parameter in self._parameters:
            seams.wrap_fetch(parameter, self.fetch, self.gather_exactly)

    def after_step(self) -> None:
        """The optimizer has written new shards (DeepSpeed counts the step only after it)."""
        self._binding.learn_levels(self._binding.step + 1, self._own_values())
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
        params = sorted(params, key=lambda p: p.ds_id)  # the caller's order comes from a set
        groups: dict[int, list[Any]] = {}
        others = []
        for p in params:
            if self._is_ours(p):
                groups.setdefault(id(p.ds_process_group), []).append(p)
            else:
                others.append(p)
        self._barrier.wait()
        handles: list[Any] = [self._gather(group) for group in groups.values()]
        if others:
            self._decoded.difference_update(p.ds_id for p in others)
            handles.append(original(others, *args, **kwargs))
        return handles[0] if len(handles) == 1 else _JointHandle(handles)

    def _is_ours(self, parameter: Any) -> bool:
        return (
            self._binding.tracked(parameter) is not None
            and parameter.ds_tensor.dtype in _TRAVELS
            and self._binding.link(parameter.ds_process_group).size > 1
        )

    def _gather(self, params: list[Any]) -> _FetchHandle:
        link = self._binding.link(params[0].ds_process_group)
        shards, codings = [], []
        for p in params:
            if not parameters.is_unavailable(p):
                raise RuntimeError(
                    f"fetch of a parameter that is not partitioned: {p.ds_summary()}"
                )
            parameters.set_inflight(p)
            shards.append(parameters.valid_shard(p, link.rank))
            codings.append(self._coding(p, link.rank))
        device = parameters.device()
        shards = [s.to(device, non_blocking=True) for s in shards]
        handle = all_gather(shards, [p.ds_numel for p in params], codings, link)
        return _FetchHandle(params, handle, codings, self._decoded)

    def _coding(self, parameter: Any, rank: int) -> Coding:
        dtype = parameter.ds_tensor.dtype
        if parameter.ds_persist:  # stays gathered between steps and is refreshed exactly
            return Coding(codec=CastCodec(dtype))
        tracked = self._binding.tracked(parameter)
        return self._binding.coding(
            Role.WEIGHTS, tracked, dtype, step=self._binding.step, rank=rank
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
        for p in [parameter] if param_list is None else param_list:
            if p.ds_id in self._decoded and parameters.is_available(p):
                parameters.forget_values(p)
                self._decoded.discard(p.ds_id)
        return original(param_list, *args, **kwargs)


class _FetchHandle:
    """DeepSpeed's gather handle: ``wait`` is called once per parameter and must be idempotent."""

    def __init__(
        self, params: list[Any], gather: GatherHandle, codings: list[Coding], decoded: set[int]
    ) -> None:
        self._params, self._gather, self._codings = params, gather, codings
        self._decoded = decoded
        self._complete = False

    def wait(self, **_: Any) -> None:
        if self._complete:
            return
        for p, values, coding in zip(self._params, self._gather.wait(), self._codings, strict=True):
            parameters.fill(p, values)
            if isinstance(coding.codec, CastCodec):
                self._decoded.discard(p.ds_id)
            else:
                self._decoded.add(p.ds_id)
        self._complete = True


class _JointHandle:
    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def wait(self, **kwargs: Any) -> None:
        for handle in self._handles:
            handle.wait(**kwargs)
