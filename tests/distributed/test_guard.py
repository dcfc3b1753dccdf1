"""What is refused, and when: through real ``deepspeed.initialize``, before any collective that a
refusal could leave half done. The handshake goes through the store alone.

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

from tests.distributed.harness import run, run_each
from tests.distributed.models import QSDP, Regression, build, evaluate, heard, settings, train_step
from tests.thin import thinned


def collectives_issued() -> int:
    """Collectives of all process groups of this rank so far, DeepSpeed's included."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def block(**fields: Any) -> dict[str, Any]:
    return settings(2, fields)


# ---- a world of one ----

WRAPPED = (
    "step", "average_tensor", "allreduce_and_copy_with_multiple_ranks",
    "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
)  # fmt: skip


def _alone_rank(stage: int) -> tuple[list[str], Any, list[float], list[float], float]:
    """Wrapped methods, the report, the losses with and without the block, the evaluation."""
    import ds_quant

    engine = build(settings(stage, QSDP))
    optimizer = engine.optimizer
    wrapped = [n for n in WRAPPED if hasattr(getattr(optimizer, n, None), "ds_quant_wraps")]
    wrapped += [
        name
        for name, p in engine.module.named_parameters()
        if isinstance(getattr(p, "all_gather_coalesced", None), functools.partial)
    ]
    with ds_quant.exact_weights(engine):
        losses = train_step(engine, 0) + train_step(engine, 1)
    plain = build(settings(stage))
    expected = train_step(plain, 0) + train_step(plain, 1)
    return wrapped, ds_quant.report(engine), losses, expected, evaluate(engine) - evaluate(plain)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_world_of_one_trains_unwrapped_and_says_so(stage: int) -> None:
    ((wrapped, report, losses, expected, difference),) = run(_alone_rank, 1, stage)
    assert wrapped == []
    assert "single rank: nothing to communicate" in report["line"]
    assert report["collectives"] == {"weights": 0, "gradients": 0}
    assert losses == expected and difference == 0


# ---- handshake ----

TIMEOUT = 2.0
CAREFUL = {"scheme": "qsdp", "handshake_timeout": TIMEOUT}


def _handshake_rank(configs: list[dict[str, Any]]) -> tuple[str, str, float, int]:
    """``configs[rank]`` is this rank's; error or "built", its text, seconds, own collectives."""
    from ds_quant.zero import handshake

    begun = 0
    compare = handshake.handshake

    def noted(**facts: Any) -> int:
        nonlocal begun
        begun = collectives_issued()
        return compare(**facts)

    handshake.handshake = noted
    started = time.monotonic()
    try:
        build(configs[torch.distributed.get_rank()])
    except Exception as error:
        since = collectives_issued() - begun
        return type(error).__name__, str(error), time.monotonic() - started, since
    return "built", "", time.monotonic() - started, 0


@pytest.mark.parametrize(
    ("stage", "absent"),
    thinned(product([2, 3], [[0], [1], [0, 2]]), lambda *case: case in ((2, [0, 2]), (3, [0]))),
)
def test_ranks_without_the_plugin_are_named_within_the_timeout(
    stage: int, absent: list[int]
) -> None:
    """Their config lacks the block, which is what DeepSpeed sees where the plugin is missing."""
    configs = [settings(stage, None if rank in absent else CAREFUL) for rank in range(3)]
    outcomes = run_each(_handshake_rank, 3, configs, timeout=15)
    for rank in set(range(3)) - set(absent):
        assert outcomes[rank][0] is not None, outcomes[rank][1]
        kind, message, seconds, collectives = outcomes[rank][0]
        assert kind == "StartError"
        assert f"no answer from rank(s) {absent} within {TIMEOUT:g} s" in message
        assert "DS_QUANT_DISABLE" in message and "handshake_timeout" in message
        assert TIMEOUT <= seconds < TIMEOUT + 8  # building the engine is part of it
        assert collectives == 0


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


def _compared_rank() -> dict[str, tuple[str, str, float, int]]:
    """One engine after the other, each compared with those of equal place."""
    import ds_quant
    from ds_quant.zero import handshake

    rank, found = torch.distributed.get_rank(), {}

    def compare(name: str, *blocks: dict[str, Any]) -> None:
        found[name] = _handshake_rank([settings(2, fields) for fields in blocks])

    for named, other in OTHERS.items():
        compare(named, CAREFUL, CAREFUL, CAREFUL, CAREFUL | other)
    other, third = CAREFUL | {"seed": 1}, CAREFUL | {"seed": 2}
    compare("together", CAREFUL, other, other, third)
    compare("spelt differently", {}, QSDP, SPELT_OUT, QSDP)
    for name, owner, value in (("__version__", ds_quant, "0.0.0"), ("WIRE_VERSION", handshake, 9)):
        with patch.object(owner, name, value if rank == 1 else getattr(owner, name)):
            compare(name, *[CAREFUL] * 4)
    compare("again", *[CAREFUL] * 4)
    return found


@functools.cache
def compared() -> list[dict[str, tuple[str, str, float, int]]]:
    return run(_compared_rank, 4)


@pytest.mark.parametrize("named", OTHERS)
def test_ranks_with_other_settings_are_named_with_the_keys_that_differ(named: str) -> None:
    for kind, message, _, collectives in (rank[named] for rank in compared()):
        assert kind == "StartError" and "ranks disagree" in message
        assert f"quantized_comm.{named}" in message
        assert "rank 3:" in message and "rank 1:" not in message and "rank 2:" not in message
        assert "handshake_timeout" not in message, "equal keys are left out"
        assert collectives == 0


def test_ranks_with_one_other_block_are_named_together() -> None:
    for _, message, _, _ in (rank["together"] for rank in compared()):
        assert "ranks 1 to 2: quantized_comm.seed=1 (rank 0: 0); rank 3: " in message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("__version__", ['rank 1: ds_quant="0.0.0" (rank 0: "', "same ds_quant everywhere"]),
        ("WIRE_VERSION", ["rank 1: wire=9 (rank 0: "]),
    ],
)
def test_ranks_with_another_version_or_other_bytes_are_named(name: str, said: list[str]) -> None:
    for kind, message, _, collectives in (rank[name] for rank in compared()):
        assert kind == "StartError" and "ranks disagree" in message and collectives == 0
        assert [text for text in said if text not in message] == []


@pytest.mark.parametrize("name", ["spelt differently", "again"])
def test_the_same_settings_agree_however_written_and_whatever_was_before(name: str) -> None:
    assert [rank[name][0] for rank in compared()] == ["built"] * 4


def _launched_otherwise_rank() -> str:
    import ds_quant

    if torch.distributed.get_rank() == 0:
        os.environ["LOCAL_SIZE"] = "1"
    return ds_quant.report(build(settings(2, QSDP)))["line"]


def test_hosts_decide_where_launchers_contradict_each_other() -> None:
    """Rank 0 was told of one rank on its host, rank 1 of two; they share it."""
    for line in run(_launched_otherwise_rank, 2):
        assert "; 1 x 2 ranks; " in line


# ---- hosts and kernels ----


class _Counted:
    """The store, counting what is asked of it."""

    def __init__(self, store: Any) -> None:
        self._store, self.asked = store, 0

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        return getattr(self._store, name)


def _store_rank() -> int:
    """Questions that one handshake puts to the store."""
    from ds_quant.config.schema import parse_block
    from ds_quant.zero import handshake

    distributed = torch.distributed.distributed_c10d
    store = _Counted(distributed._get_default_store())
    with patch.object(distributed, "_get_default_store", return_value=store):
        handshake.handshake(
            config=parse_block(CAREFUL), must={}, kernels="",
            rank=torch.distributed.get_rank(), world=torch.distributed.get_world_size(),
        )  # fmt: skip
    return store.asked


def test_the_handshake_asks_the_store_no_more_with_more_ranks() -> None:
    assert run(_store_rank, 2) == run(_store_rank, 6)[:2]


# hosts of the ranks, block, kernels of the ranks.
PLACES: dict[str, tuple[str, dict[str, Any], list[str] | None]] = {
    "nobody says": ("aabb", QSDP, None),
    "a node on two hosts": ("aabb", {"node_size": 4}, None),
    "two nodes on a host": ("aaaa", {"node_size": 2}, None),
    "cyclic": ("abab", QSDP, None),
    "kernels": ("abcd", {"node_size": 1}, ["CuPy kernels"] * 2 + ["torch kernels", "CuPy kernels"]),
}


def _placed_rank() -> dict[str, tuple[str, list[str]]]:
    """The line of the report or the error, and what rank 0 was told."""
    import socket

    import ds_quant
    from ds_quant.kernels import dispatch
    from ds_quant.zero import log

    rank, found = torch.distributed.get_rank(), {}
    for name, (hosts, fields, kernels) in PLACES.items():
        said: list[str] = []
        with (
            patch.object(socket, "gethostname", lambda hosts=hosts: hosts[rank]),
            patch.object(log, "log_rank0", said.append),
            patch.object(
                dispatch, "describe", lambda *_, k=kernels: k[rank] if k else "torch kernels"
            ),
        ):
            try:
                line = ds_quant.report(build(settings(2, fields)))["line"]
            except RuntimeError as error:
                line = str(error)
        found[name] = line, said
    return found


@functools.cache
def placed() -> list[dict[str, tuple[str, list[str]]]]:
    return run(_placed_rank, 4, environment={"LOCAL_SIZE": "", "LOCAL_WORLD_SIZE": ""})


@pytest.mark.parametrize(
    ("name", "said", "warned"),
    [
        ("nobody says", "; 2 x 2 ranks; ", []),
        ("a node on two hosts", "; 1 x 4 ranks; ",
         ["node_size=4, but ranks 0 to 3 lie on several hosts (2 on a, 2 on b)"]),
        ("two nodes on a host", "; 2 x 2 ranks; ", []),
        ("cyclic", "srun --distribution=block", []),
        ("kernels", "x 1 ranks; ", ["Most ranks: CuPy kernels; rank 2 on c: torch kernels"]),
    ],
)  # fmt: skip
def test_hosts_make_the_nodes_and_what_contradicts_them_is_told_once(
    name: str, said: str, warned: list[str]
) -> None:
    ranks = [rank[name] for rank in placed()]
    assert all(said in line for line, _ in ranks)
    assert len(ranks[0][1]) == len(warned)
    assert all(part in line for part, line in zip(warned, ranks[0][1], strict=True))


# ---- exclude ----


class _Wrapped(torch.nn.Module):
    """As torch.compile wraps a model."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = Regression()

    def forward(self, *batch: Any) -> Any:
        return self._orig_mod(*batch)


def _patterns_rank(patterns: list[str]) -> tuple[str, list[str]]:
    import ds_quant

    said = heard()
    engine = build(block(exclude=patterns), _Wrapped)
    return ds_quant.report(engine)["line"], said


def test_patterns_reach_a_wrapped_model_and_idle_ones_are_named() -> None:
    line, said = run(_patterns_rank, 2, ["last.weight", "secnd.weight", "*.embed*"])[0]
    assert "1 excluded" in line
    assert [warning.split("; ")[0] for warning in said] == [
        'quantized_comm: exclude pattern "secnd.weight" matches no parameter',
        'quantized_comm: exclude pattern "*.embed*" matches no parameter',
    ]
    assert said[0].endswith("one is called _orig_mod.second.weight")
