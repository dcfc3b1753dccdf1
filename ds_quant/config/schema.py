"""The "quantized_comm" block of a DeepSpeed config: keys, presets, checks, JSON schema.

DeepSpeed ignores top-level keys that it does not know, so mistakes in the block are found only
here. Keys that are unknown, misspelt, contradictory or without effect are refused.

[Note: words of the block] A *role* is what is communicated: weights or gradients. A *scheme* is a
named set of values for all keys; the user's keys replace its values. A *preset* is a scheme of
configs/presets.yaml. The *block* is the object as the user writes it; a ``QuantizedCommConfig`` is
the block over the values of its scheme, checked. Elsewhere ``block`` also names the config, as in
``Scheme.block``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
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

from ds_quant.codec.rules import (
    BITS,
    GAUSSIAN_BITS,
    GAUSSIAN_NEEDS,
    GROUP_SIZES,
    Levels,
    Range,
    Rounding,
    broken_rules,
)
from ds_quant.comm.topology import divisors
from ds_quant.config.errors import (
    KEY,
    ConfigError,
    KeySchemas,
    auto_values,
    conflicts,
    explain,
    key_schemas_of,
    misplaced_block,
    not_an_object,
    path_of,
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
    successor,
)

# ---- parts of the block ----


def as_int(value: object) -> object:
    """Accept integral floats such as 1e6, which JSON parses as float."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def as_tuple(value: object) -> object:
    """Turn the list of a JSON file into a tuple, which a frozen block may hold."""
    if isinstance(value, list):
        return tuple(value)
    return value


Natural = Annotated[int, Field(ge=0), BeforeValidator(as_int)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(as_int)]
Bits = Annotated[int, Field(ge=BITS[0], le=BITS[-1]), BeforeValidator(as_int)]
GroupSize = Annotated[
    int,
    Field(ge=GROUP_SIZES[0], le=GROUP_SIZES[-1], multiple_of=GROUP_SIZES.step),
    BeforeValidator(as_int),
]
Patterns = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(as_tuple)]


def rule(allowed: str, words: Sequence[str] = ()) -> PydanticCustomError:
    """Return the error of a value that no JSON schema describes.

    allowed: the allowed values in words.
    words: candidates for the did-you-mean hint.
    """
    return PydanticCustomError("rule", "{allowed}", {"allowed": allowed, "words": words})


class Block(BaseModel):
    """An object of the block: unknown keys are refused, values are not converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# Two keys of a role that contradict each other, and the reason with a fix.
Conflicts = Iterator[tuple[str, str, str]]


class _Quantizer(Block):
    """Quantization of one role: weights or gradients."""

    enabled: bool = Field(True, description="false: this role is sent in full precision.")
    codec: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Python module with a number format of your own, in place of bits, group_size, "
        "range, rounding and levels (docs/adding_a_codec.md). null: none.",
    )
    bits: Bits = Field(8, description="Bits per code.")
    group_size: GroupSize = Field(
        1024, description="Elements that share a scale. Smaller groups: less error, more bytes."
    )
    range: Range
    rounding: Rounding

    def conflicts(self) -> Conflicts:
        """Yield settings that contradict each other, set by the user or by the scheme."""
        for broken in broken_rules(self):
            if broken.remedy:
                yield broken.setting, broken.restricted, broken.remedy


class IntraConfig(Block):
    """Codec inside a node. Rounding and range are the role's; "gaussian" becomes absmax."""

    bits: Bits = Field(8, description="Bits per code.")
    group_size: GroupSize = Field(128, description="Elements that share a scale.")


class FallbackConfig(Block):
    """Conditions under which a running job returns to full precision."""

    on_nonfinite: Literal["skip", "raise", "full_precision"] = Field(
        "skip",
        description="When the gradients of a step hold NaN or Inf. skip: what DeepSpeed or the "
        "loop does; raise: end all ranks, naming step and parameter, before the optimizer uses "
        "them; full_precision: as skip, and the next steps are sent in full precision.",
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

    # Without Gaussian levels, which are for gradients.
    range: Literal["minmax", "absmax"] = Field(
        "minmax",
        description="minmax: codes span smallest to largest value (scale and offset per group); "
        "absmax: symmetric around zero (scale only).",
    )
    rounding: Rounding = Field(
        "random_shift",
        description="nearest: ties to even; stochastic: up with the probability of the fraction; "
        "random_shift: nearest on a grid shifted once per parameter and step (QSDP).",
    )
    difference: bool = Field(
        False,
        description="true: send the difference to the last weights that all ranks received "
        "(SDP4Bit); the quantization error is carried into the next difference. Under ZeRO-3 it "
        "needs node_shard.",
    )
    lossless: bool = Field(
        False,
        description="true: send the difference to the last weights without loss; about 2-3 bits "
        "per weight, more at high learning rates, 16 at most. For bf16 and fp16; fp32 weights are "
        "sent in full precision. Under ZeRO-3 it needs node_shard.",
    )
    intra: IntraConfig | None = Field(
        None,
        description="Codec of the gathers inside a node, with node_shard. null: the weights' own "
        "dtype.",
    )
    levels: Levels = Field(
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
        description="Learning rate of the levels: the nearest level moves by this share of its "
        "distance to a value.",
    )

    @property
    def sends_lossless_differences(self) -> bool:
        """True if lossless differences are sent."""
        return self.enabled and self.lossless

    @property
    def sends_quantized_differences(self) -> bool:
        """True if quantized differences are sent."""
        return self.enabled and self.difference and not self.lossless

    @property
    def difference_key(self) -> str | None:
        """The key that makes this scheme send differences, or None."""
        if self.sends_lossless_differences:
            return "lossless"
        if self.sends_quantized_differences:
            return "difference"
        return None

    @field_validator("level_steps")
    @classmethod
    def _increasing(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        increasing = all(earlier < later for earlier, later in pairwise(steps))
        if not steps or not increasing:
            raise rule("one or more step numbers in increasing order, such as [400, 1900]")
        return steps

    def conflicts(self) -> Conflicts:
        yield from super().conflicts()
        if self.levels == "learned" and self.difference:
            fix = "levels are fitted to weights, not to differences: switch one of them off"
            yield "levels", "difference", fix


LEAST_RETURNED_BITS = 5  # by default, see gradients.returned_bits


class GradientsConfig(_Quantizer):
    """Gradients that are reduced."""

    range: Range = Field(
        "minmax",
        description="As for weights; gaussian: levels of a normal distribution and EDEN's scale, "
        f"unbiased over random signs ({GAUSSIAN_BITS[0]} to {GAUSSIAN_BITS[-1]} bits; needs "
        "group_size 128, rotation 128 and "
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
    returned_bits: Bits | None = Field(
        None,
        description="With a replica of the model in every node (HSDP): bits of the sums that are "
        "sent back to all nodes, 1/8 byte per parameter and step each. Their error is the same on "
        "all nodes, so it does not average out. null: as bits, but at least 5. gaussian becomes "
        "absmax from 6 bits on.",
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

    @property
    def bits_of_returned_sums(self) -> int:
        """``returned_bits``, or what stands for null."""
        if self.returned_bits is None:
            return max(self.bits, LEAST_RETURNED_BITS)
        return self.returned_bits

    def conflicts(self) -> Conflicts:
        yield from super().conflicts()
        if self.range == "gaussian":
            yield from self._gaussian_conflicts()
        elif self.rotation_signs == "node":
            fix = 'only errors of Gaussian levels gain by it: set rotation_signs to "shared"'
            yield "rotation_signs", "range", fix
        if not self.rotation:
            return
        fix = "a group holds whole rotation blocks: use a multiple, or a smaller rotation"
        if self.range != "gaussian" and self.group_size % self.rotation:
            yield "group_size", "rotation", fix
        if self.intra is not None and self.intra.group_size % self.rotation:
            yield "intra", "rotation", fix

    def _gaussian_conflicts(self) -> Conflicts:
        """Yield settings of the rotation that leave values without a normal distribution."""
        if self.rotation != 128:
            yield "range", "rotation", f"{GAUSSIAN_NEEDS}: set rotation to 128"
        if self.rotation_signs is False:
            yield "range", "rotation_signs", f"{GAUSSIAN_NEEDS}: set rotation_signs to true"


# ---- the block ----


if TYPE_CHECKING:
    from ds_quant.policy.scheme import Scheme

__all__ = ["KEY", "ConfigError", "QuantizedCommConfig", "json_schema", "parse", "parse_block"]

MAX_SEED = 2**63 - 1


class QuantizedCommConfig(Block):
    """Quantized ZeRO communication. Every key is optional; the scheme sets the others."""

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
    slices: Annotated[int, Field(ge=1, le=64), BeforeValidator(as_int)] | None = Field(
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
    def _known_scheme(cls, name: object) -> object:
        if name not in (*preset_names(), AUTOTUNE):
            raise rule(choices(), words=(*preset_names(), AUTOTUNE))
        return name

    @classmethod
    @cache
    def key_schemas(cls) -> KeySchemas:
        """Return the JSON schema of every key."""
        return key_schemas_of(cls.model_json_schema())

    def resolved(self) -> dict[str, Any]:
        """Return every effective value as JSON types, as logged and as compared between ranks.

        Keys that autotune chooses are left out.
        """
        if self.scheme == AUTOTUNE:
            return self.model_dump(mode="json", exclude={"weights", "gradients", "node_shard"})
        return self.model_dump(mode="json")

    def with_scheme(self, name: str) -> QuantizedCommConfig:
        """Return the settings with scheme ``name`` in place of "autotune"."""
        # "autotune" has no values of its own: all keys that are set are the user's.
        written = self.model_dump(mode="json", exclude_unset=True)
        return parse_block({**written, "scheme": name})

    def validate_world(self, world: int) -> None:
        """Raise ``ConfigError`` unless ``node_size`` divides the number of ranks."""
        if self.node_size is None or world % self.node_size == 0:
            return
        allowed = divisors(world)
        shown = ", ".join(map(str, allowed[:16]))
        if len(allowed) > 16:
            shown += ", ..."
        path = path_of(("node_size",))
        raise ConfigError(f"{path}={self.node_size}: allowed with {world} ranks: {shown}")

    @property
    def own_codecs(self) -> dict[str, str]:
        """Modules with a number format of the user's own, by role."""
        modules = {}
        if self.weights.enabled and self.weights.codec is not None:
            modules["weights"] = self.weights.codec
        if self.gradients.enabled and self.gradients.codec is not None:
            modules["gradients"] = self.gradients.codec
        return modules

    @property
    def preset(self) -> QuantizedCommConfig:
        """The block of this scheme without the user's keys."""
        return parse_block({"scheme": self.scheme}, load_codecs=False)

    @property
    def keeps_node_shard(self) -> bool:
        """True if ZeRO-3 keeps a copy of the weights in every node, given several nodes."""
        if self.node_shard is not None:
            return self.node_shard
        return self.weights.difference_key is not None

    @property
    def without_node_shard(self) -> str:
        """The scheme without a node shard that is nearest to this one."""
        if self.weights.sends_quantized_differences or self.gradients.enabled:
            return "qsdp"
        return "full_precision"

    def validate_stage(self, stage: int | None) -> None:
        """Raise ``ConfigError`` unless the block works under a ZeRO stage; None: not set."""
        if stage not in (1, 2, 3):
            written = " is not set" if stage is None else f"={show(stage)}"
            raise ConfigError(
                f"zero_optimization.stage{written}: allowed with {KEY}: 1, 2 or 3; "
                f"set one of them or remove {KEY}"
            )
        key = self.weights.difference_key
        if stage == 3 and key is not None and self.node_shard is False:
            difference = f"{path_of(('weights', key))}=true"
            way_out = f"leave {key} out"
            if self.preset.weights.difference_key is not None:
                difference = f'{path_of(("scheme",))}="{self.scheme}"'
                way_out = f'use scheme "{self.without_node_shard}"'
            raise ConfigError(
                f"{path_of(('node_shard',))}=false conflicts with {difference} under ZeRO-3 and "
                "FSDP2: weight differences are added to weights that every node keeps; leave "
                f"node_shard out, or {way_out}"
            )

    def to_scheme(self) -> Scheme:
        """Build the scheme. Raises ``ConfigError`` for "autotune", see ``with_scheme``."""
        # Imported here: it loads torch, which checks of a block do not need.
        from ds_quant.policy.scheme import Scheme

        return Scheme.of(self)


def parse(param_dict: dict[str, Any], *, load_codecs: bool = True) -> QuantizedCommConfig | None:
    """Parse the block of a DeepSpeed config; None if there is no block or a disabled one.

    load_codecs: import and try the user's own codecs of enabled roles.

    Raises:
        ConfigError: a mistake in the block, also in a disabled, misspelt or misplaced one.
    """
    problems = misplaced_block(param_dict, QuantizedCommConfig.model_fields)
    if problems:
        raise ConfigError(*problems)
    if KEY not in param_dict:
        return None
    config = parse_block(param_dict[KEY], load_codecs=load_codecs)
    if config.fallback.on_nonfinite == "raise" and _scales_dynamically(param_dict.get("fp16")):
        raise ConfigError(
            f'{path_of(("fallback", "on_nonfinite"))}="raise" conflicts with fp16.loss_scale=0 '
            '(dynamic), which is found by steps that overflow: allowed are "skip" and '
            '"full_precision"; or give fp16.loss_scale a value'
        )
    return config if config.enabled else None


def _scales_dynamically(fp16: object) -> bool:
    """Return True if the section "fp16" of a DeepSpeed config asks for dynamic loss scaling."""
    return isinstance(fp16, dict) and fp16.get("enabled") is True and not fp16.get("loss_scale")


def parse_block(block: object, *, load_codecs: bool = True) -> QuantizedCommConfig:
    """Parse the block alone; values of its scheme are defaults of the user's.

    Raises:
        ConfigError: all mistakes of one kind, in the order of the checks below.
    """
    if not isinstance(block, dict):
        raise ConfigError(not_an_object(block, (*preset_names(), AUTOTUNE)))
    problems = auto_values(block)
    if problems:
        raise ConfigError(*problems)
    name = block.get("scheme", QuantizedCommConfig.model_fields["scheme"].default)
    if isinstance(name, str) and name in RENAMED:
        name = successor(name)
        block = {**block, "scheme": name}
    try:
        config = QuantizedCommConfig.model_validate(apply_preset(name, block))
    except ValidationError as error:
        key_schemas = QuantizedCommConfig.key_schemas()
        raise ConfigError(*explain(error, key_schemas=key_schemas)) from None
    problems = conflicts(config, block)
    if not problems:
        problems = without_effect(config, block)
    if not problems and config.enabled and load_codecs:
        problems = _unusable_codecs(config)
    if problems:
        raise ConfigError(*problems)
    return config


def _unusable_codecs(config: QuantizedCommConfig) -> list[str]:
    """Return one sentence per module of the block that cannot be used as a codec."""
    from ds_quant.codec.module import load

    problems = []
    for role, module in config.own_codecs.items():
        try:
            load(module)
        except ValueError as error:
            problems.append(f"{path_of((role, 'codec'))}={show(module)}: {error}")
    return problems


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a DeepSpeed config file, for editors; it describes our block."""
    block = QuantizedCommConfig.model_json_schema()
    definitions = block.pop("$defs")
    scheme = block["properties"]["scheme"]
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
