"""Install the plugin when DeepSpeed's engine module is imported, with no line in the script.

torch runs every entry point of the group ``torch.backends`` at the end of ``import torch`` (unless
``TORCH_DEVICE_BACKEND_AUTOLOAD=0``). This package's is ``activate``. It only leaves an import hook,
because DeepSpeed is not loaded yet. Standard library only. Never raises: torch turns an exception
here into a failing ``import torch`` for every program in the environment.
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


def is_disabled() -> bool:
    """Return True if the environment switches the plugin off."""
    return os.environ.get(DISABLE_VARIABLE, "").strip().lower() not in ("", "0", "false", "no")


def activate() -> None:
    """Install now if DeepSpeed's engine is loaded, otherwise as soon as it is. Idempotent."""
    if is_disabled():
        return
    if hasattr(sys.modules.get(TARGET), "DeepSpeedEngine"):
        _install()
    elif not any(isinstance(finder, _EngineFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _EngineFinder())


def _install() -> None:
    try:
        from ds_quant.zero.install import install

        install()
    except Exception as error:  # the program may not use the plugin: it must go on
        _warn(f"ds_quant could not hook into DeepSpeed, quantized_comm is NOT active: {error!r}")


def _warn(message: str) -> None:
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:  # python -W error: it must not become a failing import of DeepSpeed
        print(message, file=sys.stderr)


class _EngineFinder(importlib.abc.MetaPathFinder):
    """Find ``TARGET`` only, and install the plugin once it is loaded.

    Stays until the plugin is installed: the module may be searched without an import, and the
    import may fail and be repeated.
    """

    _searching = False  # the search below asks this finder again

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
        """Wrap the loader, which was made for this search, until it has loaded the module."""

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            loader.exec_module(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _install()

        loader.exec_module = exec_module
