"""FSDP2 with a replica of the model in every node (HSDP), and its drift checks."""

from __future__ import annotations

import copy
import zlib
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from simulated import Simulation
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import ds_quant
from ds_quant import fsdp2
from ds_quant.comm.returned_sums import ReturnedSums
from ds_quant.comm.topology import Topology
from ds_quant.config.schema import parse_block
from ds_quant.fsdp2.model import AttachedModel
from tests.distributed.exact_model import sgd
from tests.distributed.fsdp2_runs import adam
from tests.distributed.harness import of_all_ranks, on_ranks
from tests.distributed.test_fsdp2 import WIDTH, Net, new_model, sharded, weights_of
from tests.thin import thinned
from tests.unit import wire_oracle as oracle

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def mesh_of(nodes: int) -> DeviceMesh:
    """Return a mesh of replicas and shards."""
    size = torch.distributed.get_world_size() // nodes
    return init_device_mesh("cpu", (nodes, size), mesh_dim_names=("replica", "shard"))


def replicated(reference: nn.Module, mesh: DeviceMesh, **options: Any) -> FSDPModule:
    """Return a copy of a model, every layer and the root on the mesh."""
    model = copy.deepcopy(reference)
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    micro_steps: int = 1,
    width: int = WIDTH,
) -> list[float]:
    """Train on the same rows; the last backward of a step is declared as users of HSDP do.

    Returns:
        the losses of every step, summed over the ranks.
    """
    rank = torch.distributed.get_rank()
    losses = torch.zeros(steps)
    for step in range(steps):
        for micro_step in range(micro_steps):
            generator = torch.Generator().manual_seed(10 * micro_step + rank)
            x = torch.randn(8, width, generator=generator)
            model.set_requires_all_reduce(micro_step == micro_steps - 1)
            loss = (model(x) - x[:, :1]).square().mean() / micro_steps
            loss.backward()
            losses[step] += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(of_all_ranks(losses.tolist())).sum(0).tolist()


def trained(
    block: dict[str, Any] | None,
    *,
    reference: nn.Module | None = None,
    nodes: int = 2,
    steps: int = 5,
    micro_steps: int = 1,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Return losses, weights and model of a run with a block, or of FSDP2's own HSDP."""
    model = replicated(reference or new_model(), mesh_of(nodes), **options)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-3, fused=True)
    if block is not None:
        fsdp2.attach(model, {"min_numel": 512, **block}, optimizer=optimizer)
    losses = train(model, optimizer, steps=steps, micro_steps=micro_steps)
    return losses, weights_of(model), model


def assert_equal_on_all_ranks(weights: dict[str, torch.Tensor], case: object = None) -> None:
    """Compare the bits of full weights between all ranks."""
    own = {name: value.numpy().tobytes() for name, value in weights.items()}
    first, *others = of_all_ranks({name: zlib.crc32(bits) for name, bits in own.items()})
    for other in others:
        assert other == first, case


@pytest.mark.parametrize("micro_steps", thinned([1, 4], lambda micro_steps: micro_steps == 1))
@on_ranks(4)
def test_full_precision_trains_as_hsdp_alone(micro_steps: int) -> None:
    plain_losses, plain, _ = trained(None, micro_steps=micro_steps)
    losses, weights, _ = trained({"scheme": "full_precision"}, micro_steps=micro_steps)
    assert_equal_on_all_ranks(weights)
    if micro_steps == 1:  # two summands inside the nodes, two between them: one order
        assert losses == plain_losses
        assert all(torch.equal(weights[name], expected) for name, expected in plain.items())
    assert losses == pytest.approx(plain_losses, rel=1e-6)
    for name, expected in plain.items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("scheme", "micro_steps"),
    thinned(product(("eden4", "sdp4bit", "qsdp"), (1, 4)), lambda *case: case == ("eden4", 1)),
)
@on_ranks(4)
def test_replicas_end_with_equal_bits(scheme: str, micro_steps: int) -> None:
    reference = new_model()
    reference.layers[0].requires_grad_(False)
    reference.layers[1].bias.requires_grad_(False)
    plain, _, _ = trained(None, reference=reference, micro_steps=micro_steps)
    block = {"scheme": scheme}
    losses, weights, _ = trained(block, reference=reference, micro_steps=micro_steps)
    assert_equal_on_all_ranks(weights)
    assert losses == pytest.approx(plain, abs=0.2 * (plain[0] - plain[-1]))
    assert losses != plain


class LossOf(nn.Module):
    """The loss that ``train`` takes, of inputs in fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.model(x.bfloat16()) - x[:, :1]).square().mean()


@pytest.mark.parametrize(
    ("scheme", "micro_steps"),
    thinned(product(("eden4", "qsdp"), (1, 3)), lambda *case: case == ("eden4", 3)),
)
@on_ranks(4)
def test_simulated_replicas_end_with_the_bits_of_real_ones(scheme: str, micro_steps: int) -> None:
    """benchmarks/simulated_replicas.py trains as FSDP2 does, weights and gradients in bf16."""
    reference = new_model().bfloat16().float()
    block = {"scheme": scheme, "min_numel": 512, "slices": 1}
    model = replicated(reference, mesh_of(2), mp_policy=BF16)
    optimizer = sgd(model.parameters())
    fsdp2.attach(model, block, optimizer=optimizer)
    train(model, optimizer, steps=3, micro_steps=micro_steps)
    weights = weights_of(model)
    if torch.distributed.get_rank():
        return
    simulation = Simulation(
        LossOf(copy.deepcopy(reference).bfloat16()),
        parse_block({**block, "node_size": 2}).to_scheme(),
        sgd,
        topology=Topology(world=4, node_size=2),
        micro_steps=micro_steps,
        clip=0.0,
        sums="hsdp",
    )

    def rows(micro_step: int, rank: int) -> tuple[torch.Tensor]:
        generator = torch.Generator().manual_seed(10 * micro_step + rank)
        return (torch.randn(8, WIDTH, generator=generator),)

    for _ in range(3):
        simulation.step(rows)
    for name, values in simulation.named_masters():
        assert torch.equal(values, weights[name.removeprefix("model.")]), name


@pytest.mark.slow
@pytest.mark.parametrize(("world", "nodes", "scheme"), [(6, 3, "sdp4bit"), (8, 4, "eden2")])
@on_ranks()
def test_more_nodes_than_two_end_with_equal_bits(world: int, nodes: int, scheme: str) -> None:
    """Three pieces of a shard, and signs of every node's own."""
    plain, _, _ = trained(None, nodes=nodes, steps=3, micro_steps=2)
    losses, weights, _ = trained({"scheme": scheme}, nodes=nodes, steps=3, micro_steps=2)
    assert_equal_on_all_ranks(weights)
    assert losses == pytest.approx(plain, abs=0.2 * (plain[0] - plain[-1]))
    assert losses != plain


@pytest.mark.slow
@on_ranks(4)
def test_all_nodes_decode_the_same_weights() -> None:
    qsdp = {"scheme": "qsdp"}
    for block in (qsdp, {**qsdp, "weights": {"rounding": "stochastic"}}, {"scheme": "zeropp"}):
        _, exact, model = trained(block, steps=1)
        model.uneven.unshard()
        decoded = model.uneven.weight.detach().clone()
        assert_equal_on_all_ranks({"uneven": decoded}, block)
        assert torch.equal(decoded, exact["uneven.weight"]) == (block["scheme"] == "zeropp")


@pytest.mark.slow
@on_ranks(4)
def test_other_schemes_train_near_hsdp_alone() -> None:
    plain, _, _ = trained(None, micro_steps=2, mp_policy=BF16)
    learned = plain[0] - plain[-1]
    eden4 = {"scheme": "eden4", "warmup_steps": 2, "payload_checksum": True, "slices": 3}
    others = ("hybrid", "zeropp", "eden2", "lossless_w_g4", "tlq")
    for block in (eden4, *({"scheme": scheme} for scheme in others)):
        losses, weights, _ = trained(block, micro_steps=2, mp_policy=BF16)
        assert_equal_on_all_ranks(weights, block)
        assert losses == pytest.approx(plain, abs=0.2 * learned), block


@on_ranks(4)
def test_the_last_backward_is_declared_as_without_replicas() -> None:
    """By ``set_is_last_backward``, as where all ranks share the parameters."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    found = []
    for block in (None, {"scheme": "full_precision"}):
        model = replicated(new_model(), mesh_of(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if block is not None:
            fsdp2.attach(model, block, optimizer=optimizer)
        for last in (False, True):
            model.set_is_last_backward(last)
            model(x).square().mean().backward()
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-6, atol=1e-7)
    model.set_requires_all_reduce(False)
    model(x).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"set_requires_all_reduce\(True\) if you have called it"
    ):
        optimizer.step()


@pytest.mark.slow
@on_ranks(4)
def test_sums_have_the_errors_of_both_halves_and_no_bias() -> None:
    """Between two nodes at most half the squared error of a message on the way out, and all of it
    on the way back: 0.13 with 2 bits, 0.0096 with 4, 0.0025 with 5, with which sums go back.
    """
    rank = torch.distributed.get_rank()
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(rank))
    gradients: dict[str, list[torch.Tensor]] = {}
    for scheme in ("full_precision", "eden4", "eden2"):
        model = replicated(wide(), mesh_of(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        fsdp2.attach(model, {"scheme": scheme}, optimizer=optimizer)
        gradients[scheme] = []
        for _ in range(8):
            model(x).square().mean().backward()
            gradients[scheme].append(model[0].weight.grad.full_tensor())
            optimizer.step()
            optimizer.zero_grad()
    exact = gradients["full_precision"][0]

    def error(gradient: torch.Tensor) -> float:
        return float((gradient - exact).square().sum() / exact.square().sum())

    for scheme, least, most in (("eden4", 0.0025, 0.0085), ("eden2", 0.028, 0.075)):
        assert least < error(gradients[scheme][0]) < most, scheme
        mean = torch.stack(gradients[scheme]).mean(0)
        assert error(mean) < 1.3 / 8 * error(gradients[scheme][0]), scheme


@pytest.mark.parametrize(
    ("scheme", "bits"),
    thinned(
        [("eden4", None), ("eden4", 4), ("eden4", 8), ("sdp4bit", None)],
        lambda scheme, bits: scheme == "eden4" and bits is None,
    ),
)
@on_ranks(4)
def test_sums_go_back_as_the_wire_page_says(scheme: str, bits: int | None) -> None:
    """The model is one matrix, whose shards of 2048 elements are summed in pieces of 1024."""
    model = fully_shard(nn.Linear(64, 64, bias=False), mesh=mesh_of(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    block = {"scheme": scheme, "min_numel": 64, "checksum_steps": 0}
    block["gradients"] = {"returned_bits": bits}
    front = fsdp2.attach(model, block, optimizer=optimizer)
    node, local = divmod(torch.distributed.get_rank(), 2)
    for _ in range(2):
        optimizer.step()
    returned: list[torch.Tensor] = []
    payloads: list[torch.Tensor] = []
    send, inter = ReturnedSums.send, front.run.world.hierarchy.inter
    all_gather = inter.all_gather

    def recorded(self: Any, sums: torch.Tensor, *others: Any) -> Any:
        returned.append(sums[:1024].clone())
        return send(self, sums, *others)

    def gathered(payload: torch.Tensor, *, role: str) -> Any:
        payloads.append(payload.clone())
        return all_gather(payload, role=role)

    ReturnedSums.send, inter.all_gather = recorded, gathered
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    model(x).square().mean().backward()
    h = 128 if scheme == "eden4" else 32
    is_gaussian = scheme == "eden4" and bits != 8
    fmt = oracle.Format(bits=bits or 5, group=128, gaussian=is_gaussian, rounding="stochastic")

    def key(stream: int, hop: int) -> int:
        return oracle.key_of(seed=0, role=1, parameter=0, stream=stream, hop=hop)

    step = 2 << 24
    signs = np.ones(h, np.float32)
    if scheme == "eden4":
        signs = oracle.signs_of(key(0, 98), step, h)
    values = returned[0].numpy().reshape(-1, h) * signs
    expected = oracle.encode(
        oracle.rotate(values.reshape(-1), h),
        fmt,
        stream=(key(2 * node + local + 1, 97), step),
        first=16 * (2048 * local + 1024 * node),
    )
    sent = payloads[0].numpy().tobytes()
    assert sent[: len(expected)] == expected
    rows = of_all_ranks(sent)
    decoded = [oracle.decode(rows[2 * n + local], fmt, 1024) for n in range(2)]
    found = model.weight.grad.to_local().numpy().reshape(2, 1024)
    for n in range(2):
        pieces = oracle.unrotate(decoded[n].astype(np.float32), h, 1.0).reshape(-1, h) * signs
        assert np.array_equal(found[n], pieces.reshape(-1))


@pytest.mark.slow
@on_ranks(4)
def test_a_divide_factor_of_the_user_is_taken_over() -> None:
    """Without forced sums FSDP2 asks for a premultiplied sum of 7, an operation that gloo lacks."""
    found = []
    cases = (None, False), (None, True), (2.0, False), (7.0, True)
    premultiplied = (7.0, False)
    for block in (None, {"scheme": "full_precision"}):
        for factor, sums in cases if block is None else (*cases, premultiplied):
            model = replicated(new_model(), mesh_of(2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(sums)
                    if factor is not None:
                        module.set_gradient_divide_factor(factor)
            if block is not None:
                fsdp2.attach(model, block, optimizer=optimizer)
            model(torch.ones(1, WIDTH)).sum().backward()
            found.append(model.uneven.weight.grad.full_tensor())
    assert len(found) == 9
    torch.testing.assert_close(found[4:], [*found[:4], found[3]])


@pytest.mark.slow
@pytest.mark.parametrize("reshard", [False, 2])
@on_ranks(8)
def test_resharding_after_forward_trains_as_hsdp_alone(reshard: bool | int) -> None:
    plain, _, _ = trained(None, steps=3, reshard_after_forward=reshard)
    losses, weights, _ = trained({"scheme": "hybrid"}, steps=3, reshard_after_forward=reshard)
    assert_equal_on_all_ranks(weights)
    assert losses == pytest.approx(plain, rel=1e-5)


@pytest.mark.slow
@on_ranks(4)
def test_a_loaded_checkpoint_resumes_bit_for_bit() -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def made() -> tuple[Any, torch.optim.Optimizer, Any]:
        model = replicated(new_model(), mesh_of(2))
        optimizer = adam(model, lr=3e-3)
        block = {"scheme": "eden4", "min_numel": 512}
        return model, optimizer, fsdp2.attach(model, block, optimizer=optimizer)

    model, optimizer, front = made()
    train(model, optimizer, steps=3)
    model_state, optimizer_state = copy.deepcopy(get_state_dict(model, optimizer))
    own = front.state_dict()
    expected = train(model, optimizer, steps=3)
    model, optimizer, front = made()
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    front.load_state_dict(own)
    assert train(model, optimizer, steps=3) == expected


# ---- gradients that are not finite, in both layouts ----


@pytest.mark.parametrize("scheme", thinned(["eden4", "sdp4bit"], lambda scheme: scheme == "eden4"))
@on_ranks(4)
def test_an_infinite_gradient_of_one_rank_is_seen_by_all(scheme: str) -> None:
    block = {"scheme": scheme, "min_numel": 512}
    for layout in ("replicas", "one mesh"):
        if layout == "replicas":
            model = replicated(new_model(), mesh_of(2))
        else:
            model = sharded(new_model())
            block = {**block, "node_size": 2}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fsdp2.attach(model, block, optimizer=optimizer)
        if torch.distributed.get_rank() == 1:
            model.layers[1].register_forward_hook(with_an_infinite_gradient)
        for last in (False, True):
            model.set_is_last_backward(last)
            model(torch.ones(4, WIDTH)).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        assert not torch.isfinite(norm), (layout, norm)


def with_an_infinite_gradient(_: nn.Module, __: Any, output: torch.Tensor) -> None:
    infinity = torch.zeros_like(output)
    infinity[0, 7] = torch.inf
    output.register_hook(lambda gradient: gradient + infinity)


# ---- frozen and unused parameters, in both layouts ----


@on_ranks(4)
def test_frozen_parameters_beside_trained_ones_are_left_out_of_a_message() -> None:
    reference = new_model()
    reference.uneven.weight.requires_grad_(False)
    reference.layers[1].bias.requires_grad_(False)
    found = []
    for block in (None, {"scheme": "hybrid", "node_size": 2}):
        model = sharded(reference)
        trained_ones = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained_ones, lr=0.1)
        if block is not None:
            fsdp2.attach(model, block, optimizer=optimizer)
        found.append((train(model, optimizer, steps=3, micro_steps=2), weights_of(model)))
    (plain, plain_weights), (losses, weights) = found
    assert losses == pytest.approx(plain, rel=1e-5)
    for name, expected in plain_weights.items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_a_parameter_without_a_gradient_stays_without_one() -> None:
    class Partly(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.T

    model = fully_shard(Partly(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp2.attach(model, {"scheme": "qsdp"}, optimizer=optimizer)
    model(torch.ones(1, WIDTH)).sum().backward()
    assert model.bias.grad is None and model.weight.grad is not None
    optimizer.step()
    if not hasattr(model, "set_reduce_scatter_unused_params"):  # torch 2.13
        return
    model = fully_shard(Partly(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp2.attach(model, {"scheme": "qsdp"}, optimizer=optimizer)
    model.set_reduce_scatter_unused_params(True)
    model(torch.ones(1, WIDTH)).sum().backward()
    assert model.bias.grad.full_tensor().abs().max() == 0


# ---- bytes ----


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))


@on_ranks(4)
def test_the_all_reduce_of_fsdp2_takes_four_bytes_of_bf16_between_nodes() -> None:
    """Per parameter and step, from infinitely many nodes."""
    reduced_bytes = 0
    all_reduce = torch.distributed.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal reduced_bytes
        reduced_bytes += tensor.nbytes
        return all_reduce(tensor, *args, **kwargs)

    model = replicated(wide(), mesh_of(2), mp_policy=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.distributed.all_reduce = counted
    train(model, optimizer, steps=1, micro_steps=2, width=512)
    params_per_rank = sum(p.numel() for p in model.parameters()) / 2
    # A ring over all nodes sends every byte twice.
    assert 2 * reduced_bytes / params_per_rank == 4.0


def train_wide_replicas(*, steps: int) -> tuple[nn.Module, AttachedModel]:
    """Train two replicas of two ranks under eden4, in four micro-steps per step."""
    model = replicated(wide(), mesh_of(2), mp_policy=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    block = {"scheme": "eden4", "checksum_steps": 0}
    front = fsdp2.attach(model, block, optimizer=optimizer)
    train(model, optimizer, steps=steps, micro_steps=4, width=512)
    return model, front


@on_ranks(4)
def test_fsdp2_reduces_no_gradients_between_replicas_itself() -> None:
    reduced = []
    all_reduce = torch.distributed.all_reduce

    def recorded(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced.append(tensor.dtype)
        return all_reduce(tensor, *args, **kwargs)

    torch.distributed.all_reduce = recorded
    train_wide_replicas(steps=2)
    assert not any(dtype.is_floating_point for dtype in reduced)  # votes are integers


@on_ranks(4)
def test_replicas_receive_the_bytes_that_were_announced() -> None:
    """On two nodes they are half of the volume, which is that of infinitely many."""
    model, front = train_wide_replicas(steps=2)
    figures = ds_quant.report(model)
    received = figures["received_bytes"]
    volume = figures["expected_bytes_per_param"]
    assert 1.14 < volume < 1.19  # 4 bits out, 5 back
    assert received["weights"]["inter"] == 0
    bytes_into_node = 2 * received["gradients"]["inter"] / figures["steps"]
    assert bytes_into_node / figures["params"] == pytest.approx(volume / 2, rel=0.02)
    expected = front.run.comm_volume().received(3, micro_steps=4)
    expected_inside = sum(hops["intra"] for hops in expected.values())
    inside = sum(hops["intra"] for hops in received.values())
    assert inside / figures["steps"] == pytest.approx(expected_inside, rel=0.05)


@on_ranks(4)
def test_the_start_up_line_tells_what_replicas_send() -> None:
    model, front = train_wide_replicas(steps=0)
    volume = ds_quant.report(model)["expected_bytes_per_param"]
    assert front.line.startswith(
        f"eden4 on FSDP2, volume {volume:.2f} B/param/step between nodes "
        "(bf16 4.00), all weights, 2 small tensors unquantized ("
    )
    assert "; 2 replicas of 2 ranks; " in front.line
    assert "weights stay in the node, exact; " in front.line
    assert f"{volume / 2:.2f} B/param/step received per node" in front.line


# ---- drift ----


@on_ranks(4)
def test_replicas_that_differ_end_the_run_on_all_ranks() -> None:
    block = {"scheme": "eden4", "checksum_steps": 2}
    model = replicated(new_model(), mesh_of(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp2.attach(model, block, optimizer=optimizer)
    train(model, optimizer, steps=4)
    if torch.distributed.get_rank() == 3:
        with torch.no_grad():
            model.layers[1].weight.to_local()[0, 0] += 1
    train(model, optimizer, steps=1)
    with pytest.raises(RuntimeError, match=r"step 6: the weights of rank\(s\) \[1, 3\] differ"):
        train(model, optimizer, steps=1)


@on_ranks(4)
def test_replicas_that_begin_with_other_weights_end_after_the_first_step() -> None:
    torch.manual_seed(torch.distributed.get_rank() // 2)
    model = replicated(Net(), mesh_of(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp2.attach(model, {"scheme": "qsdp"}, optimizer=optimizer)
    with pytest.raises(RuntimeError, match="step 1: .* differ from those of the other replicas"):
        train(model, optimizer, steps=1)


@on_ranks(4)
def test_weights_that_nodes_keep_are_brought_back_from_a_drift() -> None:
    block = {"scheme": "eden4", "node_size": 2, "checksum_steps": 2, "min_numel": 512}
    model = sharded(new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    front = fsdp2.attach(model, block, optimizer=optimizer)
    refills = []
    refill = front.copies.resync
    front.copies.resync = lambda: (refills.append(front.step), refill())
    train(model, optimizer, steps=3)
    if torch.distributed.get_rank() == 2:
        front.copies.rows()[1][0, 5] += 1
    train(model, optimizer, steps=3)
    assert refills == [4]
    copies = [rows.clone() for rows in front.copies.rows()]
    held = of_all_ranks([rows.sum().item() for rows in copies])
    assert held[0] == held[2] and held[1] == held[3]


# ---- refusals ----


@on_ranks(4)
def test_meshes_that_make_no_replicas_are_refused_by_name() -> None:
    def refused(mesh: DeviceMesh, block: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            fsdp2.attach(replicated(new_model(), mesh), block, optimizer=[])

    refused(mesh_of(2), {"node_size": 1}, "node_size=1: allowed with replicas of 2 ranks: 2")
    refused(mesh_of(2), {"scheme": "autotune"}, '"autotune": allowed with replicas: a preset')
    scattered = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replica", "shard"))
    refused(
        scattered, {}, r"replicas of ranks \[0, 2\] and \[1, 3\]: allowed: replicas that follow"
    )
    first = torch.distributed.get_rank() < 2
    other = replicated(new_model() if first else wide(), mesh_of(2))
    with pytest.raises(RuntimeError, match=r"parameters=.4 \(.*rank 0: .10 \("):
        fsdp2.attach(other, {}, optimizer=[])
