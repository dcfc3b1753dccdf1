"""The "quantized_comm" block of a DeepSpeed config: fields, presets, checks, JSON schema.

DeepSpeed ignores top-level keys that it does not know, so this module is the only one that can
tell a user about a mistake: nothing unknown, misspelt, contradictory or without effect passes.
May import pydantic, config_errors, presets and (when a scheme is built) codec and scheme.
"""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ds_quant.config_errors import (
    KEY,
    ConfigError,
    auto_values,
    explain,
    misplaced_block,
    not_an_object,
    path_of,
    show,
    without_effect,
)
from ds_quant.presets import apply_preset, preset_description, preset_names

if TYPE_CHECKING:
    from ds_quant.codec import GroupCodec
    from ds_quant.scheme import Scheme

__all__ = [
    "KEY",
    "ConfigError",
    "QuantizedCommConfig",
    "json_schema",
    "parse",
    "parse_block",
    "require_zero",
]

MAX_SEED = 2**63 - 1


def _whole(value: Any) -> Any:
    """1e6 is a float in JSON, and how DeepSpeed users write a million."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Whole = Annotated[int, BeforeValidator(_whole)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
Range = Literal["minmax", "absmax"]
Rounding = Literal["nearest", "stochastic", "random_shift"]


def _conflict(block: BaseModel, *keys: str, fix: str) -> PydanticCustomError:
    settings = {key: getattr(block, key) for key in keys}
    return PydanticCustomError("conflict", "{fix}", {"settings": settings, "fix": fix})


def _rule(allowed: str) -> PydanticCustomError:
    return PydanticCustomError("rule", "{allowed}", {"allowed": allowed})


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class _Quantizer(_Block):
    """How one role is quantized."""

    enabled: bool = Field(True, description="false: this role travels in full precision.")
    bits: Whole = Field(8, ge=2, le=8, description="Bits per code.")
    group_size: Whole = Field(
        1024,
        ge=32,
        le=65536,
        multiple_of=32,
        description="Elements that share a scale. Smaller groups: less error, more bytes.",
    )
    range: Range = Field(
        "minmax",
        description="minmax: codes span smallest to largest value (scale and offset per group); "
        "absmax: symmetric around zero (scale only).",
    )

    @model_validator(mode="after")
    def _shift_needs_minmax(self) -> _Quantizer:
        if self.rounding == "random_shift" and self.range != "minmax":
            fix = 'a shift moves the min-max grid: set range to "minmax" or rounding to "nearest"'
            raise _conflict(self, "range", "rounding", fix=fix)
        return self


class WeightsConfig(_Quantizer):
    """Weights that are gathered: ZeRO-3 parameters, updated parameters of ZeRO-1 and 2."""

    rounding: Rounding = Field(
        "random_shift",
        description="nearest: ties to even; stochastic: up with the probability of the fraction; "
        "random_shift: nearest on a grid shifted once per parameter and step (QSDP).",
    )
    levels: Literal["uniform", "learned"] = Field(
        "uniform",
        description="learned: a table of 2^bits levels per parameter, fitted at level_steps. "
        "Worth it at 5 bits and below.",
    )
    level_steps: Annotated[tuple[Positive, ...], BeforeValidator(_tuple)] = Field(
        (400, 1900, 3800, 5600),
        description="Optimizer steps after which learned levels are fitted, increasing.",
    )
    level_rate: float = Field(
        0.01,
        gt=0,
        lt=1,
        description="Share of its distance to a value by which the nearest learned level moves.",
    )

    @field_validator("level_steps")
    @classmethod
    def _increasing(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if not steps or any(b <= a for a, b in pairwise(steps)):
            raise _rule("one or more step numbers in increasing order, such as [400, 1900]")
        return steps

    @model_validator(mode="after")
    def _learned_is_nearest(self) -> WeightsConfig:
        if self.levels == "learned" and self.range != "minmax":
            fix = 'learned levels divide the min-max range: set range to "minmax"'
            raise _conflict(self, "levels", "range", fix=fix)
        if self.levels == "learned" and self.rounding != "nearest":
            fix = 'a value goes to its nearest learned level: set rounding to "nearest"'
            raise _conflict(self, "levels", "rounding", fix=fix)
        return self


class GradientsConfig(_Quantizer):
    """Gradients that are reduced."""

    rounding: Rounding = Field(
        "stochastic",
        description="As for weights. Only stochastic keeps every gradient element unbiased "
        "independently of the others.",
    )


class QuantizedCommConfig(_Block):
    """Quantized ZeRO communication. Every key is optional; the scheme sets what is left out."""

    enabled: bool = Field(True, description="false: checked, then ignored.")
    scheme: str = Field("qsdp", description="Preset whose values the other keys replace.")
    weights: WeightsConfig = Field(WeightsConfig(), description="How weights are quantized.")
    gradients: GradientsConfig = Field(
        GradientsConfig(), description="How gradients are quantized."
    )
    node_size: Positive | None = Field(
        None, description="Ranks per node; must divide the world size. null: as launched."
    )
    exclude: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_tuple)] = (
        Field((), description='Parameter names left in full precision; patterns: ["*.embed*"].')
    )
    min_numel: Whole = Field(
        2048, ge=0, description="Parameters with fewer elements stay in full precision."
    )
    warmup_steps: Whole = Field(
        0, ge=0, description="Optimizer steps in full precision before quantization starts."
    )
    seed: Whole = Field(0, ge=0, le=MAX_SEED, description="Seed of all random rounding.")
    handshake_timeout: float = Field(
        60.0, gt=0, description="Seconds to wait at start-up for ranks without this block."
    )

    @field_validator("scheme")
    @classmethod
    def _known_scheme(cls, name: str) -> str:
        if name not in preset_names():
            raise PydanticCustomError("unknown_scheme", "unknown scheme")
        return name

    def resolved(self) -> dict[str, Any]:
        """Every effective value as JSON types: what the log shows and the ranks compare."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """16 hex digits, equal on two ranks exactly when ``resolved`` is."""
        text = json.dumps(self.resolved(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def validate_world(self, world: int) -> None:
        """Raise ``ConfigError`` unless ``node_size`` divides the number of ranks."""
        if self.node_size is None or world % self.node_size == 0:
            return
        divisors = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        path = path_of(("node_size",))
        raise ConfigError(f"{path}={self.node_size}: allowed with {world} ranks: {divisors}")

    def to_scheme(self) -> Scheme:
        """The scheme these settings describe."""
        # Here, so that the schema and the checks work without loading torch.
        from ds_quant.scheme import Scheme

        learned = self.weights.enabled and self.weights.levels == "learned"
        return Scheme(
            name=self.scheme,
            weights=_codec(self.weights),
            gradients=_codec(self.gradients),
            exclude=self.exclude,
            min_numel=self.min_numel,
            warmup_steps=self.warmup_steps,
            seed=self.seed,
            node_size=self.node_size,
            level_steps=self.weights.level_steps if learned else (),
            level_rate=self.weights.level_rate,
        )


def _codec(settings: WeightsConfig | GradientsConfig) -> GroupCodec | None:
    from ds_quant.codec import GroupCodec

    fields = ("bits", "group_size", "range", "rounding", "levels")
    given = {name: getattr(settings, name) for name in fields if hasattr(settings, name)}
    return GroupCodec(**given) if settings.enabled else None


def parse(param_dict: dict[str, Any]) -> QuantizedCommConfig | None:
    """The settings of a whole DeepSpeed config, or ``None`` if it asks for no quantization.

    Raises ``ConfigError``, also for mistakes in a disabled block and for a block whose key is
    misspelt or that is not at the top level.
    """
    if problems := misplaced_block(param_dict):
        raise ConfigError(*problems)
    if KEY not in param_dict:
        return None
    config = parse_block(param_dict[KEY])
    return config if config.enabled else None


def require_zero(stage: int) -> None:
    """Raise ``ConfigError`` for a ZeRO stage without sharded communication."""
    if stage not in (1, 2, 3):
        raise ConfigError(
            f"zero_optimization.stage={show(stage)}: allowed with {KEY}: 1, 2 or 3; "
            f"set one of them or remove {KEY}"
        )


def parse_block(block: Any) -> QuantizedCommConfig:
    """The settings of the block alone, with the values of its scheme merged under the user's."""
    if not isinstance(block, dict):
        raise ConfigError(not_an_object(block, preset_names()))
    if problems := auto_values(block):
        raise ConfigError(*problems)
    name = block.get("scheme", QuantizedCommConfig.model_fields["scheme"].default)
    try:
        config = QuantizedCommConfig.model_validate(apply_preset(name, block))
    except ValidationError as error:
        raise ConfigError(*explain(error, schema=_block_schema(), block=block)) from None
    if problems := without_effect(config, block):
        raise ConfigError(*problems)
    return config


def _block_schema() -> dict[str, Any]:
    """JSON Schema of the block alone, with the names of the schemes."""
    schema = QuantizedCommConfig.model_json_schema()
    scheme = schema["properties"]["scheme"]
    scheme["enum"] = list(preset_names())
    described = "; ".join(f"{name}: {preset_description(name)}" for name in preset_names())
    scheme["description"] += f" {described}."
    return schema


def json_schema() -> dict[str, Any]:
    """JSON Schema of a DeepSpeed config file, for editors: only our block is described."""
    block = _block_schema()
    definitions = block.pop("$defs")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "DeepSpeed config with ds_quant",
        "type": "object",
        "properties": {KEY: {"$ref": "#/$defs/QuantizedCommConfig"}},
        "$defs": {**definitions, "QuantizedCommConfig": block},
    }
