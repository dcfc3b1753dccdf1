"""Muon: price and count the messages that DeepSpeed itself sends for Muon's whole matrices.

Names DeepSpeed's internals, as hooks.py does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ds_quant.kernels.wire import FP32_BYTES, ceil_div
from ds_quant.policy import refusals
from ds_quant.runtime.param import Param
from ds_quant.runtime.run import Run
from ds_quant.zero.deepspeed_types import Engine, OwnerOptimizer
from ds_quant.zero.hooks import Context, ExpectedCall, Hooks, as_event
from ds_quant.zero.version import deepspeed_version, is_older

# Methods that run Muon once per optimizer step, on the shards of a rank: ZeRO-3 from 0.19.8 on, and
# offloaded optimizers.
_AT_THE_BOUNDARY = "_apply_muon_to_accumulated_grads", "_apply_muon_updates_cpu_offload"
_gathers = ExpectedCall("all_gather"), ExpectedCall("all_gather_into_tensor")


def stock_gradients_reason(engine: Engine) -> str | None:
    """Return the setting that keeps gradients on DeepSpeed's own exact path, if there is one.

    With Muon, ZeRO-3 requires ``reduce_scatter: false``. From 0.19.8 on Muon does not need it,
    because it runs once per step, on accumulated shards.
    """
    zero = engine._config.zero_config
    reason = refusals.stock_gradients_reason(int(zero.stage), partial(getattr, zero))
    if reason is None or zero.stage < 3 or not is_muon(engine.basic_optimizer):
        return reason
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Optimizer

    if not hasattr(Optimizer, "_apply_muon_to_accumulated_grads"):
        return (
            f"Muon of {deepspeed_version()} runs on every bucket and needs it whole; DeepSpeed "
            "0.19.8 runs it once per step"
        )
    plain = engine.gradient_predivide_factor() == 1 and engine.postscale_gradients()
    return None if plain and engine.sequence_parallel_size == 1 else reason


def is_muon(optimizer: Any) -> bool:
    """Return True for DeepSpeed's Muon, by its name: importing it takes seconds."""
    return any(kind.__name__ == "MuonWithAuxAdam" for kind in type(optimizer).__mro__)


def set_reduce_scatter(hooks: Hooks) -> None:
    """ZeRO-3: set ``reduce_scatter``, so that buckets reach ``wrap_shard_reduction``."""
    optimizer = hooks.optimizer
    if not optimizer.reduce_scatter:
        optimizer.reduce_scatter = True
        hooks.on_destroy.append(partial(setattr, optimizer, "reduce_scatter", False))


def runs_per_step(optimizer: Any) -> bool:
    """Return True if it is Muon and runs once per optimizer step, on the shards of a rank."""
    if not is_muon(optimizer.optimizer):
        return False
    return any(hasattr(optimizer, name) for name in _AT_THE_BOUNDARY)


class MatrixGroup(NamedTuple):
    """The matrices of a sub-group of ZeRO-3, which Muon updates together.

    numels: elements of every matrix, in order.
    ranks: number of ranks that share the matrices.
    """

    numels: tuple[int, ...]
    ranks: int

    @property
    def full_round(self) -> int:
        """Elements of a bucket with one of the largest matrices for every rank."""
        return self.ranks * max(self.numels)

    def gathered(self, bucket_size: int) -> list[float]:
        """Return the elements that DeepSpeed gathers for every matrix in an optimizer step.

        A bucket of at most ``bucket_size`` elements, or of one matrix, gathers gradients and
        momentum. Rounds of one matrix per rank then update it. A round gathers updates and
        momentum, and pads all rows to its largest one, also those of ranks without a matrix. Its
        matrices share its elements by their sizes.
        """
        counts: list[float] = []
        for bucket in self._buckets(bucket_size):
            for start in range(0, len(bucket), self.ranks):
                matrices = bucket[start : start + self.ranks]
                gathered_per_element = self.ranks * max(matrices) / max(1, sum(matrices))
                for numel in matrices:
                    in_shards = self.ranks * ceil_div(numel, self.ranks)
                    counts.append(2 * in_shards + 2 * gathered_per_element * numel)
        return counts

    def _buckets(self, bucket_size: int) -> list[list[int]]:
        buckets: list[list[int]] = []
        room = 0
        for numel in self.numels:
            if not buckets or numel > room:
                buckets.append([])
                room = bucket_size
            buckets[-1].append(numel)
            room -= numel
        return buckets


def _sub_groups(run: Run, optimizer: Any) -> list[tuple[list[Any], MatrixGroup]]:
    """Return the parameters of every sub-group of ZeRO-3 that Muon updates in rounds."""
    if run.routes.stage < 3 or not runs_per_step(optimizer) or optimizer.offload_optimizer:
        return []
    groups: list[tuple[list[Any], MatrixGroup]] = []
    for params, uses_muon in zip(
        optimizer.fp16_groups, optimizer.sub_groups_using_muon, strict=True
    ):
        if uses_muon and params:
            numels = tuple([p.ds_numel for p in params])
            ranks = run.communicator(params[0].ds_process_group).size
            groups.append((params, MatrixGroup(numels, ranks)))
    return groups


def full_round(run: Run, optimizer: Any) -> int:
    """Return the least ``reduce_bucket_size`` that gives every rank a matrix; 0 without rounds.

    In a smaller bucket DeepSpeed gathers padding in place of the missing matrices.
    """
    rounds = [group.full_round for _, group in _sub_groups(run, optimizer)]
    return max(rounds, default=0)


def _gathered_bytes(run: Run, optimizer: Any, bucket_size: int) -> dict[Param, float]:
    """Return the bytes per element that Muon gathers once per optimizer step, by parameter.

    An offloaded optimizer gathers less in the first step.
    """
    if not runs_per_step(optimizer):
        return {}
    matrices = [p for p in run.params if getattr(p.tensor, "use_muon", False)]
    if run.routes.stage < 3:
        return dict.fromkeys(matrices, 2.0 * FP32_BYTES) if optimizer.cpu_offload else {}
    if optimizer.offload_optimizer:
        return dict.fromkeys(matrices, 2.0 * optimizer.gradient_accumulation_dtype.itemsize)
    itemsize = optimizer.communication_data_type.itemsize
    gathered: dict[Param, float] = {}
    for params, group in _sub_groups(run, optimizer):
        for parameter, elements in zip(params, group.gathered(bucket_size), strict=True):
            param = run.param_of(parameter)
            if param is not None and parameter.ds_numel:
                gathered[param] = itemsize * elements / parameter.ds_numel
    return gathered


def _count_gathers(run: Run, events: Hooks) -> None:
    """Count every gather that Muon runs at the end of an accumulation."""
    from deepspeed import comm

    def counted(gather: Callable[..., Any], output: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [output] if isinstance(output, torch.Tensor) else output
        nbytes = sum(t.numel() * t.element_size() for t in tensors)  # from all ranks together
        run.communicator(kwargs.get("group")).count_ring(nbytes, role="gradients")
        return gather(output, *args, **kwargs)

    contexts: list[Context] = []
    for call in _gathers:
        call.install(comm)
        gather = getattr(comm, call.name).ds_quant_wraps
        contexts.append(partial(call.through, partial(counted, gather), lambda: True))
    optimizer = events.optimizer
    for name in _AT_THE_BOUNDARY:
        if hasattr(optimizer, name):
            events.wrap(optimizer, name, as_event(contexts))


def _price(run: Run, gathered: dict[Param, float]) -> float:
    """Return bytes per parameter of the model, from bytes per element of Muon's matrices."""
    total = sum(nbytes * param.shape.numel() for param, nbytes in gathered.items())
    return total / run.comm_volume().numel


def attach(run: Run, engine: Engine, events: Hooks) -> None:
    """Price and count the gathers of an optimizer step of Muon: exact gradients and momentum."""
    optimizer = events.optimizer
    bucket_size = int(engine.zero_reduce_bucket_size())
    gathered = _gathered_bytes(run, optimizer, bucket_size)
    if not gathered:
        return
    _count_gathers(run, events)
    for param, nbytes in gathered.items():
        param.boundary = nbytes
    price = _price(run, gathered)
    notice = f"Muon gathers gradients and momentum itself, exactly: volume {price:.2f} B/param/step"
    enough = full_round(run, optimizer)
    if bucket_size < enough:
        best = _price(run, _gathered_bytes(run, optimizer, enough))
        if best < price:
            notice += f" ({best:.2f} with reduce_bucket_size={enough})"
    run.notices.append(notice)


def note_whole_matrices(run: Run, optimizer: OwnerOptimizer) -> None:
    """ZeRO-1/2: leave Muon matrices that span partitions to DeepSpeed's all-reduce.

    Muon needs their whole gradient on several ranks. Before 0.19.3 DeepSpeed sums only a rank's
    part of such a matrix, and Muon takes the rank's own gradient for the rest.
    """
    if not is_muon(optimizer.optimizer) or is_older("0.19.3"):
        return
    owners = optimizer.param_to_partition_ids
    split: list[Param] = []
    for index, group in enumerate(optimizer.bit16_groups):
        for p in group:
            param = run.param_of(p)
            if param is None or not getattr(p, "use_muon", False):
                continue
            if len(owners[index][optimizer.get_param_id(p)]) > 1:
                param.needs_full_gradient = True
                split.append(param)
    if split:
        trained = sum(param.shape.numel() for param in run.params if param.trained)
        share = sum(param.shape.numel() for param in split) / trained
        run.notices.append(
            f"gradients of Muon matrices that lie on several ranks ({len(split)}, "
            f"{100 * share:.1f} % of the elements) stay exact: Muon needs them whole"
        )
