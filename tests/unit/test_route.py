"""The table of routes, written by hand: codecs by hop, and how often; and the random streams of a
parameter that follow.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from ds_quant.codec.bound import full_precision
from ds_quant.codec.codec import CastCodec, GroupCodec
from ds_quant.config.schema import parse_block
from ds_quant.kernels.batch import OWN_SIGNS
from ds_quant.policy.cost import ParamSpec, comm_volume
from ds_quant.policy.route import Hop, Routes, times
from ds_quant.policy.scheme import Scheme
from ds_quant.runtime.param import Param, full_precision_gradient

BF16, FP32 = torch.bfloat16, torch.float32
SHARED = 1  # signs


def scheme_of(name: str, **keys: Any) -> Scheme:
    return parse_block({"scheme": name, **keys}).to_scheme()


def routes(name: str, stage: int, nodes: int = 2, node_size: int = 2, **more: Any) -> Routes:
    return Routes(scheme=scheme_of(name), stage=stage, nodes=nodes, node_size=node_size, **more)


# ---- what stays in full precision ----

EXCLUDE = ["lm_head.*", "*.embed.*", "layers.0.mlp.*", "model.norm.weight", "_orig_mod.tail.*"]


@pytest.mark.parametrize(
    "name, shape, dtype, reason",
    [
        ("block.weight", (64, 64), BF16, None),
        ("block.weight", (64, 64), FP32, None),
        ("conv.weight", (4, 4, 16, 16), torch.float16, None),
        ("block.weight", (64, 32), BF16, None),  # exactly min_numel
        ("block.weight", (2047, 1), BF16, "small"),
        ("block.weight", (0, 64), BF16, "small"),
        ("block.bias", (100000,), BF16, "1-D"),
        ("scale", (), BF16, "1-D"),
        ("table", (64, 64), torch.int8, "int8"),
        ("mask", (64, 64), torch.bool, "bool"),
        ("block.weight", (64, 64), torch.float8_e4m3fn, "float8_e4m3fn"),
        ("block.weight", (64, 64), torch.float64, "float64"),
        ("lm_head.weight", (64, 64), BF16, "excluded"),
        ("model.embed.weight", (64, 64), BF16, "excluded"),
        ("LM_HEAD.weight", (64, 64), BF16, None),  # patterns mind the case
        # without what wrappers put into names: torch.compile of the model and of a block, PEFT
        ("_orig_mod.lm_head.weight", (64, 64), BF16, "excluded"),
        ("layers.0._orig_mod.mlp.weight", (64, 64), BF16, "excluded"),
        ("base_model.model.lm_head.weight", (64, 64), BF16, "excluded"),
        ("_orig_mod.base_model.model.model.norm.weight", (64, 64), BF16, "excluded"),
        ("_orig_mod.tail.weight", (64, 64), BF16, "excluded"),  # written as it is called
        ("my_orig_mod.lm_head.weight", (64, 64), BF16, None),
        ("other_base_model.model.lm_head.weight", (64, 64), BF16, None),
    ],
)
def test_skip_reason(name: str, shape: tuple, dtype: torch.dtype, reason: str | None) -> None:
    made = scheme_of("qsdp", exclude=EXCLUDE)
    assert made.skip_reason(name, shape, dtype) == reason
    assert made.skip_reason(name, shape, dtype, packed=True) == "packed"


# ---- hops ----


def written(hop: Hop, scheme: Scheme) -> str:
    """As "level codec/how often", and what else is true of it."""
    codecs = {"W": scheme.weights, "w": scheme.weights_intra}
    codecs |= {"G": scheme.gradients, "g": scheme.gradients_intra}
    (letter,) = [n for n, codec in codecs.items() if codec is hop.codec is not None] or ["16"]
    flags = {
        "own": hop.full_precision_own,
        "forwards": hop.forwards,
        "difference": hop.difference,
        "lossless": hop.lossless,
    }
    true = [flag for flag, value in flags.items() if value]
    return " ".join([hop.level, f"{letter}/{hop.per}", *true])


FACTS: dict[str, dict[str, Any]] = {
    "exempt": {"quantized": False},  # by the scheme: full precision, or lossless differences
    "fp32": {"dtype": FP32},  # never lossless differences
    "frozen": {"trained": False},  # never changes in a node shard
    "part": {"full_world": False},  # experts: their ranks are not the world, and have no node shard
}
# role, scheme, stages, fact | nodes x ranks of a node | hops. W, G: the scheme's codecs, w, g: its
# inner ones. A node shard of zeropp has no differences; in one node nothing crosses.
TABLE = """
weights   full_precision 12 | 1x4 4x1 | flat 16/step
weights   full_precision 12 | 2x2     | inter 16/step, intra 16/step forwards
weights   full_precision 3  | 1x4 4x1 | flat 16/gather
weights   full_precision 3  | 2x2     | inter 16/gather, intra 16/gather forwards
weights   qsdp           12 | 1x4 4x1 | flat W/step
weights   qsdp           12 | 2x2     | inter W/step, intra W/step forwards
weights   qsdp           3  | 1x4 4x1 | flat W/gather
weights   qsdp           3  | 2x2     | inter W/gather, intra W/gather forwards
weights   zeropp         2  | 2x2     | inter W/step, intra W/step forwards
weights   zeropp         3  | 1x4     | flat 16/gather
weights   zeropp         3  | 4x1     | flat W/step
weights   zeropp         3  | 2x2     | inter W/step, intra 16/gather
weights   sdp4bit        12 | 1x4 4x1 | flat W/step difference
weights   sdp4bit        12 | 2x2     | inter W/step difference, intra W/step forwards difference
weights   sdp4bit        3  | 1x4     | flat 16/gather
weights   sdp4bit        3  | 4x1     | flat W/step difference
weights   sdp4bit        3  | 2x2     | inter W/step difference, intra 16/gather
weights   lossless       12 | 1x4     | flat 16/step lossless
weights   lossless       12 | 2x2     | inter 16/step lossless, intra 16/step forwards lossless
weights   lossless       3  | 1x4     | flat 16/gather
weights   lossless       3  | 4x1     | flat 16/step lossless
weights   lossless       3  | 2x2     | inter 16/step lossless, intra 16/gather
weights   qsdp           2 exempt | 2x2 | inter 16/step, intra 16/step forwards
weights   sdp4bit        3 exempt | 2x2 | inter 16/step, intra 16/gather
weights   lossless       2 exempt | 2x2 | inter 16/step lossless, intra 16/step forwards lossless
weights   lossless       3 fp32   | 2x2 | inter 16/step, intra 16/gather
weights   sdp4bit        3 frozen | 2x2 | intra 16/gather
weights   sdp4bit        3 frozen | 4x1 |
weights   qsdp           3 frozen | 2x2 | inter W/gather, intra W/gather forwards
weights   qsdp           3 part   | 2x2 | flat W/gather
weights   sdp4bit        2 part   | 2x2 | flat W/step difference
weights   sdp4bit        3 part   | 2x2 | flat 16/gather
gradients full_precision 1  | 2x2     | intra 16/step own, inter 16/step own
gradients full_precision 23 | 1x4     | flat 16/micro_step
gradients full_precision 23 | 2x2     | intra 16/micro_step own, inter 16/step own
gradients qsdp           1  | 1x4     | flat G/step
gradients qsdp           1  | 2x2     | intra G/step own, inter G/step own
gradients qsdp           23 | 1x4 4x1 | flat G/micro_step
gradients qsdp           23 | 2x2     | intra G/micro_step own, inter G/step own
gradients sdp4bit        1  | 1x4     | flat g/step own
gradients sdp4bit        1  | 4x1     | flat G/step own
gradients sdp4bit        1  | 2x2     | intra g/step own, inter G/step own
gradients sdp4bit        23 | 1x4     | flat g/micro_step own
gradients sdp4bit        23 | 4x1     | flat G/micro_step own
gradients sdp4bit        23 | 2x2     | intra g/micro_step own, inter G/step own
gradients tlq            23 | 2x2     | intra g/micro_step own, inter G/micro_step own
gradients lossless       23 | 2x2     | intra 16/micro_step own, inter 16/step own
gradients sdp4bit        1 part   | 2x2 | flat G/step own
gradients sdp4bit        23 part  | 2x2 | flat G/micro_step own
gradients sdp4bit        1 exempt | 2x2 | intra 16/step own, inter 16/step own
gradients sdp4bit        23 exempt | 2x2 | intra 16/micro_step own, inter 16/step own
"""


@pytest.mark.parametrize("row", TABLE.strip().splitlines())
def test_hops_are_those_of_the_table(row: str) -> None:
    case, topologies, expected = (part.strip() for part in row.split("|"))
    role, name, stages, *named = case.split()
    facts = {key: value for fact in named for key, value in FACTS[fact].items()}
    for stage, topology in product(stages, topologies.split()):
        found = routes(name, int(stage), *map(int, topology.split("x")))
        if role == "weights":
            route = found.weights(**{"dtype": BF16, **facts})
        else:
            route = found.gradients(**facts)
            assert route.keeps_partial_sums == ("micro_step" in expected and "/step" in expected)
        assert ", ".join(written(hop, found.scheme) for hop in route.hops) == expected


def test_gradients_are_rotated_around_all_hops_if_any_is_quantized() -> None:
    found = routes("sdp4bit", 2)
    exact = found.gradients(quantized=False)
    assert exact.is_full_precision and exact.rotation is None
    assert found.gradients().rotation.block == found.scheme.block.gradients.rotation
    assert replace(found, stock_gradients=True).gradients().hops == ()


@pytest.mark.parametrize("name", ["qsdp", "sdp4bit", "eden3", "full_precision"])
def test_owners_get_sums_in_eight_bits_of_the_last_hop(name: str) -> None:
    for stage, topology in product((1, 2), ((1, 4), (4, 1), (2, 2))):
        route = routes(name, stage, *topology).gradients()
        last, delivery = route.hops[-1], route.delivery
        assert delivery.per == last.per and delivery.level == "flat"
        if last.codec is None:
            assert delivery.codec is None
        else:
            assert (delivery.codec.bits, delivery.codec.group_size) == (8, last.codec.group_size)
    assert routes(name, 3).gradients().delivery is None


@pytest.mark.parametrize(
    ("name", "bits", "codec"),
    [
        ("eden4", None, "int5 gaussian g128 nearest"),
        ("eden2", None, "int5 gaussian g128 nearest"),
        ("eden4", 4, "int4 gaussian g128 nearest"),
        ("eden4", 6, "int6 absmax g128 stochastic"),
        ("eden4", 8, "int8 absmax g128 stochastic"),
        ("eden3", 2, "int2 gaussian g128 nearest"),
        ("sdp4bit", None, "int5 absmax g128 stochastic"),
        ("sdp4bit", 4, "int4 absmax g128 stochastic"),
        ("zeropp", None, "int5 absmax g4096 nearest"),
        ("qsdp", None, "int8 minmax g1024 stochastic"),
        ("qsdp", 4, "int4 minmax g1024 stochastic"),
        ("full_precision", None, None),
        ("lossless", None, None),
    ],
)
def test_sums_go_back_to_replicas_in_bits_of_their_own(
    name: str, bits: int | None, codec: str | None
) -> None:
    """By default in at least 5; the way out keeps those of the scheme."""
    plain = routes(name, 3, replicas=True)
    gradients = {} if bits is None else {"returned_bits": bits}
    found = replace(plain, scheme=scheme_of(name, gradients=gradients)).gradients()
    assert found.hops == plain.gradients().hops
    assert found.returned.level == "inter" and found.returned.per == found.hops[-1].per
    assert (found.returned.codec and found.returned.codec.name) == codec
    assert replace(plain, replicas=False).gradients().returned is None


def test_a_hop_without_a_codec_sends_the_dtype_and_refuses_what_has_no_codec() -> None:
    exact, coded = Hop(level="flat", codec=None, per="step"), GroupCodec(bits=4)
    assert [exact.sends(d) for d in (BF16, FP32)] == [CastCodec(BF16), CastCodec(FP32)]
    assert replace(exact, codec=coded).sends(BF16) is coded
    with pytest.raises(ValueError, match="float64"):
        exact.sends(torch.float64)


def test_how_often_a_hop_runs() -> None:
    found = [times(per, micro_steps=4, gathers=1.5) for per in ("step", "micro_step", "gather")]
    assert found == [1, 4, 6]


def test_gradients_without_a_codec_stay_exact_inside_a_node_too() -> None:
    """The inner codec alone quantizes nothing, so it must not be priced either."""
    inner = GroupCodec(bits=8, group_size=128)
    scheme = Scheme(block=parse_block({"scheme": "tlq_hs"}), gradients_intra=inner)
    route = Routes(scheme=scheme, stage=2, nodes=2, node_size=2).gradients()
    assert route.is_full_precision and route.rotation is None
    weight = ParamSpec("a.weight", (257, 96), BF16, True)
    costs = comm_volume(scheme, 2, [weight], ranks=4, node_size=2, gradient_dtype=BF16)
    assert costs.gradients == costs.gradients_intra == 2


@pytest.mark.parametrize(
    "given, expected, schemes_at_nodes",
    [
        (True, OWN_SIGNS, "eden3 4, eden2 8, lossless_w_g3 4"),
        (True, SHARED, "eden3 1, eden3 2, eden3 3, eden4 8, sdp4bit 8"),
        ("node", OWN_SIGNS, "eden4 2, eden2 8"),
        ("node", SHARED, "eden2 1"),
        ("shared", SHARED, "eden2 8, sdp4bit 8"),
        (True, 0, "qsdp 8"),
    ],
)
def test_signs_are_of_each_node_with_few_bits_on_many_nodes(
    given: bool | str, expected: int, schemes_at_nodes: str
) -> None:
    for scheme, nodes in (case.split() for case in schemes_at_nodes.split(", ")):
        block = {"scheme": scheme, "gradients": {"rotation_signs": given}}
        how = {"scheme": parse_block(block).to_scheme(), "stage": 3, "nodes": int(nodes)}
        for node_size in (1, 2):
            found = Routes(**how, node_size=node_size)
            assert found.gradients().flips == expected
            assert found.gradients(quantized=False).flips == 0


# ---- streams of a parameter ----


def param(scheme: str, stage: int, *, trained: bool = True) -> Param:
    return Param(
        index=3, name="a.weight", shape=torch.Size((64, 64)), trained=trained, tensor=None,
        routes=routes(scheme, stage),
    )  # fmt: skip


def test_frozen_weights_of_a_node_shard_are_exact() -> None:
    """They are filled exactly and never exchanged, so that nothing has to fetch them again."""
    assert any(param("sdp4bit", 3).weight_codecs(BF16, rank=0))
    assert not any(param("sdp4bit", 3, trained=False).weight_codecs(BF16, rank=0))


def test_codings_have_the_random_bits_of_their_step_and_the_levels_of_the_outer_codec() -> None:
    found = param("qsdp", 3)
    found.levels = torch.arange(256.0)
    ((sent,), (received,)) = (found.weight_codecs(BF16, rank=rank) for rank in (1, None))
    bound_codecs = [found.bound_codec(sent, BF16, step) for step in (5, 6)]
    assert [bound_codec.address.step for bound_codec in bound_codecs] == [5, 6]
    assert bound_codecs[0].levels is found.levels and bound_codecs[0].codec == received.codec
    assert found.bound_codec(received, BF16, 5).address is None
    assert found.bound_codec(None, BF16, 5) == full_precision(BF16)
    between, inside = param("qsdp_shard", 3).weight_codecs(BF16, rank=1)
    assert between.learned and inside is None


def test_ranks_shift_together() -> None:
    """A shift is QSDP's, of one parameter."""
    (first,), (second,) = (param("qsdp", 2).weight_codecs(BF16, rank=rank) for rank in (0, 1))
    assert first.key == second.key is not None


def test_streams_are_kept_by_dtype_rank_and_hops() -> None:
    found = param("sdp4bit", 3)
    usual = found.gradient_codecs(BF16, rank=0, hops=2)
    others = [
        found.gradient_codecs(FP32, rank=0, hops=2),
        found.gradient_codecs(BF16, rank=1, hops=2),
        found.gradient_codecs(BF16, rank=0, hops=1),
    ]
    assert len(others[2].hops) == 1 and others[1].hops[0].key != usual.hops[0].key
    assert all(other is not usual for other in others)
    assert found.gradient_codecs(BF16, rank=0, hops=2) is usual
    between, again = (found.weight_codecs(BF16, rank=0) for _ in range(2))
    assert found.weight_codecs(BF16, rank=0, full_world=False) != between
    assert again[0] is between[0]
    exact = param("full_precision", 2)
    assert exact.weight_codecs(BF16, rank=0) == (None,)
    assert exact.gradient_codecs(BF16, rank=0, hops=2) is full_precision_gradient(BF16, 2)
