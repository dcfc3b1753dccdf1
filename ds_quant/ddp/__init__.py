"""Quantized gradients for DDP: attach a ``quantized_comm`` block to a ``DistributedDataParallel``.

Does not need DeepSpeed. ``ds_quant.report`` takes the model. Of torch it uses public names only,
above all ``register_comm_hook``.
"""

from ds_quant.ddp.attaching import attach

__all__ = ["attach"]
