"""owners.plan is the cheapest of the page's ways to cut a bucket, whatever is in it."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.comm.owners import OwnedPiece, OwnedRange, inbound, plan
from ds_quant.policy.route import delivery_codec
from tests.codecs import format_of
from tests.unit import wire_oracle as oracle

CODECS: tuple[Codec, ...] = (
    *(GroupCodec(bits=b, group_size=64) for b in (2, 4, 8)),
    GroupCodec(bits=8, group_size=1024, range="absmax", rounding="stochastic"),
    GroupCodec(bits=3, group_size=32, rounding="stochastic"),
    GroupCodec(bits=3, group_size=128, range="gaussian"),
    CastCodec(torch.bfloat16),
    CastCodec(torch.float32),
)
INNER = GroupCodec(bits=8, group_size=128, range="absmax")


@st.composite
def buckets(draw: st.DrawFn) -> tuple[tuple[OwnedRange, ...], int, int | None]:
    """Any parts, also empty ones and more ranks than elements, over one hop or two.

    Draws the parts, the ranks, and the ranks of a node or None for one hop.
    """
    nodes, node_size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    two_hops = draw(st.booleans()) and nodes > 1 and node_size > 1
    world = nodes * node_size
    owners, numels = st.integers(0, world - 1), st.integers(0, 5000)
    parts = draw(
        st.lists(st.tuples(owners, numels, st.sampled_from(CODECS)), min_size=1, max_size=8)
    )
    inner = INNER if two_hops else None
    shapes = tuple(OwnedRange(o, n, codec, delivery_codec(codec), inner) for o, n, codec in parts)
    return shapes, world, node_size if two_hops else None


@settings(deadline=None, derandomize=True, max_examples=200)  # the machine may be busy
@given(buckets())
def test_the_plan_is_that_of_the_page(case: tuple) -> None:
    shapes, world, node_size = case
    hops = [(INNER, s.codec) if node_size else (s.codec,) for s in shapes]
    runs = [
        (s.owner, s.numel, tuple(map(format_of, codecs)), 0)
        for s, codecs in zip(shapes, hops, strict=True)
    ]
    wanted = oracle.owner_pieces(runs, world, node_size or world)
    found = plan(shapes, world, node_size)
    assert found == tuple(OwnedPiece(p.tensor, p.start, p.stop, p.reducer) for p in wanted)
    # What DeepSpeed's own owners would receive, at least.
    direct = [OwnedPiece(i, 0, s.numel, s.owner) for i, s in enumerate(shapes)]
    assert inbound(shapes, found, world, node_size) <= inbound(shapes, direct, world, node_size)
