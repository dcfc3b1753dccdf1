"""The choice of "autotune": the ladder, the price of a codec, and every point that was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_quant.comm.reduction_plan import MOST, Slicing, presumed_pace, slice_seconds
from ds_quant.config.presets import CANDIDATES
from ds_quant.config.schema import parse_block
from ds_quant.policy import autotune, cost
from ds_quant.policy.autotune import (
    Candidate,
    Links,
    Place,
    Rate,
    Speed,
    Speeds,
    choose,
    codec_seconds,
    messages,
    slice_pace,
    speeds_of,
)
from ds_quant.policy.cost import Costs
from ds_quant.tools.forecast import block_cargo

RESULTS = sorted(Path(__file__).parents[2].glob("benchmarks/results/speed_*.json"))
CLOSE = 1.05
BF16 = torch.bfloat16
CPU = torch.device("cpu")
TWO_BY_ONE = Place(stage=2, micro_steps=1, nodes=2, node_size=1)


def links(inter: float | None = None, intra: float | None = None) -> Links:
    """Rates in bytes per second."""
    found = [None if r is None else Rate(bytes_per_second=r, latency=0.0) for r in (intra, inter)]
    return Links(intra=found[0], inter=found[1])


def candidate(name: str, nbytes: float, codec: float = 0.0) -> Candidate:
    """``nbytes`` per parameter and ZeRO-2 step between nodes, 1000 parameters."""
    bill = Costs(numel=1000, weights=nbytes, gradients=0.0, full_precision_share=0, kept={})
    return Candidate(name=name, bill=bill, codec=codec)


def test_messages_are_the_wire_and_the_codec() -> None:
    """2000 bytes, half of them from elsewhere, at 100 bytes per second; 1000 x 3 ms of codec."""
    seconds = messages(candidate("a", 2.0, 0.003), TWO_BY_ONE, links(inter=100))
    assert seconds == pytest.approx(2000 / 2 / 100 + 3)


@pytest.mark.parametrize(
    ("stage", "kept", "nodes", "size", "expected"),
    [
        (2, False, 2, 4, 0),  # reductions are as many under every scheme
        (3, False, 2, 4, 2 * 3 * 10 * (5 + 1)),  # between nodes and inside them
        (3, True, 2, 4, 2 * 3 * 10 * 1),  # a node shard: inside
        (3, True, 2, 1, 0),  # every rank has it all
        (3, False, 1, 4, 2 * 3 * 10 * 1),
    ],
)
def test_every_module_pays_for_the_latency_of_its_gathers(
    stage: int, kept: bool, nodes: int, size: int, expected: float
) -> None:
    place = Place(stage=stage, micro_steps=3, nodes=nodes, node_size=size, modules=10)
    inside, between = (Rate(bytes_per_second=float("inf"), latency=s) for s in (1.0, 5.0))
    found = Links(intra=inside if size > 1 else None, inter=between if nodes > 1 else None)
    bill = replace(candidate("a", 1.0).bill, once_per_step=kept)
    assert messages(Candidate(name="a", bill=bill, codec=0), place, found) == expected


@pytest.mark.parametrize("numel", [1000, 10**7, 5 * 10**8])
@pytest.mark.parametrize(("inside", "between"), [(1.0, 0.5), (2e-3, 1.0)])
def test_slices_are_as_many_as_take_the_least_time(
    numel: int, inside: float, between: float
) -> None:
    """Bytes per element of the hops on links of 1 GB/s, against trying every number."""
    bill = Costs(numel=1, weights=0, gradients=between, gradients_intra=inside,
                full_precision_share=0, kept={})  # fmt: skip
    place = Place(stage=2, micro_steps=1, nodes=2, node_size=2)
    pace = slice_pace(Candidate(name="a", bill=bill, codec=0), place, links(1e9, 1e9), CPU)
    hops = [numel * nbytes / 2 / 1e9 for nbytes in (inside, between)]

    def seconds(count: int) -> float:
        return max(hops) + min(hops) / count + count * slice_seconds(CPU)

    best = min(range(1, MOST + 1), key=seconds)
    assert seconds(Slicing(pace=pace).slices(numel)) <= 1.02 * seconds(best)


def test_nvlink_takes_few_slices() -> None:
    """Of a layer of Llama-7B and of DeepSpeed's largest bucket, where no link is measured."""
    cuda, layer, bucket = torch.device("cuda"), 202_383_360, 500_000_000
    fast = Slicing(pace=presumed_pace(cuda, "cpu:gloo,cuda:nccl"))
    assert [fast.slices(numel) for numel in (layer, bucket)] == [1, 2]
    assert Slicing(pace=presumed_pace(cuda, "gloo")).slices(layer) == 4
    assert Slicing(pace=presumed_pace(CPU, "nccl")) == Slicing() and Slicing().slices(layer) == 10


def test_slices_that_are_given_are_taken() -> None:
    assert Slicing(count=7).slices(10) == Slicing(count=7).slices(10**9) == 7


@pytest.mark.parametrize("found", [links(inter=1e9), links(intra=1e9)])
def test_one_level_has_no_pace(found: Links) -> None:
    assert slice_pace(candidate("a", 1.0), TWO_BY_ONE, found, CPU) is None


@pytest.mark.parametrize(
    ("codec", "rate", "expected"),
    [
        (0.0, 100, "low"),  # 20 s, 10 s, 5 s
        (0.003, 100, "low"),  # 20 s, 13 s, 8 s
        (0.003, 1000, "exact"),  # 2 s, 4 s, 3.5 s: encoding takes longer than it saves
        (0.0, 1e12, "low"),  # everything is nothing, but a quarter of it: compute is as short
    ],
)
def test_the_shortest_step_wins(codec: float, rate: float, expected: str) -> None:
    offered = [candidate("exact", 4), candidate("half", 2, codec), candidate("low", 1, codec)]
    assert choose(offered, TWO_BY_ONE, links(inter=rate)).scheme == expected


def test_what_loses_more_must_gain_five_percent_of_the_step() -> None:
    offered = [candidate("exact", 4), candidate("half", 2), candidate("low", 1)]
    fast = links(inter=100)  # 20 s, 10 s, 5 s
    assert choose(offered, TWO_BY_ONE, fast, compute=0).scheme == "low"
    assert choose(offered, TWO_BY_ONE, fast, compute=94).scheme == "low"
    assert choose(offered, TWO_BY_ONE, fast, compute=96).scheme == "half"  # 106 to 101
    assert choose(offered, TWO_BY_ONE, fast, compute=400).scheme == "exact"
    # By little faster than the step before it, but much faster than the first one.
    ladder = [candidate("exact", 4), candidate("half", 2), candidate("low", 1.95)]
    assert choose(ladder, TWO_BY_ONE, fast, compute=0).scheme == "half"


def test_the_reason_names_seconds_and_links() -> None:
    offered = [candidate("full_precision", 4), candidate("qsdp", 2)]
    slow = links(inter=125e6, intra=12.5e9)
    reason = choose(offered, TWO_BY_ONE, slow).reason(slow)
    assert reason == (
        "chosen by autotune: messages of a step take full_precision 1.6e-05 s, qsdp 8e-06 s at "
        "1 Gb/s into a node and 100 Gb/s into a rank inside a node"
    )
    alone = choose(offered[:1], TWO_BY_ONE, slow)
    assert alone.scheme == "full_precision" and "nothing else gains 5 %" in alone.reason(slow)


SPEEDS = Speeds(
    weights=Speed(encode=1000.0, decode=100.0),
    weights_intra=Speed(encode=10000.0, decode=7.0),
    gradients=Speed(encode=20.0, decode=3.0),
    gradients_intra=Speed(encode=0.2, decode=0.03),
)


@pytest.mark.parametrize(
    ("scheme", "stage", "micro_steps", "nodes", "size", "expected"),
    [
        # an own share of the weights, all of them; all gradients twice
        ("qsdp", 2, 1, 1, 2, 1000 / 2 + 100 + 0.2 + 0.03),
        ("qsdp", 2, 3, 2, 1, 1000 / 2 + 100 + 3 * 23),
        ("qsdp", 1, 3, 2, 1, 1000 / 2 + 100 + 23),
        ("qsdp", 3, 3, 2, 1, 6 * (1000 / 2 + 100) + 3 * 23),
        # the second hop handles what is left of a node; on two levels own rows stay exact
        ("qsdp", 2, 1, 2, 4, 1000 / 8 + 100 + 0.23 * 3 / 4 + 23 / 4 / 2),
        # which crosses once per step, or as often as its publication says
        ("qsdp", 2, 3, 2, 4, 1000 / 8 + 100 + 3 * 0.23 * 3 / 4 + 23 / 4 / 2),
        ("tlq", 2, 3, 2, 4, 1000 / 8 + 100 + 3 * (0.23 * 3 / 4 + 23 / 4 / 2)),
        # a node shard: once between the nodes, then two gathers from it
        (
            "sdp4bit",
            3,
            1,
            2,
            4,
            1000 / 8 + 100 / 4 + 2 * (10000 / 4 + 7) + 0.23 * 3 / 4 + 23 / 4 / 2,
        ),
        ("sdp4bit", 3, 1, 1, 4, 2 * (10000 / 4 + 7) + 0.23 * 3 / 4),
        ("sdp4bit", 2, 1, 2, 1, 1000 / 2 + 100 + 23 / 2),
    ],
)
def test_a_rank_pays_for_what_it_encodes_and_decodes(
    scheme: str, stage: int, micro_steps: int, nodes: int, size: int, expected: float
) -> None:
    place = Place(stage=stage, micro_steps=micro_steps, nodes=nodes, node_size=size)
    found = codec_seconds(parse_block({"scheme": scheme}).to_scheme(), SPEEDS, place)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("scheme", ["qsdp", "sdp4bit"])
def test_weights_that_stay_gathered_cost_one_gather_less_per_micro_step(scheme: str) -> None:
    twice = Place(stage=3, micro_steps=3, nodes=2, node_size=2, modules=10)
    once = replace(twice, gathers=1.0)
    settings = parse_block({"scheme": scheme}).to_scheme()
    costs = [codec_seconds(settings, SPEEDS, place) for place in (twice, once)]
    inner = SPEEDS.weights_intra if scheme == "sdp4bit" else SPEEDS.weights
    ranks = 2 if scheme == "sdp4bit" else 4
    assert costs[0] - costs[1] == pytest.approx(3 * (inner.encode / ranks + inner.decode))
    bill = replace(candidate("a", 1.0).bill, once_per_step=scheme == "sdp4bit")
    rates = [Rate(bytes_per_second=float("inf"), latency=s) for s in (1.0, 5.0)]
    waits = Links(intra=rates[0], inter=rates[1])
    slow, fast = (
        messages(Candidate(name="a", bill=bill, codec=0), p, waits) for p in (twice, once)
    )
    assert slow == 2 * fast > 0


@pytest.mark.parametrize("name", CANDIDATES)
def test_codecs_of_every_candidate_can_be_measured(name: str) -> None:
    state = torch.get_rng_state()
    speeds = speeds_of(
        parse_block({"scheme": name}).to_scheme(), weights=BF16, gradients=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    for speed in (speeds.weights, speeds.weights_intra, speeds.gradients, speeds.gradients_intra):
        assert 1e-12 < speed.encode < 1e-5 and 1e-12 < speed.decode < 1e-5
    assert torch.equal(torch.get_rng_state(), state), "the user's random numbers stay the same"


# ---- the points of the network lab ----


def _points() -> list[tuple[str, dict[str, Any], float]]:
    """Where every candidate was measured."""
    return [
        (path.stem, place, rate)
        for path in RESULTS
        for place in json.loads(path.read_text("utf-8"))["points"]
        for rate in sorted({row["rate"] for row in place["rows"]})
        if {row["scheme"] for row in place["rows"]} >= set(CANDIDATES)
    ]


def paired_seconds(place: dict[str, Any], rate: float) -> dict[str, float]:
    """A step of every candidate, from that of full_precision and the gain over it in the same
    blocks: the machine's speed changes between blocks, which medians of seconds do not forgive.
    """
    rows = {row["scheme"]: row for row in place["rows"] if row["rate"] == rate}
    base = rows["full_precision"]["seconds"]
    return {name: base / rows[name]["speedup"] for name in CANDIDATES}


def picked(place: dict[str, Any], rate: float, *, compute_is_known: bool) -> str:
    """What autotune takes when the probe finds the lab's rate (Mbit/s, 0 for no limit).

    What a codec costs is what the unshaped step takes longer than that of full_precision.
    """
    nodes, size = map(int, place["topology"].split("x"))
    where = Place(stage=place["stage"], micro_steps=1, nodes=nodes, node_size=size)
    local = paired_seconds(place, 0)
    offered = []
    for name in CANDIDATES:
        costs = cost.bill(
            parse_block({"scheme": name}).to_scheme(), place["stage"],
            block_cargo(384, dtype=BF16), ranks=nodes * size, node_size=size, gradient_dtype=BF16,
        )  # fmt: skip
        bill = Costs(**{**vars(costs), "numel": place["parameters"]})
        more = max(0.0, local[name] - local["full_precision"])
        offered.append(Candidate(name=name, bill=bill, codec=more / place["parameters"]))
    found = links(inter=rate * 1e6 / 8 if rate else None)
    compute = local["full_precision"] if compute_is_known else None
    return choose(offered, where, found, compute=compute).scheme


@pytest.mark.parametrize("compute_is_known", [True, False], ids=["compute", "start-up"])
@pytest.mark.parametrize(("file", "place", "rate"), [p for p in _points() if p[2]])
def test_the_pick_is_the_measured_best_or_close(
    file: str, place: dict[str, Any], rate: float, compute_is_known: bool
) -> None:
    measured = paired_seconds(place, rate)
    choice = picked(place, rate, compute_is_known=compute_is_known)
    assert measured[choice] <= CLOSE * min(measured.values()), (choice, measured)


def test_where_messages_take_no_time_weights_and_gradients_stay_exact() -> None:
    """README says so. Schemes that send less measured faster there too, by less than they vary."""
    for _, place, rate in _points():
        choice = picked(place, rate, compute_is_known=True)
        assert (choice == "full_precision") == (rate == 0)


@pytest.mark.parametrize(("ranks", "largest"), [(2, 1 << 24), (64, 1 << 22), (1024, 1 << 18)])
def test_messages_of_a_measurement_are_bounded_by_what_a_rank_receives(
    monkeypatch: pytest.MonkeyPatch, ranks: int, largest: int
) -> None:
    """On a link so fast that nothing else ends it."""
    sizes = []

    def instantly(link: object, nbytes: int, device: object, *, repeats: int) -> float:
        sizes.append(nbytes)
        return 1e-9 * nbytes

    monkeypatch.setattr(autotune, "_seconds", instantly)
    autotune.measure_shortly(SimpleNamespace(size=ranks), torch.device("cpu"))
    assert max(sizes) == largest and largest * ranks <= 1 << 28
