"""Links, full precision, prices and lines of one run, as one of 2 x 2 ranks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_quant.comm.reduction_plan import Slicing, presumed_pace
from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import LosslessDifferences, Traffic
from ds_quant.config.presets import preset_names
from ds_quant.config.schema import parse_block
from ds_quant.kernels import native
from ds_quant.policy import in_words
from ds_quant.policy.cost import LOSSLESS_BITS, CommVolume, ParamSpec
from ds_quant.policy.model_volume import ModelVolume
from ds_quant.policy.route import Routes
from ds_quant.policy.scheme import Scheme
from ds_quant.runtime import log, start_line
from ds_quant.runtime import run as run_module
from ds_quant.runtime.figures import figures
from ds_quant.runtime.front import SentParam, Workload, saved_step
from ds_quant.runtime.run import Run, SchemeState, StockVolume
from ds_quant.runtime.savings import Received, Savings
from ds_quant.runtime.start_line import LineParts, announce, full_line, saving, summary
from ds_quant.policy.cost import LOSSLESS_BITS
from ds_quant.policy.model_volume import ModelVolume
from ds_quant.policy.route import Routes
from ds_quant.runtime import log
from ds_quant.runtime import run as run_module
from ds_quant.runtime.front import SentParam, Workload
from ds_quant.runtime.run import Level, ProcessGroups, Run, SchemeState, StockVolume
from ds_quant.runtime.savings import Savings
from ds_quant.runtime.start_line import LineParts, announce, full_line, summary
from tests.world import SimulatedRank, World


def world(**keys: Any) -> World:
    """Two micro-steps under ZeRO-2, with a weight of 64 x 64."""
    module = nn.ParameterDict({"w": nn.Parameter(torch.empty(64, 64))})
    return World(2, 2, module=module, stage=2, micro_steps=2, scheme="full_precision", **keys)


def rank_of(**keys: Any) -> SimulatedRank:
    return world(**keys).ranks[0]


@pytest.mark.parametrize(
    ("warmup", "until", "killed", "exact"),
    [(0, 0, False, 0), (3, 0, False, 3), (0, 2, False, 2), (2, 4, False, 4), (4, 2, False, 4),
     (0, 0, True, 6)],
)  # fmt: skip
def test_full_precision_lasts_for_the_warm_up_the_fallback_and_the_kill_file(
    warmup: int, until: int, killed: bool, exact: int
) -> None:
    made = rank_of(warmup_steps=warmup)
    made.run.state.exact_until, made.run.state.killed = until, killed
    assert [made.run.is_full_precision(step) for step in range(6)] == [
        step < exact for step in range(6)
    ]


def test_an_entry_of_a_schedule_is_due_once() -> None:
    state = SchemeState()
    due = [state.due((2, 5), step) for step in (1, 2, 3, 6, 7, 4)]  # step 5 is loaded over
    assert due == [False, True, False, True, False, False]
    assert state.learned_at == 7


@pytest.mark.parametrize(("kind", "backend"), [("cpu", "gloo"), ("cuda", "nccl"), ("cuda", "gloo")])
def test_slices_are_as_long_as_device_and_backend_need(
    kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "carries", lambda process_group, device: backend)
    made = world()
    made.engine.device = torch.device(kind)
    network = made.ranks[0].network
    scheme = made.ranks[0].run.scheme
    run = SimulatedRank(made.engine, scheme, rank=0, network=network).run
    assert run.slicing.pace == presumed_pace(torch.device(kind), backend)


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [0, 2]])
def test_the_world_has_two_levels_and_a_part_of_it_one(
    ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world()
    first, part = made.ranks[0], made.communicator(ranks, 0)
    monkeypatch.setattr(first.run, "communicator", lambda group: part)
    hierarchy = first.run.level(object()).hierarchy
    assert (hierarchy.intra is None) == (hierarchy.inter is None) == (len(ranks) < 4)


# ---- the communicators of a run, on stand-ins for torch's groups ----

RANKS = {
    "the world": [0, 1, 2, 3, 4, 5, 6, 7],
    "shards": [0, 1],
    "replicas": [0, 2, 4, 6],
    "node": [0, 1],
    "place": [0, 2, 4, 6],
    "node for gradients": [0, 1],
    "all by ranks": [0, 1, 2, 3, 4, 5, 6, 7],
    "a part": [0, 1, 2],
}
EIGHT, FOUR = Topology(world=8, node_size=2), Topology(world=4, node_size=4)
ON_CPU = torch.device("cpu")


class Connected:
    """A communicator that notes how it was made. Rank 0 votes; others vote 1 less."""

    def __init__(self, process_group: str, **how: Any) -> None:
        self.process_group, self.how, self.backend = process_group, how, how["backend"]
        self.ranks = RANKS[process_group]
        self.size, self.rank = len(self.ranks), 0
        self.hop = self.encoding = self.decoding = self.empty = None

    def least(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers - 1


class Groups:
    """The functions that make process groups, noting their calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[Any, ...]] = []
        monkeypatch.setattr(run_module, "Communicator", Connected)
        self.asked: list[tuple[Any, torch.device]] = []
        monkeypatch.setattr(run_module, "carries", self._carries)
        monkeypatch.setattr(run_module.groups, "level_groups", self._levels)
        monkeypatch.setattr(run_module.groups, "group_of", self._group)

    def _carries(self, group: Any, device: torch.device) -> str:
        self.asked.append((group, device))
        return "gloo"

    def _levels(self, topology: Topology, *, device: Any, has_streams: bool, least: Any) -> Any:
        self.made.append((topology, device, has_streams, least([5, -5])))
        return "node", "place", "node for gradients"

    def _group(self, ranks: Any, *, device: Any, least: Any) -> Any:
        self.made.append((list(ranks), device, least([5, -5])))
        return "all by ranks"


def run_over(
    groups: ProcessGroups, *, stage: int = 3, topology: Topology = EIGHT, **how: Any
) -> Any:
    """Return a run with the block of qsdp, checksums and torch kernels."""
    block = {"scheme": "qsdp", "payload_checksum": True, "backend": "torch", "slices": 3}
    scheme = parse_block(block).to_scheme()
    replicas = groups.replicas is not None
    routes = Routes.over(topology, scheme, stage=stage, replicas=replicas)
    device = how.pop("device", ON_CPU)
    return Run(
        how.pop("front", None), routes, topology, [], device=device, process_groups=groups,
        dist="collectives", **how,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "given", "streams"),
    [("cpu", None, False), ("cuda", None, True), ("cpu", True, True), ("cuda", False, False)],
)
def test_a_run_over_several_nodes_makes_groups_inside_and_between_them(
    kind: str, given: bool | None, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = Groups(monkeypatch)
    device = torch.device(kind)
    # A vote is made on the device, which is none here.
    monkeypatch.setattr(
        run_module.torch, "tensor", lambda numbers, *, device: torch.Tensor(numbers).long()
    )
    run = run_over(ProcessGroups(shards="the world"), device=device, has_streams=given)
    assert groups.made == [(EIGHT, device, streams, [4, -6])]
    assert run.levels == [run.world] and run.votes is run.world.hierarchy.flat
    level = run.world
    assert (level.topology, level.routes) == (EIGHT, run.routes)
    assert level.shards is level.hierarchy and level.returning is None
    assert level.traffic.whole is run.traffic
    found = level.hierarchy.flat, level.hierarchy.intra, level.hierarchy.inter
    found += (level.hierarchy.gradients,)
    names = "the world", "node", "place", "node for gradients"
    assert tuple(each.process_group for each in found) == names
    for each in found:
        assert each.how == {
            "topology": EIGHT,
            "traffic": level.traffic,
            "message_errors": run.message_errors,
            "sealed": True,
            "buffers": run.buffers,
            "backend": "torch",
            "dist": "collectives",
        }
    assert run.communicators() == list(found)
    assert run.communicator("the world") is level.hierarchy.flat
    assert groups.asked == [("the world", device)]
    assert run.slicing == Slicing(count=3, pace=presumed_pace(device, "gloo"))


def test_the_hops_of_a_reduction_share_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank r is bound for place r // divisor % size of a hop."""
    Groups(monkeypatch)
    run = run_over(ProcessGroups(shards="the world"))
    for level, hierarchy_of in ((run.world, run.world.hierarchy), (run.level("a part"), None)):
        hops = level.routes.gradients(full_world=hierarchy_of is not None).hops
        divisor = 1
        assert len(level.hops) == len(hops)
        for made, planned in zip(level.hops, hops, strict=True):
            by_level = {"flat": level.hierarchy.flat, "intra": level.hierarchy.gradients,
                        "inter": level.hierarchy.inter}  # fmt: skip
            assert made.communicator is by_level[planned.level]
            assert (made.divisor, made.slicing) == (divisor, run.slicing)
            assert made.full_precision_own == planned.full_precision_own
            divisor *= made.communicator.size


def test_replicas_and_shards_have_the_groups_of_their_mesh(monkeypatch) -> None:
    groups = Groups(monkeypatch)
    run = run_over(ProcessGroups(shards="shards", replicas="replicas"))
    # Both communicators vote, one after the other.
    assert groups.made == [([0, 1, 2, 3, 4, 5, 6, 7], ON_CPU, [3, -7])]
    level = run.world
    hierarchy = level.hierarchy
    found = hierarchy.flat, hierarchy.intra, hierarchy.inter, level.shards.flat
    names = "all by ranks", "shards", "replicas", "shards"
    assert tuple(each.process_group for each in found) == names
    assert level.shards.intra is level.shards.inter is None
    assert level.returning is hierarchy.inter
    assert (level.topology, level.routes, level.num_shards) == (EIGHT, run.routes, 2)
    assert (level.replicas, level.shard) == (4, 0)
    assert level.traffic.whole is run.traffic
    assert all(each.how["traffic"] is level.traffic for each in found)


def test_a_group_that_is_no_world_has_one_hop_and_the_counters_of_the_world(monkeypatch) -> None:
    Groups(monkeypatch)
    run = run_over(ProcessGroups(shards="the world"))
    assert run.level("the world") is run.level("all by ranks") is run.world
    part = run.level("a part")
    assert part is run.level("a part") and part is not run.world
    assert (part.topology, part.routes) == (EIGHT, run.routes)
    assert part.hierarchy is part.shards and part.hierarchy.intra is None
    assert part.hierarchy.flat is run.communicator("a part")
    assert part.traffic is run.world.traffic and run.levels == [run.world]
    assert (run.is_world("the world"), run.is_world("a part")) == (True, False)
    assert run.communicator("a part").how["traffic"] is run.traffic


def test_communicators_are_made_once_for_a_group_and_its_nodes(monkeypatch) -> None:
    Groups(monkeypatch)
    run = run_over(ProcessGroups(shards="the world"))
    other, traffic = Topology(world=8, node_size=4), Traffic()
    first = run.communicator("shards", other, traffic)
    assert first.how["topology"] is other and first.how["traffic"] is traffic
    assert run.communicator("shards", other) is first
    assert run.communicator("shards") is run.communicator("shards", EIGHT) is not first


def test_messages_that_are_not_counted_have_counters_of_their_own(monkeypatch) -> None:
    Groups(monkeypatch)
    run = run_over(ProcessGroups(shards="the world"))
    made: Any = run.uncounted(run.communicator("a part"))
    traffic = made.how.pop("traffic")
    assert made.process_group == "a part" and isinstance(traffic, Traffic)
    assert traffic.whole is None and traffic is not run.traffic
    assert made.how == {"topology": EIGHT, "backend": "torch", "dist": "collectives"}
    assert made not in run.communicators()


def test_the_ranks_of_all_levels_vote_through_the_groups_of_each(monkeypatch) -> None:
    groups = Groups(monkeypatch)
    run = run_over(ProcessGroups(shards="shards"), topology=Topology(world=2, node_size=2))
    assert groups.made == []  # one node
    run.vote_with(EIGHT, ["shards", "replicas"])
    assert groups.made == [([0, 1, 2, 3, 4, 5, 6, 7], ON_CPU, [3, -7])]
    assert run.topology is EIGHT and run.votes.process_group == "all by ranks"
    assert run.votes is run.communicator("all by ranks", EIGHT)
    assert [each.how["topology"] for each in run.communicators()[1:]] == [EIGHT] * 3


@pytest.mark.parametrize(
    ("stage", "replicas", "returns"), [(3, False, None), (3, True, "inter"), (0, False, "all")]
)
def test_sums_of_gradients_return_to_all_copies(
    stage: int, replicas: bool, returns: str | None, monkeypatch
) -> None:
    Groups(monkeypatch)
    groups = ProcessGroups(shards="shards", replicas="replicas")
    level = run_over(groups if replicas else ProcessGroups(shards="the world"), stage=stage).world
    expected = {None: None, "inter": level.hierarchy.inter, "all": level.hierarchy}[returns]
    assert level.returning is expected


@pytest.mark.parametrize(
    ("sends", "found"),
    # shards, replicas, index: 6 ranks, of which 2 share a copy; without shards all hold one.
    [(True, (2, 3, 1)), (False, (1, 6, 0))],
)
def test_a_level_counts_shards_and_replicas(sends: bool, found: tuple[int, int, int]) -> None:
    flat = SimpleNamespace(size=6)
    level: Any = Level(
        topology=Topology(world=6, node_size=2),
        routes=SimpleNamespace(sends_weights=sends),  # type: ignore[arg-type]
        hierarchy=SimpleNamespace(size=6, inter=None, flat=flat),  # type: ignore[arg-type]
        shards=SimpleNamespace(size=2, rank=1),  # type: ignore[arg-type]
        hops=(),
        traffic=Traffic(),
    )
    assert (level.num_shards, level.replicas, level.shard) == found
    assert isinstance(level.replicas, int) and level.returning is None
    assert level.between_nodes is flat
    level.hierarchy.inter = SimpleNamespace(size=3)
    assert level.between_nodes is level.hierarchy.inter
    assert level == level and level != replace(level) and len({level, replace(level)}) == 2


def test_a_run_begins_with_nothing_counted() -> None:
    run = rank_of().run
    assert vars(run.state) == {
        "learned_at": 0,
        "resyncs": 0,
        "exact_until": 0,
        "killed": False,
        "nonfinite_steps": 0,
        "exact_steps": 0,
    }
    assert run.state.killed is False and run.notices == []


@pytest.mark.parametrize(("policy", "flags"), [("skip", None), ("full_precision", []),
                                               ("raise", [])])  # fmt: skip
def test_gradients_are_watched_where_a_policy_asks_for_it(policy: str, flags: list | None) -> None:
    assert rank_of(fallback={"on_nonfinite": policy}).run.finite_flags == flags


@pytest.mark.parametrize(("now", "step", "exact"), [(2, None, True), (3, None, False),
                                                    (5, 2, True), (2, 3, False)])  # fmt: skip
def test_a_step_begins_in_full_precision_or_not(now: int, step: int | None, exact: bool) -> None:
    made = rank_of(warmup_steps=3)
    made.engine.global_steps = now
    for begins_with in (False, True):
        made.run.traffic.is_exact = begins_with
        made.run.begin_step(step)
        assert made.run.traffic.is_exact is exact


def test_the_first_rank_of_a_run_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    for name in ("log_rank0", "info_rank0"):
        monkeypatch.setattr(
            log, name, lambda *words, name=name, **how: said.append((name, words, how))
        )
    run = rank_of().run
    run.log("of all")
    run.topology = Topology(world=2, node_size=1, ranks=(5, 3))
    run.log("a warning")
    run.info("a line")
    assert said == [
        ("log_rank0", ("of all",), {"first": 0}),
        ("log_rank0", ("a warning",), {"first": 5}),
        ("info_rank0", ("a line",), {"first": 5}),
    ]


@pytest.mark.parametrize(
    ("kind", "captures", "refuses"),
    [("cpu", True, False), ("cuda", False, False), ("cuda", True, True)],
)
def test_a_capture_of_a_cuda_graph_is_refused(
    kind: str, captures: bool, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = rank_of().run
    run.device = torch.device(kind)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    if not refuses:
        run.refuse_capture()
        return
    with pytest.raises(RuntimeError) as raised:
        run.refuse_capture()
    assert str(raised.value) == (
        "quantized_comm: a CUDA graph is captured here, and its replays would repeat one random "
        "rounding and skip all checks: capture no forward, backward or optimizer step of this "
        "model (torchtitan: leave cudagraphs out of --compile; torch.compile: no "
        'mode="reduce-overhead" and no "max-autotune"), or leave the block out'
    )


def test_parameters_are_found_by_their_tensors() -> None:
    made = rank_of()
    (first,) = made.run.params
    other = torch.zeros(3)
    assert made.run.param_of(first.tensor) is made.run.known_param(first.tensor) is first
    assert made.run.param_of(other) is None
    added: Any = SimpleNamespace(tensor=other)
    made.run.add_params([added])
    assert made.run.params == [first, added]
    assert made.run.param_of(other) is made.run.known_param(other) is added
    with pytest.raises(KeyError):
        made.run.known_param(torch.zeros(3))


def test_levels_are_learned_when_due_by_the_ranks_that_share_the_parameter(monkeypatch) -> None:
    learned: list[Any] = []
    monkeypatch.setattr(run_module, "learn", lambda *given: learned.append(given))
    made = rank_of()

    def param(numel: int, dtype: torch.dtype) -> Any:
        return SimpleNamespace(
            shape=torch.Size([numel]), is_quantized=lambda values: values == dtype
        )

    bf16 = torch.bfloat16
    quantized, another, empty = (param(numel, bf16) for numel in (4, 5, 0))
    exact = param(4, torch.float64)
    values = torch.zeros(4, dtype=bf16)
    own: Any = [
        (quantized, values, "world"), (None, values, "world"), (empty, values, "world"),
        (exact, values, "world"), (another, values, "world"), (another, values, "node"),
    ]  # fmt: skip
    scheme: Any = SimpleNamespace(level_steps=(3,))
    made.run.scheme = scheme
    made.run.learn_levels(2, own)
    assert learned == []
    for _ in range(2):
        made.run.learn_levels(3, own)
    assert [(by, given) for _, by, given in learned] == [("world", scheme), ("node", scheme)]
    shards = [[(id(each), given) for each, given in of] for of, _, _ in learned]
    assert shards == [
        [(id(quantized), values), (id(another), values)], [(id(another), values)]
    ]  # fmt: skip


# ---- prices ----

FP32, BF16 = torch.float32, torch.bfloat16


def sent(numel: int, weights: torch.dtype, gradients: torch.dtype, trained: bool = True) -> Any:
    param = SimpleNamespace(shape=torch.Size([numel]))
    return SentParam(param, weights, gradients, trained)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("levels", "numel", "nbytes", "dtypes"),
    [
        # Two gathers of bf16 and one reduction in fp32.
        ([(False, 2, [sent(100, BF16, FP32)])], 100, 2 * 200 + 400, "bf16 + fp32"),
        # A frozen one is gathered.
        ([(False, 1, [sent(100, BF16, BF16), sent(60, BF16, BF16, False)])], 160,
         200 + 200 + 120, "bf16"),
        # Replicas gather nothing and all-reduce in two passes.
        ([(True, 2, [sent(100, BF16, FP32), sent(60, BF16, FP32, False)])], 160,
         2 * 400, "fp32"),
        # Both levels count; a mean of 1.5 gathers.
        ([(False, 1.5, [sent(100, BF16, BF16)]), (True, 0, [sent(10, FP32, torch.float64)])],
         110, 300 + 200 + 2 * 80, "bf16 + float64"),
        ([(False, 2, [])], 0, 0, ""),
        ([(False, 1, [sent(1, BF16, FP32)])], 1, 2 + 4, "bf16 + fp32"),
    ],
)  # fmt: skip
def test_bytes_without_the_block_are_those_of_torchs_collectives(
    levels: list[Any], numel: int, nbytes: float, dtypes: str
) -> None:
    workload = Workload(
        params=[params for _, _, params in levels],
        gathers=[gathers for _, gathers, _ in levels],
        gather_numel=0,
        micro_steps=1,
    )
    run: Any = SimpleNamespace(
        levels=[SimpleNamespace(returning="all" if returns else None) for returns, *_ in levels],
        workload=workload,
    )
    volume: Any = SimpleNamespace(numel=numel)
    expected = StockVolume(nbytes / max(numel, 1), dtypes)
    assert Run.stock_volume(run, volume) == expected


@pytest.mark.parametrize("other", [None, "another scheme"])
def test_every_level_is_priced_with_its_own_parameters(
    other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    priced: list[Any] = []
    monkeypatch.setattr(
        run_module, "comm_volume", lambda *given, **how: priced.append((given, how)) or len(priced)
    )
    a, b, c = (SimpleNamespace(spec=name) for name in "abc")
    levels = [
        SimpleNamespace(routes=SimpleNamespace(stage=3, replicas=True), topology=EIGHT),
        SimpleNamespace(routes=SimpleNamespace(stage=0, replicas=False), topology=FOUR),
    ]
    workload = SimpleNamespace(
        params=[[a, b], [c]], gathers=[2, 1.5], gradient_dtype=BF16, stock_gradients=True
    )
    run: Any = SimpleNamespace(levels=levels, workload=workload, scheme="own scheme")
    volume = Run.comm_volume(run, other)
    how = {"gradient_dtype": BF16, "stock_gradients": True}
    first = {"ranks": 8, "node_size": 2, "gathers": 2, "replicas": True, **how}
    second = {"ranks": 4, "node_size": 4, "gathers": 1.5, "replicas": False, **how}
    scheme = other or "own scheme"
    assert priced == [((scheme, 3, ["a", "b"]), first), ((scheme, 0, ["c"]), second)]
    assert volume == ModelVolume((1, 2))  # type: ignore[arg-type]


def test_gradients_that_the_library_reduces_save_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rank_of(gradients={"cross": "step"})
    made.engine.communication_data_type = torch.float32
    workload = made.run._front.workload()
    before = made.run.received_in_full_precision()
    monkeypatch.setattr(
        made.run._front, "workload", lambda: replace(workload, stock_gradients=True)
    )
    found = made.run.received_in_full_precision()
    assert found["gradients"] == {"intra": 0.0, "inter": 0.0}
    assert set(found) == {"weights", "gradients"} and found["weights"] == before["weights"]


def test_a_run_prices_another_scheme_like_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rank_of()
    made.engine.communication_data_type = torch.float32
    own, qsdp = made.run.comm_volume(), parse_block({"scheme": "qsdp"}).to_scheme()
    assert made.run.comm_volume(made.run.scheme) == own
    other = made.run.comm_volume(qsdp)
    module = nn.ParameterDict({"w": nn.Parameter(torch.empty(64, 64))})
    second = World(2, 2, module=module, stage=2, micro_steps=2, scheme="qsdp").ranks[0]
    second.engine.communication_data_type = torch.float32
    assert other == second.run.comm_volume() and other != own
    received = own.received(2, micro_steps=2)
    assert made.run.received_by_formula(own) == received
    monkeypatch.setattr(made, "sizes", lambda: "sizes")
    volume: Any = SimpleNamespace(peak_bytes=lambda sizes: (sizes, 7.5))
    assert made.run.peak_bytes(volume) == ("sizes", 7.5)


@pytest.mark.parametrize("cross", ["step", "micro_step"])
def test_what_is_saved_is_compared_with_full_precision_that_crosses_as_often(
    cross: str,
) -> None:
    """64 x 64 in fp32 over 2 x 2 ranks: half of a node's gradients comes from the other one."""
    made = rank_of(gradients={"cross": cross})
    made.engine.communication_data_type = torch.float32
    found = made.run.received_in_full_precision()["gradients"]
    own = made.run.received_by_formula(made.run.comm_volume())
    traffic = Traffic()
    savings = Savings(traffic)
    for at, nbytes in own["gradients"].items():
        traffic.received["gradients"][at] = 4 * int(nbytes)  # of four steps
        traffic.exact["gradients"][at] = int(nbytes)  # one in full precision
        traffic.added["gradients"][at] = int(nbytes)  # one for nothing
    saved = savings.total(own, made.run.received_in_full_precision())["gradients"]
    for at in ("inter", "intra"):
        one_step = found[at] - own["gradients"][at]
        assert saved[at] == pytest.approx(2 * one_step - own["gradients"][at])
    crossings = 1 if cross == "step" else 2
    assert found["inter"] == crossings * 4 * 64 * 64 / 2 / 2
    assert found["intra"] == 2 * 4 * 64 * 64 / 2


def test_a_settled_step_keeps_its_savings_when_others_are_priced_otherwise() -> None:
    traffic = Traffic()
    savings = Savings(traffic)
    own = {role: {"intra": 10.0, "inter": 0.0} for role in traffic.received}
    for step, factor in enumerate((4, 2, 4)):
        traffic.count("gradients", intra=10, inter=0)
        stock = {role: {"intra": 10.0 * factor, "inter": 5.0} for role in own}
        savings.settle(savings.ratios(factor, lambda stock=stock: (own, stock)))
        expected = [30, 40, 70][step]
        assert savings.total(own, own)["gradients"] == {"intra": expected, "inter": 0}
    savings.forget_prices()
    traffic.count("gradients", intra=10, inter=0)
    savings.settle(savings.ratios(4, lambda: (own, own)))
    with traffic.adding():
        traffic.count("gradients", intra=7, inter=3)
    assert savings.total(own, own)["gradients"] == {"intra": 63, "inter": -3}


def test_lossless_weights_save_what_full_precision_receives_besides() -> None:
    """However long they are: here twice as long as the formula expects."""
    traffic = Traffic()
    savings = Savings(traffic)
    by_formula = 8000 * LOSSLESS_BITS / 8
    nbytes = int(2 * by_formula)
    expected = {role: {"intra": 0.0, "inter": by_formula} for role in traffic.received}
    stock = {role: {"intra": 0.0, "inter": 16000.0} for role in traffic.received}
    counted = LosslessDifferences(
        numel=12_000,
        received_numel={"intra": 0, "inter": 8000},
        received={"intra": 0, "inter": nbytes},
    )
    for is_exact in (False, True):
        traffic.is_exact = is_exact
        traffic.count_lossless(counted)
        traffic.count("weights", intra=0, inter=nbytes)
    assert savings.total(expected, stock)["weights"]["inter"] == pytest.approx(16000 - nbytes)


def test_a_step_is_priced_once_until_other_parameters_are_trained() -> None:
    traffic = Traffic()
    savings, priced_keys = Savings(traffic), list[int]()
    own = {role: {"intra": 10.0, "inter": 0.0} for role in traffic.received}

    def ratio(key: int) -> float:
        def prices() -> tuple[Received, Received]:
            priced_keys.append(key)
            stock = {role: {"intra": 10.0 * key, "inter": 5.0} for role in own}
            return own, stock

        return savings.ratios(key, prices)["gradients"]["intra"]

    assert [ratio(key) for key in (4, 2, 4, 2)] == [4, 2, 4, 2] and priced_keys == [4, 2]
    savings.forget_prices()
    assert ratio(4) == 4 and priced_keys == [4, 2, 4]


def test_messages_that_the_formula_does_not_know_save_nothing() -> None:
    """As many bytes count as full precision would have received."""
    traffic = Traffic()
    savings = Savings(traffic)
    traffic.count("weights", intra=0, inter=100)
    none = {role: {"intra": 0.0, "inter": 0.0} for role in traffic.received}
    stock = {role: {"intra": 0.0, "inter": 5.0} for role in traffic.received}
    assert savings.total(none, stock) == none


# ---- the figures of ds_quant.report ----


def test_every_figure_has_its_own_name() -> None:
    """A front of two levels, ranks 0 to 7 and 4 to 7, as rank 4 sees it.

    ZeRO-3: 2 x 2 gathers of 1 byte, of 3 bytes at most, and two reductions of 0.5 bytes, of 1000
    parameters: 5 or 13 bytes. Of the 3000 others inside a node 4 x 4 + 2 x 2 bytes. Means over all
    4000: 5 / 4 between nodes, 13 / 4 at most, and (2 x 0.25 + 3 x 20) / 4 inside.
    """
    dense = priced(
        stage=3,
        node_size=4,
        numel=1000,
        weights_most=3.0,
        gradients_intra=0.25,
        memory=8.0,
        partial_sums=4.0,
        block=EACH_BACKWARD,
    )
    experts = priced(
        stage=3, nodes=1, node_size=4, numel=3000, weights=4.0, gradients=2.0, weights_most=4.0
    )
    volume = ModelVolume((dense, experts))
    traffic, part = Traffic(), Traffic()
    traffic.count("weights", intra=1, inter=2)
    traffic.count("gradients", intra=3, inter=4)
    traffic.count("gradients", intra=5, inter=6)
    part.count("weights", intra=7, inter=0)
    traffic.lossless = LosslessDifferences(numel=100, used=40, moved=50)
    own, stock = ({"own": {"inter": factor}} for factor in (1.0, 2.0))
    totals = {(id(own), id(stock)): {"saved": {"inter": 3.0}}}
    topology = Topology(world=8, node_size=4)
    run: Any = SimpleNamespace(
        scheme=dense.routes.scheme,
        routes=dense.routes,
        topology=topology,
        traffic=traffic,
        counted_steps=11,
        comm_volume=lambda: volume,
        received_by_formula=lambda of: own if of is volume else None,
        received_in_full_precision=lambda: stock,
        savings=SimpleNamespace(total=lambda *both: totals[tuple(map(id, both))]),
        peak_bytes=lambda of: 12.5 if of is volume else None,
        buffers=SimpleNamespace(nbytes=13),
        state=SchemeState(resyncs=14, nonfinite_steps=15, exact_steps=16, killed=True),
        levels=[
            SimpleNamespace(topology=topology, replicas=1, traffic=traffic),
            SimpleNamespace(
                topology=Topology(world=4, node_size=4, ranks=(4, 5, 6, 7)),
                replicas=2,
                traffic=part,
            ),
        ],
    )
    received = {"weights": {"intra": 1, "inter": 2}, "gradients": {"intra": 8, "inter": 10}}
    expected = {
        "scheme": "qsdp",
        "world": 8,
        "node_size": 4,
        "params": 4000,
        "steps": 11,
        "received_bytes": received,
        "saved_bytes": {"saved": {"inter": 3.0}},
        "collectives": {"weights": 1, "gradients": 2},
        "full_precision_share": 0.0,
        "expected_bytes_per_param": 1.25,
        "expected_intra_bytes_per_param": 15.125,
        "expected_most_bytes_per_param": 3.25,
        "lossless_bits": 3.2,
        "lossless_padding": 0.25,
        "kept_bytes": 17,
        "expected_kept_bytes": 8000.0,
        "held_bytes": 18,
        "expected_held_bytes": 4000.0,
        "expected_peak_bytes": 12.5,
        "buffer_bytes": 13,
        "resyncs": 14,
        "nonfinite_steps": 15,
        "exact_steps": 16,
        "killed": True,
        "levels": [
            {
                "ranks": [0, 1, 2, 3, 4, 5, 6, 7],
                "nodes": 2,
                "node_size": 4,
                "replicas": 1,
                "params": 1000,
                "received_bytes": received,
            },
            {
                "ranks": [4, 5, 6, 7],
                "nodes": 1,
                "node_size": 4,
                "replicas": 2,
                "params": 3000,
                "received_bytes": {
                    "weights": {"intra": 7, "inter": 0},
                    "gradients": {"intra": 0, "inter": 0},
                },
            },
        ],
    }
    found = figures(run, micro_steps=2, kept_bytes=17, held_bytes=18, accumulates=True)
    assert found == expected
    # One micro-step, in which gradients do not wait, and nothing that is kept.
    assert figures(run) == expected | {
        "expected_bytes_per_param": 0.625,
        "expected_intra_bytes_per_param": 7.5625,
        "expected_most_bytes_per_param": 1.625,
        "kept_bytes": 0,
        "held_bytes": 0,
        "expected_held_bytes": 0,
    }
    traffic.count("weights", intra=100, inter=100)
    assert found == expected, "figures are those of the call"
    run.levels.pop()
    with pytest.raises(ValueError, match="zip"):
        figures(run)


# ---- the facts of a front ----


def sent(dtype: torch.dtype, gradient_dtype: torch.dtype, **facts: Any) -> SentParam:
    param: Any = SimpleNamespace(
        name="w", shape=torch.Size([2, 3]), packed=True, needs_full_gradient=True, boundary=0.5
    )
    return SentParam(param, dtype, gradient_dtype, **{"trained": True, **facts})


def test_formulas_see_every_fact_of_a_parameter() -> None:
    expected = ParamSpec(
        name="w",
        shape=(2, 3),
        dtype=torch.bfloat16,
        trainable=True,
        packed=True,
        needs_full_gradient=True,
        boundary=0.5,
    )
    spec = sent(torch.bfloat16, torch.float32).spec
    assert spec == expected and type(spec.shape) is tuple
    stock = sent(torch.bfloat16, torch.float64, trained=False, stock_weights=True).spec
    assert stock == expected._replace(trainable=False, stock_weights=True, stock_gradients=True)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([[torch.float64], [torch.float16, torch.bfloat16]], torch.float16),
        ([[torch.float64], []], torch.float32),
    ],
)
def test_gradients_have_the_dtype_of_the_first_one_that_a_codec_takes(
    dtypes: list[list[torch.dtype]], expected: torch.dtype
) -> None:
    params = [[sent(torch.bfloat16, dtype) for dtype in level] for level in dtypes]
    workload = Workload(params=params, gathers=[1.0, 1.0], gather_numel=6, micro_steps=1)
    assert workload.gradient_dtype == expected and workload.stock_gradients is False


@pytest.mark.parametrize("step", [0, 1, 2**39 - 1, torch.tensor(7)])
def test_a_saved_step_is_a_whole_number(step: Any) -> None:
    found = saved_step({"step": step})
    assert found == int(step) and type(found) is int


@pytest.mark.parametrize(
    ("state", "step"),
    [({"step": -1}, "-1"), ({"step": 2**39}, "549755813888"), ({"step": True}, "True"),
     ({"step": False}, "False"), ({"step": 1.0}, "1.0"), ({"step": "1"}, "'1'"), ({}, "None"),
     ([("step", 1)], "None"), (None, "None")],
)  # fmt: skip
def test_a_state_without_a_step_is_refused(state: Any, step: str) -> None:
    with pytest.raises(ValueError) as error:
        saved_step(state)
    assert str(error.value) == (
        f"quantized_comm: front.load_state_dict: step={step}: allowed: the state that "
        "front.state_dict() has returned, with a whole number of steps"
    )


# ---- the log ----


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The logger of the lines, as a program finds it."""
    logger = logging.getLogger("ds_quant.run")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)


def test_lines_go_to_the_present_standard_output_and_nowhere_else(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for say in (log.log_here, log.log_rank0, log.info_rank0):
        say("a line")
        assert capsys.readouterr() == ("a line\n", "")
    assert not caplog.records and len(logger.handlers) == 1
    with capsys.disabled():
        shown: Any = logger.handlers[0]
        assert shown.stream is sys.stdout


def test_a_program_that_has_set_up_the_log_keeps_its_settings(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logger.addHandler(logging.NullHandler())
    logger.setLevel(logging.WARNING)
    log.log_here("a warning")
    log.info_rank0("a line")
    log.log_rank0("another warning")
    said = [(record.levelname, record.message) for record in caplog.records]
    assert said == [("WARNING", "a warning"), ("WARNING", "another warning")]
    assert capsys.readouterr().out == "" and logger.level == logging.WARNING


@pytest.mark.parametrize(
    ("rank", "said"),
    [(None, "here all of two info all info of two "), (0, "here all info all "), (1, "here "),
     (2, "here of two info of two ")],
)  # fmt: skip
def test_the_first_rank_of_a_model_speaks_for_it(
    logger: logging.Logger,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rank: int | None,
    said: str,
) -> None:
    """And every rank before there are process groups."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: rank is not None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    log.log_here("here")
    log.log_rank0("all")
    log.log_rank0("of two", first=2)
    log.info_rank0("info all")
    log.info_rank0("info of two", first=2)
    assert capsys.readouterr().out.replace("\n", " ") == said


# ---- the start-up lines ----


def parts_of(run: Run, *, period: str = "step") -> LineParts:
    """Return the parts of a front that keeps memory and accumulates gradients."""
    return LineParts(
        layout="ZeRO-3",
        volume=run.comm_volume(),
        stock=StockVolume(14.0, "bf16"),
        micro_steps=2,
        period=period,
        kept_bytes=12.3e9,
        gradients="gradients are sent between nodes once per optimizer step",
        accumulates=True,
    )


def text_of(run: Run, *, period: str = "step") -> str:
    """Return the start-up lines."""
    return summary(run, parts_of(run, period=period))


@pytest.mark.parametrize("scheme", preset_names())
def test_the_start_up_lines_of_every_scheme_fit_on_three_lines_of_a_terminal(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.ParameterDict({"w": nn.Parameter(torch.empty(64, 64))})
    stage = 3 if parse_block({"scheme": scheme}).keeps_node_shard else 2
    made = World(2, 2, module=module, stage=stage, scheme=scheme, warmup_steps=1000).ranks[0]
    made.engine.communication_data_type = torch.bfloat16
    monkeypatch.setattr(made.run, "peak_bytes", lambda volume: 34.5e9)
    for period in ("step", "micro-step"):
        lines = text_of(made.run, period=period).split("\n")
        assert len(lines) <= 3 and max(map(len, lines)) <= 100, lines
        assert lines[0].startswith(f"quantized_comm: {scheme} on ZeRO-3, 2 nodes x 2 CPU processes")
        text = " ".join(map(str.strip, lines))
        assert "; from step 1000 on; " in text
        assert "memory per process: 12 GB kept + 3" in text


@pytest.mark.parametrize(
    ("stock_bytes", "sent_bytes", "nodes", "said"),
    [
        (5.7, 1.02, 2, "5.6 times fewer bytes between nodes"),
        (8.0, 5.04, 1, "1.6 times fewer bytes between GPUs"),
        (4.0, 4.1, 1, "as many bytes between GPUs as without it"),
        (4.0, 6.0, 2, "1.5 times more bytes between nodes"),
        (4.0, 0.0, 2, "no bytes between nodes"),
    ],
)
def test_bytes_are_compared_with_a_run_without_the_block(
    stock_bytes: float, sent_bytes: float, nodes: int, said: str
) -> None:
    assert in_words.saving(stock_bytes, sent_bytes, nodes=nodes) == said


def test_amounts_of_memory_have_the_unit_that_fits() -> None:
    amounts = (0, 12_416, 1.26e6, 13e6, 999e6, 1.68e9, 24e9)
    assert [in_words.amount(nbytes) for nbytes in amounts] == [
        "0.0 kB", "12 kB", "1.3 MB", "13 MB", "999 MB", "1.7 GB", "24 GB",
    ]  # fmt: skip


@pytest.mark.parametrize("scheme", preset_names())
def test_a_single_rank_has_start_up_lines_in_every_scheme(scheme: str) -> None:
    module = nn.ParameterDict({"w": nn.Parameter(torch.empty(64, 64))})
    made = World(1, 1, module=module, stage=2, scheme=scheme).ranks[0]
    made.engine.communication_data_type = torch.bfloat16
    text = text_of(made.run)
    assert text.startswith(f"quantized_comm: {scheme} on ZeRO-3, 1 node x 1 CPU process;")
    whole = full_line(made.run, parts_of(made.run))
    assert "extra memory" not in whole and "received per" not in whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lossless_is_advised_where_it_sends_less_than_hybrid(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in fp32 are sent whole by both."""
    module = nn.ParameterDict({"w": nn.Parameter(torch.empty(64, 64, dtype=dtype))})
    made = World(2, 2, module=module, stage=3, scheme="hybrid").ranks[0]
    made.engine.communication_data_type = torch.bfloat16
    monkeypatch.setattr(made.run, "peak_bytes", lambda volume: 34.5e9)
    advice = 'advice: scheme "lossless" is also exact and sends less'
    assert (advice in full_line(made.run, parts_of(made.run))) == (dtype == torch.bfloat16)


def test_slow_kernels_have_a_line_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.ParameterDict({"w": nn.Parameter(torch.empty(64, 64))})
    made = World(2, 2, module=module, stage=3, scheme="qsdp").ranks[0]
    made.engine.communication_data_type = torch.bfloat16
    monkeypatch.setattr(made.run, "peak_bytes", lambda volume: 34.5e9)
    monkeypatch.setattr(native, "unavailable_reason", lambda: "were not compiled")
    lines: list[str] = []
    monkeypatch.setattr(made.run, "info", lines.append)
    announce(made.run, parts_of(made.run))
    assert "quantized_comm: torch kernels are slow: C++ ones were not compiled" in lines


# ---- the start-up lines, word by word ----

BF16, FP32 = torch.bfloat16, torch.float32


def priced(
    scheme: str = "qsdp",
    *,
    nodes: int = 2,
    node_size: int = 8,
    stage: int = 3,
    replicas: bool = False,
    kernels: Mapping[str, Any] = MappingProxyType({"backend": "torch"}),
    block: Mapping[str, Any] = MappingProxyType({}),
    **figures: Any,
) -> CommVolume:
    """Return the volume of a scheme between some ranks. figures: others than the usual ones."""
    routes = Routes(
        scheme=parse_block({"scheme": scheme, **kernels, **block}).to_scheme(),
        stage=stage,
        nodes=nodes,
        node_size=node_size,
        replicas=replicas,
    )
    usual: dict[str, Any] = {"numel": 10**9, "weights": 1.0, "gradients": 0.5, "kept": {}}
    return CommVolume(routes=routes, **usual | {"full_precision_share": 0.0} | figures)


def run_of(
    *parts: CommVolume,
    device: str = "cuda",
    dtypes: Sequence[tuple[torch.dtype, int]] = ((BF16, 10**9),),
    micro_steps: int = 1,
    world: int = 0,
    others: Mapping[str, CommVolume] = MappingProxyType({}),
    peak_bytes: float = 3.5e9,
    names: Sequence[str] = (),
    notices: Sequence[str] = (),
) -> Any:
    """Return the part of a run that its lines read.

    parts: volumes of its levels. dtypes: of its weights, with their elements.
    world: its ranks, if they are more than those of the first level.
    others: volumes of other schemes by name. The rest cost as much as the first part.

    asked: blocks of the schemes that were priced. said, warned: its lines.
    """
    levels = []
    for part in parts:
        topology = Topology(world=part.routes.ranks, node_size=part.routes.node_size)
        levels.append(SimpleNamespace(topology=topology, routes=part.routes))
    first = parts[0].routes
    run = SimpleNamespace(
        device=torch.device(device),
        scheme=first.scheme,
        routes=first,
        levels=levels,
        topology=Topology(world=world or first.ranks, node_size=first.node_size),
        workload=SimpleNamespace(
            micro_steps=micro_steps,
            params=[
                [SimpleNamespace(dtype=dtype, param=SimpleNamespace(shape=torch.Size([numel])))]
                for dtype, numel in dtypes
            ],
        ),
        params=[SimpleNamespace(name=name) for name in names],
        notices=list(notices),
        peak_bytes=lambda volume: peak_bytes if volume.parts == parts else float("nan"),
        asked=[],
        said=[],
        warned=[],
    )

    def comm_volume(scheme: Scheme) -> ModelVolume:
        run.asked.append(scheme.block)
        return ModelVolume((others.get(scheme.name, parts[0]),))

    run.comm_volume, run.info, run.log = comm_volume, run.said.append, run.warned.append
    return run


def plain(
    *parts: CommVolume, stock: float = 6.0, layout: str = "ZeRO-3", **known: Any
) -> LineParts:
    """Return the parts of a front that knows little more than its volume."""
    volume = ModelVolume(parts)
    return LineParts(layout=layout, volume=volume, stock=StockVolume(stock, "bf16"), **known)


def lines_of(run: Any, front: LineParts) -> list[str]:
    """Return the lines of the log at start-up, without their subject."""
    announce(run, front)
    summary_lines, *others = run.said
    lines = [*summary_lines.split("\n  "), *others]
    assert lines[0].startswith("quantized_comm: ")
    assert all(line.startswith("quantized_comm: ") for line in others)
    return [line.removeprefix("quantized_comm: ") for line in lines]


def test_the_lines_of_a_front_that_knows_little() -> None:
    """Two gathers of 1 byte and one reduction of 0.5 bytes between two nodes of eight GPUs.

    Half of what enters a node comes from it: (2 + 0.5) / 2. No gradients wait, so none of their
    bytes are added.
    """
    part = priced(replicas=True, partial_sums=0.5)
    run = run_of(part)
    assert lines_of(run, plain(part)) == [
        "qsdp on ZeRO-3, 2 nodes x 8 GPUs: 2.4 times fewer bytes between nodes",
        "(2.50 instead of 6.00 per parameter and step); weights stay in the node, "
        "gradients in 8 bits;",
        "memory per GPU: 3.5 GB at most in a step; torch kernels; all: ds_quant.report(model)",
    ]
    assert full_line(run, plain(part)) == (
        "qsdp on ZeRO-3, volume 2.50 B/param/step (bf16 6.00), all tensors quantized; "
        "2 x 8 ranks; torch kernels; 1.25 B/param/step received per node; "
        "extra memory: up to 3.5 GB"
    )
    assert saving(run, plain(part)) == (
        "2.4 times fewer bytes between nodes (2.50 instead of 6.00 per parameter and step)"
    )
    assert run.warned == []


def test_two_processes_are_said_to_be_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-2: one exchange of 0.5 bytes and two reductions of 0.25 bytes per step."""
    monkeypatch.setattr(native, "unavailable_reason", lambda: None)
    part = priced(
        "eden4",
        nodes=1,
        node_size=2,
        stage=2,
        weights=0.5,
        gradients=0.25,
        kernels={},
    )
    run = run_of(part, device="cpu", micro_steps=2)
    front = plain(part, stock=8.0, micro_steps=2, report_of="engine", kept_bytes=2e6)
    assert lines_of(run, front) == [
        "eden4 on ZeRO-3, 1 node x 2 CPU processes: 8.0 times fewer bytes between processes",
        "(1.00 instead of 8.00 per parameter and step); weights in 4 bits, gradients in 8 bits; "
        "memory per",
        "process: 2.0 MB kept + 3.5 GB at most in a step; C++ kernels; "
        "all: ds_quant.report(engine)",
    ]
    assert full_line(run, front) == (
        "eden4 on ZeRO-3, volume 1.00 B/param/step (bf16 8.00), all tensors quantized; "
        "1 x 2 ranks; C++ kernels; 0.50 B/param/step received per rank; "
        "keeps 0.00 B/param (0.002 GB) more on every rank; extra memory: up to 3.5 GB"
    )


def test_two_nodes_of_one_process_each_are_named_in_the_singular(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And torch kernels that the block asks for are not called slow."""
    monkeypatch.setattr(native, "unavailable_reason", lambda: "were not compiled")
    part = priced("qsdp", node_size=1, block={"warmup_steps": 7})
    run = run_of(part, device="cpu")
    front = plain(part, period="backward")
    assert lines_of(run, front) == [
        "qsdp on ZeRO-3, 2 nodes x 1 CPU process: 2.4 times fewer bytes between nodes",
        "(2.50 instead of 6.00 per parameter and backward); weights and gradients in 8 bits; "
        "from step",
        "7 on; memory per process: 3.5 GB at most in a step; torch kernels; "
        "all: ds_quant.report(model)",
    ]
    assert full_line(run, front) == (
        "qsdp on ZeRO-3, volume 2.50 B/param/backward (bf16 6.00), all tensors quantized; "
        "2 x 1 ranks; torch kernels; 1.25 B/param/backward received per node; "
        "extra memory: up to 3.5 GB; from step 7 on"
    )


def test_weights_that_stay_on_the_gpus_of_one_node_are_said_to() -> None:
    """sdp4bit gathers them from a node shard, which one node has not."""
    part = priced("sdp4bit", nodes=1, node_size=4, weights=2.0)
    part = replace(part, kept={"1-D": 1, "excluded": 2}, full_precision_share=0.8)
    run = run_of(part)
    assert lines_of(run, plain(part)) == [
        "sdp4bit on ZeRO-3, 1 node x 4 GPUs: 1.3 times fewer bytes between GPUs",
        "(4.50 instead of 6.00 per parameter and step); "
        "weights NOT compressed, gradients in 8 bits;",
        "memory per GPU: 3.5 GB at most in a step; torch kernels; all: ds_quant.report(model)",
    ]
    assert full_line(run, plain(part)) == (
        "sdp4bit on ZeRO-3, volume 4.50 B/param/step (bf16 6.00), "
        "all weights, 1 small tensor, 2 excluded unquantized (80.0 % of bytes); 1 x 4 ranks; "
        "torch kernels; 3.38 B/param/step received per rank; extra memory: up to 3.5 GB"
    )


def test_the_lines_of_a_front_that_knows_much() -> None:
    """Between nodes weights and partial sums once per step: 0.3 + 0.4 bytes, half are received.

    Inside a node two micro-steps: 2 x 2 gathers of 2 bytes and two reductions of 1 byte.
    Partial sums of 0.5 bytes per parameter wait for the last micro-step: 3.5 GB + 0.5 GB.
    """
    part = priced(
        "lossless_w_g3",
        weights=0.3,
        weights_most=2.0,
        gradients=0.4,
        weights_intra=2.0,
        gradients_intra=1.0,
        partial_sums=0.5,
        full_precision_share=0.125,
        kept={"small": 1, "fp32 weights": 2, "1-D": 3, "excluded": 5},
        block={"warmup_steps": 3},
    )
    run = run_of(part, micro_steps=2, notices=["a notice", "another one"])
    front = plain(
        part,
        stock=14.0,
        layout="FSDP2",
        micro_steps=2,
        kept_bytes=12.4e9,
        kept_where=" in host memory",
        report_of="engine",
        fetches="fetches are said",
        weights="weights are said",
        gradients="gradients are said",
        accumulates=True,
        reasons=["a reason"],
    )
    kept = "4 small tensors, 5 excluded, 2 fp32 weights"
    assert lines_of(run, front) == [
        "lossless_w_g3 on FSDP2, 2 nodes x 8 GPUs: 20.0 times fewer bytes between nodes",
        "(0.70 instead of 14.00 per parameter and step); weights in about 2.4 bits without loss, "
        "gradients",
        "in 3 bits; from step 3 on; memory per GPU: 12 GB kept in host memory + "
        "4.0 GB at most in a step;",
        f"NOT compressed: {kept}, 12.5 % of the bytes",
        "a reason",
        "a notice",
        "another one",
    ]
    assert full_line(run, front) == (
        "lossless_w_g3 on FSDP2, volume 0.70 B/param/step between nodes (bf16 14.00), "
        f"{kept} unquantized (12.5 % of bytes); 2 x 8 ranks; torch kernels; fetches are said; "
        "0.35 B/param/step received per node; volume inside a node 10.00 B/param; "
        "keeps 12.40 B/param (12.4 GB) more in host memory on every rank; weights are said; "
        "gradients are said; buffering them takes 0.50 B/param (0.5 GB) on every rank; "
        "extra memory: up to 3.5 GB; from step 3 on; "
        "traffic depends on the learning rate: volume 2.40 B/param/step at most; "
        "a reason; a notice; another one"
    )


def test_ranks_of_every_level_are_described_the_most_parameters_first() -> None:
    """A quarter of the parameters sends 2.5 bytes between 16 ranks, the others 4.5 between 4.

    Means: (2.5 + 3 x 4.5) / 4 and half of that.
    """
    dense = priced()
    experts = priced(node_size=2, numel=3 * 10**9, weights=1.75, gradients=1.0, replicas=True)
    run = run_of(dense, experts, world=16, others={"eden4": experts})
    front = plain(dense, experts, stock=2.0, between="replicas of")
    assert lines_of(run, front)[0] == (
        "qsdp on ZeRO-3, 2 nodes x 8 GPUs: 2.0 times more bytes between nodes"
    )
    assert full_line(run, front) == (
        "qsdp on ZeRO-3, volume 4.00 B/param/step (bf16 2.00), all tensors quantized; "
        "75 % of the parameters on 2 replicas of 2 of 16 ranks, 4.50 B/param; "
        "25 % of the parameters on 2 x 8 ranks, 2.50 B/param; torch kernels; "
        "2.00 B/param/step received per node; extra memory: up to 3.5 GB"
    )
    run.levels.pop()
    with pytest.raises(ValueError, match="zip"):
        full_line(run, front)


def test_one_level_between_nodes_is_enough_for_bytes_between_nodes() -> None:
    """Experts inside a node send 2.5 bytes there, and dense layers 2.5 bytes between nodes."""
    experts, dense = priced(nodes=1, node_size=4), priced(node_size=4)
    run = run_of(experts, dense, world=8)
    front = plain(experts, dense)
    assert lines_of(run, front)[0] == (
        "qsdp on ZeRO-3, 2 nodes x 4 GPUs: 4.8 times fewer bytes between nodes"
    )
    assert full_line(run, front) == (
        "qsdp on ZeRO-3, volume 1.25 B/param/step between nodes (bf16 6.00), "
        "all tensors quantized; "
        "50 % of the parameters on 1 x 4 of 8 ranks, 2.50 B/param; "
        "50 % of the parameters on 2 x 4 ranks, 2.50 B/param; torch kernels; "
        "0.62 B/param/step received per node; volume inside a node 1.25 B/param; "
        "extra memory: up to 3.5 GB"
    )


def test_a_block_that_leaves_out_all_tensors_has_no_advice() -> None:
    part = priced(
        node_size=1,
        full_precision_share=1.0,
        kept={"excluded": 3},
        block={"exclude": ["*", "bias", "layr*"]},
    )
    run = run_of(
        part,
        notices=["a notice"],
        names=["layer.weight"],
        others={"eden4": priced("eden4", weights=0.0, gradients=0.0)},
    )
    front = plain(part, reasons=["a reason"])
    assert lines_of(run, front) == [
        "qsdp on ZeRO-3, 2 nodes x 1 GPU: 2.4 times fewer bytes between nodes",
        "(2.50 instead of 6.00 per parameter and step); nothing is quantized;",
        "memory per GPU: 3.5 GB at most in a step; torch kernels; all: ds_quant.report(model)",
        "NOT compressed: 3 excluded, 100.0 % of the bytes",
        "a notice",
    ]
    assert full_line(run, front).endswith("; extra memory: up to 3.5 GB; a notice")
    assert run.asked == []
    assert run.warned == [
        'quantized_comm: exclude pattern "bias" matches no parameter; one is called layer.weight',
        'quantized_comm: exclude pattern "layr*" matches no parameter; one is called layer.weight',
    ]


def test_weights_that_the_library_gathers_itself_leave_nothing_to_lossless_differences() -> None:
    part = priced("lossless", stage=2, full_precision_share=1.0, kept={"float8": 3})
    run = run_of(part)
    assert lines_of(run, plain(part, reasons=["a reason"]))[1:] == [
        "(1.50 instead of 6.00 per parameter and step); nothing is quantized;",
        "memory per GPU: 3.5 GB at most in a step; torch kernels; all: ds_quant.report(model)",
        "NOT compressed: 3 float8, 100.0 % of the bytes",
    ]


@pytest.mark.parametrize(
    ("pattern", "names", "called"),
    [
        ("heads", ["layer.weight", "head"], "head"),
        ("xyz", ["layer.weight", "head"], "layer.weight"),
        ("abcdefgh", ["zzz", "abcd5678"], "abcd5678"),  # half of the letters are alike
        ("xyz", [], "nothing"),
    ],
)
def test_a_pattern_without_a_parameter_is_compared_with_their_names(
    pattern: str, names: list[str], called: str
) -> None:
    part = priced(block={"exclude": [pattern]})
    run = run_of(part, names=names)
    announce(run, plain(part))
    assert run.warned == [
        f'quantized_comm: exclude pattern "{pattern}" matches no parameter; one is called {called}'
    ]


def test_a_scheme_that_quantizes_nothing_names_no_tensors() -> None:
    part = priced("full_precision", full_precision_share=1.0, kept={"small": 9})
    run = run_of(part, notices=["a notice"])
    front = plain(part, stock=5.0, reasons=["a reason"])
    assert lines_of(run, front) == [
        "full_precision on ZeRO-3, 2 nodes x 8 GPUs: 2.0 times fewer bytes between nodes",
        "(2.50 instead of 5.00 per parameter and step); nothing is quantized;",
        "memory per GPU: 3.5 GB at most in a step; torch kernels; all: ds_quant.report(model)",
        "a reason",
        "a notice",
    ]
    assert ", nothing quantized; 2 x 8 ranks; " in full_line(run, front)


def test_one_rank_sends_nothing_that_could_be_compared() -> None:
    part = priced(nodes=1, node_size=1, full_precision_share=1.0, kept={"small": 9})
    run = run_of(part)
    front = plain(part, kept_bytes=1e9)
    assert lines_of(run, front) == [
        "qsdp on ZeRO-3, 1 node x 1 GPU; torch kernels; all: ds_quant.report(model)"
    ]
    assert full_line(run, front) == (
        "qsdp on ZeRO-3, volume 2.50 B/param/step (bf16 6.00), "
        "9 small tensors unquantized (100.0 % of bytes); 1 x 1 ranks; torch kernels; "
        "keeps 1.00 B/param (1 GB) more on every rank"
    )


@pytest.mark.parametrize(
    ("ranks", "left"),
    [(1, "all tensors quantized"), (2, "all weights unquantized (0.0 % of bytes)")],
)
def test_weights_of_a_node_shard_are_named_where_one_node_gathers_them(
    ranks: int, left: str
) -> None:
    part = priced("sdp4bit", nodes=1, node_size=ranks)
    assert f"(bf16 6.00), {left}; 1 x {ranks} ranks; " in full_line(run_of(part), plain(part))


@pytest.mark.parametrize(
    ("scheme", "stage", "left"),
    [
        ("lossless", 2, "all gradients, 1 small tensor unquantized (50.0 % of bytes)"),
        ("lossless_w_g3", 3, "1 small tensor unquantized (50.0 % of bytes)"),
        ("sdp4bit", 0, "1 small tensor unquantized (50.0 % of bytes)"),
        ("lossless", 0, "nothing quantized"),  # DDP sends no weights
        ("hybrid", 3, "nothing quantized"),
    ],
)
def test_roles_in_full_precision_are_named_before_tensors(
    scheme: str, stage: int, left: str
) -> None:
    part = priced(scheme, stage=stage, full_precision_share=0.5, kept={"small": 1})
    assert f"(bf16 6.00), {left}; 2 x 8 ranks; " in full_line(run_of(part), plain(part))


def test_weights_that_a_block_keeps_in_full_precision_are_named() -> None:
    part = priced("qsdp", block={"weights": {"enabled": False}}, full_precision_share=0.8)
    assert ", all weights unquantized (80.0 % of bytes); " in full_line(run_of(part), plain(part))


@pytest.mark.parametrize(
    ("scheme", "stage", "share", "named"),
    [
        ("qsdp", 3, 0.05, False),
        ("qsdp", 3, 0.06, True),
        ("lossless", 3, 0.9, False),  # the line names the gradients already
        ("lossless", 0, 0.9, False),  # which are all that DDP sends
    ],
)
def test_tensors_in_full_precision_are_named_if_they_are_many_bytes(
    scheme: str, stage: int, share: float, named: bool
) -> None:
    part = priced(scheme, stage=stage, full_precision_share=share, kept={"small": 2})
    run = run_of(part)
    announce(run, plain(part))
    said = [f"quantized_comm: NOT compressed: 2 small tensors, {100 * share:.1f} % of the bytes"]
    assert run.said[1:] == (said if named else [])


@pytest.mark.parametrize(
    ("dtypes", "named"),
    [
        ([(BF16, 15), (FP32, 10), (FP32, 10)], "weights NOT compressed, gradients in 3 bits"),
        ([(BF16, 15), (FP32, 10)], "weights in about 2.4 bits without loss, gradients in 3 bits"),
        ([], "weights in about 2.4 bits without loss, gradients in 3 bits"),
    ],
)
def test_the_format_of_weights_is_that_of_most_of_them(
    dtypes: list[tuple[torch.dtype, int]], named: str
) -> None:
    part = priced("lossless_w_g3")
    text = summary(run_of(part, dtypes=dtypes), plain(part))
    assert f" per parameter and step); {named}; " in " ".join(text.split())


def rows(*widths: int) -> list[str]:
    """Return facts of these widths, each of one word."""
    return [letter * width for letter, width in zip("abcdefg", widths, strict=False)]


def test_facts_fill_three_lines_of_a_hundred_columns() -> None:
    """Lines behind the first one are indented by two."""
    a, b, c = rows(60, 39, 98)
    assert start_line._lines_of([a, b]) == [f"{a} {b}"]
    assert start_line._lines_of([a, f"{b}b"]) == [a, f"{b}b"]
    assert start_line._lines_of([a, b, c, c]) == [f"{a} {b}", c, c]
    a, b, c, d, e = rows(100, 60, 37, 60, 37)
    assert start_line._lines_of([a, b, c, d, e]) == [a, f"{b} {c}", f"{d} {e}"]
    assert start_line._lines_of([a, b, f"{c}c", c]) == [a, b, f"{c}c {c}"]


def test_facts_that_are_too_long_are_broken_between_words_and_the_last_ones_left_out() -> None:
    """A number stays with its unit."""
    a, b, c, d, e = rows(92, 96, 80, 96, 9)
    assert start_line._lines_of([f"{a} {b}", c]) == [a, b, c]
    assert start_line._lines_of(["x", f"{b} yy"]) == [f"x {b}", "yy"]
    assert start_line._lines_of([f"{a} at 12 GB {b}", c, d, e]) == [f"{a} at", "12 GB", b]
    assert start_line._lines_of([a, b, f"{c} {e}", d]) == [a, b, f"{c} {e}"]


SPARING: dict[str, Any] = {"weights": 3.5, "gradients": 0.5}
EACH_BACKWARD = {"gradients": {"cross": "micro_step"}}
# What is run, what is advised instead, and the advice.
ADVISED = {
    "a tenth less": (
        priced(block=EACH_BACKWARD),
        priced("eden4", block=EACH_BACKWARD, **SPARING),
        'advice: scheme "eden4" sends 4.50 bytes per parameter and step here',
    ),
    "less, for memory": (
        priced(memory=0.5),
        priced("eden4", memory=0.75, weights=1.0, gradients=0.25),
        'advice: scheme "eden4" sends 1.25 bytes per parameter and step here and keeps 0.75 in '
        "memory",
    ),
    "less, in the same memory": (
        priced(memory=0.5),
        priced("eden4", memory=0.5, weights=1.0, gradients=0.25),
        'advice: scheme "eden4" sends 1.25 bytes per parameter and step here',
    ),
    "hardly less": (
        priced(block=EACH_BACKWARD), priced("eden4", weights=4.0, gradients=0.51), None,
    ),
    "a full copy is allowed": (
        priced("sdp4bit", node_size=1, block={"allow_full_replica": True}),
        priced("eden4", node_size=1, weights=0.5, gradients=0.25),
        'advice: scheme "eden4" sends 1.00 bytes per parameter and step here',
    ),
    "no full copy is allowed": (
        priced("zeropp", node_size=1, weights=4.0),
        priced("qsdp", node_size=1, weights=0.5, gradients=0.25),
        'advice: scheme "qsdp" sends 2.50 bytes per parameter and step here',
    ),
    "one node": (
        priced("eden4", nodes=1, weights=9.0), priced("qsdp", nodes=1, weights=0.1), None,
    ),
    "recommended": (priced("eden4", weights=9.0), priced("eden4", weights=0.1), None),
    "no loss": (priced("lossless", weights=9.0), priced("eden4", weights=0.1), None),
    "for research": (priced("qsdp_w4g4", weights=9.0), priced("eden4", weights=0.1), None),
}  # fmt: skip


@pytest.mark.parametrize(("own", "other", "advice"), ADVISED.values(), ids=ADVISED)
def test_a_scheme_that_sends_clearly_less_is_advised(
    own: CommVolume, other: CommVolume, advice: str | None
) -> None:
    """In a step of two micro-steps; the own volume of "a tenth less" is 4 x 1 + 2 x 0.5."""
    run = run_of(own, micro_steps=2, others={other.routes.scheme.name: other})
    line = full_line(run, plain(own, reasons=["a reason"]))
    assert line.endswith(f"; a reason; {advice}" if advice else "; a reason")


def test_the_advised_scheme_is_priced_with_the_exceptions_of_the_block() -> None:
    part = priced(block={"exclude": ["head*"], "min_numel": 77})
    run = run_of(part)
    full_line(run, plain(part))
    (asked,) = run.asked
    assert (asked.scheme, list(asked.exclude), asked.min_numel) == ("eden4", ["head*"], 77)


@pytest.mark.parametrize(
    ("scheme", "nodes", "stage", "weights", "gradients", "advised"),
    [
        ("hybrid", 2, 3, 0.69, 0.1, True),
        ("hybrid", 2, 3, 0.7, 0.1, False),
        ("hybrid", 2, 1, 0.44, 0.15, True),  # gradients are sent once
        ("hybrid", 2, 1, 0.5, 0.15, False),
        ("hybrid", 1, 3, 0.1, 0.1, False),
        ("full_precision", 2, 3, 0.1, 0.1, False),
    ],
)
def test_lossless_is_advised_in_place_of_hybrid_alone(
    scheme: str, nodes: int, stage: int, weights: float, gradients: float, advised: bool
) -> None:
    """In three micro-steps gradients of ZeRO-3 are sent three times: 0.4 + 3 x 0.2 bytes."""
    where: dict[str, Any] = {"nodes": nodes, "stage": stage, "block": EACH_BACKWARD}
    own = priced(scheme, weights=0.4, gradients=0.2, **where)
    other = priced("lossless", weights=weights, gradients=gradients, **where)
    run = run_of(own, others={"lossless": other})
    line = full_line(run, plain(own, micro_steps=3))
    advice = '; advice: scheme "lossless" is also exact and sends less'
    assert line.endswith(advice) == advised
