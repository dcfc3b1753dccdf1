"""Quantized communication for FSDP2: attach a ``quantized_comm`` block to a ``fully_shard`` model.

Does not need DeepSpeed. ``ds_quant.report`` and ``ds_quant.resync`` take the wrapped root module.
"""

from __future__ import annotations

from ds_quant.fsdp2.attaching import attach

__all__ = ["attach"]
