"""Imported once by the fork server of DeepSpeed's tests, from which all ranks are forked.

A rank starts with the block inserted and with torch, DeepSpeed and its CPU operators loaded, which
would take seconds per rank and test. The operators are compiled on first use.
"""

# ruff: noqa: E402  (the block must be in place before DeepSpeed is imported)

from __future__ import annotations

import functools
import gc
from typing import Any

from peer import notes
from peer.deepspeed import plugin

plugin.insert()

import deepspeed
import deepspeed.runtime.zero.stage3
import functorch.compile  # noqa: F401  (an engine would import these four on every rank)
import pytest  # noqa: F401
import torch._dynamo
import torch._inductor.compile_fx
import torch._inductor.config  # noqa: F401
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from unit.common import DistributedExec

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes long to build, not used
for operator in ("CPUAdamBuilder", "FusedAdamBuilder"):
    get_accelerator().create_op_builder(operator).load()

# 0.19.8 no longer has it; the checkpoint tests of 0.19.6 compare it.
if not hasattr(DeepSpeedEngine, "sparse_tensor_module_names"):
    DeepSpeedEngine.sparse_tensor_module_names = frozenset()


def _report_errors(original: Any) -> Any:
    """Note errors of ranks: pytest reports a failed rank only if no other rank waits for it."""

    @functools.wraps(original)  # the method is pickled by its name
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:
            notes.note(notes.RANK_ERROR, f"{type(error).__name__}: {error}")
            raise

    return run


DistributedExec._dist_run = _report_errors(DistributedExec._dist_run)
gc.freeze()
