"""Be one rank of a large world without the others, up to the kernels, which are counted.

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
from typing import Any, NamedTuple
from unittest.mock import patch

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
    from ds_quant.runtime import handshake

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

    from ds_quant.comm.lossless_gather import LosslessGather
    from ds_quant.kernels import cuda, dispatch, reference
    from ds_quant.kernels.dispatch import Operations

    runner = CountingRunner()
    with ExitStack() as stack:
        change = lambda *what: stack.enter_context(patch.object(*what))  # noqa: E731
        change(cuda, "runner_of", lambda _: runner)
        change(dispatch, "cuda_runner", lambda *_: runner)
        change(Operations, "run", _decoding_zeros(Operations.run))
        change(dispatch, "on_host", lambda *_: reference)
        change(LosslessGather, "_agree", _at_full_length(LosslessGather._agree))
        yield runner
