"""Refuse settings that cannot work together, at start-up and in ``ds_quant validate`` alike.

Only the text of the DeepSpeed config is read, so both decide by the same facts. Loads neither torch
nor deepspeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ds_quant.config.schema import KEY, ConfigError, QuantizedCommConfig

_YES = ("true", "1", "yes", "on", "t", "y")  # as in pydantic, with which DeepSpeed reads its config
_ZEROPP_FLAGS = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)

# Optimizers with compressed communication, and the plain optimizer of each.
ONE_BIT = {"onebitadam": "AdamW", "zerooneadam": "AdamW", "onebitlamb": "Lamb"}

# Older names that DeepSpeed still reads, and its present ones. The first nine are names of fields
# whose alias is usual.
_RENAMED_ZERO_KEYS = {
    "allgather_sequential": "stage3_allgather_sequential",
    "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "module_granularity_threshold": "stage3_module_granularity_threshold",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
_OFFLOAD_FLAGS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
_FP32_NAMES = ("fp32", "float32", "float", "torch.float32")  # in the section data_types

_MIGRATE = '"ds_quant migrate ds_config.json" translates the settings'


def section(param_dict: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return ``whole_section`` without the values that a Trainer fills in."""
    settings = whole_section(param_dict, name)
    return {key: setting for key, setting in settings.items() if setting != "auto"}


def whole_section(param_dict: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section of a DeepSpeed config under its present names."""
    value = param_dict.get(name)
    if name == "bf16" and value is None:
        value = param_dict.get("bfloat16")
    if name == "zero_optimization" and isinstance(value, bool):
        value = {"stage": int(value)}
        if "allgather_size" in param_dict:
            value["allgather_bucket_size"] = param_dict["allgather_size"]
    if not isinstance(value, dict):
        return {}
    if name == "zero_optimization":
        return _present_names(value)
    return value


def _present_names(zero: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section zero_optimization under its present names."""
    settings: dict[str, Any] = {}
    for key, value in zero.items():
        if key not in _OFFLOAD_FLAGS:
            settings[_RENAMED_ZERO_KEYS.get(key, key)] = value
        elif is_on(value):
            settings[_OFFLOAD_FLAGS[key]] = {"device": "cpu"}
    return settings


def stage_of(param_dict: Mapping[str, Any]) -> Any:
    """Return the ZeRO stage as an int if it is one, else as written; None if it is absent."""
    stage = section(param_dict, "zero_optimization").get("stage")
    return int(number(stage)) if number(stage) in (0, 1, 2, 3) else stage


def is_on(value: object) -> bool:
    """Return True if DeepSpeed reads a flag as true."""
    return str(value).lower() in _YES


def low_precision(param_dict: Mapping[str, Any]) -> list[str]:
    """Return those of bf16 and fp16 that the config enables."""
    return [name for name in ("bf16", "fp16") if is_on(section(param_dict, name).get("enabled"))]


def automatic_precision(param_dict: Mapping[str, Any]) -> bool:
    """Return True if a Trainer decides about bf16 or fp16: it enables one of them or none."""
    return any(
        whole_section(param_dict, name).get("enabled") == "auto" for name in ("bf16", "fp16")
    )


def number(value: Any) -> float:
    """Return a number as DeepSpeed reads it; -1 for a value that is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return -1.0


def together(*checks: Callable[[], object]) -> None:
    """Raise one ``ConfigError`` with the problems of all checks, if there are any."""
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)


def refuse(
    param_dict: Mapping[str, Any], config: QuantizedCommConfig, *, bf16_optimizer: bool = False
) -> None:
    """Raise ConfigError if the block ``config`` cannot work in its DeepSpeed config."""
    together(
        lambda: config.validate_stage(stage_of(param_dict)),
        lambda: refuse_unsupported(param_dict, bf16_optimizer=bf16_optimizer),
    )


def refuse_block(config: QuantizedCommConfig, *, stage: int, world: int) -> None:
    """Raise ConfigError if a block cannot work under FSDP2 or DDP, whatever the model is.

    stage: 3 for FSDP2, which shards as ZeRO-3 does; 0 for DDP, which sends no weights.
    """
    checks: list[Callable[[], object]] = [lambda: config.validate_world(world)]
    if stage > 0:
        checks.append(lambda: config.validate_stage(stage))
    together(*checks)


def refuse_unsupported(param_dict: Mapping[str, Any], *, bf16_optimizer: bool = False) -> None:
    """Raise ConfigError for settings of a DeepSpeed config that the plugin does not support.

    bf16_optimizer: True if DeepSpeed is known to use an optimizer without ZeRO's shards.
    """
    conflicts = [
        *_optimizer_without_shards(param_dict, bf16_optimizer),
        *_other_compression(param_dict),
        *_offload(param_dict),
        *_other_features(param_dict),
    ]
    if conflicts:
        raise ConfigError(
            *[
                f"quantized_comm cannot be used with {setting}: {remedy}"
                for setting, remedy in conflicts
            ]
        )


Conflict = tuple[str, str]  # (setting with its value, reason and remedy)


def _optimizer_without_shards(
    param_dict: Mapping[str, Any], bf16_optimizer: bool
) -> Iterator[Conflict]:
    offload_optimizer = section(section(param_dict, "zero_optimization"), "offload_optimizer")
    has_fp32_sums = (
        stage_of(param_dict) == 1
        and is_on(section(param_dict, "bf16").get("enabled"))
        and str(section(param_dict, "data_types").get("grad_accum_dtype")) in _FP32_NAMES
        and offload_optimizer.get("device") != "cpu"
    )
    if bf16_optimizer or has_fp32_sums:
        yield (
            "data_types.grad_accum_dtype=fp32 with bf16 under ZeRO-1",
            "DeepSpeed then uses BF16_Optimizer (0.17: FP16_UnfusedOptimizer, without ZeRO), which "
            "needs full gradients on every rank; use zero_optimization.stage 2, or leave "
            "data_types.grad_accum_dtype out",
        )
    if is_on(section(param_dict, "compile").get("deepcompile")):
        yield (
            "compile.deepcompile=true",
            "DeepCompile removes the hooks this plugin needs; set compile.deepcompile to false "
            "(plain engine.compile() works)",
        )


def _other_compression(param_dict: Mapping[str, Any]) -> Iterator[Conflict]:
    zero = section(param_dict, "zero_optimization")
    zeropp = [f"{flag}=true" for flag in _ZEROPP_FLAGS if is_on(zero.get(flag))]
    if number(zero.get("zero_hpz_partition_size")) > 1:
        zeropp.append(f"zero_hpz_partition_size={zero['zero_hpz_partition_size']}")
    if zeropp:
        yield (
            ", ".join(f"zero_optimization.{setting}" for setting in zeropp),
            f"ZeRO++ and quantized_comm would both quantize; {_MIGRATE}",
        )
    if number(zero.get("mics_shard_size")) > 0:
        yield "zero_optimization.mics_shard_size", f"MiCS keeps its own shards; {_MIGRATE}"
    optimizer = section(param_dict, "optimizer").get("type")
    if str(optimizer).lower() in ONE_BIT:
        yield f"optimizer.type={optimizer}", f"it compresses what it sends by itself; {_MIGRATE}"


def _offload(param_dict: Mapping[str, Any]) -> Iterator[Conflict]:
    zero = section(param_dict, "zero_optimization")
    offload_optimizer = section(zero, "offload_optimizer")
    if section(zero, "offload_param").get("device") == "nvme":
        yield (
            "zero_optimization.offload_param.device=nvme",
            "parameters on NVMe are not supported; allowed: cpu, none",
        )
    if zero.get("zenflow") is not None:
        yield "zero_optimization.zenflow", "ZenFlow has update paths of its own; remove zenflow"
    if is_on(offload_optimizer.get("super_offload")):
        yield (
            "zero_optimization.offload_optimizer.super_offload=true",
            "SuperOffload is not supported; set it to false",
        )
    if stage_of(param_dict) == 3 and offload_optimizer.get("device") == "nvme":
        yield (
            "zero_optimization.offload_optimizer.device=nvme under ZeRO-3",
            "not tested; allowed: cpu, none",
        )


def _other_features(param_dict: Mapping[str, Any]) -> Iterator[Conflict]:
    stage = stage_of(param_dict)
    zero = section(param_dict, "zero_optimization")
    if stage in (1, 2) and number(zero.get("allgather_bucket_size")) == 0:
        yield (
            f"zero_optimization.allgather_bucket_size=0 under ZeRO-{stage}",
            "DeepSpeed divides by it; set it to 5e7",
        )
    if is_on(section(param_dict, "hybrid_engine").get("enabled")):
        yield (
            "hybrid_engine.enabled=true",
            "generation with kernels of its own is not tested; set it to false",
        )
    if stage == 3 and is_on(section(param_dict, "expert_parallel").get("enabled")):
        yield (
            "expert_parallel.enabled=true under ZeRO-3",
            "AutoEP works under ZeRO-1 and 2; use zero_optimization.stage 2",
        )


def refuse_full_replica(
    config: QuantizedCommConfig,
    *,
    world: int,
    node_size: int,
    model_bytes: float | None,
    fsdp2: bool = False,
    is_part: bool = False,
) -> None:
    """Raise ConfigError under ZeRO-3 and FSDP2 for a node shard that is a full copy of the model on
    every rank.

    model_bytes: None if the model is not known. is_part: these ranks share a part of the model.
    """
    if node_size == 1 and world > 1 and needs_two_per_node(config):
        message = two_per_node(config, model_bytes=model_bytes, fsdp2=fsdp2, is_part=is_part)
        raise ConfigError(message)


def needs_two_per_node(config: QuantizedCommConfig) -> bool:
    """Return True if start-up refuses the block under ZeRO-3 on nodes with one rank."""
    return config.keeps_node_shard and not config.allow_full_replica


def two_per_node(
    config: QuantizedCommConfig,
    *,
    model_bytes: float | None = None,
    fsdp2: bool = False,
    is_part: bool = False,
) -> str:
    """Describe a block that needs several GPUs per node: its cause, the reason and the ways out."""
    setting, reason = _cause_of_node_shard(config)
    memory = "" if model_bytes is None else f", {model_bytes / 1e9:.3g} GB more"
    stage = "use zero_optimization.stage 2 (which keeps that copy anyway)"
    if not config.preset.keeps_node_shard:
        way_out = f"leave {setting.partition('=')[0]} out"
    else:
        way_out = f'use scheme "{config.without_node_shard}"'
        if config.without_node_shard == "full_precision":
            stage += ' with scheme "lossless"'
    if not fsdp2:
        way_out = f"{stage}, or {way_out}"
    whole = "the whole model"
    if is_part:
        whole = "all that the GPU and its mesh have, a part of the model"
    return (
        f"{setting} under {'FSDP2' if fsdp2 else 'ZeRO-3'} needs two GPUs per node or more "
        f"({reason} a copy of the weights in every node, which with one GPU is {whole}"
        f"{memory}): {way_out}, or set {KEY}.allow_full_replica to true to accept that copy"
    )


def _cause_of_node_shard(config: QuantizedCommConfig) -> tuple[str, str]:
    """Return the setting that asks for a node shard, and the beginning of its reason.

    The setting is the scheme if its own values ask for it, else the key of the user.
    """
    key = config.weights.difference_key
    if key is None:
        if config.preset.keeps_node_shard:
            return f'scheme "{config.scheme}"', "it keeps"
        return f"{KEY}.node_shard=true", "it keeps"
    differences = "lossless weight differences" if key == "lossless" else "weight differences"
    if config.preset.weights.difference_key == key:
        return f'scheme "{config.scheme}"', f"its {differences} need"
    return f"{KEY}.weights.{key}=true", f"{differences} need"


def can_start(config: QuantizedCommConfig, *, stage: int, world: int, node_size: int) -> bool:
    """Return True if start-up accepts the block under a stage and on nodes of a size.

    stage: 0 for DDP, which takes every block.
    """
    try:
        if stage > 0:
            config.validate_stage(stage)
        if stage == 3:
            refuse_full_replica(config, world=world, node_size=node_size, model_bytes=None)
    except ConfigError:
        return False
    return True


def stock_gradients_reason(stage: int, value_of: Callable[[str], object]) -> str | None:
    """Return the setting that makes DeepSpeed reduce gradients itself, or None.

    value_of: returns the value of a key of zero_optimization.
    """
    names = ["reduce_scatter"]
    if stage < 3:
        names += ["contiguous_gradients", "use_multi_rank_bucket_allreduce"]
    off = [name for name in names if not value_of(name)]
    return f"zero_optimization.{off[0]} is false" if off else None
