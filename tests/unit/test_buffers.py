"""The pool of large host buffers: nothing in use is given away, nothing grows without need."""

from __future__ import annotations

import gc

import pytest
import torch

from ds_quant.comm.buffers import MIN_BYTES, Buffers
from tests.thin import thinned

CPU = torch.device("cpu")
N = MIN_BYTES


def test_a_freed_buffer_is_used_again() -> None:
    pool = Buffers()
    first = pool.empty(N, device=CPU)
    place = first.data_ptr()
    del first
    for nbytes in (N, N + 0, N):
        again = pool.empty(nbytes, device=CPU)
        assert again.data_ptr() == place
        del again
    assert pool.nbytes == N


HOLDERS = {
    "array": lambda t: t.numpy()[3:4],
    "itself": lambda t: t,
    "view": lambda t: t.view(torch.float32).view(2, -1)[1],
    "slice": lambda t: t[5:6],
    "parameter": lambda t: torch.nn.Parameter(t.view(torch.float32)).data,
    "storage": lambda t: t.untyped_storage(),
}
# Those that refer to no tensor of the pool.
QUICK = ("array", "parameter", "storage")


@pytest.mark.parametrize("holder", thinned(HOLDERS, lambda holder: holder in QUICK))
def test_a_buffer_is_not_free_while_anything_on_it_is_held(holder: str) -> None:
    pool = Buffers()
    taken = pool.empty(N, device=CPU).fill_(7)
    place, held = taken.data_ptr(), HOLDERS[holder](taken)
    del taken
    gc.collect()
    assert pool.empty(N, device=CPU).data_ptr() != place
    del held
    gc.collect()
    places = {t.data_ptr() for t in [pool.empty(N, device=CPU) for _ in range(2)]}
    assert place in places and pool.nbytes == 2 * N


def test_a_buffer_that_is_too_small_makes_room_for_a_larger_one() -> None:
    pool = Buffers()
    for nbytes in (N, 3 * N, 2 * N):
        pool.empty(nbytes, device=CPU)
    assert pool.nbytes == 3 * N


def test_the_smallest_buffer_that_fits_is_taken() -> None:
    pool = Buffers()
    large, small = pool.empty(4 * N, device=CPU), pool.empty(2 * N, device=CPU)
    places = large.data_ptr(), small.data_ptr()
    del large, small
    assert pool.empty(N, device=CPU).data_ptr() == places[1]
    held = pool.empty(N, device=CPU)
    assert pool.empty(N, device=CPU).data_ptr() == places[0]
    del held


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_shape_and_dtype_are_those_asked_for(dtype: torch.dtype) -> None:
    taken = Buffers().empty(3, N, dtype=dtype, device=CPU)
    assert taken.shape == (3, N) and taken.dtype == dtype and taken.is_contiguous()


def test_small_tensors_do_not_enter_the_pool() -> None:
    pool = Buffers()
    pool.empty(N - 1, device=CPU)
    assert pool.nbytes == 0
