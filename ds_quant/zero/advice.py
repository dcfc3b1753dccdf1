"""What makes a job slower than it need be, for the start-up line."""

from __future__ import annotations

import os
from typing import Any

from ds_quant.zero import hooks


def advice(engine: Any) -> list[str]:
    """One sentence per setting that costs time on a device with streams and changes no number."""
    found = []
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1":
        found.append(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 lets a stream that waits for a message stop all others, "
            "so that little overlaps: unset it, unless tensor parallelism needs it"
        )
    logged = hooks.param_dict(engine).get("comms_logger")
    if isinstance(logged, dict) and logged.get("enabled"):
        found.append(
            "comms_logger.enabled=true waits for the device around every message: set it to false "
            "unless you look at messages"
        )
    for name in ("offload_optimizer", "offload_param"):
        offload = getattr(engine, f"zero_{name}")()
        if offload is not None and offload.device == "cpu" and not offload.pin_memory:
            found.append(
                f"zero_optimization.{name}.pin_memory=false makes the host wait for copies of "
                "weights to the device: set it to true"
            )
    return found


def one_bucket(engine: Any) -> list[str]:
    """Say so if no gradient is reduced before backward ends: DeepSpeed hands over a bucket when it
    is full. Not worth a notice if most of the model is frozen.
    """
    room, (numel, trained) = engine.zero_reduce_bucket_size(), hooks.elements(engine.module)
    several = len(list(engine.module.parameters())) > 1
    if not (engine.zero_overlap_comm() and several and numel / 2 < trained <= room):
        return []
    return [
        f"gradients are not reduced during backward: reduce_bucket_size={room} holds all "
        f"{trained} elements (try {trained // 8})"
    ]
