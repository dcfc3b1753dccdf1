"""Settings that look like ones that are refused, and work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_quant.config.schema import parse_block
from ds_quant.policy import refusals
from ds_quant.policy.refusals import exact_gradient_reason
from ds_quant.zero import safety
from ds_quant.zero.safety import judge_first_step

NVME = {"offload_optimizer": {"device": "nvme", "nvme_path": "/local"}}
FP32_SUMS = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
CPU = {"offload_optimizer": {"device": "cpu"}}
# Name -> stage, keys of zero_optimization, keys beside it.
ACCEPTED: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "hpZ of one rank": (3, {"zero_hpz_partition_size": 1}, {}),
    "ZeRO-1, offloaded, fp32 sums": (1, CPU, FP32_SUMS),
    "ZeRO-2, fp32 sums": (2, {}, FP32_SUMS),
    "fp32 sums of fp32 gradients": (1, {}, {"data_types": {"grad_accum_dtype": "fp32"}}),
    "ZeRO-1, optimizer on NVMe": (1, NVME, {}),
    "ZeRO-2, optimizer on NVMe": (2, NVME, {}),
    "ZeRO-3, optimizer on the CPU": (3, CPU, {}),
    "no shards of MiCS": (3, {"mics_shard_size": -1}, {}),
    "ZeRO++ switched off": (3, {"zero_quantized_weights": False}, {}),
    "buckets of one owner": (2, {"use_multi_rank_bucket_allreduce": False}, {}),
    "DeepCompile switched off": (2, {}, {"compile": {"deepcompile": False}}),
    "hybrid engine switched off": (2, {}, {"hybrid_engine": {"enabled": False}}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_looks_like_it_is_not_refused(name: str) -> None:
    stage, zero, more = ACCEPTED[name]
    config = {"zero_optimization": {"stage": stage, **zero}, **more}
    refusals.refuse(config, parse_block({"scheme": "sdp4bit"}))


@pytest.mark.parametrize(
    ("world", "node_size", "refused"), [(1, 1, False), (2, 2, False), (2, 1, True)]
)
def test_a_full_replica_needs_a_second_rank(world: int, node_size: int, refused: bool) -> None:
    config = parse_block({"scheme": "sdp4bit"})
    assert refusals.starts(config, stage=3, world=world, node_size=node_size) is not refused


@pytest.mark.parametrize(
    ("stage", "off", "exact"),
    [
        (2, "use_multi_rank_bucket_allreduce", True), (3, "use_multi_rank_bucket_allreduce", False),
        (1, "contiguous_gradients", True), (3, "contiguous_gradients", False),
        (3, "reduce_scatter", True), (2, "overlap_comm", False),
    ],
)  # fmt: skip
def test_settings_that_keep_gradients_on_deepspeeds_path(stage: int, off: str, exact: bool) -> None:
    reason = exact_gradient_reason(stage, lambda name: name != off)
    assert reason == (f"zero_optimization.{off} is false" if exact else None)


@pytest.mark.parametrize(("lossless", "warned"), [(True, []), (False, ["weights"])])
def test_lossless_differences_of_a_first_step_may_be_short(
    lossless: bool, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that changes nothing sends nearly nothing, and nothing is wrong."""
    expected = {role: {"intra": 0.0, "inter": 1000.0} for role in ("weights", "gradients")}
    arrived = {"weights": {"inter": 499}, "gradients": {"inter": 501}}
    plugin: Any = SimpleNamespace(
        bill=lambda: SimpleNamespace(received=lambda *args, **how: expected),
        topology=SimpleNamespace(nodes=2, node_size=1),
        scheme=SimpleNamespace(lossless=lossless), has_few_ranks=False,
        hooks=SimpleNamespace(after_step=[], before_last_buckets=[]),
        asked={"weights", "gradients"},
        traffic=SimpleNamespace(received=arrived),
    )  # fmt: skip
    logged: list[str] = []
    monkeypatch.setattr(safety.log, "log_rank0", logged.append)
    judge_first_step(plugin, ["weights", "gradients"])
    (judge,) = plugin.hooks.after_step
    judge(True)  # skipped: the next one counts
    judge(False)
    assert [role for role in expected for line in logged if f"bytes of {role} to" in line] == warned
    assert plugin.hooks.after_step == []
