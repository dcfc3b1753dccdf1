"""Bytes on gloo ranks: from peer to peer, and by one gather and one all-to-all as on NCCL.

gloo has both calls, so the ranks only pretend that their backend is another one. Messages have
other sizes for every pair of ranks. What is made of them is tested in tests/unit: test_reductions,
test_gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Link
from tests.distributed.harness import run

RANKS = 3
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


def _arrived() -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """What an all-to-all and a gather bring, waited for in the other order, and what is counted."""
    traffic, topology = Traffic(), Topology(world=RANKS, node_size=1)
    link, everyone = Link(None, topology=topology, traffic=traffic), range(RANKS)
    payload = torch.from_numpy(np.concatenate([message(link.rank, d) for d in everyone]))
    exchange = link.all_to_all(
        payload,
        sent=[nbytes(link.rank, d) for d in everyone],
        received=[nbytes(s, link.rank) for s in everyone],
        role="gradients",
    )
    gather = link.all_gather(torch.from_numpy(message(link.rank, 0)[:16]), role="weights")
    gathered = gather.wait().numpy()
    return exchange.wait().numpy(), gathered, traffic.received["gradients"]


def _both_ways() -> list[tuple[np.ndarray, np.ndarray, dict[str, int]]]:
    usual = _arrived()
    torch.distributed.isend = torch.distributed.irecv = forbidden
    with other_backend():
        return [usual, _arrived()]


def test_every_byte_arrives_where_it_is_bound_for() -> None:
    for rank, ways in enumerate(run(_both_ways, RANKS)):
        for exchanged, gathered, counted in ways:
            expected = [message(source, rank) for source in range(RANKS)]
            np.testing.assert_array_equal(exchanged, np.concatenate(expected))
            firsts = [message(source, 0)[:16] for source in range(RANKS)]
            np.testing.assert_array_equal(gathered, np.concatenate(firsts))
            others = sum(len(m) for source, m in enumerate(expected) if source != rank)
            assert counted == {"intra": 0, "inter": others}
