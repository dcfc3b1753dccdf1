"""Which codec goes on which hop, and how often: a table by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from ds_quant.codec.codec import CastCodec, GroupCodec
from ds_quant.config.schema import parse_block
from ds_quant.kernels.batch import OWN_SIGNS
from ds_quant.policy.cost import PricedParam, bill
from ds_quant.policy.route import Hop, Route, Routes, times
from ds_quant.policy.scheme import Scheme

BF16, FP32 = torch.bfloat16, torch.float32
TOPOLOGIES = ((1, 4), (4, 1), (2, 2), (3, 4))  # nodes, ranks of a node
SHARED = 1  # signs


def scheme_of(name: str) -> Scheme:
    return parse_block({"scheme": name}).to_scheme()


def routes(name: str, stage: int, nodes: int, node_size: int) -> Routes:
    return Routes(scheme=scheme_of(name), stage=stage, nodes=nodes, node_size=node_size)


def written(route: Route, scheme: Scheme) -> str:
    """Every hop as "level codec/how often", and what else is true of it."""
    return ", ".join(_written(hop, scheme) for hop in route.hops)


def _written(hop: Hop, scheme: Scheme) -> str:
    codecs = {"W": scheme.weights, "w": scheme.weights_intra}
    codecs |= {"G": scheme.gradients, "g": scheme.gradients_intra}
    (letter,) = [n for n, codec in codecs.items() if codec is hop.codec is not None] or ["16"]
    flags = ("exact_own", "forwards", "difference", "lossless")
    true = [flag for flag in flags if getattr(hop, flag)]
    return " ".join([hop.level, f"{letter}/{hop.per}", *true])


# role, scheme, stages | nodes x ranks of a node | hops. W, G: the scheme's codecs, w, g: its inner
# ones. A node shard of zeropp has no differences; in one node nothing crosses.
TABLE = """
weights   full_precision 12 | 1x4 4x1 | whole 16/step
weights   full_precision 12 | 2x2     | inter 16/step, intra 16/step forwards
weights   full_precision 3  | 1x4 4x1 | whole 16/gather
weights   full_precision 3  | 2x2     | inter 16/gather, intra 16/gather forwards
weights   qsdp           12 | 1x4 4x1 | whole W/step
weights   qsdp           12 | 2x2     | inter W/step, intra W/step forwards
weights   qsdp           3  | 1x4 4x1 | whole W/gather
weights   qsdp           3  | 2x2     | inter W/gather, intra W/gather forwards
weights   zeropp         2  | 2x2     | inter W/step, intra W/step forwards
weights   zeropp         3  | 1x4     | whole 16/gather
weights   zeropp         3  | 4x1     | whole W/step
weights   zeropp         3  | 2x2     | inter W/step, intra 16/gather
weights   sdp4bit        12 | 1x4 4x1 | whole W/step difference
weights   sdp4bit        12 | 2x2     | inter W/step difference, intra W/step forwards difference
weights   sdp4bit        3  | 1x4     | whole 16/gather
weights   sdp4bit        3  | 4x1     | whole W/step difference
weights   sdp4bit        3  | 2x2     | inter W/step difference, intra 16/gather
weights   lossless       12 | 1x4     | whole 16/step lossless
weights   lossless       12 | 2x2     | inter 16/step lossless, intra 16/step forwards lossless
weights   lossless       3  | 1x4     | whole 16/gather
weights   lossless       3  | 4x1     | whole 16/step lossless
weights   lossless       3  | 2x2     | inter 16/step lossless, intra 16/gather
gradients full_precision 1  | 2x2     | intra 16/step exact_own, inter 16/step exact_own
gradients full_precision 23 | 1x4     | whole 16/micro_step
gradients full_precision 23 | 2x2     | intra 16/micro_step exact_own, inter 16/step exact_own
gradients qsdp           1  | 1x4     | whole G/step
gradients qsdp           1  | 2x2     | intra G/step exact_own, inter G/step exact_own
gradients qsdp           23 | 1x4 4x1 | whole G/micro_step
gradients qsdp           23 | 2x2     | intra G/micro_step exact_own, inter G/step exact_own
gradients sdp4bit        1  | 1x4     | whole g/step exact_own
gradients sdp4bit        1  | 4x1     | whole G/step exact_own
gradients sdp4bit        1  | 2x2     | intra g/step exact_own, inter G/step exact_own
gradients sdp4bit        23 | 1x4     | whole g/micro_step exact_own
gradients sdp4bit        23 | 4x1     | whole G/micro_step exact_own
gradients sdp4bit        23 | 2x2     | intra g/micro_step exact_own, inter G/step exact_own
gradients tlq            23 | 2x2     | intra g/micro_step exact_own, inter G/micro_step exact_own
gradients lossless       23 | 2x2     | intra 16/micro_step exact_own, inter 16/step exact_own
"""


@pytest.mark.parametrize("row", TABLE.strip().splitlines())
def test_hops_are_those_of_the_table(row: str) -> None:
    (role, name, stages), topologies, (expected,) = (
        part.split() if i < 2 else [part.strip()] for i, part in enumerate(row.split("|"))
    )
    for stage, topology in product(stages, topologies):
        found = routes(name, int(stage), *map(int, topology.split("x")))
        route = found.weights(dtype=BF16) if role == "weights" else found.gradients()
        assert written(route, found.scheme) == expected
        if role == "gradients":
            assert route.waits == ("micro_step" in expected and "/step" in expected)


@pytest.mark.parametrize(
    ("name", "stage", "facts", "expected"),
    [
        # left out by the scheme: full precision on every hop, as often as any other
        ("qsdp", 2, {"quantized": False}, "inter 16/step, intra 16/step forwards"),
        ("sdp4bit", 3, {"quantized": False}, "inter 16/step, intra 16/gather"),
        # lossless differences leave nothing out but weights of 32 bits
        ("lossless", 2, {"quantized": False},
         "inter 16/step lossless, intra 16/step forwards lossless"),
        ("lossless", 3, {"dtype": FP32}, "inter 16/step, intra 16/gather"),
        # frozen weights never change in the node shard
        ("sdp4bit", 3, {"trained": False}, "intra 16/gather"),
        ("qsdp", 3, {"trained": False}, "inter W/gather, intra W/gather forwards"),
        # experts: their ranks are not the world, and have no node shard
        ("qsdp", 3, {"whole": False}, "whole W/gather"),
        ("sdp4bit", 2, {"whole": False}, "whole W/step difference"),
        ("sdp4bit", 3, {"whole": False}, "whole 16/gather"),
    ],
)  # fmt: skip
def test_hops_of_weights_that_are_special(
    name: str, stage: int, facts: dict[str, Any], expected: str
) -> None:
    found = routes(name, stage, 2, 2)
    assert written(found.weights(**{"dtype": BF16, **facts}), found.scheme) == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hops_of_gradients_that_are_special(stage: int) -> None:
    found, per = routes("sdp4bit", stage, 2, 2), "step" if stage == 1 else "micro_step"
    part = found.gradients(whole=False)
    assert written(part, found.scheme) == f"whole G/{per} exact_own" and not part.waits
    exact = found.gradients(quantized=False)
    assert exact.is_exact and exact.rotation is None
    assert [hop.level for hop in exact.hops] == ["intra", "inter"]
    assert found.gradients().rotation.block == found.scheme.block.gradients.rotation
    assert replace(found, shipped_gradients=True).gradients().hops == ()


def test_a_frozen_weight_of_a_rank_that_is_a_node_has_no_hop() -> None:
    assert routes("sdp4bit", 3, 4, 1).weights(dtype=BF16, trained=False).hops == ()


@pytest.mark.parametrize(("nodes", "node_size"), [(1, 4), (4, 1), (2, 2)])
@pytest.mark.parametrize("name", ["qsdp", "sdp4bit", "eden3", "full_precision"])
def test_owners_get_sums_in_eight_bits_of_the_last_hop(
    name: str, nodes: int, node_size: int
) -> None:
    for stage in (1, 2):
        route = routes(name, stage, nodes, node_size).gradients()
        last, delivery = route.hops[-1], route.delivery
        assert delivery.per == last.per and delivery.level == "whole"
        if last.codec is None:
            assert delivery.codec is None
        else:
            assert (delivery.codec.bits, delivery.codec.group_size) == (8, last.codec.group_size)
    assert routes(name, 3, nodes, node_size).gradients().delivery is None


def test_a_hop_without_a_codec_sends_the_dtype_and_refuses_what_has_no_codec() -> None:
    exact, coded = Hop(level="whole", codec=None, per="step"), GroupCodec(bits=4)
    assert [exact.sends(d) for d in (BF16, FP32)] == [CastCodec(BF16), CastCodec(FP32)]
    assert replace(exact, codec=coded).sends(BF16) is coded
    with pytest.raises(ValueError, match="float64"):
        exact.sends(torch.float64)


@pytest.mark.parametrize(("per", "expected"), [("step", 1), ("micro_step", 4), ("gather", 6)])
def test_how_often_a_hop_runs(per: str, expected: float) -> None:
    assert times(per, micro_steps=4, gathers=1.5) == expected


def test_gradients_without_a_codec_stay_exact_inside_a_node_too() -> None:
    """The inner codec alone quantizes nothing, so it must not be priced either."""
    inner = GroupCodec(bits=8, group_size=128)
    scheme = Scheme(block=parse_block({"scheme": "tlq_hs"}), gradients_intra=inner)
    route = Routes(scheme=scheme, stage=2, nodes=2, node_size=2).gradients()
    assert route.is_exact and route.rotation is None
    weight = PricedParam("a.weight", (257, 96), BF16, True)
    costs = bill(scheme, 2, [weight], ranks=4, node_size=2, gradient_dtype=BF16)
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
