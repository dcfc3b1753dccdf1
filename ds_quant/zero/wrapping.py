"""How a function of DeepSpeed is wrapped: once, visibly, and only if it exists."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_TESTED = "0.17.6, 0.18.9 and 0.19.8"


def wrap(owner: Any, name: str, around: Callable[..., Any], *, stacked: bool = False) -> None:
    """Replace ``owner.name`` by ``around(original, ...)``; a class or an instance.

    Once, unless it is ``stacked`` on wrappers that are there already.
    """
    original = getattr(owner, name)
    if getattr(original, "ds_quant_wraps", None) is not None and not stacked:
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapper.ds_quant_wraps = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


def after(owner: Any, name: str, then: Callable[[], None], *, stacked: bool = False) -> None:
    """Run ``then()`` behind every call of ``owner.name``."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then()
        return result

    require(owner, name)
    wrap(owner, name, around, stacked=stacked)


class Seam(threading.local):
    """A function of DeepSpeed that must be called while another one runs: were it moved, what the
    plugin should carry would travel past it without a word.
    """

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, 0

    @contextmanager
    def expected(self, excused: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Raise RuntimeError at the end if it was not called inside and that is not ``excused``."""
        before = self.calls
        yield
        if self.calls == before and not excused():
            raise moved(self.name)


class Route(Seam):
    """A module-level function of DeepSpeed that goes elsewhere while ``through`` is open."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.target: Callable[..., Any] | None = None

    def install(self, module: Any) -> None:
        def dispatch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return (self.target or original)(*args, **kwargs)

        require(module, self.name)
        wrap(module, self.name, dispatch)

    @contextmanager
    def through(
        self, target: Callable[..., Any], excused: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Inside, ``target`` is called instead; raises as ``expected``."""
        previous, self.target = self.target, target
        try:
            with self.expected(excused):
                yield
        finally:
            self.target = previous


def moved(what: str) -> RuntimeError:
    """The error where DeepSpeed does not call what it is known to call."""
    return RuntimeError(
        f"quantized_comm: {deepspeed_version()} did not call {what}, so what this plugin should "
        f"carry travelled without it; use a tested version ({_TESTED}) or remove the "
        "quantized_comm block"
    )


def require(owner: Any, name: str) -> None:
    if not hasattr(owner, name):
        raise RuntimeError(
            f"quantized_comm: {deepspeed_version()} has no {name} on {type(owner).__name__}; "
            f"tested versions are {_TESTED}"
        )


def deepspeed_version() -> str:
    """For messages."""
    import deepspeed

    return f"DeepSpeed {deepspeed.__version__}"
