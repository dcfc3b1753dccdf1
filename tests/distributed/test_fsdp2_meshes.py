"""FSDP2 beside tensor and expert parallelism: other meshes than one dimension over all ranks."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import ds_quant
from ds_quant import fsdp2
from ds_quant.comm.topology import PlacementError, Topology
from ds_quant.config.errors import ConfigError
from tests import needs
from tests.distributed.fsdp2_meshes import (
    SETUPS,
    Setup,
    Trained,
    assert_copies_are_equal,
    assert_trains_alike,
    block_of,
    dense,
    full_weights,
    mesh_of,
    mixture,
    take_backward,
    tensor_parallel_inside,
    three_dimensions,
    train,
)
from tests.distributed.harness import of_all_ranks, on_ranks, scratch
from tests.thin import thinned

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LOSSY = "eden4", "qsdp", "sdp4bit", "lossless_w_g3"
# Elements of ``Net`` that a rank and its mesh have, with two ranks of tensor parallelism.
PART_NUMEL = 2 * (65 * 64 + 65 + 64 * 65 + 64 + 2 * 64) + 12 * 64 + 12
TP_INSIDE = SETUPS["tp inside a node"]


def needs_groups(title: str) -> None:
    if title == "two groups":
        needs.torch("2.13", "has one group of parameters per module")


# ---- training ----


# Left to test-all: a mesh that lies in one node, and experts that no other rank shares.
SLOW_SETUPS = ("tp in one node", "experts on one rank")
# What make test trains in all ways: no node holds a whole dimension; and meshes of two sizes.
QUICK = ("tp around", "experts apart")


@pytest.mark.parametrize(
    ("title", "micro_steps"),
    thinned(
        product(SETUPS, (1, 2)),
        lambda title, micro_steps: (
            title not in SLOW_SETUPS and micro_steps == (2 if title in QUICK else 1)
        ),
    ),
)
@on_ranks(4, timeout=200)
def test_full_precision_trains_as_fsdp2_alone(title: str, micro_steps: int) -> None:
    needs_groups(title)
    setup = SETUPS[title]
    plain = train(setup, None, micro_steps=micro_steps)
    found = train(setup, block_of(setup, "full_precision"), micro_steps=micro_steps)
    assert_trains_alike(found, plain, exactly=setup.pairs and micro_steps == 1)
    assert found.front.step == 5 and found.front.micro_steps == micro_steps


@pytest.mark.parametrize(
    ("title", "schemes"),
    thinned(
        [
            ("tp around", LOSSY[:1]),
            ("experts apart", LOSSY[1:2]),
            *((title, LOSSY) for title in SETUPS),
        ],
        lambda _, schemes: len(schemes) == 1,
    ),
)
@on_ranks(4, timeout=300)
def test_schemes_train_near_fsdp2_alone(title: str, schemes: tuple[str, ...]) -> None:
    needs_groups(title)
    setup = SETUPS[title]
    plain = train(setup, None, policy=BF16)
    learned = plain.losses[0] - plain.losses[-1]
    assert learned > 0.2
    for scheme in schemes:
        found = train(setup, block_of(setup, scheme), policy=BF16)
        for expected, loss in zip(plain.losses, found.losses, strict=True):
            assert abs(loss - expected) < 0.2 * learned, (scheme, found.losses, plain.losses)
        assert found.losses != plain.losses, scheme


@pytest.mark.slow
@on_ranks(8)
def test_replicas_of_shards_of_tensor_parallel_parameters() -> None:
    """Two replicas of two shards, each over two ranks of tensor parallelism."""
    setup = Setup(three_dimensions, source=lambda rank: rank // 2, node_size=4)
    plain = train(setup, None)
    found = train(setup, block_of(setup, "full_precision"))
    assert_trains_alike(found, plain, exactly=False)
    assert "2 replicas of 2 of 8 ranks" in found.front.line
    for scheme in ("eden4", "qsdp"):
        found = train(setup, block_of(setup, scheme))
        assert found.losses == pytest.approx(plain.losses, abs=0.3)
        mesh = mesh_of((2, 2, 2), "replica", "fsdp", "tp")
        assert_copies_are_equal(found, mesh["tp"])
        for shard in found.shards.values():  # replicas hold equal bits
            total = shard.double().sum()
            totals = [torch.empty_like(total) for _ in range(2)]
            dist.all_gather(totals, total, group=mesh["replica"].get_group())
            assert totals[0] == totals[1]


# ---- tensor parallelism ----


@pytest.mark.parametrize(
    "title",
    thinned(
        [title for title in SETUPS if title.startswith("tp")],
        lambda title: title not in SLOW_SETUPS,
    ),
)
@on_ranks(4)
def test_parameters_that_tensor_parallelism_copies_keep_equal_bits(title: str) -> None:
    """Random bits depend on the place in the mesh, not on the rank in the job."""
    setup = SETUPS[title]
    for scheme in ("eden4", "qsdp"):
        found = train(setup, block_of(setup, scheme))
        names = ("tp", "fsdp") if title == "tp around" else ("fsdp", "tp")
        assert_copies_are_equal(found, mesh_of((2, 2), *names)["tp"])


@on_ranks(4, timeout=60)
def test_an_error_on_one_rank_of_tensor_parallelism_ends_all_ranks() -> None:
    """The others would wait for it in a collective of tensor parallelism."""
    found = train(TP_INSIDE, block_of(TP_INSIDE, "qsdp", payload_checksum=True), steps=1)
    errors = found.front.run.message_errors
    take_backward(found, TP_INSIDE, 1)
    if dist.get_rank() == 2:
        changed = torch.ones(2, 1, dtype=torch.bool)
        flat = found.front.run.world.hierarchy.flat
        errors.note("gradients", flat.ranks, changed, lambda row: "was changed on its way to {}")
    with pytest.raises(RuntimeError, match="step 1: gradients from rank 0 was changed .* to 2"):
        found.optimizer.step()


@on_ranks(4, timeout=60)
def test_a_step_that_one_rank_of_tensor_parallelism_skips_ends_all_ranks() -> None:
    found = train(TP_INSIDE, block_of(TP_INSIDE, "eden4"), steps=1)
    take_backward(found, TP_INSIDE, 1)
    if dist.get_rank() != 3:
        found.optimizer.step()
    with pytest.raises(RuntimeError, match="have taken 1 steps on some ranks and 2 on others"):
        take_backward(found, TP_INSIDE, 2)
        take_backward(found, TP_INSIDE, 3)


@on_ranks(4)
def test_copies_that_differ_on_one_rank_are_named_and_filled() -> None:
    block = block_of(TP_INSIDE, "eden4", checksum_steps=1, gradients={"enabled": False})
    found = train(TP_INSIDE, block, steps=2)
    run = found.front.run
    assert run.state.resyncs == 0
    rows = found.front.copies.rows()
    if dist.get_rank() == 3:
        rows[0].add_(1)
    take_backward(found, TP_INSIDE, 5)
    found.optimizer.step()
    assert run.state.resyncs == 1


@on_ranks(4)
def test_a_write_on_one_rank_reaches_the_mesh_and_no_other() -> None:
    """Rank 2 shares its parameters with rank 0; ranks 1 and 3 hold other parts."""
    found = train(TP_INSIDE, block_of(TP_INSIDE, "hybrid"), steps=1)
    plain = train(TP_INSIDE, None, steps=1)
    for trained in (found, plain):
        parameter = trained.model.first.up.weight
        with torch.no_grad():
            if dist.get_rank() == 2:
                parameter.to_local().mul_(2)
    for seed in (1, 2):
        for trained in (found, plain):
            take_backward(trained, TP_INSIDE, seed)
            trained.optimizer.step()
    assert_trains_alike(found, plain, exactly=True)


@on_ranks(4)
def test_figures_are_those_of_the_part_that_a_rank_has() -> None:
    found = train(TP_INSIDE, block_of(TP_INSIDE, "eden4"))
    figures = ds_quant.report(found.model)
    assert figures is not None
    assert figures["world"] == 4 and figures["node_size"] == 2
    assert figures["params"] == PART_NUMEL
    assert "; 2 x 1 of 4 ranks; " in figures["line"]
    (level,) = figures["levels"]
    assert level["ranks"] == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    assert (level["nodes"], level["node_size"], level["replicas"]) == (2, 1, 1)


@on_ranks(4)
def test_one_rank_per_node_is_priced_by_the_part_that_a_rank_has() -> None:
    block = block_of(TP_INSIDE, "eden4", allow_full_replica=False)
    model = tensor_parallel_inside()
    with pytest.raises(ConfigError, match=f"part of the model, {4 * PART_NUMEL / 1e9:.3g} GB"):
        fsdp2.attach(model, block, optimizer=[])


def test_a_mesh_takes_as_many_ranks_of_every_node() -> None:
    job = Topology(world=8, node_size=4)
    assert job.part([0, 2, 4, 6]) == Topology(world=4, node_size=2, ranks=(0, 2, 4, 6))
    assert job.part(range(8)) is job
    for ranks in ([0, 1, 4], [0, 4, 1, 5], [1, 2, 3, 4, 5]):
        with pytest.raises(PlacementError, match="as many ranks of every node"):
            job.part(ranks)


@on_ranks(4, timeout=60)
def test_a_mesh_of_unequal_nodes_is_refused_on_all_ranks() -> None:
    """Ranks 0 to 2 share experts, rank 3 has its own."""
    three = DeviceMesh("cpu", [0, 1, 2])
    one = DeviceMesh("cpu", [3])
    model = mixture(mesh_of((4,), "dp"), one if dist.get_rank() == 3 else three, 1)
    with pytest.raises(RuntimeError, match='rank 3: mesh="1 x 4" .rank 0: "1 x 4, 1 x 3"'):
        fsdp2.attach(model, {"scheme": "qsdp", "node_size": 2}, optimizer=[])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["qsdp", "eden4"])
@on_ranks(6, timeout=120)
def test_meshes_of_equal_size_on_other_nodes_are_refused_on_all_ranks(scheme: str) -> None:
    """Ranks 2 and 3 lie on two nodes, the other pairs on one."""
    experts = mesh_of((3, 2), "ep", "fsdp")["fsdp"]
    model = mixture(mesh_of((6,), "dp"), experts, dist.get_rank() // 2)
    said = "others lie on other numbers of nodes|mesh of another rank|part of the model"
    with pytest.raises(ConfigError, match=said):
        fsdp2.attach(model, {"scheme": scheme, "node_size": 3}, optimizer=[])


# ---- several meshes ----


@on_ranks(4)
def test_every_mesh_is_priced_and_counted() -> None:
    setup = SETUPS["experts apart"]
    block = block_of(setup, "full_precision")
    found = train(setup, block)
    line = found.front.line
    # A root gathers once: 11.4 of 12 bytes.
    assert "% of the parameters on 2 x 2 ranks, 11.38" in line, line
    assert "% of the parameters on 2 x 1 of 4 ranks, 12.0" in line, line
    figures = found.front.figures()
    assert figures["world"] == 4
    total = 0
    for level in figures["levels"]:
        total += sum(sum(links.values()) for links in level["received_bytes"].values())
    assert total == sum(sum(links.values()) for links in figures["received_bytes"].values())
    run = found.front.run
    expected = run.received_by_formula(run.comm_volume())
    summed = {
        role: {link: sum(of_all_ranks(figures["received_bytes"][role][link])) for link in links}
        for role, links in expected.items()
    }
    for role, links in expected.items():
        for link, nbytes in links.items():
            everywhere = sum(of_all_ranks(nbytes))
            assert summed[role][link] == pytest.approx(5 * everywhere, rel=0.01), (role, link)


@on_ranks(4)
def test_experts_of_one_rank_are_left_alone() -> None:
    setup = SETUPS["experts on one rank"]
    found = train(setup, block_of(setup, "eden4"))
    assert "1 module(s), such as experts, have a mesh of one rank: nothing" in found.front.line
    assert len(found.front.figures()["levels"]) == 1
    assert not any(param.name.startswith("experts") for param in found.front.run.params)


@on_ranks(4)
def test_meshes_that_nothing_joins_are_refused() -> None:
    mesh = mesh_of((2, 2), "a", "b")
    together = torch.nn.ModuleList([dense(mesh["a"]), dense(mesh["b"])])
    with pytest.raises(ValueError, match="give both a mesh of one init_device_mesh"):
        fsdp2.attach(together, "qsdp", optimizer=[])


# ---- checkpoints ----


@on_ranks(4)
def test_a_checkpoint_moves_between_meshes_and_away_from_the_block() -> None:
    saved = train(TP_INSIDE, block_of(TP_INSIDE, "eden4"))
    model_state, optimizer_state = get_state_dict(saved.model, saved.optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "front": saved.front}
    dcp.save(state, checkpoint_id=scratch() / "saved")
    expected = full_weights(saved.model)
    take_backward(saved, TP_INSIDE, 5)
    around, last_dimension = SETUPS["tp around"], SETUPS["dim 1"]
    same_rows = Setup(last_dimension.make, source=TP_INSIDE.source)
    for title, setup, block in (
        ("tp around", around, block_of(around, "eden4")),
        ("tp around", around, None),
        ("dim 1", same_rows, block_of(same_rows, "qsdp")),
    ):
        other = train(setup, block, steps=0)
        model_state, optimizer_state = get_state_dict(other.model, other.optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        if other.front is not None:
            state["front"] = other.front
        dcp.load(state, checkpoint_id=scratch() / "saved")
        set_state_dict(
            other.model,
            other.optimizer,
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
        )
        for name, weight in full_weights(other.model).items():
            assert torch.equal(weight, expected[name]), (title, name)
        assert other.front is None or other.front.step == 5
        # The rows of a rank depend on its place in the mesh, those of all ranks do not.
        losses = sum(of_all_ranks(other_loss(other, setup)))
        assert losses == pytest.approx(sum(of_all_ranks(saved.losses[-1])), abs=0.1)


def other_loss(trained: Trained, setup: Setup) -> float:
    """Return the loss on the rows of seed 5."""
    take_backward(trained, setup, 5)
    return trained.losses[-1]
