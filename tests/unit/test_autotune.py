"""The choice of "autotune", and slices of a bucket."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_quant.comm.reduction_plan import Slicing, presumed_pace
from ds_quant.config.schema import parse_block
from ds_quant.policy import autotune, timing
from ds_quant.policy.autotune import choose, reason
from ds_quant.policy.route import Routes
from tests.unit import wire_oracle as oracle

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((20, 10, 5), "low"),
        ((2, 4, 3.5), "exact"),  # encoding takes longer than it saves
        ((1, 0.91, 1), "exact"),  # compute is as long as the first, so 5 % are 0.095
        ((1, 0.90, 1), "half"),
        ((20, 10, 9.75), "half"),  # little faster than the step before it
        ((20,), "exact"),
    ],
)
def test_what_loses_more_must_gain_five_percent_of_the_step(
    seconds: tuple[float, ...], expected: str
) -> None:
    found = dict(zip(("exact", "half", "low"), seconds, strict=False))
    assert choose(found) == expected


def test_the_reason_names_seconds() -> None:
    found = {"full_precision": 1.6, "eden4": 0.41234}
    assert reason(found) == (
        "chosen by autotune: messages of a step take full_precision 1.6 s, eden4 0.412 s"
    )
    assert "nothing else gains 5 %" in reason({"full_precision": 1.6})


def test_the_median_of_the_slowest_rank_counts_without_the_first_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken, now = iter((100.0, 3.0, 50.0, 2.0)), 0.0

    def run() -> None:
        nonlocal now
        now += next(taken)

    def all_reduce(seconds: torch.Tensor, op: Any) -> None:
        assert op == "max"
        seconds += 1  # another rank

    found = SimpleNamespace(
        barrier=lambda: None, all_reduce=all_reduce, ReduceOp=SimpleNamespace(MAX="max")
    )
    monkeypatch.setattr(torch, "distributed", found)
    monkeypatch.setattr(timing, "device_clock", lambda device: lambda: now)
    assert timing.slowest(run, CPU) == 3.0 + 1


def test_gradients_on_deepspeeds_own_path_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_gather", lambda *_, **__: "gather")
    monkeypatch.setattr(autotune, "_reduce", lambda *_, **__: "reduce")
    monkeypatch.setattr(autotune, "slowest", lambda run, device: 3.0 if run == "gather" else 5.0)
    link = SimpleNamespace(size=2)
    hierarchy, work = (
        SimpleNamespace(flat=link, intra=None, inter=None),
        autotune.Work(
            numel=100, trained=80, gather=50, bucket=20, dtype=torch.bfloat16,
            gradients=torch.bfloat16, micro_steps=4, gathers=1.5,
        ),
    )  # fmt: skip
    how = {"scheme": parse_block({"scheme": "qsdp"}).to_scheme(), "nodes": 2, "node_size": 1}
    for stage, gathers in ((2, 1), (3, 1.5 * 4)):
        for exact in (False, True):
            routes = Routes(stage=stage, stock_gradients=exact, **how)
            found = autotune.step_seconds(routes, hierarchy, work, torch.device("cpu"))
            assert found == pytest.approx(gathers * 2 * 3.0 + (0 if exact else 4 * 4 * 5.0))


@pytest.mark.parametrize(
    ("rate", "free", "timed"),
    [
        (1e11, 80e9, [22, 24, 26]),  # elements per second, free bytes, powers of two
        (1e9, 80e9, [22, 24]),
        (1e8, 80e9, [22]),
        (1e11, 1e9, [22]),
    ],
)
def test_fixed_costs_of_short_messages_on_a_gpu_are_not_multiplied(
    monkeypatch: pytest.MonkeyPatch, rate: float, free: float, timed: list[int]
) -> None:
    seen, fixed, gather = [], 2e-4, 1 << 26

    def seconds(numel: int, device: torch.device) -> float:
        seen.append(numel)
        return fixed + numel / rate

    cuda, place = torch.device("cuda"), torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda values, device: place(values))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free), 0))
    group = SimpleNamespace(all_reduce=lambda *_, **__: None, ReduceOp=SimpleNamespace(MIN="min"))
    monkeypatch.setattr(torch, "distributed", group)
    monkeypatch.setattr(autotune, "slowest", seconds)
    found = autotune._seconds(lambda n: n, gather, autotune._most_numel(cuda), cuda) * gather
    assert seen[: len(timed)] == [1 << power for power in timed]
    exact = fixed + gather / rate
    if free == 80e9:
        assert seen == [1 << power for power in timed] and found == pytest.approx(exact, rel=0.02)
    else:
        assert max(seen) <= free / 4 / autotune._BYTES


def test_nvlink_takes_few_slices() -> None:
    """Tried: a layer of Llama-7B and DeepSpeed's largest bucket."""
    cuda, layer, bucket = torch.device("cuda"), 202_383_360, 500_000_000
    fast = Slicing(pace=presumed_pace(cuda, "cpu:gloo,cuda:nccl"))
    assert [fast.slices(numel) for numel in (layer, bucket)] == [1, 2]
    assert Slicing(pace=presumed_pace(cuda, "gloo")).slices(layer) == 4
    assert Slicing(pace=presumed_pace(CPU, "nccl")) == Slicing() and Slicing().slices(layer) == 10


def test_slices_are_as_many_as_the_page_says() -> None:
    for total in (0, 1, 499_999, 500_001, 4_499_999, 4_500_001, 10**8, 10**10):
        assert oracle.slice_count(total) == Slicing().slices(total)


def test_slices_that_are_given_are_taken() -> None:
    assert Slicing(count=7).slices(10) == Slicing(count=7).slices(10**9) == 7
