"""Profiler ranges of the collectives, named ``ds_quant::<action> <role> <hop>``.

Actions: encode, all_gather, all_to_all, wait, decode, sum. Roles: weights, gradients. Hops: intra
(inside a node), inter (between nodes). An example is ``ds_quant::encode gradients inter``. A
posted collective ends with the range ``wait``: on a CPU the time in which the host was blocked, on
CUDA the time to enqueue the wait.

Around them, ``ds_quant::gather <module>`` and ``ds_quant::reduce <module>`` name the module whose
weights or gradients are posted; under ZeRO-3, where a fetch and a bucket hold several modules, the
first parameter.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

_NO_RANGE = nullcontext()


def profiler_range(*words: str) -> AbstractContextManager[Any]:
    """Return a range for torch.profiler and NVTX, or a null context if neither records.

    words: action, role and hop; or action and module.

    ``record_function`` takes tens of microseconds on a slow host even without a profiler, so it is
    entered only while one records.
    """
    if not torch._C._autograd._profiler_enabled():
        return _NO_RANGE
    return record_function(f"ds_quant::{' '.join(words)}")
