"""Muon: what DeepSpeed sends for it by itself, because it needs whole matrices.

Like hooks.py it names DeepSpeed's internals.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ds_quant.policy import refusals
from ds_quant.zero.hooks import ExpectedCall, Hooks, as_event
from ds_quant.zero.plugin import Plugin
from ds_quant.zero.version import deepspeed_version, is_older

# Where it runs once per optimizer step, on what the ranks own: gradients of ZeRO-3 from 0.19.8 on,
# and of offloaded optimizers.
_AT_THE_BOUNDARY = "_apply_muon_to_accumulated_grads", "_apply_muon_updates_cpu_offload"
_gathers = ExpectedCall("all_gather"), ExpectedCall("all_gather_into_tensor")


def exact_gradient_reason(engine: Any) -> str | None:
    """Return the setting that keeps gradients on DeepSpeed's own exact path, if there is one.

    With Muon, ZeRO-3 insists on ``reduce_scatter: false``, which from 0.19.8 on Muon does not need:
    it runs once per step, on accumulated partitions.
    """
    zero = engine._config.zero_config
    reason = refusals.exact_gradient_reason(int(zero.stage), partial(getattr, zero))
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
    """Whether it is DeepSpeed's Muon, told by its name: importing it takes seconds."""
    return any(kind.__name__ == "MuonWithAuxAdam" for kind in type(optimizer).__mro__)


def reduce_scatter(hooks: Hooks) -> None:
    """ZeRO-3: let buckets take the way on which ``wrap_shard_reduction`` is."""
    optimizer = hooks.optimizer
    if not optimizer.reduce_scatter:
        optimizer.reduce_scatter = True
        hooks.on_destroy.append(partial(setattr, optimizer, "reduce_scatter", False))


def boundary_itemsize(optimizer: Any, stage: int) -> int:
    """Bytes per element that Muon gathers itself, once per optimizer step: gradients and momentum,
    and under ZeRO-3 both again after its update. The first step of an offloaded one takes less.
    """
    if not is_muon(optimizer.optimizer) or not any(hasattr(optimizer, n) for n in _AT_THE_BOUNDARY):
        return 0
    offloaded = getattr(optimizer, "cpu_offload" if stage < 3 else "offload_optimizer")
    if stage < 3:
        return 2 * torch.float32.itemsize if offloaded else 0
    if offloaded:
        return 2 * optimizer.gradient_accumulation_dtype.itemsize
    return 4 * optimizer.communication_data_type.itemsize


def _count_gathers(plugin: Plugin) -> None:
    """Count every gather that Muon runs at the boundary."""
    from deepspeed import comm

    def counted(gather: Callable[..., Any], into: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [into] if isinstance(into, torch.Tensor) else into
        nbytes = sum(t.numel() * t.element_size() for t in tensors)  # from all ranks together
        plugin.link(kwargs.get("group")).count_ring(nbytes, role="gradients")
        return gather(into, *args, **kwargs)

    contexts = []
    for call in _gathers:
        call.install(comm)
        gather = getattr(comm, call.name).ds_quant_wraps
        contexts.append(partial(call.through, partial(counted, gather), lambda: True))
    optimizer = plugin.hooks.optimizer
    for name in _AT_THE_BOUNDARY:
        if hasattr(optimizer, name):
            plugin.hooks.wrap(optimizer, name, as_event(contexts))


def attach(plugin: Plugin, optimizer: Any) -> None:
    """Count what an optimizer step of Muon gathers: exact gradients and its momentum."""
    itemsize = boundary_itemsize(optimizer, plugin.stage)
    if not itemsize:
        return
    _count_gathers(plugin)
    matrices = [p for p in plugin.all_params() if getattr(p.tensor, "use_muon", False)]
    for param in matrices:
        param.boundary = itemsize
    share = sum(p.shape.numel() for p in matrices) / plugin.bill().numel
    plugin.notices.append(
        f"Muon gathers gradients and momentum itself, exactly: {itemsize * share:.2f} B/param/step"
    )


def note_whole_matrices(plugin: Plugin, optimizer: Any) -> None:
    """Leave gradients to DeepSpeed of which several ranks need all, under ZeRO-1 and 2: of Muon's
    matrices that are split over them. Before 0.19.3 DeepSpeed sums a rank's part of such a matrix
    for it, and Muon takes that and the rank's own gradient of the rest for the whole.
    """
    if not is_muon(optimizer.optimizer) or is_older("0.19.3"):
        return
    whole, owners = [], optimizer.param_to_partition_ids
    for i, group in enumerate(optimizer.bit16_groups):
        for p in group:
            if getattr(p, "use_muon", False) and len(owners[i][optimizer.get_param_id(p)]) > 1:
                whole.append(plugin.param_of(p))
    for param in whole:
        param.whole = True
    if whole:
        trained = sum(p.shape.numel() for p in plugin.all_params() if p.trained)
        share = sum(p.shape.numel() for p in whole) / trained
        plugin.notices.append(
            f"gradients of Muon matrices that lie on several ranks ({len(whole)}, "
            f"{100 * share:.1f} % of the elements) stay exact: Muon needs them whole"
        )
