"""FSDP2's front as rank 0 of four sees it: refusals, notices, figures and records.

The collectives of this process leave tensors as they are, and the handshake answers at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_quant import fsdp2
from ds_quant.config.errors import AttachError, ConfigError
from ds_quant.config.schema import QuantizedCommConfig, parse_block
from ds_quant.fsdp2 import attaching
from ds_quant.fsdp2.attaching import front_of
from ds_quant.fsdp2.meshes import Mesh, Meshes
from ds_quant.runtime import log
from ds_quant.runtime.inactive import InactiveFront
from ds_quant.runtime.memory_check import Free

CPU = torch.device("cpu")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
NODES = {"node_size": 2, "min_numel": 64}


@pytest.fixture(scope="module", autouse=True)
def _four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def handshake(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Answers with the ranks per node of the block, 2 without one."""
    made = Mock(side_effect=lambda config, **_: config.node_size or 2)
    monkeypatch.setattr(attaching, "handshake", made)
    return made


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines of the log."""
    found: list[str] = []
    logger = Mock(warning=found.append, info=found.append)
    monkeypatch.setattr(log, "_logger", lambda: logger)
    return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)))


def sharded(ranks: Any = (0, 1, 2, 3), **options: Any) -> Any:
    """Shard a layer and the root. ranks: of the mesh; two rows are two replicas."""
    names = ("replica", "shard") if isinstance(ranks[0], Sequence) else ("shard",)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    model = Net()
    fully_shard(model.first, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def attached(model: nn.Module, scheme: str = "qsdp", **block: Any) -> Any:
    return fsdp2.attach(model, {**NODES, "scheme": scheme, **block}, optimizer=sgd(model))


# ---- attach ----


def test_the_handshake_compares_the_model_and_its_meshes(handshake: Mock) -> None:
    model = sharded([[0, 1], [2, 3]])
    fsdp2.attach(model, {"scheme": "qsdp"}, optimizer=[])
    shapes = {"first.weight": (64, 64), "first.bias": (64,)}
    shapes |= {"head.weight": (64, 64), "head.bias": (64,)}
    listed = repr([f"{name} {shape} True" for name, shape in shapes.items()])
    handshake.assert_called_once_with(
        parse_block({"scheme": "qsdp"}),
        facts={
            "front": "fsdp2",
            "torch": torch.__version__.partition("+")[0],
            "parameters": f"4 ({zlib.crc32(listed.encode()):08x})",
            "mesh": "2 x 2",
        },
        device=CPU,
        ranks=(0, 1, 2, 3),
        call="ds_quant.fsdp2.attach",
    )


@pytest.mark.parametrize("ranks_of_host", [1, 2, 4])
def test_a_replica_is_a_node_and_one_on_several_hosts_is_warned_of(
    ranks_of_host: int, handshake: Mock, lines: list[str]
) -> None:
    handshake.side_effect = None
    handshake.return_value = ranks_of_host
    model = sharded([[0, 1], [2, 3]])
    front = fsdp2.attach(model, "qsdp", optimizer=sgd(model))
    assert front.run.topology.node_size == 2
    said = (
        "quantized_comm: a replica spans hosts of 1 ranks, between which weights are sent in every "
        "forward and backward: shard over 1 ranks"
    )
    assert lines.count(said) == (ranks_of_host == 1)
    assert not lines[1:] or "spans hosts" not in "".join(lines[1:])


def test_a_model_of_some_ranks_and_one_without_an_optimizer_say_so() -> None:
    votes = {"scheme": "qsdp", "fallback": {"on_nonfinite": "raise"}, **NODES}
    front = fsdp2.attach(sharded(), votes, optimizer=[])
    assert front.run.notices[0] == "no optimizer: weights are gathered only"
    with pytest.raises(RuntimeError, match="nothing looks at the gradients"):
        front.found_nonfinite()
    front = attached(sharded(), **votes)
    assert not any("optimizer" in each or "belongs" in each for each in front.run.notices)
    assert not front.found_nonfinite()
    half = attached(sharded((0, 2)), node_size=1)
    assert half.run.notices[0] == (
        "this model belongs to 2 of 4 ranks, from rank 0 on; other ranks train models of their own"
    )


def test_a_model_on_one_rank_has_nothing_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    require = Mock()
    monkeypatch.setattr(attaching, "_require_memory", require)
    alone = attached(sharded((0,)), node_size=1)
    assert alone.run.notices[0] == "single rank: nothing to communicate"
    require.assert_not_called()
    both = attached(sharded((0, 1)), node_size=1)
    require.assert_called_once_with(both.run)


def test_copies_that_do_not_fit_in_the_memory_of_a_gpu_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = attached(sharded(), "eden4").run
    volume = run.comm_volume()
    node_shard = int(volume.memory * volume.numel)
    votes: list[list[int]] = []

    def least(vote: Tensor) -> Tensor:
        votes.append(vote.tolist())
        return vote

    fake = Mock(wraps=run, notices=[], topology=run.topology, device=torch.device("cuda"))
    fake.votes.least = least
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda data, **_: tensor(data))
    free = Mock(return_value=(node_shard - 1, 10**12))
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    with pytest.raises(RuntimeError) as refused:
        attaching._require_memory(fake)
    assert str(refused.value) == (
        f"quantized_comm: the node shard takes {node_shard / 1e9:.3g} GB on every rank, but "
        f"{(node_shard - 1) / 1e9:.3g} GB of memory are free on the fullest device; use more ranks "
        'per node, replicas (HSDP), or a scheme without a node shard such as "qsdp"'
    )
    # Gradients that wait for a last backward, as much again, are not counted.
    free.return_value = int(node_shard + run.peak_bytes(volume)) + 1, 0
    attaching._require_memory(fake)
    assert fake.notices == []
    assert votes == [[node_shard - 1, 0], [*free.return_value]]
    free.assert_called_with(torch.device("cuda"))
    fake.device = CPU
    attaching._require_memory(fake)
    assert len(votes) == 2
    assert Free(1, 0) == Free(on_device=1, on_host=0)


def test_without_a_block_the_other_ranks_are_told(
    monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.delenv("DS_QUANT_BLOCK", raising=False)
    stay_away = Mock()
    monkeypatch.setattr(attaching, "stay_away", stay_away)
    front = fsdp2.attach(sharded((0, 2)), optimizer=[])
    assert isinstance(front, InactiveFront)
    said = "no block was given and DS_QUANT_BLOCK is not set: nothing is quantized"
    assert front.line == said and lines == [f"quantized_comm: {said}"]
    stay_away.assert_called_once_with(said, (0, 2))
    front = fsdp2.attach(sharded(), {"scheme": "qsdp", "enabled": False}, optimizer=[])
    assert front.line == "enabled=false: nothing is quantized"
    stay_away.assert_called_with("enabled=false: nothing is quantized", (0, 1, 2, 3))
    stay_away.reset_mock()
    # Who shares a model that fully_shard was not called on is not known.
    assert isinstance(fsdp2.attach(Net(), optimizer=[]), InactiveFront)
    stay_away.assert_not_called()


def test_a_model_without_parameters_is_told_by_name() -> None:
    front = fsdp2.attach(fully_shard(nn.Sequential(nn.Tanh())), "qsdp", optimizer=[])
    assert front.line == (
        "FSDPSequential has no parameters that fully_shard has sharded: nothing is quantized"
    )


def test_models_and_optimizers_that_cannot_be_served_are_named() -> None:
    def error(model: Any, block: Any = "qsdp", optimizer: Any = ()) -> str:
        with pytest.raises(AttachError) as refused:
            fsdp2.attach(model, block, optimizer=optimizer)
        return str(refused.value)

    assert error(3) == (
        "quantized_comm: model=int: allowed: a module that fully_shard was called on, or one that "
        "holds such modules"
    )
    assert error(Net()) == (
        "quantized_comm: Net holds no module that fully_shard was called on: call fully_shard "
        "before ds_quant.fsdp2.attach"
    )
    model = sharded()
    assert error(model, optimizer=[sgd(model), torch.optim.Adam(Net().parameters())]) == (
        "quantized_comm: optimizer=Adam holds none of the model's parameters, so its steps would "
        "not move the model: make it after fully_shard, which replaces the parameters, or give "
        "that of this model"
    )
    # One of many parameters is enough, in any group.
    groups = [{"params": list(Net().parameters())}, {"params": [model.head.bias]}]
    assert fsdp2.attach(model, "qsdp", optimizer=torch.optim.SGD(groups, lr=0.1)).step == 0


def test_a_second_call_returns_the_front_or_names_the_difference() -> None:
    model = sharded()
    front = attached(model)
    later = torch.optim.SGD([model.head.bias], lr=0.1)
    assert fsdp2.attach(model, {**NODES, "scheme": "qsdp"}, optimizer=later) is front
    assert later in front._optimizers._known
    end = ": call detach() of its front first"

    def error(model: Any, **block: Any) -> str:
        with pytest.raises(AttachError) as refused:
            attached(model, **block)
        return str(refused.value).removeprefix("quantized_comm: this model is attached already, ")

    assert error(model, seed=1) == (
        f"with another block: quantized_comm.seed=1 (in the first call: 0){end}"
    )
    assert error(model.first) == f"as a part of a larger model, or in part{end}"
    around = nn.Sequential(model, sharded())
    assert error(around) == f"as a part of a larger model, or in part{end}"
    evaluated = sharded()
    fsdp2.attach(evaluated, {**NODES, "scheme": "qsdp"}, optimizer=[])
    assert error(evaluated) == f"without an optimizer{end}"
    front.detach()
    assert front_of(model) is None
    assert attached(model) is front_of(model) is front_of(around) is not front


def test_resync_reaches_the_front_of_a_model() -> None:
    model = sharded()
    attaching.resync(model)  # nothing is attached
    front = attached(model, "eden4")
    front.resync = Mock()
    attaching.resync(nn.Sequential(model))
    front.resync.assert_called_once_with()


# ---- settings that are refused ----


def mesh(ranks: Sequence[int], shards: int) -> Mesh:
    return Mesh(ranks=tuple(ranks), shards=shards, shard_group=None, replica_group=None, device=CPU)


def meshes(*each: Mesh) -> Meshes:
    ranks = tuple(sorted({rank for one in each for rank in one.ranks}))
    return Meshes(each=each, ranks=ranks, process_groups=[])


SHARDS = mesh(range(6), 6)
REPLICAS = mesh(range(6), 2)
EXPERTS = mesh([0, 1], 2)
# Three replicas of two ranks that do not follow each other.
SCATTERED = mesh([0, 3, 1, 4, 2, 5], 2)
AUTOTUNE = 'quantized_comm.scheme="autotune": allowed with {}: a preset, such as "eden4"'
ORDER = (
    "replicas of ranks [0, 3] and [1, 4]: allowed: replicas that follow each other, as "
    "init_device_mesh(device, (3, 2)) makes them"
)
SIZE = "quantized_comm.node_size=3: allowed with replicas of 2 ranks: 2; leave it out"


@pytest.mark.parametrize(
    ("block", "each", "problems"),
    [
        ({"scheme": "autotune"}, [SHARDS], []),
        ({"scheme": "autotune"}, [REPLICAS], [AUTOTUNE.format("replicas")]),
        ({"scheme": "autotune"}, [mesh(range(6), 1)], [AUTOTUNE.format("replicas")]),
        ({"scheme": "autotune"}, [mesh(range(6), 3)], [AUTOTUNE.format("replicas")]),
        (
            {"scheme": "autotune"},
            [SHARDS, EXPERTS],
            [AUTOTUNE.format("several meshes or tensor parallelism")],
        ),
        ({"scheme": "qsdp"}, [REPLICAS, EXPERTS], []),
        ({"scheme": "qsdp", "node_size": 2}, [REPLICAS], []),
        ({"scheme": "qsdp", "node_size": 3}, [REPLICAS], [SIZE]),
        ({"scheme": "qsdp"}, [SCATTERED], [ORDER]),
        (
            {"scheme": "autotune", "node_size": 3},
            [SCATTERED, SCATTERED],
            [AUTOTUNE.format("replicas"), ORDER, SIZE],
        ),
        ({"scheme": "qsdp", "node_size": 3}, [SHARDS], []),
        (
            {"scheme": "qsdp", "node_size": 4},
            [SHARDS],
            ["quantized_comm.node_size=4: allowed with 6 ranks: 1, 2, 3, 6"],
        ),
        (
            {"scheme": "sdp4bit", "node_shard": False},
            [SHARDS],
            [
                'quantized_comm.node_shard=false conflicts with quantized_comm.scheme="sdp4bit" '
                "under ZeRO-3 and FSDP2: weight differences are added to weights that every node "
                'keeps; leave node_shard out, or use scheme "qsdp"'
            ],
        ),
    ],
)
def test_blocks_that_a_mesh_cannot_serve_are_refused_with_all_their_problems(
    block: dict[str, Any], each: list[Mesh], problems: list[str]
) -> None:
    config: QuantizedCommConfig = parse_block(block)
    if not problems:
        attaching._refuse(config, meshes(*each))
        return
    with pytest.raises(ConfigError) as refused:
        attaching._refuse(config, meshes(*each))
    assert list(refused.value.problems) == problems


OTHERS = "quantized_comm: the mesh of another rank cannot be served: see its error"
UNEQUAL = (
    "quantized_comm: the meshes of this rank have [4, 2] rank(s) in a node, and others lie on "
    "other numbers of nodes: make meshes whose ranks divide node_size, or are divided by it"
)


@pytest.mark.parametrize(
    ("problem", "votes_of_others", "said"),
    [
        (None, [1, 4, 2, -4, -2], None),
        (None, [0, 4, 2, -4, -2], OTHERS),
        (None, [1, 4, 1, -4, -1], UNEQUAL),
        (None, [1, 4, 4, -4, -4], UNEQUAL),
        ("own", [1, 4, 2, -4, -2], "own"),
        ("own", [0, 4, 1, -4, -1], "own"),
    ],
)
def test_all_ranks_end_where_one_has_a_mesh_that_cannot_be_served(
    problem: str | None, votes_of_others: list[int], said: str | None
) -> None:
    own = None if problem is None else ConfigError(problem)
    asked: list[list[int]] = []

    def least(numbers: list[int]) -> list[int]:
        asked.append(numbers)
        return [min(pair) for pair in zip(numbers, votes_of_others, strict=True)]

    found = attaching._problem_of_any(Mock(least=least), own, [4, 2])
    assert asked == [[int(own is None), 4, 2, -4, -2]]
    assert (found if found is None else str(found)) == said
    assert found is own or isinstance(found, ConfigError)


def test_a_copy_of_the_model_on_every_rank_is_refused_with_its_price() -> None:
    """Two layers of 64 x 64 + 64 weights take 2 bytes each in bf16, and 1 GB holds 10^9."""
    said = (
        'scheme "eden4" under FSDP2 needs two GPUs per node or more (its weight differences need a '
        "copy of the weights in every node, which with one GPU is the whole model, 1.66e-05 GB "
        'more): use scheme "qsdp", or set quantized_comm.allow_full_replica to true to accept that '
        "copy"
    )
    assert 2 * 2 * (64 * 64 + 64) == 16640
    with pytest.raises(ConfigError) as refused:
        attached(sharded(mp_policy=BF16), "eden4", node_size=1)
    assert str(refused.value) == said
    # A mesh of ranks 0 and 2 has one rank in every node: its layer takes half of the bytes.
    model = Net()
    fully_shard(model.first, mesh=DeviceMesh("cpu", [0, 2]), mp_policy=BF16)
    fully_shard(model, mesh=DeviceMesh("cpu", [0, 1, 2, 3]), mp_policy=BF16)
    with pytest.raises(ConfigError) as refused:
        attached(model, "eden4")
    assert str(refused.value) == said.replace(
        "the whole model, 1.66e-05",
        "all that the GPU and its mesh have, a part of the model, 8.32e-06",
    )
    attached(model, "qsdp")
    # With replicas every node has all weights anyway.
    attached(sharded([[0], [1], [2], [3]]), "eden4", node_size=1)
    attached(sharded([[0, 1], [2, 3]]), "eden4")


def test_a_mesh_with_unequal_numbers_of_ranks_in_its_nodes_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        model = Net()
        fully_shard(model.first, mesh=DeviceMesh("cpu", [0, 1, 2]))
        fully_shard(model, mesh=DeviceMesh("cpu", [0, 1, 2, 3]))
        attached(model)
    assert str(refused.value).startswith("quantized_comm.node_size=2: ")
    assert "ranks of every node" in str(refused.value)
