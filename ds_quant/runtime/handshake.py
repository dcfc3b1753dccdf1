"""Compare the settings and hosts of all ranks before the first collective, through torch's store.

[Note: the first rank judges] Every rank puts a card into the store. The first rank, which is rank 0
unless the model belongs to other ranks, compares the cards and writes the verdict, for which the
other ranks wait. So the store answers a few requests per rank, independent of the number of ranks.
No collective is involved: a rank without the plugin cannot hang the others.

[Note: the first verdict holds] A rank that has an error or no block, and one that has waited for
too long, writes a verdict, too. The store takes the first one, and all ranks obey it. So no rank
starts without another one.

[Note: calls in step] Calls of different ranks belong together by their number: the third handshake
of one rank is the third of all. So a call that ends with an error, or finds no block, counts, too.
A rank that comes to a handshake that others have given up goes on to the next number.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore
from torch.distributed import distributed_c10d as c10d

from ds_quant.comm.topology import PlacementError, host_name, launcher_variable, place
from ds_quant.config.environment import KILL_VARIABLE
from ds_quant.config.errors import KEY, differences
from ds_quant.config.schema import QuantizedCommConfig
from ds_quant.kernels import dispatch
from ds_quant.runtime import log
from ds_quant.runtime.fallback import kill_file
from ds_quant.runtime.telemetry import unwritable

# ---- the store ----


def plugin_store(name: str) -> PrefixStore:
    """Return the default store with the prefix "ds_quant/``name``" before every key."""
    return PrefixStore(f"ds_quant/{name}", c10d._get_default_store())


def store_of_call(name: str, rank: int) -> PrefixStore:
    """Return a store for one call of ``name``: the n-th calls of all ranks share it.

    rank: the calling rank.
    """
    call = plugin_store(name).add(f"calls/{rank}", 1)
    return plugin_store(f"{name}/{call}")


def wait_for_keys(store: PrefixStore, keys: Sequence[str], seconds: float) -> bool:
    """Return True if all keys are set within ``seconds``."""
    try:
        store.wait(list(keys), timedelta(seconds=seconds))
    except RuntimeError:  # torch.distributed.DistStoreError and its kin
        return False
    return True


def missing_ranks(store: PrefixStore, ranks: Sequence[int]) -> list[int]:
    """Return the ranks whose key is not set: by halving, in few requests if few are missing."""
    if not ranks or store.check([str(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return missing_ranks(store, ranks[:half]) + missing_ranks(store, ranks[half:])


def _read(store: PrefixStore, keys: Sequence[str]) -> list[str]:
    """Read keys that are set, in one request where the store can."""
    if store.has_extended_api():  # type: ignore[attr-defined]  # missing in torch's stubs
        return [text.decode() for text in store.multi_get(list(keys))]
    return [store.get(key).decode() for key in keys]


def wait_for_ranks(
    function: str, *, rank: int, world: int, patience: float, timeout: float
) -> None:
    """Wait through the store until every rank has called ``function``, which is a collective.

    Rank 0 warns after ``patience`` seconds, because it may be alone by mistake. Other ranks do not:
    they may be waiting for rank 0 to write a large file.

    Raises:
        RuntimeError: naming the ranks that have not called it within ``timeout`` seconds.
    """
    store = store_of_call(f"wait_for_ranks/{function}", rank)
    store.set(str(rank), "here")
    if store.add("count", 1) == world:  # one key for all ranks to wait for
        store.set("all", "here")
    message = "quantized_comm: {} needs all ranks under ZeRO-1 and 2: not called on rank(s) {}"
    if wait_for_keys(store, ["all"], patience):
        return
    missing = missing_ranks(store, range(world))
    if missing:
        log.log_rank0(message.format(function, missing) + f" after {patience:g} s, still waiting")
    if wait_for_keys(store, ["all"], timeout):
        return
    missing = missing_ranks(store, range(world))
    if missing:
        raise RuntimeError(
            message.format(function, missing)
            + f" within {timeout:g} s. Call it on all ranks and let "
            "one of them write the files, as ZeRO-3 needs it too"
        )


# ---- cards and verdict ----


class Card(TypedDict):
    """The facts that a rank puts into the store for the first rank."""

    # These must be equal on all ranks.
    versions: dict[str, Any]
    block: dict[str, Any]
    # These may differ. All ranks are as slow as the slowest kernels.
    kernels: str
    # Placement, see ``topology.place``.
    host: str
    launched: tuple[str, int] | None  # a list once it has been JSON


class Verdict(TypedDict, total=False):
    """The outcome of a handshake: an error, or the ranks per node and warnings.

    given_up: True if a rank has waited for too long, see [Note: calls in step].
    """

    error: str
    given_up: bool
    node_size: int
    warnings: list[str]


_SHOWN = 8  # groups of ranks that a message names


def disagreement(cards: Mapping[int, Card]) -> str:
    """Name the ranks that differ from the first one, by their differences; "" if none does.

    cards: by global rank, ascending.
    """
    first, *_ = cards
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, card in cards.items():
        versions = cards[first]["versions"], card.get("versions", {})
        differing = tuple(differences(*versions, of=f"rank {first}"))
        if not differing:  # settings of another version may have other keys
            blocks = cards[first]["block"], card.get("block", {})
            differing = tuple(differences(*blocks, of=f"rank {first}", prefix=f"{KEY}."))
        if differing:
            groups.setdefault(differing, []).append(rank)
    if not groups:
        return ""
    named_groups = [
        f"{named(ranks)}: {', '.join(differing)}" for differing, ranks in groups.items()
    ]
    advice = "ranks disagree; install the same ds_quant everywhere and use one config. "
    return advice + "; ".join(named_groups[:_SHOWN])


def mixed_kernels(cards: Mapping[int, Card]) -> list[str]:
    """Return a warning that names the ranks whose kernels differ from those of most; or none.

    cards: by global rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, card in cards.items():
        ranks_of.setdefault(card["kernels"], []).append(rank)
    common, *rare = sorted(ranks_of, key=lambda kernels: -len(ranks_of[kernels]))
    if not rare:
        return []
    others: list[str] = []
    for kernels in rare[:_SHOWN]:
        ranks = ranks_of[kernels]
        host = cards[ranks[0]]["host"].split(" ")[0]
        others.append(f"{named(ranks)} on {host}: {kernels}")
    return [
        f"kernels differ, and the slowest rank sets the pace. Most ranks: {common}; "
        f"{'; '.join(others)}. ds_quant doctor there says why"
    ]


def named(ranks: Sequence[int]) -> str:
    """[2] -> "rank 2", [2, 3, 4, 7] -> "ranks 2 to 4, 7"; the first few of many."""
    runs: list[list[int]] = []  # [first, last]
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    shown = ", ".join(" to ".join(map(str, run)) for run in runs[:_SHOWN])
    noun = "ranks" if len(ranks) > 1 else "rank"
    others = " and others" if len(runs) > _SHOWN else ""
    return f"{noun} {shown}{others}"


def model_facts(front: str, model: nn.Module) -> dict[str, str]:
    """Return the facts of a model under FSDP2 or DDP: the front, torch, and for the parameters
    their number and a checksum of names, shapes and training.
    """
    listed = [f"{name} {tuple(p.shape)} {p.requires_grad}" for name, p in model.named_parameters()]
    return {
        "front": front,
        "torch": torch.__version__.partition("+")[0],
        "parameters": f"{len(listed)} ({zlib.crc32(repr(listed).encode()):08x})",
    }


# ---- the handshake ----


WIRE_VERSION = 3  # raised when bytes on the wire change meaning
_PATIENCE = 10.0  # seconds for a rank that answers at once


class StartError(RuntimeError):
    """The ranks cannot start together."""


def handshake(
    config: QuantizedCommConfig,
    *,
    facts: Mapping[str, str],
    device: torch.device,
    ranks: Sequence[int] | None = None,
    call: str | None = None,
) -> int:
    """Check through the store that all ranks fit together, and return the ranks per node.

    Args:
        facts: by name, those that must be equal on all ranks besides versions and the block.
        device: of the collectives. Ranks whose kernels differ are warned of.
        call: the function that the user calls on all ranks; None under DeepSpeed, which calls this
            where the plugin is installed and the config has a block.
        ranks: global ranks that start together, ascending; None for all ranks of the job.

    Raises:
        StartError: naming the ranks that did not answer within ``handshake_timeout`` seconds,
            those that have stopped with an error (``refusal_of_this_rank``) or have no block
            (``stay_away``), those whose version or settings differ, a file of metrics that rank 0
            cannot write, or a placement that makes no nodes.
    """
    ranks = range(dist.get_world_size()) if ranks is None else ranks
    rank = dist.get_rank()
    is_part = len(ranks) < dist.get_world_size()
    # A launcher's variable counts all ranks of a host.
    launched = None if is_part else launcher_variable(len(ranks))
    store = _store_of_handshake(ranks)
    store.set(str(rank), json.dumps(_card(config, facts, device, launched)))
    if store.add("cards", 1) == len(ranks):
        store.set(_READY, "")
    if rank == ranks[0]:
        verdict = _lead(store, config, ranks, call)
    else:
        verdict = _follow(store, config.handshake_timeout, ranks, call)
    if "error" in verdict:
        _leave(store, ranks, awaited=sorted({*ranks[1:]} - {*missing_ranks(store, ranks)}))
        raise StartError(f"quantized_comm: {verdict['error']}")
    for warning in verdict["warnings"]:
        log.log_rank0(f"quantized_comm: {warning}", first=ranks[0])
    return verdict["node_size"]


def _card(
    config: QuantizedCommConfig,
    facts: Mapping[str, str],
    device: torch.device,
    launched: tuple[str, int] | None,
) -> Card:
    """Return the card of this rank."""
    from ds_quant import __version__

    return {
        "versions": {
            "ds_quant": __version__,
            "wire": WIRE_VERSION,
            # All ranks must vote, or none: a vote of some would hang.
            KILL_VARIABLE: "unset" if kill_file() is None else "set",
            **facts,
        },
        "block": config.resolved(),
        "kernels": dispatch.describe(device, config.backend),
        "host": host_name(),
        "launched": launched,
    }


@contextmanager
def refusal_of_this_rank(ranks: Sequence[int] | None = None) -> Iterator[None]:
    """Let the other ranks end, too, if the body raises an error before the handshake.

    They raise ``StartError`` with this rank's message. Without it they would wait for this rank
    until ``handshake_timeout``.

    ranks: as of ``handshake``; None also while they are not known.
    """
    try:
        yield
    except Exception as error:
        if dist.is_initialized():
            ranks = range(dist.get_world_size()) if ranks is None else ranks
            with suppress(RuntimeError):  # the store is gone with the rank that held it
                message = f"rank {dist.get_rank()} stopped: {type(error).__name__}: {error}"
                _leave(_refuse(ranks, message), ranks, awaited=ranks[1:])
        raise


def stay_away(reason: str, ranks: Sequence[int]) -> None:
    """Answer the handshake of a rank that has no block. Does not wait for other ranks.

    Ranks with a block raise ``StartError``: their first message would wait for this rank.

    reason: why nothing is quantized. ranks: as of ``handshake``.
    """
    if dist.is_initialized() and len(ranks) > 1:
        with suppress(RuntimeError):
            advice = "give all ranks the same block, or none"
            store = _refuse(ranks, f"on rank {dist.get_rank()} {reason}; {advice}")
            _leave(store, ranks, awaited=())


def _refuse(ranks: Sequence[int], error: str) -> PrefixStore:
    """Answer this rank's next handshake with an error, and return its store."""
    store = store_of_call(_name_of(ranks), dist.get_rank())
    store.set(str(dist.get_rank()), "")
    _decide(store, {"error": error})
    store.set(_READY, "")
    return store


# ---- the store of a handshake ----

# Keys beside the cards, which have the ranks as their keys.
_READY = "ready"  # all cards are there, or an error is decided
_VERDICT = "verdict"


def _left(rank: int) -> str:
    """Return the key of a rank that has read an error and needs the store no longer."""
    return f"left/{rank}"


def _store_of_handshake(ranks: Sequence[int]) -> PrefixStore:
    """Return the store of this rank's next handshake that is not given up."""
    while True:
        store = store_of_call(_name_of(ranks), dist.get_rank())
        verdict = _verdict(store)
        if verdict is None or not verdict.get("given_up", False):
            return store


def _verdict(store: PrefixStore) -> Verdict | None:
    """Return the verdict, None if there is none yet."""
    if not store.check([_VERDICT]):
        return None
    verdict: Verdict = json.loads(store.get(_VERDICT).decode())
    return verdict


def _decide(store: PrefixStore, verdict: Verdict) -> Verdict:
    """Write the verdict unless another rank decides first, and return that which holds.

    Not with ``compare_set``, which stores that are written in Python lack.
    """
    if store.add("decisions", 1) == 1:
        store.set(_VERDICT, json.dumps(verdict))
        return verdict
    wait_for_keys(store, [_VERDICT], _PATIENCE)
    held = _verdict(store)
    return verdict if held is None else held


def _leave(store: PrefixStore, ranks: Sequence[int], *, awaited: Sequence[int]) -> None:
    """Leave a handshake that ends with an error.

    awaited: ranks for which the first rank waits, because it may hold the store that they read.
    """
    rank = dist.get_rank()
    if rank == ranks[0]:
        wait_for_keys(store, [_left(other) for other in awaited], _PATIENCE)
    else:
        store.set(_left(rank), "")


def _name_of(ranks: Sequence[int]) -> str:
    """Return the name of the handshake of some ranks in the store."""
    if len(ranks) == dist.get_world_size():
        return "handshake"
    return f"handshake of ranks {'_'.join(map(str, ranks))}"


def _lead(
    store: PrefixStore, config: QuantizedCommConfig, ranks: Sequence[int], call: str | None
) -> Verdict:
    """First rank: judge, and return the verdict that holds."""
    if not wait_for_keys(store, [_READY], config.handshake_timeout):
        return _give_up(store, config.handshake_timeout, ranks, call)
    verdict = _verdict(store)
    if verdict is None:
        texts = _read(store, [str(rank) for rank in ranks])
        cards = {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True)}
        verdict = _decide(store, _judge(cards, config))
    return verdict


def _follow(store: PrefixStore, timeout: float, ranks: Sequence[int], call: str | None) -> Verdict:
    """Every other rank: return the verdict that holds."""
    if not wait_for_keys(store, [_VERDICT], timeout):
        is_ready = store.check([_READY])  # then the first rank is about to judge
        if not is_ready or not wait_for_keys(store, [_VERDICT], 2 * _PATIENCE):
            return _give_up(store, timeout, ranks, call)
    verdict = _verdict(store)
    assert verdict is not None
    return verdict


def _give_up(store: PrefixStore, timeout: float, ranks: Sequence[int], call: str | None) -> Verdict:
    """Give the handshake up after ``timeout``, and return the verdict that holds."""
    missing = missing_ranks(store, ranks) or [ranks[0]]  # the first rank has not judged
    question = (
        "Is ds_quant installed on their hosts, DS_QUANT_DISABLE unset and the same config used "
        "there?"
    )
    if call is not None:
        question = f"Do all ranks call {call}, and with a block?"
    error = (
        f"no answer from rank(s) {missing} within {timeout:g} s. {question} "
        "A slow start needs a larger quantized_comm.handshake_timeout"
    )
    verdict = _decide(store, {"error": error, "given_up": True})
    store.set(_READY, "")
    return verdict


def _judge(cards: Mapping[int, Card], config: QuantizedCommConfig) -> Verdict:
    """Return the verdict of the first rank. cards: by global rank, ascending."""
    error = disagreement(cards) or unwritable(config.metrics)
    if error:
        return {"error": error}
    hosts = [card["host"] for card in cards.values()]
    launched: list[tuple[str, int] | None] = []
    for card in cards.values():
        if card["launched"] is None:
            launched.append(None)
        else:
            variable, size = card["launched"]
            launched.append((variable, size))
    try:
        node_size, warning = place(hosts, given=config.node_size, launched=launched)
    except PlacementError as placement_error:
        return {"error": str(placement_error)}
    warnings = [warning] if warning else []
    return {"node_size": node_size, "warnings": warnings + mixed_kernels(cards)}
