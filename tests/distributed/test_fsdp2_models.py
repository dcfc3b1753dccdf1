"""Kinds of models and loops under FSDP2: equal to FSDP2 alone with an exact scheme."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from ds_quant import fsdp2
from ds_quant.runtime.handshake import StartError
from tests.distributed.fsdp2_runs import adam
from tests.distributed.harness import on_ranks
from tests.distributed.test_fsdp2 import WIDTH, Net, new_model, sharded, train, weights_of
from tests.thin import thinned


class Checkpointed(Net):
    """Layers are computed again in backward, which gathers their weights again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return self.head(torch.tanh(self.uneven(x)))


class Tied(Net):
    """The weight of the first layer is used again by the last one: the root gathers it once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.last(torch.tanh(self.first(x))))


def losses_and_weights(
    model_class: type[nn.Module], block: dict[str, Any] | None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = sharded(model_class())
    optimizer = adam(model, lr=3e-3)
    if block is not None:
        fsdp2.attach(model, {"min_numel": 512, **block}, optimizer=optimizer)
    losses = train(model, optimizer, steps=4, micro_steps=2)
    return losses, weights_of(model)


@pytest.mark.parametrize(
    "model_class", thinned([Checkpointed, Tied], lambda model_class: model_class is Tied)
)
@on_ranks(4)
def test_models_train_as_alone_and_near_it_in_4_bits(model_class: type[nn.Module]) -> None:
    plain_losses, plain = losses_and_weights(model_class, None)
    losses, weights = losses_and_weights(model_class, {"scheme": "hybrid", "node_size": 2})
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    for name, expected in plain.items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-5)
    quantized, _ = losses_and_weights(model_class, {"scheme": "sdp4bit", "node_size": 2})
    assert quantized != plain_losses
    assert quantized == pytest.approx(plain_losses, rel=0.05)


@pytest.mark.parametrize("scheme", thinned(["qsdp", "sdp4bit"], lambda scheme: scheme == "sdp4bit"))
@on_ranks(4)
def test_evaluations_between_steps_change_no_bit_of_the_training(scheme: str) -> None:
    """They gather the weights once more, with the same random bits."""
    found = []
    for evaluates in (False, True):
        model = sharded(new_model())
        optimizer = adam(model, lr=3e-3)
        block = {"scheme": scheme, "node_size": 2, "min_numel": 512}
        fsdp2.attach(model, block, optimizer=optimizer)
        losses = []
        for _ in range(3):
            losses += train(model, optimizer, steps=1)
            if evaluates:
                with torch.no_grad():
                    assert model(torch.ones(2, WIDTH)).isfinite().all()
                model.reshard()  # the root stays whole after a forward without backward
        found.append((losses, weights_of(model)))
    (losses, weights), (with_evaluations, same_weights) = found
    assert with_evaluations == losses
    assert all(torch.equal(same_weights[name], value) for name, value in weights.items())


@on_ranks(2)
def test_a_rank_that_does_not_attach_is_named() -> None:
    model = fully_shard(new_model(), mesh=init_device_mesh("cpu", (2,)))
    if torch.distributed.get_rank() == 1:
        return
    block = {"scheme": "qsdp", "handshake_timeout": 2}
    unanswered = (
        r"no answer from rank\(s\) \[1\] within 2 s. Do all ranks call ds_quant.fsdp2.attach"
    )
    with pytest.raises(StartError, match=unanswered):
        fsdp2.attach(model, block, optimizer=[])
