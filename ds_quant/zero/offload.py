"""Follow DeepSpeed's offloading: state of the plugin moves to host memory with DeepSpeed's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ds_quant.zero import accelerator, hooks
from ds_quant.zero.deepspeed_types import Engine

# ---- by the config ----


def free_host_memory() -> int:
    """Return the bytes of host memory that the processes of this machine can still allocate."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    return int(CPU_Accelerator().available_memory())


def offloads_parameters(engine: Engine) -> bool:
    """Return True if ZeRO-3 keeps its shards in host memory, apart from the device."""
    settings = engine.zero_offload_param()
    if settings is None or accelerator.device().type == "cpu":
        return False
    return settings.device == "cpu"


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a host tensor to page-locked memory, if the accelerator has it."""
    return accelerator.get().pin_memory(tensor)


# ---- between steps, by offload_states ----


_WEIGHTS, _GRADIENTS = "lp_params", "lp_grads"  # members of DeepSpeed's enumeration are strings


class Movable(Protocol):
    """State of the plugin on the device. Both calls are collectives."""

    def leave_device(self, *, pin: bool) -> None:
        """Move the state to host memory, page-locked if ``pin``. Does nothing if it is there."""

    def return_to_device(self) -> None:
        """Move the state back. Does nothing if it is on the device."""


def follow_states(
    events: hooks.Hooks, *, weights: Sequence[Movable], gradients: Sequence[Movable]
) -> None:
    """Follow the optimizer's ``offload_states`` and ``reload_states``.

    Frameworks for reinforcement learning call these without the engine.

    weights: state that moves with ``lp_params``.
    gradients: state that moves with ``lp_params`` or ``lp_grads``.
    """

    def leave(original: Callable[..., object], *args: object, **kwargs: object) -> object:
        call = inspect.signature(original).bind(*args, **kwargs)
        call.apply_defaults()
        arguments: dict[str, Any] = call.arguments
        include = arguments["include"]
        moves_weights = include is None or _WEIGHTS in include
        moves_gradients = moves_weights or _GRADIENTS in include
        leaving: list[Movable] = []
        if moves_weights:
            leaving += weights
        if moves_gradients:
            leaving += gradients
        for state in leaving:
            state.leave_device(pin=arguments["pin_memory"])
        # Last: at its end the original returns free memory to the system.
        return original(*args, **kwargs)

    def come_back(original: Callable[..., object], *args: object, **kwargs: object) -> object:
        result = original(*args, **kwargs)
        for state in (*weights, *gradients):
            state.return_to_device()
        return result

    is_used = bool(weights or gradients)
    if is_used and hasattr(events.optimizer, "offload_states"):  # inference lacks it
        events.wrap(events.optimizer, "offload_states", leave)
        events.wrap(events.optimizer, "reload_states", come_back)
