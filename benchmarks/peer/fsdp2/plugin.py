"""pytest plugin (-p peer.fsdp2.plugin): attaches the block to every FSDP2 model, on the CPU.

A model is attached before its first forward, or in an earlier ``unshard``, with the optimizers that
hold its parameters then. What the tests ask of CUDA is answered for PEER_SUITE_RANKS ranks on the
CPU: see ``read_cuda_as_cpu`` and ``on_cpu``. Ranks are forked processes, also where torch's tests
take threads, because the plugin has one world per process.
"""

from __future__ import annotations

import functools
import os
import re
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import SkipTest

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp._fully_shard import _fsdp_state
from torch.optim import Optimizer

from peer import notes

# ---- the CPU for CUDA ----


def on_cpu(text: str) -> str:
    """Return the text of a test file with the CPU for CUDA, except in names."""
    text = re.sub(r"""(["'])cuda(:[^"']*)?\1""", r"\1cpu\1", text)
    text = re.sub(r"device_ids=\[[^\]]*\]", "device_ids=None", text)
    text = re.sub(r"[^\s(]+\.device\.index\b", "torch.distributed.get_rank()", text)
    text = text.replace("test_compiled_fsdp", "compiled_fsdp_test")  # renamed after 2.6
    return text.replace(".cuda()", ".cpu()")


def read_cuda_as_cpu(ranks: int) -> None:
    """Answer the tests' questions about CUDA as a machine with ``ranks`` devices would."""
    cuda: Any = torch.cuda
    accelerator: Any = torch.accelerator
    helpers: list[Any] = [
        import_module(f"torch.testing._internal.{name}")
        for name in ("common_utils", "common_cuda", "common_distributed", "common_fsdp")
    ]
    common_utils, common_cuda, common_distributed, common_fsdp = helpers
    for module in (cuda, accelerator):
        module.device_count = lambda: ranks
    for name in ("current_stream", "Stream", "stream", "synchronize"):
        setattr(cuda, name, getattr(torch.cpu, name))
    for name in ("set_device", "_sleep", "empty_cache"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.current_device = lambda: 0
    scaler: Any = GradScaler.__init__
    scaler.__defaults__ = ("cpu", *scaler.__defaults__[1:])
    for module in (common_utils, common_fsdp):
        module.get_cycles_per_ms = lambda: 1.0  # it would measure _sleep
    common_cuda.TEST_CUDA = True
    common_distributed.skip_if_lt_x_gpu = functools.partial(_skip_if_fewer, ranks)
    common_fsdp.DEVICE_COUNT = ranks

    base = common_distributed.MultiProcessTestCase
    base._spawn_processes = functools.partialmethod(_fork, ranks)
    base.join_or_run = _reporting_errors(base.join_or_run)
    common_fsdp.FSDPTestMultiThread = type("Processes", (common_fsdp.FSDPTest,), {})
    if hasattr(common_fsdp, "FSDPTestContinuous"):
        common_fsdp.FSDPTestContinuous = type("Processes", (common_fsdp.FSDPTest,), {})


def _skip_if_fewer(ranks: int, wanted: int, **_: Any) -> Callable[[Any], Any]:
    def decorated(test: Any) -> Any:
        if wanted <= ranks:
            return test

        @functools.wraps(test)
        def skipped(*_: Any, **__: Any) -> None:
            raise SkipTest(f"needs {wanted} ranks")

        return skipped

    return decorated


def _fork(case: Any, ranks: int) -> None:
    """Start the ranks of a test, each a fork of this process."""
    if case.world_size > ranks:
        raise SkipTest(f"needs {case.world_size} ranks")
    case._start_processes(torch.multiprocessing.get_context("fork").Process)


def _reporting_errors(join_or_run: Any) -> Any:
    """Note the first error of a rank: torch reports that of the first rank to exit."""

    def joined_or_run(case: Any, test: Callable[[], None]) -> Any:
        def reporting() -> None:
            try:
                test()
            except Exception as error:
                if not isinstance(error, SkipTest):
                    text, _, _ = str(error).partition("To execute this test")
                    notes.note(notes.RANK_ERROR, f"{type(error).__name__}: {text}")
                raise

        return join_or_run(case, functools.wraps(test)(reporting))

    return joined_or_run


# ---- fronts ----

_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def follow(block: dict[str, Any]) -> None:
    """Attach ``block`` to every model that is about to run forward for the first time."""
    state_class: Any = _fsdp_state.FSDPState
    optimizer_class: Any = Optimizer
    make = optimizer_class.__init__
    begin = state_class._root_pre_forward
    initialize = state_class._lazy_init

    @functools.wraps(make)
    def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        _optimizers.add(optimizer)

    @functools.wraps(initialize)
    def initialized(state: Any) -> None:
        is_first = state._is_root is None
        initialize(state)
        if is_first:
            attach(state._modules[0], block)

    @functools.wraps(begin)
    def begun(state: Any, *args: Any, **kwargs: Any) -> Any:
        if state._is_root is None:
            state._lazy_init()
            attached = vars(state).get("_root_pre_forward")  # by the front that is attached now
            if attached is not None:
                return attached(*args, **kwargs)
        return begin(state, *args, **kwargs)

    optimizer_class.__init__ = made
    state_class._lazy_init = initialized
    state_class._root_pre_forward = begun


def attach(model: nn.Module, block: dict[str, Any]) -> None:
    """Attach the block to a model, and note the front or the refusal.

    A model that is refused trains without the block: other models of the test may be attached.
    """
    from ds_quant import fsdp2
    from ds_quant.config.errors import AttachError, ConfigError
    from ds_quant.runtime.inactive import InactiveFront

    parameters = {id(parameter) for parameter in model.parameters()}
    optimizers = [
        optimizer
        for optimizer in _optimizers
        if any(id(p) in parameters for group in optimizer.param_groups for p in group["params"])
    ]
    try:
        front = fsdp2.attach(model, _for_world(model, block), optimizer=optimizers)
    except (ConfigError, AttachError) as error:
        notes.note(notes.REFUSAL, str(error))
        return
    if isinstance(front, InactiveFront):
        return
    notes.note(notes.WORLD, front.run.topology.world)
    if dist.get_rank() == front.run.topology.all_ranks[0]:
        notes.note(notes.FRONT, front.line)


def _for_world(model: nn.Module, block: dict[str, Any]) -> dict[str, Any]:
    """Return the block for two nodes, without replicas, which are nodes themselves."""
    from ds_quant.fsdp2.meshes import meshes_of
    from ds_quant.fsdp2.sharded_module import groups_of

    meshes = meshes_of((name, group) for name, _, group in groups_of(model))
    has_nodes = meshes is not None and meshes.replicas == 1 and len(meshes.ranks) % 2 == 0
    if "node_size" not in block or meshes is None or not has_nodes:
        return {key: value for key, value in block.items() if key != "node_size"}
    return {**block, "node_size": len(meshes.ranks) // 2}


# ---- pytest ----


def pytest_configure() -> None:
    read_cuda_as_cpu(int(os.environ[notes.RANKS]))
    block = notes.block()
    if block is not None:
        follow(block)
