"""Refuse settings that cannot work together, alike at start-up and in ``ds_quant validate``.

Only the text of the DeepSpeed config is read, so that both see the same facts. Loads neither torch
nor deepspeed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ds_quant.config.schema import KEY, ConfigError, QuantizedCommConfig

_YES = ("true", "1", "yes", "on", "t", "y")  # as pydantic, which DeepSpeed reads its config with
_FLAGS = (
    "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",
)  # fmt: skip


# Optimizers that compress what they send, and the plain ones.
ONE_BIT = {"onebitadam": "AdamW", "zerooneadam": "AdamW", "onebitlamb": "Lamb"}


_MIGRATE = '"ds_quant migrate ds_config.json" translates the settings'


def section(param_dict: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a part of a DeepSpeed config, without the values that a Trainer would fill in."""
    value = param_dict.get(name)
    if name == "zero_optimization" and isinstance(value, bool):  # how it was written once
        return {"stage": int(value)}
    found = value if isinstance(value, dict) else {}
    return {key: item for key, item in found.items() if item != "auto"}


def stage_of(param_dict: Mapping[str, Any]) -> Any:
    """Return the ZeRO stage as written, None if it is not."""
    stage = section(param_dict, "zero_optimization").get("stage")
    return int(number(stage)) if number(stage) in (0, 1, 2, 3) else stage


def is_on(value: Any) -> bool:
    """Read a flag as DeepSpeed does."""
    return str(value).lower() in _YES


def low_precision(param_dict: Mapping[str, Any]) -> list[str]:
    """Return which of bf16 and fp16 the config switches on."""
    return [name for name in ("bf16", "fp16") if is_on(section(param_dict, name).get("enabled"))]


def automatic_precision(param_dict: Mapping[str, Any]) -> bool:
    """Whether a Trainer fills in bf16 or fp16, one of which is then switched on or none is."""
    given = (param_dict.get(name) for name in ("bf16", "fp16"))
    return any(isinstance(found, dict) and found.get("enabled") == "auto" for found in given)


def number(value: Any) -> float:
    """Read a number as DeepSpeed does; -1 for what is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return -1.0


def together(*checks: Callable[[], object]) -> None:
    """Raise one ``ConfigError`` with what all checks have found."""
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
    """Raise ConfigError for a DeepSpeed config whose block ``config`` cannot work in it."""
    together(
        lambda: config.validate_stage(stage_of(param_dict)),
        lambda: refuse_unsupported(param_dict, bf16_optimizer=bf16_optimizer),
    )


def refuse_unsupported(param_dict: Mapping[str, Any], *, bf16_optimizer: bool = False) -> None:
    """Raise ConfigError for settings of a DeepSpeed config with which the plugin cannot work.

    ``bf16_optimizer``: DeepSpeed is seen to use an optimizer without ZeRO's shards.
    """
    zero, stage = section(param_dict, "zero_optimization"), stage_of(param_dict)
    offloaded, weights = section(zero, "offload_optimizer"), section(zero, "offload_param")
    bf16_optimizer |= (
        stage == 1
        and is_on(section(param_dict, "bf16").get("enabled"))
        and section(param_dict, "data_types").get("grad_accum_dtype") == "fp32"
        and offloaded.get("device", "none") == "none"
    )
    one_bit = section(param_dict, "optimizer").get("type")
    zeropp = [f"{flag}=true" for flag in _FLAGS if is_on(zero.get(flag))]
    if number(zero.get("zero_hpz_partition_size")) > 1:
        zeropp.append(f"zero_hpz_partition_size={zero['zero_hpz_partition_size']}")
    rules = (
        (bf16_optimizer, "data_types.grad_accum_dtype=fp32 with bf16 under ZeRO-1",
         "DeepSpeed then uses BF16_Optimizer (0.17: FP16_UnfusedOptimizer, without ZeRO), which "
         "needs full gradients on every rank; use zero_optimization.stage 2, or leave "
         "data_types.grad_accum_dtype out"),
        (is_on(section(param_dict, "compile").get("deepcompile")), "compile.deepcompile=true",
         "DeepCompile removes the hooks this plugin needs; set compile.deepcompile to false "
         "(plain engine.compile() works)"),
        (zeropp, ", ".join(f"zero_optimization.{k}" for k in zeropp),
         f"ZeRO++ and quantized_comm would both quantize; {_MIGRATE}"),
        (number(zero.get("mics_shard_size")) > 0, "zero_optimization.mics_shard_size",
         f"MiCS keeps its own shards; {_MIGRATE}"),
        (str(one_bit).lower() in ONE_BIT, f"optimizer.type={one_bit}",
         f"it compresses what it sends by itself; {_MIGRATE}"),
        (weights.get("device") == "nvme", "zero_optimization.offload_param.device=nvme",
         "parameters on NVMe are not supported; allowed: cpu, none"),
        (zero.get("zenflow") is not None, "zero_optimization.zenflow",
         "ZenFlow has update paths of its own; remove zenflow"),
        (is_on(offloaded.get("super_offload")),
         "zero_optimization.offload_optimizer.super_offload=true",
         "SuperOffload is not supported; set it to false"),
        (stage == 3 and offloaded.get("device") == "nvme",
         "zero_optimization.offload_optimizer.device=nvme under ZeRO-3",
         "not tested; allowed: cpu, none"),
        (stage in (1, 2) and number(zero.get("allgather_bucket_size")) == 0,
         f"zero_optimization.allgather_bucket_size=0 under ZeRO-{stage}",
         "DeepSpeed divides by it; set it to 5e7"),
        (is_on(section(param_dict, "hybrid_engine").get("enabled")), "hybrid_engine.enabled=true",
         "generation with kernels of its own is not tested; set it to false"),
        (stage == 3 and is_on(section(param_dict, "expert_parallel").get("enabled")),
         "expert_parallel.enabled=true under ZeRO-3",
         "AutoEP works under ZeRO-1 and 2; use zero_optimization.stage 2"),
    )  # fmt: skip
    found = [
        f"quantized_comm cannot be used with {setting}: {remedy}"
        for refused, setting, remedy in rules
        if refused
    ]
    if found:
        raise ConfigError(*found)


def refuse_full_replica(
    config: QuantizedCommConfig, *, world: int, node_size: int, model_bytes: float | None
) -> None:
    """Raise ConfigError for a node shard that is a full copy of the model on every rank, under
    ZeRO-3. ``model_bytes``: None where the model is not known.
    """
    if not config.keeps_node_shard or node_size > 1 or world == 1 or config.allow_full_replica:
        return
    key = config.weights.reference
    what = "node_shard" if key is None else f"weights.{key}"
    exact = not (config.weights.enabled or config.gradients.enabled)
    more = "" if model_bytes is None else f", {model_bytes / 1e9:.3g} GB more"
    raise ConfigError(
        f"{KEY}.{what}=true with one rank per node: under ZeRO-3 the node shard is a "
        f"full copy of the weights{more} on every rank; set "
        f"{KEY}.allow_full_replica to true to accept that, use zero_optimization.stage "
        "2 (which keeps that copy anyway), or a scheme without a node shard such as "
        + ('"full_precision"; "lossless" under stage 2 is exact, too' if exact else '"qsdp"')
    )


def starts(config: QuantizedCommConfig, *, stage: int, world: int, node_size: int) -> bool:
    """Whether start-up accepts the block under a stage and on such nodes."""
    try:
        config.validate_stage(stage)
        if stage == 3:
            refuse_full_replica(config, world=world, node_size=node_size, model_bytes=None)
    except ConfigError:
        return False
    return True


def exact_gradient_reason(stage: int, value_of: Callable[[str], Any]) -> str | None:
    """Return the setting that keeps gradients on DeepSpeed's own exact path, if there is one.

    ``value_of``: a key of zero_optimization.
    """
    names = ["reduce_scatter"]
    if stage < 3:
        names += ["contiguous_gradients", "use_multi_rank_bucket_allreduce"]
    off = [name for name in names if not value_of(name)]
    return f"zero_optimization.{off[0]} is false" if off else None
