"""What a step of the plugin asks of the host: calls, torch operations, waits for the device."""

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
# Operations that are no views and launch no kernel either.
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
WAITS = ("cpu", "tolist", "item", "__bool__", "__int__", "__float__", "nonzero")


@contextmanager
def calls() -> Iterator[Counter[str]]:
    """Count Python calls of the plugin's functions but for ranges: ``counts["calls"]``."""
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
    """Count by function of the plugin where it asks for values of tensors: on CUDA to wait for the
    device.
    """
    counts = Counter[str]()

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **keywords: Any) -> Any:
            code = sys._getframe(1).f_code
            if code.co_filename.startswith(OURS):
                counts[code.co_qualname if hasattr(code, "co_qualname") else code.co_name] += 1
            return original(*args, **keywords)

        return asked

    with ExitStack() as stack:
        for name in WAITS:
            asked = noting(getattr(torch.Tensor, name))
            stack.enter_context(patch.object(torch.Tensor, name, asked))
        yield counts


@contextmanager
def operations() -> Iterator[Counter[str]]:
    """Count torch operations: ``views`` that are made, others as ``torch``, that is kernels.

    Those that the plugin asks for; all of them as ``all views`` and ``all torch``.
    """
    counts = Counter[str]()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            kind, caller = _kind(func), _caller()
            if kind is not None and caller != fake_world.__file__:
                many = isinstance(result, list | tuple) and kind == "views"
                number = len(result) if many else 1
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
    """File of the function that has asked for the operation, torch's own left out."""
    frame = sys._getframe(2).f_back  # behind __torch_dispatch__
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(THEIRS):
            return name
        frame = frame.f_back
    return ""
