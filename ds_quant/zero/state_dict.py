"""Tells of a ``module.state_dict()`` that reads decoded weights under ZeRO-1 and 2."""

from __future__ import annotations

import weakref
from typing import Any

from ds_quant.zero import seams
from ds_quant.zero.binding import Binding


def watch_state_dict(binding: Binding) -> None:
    """Log the first such call, until the engine is destroyed."""
    if binding.scheme.weights is None:
        return
    hook = binding.engine.module.register_state_dict_pre_hook(_Hook(binding))
    seams.before_destroy(binding.engine, hook.remove)


class _Hook:
    """Does not keep the engine alive; inert in a copy of the module and in a pickled one."""

    def __init__(self, binding: Binding | None = None) -> None:
        self._find = (lambda: None) if binding is None else weakref.ref(binding)

    def __reduce__(self) -> Any:
        return _Hook, ()

    def __call__(self, *_: Any) -> None:
        binding = self._find()
        if binding is None or binding.replica.is_exact():
            return
        self._find = lambda: None
        seams.log_rank0(
            f"quantized_comm: module.state_dict() under ZeRO-{binding.stage} gives decoded "
            "weights, which are not those of a checkpoint: call it inside `with "
            "ds_quant.exact_weights(engine):`, entered by all ranks, or use "
            "engine.save_16bit_model (logged once)"
        )
