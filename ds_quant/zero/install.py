"""Install the plugin into DeepSpeed, once per process.

[Note: where the plugin enters] Five methods are wrapped once, when the engine module is imported.
The config parser reads the block. The engine's first check refuses stage 0 if there is an
optimizer. The three methods that build an optimizer attach to it or refuse. All other hooks are set
per engine, see hooks.py.

[Note: the shared-memory operator] On the CPU ``deepspeed.init_distributed`` compiles DeepSpeed's
shared-memory operator, which takes a minute or more, and opens 69 MB of shared memory per rank that
nothing removes. Only ``inference_all_reduce`` uses it: inference and tensor parallelism. So it is
built and opened at the first such call, which all ranks make. Results are the same.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

from ds_quant import leftovers
from ds_quant.config import environment
from ds_quant.config.environment import VARIABLE
from ds_quant.policy import refusals
from ds_quant.runtime import log
from ds_quant.runtime.short_messages import shorten_messages
from ds_quant.zero import hooks
from ds_quant.zero.deepspeed_types import Config, Engine, TorchBackend
from ds_quant.zero.hooks import wrap_once


def install() -> None:
    """Wrap DeepSpeed: see [Note: where the plugin enters]. Idempotent; does not start CUDA."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    shorten_messages()
    defer_operator()
    wrap_once(DeepSpeedConfig, "_initialize_params", read_block)
    wrap_once(DeepSpeedEngine, "_do_sanity_check", check_stage_0)
    wrap_once(DeepSpeedEngine, "_configure_zero_optimizer", attach_zero)
    wrap_once(DeepSpeedEngine, "_configure_bf16_optimizer", refuse_unsharded)
    # DeepSpeed 0.17 takes "bf16" for a model without ZeRO and builds this optimizer for ZeRO-1,
    # which shards nothing. No other config with a block comes here: its stage is 1 or more.
    wrap_once(DeepSpeedEngine, "_configure_fp16_optimizer", refuse_unsharded)


# ---- wrapped methods ----


def read_block(original: Callable[..., object], self: Config, param_dict: dict[str, Any]) -> None:
    """Read the block as the config is parsed. Wraps ``DeepSpeedConfig._initialize_params``."""
    block = environment.parse(param_dict)
    self.quantized_comm = block
    self.quantized_comm_from_variable = environment.is_source(param_dict)
    if environment.is_set() and not self.quantized_comm_from_variable:
        _log_once(environment.CONFIG_WINS)
    if block is not None:
        if refusals.stage_of(param_dict):  # else see ``check_stage_0``
            refusals.refuse(param_dict, block)  # before DeepSpeed's checks; ``attach`` repeats it
        if os.environ.get("LOCAL_RANK", "0") == "0":
            for lock in leftovers.idle_locks():
                log.log_here(f"quantized_comm: {leftovers.lock_sentence(lock)}")
    original(self, param_dict)


def check_stage_0(original: Callable[..., object], self: Engine) -> None:
    """Refuse or drop a block at stage 0. Wraps ``DeepSpeedEngine._do_sanity_check``.

    It is dropped without an optimizer, as for the frozen model of a preference trainer.
    """
    original(self)
    block = hooks.block_of(self)
    if block is None or self.zero_optimization_stage() != 0:
        return
    if hooks.block_is_from_variable(self):
        log.log_rank0(f"quantized_comm: {VARIABLE} has no effect on an engine at stage 0")
    else:
        if self.optimizer_name():
            block.validate_stage(refusals.stage_of(hooks.param_dict(self)))  # raises
        log.log_rank0("quantized_comm: inactive in an engine at stage 0 without an optimizer")
    hooks.drop_block(self)


def attach_zero(
    original: Callable[..., object], self: Engine, *args: object, **kwargs: object
) -> object:
    """Attach to the optimizer that ``original`` builds."""
    optimizer = original(self, *args, **kwargs)
    _attach(self, optimizer)
    return optimizer


def refuse_unsharded(
    original: Callable[..., object], self: Engine, *args: object, **kwargs: object
) -> object:
    """Refuse an optimizer that does not shard, if the engine has a block."""
    _attach(self, None)
    return original(self, *args, **kwargs)


@functools.cache
def _log_once(sentence: str) -> None:
    log.log_rank0(f"quantized_comm: {sentence}")


def _attach(engine: Engine, optimizer: object) -> None:
    # Imported here: it imports DeepSpeed, whose import runs this module.
    from ds_quant.zero.attach import attach

    is_inference = engine.zero_optimization_stage() == 3 and not hooks.has_step(optimizer)
    if is_inference and hooks.block_of(engine) and hooks.block_is_from_variable(engine):
        log.log_rank0(f"quantized_comm: {VARIABLE} has no effect without an optimizer")
        hooks.drop_block(engine)
    attach(engine, optimizer)


# ---- the shared-memory operator ----


_BUILD = "build_shm_op"


def defer_operator() -> None:
    """Wrap DeepSpeed's backend before it is made. Idempotent; no effect if it has no operator.

    See [Note: the shared-memory operator].
    """
    backend = importlib.import_module("deepspeed.comm.torch")
    if hasattr(backend, _BUILD) and hasattr(backend.TorchBackend, "inference_all_reduce"):
        wrap_once(backend, _BUILD, lambda original: None)
        wrap_once(backend.TorchBackend, "inference_all_reduce", _inference_all_reduce)


def _inference_all_reduce(
    original: Callable[..., object], self: Any, *args: object, **kwargs: object
) -> object:
    _open_operator(self)
    return original(self, *args, **kwargs)


@functools.cache
def _open_operator(backend: TorchBackend) -> None:
    """At the first call, build and open the operator as the backend's constructor would."""
    module = importlib.import_module("deepspeed.comm.torch")
    operator = getattr(module, _BUILD).ds_quant_wraps()
    if operator is None:
        return
    operator.initialize(backend.get_world_size(), backend.get_rank())
    backend.shm_comm_op = operator
    if hasattr(operator, "vector_kernel_level"):  # from 0.19.6 on
        backend.shm_vector_kernel_level = operator.vector_kernel_level()
