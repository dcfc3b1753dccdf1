"""Which codec goes on which hop, and how often: a table by hand, and the price of every route."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_quant.codec.codec import CastCodec, GroupCodec
from ds_quant.config.presets import preset_names
from ds_quant.config.schema import parse_block
from ds_quant.kernels.wire import ceil_div, round_up
from ds_quant.policy.autotune import Place, Speed, Speeds, codec_seconds
from ds_quant.policy.cost import LOSSLESS_BITS, PricedParam, bill
from ds_quant.policy.route import Hop, Route, Routes, times
from ds_quant.policy.scheme import Scheme

BF16, FP32 = torch.bfloat16, torch.float32
TOPOLOGIES = ((1, 4), (4, 1), (2, 2), (3, 4))  # nodes, ranks of a node


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
    (letter,) = [n for n, codec in codecs.items() if codec is hop.codec is not None] or ["16 bits"]
    flags = ("exact_own", "forwards", "difference", "lossless")
    true = [flag for flag in flags if getattr(hop, flag)]
    return " ".join([hop.level, f"{letter}/{hop.per}", *true])


# (stages) -> nodes x ranks of a node -> the hops. W, G: the scheme's codecs, w, g: its inner ones.
WEIGHTS: dict[str, dict[tuple[int, ...], dict[tuple[int, int], str]]] = {
    "full_precision": {
        (1, 2): {
            (1, 4): "whole 16 bits/step",
            (4, 1): "whole 16 bits/step",
            (2, 2): "inter 16 bits/step, intra 16 bits/step forwards",
        },
        (3,): {
            (1, 4): "whole 16 bits/gather",
            (4, 1): "whole 16 bits/gather",
            (2, 2): "inter 16 bits/gather, intra 16 bits/gather forwards",
        },
    },
    "qsdp": {
        (1, 2): {
            (1, 4): "whole W/step",
            (4, 1): "whole W/step",
            (2, 2): "inter W/step, intra W/step forwards",
        },
        (3,): {
            (1, 4): "whole W/gather",
            (4, 1): "whole W/gather",
            (2, 2): "inter W/gather, intra W/gather forwards",
        },
    },
    "zeropp": {  # a node shard without differences
        (2,): {(2, 2): "inter W/step, intra W/step forwards"},
        (3,): {
            (1, 4): "whole 16 bits/gather",
            (4, 1): "whole W/step",
            (2, 2): "inter W/step, intra 16 bits/gather",
        },
    },
    "sdp4bit": {
        (1, 2): {
            (1, 4): "whole W/step difference",
            (4, 1): "whole W/step difference",
            (2, 2): "inter W/step difference, intra W/step forwards difference",
        },
        (3,): {
            (1, 4): "whole 16 bits/gather",  # nothing crosses between nodes
            (4, 1): "whole W/step difference",
            (2, 2): "inter W/step difference, intra 16 bits/gather",
        },
    },
    "lossless": {
        (1, 2): {
            (1, 4): "whole 16 bits/step lossless",
            (2, 2): "inter 16 bits/step lossless, intra 16 bits/step forwards lossless",
        },
        (3,): {
            (1, 4): "whole 16 bits/gather",
            (4, 1): "whole 16 bits/step lossless",
            (2, 2): "inter 16 bits/step lossless, intra 16 bits/gather",
        },
    },
}
GRADIENTS: dict[str, dict[tuple[int, ...], dict[tuple[int, int], str]]] = {
    "full_precision": {
        (1,): {(2, 2): "intra 16 bits/step exact_own, inter 16 bits/step exact_own"},
        (2, 3): {
            (1, 4): "whole 16 bits/micro_step",
            (2, 2): "intra 16 bits/micro_step exact_own, inter 16 bits/step exact_own",
        },
    },
    "qsdp": {
        (1,): {
            (1, 4): "whole G/step",
            (2, 2): "intra G/step exact_own, inter G/step exact_own",
        },
        (2, 3): {
            (1, 4): "whole G/micro_step",
            (4, 1): "whole G/micro_step",
            (2, 2): "intra G/micro_step exact_own, inter G/step exact_own",
        },
    },
    "sdp4bit": {
        (1,): {
            (1, 4): "whole g/step exact_own",
            (4, 1): "whole G/step exact_own",
            (2, 2): "intra g/step exact_own, inter G/step exact_own",
        },
        (2, 3): {
            (1, 4): "whole g/micro_step exact_own",
            (4, 1): "whole G/micro_step exact_own",
            (2, 2): "intra g/micro_step exact_own, inter G/step exact_own",
        },
    },
    "tlq": {  # as published, every micro-step crosses
        (2, 3): {(2, 2): "intra g/micro_step exact_own, inter G/micro_step exact_own"},
    },
    "lossless": {
        (2, 3): {(2, 2): "intra 16 bits/micro_step exact_own, inter 16 bits/step exact_own"},
    },
}


def rows(table: dict[str, Any]) -> list[tuple[str, int, int, int, str]]:
    return [
        (name, stage, *topology, hops)
        for name, by_stage in table.items()
        for stages, by_topology in by_stage.items()
        for stage in stages
        for topology, hops in by_topology.items()
    ]


@pytest.mark.parametrize(("name", "stage", "nodes", "node_size", "expected"), rows(WEIGHTS))
def test_hops_of_weights(name: str, stage: int, nodes: int, node_size: int, expected: str) -> None:
    found = routes(name, stage, nodes, node_size)
    assert written(found.weights(dtype=BF16), found.scheme) == expected


@pytest.mark.parametrize(("name", "stage", "nodes", "node_size", "expected"), rows(GRADIENTS))
def test_hops_of_gradients(
    name: str, stage: int, nodes: int, node_size: int, expected: str
) -> None:
    found = routes(name, stage, nodes, node_size)
    route = found.gradients()
    assert written(route, found.scheme) == expected
    assert route.waits == ("micro_step" in expected and "/step" in expected)


@pytest.mark.parametrize(
    ("name", "stage", "facts", "expected"),
    [
        # left out by the scheme: full precision on every hop, as often as any other
        ("qsdp", 2, {"quantized": False}, "inter 16 bits/step, intra 16 bits/step forwards"),
        ("sdp4bit", 3, {"quantized": False}, "inter 16 bits/step, intra 16 bits/gather"),
        # exact differences leave nothing out but weights of 32 bits
        (
            "lossless",
            2,
            {"quantized": False},
            "inter 16 bits/step lossless, intra 16 bits/step forwards lossless",
        ),
        ("lossless", 3, {"dtype": FP32}, "inter 16 bits/step, intra 16 bits/gather"),
        # frozen weights never change in the node shard
        ("sdp4bit", 3, {"trained": False}, "intra 16 bits/gather"),
        ("qsdp", 3, {"trained": False}, "inter W/gather, intra W/gather forwards"),
        # experts: their ranks are not the world, and have no node shard
        ("qsdp", 3, {"whole": False}, "whole W/gather"),
        ("sdp4bit", 2, {"whole": False}, "whole W/step difference"),
        ("sdp4bit", 3, {"whole": False}, "whole 16 bits/gather"),
    ],
)
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
    assert found.gradients().rotation.block == found.scheme.rotation
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


# ---- prices ----

CARGO = (
    PricedParam("a.weight", (257, 96), BF16, True),
    PricedParam("a.bias", (257,), BF16, True),
    PricedParam("b.weight", (64, 64), FP32, True),
    PricedParam("frozen.weight", (128, 48), BF16, False),
)


def volume(found: Routes, route: Route, hop: Hop, item: PricedParam, dtype: torch.dtype) -> float:
    """Bytes of one run of a hop."""
    numel = torch.Size(item.shape).numel()
    if hop.lossless:
        return ceil_div(round(numel * LOSSLESS_BITS), 8)
    shards = found.nodes * found.node_size if found.stage == 3 else 1
    width = ceil_div(numel, shards)
    if route.rotation is not None:
        width = round_up(width, route.rotation.block)
    return shards * hop.sends(dtype).wire_bytes(width)


def brought(found: Routes, hop: Hop) -> tuple[str, float]:
    """The link of a hop, and the share of its bytes that a rank gets from others there."""
    near, away = 1 - 1 / found.node_size, (1 - 1 / found.nodes) / found.node_size
    inside = hop.level == "intra" or (hop.level == "whole" and found.nodes == 1)
    return ("intra", near) if inside else ("inter", away)


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize(("nodes", "node_size"), TOPOLOGIES)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", preset_names())
def test_the_price_of_a_step_is_that_of_its_hops(
    name: str, stage: int, nodes: int, node_size: int, micro_steps: int
) -> None:
    found, often = routes(name, stage, nodes, node_size), {"micro_steps": micro_steps}
    expected = {role: {"intra": 0.0, "inter": 0.0} for role in ("weights", "gradients")}
    for item in CARGO:
        if stage < 3 and not item.trainable:
            continue
        quantized = found.scheme.skip_reason(item.name, item.shape, item.dtype) is None
        weights = found.weights(dtype=item.dtype, quantized=quantized, trained=item.trainable)
        gathers, reductions = (weights, item.dtype), (found.gradients(quantized=quantized), BF16)
        taken = {"weights": gathers, "gradients": reductions}
        for role, (route, dtype) in taken.items():
            for hop in route.hops if role == "weights" or item.trainable else ():
                link, share = brought(found, hop)
                runs = times(hop.per, gathers=1.5, **often)
                expected[role][link] += share * runs * volume(found, route, hop, item, dtype)
    costs = bill(
        found.scheme, stage, CARGO, ranks=nodes * node_size, node_size=node_size,
        gradient_dtype=BF16, gathers=1.5,
    )  # fmt: skip
    received = costs.received(stage, nodes=nodes, node_size=node_size, **often)
    for role, links in expected.items():
        assert received[role] == pytest.approx(links), role


def test_gradients_without_a_codec_stay_exact_inside_a_node_too() -> None:
    """The inner codec alone quantizes nothing, so it must not be priced either."""
    inner = GroupCodec(bits=8, group_size=128)
    scheme = Scheme(name="inner", weights=None, gradients=None, gradients_intra=inner, rotation=32)
    route = Routes(scheme=scheme, stage=2, nodes=2, node_size=2).gradients()
    assert route.is_exact and route.rotation is None
    costs = bill(scheme, 2, CARGO[:1], ranks=4, node_size=2, gradient_dtype=BF16)
    assert costs.gradients == costs.gradients_intra == 2
    speeds = Speeds(**{
        field: Speed(encode=seconds, decode=0.0)
        for field, seconds in (
            ("weights", 0.0), ("weights_intra", 0.0), ("gradients", 1.0), ("gradients_intra", 1.0)
        )
    })  # fmt: skip
    place = Place(stage=2, micro_steps=1, nodes=2, node_size=2)
    assert codec_seconds(scheme, speeds, place) == 0.5 + 0.25


def test_gradients_on_deepspeeds_own_path_take_no_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """With reduce_scatter off, autotune charges no scheme for gradients that it does not encode."""
    from ds_quant.zero import attach

    speed = {"weights": 3.0, "weights_intra": 0.0, "gradients": 5.0, "gradients_intra": 5.0}
    speeds = Speeds(**{name: Speed(encode=s, decode=0.0) for name, s in speed.items()})
    monkeypatch.setattr(attach.autotune, "speeds_of", lambda *args, **how: speeds)
    monkeypatch.setattr(attach.hooks, "gradient_dtype", lambda engine: BF16)
    monkeypatch.setattr(attach.hooks, "device", lambda: torch.device("cpu"))
    place = Place(stage=2, micro_steps=4, nodes=2, node_size=1)
    costs = {}
    for reason in (None, "zero_optimization.reduce_scatter is false"):
        monkeypatch.setattr(attach.hooks, "exact_gradient_reason", lambda engine, r=reason: r)
        engine = SimpleNamespace(module=torch.nn.Linear(2, 2))
        binding = SimpleNamespace(engine=engine, bill=lambda scheme: None)
        found = attach._candidate(binding, parse_block({"scheme": "qsdp"}), place)
        costs[reason is None] = found.codec
    assert costs == {True: 3.0 / 2 + 4 * 5.0, False: 3.0 / 2}
