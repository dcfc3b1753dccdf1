"""Every contact with DeepSpeed's private names, so that an upstream change breaks one module.

[Note: where the plugin enters] Three methods are wrapped once, when the engine module is imported:
the config parser reads the block, and the two places that build a ZeRO optimizer attach to it.
Everything else is set per engine, on instances. Two functions that the optimizers call by module
name (gradient reduce-scatter of ZeRO-3, weight gather of ZeRO-1/2) become *routes*: inert unless
the calling optimizer opened them, on this thread, for the length of one call.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_AVG_SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
_REDUCE_TO_OWNERS = "allreduce_and_copy_with_multiple_ranks"


def install() -> None:
    """Wrap the config parser and the optimizer factories. Idempotent; starts no CUDA."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    from ds_quant import config
    from ds_quant.zero import guard
    from ds_quant.zero.attach import attach

    def read_block(original: Callable[..., Any], self: Any, param_dict: dict) -> None:
        self.quantized_comm = config.parse(param_dict)
        original(self, param_dict)
        if self.quantized_comm is not None:
            config.require_zero(self.zero_config.stage)
            guard.refuse_unsupported(facts(self))  # before DeepSpeed builds what it refuses

    def attach_zero(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = original(self, *args, **kwargs)
        attach(self, optimizer)
        return optimizer

    def refuse_bf16_optimizer(
        original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
    ) -> Any:
        attach(self, None)
        return original(self, *args, **kwargs)

    _wrap(DeepSpeedConfig, "_initialize_params", read_block)
    _wrap(DeepSpeedEngine, "_configure_zero_optimizer", attach_zero)
    _wrap(DeepSpeedEngine, "_configure_bf16_optimizer", refuse_bf16_optimizer)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``around(original, ...)``, once; a class or an instance."""
    original = getattr(owner, name)
    if getattr(original, "ds_quant_wraps", None) is not None:
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapper.ds_quant_wraps = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


class _Route(threading.local):
    """A module-level function of DeepSpeed that goes elsewhere while ``through`` is open."""

    target: Callable[..., Any] | None = None

    def install(self, module: Any, name: str) -> None:
        def dispatch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return (self.target or original)(*args, **kwargs)

        _wrap(module, name, dispatch)

    @contextmanager
    def through(self, target: Callable[..., Any] | None) -> Iterator[None]:
        previous, self.target = self.target, target
        try:
            yield
        finally:
            self.target = previous


_shard_reduction = _Route()
_weight_gather = _Route()


def facts(config: Any, *, bf16_optimizer: bool = False) -> dict[str, Any]:
    """Settings of a DeepSpeedConfig that decide whether the plugin can work; equal on all ranks."""
    zero = config.zero_config
    compile_config = getattr(config, "compile_config", None)
    offload_param, offload_optimizer = zero.offload_param, zero.offload_optimizer
    flags = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
    flags = (*flags, "zero_quantized_gradients")
    zeropp = [f"{flag}=true" for flag in flags if getattr(zero, flag, False)]
    if zero.zero_hpz_partition_size > 1:
        zeropp.append(f"zero_hpz_partition_size={zero.zero_hpz_partition_size}")
    return {
        "stage": int(zero.stage),
        "bf16_optimizer": bf16_optimizer,
        "deepcompile": bool(getattr(compile_config, "deepcompile", False)),
        "zeropp": zeropp,
        "mics": getattr(zero, "mics_shard_size", -1) > 0,
        "nvme_params": offload_param is not None and offload_param.device == "nvme",
        "zenflow": getattr(zero, "zenflow", None) is not None,
        "super_offload": bool(getattr(offload_optimizer, "super_offload", False)),
    }


def exact_gradient_reason(engine: Any) -> str | None:
    """The setting that keeps gradients on DeepSpeed's own exact path, if there is one."""
    zero = engine._config.zero_config
    names = ["reduce_scatter"]
    if zero.stage < 3:
        names += ["contiguous_gradients", "use_multi_rank_bucket_allreduce"]
    off = [name for name in names if not getattr(zero, name)]
    return f"zero_optimization.{off[0]} is false" if off else None


# ---- parameters of ZeRO-3 ----


def wrap_fetch(
    parameter: torch.Tensor, fetch: Callable[..., Any], gather_exactly: Callable[..., Any]
) -> None:
    """``fetch(original, params, ...)`` serves forward and backward; ``gather_exactly(original,
    param, param_list, ...)`` everything that must see exact weights.
    """
    parameter.all_gather_coalesced = functools.partial(fetch, parameter.all_gather_coalesced)
    parameter.all_gather = functools.partial(gather_exactly, parameter.all_gather, parameter)


# ---- gradients ----


def wrap_shard_reduction(optimizer: Any, reduce: Callable[..., Any]) -> None:
    """ZeRO-3: ``reduce(original, params, tensors, group)`` replaces the reduce-scatter."""
    from deepspeed.runtime.zero import stage3

    _shard_reduction.install(stage3, "reduce_scatter_coalesced")
    original = stage3.reduce_scatter_coalesced.ds_quant_wraps

    def around(avg_scatter: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Any:
        with _shard_reduction.through(functools.partial(reduce, original, params)):
            return avg_scatter(params, *args, **kwargs)

    _require(optimizer, _AVG_SCATTER)
    _wrap(optimizer, _AVG_SCATTER, around)


def wrap_owner_reduction(
    optimizer: Any, begin: Callable[..., None], reduce: Callable[..., Any]
) -> None:
    """ZeRO-1/2: ``begin(tensor, params)`` sees each bucket before it is cut into slices by owner,
    ``reduce(original, call)`` replaces the reduction of slices, with the call's bound arguments.
    """
    _require(optimizer, "average_tensor")
    _require(optimizer, _REDUCE_TO_OWNERS)
    signature = inspect.signature(getattr(optimizer, _REDUCE_TO_OWNERS))

    def bucket(original: Callable[..., Any], tensor: torch.Tensor, dtype: Any, **kw: Any) -> Any:
        groups = optimizer.bit16_groups
        begin(tensor, [groups[i][k] for i, k, _ in optimizer.ipg_buckets[dtype].params])
        return original(tensor, dtype, **kw)

    def slices(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        return reduce(functools.partial(original, *args, **kwargs), call.arguments)

    _wrap(optimizer, "average_tensor", bucket)
    _wrap(optimizer, _REDUCE_TO_OWNERS, slices)


def add_to_partition(optimizer: Any, output: torch.Tensor | None, values: torch.Tensor) -> None:
    """Accumulate into DeepSpeed's fp32 gradient partition, where this version has one."""
    if output is not None:
        optimizer._add_to_grad_partition_buffer(output, values)


# ---- updated weights of ZeRO-1/2 and the optimizer step ----


def wrap_weight_gather(optimizer: Any, gather: Callable[[], None]) -> None:
    """ZeRO-1/2: ``gather()`` replaces the gather of updated weights inside ``optimizer.step``."""
    from deepspeed.runtime.zero import stage_1_and_2

    _weight_gather.install(stage_1_and_2, "all_gather_dp_groups")

    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _weight_gather.through(lambda *a, **k: gather()):
            return original(*args, **kwargs)

    _wrap(optimizer, "step", step)


def after_step(optimizer: Any, then: Callable[[], None]) -> None:
    """Run ``then()`` after every ``optimizer.step``."""

    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then()
        return result

    _wrap(optimizer, "step", step)


def wrap_exports(engine: Any, optimizer: Any, exact: Callable[[], Any]) -> None:
    """ZeRO-1/2: hold ``exact()`` open around checkpoint save and load and ``save_16bit_model``."""
    held: list[Any] = []

    def prologue() -> None:
        held.append(exact())
        held[-1].__enter__()

    def epilogue() -> None:
        held.pop().__exit__(None, None, None)

    def save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with exact():
            return original(*args, **kwargs)

    optimizer.checkpoint_event_prologue = prologue
    optimizer.checkpoint_event_epilogue = epilogue
    _wrap(engine, "save_16bit_model", save)


def refresh_replica(optimizer: Any, gather: Callable[[], None]) -> None:
    """ZeRO-1/2: copy the master weights into the own partition, then ``gather()``."""
    with _weight_gather.through(lambda *a, **k: gather()):
        optimizer.update_lp_params()


def replica_groups(optimizer: Any) -> Iterator[tuple[torch.Tensor, list[torch.Tensor], Any]]:
    """Per parameter group: the flat 16-bit replica, its parameters, its process group."""
    yield from zip(
        optimizer.bit16_groups_flat,
        optimizer.bit16_groups,
        optimizer.real_dp_process_group,
        strict=True,
    )


def _require(owner: Any, name: str) -> None:
    if not hasattr(owner, name):
        import deepspeed

        raise RuntimeError(
            f"quantized_comm: DeepSpeed {deepspeed.__version__} has no {name} on "
            f"{type(owner).__name__}; tested versions are 0.17.6, 0.18.9 and 0.19.8"
        )


def log_rank0(message: str) -> None:
    from deepspeed.utils import log_dist

    # DeepSpeed's logger shows nothing below a warning unless the user lowers its level.
    log_dist(message, ranks=[0], level=logging.WARNING)


def rank_and_world() -> tuple[int, int]:
    from deepspeed import comm as dist

    return dist.get_rank(), dist.get_world_size()


def gradient_dtype(engine: Any) -> torch.dtype:
    """What DeepSpeed sends gradients in: ``communication_data_type``, by default the model's."""
    return engine.communication_data_type


def steps(optimizer: Any) -> bool:
    """False for ZeRO-3 without an optimizer (inference)."""
    return hasattr(optimizer, "step") and hasattr(optimizer, _AVG_SCATTER)
