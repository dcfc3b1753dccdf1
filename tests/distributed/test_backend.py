"""Engines of one process with different settings of ``backend``: each uses its own kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests import needs
from tests.distributed.harness import run
from tests.distributed.models import build, digests, masters, settings, train_step

pytestmark = needs.native_kernels

LINES = {"auto": "; C++ kernels", "torch": "; torch kernels"}
USED = {"auto": {"C++"}, "torch": {"torch"}}


def counted() -> Counter[str]:
    """Calls of the C++ kernels and of the torch reference from here on."""
    from ds_quant.kernels import lossless, native, reference

    calls, find = Counter[str](), native.function

    def counting(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[kind] += 1
            return function(*args, **options)

        return call

    native.function = lambda name: counting("C++", find(name))
    for name in ("encode", "decode", "decode_sum", "rotate", "unrotate_"):
        setattr(reference, name, counting("torch", getattr(reference, name)))
    for name in ("encode", "decode"):
        setattr(lossless, name, counting("torch", getattr(lossless, name)))
    return calls


def _engines(
    stage: int, scheme: str, backends: tuple[str, ...]
) -> tuple[list[tuple[str, str, set[str]]], list[dict[str, str]]]:
    """(backend, start-up line, kernels used) of every step of engines that take turns, and the
    weights of each.
    """
    import ds_quant

    calls = counted()
    block = {"scheme": scheme, "node_size": 2, "allow_full_replica": True}
    engines = []
    for backend in backends:  # the value "auto" is not written out: it means others to accelerate
        key = {"backend": backend} if backend == "torch" else {}
        engines.append(build(settings(stage, block | key, dtype="bf16")))
    used = []
    for step in range(2):
        for engine, backend in zip(engines, backends, strict=True):
            calls.clear()
            train_step(engine, step)
            used.append((backend, ds_quant.report(engine)["line"], set(calls)))
    return used, [digests(masters(engine)) for engine in engines]


@pytest.mark.parametrize(
    ("stage", "scheme", "backends"),
    [
        (2, "sdp4bit", ("torch", "auto")), (3, "sdp4bit", ("auto", "torch")),
        (2, "lossless_w_g4", ("auto", "torch")),
    ],
)  # fmt: skip
def test_each_engine_uses_its_own_kernels(
    stage: int, scheme: str, backends: tuple[str, ...]
) -> None:
    for used, (one, other) in run(_engines, 4, stage, scheme, backends):
        for backend, line, kernels in used:
            assert LINES[backend] in line and kernels == USED[backend]
        assert one == other
