"""A scheme: the settings of a run and their codecs. Which codec goes where is decided in route.py.

Every decision uses only facts that all ranks share (name, shape, dtype of a parameter), so that
the ranks agree without asking each other. Users get a scheme from the config block; making one
by hand is meant for tests and research.
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

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what codecs take
# What torch.compile and PEFT put into the names of the modules they wrap, at any depth.
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|base_model\.model)\.")


def matches(name: str, pattern: str) -> bool:
    """Whether an ``exclude`` pattern means this parameter, as it is called or as it was called
    before the model was wrapped.
    """
    return fnmatchcase(name, pattern) or fnmatchcase(_WRAPPERS.sub("", name), pattern)


def is_packed(parameter: torch.Tensor, module: torch.nn.Module | None) -> bool:
    """Whether a parameter, which lies in ``module``, may hold bit patterns instead of numbers, such
    as the 4-bit weights that bitsandbytes stores as bf16 (QLoRA). In doubt it does.
    """
    return (
        type(parameter).__module__.partition(".")[0] != "torch"
        or getattr(parameter, "bnb_quantized", False)
        or any(getattr(owner, "quant_state", None) is not None for owner in (parameter, module))
        or hasattr(module, "W_q")
    )


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The settings of a run with the codecs that they name.

    block: every setting; "autotune" is replaced by what it chose.
    weights, gradients: the codec of each role; ``None`` is full precision. With two levels it is
        the codec between nodes.
    weights_intra: codec of gathers from the node shard, ``None`` for the weights' own dtype.
    gradients_intra: codec of the hop inside a node; ``None``: that of ``gradients``.
    """

    block: QuantizedCommConfig
    weights: Codec | None = None
    gradients: Codec | None = None
    weights_intra: GroupCodec | None = None
    gradients_intra: GroupCodec | None = None

    @classmethod
    def of(cls, block: QuantizedCommConfig) -> Scheme:
        """Make the codecs. Raises ``ConfigError`` for "autotune", see ``picked``."""
        if block.scheme == AUTOTUNE:
            raise ConfigError(
                f'{path_of(("scheme",))}="{AUTOTUNE}": no scheme before links are measured: '
                "allowed here: a preset"
            )
        weights, gradients = block.weights, block.gradients
        return cls(
            block=block,
            weights=None if weights.exactly_differ else _codec(weights),
            gradients=_codec(gradients),
            weights_intra=_inner_codec(weights),
            gradients_intra=_inner_codec(gradients),
        )

    @property
    def name(self) -> str:
        """Of the preset."""
        return self.block.scheme

    @cached_property
    def difference(self) -> bool:
        """Whether weights travel as their quantized difference to what everybody holds."""
        return self.block.weights.differ

    @cached_property
    def lossless(self) -> bool:
        """Whether weights of 16 bits travel as their exact difference to what everybody holds,
        whatever they are called and however small.
        """
        return self.block.weights.exactly_differ

    @cached_property
    def level_steps(self) -> tuple[int, ...]:
        """Optimizer steps after which weight levels are learned anew; none if uniform."""
        weights = self.block.weights
        learned = isinstance(self.weights, GroupCodec) and weights.levels == "learned"
        return weights.level_steps if learned else ()

    def sends_lossless(self, dtype: torch.dtype) -> bool:
        """Whether weights of this dtype travel as lossless differences, wherever something is kept
        that they can differ from.
        """
        return self.lossless and dtype in (torch.bfloat16, torch.float16)

    def skip_reason(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, *, packed: bool = False
    ) -> str | None:
        """Return why the parameter stays in full precision in every role, or ``None``.

        ``packed``: its values may be bit patterns instead of numbers, see ``is_packed``.
        """
        if packed:
            return "packed"
        if dtype not in FLOATS:
            return str(dtype).removeprefix("torch.")
        if len(shape) <= 1:
            return "1-D"
        if math.prod(shape) < self.block.min_numel:
            return "small"
        if any(matches(name, pattern) for pattern in self.block.exclude):
            return "excluded"
        return None


def _codec(role: WeightsConfig | GradientsConfig) -> Codec | None:
    """The codec of a role."""
    if not role.enabled:
        return None
    if role.codec is not None:
        return load(role.codec)
    fields = ("bits", "group_size", "range", "rounding", "levels")
    given = {name: getattr(role, name) for name in fields if hasattr(role, name)}
    if role.range == "gaussian":
        given["rounding"] = "nearest"
    return GroupCodec(**given)


def _inner_codec(role: WeightsConfig | GradientsConfig) -> GroupCodec | None:
    """That of its exchanges inside a node, where it has one of its own."""
    if not role.enabled or role.intra is None:
        return None
    return GroupCodec(
        bits=role.intra.bits,
        group_size=role.intra.group_size,
        range="absmax" if role.range == "gaussian" else role.range,
        rounding=role.rounding,
    )
