"""Refusals and roll calls: what must be settled before a collective.

A rank that decides alone can hang the others, so every check reads facts that all ranks share and
every error names the setting, its value and the way out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as torch_dist

from ds_quant.config import ConfigError
from ds_quant.scheme import Scheme
from ds_quant.topology import Topology
from ds_quant.zero.handshake import Board, handshake
from ds_quant.zero.log import log_rank0

__all__ = ["handshake", "refuse_full_replica", "refuse_unsupported", "roll_call"]


def refuse_unsupported(facts: Mapping[str, Any]) -> None:
    """Raise ConfigError for combinations that cannot work; ``facts`` as ``seams.facts`` gives."""
    rules = (
        (facts["bf16_optimizer"], "data_types.grad_accum_dtype=fp32 with bf16 under ZeRO-1",
         "DeepSpeed then uses BF16_Optimizer (0.17: FP16_UnfusedOptimizer, without ZeRO), which "
         "needs full gradients on every rank; use zero_optimization.stage 2, or leave "
         "data_types.grad_accum_dtype out"),
        (facts["deepcompile"], "compile.deepcompile=true",
         "DeepCompile removes the hooks this plugin needs; set compile.deepcompile to false "
         "(plain engine.compile() works)"),
        (facts["zeropp"], ", ".join(f"zero_optimization.{k}" for k in facts["zeropp"]),
         "ZeRO++ and quantized_comm would both quantize; remove the ZeRO++ settings"),
        (facts["mics"], "zero_optimization.mics_shard_size",
         "MiCS keeps its own shards; remove mics_shard_size"),
        (facts["nvme_params"], "zero_optimization.offload_param.device=nvme",
         "parameters on NVMe are not supported; allowed: cpu, none"),
        (facts["zenflow"], "zero_optimization.zenflow",
         "ZenFlow has update paths of its own; remove zenflow"),
        (facts["super_offload"], "zero_optimization.offload_optimizer.super_offload=true",
         "SuperOffload is not supported; set it to false"),
    )  # fmt: skip
    rules += (
        (facts["nvme_optimizer"], "zero_optimization.offload_optimizer.device=nvme under ZeRO-3",
         "not tested; allowed: cpu, none"),
        (facts["hybrid_engine"], "hybrid_engine.enabled=true",
         "generation with kernels of its own is not tested; set it to false"),
        (facts["auto_experts"], "expert_parallel.enabled=true",
         "AutoEP is not tested; set it to false and use deepspeed.moe.layer.MoE under ZeRO-1 or 2"),
    )  # fmt: skip
    for refused, setting, remedy in rules:
        if refused:
            raise ConfigError(f"quantized_comm cannot be used with {setting}: {remedy}")


def refuse_full_replica(scheme: Scheme, topology: Topology, model_bytes: int) -> None:
    """Raise ConfigError for a node shard that is a full copy of the model on every rank."""
    if not scheme.node_shard or topology.node_size > 1 or topology.nodes == 1:
        return
    if not scheme.allow_full_replica:
        what = "weights.difference" if scheme.difference else "node_shard"
        raise ConfigError(
            f"quantized_comm.{what}=true with one rank per node: under ZeRO-3 the node shard is a "
            f"full copy of the weights, {model_bytes / 1e9:.3g} GB more on every rank; set "
            "quantized_comm.allow_full_replica to true to accept that, use zero_optimization.stage "
            '2 (which keeps that copy anyway), or a scheme without a node shard such as "qsdp"'
        )


def roll_call(what: str, *, rank: int, world: int, patience: float, timeout: float) -> None:
    """Wait through the store until every rank has called ``what``, which is a collective.

    Rank 0 warns after ``patience`` seconds, because it may be alone by mistake; others may also be
    late because they write a large file.

    Raises:
        RuntimeError: naming the ranks that have not called it within ``timeout`` seconds.
    """
    store = torch_dist.distributed_c10d._get_default_store()
    call = store.add(f"ds_quant/calls/{what}/{rank}", 1)
    board, ranks = Board(store, f"ds_quant/roll_call/{what}/{call}"), range(world)
    board.put(rank, "here")
    message = "quantized_comm: {} needs all ranks under ZeRO-1 and 2: not called on rank(s) {}"
    if board.arrive(ranks, patience):
        return
    if missing := board.missing(ranks):
        log_rank0(message.format(what, missing) + f" after {patience:g} s, still waiting")
    if not board.arrive(ranks, timeout) and (missing := board.missing(ranks)):
        raise RuntimeError(
            message.format(what, missing) + f" within {timeout:g} s. Call it on all ranks and let "
            "one of them write the files, as ZeRO-3 needs it too"
        )
