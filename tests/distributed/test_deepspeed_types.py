"""The installed DeepSpeed has every attribute that ``zero/deepspeed_types.py`` declares."""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from packaging.version import Version

from ds_quant.zero import deepspeed_types as declared
from tests.distributed.harness import on_ranks
from tests.distributed.models import engine_of, forward

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

OURS = {"quantized_comm", "quantized_comm_from_variable", "ds_quant_attached"}
HOST = {"offload_optimizer": {"device": "cpu"}}


def attributes(kind: type) -> dict[str, Any]:
    """Types of the data attributes that a class of the module declares or inherits."""
    names = {
        name
        for base in kind.__mro__
        if base.__module__ == declared.__name__
        for name in vars(base).get("__annotations__", {})
    }
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in names}


def methods(kind: type) -> dict[str, Any]:
    return {
        name: value
        for base in kind.__mro__
        if base.__module__ == declared.__name__
        for name, value in vars(base).items()
        if inspect.isfunction(value) and name not in ("__init__", "__subclasshook__")
    }


def is_newer(name: str, version: str) -> bool:
    """Return True if releases before ``version`` or that one may lack an attribute."""
    return name in declared.SINCE and Version(version) < Version(declared.SINCE[name])


def is_expected(name: str, version: str) -> bool:
    return name not in OURS and name not in SOMETIMES and not is_newer(name, version)


def is_of(value: object, hint: Any) -> bool:
    """Return True if a value has the declared type; elements of containers are not checked."""
    if hint in (Any, object) or getattr(hint, "_is_protocol", False):
        return True
    if isinstance(hint, types.UnionType):
        return any(is_of(value, option) for option in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    if kind is typing.ClassVar:
        return True
    if issubclass(kind, declared.Tensor):
        return isinstance(value, declared.Tensor)
    return isinstance(value, (int, float) if kind is float else kind)


def takes(method: Any, described: Any) -> bool:
    """Return True if a method can be called with the declared arguments."""
    _, *parameters = inspect.signature(described).parameters.values()
    keywords = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    positional = [None for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    try:
        inspect.signature(method).bind(*positional, **keywords)
    except TypeError:
        return False
    return True


def faults(kind: type, real: object, version: str) -> Iterator[str]:
    """Name the attributes of a class that a real object lacks or has otherwise."""
    for name, hint in attributes(kind).items():
        if not is_expected(name, version):
            continue
        if not hasattr(real, name):
            yield f"{kind.__name__}.{name} is gone from {type(real).__name__}"
        elif not is_of(getattr(real, name), hint):
            yield f"{kind.__name__}.{name} is {getattr(real, name)!r}, declared is {hint}"
    for name, described in methods(kind).items():
        if not is_expected(name, version):
            continue
        if not callable(getattr(real, name, None)):
            yield f"{kind.__name__}.{name}() is gone from {type(real).__name__}"
        elif not takes(getattr(real, name), described):
            signature = inspect.signature(described)
            yield f"{kind.__name__}.{name} does not take {signature}"


def parts(engine: DeepSpeedEngine, stage: int) -> Iterator[tuple[type, object]]:
    """The objects behind an engine, each with the class that declares it."""
    from deepspeed.accelerator import get_accelerator

    optimizer = engine.optimizer
    yield declared.Engine, engine
    yield declared.Config, engine._config
    yield declared.ZeroSettings, engine._config.zero_config
    yield declared.Monitor, engine.monitor
    yield declared.CheckpointEngine, engine.checkpoint_engine
    yield declared.Accelerator, get_accelerator()
    yield declared.Bucket, next(iter(optimizer.ipg_buckets.values()))
    if engine.zero_offload_optimizer() is not None:
        yield declared.OffloadSettings, engine.zero_offload_optimizer()
    if stage < 3:
        yield declared.OwnerOptimizer, optimizer
        return
    yield declared.ShardOptimizer, optimizer
    yield declared.ParameterOffload, optimizer.parameter_offload
    yield declared.Coordinator, optimizer.parameter_offload.get_param_coordinator()
    parameter = next(engine.module.parameters())
    yield declared.ZeroParameter, parameter
    yield declared.ParamStatus, type(parameter.ds_status)
    yield declared.Shard, parameter.ds_tensor
    handle = parameter.all_gather_coalesced([parameter])
    yield declared.GatherHandle, handle
    handle.wait()
    parameter.partition()


# Attributes that DeepSpeed sets in some runs only -> the module that names them.
SOMETIMES = {
    "Event": "deepspeed.accelerator.cuda_accelerator",
    "use_muon": "deepspeed",
    "accumulated_grads_in_cpu": "deepspeed.runtime.zero.stage_1_and_2",
    "shm_comm_op": "deepspeed.comm.torch",
    "shm_vector_kernel_level": "deepspeed.comm.torch",
    "vector_kernel_level": "deepspeed.comm.torch",
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_every_declared_attribute_exists(stage: int) -> None:
    import deepspeed

    zero = HOST if stage == 2 else {}
    engine = engine_of(stage, zero=zero, zero_force_ds_cpu_optimizer=False)
    engine.backward(forward(engine, 0))
    found = [
        fault
        for kind, real in parts(engine, stage)
        for fault in faults(kind, real, deepspeed.__version__)
    ]
    assert found == []


def test_functions_and_attributes_of_some_runs_are_named() -> None:
    import deepspeed

    for module, names in declared.FUNCTIONS.items():
        for name in names:
            assert callable(getattr(importlib.import_module(module), name, None)), (module, name)
    for name, module in SOMETIMES.items():
        source = inspect.getsource(importlib.import_module(module))
        assert name in source or is_newer(name, deepspeed.__version__), (module, name)


def test_a_changed_release_is_noticed() -> None:
    class Settings:
        device = 3

    assert sorted(faults(declared.OffloadSettings, Settings(), "1.0")) == [
        "OffloadSettings.device is 3, declared is <class 'str'>",
        "OffloadSettings.pin_memory is gone from Settings",
    ]

    class Events:
        enabled = True

        def write_events(self) -> None:
            """Take nothing."""

    (fault,) = faults(declared.Monitor, Events(), "1.0")
    assert fault.startswith("Monitor.write_events does not take ")
