"""The codecs that a parameter remembers: an answer follows from the question alone.

Everything that a codec depends on must be in the key under which it is remembered. Otherwise one
rank, hop or dtype gets the codec or the random bits of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import nn

from ds_quant.kernels.random_bits import Address
from ds_quant.runtime.param import Param
from tests.world import World

RANKS = range(4)  # two nodes of two
SIGNS_OF_EVERY_NODE = {"scheme": "eden3", "gradients": {"rotation_signs": "node"}}
BLOCKS = [SIGNS_OF_EVERY_NODE, {"scheme": "qsdp"}, {"scheme": "lossless"}]


def new_param(block: dict[str, Any]) -> Param:
    """Return a matrix in a run of 2 x 2 ranks, which remembers nothing yet."""
    module = nn.ParameterList([torch.empty(64, 64)])
    world = World(2, 2, module=module, **block)
    (param,) = world.ranks[0].run.params
    return param


Question = Callable[[Param], object]


def weight_questions() -> Iterator[Question]:
    """Yield every way to ask for the codecs of a parameter's weights."""
    dtypes = (torch.bfloat16, torch.int8)
    for dtype, rank, full_world in product(dtypes, (None, *RANKS), (False, True)):
        yield partial(Param.weight_codecs, dtype=dtype, rank=rank, full_world=full_world)


def gradient_questions() -> Iterator[Question]:
    """Yield every way to ask for the codecs of a parameter's gradients."""
    dtypes = (torch.bfloat16, torch.float32)
    for dtype, rank, hops in product(dtypes, RANKS, (1, 2)):
        yield partial(Param.gradient_codecs, dtype=dtype, rank=rank, hops=hops)


@pytest.mark.parametrize("questions", [weight_questions, gradient_questions])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_an_answer_does_not_depend_on_earlier_questions(
    block: dict[str, Any], questions: Callable[[], Iterator[Question]]
) -> None:
    asked_everything = new_param(block)
    for ask in questions():
        assert ask(asked_everything) == ask(new_param(block))


# ---- sign flips of a rotation ----


def signs_by_rank(*, hops: int) -> list[Address | None]:
    """Return the address of every rank's sign flips."""
    param = new_param(SIGNS_OF_EVERY_NODE)
    signs = []
    for rank in RANKS:
        rotation = param.gradient_codecs(torch.bfloat16, rank=rank, hops=hops).rotation
        assert rotation is not None
        signs.append(rotation.signs)
    return signs


def test_over_one_hop_every_rank_flips_other_signs() -> None:
    """Otherwise the errors of their messages do not average out."""
    for one, other in combinations(signs_by_rank(hops=1), 2):
        assert one != other


def test_over_two_hops_the_ranks_of_a_node_flip_equal_signs() -> None:
    """They are added up before the node sends them."""
    signs = signs_by_rank(hops=2)
    assert signs[0] == signs[1]
    assert signs[2] == signs[3]


def test_over_two_hops_every_node_flips_other_signs() -> None:
    signs = signs_by_rank(hops=2)
    assert signs[0] != signs[2]
