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

import pytest
import torch

from tests.distributed.harness import run, run_each
from tests.distributed.models import QSDP, Regression, build, evaluate, settings, train_step
from tests.thin import thinned

pytestmark = pytest.mark.distributed


def collectives_issued() -> int:
    """Collectives of all process groups of this rank so far, DeepSpeed's included."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def _all_refused(configs: list[dict[str, Any]]) -> list[tuple[str, str, int, int]]:
    return [_refused_rank(config) for config in configs]


def _refused_rank(config: dict[str, Any]) -> tuple[str, str, int, int]:
    """Name and text of the error, collectives issued in all and since the plugin's last check."""
    from ds_quant.policy import refusals

    started = checked = collectives_issued()
    check = refusals.refuse_unsupported

    def noted(facts: Any) -> None:
        nonlocal checked
        checked = collectives_issued()
        check(facts)

    refusals.refuse_unsupported = noted
    try:
        build(config)
    except Exception as error:
        now = collectives_issued()
        return type(error).__name__, str(error), now - started, now - checked
    finally:
        refusals.refuse_unsupported = check
    return "nothing", "", 0, 0


def zero(stage: int, **extra: Any) -> dict[str, Any]:
    return settings(stage, QSDP, zero=extra)


def block(**fields: Any) -> dict[str, Any]:
    return settings(2, fields)


# What is asked for -> parts of the message: the key, the value, the way out.
AT_PARSING = {
    "stage 0": (settings(0, QSDP), ["zero_optimization.stage=0", "1, 2 or 3", "remove"]),
    "deepcompile": (
        settings(2, QSDP, compile={"deepcompile": True}),
        ["compile.deepcompile=true", "set compile.deepcompile to false"],
    ),
    **{
        f"{key}, ZeRO-{stage}": (
            zero(stage, **{key: True}), [f"zero_optimization.{key}=true", "remove"]
        )
        for key in ("zero_quantized_weights", "zero_quantized_gradients")
        for stage in (2, 3)
    },
    "hpZ": (
        zero(3, zero_hpz_partition_size=2),
        ["zero_optimization.zero_hpz_partition_size=2", "remove"],
    ),
    "NVMe parameters": (
        zero(3, offload_param={"device": "nvme", "nvme_path": "/nowhere"}),
        ["zero_optimization.offload_param.device=nvme", "allowed: cpu, none"],
    ),
    "ZenFlow": (
        zero(2, zenflow={"topk_ratio": 0.1}, offload_optimizer={"device": "cpu"}),
        ["zero_optimization.zenflow", "remove zenflow"],
    ),
    "SuperOffload": (
        zero(3, offload_optimizer={"device": "cpu", "super_offload": True}),
        ["zero_optimization.offload_optimizer.super_offload=true", "set it to false"],
    ),
    "bits 1": (
        block(gradients={"bits": 1}),
        ["quantized_comm.gradients.bits=1", "from 2 to 8"],
    ),
    "bits 9": (
        block(weights={"bits": 9}),
        ["quantized_comm.weights.bits=9", "from 2 to 8"],
    ),
    "group_size 33": (
        block(weights={"group_size": 33}),
        ["quantized_comm.weights.group_size=33", "multiple of 32"],
    ),
    "unknown scheme": (
        block(scheme="qspd"),
        ['quantized_comm.scheme="qspd"', "full_precision", "qsdp_w4g4", 'did you mean "qsdp"?'],
    ),
    "auto": (
        block(gradients={"bits": "auto"}),
        ['quantized_comm.gradients.bits="auto"', "accelerate", "leave the key out"],
    ),
    "misspelt key": (
        settings(2) | {"quantised_comm": {"scheme": "qsdp"}},
        ["quantised_comm", "did you mean quantized_comm?"],
    ),
    "misspelt field": (
        block(weights={"bit": 4}),
        ["quantized_comm.weights.bit", "unknown key", "did you mean quantized_comm.weights.bits?"],
    ),
    "block inside zero_optimization": (
        zero(2, quantized_comm=QSDP),
        ["zero_optimization.quantized_comm", "top level"],
    ),
    "not an object": (
        settings(2) | {"quantized_comm": True},
        ["quantized_comm=true", 'an object such as {"scheme": "qsdp"}'],
    ),
    "list": (settings(2) | {"quantized_comm": [4]}, ["quantized_comm=[4]", "an object such as"]),
}  # fmt: skip
BF16_OPTIMIZER = settings(1, QSDP, dtype="bf16", data_types={"grad_accum_dtype": "fp32"})
AT_THE_ENGINE = {
    "BF16_Optimizer": (
        2,
        BF16_OPTIMIZER,
        ["data_types.grad_accum_dtype=fp32", "BF16_Optimizer", "stage 2", "leave"],
    ),
    "node_size 2 of 3": (
        3,
        settings(2, {"node_size": 2}),
        ["quantized_comm.node_size=2", "with 3 ranks: 1, 3"],
    ),
    "node_size 4 of 2": (
        2,
        settings(3, {"node_size": 4}),
        ["quantized_comm.node_size=4", "with 2 ranks: 1, 2"],
    ),
}


@functools.cache
def refused_at_parsing() -> list[list[tuple[str, str, int, int]]]:
    return run(_all_refused, 2, [config for config, _ in AT_PARSING.values()])


@pytest.mark.parametrize("case", AT_PARSING)
def test_a_wrong_setting_is_refused_before_any_collective(case: str) -> None:
    parts, place = AT_PARSING[case][1], list(AT_PARSING).index(case)
    for kind, message, collectives, _ in (rank[place] for rank in refused_at_parsing()):
        assert kind == "ConfigError", (kind, message)
        assert [part for part in parts if part not in message] == [], message
        assert collectives == 0


@pytest.mark.parametrize("case", AT_THE_ENGINE)
def test_what_only_the_engine_knows_is_refused_before_the_first_own_collective(case: str) -> None:
    world, config, parts = AT_THE_ENGINE[case]
    for kind, message, _, collectives in run(_refused_rank, world, config):
        assert kind == "ConfigError", (kind, message)
        assert [part for part in parts if part not in message] == [], message
        assert collectives == 0


# ---- settings that are no mistake ----


def _accepted_rank(config: dict[str, Any]) -> tuple[bool, Any, list[float]]:
    """Whether the engine is bound, its report, and the losses of two steps."""
    import ds_quant

    engine = build(config)
    losses = train_step(engine, 0) + train_step(engine, 1)
    return hasattr(engine, "ds_quant_engine"), ds_quant.report(engine), losses


@pytest.mark.parametrize(
    "config",
    [settings(2), settings(2, {"enabled": False}), settings(0), settings(0, {"enabled": False})],
    ids=["no block", "disabled", "stage 0", "stage 0, disabled"],
)
def test_no_block_and_a_disabled_block_leave_the_engine_alone(config: dict[str, Any]) -> None:
    for bound, report, _ in run(_accepted_rank, 2, config):
        assert not bound and report is None


def test_settings_that_keep_gradients_exact_are_named_in_the_line() -> None:
    config = settings(2, QSDP, zero={"reduce_scatter": False})
    for _, report, _ in run(_accepted_rank, 2, config):
        assert "gradients stay exact: zero_optimization.reduce_scatter is false" in report["line"]
        assert report["collectives"]["gradients"] == 0 < report["collectives"]["weights"]


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
    from ds_quant.zero import safety

    begun = 0
    handshake = safety.handshake

    def noted(**facts: Any) -> int:
        nonlocal begun
        begun = collectives_issued()
        return handshake(**facts)

    safety.handshake = noted
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


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"gradients": {"bits": 4}}, "gradients.bits=4 (rank 0: 8)"),
        ({"seed": 1}, "seed=1 (rank 0: 0)"),
        ({"scheme": "qsdp_w4g4"}, 'scheme="qsdp_w4g4" (rank 0: "qsdp")'),
        ({"min_numel": 64}, "min_numel=64 (rank 0: 2048)"),
        ({"exclude": ["last*"]}, 'exclude=["last*"] (rank 0: [])'),
        ({"node_size": 1}, "node_size=1 (rank 0: null)"),
        ({"fallback": {"steps": 7}}, "fallback.steps=7 (rank 0: 100)"),
    ],
    ids=str,
)
def test_ranks_with_other_settings_are_named_with_the_keys_that_differ(
    other: dict[str, Any], named: str
) -> None:
    configs = [settings(2, CAREFUL), settings(2, CAREFUL), settings(2, CAREFUL | other)]
    for kind, message, _, collectives in run(_handshake_rank, 3, configs):
        assert kind == "StartError" and "ranks disagree" in message
        assert f"quantized_comm.{named}" in message
        assert "rank 2:" in message and "rank 1:" not in message
        assert "handshake_timeout" not in message, "equal keys are left out"
        assert collectives == 0


def test_ranks_with_one_other_block_are_named_together() -> None:
    other, third = CAREFUL | {"seed": 1}, CAREFUL | {"seed": 2}
    configs = [settings(2, block) for block in (CAREFUL, other, other, third)]
    for _, message, _, _ in run(_handshake_rank, 4, configs):
        assert "ranks 1 to 2: quantized_comm.seed=1 (rank 0: 0); rank 3: " in message


def test_the_same_settings_written_differently_agree() -> None:
    spelt_out = {"scheme": "qsdp", "weights": {"bits": 8}, "seed": 0, "enabled": True}
    configs = [settings(2, {}), settings(2, QSDP), settings(2, spelt_out)]
    assert [kind for kind, *_ in run(_handshake_rank, 3, configs)] == ["built"] * 3


def _version_rank() -> str:
    import ds_quant

    if torch.distributed.get_rank() == 1:
        ds_quant.__version__ = "0.0.0"
    try:
        build(settings(2, CAREFUL))
    except RuntimeError as error:
        return str(error)
    return "built"


def test_ranks_with_another_version_are_named() -> None:
    for message in run(_version_rank, 2):
        assert "install the same ds_quant everywhere" in message
        assert 'rank 1: ds_quant="0.0.0" (rank 0: "' in message


def _several_engines_rank(blocks: list[dict[str, Any]]) -> list[tuple[str, list[float]]]:
    import ds_quant

    engines = [build(settings(2, fields)) for fields in blocks]
    losses = [train_step(engine, 0) for engine in engines]
    return [
        (ds_quant.report(engine)["scheme"], loss)
        for engine, loss in zip(engines, losses, strict=True)
    ]


def test_every_engine_of_a_process_shakes_hands_for_itself() -> None:
    blocks = [{"scheme": s} for s in ("qsdp", "qsdp_w4g4", "qsdp")]
    for results in run(_several_engines_rank, 2, blocks):
        assert [scheme for scheme, _ in results] == ["qsdp", "qsdp_w4g4", "qsdp"]


def _second_engine_rank() -> str:
    build(settings(2, CAREFUL))
    seed = torch.distributed.get_rank()
    try:
        build(settings(2, CAREFUL | {"seed": seed}))
    except RuntimeError as error:
        return str(error)
    return "built"


def test_the_second_engine_is_compared_with_second_engines() -> None:
    for message in run(_second_engine_rank, 2):
        assert "ranks disagree" in message and "rank 1:" in message


def _other_bytes_rank() -> tuple[str, str, float, int]:
    from ds_quant.zero import handshake

    handshake.WIRE_VERSION += torch.distributed.get_rank()
    return _handshake_rank([settings(2, CAREFUL)] * 2)


def test_ranks_with_other_bytes_are_named() -> None:
    for kind, message, _, collectives in run(_other_bytes_rank, 2):
        assert kind == "StartError" and "ranks disagree" in message
        assert "rank 1: wire=3 (rank 0: 2)" in message
        assert collectives == 0


def _launched_otherwise_rank() -> str:
    import ds_quant

    if torch.distributed.get_rank() == 1:
        os.environ["LOCAL_SIZE"] = "1"
    return ds_quant.report(build(settings(2, QSDP)))["line"]


def test_hosts_decide_where_launchers_contradict_each_other() -> None:
    """Rank 0 was told of two ranks on its host, rank 1 of one; they share it."""
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
    from unittest.mock import patch

    from ds_quant.config.schema import parse_block
    from ds_quant.zero import safety

    distributed = torch.distributed.distributed_c10d
    store = _Counted(distributed._get_default_store())
    with patch.object(distributed, "_get_default_store", return_value=store):
        safety.handshake(
            config=parse_block(CAREFUL), must={}, facts={},
            rank=torch.distributed.get_rank(), world=torch.distributed.get_world_size(),
        )  # fmt: skip
    return store.asked


def test_the_handshake_asks_the_store_no_more_with_more_ranks() -> None:
    assert run(_store_rank, 2) == run(_store_rank, 6)[:2]


def _placed_rank(
    hosts: list[str], config: dict[str, Any], kernels: list[str] | None = None
) -> tuple[str, list[str]]:
    """The line of the report or the error, and what rank 0 was told."""
    import socket

    import ds_quant
    from ds_quant.kernels import dispatch
    from ds_quant.zero import log

    rank, said = torch.distributed.get_rank(), []
    socket.gethostname = lambda: hosts[rank]
    log.log_rank0 = said.append
    if kernels is not None:
        dispatch.describe = lambda *_: kernels[rank]
    try:
        return ds_quant.report(build(config))["line"], said
    except RuntimeError as error:
        return str(error), said


NOBODY_SAYS = {"LOCAL_SIZE": "", "LOCAL_WORLD_SIZE": ""}


def test_hosts_make_the_nodes_where_neither_config_nor_launcher_says() -> None:
    for line, said in run(
        _placed_rank, 4, list("aabb"), settings(2, QSDP), environment=NOBODY_SAYS
    ):
        assert "; 2 x 2 ranks; " in line and said == []


def test_a_given_node_on_several_hosts_trains_with_one_warning() -> None:
    ranks = run(_placed_rank, 4, list("aabb"), block(node_size=4))
    assert all("; 1 x 4 ranks; " in line for line, _ in ranks)
    (warning,) = ranks[0][1]
    assert "node_size=4, but ranks 0 to 3 lie on several hosts (2 on a, 2 on b)" in warning


def test_several_declared_nodes_on_one_host_are_silent() -> None:
    for line, said in run(_placed_rank, 4, ["a"] * 4, block(node_size=2)):
        assert "; 2 x 2 ranks; " in line and said == []


def test_cyclic_ranks_are_refused_on_all_ranks() -> None:
    ranks = run(_placed_rank, 4, list("abab"), settings(2, QSDP), environment=NOBODY_SAYS)
    for message, _ in ranks:
        assert "are not consecutive" in message and "srun --distribution=block" in message


def test_ranks_with_other_kernels_are_named_in_one_warning() -> None:
    kernels = ["CuPy kernels"] * 2 + ["torch kernels"]
    ranks = run(_placed_rank, 3, list("abc"), block(node_size=1), kernels)
    assert all("x 1 ranks; " in line for line, _ in ranks)
    (warning,) = ranks[0][1]
    assert "kernels differ" in warning
    assert "Most ranks: CuPy kernels; rank 2 on c: torch kernels" in warning


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
    from ds_quant.zero import log

    said: list[str] = []
    log.log_rank0 = said.append
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
