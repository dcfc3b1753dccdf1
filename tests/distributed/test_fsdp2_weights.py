"""Lossless differences of weights under FSDP2, bytes between nodes, and a rank that dies."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import ds_quant
from ds_quant import fsdp2
from ds_quant.comm.buffers import Buffers
from ds_quant.comm.transport import Communicator
from ds_quant.fsdp2.attaching import front_of
from tests.distributed.harness import on_ranks, run_each
from tests.distributed.messages import before_each_send
from tests.distributed.test_faults import die
from tests.distributed.test_fsdp2 import new_model, sharded, train, weights_of
from tests.thin import thinned

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
EXACT = {"weights": {"enabled": False}, "node_shard": True}  # the same gradients, exact weights


def attached(
    block: dict[str, Any], model: nn.Module | None = None, *, lr: float = 3e-3, **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    """A sharded model with a block on two nodes, and its optimizer."""
    model = sharded(new_model() if model is None else model, **{"mp_policy": BF16, **options})
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    node_size = torch.distributed.get_world_size() // 2
    fsdp2.attach(model, {"node_size": node_size, "min_numel": 512, **block}, optimizer=optimizer)
    return model, optimizer


def computed_with(model: nn.Module) -> dict[str, torch.Tensor]:
    """The full weights that the next forward of this rank uses."""
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            for name, p in module.named_parameters(prefix):
                if not hasattr(p, "to_local"):
                    found[name] = p.detach().clone()
            module.reshard()
    return found


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("scheme", ["hybrid", "lossless"])
@on_ranks(2)
def test_weights_that_are_sent_lie_in_the_pool(scheme: str) -> None:
    """Else every module takes new memory from the system in every step."""
    taken: list[tuple[Any, ...]] = []
    empty = Buffers.empty

    def noted(self: Buffers, *shape: int, dtype: torch.dtype = torch.uint8, **place: Any) -> Any:
        taken.append((*shape, dtype))
        return empty(self, *shape, dtype=dtype, **place)

    model, optimizer = attached({"scheme": scheme, "allow_full_replica": True})
    train(model, optimizer, steps=1)
    Buffers.empty = noted
    train(model, optimizer, steps=1)
    rows = [each.sharded.row_numel for each in front_of(model).copies.node_shards]
    assert rows
    for numel in rows:
        assert (numel, torch.bfloat16) in taken


# ---- lossless differences ----


@pytest.mark.parametrize(
    ("scheme", "micro_steps"),
    thinned([("lossless", 4), ("lossless_w_g3", 1)], lambda scheme, _: scheme == "lossless_w_g3"),
)
@on_ranks(4)
def test_lossless_weights_are_those_of_exact_ones_bit_for_bit(
    scheme: str, micro_steps: int
) -> None:
    """Losses, shards and the weights that every rank computes with, in every step. One layer is
    frozen, another has rows that four ranks cannot share evenly.
    """
    found = []
    for block in ({"scheme": scheme}, {"scheme": scheme, **EXACT}):
        made = new_model()
        made.layers[1].bias.requires_grad_(False)
        model, optimizer = attached(block, made)
        steps = []
        for _ in range(2):
            losses = train(model, optimizer, steps=1, micro_steps=micro_steps)
            steps.append((losses, weights_of(model), computed_with(model)))
        found.append(steps)
    for (losses, masters, weights), (exact_losses, exact_masters, exact) in zip(
        *found, strict=True
    ):
        assert losses == exact_losses
        assert same_bits(masters, exact_masters)
        assert same_bits(weights, exact)
        assert same_bits(weights, {n: w.bfloat16() for n, w in masters.items()})


def used(model: nn.Module) -> tuple[int, int]:
    """Lossless messages of one rank since the start, in elements, and collectives of weights."""
    front = front_of(model)
    return front.run.traffic.lossless.numel, front.run.traffic.collectives["weights"]


@on_ranks(4)
def test_all_modules_agree_on_the_lengths_of_their_messages_at_once() -> None:
    """One message of each module between the nodes and one gather of lengths for all of them."""
    model, optimizer = attached({"scheme": "lossless"})
    modules = len(front_of(model).copies.node_shards)
    assert modules == 5
    sent: list[tuple[str, str]] = []
    gather, least = Communicator.all_gather, Communicator.least

    def gathered(self: Communicator, payload: torch.Tensor, *, role: str) -> Any:
        sent.append((role, self.hop))
        return gather(self, payload, role=role)

    def agreed(self: Communicator, numbers: torch.Tensor) -> torch.Tensor:
        sent.append(("agreement", self.hop))
        return least(self, numbers)

    train(model, optimizer, steps=1)
    Communicator.all_gather, Communicator.least = gathered, agreed
    train(model, optimizer, steps=1)
    assert sent.count(("weights", "inter")) == modules + 1
    # On weights that were written, on the lengths, and before the step that all messages could be
    # decoded.
    assert sum(what == "agreement" for what, _ in sent) == 3


@on_ranks(2)
def test_one_rank_per_node_and_one_node_are_told() -> None:
    """A full replica must be allowed. On one node and with fp32 weights nothing can be done."""
    block = {"scheme": "lossless", "node_size": 1}
    with pytest.raises(ds_quant.ConfigError, match='scheme "lossless" under FSDP2 needs two'):
        attached(block)
    model, optimizer = attached({**block, "allow_full_replica": True})
    train(model, optimizer, steps=2)
    assert same_bits(computed_with(model), {n: w.bfloat16() for n, w in weights_of(model).items()})
    assert used(model)[0] > 0
    for changes, told in (
        ({"node_size": 2}, 'on one node take "qsdp"'),
        ({"allow_full_replica": True}, "lossless differences take 16 bits"),
    ):
        policy = MixedPrecisionPolicy() if "allow_full_replica" in changes else BF16
        model, optimizer = attached({**block, **changes}, mp_policy=policy)
        train(model, optimizer, steps=1)
        assert told in ds_quant.report(model)["line"]
        assert used(model)[0] == 0


def receive_damaged(message: int, byte: int) -> None:
    """Rank 3 receives a byte of a message between the nodes otherwise than rank 1 has sent it.

    message: index since the second step. Number 0 has the lengths of all others.
    """
    model, optimizer = attached({"scheme": "lossless"})
    train(model, optimizer, steps=1)
    inter = front_of(model).run.world.hierarchy.inter
    gather, messages = inter.all_gather, []

    def garbled(arrived: torch.Tensor) -> torch.Tensor:
        arrived[byte] ^= 16
        return arrived

    def damaged(payload: torch.Tensor, *, role: str) -> Any:
        messages.append(payload)
        arriving = gather(payload, role=role)
        return arriving.then(garbled) if len(messages) == message + 1 else arriving

    if torch.distributed.get_rank() == 3:
        inter.all_gather = damaged
    train(model, optimizer, steps=2)


def test_weights_that_cannot_be_decoded_end_all_ranks() -> None:
    for _, error in run_each(receive_damaged, 4, 2, 40):
        assert "step 2: weights from rank 1 cannot be decoded on rank 3 (lossless mess" in error
        assert "and for code that writes weights outside the optimizer" in error


@pytest.mark.slow
def test_a_wrong_length_ends_all_ranks() -> None:
    """By name on the two that have exchanged it; the others lose them."""
    errors = [error for _, error in run_each(receive_damaged, 4, 0, 8)]
    for rank in (1, 3):
        assert "ranks have received different lengths" in errors[rank]
    for rank in (0, 2):
        assert "does not answer" in errors[rank]


# ---- a lost rank ----


def lose_a_rank(scheme: str, role: str) -> None:
    """Rank 3 dies in the second step: at its first send of the role, its receives posted."""
    model, optimizer = attached({"scheme": scheme})
    train(model, optimizer, steps=1)
    if torch.distributed.get_rank() == 3:

        def die_at_role(posted_role: str) -> None:
            if posted_role == role:
                die()

        before_each_send(die_at_role)
    train(model, optimizer, steps=2)


@pytest.mark.parametrize(
    ("scheme", "role"),
    thinned(
        [("lossless_w_g3", "weights"), ("qsdp", "weights"), ("eden4", "gradients")],
        lambda scheme, _: scheme == "lossless_w_g3",
    ),
)
def test_a_lost_rank_ends_the_others_by_name(scheme: str, role: str) -> None:
    start = time.monotonic()
    outcomes = run_each(lose_a_rank, 4, scheme, role, environment={"TEST_COLLECTIVE_TIMEOUT": "60"})
    errors = [error for _, error in outcomes]
    assert errors[3] == "the process died"
    for error in errors[:3]:
        assert "quantized_comm: rank" in error and "does not answer" in error
    assert time.monotonic() - start < 60, "the others wait for the timeout"


# ---- bytes ----


class Wide(nn.Module):
    """400 k parameters as wide as a small language model's, with weights of its size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        self.uneven = nn.Linear(256, 513)
        for p in self.parameters():
            nn.init.normal_(p, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.uneven(x)


@pytest.mark.parametrize(
    ("scheme", "micro_steps", "steps", "most"),
    thinned(
        [("eden4", 8, 1, 1.06), ("lossless_w_g3", 1, 2, 0.8)],
        lambda scheme, *_: scheme == "lossless_w_g3",
    ),
)
@on_ranks(4)
def test_bytes_between_nodes_stay_below_a_bound(
    scheme: str, micro_steps: int, steps: int, most: float
) -> None:
    """Bytes per parameter and step that enter a node, of many. Lossless differences are those of
    Adam at a learning rate of 1e-4; they are largest in the first steps.
    """
    model, optimizer = attached({"scheme": scheme}, Wide(), lr=1e-4)

    def received() -> int:
        return sum(links["inter"] for links in ds_quant.report(model)["received_bytes"].values())

    def step(number: int) -> None:
        for micro_step in range(micro_steps):
            seed = 100 * number + 10 * micro_step + torch.distributed.get_rank()
            x = torch.randn(8, 256, generator=torch.Generator().manual_seed(seed))
            model.set_is_last_backward(micro_step == micro_steps - 1)
            (model(x) - x.repeat(1, 3)[:, :513]).square().mean().div(micro_steps).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    before = received()
    for number in range(steps):
        step(1 + number)
    # A node has two ranks. Of two nodes one receives from one other, of many from nearly all.
    volume = 2 * 2 * (received() - before) / steps / ds_quant.report(model)["params"]
    assert 0.9 * most < volume < most
