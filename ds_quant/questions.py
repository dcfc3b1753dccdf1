"""The questions of ``ds_quant``: each takes a DeepSpeed engine or a model under FSDP2 or DDP."""

from __future__ import annotations

from typing import Any


def report(target: Any) -> dict[str, Any] | None:
    """Report what this rank has received so far; None without a block.

    Args:
        target: an engine, see ``ds_quant.zero.attach.report`` for its figures, the root of an
            FSDP2 model, or a DDP model.
    """
    if _is_ddp(target):
        from ds_quant.ddp import attaching as ddp_attaching

        ddp_front = ddp_attaching.front_of(target)
        return None if ddp_front is None else ddp_front.figures()
    if _is_sharded_model(target):
        from ds_quant.fsdp2 import attaching

        front = attaching.front_of(target)
        return None if front is None else front.figures()
    from ds_quant.zero import attach as engine_attach

    return engine_attach.report(target)


def resync(target: Any) -> None:
    """Bring exact weights to all ranks; see ``ds_quant.zero.attach.resync``. A collective.

    Args:
        target: an engine, or the root of an FSDP2 model. DDP keeps exact weights on all ranks.
    """
    if _is_ddp(target):
        return
    if _is_sharded_model(target):
        from ds_quant.fsdp2 import attaching

        attaching.resync(target)
        return
    from ds_quant.zero import attach as engine_attach

    engine_attach.resync(target)


def _is_ddp(target: Any) -> bool:
    """Return True for a ``DistributedDataParallel``, or a module that holds one."""
    if hasattr(target, "zero_optimization_stage") or not hasattr(target, "modules"):
        return False
    return any(
        hasattr(module, "register_comm_hook") and hasattr(module, "join")
        for module in target.modules()
    )


def _is_sharded_model(target: Any) -> bool:
    """Return True for a module that ``fully_shard`` was called on, or that holds one."""
    if hasattr(target, "zero_optimization_stage") or not hasattr(target, "modules"):
        return False
    return any(
        hasattr(module, "set_is_last_backward") and hasattr(module, "unshard")
        for module in target.modules()
    )
