"""What is held between micro-steps, without ranks: what is dropped, crosses and is skipped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_quant.comm.reduction_plan import Segment
from ds_quant.zero import hooks, optimizer_hooks
from ds_quant.zero.gradients import GradientReducer, Layout
from ds_quant.zero.held import HeldBucket, HeldGradients, Member
from ds_quant.zero.param import Param, exact_gradient

MODULE = torch.nn.Linear(2, 2)


def member(index: int, tensor: torch.Tensor) -> Member:
    record = Param(
        index=index, name="", shape=tensor.shape, trained=True, tensor=tensor, routes=None
    )
    return record, -1


A, B = (member(index, tensor) for index, tensor in enumerate(MODULE.parameters()))
C = member(2, torch.empty(2))


class Engine(SimpleNamespace):
    def is_gradient_accumulation_boundary(self) -> bool:
        return self.boundary


def store() -> tuple[HeldGradients, Engine]:
    engine = Engine(global_steps=0, boundary=False)
    return HeldGradients(engine), engine


def bucket(*members: Member, value: float = 1.0) -> HeldBucket:
    return HeldBucket(
        members=members,
        values=torch.zeros(4 * len(members)),
        added=SimpleNamespace(wait=lambda: None),
        cross=lambda: [(member, torch.tensor([value])) for member in members],
    )


def test_a_bucket_of_the_same_make_up_gets_what_is_held() -> None:
    held, _ = store()
    assert held.take("ab", (A, B)) is None
    first = bucket(A, B)
    held.put("ab", first)
    assert held.waits(A) and not held.waits(C)
    assert (held.nbytes, held.most_nbytes) == (32, 32)
    assert held.take("ab", (A, B)) is first
    assert (held.nbytes, held.most_nbytes) == (0, 32)
    assert held.take_crossed((A, B)) == {}


def test_another_make_up_lets_what_is_held_of_its_parameters_cross() -> None:
    held, _ = store()
    held.take("ab", (A, B))
    held.put("ab", bucket(A, B))
    held.put("c", bucket(C))
    assert held.take("a", (A,)) is None
    assert held.take_crossed((C,)) == {} and held.waits(C)
    assert held.take_crossed((A,)) == {A: torch.tensor([1.0])}
    held.put("b", bucket(B, value=2.0))
    held.take("bc", (B, C))
    assert held.take_crossed((B,)) == {B: torch.tensor([3.0])}  # what waited already, and this
    assert held.nbytes == 0


@pytest.mark.parametrize("how", ["another step", "dropped"])
def test_an_abandoned_accumulation_is_forgotten(how: str) -> None:
    held, engine = store()
    held.take("ab", (A, B))
    held.put("ab", bucket(A, B))
    held.take("a", (A,))  # B's sum waits
    held.put("c", bucket(C))
    if how == "dropped":
        held.drop()
    else:
        engine.global_steps = 1
    assert held.take("c", (C,)) is None
    assert held.take_crossed((A, B, C)) == {}
    assert held.nbytes == 0


def test_the_rest_is_given_zeros_in_module_order_at_the_boundary_only() -> None:
    held, engine = store()
    calls: list[Any] = []

    class Buckets:
        def flush(self) -> None:
            calls.append("flush")

        def reduce_zeros(self, params: Any) -> None:
            calls.append([id(p) for p in params])
            assert held.are_left((A,)) and held.are_left((A, B)) and not held.are_left((A, C))
            held.take(None, (A, B))

    held.take("ba", (B, A))
    held.put("ba", bucket(B, A))
    held.reduce_rest(Buckets())
    assert calls == []
    engine.boundary = True
    held.reduce_rest(Buckets())
    params = [id(p) for p in MODULE.parameters()]
    assert calls == ["flush", params, "flush"]
    assert not held.are_left((A,))


@pytest.mark.parametrize("how", ["at the boundary", "by the user's word"])
def test_sums_that_crossed_are_the_rest_too(how: str) -> None:
    """Their parameter has no gradient in the last micro-step, and no bucket is held."""
    held, engine = store()
    given: list[Any] = []
    buckets = SimpleNamespace(flush=lambda: None, reduce_zeros=given.extend)
    held.take("a", (A,))
    held.put("a", bucket(A))
    held.take("ab", (A, B))  # A's sum crosses
    assert held.nbytes == 0
    if how == "at the boundary":
        engine.boundary = True
        held.reduce_rest(buckets)
    else:
        epilogue = lambda: held.reduce_rest(buckets)  # noqa: E731
        held.finish(SimpleNamespace(independent_gradient_partition_epilogue=epilogue))
    assert [id(p) for p in given] == [id(A[0].tensor)]


@pytest.mark.parametrize("left", [False, True])
def test_sums_that_crossed_are_added_to_those_of_the_last_micro_step(left: bool) -> None:
    """To the last bucket's sums or, where only zeros are left, to these."""
    held, engine = store()
    held.take("a", (A,))
    held.put("a", bucket(A, value=3.0))
    held.take("ab", (A, B))
    engine.boundary = True
    sums: Any = SimpleNamespace(
        room=lambda device, dtype=None: torch.ones(3),
        begin=lambda *args, into, held: Filled(into),
    )
    own = [(B, Segment(0, 0, 2, 0, 0, 0), 0), (A, Segment(1, 0, 1, 0, 0, 0), 2)]
    layout = Layout(
        streams=[exact_gradient(torch.float32, 2)], sums=sums, members=(B, A), own=own,
        dtype=torch.float32,
    )  # fmt: skip
    held._left = {A[0], B[0]} if left else set()
    binding: Any = SimpleNamespace(
        engine=engine, held=held, routes=None, gradient_step=0,
        signed_step=lambda route: 0, crosses_once=lambda route: True,
    )  # fmt: skip
    found = GradientReducer(binding)._begin(layout, [torch.zeros(3)], ()).wait()
    assert found.tolist() == ([0.0, 0.0, 3.0] if left else [10.0, 20.0, 33.0])
    assert held.take_crossed((A, B)) == {}


class Filled:
    """A reduction of which the sums are 10, 20 and 30."""

    def __init__(self, into: torch.Tensor) -> None:
        self.wait = lambda: into.copy_(torch.tensor([10.0, 20.0, 30.0]))


def test_zeros_are_not_added_to_shards_on_the_host() -> None:
    parameters = [SimpleNamespace(grad=0, waits=waits) for waits in (True, True, False)]
    put: list[Any] = []
    optimizer = SimpleNamespace(
        micro_step_id=0, partition_grads=lambda params, shards: put.append(params)
    )
    around = hooks.skip_zero_shards(optimizer, lambda p: p.waits)
    hooks.Hooks(None, optimizer).wrap(optimizer, "partition_grads", around)
    waiting = parameters[:2]
    optimizer.partition_grads(waiting, [])
    assert put == [waiting]  # so that what DeepSpeed has from the last step is overwritten
    optimizer.micro_step_id = 1
    optimizer.partition_grads(waiting, [])
    assert put == [waiting] and all(p.grad is None for p in waiting)
    optimizer.partition_grads(parameters, [])
    assert put == [waiting, parameters]


def test_zeros_are_not_added_to_gradients_on_the_host() -> None:
    copied: list[Any] = []
    optimizer = SimpleNamespace(
        micro_step_id=0,
        cpu_offload=True,
        accumulated_grads_in_cpu={"seen": None},
        get_param_id=lambda param: param,
        async_accumulate_grad_in_cpu_via_gpu=copied.append,
    )
    optimizer_hooks.skip_zero_gradients(hooks.Hooks(None, optimizer), lambda param: True)
    optimizer.async_accumulate_grad_in_cpu_via_gpu("seen")
    optimizer.micro_step_id = 1
    optimizer.async_accumulate_grad_in_cpu_via_gpu("seen")
    optimizer.async_accumulate_grad_in_cpu_via_gpu("new")
    assert copied == ["seen", "new"]
