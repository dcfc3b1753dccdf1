"""What ranks tell each other at start-up, and what is wrong with it. Nothing is sent here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_quant.config_errors import KEY, show

SETTINGS = "settings"  # name of the block's digest
_SHOWN = 8  # groups of ranks that a message names


@dataclass(frozen=True, kw_only=True)
class Card:
    """One rank's.

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
    """The card of a JSON text; of a version with other cards one that differs from all others."""
    fields = json.loads(text)
    launched = fields.get("launched")
    return Card(
        equal=fields.get("equal", fields),
        facts=fields.get("facts", {}),
        host=fields.get("host", ""),
        launched=None if launched is None else tuple(launched),
    )


def strangers(cards: Sequence[Card]) -> list[list[int]]:
    """Ranks that must not train with rank 0, those with the same card together."""
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
    """One warning per fact that is not the same on all ranks, naming those unlike most."""
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
