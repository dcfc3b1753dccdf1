"""What a collective returns: a result that is waited for once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
    """A result on its way. ``finish`` waits for it and makes it; it is called once."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None

    def wait(self) -> T:
        """Return the result, the same object at every call."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None  # and the buffers that only it keeps
        return self._result

    def then(self, change: Callable[[T], U]) -> Pending[U]:
        """Return what ``change`` makes of the result, when that is waited for."""
        return Pending(lambda: change(self.wait()))


def arrived(result: T) -> Pending[T]:
    """Return a result that nothing is waited for."""
    return Pending(lambda: result)
