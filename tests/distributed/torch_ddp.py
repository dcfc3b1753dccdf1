"""torch's own tests of DDP, on two CPU ranks over gloo, with and without a block.

The tests are those of torch/testing/_internal/distributed/distributed_test.py, which comes with
torch. Most of them ask for GPUs: their text is changed to the CPU. ``play`` runs them in one
process per rank, as a test that ends well leaves nothing behind.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
import time
import types
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.harness import scratch

PASSED, SKIPPED, REFUSED = "passed", "skipped", "refused"
BLOCK = {"scheme": "full_precision", "checksum_steps": 1}
_MODULE = "torch.testing._internal.distributed.distributed_test"
_NAMES = re.compile(r"        def (test\w*(?:ddp|DistributedDataParallel|DDP)\w*)\(self")


def _source() -> str:
    spec = importlib.util.find_spec(_MODULE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text("utf-8")


def names() -> list[str]:
    """Return the names of torch's tests of DDP."""
    return _NAMES.findall(_source())


def play(tests: Sequence[str], with_block: bool) -> None:
    """Run tests on this rank until one fails. Outcomes are written to files: see ``outcomes``."""
    case_class = _case_class()
    fronts: list[Any] = []
    if with_block:
        _attach_before_forward(fronts)
    for place, name in enumerate(tests):
        file = scratch() / f"{place} on rank {dist.get_rank()}"
        outcome = _run(case_class, name, fronts)
        part = file.with_suffix(".part")
        part.write_text(outcome)
        part.rename(file.with_suffix(".end"))
        of_ranks = {_outcome_of(place, rank) for rank in range(dist.get_world_size())}
        if len(of_ranks) > 1 or "failed" in of_ranks:
            dist.destroy_process_group()  # else the end of the run waits for all ranks
            break


def _outcome_of(place: int, rank: int) -> str:
    """Wait for the outcome of a test on a rank. The harness has a time limit."""
    file = scratch() / f"{place} on rank {rank}.end"
    while not file.exists():
        time.sleep(0.001)
    return file.read_text().partition(":")[0]


def _run(case_class: type[unittest.TestCase], name: str, fronts: list[Any]) -> str:
    fronts.clear()
    torch.manual_seed(0)
    try:
        case: Any = case_class(name)
        case.rank = dist.get_rank()
        case.file_name = str(scratch() / f"file of {name}")
        getattr(case, name)()
    except unittest.SkipTest as reason:
        return f"{SKIPPED}: {reason}"
    except SystemExit as reason:
        return f"{SKIPPED}: exit code {reason.code}"
    except BaseException as error:  # also of a rank that torch's test has ended
        text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        return f"{REFUSED}: {text}" if "quantized_comm: " in text else f"failed: {text}"
    if fronts and all(isinstance(front, str) for front in fronts):
        return f"{REFUSED}: {fronts[0]}"
    attached = sum(not isinstance(front, str) for front in fronts)
    return f"{PASSED}: {attached} attached"


# ---- the block ----


def _attach_before_forward(fronts: list[Any]) -> None:
    """Attach the block to every DDP model before its first forward.

    fronts: gets the front of each model, or the words of the refusal.
    """
    from ds_quant import ddp
    from ds_quant.config.errors import AttachError

    model_class: Any = DistributedDataParallel
    forward = model_class.forward
    seen: WeakSet[DistributedDataParallel] = WeakSet()

    @torch.compiler.disable
    def attach_once(model: Any) -> None:
        if model in seen or not torch.is_grad_enabled():
            return
        seen.add(model)
        try:
            fronts.append(ddp.attach(model, dict(BLOCK)))
        except (RuntimeError, AttachError) as error:
            if "quantized_comm: " not in str(error):
                raise
            fronts.append(str(error))

    @functools.wraps(forward)
    def attached(model: Any, *inputs: Any, **options: Any) -> Any:
        attach_once(model)
        return forward(model, *inputs, **options)

    model_class.forward = attached


# ---- the CPU for CUDA ----


def _case_class() -> type[unittest.TestCase]:
    """Return the class of torch's tests."""
    world = str(dist.get_world_size())
    os.environ.update(BACKEND="gloo", WORLD_SIZE=world, TEMP_DIR=str(scratch()))
    for folder in ("barrier", "test_dir", "init_dir"):
        (scratch() / folder).mkdir(exist_ok=True)
    _answer_for_cuda()
    module = types.ModuleType("distributed_test_on_the_cpu")
    sys.modules[module.__name__] = module
    exec(compile(_on_cpu(_source()), _MODULE, "exec"), module.__dict__)  # noqa: S102
    base: Any = module.__dict__["DistributedTest"]._DistTestBase
    from torch.testing._internal.common_utils import TestCase

    class Case(base, TestCase):  # type: ignore[misc]
        world_size = world

        def _barrier(self, *_: Any, **__: Any) -> None:
            dist.barrier()

    return Case


def _on_cpu(text: str) -> str:
    """Return the text of the tests with the CPU for CUDA, except in names."""
    text = re.sub(r"""(?<!\[)(["'])cuda(:[^"']*)?\1""", r"\1cpu\1", text)
    text = re.sub(r'f"cuda:\{[^"]*\}"', '"cpu"', text)
    text = re.sub(r"torch\.device\((?:self\.)?rank\)", 'torch.device("cpu")', text)
    return re.sub(r"device=(?:self\.)?rank\b", 'device="cpu"', text)


def _answer_for_cuda() -> None:
    """Answer the tests' questions about CUDA as a machine with a device per rank would."""
    cuda: Any = torch.cuda
    count = dist.get_world_size()
    cuda.device_count = lambda: count
    for name in ("current_stream", "Stream", "stream"):
        setattr(cuda, name, getattr(torch.cpu, name))
    for name in ("set_device", "synchronize", "_sleep", "empty_cache"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.current_device = lambda: dist.get_rank()
    for owner in (torch.Tensor, nn.Module):
        _stay(owner)
    model_class: Any = DistributedDataParallel
    make = model_class.__init__

    @functools.wraps(make)
    def made(model: Any, module: Any, *args: Any, **options: Any) -> None:
        options.pop("device_ids", None)
        options.pop("output_device", None)
        make(model, module, **options)

    model_class.__init__ = made
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    common.TEST_CUDA = True
    common.skip_if_lt_x_gpu = _skip_if_fewer
    common.skip_if_no_gpu = _unchanged
    common.require_n_gpus_for_nccl_backend = lambda *_: _unchanged
    common.nccl_skip_if_lt_x_gpu = lambda *_: _unchanged


def _stay(owner: Any) -> None:
    """Let ``cuda()`` and ``to(rank)`` return the object."""
    to = owner.to

    def moved(self: Any, *args: Any, **options: Any) -> Any:
        args = tuple(arg for arg in args if type(arg) is not int)
        if isinstance(options.get("device"), int):
            options.pop("device")
        return to(self, *args, **options) if args or options else self

    owner.to = moved
    owner.cuda = lambda self, *_, **__: self


def _unchanged(test: Callable[..., Any]) -> Callable[..., Any]:
    return test


def _skip_if_fewer(wanted: int, **_: Any) -> Callable[[Any], Any]:
    def decorated(test: Any) -> Any:
        @functools.wraps(test)
        def checked(*args: Any, **options: Any) -> Any:
            if wanted > dist.get_world_size():
                raise unittest.SkipTest(f"needs {wanted} ranks")
            return test(*args, **options)

        return checked

    return decorated
