"""Inside a node gradients have a communicator of their own, on devices with streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed.harness import run
from tests.distributed.models import PREFETCH, build, digests, masters, settings, train_step

ROLES = ("weights", "gradients")


def _posted(stage: int, streams: bool) -> tuple[list[str], list[tuple[str, int, str]]]:
    """Digests of the weights, and what was posted inside the node, in order: role, process group
    and collective.
    """
    from ds_quant.comm.transport import Link
    from ds_quant.zero import world

    world.hooks = SimpleNamespace(**vars(world.hooks) | {"has_streams": lambda: streams})
    seen, groups = [], []

    def noting(name: str) -> None:
        original = getattr(Link, name)

        def noted(link: Link, payload: torch.Tensor, *, role: str, **how: Any) -> Any:
            if link.size == 2 and link._reach == "intra":
                if link.process_group not in groups:
                    groups.append(link.process_group)
                seen.append((role, groups.index(link.process_group), name))
            return original(link, payload, role=role, **how)

        setattr(Link, name, noted)

    noting("all_gather")
    noting("all_to_all")
    block = {"scheme": "sdp4bit", "node_size": 2, "metrics": {"interval": 0}}
    zero = PREFETCH if stage == 3 else {"reduce_bucket_size": 20_000}
    engine = build(settings(stage, block, dtype="bf16", accumulation=2, zero=zero))
    for step in range(3):
        train_step(engine, step)
    return digests(masters(engine)), seen


@pytest.mark.parametrize("stage", (2, 3))
def test_gradients_have_a_communicator_inside_the_node_and_one_order(stage: int) -> None:
    apart, together = (run(_posted, 4, stage, streams) for streams in (True, False))
    for (weights, seen), (other_weights, other_seen) in zip(apart, together, strict=True):
        assert weights == other_weights
        used = [{group for role, group, _ in seen if role == name} for name in ROLES]
        assert all(len(groups) == 1 for groups in used) and used[0] != used[1]
        assert {group for _, group, _ in other_seen} == {0}
    for one, other in ((0, 1), (2, 3)):  # of a node
        assert apart[one][1] == apart[other][1]
