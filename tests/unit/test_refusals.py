"""Settings: those that look like refused ones and work, those that are advised against, and those
with which DeepSpeed loses gradients.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest

from ds_quant.config.presets import preset_names
from ds_quant.config.schema import ConfigError, parse_block
from ds_quant.policy import refusals
from ds_quant.policy.refusals import stock_gradients_reason
from ds_quant.zero.advice import advice
from ds_quant.zero.optimizer_hooks import lost_gradients

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
    "a stage as DeepSpeed also reads it": (2, {"stage": "2.0"}, {}),
    "ZeRO-3, which does not use it": (3, {"allgather_bucket_size": 0}, {}),
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
    assert refusals.can_start(config, stage=3, world=world, node_size=node_size) is not refused


REASON = "{} a copy of the weights in every node, which with one GPU is the whole model, 14 GB more"
STAGE_2 = "use zero_optimization.stage 2 (which keeps that copy anyway)"


@pytest.mark.parametrize(
    ("block", "setting", "reason", "ways_out"),
    [
        (
            {"scheme": "eden4"},
            'scheme "eden4"',
            "its weight differences need",
            f'{STAGE_2}, or use scheme "qsdp"',
        ),
        (
            {"scheme": "hybrid"},
            'scheme "hybrid"',
            "it keeps",
            f'{STAGE_2} with scheme "lossless", or use scheme "full_precision"',
        ),
        (
            {"weights": {"difference": True}},
            "quantized_comm.weights.difference=true",
            "weight differences need",
            f"{STAGE_2}, or leave quantized_comm.weights.difference out",
        ),
        (
            {"scheme": "full_precision", "node_shard": True},
            "quantized_comm.node_shard=true",
            "it keeps",
            f"{STAGE_2}, or leave quantized_comm.node_shard out",
        ),
        (
            {"scheme": "sdp4bit", "weights": {"lossless": True}},
            "quantized_comm.weights.lossless=true",
            "lossless weight differences need",
            f'{STAGE_2}, or use scheme "qsdp"',
        ),
    ],
)
def test_one_gpu_per_node_is_refused_with_a_setting_that_the_user_wrote(
    block: dict[str, Any], setting: str, reason: str, ways_out: str
) -> None:
    config = parse_block(block)
    ways_out += ", or set quantized_comm.allow_full_replica to true to accept that copy"
    with pytest.raises(ConfigError) as error:
        refusals.refuse_full_replica(config, world=2, node_size=1, model_bytes=14e9)
    assert str(error.value) == (
        f"{setting} under ZeRO-3 needs two GPUs per node or more ({REASON.format(reason)}): "
        f"{ways_out}"
    )
    refusals.refuse_full_replica(config, world=4, node_size=2, model_bytes=None)


def test_the_refusal_under_fsdp2_names_no_stage() -> None:
    with pytest.raises(ConfigError, match='scheme "eden4" under FSDP2 needs two') as error:
        refusals.refuse_full_replica(
            parse_block({"scheme": "eden4"}), world=2, node_size=1, model_bytes=None, fsdp2=True
        )
    assert "stage" not in str(error.value) and 'use scheme "qsdp"' in str(error.value)


@pytest.mark.parametrize("name", preset_names())
def test_the_scheme_that_is_advised_instead_starts(name: str) -> None:
    """Under ZeRO-3 on nodes with one GPU."""
    config = parse_block({"scheme": name})
    if refusals.can_start(config, stage=3, world=2, node_size=1):
        return
    *_, instead = re.findall(r'use scheme "(\w+)"', refusals.two_per_node(config))
    assert refusals.can_start(parse_block({"scheme": instead}), stage=3, world=2, node_size=1)
    in_stage_2 = re.findall(r'stage 2 .*? with scheme "(\w+)"', refusals.two_per_node(config))
    for scheme in (*in_stage_2, name):
        assert refusals.can_start(parse_block({"scheme": scheme}), stage=2, world=2, node_size=1)


@pytest.mark.parametrize(
    ("stage", "off", "exact"),
    [
        (2, "use_multi_rank_bucket_allreduce", True), (3, "use_multi_rank_bucket_allreduce", False),
        (1, "contiguous_gradients", True), (3, "contiguous_gradients", False),
        (3, "reduce_scatter", True), (2, "overlap_comm", False),
    ],
)  # fmt: skip
def test_settings_that_keep_gradients_on_deepspeeds_path(stage: int, off: str, exact: bool) -> None:
    reason = stock_gradients_reason(stage, lambda name: name != off)
    assert reason == (f"zero_optimization.{off} is false" if exact else None)


# ---- advice on a device with streams ----


def found(monkeypatch: pytest.MonkeyPatch, connections: str = "", **config: Any) -> list[str]:
    """The settings named, for an engine of this DeepSpeed config."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)

    def offload(name: str) -> Any:
        given = config.get(name)
        return None if given is None else SimpleNamespace(**given)

    engine = SimpleNamespace(
        _config=SimpleNamespace(_param_dict=config),
        zero_offload_optimizer=lambda: offload("offload_optimizer"),
        zero_offload_param=lambda: offload("offload_param"),
    )
    return [sentence.split(" ")[0] for sentence in advice(engine)]


def test_nothing_is_said_of_what_is_right(monkeypatch) -> None:
    assert found(monkeypatch) == found(monkeypatch, "8", comms_logger={"enabled": False}) == []
    pinned = {"device": "cpu", "pin_memory": True}
    assert found(monkeypatch, offload_param=pinned, offload_optimizer=pinned) == []


def test_what_costs_time_is_named_with_its_value(monkeypatch) -> None:
    assert found(monkeypatch, "1") == ["CUDA_DEVICE_MAX_CONNECTIONS=1"]
    assert found(monkeypatch, comms_logger={"enabled": True}) == ["comms_logger.enabled=true"]
    loose = {"device": "cpu", "pin_memory": False}
    assert found(monkeypatch, offload_param=loose, offload_optimizer=loose) == [
        "zero_optimization.offload_optimizer.pin_memory=false",
        "zero_optimization.offload_param.pin_memory=false",
    ]


# ---- gradients that DeepSpeed loses ----


@pytest.mark.parametrize(
    ("version", "stage", "accumulation", "offloaded", "said"),
    [
        ("0.17.6", 2, 2, False, ["forgets"]), ("0.17.6", 2, 1, False, []),
        ("0.17.6", 1, 2, False, []), ("0.18.2", 2, 2, False, ["forgets"]),
        ("0.18.3", 2, 2, False, ["8224"]), ("0.19.3", 2, 1, False, ["8224"]),
        ("0.19.3", 1, 1, False, []), ("0.19.4", 2, 1, False, []),
        ("0.18.9", 2, 3, True, ["forgets"]), ("0.18.9", 2, 2, True, []),
        ("0.19.0", 2, 3, True, []),
    ],
)  # fmt: skip
def test_the_line_names_the_version_that_loses_gradients_and_the_setting(
    monkeypatch, version: str, stage: int, accumulation: int, offloaded: bool, said: list[str]
) -> None:
    monkeypatch.setattr(deepspeed, "__version__", version)
    engine = SimpleNamespace(gradient_accumulation_steps=lambda: accumulation)
    optimizer = SimpleNamespace(partition_gradients=stage == 2, cpu_offload=offloaded)
    lines = list(lost_gradients(engine, optimizer, waiting=False))
    assert len(lines) == len(said)
    for line, word in zip(lines, said, strict=True):
        assert word in line and line.startswith(f"DeepSpeed {version} ")
        if word == "forgets":
            assert f"gradient_accumulation_steps={accumulation} needs" in line
