"""Quantized communication for FSDP2: attach a ``quantized_comm`` block to a ``fully_shard`` model.

Does not need DeepSpeed. ``ds_quant.report`` and ``ds_quant.resync`` take the wrapped root module.
"""

from __future__ import annotations

import torch
from torch.distributed import fsdp

# The collectives were written against a release of torch that has this method.
_NEEDED = "set_reduce_scatter_unused_params"
if not hasattr(getattr(fsdp, "FSDPModule", None), _NEEDED):
    raise ImportError(
        f"ds_quant.fsdp2: FSDP2 of torch {torch.__version__} has no {_NEEDED}: "
        "use a release that has it, such as torch 2.13; under DeepSpeed older ones work"
    )

from ds_quant.fsdp2.attaching import attach  # noqa: E402

__all__ = ["attach"]
