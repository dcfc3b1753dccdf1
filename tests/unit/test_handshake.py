"""Ranks start together, or end together and say why: threads that share a store stand for ranks."""

from __future__ import annotations

import functools
import io
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore, PrefixStore

import ds_quant
from ds_quant.config.errors import AttachError, ConfigError
from ds_quant.config.schema import parse_block
from ds_quant.runtime import handshake, log, short_messages
from ds_quant.runtime.handshake import Card, StartError

CPU = torch.device("cpu")


class Store(torch.distributed.Store):
    """A store written in Python, without the extended requests.

    slow: ends of keys that are set 0.2 seconds late. gone: True once the rank that held it ended.
    """

    def __init__(self, slow: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.store, self.slow, self.gone, self.checks = HashStore(), slow, False, 0

    def _answer(self) -> None:
        if self.gone:
            raise RuntimeError("Connection reset by peer")

    def set(self, key: str, value: bytes) -> None:
        self._answer()
        if self.slow and key.endswith(self.slow):
            time.sleep(0.2)
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def add(self, key: str, amount: int) -> int:
        self._answer()
        return self.store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self._answer()
        self.checks += 1
        return self.store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.store.wait(keys, timeout)


class Ranks:
    """torch.distributed of the ranks of this process.

    warned: rank, message and the first rank of every warning. asked: launcher's variables.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, world: int, *, store: Any = None, hosts: str = ""
    ) -> None:
        self.own = threading.local()
        self.own.rank = 0
        self.world, self.store, self.hosts = world, store or HashStore(), hosts or "a" * world
        self.kernels = ["C++ kernels"] * world
        self.launched: tuple[str, int] | None = None
        self.is_initialized = True
        self.warned: list[tuple[int, str, int]] = []
        self.asked: list[int] = []
        self.dist = SimpleNamespace(
            get_rank=lambda: self.own.rank,
            get_world_size=lambda: self.world,
            is_initialized=lambda: self.is_initialized,
        )
        monkeypatch.setattr(handshake, "dist", self.dist)
        monkeypatch.setattr(handshake.c10d, "_get_default_store", lambda: self.store)
        monkeypatch.setattr(handshake, "host_name", lambda: f"{self.hosts[self.own.rank]} boot")
        monkeypatch.setattr(
            handshake.dispatch, "describe", lambda device, backend: self.kernels[self.own.rank]
        )
        monkeypatch.setattr(handshake, "launcher_variable", self._launcher_variable)
        monkeypatch.setattr(log, "log_rank0", self._warn)

    def _launcher_variable(self, ranks: int) -> tuple[str, int] | None:
        self.asked.append(ranks)
        return self.launched

    def _warn(self, message: str, *, first: int = 0) -> None:
        self.warned.append((self.own.rank, message, first))

    def all(self, ranks: Sequence[int], function: Callable[[int], Any]) -> dict[int, Any]:
        """Return by rank what a function returns, or the words of its error."""

        def outcome(rank: int) -> Any:
            self.own.rank = rank
            try:
                return function(rank)
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        with ThreadPoolExecutor(len(ranks)) as pool:
            return dict(zip(ranks, pool.map(outcome, ranks), strict=True))


def begin(seconds: float = 5.0, block: Mapping[str, Any] | None = None, **how: Any) -> int:
    """Call the handshake of one rank."""
    config = parse_block({"scheme": "qsdp", "handshake_timeout": seconds, **(block or {})})
    return handshake.handshake(config, facts={"front": "FSDP2"}, device=CPU, **how)


# ---- a handshake ----


def test_ranks_that_agree_learn_the_nodes_and_hear_what_is_odd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(monkeypatch, 4, hosts="aabb")
    ranks.kernels[3] = "torch kernels"
    assert ranks.all(range(4), lambda rank: begin()) == dict.fromkeys(range(4), 2)
    said = (
        "quantized_comm: kernels differ, and the slowest rank sets the pace. Most ranks: "
        "C++ kernels; rank 3 on b: torch kernels. ds_quant doctor there says why"
    )
    assert sorted(ranks.warned) == [(rank, said, 0) for rank in range(4)]
    assert ranks.asked == [4] * 4


def test_a_launcher_decides_the_nodes_of_all_ranks_and_not_those_of_a_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(monkeypatch, 6, hosts="aaaabb")
    ranks.launched = "LOCAL_WORLD_SIZE", 1
    assert ranks.all(range(6), lambda rank: begin()) == dict.fromkeys(range(6), 1)
    ranks.asked.clear()
    part = [2, 3, 5]
    assert ranks.all(part, lambda rank: begin(ranks=part)) == dict.fromkeys(part, 1)
    said = (
        "quantized_comm: hosts hold 2, 1 ranks, so nodes are of 1; equal numbers of ranks per "
        "host make larger nodes"
    )
    assert sorted(ranks.warned) == [(rank, said, 2) for rank in part]
    assert ranks.asked == []


def test_handshakes_of_other_ranks_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 3)
    for part in ([0, 1], [0, 2], [0, 1], [1, 2]):
        found = ranks.all(part, lambda rank, part=part: begin(3.0, ranks=part))
        assert found == dict.fromkeys(part, 2)


@pytest.mark.parametrize("is_in_python", [False, True])
def test_ranks_that_disagree_end_with_one_message(
    is_in_python: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank, which may hold the store, ends last. It does not wait for others for long."""
    ranks = Ranks(monkeypatch, 4, store=Store(slow=("left/2",)) if is_in_python else None)
    part, last_left = [1, 2, 3], "ds_quant/handshake of ranks 1_2_3/1/left/"
    has_ended_last = False

    def end(rank: int) -> None:
        nonlocal has_ended_last
        try:
            begin(block={"seed": 1} if rank == 3 else {}, ranks=part)
        finally:
            if rank == 1:
                has_ended_last = ranks.store.check([f"{last_left}2", f"{last_left}3"])

    start = time.monotonic()
    error = (
        "StartError: quantized_comm: ranks disagree; install the same ds_quant everywhere and use "
        "one config. rank 3: quantized_comm.seed=1 (rank 1: 0)"
    )
    assert ranks.all(part, end) == dict.fromkeys(part, error)
    assert has_ended_last and time.monotonic() - start < 8
    assert ranks.warned == []


IN_DEEPSPEED = (
    "Is ds_quant installed on their hosts, DS_QUANT_DISABLE unset and the same config used there?"
)
IN_ATTACH = "Do all ranks call ds_quant.ddp.attach, and with a block?"


@pytest.mark.parametrize(
    ("call", "question"), [(None, IN_DEEPSPEED), ("ds_quant.ddp.attach", IN_ATTACH)]
)
def test_a_rank_that_does_not_come_is_named_and_joins_the_next_call(
    call: str | None, question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, 3)
    start = time.monotonic()
    error = (
        f"StartError: quantized_comm: no answer from rank(s) [2] within 1 s. {question} "
        "A slow start needs a larger quantized_comm.handshake_timeout"
    )
    found = ranks.all([0, 1], lambda rank: begin(1.0, call=call))
    assert found == dict.fromkeys([0, 1], error)
    assert 0.9 < time.monotonic() - start < 8  # nobody waits for the absent one to leave
    assert ranks.all(range(3), lambda rank: begin()) == dict.fromkeys(range(3), 3)


def test_a_first_rank_that_does_not_judge_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 2)
    monkeypatch.setattr(handshake, "_PATIENCE", 0.1)
    store = handshake.plugin_store("handshake/1")
    store.set("0", "a card")
    store.add("cards", 1)
    start = time.monotonic()
    said = ranks.all([1], lambda rank: begin(0.25))[1]
    assert said == (
        f"StartError: quantized_comm: no answer from rank(s) [0] within 0.25 s. {IN_DEEPSPEED} "
        "A slow start needs a larger quantized_comm.handshake_timeout"
    )
    assert 0.4 < time.monotonic() - start < 8  # a rank that is about to judge gets 2 x 0.1 s more


def test_ranks_wait_longer_for_the_first_one_once_all_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(monkeypatch, 2)
    store = handshake.plugin_store("a handshake")
    store.set("ready", "")
    verdict = {"node_size": 2, "warnings": []}
    threading.Timer(0.3, handshake._decide, [store, verdict]).start()
    assert ranks.all([1], lambda rank: handshake._follow(store, 0.1, [0, 1], None)) == {1: verdict}


def test_a_verdict_of_others_replaces_that_of_a_late_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for where it is decided but not yet written."""
    ranks = Ranks(monkeypatch, 2)
    store = PrefixStore("handshake", HashStore())
    store.add("decisions", 1)
    held = {"error": "another"}
    monkeypatch.setattr(handshake, "_PATIENCE", 0.05)
    assert handshake._decide(store, {"error": "own"}) == {"error": "own"}  # it never came
    monkeypatch.setattr(handshake, "_PATIENCE", 5.0)
    writer = threading.Timer(0.1, lambda: store.set("verdict", '{"error": "another"}'))
    writer.start()
    assert handshake._give_up(store, 1.0, [0, 1], None) == held
    assert store.check(["ready"]) and ranks.warned == []


# ---- ranks that refuse or stay away ----


@pytest.mark.parametrize("part", [None, [1, 2]])
def test_the_error_of_one_rank_ends_the_others_at_once(
    part: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, 3, store=Store(slow=("left/2",)))
    own = part or [0, 1, 2]
    first, last, ended = own[0], own[-1], False

    def end(rank: int) -> None:
        nonlocal ended
        if rank != first:
            begin(ranks=part)
            return
        try:
            with handshake.refusal_of_this_rank(part):
                raise ConfigError("no such scheme")
        finally:
            name = "handshake" if part is None else "handshake of ranks 1_2"
            ended = ranks.store.check([f"ds_quant/{name}/1/left/{last}"])

    start = time.monotonic()
    found = ranks.all(own, end)
    assert found.pop(first) == "ConfigError: no such scheme"
    error = f"StartError: quantized_comm: rank {first} stopped: ConfigError: no such scheme"
    assert found == dict.fromkeys(own[1:], error)
    assert ended and time.monotonic() - start < 8
    assert ranks.all(own, lambda rank: begin(ranks=part)) == dict.fromkeys(own, len(own))


def test_a_rank_without_a_block_ends_the_others_and_waits_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(monkeypatch, 2)
    start = time.monotonic()
    handshake.stay_away("no block was given: nothing is quantized", [0, 1])
    assert time.monotonic() - start < 8
    assert ranks.all([1], lambda rank: begin())[1] == (
        "StartError: quantized_comm: on rank 0 no block was given: nothing is quantized; give all "
        "ranks the same block, or none"
    )


def test_a_rank_alone_asks_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 2)

    def nobody() -> None:
        raise AssertionError("a store was asked for")

    monkeypatch.setattr(handshake.c10d, "_get_default_store", nobody)
    handshake.stay_away("no block was given", [0])
    ranks.is_initialized = False
    handshake.stay_away("no block was given", [0, 1])
    with pytest.raises(ConfigError, match="^a typo$"), handshake.refusal_of_this_rank():
        raise ConfigError("a typo")


def test_a_rank_whose_store_is_gone_tells_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 2, store=Store())
    ranks.store.gone = True
    handshake.stay_away("no block was given", [0, 1])
    with pytest.raises(ConfigError, match="^a typo$"), handshake.refusal_of_this_rank():
        raise ConfigError("a typo")


# ---- ranks that have not answered ----


@pytest.mark.parametrize(
    ("missing", "checks"),
    # A check of all, and for each of three halvings of 8 ranks one of either half.
    [([], 1), ([0], 7), ([5], 7), ([7], 7), (list(range(8)), 15)],
)
def test_missing_ranks_are_found_by_halving(missing: list[int], checks: int) -> None:
    store = Store()
    for rank in {*range(8)} - {*missing}:
        store.set(str(rank), b"here")
    assert handshake.missing_ranks(store, range(8)) == missing
    assert store.checks == checks
    assert handshake.missing_ranks(store, []) == []


# ---- cards ----


@pytest.mark.parametrize(("file", "watches"), [("", "unset"), ("/shared/stop", "set")])
def test_a_card_holds_what_ranks_compare(
    file: str, watches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, 1, hosts="b")
    monkeypatch.setattr(handshake.dispatch, "describe", lambda *given: f"kernels of {given}")
    monkeypatch.setenv("DS_QUANT_KILL_FILE", file)
    config = parse_block({"scheme": "qsdp", "seed": 3, "backend": "torch"})
    card = handshake._card(config, {"front": "DDP", "torch": "2.9"}, CPU, ("LOCAL_SIZE", 2))
    assert card == {
        "versions": {
            "ds_quant": ds_quant.__version__,
            "wire": 3,
            "DS_QUANT_KILL_FILE": watches,
            "front": "DDP",
            "torch": "2.9",
        },
        "block": config.resolved(),
        "kernels": f"kernels of {(CPU, 'torch')}",
        "host": "b boot",
        "launched": ("LOCAL_SIZE", 2),
    }
    assert ranks.asked == []


def card(seed: int = 0, version: str = "1", host: str = "a", **facts: Any) -> Card:
    """Return a card with two settings."""
    made: Card = {
        "versions": {"ds_quant": version},
        "block": {"scheme": "qsdp", "seed": seed},
        "kernels": "C++ kernels",
        "host": host,
        "launched": None,
    }
    return {**made, **facts}  # type: ignore[typeddict-item]


ADVICE = "ranks disagree; install the same ds_quant everywhere and use one config. "


@pytest.mark.parametrize(
    ("cards", "said"),
    [
        ([card(), card(), card(host="b", kernels="torch kernels")], ""),
        ([card(), card(1), card(1), card(2)],
         ADVICE + "ranks 3 to 4: quantized_comm.seed=1 (rank 2: 0); "
         "rank 5: quantized_comm.seed=2 (rank 2: 0)"),
        # Settings of another version are not compared.
        ([card(), card(1, "2")], ADVICE + 'rank 3: ds_quant="2" (rank 2: "1")'),
        ([card(), {}], ADVICE + 'rank 3: ds_quant=null (rank 2: "1")'),
        ([card(), {"versions": {"ds_quant": "1"}}],
         ADVICE + 'rank 3: quantized_comm.scheme=null (rank 2: "qsdp"), '
         "quantized_comm.seed=null (rank 2: 0)"),
        ([card(seed) for seed in range(10)],
         ADVICE + "; ".join(f"rank {seed + 2}: quantized_comm.seed={seed} (rank 2: 0)"
                            for seed in range(1, 9))),
    ],
)  # fmt: skip
def test_differences_from_the_first_rank_are_told_by_groups(cards: list[Any], said: str) -> None:
    assert handshake.disagreement(dict(enumerate(cards, start=2))) == said


def test_kernels_that_differ_from_those_of_most_are_told_with_their_host() -> None:
    def told(kernels: Sequence[str]) -> list[str]:
        hosts = (f"node{rank // 2} boot" for rank in range(len(kernels)))
        pairs = zip(kernels, hosts, strict=True)
        return handshake.mixed_kernels(
            {rank: card(kernels=each, host=host) for rank, (each, host) in enumerate(pairs)}
        )

    begins = "kernels differ, and the slowest rank sets the pace. Most ranks: "
    ends = ". ds_quant doctor there says why"
    assert told(["C++"] * 4) == []
    assert told(["torch", "C++", "C++", "C++", "torch", "CuPy"]) == [
        f"{begins}C++; ranks 0, 4 on node0: torch; rank 5 on node2: CuPy{ends}"
    ]
    # Of ten kinds beside that of most, eight are told.
    kinds = [f"kind {rank}" for rank in range(10)]
    shown = "; ".join(f"rank {rank} on node{rank // 2}: kind {rank}" for rank in range(8))
    assert told([*kinds, "C++", "C++"]) == [f"{begins}C++; {shown}{ends}"]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([2], "rank 2"),
        ([2, 3], "ranks 2 to 3"),
        ([2, 3, 4, 7], "ranks 2 to 4, 7"),
        ([0, 2, 4, 5, 8], "ranks 0, 2, 4 to 5, 8"),
        (list(range(0, 16, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14"),
        (list(range(0, 18, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and others"),
    ],
)
def test_runs_of_ranks_are_written_short(ranks: list[int], words: str) -> None:
    assert handshake.named(ranks) == words


def test_a_model_is_compared_by_names_shapes_and_training() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    listed = "['weight (2, 3) True', 'bias (2,) False']"
    assert handshake.model_facts("FSDP2", model) == {
        "front": "FSDP2",
        "torch": re.match(r"[\d.]+", torch.__version__)[0],
        "parameters": f"2 ({zlib.crc32(listed.encode()):08x})",
    }


# ---- the judgement ----

ON_B = {"host": "b", "kernels": "torch kernels"}
DIFFER = (
    "kernels differ, and the slowest rank sets the pace. Most ranks: C++ kernels; "
    "rank 3 on b: torch kernels. ds_quant doctor there says why"
)
UNEVEN = (
    "hosts hold 3, 1 ranks, so nodes are of 1; equal numbers of ranks per host make larger nodes"
)


@pytest.mark.parametrize(
    ("cards", "block", "verdict"),
    [
        ([card(), card(host="b")], {}, {"node_size": 1, "warnings": []}),
        ([card(), card()], {"node_size": 1}, {"node_size": 1, "warnings": []}),
        # As JSON has them.
        ([card(launched=["LOCAL_SIZE", 1])] * 2, {}, {"node_size": 1, "warnings": []}),
        ([card(launched=["LOCAL_SIZE", 1]), card()], {}, {"node_size": 2, "warnings": []}),
        ([card(), card(), card(), card(**ON_B)], {},
         {"node_size": 1, "warnings": [UNEVEN, DIFFER]}),
        ([card(), card(1)], {"metrics": {"file": "/no/where"}},
         {"error": ADVICE + "rank 1: quantized_comm.seed=1 (rank 0: 0)"}),
        ([card(), card()], {"metrics": {"file": "/no/where"}},
         {"error": 'metrics.file="/no/where": No such file or directory: allowed: a file that '
                   "rank 0 can write, in a folder that exists; or null"}),
        ([card(launched=["LOCAL_SIZE", 2]), card(launched=["LOCAL_SIZE", 2], host="b")], {},
         {"error": "LOCAL_SIZE=2, but ranks 0 to 1 lie on several hosts (1 on a, 1 on b): unset "
                   "it, or set quantized_comm.node_size=1, the ranks that share a host"}),
    ],
)  # fmt: skip
def test_the_first_rank_judges_the_cards(
    cards: list[Card], block: dict[str, Any], verdict: dict[str, Any]
) -> None:
    config = parse_block({"scheme": "qsdp", **block})
    assert handshake._judge(dict(enumerate(cards)), config) == verdict


# ---- errors of the user are printed once ----


class Terminal(io.StringIO):
    """Shows what a rank has printed once it is flushed."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks, self._waiting = ranks, dict[int, str]()
        self.shown: dict[int, str] = {}

    def write(self, text: str) -> int:
        rank = self._ranks.own.rank
        self._waiting[rank] = self._waiting.get(rank, "") + text
        return len(text)

    def flush(self) -> None:
        rank = self._ranks.own.rank
        self.shown[rank] = self.shown.get(rank, "") + self._waiting.pop(rank, "")


def terminal(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return the terminal of some ranks."""
    made = Terminal(ranks)
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setattr(short_messages, "torch", SimpleNamespace(distributed=ranks.dist))
    return made


def ends(error: BaseException, previous: Callable[..., object] | None = None) -> None:
    """End a rank with an error."""
    short_messages._print_short(previous or pytest.fail, type(error), error, None)


@pytest.mark.parametrize(
    ("kind", "slow"), [(ConfigError, "read/1"), (StartError, "read/2"), (AttachError, "read/1")]
)
def test_equal_messages_are_printed_by_rank_0_alone(
    kind: type[Exception], slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0, which may hold the store, ends last."""
    ranks = Ranks(monkeypatch, 3, store=Store(slow=(slow,)))
    screen = terminal(ranks, monkeypatch)

    def end(rank: int) -> bool:
        error = kind("a typo")
        ends(error)
        return short_messages._store_of_error(error).check(["read/1", "read/2"])

    assert ranks.all(range(3), end)[0] is True
    assert screen.shown == {
        0: f"{kind.__name__}: a typo\n",
        1: "rank 1 ends: see the message of rank 0\n",
        2: "rank 2 ends: see the message of rank 0\n",
    }


@pytest.mark.parametrize("gone", [False, True])
def test_a_rank_tells_its_own_message_unless_rank_0_has_printed_it(
    gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, 2, store=Store())
    screen = terminal(ranks, monkeypatch)
    monkeypatch.setattr(short_messages, "_PATIENCE", 0.1)
    ranks.store.gone = gone  # with rank 0
    ending = [1] if gone else [0, 1]
    ranks.all(ending, lambda rank: ends(ConfigError(f"typo {rank}")))
    assert screen.shown.pop(1) == "ConfigError on rank 1: typo 1\n"
    assert screen.shown == ({} if gone else {0: "ConfigError: typo 0\n"})


@pytest.mark.parametrize(
    ("variable", "subject"),
    [(None, "ConfigError"), ("", "ConfigError"), ("0", "ConfigError"),
     ("3", "ConfigError on rank 3")],
)  # fmt: skip
def test_an_error_before_the_ranks_are_connected_names_the_rank_of_the_launcher(
    variable: str | None, subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, 4)
    screen = terminal(ranks, monkeypatch)
    ranks.is_initialized = False
    monkeypatch.delenv("RANK", raising=False)
    if variable is not None:
        monkeypatch.setenv("RANK", variable)
    ends(ConfigError("a typo"))
    assert screen.shown == {0: f"{subject}: a typo\n"}


def test_a_rank_asks_every_twentieth_second_for_three_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, slept = Store(), list[float]()
    clock = SimpleNamespace(monotonic=lambda: 100 + sum(slept), sleep=slept.append)
    monkeypatch.setattr(short_messages, "time", clock)
    monkeypatch.setattr(store, "_answer", lambda: store.checks < 100 or pytest.fail("no end"))
    assert short_messages._poll(store, ["printed"]) is False
    assert slept == [0.05] * len(slept) and 2.99 < sum(slept) < 3.11
    store.set("printed", b"")
    assert short_messages._poll(store, ["printed"]) is True
    store.gone = True
    monkeypatch.undo()
    assert short_messages._poll(store, ["printed"]) is False


@pytest.mark.parametrize("by", ["Python", "torch"])
def test_other_errors_go_to_the_hook_that_was_there(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, 1)
    screen = terminal(ranks, monkeypatch)
    heard: list[Any] = []

    def hook(*given: Any) -> None:
        heard.append(given)

    hook.__module__ = "torch.distributed.run" if by == "torch" else "sys"
    monkeypatch.setattr(sys, "excepthook", hook)
    if by == "Python":
        monkeypatch.setattr(sys, "__excepthook__", hook)
    short_messages.shorten_messages()
    first = sys.excepthook
    short_messages.shorten_messages()
    assert sys.excepthook is first and first is not hook
    try:
        raise ValueError("a bug")
    except ValueError as error:
        bug = ValueError, error, error.__traceback__
    sys.excepthook(*bug)
    sys.excepthook(ConfigError, ConfigError("a typo"), None)
    assert heard == [bug] and screen.shown == {0: "ConfigError: a typo\n"}


def test_the_hook_of_a_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*given: Any) -> None:
        pass

    def nameless(*given: Any) -> None:
        pass

    nameless.__module__ = None  # type: ignore[assignment]
    for hook in (own, functools.partial(own), functools.partial(own).__call__, nameless):
        monkeypatch.setattr(sys, "excepthook", hook)
        short_messages.shorten_messages()
        assert sys.excepthook is hook
