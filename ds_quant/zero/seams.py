"""Every contact with DeepSpeed's private names, here and, for ZeRO-1/2, in replica_seams.py, so
that an upstream change breaks two modules at most.

[Note: where the plugin enters] Five methods are wrapped once, when the engine module is imported:
the config parser reads the block, the engine's first check refuses stage 0 where there is an
optimizer, and the places that build an optimizer attach to it or refuse.
Everything else is set per engine, on instances. Two functions that the optimizers call by module
name (gradient reduce-scatter of ZeRO-3, weight gather of ZeRO-1/2) become *routes*: inert unless
the calling optimizer opened them, on this thread, for the length of one call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from ds_quant import config, leftovers, refusals
from ds_quant.zero.log import log_here
from ds_quant.zero.log import log_rank0 as log_rank0
from ds_quant.zero.wrapping import Route, after, moved, require, wrap

_AVG_SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
_FETCH = "_PartitionedParameterCoordinator__all_gather_params_"


def install() -> None:
    """Wrap the config parser and the optimizer factories. Idempotent; starts no CUDA."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    from ds_quant.zero.attach import attach
    from ds_quant.zero.deferred import defer_operator
    from ds_quant.zero.quiet import install_hook

    def read_block(original: Callable[..., Any], self: Any, param_dict: dict) -> None:
        self.quantized_comm = config.parse(param_dict)
        if self.quantized_comm is not None:
            if refusals.stage_of(param_dict):  # else see judge_stage_0
                refusals.refuse(param_dict, self.quantized_comm)  # ahead of DeepSpeed's own checks
            if os.environ.get("LOCAL_RANK", "0") == "0":
                for lock in leftovers.idle_locks():
                    log_here(f"quantized_comm: {leftovers.lock_sentence(lock)}")
        original(self, param_dict)

    def judge_stage_0(original: Callable[..., Any], self: Any) -> None:
        original(self)
        config = getattr(self._config, "quantized_comm", None)
        if config is not None and self.zero_optimization_stage() == 0:
            if self.optimizer_name():
                config.validate_stage(refusals.stage_of(param_dict(self)))
            self._config.quantized_comm = None  # as for the frozen model of a preference trainer
            log_rank0("quantized_comm: inactive in an engine at stage 0 without an optimizer")

    def attach_zero(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = original(self, *args, **kwargs)
        attach(self, optimizer)
        return optimizer

    def refuse_other(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        attach(self, None)
        return original(self, *args, **kwargs)

    install_hook()
    defer_operator()
    wrap(DeepSpeedConfig, "_initialize_params", read_block)
    wrap(DeepSpeedEngine, "_do_sanity_check", judge_stage_0)
    wrap(DeepSpeedEngine, "_configure_zero_optimizer", attach_zero)
    wrap(DeepSpeedEngine, "_configure_bf16_optimizer", refuse_other)
    # 0.17 takes "bf16" for a model without ZeRO and gives ZeRO-1 this one, under which nothing
    # is sharded; with a block, whose stage is 1 or more, no other config comes here.
    wrap(DeepSpeedEngine, "_configure_fp16_optimizer", refuse_other)


_shard_reduction = Route("reduce_scatter_coalesced")


def exact_gradient_reason(engine: Any) -> str | None:
    """The setting that keeps gradients on DeepSpeed's own exact path, if there is one."""
    zero = engine._config.zero_config
    return refusals.exact_gradient_reason(int(zero.stage), partial(getattr, zero))


def param_dict(engine: Any) -> dict[str, Any]:
    """The DeepSpeed config as it was written."""
    return engine._config._param_dict


# ---- parameters of ZeRO-3 ----


def before_fetch(optimizer: Any, meet: Callable[[Iterable[Any]], None]) -> None:
    """``meet(params)`` sees parameters that are about to be fetched together."""

    def fetch(original: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Any:
        meet(params)
        return original(params, *args, **kwargs)

    offload = getattr(optimizer, "parameter_offload", optimizer)  # itself without an optimizer
    coordinator = offload.get_param_coordinator()
    require(coordinator, _FETCH)
    wrap(coordinator, _FETCH, fetch)


def is_gathered_whole(module: torch.nn.Module) -> bool:
    """Whether ZeRO-3 gathers all that is in the module at once (DeepSpeed's leaf modules)."""
    from deepspeed.utils import z3_leaf_module

    return bool(z3_leaf_module(module))


def note_borrowed() -> None:
    """Mark parameters that a module uses in its forward though they are not its own: DeepSpeed
    learns of it then, once per use and run, and gathers them on the spot with ``all_gather()``.
    """
    from deepspeed.runtime.zero import parameter_offload

    def register(original: Callable[..., Any], module: Any, parameter: Any) -> None:
        original(module, parameter)
        parameter.ds_quant_borrowed = True

    require(parameter_offload, "register_external_parameter")
    wrap(parameter_offload, "register_external_parameter", register)


# ---- gradients ----


def wrap_shard_reduction(
    optimizer: Any, reduce: Callable[..., Any], put_away: Callable[..., Any] | None = None
) -> None:
    """ZeRO-3: ``reduce(original, params, tensors, group)`` replaces the reduce-scatter and
    ``put_away(original, params, shards)`` what follows it.
    """
    from deepspeed.runtime.zero import stage3

    _shard_reduction.install(stage3)
    original = stage3.reduce_scatter_coalesced.ds_quant_wraps

    def around(avg_scatter: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Any:
        with _shard_reduction.through(partial(reduce, original, params)):
            return avg_scatter(params, *args, **kwargs)

    require(optimizer, _AVG_SCATTER)
    wrap(optimizer, _AVG_SCATTER, around)
    if put_away is not None:
        require(optimizer, "partition_grads")
        wrap(optimizer, "partition_grads", put_away)


def after_backward(
    optimizer: Any,
    then: Callable[[], None],
    last_buckets: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Run ``then()`` after every backward, whose last buckets go in ``last_buckets()``."""

    def epilogue(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with last_buckets():
            result = original(*args, **kwargs)
        then()
        return result

    require(optimizer, "independent_gradient_partition_epilogue")
    wrap(optimizer, "independent_gradient_partition_epilogue", epilogue)


def unasked(role: str) -> RuntimeError:
    """The error where a step was taken without a call of what carries ``role``."""
    gradients = "__avg_scatter_grads (ZeRO-3) or average_tensor (ZeRO-1 and 2)"
    carriers = {"weights": "all_gather_coalesced of a parameter", "gradients": gradients}
    return moved(f"{carriers[role]} in the first step")


# ---- the optimizer step ----


def after_step(optimizer: Any, then: Callable[[], None]) -> None:
    """Run ``then()`` after every ``optimizer.step`` that was not skipped (overflow)."""

    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not optimizer.overflow:
            then()
        return result

    wrap(optimizer, "step", step, stacked=True)


def around_step(optimizer: Any, before: Callable[[], None], after: Callable[[bool], None]) -> None:
    """Run ``before()`` ahead of every ``optimizer.step`` and ``after(skipped)`` behind it."""

    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before()
        result = original(*args, **kwargs)
        after(bool(optimizer.overflow))
        return result

    wrap(optimizer, "step", step, stacked=True)


def after_global_step(engine: Any, then: Callable[[], None]) -> None:
    """Run ``then()`` whenever ``engine.global_steps`` has grown, skipped updates included."""
    after(engine, "_take_model_step", then, stacked=True)


def before_destroy(engine: Any, first: Callable[[], None]) -> None:
    """Run ``first()`` when the engine is destroyed: asked to, or collected."""

    def destroy(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            first()
        finally:
            original(*args, **kwargs)

    wrap(engine, "destroy", destroy)


def rank_and_world() -> tuple[int, int]:
    from deepspeed import comm as dist

    return dist.get_rank(), dist.get_world_size()


def after_checkpoint_event(optimizer: Any, then: Callable[[], None]) -> None:
    """ZeRO-3: run ``then()`` after a checkpoint was saved or loaded."""
    after(optimizer, "checkpoint_event_epilogue", then, stacked=True)


def wrap_checkpoints(
    engine: Any, key: str, dump: Callable[[], Any], restore: Callable[[Any], None]
) -> None:
    """Save ``dump()`` as ``key`` of the client state, hand it to ``restore`` on load (None if the
    checkpoint has none). The caller's client state does not show it.
    """

    def save(
        original: Callable[..., Any], save_dir: Any, tag: Any = None, client_state: Any = None,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        return original(save_dir, tag, {**(client_state or {}), key: dump()}, *args, **kwargs)

    def load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        path, client_state = original(*args, **kwargs)
        if path is not None:
            restore(client_state.pop(key, None))
        return path, client_state

    wrap(engine, "save_checkpoint", save)
    wrap(engine, "load_checkpoint", load)


def after_save(engine: Any, then: Callable[[], None]) -> None:
    """Run ``then()`` when a checkpoint or 16-bit weights have been saved."""
    for name in ("save_checkpoint", "save_16bit_model"):
        after(engine, name, then, stacked=True)


def gradient_dtype(engine: Any) -> torch.dtype:
    """What DeepSpeed sends gradients in: ``communication_data_type``, by default the model's."""
    return engine.communication_data_type


def steps(optimizer: Any) -> bool:
    """False for ZeRO-3 without an optimizer (inference)."""
    return hasattr(optimizer, "step") and hasattr(optimizer, _AVG_SCATTER)
