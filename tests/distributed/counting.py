"""Counts the host's work of a step: Python calls, torch operations, waits for the device."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import FrameType
from typing import Any
from unittest.mock import patch

import fake_world
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ds_quant
from ds_quant.comm.profiling import profiler_range

OURS, THEIRS = (os.path.dirname(module.__file__) + os.sep for module in (ds_quant, torch))
# Python 3.12 has no frames for these, earlier versions do.
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")
# Operations that neither make a view nor launch a kernel.
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
# Functions of the plugin that stand around one of FSDP2, whose operations are not the plugin's.
WRAPPERS = ("post_backward", "root_pre_forward", "zero_and_drop")
# Methods of tensors that wait for the device on CUDA.
WAITS = ("cpu", "tolist", "item", "__bool__", "__int__", "__float__", "nonzero")


@contextmanager
def calls() -> Iterator[Counter[str]]:
    """Count calls of the plugin's functions as "calls", profiler ranges left out."""
    counts = Counter[str]()

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(OURS):
            return
        if code.co_name not in (*COMPREHENSIONS, profiler_range.__name__):
            counts["calls"] += 1

    sys.setprofile(count)
    try:
        yield counts
    finally:
        sys.setprofile(None)


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """Count by function of the plugin the reads of tensor values, each a wait on CUDA."""
    counts = Counter[str]()

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **keywords: Any) -> Any:
            code = sys._getframe(1).f_code
            if code.co_filename.startswith(OURS):
                function = code.co_qualname if hasattr(code, "co_qualname") else code.co_name
                counts[function] += 1
            return original(*args, **keywords)

        return counted

    with ExitStack() as stack:
        for name in WAITS:
            counted = noting(getattr(torch.Tensor, name))
            stack.enter_context(patch.object(torch.Tensor, name, counted))
        yield counts


@contextmanager
def operations() -> Iterator[Counter[str]]:
    """Count torch operations of the plugin: "views", and kernels as "torch".

    Operations of all callers are counted as "all views" and "all torch".
    """
    counts = Counter[str]()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            kind = _kind(func)
            caller = _caller()
            if kind is None or caller == fake_world.__file__:
                return result
            number = 1
            if kind == "views" and isinstance(result, list | tuple):
                number = len(result)
            counts[f"all {kind}"] += number
            if caller.startswith(OURS):
                counts[kind] += number
            return result

    with Mode():
        yield counts


@cache
def _kind(operation: Any) -> str | None:
    aliases = (r.alias_info for r in operation._schema.returns)
    if any(alias is not None and not alias.is_write for alias in aliases):
        return "views"
    return None if operation._opname in ALLOCATIONS else "torch"


def _caller() -> str:
    """Return the file of the caller of an operation, files of torch and wrappers left out."""
    frame = sys._getframe(2)  # the caller of __torch_dispatch__, from torch 2.11 on torch's own
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(THEIRS) and frame.f_code.co_name not in WRAPPERS:
            return name
        frame = frame.f_back
    return ""
