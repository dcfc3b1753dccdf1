"""ZeRO-3: weights that a module takes from another one, or hands out, when a run begins; parameters
that come later; and memory of both stages that DeepSpeed frees.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.distributed.features import Borrowed, Bottleneck, with_leaf
from tests.distributed.harness import on_ranks, run
from tests.distributed.models import (
    PREFETCH,
    QSDP,
    WIDTH,
    Regression,
    build,
    digest,
    engine_of,
    evaluate,
    exact,
    gathered,
    master_bits,
    masters,
    settings,
    train_step,
    train_steps,
    watch,
)
from tests.thin import thinned


class HandsOut(nn.Linear):
    """Returns its bias instead of adding it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return nn.functional.linear(x, self.weight), self.bias


class TakesIn(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.first = HandsOut(self.first.in_features, self.first.out_features)
        self.first.bias = nn.Parameter(torch.randn(self.first.out_features, 40))
        self.used: list[str] = []

    def body(self, x: Tensor) -> Tensor:
        hidden, bias = self.first(x)
        self.used.append(digest(bias.data))
        return self.second(torch.tanh(hidden + bias.mean(1)))


@pytest.mark.parametrize("model", [Borrowed, TakesIn])
@on_ranks()
def test_all_forwards_use_what_is_fetched_and_exact_reads_stay_exact(model: type) -> None:
    """Also the first one, in which DeepSpeed learns of such a use and gathers the weight on the
    spot. From then on it fetches it for the other module too. ``Module.apply`` writes what it
    reads.
    """
    engine = engine_of(3, QSDP, model, dtype="fp32")
    name = "first.bias" if model is TakesIn else "embed.weight"
    weight, used = engine.module.get_parameter(name), engine.module.used
    with watch(engine) as seen:
        train_steps(engine, 3)
    fetched = {s.step: s.bits for s in seen if s.name == name}
    evaluate(engine), evaluate(engine)
    assert used[:3] == list(fetched.values()) and used[3] == used[4]
    assert len(used) == 5 and len(set(used)) == 4
    engine.module.apply(lambda _: None)
    exact = masters(engine)[name]
    with gathered([weight]):
        assert np.array_equal(weight.detach().numpy(), exact)


@on_ranks()
def test_a_first_forward_that_only_evaluates_uses_what_later_ones_use() -> None:
    engine = engine_of(3, QSDP, Borrowed, dtype="fp32")
    exact = digest(torch.from_numpy(masters(engine)["embed.weight"]))
    evaluate(engine), evaluate(engine)
    first, second = engine.module.used
    assert first == second != exact


# ---- parameters made after the engine, fetched together with those that it quantizes ----


class Widened(Bottleneck):
    """Gets a frozen layer later."""

    late: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.late(super().forward(x))


def use_another_order_on_every_rank(rank: int) -> None:
    """DeepSpeed keeps what it fetches in sets, whose order is that of addresses: by chance."""
    from deepspeed.runtime.zero import partitioned_param_coordinator

    def place(member: Any) -> int:
        return getattr(member, "ds_id", member)

    class Ordered(set):
        def __iter__(self) -> Any:
            return iter(sorted(super().__iter__(), key=place, reverse=rank % 2 == 1))

    partitioned_param_coordinator.set = Ordered  # before the built-in of that name


def with_a_late_layer(block: dict[str, Any] | None, ordered: bool) -> tuple[Any, ...]:
    """Losses, digests of the masters, and of the late weight that was gathered beside another one,
    which is exact.
    """
    import deepspeed
    from deepspeed.runtime.zero import parameter_offload

    if not ordered:
        use_another_order_on_every_rank(torch.distributed.get_rank())
    config = settings(3, block, dtype="bf16", zero=PREFETCH)
    engine = build(config, partial(with_leaf, Widened))
    with deepspeed.zero.Init(config_dict_or_path=engine.config):
        late = nn.Linear(WIDTH, WIDTH)
    parameter_offload._inject_parameters(late, parameter_offload.ZeROOrderedDict)  # for 0.18
    late.requires_grad_(False)
    engine.module.second.late, other = late, engine.module.second.up.weight
    losses = [*train_steps(engine, 4), evaluate(engine)]
    with gathered([late.weight, other]):
        beside, bits = digest(late.weight), digest(other)
    del engine.module.second.late  # DeepSpeed knows no master of it
    assert exact(engine, "bf16")["second.up.weight"] == bits
    return losses, master_bits(engine), beside


@pytest.mark.parametrize(
    "block",
    thinned(
        [QSDP, {"scheme": "sdp4bit", "node_size": 2}],
        lambda block: block["scheme"] == "sdp4bit",  # it keeps weights
    ),
)
def test_every_order_of_a_fetch_trains_alike(block: dict[str, Any]) -> None:
    environment = {"TEST_COLLECTIVE_TIMEOUT": "20"}
    found, other = (
        run(with_a_late_layer, 4, block, ordered, timeout=60, environment=environment)
        for ordered in (True, False)
    )
    assert found == other
    for _, *bits in found:
        assert bits == [*found[0][1:]]


# ---- memory that DeepSpeed frees is not kept alive ----


@pytest.mark.parametrize("zero", [{}, {"overlap_comm": True}], ids=["plain", "overlap"])
@pytest.mark.parametrize("stage", [1, 2])
@on_ranks()
def test_gradient_buckets_are_freed_at_the_end_of_a_backward(
    stage: int, zero: dict[str, Any]
) -> None:
    """By default a bucket is 1 GB of bf16, which must not be there next to the optimizer step."""
    engine = engine_of(stage, QSDP, zero=zero)
    optimizer, seen = engine.optimizer, list[StorageWeakRef]()
    release = optimizer._release_ipg_buffers

    def watched() -> None:
        for bucket in optimizer.ipg_buckets.values():
            seen.extend(StorageWeakRef(buffer.untyped_storage()) for buffer in bucket.buffer)
        release()

    optimizer._release_ipg_buffers = watched
    train_step(engine, 0)
    assert seen and all(reference.expired() for reference in seen)


@on_ranks()
def test_a_released_parameter_is_freed_although_others_of_its_gather_are_in_use() -> None:
    params = list(engine_of(3, QSDP).module.parameters())
    handle = params[0].all_gather_coalesced(params)
    handle.wait()
    values = StorageWeakRef(params[0].data.untyped_storage())
    params[0].partition()
    assert values.expired()
    handle.wait()  # still idempotent
