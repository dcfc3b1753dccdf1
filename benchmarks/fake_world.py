"""Be one rank of a large world without the others, and count what the plugin does on the host.

torch's fake process group sends nothing, and a runner that launches nothing stands for CUDA: only
the host's work is left. What is received or decoded is zeros, so losses mean nothing. May import
the standard library and, inside functions, torch, DeepSpeed and the plugin.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

# Python 3.12 has no frames for these, earlier versions do.
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")
# Operations that are no views and launch no kernel either.
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
RECEIVING = ("all_gather_into_tensor", "all_gather", "all_to_all_single", "reduce_scatter_tensor")


class World(NamedTuple):
    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"

    @classmethod
    def parse(cls, text: str) -> World:
        """From "8x8": nodes x ranks per node."""
        try:
            nodes, ranks_per_node = map(int, text.split("x"))
        except ValueError:
            raise ValueError(f"world {text!r}: allowed: nodes x ranks per node, as 8x8") from None
        return cls(nodes, ranks_per_node)


def join(world: World) -> None:
    """Become rank 0 of a world. Once per process: DeepSpeed remembers its process groups."""
    import torch
    from deepspeed import comm as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world.ranks),
        "LOCAL_SIZE": str(world.ranks_per_node),
    }  # fmt: skip
    torch.set_num_threads(1)
    for name in RECEIVING:
        setattr(torch.distributed, name, _receives_zeros(getattr(torch.distributed, name)))
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("fake", store=store, rank=0, world_size=world.ranks)
    dist.init_distributed(verbose=False)


def _receives_zeros(collective: Callable[..., Any]) -> Callable[..., Any]:
    def zeroing(*args: Any, **keywords: Any) -> Any:
        work = collective(*args, **keywords)  # newer fakes copy what is sent
        output = (*args, *keywords.values())[0]
        for tensor in output if isinstance(output, list | tuple) else [output]:
            tensor.detach().zero_()
        return work

    return zeroing


def without_handshake() -> AbstractContextManager[Any]:
    """Inside, an engine starts although the other ranks cannot answer."""
    from ds_quant.zero import handshake

    return patch.object(handshake, "handshake", return_value=int(os.environ["LOCAL_SIZE"]))


class CountingRunner:
    """Stands for ``kernels.cuda.Runner``: counts launches by kernel, collects the ``variants``
    (kernel, macros) that are launched, and decodes to zeros. A lossless message is its header.
    """

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.variants: set[tuple[str, tuple[tuple[str, int], ...]]] = set()

    def run_tables(self, tables: Iterable[Any]) -> None:
        from ds_quant.kernels import launch_batch, lossless

        counting = sys.getprofile()
        sys.setprofile(None)  # a runner's own calls are not counted
        for table in tables:
            if ("DSQ_PHASE", launch_batch.SCAN) in table.macros:
                for told in table.jobs["nbytes"].tolist():
                    ctypes.c_int64.from_address(told).value = lossless.HEADER
            for work in table.launches():
                self.launches[work.kernel] += 1
                self.variants.add((work.kernel, work.macros))
        sys.setprofile(counting)


def _decoding_zeros(run: Callable[..., None]) -> Callable[..., None]:
    """What operations would write as numbers is zeros; left as it lies it may be NaN."""

    def zeroing(self: Any, buffers: Any, *args: Any, **options: Any) -> None:
        run(self, buffers, *args, **options)
        written = set()
        for operation, _ in self.tasks:
            if "Encode" not in type(operation).__name__:
                places = (getattr(operation, name, None) for name in ("values", "rotated"))
                written |= {place for place in places if place is not None}
        for place in written:
            buffers[place].detach().zero_()

    return zeroing


def _at_full_length(agree: Callable[..., Any]) -> Callable[..., Any]:
    """Lossless messages of all ranks are as long as they may be: zeros are no lengths."""

    def agreed(outbox: Any, own: Any) -> Any:
        lengths = agree(outbox, own)
        lengths[:] = outbox._rooms
        return lengths

    return agreed


@contextmanager
def faked_cuda() -> Iterator[CountingRunner]:
    """Inside, codecs of CPU tensors take the path of CUDA tensors, up to the launch."""

    from ds_quant.comm.lossless import Outbox
    from ds_quant.kernels import cuda, dispatch, reference
    from ds_quant.kernels.dispatch import Operations

    runner = CountingRunner()
    with ExitStack() as stack:
        change = lambda *what: stack.enter_context(patch.object(*what))  # noqa: E731
        change(cuda, "runner_of", lambda _: runner)
        change(dispatch, "cuda_runner", lambda *_: runner)
        change(Operations, "run", _decoding_zeros(Operations.run))
        change(dispatch, "on_host", lambda *_: reference)
        change(Outbox, "_agree", _at_full_length(Outbox._agree))
        yield runner


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Count Python calls of the plugin's functions: ``counts["calls"]``."""
    import ds_quant

    folder, counts = os.path.dirname(ds_quant.__file__) + os.sep, Counter[str]()

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder):
            counts["calls"] += code.co_name not in COMPREHENSIONS

    sys.setprofile(count)
    try:
        yield counts
    finally:
        sys.setprofile(None)


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """Count by function of the plugin where it asks for values of tensors: on CUDA to wait for the
    device.
    """
    import torch

    import ds_quant

    folder, counts = os.path.dirname(ds_quant.__file__) + os.sep, Counter[str]()

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **keywords: Any) -> Any:
            code = sys._getframe(1).f_code
            if code.co_filename.startswith(folder):
                counts[code.co_qualname if hasattr(code, "co_qualname") else code.co_name] += 1
            return original(*args, **keywords)

        return asked

    with ExitStack() as stack:
        for name in ("cpu", "tolist", "item", "__bool__", "__int__", "__float__", "nonzero"):
            asked = noting(getattr(torch.Tensor, name))
            stack.enter_context(patch.object(torch.Tensor, name, asked))
        yield counts


@contextmanager
def counted_operations() -> Iterator[Counter[str]]:
    """Count torch operations: ``views`` that are made, others as ``torch``, that is kernels.

    Those that the plugin asks for; all of them as ``all views`` and ``all torch``.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    import ds_quant

    ours, theirs = (os.path.dirname(m.__file__) + os.sep for m in (ds_quant, torch))
    counts = Counter[str]()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            kind, caller = _kind(func), _caller(theirs)
            if kind is not None and caller != __file__:
                many = isinstance(result, list | tuple) and kind == "views"
                number = len(result) if many else 1
                counts[f"all {kind}"] += number
                if caller.startswith(ours):
                    counts[kind] += number
            return result

    with Mode():
        yield counts


@cache
def _kind(operation: Any) -> str | None:
    aliases = (r.alias_info for r in operation._schema.returns)
    if any(alias is not None and not alias.is_write for alias in aliases):
        return "views"
    return None if operation._opname in ALLOCATIONS else "torch"


def _caller(torch_folder: str) -> str:
    """File of the function that has asked for the operation, torch's own left out."""
    frame = sys._getframe(2).f_back  # behind __torch_dispatch__
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(torch_folder):
            return name
        frame = frame.f_back
    return ""
