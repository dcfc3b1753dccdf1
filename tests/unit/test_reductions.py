"""Reductions of gradients on many ranks of one process against wire_oracle.py, which was written
from docs/wire_format.md alone: every message byte by byte, every sum bit by bit.

Schemes, topologies, stages, slices and micro-steps that cross between nodes once; each pair of
values occurs.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from ds_quant.codec.codec import CAST_NAMES
from ds_quant.zero.owner_gradients import OwnerReduction
from tests.codecs import format_of
from tests.pairwise import all_pairs
from tests.unit import wire_oracle as oracle
from tests.world import SimulatedRank, World

# Quantized from 64 elements on, but for the last name; of odd sizes, with short and empty shards.
SHAPES = {
    "w": (41, 53), "bias": (33,), "tiny": (3, 3), "m": (16, 128), "one": (1,), "thin": (65, 1),
    "norm": (2, 5), "large.kept": (130, 127),
}  # fmt: skip
NUMELS = [int(np.prod(shape)) for shape in SHAPES.values()]


def module() -> nn.Module:
    made = nn.ParameterDict()
    for name, shape in SHAPES.items():
        made[name.replace(".", "_")] = nn.Parameter(torch.zeros(shape))
    return made


class Case(NamedTuple):
    """scheme: and its signs, if not its own, or one of ``BLOCKS``. layout: of owners under ZeRO-2,
    None under ZeRO-3. dtype: None for two in turns. crossing: micro-steps that cross nodes once,
    where there are two levels.
    """

    scheme: str
    topology: tuple[int, int]
    layout: str | None
    dtype: torch.dtype | None
    slices: int | None
    crossing: int


CASES = [
    Case(*case)
    for case in all_pairs(
        {
            "scheme": "sdp4bit,qsdp,eden3,full_precision,zeropp,tlq_hs,eden2 node".split(","),
            "topology": ((2, 2), (1, 3), (4, 1), (3, 2), (2, 1)),
            "layout": (None, "shards", "one owner", "two owners"),
            "dtype": (torch.bfloat16, torch.float32),
            "slices": (None, 3),
            "crossing": (1, 3),
        }
    )
] + [
    Case("qsdp", (1, 3), None, torch.bfloat16, None, 1),
    Case("qsdp", (4, 1), None, None, None, 1),
    Case("sdp4bit", (2, 2), None, None, 3, 3),
    Case("other groups inside", (2, 2), None, None, 3, 1),
]
BLOCKS = {
    "other groups inside": {
        "scheme": "sdp4bit",
        "gradients": {"group_size": 96, "rotation": 0, "intra": {"bits": 8, "group_size": 160}},
    }
}


def dtype_of(case: Case, parameter: int) -> torch.dtype:
    return case.dtype or (torch.bfloat16, torch.float32)[parameter // 2 % 2]


# ---- what is reduced ----


def gradients(case: Case, rank: int, micro: int) -> list[torch.Tensor]:
    """Return the gradients of all parameters of a rank in a micro-step."""
    draw = np.random.default_rng((rank, micro))
    found = [torch.from_numpy(draw.normal(size=n) * 10 ** draw.normal(size=n)) for n in NUMELS]
    return [values.to(dtype_of(case, i)) for i, values in enumerate(found)]


def borders(case: Case, world: int) -> list[int]:
    """Return the borders of the parts of the bucket that the ranks own; its ends are shorter."""
    total = sum(NUMELS)
    if case.layout == "one owner":
        return [0] * world + [total]
    if case.layout == "two owners":
        return [0] + [1500] * (world - 1) + [total]
    return [total * rank // world for rank in range(world + 1)]


def reduce_rank(rank: SimulatedRank, case: Case, meet: threading.Barrier) -> list[torch.Tensor]:
    """Return the results of a rank: of every parameter its shard, or its part of the bucket.

    All ranks share the engine that counts micro-steps, so they meet between these.
    """
    world, params = rank.run.topology.world, list(rank.engine.module.parameters())
    owners = OwnerReduction(rank, rank.partial_gradients, SimpleNamespace(dp_process_group=None))
    for micro in range(rank.engine.micro_steps):
        tensors = gradients(case, rank.number, micro)
        if case.layout is None:
            found = rank.reduction.begin(params, tensors, None).finish()
        else:
            flat, cuts = torch.cat(tensors), borders(case, world)
            slices = [flat[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
            call = {
                "process_group": None, "communication_data_type": case.dtype,
                "small_bucket": [s for s in slices if len(s)],
                "bucket_ranks": [r for r, s in enumerate(slices) if len(s)],
            }  # fmt: skip
            with owners.bucket(flat, params, float(world)):
                owners.reduce(lambda **_: None, call)
            found = [slices[rank.number]]
        meet.wait(20)
        rank.after_backward()
        rank.engine.is_last_micro_step = micro == rank.engine.micro_steps - 2
    return found


# ---- what the page says ----


@dataclass(frozen=True, kw_only=True)
class Run:
    """Elements of a gradient that are one tensor of a reduction: where they begin in it and in the
    bucket, and their owner.
    """

    parameter: int
    numel: int
    first: int = 0
    start: int = 0
    owner: int = 0


class Page:
    """Follows the page for all ranks of a case."""

    def __init__(self, case: Case, world: World) -> None:
        self.case, self.world, self.ranks = case, world, len(world.ranks)
        self.nodes, self.node_size = case.topology
        self.two = self.nodes > 1 and self.node_size > 1
        self.scheme = world.ranks[0].run.scheme
        whole = tuple(range(self.ranks))
        topology = world.ranks[0].run.topology
        levels = topology.levels() if self.two else [[whole]]
        self.links = [[tuple(link) for link in level] for level in levels]
        self.full_precision_own = self.two or self.scheme.gradients_intra is not None
        self.seen: dict[tuple[int, ...], int] = defaultdict(int)  # rounds by group
        self.runs = self._runs()
        self.pieces = self._pieces()
        self.received = [{"intra": 0, "inter": 0} for _ in whole]

    def formats(self, parameter: int) -> tuple[oracle.Sent, ...]:
        hops = 1 + self.two
        if NUMELS[parameter] < 64 or parameter == len(NUMELS) - 1 or not self.scheme.gradients:
            return (CAST_NAMES[dtype_of(self.case, parameter)],) * hops
        outer = format_of(self.scheme.gradients)
        inner = format_of(self.scheme.gradients_intra or self.scheme.gradients)
        if self.two:
            return inner, outer
        return (inner if self.nodes == 1 else outer,)

    def rotation(self, parameter: int) -> int:
        quantized = isinstance(self.formats(parameter)[0], oracle.Format)
        return self.scheme.block.gradients.rotation if quantized else 0

    @property
    def own_signs(self) -> bool:
        """Return True if every sender of the last hop has its own signs."""
        gradients = self.scheme.block.gradients
        if gradients.rotation_signs is True:
            return gradients.range == "gaussian" and gradients.bits < 4 and self.nodes >= 4
        return gradients.rotation_signs == "node" and self.nodes > 1

    def signs(self, parameter: int, sender: int | None) -> np.ndarray | None:
        """Return the signs of the first backward, which are those of sums that wait."""
        h = self.rotation(parameter)
        if not (h and self.scheme.block.gradients.rotation_signs):
            return None
        key = oracle.key_of(seed=0, role=1, parameter=parameter, stream=0, hop=99)
        return oracle.signs_of(key, 0, h, sender if self.own_signs else None)

    def _runs(self) -> list[Run]:
        if self.case.layout is None:
            runs = [Run(parameter=i, numel=n) for i, n in enumerate(NUMELS)]
            small = [run for run in runs if self._is_small(run)]
            large = [run for run in runs if not self._is_small(run)]
            dtypes = list(dict.fromkeys(dtype_of(self.case, run.parameter) for run in small))
            return large + sorted(
                small, key=lambda r: dtypes.index(dtype_of(self.case, r.parameter))
            )
        found, small, cuts = [], {}, borders(self.case, self.ranks)
        begins = np.cumsum([0, *NUMELS])
        for owner, (low, high) in enumerate(zip(cuts, cuts[1:], strict=False)):
            for i, begin in enumerate(begins[:-1]):
                a, b = max(low, begin), min(high, begin + NUMELS[i])
                if a < b:
                    run = Run(parameter=i, numel=int(b - a), first=int(a - begin), start=int(a),
                              owner=owner)  # fmt: skip
                    if self._is_small(run) and owner in small:
                        small[owner].append(run)
                    else:
                        found.append([run])
                        if self._is_small(run):
                            small[owner] = found[-1]
        return [run for runs in found for run in runs]

    def _is_small(self, run: Run) -> bool:
        return oracle.is_small(self.formats(run.parameter), run.numel)

    def _pieces(self) -> list[oracle.Piece]:
        how = [(self.formats(run.parameter), self.rotation(run.parameter)) for run in self.runs]
        if self.case.layout is None:
            plain = not self.two and not self.full_precision_own and not any(h for _, h in how)
            return [
                piece
                for i, run in enumerate(self.runs)
                for piece in oracle.shards(i, run.numel, self.ranks, *how[i], plain)
            ]
        runs: list[tuple] = []
        members: list[list[tuple[int, int]]] = []
        for i, run in enumerate(self.runs):
            alike = runs and runs[-1][0] == run.owner and runs[-1][2:] == how[i]
            if alike and self._is_small(run):
                runs[-1] = (run.owner, runs[-1][1] + run.numel, *how[i])
                members[-1].append((i, run.numel))
            else:
                runs.append((run.owner, run.numel, *how[i]))
                members.append([(i, run.numel)])
        return oracle.split_small(oracle.owner_pieces(runs, self.ranks, self.node_size), members)

    def _row(self, p: oracle.Piece, x: np.ndarray, rank: int, hop: int, step: int) -> bytes:
        run = self.runs[p.tensor]
        key = oracle.key_of(seed=0, role=1, parameter=run.parameter, stream=rank + 1, hop=hop)
        return oracle.row_of(x, p.formats[hop], (key, step), p.first(run.first))

    def _exchange(
        self, level: int, own: list[dict[oracle.Piece, np.ndarray]], step: int
    ) -> list[dict[oracle.Piece, np.ndarray]]:
        """One hop of a slice on all ranks: their messages are ours, and what everybody sums."""
        sums: list[dict[oracle.Piece, np.ndarray]] = [{}] * self.ranks
        for link in self.links[level]:
            # Under two hops the first link of a rank takes what is bound for its place.
            place = (lambda p: p.reducer % self.node_size) if self.two and not level else (
                lambda p, link=link: link.index(p.reducer))  # fmt: skip
            sent = self._next(link)
            for mine, receiver in enumerate(link):
                pieces = [p for p in own[receiver] if place(p) == mine]
                for source, sender in enumerate(link):
                    rows = {p: self._row(p, own[sender][p], sender, level, step) for p in pieces}
                    if self.full_precision_own and sender == receiver:
                        rows = {}
                    assert oracle.holds(sent[mine][source], rows, level)
                self._count(receiver, link, sent[mine])
                exact = (mine, own[receiver]) if self.full_precision_own else None
                arrived = dict(enumerate(sent[mine]))
                signs = None
                if self.own_signs and level == self.two:
                    signs = lambda p, s: self.signs(self.runs[p.tensor].parameter, s)  # noqa: E731
                sums[receiver] = oracle.add_up(pieces, arrived, level, exact, signs)
        return sums

    def _next(self, link: tuple[int, ...]) -> dict[int, list[bytes]]:
        self.seen[link] += 1
        return self.world.messages(link)[self.seen[link] - 1]

    def _count(self, receiver: int, link: tuple[int, ...], messages: Sequence[bytes]) -> None:
        for sender, message in zip(link, messages, strict=True):
            if sender != receiver:
                near = sender // self.node_size == receiver // self.node_size
                self.received[receiver]["intra" if near else "inter"] += len(message)

    def sums(self, values: list[list[list[np.ndarray]]]) -> dict[oracle.Piece, np.ndarray]:
        """Return the sums of gradients, given by micro-step and rank in the order of the runs."""
        last = len(values) - 1
        waiting: dict[tuple[int, oracle.Piece], np.ndarray] = {}
        for micro, by_rank in enumerate(values):
            for part in oracle.slices(self.pieces, self.case.slices):
                own = [self._own(part, by_rank[r], r) for r in range(self.ranks)]
                inner = self._exchange(0, own, micro)
                for r, sums in enumerate(inner):
                    for p, partial in sums.items():
                        before = waiting.get((r, p))
                        waiting[r, p] = partial if before is None else before + partial
        found: dict[oracle.Piece, np.ndarray] = {}
        for part in oracle.slices(self.pieces, self.case.slices):
            own = [{p: waiting[r, p] for p in part if (r, p) in waiting} for r in range(self.ranks)]
            if self.two:
                own = self._exchange(1, own, last)
            for sums in own:
                for p, total in sums.items():
                    signs = self.signs(self.runs[p.tensor].parameter, None)
                    done = oracle.finished(p, total, 1 / self.ranks, self.own_signs)
                    turned = signs is None or self.own_signs
                    found[p] = done if turned else done * np.resize(signs, len(done))
        return {p: joined(found, p) for p in self.pieces}

    def _own(
        self, part: list[oracle.Piece], values: list[np.ndarray], rank: int
    ) -> dict[oracle.Piece, np.ndarray]:
        """Values of a rank, rotated."""
        found, sender = {}, rank // self.node_size if self.two else rank
        for p in part:
            x = values[p.tensor][p.start : p.stop]
            signs = self.signs(self.runs[p.tensor].parameter, sender)
            x = x if signs is None else x * np.resize(signs, len(x))
            found[p] = oracle.rotate(x, p.h) if p.h else x
        return found

    def deliver(self, sums: dict[oracle.Piece, np.ndarray], step: int) -> None:
        """Replace the sums that another rank than the owner has made by what the owner decodes."""
        moved = [p for p in self.pieces if p.reducer != self.runs[p.tensor].owner]
        if self.case.layout is None or not moved:
            return
        sent = self._next(tuple(range(self.ranks)))
        for owner in range(self.ranks):
            for reducer in range(self.ranks):
                rows = {}
                for p in moved:
                    run = self.runs[p.tensor]
                    if (p.reducer, run.owner) == (reducer, owner):
                        fmt = oracle.delivered(p.formats[-1])
                        key = oracle.key_of(seed=0, role=1, parameter=run.parameter,
                                            stream=reducer + 1, hop=len(p.formats) - 1)  # fmt: skip
                        first = oracle.DELIVERED + p.first(run.first)
                        row = oracle.row_of(sums[p], fmt, (key, step), first)
                        sums[p] = oracle.read(row, fmt, len(sums[p]))
                        rows[oracle.replace(p, formats=(fmt,), h=0)] = row
                assert oracle.holds(sent[owner][reducer], rows, 0)
            self._count(owner, tuple(range(self.ranks)), sent[owner])


def joined(found: dict[oracle.Piece, np.ndarray], whole: oracle.Piece) -> np.ndarray:
    """The sum of a piece from those of its slices."""
    parts = [
        p
        for p in found
        if p.tensor == whole.tensor and whole.start <= p.start < p.stop <= whole.stop
    ]
    values = [found[p] for p in sorted(parts, key=lambda p: p.start)]
    return np.concatenate([np.zeros(0, np.float32), *values])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_messages_and_sums_are_those_of_the_page(case: Case) -> None:
    check(case)


def check(case: Case) -> None:
    scheme, _, signs = case.scheme.partition(" ")
    block = {"scheme": scheme, "min_numel": 64, "exclude": ["*kept*"], "slices": case.slices}
    block |= BLOCKS.get(case.scheme, {"gradients": {"rotation_signs": signs}} if signs else {})
    nodes, node_size = case.topology
    once = nodes > 1 and node_size > 1 and case.scheme not in ("zeropp", "tlq_hs")
    micro_steps = case.crossing if once else 1
    how = {"module": module(), "stage": 2 if case.layout else 3, "micro_steps": micro_steps}
    world = World(nodes, node_size, **how, **block, allow_full_replica=True)
    world.engine.is_last_micro_step = micro_steps == 1
    meet = threading.Barrier(len(world.ranks))
    found = world.all(lambda rank: reduce_rank(rank, case, meet))
    page = Page(case, world)
    values = [
        [
            [
                gradients(case, rank, micro)[run.parameter][run.first : run.first + run.numel]
                .float().numpy() for run in page.runs
            ]
            for rank in range(page.ranks)
        ]
        for micro in range(micro_steps)
    ]  # fmt: skip
    sums = page.sums(values)
    page.deliver(sums, micro_steps - 1)
    for rank, got in enumerate(found):
        for i, run in enumerate(page.runs):
            if case.layout is None:
                mine, of = got[run.parameter], [p for p in sums if p.reducer == rank]
            elif run.owner == rank:
                begin = run.start - borders(case, page.ranks)[rank]
                mine, of = got[0][begin : begin + run.numel], list(sums)
            else:
                continue
            parts = [sums[p] for p in of if p.tensor == i]
            wanted = torch.from_numpy(np.concatenate(parts)).to(dtype_of(case, run.parameter))
            torch.testing.assert_close(mine, wanted, rtol=0, atol=0, equal_nan=True)
        assert world.ranks[rank].run.traffic.received["gradients"] == page.received[rank]
