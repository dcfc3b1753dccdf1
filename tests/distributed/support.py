"""What works together with quantized communication: the table behind docs/support.md.

A row is tested or refused, never merely believed. ``python -m tests.distributed.support`` writes
the page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.distributed import scenarios
from tests.distributed.features import DEEPSPEED_FEATURES
from tests.distributed.models import settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "support.md"
ALL = (1, 2, 3)
Version = tuple[int, int]
V017, V018 = (0, 17), (0, 18)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """``train(stage, block)`` with and without the block ends with the same loss.

    fails: by version of DeepSpeed, stages that it cannot train without the plugin either.
    exact_gradients: gradients stay on DeepSpeed's own path, except in the versions ``travel``.
    few_ranks: some parameters belong to part of the ranks.
    """

    feature: str
    train: Callable[[int, Any], scenarios.Outcome]
    stages: tuple[int, ...] = ALL
    note: str = ""
    fails: Mapping[Version, tuple[int, ...]] = field(default_factory=dict)
    exact_gradients: bool = False
    travel: tuple[Version, ...] = ()
    few_ranks: bool = False

    def remark(self) -> str:
        """For the page."""
        parts = [self.note] if self.note else []
        for (major, minor), stages in self.fails.items():
            parts.append(f"DeepSpeed {major}.{minor} cannot under ZeRO-{_list(stages)}")
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A DeepSpeed config that ends at start-up; ``parts`` are in the message."""

    feature: str
    reason: str
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
    note: str = ""


ONE_LEVEL = "where ranks are fewer than the world: one level, no node shard"
DEEPSPEED_REFUSES = "DeepSpeed refuses the other stages"
WHOLE_MATRICES = "gradients stay exact: Muon needs whole matrices"

TRAINED = (
    Trained(
        feature="MoE, every rank all experts", train=partial(scenarios.experts, ep_size=1),
        stages=(1, 2), note=DEEPSPEED_REFUSES,
    ),
    Trained(
        feature="MoE, experts split over ranks", train=partial(scenarios.experts, ep_size=2),
        stages=(1, 2), few_ranks=True, note=f"{ONE_LEVEL}; {DEEPSPEED_REFUSES}",
    ),
    Trained(
        feature="pipeline parallel, fp32", train=scenarios.pipeline, stages=(1,), few_ranks=True,
        note=f"{ONE_LEVEL}; {DEEPSPEED_REFUSES}",
    ),
    Trained(
        feature="pipeline parallel, bf16", train=partial(scenarios.pipeline, dtype="bf16"),
        stages=(1,), few_ranks=True, note=f"{ONE_LEVEL}; {DEEPSPEED_REFUSES}",
    ),
    Trained(
        feature="tensor parallel (mpu)", train=scenarios.tensor_parallel, few_ranks=True,
        note=ONE_LEVEL,
    ),
    Trained(
        feature="tensor parallel (AutoTP, `partition_config`)", few_ranks=True,
        train=scenarios.auto_tensor_parallel, note=ONE_LEVEL, fails={V017: ALL, V018: (3,)},
    ),
    Trained(
        feature="sequence parallel (config)", train=scenarios.sequence_parallel, stages=(1, 2),
        few_ranks=True, note=ONE_LEVEL,
    ),
    Trained(
        feature="sequence parallel (config) ", train=scenarios.sequence_parallel, stages=(3,),
        note="weights are split over all ranks", fails={V017: (3,), V018: (3,)},
    ),
    Trained(
        feature="frozen int8 base", train=scenarios.integer_base,
        note="non-float parameters are left to DeepSpeed and counted as full precision",
    ),
    Trained(feature="frozen bf16 base, fp32 adapter", train=scenarios.mixed_dtypes),
    Trained(
        feature="Muon", train=scenarios.muon, stages=(1, 2), exact_gradients=True,
        travel=(V017, V018), note=f"{WHOLE_MATRICES}; they travel with DeepSpeed 0.17 and 0.18",
    ),
    Trained(
        feature="Muon ", train=scenarios.muon, stages=(3,), exact_gradients=True,
        fails={V018: (3,)}, note=WHOLE_MATRICES,
    ),
    Trained(
        feature="SGD", train=partial(
            scenarios.other_optimizer, make=partial(torch.optim.SGD, lr=0.5)
        ),
    ),
    Trained(
        feature="Adagrad", train=partial(
            scenarios.other_optimizer, make=partial(torch.optim.Adagrad, lr=0.01)
        ),
    ),
    Trained(
        feature="`engine.no_sync()`", train=scenarios.no_sync, stages=(1,), note=DEEPSPEED_REFUSES
    ),
    Trained(feature="`engine.compile()`, backend eager", train=scenarios.compiled),
)  # fmt: skip

NVME = {"device": "nvme", "nvme_path": "/nowhere"}
REFUSED = (
    Refused(
        feature="optimizer offload to NVMe", zero={"offload_optimizer": NVME}, stages=(3,),
        reason="not tested; use cpu. Under ZeRO-1/2 DeepSpeed itself takes the CPU instead",
        parts=("offload_optimizer.device=nvme", "allowed: cpu, none"),
    ),
    Refused(
        feature="parameter offload to NVMe", zero={"offload_param": NVME}, stages=(3,),
        reason="shards are not in memory when they are encoded; use cpu",
        parts=("offload_param.device=nvme", "allowed: cpu, none"),
    ),
    Refused(
        feature="hpZ", zero={"zero_hpz_partition_size": 2},
        reason="use `node_shard` or scheme `zeropp`",
        parts=("zero_hpz_partition_size=2", "remove"),
    ),
    Refused(
        feature="ZeRO++ quantized weights", zero={"zero_quantized_weights": True},
        reason="both would quantize; use scheme `zeropp`",
        parts=("zero_quantized_weights=true", "remove"),
    ),
    Refused(
        feature="ZeRO++ quantized frozen weights",
        zero={"zero_quantized_nontrainable_weights": True},
        reason="both would quantize; use scheme `zeropp`",
        parts=("zero_quantized_nontrainable_weights=true", "remove"),
    ),
    Refused(
        feature="ZeRO++ quantized gradients", zero={"zero_quantized_gradients": True},
        reason="both would quantize; use scheme `zeropp`",
        parts=("zero_quantized_gradients=true", "remove"),
    ),
    Refused(
        feature="MiCS", zero={"mics_shard_size": 2}, stages=(3,),
        reason="keeps shards of its own; DeepSpeed 0.19.7 removed it. Use `node_shard`",
        parts=("mics_shard_size",),
    ),
    Refused(
        feature="DeepCompile", top={"compile": {"deepcompile": True}},
        reason="removes the hooks that the plugin needs; `engine.compile()` works",
        parts=("compile.deepcompile=true", "set compile.deepcompile to false"),
    ),
    Refused(
        feature="BF16_Optimizer", top={"data_types": {"grad_accum_dtype": "fp32"}}, stages=(1,),
        reason="ZeRO-1, bf16 and fp32 accumulation: needs full gradients on every rank; use ZeRO-2",
        parts=("data_types.grad_accum_dtype=fp32", "stage 2"),
    ),
    Refused(
        feature="ZenFlow", stages=(2,),
        zero={"zenflow": {"topk_ratio": 0.1}, "offload_optimizer": {"device": "cpu"}},
        reason="updates weights outside the optimizer step", parts=("zenflow", "remove"),
    ),
    Refused(
        feature="SuperOffload", stages=(3,),
        zero={"offload_optimizer": {"device": "cpu", "super_offload": True}}, since=(0, 18),
        reason="needs CUDA, not tested", parts=("super_offload=true", "set it to false"),
    ),
    Refused(
        feature="hybrid engine", top={"hybrid_engine": {"enabled": True}},
        reason="generates with kernels of its own, not tested",
        parts=("hybrid_engine.enabled=true", "set it to false"),
    ),
    Refused(
        feature="AutoEP", top={"expert_parallel": {"enabled": True, "autoep_size": 2}},
        reason="not tested; use deepspeed.moe under ZeRO-1/2", since=(0, 19),
        parts=("expert_parallel", "MoE"),
    ),
)  # fmt: skip

FEATURES = "test_features.py"
ELSEWHERE = (
    *(
        Elsewhere(feature=name, test=FEATURES, stages=feature.stages)
        for name, feature in DEEPSPEED_FEATURES.items()
    ),
    Elsewhere(
        feature="`reduce_scatter: false`", test=FEATURES,
        note="gradients stay exact, and the start-up line says so",
    ),
    Elsewhere(
        feature="several engines in one process, trained in turn", test="test_support.py",
        note="every one equals its run alone, bit for bit",
    ),
    Elsewhere(feature="engine rebuilt in one process", test="test_support.py"),
    Elsewhere(feature="checkpoints, resumed", test="test_checkpoint.py"),
)  # fmt: skip

INTRODUCTION = """\
# What works together

Made by `make report` from `tests/distributed/support.py`; do not edit. Everything was
tried on CPU with gloo, 4 ranks for rows of `test_support.py`: one level with `qsdp` and two nodes
of two ranks with `sdp4bit`, against the same training without the plugin. "Refused" is an error at
start-up that names the setting and the way out. What is in neither table has not been tried.
DeepSpeed is 0.19.8; rows of `test_support.py` were also trained with 0.18.9 and 0.17.6, and the
remark says what these cannot do themselves.
"""


def page() -> str:
    """docs/support.md."""
    works = [(r.feature.strip(), r.stages, r.remark(), "test_support.py") for r in TRAINED]
    works += [(r.feature, r.stages, r.note, r.test) for r in ELSEWHERE]
    tested = ["| works | ZeRO | remark | tested in |", "| --- | --- | --- | --- |"]
    tested += [f"| {name} | {_list(s)} | {note} | `{test}` |" for name, s, note, test in works]
    refused = ["| refused | ZeRO | why, and what instead |", "| --- | --- | --- |"]
    refused += [f"| {r.feature} | {_list(r.stages)} | {r.reason} |" for r in REFUSED]
    return "\n".join([INTRODUCTION, *tested, "", *refused, ""])


def _list(stages: tuple[int, ...]) -> str:
    return ", ".join(str(stage) for stage in stages)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
