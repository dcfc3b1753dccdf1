"""Links, full precision and prices of one run, as one of 2 x 2 ranks."""

from __future__ import annotations

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


def test_replicas_and_shards_have_the_groups_of_their_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_group_that_is_no_world_has_one_hop_and_the_counters_of_the_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_communicators_are_made_once_for_a_group_and_its_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Groups(monkeypatch)
    run = run_over(ProcessGroups(shards="the world"))
    other, traffic = Topology(world=8, node_size=4), Traffic()
    first = run.communicator("shards", other, traffic)
    assert first.how["topology"] is other and first.how["traffic"] is traffic
    assert run.communicator("shards", other) is first
    assert run.communicator("shards") is run.communicator("shards", EIGHT) is not first


def test_messages_that_are_not_counted_have_counters_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Groups(monkeypatch)
    run = run_over(ProcessGroups(shards="the world"))
    made: Any = run.uncounted(run.communicator("a part"))
    traffic = made.how.pop("traffic")
    assert made.process_group == "a part" and isinstance(traffic, Traffic)
    assert traffic.whole is None and traffic is not run.traffic
    assert made.how == {"topology": EIGHT, "backend": "torch", "dist": "collectives"}
    assert made not in run.communicators()


def test_the_ranks_of_all_levels_vote_through_the_groups_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    stage: int, replicas: bool, returns: str | None, monkeypatch: pytest.MonkeyPatch
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


def test_levels_are_learned_when_due_by_the_ranks_that_share_the_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
