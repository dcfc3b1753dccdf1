"""DeepSpeed's shared-memory operator, built when it is first used instead of at every start.

On the CPU ``deepspeed.init_distributed`` compiles it, for a minute and more, and lets it open 69 MB
of shared memory per rank that nothing removes. Only ``inference_all_reduce`` uses it: inference and
tensor parallelism. So it is built and opened at the first such call, which all ranks make, and
training without one does without it. Results are the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ds_quant.zero.wrapping import wrap

_BUILD = "build_shm_op"


def defer_operator() -> None:
    """Wrap DeepSpeed's backend, before it is made. Idempotent; nothing where it has no operator."""
    backend = importlib.import_module("deepspeed.comm.torch")
    if hasattr(backend, _BUILD) and hasattr(backend.TorchBackend, "inference_all_reduce"):
        wrap(backend, _BUILD, lambda original: None)
        wrap(backend.TorchBackend, "inference_all_reduce", _reduce)


def _reduce(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if not getattr(self, "ds_quant_asked", False):
        self.ds_quant_asked = True
        _open(self)
    return original(self, *args, **kwargs)


def _open(backend: Any) -> None:
    """What the backend's constructor does with the operator."""
    module = importlib.import_module("deepspeed.comm.torch")
    operator = getattr(module, _BUILD).ds_quant_wraps()
    if operator is None:
        return
    operator.initialize(backend.get_world_size(), backend.get_rank())
    backend.shm_comm_op = operator
    if hasattr(operator, "vector_kernel_level"):  # from 0.19.6 on
        backend.shm_vector_kernel_level = operator.vector_kernel_level()
