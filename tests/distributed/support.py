"""The rows of docs/support.md: features that train with quantized communication, or are refused.

Every row of the page is tested or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tests.distributed import scenarios
from tests.distributed.features import DEEPSPEED_FEATURES, Feature, separate_experts
from tests.distributed.models import settings

ALL = (1, 2, 3)
Version = tuple[int, int]
V017, V018 = (0, 17), (0, 18)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A feature that trains to the same loss with and without the block.

    fails: by version of DeepSpeed, stages that it cannot train, with or without the plugin.
    exact_gradients: versions in which gradients stay on DeepSpeed's own path.
    rough: losses may differ more, because Muon turns rounding errors into directions.
    few_ranks: some parameters have a process group smaller than the world.
    """

    feature: str
    how: Feature
    fails: Mapping[Version, tuple[int, ...]] = field(default_factory=dict)
    exact_gradients: tuple[Version, ...] = ()
    rough: bool = False
    few_ranks: bool = False

    @property
    def stages(self) -> tuple[int, ...]:
        return self.how.stages


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A DeepSpeed config that start-up refuses. parts: texts of the message."""

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
    """A feature with its own test. test: file name."""

    feature: str
    test: str
    stages: tuple[int, ...] = ALL


def unclipped(*stages: int, **fields: Any) -> Feature:
    """Return a feature without clipping, which would hide a wrong divisor.

    DeepSpeed clips by default.
    """
    top = {"gradient_clipping": 0.0, **fields.pop("top", {})}
    return Feature(stages=stages or ALL, top=top, **fields)


MUON = {"groups": scenarios.matrices_apart, "optimizer": scenarios.muon}
SLICED = {"model": scenarios.Sliced, "step": scenarios.neighbourly}
SEQUENCES = {"data_parallel_size": 2, "sequence_parallel_size": 2}
PIPELINE = {"model": scenarios.pipeline, "step": scenarios.piped}
AUTO_TP = {"tensor_parallel": scenarios.AUTO_TENSOR_PARALLEL}
EXPERTS = {
    size: {"model": partial(scenarios.Mixture, size), "groups": separate_experts} for size in (1, 2)
}


TRAINED = (
    Trained(feature="MoE, every rank all experts", how=unclipped(1, 2, **EXPERTS[1])),
    Trained(
        feature="MoE, experts split over ranks", how=unclipped(1, 2, **EXPERTS[2]), few_ranks=True
    ),
    Trained(
        feature="AutoEP", few_ranks=True, fails={V017: (1, 2), V018: (1, 2)},
        how=unclipped(1, 2, model=scenarios.AutoMixture, top=scenarios.AUTO_EXPERTS),
    ),
    Trained(
        feature="pipeline parallel, fp32", how=unclipped(1, dtype="fp32", **PIPELINE),
        few_ranks=True,
    ),
    Trained(feature="pipeline parallel, bf16", how=unclipped(1, **PIPELINE), few_ranks=True),
    Trained(
        feature="tensor parallel (mpu)", few_ranks=True,
        how=unclipped(**SLICED),
    ),
    Trained(
        feature="tensor parallel (AutoTP, `partition_config`)", few_ranks=True,
        how=unclipped(model=scenarios.Pair, step=scenarios.neighbourly, top=AUTO_TP),
        fails={V017: ALL, V018: (3,)},
    ),
    Trained(
        feature="sequence parallel (config)", how=unclipped(1, 2, top=SEQUENCES), few_ranks=True
    ),
    Trained(
        feature="sequence parallel (config) ", how=unclipped(3, top=SEQUENCES),
        fails={V017: (3,), V018: (3,)},
    ),
    Trained(feature="frozen int8 base", how=unclipped(model=scenarios.Quantized)),
    Trained(
        feature="frozen bf16 base, fp32 adapter",
        how=unclipped(model=scenarios.MixedDtypes, dtype="fp32"),
    ),
    Trained(feature="Muon", how=unclipped(1, 2, **MUON), rough=True),
    Trained(
        feature="Muon ", how=unclipped(3, **MUON, zero={"reduce_scatter": False}), rough=True,
        exact_gradients=(V017, V018), fails={V018: (3,)},
    ),
    Trained(feature="SGD", how=unclipped()),
    Trained(feature="Adagrad", how=unclipped(optimizer=partial(torch.optim.Adagrad, lr=0.01))),
    Trained(
        feature="`engine.no_sync()`", how=unclipped(1, accumulation=2, step=scenarios.no_sync)
    ),
    Trained(
        feature="`engine.compile()`, backend eager", how=unclipped(step=scenarios.compiled)
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
    Elsewhere(feature="Ulysses (Trainer's `ParallelismConfig`)", test="test_hf.py"),
    Elsewhere(feature="`offload_states`, `reload_states`", test="test_offload_states.py"),
    Elsewhere(
        feature="QLoRA: 4-bit base stored as bf16 (bitsandbytes)", test="test_packed.py",
        stages=(3,),
    ),
)  # fmt: skip
