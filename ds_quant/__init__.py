"""Weights and gradients in 3 to 8 bits on the network: DeepSpeed ZeRO, FSDP2 and DDP.

A ``"quantized_comm"`` block in the DeepSpeed config, or a call of ``attach``, switches it on.
Importing this package is cheap: it loads the standard library only, and leaves a hook that installs
the plugin when ``deepspeed.runtime.engine`` is imported. The public names load at first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from ds_quant import _autoload

__version__ = "1.0.0rc1"

_MODULE_OF = {
    "AttachError": "ds_quant.config.errors",
    "CastCodec": "ds_quant.codec.codec",
    "ConfigError": "ds_quant.config.schema",
    "GroupCodec": "ds_quant.codec.codec",
    "QuantizedCommConfig": "ds_quant.config.schema",
    "Scheme": "ds_quant.policy.scheme",
    "StartError": "ds_quant.runtime.handshake",
    "exact_weights": "ds_quant.zero.attach",
    "json_schema": "ds_quant.config.schema",
    "report": "ds_quant.questions",
    "resync": "ds_quant.questions",
}

__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'ds_quant' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


_autoload.activate()
