"""A scheme: the settings of a run and their codecs. route.py decides which codec goes where.

Every decision uses only facts that all ranks share (name, shape, dtype of a parameter), so the
ranks agree without communication. Users get a scheme from the config block; making one by hand is
meant for tests and research.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import torch

from ds_quant.codec.codec import Codec, GroupCodec
from ds_quant.codec.module import load
from ds_quant.config.errors import ConfigError, path_of
from ds_quant.config.presets import AUTOTUNE
from ds_quant.config.schema import GradientsConfig, QuantizedCommConfig, WeightsConfig
from ds_quant.kernels.batch import DTYPES

FLOATS = tuple(DTYPES)  # dtypes that codecs encode: fp32, bf16, fp16
# Prefixes that torch.compile and PEFT add to the names of the modules they wrap, at any depth.
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|base_model\.model)\.")


def matches(name: str, pattern: str) -> bool:
    """Return True if an ``exclude`` pattern matches a parameter's name, or its name before the
    model was wrapped.
    """
    return fnmatchcase(name, pattern) or fnmatchcase(_WRAPPERS.sub("", name), pattern)


def is_packed(parameter: torch.Tensor, module: torch.nn.Module | None) -> bool:
    """Return True if the parameter may store packed bits; unknown subclasses count as packed.

    For example, bitsandbytes stores 4-bit weights as bf16 (QLoRA).

    module: the module of the parameter.
    """
    if type(parameter).__module__.partition(".")[0] != "torch":
        return True
    if getattr(parameter, "bnb_quantized", False):
        return True
    if any(getattr(owner, "quant_state", None) is not None for owner in (parameter, module)):
        return True
    return hasattr(module, "W_q")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The settings of a run with the codecs that they name.

    block: every setting; "autotune" is replaced by the scheme that it chose.
    weights, gradients: the codec of each role, between nodes if there are two levels; None: full
        precision.
    weights_intra: codec of gathers from the node shard; None: full precision.
    gradients_intra: codec of the hop inside a node; None: that of ``gradients``.
    """

    block: QuantizedCommConfig
    weights: Codec | None = None
    gradients: Codec | None = None
    weights_intra: GroupCodec | None = None
    gradients_intra: GroupCodec | None = None

    @classmethod
    def of(cls, block: QuantizedCommConfig) -> Scheme:
        """Make the codecs. Raises ``ConfigError`` for "autotune", see ``with_scheme``."""
        if block.scheme == AUTOTUNE:
            raise ConfigError(
                f'{path_of(("scheme",))}="{AUTOTUNE}": no scheme before links are measured: '
                "allowed here: a preset"
            )
        weights, gradients = block.weights, block.gradients
        return cls(
            block=block,
            weights=None if weights.sends_lossless_differences else _codec(weights),
            gradients=_codec(gradients),
            weights_intra=_intra_codec(weights),
            gradients_intra=_intra_codec(gradients),
        )

    @property
    def name(self) -> str:
        """Name of the preset."""
        return self.block.scheme

    @cached_property
    def difference(self) -> bool:
        """Return True if weights are sent as quantized differences to a reference."""
        return self.block.weights.sends_quantized_differences

    @cached_property
    def lossless(self) -> bool:
        """Return True if 16-bit weights of any name and size are sent as exact differences to a
        reference.
        """
        return self.block.weights.sends_lossless_differences

    @cached_property
    def level_steps(self) -> tuple[int, ...]:
        """Optimizer steps after which weight levels are learned anew; empty if uniform."""
        weights = self.block.weights
        if isinstance(self.weights, GroupCodec) and weights.levels == "learned":
            return weights.level_steps
        return ()

    def sends_lossless(self, dtype: torch.dtype) -> bool:
        """Return True if weights of this dtype are sent as lossless differences where a reference
        is kept.
        """
        return self.lossless and dtype in (torch.bfloat16, torch.float16)

    def skip_reason(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, *, packed: bool = False
    ) -> str | None:
        """Return why the parameter stays in full precision in every role, or None.

        packed: see ``is_packed``.
        """
        if packed:
            return "packed"
        if dtype not in FLOATS:
            return str(dtype).removeprefix("torch.")
        if len(shape) <= 1:
            return "1-D"
        if math.prod(shape) < self.block.min_numel:
            return "small"
        if self.excludes(name):
            return "excluded"
        return None

    def excludes(self, name: str) -> bool:
        """Return True if the block leaves out the parameter of this name."""
        return any(matches(name, pattern) for pattern in self.block.exclude)


def _codec(role: WeightsConfig | GradientsConfig) -> Codec | None:
    """Return the codec of a role; None: full precision."""
    if not role.enabled:
        return None
    if role.codec is not None:
        return load(role.codec)
    return GroupCodec(
        bits=role.bits,
        group_size=role.group_size,
        range=role.range,
        rounding="nearest" if role.range == "gaussian" else role.rounding,
        levels=role.levels if isinstance(role, WeightsConfig) else "uniform",
    )


def _intra_codec(role: WeightsConfig | GradientsConfig) -> GroupCodec | None:
    """Return the codec of a role inside a node; None: it has none of its own."""
    if not role.enabled or role.intra is None:
        return None
    return GroupCodec(
        bits=role.intra.bits,
        group_size=role.intra.group_size,
        range="absmax" if role.range == "gaussian" else role.range,
        rounding=role.rounding,
    )
