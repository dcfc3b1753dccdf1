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
from typing import Any

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
    """Find only ``TARGET`` and install the plugin once it is loaded; stay until that has succeeded,
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
            self._install_after(spec.loader)
        return spec

    def _install_after(self, loader: Any) -> None:
        """``loader`` was made for this search; loading gives it back as it was."""

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            loader.exec_module(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _install()

        loader.exec_module = exec_module
