"""Install the plugin into DeepSpeed, once per process.

[Note: what is shortened] Only errors that are messages to the user by their type: a wrong setting,
and ranks that do not fit together at start-up. Everything else goes to the hook that was there:
Python's or the one of torch.distributed. A program with another one of its own keeps that. Other
ranks stay short only if rank 0 has printed the very same message; otherwise each rank prints its
own.

[Note: where the plugin enters] Five methods are wrapped once, when the engine module is imported:
the config parser reads the block, the engine's first check refuses stage 0 where there is an
optimizer, and the places that build an optimizer attach to it or refuse. Everything else is set
per engine, see hooks.py.

On the CPU ``deepspeed.init_distributed`` compiles it, for a minute and more, and lets it open 69 MB
of shared memory per rank that nothing removes. Only ``inference_all_reduce`` uses it: inference and
tensor parallelism. So it is built and opened at the first such call, which all ranks make, and
training without one does without it. Results are the same.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ds_quant import leftovers
from ds_quant.config import environment
from ds_quant.config.environment import VARIABLE
from ds_quant.config.presets import renamed
from ds_quant.config.schema import KEY, ConfigError
from ds_quant.policy import refusals
from ds_quant.zero import hooks, log
from ds_quant.zero.handshake import Board, StartError
from ds_quant.zero.hooks import wrap_once


def install() -> None:
    """Wrap the config parser and the optimizer factories. Idempotent; starts no CUDA."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    def read_block(original: Callable[..., Any], self: Any, param_dict: dict) -> None:
        self.quantized_comm = environment.parse(param_dict)
        self.quantized_comm_from_variable = environment.is_source(param_dict)
        if environment.is_set() and not self.quantized_comm_from_variable:
            _tell_once(environment.CONFIG_WINS)
        if self.quantized_comm is not None:
            if refusals.stage_of(param_dict):  # else see judge_stage_0
                refusals.refuse(param_dict, self.quantized_comm)  # ahead of DeepSpeed's own checks
            if os.environ.get("LOCAL_RANK", "0") == "0":
                for lock in leftovers.idle_locks():
                    log.log_here(f"quantized_comm: {leftovers.lock_sentence(lock)}")
            if sentence := renamed(param_dict.get(KEY)):
                _tell_once(sentence)
        original(self, param_dict)

    def judge_stage_0(original: Callable[..., Any], self: Any) -> None:
        original(self)
        block = getattr(self._config, "quantized_comm", None)
        if block is not None and self.zero_optimization_stage() == 0:
            if self._config.quantized_comm_from_variable:
                log.log_rank0(f"quantized_comm: {VARIABLE} has no effect on an engine at stage 0")
            else:
                if self.optimizer_name():
                    block.validate_stage(refusals.stage_of(hooks.param_dict(self)))
                log.log_rank0(
                    "quantized_comm: inactive in an engine at stage 0 without an optimizer"
                )
            self._config.quantized_comm = None  # as for the frozen model of a preference trainer

    def attach_zero(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = original(self, *args, **kwargs)
        _attach(self, optimizer)
        return optimizer

    def refuse_other(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        _attach(self, None)
        return original(self, *args, **kwargs)

    shorten_messages()
    defer_operator()
    wrap_once(DeepSpeedConfig, "_initialize_params", read_block)
    wrap_once(DeepSpeedEngine, "_do_sanity_check", judge_stage_0)
    wrap_once(DeepSpeedEngine, "_configure_zero_optimizer", attach_zero)
    wrap_once(DeepSpeedEngine, "_configure_bf16_optimizer", refuse_other)
    # 0.17 takes "bf16" for a model without ZeRO and gives ZeRO-1 this one, under which nothing
    # is sharded; with a block, whose stage is 1 or more, no other config comes here.
    wrap_once(DeepSpeedEngine, "_configure_fp16_optimizer", refuse_other)


@functools.cache
def _tell_once(sentence: str) -> None:
    log.log_rank0(f"quantized_comm: {sentence}")


def _attach(engine: Any, optimizer: Any) -> None:
    """Import ``attach`` late: it imports DeepSpeed, whose import runs this module."""
    from ds_quant.zero.attach import attach

    idle = engine.zero_optimization_stage() == 3 and not hooks.steps(optimizer)
    if idle and engine._config.quantized_comm and engine._config.quantized_comm_from_variable:
        log.log_rank0(f"quantized_comm: {VARIABLE} has no effect without an optimizer")
        engine._config.quantized_comm = None
    attach(engine, optimizer)


# ---- the shared-memory operator ----


_BUILD = "build_shm_op"


def defer_operator() -> None:
    """Wrap DeepSpeed's backend, before it is made. Idempotent; nothing where it has no operator."""
    backend = importlib.import_module("deepspeed.comm.torch")
    if hasattr(backend, _BUILD) and hasattr(backend.TorchBackend, "inference_all_reduce"):
        wrap_once(backend, _BUILD, lambda original: None)
        wrap_once(backend.TorchBackend, "inference_all_reduce", _reduce)


def _reduce(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    _open(self)
    return original(self, *args, **kwargs)


@functools.cache
def _open(backend: Any) -> None:
    """Build and open the operator, as the backend's constructor would, at the first call."""
    module = importlib.import_module("deepspeed.comm.torch")
    operator = getattr(module, _BUILD).ds_quant_wraps()
    if operator is None:
        return
    operator.initialize(backend.get_world_size(), backend.get_rank())
    backend.shm_comm_op = operator
    if hasattr(operator, "vector_kernel_level"):  # from 0.19.6 on
        backend.shm_vector_kernel_level = operator.vector_kernel_level()


# ---- uncaught mistakes of the user ----


_PATIENCE = 3.0  # seconds for ranks that fail together to hear of each other


def shorten_messages() -> None:
    """Shorten what Python or torch.distributed would print. Idempotent."""
    previous = sys.excepthook
    of_torch = getattr(previous, "__module__", "").startswith("torch.distributed")
    if previous is sys.__excepthook__ or of_torch:
        sys.excepthook = functools.partial(_hook, previous)


def _hook(previous: Callable[..., Any], kind: type, error: BaseException, traceback: Any) -> None:
    if kind not in (ConfigError, StartError):
        previous(kind, error, traceback)
        return
    rank, board = int(os.environ.get("RANK") or 0), None  # the launcher's
    if torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
        board = Board(f"said/{hashlib.sha256(str(error).encode()).hexdigest()[:16]}")
    if board is not None and rank:
        said = board.arrive(["said"], _PATIENCE)
        with suppress(RuntimeError):  # the store is gone with rank 0
            board.put(f"heard/{rank}", "")
        if said:
            print(f"rank {rank} ends: see the message of rank 0", file=sys.stderr, flush=True)
            return
    who = f"{kind.__name__} on rank {rank}" if rank else kind.__name__
    print(f"{who}: {error}", file=sys.stderr, flush=True)
    if board is not None and not rank:
        board.put("said", "")  # and wait for readers: rank 0's process may hold the store
        readers = range(1, torch.distributed.get_world_size())
        board.arrive([f"heard/{rank}" for rank in readers], _PATIENCE)
