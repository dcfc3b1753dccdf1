"""A scheme: the settings of a run, as codecs. Which codec goes where is decided in route.py.

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
from itertools import pairwise
from typing import Literal

import torch

from ds_quant.codec.bound import Rotation
from ds_quant.codec.codec import Codec, GroupCodec
from ds_quant.codec.lossless import LosslessCodec

# What torch.compile and PEFT put into the names of the modules they wrap, at any depth.
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|base_model\.model)\.")


def matches(name: str, pattern: str) -> bool:
    """Whether an ``exclude`` pattern means this parameter, as it is called or as it was called
    before the model was wrapped.
    """
    return fnmatchcase(name, pattern) or fnmatchcase(_WRAPPERS.sub("", name), pattern)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Settings of a scheme: what is quantized, how, and from which step on.

    weights, gradients: the codec of each role; ``None`` is full precision. With two levels it is
        the codec between nodes.
    weights_intra: codec of gathers from the node shard, ``None`` for the weights' own dtype.
    gradients_intra: codec of the hop inside a node; ``None``: that of ``gradients``.
    difference: weights travel as their difference to what everybody holds (SDP4Bit's qWD).
    lossless: weights of 16 bits travel as their exact difference to what everybody holds, whatever
        they are called and however small; ``weights`` is None then.
    node_shard: ZeRO-3 keeps the weights in every node, sharded over its ranks.
    allow_full_replica: a node shard of one rank, which is a full copy, is accepted.
    checksum_steps: optimizer steps between comparisons of kept weights; 0 for never.
    payload_checksum: every message carries a checksum.
    cross: gradients cross between nodes once per optimizer step, or in every micro-step.
    rotation: block of the Hadamard transform around the gradients' reduction, 0 for none.
    rotation_signs: random sign flips before it.
    exclude: fnmatch patterns on parameter names, case-sensitive, see ``matches``; these
        parameters stay in full precision.
    min_numel: parameters with fewer elements stay full precision.
    warmup_steps: optimizer steps at the start during which everything is full precision.
    seed: seed of all addressed random bits, the same on every rank.
    node_size: ranks per node, or ``None``: as the launcher says.
    slices: into which a reduction over two levels is cut, ``None``: as many as take least time.
    level_steps: optimizer steps after which weight levels are learned anew; empty when uniform.
    level_rate: share of its distance to a value by which the nearest level moves towards it.
    backend: kernels, as of the codecs, for exact differences and rotations.
    """

    name: str
    weights: Codec | None
    gradients: Codec | None
    weights_intra: GroupCodec | None = None
    gradients_intra: GroupCodec | None = None
    difference: bool = False
    lossless: bool = False
    node_shard: bool = False
    allow_full_replica: bool = False
    checksum_steps: int = 0
    payload_checksum: bool = False
    cross: Literal["step", "micro_step"] = "step"
    rotation: int = 0
    rotation_signs: bool = False
    exclude: tuple[str, ...] = ()
    min_numel: int = 2048
    warmup_steps: int = 0
    seed: int = 0
    node_size: int | None = None
    slices: int | None = None
    level_steps: tuple[int, ...] = ()
    level_rate: float = 0.01
    backend: str = "auto"

    def __post_init__(self) -> None:
        for field in ("min_numel", "warmup_steps", "seed"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field}={getattr(self, field)}: allowed: 0 or more")
        if self.node_size is not None and self.node_size < 1:
            raise ValueError(f"node_size={self.node_size}: allowed: 1 or more, or None")
        if isinstance(self.gradients, GroupCodec) and self.gradients.levels != "uniform":
            raise ValueError(
                f'gradients.levels={self.gradients.levels!r}: allowed: "uniform" '
                "(learned levels are biased; gradients must stay unbiased)"
            )
        if self.slices is not None and self.slices < 1:
            raise ValueError(f"slices={self.slices}: allowed: 1 or more, or None")
        if any(b <= a for a, b in pairwise((0, *self.level_steps))):
            raise ValueError(
                f"level_steps={self.level_steps}: allowed: increasing positive step numbers"
            )
        if not 0 < self.level_rate < 1:
            raise ValueError(f"level_rate={self.level_rate}: allowed: above 0 and below 1")

    @property
    def keeps_reference(self) -> bool:
        """Whether differences are added to weights that everybody holds."""
        return self.difference or self.lossless

    @property
    def exact_codec(self) -> LosslessCodec:
        """Codec of exact differences."""
        return LosslessCodec(backend=self.backend)

    @property
    def gradient_rotation(self) -> Rotation | None:
        """Rotation of the gradients, its sign flips left out."""
        return Rotation(block=self.rotation, backend=self.backend) if self.rotation else None

    def differs_exactly(self, dtype: torch.dtype) -> bool:
        """Whether weights of this dtype travel as exact differences, wherever something is kept
        that they can differ from.
        """
        return self.lossless and dtype in (torch.bfloat16, torch.float16)

    def skip_reason(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> str | None:
        """Return why the parameter stays in full precision in every role, or ``None``."""
        if not dtype.is_floating_point:
            return "not floating point"
        if len(shape) <= 1:
            return "1-D"
        if math.prod(shape) < self.min_numel:
            return "small"
        if any(matches(name, pattern) for pattern in self.exclude):
            return "excluded"
        return None
