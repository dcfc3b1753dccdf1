"""The exchange after a step is spread over the next forward and changes no bit of the training.

Chunks are made small here, so that the tiny models have several.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import fake_world
import pytest
import torch
from torch import Tensor, nn

from tests.distributed.harness import OWN_GROUP, on_ranks, run_each
from tests.distributed.models import (
    FEATURES,
    PREFETCH,
    TARGETS,
    build,
    forward,
    settings,
    train_steps,
)


def config(node_size: int, zero: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    block = {"scheme": "sdp4bit", "node_size": node_size, "allow_full_replica": True}
    return settings(3, block, dtype="bf16", zero=zero, **given)


@contextmanager
def small_chunks(
    *, in_flight: int = 2, at_once: bool = False, streams: bool = False
) -> Iterator[None]:
    """``at_once``: every exchange is finished before the optimizer step returns. ``streams``:
    gathers are posted as on a device with streams.
    """
    from ds_quant.policy import in_flight as limits
    from ds_quant.zero import chunked_exchange, node_shard

    after_step = node_shard.NodeShard.after_step

    def then_finish(self: Any) -> None:
        after_step(self)
        self.finish()

    as_asked = vars(node_shard.accelerator) | {"has_streams": lambda: streams}
    with (
        patch.object(limits, "LEAST_NUMEL", 500),
        patch.object(chunked_exchange, "EXCHANGED_AT_ONCE", in_flight),
        patch.object(node_shard, "accelerator", SimpleNamespace(**as_asked)),
        patch.object(node_shard.NodeShard, "after_step", then_finish if at_once else after_step),
    ):
        yield


class Detour(nn.Module):
    """Layers in another order in every forward, of which one is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(5))
        self.last = nn.Linear(FEATURES, TARGETS)
        self.turn = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.turn += 1
        order = torch.randperm(5, generator=torch.Generator().manual_seed(self.turn)).tolist()
        for place in order[:4]:
            x = x + torch.tanh(self.layers[place](x))
        return (self.last(x).float() - y).square().mean()


@on_ranks(4)
def test_a_gather_waits_for_its_own_parameters_and_those_before() -> None:
    """Noted: the rows still to arrive, after a step and after every gather of the forward."""
    from ds_quant.zero import fetch

    seen: list[list[str]] = []
    wait = fetch._FetchHandle.wait

    def note() -> None:
        params = engine.ds_quant_attached.node_shard._exchange._missing
        seen.append([param.name for param in sorted(params, key=lambda param: param.index)])

    def noted(self: Any, **kwargs: Any) -> None:
        wait(self, **kwargs)
        note()

    with small_chunks(in_flight=8):
        engine = build(config(2))
        train_steps(engine, 2)
        note()
        fetch._FetchHandle.wait = noted
        train_steps(engine, 1, 2)
    before, *later = seen
    assert {"first.weight", "second.weight", "last.weight"} <= set(before)
    held = [name for name in before if name not in later[0]]
    assert held == ["first.weight", "first.bias"]
    assert "last.weight" in later[0] and later[-1] == []
    sizes = [len(names) for names in later]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("streams", (False, True), ids=("cpu", "streams"))
@on_ranks(1, environment=OWN_GROUP)
def test_gathers_are_posted_ahead_in_the_first_forward_after_a_step(streams: bool) -> None:
    """By micro-step, the calls of DeepSpeed in which gathers of the node shard are posted."""
    from ds_quant.zero import fetch

    fake_world.join(fake_world.World(2, 2))
    during, seen = [""], []

    def noting(kind: type, name: str, call: str) -> None:
        original = getattr(kind, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            during[0] = call
            return original(*args, **kwargs)

        setattr(kind, name, noted)

    noting(fetch.Fetch, "fetch", "fetch")
    noting(fetch._FetchHandle, "wait", "wait")
    small = small_chunks(in_flight=16, streams=streams)
    with fake_world.without_handshake(), fake_world.faked_cuda(), small:
        engine = build(config(2, PREFETCH, accumulation=2))
        train_steps(engine, 2)
        link = engine.ds_quant_attached.run.world.hierarchy.intra
        gather = link.all_gather

        def counted(*args: Any, **kwargs: Any) -> Any:
            seen[-1].append(during[0])
            return gather(*args, **kwargs)

        link.all_gather = counted
        for micro in range(2):
            seen.append([])
            engine.backward(forward(engine, 2, micro))
            engine.step()
    first, second = seen
    assert len(first) == len(second) > 3
    assert set(second) == {"fetch"}
    assert set(first) == {"fetch"} if streams else "wait" in first


@pytest.mark.parametrize("explicitly", [True, False])
@on_ranks()
def test_the_links_of_an_engine_that_ended_serve_the_next(explicitly: bool) -> None:
    """Engines end in the middle of an exchange over the world's links."""
    losses = []
    for _ in range(3):
        with small_chunks():
            engine = build(config(1))
            losses.append(train_steps(engine, 3))
            assert engine.ds_quant_attached.node_shard._exchange._missing
            if explicitly:
                engine.destroy()
            del engine
            gc.collect()
            torch.distributed.barrier()
    assert losses == [losses[0]] * 3


def left_alone() -> None:
    """Rank 1 ends after a step, while rank 0 is in the forward that misses what it has not sent."""
    with small_chunks():
        engine = build(config(1))
        train_steps(engine, 2)
        if torch.distributed.get_rank() == 1:
            torch.distributed.isend = lambda *args, **kwargs: os._exit(1)
        try:
            train_steps(engine, 2, 2)
        except RuntimeError:
            start = time.monotonic()
            engine.destroy()  # waits for nobody again
            assert time.monotonic() - start < 1
            raise


def test_a_rank_that_has_died_is_named_by_the_forward_that_misses_it() -> None:
    (_, error), _ = run_each(left_alone, 2, environment={"TEST_COLLECTIVE_TIMEOUT": "20"})
    assert "in forward" in error
    assert error.strip().splitlines()[-1].startswith("RuntimeError: quantized_comm: rank 1 does")
