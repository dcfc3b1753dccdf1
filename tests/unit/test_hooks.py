"""Hooks of one engine: events run in the order of their lists, and everything can be taken back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ds_quant.zero.hooks import Hooks


class Optimizer:
    overflow = False

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def step(self) -> str:
        self.seen.append("step")
        return "result"

    def independent_gradient_partition_epilogue(self) -> None:
        self.seen.append("epilogue")


class Engine:
    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def save_checkpoint(self, save_dir: str, tag: Any = None, client_state: Any = None) -> Any:
        self.seen.append("save")
        self.saved = client_state
        return True

    def load_checkpoint(self, load_dir: str) -> tuple[str | None, dict[str, Any]]:
        return load_dir or None, dict(self.saved)

    def save_16bit_model(self) -> None:
        self.seen.append("save 16-bit")

    def destroy(self) -> None:
        self.seen.append("destroy")


@pytest.fixture
def seen() -> list[str]:
    return []


@pytest.fixture
def hooks(seen: list[str]) -> Hooks:
    return Hooks(Engine(seen), Optimizer(seen))


def around(seen: list[str], name: str) -> Any:
    @contextmanager
    def opened() -> Iterator[None]:
        seen.append(f"open {name}")
        try:
            yield
        finally:
            seen.append(f"close {name}")

    return opened


@pytest.mark.parametrize("overflow", [False, True])
def test_a_step_runs_its_lists_in_order(hooks: Hooks, seen: list[str], overflow: bool) -> None:
    hooks.optimizer.overflow = overflow
    hooks.before_step += [lambda: seen.append("first"), lambda: seen.append("second")]
    hooks.around_step += [around(seen, "outer"), around(seen, "inner")]
    hooks.after_update += [lambda: seen.append("updated"), lambda: seen.append("compared")]
    hooks.after_step.append(lambda skipped: seen.append(f"skipped {skipped}"))
    hooks.connect()
    assert hooks.optimizer.step() == "result"
    updated = [] if overflow else ["updated", "compared"]
    assert seen == [
        "first", "second", "open outer", "open inner", "step", "close inner", "close outer",
        *updated, f"skipped {overflow}",
    ]  # fmt: skip


def test_contexts_are_left_when_a_step_fails(hooks: Hooks, seen: list[str]) -> None:
    def failing() -> Any:
        raise ValueError("no")

    hooks.around_step += [around(seen, "outer"), failing]
    hooks.connect()
    with pytest.raises(ValueError, match="no"):
        hooks.optimizer.step()
    assert seen == ["open outer", "close outer"]


def test_a_second_wrap_raises(hooks: Hooks) -> None:
    hooks.before_step.append(lambda: None)
    hooks.connect()
    with pytest.raises(RuntimeError, match="step of Optimizer is wrapped already"):
        hooks.connect()
    with pytest.raises(RuntimeError, match="has no swim on Optimizer"):
        hooks.wrap(hooks.optimizer, "swim", lambda original: None)


def test_destroy_takes_everything_back(hooks: Hooks, seen: list[str]) -> None:
    own = hooks.optimizer.independent_gradient_partition_epilogue  # an attribute of the instance
    hooks.optimizer.independent_gradient_partition_epilogue = own
    hooks.before_step.append(lambda: seen.append("before"))
    hooks.after_backward.append(lambda: seen.append("backward"))
    hooks.after_save.append(lambda: seen.append("saved"))
    hooks.on_destroy.append(lambda: seen.append("closed"))
    hooks.keep_state("ours", lambda: 1, lambda state: None)
    hooks.connect()
    hooks.engine.destroy()
    assert seen == ["closed", "destroy"]
    hooks.optimizer.step()
    hooks.engine.save_checkpoint("x")
    assert seen[2:] == ["step", "save"] and hooks.engine.saved is None
    assert set(vars(hooks.optimizer)) == {"seen", "independent_gradient_partition_epilogue"}
    assert hooks.optimizer.independent_gradient_partition_epilogue == own
    assert set(vars(hooks.engine)) == {"seen", "saved"}


def test_what_somebody_wrapped_later_stays(hooks: Hooks, seen: list[str]) -> None:
    hooks.before_step.append(lambda: None)
    hooks.connect()
    hooks.optimizer.step = later = lambda: None
    hooks.remove()
    assert hooks.optimizer.step is later


def test_state_goes_with_checkpoints_unseen(hooks: Hooks, seen: list[str]) -> None:
    restored: list[Any] = []
    hooks.after_save.append(lambda: seen.append("checked"))
    hooks.keep_state("ours", lambda: {"levels": 2}, restored.append)
    hooks.connect()
    mine = {"epoch": 3}
    assert hooks.engine.save_checkpoint("x", client_state=mine) is True
    assert mine == {"epoch": 3} and hooks.engine.saved == {"epoch": 3, "ours": {"levels": 2}}
    assert hooks.engine.load_checkpoint("x") == ("x", {"epoch": 3})
    hooks.engine.load_checkpoint("")  # nothing found: nothing restored
    hooks.engine.save_16bit_model()
    assert restored == [{"levels": 2}] and seen == ["save", "checked", "save 16-bit", "checked"]
