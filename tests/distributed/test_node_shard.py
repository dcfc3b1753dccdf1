"""node_shard.exchange and gather on gloo ranks, for odd sizes and shards shorter than a row."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ds_quant.codec.bound import Coding
from ds_quant.codec.codec import CastCodec, GroupCodec
from ds_quant.comm.gather import Kept, exchange, gather
from ds_quant.kernels.wire import shard_range
from tests.distributed.harness import run
from tests.distributed.messages import bits
from tests.distributed.models import (
    PREFETCH,
    build,
    digests,
    masters,
    settings,
    train_step,
)
from tests.distributed.test_hops import fabric_of

pytestmark = pytest.mark.distributed

TOPOLOGIES = ((2, 2), (4, 1), (2, 1), (3, 1))
NUMELS = (1, 2, 5, 1000, 5003)
ROUNDS = 12
ROLES = ("weights", "gradients")
BF16 = torch.bfloat16
DIFFERENCE = Coding(codec=GroupCodec(bits=4, group_size=2048, range="absmax"), difference=True)
INT8 = Coding(codec=GroupCodec(bits=8, group_size=128, range="absmax"))


def weights(place: int) -> torch.Tensor:
    draw = np.random.default_rng(place)
    return torch.from_numpy(draw.normal(size=NUMELS[place])).to(BF16)


def _rank(node_size: int) -> dict[str, list]:
    """Bits of what every rank gathers, by how it got there, and the errors of repeated rounds."""
    torch.use_deterministic_algorithms(
        True
    )  # torch.empty is filled with NaN: padding must not leak
    fabric, _ = fabric_of(node_size)
    rank, world = fabric.whole.rank, fabric.whole.size
    inter = fabric.inter or fabric.whole
    kept = [
        Kept.allocate(
            numel, nodes=world // node_size, node_size=node_size, local=rank % node_size,
            dtype=BF16, device="cpu",
        )
        for numel in NUMELS
    ]  # fmt: skip
    shards = [weights(i)[slice(*shard_range(n, world, rank))] for i, n in enumerate(NUMELS)]
    exact = [Coding(codec=CastCodec(BF16))] * len(NUMELS)

    def full(codings: list[Coding]) -> list[torch.Tensor]:
        return gather(kept, codings, fabric.intra).wait()

    errors, seen = [], []
    for _ in range(ROUNDS):
        exchange(kept, shards, [DIFFERENCE] * len(NUMELS), inter).wait()
        values = full(exact)
        seen.append([bits(v) for v in values])
        errors.append([float((v - weights(i)).abs().max()) for i, v in enumerate(values)])
    exchange(kept, shards, exact, inter).wait()
    return {
        "exact": [bits(v) for v in full(exact)],
        "int8": [v.float().numpy() for v in full([INT8] * len(NUMELS))],
        "differences": seen,
        "errors": errors,
    }


@functools.cache
def results(nodes: int, node_size: int) -> list[dict[str, list]]:
    return run(_rank, nodes * node_size, node_size)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_exact_exchange_and_gather_give_the_weights_in_shard_order(topology: tuple) -> None:
    for result in results(*topology):
        for place, got in enumerate(result["exact"]):
            np.testing.assert_array_equal(got, bits(weights(place)))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_all_ranks_hold_equal_bits_after_every_difference(topology: tuple) -> None:
    first, *others = results(*topology)
    for other in others:
        for mine, theirs in zip(first["differences"], other["differences"], strict=True):
            for a, b in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_repeated_differences_reach_the_target(topology: tuple) -> None:
    """The error of a group is at most half a step, 1/14 of the largest error before, and a bf16
    rounding; so after 12 rounds only weights that are one rounding off are left, if any.
    """
    for result in results(*topology):
        errors = np.array(result["errors"])  # (rounds, parameters)
        largest = np.array([float(weights(i).abs().max()) for i in range(len(NUMELS))])
        assert (errors[0] <= largest * (1 / 14 + 2.0**-7)).all()
        assert (errors[1] <= largest * (1 / 14 + 2.0**-7) ** 2 + largest * 2.0**-8).all()
        assert (errors[-1] <= largest * 2.0**-8).all()
        assert (errors[-1] <= errors[0]).all()


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_eight_bits_inside_a_node_are_equal_on_all_ranks_and_close(topology: tuple) -> None:
    first, *others = results(*topology)
    for place, got in enumerate(first["int8"]):
        exact = weights(place).float().numpy()
        step = np.abs(exact).max() / 127
        assert np.abs(got - exact).max() <= step / 2 + np.abs(exact).max() * 2.0**-8
        for other in others:
            np.testing.assert_array_equal(got, other["int8"][place])


# ---- communicators ----


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
