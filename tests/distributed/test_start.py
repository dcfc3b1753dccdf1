"""The start of a run on the CPU: what is built, what is said about it, how mistakes are told, and
DS_QUANT_BLOCK, a block for DeepSpeed configs that nobody can edit.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ds_quant
from ds_quant import ddp, fsdp2
from ds_quant.config.environment import VARIABLE
from ds_quant.policy.in_words import amount
from tests.distributed.harness import on_ranks, run, scratch
from tests.distributed.models import (
    QSDP,
    Regression,
    build,
    engine_of,
    heard,
    settings,
    train_steps,
)
from tests.thin import thinned
from tests.unit.advice import ROOT, advices

# ---- DeepSpeed's shared-memory operator ----


class _Operator:
    """Stands for the compiled one."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, int]] = []

    def initialize(self, world: int, rank: int) -> None:
        self.opened.append((world, rank))

    def vector_kernel_level(self) -> int:
        return 2


@pytest.mark.slow
@on_ranks()
def test_the_operator_is_built_when_inference_first_reduces() -> None:
    module, built = importlib.import_module("deepspeed.comm.torch"), list[_Operator]()

    def compile_it() -> _Operator:
        built.append(_Operator())
        return built[-1]

    module.build_shm_op.ds_quant_wraps = compile_it
    backend, value = module.TorchBackend("gloo", None, None), torch.ones(3)
    assert built == []
    for _ in range(2):
        backend.inference_all_reduce(value, module.ReduceOp.SUM)
        assert [operator.opened for operator in built] == [[(2, torch.distributed.get_rank())]]
    assert value.tolist() == [2 * 2] * 3


# ---- interrupted builds ----


@on_ranks()
def test_the_lock_of_an_interrupted_build_is_named_once_before_deepspeed_waits_for_it() -> None:
    said, rank = heard("log_here"), torch.distributed.get_rank()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(scratch())
    operator = scratch() / "py311_cpu" / "cpu_adam"
    if rank == 0:
        operator.mkdir(parents=True)
        (operator / "lock").touch()
    torch.distributed.barrier()
    engine_of(2, QSDP)
    assert len(said) == (rank == 0)
    for line in said:
        assert line.startswith("quantized_comm: ") and "operator cpu_adam that did not end" in line
        assert "rm " in line and "/py311_cpu/cpu_adam/lock" in line


# ---- mistakes ----


def told(configs: list[dict[str, Any]]) -> str:
    """Return the output of this rank when its mistake is caught by nobody."""
    return printed_by(lambda: build(configs[torch.distributed.get_rank()]))


def printed_by(function: Callable[[], object]) -> str:
    """Return the output of this rank when an error of ``function`` is caught by nobody."""
    printed = io.StringIO()
    try:
        function()
    except Exception as error:
        with contextlib.redirect_stderr(printed):
            sys.excepthook(type(error), error, error.__traceback__)
    return printed.getvalue().replace(f"[rank{torch.distributed.get_rank()}]: ", "")  # torch's


TYPO = settings(2, {"gradients": {"bit": 4}})
SHORT = "rank 1 ends: see the message of rank 0\n"


def test_a_mistake_in_the_config_is_told_once_without_a_traceback() -> None:
    first, second = run(told, 2, [TYPO, TYPO])
    assert first.startswith("ConfigError: quantized_comm.gradients.bit=4: unknown key")
    assert first.count("\n") == 1 and second == SHORT


# Both fronts share the handshake: make test runs one of them.
QUICK_FRONTS = thinned(["fsdp2", "ddp"], lambda front: front == "ddp")


def told_of_attach(front: str, blocks: list[Any]) -> str:
    """Return the output of this rank for its block; for None, for a model that is refused."""
    sys.excepthook = sys.__excepthook__  # as without DeepSpeed
    block = blocks[torch.distributed.get_rank()]
    net = nn.Embedding(8, 4, sparse=block is None)
    if front == "ddp":
        return printed_by(lambda: ddp.attach(DistributedDataParallel(net), block or QSDP))
    if block is not None:
        fully_shard(net)
    return printed_by(lambda: fsdp2.attach(net, block or QSDP, optimizer=[]))


@pytest.mark.parametrize("front", ["fsdp2", "ddp"])
def test_a_mistake_is_told_once_under_every_front(front: str) -> None:
    # All ranks make the mistake: the first tells it.
    typo = {"gradients": {"bit": 4}, "schem": "qsdp"}
    first, second = run(told_of_attach, 2, front, [typo, typo])
    assert first.startswith("ConfigError: 2 mistakes:\n  quantized_comm.")
    assert "\n  quantized_comm.gradients.bit=4: unknown key" in first
    assert first.count("\n") == 3 and second == SHORT
    # One rank makes it: each rank tells it in a line.
    first, second = run(told_of_attach, 2, front, [QSDP, {**QSDP, "node_size": 3}])
    sentence = "quantized_comm.node_size=3: allowed with 2 ranks: 1, 2\n"
    assert first == f"StartError: quantized_comm: rank 1 stopped: ConfigError: {sentence}"
    assert second == f"ConfigError on rank 1: {sentence}"
    # The model of all ranks is refused.
    first, second = run(told_of_attach, 2, front, [None, None])
    assert first.startswith("AttachError: quantized_comm: ")
    assert first.count("\n") == 1 and second == SHORT


def told_of_arguments(front: str, mistake: str) -> str:
    """Return the output of this rank for a mistake in another argument than the block."""
    sys.excepthook = sys.__excepthook__
    model: nn.Module = nn.Linear(8, 8)
    trained = model if mistake != "another optimizer" else nn.Linear(8, 8)
    if mistake != "not wrapped":
        model = fully_shard(model) if front == "fsdp2" else DistributedDataParallel(model)
    attach = fsdp2.attach if front == "fsdp2" else ddp.attach
    call = partial(attach, model, optimizer=torch.optim.SGD(trained.parameters()))
    if mistake == "no model":
        return printed_by(lambda: attach(None, QSDP, optimizer=[]))
    if mistake == "no optimizer":
        return printed_by(lambda: attach(model, QSDP, optimizer=model.parameters()))
    if mistake in ("not wrapped", "another optimizer"):
        return printed_by(lambda: call(QSDP))
    call(QSDP)
    is_mistaken = mistake == "another block" or torch.distributed.get_rank() == 1
    return printed_by(lambda: call({**QSDP, "seed": 1} if is_mistaken else QSDP))


MISTAKES = [
    ("fsdp2", "no model", "model=NoneType: allowed: a module that fully_shard was called on"),
    ("ddp", "no model", "model=NoneType: allowed: a DistributedDataParallel"),
    ("fsdp2", "no optimizer", "optimizer=DTensor: allowed: the optimizer of the model's"),
    ("ddp", "no optimizer", "optimizer=Parameter: allowed: the optimizer of the model's"),
    ("fsdp2", "not wrapped", "holds no module that fully_shard was called on"),
    ("ddp", "not wrapped", "model=Linear: allowed: a DistributedDataParallel"),
    ("fsdp2", "another optimizer", "holds none of the model's parameters"),
    ("fsdp2", "another block", "another block: quantized_comm.seed=1 (in the first call: 0): call"),
    ("ddp", "another block", "another block: quantized_comm.seed=1 (in the first call: 0): call"),
]


@pytest.mark.parametrize(("front", "mistake", "said"), MISTAKES)
def test_a_wrong_argument_of_attach_is_told_once(front: str, mistake: str, said: str) -> None:
    first, second = run(told_of_arguments, 2, front, mistake)
    assert first.startswith("AttachError: quantized_comm: ") and said in first
    assert first.count("\n") == 1 and second == SHORT


@pytest.mark.parametrize("front", QUICK_FRONTS)
def test_another_block_on_one_rank_in_a_second_call_ends_all_ranks(front: str) -> None:
    first, second = run(told_of_arguments, 2, front, "another block on one rank")
    assert first.startswith("StartError: quantized_comm: rank 1 stopped: AttachError: ")
    assert second.startswith("AttachError on rank 1: ")
    for printed in (first, second):
        assert "another block: quantized_comm.seed=1 (in the first call: 0)" in printed


PATIENT = {**QSDP, "handshake_timeout": 600.0}  # longer than a test may take


def wrapped(front: str) -> Callable[[Any], Any]:
    """Return a call of ``attach`` for a model, which takes the block."""
    net = nn.Linear(8, 8)
    if front == "ddp":
        return partial(ddp.attach, DistributedDataParallel(net))
    return partial(fsdp2.attach, fully_shard(net), optimizer=[])


@pytest.mark.parametrize("absent", [0, 1])
@pytest.mark.parametrize("front", ["fsdp2", "ddp"])
@on_ranks(2)
def test_a_rank_without_a_block_ends_the_others_at_once(front: str, absent: int) -> None:
    """As where DS_QUANT_BLOCK is set on one of two machines."""
    attach = wrapped(front)
    if torch.distributed.get_rank() == absent:
        assert "nothing is quantized" in attach(None).line
    else:
        said = f"on rank {absent} no block was given and DS_QUANT_BLOCK is not set: nothing is"
        with pytest.raises(ds_quant.StartError, match=f"{said} quantized; give all ranks the same"):
            attach(PATIENT)
    assert "qsdp on" in attach(PATIENT).line


@pytest.mark.parametrize("mistaken", [0, 1])
@pytest.mark.parametrize("front", QUICK_FRONTS)
@on_ranks(2)
def test_a_mistake_that_no_other_rank_hears_of_is_over_with_its_call(
    front: str, mistaken: int
) -> None:
    attach = wrapped(front)
    if torch.distributed.get_rank() == mistaken:
        with pytest.raises(ds_quant.ConfigError, match="schem"):
            attach({"schem": "qsdp"})
    else:
        attach(None)
    assert "qsdp on" in attach(PATIENT).line


@pytest.mark.parametrize("front", QUICK_FRONTS)
@on_ranks(3)
def test_no_rank_starts_without_one_that_has_given_up(front: str) -> None:
    """Rank 1 gives up just before rank 2 comes; rank 0, which judges, is there by then."""
    attach = wrapped(front)
    rank = torch.distributed.get_rank()
    time.sleep((1, 0, 3)[rank])
    block = {**QSDP, "handshake_timeout": 2.0}
    if rank < 2:
        with pytest.raises(ds_quant.StartError, match=r"no answer from rank\(s\) \[2\] within 2 s"):
            attach(block)
    assert "qsdp on" in attach(PATIENT).line  # the second call meets the first one of rank 2


@pytest.mark.parametrize("block", [{"schem": "qsdp"}, None])
@pytest.mark.parametrize("front", QUICK_FRONTS)
@on_ranks(2)
def test_an_error_after_the_others_have_given_up_is_over_with_its_call(
    front: str, block: dict[str, Any] | None
) -> None:
    attach = wrapped(front)
    if torch.distributed.get_rank() == 1:
        with pytest.raises(ds_quant.StartError, match=r"no answer from rank\(s\) \[0\]"):
            attach({**QSDP, "handshake_timeout": 1.0})
    else:
        time.sleep(2)
        with pytest.raises(ds_quant.ConfigError) if block else contextlib.nullcontext():
            attach(block)
    torch.distributed.barrier()
    assert "qsdp on" in attach(PATIENT).line


@pytest.mark.parametrize("front", QUICK_FRONTS)
@on_ranks(3)
def test_an_error_is_told_before_the_last_rank_has_come(front: str) -> None:
    attach = wrapped(front)
    rank = torch.distributed.get_rank()
    time.sleep(3 * (rank == 1))
    start = time.monotonic()
    with pytest.raises(ds_quant.ConfigError if rank == 2 else ds_quant.StartError, match="schem="):
        attach({"schem": "qsdp"} if rank == 2 else PATIENT)
    assert time.monotonic() - start < 2
    assert "qsdp on" in attach(PATIENT).line


def test_ranks_that_disagree_are_told_once() -> None:
    careful = {"scheme": "qsdp", "handshake_timeout": 5.0}
    first, second = run(told, 2, [settings(2, careful), settings(2, careful | {"seed": 1})])
    assert first.startswith("StartError: quantized_comm: ranks disagree") and second == SHORT


def test_a_mistake_of_one_rank_is_told_by_that_rank() -> None:
    other = settings(2, {"weights": {"bits": 1}})
    _, second = run(told, 2, [TYPO, other])
    assert second.startswith("ConfigError on rank 1: quantized_comm.weights.bits=1: allowed: ")


def told_of_files(files: list[str]) -> list[str]:
    return [told([settings(2, QSDP | {"metrics": {"file": file}})] * 2) for file in files]


def test_a_metrics_file_that_rank_0_cannot_write_ends_all_ranks_together() -> None:
    """Only rank 0 opens it. A folder, no folder, a file in the folder's place, no file name."""
    reasons = {"/": "Is a directory", "/no/where": "No such file", "/dev/null/x": "Not a directory"}
    first, second = run(told_of_files, 2, [*reasons, "a\0b"])
    for printed, (file, reason) in zip(first[:-1], reasons.items(), strict=True):
        assert printed.startswith(f'StartError: quantized_comm: metrics.file="{file}": {reason}')
        assert printed.endswith(": allowed: a file that rank 0 can write, in a folder that exists; "
                                "or null\n")  # fmt: skip
    assert first[-1].startswith('ConfigError: quantized_comm.metrics.file="a\\u0000b": allowed: ')
    assert second == [SHORT] * 4


@on_ranks()
def test_a_bug_keeps_its_traceback_on_every_rank() -> None:
    from ds_quant.policy import refusals

    def fails(*_: object, **__: object) -> None:
        raise ValueError("a bug")

    refusals.refuse = fails
    printed = told([settings(2, QSDP)] * 2)
    assert sys.excepthook is not sys.__excepthook__
    assert printed.startswith("Traceback (most recent call last):") and "in read_block" in printed
    assert printed.endswith("ValueError: a bug\n")


# ---- the block of the environment ----

BLOCK = {"scheme": "sdp4bit", "node_size": 2}
GIVEN = {VARIABLE: json.dumps(BLOCK)}


@on_ranks()
def test_a_file_is_read() -> None:
    """Trained with a block of the environment: see test_equal_runs.py."""
    path = scratch() / f"block of rank {torch.distributed.get_rank()}.json"
    path.write_text(json.dumps({"quantized_comm": BLOCK}))
    os.environ[VARIABLE] = str(path)
    line = ds_quant.report(engine_of(2))["line"]
    assert line.startswith("sdp4bit on ZeRO-2") and f"from {VARIABLE}" in line


@on_ranks(environment=GIVEN)
def test_a_block_in_the_config_wins() -> None:
    line = ds_quant.report(engine_of(2, {"scheme": "qsdp"}))["line"]
    assert line.startswith("qsdp on ZeRO-2") and VARIABLE not in line
    assert ds_quant.report(engine_of(2, {"enabled": False})) is None


@on_ranks(environment=GIVEN)
def test_stage_0_and_engines_without_an_optimizer_stay_as_they_are() -> None:
    import deepspeed

    logged, config = heard(), settings(0)
    config["zero_optimization"] = {"stage": 0}
    engine = build(config)
    first, second = train_steps(engine, 2)
    assert first != second
    frozen = deepspeed.initialize(model=Regression(), config=settings(3, dtype="bf16"))[0]
    with torch.no_grad():
        frozen(torch.ones(1, 63, dtype=torch.bfloat16), torch.ones(1, 61))
    first, second = logged
    assert "has no effect on an engine at stage 0" in first
    assert "has no effect without an optimizer" in second
    assert ds_quant.report(engine) is ds_quant.report(frozen) is None


@on_ranks(environment=GIVEN)
def test_the_handshake_compares_it() -> None:
    if torch.distributed.get_rank() == 1:
        os.environ[VARIABLE] = '{"scheme": "qsdp", "seed": 1}'
    with pytest.raises(RuntimeError, match="(?s)ranks disagree.*seed"):
        engine_of(2)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{'scheme': 1}", "allowed: a block such as"),
        ("/nowhere/block.json", "No such file or directory"),
        ('{"scheme": "qspd"}', r'did you mean "qsdp"\?'),
        ("[1]", "allowed: a block such as"),
    ],
)
@on_ranks()
def test_a_wrong_one_ends_the_job_like_a_wrong_block(value: str, said: str) -> None:
    from ds_quant.config.errors import ConfigError

    os.environ[VARIABLE] = value
    with pytest.raises(ConfigError, match=f"^{VARIABLE}: .*{said}"):
        engine_of(2)


# ---- the whole start-up line, every figure of it by hand ----


class Small(nn.Module):
    """Weights of 8192 and 4096 elements and a bias of 128: 12,416 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 32, bias=False)


def config(stage: int, scheme: str, node_size: int, micro_steps: int, **block: Any) -> dict:
    fields = {"scheme": scheme, "node_size": node_size, "backend": "torch", **block}
    zero = {"overlap_comm": stage == 3 and scheme == "qsdp"}
    return settings(stage, fields, dtype="bf16", accumulation=micro_steps, zero=zero)


# Volumes; of two nodes each receives half, of four ranks on one node each three quarters.
# Bytes of the up weight, the down weight and the bias, which is sent in bf16: 256. Codes and scales
# are filled up to 16 bytes each.
LINES = {
    # 4 rows of 2048 + 16 + 16 and of 1024 + 16 + 16: 8320 + 4224 + 256 = 12,800 for weights and for
    # gradients. A micro-step gathers twice and reduces once: 38,400 / 12,416. In full precision
    # 512 of 25,600.
    "qsdp ZeRO-3": (
        config(3, "qsdp", 4, 2),
        "qsdp on ZeRO-3, volume 3.09 B/param/micro-step (bf16 6.00), 1 small tensor unquantized "
        "(2.0 % of bytes); 1 x 4 ranks; torch kernels; weights fetched 2 times per micro-batch; "
        "2.32 B/param/micro-step received per rank; "
        "advice: gradients are not reduced during backward: "
        "reduce_bucket_size=1000000 holds all 12416 elements (try 1552)",
    ),
    # Between nodes: weights once, 4160 + 2112 + 256 = 6528; gradients once, 4352 + 2176 + 256 =
    # 6784: 13,312 / 12,416, and 512 of 13,312 in full precision. Inside: 4 gathers in bf16, 24,832;
    # gradients twice, 8448 + 4224 + 256 = 12,928: 125,184 / 12,416. Half of the weights is kept,
    # half of the gradients is held in fp32.
    "sdp4bit ZeRO-3": (
        config(3, "sdp4bit", 2, 2, warmup_steps=7),
        "sdp4bit on ZeRO-3, volume 1.07 B/param/step between nodes (bf16 12.00), 1 small tensor "
        "unquantized (3.8 % of bytes); 2 x 2 ranks; torch kernels; weights fetched 2 times per "
        "micro-batch; 0.54 B/param/step received per node; volume inside a node 10.08 B/param; "
        "keeps 1.00 B/param (1.24e-05 GB) more on every rank; gradients are sent between nodes "
        "once per optimizer step; buffering them takes 2.00 B/param (2.48e-05 GB) on every rank; "
        "from step 7 on",
    ),
    # One row: weights 4112 + 2064 + 256 = 6432, gradients 6784 once: 13,216 / 12,416, and
    # 512 of 13,216 in full precision. Inside: the same weights, gradients 12,928 per micro-step:
    # 45,216 / 12,416.
    "sdp4bit ZeRO-2": (
        config(2, "sdp4bit", 2, 3),
        "sdp4bit on ZeRO-2, volume 1.06 B/param/step between nodes (bf16 14.00), 1 small tensor "
        "unquantized (3.9 % of bytes); 2 x 2 ranks; torch kernels; 0.53 B/param/step received "
        "per node; volume inside a node 3.64 B/param; gradients are sent between nodes once per "
        "optimizer step; buffering them takes 2.00 B/param (2.48e-05 GB) on every rank",
    ),
    # One row: 8256 + 4128 + 256 = 12,640 for weights and, in each of three micro-steps, for
    # gradients: 50,560 / 12,416 in a step, though nothing waits. In full precision 512 of 25,280.
    "qsdp ZeRO-2 on one node": (
        config(2, "qsdp", 4, 3),
        "qsdp on ZeRO-2, volume 4.07 B/param/step (bf16 14.00), 1 small tensor unquantized (2.0 "
        "% of bytes); 1 x 4 ranks; torch kernels; 3.05 B/param/step received per rank",
    ),
    # 2.36 bits of every weight: 2417 + 1209 + 38 = 3664 bytes, gradients 24,832 bytes once:
    # 28,496 / 12,416, and with 16 bits 4.00; inside the node in each of three micro-steps:
    # 78,160 / 12,416. In full precision 24,832 of 28,496.
    "lossless ZeRO-2": (
        config(2, "lossless", 2, 3),
        "lossless on ZeRO-2, volume 2.30 B/param/step between nodes (bf16 14.00), all gradients "
        "unquantized (87.1 % of bytes); 2 x 2 ranks; torch kernels; 1.15 B/param/step received "
        "per node; volume inside a node 6.30 B/param; gradients are sent between nodes once per "
        "optimizer step; buffering them takes 2.00 B/param (2.48e-05 GB) on every rank; traffic "
        "depends on the learning rate: volume 4.00 B/param/step at most",
    ),
    # Two gathers in bf16, 49,664, and gradients of 8448 + 4224 + 256 = 12,928: 62,592 / 12,416. In
    # full precision 24,832 + 256 of 37,760, gathers counted once.
    "sdp4bit ZeRO-3 on one node": (
        config(3, "sdp4bit", 4, 1),
        "sdp4bit on ZeRO-3, volume 5.04 B/param/micro-step (bf16 6.00), all weights, 1 small "
        "tensor unquantized (66.4 % of bytes); 1 x 4 ranks; torch kernels; weights fetched 2 "
        "times per micro-batch; 3.78 B/param/micro-step received per rank; advice: sdp4bit "
        'compresses weights between nodes only; on one node take "qsdp", or set weights.intra, '
        'such as {"bits": 8}',
    ),
    "lossless ZeRO-3 on one node": (
        config(3, "lossless", 4, 1),
        "lossless on ZeRO-3, volume 6.00 B/param/micro-step (bf16 6.00), all weights, all "
        "gradients unquantized (100.0 % of bytes); 1 x 4 ranks; torch kernels; weights fetched 2 "
        "times per micro-batch; 4.50 B/param/micro-step received per rank; advice: nothing "
        "to gain on one node: remove the block, or take zero_optimization.stage 2, where they are "
        "compressed on one node too",
    ),
}


LONG = "sdp4bit ZeRO-3", "lossless ZeRO-2"  # three lines without the pointer to the report
# Ratios and formats, and what follows the three lines. Bytes: see LINES.
STARTS = {
    "qsdp ZeRO-3": (
        "qsdp on ZeRO-3, 1 node x 4 CPU processes: 1.9 times fewer bytes between processes\n"
        "  (3.09 instead of 6.00 per parameter and micro-step); weights and gradients in 8 bits;\n"
        "  memory per process: ",
        ["advice: gradients are not reduced during backward: "
         "reduce_bucket_size=1000000 holds all 12416 elements (try 1552)"],
    ),
    "sdp4bit ZeRO-3": (
        "sdp4bit on ZeRO-3, 2 nodes x 2 CPU processes: 11.2 times fewer bytes between nodes\n"
        "  (1.07 instead of 12.00 per parameter and step); weights and gradients in 4 bits;\n"
        "  from step 7 on; memory per process: 12 kB kept + ",
        [],
    ),
    "sdp4bit ZeRO-2": (
        "sdp4bit on ZeRO-2, 2 nodes x 2 CPU processes: 13.2 times fewer bytes between nodes\n"
        "  (1.06 instead of 14.00 per parameter and step); weights and gradients in 4 bits;\n"
        "  memory per process: ",
        [],
    ),
    "qsdp ZeRO-2 on one node": (
        "qsdp on ZeRO-2, 1 node x 4 CPU processes: 3.4 times fewer bytes between processes\n"
        "  (4.07 instead of 14.00 per parameter and step); weights and gradients in 8 bits;\n"
        "  memory per process: ",
        [],
    ),
    "lossless ZeRO-2": (
        "lossless on ZeRO-2, 2 nodes x 2 CPU processes: 6.1 times fewer bytes between nodes\n"
        "  (2.30 instead of 14.00 per parameter and step);"
        " weights in about 2.4 bits without loss, gradients NOT compressed;\n"
        "  memory per process: ",
        [],
    ),
    "sdp4bit ZeRO-3 on one node": (
        "sdp4bit on ZeRO-3, 1 node x 4 CPU processes: 1.2 times fewer bytes between processes\n"
        "  (5.04 instead of 6.00 per parameter and micro-step);"
        " weights NOT compressed, gradients in 8 bits;\n"
        "  memory per process: ",
        ['advice: sdp4bit compresses weights between nodes only; on one node take "qsdp", or set '
         'weights.intra, such as {"bits": 8}'],
    ),
    "lossless ZeRO-3 on one node": (
        "lossless on ZeRO-3, 1 node x 4 CPU processes: as many bytes between processes as "
        "without it\n"
        "  (6.00 instead of 6.00 per parameter and micro-step); nothing is quantized;\n"
        "  memory per process: ",
        ["advice: nothing to gain on one node: remove the block, or take zero_optimization.stage "
         "2, where they are compressed on one node too"],
    ),
}  # fmt: skip


def _logged_rank() -> dict[str, tuple[list[str], dict]]:
    """By case what was logged at start-up, on this rank if it were rank 0, and what is reported."""
    import ds_quant

    logged = heard("info_rank0")
    found = {}
    for name, (settings_of_case, _) in LINES.items():
        logged.clear()
        engine = build(settings_of_case, Small)
        found[name] = list(logged), ds_quant.report(engine)
        engine.destroy()
    return found


@cache
def logged() -> list[dict[str, tuple[list[str], dict]]]:
    return run(_logged_rank, 4)


@pytest.mark.parametrize("case", LINES)
def test_the_report_says_what_crosses_the_wire_and_what_is_kept(case: str) -> None:
    line = LINES[case][1]
    for found in logged():
        _, report = found[case]
        peak = f"; extra memory: up to {report['expected_peak_bytes'] / 1e9:.2g} GB"
        assert report["line"].replace(peak, "", 1) == line and peak in report["line"]


@pytest.mark.parametrize("case", LINES)
def test_the_start_up_lines_need_no_glossary(case: str) -> None:
    start, sentences = STARTS[case]
    for found in logged():
        (text, *others), report = found[case]
        waiting = (
            report["expected_held_bytes"] if "sent between nodes once" in report["line"] else 0
        )
        memory = amount(report["expected_peak_bytes"] + waiting)
        end = f"{memory} at most in a step; torch kernels;"
        if case not in LONG:
            end += " all: ds_quant.report(engine)"
        assert text.replace("\n  ", " ") == f"quantized_comm: {start}{end}".replace("\n  ", " ")
        assert others == [f"quantized_comm: {sentence}" for sentence in sentences]
        lines = text.split("\n")
        assert len(lines) <= 3 and max(map(len, lines)) <= 100
        assert all(line.startswith("  ") for line in lines[1:])


@on_ranks(2)
def test_what_the_page_advises_for_one_gpu_per_node_starts() -> None:
    found = sorted({each for each in advices(ROOT / "docs" / "hybrid.md") if each.node_size == 1})
    assert {(advice.scheme, advice.stage) for advice in found} == {
        ("lossless", 2), ("full_precision", 3), ("lossless", 3)
    }  # fmt: skip
    for advice in found:
        block = {"scheme": advice.scheme, "node_size": 1, "allow_full_replica": advice.replica}
        line = ds_quant.report(engine_of(advice.stage, block))["line"]
        assert line.startswith(f"{advice.scheme} on ZeRO-{advice.stage}, ")
        assert "; 2 x 1 ranks; " in line
