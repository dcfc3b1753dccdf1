"""Without the block the installed plugin changes nothing: not a bit, not an attribute."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.distributed.harness import on_ranks
from tests.distributed.models import QSDP, Run, engine_of, train_step
from tests.distributed.rows import Table, Way, same_weights

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


@contextmanager
def unhooked() -> Iterator[int]:
    """Without what the plugin has wrapped of DeepSpeed; how many methods that are."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    wrapped = [
        (owner, name, value)
        for owner in (DeepSpeedConfig, DeepSpeedEngine, stage3, stage_1_and_2)
        for name, value in list(vars(owner).items())
        if hasattr(value, "ds_quant_wraps")
    ]
    for owner, name, value in wrapped:
        setattr(owner, name, value.ds_quant_wraps)
    yield len(wrapped)
    for owner, name, value in wrapped:
        setattr(owner, name, value)


def untouched(run: Run, other: Run) -> None:
    same_weights(run, other)
    assert run.report is None and other.noted >= 3 and run.weights


TABLE = Table(__name__)
for dtype, stages in (("fp32", (0, 2, 3)), ("bf16", (1, 3))):
    TABLE.add(
        dtype, Way(block=None), Way(block=None, inside=unhooked), holds=untouched, dtype=dtype,
        stages=stages, accumulation=2, quick=stages,
    )  # fmt: skip


@pytest.mark.parametrize(("title", "stage"), TABLE.params())
def test_run_without_the_block_equals_one_without_the_plugin(title: str, stage: int) -> None:
    TABLE.check(title, stage)


def traces(engine: DeepSpeedEngine) -> list[str]:
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
    """Return the parts of which a bound method or a partial was made."""
    if inspect.ismethod(value):
        yield value.__func__
        yield value.__self__
    if isinstance(value, functools.partial):
        yield value.func
        yield from _parts(value.func)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_engine_without_the_block_carries_no_trace_of_the_plugin(stage: int) -> None:
    plain, quantized = (engine_of(stage, block, dtype="fp32") for block in (None, QSDP))
    for engine in (plain, quantized):
        train_step(engine, 0)
    assert traces(plain) == []
    assert len(traces(quantized)) >= 4  # else the search is blind
