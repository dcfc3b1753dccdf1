"""Without the block the installed plugin changes nothing: not a bit, not an attribute."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.harness import run, run_all
from tests.distributed.models import (
    QSDP,
    Run,
    build,
    digests,
    settings,
    train,
    train_step,
)

pytestmark = pytest.mark.distributed

STEPS = 4


def unhook() -> int:
    """Put DeepSpeed's own methods back; how many the plugin had wrapped."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    wrapped = 0
    for owner in (DeepSpeedConfig, DeepSpeedEngine, stage3, stage_1_and_2):
        for name, value in list(vars(owner).items()):
            if hasattr(value, "ds_quant_wraps"):
                setattr(owner, name, value.ds_quant_wraps)
                wrapped += 1
    return wrapped


def plain(stage: int, dtype: str) -> Run:
    return train(settings(stage, dtype=dtype, accumulation=2), STEPS)


def hooked_then_unhooked(stage: int, dtype: str) -> tuple[Run, Run, int]:
    return plain(stage, dtype), *(unhook(), plain(stage, dtype))[::-1]


def same(one: Run, other: Run) -> bool:
    assert one.weights.keys() == other.weights.keys() != set()
    return one.losses == other.losses and digests(one.weights) == digests(other.weights)


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16"), (3, "fp32")]
)
def test_run_without_the_block_equals_one_without_the_plugin(stage: int, dtype: str) -> None:
    for hooked, unhooked, wrapped in run(hooked_then_unhooked, 2, stage, dtype):
        assert wrapped >= 3
        assert hooked.report is None
        assert same(hooked, unhooked)


def traces(engine: Any) -> list[str]:
    """Attributes of the engine, its optimizer and its parameters that the plugin made."""
    owners = {"engine": engine, "config": engine._config, "optimizer": engine.optimizer}
    owners |= dict(engine.module.named_parameters())
    return [
        f"{label}.{name}"
        for label, owner in owners.items()
        for name, value in vars(owner).items()
        if value is not None and any(_ours(part) for part in (value, *_parts(value)))
    ]


def _ours(value: Any) -> bool:
    home = value.__module__ if inspect.isfunction(value) else type(value).__module__
    return str(home).startswith("ds_quant") or hasattr(value, "ds_quant_wraps")


def _parts(value: Any) -> Iterator[Any]:
    """What a bound method or a partial was made of."""
    if inspect.ismethod(value):
        yield value.__func__
        yield value.__self__
    if isinstance(value, functools.partial):
        yield value.func
        yield from _parts(value.func)


def attributes(stage: int) -> tuple[list[str], list[str]]:
    engines = [build(settings(stage, block)) for block in (None, QSDP)]
    for engine in engines:
        train_step(engine, 0)
    return traces(engines[0]), traces(engines[1])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_engine_without_the_block_carries_no_trace_of_the_plugin(stage: int) -> None:
    for plain_traces, quantized_traces in run_all(attributes, 2, ((1,), (2,), (3,)))[stage,]:
        assert plain_traces == []
        assert len(quantized_traces) >= 4  # else the search is blind
