"""ZeRO-3: parameters made after the engine, fetched together with those that it quantizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.features import Bottleneck, Leaf
from tests.distributed.harness import run
from tests.distributed.models import (
    PREFETCH,
    WIDTH,
    build,
    digest,
    digests,
    evaluate,
    masters,
    settings,
    train_step,
)

BLOCKS = {
    "qsdp": {"scheme": "qsdp"},
    "sdp4bit": {"scheme": "sdp4bit", "node_size": 2},
}


class Widened(Bottleneck):
    """Gets a frozen layer later."""

    late: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.late(super().forward(x))


def with_widened_leaf() -> nn.Module:
    from deepspeed.utils import set_z3_leaf_modules

    model = Leaf()
    model.second = Widened()
    set_z3_leaf_modules(model, [Widened])
    return model


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
    """Losses; digests of the masters, of two weights gathered side by side, one of them late, and
    of what the other one must be.
    """
    import deepspeed
    from deepspeed import comm as dist
    from deepspeed.runtime.zero import parameter_offload

    if not ordered:
        use_another_order_on_every_rank(dist.get_rank())
    engine = build(settings(3, block, dtype="bf16", zero=PREFETCH), with_widened_leaf)
    with deepspeed.zero.Init(config_dict_or_path=engine.config):
        late = nn.Linear(WIDTH, WIDTH)
    parameter_offload._inject_parameters(late, parameter_offload.ZeROOrderedDict)  # for 0.18
    late.requires_grad_(False)
    engine.module.second.late = late
    losses = [loss for step in range(4) for loss in train_step(engine, step)]
    losses.append(evaluate(engine))
    with deepspeed.zero.GatheredParameters([late.weight, engine.module.second.up.weight]):
        gathered = digest(late.weight), digest(engine.module.second.up.weight.float())
    del engine.module.second.late  # DeepSpeed knows no master of it
    exact = masters(engine)
    own = digest(torch.from_numpy(exact["second.up.weight"]).bfloat16().float())
    return losses, digests(exact), gathered, own


@pytest.mark.parametrize("scheme", BLOCKS)
def test_every_order_of_a_fetch_trains_alike(scheme: str) -> None:
    found = [
        run(with_a_late_layer, 4, BLOCKS[scheme], ordered, timeout=60,
            environment={"TEST_COLLECTIVE_TIMEOUT": "20"})
        for ordered in (True, False)
    ]  # fmt: skip
    assert found[0] == found[1]
    for _, masters_of_rank, (late, gathered), own in found[1]:
        assert masters_of_rank == found[1][0][1] and late == found[1][0][2][0]
        assert gathered == own, "GatheredParameters sees exact weights beside a late one"
