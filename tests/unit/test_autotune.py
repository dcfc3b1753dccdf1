"""The choice of "autotune", and slices of a bucket."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ds_quant.comm.reduction_plan import Slicing, presumed_pace
from ds_quant.comm.topology import Topology
from ds_quant.config.schema import parse_block
from ds_quant.policy import autotune, refusals, timing
from ds_quant.policy.autotune import choose, reason
from ds_quant.policy.route import Routes
from ds_quant.policy.scheme import Scheme
from ds_quant.runtime.tuning import tuned_front
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


# ---- the front that measures ----

BF16, FP32 = torch.bfloat16, torch.float32
WEIGHTS = [(torch.int8, 20, False), (BF16, 100, True), (FP32, 60, False)]  # elements, trained


class Job:
    """Fronts on ranks 4 to 11 of 2 x 4 ranks, as this one of them makes them.

    made: schemes of the fronts. timed: the arguments of ``step_seconds``.
    seconds: by scheme, as measured here; the first rank has ``of_first``.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        nodes: int = 2,
        node_size: int = 4,
        stage: int = 3,
        weights: list[tuple[torch.dtype, int, bool]] = WEIGHTS,
        gather_numel: int = 150,
        bucket: int = 70,
    ) -> None:
        self.made: list[Scheme] = []
        self.timed: list[tuple[Any, ...]] = []
        self.seconds = {"full_precision": 1.0, "eden4": 20.0, "qsdp": 30.0}
        self.of_first = {"full_precision": 20.0, "eden4": 1.0}
        flat = SimpleNamespace(ranks=[4, 5, 6, 7], process_group="group")
        self.hierarchy = SimpleNamespace(flat=flat)
        self.place = Topology(world=nodes * node_size, node_size=node_size)
        self.stage, self.bucket = stage, bucket
        self.workload = SimpleNamespace(
            params=[
                [
                    SimpleNamespace(
                        dtype=dtype,
                        param=SimpleNamespace(shape=torch.Size([numel])),
                        trained=trained,
                    )
                    for dtype, numel, trained in weights
                ],
                [SimpleNamespace(dtype=FP32, param=None, trained=True)],  # another level
            ],
            gathers=[1.5, 2.0],
            gather_numel=gather_numel,
            micro_steps=3,
            gradient_dtype=FP32,
            stock_gradients=True,
        )
        monkeypatch.setattr(autotune, "step_seconds", self.step_seconds)
        self.broadcast = Mock(side_effect=self.receive)
        monkeypatch.setattr(torch.distributed, "broadcast_object_list", self.broadcast)

    def make(self, scheme: Scheme) -> Any:
        self.made.append(scheme)
        routes = Routes.over(self.place, scheme, stage=self.stage)
        run = SimpleNamespace(
            routes=routes,
            topology=self.place,
            world=SimpleNamespace(hierarchy=self.hierarchy),
            workload=self.workload,
            sizes=[SimpleNamespace(bucket=self.bucket), SimpleNamespace(bucket=1)],
            device=CPU,
            notices=["a notice of the front"],
        )
        return SimpleNamespace(run=run)

    def step_seconds(self, routes: Routes, *given: Any) -> float:
        self.timed.append((routes, *given))
        return self.seconds[routes.scheme.name]

    def receive(self, seconds: list[dict[str, float]], **_: Any) -> None:
        self.measured = seconds[0]
        seconds[:] = [self.of_first]

    def front(self, scheme: str = "autotune", **block: Any) -> Any:
        return tuned_front(parse_block({"scheme": scheme, **block}), self.make)

    @property
    def names(self) -> list[str]:
        return [scheme.name for scheme in self.made]


def test_all_ranks_take_the_scheme_that_the_first_one_found_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch)
    front = job.front(min_numel=77)
    assert job.names == ["full_precision", "eden4"]
    assert [scheme.block.min_numel for scheme in job.made] == [77, 77]
    assert front.run.routes.scheme.name == "eden4"
    assert front.run.notices == [reason(job.of_first), "a notice of the front"]
    assert job.measured == {"full_precision": 1.0, "eden4": 20.0}
    assert job.broadcast.call_args.kwargs == {"src": 4, "group": "group"}
    for (routes, *given), name in zip(job.timed, job.measured, strict=True):
        scheme = parse_block({"scheme": name, "min_numel": 77}).to_scheme()
        assert routes == Routes(scheme=scheme, stage=3, nodes=2, node_size=4, stock_gradients=True)
        assert given[0] is job.hierarchy and given[2] == CPU


@pytest.mark.parametrize(
    ("how", "numel", "gather", "bucket", "dtype"),
    [
        ({"stage": 3}, 180, 150, 70, BF16),
        ({"stage": 3, "gather_numel": 500, "bucket": 500}, 180, 180, 100, BF16),
        ({"stage": 2}, 100, 100, 70, BF16),  # frozen weights are not sent
        ({"stage": 3, "weights": WEIGHTS[:1]}, 20, 20, 0, FP32),
    ],
)
def test_messages_are_timed_in_the_sizes_of_the_first_level(
    monkeypatch: pytest.MonkeyPatch,
    how: dict[str, Any],
    numel: int,
    gather: int,
    bucket: int,
    dtype: torch.dtype,
) -> None:
    job = Job(monkeypatch, **how)
    job.front()
    trained = 0 if numel == 20 else 100
    work = autotune.Work(
        numel=numel,
        trained=trained,
        gather=gather,
        bucket=bucket,
        dtype=dtype,
        gradients=FP32,
        micro_steps=3,
        gathers=1.5,
    )
    assert [given[2] for given in job.timed] == [work, work]


@pytest.mark.parametrize(
    ("nodes", "node_size", "block", "timed"),
    [
        (2, 1, {}, ["full_precision", "qsdp"]),
        (2, 1, {"allow_full_replica": True}, ["full_precision", "eden4"]),
        (1, 2, {}, ["full_precision", "qsdp"]),
        (1, 1, {}, []),
    ],
)
def test_schemes_of_the_place_are_timed(
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    node_size: int,
    block: dict[str, Any],
    timed: list[str],
) -> None:
    job = Job(monkeypatch, nodes=nodes, node_size=node_size)
    front = job.front(**block)
    assert [routes.scheme.name for routes, *_ in job.timed] == timed
    assert job.names == ["full_precision", *(["eden4"] if timed else [])]
    assert (front.run.notices == ["a notice of the front"]) == (not timed)


def test_a_scheme_that_start_up_would_refuse_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def can_start(config: Any, **where: int) -> bool:
        asked.append((config.scheme, where))
        return config.scheme == "full_precision"

    monkeypatch.setattr(refusals, "can_start", can_start)
    job = Job(monkeypatch)
    job.front()
    where = {"stage": 3, "world": 8, "node_size": 4}
    assert asked == [("full_precision", where), ("eden4", where)]
    assert [routes.scheme.name for routes, *_ in job.timed] == ["full_precision"]


def test_a_scheme_with_a_name_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    front = job.front("qsdp")
    assert job.names == ["qsdp"] and front.run.notices == ["a notice of the front"]
    assert not job.timed and not job.broadcast.called
