"""FSDP2: steps in full precision after NaN or Inf, and while a kill file exists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ds_quant
from ds_quant import fsdp2
from ds_quant.fsdp2.attaching import front_of
from tests.distributed.fsdp2_runs import WIDTH, logged
from tests.distributed.harness import move_kill_file, on_ranks, scratch
from tests.distributed.test_fsdp2_between_steps import one_per_parameter, rows, sgd, sharded

BLOCK = {"scheme": "qsdp", "node_size": 2, "min_numel": 64}


def received(model: Any, role: str) -> float:
    """Return the bytes of a role that this rank has received between nodes."""
    return ds_quant.report(model)["received_bytes"][role]["inter"]


def backward(model: Any, seed: int, *, spoilt: bool = False, role: str = "gradients") -> float:
    """Run forward and backward; return the bytes between nodes. spoilt: on the last rank."""
    before = received(model, role)
    factor = float("inf") if spoilt and dist.get_rank() == dist.get_world_size() - 1 else 1.0
    (model(rows(seed)).float().square().mean() * factor).backward()
    return received(model, role) - before


@pytest.mark.parametrize("role", ["gradients", "weights"])
@on_ranks(4)
def test_a_loop_skips_a_step_together_and_the_next_ones_are_exact(role: str) -> None:
    """Weights of a repeated step, too: they were gathered in 8 bits before it was skipped."""
    model = sharded()
    optimizer = sgd(model)
    fallback = {"on_nonfinite": "full_precision", "steps": 2}
    front = fsdp2.attach(model, {**BLOCK, "fallback": fallback}, optimizer=optimizer)
    taken = []
    sent = []
    for step in range(6):
        sent.append(backward(model, step, spoilt=step == 1, role=role))
        if front.found_nonfinite():
            optimizer.zero_grad()
            continue
        taken.append(step)
        optimizer.step()
        optimizer.zero_grad()
    assert taken == [0, 2, 3, 4, 5]
    quantized, exact = sent[0], sent[2]
    assert exact > 2 * quantized
    assert sent == [quantized, quantized, exact, exact, quantized, quantized]
    figures = ds_quant.report(model)
    assert figures["nonfinite_steps"] == 1 and figures["exact_steps"] == 2
    assert all(p.isfinite().all() for p in (q.full_tensor() for q in model.parameters()))


def _zero_grad(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()


def _set_to_none(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@pytest.mark.parametrize("drop", [_zero_grad, _set_to_none])
@on_ranks(4)
def test_the_answer_stays_until_there_are_other_gradients(drop: Callable[..., None]) -> None:
    """A loop may ask after every backward and again before the step."""
    model = sharded()
    optimizer = sgd(model)
    fallback = {"on_nonfinite": "full_precision", "steps": 2}
    front = fsdp2.attach(model, {**BLOCK, "fallback": fallback}, optimizer=optimizer)

    def answers() -> list[bool]:
        found = []
        for spoilt in (True, False):
            backward(model, 1, spoilt=spoilt)
            found += [front.found_nonfinite(), front.found_nonfinite()]
        return found

    assert answers() == [True] * 4
    drop(model, optimizer)
    sent = []
    for step in range(3):
        sent.append(backward(model, step))
        assert not front.found_nonfinite() and not front.found_nonfinite()
        optimizer.step()
        assert not front.found_nonfinite()
        optimizer.zero_grad()
    exact, second, quantized = sent
    assert exact == second > 2 * quantized
    figures = ds_quant.report(model)
    assert figures["nonfinite_steps"] == 1 and figures["exact_steps"] == 2


def _of_halves(model: Any) -> list[torch.optim.Optimizer]:
    lower = [*model.first.parameters(), *model.second.parameters()]
    upper = [*model.third.parameters(), *model.head.parameters()]
    return [torch.optim.SGD(part, lr=0.1) for part in (lower, upper)]


@pytest.mark.parametrize("is_asked_first", [True, False])
@on_ranks(4)
def test_an_optimizer_that_drops_its_gradients_hides_no_nan_of_another(
    is_asked_first: bool,
) -> None:
    model = sharded()
    lower, upper = _of_halves(model)
    block = {**BLOCK, "fallback": {"on_nonfinite": "full_precision", "steps": 2}}
    front = fsdp2.attach(model, block, optimizer=[lower, upper])
    backward(model, 0, spoilt=True)
    assert not is_asked_first or front.found_nonfinite()
    upper.zero_grad()
    assert front.found_nonfinite()
    model.first.zero_grad()
    assert front.found_nonfinite()
    lower.zero_grad()
    assert not front.found_nonfinite()
    assert ds_quant.report(model)["nonfinite_steps"] == 1


@on_ranks(4)
def test_an_optimizer_that_drops_its_gradients_hides_no_nan_that_ends_the_run() -> None:
    model = sharded()
    lower, upper = _of_halves(model)
    block = {**BLOCK, "fallback": {"on_nonfinite": "raise"}}
    fsdp2.attach(model, block, optimizer=[lower, upper])
    backward(model, 0, spoilt=True)
    upper.zero_grad()
    with pytest.raises(FloatingPointError, match="step 0: NaN or Inf in the gradient of"):
        lower.step()


@on_ranks(4)
def test_gradients_that_no_optimizer_uses_skip_no_later_step() -> None:
    """Nobody drops them: a loop that waited for that would take no step any more."""
    model = sharded()
    lower, _ = _of_halves(model)
    block = {**BLOCK, "fallback": {"on_nonfinite": "full_precision", "steps": 2}}
    front = fsdp2.attach(model, block, optimizer=lower)
    found = []
    for step in range(4):
        backward(model, step, spoilt=step == 1)
        found.append(front.found_nonfinite())
        if not found[-1]:
            lower.step()
        lower.zero_grad()
    assert found == [False, True, False, False]


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("is_sent", [True, False])
@on_ranks(2)
def test_every_step_with_inf_is_found_and_counted(is_held: bool, is_sent: bool) -> None:
    """Gradients are dropped by writing None. is_held: by an optimizer. is_sent: not ignored."""
    model = Experts()
    fully_shard(model, ignored_params=set() if is_sent else set(model.own.parameters()))
    held = model.parameters() if is_held else model.shared.parameters()
    optimizer = torch.optim.SGD(held, lr=0.1)
    block = {"scheme": "qsdp", "min_numel": 64, "fallback": {"on_nonfinite": "full_precision"}}
    front = fsdp2.attach(model, block, optimizer=optimizer)
    factor = [1.0]
    model.own.register_forward_hook(lambda module, args, output: output * factor[0])
    found = []
    for step in range(6):
        factor[0] = float("inf") if step in (1, 2, 4) and dist.get_rank() == 1 else 1.0
        model(rows(step)).backward()
        found.append(front.found_nonfinite())
        if not found[-1]:
            optimizer.step()
        _set_to_none(model, optimizer)
    assert found == [False, True, True, False, True, False]
    assert ds_quant.report(model)["nonfinite_steps"] == 3


@on_ranks(2)
def test_a_loop_that_asks_after_every_backward_goes_on_after_an_accumulation_with_nan() -> None:
    """It gives the accumulation up by writing None, and its first backward reduces nothing."""
    model = sharded()
    optimizer = sgd(model)
    block = {**BLOCK, "fallback": {"on_nonfinite": "full_precision", "steps": 2}}
    front = fsdp2.attach(model, {**block, "node_size": 1}, optimizer=optimizer)
    taken = []
    for step in range(5):
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            backward(model, step, spoilt=step == 1 and is_last)
            if front.found_nonfinite():
                _set_to_none(model, optimizer)
                assert not front.found_nonfinite()
                break
        else:
            taken.append(step)
            optimizer.step()
            optimizer.zero_grad()
    assert taken == [0, 2, 3, 4]


@on_ranks(4)
def test_a_step_with_inf_ends_all_ranks_if_asked_to() -> None:
    model = sharded()
    optimizer = sgd(model)
    block = {**BLOCK, "fallback": {"on_nonfinite": "raise"}}
    fsdp2.attach(model, block, optimizer=optimizer)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1, spoilt=True)
    optimizer.zero_grad()  # an accumulation that is given up counts no more
    backward(model, 2)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 3, spoilt=True)
    with pytest.raises(FloatingPointError, match=r"step 2: NaN or Inf in the gradient of .*rank"):
        optimizer.step()


# ---- gradients that no message has held ----


class Experts(nn.Module):
    """A layer that all ranks share, and one of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(x).sum() + self.own(x).sum()


def _sums_overflow() -> nn.Module:
    """Each of two backwards makes finite gradients in fp16, and their sum is Inf."""
    model = nn.Linear(WIDTH, WIDTH, bias=False).half()
    fully_shard(model)
    attach_watching(model)
    for _ in range(2):
        output = model(torch.full((1, WIDTH), 40.0, dtype=torch.float16))
        output.backward(torch.full_like(output, 1000.0))
    return model


def _written_by_the_loop() -> nn.Module:
    model = sharded()
    attach_watching(model)
    backward(model, 0)
    if dist.get_rank() == 1:
        model.first.weight.grad.to_local()[0] = float("nan")
    return model


def _of_one_rank() -> nn.Module:
    model = Experts()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "one"))
    fully_shard(model.own, mesh=mesh["one"])
    fully_shard(model, mesh=mesh["all"])
    attach_watching(model)
    _make_inf(model)
    return model


def _left_alone() -> nn.Module:
    """FSDP2 reduces no gradients of ``ignored_params``."""
    model = Experts()
    fully_shard(model, ignored_params=set(model.own.parameters()))
    attach_watching(model)
    _make_inf(model)
    return model


def _make_inf(model: Experts) -> None:
    """Give the layer of rank 1 gradients of Inf."""
    if dist.get_rank() == 1:
        model.own.register_forward_hook(lambda module, args, output: output * float("inf"))
    model(rows(0)).backward()


def attach_watching(model: Any) -> None:
    block = {"scheme": "qsdp", "min_numel": 64, "fallback": {"on_nonfinite": "full_precision"}}
    fsdp2.attach(model, block, optimizer=sgd(model))


@pytest.mark.parametrize("spoil", [_sums_overflow, _written_by_the_loop, _of_one_rank, _left_alone])
@on_ranks(2)
def test_gradients_are_looked_at_as_the_optimizer_would_use_them(
    spoil: Callable[[], nn.Module],
) -> None:
    model = spoil()
    front = front_of(model)
    assert front.found_nonfinite()
    model.zero_grad()
    assert not front.found_nonfinite()
    assert ds_quant.report(model)["nonfinite_steps"] == 1


@on_ranks(2)
def test_the_module_whose_gradient_held_inf_is_named_after_clipping() -> None:
    """Clipping by a norm of NaN spreads it to all gradients of all ranks."""
    model = sharded()
    optimizer = sgd(model)
    block = {**BLOCK, "node_size": 1, "fallback": {"on_nonfinite": "raise"}}
    fsdp2.attach(model, block, optimizer=optimizer)
    if dist.get_rank() == 1:
        model.second.register_full_backward_hook(
            lambda module, of_input, of_output: tuple(g * 0 for g in of_input)
        )
        model.first.register_forward_hook(
            lambda module, args, output: output.register_hook(lambda g: g + float("inf")) and None
        )
    backward(model, 0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert not model.head.weight.grad.to_local().isfinite().any()
    with pytest.raises(FloatingPointError, match=r"gradient of first, on rank"):
        optimizer.step()


@on_ranks(2)
def test_optimizers_that_step_in_backward_vote_before_the_next_forward() -> None:
    block = {**BLOCK, "node_size": 1, "fallback": {"on_nonfinite": "raise"}}
    file, model, _, _ = attached_beside_kill_file(block, one_per_parameter)
    sent = []
    for step in range(4):
        move_kill_file(file, step)
        sent.append(backward(model, step))
    quantized, exact = sent[:2]  # the forward of step 1 has ended step 0
    assert exact > 2 * quantized
    assert sent == [quantized, exact, quantized, quantized]
    backward(model, 4, spoilt=True)
    with pytest.raises(FloatingPointError, match="step 4: NaN or Inf in the gradient of"):
        backward(model, 5)


@on_ranks(2)
def test_gradients_that_nothing_looks_at_are_no_finite_ones() -> None:
    model = sharded()
    front = fsdp2.attach(model, "qsdp", optimizer=sgd(model))
    with pytest.raises(RuntimeError, match=r'fallback.on_nonfinite="skip": nothing looks'):
        front.found_nonfinite()


def attached_beside_kill_file(
    block: dict[str, Any], make_optimizer: Callable[[Any], Any] = sgd
) -> tuple[Path, Any, Any, Any]:
    """Return the path of this rank's kill file, a model, its optimizer and the front."""
    file = Path(scratch()) / f"kill {dist.get_rank()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_QUANT_KILL_FILE", str(file))
        model = sharded()
        optimizer = make_optimizer(model)
        front = fsdp2.attach(model, block, optimizer=optimizer)
    return file, model, optimizer, front


@on_ranks(4)
def test_a_kill_file_on_one_rank_sends_all_of_them_in_full_precision() -> None:
    file, model, optimizer, front = attached_beside_kill_file(BLOCK)
    assert "DS_QUANT_KILL_FILE watched" in front.line
    lines = logged()
    sent = []
    for step in range(4):
        move_kill_file(file, step)
        sent.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    quantized, exact = sent[0], sent[2]
    assert exact > 2 * quantized
    assert sent == [quantized, quantized, exact, quantized]
    if dist.get_rank() == 0:
        began, ended = [line for line in lines if "DS_QUANT_KILL_FILE" in line]
        assert "step 1: " in began and "on rank 3: full precision from the next step on" in began
        assert "step 2: " in ended and "gone on all ranks: quantized again" in ended


@on_ranks(4)
def test_a_kill_file_makes_the_copies_of_frozen_weights_exact() -> None:
    """The last exchange before a parameter was frozen has left quantized ones in all nodes."""
    file, model, optimizer, _ = attached_beside_kill_file({**BLOCK, "scheme": "qsdp_shard"})
    used = {}
    model.first.register_forward_pre_hook(
        lambda module, _: used.update(first=module.weight.detach().clone())
    )
    exact = []
    for step in range(5):
        if step == 1:
            model.first.weight.requires_grad_(False)
        if step == 3:
            file.touch()
        backward(model, step)
        exact.append(torch.equal(used["first"], model.first.weight.full_tensor()))
        optimizer.step()
        optimizer.zero_grad()
    assert exact == [True, False, False, False, True]


@on_ranks(4)
def test_nothing_changes_where_all_gradients_are_finite() -> None:
    found = []
    for fallback in ({}, {"fallback": {"on_nonfinite": "full_precision"}}):
        model = sharded()
        optimizer = sgd(model)
        fsdp2.attach(model, {**BLOCK, **fallback}, optimizer=optimizer)
        for step in range(3):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.full_tensor().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
