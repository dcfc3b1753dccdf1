"""Install the plugin when DeepSpeed's engine module is imported, with no line in the script.

torch runs every entry point of the group ``torch.backends`` at the end of ``import torch`` (unless
``TORCH_DEVICE_BACKEND_AUTOLOAD=0``); ours is ``activate``. It only plants a one-shot import hook,
because DeepSpeed is not loaded yet. Standard library only, and it never raises: torch turns an
exception here into a failing ``import torch`` for every program in the environment.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

DISABLE_VARIABLE = "DS_QUANT_DISABLE"
TARGET = "deepspeed.runtime.engine"


def activate() -> None:
    """Install now if DeepSpeed's engine is loaded, otherwise as soon as it is. Idempotent."""
    if os.environ.get(DISABLE_VARIABLE, "").strip().lower() not in ("", "0", "false", "no"):
        return
    if hasattr(sys.modules.get(TARGET), "DeepSpeedEngine"):
        _install()
    elif not any(isinstance(finder, _EngineFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _EngineFinder())


def _install() -> None:
    try:
        from ds_quant.zero.install import install

        install()
    except Exception as error:  # never break a program that may not use the plugin
        _warn(f"ds_quant could not hook into DeepSpeed, quantized_comm is NOT active: {error!r}")


def _warn(message: str) -> None:
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:  # python -W error: it must not become a failing import of DeepSpeed
        print(message, file=sys.stderr)


class _EngineFinder(importlib.abc.MetaPathFinder):
    """Find only ``TARGET`` and let the real loader do the work; stay until that has succeeded,
    so that a mere look for the module or a failed import does not lose the plugin.
    """

    _searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TARGET or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _EngineLoader(spec.loader, self)
        return spec


class _EngineLoader(importlib.abc.Loader):
    """Run the wrapped loader, restore it on the module, then install the plugin."""

    def __init__(self, wrapped: importlib.abc.Loader, finder: _EngineFinder) -> None:
        self._wrapped, self._finder = wrapped, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._wrapped.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._wrapped
        if module.__spec__ is not None:
            module.__spec__.loader = self._wrapped
        self._wrapped.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _install()
