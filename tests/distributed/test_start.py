"""The start of a run on the CPU: what is built, what is said about it, how mistakes are told."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from typing import Any

import torch

from tests.distributed.harness import on_ranks, run, scratch
from tests.distributed.models import QSDP, build, engine_of, heard, settings

# ---- DeepSpeed's shared-memory operator ----


class _Operator:
    """Stands for the compiled one."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, int]] = []

    def initialize(self, world: int, rank: int) -> None:
        self.opened.append((world, rank))

    def vector_kernel_level(self) -> int:
        return 2


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
    """What this rank prints when its mistake is caught by nobody."""
    printed = io.StringIO()
    try:
        build(configs[torch.distributed.get_rank()])
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
