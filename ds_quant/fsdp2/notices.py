"""Notices of the start-up line: weights that are not compressed on these ranks, and a new torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ds_quant.fsdp2.sharded_module import ShardedModule, groups_of
from ds_quant.fsdp2.torch_names import NEWEST_TRIED
from ds_quant.policy.route import Routes


def weights_in_full(modules: Sequence[ShardedModule]) -> list[str]:
    """Return why weights are sent in full precision although the scheme compresses them."""
    by_routes: dict[Routes, list[ShardedModule]] = {}
    for sharded in modules:
        if sharded.is_replicated:
            continue
        by_routes.setdefault(sharded.level.routes, []).append(sharded)
    reasons = [_reason(routes, of_routes) for routes, of_routes in by_routes.items()]
    return list(dict.fromkeys(filter(None, reasons)))


def _reason(routes: Routes, modules: Sequence[ShardedModule]) -> str:
    scheme = routes.scheme
    if scheme.weights is None and not scheme.lossless:
        return ""
    quantized = [
        sharded
        for sharded in modules
        if any(param.is_quantized(sharded.dtype) for param in sharded.params)
    ]
    dtypes = {sharded.dtype for sharded in quantized}
    full = [dtype for dtype in dtypes if routes.weights(dtype=dtype).is_full_precision]
    if full and routes.nodes == 1:
        return (
            f'advice: {scheme.name} compresses weights between nodes only; on one node take "qsdp"'
        )
    if scheme.lossless and not all(map(scheme.sends_lossless, dtypes)):
        return (
            "fp32 weights are sent in full precision: lossless differences take 16 bits; give "
            "MixedPrecisionPolicy param_dtype=torch.bfloat16"
        )
    return ""


def on_one_rank(model: nn.Module, modules: Sequence[ShardedModule]) -> list[str]:
    """Return a notice of the parameter groups that have one rank, such as experts of that rank."""
    served = {id(sharded.group) for sharded in modules}
    others = [name for name, _, group in groups_of(model) if id(group) not in served]
    if not others:
        return []
    return [
        f"{len(others)} module(s), such as {others[0] or 'the root'}, have a mesh of one rank: "
        "nothing of them is sent"
    ]


def untried_torch() -> list[str]:
    """Return a notice of a torch that is newer than all whose FSDP2 was tried."""
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    if release <= NEWEST_TRIED:
        return []
    newest = ".".join(map(str, NEWEST_TRIED))
    return [f"torch {torch.__version__} is newer than {newest}, the last that FSDP2 was tried with"]
