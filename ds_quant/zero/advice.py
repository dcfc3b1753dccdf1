"""Name the settings of DeepSpeed that cost time and change no number."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ds_quant.kernels.wire import round_up
from ds_quant.zero import hooks, sharded_params
from ds_quant.zero.deepspeed_types import Engine


def advice(engine: Engine) -> Iterator[str]:
    """Yield one sentence per setting that costs time on a device with streams."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1":
        yield (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 lets a stream that waits for a message stop all others, "
            "so that little overlaps: unset it, unless tensor parallelism needs it"
        )
    logger = hooks.param_dict(engine).get("comms_logger")
    if isinstance(logger, dict) and logger.get("enabled"):
        yield (
            "comms_logger.enabled=true waits for the device around every message: set it to false "
            "unless you look at messages"
        )
    settings = {
        "offload_optimizer": engine.zero_offload_optimizer(),
        "offload_param": engine.zero_offload_param(),
    }
    for name, offload in settings.items():
        if offload is not None and offload.device == "cpu" and not offload.pin_memory:
            yield (
                f"zero_optimization.{name}.pin_memory=false makes the host wait for copies of "
                "weights to the device: set it to true"
            )


def one_bucket_advice(engine: Engine, muon_round: int = 0) -> Iterator[str]:
    """Yield a sentence if no gradient is reduced before backward ends.

    DeepSpeed reduces a bucket when it is full. No sentence if most of the model is frozen.

    muon_round: elements of one of Muon's largest matrices per rank, see ``muon.full_round``. The
        advised size is a multiple of it, and no size is advised if one such bucket holds all.
    """
    bucket_size = engine.zero_reduce_bucket_size()
    numel, trained = sharded_params.elements(engine.module)
    advised = trained // 8
    if muon_round:
        advised = round_up(advised, muon_round)
    has_several = len(list(engine.module.parameters())) > 1
    one_holds_all = numel / 2 < trained <= bucket_size
    if engine.zero_overlap_comm() and has_several and one_holds_all and advised < trained:
        yield (
            "advice: gradients are not reduced during backward: "
            f"reduce_bucket_size={bucket_size} holds all {trained} elements (try {advised})"
        )
