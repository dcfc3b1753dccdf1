"""Collectives without the peer-to-peer path of gloo, as on NCCL: one gather and one all-to-all.

gloo has both calls, so the ranks only pretend that their backend is another one. Messages have
other sizes for every pair of ranks; the bytes that must arrive are computed here. Collectives,
owners and hops must then give the bits that they give from peer to peer, which their own tests
compare with plain sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.distributed import test_collectives, test_hops, test_owners
from tests.distributed.harness import run
from tests.distributed.messages import bits, make_link

pytestmark = pytest.mark.distributed

NODE_SIZE = 2
SENDS_NOTHING = (2, 1)  # to whom


def nbytes(source: int, destination: int) -> int:
    """Of the message between two ranks: other sizes in both directions, one of them nothing."""
    return 0 if (source, destination) == SENDS_NOTHING else 16 * (1 + 3 * source + destination)


def message(source: int, destination: int) -> np.ndarray:
    return np.arange(nbytes(source, destination), dtype=np.uint8) + 100 * source + 10 * destination


@contextmanager
def other_backend() -> Iterator[None]:
    """Links made inside take their backend for another one than gloo."""
    gloo = torch.distributed.get_backend
    torch.distributed.get_backend = lambda group=None: "other"
    try:
        yield
    finally:
        torch.distributed.get_backend = gloo


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("a message went from peer to peer")


def _bytes_rank() -> tuple[np.ndarray, np.ndarray]:
    """What an all-to-all and a gather bring."""
    with other_backend():
        link, _ = make_link()
    torch.distributed.isend = torch.distributed.irecv = forbidden
    everyone = range(link.size)
    payload = torch.from_numpy(np.concatenate([message(link.rank, d) for d in everyone]))
    exchange = link.all_to_all(
        payload,
        sent=[nbytes(link.rank, d) for d in everyone],
        received=[nbytes(s, link.rank) for s in everyone],
        role="gradients",
    )
    gather = link.all_gather(torch.from_numpy(message(link.rank, 0)[:16]), role="weights")
    return exchange.wait().numpy(), gather.wait().numpy()


def test_every_byte_arrives_where_it_is_bound_for() -> None:
    for rank, (exchanged, gathered) in enumerate(run(_bytes_rank, 3)):
        expected = [message(source, rank) for source in range(3)]
        np.testing.assert_array_equal(exchanged, np.concatenate(expected))
        firsts = [message(source, 0)[:16] for source in range(3)]
        np.testing.assert_array_equal(gathered, np.concatenate(firsts))


def _everything() -> dict[str, list[np.ndarray | None]]:
    """Collectives, owners and hops over one and two levels, on lossy codecs and odd sizes."""
    link, _ = make_link(NODE_SIZE)
    found: dict[str, list[np.ndarray | None]] = {}
    items = test_collectives.UNEVEN
    own = [item.off_grid(rank=link.rank) for item in items]
    gathered = test_collectives.gather(items, [item.off_grid() for item in items], link)
    found["gather"] = [bits(values) for values in gathered.wait()]
    found["reduce"] = [bits(v) for v in test_collectives.reduce(items, own, link).wait()]
    shapes = test_owners.LAYOUTS["two owners"](test_owners.INT8, link.size)
    assert test_owners.is_balanced(shapes, link.size)  # delivers too
    values = test_owners.contributions(shapes, link.size, link.rank)
    found["owners"] = [
        None if total is None else bits(total)
        for total in test_owners.reduce_flat(shapes, values, link, scale=1.0)
    ]
    for node_size in (NODE_SIZE, link.size):
        fabric, _ = test_hops.fabric_of(node_size)
        sums = test_hops.reduce(test_hops.QUANTIZED, fabric, node_size)
        found[f"hops {node_size}"] = [None if s is None else bits(s) for s in sums]
        rows = fabric.all_gather(torch.full((48,), link.rank, dtype=torch.uint8), role="weights")
        found[f"rows {node_size}"] = [np.array(rows.wait()).copy()]
    return found


def _both_rank() -> tuple[dict, dict]:
    """As messages go on gloo, and as they go elsewhere."""
    usual = _everything()
    torch.distributed.isend = torch.distributed.irecv = forbidden
    with other_backend():
        return usual, _everything()


def test_collectives_owners_and_hops_give_the_same_bits() -> None:
    results = run(_both_rank, 4)
    for name in results[0][0]:
        pairs = [(usual[name], other[name]) for usual, other in results]
        for usual, other in pairs:
            for expected, got in zip(usual, other, strict=True):
                assert (expected is None) == (got is None), name
                np.testing.assert_array_equal(got, expected, err_msg=name)
        assert sum(a.size for usual, _ in pairs for a in usual if a is not None) > 0, name
