"""Refusals through real ``deepspeed.initialize``, before any collective that a refusal could leave
half done. The handshake goes through the store alone.

Collectives are counted by the sequence numbers that torch keeps for every process group.
"""

from __future__ import annotations

import functools
import os
import time
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

import ds_quant
from tests.distributed.harness import on_ranks, run, run_each
from tests.distributed.models import (
    QSDP,
    Regression,
    build,
    engine_of,
    evaluate,
    heard,
    settings,
    train_steps,
)
from tests.thin import thinned


def collectives_issued() -> int:
    """Collectives of all process groups of this rank so far, DeepSpeed's included."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


# ---- a world of one ----

MARK = "ds_quant_wraps"
WRAPPED = (
    "step", "average_tensor", "allreduce_and_copy_with_multiple_ranks",
    "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
)  # fmt: skip


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(1)
def test_a_world_of_one_trains_unwrapped_and_says_so(stage: int) -> None:
    engine, plain = engine_of(stage, QSDP), engine_of(stage)
    assert not [name for name in WRAPPED if hasattr(getattr(engine.optimizer, name, None), MARK)]
    for p in engine.module.parameters():
        assert not isinstance(getattr(p, "all_gather_coalesced", None), functools.partial)
    with ds_quant.exact_weights(engine):
        losses = train_steps(engine, 2)
    assert losses == train_steps(plain, 2) and evaluate(engine) == evaluate(plain)
    report = ds_quant.report(engine)
    assert "single rank: nothing to communicate" in report["line"]
    assert report["collectives"] == {"weights": 0, "gradients": 0}


# ---- handshake ----

TIMEOUT = 2.0
CAREFUL = {"scheme": "qsdp", "handshake_timeout": TIMEOUT}


def started(configs: list[dict[str, Any]]) -> tuple[str, float]:
    """Return the error of start-up for the config of this rank, "" without one, and its seconds.

    From the handshake on start-up issues no collective before it refuses.
    """
    from ds_quant.runtime import handshake

    begun, compare = 0, handshake.handshake

    def noted(*args: Any, **facts: Any) -> int:
        nonlocal begun
        begun = collectives_issued()
        return compare(*args, **facts)

    message, start = "", time.monotonic()
    with patch.object(handshake, "handshake", noted):
        try:
            build(configs[torch.distributed.get_rank()])
        except handshake.StartError as error:
            message = str(error)
            assert collectives_issued() == begun
    return message, time.monotonic() - start


@pytest.mark.parametrize(
    ("stage", "absent"),
    thinned(product([2, 3], [[0], [1], [0, 2]]), lambda *case: case == (2, [0, 2])),
)
def test_ranks_without_the_plugin_are_named_within_the_timeout(
    stage: int, absent: list[int]
) -> None:
    """Their config lacks the block, which is what DeepSpeed sees where the plugin is missing."""
    configs = [settings(stage, None if rank in absent else CAREFUL) for rank in range(3)]
    outcomes = run_each(started, 3, configs, timeout=15)
    for rank in set(range(3)) - set(absent):
        assert outcomes[rank][0] is not None, outcomes[rank][1]
        message, seconds = outcomes[rank][0]
        assert f"no answer from rank(s) {absent} within {TIMEOUT:g} s" in message
        assert "DS_QUANT_DISABLE" in message and "handshake_timeout" in message
        assert TIMEOUT <= seconds < TIMEOUT + 8  # building the engine is part of it


# What the message says of the last rank -> what its block has besides.
OTHERS = {
    "gradients.bits=4 (rank 0: 8)": {"gradients": {"bits": 4}},
    "seed=1 (rank 0: 0)": {"seed": 1},
    'scheme="qsdp_w4g4" (rank 0: "qsdp")': {"scheme": "qsdp_w4g4"},
    "min_numel=64 (rank 0: 2048)": {"min_numel": 64},
    'exclude=["last*"] (rank 0: [])': {"exclude": ["last*"]},
    "node_size=1 (rank 0: null)": {"node_size": 1},
    "fallback.steps=7 (rank 0: 100)": {"fallback": {"steps": 7}},
}
SPELT_OUT = {"scheme": "qsdp", "weights": {"bits": 8}, "seed": 0, "enabled": True}


def said_to(*blocks: dict[str, Any]) -> str:
    """To each of four ranks with a block of its own."""
    return started([settings(2, block) for block in blocks])[0]


@on_ranks(4)
def test_ranks_with_other_settings_are_named_with_the_keys_that_differ() -> None:
    for named, other in OTHERS.items():
        message = said_to(CAREFUL, CAREFUL, CAREFUL, CAREFUL | other)
        assert "ranks disagree" in message and f"quantized_comm.{named}" in message
        assert "rank 3:" in message and "rank 1:" not in message and "rank 2:" not in message
        assert "handshake_timeout" not in message, "equal keys are left out"


@on_ranks(4)
def test_ranks_with_one_other_block_are_named_together() -> None:
    other, third = CAREFUL | {"seed": 1}, CAREFUL | {"seed": 2}
    message = said_to(CAREFUL, other, other, third)
    assert "ranks 1 to 2: quantized_comm.seed=1 (rank 0: 0); rank 3: " in message


@on_ranks(4)
def test_ranks_with_another_version_or_other_bytes_are_named() -> None:
    """However the same settings are written, and whatever was before, they agree."""
    from ds_quant.runtime import handshake

    said = 'rank 1: ds_quant="0.0.0" (rank 0: "', "same ds_quant everywhere"
    rank = torch.distributed.get_rank()
    for owner, name, value, parts in (
        (ds_quant, "__version__", "0.0.0", said),
        (handshake, "WIRE_VERSION", 9, ("rank 1: wire=9 (rank 0: ",)),
    ):
        with patch.object(owner, name, value if rank == 1 else getattr(owner, name)):
            message = said_to(*[CAREFUL] * 4)
        assert "ranks disagree" in message and all(part in message for part in parts)
    assert said_to({}, QSDP, SPELT_OUT, QSDP) == ""


@on_ranks()
def test_hosts_decide_where_launchers_contradict_each_other() -> None:
    """Rank 0 was told of one rank on its host, rank 1 of two; they share it."""
    if torch.distributed.get_rank() == 0:
        os.environ["LOCAL_SIZE"] = "1"
    assert "; 1 x 2 ranks; " in ds_quant.report(engine_of(2, QSDP))["line"]


# ---- hosts and kernels ----


class _Counted(torch.distributed.Store):
    """The store, counting the requests to it."""

    def __init__(self, store: torch.distributed.Store) -> None:
        super().__init__()
        self._store, self.asked = store, 0

    def _request(self, name: str, *args: Any) -> Any:
        self.asked += 1
        return getattr(self._store, name)(*args)

    def set(self, *args: Any) -> Any:
        return self._request("set", *args)

    def get(self, *args: Any) -> Any:
        return self._request("get", *args)

    def add(self, *args: Any) -> Any:
        return self._request("add", *args)

    def check(self, *args: Any) -> Any:
        return self._request("check", *args)

    def wait(self, *args: Any) -> Any:
        return self._request("wait", *args)

    def multi_get(self, *args: Any) -> Any:
        return self._request("multi_get", *args)

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()


def _store_rank() -> int:
    """Questions that one handshake puts to the store."""
    from ds_quant.config.schema import parse_block
    from ds_quant.runtime import handshake

    distributed = torch.distributed.distributed_c10d
    store = _Counted(distributed._get_default_store())
    with patch.object(distributed, "_get_default_store", return_value=store):
        handshake.handshake(
            parse_block(CAREFUL), facts={}, device=torch.device("cpu")
        )  # fmt: skip
    return store.asked


def test_the_handshake_asks_the_store_no_more_with_more_ranks() -> None:
    few, many = run(_store_rank, 2), run(_store_rank, 6)
    assert max(many) <= max(few) + 1  # the rank that comes last says that all are there


# hosts of the ranks, block, kernels of the ranks; the line or error, and what rank 0 is told.
TORCH, CUPY = "torch kernels", "CuPy kernels"
PLACES = [
    ("aabb", QSDP, [TORCH] * 4, "; 2 x 2 ranks; ", []),
    ("aabb", {"node_size": 4}, [TORCH] * 4, "; 1 x 4 ranks; ",
     ["node_size=4, but ranks 0 to 3 lie on several hosts (2 on a, 2 on b)"]),
    ("aaaa", {"node_size": 2}, [TORCH] * 4, "; 2 x 2 ranks; ", []),
    ("abab", QSDP, [TORCH] * 4, "srun --distribution=block", []),
    ("abcd", {"node_size": 1}, [CUPY, CUPY, TORCH, CUPY], "x 1 ranks; ",
     ["Most ranks: CuPy kernels; rank 2 on c: torch kernels"]),
]  # fmt: skip


@on_ranks(4, environment={"LOCAL_SIZE": "", "LOCAL_WORLD_SIZE": ""})
def test_hosts_make_the_nodes_and_what_contradicts_them_is_told_once() -> None:
    import socket

    from ds_quant.kernels import dispatch

    rank, told = torch.distributed.get_rank(), heard()
    for hosts, block, kernels, said, warned in PLACES:
        told.clear()
        socket.gethostname = lambda hosts=hosts: hosts[rank]
        dispatch.describe = lambda *_, kernels=kernels: kernels[rank]
        try:
            line = ds_quant.report(engine_of(2, block))["line"]
        except RuntimeError as error:
            line = str(error)
        assert said in line
        if rank == 0:
            assert len(told) == len(warned), told
            assert all(part in line for part, line in zip(warned, told, strict=True))


# ---- exclude ----


class _Wrapped(torch.nn.Module):
    """As torch.compile wraps a model."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = Regression()

    def forward(self, *batch: Any) -> Any:
        return self._orig_mod(*batch)


@on_ranks()
def test_patterns_reach_a_wrapped_model_and_idle_ones_are_named() -> None:
    said, patterns = heard(), ["last.weight", "secnd.weight", "*.embed*"]
    engine = engine_of(2, {"exclude": patterns}, _Wrapped)
    assert "1 excluded" in ds_quant.report(engine)["line"]
    assert [warning.split("; ")[0] for warning in said] == [
        f'quantized_comm: exclude pattern "{pattern}" matches no parameter'
        for pattern in patterns[1:]
    ]
    assert said[0].endswith("one is called _orig_mod.second.weight")
