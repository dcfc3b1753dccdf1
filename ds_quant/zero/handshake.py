"""Compare settings and hosts of all ranks before the first collective.

[Note: rank 0 judges] Every rank leaves a card in the store; rank 0 reads all cards and leaves its
verdict, for which the others wait. So the store answers a few questions per rank, however many
ranks there are. No collective is involved: a rank without the plugin cannot hang the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist

from ds_quant.comm.topology import PlacementError, host_name, launched_size, place
from ds_quant.config.errors import KEY, show
from ds_quant.config.schema import QuantizedCommConfig
from ds_quant.zero import log

# ---- what ranks show each other ----


# Of one rank. versions, block: what has to be the same on all ranks, by name. kernels: what may
# differ, but makes all ranks as slow as the slowest. host, launched: see ``topology.place``.
Card = Mapping[str, Any]
_SHOWN = 8  # groups of ranks that a message names


def disagreement(cards: Sequence[Card]) -> str:
    """Name what differs from rank 0, ranks that differ alike together; empty if nothing does."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, card in enumerate(cards):
        versions = _differences(cards[0]["versions"], card.get("versions", {}))
        settings = _differences(cards[0]["block"], card.get("block", {}), f"{KEY}.")
        # Another version may have other settings.
        if found := tuple(versions) or tuple(settings):
            groups.setdefault(found, []).append(rank)
    if not groups:
        return ""
    told = [f"{named(ranks)}: {', '.join(found)}" for found, ranks in groups.items()]
    advice = "ranks disagree; install the same ds_quant everywhere and use one config. "
    return advice + "; ".join(told[:_SHOWN])


def _differences(
    first: Mapping[str, Any], other: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    for key in sorted({*first, *other}):
        mine, theirs = first.get(key), other.get(key)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            yield from _differences(mine, theirs, f"{prefix}{key}.")
        elif mine != theirs:
            yield f"{prefix}{key}={show(theirs)} (rank 0: {show(mine)})"


def mixed_kernels(cards: Sequence[Card]) -> list[str]:
    """Warn of ranks whose kernels are unlike those of most."""
    ranks: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        ranks.setdefault(card["kernels"], []).append(rank)
    common, *rare = sorted(ranks, key=lambda kernels: -len(ranks[kernels]))
    if not rare:
        return []
    others = "; ".join(
        f"{named(ranks[kernels])} on {cards[ranks[kernels][0]]['host'].split(' ')[0]}: {kernels}"
        for kernels in rare[:_SHOWN]
    )
    return [
        f"kernels differ, and the slowest rank sets the pace. Most ranks: {common}; {others}. "
        "ds_quant doctor there says why"
    ]


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


WIRE_VERSION = 3  # raised when bytes on the wire change meaning
_PATIENCE = 10.0  # seconds for what another rank does at once


class StartError(RuntimeError):
    """The ranks cannot start together."""


def handshake(
    *,
    config: QuantizedCommConfig,
    must: Mapping[str, str],
    kernels: str,
    rank: int,
    world: int,
    fault: str = "",
) -> int:
    """Check through the store that all ranks fit together, and return the ranks per node.

    Args:
        must: what has to be equal on all ranks besides versions and the block, by name.
        kernels: what may differ, but slows all ranks down if it does.
        fault: of rank 0, a mistake that it alone can find; it ends all ranks.

    Raises:
        StartError: naming the ranks that did not answer within ``handshake_timeout`` seconds,
            those whose version or settings differ, the fault of rank 0, or a placement that makes
            no nodes.
    """
    from ds_quant import __version__

    board = Board.of_call("handshake", rank)
    card = {
        "versions": {"ds_quant": __version__, "wire": WIRE_VERSION, **must},
        "block": config.resolved(),
        "kernels": kernels,
        "host": host_name(),
        "launched": launched_size(world),
    }
    board.put(rank, json.dumps(card))
    ranks = range(world)
    timeout = config.handshake_timeout
    verdict = _follow(board, timeout, ranks, rank) if rank else _lead(board, config, ranks, fault)
    if "error" in verdict:
        raise StartError(f"quantized_comm: {verdict['error']}")
    for warning in verdict["warnings"]:
        log.log_rank0(f"quantized_comm: {warning}")
    return verdict["node_size"]


def _lead(
    board: Board, config: QuantizedCommConfig, ranks: Sequence[int], fault: str
) -> dict[str, Any]:
    """Rank 0: publish the verdict, which has "error", or "node_size" and "warnings"."""
    missing = [] if board.arrive(ranks, config.handshake_timeout) else board.missing(ranks)
    if missing:
        verdict = _no_answer(missing, config.handshake_timeout)
    else:
        verdict = _judge([json.loads(text) for text in board.read(ranks)], config, fault)
    board.put("verdict", json.dumps(verdict))
    if "error" in verdict:  # this process may hold the store: it leaves last
        present = sorted({*ranks[1:]} - {*missing})
        board.arrive([f"left/{rank}" for rank in present], _PATIENCE)
    return verdict


def _follow(board: Board, timeout: float, ranks: Sequence[int], rank: int) -> dict[str, Any]:
    """Every other rank: return the verdict."""
    arrived = board.arrive(["verdict"], timeout)
    missing = [] if arrived else board.missing(ranks)
    if missing:
        verdict = _no_answer(missing, timeout)
    elif board.arrive(["verdict"], 2 * _PATIENCE):
        (text,) = board.read(["verdict"])
        verdict = json.loads(text)
    else:
        verdict = {"error": "rank 0 has left the handshake; see its log"}
    if "error" in verdict:
        board.put(f"left/{rank}", "")
    return verdict


def _no_answer(missing: list[int], timeout: float) -> dict[str, Any]:
    return {
        "error": f"no answer from rank(s) {missing} within {timeout:g} s. Is "
        "ds_quant installed on their hosts, DS_QUANT_DISABLE unset and the same config used there? "
        "A slow start needs a larger quantized_comm.handshake_timeout"
    }


def _judge(cards: Sequence[Card], config: QuantizedCommConfig, fault: str) -> dict[str, Any]:
    if error := disagreement(cards) or fault:
        return {"error": error}
    hosts = [card["host"] for card in cards]
    launched = [card["launched"] and tuple(card["launched"]) for card in cards]
    try:
        node_size, warning = place(hosts, given=config.node_size, launched=launched)
    except PlacementError as error:
        return {"error": str(error)}
    warnings = [warning] if warning else []
    return {"node_size": node_size, "warnings": warnings + mixed_kernels(cards)}


class Board:
    """Texts in the default store, under names with a common prefix."""

    def __init__(self, name: str) -> None:
        self._store = torch_dist.distributed_c10d._get_default_store()
        self._prefix = f"ds_quant/{name}"

    @classmethod
    def of_call(cls, what: str, rank: int) -> Board:
        """The same board for the n-th call of ``what`` on every rank; this is one of ``rank``."""
        return cls(f"{what}/{cls(what).count(f'calls/{rank}')}")

    def count(self, name: str) -> int:
        """Count a call, and return how many there were."""
        return self._store.add(f"{self._prefix}/{name}", 1)

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
