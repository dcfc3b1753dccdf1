"""What works together with quantized communication, as docs/support.md lists it.

A row is tested or refused, never merely believed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tests.distributed import scenarios
from tests.distributed.features import DEEPSPEED_FEATURES, separate_experts
from tests.distributed.models import settings
from tests.distributed.scenarios import featured

ALL = (1, 2, 3)
Version = tuple[int, int]
V017, V018 = (0, 17), (0, 18)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """``train(stage, block)`` with and without the block ends with the same loss.

    fails: by version of DeepSpeed, stages that it cannot train without the plugin either.
    exact_gradients: versions in which gradients stay on DeepSpeed's own path.
    rough: Muon takes rounding for directions of their own, so losses may differ more.
    few_ranks: some parameters live on a subset of ranks.
    """

    feature: str
    train: Callable[[int, Any], scenarios.Outcome]
    stages: tuple[int, ...] = ALL
    fails: Mapping[Version, tuple[int, ...]] = field(default_factory=dict)
    exact_gradients: tuple[Version, ...] = ()
    rough: bool = False
    few_ranks: bool = False


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A DeepSpeed config that ends at start-up; ``parts`` are in the message."""

    feature: str
    parts: tuple[str, ...]
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = ALL
    dtype: str = "bf16"
    since: Version = (0, 17)  # an older DeepSpeed ignores the setting

    def config(self, stage: int, block: dict[str, Any]) -> dict[str, Any]:
        return settings(stage, block, dtype=self.dtype, zero=self.zero, **self.top)


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """Tested by a test of its own."""

    feature: str
    test: str
    stages: tuple[int, ...] = ALL


MUON = {"groups": scenarios.matrices_apart, "optimizer": scenarios.muon}
SEQUENCES = featured(top={"data_parallel_size": 2, "sequence_parallel_size": 2})


def mixture(ep_size: int) -> Callable[[int, Any], scenarios.Outcome]:
    return featured(model=partial(scenarios.Mixture, ep_size), groups=separate_experts)


TRAINED = (
    Trained(
        feature="MoE, every rank all experts", train=mixture(1),
        stages=(1, 2),
    ),
    Trained(
        feature="MoE, experts split over ranks", train=mixture(2),
        stages=(1, 2), few_ranks=True,
    ),
    Trained(
        feature="AutoEP", train=scenarios.auto_experts, stages=(1, 2), few_ranks=True,
        fails={V017: (1, 2), V018: (1, 2)},
    ),
    Trained(
        feature="pipeline parallel, fp32", train=scenarios.pipeline, stages=(1,), few_ranks=True,
    ),
    Trained(
        feature="pipeline parallel, bf16", train=partial(scenarios.pipeline, dtype="bf16"),
        stages=(1,), few_ranks=True,
    ),
    Trained(
        feature="tensor parallel (mpu)", train=scenarios.tensor_parallel, few_ranks=True,
    ),
    Trained(
        feature="tensor parallel (AutoTP, `partition_config`)", few_ranks=True,
        train=scenarios.auto_tensor_parallel, fails={V017: ALL, V018: (3,)},
    ),
    Trained(
        feature="sequence parallel (config)", train=SEQUENCES, stages=(1, 2), few_ranks=True,
    ),
    Trained(
        feature="sequence parallel (config) ", train=SEQUENCES, stages=(3,),
        fails={V017: (3,), V018: (3,)},
    ),
    Trained(feature="frozen int8 base", train=featured(model=scenarios.Quantized)),
    Trained(
        feature="frozen bf16 base, fp32 adapter",
        train=featured(model=scenarios.MixedDtypes, dtype="fp32"),
    ),
    Trained(feature="Muon", train=featured(**MUON), stages=(1, 2), rough=True),
    Trained(
        feature="Muon ", train=featured(**MUON, zero={"reduce_scatter": False}), stages=(3,),
        rough=True,
        exact_gradients=(V017, V018), fails={V018: (3,)},
    ),
    Trained(
        feature="SGD", train=featured(),
    ),
    Trained(
        feature="Adagrad", train=featured(optimizer=partial(torch.optim.Adagrad, lr=0.01)),
    ),
    Trained(
        feature="`engine.no_sync()`", train=featured(accumulation=2, step=scenarios.no_sync),
        stages=(1,),
    ),
    Trained(
        feature="`engine.compile()`, backend eager", train=featured(step=scenarios.compiled)
    ),
)  # fmt: skip

NVME = {"device": "nvme", "nvme_path": "/nowhere"}
REFUSED = (
    Refused(
        feature="optimizer offload to NVMe", zero={"offload_optimizer": NVME}, stages=(3,),
        parts=("offload_optimizer.device=nvme", "allowed: cpu, none"),
    ),
    Refused(
        feature="parameter offload to NVMe", zero={"offload_param": NVME}, stages=(3,),
        parts=("offload_param.device=nvme", "allowed: cpu, none"),
    ),
    Refused(
        feature="hpZ", zero={"zero_hpz_partition_size": 2},
        parts=("zero_hpz_partition_size=2", "ds_quant migrate"),
    ),
    Refused(
        feature="ZeRO++ quantized weights", zero={"zero_quantized_weights": True},
        parts=("zero_quantized_weights=true", "ds_quant migrate"),
    ),
    Refused(
        feature="ZeRO++ quantized frozen weights",
        zero={"zero_quantized_nontrainable_weights": True},
        parts=("zero_quantized_nontrainable_weights=true", "ds_quant migrate"),
    ),
    Refused(
        feature="ZeRO++ quantized gradients", zero={"zero_quantized_gradients": True},
        parts=("zero_quantized_gradients=true", "ds_quant migrate"),
    ),
    Refused(
        feature="MiCS", zero={"mics_shard_size": 2}, stages=(3,),
        parts=("mics_shard_size",),
    ),
    Refused(
        feature="DeepCompile", top={"compile": {"deepcompile": True}},
        parts=("compile.deepcompile=true", "set compile.deepcompile to false"),
    ),
    Refused(
        feature="BF16_Optimizer", top={"data_types": {"grad_accum_dtype": "fp32"}}, stages=(1,),
        parts=("data_types.grad_accum_dtype=fp32", "stage 2"),
    ),
    Refused(
        feature="ZenFlow", stages=(2,),
        zero={"zenflow": {"topk_ratio": 0.1}, "offload_optimizer": {"device": "cpu"}},
        parts=("zenflow", "remove"),
    ),
    Refused(
        feature="SuperOffload", stages=(3,),
        zero={"offload_optimizer": {"device": "cpu", "super_offload": True}}, since=(0, 18),
        parts=("super_offload=true", "set it to false"),
    ),
    Refused(
        feature="hybrid engine", top={"hybrid_engine": {"enabled": True}},
        parts=("hybrid_engine.enabled=true", "set it to false"),
    ),
    Refused(
        feature="AutoEP", top={"expert_parallel": {"enabled": True, "autoep_size": 2}},
        stages=(3,), parts=("expert_parallel.enabled=true under ZeRO-3", "stage 2"), since=(0, 19),
    ),
)  # fmt: skip

FEATURES = "test_features.py"
ELSEWHERE = (
    *(
        Elsewhere(feature=name, test=FEATURES, stages=feature.stages)
        for name, feature in DEEPSPEED_FEATURES.items()
    ),
    Elsewhere(
        feature="several engines in one process, trained in turn", test="test_support.py",
    ),
    Elsewhere(feature="engine rebuilt in one process", test="test_equal_runs.py"),
    Elsewhere(feature="checkpoints, resumed", test="test_checkpoint.py"),
    Elsewhere(feature="Ulysses (Trainer's `ParallelismConfig`)", test="test_ulysses.py"),
    Elsewhere(feature="`offload_states`, `reload_states`", test="test_offload_states.py"),
    Elsewhere(
        feature="QLoRA: 4-bit base stored as bf16 (bitsandbytes)", test="test_packed.py",
        stages=(3,),
    ),
)  # fmt: skip
