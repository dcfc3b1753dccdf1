"""The parts of the "quantized_comm" block: how one role is quantized. May import pydantic."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError


def whole(value: Any) -> Any:
    """1e6 is a float in JSON, and how DeepSpeed users write a million."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Whole = Annotated[int, BeforeValidator(whole)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(whole)]
Patterns = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(as_tuple)]
Range = Literal["minmax", "absmax"]
Rounding = Literal["nearest", "stochastic", "random_shift"]


def conflict(block: BaseModel, *keys: str, fix: str) -> PydanticCustomError:
    dump = block.model_dump(mode="json", include=set(keys))
    settings = {key: dump[key] for key in keys}
    return PydanticCustomError("conflict", "{fix}", {"settings": settings, "fix": fix})


def rule(allowed: str) -> PydanticCustomError:
    return PydanticCustomError("rule", "{allowed}", {"allowed": allowed})


class Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class _Quantizer(Block):
    """How one role is quantized."""

    enabled: bool = Field(True, description="false: this role travels in full precision.")
    codec: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Python module with a number format of your own, in place of bits, group_size, "
        "range, rounding and levels (docs/adding_a_codec.md). null: none.",
    )
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
            raise conflict(self, "range", "rounding", fix=fix)
        return self


class IntraConfig(Block):
    """Inside a node; range and rounding are those of the role."""

    bits: Whole = Field(8, ge=2, le=8, description="Bits per code.")
    group_size: Whole = Field(
        128, ge=32, le=65536, multiple_of=32, description="Elements that share a scale."
    )


class FallbackConfig(Block):
    """When quantized traffic gives way to full precision while a job runs."""

    on_nonfinite: Literal["skip", "raise", "full_precision"] = Field(
        "skip",
        description="When the gradients of a step hold NaN or Inf. skip: whatever DeepSpeed does; "
        "raise: end all ranks, naming step and parameter, before the optimizer uses them; "
        "full_precision: what DeepSpeed does, and the next steps travel in full precision.",
    )
    steps: Positive = Field(
        100, description="Optimizer steps in full precision after such a step (full_precision)."
    )


class MetricsConfig(Block):
    """What rank 0 writes about its messages, to DeepSpeed's monitors and to a file."""

    interval: Whole = Field(
        100,
        ge=0,
        description="Every so many optimizer steps one is sampled and bytes, errors, bits and "
        "seconds are written to the monitors of the DeepSpeed config. 0: never.",
    )
    file: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="File to which rank 0 appends the same as a line of JSON. null: none."
    )


class WeightsConfig(_Quantizer):
    """Weights that are gathered: ZeRO-3 parameters, updated parameters of ZeRO-1 and 2."""

    rounding: Rounding = Field(
        "random_shift",
        description="nearest: ties to even; stochastic: up with the probability of the fraction; "
        "random_shift: nearest on a grid shifted once per parameter and step (QSDP).",
    )
    difference: bool = Field(
        False,
        description="true: send what changed since the last weights that everybody received "
        "(SDP4Bit); what is lost stays in the next difference. Under ZeRO-3 it needs node_shard.",
    )
    intra: IntraConfig | None = Field(
        None,
        description="Codec of the gathers inside a node, with node_shard. null: the weights' own "
        "dtype.",
    )
    levels: Literal["uniform", "learned"] = Field(
        "uniform",
        description="learned: a table of 2^bits levels per parameter, fitted at level_steps. "
        "Worth it at 5 bits and below.",
    )
    level_steps: Annotated[tuple[Positive, ...], BeforeValidator(as_tuple)] = Field(
        (400, 1900, 3800, 5600),
        description="Optimizer steps after which learned levels are fitted, increasing.",
    )
    level_rate: float = Field(
        0.01,
        gt=0,
        lt=1,
        description="Share of its distance to a value by which the nearest learned level moves.",
    )

    @property
    def differ(self) -> bool:
        """Whether differences travel."""
        return self.enabled and self.difference

    @field_validator("level_steps")
    @classmethod
    def _increasing(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if not steps or any(b <= a for a, b in pairwise(steps)):
            raise rule("one or more step numbers in increasing order, such as [400, 1900]")
        return steps

    @model_validator(mode="after")
    def _learned_is_nearest(self) -> WeightsConfig:
        if self.levels == "learned" and self.range != "minmax":
            fix = 'learned levels divide the min-max range: set range to "minmax"'
            raise conflict(self, "levels", "range", fix=fix)
        if self.levels == "learned" and self.difference:
            fix = "levels are fitted to weights, not to differences: switch one of them off"
            raise conflict(self, "levels", "difference", fix=fix)
        if self.levels == "learned" and self.rounding != "nearest":
            fix = 'a value goes to its nearest learned level: set rounding to "nearest"'
            raise conflict(self, "levels", "rounding", fix=fix)
        return self


class GradientsConfig(_Quantizer):
    """Gradients that are reduced."""

    rounding: Rounding = Field(
        "stochastic",
        description="As for weights. Only stochastic keeps every gradient element unbiased "
        "independently of the others.",
    )
    intra: IntraConfig | None = Field(
        None,
        description="With several nodes of several ranks gradients are summed inside each node "
        "with this codec and the partial sums between nodes with the outer one. null: the outer "
        "one on both hops.",
    )
    rotation: Literal[0, 32, 64, 128] = Field(
        0,
        description="Block of the Hadamard transform that spreads outliers before the first hop "
        "and is undone after the last sum (SDP4Bit); 0: none.",
    )
    rotation_signs: bool = Field(
        False, description="Random sign flips before the transform, anew in every step."
    )

    @model_validator(mode="after")
    def _whole_blocks(self) -> GradientsConfig:
        fix = "a group holds whole rotation blocks: use a multiple, or a smaller rotation"
        if self.rotation and self.group_size % self.rotation:
            raise conflict(self, "group_size", "rotation", fix=fix)
        if self.rotation and self.intra and self.intra.group_size % self.rotation:
            raise conflict(self, "intra", "rotation", fix=fix)
        return self
