"""Scheme: what it leaves in full precision, and settings that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_quant.codec.codec import GroupCodec
from ds_quant.policy.scheme import Scheme

WEIGHTS = GroupCodec(bits=8, rounding="random_shift")
GRADIENTS = GroupCodec(bits=4, rounding="stochastic")


def scheme(**fields: Any) -> Scheme:
    return Scheme(**{"name": "test", "weights": WEIGHTS, "gradients": GRADIENTS, **fields})


@pytest.mark.parametrize(
    "name, shape, dtype, reason",
    [
        ("block.weight", (64, 64), torch.bfloat16, None),
        ("block.weight", (64, 64), torch.float32, None),
        ("conv.weight", (4, 4, 16, 16), torch.float16, None),
        ("block.weight", (64, 32), torch.bfloat16, None),  # exactly min_numel
        ("block.weight", (2047, 1), torch.bfloat16, "small"),
        ("block.weight", (0, 64), torch.bfloat16, "small"),
        ("block.bias", (100000,), torch.bfloat16, "1-D"),
        ("scale", (), torch.bfloat16, "1-D"),
        ("table", (64, 64), torch.int8, "not floating point"),
        ("mask", (64, 64), torch.bool, "not floating point"),
        ("lm_head.weight", (64, 64), torch.bfloat16, "excluded"),
        ("model.embed.weight", (64, 64), torch.bfloat16, "excluded"),
        ("LM_HEAD.weight", (64, 64), torch.bfloat16, None),  # patterns mind the case
    ],
)
def test_skip_reason(name: str, shape: tuple, dtype: torch.dtype, reason: str | None) -> None:
    assert scheme(exclude=("lm_head.*", "*.embed.*")).skip_reason(name, shape, dtype) == reason


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"min_numel": -1}, "min_numel=-1: allowed: 0 or more"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"node_size": 0}, "node_size=0"),
        ({"slices": 0}, "slices=0"),
        ({"level_steps": (3, 3)}, "level_steps"),
        ({"level_steps": (0, 3)}, "level_steps"),
        ({"level_rate": 0.0}, "level_rate"),
        ({"level_rate": 1.0}, "level_rate"),
        ({"level_rate": float("nan")}, "level_rate"),
        ({"gradients": GroupCodec(levels="learned")}, "gradients must stay unbiased"),
    ],
)
def test_impossible_scheme_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scheme(**fields)


def test_scheme_is_frozen_and_hashable() -> None:
    assert hash(scheme()) == hash(scheme())
    with pytest.raises(AttributeError):
        scheme().seed = 1


@pytest.mark.parametrize(
    ("name", "pattern", "excluded"),
    [
        ("_orig_mod.lm_head.weight", "lm_head.*", True),  # torch.compile of the model
        ("layers.0._orig_mod.mlp.weight", "layers.0.mlp.*", True),  # and of a block
        ("base_model.model.lm_head.weight", "lm_head.*", True),  # PEFT
        ("_orig_mod.base_model.model.model.embed.weight", "model.embed.weight", True),
        ("_orig_mod.lm_head.weight", "_orig_mod.lm_head.*", True),  # written as it is called
        ("my_orig_mod.lm_head.weight", "lm_head.*", False),
        ("other_base_model.model.head.weight", "head.*", False),
        ("_orig_mod.lm_head.weight", "embed.*", False),
    ],
)
def test_patterns_match_without_what_wrappers_put_into_names(
    name: str, pattern: str, excluded: bool
) -> None:
    reason = scheme(exclude=(pattern,)).skip_reason(name, (64, 64), torch.bfloat16)
    assert (reason == "excluded") is excluded
