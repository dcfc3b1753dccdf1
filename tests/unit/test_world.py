"""Work of all ranks together, on stand-ins for torch's: the number of collectives that make the
process groups of the two levels, and of keys that a wait for all asks for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ds_quant.comm.topology import Topology
from ds_quant.runtime import groups, log
from ds_quant.runtime.handshake import wait_for_ranks

CUDA, PATIENCE = torch.device("cuda", 0), timedelta(minutes=10)
TOPOLOGY, RANK = Topology(world=512, node_size=8), 83  # node 10, place 3
NODE, PLACE = list(range(80, 88)), list(range(3, 512, 8))


class Options:
    """NCCL's options of one process group."""

    def __init__(self) -> None:
        self._timeout = timedelta(minutes=30)
        self.global_ranks_in_group: list[int] = []
        self.is_high_priority_stream = False
        self.config = "NCCL's default"


class Torch:
    """torch.distributed of one rank: what it is asked to make.

    copies: whether a split without options gets a copy of the world's, as from torch 2.10 on.
    is_first: whether the world is the first NCCL group of the process.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        streams: bool = False,
        copies: bool = True,
        is_first: bool = True,
    ) -> None:
        self.made: list[tuple[str, Any, dict[str, Any]]] = []
        self.alive: list[Any] = []  # ranks of groups that are not destroyed
        self.votes: list[list[int]] = []
        self.equal = True  # whether all ranks know as many groups
        self.options, self.copies, self.is_first = Options(), copies, is_first
        self.options._timeout = PATIENCE
        backend = SimpleNamespace(options=self.options, supports_splitting=True)
        self.world = SimpleNamespace(bound_device_id=None, _get_backend=lambda device: backend)
        c10d = SimpleNamespace(
            _get_default_group=lambda: self.world,
            _world=SimpleNamespace(pg_map=self.alive, pg_names={"world": "0"}),
        )
        dist = SimpleNamespace(
            split_group=self._split,
            new_group=lambda ranks, **how: self._make("new", ranks, how),
            get_rank=lambda: RANK,
            get_world_size=lambda: TOPOLOGY.world,
        )
        self.streams = streams
        monkeypatch.setattr(groups, "c10d", c10d)
        monkeypatch.setattr(groups, "_level_groups", {})
        monkeypatch.setattr(groups, "_groups", {})
        monkeypatch.setattr(groups, "torch", SimpleNamespace(distributed=dist))

    def _vote(self, numbers: list[int]) -> list[int]:
        self.votes.append(numbers)
        return numbers if self.equal else [0, *numbers[1:]]

    def level_groups(self, topology: Topology = TOPOLOGY) -> groups.LevelGroups:
        return groups.level_groups(
            topology, device=CUDA, has_streams=self.streams, least=self._vote
        )

    def _make(self, how: str, ranks: Any, options: dict[str, Any]) -> object:
        self.made.append((how, ranks, options))
        self.alive.append(ranks)
        return ranks

    def _split(
        self,
        split_ranks: Sequence[list[int]],
        timeout: timedelta,
        pg_options: Options | None = None,
    ) -> list[int]:
        """Do the work of torch in Python, then in C++."""
        given = pg_options
        if given is None:
            given = deepcopy(self.options) if self.copies else self.options
        given._timeout = timeout
        known = self.options.global_ranks_in_group
        if not known and self.is_first:
            known = range(TOPOLOGY.world)
        own = next(part for part in split_ranks if RANK in part)
        given.global_ranks_in_group = [known[rank] for rank in own]
        self.made.append(("split", split_ranks, given))
        return given.global_ranks_in_group


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("copies", [False, True], ids=["torch 2.9", "torch 2.13"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_world_that_is_bound_to_devices_is_split_once_per_level(
    streams, copies, is_first, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_ = Torch(monkeypatch, streams=streams, copies=copies, is_first=is_first)
    torch_.world.bound_device_id = CUDA
    torch_.options.is_high_priority_stream, torch_.options.config = True, "the user's"
    assert torch_.level_groups() == (NODE, PLACE, NODE)
    nodes, places = TOPOLOGY.levels()
    wanted = [nodes, places] + [nodes] * streams  # gradients have a communicator of their own
    assert [(how, ranks) for how, ranks, _ in torch_.made] == [("split", each) for each in wanted]
    options = [given for _, _, given in torch_.made]
    assert len({id(given) for given in (torch_.options, *options)}) == 1 + len(wanted)
    assert torch_.options.global_ranks_in_group == list(range(TOPOLOGY.world))
    for given in options:
        assert given._timeout == PATIENCE
        assert given.is_high_priority_stream and given.config == "the user's"


def test_options_without_ranks_or_config_are_made_anew_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of XCCL."""
    torch_ = Torch(monkeypatch)
    given = groups._options_of_split(SimpleNamespace(options=SimpleNamespace()))
    assert vars(given) == {} and torch_.made == []


def test_elsewhere_a_group_is_made_by_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_ = Torch(monkeypatch)
    assert torch_.level_groups() == (NODE, PLACE, NODE)
    how = {"timeout": PATIENCE, "use_local_synchronization": True}
    assert torch_.made == [("new", NODE, how), ("new", PLACE, how)]


def test_ranks_that_know_other_groups_make_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members would call a group by different names and wait for each other for ever."""
    torch_ = Torch(monkeypatch)
    torch_.equal = False
    assert torch_.level_groups() == (NODE, PLACE, NODE)
    nodes, places = TOPOLOGY.levels()
    assert torch_.made == [("new", ranks, {"timeout": PATIENCE}) for ranks in (*nodes, *places)]


PART = Topology(world=16, node_size=8, ranks=tuple(range(3, 128, 8)))  # RANK is its index 10


def test_part_of_the_world_makes_its_groups_without_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch_ = Torch(monkeypatch)
    torch_.world.bound_device_id = CUDA  # a split would need all ranks
    node, place = list(range(67, 131, 8)), [19, 83]
    assert torch_.level_groups(PART) == (node, place, node)
    how = {"timeout": PATIENCE, "use_local_synchronization": True}
    assert torch_.made == [("new", node, how), ("new", place, how)]


def test_part_of_the_world_cannot_make_groups_under_different_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch_ = Torch(monkeypatch)
    torch_.equal = False
    with pytest.raises(RuntimeError) as raised:
        torch_.level_groups(PART)
    assert str(raised.value) == (
        f"quantized_comm: this rank knows 1 process groups, another rank of {list(PART.ranks)} "
        "knows another number, and torch names a new group by it: make process groups in equal "
        "number on all ranks that share a model"
    )
    assert torch_.made == [] and torch_.votes == [[1, -1]]


@pytest.mark.parametrize("streams", [False, True])
def test_groups_are_made_again_once_one_is_destroyed(
    streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_ = Torch(monkeypatch, streams=streams)
    for _ in range(2):
        assert torch_.level_groups() == (NODE, PLACE, NODE)
        assert len(torch_.made) == 2 + streams
    assert torch_.level_groups(PART) != (NODE, PLACE, NODE)  # another topology has its own
    torch_.made.clear()
    torch_.alive.remove(PLACE)
    for _ in range(2):
        assert torch_.level_groups() == (NODE, PLACE, NODE)
        assert [ranks for _, ranks, _ in torch_.made] == [NODE, PLACE] + [NODE] * streams


@pytest.mark.parametrize("is_bound", [False, True])
def test_a_group_of_some_ranks_is_made_by_them_once(
    is_bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_ = Torch(monkeypatch)
    torch_.world.bound_device_id = CUDA if is_bound else None
    group_of = partial(groups.group_of, device=CUDA, least=torch_._vote)
    assert group_of(range(512)) is None and group_of(list(range(512))) is None
    assert torch_.made == []
    how = {"timeout": PATIENCE, "use_local_synchronization": True}
    for _ in range(2):
        assert group_of((3, 83, 7)) == [3, 83, 7]
        assert torch_.made == [("new", [3, 83, 7], how)]
    assert group_of([83, 84]) == [83, 84]
    torch_.alive.remove([3, 83, 7])  # destroyed
    for _ in range(2):
        assert group_of((3, 83, 7)) == [3, 83, 7]
        assert [ranks for _, ranks, _ in torch_.made] == [[3, 83, 7], [83, 84], [3, 83, 7]]
    torch_.equal = False
    with pytest.raises(RuntimeError, match=r"another rank of \[5, 83\] knows another number"):
        group_of((5, 83))


@pytest.mark.parametrize("backend", ["without options", "without a timeout", "cannot split"])
def test_a_backend_without_settings_makes_groups_with_those_of_torch(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_ = Torch(monkeypatch)
    torch_.world.bound_device_id = CUDA
    given = SimpleNamespace()
    if backend == "without a timeout":
        given.options = SimpleNamespace()
    if backend == "cannot split":
        given.options, given.supports_splitting = torch_.options, False
    asked: list[Any] = []
    torch_.world._get_backend = lambda device: asked.append(device) or given
    assert torch_.level_groups() == (NODE, PLACE, NODE)
    timeout = PATIENCE if backend == "cannot split" else None
    how = {"timeout": timeout, "use_local_synchronization": True}
    assert torch_.made == [("new", NODE, how), ("new", PLACE, how)]
    assert asked == [CUDA]


class Store(torch.distributed.Store):
    """A store that notes the keys that are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.waited = torch.distributed.HashStore(), list[str]()

    def set(self, key: str, value: bytes) -> None:
        self.store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self.store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.waited += keys
        self.store.wait(keys, timeout)


def test_ranks_that_wait_for_all_ask_for_one_key_each(monkeypatch: pytest.MonkeyPatch) -> None:
    store, ranks, limits = Store(), 8, {"patience": 20.0, "timeout": 1.0}
    c10d = torch.distributed.distributed_c10d
    monkeypatch.setattr(c10d, "_get_default_store", lambda: store)
    call = partial(wait_for_ranks, "a save", world=ranks, **limits)
    with ThreadPoolExecutor(ranks) as pool:
        for _ in range(2):
            list(pool.map(lambda rank: call(rank=rank), range(ranks)))
    assert len(store.waited) == 2 * ranks and len(set(store.waited)) == 2


def test_a_rank_that_calls_another_function_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a save on one rank does not take an export on another for its own."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(log, "log_rank0", Mock())
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    call = partial(wait_for_ranks, world=2, patience=0.1, timeout=0.1)
    with ThreadPoolExecutor(2) as pool:
        saved = pool.submit(call, "a save", rank=0)
        exported = pool.submit(call, "an export", rank=1)
    assert "a save needs all ranks under ZeRO-1 and 2: not called on rank(s) [1] within" in str(
        saved.exception()
    )
    assert "an export needs all ranks under ZeRO-1 and 2: not called on rank(s) [0] within" in str(
        exported.exception()
    )


@pytest.mark.parametrize("comes", [False, True])
def test_ranks_that_have_not_come_are_named_first_in_a_warning(
    comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "log_rank0", said.append)
    c10d, store = torch.distributed.distributed_c10d, Store()
    monkeypatch.setattr(c10d, "_get_default_store", lambda: store)
    call = partial(wait_for_ranks, "a save", world=3, patience=0.1)
    begins = "quantized_comm: a save needs all ranks under ZeRO-1 and 2: not called on rank(s)"
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(call, rank=0, timeout=10.0 if comes else 0.15)
        while not said and not first.done():
            time.sleep(0.01)
        assert said == [f"{begins} [1, 2] after 0.1 s, still waiting"]
        said.clear()
        if comes:
            second = pool.submit(call, rank=1, timeout=10.0)
            call(rank=2, timeout=10.0)
            assert first.result() is second.result() is None
            return
        error = first.exception()
    assert isinstance(error, RuntimeError)
    assert str(error) == (
        f"{begins} [1, 2] within 0.15 s. Call it on all ranks and let one of them write the files, "
        "as ZeRO-3 needs it too"
    )
    assert said == []
