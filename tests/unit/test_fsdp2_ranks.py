"""FSDP2's ranks: the nodes of a mesh, the schemes whose ranks compare their steps, and the prices
of what they send.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from ds_quant.comm.reduction_plan import Slicing
from ds_quant.comm.topology import Topology
from ds_quant.config.schema import parse_block
from ds_quant.fsdp2 import forwards, notices
from ds_quant.fsdp2.forwards import Forwards
from ds_quant.fsdp2.meshes import Mesh, Meshes
from ds_quant.fsdp2.notices import on_one_rank, weights_in_full
from ds_quant.fsdp2.prices import line_parts_of, sizes_of, workload_of
from ds_quant.fsdp2.ranks import ranks_of_model
from ds_quant.policy.memory import Sizes
from ds_quant.policy.route import Routes
from ds_quant.runtime.front import SentParam, Workload
from ds_quant.runtime.run import StockVolume
from ds_quant.runtime.start_line import LineParts
from tests.world import World

CPU = torch.device("cpu")


def topologies(*meshes: tuple[tuple[int, ...], int], node_size: int) -> list[Topology]:
    """Return the nodes of meshes of ``(ranks, shards)`` in a job of 8 ranks."""
    made = [
        Mesh(ranks=ranks, shards=shards, shard_group=Mock(), replica_group=Mock(), device=CPU)
        for ranks, shards in meshes
    ]
    all_ranks = tuple(sorted({rank for mesh in made for rank in mesh.ranks}))
    all_meshes = Meshes(each=made, ranks=all_ranks, process_groups=[])
    return list(ranks_of_model(all_meshes, node_size=node_size).topologies)


@pytest.fixture(autouse=True)
def _job_of_eight_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)


def test_replicas_of_the_whole_job_are_nodes_that_its_groups_can_split() -> None:
    """A topology that names its ranks gets new process groups, where NCCL could split one."""
    assert topologies((tuple(range(8)), 4), node_size=4) == [Topology(world=8, node_size=4)]
    assert topologies((tuple(range(8)), 2), node_size=4) == [Topology(world=8, node_size=2)]


def test_replicas_on_some_ranks_are_nodes_of_these_ranks() -> None:
    whole, experts = topologies((tuple(range(8)), 8), ((0, 1, 4, 5), 2), node_size=4)
    assert whole == Topology(world=8, node_size=4)
    assert experts == Topology(world=4, node_size=2, ranks=(0, 1, 4, 5))


def test_replicas_in_one_half_of_the_job_know_their_ranks() -> None:
    (half,) = topologies(((4, 5, 6, 7), 2), node_size=2)
    assert half == Topology(world=4, node_size=2, ranks=(4, 5, 6, 7))


@pytest.mark.parametrize(
    ("block", "compares"),
    [
        ({"scheme": "full_precision"}, False),
        ({"scheme": "lossless"}, False),
        ({"scheme": "qsdp"}, True),
        ({"scheme": "qsdp", "gradients": {"enabled": False}}, True),
        ({"scheme": "qsdp", "weights": {"enabled": False}}, True),
    ],
)
def test_ranks_compare_their_steps_where_random_bits_depend_on_them(
    block: dict[str, Any], compares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock()
    monkeypatch.setattr(forwards, "StepsVote", made)
    module = nn.ParameterDict({"w": nn.Parameter(torch.empty(64, 64))})
    run = World(2, 2, module=module, stage=3, **block).ranks[0].run
    Forwards(run).compare_steps()
    assert made.return_value.compare.call_count == int(compares)


# ---- the prices of a model ----

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def level(
    scheme: str = "eden4",
    *,
    nodes: int = 2,
    node_size: int = 4,
    stage: int = 3,
    replicas: bool = False,
    **block: Any,
) -> Any:
    """Return the part of a level that prices read."""
    made = parse_block({"scheme": scheme, **block}).to_scheme()
    routes = Routes(scheme=made, stage=stage, nodes=nodes, node_size=node_size, replicas=replicas)
    return SimpleNamespace(routes=routes, num_shards=node_size if replicas else nodes * node_size)


def module(of: Any, *numels: int, **facts: Any) -> Any:
    """Return the part of a sharded module that prices read; the last parameter is frozen."""
    usual: dict[str, Any] = {
        "gathers": 2,
        "dtypes": (BF16,) * len(numels),
        "gradient_dtype": FP32,
        "fsdp_gathers": "",
        "is_replicated": False,
        "defers_inter_node": False,
        "row_numel": sum(numels),
        "group": object(),
    }
    params = [
        SimpleNamespace(
            shape=torch.Size([numel]),
            trained=place < len(numels) - 1,
            is_quantized=lambda dtype, numel=numel: numel > 9 and dtype.is_floating_point,
        )
        for place, numel in enumerate(numels)
    ]
    made = SimpleNamespace(level=of, params=params, numel=sum(numels), **usual | facts)
    made.dtype = made.dtypes[0]
    return made


def run_of(*levels: Any, device: str = "cpu") -> Any:
    return SimpleNamespace(
        levels=levels,
        device=torch.device(device),
        slicing=Slicing(count=3),
        stock_volume=lambda volume: StockVolume(6.0, volume),
    )


def test_every_level_has_the_work_of_its_modules() -> None:
    """Gathers of the dense weights: (2 x 30 + 1 x 90) / 120."""
    dense, experts, empty = level(), level(node_size=2), level()
    first = module(dense, 20, 10)
    replicated = module(
        dense, 60, 30, gathers=1, dtypes=(BF16, FP64), is_replicated=True, fsdp_gathers="a reason"
    )
    expert = module(experts, 500, 100, dtypes=(FP64, BF16), gradient_dtype=BF16)
    modules = [first, expert, replicated]
    assert workload_of(run_of(dense, experts, empty), modules, micro_steps=3) == Workload(
        params=[
            [
                SentParam(first.params[0], BF16, FP32, trained=True, stock_weights=False),
                SentParam(first.params[1], BF16, FP32, trained=False, stock_weights=False),
                SentParam(replicated.params[0], FP32, FP32, trained=True, stock_weights=True),
                SentParam(replicated.params[1], FP32, FP32, trained=False, stock_weights=True),
            ],
            [
                SentParam(expert.params[0], FP64, BF16, trained=True, stock_weights=False),
                SentParam(expert.params[1], BF16, BF16, trained=False, stock_weights=False),
            ],
            [],
        ],
        gathers=[1.25, 2.0, 0.0],
        gather_numel=600,
        micro_steps=3,
    )
    assert workload_of(run_of(), [], micro_steps=1).gather_numel == 0
    first.dtypes = (BF16,)
    with pytest.raises(ValueError, match="zip"):
        workload_of(run_of(dense), modules, micro_steps=3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rows_of_the_largest_module_of_a_level_are_in_memory_at_once(device: str) -> None:
    """Rows of all ranks, padding included: 8 x 32; of a replica: 4 x 17. Messages of replicas
    cross at once on a device with streams.
    """
    dense, replicas, empty = level(), level(replicas=True), level()
    modules = [
        module(dense, 20, 10, row_numel=32),
        module(dense, 12, 3, 5, row_numel=31),
        module(replicas, 8, 1, row_numel=17),
    ]
    crossing = device == "cuda"
    expected = [(20 + 12 + 3, 8 * 32, False), (8, 4 * 17, crossing), (0, 0, False)]
    run = run_of(dense, replicas, empty, device=device)
    assert sizes_of(run, modules) == [
        Sizes(
            trained=trained,
            largest=largest,
            bucket=largest,
            prefetch=largest,
            exchanged_at_once=True,
            crossing_at_once=at_once,
            slicing=Slicing(count=3),
        )
        for trained, largest, at_once in expected
    ]


SENT_IN = "gradients are sent between nodes in every backward that is not declared otherwise by "


@pytest.mark.parametrize(
    ("levels", "defers", "between", "weights", "gradients"),
    [
        ([level()], [False, False], "x", "", ""),
        ([level()], [False, True], "x", "", f"{SENT_IN}set_is_last_backward(False)"),
        (
            [level(), level(replicas=True)],
            [True, False],
            "replicas of",
            "weights stay in the node",
            f"{SENT_IN}set_requires_all_reduce(False)",
        ),
        (
            [level("full_precision"), level("full_precision", replicas=True)],
            [False, False],
            "replicas of",
            "weights stay in the node, exact",
            "",
        ),
        ([level(stage=0)], [False, False], "x", "every rank holds all weights", ""),
        ([level(stage=0), level()], [False, False], "x", "", ""),
    ],
)
def test_the_start_up_lines_name_where_weights_and_gradients_go(
    levels: list[Any], defers: list[bool], between: str, weights: str, gradients: str
) -> None:
    volume: Any = "a volume"
    modules = [module(levels[0], 10, defers_inter_node=deferred) for deferred in defers]
    assert line_parts_of(run_of(*levels), modules, volume, kept_bytes=7) == LineParts(
        layout="FSDP2",
        between=between,
        volume=volume,
        stock=StockVolume(6.0, volume),
        weights=weights,
        gradients=gradients,
        kept_bytes=7,
    )


# ---- notices ----

TAKE_QSDP = 'advice: {} compresses weights between nodes only; on one node take "qsdp"'
TAKE_BF16 = (
    "fp32 weights are sent in full precision: lossless differences take 16 bits; give "
    "MixedPrecisionPolicy param_dtype=torch.bfloat16"
)


@pytest.mark.parametrize(
    ("of", "dtype", "numel", "reasons"),
    [
        (level(), BF16, 10, []),
        (level("qsdp", nodes=1), BF16, 10, []),
        (level("full_precision", nodes=1), FP32, 10, []),
        (level(nodes=1), BF16, 10, [TAKE_QSDP.format("eden4")]),
        (level(nodes=1), BF16, 9, []),  # too small to be compressed
        (level("lossless", nodes=1), FP32, 10, [TAKE_QSDP.format("lossless")]),
        (level("lossless"), FP32, 10, [TAKE_BF16]),
        (level("lossless"), FP32, 9, []),
        (level("lossless"), BF16, 10, []),
        (level("lossless_w_g3"), FP32, 10, [TAKE_BF16]),
    ],
)
def test_weights_in_full_precision_have_a_reason(
    of: Any, dtype: torch.dtype, numel: int, reasons: list[str]
) -> None:
    frozen = 9
    assert weights_in_full([module(of, numel, frozen, dtypes=(dtype, dtype))]) == reasons


def test_a_reason_is_given_once_however_many_modules_have_it() -> None:
    """A replicated module gathers no weights."""
    inside, others = level(nodes=1), level(nodes=1, node_size=2)
    lossless = level("lossless")
    fp32 = {"dtypes": (FP32, FP32)}
    modules = [
        module(lossless, 10, 20, is_replicated=True, **fp32),
        module(inside, 9, 9),
        module(inside, 10, 20),
        module(others, 10, 20),
        module(lossless, 10, 20),
        module(lossless, 10, 20, **fp32),
    ]
    assert weights_in_full(modules) == [TAKE_QSDP.format("eden4"), TAKE_BF16]
    assert weights_in_full(modules[:2]) == []


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["served"], []),
        (["served", "experts.3", "experts.4"], ["2 module(s), such as experts.3"]),
        (["", "served"], ["1 module(s), such as the root"]),
    ],
)
def test_modules_on_one_rank_are_named(
    monkeypatch: pytest.MonkeyPatch, names: list[str], said: list[str]
) -> None:
    made = nn.Linear(1, 1)
    served = module(level(), 10)
    groups = [(name, None, served.group if name == "served" else object()) for name in names]
    monkeypatch.setattr(notices, "groups_of", {made: groups}.__getitem__)
    have = ", have a mesh of one rank: nothing of them is sent"
    assert on_one_rank(made, [module(level(), 10), served]) == [words + have for words in said]
