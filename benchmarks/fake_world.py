"""Runs one rank of a large world without the other ranks and, if wanted, without kernels.

torch's fake process group sends nothing; a runner that counts launches stands in for CUDA. Only the
host's work is left. Received and decoded values are zeros, so losses mean nothing. May import the
standard library and, inside functions, torch, DeepSpeed and the plugin.
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
        """Return the world of a text such as "8x8": nodes x ranks per node."""
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
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world.ranks),
        "LOCAL_SIZE": str(world.ranks_per_node),
    }
    torch.set_num_threads(1)
    for name in RECEIVING:
        setattr(torch.distributed, name, _receives_zeros(getattr(torch.distributed, name)))
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("fake", store=store, rank=0, world_size=world.ranks)
    dist.init_distributed(verbose=False)


def _receives_zeros(collective: Callable[..., Any]) -> Callable[..., Any]:
    def zeroing(*args: Any, **keywords: Any) -> Any:
        work = collective(*args, **keywords)  # newer fakes copy the input
        output = (*args, *keywords.values())[0]
        for tensor in output if isinstance(output, list | tuple) else [output]:
            tensor.detach().zero_()
        return work

    return zeroing


def without_handshake() -> AbstractContextManager[Any]:
    """Let an engine start although the other ranks cannot answer."""
    from ds_quant.runtime import handshake

    return patch.object(handshake, "handshake", return_value=int(os.environ["LOCAL_SIZE"]))


class CountingRunner:
    """Stands in for ``kernels.cuda.Runner``. A lossless message is only its header.

    launches: number of launches by kernel.
    variants: (kernel, macros) of all launches.
    """

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.variants: set[tuple[str, tuple[tuple[str, int], ...]]] = set()

    def run_tables(self, tables: Iterable[Any]) -> None:
        from ds_quant.kernels import launch_batch, lossless

        counting = sys.getprofile()
        sys.setprofile(None)  # do not count the calls of this runner
        for table in tables:
            if ("DSQ_PHASE", launch_batch.SCAN) in table.macros:
                for address in table.jobs["nbytes"].tolist():
                    ctypes.c_int64.from_address(address).value = lossless.HEADER
            for launch in table.launches():
                self.launches[launch.kernel] += 1
                self.variants.add((launch.kernel, launch.macros))
        sys.setprofile(counting)


def _decoding_zeros(run: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``Operations.run`` to write zeros for decoded values; memory as it is may be NaN."""

    def zeroing(self: Any, buffers: Any, *args: Any, **options: Any) -> None:
        run(self, buffers, *args, **options)
        written = set()  # indices of buffers
        for operation, _ in self.tasks:
            if "Encode" in type(operation).__name__:
                continue
            for name in ("values", "rotated"):
                buffer = getattr(operation, name, None)
                if buffer is not None:
                    written.add(buffer)
        for buffer in written:
            buffers[buffer].detach().zero_()

    return zeroing


def _at_full_length(agree: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the exchange of lengths: lossless messages have their largest length, not 0."""

    def agreed(lossless_gather: Any, own: Any) -> Any:
        lengths = agree(lossless_gather, own)
        lengths[:] = lossless_gather._rooms
        return lengths

    return agreed


@contextmanager
def faked_cuda() -> Iterator[CountingRunner]:
    """Let codecs of CPU tensors take the path of CUDA tensors, up to the launch."""
    from ds_quant.comm.lossless_gather import LosslessGather
    from ds_quant.kernels import cuda, dispatch, reference
    from ds_quant.kernels.dispatch import Operations

    runner = CountingRunner()
    with ExitStack() as stack:
        for owner, name, replacement in (
            (cuda, "runner_of", lambda _: runner),
            (dispatch, "cuda_runner", lambda *_: runner),
            (Operations, "run", _decoding_zeros(Operations.run)),
            (dispatch, "on_host", lambda *_: reference),
            (LosslessGather, "_agree", _at_full_length(LosslessGather._agree)),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        yield runner
