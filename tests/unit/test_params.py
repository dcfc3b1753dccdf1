"""What a parameter remembers of how it travels: all that the answer follows from is in the key."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch
from torch import nn

from ds_quant.runtime.param import Param
from tests.world import World

BF16, FP32 = torch.bfloat16, torch.float32
OWN_SIGNS = {"scheme": "eden3", "gradients": {"rotation_signs": "node"}}


def param(nodes: int = 2, node_size: int = 2, **block: object) -> Param:
    world = World(nodes, node_size, module=nn.ParameterList([torch.empty(64, 64)]), **block)
    return next(iter(world.ranks[0].run.params))


def fresh(known: Param) -> Param:
    """The same parameter, which remembers nothing."""
    return dataclasses.replace(known, _weights={}, _gradients={})


@pytest.mark.parametrize("block", [OWN_SIGNS, {"scheme": "qsdp"}, {"scheme": "lossless"}], ids=str)
def test_an_answer_does_not_depend_on_what_was_asked_before(block: dict) -> None:
    known = param(**block)
    for dtype, rank, whole in product((BF16, torch.int8), (None, 0, 1, 2), (False, True)):
        found = known.weight_codecs(dtype, rank=rank, full_world=whole)
        assert found == fresh(known).weight_codecs(dtype, rank=rank, full_world=whole)
    for dtype, rank, hops in product((BF16, FP32), range(4), (1, 2)):
        found = known.gradient_codecs(dtype, rank=rank, hops=hops)
        assert found == fresh(known).gradient_codecs(dtype, rank=rank, hops=hops)


@pytest.mark.parametrize(("hops", "equal"), [(1, []), (2, [(0, 1), (2, 3)])])
def test_every_sender_of_the_last_hop_has_its_own_signs(hops: int, equal: list) -> None:
    """Over two hops it is a node that sends, over one a rank."""
    known = param(**OWN_SIGNS)
    signs = [known.gradient_codecs(BF16, rank=rank, hops=hops).rotation.signs for rank in range(4)]
    pairs = [(a, b) for a, b in product(range(4), repeat=2) if a < b and signs[a] == signs[b]]
    assert pairs == equal
