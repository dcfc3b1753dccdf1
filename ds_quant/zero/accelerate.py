"""Make ``Accelerator.get_state_dict`` return exact weights under ZeRO-1 and 2."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ds_quant.zero import hooks, safety

_PATIENCE = 60.0  # seconds before rank 0 warns which ranks are missing
_TIMEOUT = 1800.0  # seconds; torch's own limit for a collective


def wrap_state_dict() -> None:
    """Make ``Accelerator.get_state_dict`` see exact weights of engines that quantize. Idempotent.

    It becomes a collective under ZeRO-1 and 2, as it is under ZeRO-3.
    """
    accelerator = getattr(sys.modules.get("accelerate"), "Accelerator", None)
    if accelerator is not None:
        hooks.wrap_once(accelerator, "get_state_dict", _exactly)


def _exactly(original: Callable[..., Any], self: Any, model: Any, *args: Any, **kw: Any) -> Any:
    replica = _replica_of(model, getattr(self, "_models", ()))
    if replica is None:
        return original(self, model, *args, **kw)
    rank, world = hooks.rank_and_world()
    safety.wait_for_ranks(
        "Accelerator.get_state_dict", rank=rank, world=world,
        patience=_PATIENCE, timeout=_TIMEOUT,
    )  # fmt: skip
    with replica.exact():
        return original(self, model, *args, **kw)


def _replica_of(model: Any, engines: Any) -> Any:
    """Find the decoded replica behind an engine or its module, None if there is none."""
    for engine in (model, *engines):
        if engine is model or getattr(engine, "module", None) is model:
            binding = getattr(engine, "ds_quant_engine", None)
            if binding is not None:
                return binding.replica
    return None
