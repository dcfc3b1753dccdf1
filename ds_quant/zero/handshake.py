"""Compare settings and hosts of all ranks before the first collective.

[Note: rank 0 judges] Every rank leaves a card in the store; rank 0 reads all cards and leaves its
verdict, for which the others wait. So the store answers a few questions per rank, however many
ranks there are. No collective is involved: a rank without the plugin cannot hang the others.

[Note: blocks] Cards hold a digest of the block. Only where digests differ rank 0 asks one rank of
each digest for the block itself, to name the keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist

from ds_quant.comm.topology import PlacementError, host_name, launched_size, place
from ds_quant.config.errors import KEY, show
from ds_quant.config.schema import QuantizedCommConfig
from ds_quant.zero import log

# ---- what ranks show each other ----


SETTINGS = "settings"  # name of the block's digest
_SHOWN = 8  # groups of ranks that a message names


@dataclass(frozen=True, kw_only=True)
class Card:
    """Settings and facts of one rank.

    equal: what has to be the same on all ranks, by name. facts: what may differ, but makes all
    ranks as slow as the slowest. host, launched: see ``topology.place``.
    """

    equal: Mapping[str, Any]
    facts: Mapping[str, str]
    host: str
    launched: tuple[str, int] | None

    def to_json(self) -> str:
        return json.dumps(vars(self))


def card_from(text: str | bytes) -> Card:
    """Parse a card; one of a version with other fields differs from all others."""
    fields = json.loads(text)
    launched = fields.get("launched")
    return Card(
        equal=fields.get("equal", fields),
        facts=fields.get("facts", {}),
        host=fields.get("host", ""),
        launched=None if launched is None else tuple(launched),
    )


def mismatched(cards: Sequence[Card]) -> list[list[int]]:
    """Group the ranks that must not train with rank 0 by their card."""
    groups: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        if card.equal != cards[0].equal:
            groups.setdefault(json.dumps(card.equal, sort_keys=True), []).append(rank)
    return list(groups.values())[:_SHOWN]


def disagreement(
    cards: Sequence[Card], groups: Sequence[list[int]], blocks: Mapping[int, Mapping[str, Any]]
) -> str:
    """Name what differs from rank 0, group by group.

    ``blocks``: of rank 0 and of the first rank of every group whose digest differs.
    """
    told = []
    for ranks in groups:
        first = ranks[0]
        found = list(_differences(cards[0].equal, cards[first].equal))
        if first in blocks:
            found += _differences(blocks[0], blocks[first], f"{KEY}.")
        told.append(
            f"{named(ranks)}: {', '.join(found) or 'another block, which it does not show'}"
        )
    return "ranks disagree; install the same ds_quant everywhere and use one config. " + "; ".join(
        told
    )


def _differences(
    first: Mapping[str, Any], other: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    for key in sorted({*first, *other}):
        mine, theirs = first.get(key), other.get(key)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            yield from _differences(mine, theirs, f"{prefix}{key}.")
        elif mine != theirs and key != SETTINGS:
            yield f"{prefix}{key}={show(theirs)} (rank 0: {show(mine)})"


def mixed_facts(cards: Sequence[Card]) -> list[str]:
    """Return one warning per fact that differs between ranks, naming the ranks unlike most."""
    warnings = []
    for name in sorted({name for card in cards for name in card.facts}):
        values: dict[str | None, list[int]] = {}
        for rank, card in enumerate(cards):
            values.setdefault(card.facts.get(name), []).append(rank)
        common, *rare = sorted(values, key=lambda value: -len(values[value]))
        if rare:
            others = "; ".join(
                f"{named(values[value])} on {cards[values[value][0]].host.split(' ')[0]}: {value}"
                for value in rare[:_SHOWN]
            )
            warnings.append(
                f"{name} differ, and the slowest rank sets the pace. Most ranks: {common}; "
                f"{others}. ds_quant doctor there says why"
            )
    return warnings


def named(ranks: Sequence[int]) -> str:
    """[2] -> "rank 2", [2, 3, 4, 7] -> "ranks 2 to 4, 7"; the first few of many."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    shown = [" to ".join(map(str, run)) for run in runs[:_SHOWN]]
    more = " and others" if len(runs) > _SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}{more}"


# ---- the handshake ----


WIRE_VERSION = 2  # raised when bytes on the wire change meaning
_CARDS = 2  # raised when cards change meaning
_PATIENCE = 10.0  # seconds for what another rank does at once


class StartError(RuntimeError):
    """The ranks cannot start together."""


def handshake(
    *,
    config: QuantizedCommConfig,
    must: Mapping[str, str],
    facts: Mapping[str, str],
    rank: int,
    world: int,
    fault: str = "",
) -> int:
    """Check through the store that all ranks fit together, and return the ranks per node.

    Args:
        must: what has to be equal on all ranks besides versions and the block, by name.
        facts: what may differ, but slows all ranks down if it does, by name; one warning each.
        fault: of rank 0, a mistake that it alone can find; it ends all ranks.

    Raises:
        StartError: naming the ranks that did not answer within ``handshake_timeout`` seconds,
            those whose version or settings differ, the fault of rank 0, or a placement that makes
            no nodes.
    """
    from ds_quant import __version__

    store = torch_dist.distributed_c10d._get_default_store()
    engine = store.add(f"ds_quant/engines/{rank}", 1)  # the n-th engine of this rank
    meeting = _Meeting(Board(store, f"ds_quant/handshake/{engine}"), config, world)
    versions = {"ds_quant": __version__, "wire": WIRE_VERSION, "cards": _CARDS}
    card = Card(
        equal={**versions, **must, SETTINGS: config.digest()},
        facts=dict(facts),
        host=host_name(),
        launched=launched_size(world),
    )
    verdict = meeting.lead(card, fault) if rank == 0 else meeting.follow(card, rank)
    if "error" in verdict:
        raise StartError(f"quantized_comm: {verdict['error']}")
    for warning in verdict["warnings"]:
        log.log_rank0(f"quantized_comm: {warning}")
    return verdict["node_size"]


class Board:
    """Texts in the store under names with a common prefix."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def put(self, name: object, text: str) -> None:
        self._store.set(f"{self._prefix}/{name}", text)

    def read(self, names: Sequence[object]) -> list[str]:
        """Read the texts that are there, in one request where the store can."""
        keys = [f"{self._prefix}/{name}" for name in names]
        if self._store.has_extended_api():
            return [text.decode() for text in self._store.multi_get(keys)]
        return [self._store.get(key).decode() for key in keys]

    def arrive(self, names: Sequence[object], seconds: float) -> bool:
        """Wait for texts; returns whether all arrived in time."""
        try:
            keys = [f"{self._prefix}/{name}" for name in names]
            self._store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError:  # torch.distributed.DistStoreError and friends
            return False
        return True

    def missing(self, names: Sequence[int]) -> list[int]:
        """Find missing texts by halving: few requests where few are missing."""
        if not names or self._store.check([f"{self._prefix}/{name}" for name in names]):
            return []
        if len(names) == 1:
            return list(names)
        half = len(names) // 2
        return self.missing(names[:half]) + self.missing(names[half:])


class _Meeting:
    """One handshake. A verdict has "error", or "node_size" and "warnings"."""

    def __init__(self, board: Board, config: QuantizedCommConfig, world: int) -> None:
        self._board, self._config = board, config
        self._ranks = list(range(world))

    def lead(self, card: Card, fault: str) -> dict[str, Any]:
        """Rank 0: judge and publish the verdict."""
        board, timeout = self._board, self._config.handshake_timeout
        board.put(0, card.to_json())
        missing = [] if board.arrive(self._ranks, timeout) else board.missing(self._ranks)
        if missing:
            board.put("asked", "[]")
        verdict = self._no_answer(missing) if missing else self._judge(fault)
        board.put("verdict", json.dumps(verdict))
        if "error" in verdict:  # this process may hold the store: it leaves last
            present = sorted({*self._ranks[1:]} - {*missing})
            board.arrive([f"left/{rank}" for rank in present], _PATIENCE)
        return verdict

    def follow(self, card: Card, rank: int) -> dict[str, Any]:
        """Every other rank: read the verdict, and publish the block first if asked for it."""
        board = self._board
        board.put(rank, card.to_json())
        verdict = self._hear(rank)
        if "error" in verdict:
            board.put(f"left/{rank}", "")
        return verdict

    def _hear(self, rank: int) -> dict[str, Any]:
        board, unheard = self._board, {"error": "rank 0 has left the handshake; see its log"}
        if not board.arrive(["asked"], self._config.handshake_timeout):
            if missing := board.missing(self._ranks):
                return self._no_answer(missing)
            if not board.arrive(["asked"], _PATIENCE):
                return unheard
        (asked,) = board.read(["asked"])
        if rank in json.loads(asked):
            board.put(f"block/{rank}", json.dumps(self._config.resolved()))
        if not board.arrive(["verdict"], 2 * _PATIENCE):
            return unheard
        (verdict,) = board.read(["verdict"])
        return json.loads(verdict)

    def _no_answer(self, missing: list[int]) -> dict[str, Any]:
        error = (
            f"no answer from rank(s) {missing} within {self._config.handshake_timeout:g} s. Is "
            "ds_quant installed on their hosts, DS_QUANT_DISABLE unset and the same config used "
            "there? A slow start needs a larger quantized_comm.handshake_timeout"
        )
        return {"error": error}

    def _judge(self, fault: str) -> dict[str, Any]:
        cards = [card_from(text) for text in self._board.read(self._ranks)]
        groups = mismatched(cards)
        blocks = self._blocks(cards, [ranks[0] for ranks in groups])
        if groups:
            return {"error": disagreement(cards, groups, blocks)}
        if fault:
            return {"error": fault}
        try:
            placement = place(
                [card.host for card in cards],
                given=self._config.node_size,
                launched=[card.launched for card in cards],
            )
        except PlacementError as error:
            return {"error": str(error)}
        warnings = [placement.warning] if placement.warning else []
        return {"node_size": placement.node_size, "warnings": warnings + mixed_facts(cards)}

    def _blocks(self, cards: Sequence[Card], ranks: Sequence[int]) -> dict[int, Any]:
        """Return the blocks of rank 0 and of those of ``ranks`` that differ. See [Note: blocks]."""
        mine, board = cards[0].equal, self._board
        readable = [r for r in ranks if cards[r].equal.get("cards") == _CARDS]
        asked = [r for r in readable if cards[r].equal[SETTINGS] != mine[SETTINGS]]
        board.put("asked", json.dumps(asked))
        names = [f"block/{rank}" for rank in asked]
        if not asked or not board.arrive(names, _PATIENCE):
            return {}
        blocks = dict(zip(asked, map(json.loads, board.read(names)), strict=True))
        return {0: self._config.resolved(), **blocks}
