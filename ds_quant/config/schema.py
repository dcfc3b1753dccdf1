"""The "quantized_comm" block of a DeepSpeed config: fields, presets, checks, JSON schema.

DeepSpeed ignores top-level keys that it does not know, so this module is the only one that can
tell a user about a mistake: nothing unknown, misspelt, contradictory or without effect passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from math import isqrt
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)
from pydantic_core import PydanticCustomError

from ds_quant.config.errors import (
    KEY,
    ConfigError,
    Places,
    auto_values,
    conflicts,
    explain,
    misplaced_block,
    not_an_object,
    path_of,
    places_of,
    show,
    without_effect,
)
from ds_quant.config.presets import (
    AUTOTUNE,
    RENAMED,
    apply_preset,
    choices,
    preset_description,
    preset_groups,
    preset_names,
)

# ---- parts of the block ----


def whole(value: Any) -> Any:
    """1e6 is a float in JSON, and how DeepSpeed users write a million."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Natural = Annotated[int, Field(ge=0), BeforeValidator(whole)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(whole)]
Bits = Annotated[int, Field(ge=2, le=8), BeforeValidator(whole)]
GroupSize = Annotated[int, Field(ge=32, le=65536, multiple_of=32), BeforeValidator(whole)]
Patterns = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(as_tuple)]
Range = Literal["minmax", "absmax"]
Rounding = Literal["nearest", "stochastic", "random_shift"]


def rule(allowed: str, words: Sequence[str] = ()) -> PydanticCustomError:
    """``words``: that somebody may have misspelt."""
    return PydanticCustomError("rule", "{allowed}", {"allowed": allowed, "words": words})


class Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Conflicts = Iterator[tuple[str, str, str]]  # two keys of a role that contradict each other, a fix


class _Quantizer(Block):
    """How one role is quantized."""

    enabled: bool = Field(True, description="false: this role travels in full precision.")
    codec: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Python module with a number format of your own, in place of bits, group_size, "
        "range, rounding and levels (docs/adding_a_codec.md). null: none.",
    )
    bits: Bits = Field(8, description="Bits per code.")
    group_size: GroupSize = Field(
        1024, description="Elements that share a scale. Smaller groups: less error, more bytes."
    )
    range: Range = Field(
        "minmax",
        description="minmax: codes span smallest to largest value (scale and offset per group); "
        "absmax: symmetric around zero (scale only).",
    )

    def conflicts(self) -> Conflicts:
        """Find settings that contradict each other, whoever made them."""
        if self.rounding == "random_shift" and self.range != "minmax":
            fix = 'a shift moves the min-max grid: set range to "minmax" or rounding to "nearest"'
            yield "range", "rounding", fix


class IntraConfig(Block):
    """Inside a node; range (beside "gaussian": absmax) and rounding are those of the role."""

    bits: Bits = Field(8, description="Bits per code.")
    group_size: GroupSize = Field(128, description="Elements that share a scale.")


class FallbackConfig(Block):
    """When a running job falls back to full precision."""

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
    """Communication metrics written by rank 0, to DeepSpeed's monitors and to a file."""

    interval: Natural = Field(
        100,
        description="Sample one optimizer step in this many and write bytes, errors, bits and "
        "seconds to the monitors of the DeepSpeed config. 0: never.",
    )
    file: Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")] | None = Field(
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
    lossless: bool = Field(
        False,
        description="true: send what changed since the last weights, without loss; about 2-3 "
        "bits per weight, more at high learning rates, 16 at most. For bf16 and fp16; fp32 weights "
        "are sent in full precision. Under ZeRO-3 it needs node_shard.",
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
        description="Learning rate of the levels: share of its distance to a value by which the "
        "nearest level moves.",
    )

    @property
    def exactly_differ(self) -> bool:
        """Whether lossless differences travel."""
        return self.enabled and self.lossless

    @property
    def differ(self) -> bool:
        """Whether quantized differences travel."""
        return self.enabled and self.difference and not self.lossless

    @property
    def reference(self) -> str | None:
        """The key that makes this scheme send differences, or None."""
        return "lossless" if self.exactly_differ else "difference" if self.differ else None

    @field_validator("level_steps")
    @classmethod
    def _increasing(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if not steps or any(b <= a for a, b in pairwise(steps)):
            raise rule("one or more step numbers in increasing order, such as [400, 1900]")
        return steps

    def conflicts(self) -> Conflicts:
        yield from super().conflicts()
        if self.levels != "learned":
            return
        if self.range != "minmax":
            fix = 'learned levels divide the min-max range: set range to "minmax"'
            yield "levels", "range", fix
        if self.difference:
            fix = "levels are fitted to weights, not to differences: switch one of them off"
            yield "levels", "difference", fix
        if self.rounding != "nearest":
            fix = 'a value goes to its nearest learned level: set rounding to "nearest"'
            yield "levels", "rounding", fix


class GradientsConfig(_Quantizer):
    """Gradients that are reduced."""

    range: Literal["minmax", "absmax", "gaussian"] = Field(
        "minmax",
        description="As for weights; gaussian: levels of a normal distribution and EDEN's scale, "
        "unbiased over random signs (2 to 4 bits; needs group_size 128, rotation 128 and "
        "rotation_signs).",
    )
    rounding: Rounding = Field(
        "stochastic",
        description="As for weights. Only stochastic keeps every gradient element unbiased "
        "independently of the others. With gaussian this sets rounding inside a node only.",
    )
    intra: IntraConfig | None = Field(
        None,
        description="With several nodes of several ranks: the codec of gradients inside a node; "
        "the keys above then apply between nodes. null: those keys on both hops.",
    )
    cross: Literal["step", "micro_step"] = Field(
        "step",
        description="When gradients are sent between nodes of several ranks under ZeRO-2 and 3. "
        "step: once per optimizer step, so accumulation costs no extra traffic between nodes; "
        "buffers 4 / ranks per node bytes per parameter. micro_step: in every micro-step.",
    )
    rotation: Literal[0, 32, 64, 128] = Field(
        0,
        description="Block size of the Hadamard transform that spreads outliers (SDP4Bit). "
        "0: none.",
    )
    rotation_signs: Literal[True, False, "shared", "node"] = Field(
        False,
        description="Flip signs at random before the transform, differently in every step. shared: "
        "alike on all ranks; node: every node has its own, so that errors of similar gradients "
        "average out (gaussian only); true: node with 2 and 3 bits from 4 nodes on, else shared.",
    )

    def conflicts(self) -> Conflicts:
        yield from super().conflicts()
        signs = (True, "shared", "node")
        needs = {"group_size": (128,), "rotation": (128,), "rotation_signs": signs}
        if self.range == "gaussian":
            if not 2 <= self.bits <= 4:
                fix = "Gaussian levels are those of 2, 3 and 4 bits: set bits to one of them"
                yield "range", "bits", fix
            for key in (key for key, needed in needs.items() if getattr(self, key) not in needed):
                fix = (
                    "Gaussian levels are for groups of 128 that random signs and a Hadamard "
                    f"transform have made look normal: set {key} to {show(needs[key][0])}"
                )
                yield "range", key, fix
        elif self.rotation_signs == "node":
            fix = 'only errors of Gaussian levels gain by it: set rotation_signs to "shared"'
            yield "rotation_signs", "range", fix
        fix = "a group holds whole rotation blocks: use a multiple, or a smaller rotation"
        if self.range != "gaussian" and self.rotation and self.group_size % self.rotation:
            yield "group_size", "rotation", fix
        if self.rotation and self.intra and self.intra.group_size % self.rotation:
            yield "intra", "rotation", fix


# ---- the block ----


if TYPE_CHECKING:
    from ds_quant.policy.scheme import Scheme

__all__ = ["KEY", "ConfigError", "QuantizedCommConfig", "json_schema", "parse", "parse_block"]

MAX_SEED = 2**63 - 1


class QuantizedCommConfig(Block):
    """Quantized ZeRO communication. Every key is optional; the scheme sets what is left out."""

    enabled: bool = Field(True, description="false: validate the block but stay inactive.")
    scheme: str = Field(
        "qsdp",
        description="Preset whose values the other keys replace, or autotune: measures at start-up "
        "whether full_precision or what docs/choosing.md advises for the stage and the nodes has "
        "the shorter step.",
    )
    weights: WeightsConfig = Field(WeightsConfig(), description="How weights are quantized.")
    gradients: GradientsConfig = Field(
        GradientsConfig(), description="How gradients are quantized."
    )
    node_size: Positive | None = Field(
        None,
        description="Ranks per node; must divide the world size. null: by launcher or hosts.",
    )
    exclude: Patterns = Field(
        (), description='Parameter names left in full precision; patterns: ["*.embed*"].'
    )
    min_numel: Natural = Field(
        2048, description="Parameters with fewer elements stay in full precision."
    )
    node_shard: bool | None = Field(
        None,
        description="ZeRO-3: keep a copy of the weights in every node, sharded over its ranks, so "
        "that gathers stay inside the node and weights are sent between nodes once per optimizer "
        "step. Takes 2 / node_size bytes per parameter. null: only where weights.difference or "
        "weights.lossless needs it.",
    )
    allow_full_replica: bool = Field(
        False,
        description="true: allow a node shard with one rank per node, where it is a full copy of "
        "the weights.",
    )
    slices: Annotated[int, Field(ge=1, le=64), BeforeValidator(whole)] | None = Field(
        None,
        description="Slices of a gradient bucket with several nodes of several ranks: one is sent "
        "between nodes while the next is summed inside them. null: by its size.",
    )
    fallback: FallbackConfig = Field(
        FallbackConfig(), description="When a running job returns to full precision."
    )
    metrics: MetricsConfig = Field(
        MetricsConfig(), description="Sampled communication metrics: bytes, error, time."
    )
    checksum_steps: Natural = Field(
        100,
        description="Every N optimizer steps, ranks compare checksums of the weights that they "
        "cache and resync on mismatch. 0: never.",
    )
    payload_checksum: bool = Field(
        False,
        description="true: add a checksum to every message; a corrupted message stops all ranks "
        "before the optimizer uses it, with role, sender and step. Costs 16 bytes per message and "
        "one all-reduce of 8 bytes per optimizer step.",
    )
    warmup_steps: Natural = Field(
        0, description="Optimizer steps in full precision before quantization starts."
    )
    backend: Literal["auto", "torch"] = Field(
        "auto",
        description="auto: CuPy kernels on CUDA and C++ kernels on the CPU where they work; torch: "
        "always plain torch, slower. Same bytes either way.",
    )
    seed: Natural = Field(0, le=MAX_SEED, description="Seed of all random rounding.")
    handshake_timeout: float = Field(
        60.0,
        gt=0,
        le=86_400,
        description="Seconds to wait at start-up for ranks that do not answer.",
    )

    @field_validator("scheme", mode="before")
    @classmethod
    def _known_scheme(cls, name: Any) -> Any:
        if name not in (*preset_names(), AUTOTUNE):
            raise rule(choices(), words=(*preset_names(), AUTOTUNE))
        return name

    @classmethod
    @cache
    def places(cls) -> Places:
        """List every key with what it may be."""
        return places_of(cls.model_json_schema())

    def resolved(self) -> dict[str, Any]:
        """Return every effective value as JSON types: what the log shows and the ranks compare."""
        chosen = {"weights", "gradients", "node_shard"} if self.scheme == AUTOTUNE else None
        return self.model_dump(mode="json", exclude=chosen)

    def picked(self, name: str) -> QuantizedCommConfig:
        """Return the settings with scheme ``name`` in place of "autotune"."""
        written = self.model_dump(mode="json", exclude_unset=True)
        return parse_block({**written, "scheme": name})

    def validate_world(self, world: int) -> None:
        """Raise ``ConfigError`` unless ``node_size`` divides the number of ranks."""
        if self.node_size is None or world % self.node_size == 0:
            return
        small = [n for n in range(1, min(isqrt(world), 10**6) + 1) if world % n == 0]
        divisors = sorted({*small, *(world // n for n in small)})
        shown = ", ".join(map(str, divisors[:16])) + (", ..." if len(divisors) > 16 else "")
        path = path_of(("node_size",))
        raise ConfigError(f"{path}={self.node_size}: allowed with {world} ranks: {shown}")

    @property
    def own_codecs(self) -> dict[str, str]:
        """Modules with a number format of the user's own, by role."""
        roles = {"weights": self.weights, "gradients": self.gradients}
        return {role: s.codec for role, s in roles.items() if s.enabled and s.codec is not None}

    @property
    def keeps_node_shard(self) -> bool:
        """Whether ZeRO-3 keeps the weights in every node, if there are several."""
        needed = self.weights.reference is not None
        return needed if self.node_shard is None else self.node_shard

    def validate_stage(self, stage: int | None) -> None:
        """Raise ``ConfigError`` for a ZeRO stage, None if not set, that cannot be quantized."""
        if stage not in (1, 2, 3):
            found = " is not set" if stage is None else f"={show(stage)}"
            raise ConfigError(
                f"zero_optimization.stage{found}: allowed with {KEY}: 1, 2 or 3; "
                f"set one of them or remove {KEY}"
            )
        key = self.weights.reference
        if stage == 3 and key is not None and self.node_shard is False:
            raise ConfigError(
                f"{path_of(('weights', key))}=true conflicts with "
                f"{path_of(('node_shard',))}=false under zero_optimization.stage=3: a difference "
                f"is added to weights that every node keeps; set node_shard to true, or {key} "
                "to false"
            )

    def to_scheme(self) -> Scheme:
        """Build the scheme; ConfigError for "autotune", see ``picked``."""
        from ds_quant.policy.scheme import Scheme  # here, so that checks do not load torch

        return Scheme.of(self)


def parse(param_dict: dict[str, Any], *, load_codecs: bool = True) -> QuantizedCommConfig | None:
    """Parse a whole DeepSpeed config; ``None`` if it asks for no quantization.

    Raises ``ConfigError``, also for mistakes in a disabled block and for a misspelt or misplaced
    one. ``load_codecs``: import and try codecs of the user's own, if enabled.
    """
    if problems := misplaced_block(param_dict):
        raise ConfigError(*problems)
    if KEY not in param_dict:
        return None
    config = parse_block(param_dict[KEY], load_codecs=load_codecs)
    if config.fallback.on_nonfinite == "raise" and _finds_its_loss_scale(param_dict.get("fp16")):
        raise ConfigError(
            f'{path_of(("fallback", "on_nonfinite"))}="raise" conflicts with fp16.loss_scale=0 '
            '(dynamic), which is found by steps that overflow: allowed are "skip" and '
            '"full_precision"; or give fp16.loss_scale a value'
        )
    return config if config.enabled else None


def _finds_its_loss_scale(fp16: Any) -> bool:
    """Whether a section "fp16" of the DeepSpeed config asks for dynamic loss scaling."""
    return isinstance(fp16, dict) and fp16.get("enabled") is True and not fp16.get("loss_scale")


def parse_block(block: Any, *, load_codecs: bool = True) -> QuantizedCommConfig:
    """Parse the block alone, with the values of its scheme merged under the user's."""
    if not isinstance(block, dict):
        raise ConfigError(not_an_object(block, (*preset_names(), AUTOTUNE)))
    if problems := auto_values(block):
        raise ConfigError(*problems)
    name = block.get("scheme", QuantizedCommConfig.model_fields["scheme"].default)
    if isinstance(name, str) and name in RENAMED:
        name = RENAMED[name]
        block = {**block, "scheme": name}
    try:
        config = QuantizedCommConfig.model_validate(apply_preset(name, block))
    except ValidationError as error:
        raise ConfigError(*explain(error, places=QuantizedCommConfig.places())) from None
    own = _unusable_codecs if config.enabled and load_codecs else lambda _: []
    if problems := conflicts(config, block) or without_effect(config, block) or own(config):
        raise ConfigError(*problems)
    return config


def _unusable_codecs(config: QuantizedCommConfig) -> list[str]:
    """Find modules named in the block that are no codecs."""
    from ds_quant.codec.module import load

    problems = []
    for role, module in config.own_codecs.items():
        try:
            load(module)
        except ValueError as error:
            problems.append(f"{path_of((role, 'codec'))}={show(module)}: {error}")
    return problems


def json_schema() -> dict[str, Any]:
    """JSON Schema of a DeepSpeed config file, for editors: only our block is described."""
    block = QuantizedCommConfig.model_json_schema()
    definitions, scheme = block.pop("$defs"), block["properties"]["scheme"]
    scheme["enum"] = [*preset_names(), AUTOTUNE]
    for group, names in preset_groups().items():
        described = "; ".join(f"{name}: {preset_description(name)}" for name in names)
        scheme["description"] += f" {group}{', ' if group else ''}{described}."
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "DeepSpeed config with ds_quant",
        "type": "object",
        "properties": {KEY: {"$ref": "#/$defs/QuantizedCommConfig"}},
        "$defs": {**definitions, "QuantizedCommConfig": block},
    }
