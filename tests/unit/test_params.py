"""The codecs that a parameter remembers: an answer follows from the question alone.

Everything that a codec depends on must be in the key under which it is remembered. Otherwise one
rank, hop or dtype gets the codec or the random bits of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_quant.codec.bound import BoundCodec, Rotation
from ds_quant.codec.codec import CastCodec
from ds_quant.codec.levels import merge_levels, update_levels
from ds_quant.comm.reduction_plan import GradientSpec
from ds_quant.comm.transport import Pending
from ds_quant.config.schema import parse_block
from ds_quant.kernels.random_bits import Address, Role, key_of
from ds_quant.policy.route import Routes
from ds_quant.runtime.param import (
    ABSENT,
    EXACT,
    GradientCodecs,
    HopCodec,
    Param,
    bind,
    full_precision_gradient,
    learn,
    tight_if_small,
)
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


# ---- random keys ----


def param_of(block: dict[str, Any], *, stage: int = 3, **fields: Any) -> Param:
    """Return the fourth parameter, a matrix, on two nodes of two ranks, with the seed 7."""
    scheme = parse_block({"seed": 7, **block}).to_scheme()
    return Param(
        index=3,
        name="w",
        shape=torch.Size((64, 64)),
        trained=True,
        tensor=None,
        routes=Routes(scheme=scheme, stage=stage, nodes=2, node_size=2),
        **fields,
    )


def key(role: Role, rank: int, hop: int) -> int:
    """Return the key of the page. rank: 0 for all ranks, else the rank + 1."""
    return key_of(seed=7, role=role, parameter=3, rank=rank, hop=hop)


WEIGHTS, GRADIENTS = Role.WEIGHTS, Role.GRADIENTS
BF16 = torch.bfloat16
ROUNDED = {"weights": {"rounding": "stochastic", "intra": {"bits": 8}}}


@pytest.mark.parametrize(
    ("block", "keys"),
    [
        ({"scheme": "qsdp"}, [key(WEIGHTS, 0, 0)]),  # a shift of all ranks
        ({"scheme": "sdp4bit", "node_shard": True, **ROUNDED},
         [key(WEIGHTS, 3, 0), key(WEIGHTS, 3, 1)]),
        ({"scheme": "sdp4bit"}, [None, "full precision"]),  # rounded to the nearest code
    ],
)  # fmt: skip
def test_weights_have_random_keys_by_rank_and_hop(block: dict[str, Any], keys: list[Any]) -> None:
    param = param_of(block)
    found = param.weight_codecs(BF16, rank=2)
    assert [codec.key if codec else "full precision" for codec in found] == keys
    receiver = param.weight_codecs(BF16, rank=None)
    assert [codec and codec._replace(key=None) for codec in found] == list(receiver)
    if len(keys) == 2 and keys[0]:
        between, inside = found
        scheme = param.routes.scheme
        assert between == HopCodec(scheme.weights, keys[0], learned=True, difference=True)
        assert inside == HopCodec(scheme.weights_intra, keys[1], learned=False, difference=False)
        param.levels = torch.arange(16.0)  # of the codec between the nodes
        assert param.bound_codec(between, BF16, 5) == BoundCodec(
            scheme.weights, Address(keys[0], 5), param.levels, difference=True
        )
        assert param.bound_codec(inside, BF16, 5) == BoundCodec(
            scheme.weights_intra, Address(keys[1], 5), None, difference=False
        )


def signs(hop: int) -> Address:
    return Address(key(GRADIENTS, 0, hop), 0)


@pytest.mark.parametrize(
    ("block", "stage", "hops", "keys", "rotation", "spec"),
    [
        ({"scheme": "sdp4bit"}, 3, 2, [0, 1], Rotation(block=32), (32, 0, None)),
        ({"scheme": "sdp4bit"}, 3, 1, [0], Rotation(block=32), (32, 0, None)),
        ({"scheme": "sdp4bit"}, 2, 2, [0, 1], Rotation(block=32), (32, 0, 8)),
        # the nearest Gaussian level takes no random bits, but its delivery does
        ({"scheme": "eden4"}, 3, 2, [0, None],
         Rotation(block=128, signs=signs(99)), (128, 1, None)),
        ({"scheme": "eden4"}, 2, 2, [0, 1], Rotation(block=128, signs=signs(99)), (128, 1, 8)),
        # the second node, and the third rank
        (SIGNS_OF_EVERY_NODE, 3, 2, [0, None],
         Rotation(block=128, signs=signs(99)).of(1), (128, 2, None)),
        (SIGNS_OF_EVERY_NODE, 3, 1, [None],
         Rotation(block=128, signs=signs(99)).of(2), (128, 2, None)),
    ],
)  # fmt: skip
def test_gradients_have_random_keys_by_rank_and_hop_and_signs_of_their_own(
    block: dict[str, Any],
    stage: int,
    hops: int,
    keys: list[int | None],
    rotation: Rotation,
    spec: tuple[int, int, int | None],
) -> None:
    """Those of the wire page, of rank 2. spec: rotation block, signs, and bits of a delivery."""
    param = param_of(block, stage=stage)
    found = param.gradient_codecs(BF16, rank=2, hops=hops)
    scheme = param.routes.scheme
    codecs = (scheme.gradients_intra, scheme.gradients)[2 - hops :]
    assert found.hops == tuple(
        HopCodec(codec, None if hop is None else key(GRADIENTS, 3, hop))
        for codec, hop in zip(codecs, keys, strict=True)
    )
    assert found.rotation == rotation
    delivery = found.spec.delivery
    assert found.spec == GradientSpec(codecs, *spec[:2], delivery)
    assert (delivery and delivery.bits) == spec[2]


@pytest.mark.parametrize(
    ("block", "has_key", "rotation", "spec"),
    [
        ({"scheme": "sdp4bit"}, True, Rotation(block=32), (32, 0)),
        ({"scheme": "eden4"}, False, Rotation(block=128, signs=signs(98)), (128, 1)),
        (SIGNS_OF_EVERY_NODE, False, Rotation(block=128, signs=signs(98)), (128, 1)),
        ({"scheme": "qsdp"}, True, None, (0, 0)),
    ],
)
def test_sums_on_their_way_back_have_keys_and_signs_of_their_own(
    block: dict[str, Any], has_key: bool, rotation: Rotation | None, spec: tuple[int, int]
) -> None:
    """The same signs on all ranks, because every sum has one sender."""
    found = param_of(block, stage=0).returned_codecs(BF16, rank=2)
    ((codec, found_key, learned, difference),) = found.hops
    assert found_key == (key(GRADIENTS, 3, 97) if has_key else None)
    assert not learned and not difference and found.rotation == rotation
    assert found.spec == GradientSpec((codec,), *spec)


def test_exact_sums_go_back_as_they_are() -> None:
    found = param_of({"scheme": "full_precision"}, stage=0).returned_codecs(BF16, rank=2)
    assert found is full_precision_gradient(BF16, 1)


# ---- codecs of a step ----


@pytest.mark.parametrize("tight", [False, True])
def test_gradients_in_full_precision_are_casts_on_all_hops(tight: bool) -> None:
    cast = CastCodec(BF16, tight)
    assert full_precision_gradient(BF16, 2, tight=tight) == GradientCodecs(
        (HopCodec(cast, None),) * 2, GradientSpec((cast, cast), delivery=cast), None
    )
    assert full_precision_gradient(BF16, 2).spec.codecs[0] == CastCodec(BF16, tight=False)


def test_a_step_binds_random_bits_and_signs_of_every_gradient() -> None:
    rounded, signed = (
        param_of({"scheme": name}).gradient_codecs(BF16, rank=2, hops=2)
        for name in ("sdp4bit", "eden4")
    )
    codecs, rotations = bind([rounded, signed], 5, 6)
    inside, between = (Address(key(GRADIENTS, 3, hop), 5) for hop in (0, 1))
    assert codecs == [
        (BoundCodec(rounded.spec.codecs[0], inside), BoundCodec(rounded.spec.codecs[1], between)),
        (BoundCodec(signed.spec.codecs[0], inside), BoundCodec(signed.spec.codecs[1], None)),
    ]
    assert rotations == [Rotation(block=32), Rotation(block=128, signs=signs(99)._replace(step=6))]


@pytest.mark.parametrize(("numel", "tight"), [(1, True), (16384, True), (16385, False)])
def test_small_gradients_in_full_precision_have_no_padding(numel: int, tight: bool) -> None:
    exact = full_precision_gradient(BF16, 2)
    wanted = full_precision_gradient(BF16, 2, tight=True) if tight else exact
    assert tight_if_small(numel, exact, BF16) is wanted
    quantized = param_of({"scheme": "sdp4bit"}).gradient_codecs(BF16, rank=2, hops=2)
    assert tight_if_small(numel, quantized, BF16) is quantized


# ---- the record of a parameter ----


def test_codecs_are_found_anew_when_a_parameter_is_frozen_and_not_before() -> None:
    param = param_of({"scheme": "sdp4bit"})
    trained = param.weight_codecs(BF16, rank=0)
    param.set_trained(True)
    assert param.weight_codecs(BF16, rank=0) is trained
    param.set_trained(False)
    assert not param.trained and param.weight_codecs(BF16, rank=0) == (None,)
    param.set_trained(True)
    assert param.trained and param.weight_codecs(BF16, rank=0) == trained


def test_parameters_are_distinct_even_if_all_their_fields_are_equal() -> None:
    one, other = (param_of({"scheme": "qsdp"}) for _ in range(2))
    assert one != other and len({one, other}) == 2
    assert (one.packed, one.needs_full_gradient, one.boundary) == (False, False, 0.0)
    assert one.levels is None and one.row_state is ABSENT and one.gathered is EXACT
    with pytest.raises(AttributeError):
        one.trained_ = True  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="node_rows"):
        _ = one.node_rows  # unset while there are none


def test_a_parameter_is_printed_without_what_it_remembers() -> None:
    param = param_of({"scheme": "qsdp"})
    printed = repr(param)
    assert "index=3, name='w'" in printed and "_weights" not in printed
    param.weight_codecs(BF16, rank=0)
    param.gradient_codecs(BF16, rank=0, hops=2)
    param.node_rows = torch.zeros(3)  # type: ignore[assignment]
    assert repr(param) == printed


def test_packed_weights_are_not_quantized() -> None:
    assert param_of({"scheme": "qsdp"}).is_quantized(BF16)
    assert not param_of({"scheme": "qsdp"}, packed=True).is_quantized(BF16)
    assert not param_of({"scheme": "qsdp"}).is_quantized(torch.int8)


# ---- learned levels ----


def test_levels_are_averaged_over_ranks_by_the_elements_of_their_shards() -> None:
    """Twice, the second time from the levels of the first."""
    block = {
        "scheme": "qsdp",
        "weights": {"bits": 2, "rounding": "nearest", "levels": "learned", "level_steps": [1]},
    }
    params = [param_of(block), param_of(block)]
    scheme = params[0].routes.scheme
    draw = torch.Generator().manual_seed(0)
    shards: list[list[Tensor]] = [  # by parameter and rank
        [torch.randn(numel, generator=draw).to(dtype) for numel in numels]
        for numels, dtype in (((3000, 50), BF16), ((64, 2048), torch.float32))
    ]
    tables: list[Tensor] = [torch.arange(4.0), torch.arange(4.0)]
    codec = scheme.weights

    def learned(table: Tensor, values: Tensor) -> Tensor:
        return update_levels(
            table,
            values.float(),
            group_size=codec.group_size,
            rate=scheme.block.weights.level_rate,
        )

    def gather(payload: Tensor, *, role: str) -> Pending[Tensor]:
        """Rank 0 sends the payload. Rank 1 sends its tables and numbers of elements."""
        assert role == "weights" and payload.dtype == torch.uint8
        own = [
            torch.cat([learned(table, values), torch.tensor([float(values.numel())])])
            for table, (_, values) in zip(tables, shards, strict=True)
        ]
        other = torch.stack(own).view(torch.uint8).view(-1)
        return Pending(lambda: torch.cat([payload, other]))

    communicator: Any = SimpleNamespace(all_gather=gather, size=2)
    for _ in range(2):
        own = [(param, values) for param, (values, _) in zip(params, shards, strict=True)]
        learn(own, communicator, scheme)
        tables = [
            merge_levels(
                torch.stack([learned(table, values) for values in of_ranks]),
                torch.tensor([float(values.numel()) for values in of_ranks]),
            )
            for table, of_ranks in zip(tables, shards, strict=True)
        ]
        for param, table in zip(params, tables, strict=True):
            assert param.levels is not None and torch.equal(param.levels, table)
    assert not torch.equal(tables[0], tables[1])
