"""Bytes on gloo ranks: from peer to peer, and by one gather and one all-to-all as on NCCL.

gloo has both calls, so the ranks only pretend that their backend is another one. Messages have
other sizes for every pair of ranks. What is made of them is tested in tests/unit: test_reductions,
test_gathered.
"""

from __future__ import annotations

import numpy as np
import torch

from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Link
from tests.distributed.harness import on_ranks

RANKS = 3
SENDS_NOTHING = (2, 1)  # to whom


def nbytes(source: int, destination: int) -> int:
    """Of the message between two ranks: other sizes in both directions, one of them nothing."""
    return 0 if (source, destination) == SENDS_NOTHING else 16 * (1 + 3 * source + destination)


def message(source: int, destination: int) -> np.ndarray:
    return np.arange(nbytes(source, destination), dtype=np.uint8) + 100 * source + 10 * destination


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("a message went from peer to peer")


def check() -> None:
    """What an all-to-all and a gather bring, waited for in the other order, and what is counted."""
    traffic, topology = Traffic(), Topology(world=RANKS, node_size=1)
    link, everyone = Link(None, topology=topology, traffic=traffic), range(RANKS)
    exchange = link.all_to_all(
        torch.from_numpy(np.concatenate([message(link.rank, d) for d in everyone])),
        sent=[nbytes(link.rank, d) for d in everyone],
        received=[nbytes(s, link.rank) for s in everyone],
        role="gradients",
    )
    gather = link.all_gather(torch.from_numpy(message(link.rank, 0)[:16]), role="weights")
    firsts = [message(source, 0)[:16] for source in everyone]
    np.testing.assert_array_equal(gather.wait().numpy(), np.concatenate(firsts))
    expected = [message(source, link.rank) for source in everyone]
    np.testing.assert_array_equal(exchange.wait().numpy(), np.concatenate(expected))
    others = sum(len(m) for source, m in enumerate(expected) if source != link.rank)
    assert traffic.received["gradients"] == {"intra": 0, "inter": others}


@on_ranks(RANKS)
def test_every_byte_arrives_where_it_is_bound_for() -> None:
    check()
    torch.distributed.isend = torch.distributed.irecv = forbidden
    gloo = torch.distributed.get_backend
    torch.distributed.get_backend = lambda group=None: "other"
    check()
    torch.distributed.get_backend = gloo
