"""Quantized communication for FSDP2: attach a ``quantized_comm`` block to a ``fully_shard`` model.

Does not need DeepSpeed. ``ds_quant.report`` and ``ds_quant.resync`` take the wrapped root module.
"""

from __future__ import annotations

import torch
from torch.distributed import fsdp

_NEEDED = "set_custom_reduce_scatter"
if not hasattr(getattr(fsdp, "FSDPModule", None), _NEEDED):
    raise ImportError(
        f"ds_quant.fsdp2: FSDP2 of torch {torch.__version__} has no {_NEEDED}: use torch 2.10 or "
        "newer; under DeepSpeed older ones work"
    )

from ds_quant.fsdp2.attaching import attach  # noqa: E402

__all__ = ["attach"]
