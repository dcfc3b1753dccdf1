"""Engines of one process with different settings of ``backend``: each uses its own kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

import ds_quant
from tests import needs
from tests.distributed.harness import on_ranks
from tests.distributed.models import engine_of, master_bits, train_step

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


@pytest.mark.parametrize(
    ("stage", "scheme", "backends"),
    [
        (2, "sdp4bit", ("torch", "auto")), (3, "sdp4bit", ("auto", "torch")),
        (2, "lossless_w_g4", ("auto", "torch")),
    ],
)  # fmt: skip
@on_ranks(4)
def test_each_engine_uses_its_own_kernels(
    stage: int, scheme: str, backends: tuple[str, ...]
) -> None:
    """Engines that take turns; they end with the same weights."""
    calls, engines = counted(), {}
    block = {"scheme": scheme, "node_size": 2, "allow_full_replica": True}
    for backend in backends:  # the value "auto" is not written out: it means others to accelerate
        key = {"backend": backend} if backend == "torch" else {}
        engines[backend] = engine_of(stage, block | key)
    for step, (backend, engine) in product(range(2), engines.items()):
        calls.clear()
        train_step(engine, step)
        assert LINES[backend] in ds_quant.report(engine)["line"] and set(calls) == USED[backend]
    one, other = (master_bits(engine) for engine in engines.values())
    assert one == other
