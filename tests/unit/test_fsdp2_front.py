"""FSDP2's front as rank 0 of four sees it: refusals, notices, figures and records.

The collectives of this process leave tensors as they are, and the handshake answers at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_quant import fsdp2
from ds_quant.config.errors import AttachError, ConfigError
from ds_quant.config.schema import QuantizedCommConfig, parse_block
from ds_quant.fsdp2 import attaching, gradients, segments, sharded_module, torch_names
from ds_quant.fsdp2.attaching import front_of
from ds_quant.fsdp2.meshes import Mesh, Meshes, mesh_of_group, meshes_of
from ds_quant.runtime import log
from ds_quant.runtime.inactive import InactiveFront
from ds_quant.runtime.memory_check import Free
from ds_quant.runtime.reductions import reduced_codecs

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
    warnings = [line for line in lines if "spans hosts" in line]
    assert warnings == ([said] if ranks_of_host == 1 else [])
    lines.clear()
    whole = sharded()  # without replicas the nodes are hosts
    front = fsdp2.attach(whole, "qsdp", optimizer=sgd(whole))
    assert front.run.topology.node_size == ranks_of_host
    assert not any("spans hosts" in line for line in lines)


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
    torch_names.param_groups(model)[0]._all_gather_comm = Mock(front="of the user")
    assert front_of(model) is None
    model = sharded()
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


# ---- optimizer steps ----


def backward(model: Any, *, last: bool = True) -> None:
    model.set_is_last_backward(last)
    model(torch.ones(2, 64)).sum().backward()


def give_gradients(model: nn.Module, value: float = 0.0) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def error_of(call: Any) -> str:
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value)


def test_a_step_amid_an_accumulation_is_told_how_to_end_it() -> None:
    model = sharded()
    optimizer = sgd(model)
    front: Any = fsdp2.attach(model, {**NODES, "scheme": "qsdp"}, optimizer=optimizer)
    backward(model, last=False)
    said = (
        "quantized_comm: {} while gradients of 2 module(s), such as the root, have not been "
        "reduced over all ranks: call model.set_is_last_backward(True), and "
        "set_requires_all_reduce(True) if you have called it, before the last backward of a step; "
        "or drop the gradients with front.discard_gradients(); or set "
        'quantized_comm.gradients.cross="micro_step"'
    )
    assert waiting_in(front) == ["the root", "first"]
    assert error_of(optimizer.step) == said.format("the optimizer steps")
    assert error_of(front.detach) == said.format("the model is detached")
    front.discard_gradients({id(parameter) for parameter in model.head.parameters()})
    assert waiting_in(front) == ["first"]
    front.discard_gradients()
    assert not front.has_waiting_gradients()
    # Half of the ranks keep the sums of every weight of a node, in fp32.
    assert front.figures()["held_bytes"] == 2 * (64 * 64 + 64) * 4 / 2
    assert front.context.partial_sums.nbytes == 0
    front.detach()


def test_gradients_written_between_two_backwards_are_named_with_the_way_out() -> None:
    model = sharded()
    optimizer = sgd(model)
    front: Any = fsdp2.attach(model, {**NODES, "scheme": "qsdp"}, optimizer=optimizer)
    backward(model, last=False)
    for parameter in model.first.parameters():
        parameter.grad.mul_(0.5)
    backward(model)
    said = (
        "quantized_comm: gradients of 1 module(s), such as first, were written between two "
        "backwards of an optimizer step. They are zero until the last backward, because the sums "
        "of this step are kept inside the nodes. To drop this step's gradients call "
        "optimizer.zero_grad(); to scale or clip gradients do so after the last backward, or set "
        'quantized_comm.gradients.cross="micro_step"'
    )
    assert error_of(optimizer.step) == said
    front.discard_gradients({id(parameter) for parameter in model.head.parameters()})
    assert error_of(optimizer.step) == said
    front.discard_gradients({id(model.first.bias)})
    optimizer.step()
    assert front.step == 1


def test_collectives_that_the_user_sets_later_are_named() -> None:
    model = sharded()
    optimizer = sgd(model)
    front: Any = fsdp2.attach(model, {**NODES, "scheme": "qsdp"}, optimizer=optimizer)
    give_gradients(model)
    served = front.served[1]
    for name in ("_all_gather_comm", "_reduce_scatter_comm"):
        kept = getattr(served.sharded.group, name)
        setattr(served.sharded.group, name, Mock())
        assert error_of(optimizer.step) == (
            "quantized_comm: set_custom_all_gather or set_custom_reduce_scatter was called on 1 "
            "attached module(s), such as first: nothing of them is quantized. Leave that out, or "
            "call front.detach() first"
        )
        setattr(served.sharded.group, name, kept)
    optimizer.step()


def test_a_change_of_what_is_trained_is_said_with_the_new_volume(lines: list[str]) -> None:
    """In fp32: the root sends 4 bytes for its gather and 4 for its gradients, the layer 4 more."""
    model = sharded()
    optimizer = sgd(model)
    front: Any = fsdp2.attach(model, {**NODES, "scheme": "full_precision"}, optimizer=optimizer)
    lines.clear()

    def step() -> list[str]:
        give_gradients(model)
        optimizer.step()
        said = list(lines)
        lines.clear()
        return said

    assert step() == []
    front.run.savings.forget_prices = Mock()
    model.first.requires_grad_(False)
    assert step() == []  # this step may have moved it
    front.run.savings.forget_prices.assert_not_called()
    assert step() == [
        "quantized_comm: 2 of 4 parameters are trained now, first.weight no longer: volume "
        f"{((4 + 4) + (4 + 4)) / 2:.2f} B/param/step"
    ]
    front.run.savings.forget_prices.assert_called_once_with()
    assert step() == []
    model.first.bias.requires_grad_(True)
    with_bias = (16 * 64 * 64 + (16 + 4) * 64) / (2 * (64 * 64 + 64))
    assert step() == [
        "quantized_comm: 3 of 4 parameters are trained now, first.bias too: volume "
        f"{with_bias:.2f} B/param/step"
    ]
    assert step() == []


def test_messages_are_checked_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_quant.fsdp2 import model as front_module

    def checks(scheme: str, **block: Any) -> int:
        check = Mock()
        monkeypatch.setattr(front_module, "check_messages", check)
        model = sharded(mp_policy=BF16)
        optimizer = sgd(model)
        front: Any = fsdp2.attach(model, {**NODES, "scheme": scheme, **block}, optimizer=optimizer)
        front.copies = None
        give_gradients(model)
        optimizer.step()
        assert all(call.args == (front.run,) for call in check.call_args_list)
        return check.call_count

    assert checks("qsdp") == 0
    assert checks("qsdp", payload_checksum=True) == 1
    assert checks("lossless") == 1


def test_copies_follow_the_steps_of_several_optimizers() -> None:
    """Writes are noted before the first one, and the last one ends the step."""
    model = sharded()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.first, model))
    block = {**NODES, "scheme": "eden4", "checksum_steps": 0}
    front: Any = fsdp2.attach(model, block, optimizer=[first, second])
    copies = front.copies = Mock(nbytes=0)
    give_gradients(model)
    first.step()
    assert [name for name, *_ in copies.method_calls] == ["note_writes"] and front.step == 0
    assert front.state_dict() == {"step": 1}
    second.step()
    assert [name for name, *_ in copies.method_calls] == ["note_writes", "resync", "exchange"]
    assert front.step == front.counted_steps == 1
    assert front.context.weights_version == (1, 1)
    copies.reset_mock()
    front.run.state.exact_until = 4  # from the next step on, and while it lasts
    for _ in range(2):
        first.step()
        second.step()
    said = [name for name, *_ in copies.method_calls]
    assert said == ["note_writes", "exchange", "resync_frozen", "note_writes", "exchange"]
    assert front.context.weights_version == (3, 3)
    front.detach()
    copies.finish.assert_called_once_with()
    assert front.copies is None
    front.detach()
    copies.finish.assert_called_once_with()


def test_copies_and_replicas_are_compared_every_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_quant.fsdp2 import model as front_module

    found: list[Any] = []

    def compare_replicas(run: Any, weights: Any, step: int) -> None:
        found.append((run, [(owner, len(held)) for owner, held in weights], step))

    monkeypatch.setattr(front_module, "compare_copies", lambda *given: found.append(given))
    monkeypatch.setattr(front_module, "compare_replicas", compare_replicas)
    block = {**NODES, "checksum_steps": 2}
    for scheme, ranks in (("eden4", range(4)), ("qsdp", [[0, 1], [2, 3]])):
        model = sharded(tuple(ranks))
        optimizer = sgd(model)
        front: Any = fsdp2.attach(model, {**block, "scheme": scheme}, optimizer=optimizer)
        copies = None
        if scheme == "eden4":
            copies = front.copies = Mock(nbytes=0)
        front._forwards.compare_steps = Mock()
        give_gradients(model)
        found.clear()
        for _ in range(5):
            optimizer.step()
        if copies is not None:
            of_copies = [given for given in found if given[1] is copies]
            assert of_copies == [(front.run, copies, 2), (front.run, copies, 4)]
            assert copies.fill_written.call_count == len(found) == 5
        else:  # rank 0 stands for ranks 0 and 2, which hold the same shards
            assert found == [(front.run, [(0, 4)], step) for step in (1, 2, 4)]
            assert front._forwards.compare_steps.call_args_list == 3 * [({"now": True},)]


def test_nan_in_a_gradient_is_found_until_it_is_dropped(lines: list[str]) -> None:
    model = sharded()
    optimizer = sgd(model)
    block = {**NODES, "scheme": "qsdp", "fallback": {"on_nonfinite": "full_precision", "steps": 3}}
    front: Any = fsdp2.attach(model, block, optimizer=optimizer)
    assert front.state_dict() == {"step": 0, "exact_until": 0}
    give_gradients(model)
    assert not front.found_nonfinite()
    front._after_reduction()  # other gradients
    model.first.bias.grad.to_local()[3] = torch.nan
    lines.clear()
    version = front.context.weights_version
    assert front.found_nonfinite() and front.found_nonfinite()
    assert front.context.weights_version == (0, version[1] + 1)
    assert lines == [
        "quantized_comm: step 0: gradients hold NaN or Inf; the next 3 steps travel in full "
        "precision (logged once, ds_quant.report counts)"
    ]
    assert front.run.state.nonfinite_steps == 1 and front.run.traffic.is_exact
    assert front.state_dict() == {"step": 0, "exact_until": 3}
    optimizer.zero_grad()
    assert not front.found_nonfinite()
    give_gradients(model)
    assert not front.found_nonfinite()
    optimizer.step()
    assert front.step == 1 and front.run.state.nonfinite_steps == 1


def test_an_optimizer_step_votes_on_nan_unless_it_was_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stepped(event: str, on_nonfinite: str = "full_precision") -> Any:
        model = sharded()
        optimizer = sgd(model)
        block = {**NODES, "scheme": "qsdp", "fallback": {"on_nonfinite": on_nonfinite}}
        front: Any = fsdp2.attach(model, block, optimizer=optimizer)
        give_gradients(model)
        model.first.bias.grad.to_local()[3] = torch.nan
        if event == "asked before":
            assert front.found_nonfinite()
            front._after_reduction()  # to the same gradients others were added
        if event == "in backward":
            front.run.finite_flags.append(("first", torch.tensor(False)))  # of its reduction
        with monkeypatch.context() as patch:
            patch.setattr(torch_names, "in_backward", lambda: event == "in backward")
            optimizer.step()
        if event == "in backward":
            assert front.step == front.run.state.nonfinite_steps == 0
            front._optimizers.before_forward()
        return front

    for event in ("alone", "asked before", "in backward"):
        front = stepped(event)
        assert front.step == front.run.state.nonfinite_steps == 1, event
        assert front.run.traffic.is_exact
        assert not front.context.watched.are_noted and not front.context.watched.found
    with pytest.raises(FloatingPointError, match="first.bias"):
        stepped("alone", "raise")


def test_reduced_gradients_are_watched_under_the_titles_of_their_modules() -> None:
    for ranks in ((0, 1, 2, 3), ((0, 1), (2, 3))):
        model = sharded(ranks)
        front = attached(model, fallback={"on_nonfinite": "full_precision"})
        backward(model, last=False)
        assert front.run.finite_flags == []
        backward(model)
        assert sorted(name for name, _ in front.run.finite_flags) == ["first", "the root"]
        front.discard_gradients()
        assert front.run.finite_flags == []


def test_a_checkpoint_has_steps_and_levels_and_loads_them() -> None:
    weights = {"bits": 2, "rounding": "nearest", "levels": "learned", "level_steps": [1]}
    model = sharded()
    optimizer = sgd(model)
    front: Any = fsdp2.attach(
        model, {**NODES, "scheme": "qsdp", "weights": weights}, optimizer=optimizer
    )
    start = front.state_dict()
    assert start.keys() == {"step", "learned_at", "levels"}
    assert (start["step"], start["learned_at"]) == (0, 0)
    assert list(start["levels"]) == ["head.weight", "first.weight"]
    assert all(table.shape == (4,) for table in start["levels"].values())
    give_gradients(model)
    optimizer.step()
    optimizer.step()
    learned = front.state_dict()
    assert (learned["step"], learned["learned_at"]) == (2, 2)
    given = {name: torch.tensor([-1.0, -0.5, 0.5, 1.0]) for name in ("first.weight",)}
    version = front.context.weights_version
    front.served[0].reduction._reductions = 7
    front.load_state_dict({"step": 5, "learned_at": 4, "levels": given})
    assert front.step == 5 and front.served[0].reduction._reductions == 0
    assert front.context.weights_version == (5, version[1] + 1)
    loaded = front.state_dict()
    assert (loaded["step"], loaded["learned_at"]) == (5, 4)
    assert torch.equal(loaded["levels"]["first.weight"], given["first.weight"])
    assert torch.equal(loaded["levels"]["head.weight"], start["levels"]["head.weight"])
    held = {param.name: param.levels for param in front.run.params}
    assert held["head.weight"] is None and held["first.bias"] is None
    front.load_state_dict({"step": 6})
    assert front.state_dict()["learned_at"] == 0
    with pytest.raises(ValueError, match="step"):
        front.load_state_dict({})


def test_the_micro_steps_of_a_step_are_those_of_most_modules() -> None:
    front = attached(sharded())
    assert front.micro_steps == 1
    for counts, micro_steps in (((3, 0), 3), ((2, 4), 2), ((4, 2), 2), ((0, 0), 1), ((5, 5), 5)):
        for served, count in zip(front.served, counts, strict=True):
            served.reduction.last_reductions = count
        assert front.micro_steps == front.workload().micro_steps == micro_steps


def test_the_report_of_a_model_has_its_replicas_and_memory() -> None:
    numel = 2 * (64 * 64 + 64)
    for scheme, ranks, replicas, kept in (
        ("eden4", (0, 1, 2, 3), 1, 4 * numel / 2),
        ("qsdp", (0, 1, 2, 3), 1, 0),
        ("qsdp", ((0, 1), (2, 3)), 2, 0),
    ):
        front = attached(sharded(ranks), scheme)
        figures = front.figures()
        assert list(figures)[:2] == ["front", "replicas"] and list(figures)[-1] == "line"
        assert (figures["front"], figures["replicas"]) == ("fsdp2", replicas)
        assert figures["line"] == front.line and front.line.startswith(f"{scheme} on FSDP2, ")
        assert (figures["kept_bytes"], figures["held_bytes"]) == (kept, 0)
        assert figures["expected_held_bytes"] == 4 * numel / 2
        assert figures["steps"] == 0 and figures["params"] == numel
        (sizes,) = front.sizes()
        assert sizes.trained == numel


# ---- sharded modules ----


def test_a_sharded_module_knows_its_shards_on_every_rank() -> None:
    """Six rows on four ranks: two each, and none on the last. A shard takes 2 x 5 elements."""
    model = nn.Linear(5, 6)
    fully_shard(model, mesh=DeviceMesh("cpu", [0, 1, 2, 3]))
    front = attached(model)
    (module,) = [served.sharded for served in front.served]
    assert module.title == "the root" and module.name == ""
    assert module.widths == (10, 2)
    assert module.lengths == ((10, 10, 10, 0), (2, 2, 2, 0))
    assert module.offsets == [0, 10] and module.row_numel == 12
    assert module.numel == 6 * 5 + 6
    assert [shard.shape for shard in module.shards()] == [(10,), (2,)]
    assert module.dtype == module.gradient_dtype == torch.float32
    assert module.reduces and module.fsdp_gathers == ""
    bias = module.reduced_part([False, True])
    assert [param.name for param in bias.params] == ["bias"]
    assert (bias.widths, bias.lengths, bias.dtypes) == ((2,), ((2, 2, 2, 0),), (torch.float32,))
    assert len(bias.members) == 1 and bias.members[0] is module.members[1]
    assert (bias.offsets, bias.row_numel, bias.numel) == ([0], 2, 6)


def test_a_row_is_finite_if_all_but_its_padding_is() -> None:
    """Seven rows: two on every rank but the last. A bias of three: one, one, one and none."""

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(7, 3))
            self.bias = nn.Parameter(torch.zeros(3))

    model = fully_shard(Uneven(), mesh=DeviceMesh("cpu", [0, 1, 2, 3]))
    (module,) = [served.sharded for served in attached(model).served]
    assert module.lengths == ((6, 6, 6, 3), (1, 1, 1, 0))

    def finite(rank: int, place: int | None) -> list[bool]:
        row = torch.zeros(module.row_numel)
        if place is not None:
            row[place] = torch.inf
        level = Mock(shard=rank, num_shards=4)
        flags = replace(module, level=level).finite_flags(row)
        return [bool(flag) for flag in flags]

    assert finite(0, None) == [True]
    assert finite(0, 5) == finite(0, 6) == finite(3, 2) == [False]
    assert finite(3, 3) == finite(3, 6) == [True]
    assert (
        replace(module.reduced_part([False, True]), level=Mock(shard=3, num_shards=4)).finite_flags(
            torch.full((1,), torch.nan)
        )
        == []
    )


def test_a_parameter_counts_as_trained_for_the_step_that_may_have_moved_it() -> None:
    model = sharded()
    module = attached(model).served[1].sharded
    weight, bias = module.params
    assert module.was_trained == [True, True]
    model.first.weight.requires_grad_(False)
    assert module.follow_training() == [] and weight.trained
    assert module.follow_training() == [weight] and not weight.trained and bias.trained
    assert module.follow_training() == []
    model.first.weight.requires_grad_(True)
    assert module.follow_training() == [weight] and weight.trained


def group(
    *parameters: Tensor, param_dtype: Any = None, reduce_dtype: Any = None
) -> tuple[Any, list[Any]]:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    members = [Mock(sharded_param=parameter, mp_policy=policy) for parameter in parameters]
    for member in members:
        member.sharded_param._local_tensor = torch.empty(0)
    return Mock(fsdp_params=members), members


def parameter(dtype: torch.dtype, *, trained: bool = True) -> Tensor:
    return nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=trained)


FP16, FP32, BYTES = torch.float16, torch.float32, torch.uint8
BF = torch.bfloat16


@pytest.mark.parametrize(
    ("parameters", "policy", "gathered", "reduced", "reason"),
    [
        ([parameter(FP32)], {}, [FP32], FP32, ""),
        ([parameter(FP32)], {"param_dtype": BF}, [BF], BF, ""),
        ([parameter(FP32)], {"param_dtype": BF, "reduce_dtype": FP32}, [BF], FP32, ""),
        ([parameter(FP32)], {"reduce_dtype": FP16}, [FP32], FP16, ""),
        (
            [parameter(BYTES, trained=False), parameter(FP32)],
            {"param_dtype": BF},
            [BYTES, BF],
            BF,
            "several dtypes (bfloat16, uint8)",
        ),
        # Gradients are those of the first trained weight, else of the first one that could be.
        ([parameter(FP16, trained=False), parameter(BF)], {}, [FP16, BF], BF, None),
        (
            [parameter(BYTES, trained=False), parameter(FP16, trained=False)],
            {},
            [BYTES, FP16],
            FP16,
            "several dtypes (float16, uint8)",
        ),
        ([parameter(BYTES, trained=False)], {}, [BYTES], FP32, "uint8"),
        ([parameter(torch.float64)], {}, [torch.float64], torch.float64, "float64"),
    ],
)
def test_dtypes_of_gathers_and_gradients_are_those_of_fsdp2(
    parameters: list[Tensor],
    policy: dict[str, Any],
    gathered: list[torch.dtype],
    reduced: torch.dtype,
    reason: str | None,
) -> None:
    of_module, members = group(*parameters, **policy)
    found = [sharded_module.gathered_dtype(member) for member in members]
    assert found == gathered
    assert sharded_module.gradient_dtype(of_module) == reduced
    if reason is not None:
        assert sharded_module._reason_of_own_gather(members, found) == reason


def test_weights_with_an_all_gather_of_their_own_are_gathered_by_fsdp2() -> None:
    of_module, (member,) = group(parameter(FP32))
    member.sharded_param._local_tensor = Mock(fsdp_pre_all_gather=Mock())
    assert sharded_module.gathered_dtype(member) == BYTES
    reason = sharded_module._reason_of_own_gather([member], [BYTES])
    assert reason == "an all-gather of their own"


def test_what_fsdp2_sends_itself_is_said_with_the_first_module() -> None:
    own = object()

    def module(title: str, gathers: str, dtype: torch.dtype, backward: int | None) -> Any:
        after = own if backward is None else Mock(shard_mesh_size=backward)
        return Mock(
            title=title,
            fsdp_gathers=gathers,
            gradient_dtype=dtype,
            reduces=dtype == FP32,
            group=Mock(mesh_info=own, post_forward_mesh_info=after),
        )

    served = module("a", "", FP32, None)
    assert list(sharded_module.gathered_by_fsdp([served])) == []
    kept = Mock(title="k", fsdp_gathers="", reduces=True, group=Mock(post_forward_mesh_info=None))
    assert list(sharded_module.gathered_by_fsdp([kept])) == []
    double = module("b", "float64", torch.float64, 4)
    packed = module("c", "uint8", FP32, 2)
    assert list(sharded_module.gathered_by_fsdp([served, double, packed])) == [
        "FSDP2 gathers the weights of 2 module(s) itself, such as b, which holds weights of "
        "float64",
        "FSDP2 gathers the weights of 2 module(s) again for the backward, among 2 or 4 ranks and "
        "in full precision: the volume leaves these gathers out",
        "FSDP2 reduces the gradients of 1 module(s) itself, such as b, whose gradients are float64",
    ]


@pytest.mark.parametrize(
    ("shape", "padded", "dim", "ranks", "lengths"),
    [
        ((6, 5), (2, 5), 0, 4, (10, 10, 10, 0)),
        ((7, 3), (2, 3), 0, 4, (6, 6, 6, 3)),
        ((1,), (1,), 0, 3, (1, 0, 0)),
        ((0, 4), (0, 4), 0, 2, (0, 0)),
        ((3, 8), (3, 4), 1, 2, (12, 12)),
    ],
)
def test_lengths_of_shards_leave_padding_out(
    shape: tuple[int, ...], padded: tuple[int, ...], dim: int, ranks: int, lengths: tuple[int, ...]
) -> None:
    member = Mock(_orig_size=torch.Size(shape), padded_sharded_param_size=torch.Size(padded))
    member.fsdp_placement.dim = dim
    assert sharded_module._lengths(member, ranks) == lengths


def test_settings_of_fully_shard_that_are_refused_are_named() -> None:
    def error(change: Any, *, root: bool = False) -> str:
        model = sharded()
        change(torch_names.param_groups(model if root else model.first)[0])
        with pytest.raises(AttachError) as refused:
            attached(model)
        return str(refused.value)

    def own_collective(of_module: Any) -> None:
        of_module._reduce_scatter_comm = Mock()

    def kept_sums(of_module: Any) -> None:
        of_module._partial_reduce_output = torch.zeros(1)

    def offload(of_module: Any) -> None:
        of_module.fsdp_params[1].offload_to_cpu = True

    assert error(own_collective) == (
        "quantized_comm: module first has collectives of set_custom_all_gather or "
        "set_custom_reduce_scatter: leave them out: the block replaces both"
    )
    assert error(kept_sums) == (
        "quantized_comm: module first has gradients that set_requires_all_reduce(False) has kept "
        "from the other replicas: call attach between optimizer steps"
    )
    assert error(offload, root=True) == (
        "quantized_comm: module (root) has offload_policy=CPUOffloadPolicy(...): allowed: "
        "OffloadPolicy(), the default; leave offload_policy out"
    )


def test_parameters_are_yielded_once_under_their_names() -> None:
    model = sharded()
    front = attached(model)
    names = ["first.weight", "first.bias", "head.weight", "head.bias"]
    held = dict(model.named_parameters())
    found = dict(sharded_module.named_parameters(model))
    assert list(found) == names and all(found[name] is held[name] for name in names)
    # Gathered modules hold other tensors: the sharded ones have the names of their modules.
    model.first.unshard()
    gathered = list(sharded_module.named_parameters(model))
    assert [name for name, _ in gathered] == [*names, "first", "first"]
    assert gathered[4][1] is held["first.weight"] and gathered[5][1] is held["first.bias"]
    modules = [served.sharded for served in front.served]
    known = list(sharded_module.named_parameters(model, modules))
    assert [name for name, _ in known] == [*names[2:], *names[:2], *names[:2]]
    assert known[2][1] is held["first.weight"]


# ---- reductions ----


def reduction_of(front: Any, index: int = 1) -> Any:
    return front.served[index].reduction


def waiting_in(front: Any) -> list[str]:
    """Return the modules with gradients that wait for the last backward."""
    return [served.sharded.title for served in front.served if served.reduction.holds_partial_sums]


@pytest.mark.parametrize(
    ("ranks", "factor", "op", "scale"),
    [
        ((0, 1, 2, 3), None, dist.ReduceOp.AVG, 1 / 4),
        ((0, 1, 2, 3), 2.0, dist.ReduceOp.AVG, 1 / 2),
        ((0, 1, 2, 3), None, dist.ReduceOp.SUM, 1.0),
        ((0, 1, 2, 3), 2.0, dist.ReduceOp.SUM, 1.0),
        (((0, 1), (2, 3)), None, dist.ReduceOp.AVG, 1 / 4),
        (((0, 1), (2, 3)), None, dist.ReduceOp.SUM, 1 / 2),
        (((0, 1), (2, 3)), 8.0, dist.ReduceOp.SUM, 1.0),
        (((0, 1), (2, 3)), 8.0, dist.ReduceOp.AVG, 1 / 8),
    ],
)
def test_sums_are_divided_once(ranks: Any, factor: float | None, op: Any, scale: float) -> None:
    model = sharded(ranks)
    reduction = reduction_of(attached(model))
    reduction.sharded.group.gradient_divide_factor = factor
    assert reduction._scale(op) == scale


@pytest.mark.parametrize(("factor", "scale"), [(None, 1 / 4), (3.0, 1.0)])
def test_sums_of_replicated_modules_are_divided_once(factor: float | None, scale: float) -> None:
    reduction = reduction_of(attached(sharded([[0], [1], [2], [3]]), node_size=1))
    reduction.sharded.group.gradient_divide_factor = factor
    assert reduction._scale_of_replicated == scale


def test_random_bits_of_a_reduction_are_addressed_by_step_and_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bits of a step begin at its number times 2^24. Backwards that are added share their signs."""
    model = sharded()
    optimizer = sgd(model)
    front: Any = fsdp2.attach(model, {**NODES, "scheme": "qsdp"}, optimizer=optimizer)
    addresses: list[tuple[int, int]] = []
    bind = gradients.bind

    def bound(codecs: Any, address: int, signs: int) -> Any:
        addresses.append((address, signs))
        return bind(codecs, address, signs)

    monkeypatch.setattr(gradients, "bind", bound)
    for _ in range(2):
        backward(model, last=False)
        backward(model)
        optimizer.step()
        assert front.micro_steps == 2
    first = 1 << 24
    assert addresses == [(0, 0), (0, 0), (1, 0), (1, 0)] + [
        (first, first),
        (first, first),
        (first + 1, first),
        (first + 1, first),
    ]
    backward(model)
    optimizer.zero_grad()  # the step begins anew
    addresses.clear()
    backward(model)
    assert addresses == [(2 * first, 2 * first)] * 2
    addresses.clear()
    one_node = sharded()
    other: Any = attached(one_node, node_size=4)
    other.step = 3
    backward(one_node)
    backward(one_node)
    assert addresses == [(3 * first, 3 * first)] * 2 + [(3 * first + 1, 3 * first + 1)] * 2


def test_plans_follow_from_dtype_precision_scale_and_gradients() -> None:
    front = attached(sharded())
    reduction = reduction_of(front)
    reduction.note_gradients([True, True])
    row = torch.empty(4 * (64 * 64 // 4 + 64 // 4))
    plan = reduction._plan(row, 0.25)
    assert reduction._plan(row, 0.25) is plan
    plans = [plan, reduction._plan(row, 1.0), reduction._plan(row.bfloat16(), 0.25)]
    front.run.state.killed = True
    exact = reduction._plan(row, 0.25)
    plans.append(exact)
    front.run.state.killed = False
    reduction.note_gradients([False, True])
    bias = reduction._plan(torch.empty(64), 0.25)
    assert [param.name for param in bias.rows.params] == ["first.bias"]
    assert len({id(each) for each in (*plans, bias)}) == 5
    assert plan.returned is None
    assert plan.gradient_codecs[0].spec.codecs != exact.gradient_codecs[0].spec.codecs
    # Layers of equal shapes share the tables.
    root = reduction_of(front, 0)
    root.note_gradients([True, True])
    assert root._plan(row, 0.25).sums is plan.sums
    assert root._plan(row, 1.0).sums is plans[1].sums is not plan.sums
    assert error_of(lambda: reduction._plan(torch.empty(68), 0.25)) == (
        "quantized_comm: FSDP2 reduces 68 elements of first where 64 were expected, of its "
        "parameters that have gradients: please report this with the release of torch"
    )


def segments_of(reduction: Any) -> list[dict[str, Any]]:
    reduction.note_gradients([True, True])
    rows = reduction.sharded.reduced_part([True, True])
    codecs = reduced_codecs(reduction._level, rows.params, FP32, full_precision=False)
    return [segment._asdict() for segment in segments.segments_of(rows, codecs)]


def uneven(ranks: Any) -> Any:
    """A layer whose 66 rows of 64 take 17 on three ranks and 15 on the last."""
    model = nn.Linear(64, 66)
    names = ("replica", "shard") if isinstance(ranks[0], Sequence) else ("shard",)
    return fully_shard(model, mesh=DeviceMesh("cpu", ranks, mesh_dim_names=names))


def test_every_rank_sums_its_shard_of_every_gradient() -> None:
    """A row holds 17 x 64 weights and 17 of the bias, whose slots have that length everywhere."""
    row = 17 * 64 + 17
    for node_size, is_plain in ((4, True), (2, False)):
        found = segments_of(reduction_of(attached(uneven(range(4)), node_size=node_size), 0))
        names = ("gradient", "start", "numel", "first", "reducer", "total")
        expected = [
            (0, rank * row, (15 if rank == 3 else 17) * 64, rank * 17 * 64, rank, 0)
            for rank in range(4)
        ]
        assert [tuple(each[name] for name in names) for each in found[:4]] == expected
        expected = [
            (1, rank * row + 17 * 64, 15 if rank == 3 else 17, rank * 17, rank, 17 * 64)
            for rank in range(4)
        ]
        assert [tuple(each[name] for name in names) for each in found[4:]] == expected
        assert {each["tensor"] for each in found} == {0}
        assert [each["slot"] for each in found[:4]] == [17 * 64 if is_plain else 0] * 4
        assert [each["slot"] for each in found[4:]] == [17] * 4
        assert all((each["vector"] is not None) == is_plain for each in found)


def test_with_replicas_nodes_sum_halves_of_every_shard() -> None:
    """Of two ranks in a node each has 33 rows; a node sums the first or second half of them."""
    found = segments_of(reduction_of(attached(uneven(((0, 1), (2, 3)))), 0))
    row = 33 * 64 + 33
    names = ("gradient", "start", "numel", "first", "reducer")
    weights = [tuple(each[name] for name in names) for each in found[:4]]
    half = weights[0][2]
    assert half % 8 == 0 and 0 < half < 33 * 64
    assert weights == [
        (0, 0, half, 0, 0),
        (0, half, 33 * 64 - half, half, 2),
        (0, row, half, 33 * 64, 1),
        (0, row + half, 33 * 64 - half, 33 * 64 + half, 3),
    ]
    bias = [tuple(each[name] for name in names) for each in found[4:]]
    part = bias[0][2]
    assert bias == [
        (1, 33 * 64, part, 0, 0),
        (1, 33 * 64 + part, 33 - part, part, 2),
        (1, row + 33 * 64, part, 33, 1),
        (1, row + 33 * 64 + part, 33 - part, 33 + part, 3),
    ]
    assert {each["tensor"] for each in found} == {0}


def test_detach_gives_fsdp2_its_collectives_and_meshes_back() -> None:
    model = sharded([[0, 1], [2, 3]])
    groups = [torch_names.param_groups(module)[0] for module in (model, model.first)]

    def records() -> list[Any]:
        names = ("_all_gather_comm", "_reduce_scatter_comm", "mesh_info", "post_forward_mesh_info")
        return [getattr(each, name) for each in groups for name in names]

    before = records()
    front = attached(model)
    during = records()
    assert not any(now is then for now, then in zip(during[:3], before[:3], strict=True))
    assert groups[0].mesh_info.replicate_mesh_dim is None
    assert groups[1].post_forward_mesh_info is groups[1].mesh_info
    assert "post_backward" in vars(groups[1])
    front.detach()
    assert all(now is then for now, then in zip(records(), before, strict=True))
    assert not any("post_backward" in vars(each) for each in groups)
    assert "zero_grad" not in vars(model) and "zero_grad" not in vars(model.first)


def test_backwards_cross_between_nodes_unless_another_one_is_declared() -> None:
    def crosses(ranks: Any, *, last: bool, hook: Any = None, **block: Any) -> bool:
        model = sharded(ranks)
        front = attached(model, **block)
        model.first.set_is_last_backward(last)  # the root has not shared its state yet
        reduction_of(front).sharded.group._all_reduce_hook = hook
        return bool(reduction_of(front)._crosses)

    flat, replicas, hook = (0, 1, 2, 3), ((0, 1), (2, 3)), Mock()
    assert crosses(flat, last=True) and crosses(replicas, last=True)
    assert not crosses(flat, last=False) and not crosses(replicas, last=False)
    # A user's hook sees all gradients; that of replicas those of the replicas.
    assert crosses(flat, last=False, hook=hook) and not crosses(replicas, last=False, hook=hook)
    assert crosses(flat, last=False, node_size=4)  # one node
    assert crosses(flat, last=False, gradients={"cross": "micro_step"})


def test_gradients_of_a_dtype_without_codec_are_reduced_by_fsdp2_and_counted() -> None:
    model = nn.Linear(8, 8, dtype=torch.float64)
    fully_shard(model, mesh=DeviceMesh("cpu", [0, 1, 2, 3]))
    ((_, _, of_torch),) = sharded_module.groups_of(model)
    own = Mock(return_value="work")
    front = attached(model)
    reduction = reduction_of(front, 0)
    assert reduction is of_torch._reduce_scatter_comm and "post_backward" not in vars(of_torch)
    reduction._fsdp_reduce_scatter = own
    row, rows = torch.empty(18), torch.empty(72)
    assert reduction(row, rows, "group", "op", True) == "work"
    own.assert_called_once_with(row, rows, "group", "op", True)
    reduction(row, rows, "group", "op")
    own.assert_called_with(row, rows, "group", "op", False)
    received = front.figures()["received_bytes"]["gradients"]
    # In a ring every rank receives three quarters of 72 x 4 bytes, twice.
    assert sum(received.values()) == 2 * 72 * 4 * 3 / 4
    own.allocate.return_value = row
    assert reduction.allocate((18,), dtype=FP32, device=CPU) is row
    own.allocate.assert_called_once_with((18,), dtype=FP32, device=CPU)


def test_a_users_hook_sees_zeros_in_the_padding_and_stays_after_an_error() -> None:
    model = uneven(range(4))
    front: Any = attached(model, "full_precision")
    model.set_all_reduce_hook(Mock())
    reduction = reduction_of(front, 0)
    row = torch.full((17 * 64 + 17,), torch.nan)
    reduction.note_gradients([True, True])
    reduction._begin = reduction._finish = Mock()  # they write all but the padding
    for has_hook in (False, True):
        reduction._has_users_hook = has_hook
        row.fill_(3.0)
        assert reduction(row, torch.ones(4 * row.numel()), None, dist.ReduceOp.AVG) is None
        assert row.unique().tolist() == [0.0 if has_hook else 3.0]
    # FSDP2 fails in this backward: its record has the user's hook again.
    of_torch = reduction.sharded.group
    hook = of_torch._all_reduce_hook
    other = sharded([[0, 1], [2, 3]])
    failing = reduction_of(attached(other)).sharded.group
    failing._all_reduce_hook = hook
    failing.reshard = Mock(side_effect=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        failing.post_backward()
    assert failing._all_reduce_hook is hook


def test_ranges_of_the_profiler_name_the_module() -> None:
    model = sharded()
    attached(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        backward(model)
    names = {event.name for event in profile.events()}
    assert {"ds_quant::reduce first", "ds_quant::reduce the root"} <= names


def test_parameters_without_a_gradient_in_the_last_backward_get_one_of_zeros() -> None:
    model = sharded()
    optimizer = sgd(model)
    front: Any = fsdp2.attach(model, {**NODES, "scheme": "qsdp"}, optimizer=optimizer)
    reduction = reduction_of(front)
    weight, bias = reduction.sharded.members
    backward(model, last=False)
    weight._unsharded_param.grad = torch.ones(64, 64)
    reduction._give_zero_gradients()
    zeros = torch_names.waiting_gradient(bias)
    assert zeros is not None and zeros.tolist() == [0.0] * 64
    assert weight._unsharded_param.grad.unique().tolist() == [1.0]
    torch_names.drop_gradient(weight)
    torch_names.drop_gradient(bias)
    model.first.bias.requires_grad_(False)
    seen: list[Any] = []
    plan = reduction._plan

    def planned(gradients: Tensor, scale: float) -> Any:
        seen.append((reduction._has_gradient, gradients.dtype))
        return plan(gradients, scale)

    reduction._plan = planned
    backward(model)
    assert seen == [((True, True), FP32)]
    assert not front.has_waiting_gradients()
    both = [weight, bias]
    assert reduction._reduced(both) == []
    assert reduction._dtype_of_gradients() == FP32
    bias._unsharded_param.grad_dtype = BF
    bias._unsharded_param.grad = torch.zeros(64, dtype=BF)
    assert reduction._reduced(both) == [bias]
    assert reduction._dtype_of_gradients() == BF
    weight._unsharded_param.grad = torch.zeros(64, 64)
    assert reduction._reduced(both) == both and reduction._dtype_of_gradients() == FP32
    torch_names.drop_gradient(weight)
    torch_names.drop_gradient(bias)
    assert reduction._dtype_of_gradients() == FP32
    reduction.sharded.group.reduce_scatter_unused_params = True
    weight._unsharded_param.requires_grad_(True)
    bias._unsharded_param.requires_grad_(False)
    assert reduction._reduced(both) == [weight]


def test_replicated_modules_keep_whole_gradients_until_the_last_backward() -> None:
    """FSDP2 is asked not to reduce while another backward is declared, also after an error."""
    model = sharded([[0], [1], [2], [3]])
    optimizer = sgd(model)
    front: Any = fsdp2.attach(
        model, {**NODES, "node_size": 1, "scheme": "qsdp"}, optimizer=optimizer
    )
    reduction = reduction_of(front)
    of_torch = reduction.sharded.group
    asked: list[bool] = []

    def reduce(*given: Any) -> None:
        asked.append(of_torch.reduce_grads)
        if given:
            raise ZeroDivisionError

    model.first.set_is_last_backward(False)
    reduction._reduce_or_keep(reduce)
    assert asked == [False] and of_torch.reduce_grads is True
    assert not front.has_waiting_gradients()  # no gradient was there
    with pytest.raises(ZeroDivisionError):
        reduction._reduce_or_keep(reduce, "unused")
    assert asked == [False, False] and of_torch.reduce_grads is True
    backward(model, last=False)
    assert waiting_in(front) == ["the root", "first"]
    weight, bias = reduction.sharded.members

    def held(member: Any) -> bool:
        """Compared as booleans: torch cannot print the parameters, whose memory is freed."""
        return torch_names.waiting_gradient(member) is not None

    assert held(weight) and held(bias)
    front.discard_gradients({id(model.first.weight)})
    assert not held(weight) and held(bias)
    assert waiting_in(front) == ["the root", "first"]
    front.discard_gradients({id(model.first.bias)})
    assert not held(bias)
    assert waiting_in(front) == ["the root"]
    front.discard_gradients()
    assert not front.has_waiting_gradients()
    asked.clear()
    of_torch.reduce_grads = False
    reduction._reduce_or_keep(reduce)
    of_torch.reduce_grads = True
    model.set_is_last_backward(True)
    reduction._reduce_or_keep(reduce)
    assert asked == [False, True] and of_torch.reduce_grads is True


def test_sums_of_dropped_gradients_leave_the_others() -> None:
    model = sharded()
    front = attached(model)
    reduction = reduction_of(front)
    backward(model, last=False)
    ((plan, sums),) = reduction._partial_sums.items()
    sums.drop = Mock(wraps=sums.drop)
    model.first.weight.grad = None
    front.discard_gradients({id(model.first.weight), id(model.head.weight)})
    sums.drop.assert_called_once_with([0])
    assert reduction._reductions == 1
    assert sums.members_without_gradient() == [0] and sums.versions[0] == -1
    assert not sums.was_written()
    model.first.bias.grad.add_(0)
    assert sums.was_written()
    sums.note_versions()
    assert not sums.was_written()
    model.first.weight.grad = torch.zeros_like(model.first.weight)  # made since
    assert sums.was_written()
    model.first.bias.grad = None
    model.first.weight.grad = None
    assert not sums.was_written()
    held = front.context.partial_sums.nbytes
    assert reduction.holds_partial_sums is False and reduction._partial_sums == {}
    assert front.context.partial_sums.nbytes == held - sums.values.nbytes
    front.discard_gradients({id(parameter) for parameter in model.first.parameters()})
    assert (reduction_of(front, 0)._reductions, reduction._reductions) == (1, 0)


# ---- the end of a front ----


def test_a_front_on_a_device_waits_for_it_before_its_copies_are_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    synchronize = Mock()
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    attached(sharded()).detach()
    synchronize.assert_not_called()
    front = attached(sharded())
    front.run.device = torch.device("cuda")
    front.detach()
    synchronize.assert_called_once_with(torch.device("cuda"))


@pytest.mark.parametrize("ended_by", ["", "ranks have stepped alone"])
def test_a_front_that_is_freed_waits_for_messages_that_will_arrive(ended_by: str) -> None:
    front = attached(sharded())
    front.copies = Mock()
    front.context.partial_sums = Mock()
    front._forwards.ended_by = ended_by
    front.__del__()
    waits = [] if ended_by else [((), {})]
    assert front.copies.finish.call_args_list == waits
    assert front.context.partial_sums.wait.call_args_list == waits
    front.copies.finish.side_effect = RuntimeError
    front.__del__()


def test_gradients_count_as_reduced_until_all_trained_ones_are_dropped() -> None:
    model = sharded()
    front = attached(model)
    steps = front._optimizers
    biases = {id(model.first.bias), id(model.head.bias)}
    backward(model)
    front.discard_gradients(biases)
    assert steps.has_reduced
    model.first.weight.requires_grad_(False)
    model.head.weight.requires_grad_(False)
    front.discard_gradients({id(model.first.bias)})
    assert steps.has_reduced
    front.discard_gradients(biases)
    assert not steps.has_reduced
    front._after_reduction()
    assert steps.has_reduced
    front.discard_gradients()
    assert not steps.has_reduced


# ---- meshes ----


def of_first(ranks: Any, **options: Any) -> Any:
    """Return FSDP2's record of a layer that is sharded over a mesh."""
    return torch_names.param_groups(sharded(ranks, **options).first)[0]


def ranks_in(process_group: Any) -> list[int]:
    return dist.get_process_group_ranks(process_group)


@pytest.mark.parametrize(
    ("ranks", "in_order", "shards", "shard_group", "replica_group"),
    [
        ((0, 1, 2, 3), (0, 1, 2, 3), 4, [0, 1, 2, 3], None),
        ((0, 2), (0, 2), 2, [0, 2], None),
        ((0,), (0,), 1, [0], None),
        (((0, 1), (2, 3)), (0, 1, 2, 3), 2, [0, 1], [0, 2]),
        (((0, 2), (1, 3)), (0, 2, 1, 3), 2, [0, 2], [0, 1]),
        (((0, 1, 2, 3),), (0, 1, 2, 3), 4, [0, 1, 2, 3], None),
        (((0,), (1,), (2,), (3,)), (0, 1, 2, 3), 1, [0], [0, 1, 2, 3]),
    ],
)
def test_a_mesh_has_the_ranks_of_its_replicas_and_shards(
    ranks: Any, in_order: Any, shards: int, shard_group: list[int], replica_group: Any
) -> None:
    found = mesh_of_group(of_first(ranks))
    assert found.key == (in_order, shards) == (found.ranks, found.shards)
    assert found.replicas == len(in_order) // shards and found.device == CPU
    assert ranks_in(found.shard_group) == shard_group
    assert (found.replica_group and ranks_in(found.replica_group)) == replica_group
    assert found.is_replicated == (shards == 1 and len(in_order) > 1)
    assert found.has_node_replicas == (shards > 1 and len(in_order) > shards)
    groups = [shard_group] if replica_group is None else [shard_group, replica_group]
    assert [ranks_in(each) for each in found.process_groups] == groups


def test_a_mesh_of_replicate_has_replicas_of_one_rank() -> None:
    replicate = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp").replicate
    model: Any = Net()
    replicate(model, mesh=DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("replica",)))
    (found,) = [mesh_of_group(of_model) for _, _, of_model in sharded_module.groups_of(model)]
    assert found.key == ((0, 1, 2, 3), 1) and found.is_replicated and found.shard_group is None
    assert [ranks_in(each) for each in found.process_groups] == [[0, 1, 2, 3]]


def test_the_ranks_of_a_model_are_those_of_its_largest_mesh() -> None:
    pairs, all_ranks = of_first((0, 1)), of_first((0, 1, 2, 3))
    found = meshes_of([("a", pairs), ("b", all_ranks), ("c", of_first((0, 1)))])
    assert found is not None
    assert [each.ranks for each in found.each] == [(0, 1), (0, 1, 2, 3)]
    assert found.ranks == (0, 1, 2, 3) and found.device == CPU and found.replicas == 1
    assert [ranks_in(each) for each in found.process_groups] == [[0, 1, 2, 3]]
    assert not found.has_one and not found.is_part
    replicas = meshes_of([("", of_first(((0, 1), (2, 3))))])
    assert replicas is not None and replicas.has_one and replicas.replicas == 2
    half = meshes_of([("", pairs)])
    assert half is not None and half.has_one and half.is_part
    # Modules on one rank count only where all are.
    alone = of_first((0,))
    both = meshes_of([("a", alone), ("b", pairs)])
    assert both is not None and [each.ranks for each in both.each] == [(0, 1)]
    only = meshes_of([("a", alone), ("b", of_first((0,)))])
    assert only is not None and [each.ranks for each in only.each] == [(0,)]
    assert meshes_of([]) is None


def test_tensor_parallelism_makes_the_ranks_of_a_model_more_than_a_mesh() -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("fsdp", "tp"))
    model = nn.Linear(8, 8)
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["fsdp"])
    found = meshes_of((name, each) for name, _, each in sharded_module.groups_of(model))
    assert found is not None
    assert [each.ranks for each in found.each] == [(0, 2)] and found.ranks == (0, 1, 2, 3)
    assert not found.has_one
    groups = [ranks_in(each) for each in found.process_groups]
    assert sorted(groups) == [[0, 1], [0, 2]]


def test_meshes_that_no_other_one_joins_are_named() -> None:
    with pytest.raises(AttachError) as refused:
        meshes_of([("a", of_first((0, 1, 2))), ("b", of_first((0, 3)))])
    assert str(refused.value) == (
        "quantized_comm: module b has a mesh of ranks [0, 3], and another module one of ranks "
        "[0, 1, 2]: give both a mesh of one init_device_mesh that holds all these ranks"
    )


def test_all_ranks_of_a_model_take_the_least_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def all_reduce(votes: Tensor, *, op: Any, group: Any) -> None:
        asked.append((op, group, votes.tolist()))
        votes.copy_(torch.minimum(votes, torch.tensor([3, 9])))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    rows: Any = ["rows", "columns"]
    found = Meshes(each=[mesh([0, 1], 2)], ranks=(0, 1, 2, 3), process_groups=rows)
    assert found.least([5, 4]) == [3, 4]
    least = dist.ReduceOp.MIN
    assert asked == [(least, "rows", [5, 4]), (least, "columns", [3, 4])]


def test_a_run_has_a_level_for_every_mesh_and_votes_with_all_ranks() -> None:
    model = Net()
    fully_shard(model.first, mesh=DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("r", "s")))
    fully_shard(model, mesh=DeviceMesh("cpu", [0, 1, 2, 3]))
    front = attached(model)
    root, first = front.run.levels
    assert [served.sharded.level for served in front.served] == [root, first]
    assert (root.replicas, root.num_shards, first.replicas, first.num_shards) == (1, 4, 2, 2)
    assert root.routes.stage == first.routes.stage == 3
    assert not root.routes.replicas and first.routes.replicas
    assert list(front.run.votes.ranks) == [0, 1, 2, 3]
    names = ["head.weight", "head.bias", "first.weight", "first.bias"]
    assert [param.name for param in front.run.params] == names
    replicated = attached(sharded([[0], [1], [2], [3]]), node_size=1)
    (level,) = replicated.run.levels
    assert level.routes.stage == 0 and not level.routes.replicas
    assert (level.replicas, level.num_shards) == (4, 1)
    assert replicated.served[0].sharded.is_replicated


def test_modules_on_one_rank_are_noticed() -> None:
    model = Net()
    fully_shard(model.first, mesh=DeviceMesh("cpu", [0]))
    fully_shard(model, mesh=DeviceMesh("cpu", [0, 1, 2, 3]))
    front = attached(model)
    assert (
        "1 module(s), such as first, have a mesh of one rank: nothing of them is sent"
        in front.run.notices
    )
    assert [served.sharded.title for served in front.served] == ["the root"]


# ---- names of torch ----


@pytest.mark.parametrize(
    ("version", "is_untried"),
    [("2.10.0", False), ("2.15.3+cu132", False), ("2.16.0.dev20261128", True), ("3.0.0", True)],
)
def test_a_newer_torch_than_all_that_were_tried_is_noted(
    version: str, is_untried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    message = f"torch {version} is newer than 2.15, the last that FSDP2 was tried with"
    notices = attached(sharded()).run.notices
    assert [each for each in notices if "torch" in each] == [message] * is_untried


def test_modules_of_fsdp2_export_what_they_list() -> None:
    found: dict[str, Any] = {}
    exec("from ds_quant.fsdp2 import *", found)
    assert found.keys() - {"__builtins__"} == {"attach"}
    exec("from ds_quant.fsdp2.torch_names import *", found)
    defined = {
        name
        for name, value in vars(torch_names).items()
        if getattr(value, "__module__", "") == torch_names.__name__ and not name.startswith("_")
    }
    assert {"AllGather", "ReduceScatter"} | defined <= found.keys()


class RecordBefore:
    """A record of a parameter before torch 2.15: a gradient of another dtype lies beside it."""

    def __init__(self, gathered: Any) -> None:
        self._unsharded_param = gathered
        self.unsharded_accumulated_grad: Tensor | None = None


class Record:
    """A record of a parameter from torch 2.15 on."""

    def __init__(self, gathered: Any) -> None:
        self._unsharded_param = gathered

    @property
    def unsharded_accumulated_grad(self) -> Tensor | None:
        return self._unsharded_param.grad


def test_before_torch_2_15_a_gradient_of_another_dtype_waits_beside_the_parameter() -> None:
    record: Any = RecordBefore(parameter(FP32))
    assert torch_names.waiting_gradient(record) is None
    torch_names.give_zero_gradient(record, BF)
    waiting = torch_names.waiting_gradient(record)
    assert waiting is record.unsharded_accumulated_grad is not None
    assert waiting.dtype == BF and waiting.tolist() == [0.0, 0.0] and not waiting.requires_grad
    assert record._unsharded_param.grad is None
    torch_names.drop_gradient(record)
    assert torch_names.waiting_gradient(record) is None
    record._unsharded_param.grad = torch.ones(2)
    assert torch_names.waiting_gradient(record) is record._unsharded_param.grad
    torch_names.drop_gradient(record)
    assert torch_names.waiting_gradient(record) is None
    del record._unsharded_param  # before the first gather
    record.unsharded_accumulated_grad = torch.ones(2)
    assert torch_names.waiting_gradient(record) is None
    torch_names.drop_gradient(record)
    assert record.unsharded_accumulated_grad is None


@pytest.mark.parametrize(
    ("grad_dtype", "given"), [("unset", FP32), (BF, BF), (None, FP32)], ids=str
)
def test_from_torch_2_15_on_the_gathered_parameter_has_the_gradient_that_waits(
    grad_dtype: Any, given: torch.dtype
) -> None:
    record: Any = Record(parameter(FP32))
    if grad_dtype != "unset":
        record._unsharded_param.grad_dtype = grad_dtype
    torch_names.give_zero_gradient(record, FP16)  # the module's gradients may have several dtypes
    waiting = torch_names.waiting_gradient(record)
    assert waiting is record._unsharded_param.grad is not None
    assert waiting.dtype == given and waiting.tolist() == [0.0, 0.0] and not waiting.requires_grad
    torch_names.drop_gradient(record)
    assert torch_names.waiting_gradient(record) is None
    del record._unsharded_param
    torch_names.drop_gradient(record)
    assert torch_names.waiting_gradient(record) is None


@pytest.mark.parametrize("kind", [RecordBefore, Record])
def test_fsdp2_reduces_gradients_that_wait_and_zeros_where_the_user_asks_for_them(
    kind: type[Any],
) -> None:
    trained, frozen, with_gradient, not_gathered = [kind(parameter(FP32)) for _ in range(4)]
    frozen._unsharded_param.requires_grad_(False)
    with_gradient._unsharded_param.grad = torch.zeros(2)
    del not_gathered._unsharded_param
    records = [trained, frozen, with_gradient, not_gathered]
    before_2_13 = Mock(spec=[])
    assert torch_names.will_reduce(before_2_13, records) == [False, False, True, False]
    for of_unused in (False, True):
        group: Any = Mock(reduce_scatter_unused_params=of_unused)
        assert torch_names.will_reduce(group, records) == [of_unused, False, True, False]
    beside: Any = RecordBefore(parameter(FP32))
    beside.unsharded_accumulated_grad = torch.zeros(2, dtype=BF)
    assert torch_names.will_reduce(before_2_13, [beside]) == [True]


@pytest.mark.parametrize(
    ("policy", "grad_dtype", "before", "since"),
    [
        ({}, "unset", FP32, FP32),
        ({"param_dtype": BF}, "unset", BF, FP32),
        ({"param_dtype": BF}, FP16, BF, FP16),
        ({"param_dtype": BF}, None, BF, BF),
        ({}, None, FP32, FP32),
        ({"param_dtype": BF, "reduce_dtype": FP16}, "unset", FP16, FP16),
        ({"param_dtype": BF, "reduce_dtype": FP16}, BF, FP16, FP16),
    ],
)
def test_a_gradient_is_reduced_in_the_dtype_of_the_release(
    policy: dict[str, Any], grad_dtype: Any, before: torch.dtype, since: torch.dtype
) -> None:
    for kind, expected in ((RecordBefore, before), (Record, since)):
        record: Any = kind(None)
        record.mp_policy = MixedPrecisionPolicy(**policy)
        record.sharded_param = parameter(FP32)
        if grad_dtype != "unset":
            record.sharded_param.grad_dtype = grad_dtype
        assert torch_names.reduced_dtype(record) == expected


def test_a_backward_that_the_loop_ends_needs_no_declaration() -> None:
    model = sharded()
    model.set_is_last_backward(False)
    assert not torch_names.is_last_backward(model)
    model._get_fsdp_state()._state_ctx.manual_backward_finalization = True  # torch 2.15
    assert torch_names.is_last_backward(model)


def test_a_reduction_has_its_gradients_in_the_order_of_fsdp2() -> None:
    """From torch 2.15 on those of one dtype follow each other."""
    front = attached(sharded())
    (module, *_) = [served.sharded for served in front.served if served.sharded.name == "first"]
    group: Any = module.group
    before = Mock(spec=["fsdp_params"], fsdp_params=["a", "b", "c"])
    assert list(torch_names.reduction_order(before)) == [0, 1, 2]
    group._reduce_scatter_param_indices = []  # before the first forward
    assert module.reduced_part([True, True]).widths == module.widths
    group._reduce_scatter_param_indices = [1, 0]
    both = module.reduced_part([True, True])
    assert both.members == module.members[::-1] and both.params == module.params[::-1]
    assert both.widths == module.widths[::-1] and both.lengths == module.lengths[::-1]
    assert both.offsets == [0, module.widths[1]]
    assert module.reduced_part([True, False]).members == module.members[:1]
    assert module.reduced_part([False, True]).dtypes == module.dtypes[1:]


def test_a_release_of_torch_with_one_group_of_parameters_is_read() -> None:
    def module(**state: Any) -> Any:
        return Mock(_get_fsdp_state=lambda: Mock(spec=list(state), **state))

    assert torch_names.param_groups(module(_fsdp_param_groups=["a", "b"])) == ["a", "b"]
    assert torch_names.param_groups(module(_fsdp_param_group="a")) == ["a"]
    assert torch_names.param_groups(module(_fsdp_param_group=None)) == []


def test_weights_are_gathered_again_for_the_backward_where_fsdp2_drops_them() -> None:
    def again(*, outermost: bool = True, run: bool = False, **options: Any) -> bool:
        model = sharded(**options)
        if run:
            model(torch.ones(2, 64))
        (_, module, of_module), *_ = sharded_module.groups_of(model)
        return torch_names.is_gathered_again(module, of_module, is_outermost=outermost)

    assert not again() and not again(run=True)  # a root keeps its weights
    assert again(outermost=False)
    assert again(reshard_after_forward=True) and again(reshard_after_forward=True, run=True)
    assert not again(reshard_after_forward=False)
    assert not again(outermost=False, reshard_after_forward=False)
    assert not again(reshard_after_forward=2)
    sizes = [
        torch_names.ranks_of_backward(of_first((0, 1, 2, 3), reshard_after_forward=value))
        for value in (True, False, 2)
    ]
    assert sizes == [None, None, 2]


def test_calls_before_forwards_run_once_per_forward_until_they_are_undone() -> None:
    model = sharded()
    states = [module._get_fsdp_state() for module in (model, model.first)]
    call = Mock()
    undo = [torch_names.before_forwards(module, call) for module in (model, model.first)]
    seen: list[bool] = []
    model.first.register_forward_hook(lambda *_: seen.append(torch_names.in_forward(model)))
    assert not torch_names.in_forward(model) and not torch_names.in_backward()
    model(torch.ones(2, 64))
    assert call.call_count == 1 and seen == [True] and not torch_names.in_forward(model)
    model.first(torch.ones(2, 64))
    assert call.call_count == 2
    in_backward: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: in_backward.append(torch_names.in_backward()))
    x.sum().backward()
    assert in_backward == [True] and not torch_names.in_backward()
    for each in (*undo, *undo):
        each()
    assert not any("_root_pre_forward" in vars(state) for state in states)
    model(torch.ones(2, 64))
    assert call.call_count == 2


def test_the_record_of_a_mesh_without_replicas_keeps_its_shards() -> None:
    of_replicas = of_first(((0, 1), (2, 3))).mesh_info
    found = torch_names.without_replicas(of_replicas)
    assert torch_names.replicas_of(of_replicas) is not None
    assert torch_names.replicas_of(found) is None and found.replicate_mesh_dim is None
    assert torch_names.shard_group(found) is torch_names.shard_group(of_replicas)
    assert found.mesh is of_replicas.mesh and found.shard_mesh_dim == of_replicas.shard_mesh_dim
    shards = of_first((0, 1, 2, 3))
    assert torch_names.uses_torch_collectives(shards)
    for name in ("_all_gather_comm", "_reduce_scatter_comm"):
        kept = getattr(shards, name)
        setattr(shards, name, Mock())
        assert not torch_names.uses_torch_collectives(shards)
        setattr(shards, name, kept)


# ---- records of parameters ----


def test_parameters_have_a_record_while_sharded_gathered_or_replaced() -> None:
    """Modules come in their order, the root first; numbers are those of ``named_parameters``."""
    expected = [
        (2, "head.weight", (64, 64), True, False),
        (3, "head.bias", (64,), True, False),
        (0, "first.weight", (64, 64), False, True),
        (1, "first.bias", (64,), True, True),
    ]
    for state in ("sharded", "gathered", "replaced"):
        model = sharded()
        model.first.W_q = None  # as a layer of packed bits of HQQ has
        if state == "gathered":
            model(torch.ones(2, 64))  # the root stays gathered
            model.first.unshard()
        if state == "replaced":
            for name, held in list(model.first.named_parameters()):
                setattr(model.first, name, nn.Parameter(held.detach() * 0.5))
        record, _ = torch_names.param_groups(model.first)[0].fsdp_params
        record.sharded_param.requires_grad_(False)
        if state == "replaced":
            model.first.weight.requires_grad_(False)
        front: Any = fsdp2.attach(model, {**NODES, "scheme": "qsdp"}, optimizer=[])
        params = front.run.params
        found = [(p.index, p.name, p.shape, p.trained, p.packed) for p in params]
        assert found == expected, state
        members = [member for served in front.served for member in served.sharded.members]
        assert all(
            param.tensor is member.sharded_param
            for param, member in zip(params, members, strict=True)
        )
        outermost = [served.sharded.is_outermost for served in front.served]
        assert outermost == [True, False]
    unwrapped = Net()
    for layer in unwrapped.children():
        fully_shard(layer, mesh=DeviceMesh("cpu", [0, 1, 2, 3]))
    front = attached(unwrapped)
    assert [served.sharded.is_outermost for served in front.served] == [True, True]
    assert [served.sharded.title for served in front.served] == ["first", "head"]


def test_modules_that_share_a_call_of_fully_shard_or_a_parameter_are_listed_once() -> None:
    model = Net()
    mesh_of_all = DeviceMesh("cpu", [0, 1, 2, 3])
    fully_shard([model.first, model.head], mesh=mesh_of_all)  # type: ignore[arg-type]
    front = attached(fully_shard(model, mesh=mesh_of_all))
    (served,) = front.served
    assert served.sharded.title == "first"
    names = [param.name for param in served.sharded.params]
    assert names == ["first.weight", "first.bias", "head.weight", "head.bias"]
    tied = Net()
    tied.head.weight = tied.first.weight
    front = attached(fully_shard(tied, mesh=mesh_of_all))
    names = [param.name for param in front.run.params]
    assert names == ["first.weight", "first.bias", "head.bias"]
    assert [param.index for param in front.run.params] == [0, 1, 2]


def test_levels_are_learned_from_shards_without_padding_as_they_are_sent() -> None:
    model = uneven(range(4))
    front = attached(model)
    (served,) = front.served
    level = Mock(shards=Mock(rank=3, flat="ranks"), routes=Mock(sends_weights=True))
    replicas = replace(served.sharded, level=Mock(routes=Mock(sends_weights=False)))
    stock = replace(served.sharded, fsdp_gathers="float64")
    sent = replace(served.sharded, level=level, dtypes=(BF, BF))
    front._modules = [replicas, stock, sent]
    found = list(front._own_values())
    assert [(param.name, values.shape, values.dtype, ranks) for param, values, ranks in found] == [
        ("weight", (15 * 64,), BF, "ranks"),
        ("bias", (15,), BF, "ranks"),
    ]
    held = model.weight.to_local().flatten()[: 15 * 64]
    assert torch.equal(found[0][1], held.to(BF))
