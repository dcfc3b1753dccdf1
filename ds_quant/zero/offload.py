"""What DeepSpeed keeps in host memory, apart from the device, the plugin keeps there too."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ds_quant.zero import hooks

# ---- by the config ----


def free_host_memory() -> int:
    """Return the bytes of host memory that the processes of this machine can still have."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    return int(CPU_Accelerator().available_memory())


def offloads_parameters(engine: Any) -> bool:
    """Whether ZeRO-3 keeps its shards in host memory, apart from the device."""
    settings = engine.zero_offload_param()
    return hooks.device().type != "cpu" and settings is not None and settings.device.value == "cpu"


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor in page-locked memory, where the accelerator has it."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().pin_memory(tensor)


# ---- between steps, by offload_states ----


_WEIGHTS, _GRADIENTS = "lp_params", "lp_grads"  # members of DeepSpeed's enumeration are strings


def follow_states(events: hooks.Hooks, *, weights: list[Any], gradients: list[Any]) -> None:
    """Follow ``offload_states`` and ``reload_states`` of the optimizer, which RL frameworks call
    without the engine: weights with ``lp_params``, sums of gradients with it or ``lp_grads``.

    What holds them has ``leave_device(pin=...)``, to host memory, page-locked or not, and
    ``return_to_device()``, which do nothing where there is nothing to move; both are collectives.
    """
    guests = [*weights, *gradients]

    def leave(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs)
        call.apply_defaults()
        include, pinned = call.arguments["include"], call.arguments["pin_memory"]
        moves_weights = include is None or _WEIGHTS in include
        moves_gradients = moves_weights or _GRADIENTS in include
        for guest in (*weights * moves_weights, *gradients * moves_gradients):
            guest.leave_device(pin=pinned)
        return original(*args, **kwargs)  # which gives the memory back to the system at its end

    def come_back(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        for guest in guests:
            guest.return_to_device()
        return found

    if guests and hasattr(events.optimizer, "offload_states"):  # else inference
        events.wrap(events.optimizer, "offload_states", leave)
        events.wrap(events.optimizer, "reload_states", come_back)
