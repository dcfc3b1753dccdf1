"""How a function of DeepSpeed is wrapped: once, visibly, and only if it exists."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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


def followed_by(then: Callable[[], None]) -> Callable[..., Any]:
    """For ``wrap``: the original, then ``then()``."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then()
        return result

    return around


class Route(threading.local):
    """A module-level function of DeepSpeed that goes elsewhere while ``through`` is open."""

    target: Callable[..., Any] | None = None

    def install(self, module: Any, name: str) -> None:
        def dispatch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return (self.target or original)(*args, **kwargs)

        wrap(module, name, dispatch)

    @contextmanager
    def through(self, target: Callable[..., Any] | None) -> Iterator[None]:
        previous, self.target = self.target, target
        try:
            yield
        finally:
            self.target = previous


def require(owner: Any, name: str) -> None:
    if not hasattr(owner, name):
        import deepspeed

        raise RuntimeError(
            f"quantized_comm: DeepSpeed {deepspeed.__version__} has no {name} on "
            f"{type(owner).__name__}; tested versions are 0.17.6, 0.18.9 and 0.19.8"
        )
