"""What the ranks do together, on stand-ins for torch's: how many collectives make the process
groups of the two levels, and how many keys a wait for all asks for.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_quant.comm.topology import Topology
from ds_quant.zero import world
from ds_quant.zero.safety import wait_for_ranks

CUDA, PATIENCE = torch.device("cuda", 0), timedelta(minutes=10)
TOPOLOGY, RANK = Topology(world=512, node_size=8), 83  # node 10, place 3
NODE, PLACE = list(range(80, 88)), list(range(3, 512, 8))


class Torch:
    """torch.distributed of one rank: what it is asked to make."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, streams: bool = False) -> None:
        self.made: list[tuple[str, Any, dict[str, Any]]] = []
        self.equal = True  # whether all ranks know as many groups
        backend = SimpleNamespace(
            options=SimpleNamespace(_timeout=PATIENCE), supports_splitting=True
        )
        self.world = SimpleNamespace(bound_device_id=None, _get_backend=lambda device: backend)
        c10d = SimpleNamespace(
            _get_default_group=lambda: self.world,
            _world=SimpleNamespace(pg_map={}, pg_names={"world": "0"}),
        )
        dist = SimpleNamespace(
            split_group=lambda split_ranks, **how: self._make("split", split_ranks, how),
            new_group=lambda ranks, **how: self._make("new", ranks, how),
        )
        stub = {"device": lambda: CUDA, "has_streams": lambda: streams}
        stub["rank_and_world"] = lambda: (RANK, 512)
        vote = lambda numbers: numbers if self.equal else [0, *numbers[1:]]  # noqa: E731
        for name, value in {
            "c10d": c10d, "hooks": SimpleNamespace(**stub), "minimum": vote, "_made": {},
            "torch": SimpleNamespace(distributed=dist),
        }.items():  # fmt: skip
            monkeypatch.setattr(world, name, value)

    def _make(self, how: str, ranks: Any, options: dict[str, Any]) -> object:
        self.made.append((how, ranks, options))
        return ranks if how == "new" else next(part for part in ranks if RANK in part)


@pytest.mark.parametrize("streams", [False, True])
def test_a_world_that_is_bound_to_devices_is_split_once_per_level(streams, monkeypatch) -> None:
    torch_ = Torch(monkeypatch, streams=streams)
    torch_.world.bound_device_id = CUDA
    assert world.level_groups(TOPOLOGY) == (NODE, PLACE, NODE)
    nodes, places = TOPOLOGY.levels()
    wanted = [nodes, places] + [nodes] * streams  # gradients have a communicator of their own
    assert torch_.made == [("split", level, {"timeout": PATIENCE}) for level in wanted]


def test_elsewhere_a_group_is_made_by_its_members(monkeypatch) -> None:
    torch_ = Torch(monkeypatch)
    assert world.level_groups(TOPOLOGY) == (NODE, PLACE, NODE)
    how = {"timeout": PATIENCE, "use_local_synchronization": True}
    assert torch_.made == [("new", NODE, how), ("new", PLACE, how)]


def test_ranks_that_know_other_groups_make_all_together(monkeypatch) -> None:
    """Members would call a group by different names and wait for each other for ever."""
    torch_ = Torch(monkeypatch)
    torch_.equal = False
    assert world.level_groups(TOPOLOGY) == (NODE, PLACE, NODE)
    nodes, places = TOPOLOGY.levels()
    assert torch_.made == [("new", ranks, {"timeout": PATIENCE}) for ranks in (*nodes, *places)]


class Store:
    """A store that notes the keys that are waited for."""

    def __init__(self) -> None:
        self.store, self.waited = torch.distributed.HashStore(), []
        self.set, self.add, self.check = self.store.set, self.store.add, self.store.check

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.waited += keys
        self.store.wait(keys, timeout)


def test_ranks_that_wait_for_all_ask_for_one_key_each(monkeypatch) -> None:
    store, ranks, limits = Store(), 8, {"patience": 20.0, "timeout": 1.0}
    c10d = torch.distributed.distributed_c10d
    monkeypatch.setattr(c10d, "_get_default_store", lambda: store)
    call = partial(wait_for_ranks, "a save", world=ranks, **limits)
    with ThreadPoolExecutor(ranks) as pool:
        for _ in range(2):
            list(pool.map(lambda rank: call(rank=rank), range(ranks)))
    assert len(store.waited) == 2 * ranks and len(set(store.waited)) == 2
    with pytest.raises(RuntimeError, match=r"not called on rank\(s\) \[1, 2\] within 0.1 s"):
        wait_for_ranks("a save", rank=0, world=3, patience=0.1, timeout=0.1)
