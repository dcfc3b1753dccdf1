"""FSDP2 between the steps of a loop: writes, freezing, dropped gradients, other optimizers, loads.

Each program runs with FSDP2 alone and with a block, see fsdp2_runs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import ds_quant
from ds_quant import fsdp2
from ds_quant.config.errors import AttachError
from ds_quant.fsdp2.attaching import front_of
from tests.distributed.fsdp2_runs import (
    BF16,
    COPIES,
    EXACT,
    Net,
    Program,
    Run,
    adam,
    assert_equal_on_all_ranks,
    assert_near,
    logged,
    played,
    rows,
    sgd,
    sharded,
    with_copies,
)
from tests.distributed.harness import on_ranks, scratch
from tests.thin import thinned

# ---- weights that other code writes ----


def _lerped(model: Any, run: Run) -> None:
    for p in model.parameters():
        p.data.lerp_(torch.ones_like(p), 0.5)


def _clamped(model: Any, run: Run) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.05, 0.05)


def _local(model: Any, run: Run) -> None:
    for p in model.parameters():
        p.to_local().data.mul_(-1)


def _foreach(model: Any, run: Run) -> None:
    torch._foreach_mul_([p.data for p in model.parameters()], 0.5)


def _without_grad(model: Any, run: Run) -> None:
    with torch.no_grad():
        model.second.weight.add_(0.3)


def _one_row_of_one_rank(model: Any, run: Run) -> None:
    if dist.get_rank() == 1:
        model.third.weight.to_local().data[0].fill_(0.7)


def _permuted(model: Any, run: Run) -> None:
    local = model.first.weight.to_local().data
    local.copy_(local.flip(1))


def _state_dict(model: Any, run: Run) -> None:
    state = {name: value + 0.1 for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def _assigned(model: Any, run: Run) -> None:
    state = {name: (value + 0.1).detach() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    run.optimizer.param_groups[0]["params"] = list(model.parameters())


def _checkpoint(model: Any, run: Run) -> None:
    import torch.distributed.checkpoint as dcp

    folder = [scratch()]
    dist.broadcast_object_list(folder)
    dcp.save(
        {"model": {n: v * 0.5 for n, v in model.state_dict().items()}}, checkpoint_id=folder[0]
    )
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder[0])


WRITES = {
    write.__name__.strip("_"): write
    for write in (
        _lerped, _clamped, _local, _foreach, _without_grad, _one_row_of_one_rank,
        _permuted, _state_dict, _assigned, _checkpoint,
    )
}  # fmt: skip


ONLY = {
    "without_grad": ["second.weight"],
    "one_row_of_one_rank": ["third.weight"],
    "permuted": ["first.weight"],
}


def write_in_many_places(run: Run, name: str) -> None:
    """Write after a step, twice in the same mode, between two forwards, and before a step."""
    written = ONLY.get(name) or [n for n, _ in run.model.named_parameters()]
    write = WRITES[name]
    run.step(0)
    write(run.model, run)
    run.look(*written)
    run.evaluate()
    write(run.model, run)
    run.evaluate()
    run.look(*written)
    run.backward(1, last=False, factor=0.5)
    write(run.model, run)
    run.backward(2, factor=0.5)
    write(run.model, run)
    run.update()
    run.look()
    run.step(3)


QUICK_WRITES = "lerped", "one_row_of_one_rank", "checkpoint", "assigned"


@pytest.mark.parametrize(
    ("world", "scheme", "names"),
    thinned(
        [(4, scheme, tuple(WRITES)) for scheme in COPIES]
        + [(4, "eden4", QUICK_WRITES), (2, "hybrid", ("local", "state_dict"))],
        lambda world, scheme, names: len(names) < len(WRITES),
    ),
)
@on_ranks(timeout=240)
def test_forward_uses_weights_that_other_code_has_written(
    world: int, scheme: str, names: tuple[str, ...]
) -> None:
    options = {"mp_policy": BF16} if "lossless" in scheme else {}
    for name in names:

        def program(run: Run, name: str = name) -> None:
            write_in_many_places(run, name)

        plain = played(program, None, optimizer=sgd, **options)
        run = played(program, with_copies(scheme, world), optimizer=sgd, **options)
        assert_near(run, plain, off=COPIES[scheme], case=name)
        assert_equal_on_all_ranks(run.forwards[-1], name)


@pytest.mark.parametrize("scheme", thinned(COPIES, lambda scheme: scheme == "eden4"))
@on_ranks(4)
def test_averaged_weights_are_swapped_in_and_out(scheme: str) -> None:
    """Two evaluations in one mode, the second with an average; then training goes on."""

    def program(run: Run) -> None:
        average = [p.detach().clone() * 0 for p in run.model.parameters()]
        for seed in range(3):
            run.step(seed)
            torch._foreach_lerp_(average, [p.data for p in run.model.parameters()], 0.2)
        run.model.eval()
        run.evaluate()
        kept = [p.detach().clone() for p in run.model.parameters()]
        for p, value in zip(run.model.parameters(), average, strict=True):
            p.data.copy_(value)
        run.evaluate()
        for p, value in zip(run.model.parameters(), kept, strict=True):
            p.data.copy_(value)
        run.evaluate()
        run.model.train()
        run.step(3)

    plain = played(program, None)
    assert plain.losses[4] != pytest.approx(plain.losses[3], rel=0.3)
    run = played(program, {"scheme": scheme})
    assert_near(run, plain, off=COPIES[scheme])
    average_loss = plain.losses[4]
    assert run.losses[4] == pytest.approx(average_loss, rel=0.03)


@on_ranks(4)
def test_weights_are_perturbed_between_two_forwards_of_a_step() -> None:
    """As sharpness-aware minimization does: the gradient is that of the perturbed weights."""

    def program(run: Run) -> None:
        for seed in range(3):
            run.backward(seed)
            gradients = [p.grad.detach().clone() for p in run.model.parameters()]
            with torch.no_grad():
                for p, gradient in zip(run.model.parameters(), gradients, strict=True):
                    p.add_(gradient, alpha=0.5)
            run.optimizer.zero_grad()
            run.backward(seed)
            with torch.no_grad():
                for p, gradient in zip(run.model.parameters(), gradients, strict=True):
                    p.sub_(gradient, alpha=0.5)
            run.update()

    plain = played(program, None, optimizer=sgd)
    run = played(program, {"scheme": "hybrid"}, optimizer=sgd)
    assert_near(run, plain)


@on_ranks(4)
def test_a_first_forward_in_inference_mode_does_not_spoil_the_copies() -> None:
    def forward_once(model: Any) -> None:
        with torch.no_grad():  # else FSDP2's own buffers are made in inference mode
            model(rows(0))
        model.reshard()

    def program(run: Run) -> None:
        with torch.inference_mode():
            run.losses.append(float(run.model(rows(0)).square().mean()))
        run.model.reshard()
        run.step(0)
        run.step(1)

    plain = played(program, None, prepare=forward_once)
    assert_near(played(program, {"scheme": "hybrid"}, prepare=forward_once), plain)


@on_ranks(4)
def test_a_write_is_logged_once_with_its_price() -> None:
    lines = logged()

    def program(run: Run) -> None:
        run.step(0)
        _local(run.model, run)
        run.evaluate()
        _local(run.model, run)
        run.evaluate()
        run.step(1)

    played(program, {"scheme": "eden4"})
    warnings = [line for line in lines if "written outside" in line]
    if dist.get_rank():
        assert not warnings
    else:
        (line,) = warnings
        numel = sum(p.numel() for p in Net().parameters())
        assert "weights of 7 parameter(s), such as head.weight, were written outside" in line
        assert f"{4 * numel / 1e6:.3g} MB between nodes" in line, line


@on_ranks(4)
def test_parts_of_a_model_run_one_after_the_other() -> None:
    """A write between the forwards of two modules that have nothing in common."""

    def program(run: Run) -> None:
        run.step(0)
        with torch.no_grad():
            hidden = run.model.first(rows(1))
            run.losses.append(float(hidden.square().sum()))
            run.model.third.weight.zero_()
            run.losses.append(float(run.model.third(hidden).square().sum()))
        run.model.first.reshard()
        run.model.third.reshard()

    assert_near(played(program, {"scheme": "hybrid"}), played(program, None))


# ---- parameters that are frozen and thawed ----


def _thaw_after_attach(run: Run) -> None:
    run.model.first.weight.requires_grad_(True)
    for seed in range(4):
        run.step(seed)
    run.look()


def _thaw_between_steps(run: Run) -> None:
    run.step(0)
    run.model.first.weight.requires_grad_(True)
    for seed in range(1, 5):
        run.step(seed)
    run.look()


def _thaw_between_backwards(run: Run) -> None:
    run.backward(0, last=False)
    run.model.first.weight.requires_grad_(True)
    run.backward(1, last=False)
    run.backward(2)
    run.update()
    run.look()
    run.step(3)
    run.look()


def _freeze_between_backwards(run: Run) -> None:
    """The gradient of the first backward still moves the weight that is frozen afterwards."""
    run.backward(0, last=False)
    run.model.third.weight.requires_grad_(False)
    run.backward(1, last=False)
    run.backward(2)
    run.update()
    run.look()
    run.step(3)
    run.look()


def _freeze_for_the_last_backward(run: Run) -> None:
    run.backward(0, last=False)
    run.model.second.requires_grad_(False)  # all parameters of a module
    run.backward(1)
    run.update()
    run.look()
    run.step(2)


def _freeze_and_thaw_in_turns(run: Run) -> None:
    for seed, trained in enumerate((True, False, False, True, False, True)):
        run.model.third.requires_grad_(trained)
        run.step(seed)
    run.look()


def _thaw_while_unsharded(run: Run) -> None:
    run.step(0)
    run.evaluate(reshard=False)
    run.model.head.requires_grad_(False)
    run.step(1)
    run.evaluate(reshard=False)
    run.model.head.requires_grad_(True)
    run.step(2)
    run.model.second.unshard()
    run.model.second.requires_grad_(False)
    run.step(3)
    run.look()


def _another_group_of_parameters(run: Run) -> None:
    run.step(0)
    run.model.first.weight.requires_grad_(True)
    run.optimizer.add_param_group({"params": [run.model.first.weight], "lr": 0.05})
    run.step(1)
    run.step(2)
    run.look()


def _freeze_for_every_last_backward(run: Run) -> None:
    """The optimizer holds the gradient of the first backward, and moves the frozen parameters."""
    for seed in (0, 2, 4):
        run.model.second.requires_grad_(True)
        run.backward(seed, last=False)
        run.model.second.requires_grad_(False)
        run.backward(seed + 1)
        run.update()
    run.look()


def _freeze_for_every_update(run: Run) -> None:
    for seed in range(3):
        run.model.third.requires_grad_(True)
        run.backward(seed)
        run.model.third.requires_grad_(False)
        run.update()
    run.look()


def _average_frozen_ones_in_a_hook(run: Run) -> None:
    """As a teacher follows a student."""

    @torch.no_grad()
    def average(*_: Any) -> None:
        for teacher, student in zip(
            run.model.third.parameters(), run.model.first.parameters(), strict=True
        ):
            teacher.lerp_(student, 0.5)

    run.model.third.requires_grad_(False)
    run.optimizer.register_step_post_hook(average)
    for seed in range(3):
        run.step(seed)
    run.look()


class Freezing(NamedTuple):
    """A program that freezes or thaws parameters.

    prepare: of the model before ``attach``.
    optimizer: makes the optimizer.
    """

    program: Program
    prepare: Callable[[Any], None] = lambda model: None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd


def _freeze_first(model: Any) -> None:
    model.first.weight.requires_grad_(False)


def _sgd_of_trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


FREEZING = {
    "thaw after attach": Freezing(_thaw_after_attach, _freeze_first),
    "thaw between steps": Freezing(_thaw_between_steps, _freeze_first),
    "thaw between backwards": Freezing(_thaw_between_backwards, _freeze_first),
    "freeze between backwards": Freezing(_freeze_between_backwards),
    "freeze for the last backward": Freezing(_freeze_for_the_last_backward),
    "freeze and thaw in turns": Freezing(_freeze_and_thaw_in_turns),
    "thaw while unsharded": Freezing(_thaw_while_unsharded),
    "another group of parameters": Freezing(
        _another_group_of_parameters, _freeze_first, _sgd_of_trained
    ),
    "freeze for every last backward": Freezing(_freeze_for_every_last_backward),
    "freeze for every update": Freezing(_freeze_for_every_update),
    "average frozen ones in a hook": Freezing(_average_frozen_ones_in_a_hook),
}


@pytest.mark.parametrize(
    ("scheme", "names"),
    thinned(
        [(scheme, tuple(FREEZING)) for scheme in ("full_precision", *COPIES)]
        + [("hybrid", tuple(FREEZING)[:5]), ("eden4", tuple(FREEZING)[5:])],
        lambda scheme, names: len(names) < len(FREEZING),
    ),
)
@on_ranks(4, timeout=240)
def test_parameters_are_frozen_and_thawed_at_any_time(scheme: str, names: tuple[str, ...]) -> None:
    options = {"mp_policy": BF16} if "lossless" in scheme else {}
    for name in names:
        program, prepare, optimizer = FREEZING[name]
        ways = {"prepare": prepare, "optimizer": optimizer, **options}
        plain = played(program, None, **ways)
        run = played(program, {"scheme": scheme}, **ways)
        assert_near(run, plain, off=COPIES.get(scheme, 0.0), case=name)
        if run.forwards:
            assert_equal_on_all_ranks(run.forwards[-1], name)


@on_ranks(4)
def test_the_bytes_of_report_follow_what_is_trained() -> None:
    model = sharded()
    model.first.requires_grad_(False)
    optimizer = sgd(model)
    fsdp2.attach(model, {"scheme": "eden4", "node_size": 2, "min_numel": 64}, optimizer=optimizer)
    run = Run(model, optimizer, None)
    expected = []
    for trained in (False, True, False, False):
        model.first.requires_grad_(trained)
        run.step(0)
        expected.append(ds_quant.report(model)["expected_bytes_per_param"])
    frozen, thawed, last_of_them, frozen_again = expected
    assert frozen < thawed == last_of_them
    assert frozen_again == frozen


# ---- accumulations that are given up ----


def _optimizer_zero_grad(run: Run) -> None:
    run.optimizer.zero_grad()


def _zero_grad_in_place(run: Run) -> None:
    run.optimizer.zero_grad(set_to_none=False)


def _optimizer_made_since(run: Run) -> None:
    sgd(run.model).zero_grad(set_to_none=False)


def _model_zero_grad(run: Run) -> None:
    run.model.zero_grad()


def _model_zero_grad_in_place(run: Run) -> None:
    run.model.zero_grad(set_to_none=False)


def _none(run: Run) -> None:
    for p in run.model.parameters():
        p.grad = None


def _discard(run: Run) -> None:
    run.optimizer.zero_grad()
    if run.front is not None:
        run.front.discard_gradients()


def _of_one_module(run: Run) -> None:
    run.model.third.zero_grad()
    run.model.head.bias.grad = None


GIVEN_UP = {
    drop.__name__.strip("_"): drop
    for drop in (
        _optimizer_zero_grad, _zero_grad_in_place, _optimizer_made_since, _model_zero_grad,
        _model_zero_grad_in_place, _none, _discard, _of_one_module,
    )
}  # fmt: skip
# A call of an optimizer that attach has not seen, one of the model that keeps the gradients, a
# write, and a part of them.
QUICK_GIVEN_UP = ("optimizer_made_since", "model_zero_grad_in_place", "none", "of_one_module")


@pytest.mark.parametrize(
    ("scheme", "names"),
    thinned(
        [
            ("full_precision", QUICK_GIVEN_UP),
            ("full_precision", tuple(GIVEN_UP)),
            ("hybrid", tuple(GIVEN_UP)),
            ("eden4", ("none",)),
        ],
        lambda _, names: names == QUICK_GIVEN_UP,
    ),
)
@on_ranks(4, timeout=240)
def test_an_accumulation_that_is_given_up_leaves_nothing(
    scheme: str, names: tuple[str, ...]
) -> None:
    for name in names:

        def program(run: Run, name: str = name) -> None:
            run.step(0)
            run.backward(1, last=False, factor=1000.0)
            GIVEN_UP[name](run)
            run.backward(2, last=False)
            run.backward(3)
            run.update()
            run.backward(4, last=False, factor=1000.0)
            GIVEN_UP[name](run)
            run.step(5)

        plain = played(program, None, optimizer=sgd)
        run = played(program, {"scheme": scheme}, optimizer=sgd)
        assert_near(run, plain, off=COPIES.get(scheme, 0.0), case=name)


@on_ranks(4)
def test_an_optimizer_steps_where_an_accumulation_was_just_given_up() -> None:
    def program(run: Run) -> None:
        run.step(0)
        run.backward(1, last=False, factor=1000.0)
        _none(run)
        run.optimizer.step()
        run.step(2)

    assert_near(played(program, EXACT, optimizer=sgd), played(program, None, optimizer=sgd))


@pytest.mark.parametrize(("is_last", "drop"), [(False, _none), (True, _model_zero_grad)])
@on_ranks(4)
def test_a_first_checkpoint_is_written_where_gradients_were_just_dropped(
    is_last: bool, drop: Callable[[Run], None]
) -> None:
    """torch gives every parameter a gradient of zeros and steps the optimizer to make its state."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def program(run: Run) -> None:
        run.backward(1, last=is_last, factor=1000.0)
        drop(run)
        get_state_dict(run.model, run.optimizer)
        assert run.front is None or run.front.step == 0
        run.step(2)
        run.look()

    assert_near(played(program, EXACT), played(program, None))


@on_ranks(4)
def test_a_model_is_not_attached_amid_an_accumulation_that_would_be_lost() -> None:
    """FSDP2 keeps the sums of a replica where no collective of a block sees them."""
    model = sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))
    optimizer = sgd(model)
    model.set_requires_all_reduce(False)
    model(rows(1)).sum().backward()
    with pytest.raises(AttachError, match=r"kept from the other replicas: call attach between"):
        fsdp2.attach(model, "eden4", optimizer=optimizer)
    model.set_requires_all_reduce(True)
    model(rows(1)).sum().backward()
    optimizer.zero_grad()
    assert "eden4 on" in fsdp2.attach(model, "eden4", optimizer=optimizer).line


@on_ranks(4)
def test_a_step_after_gradients_were_written_between_backwards_names_the_way_out() -> None:
    def program(run: Run) -> None:
        run.step(0)
        run.backward(1, last=False)
        for p in run.model.parameters():
            p.grad.mul_(0.5)
        run.backward(2)
        if run.front is not None:
            with pytest.raises(RuntimeError, match=r"were written between two .*zero_grad\(\)"):
                run.optimizer.step()
        run.optimizer.zero_grad()
        run.step(3)
        run.look()

    assert_near(played(program, EXACT), played(program, None))


class _Conditional(torch.optim.SGD):
    """Drops gradients where it is told to, as a wrapper that is called in every micro-step does."""

    drops = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.drops:
            super().zero_grad(set_to_none)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
@on_ranks(4)
def test_a_zero_grad_that_keeps_the_gradients_keeps_their_sums(shape: tuple[int, ...]) -> None:
    """shape: of the mesh. On (4, 1) FSDP2 keeps the gradients outside of ``.grad``."""

    def program(run: Run) -> None:
        for seed in (0, 3, 6):
            run.backward(seed, last=False)
            run.optimizer.zero_grad()
            run.backward(seed + 1, last=False)
            run.optimizer.zero_grad()
            run.backward(seed + 2)
            run.optimizer.step()
            run.optimizer.drops = True
            run.optimizer.zero_grad()
            run.optimizer.drops = seed == 3  # in the third step both calls drop

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return _Conditional(model.parameters(), lr=0.1, momentum=0.9)

    mesh = None
    if len(shape) == 2:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
    plain = played(program, None, optimizer=optimizer, mesh=mesh)
    assert_near(played(program, EXACT, optimizer=optimizer, mesh=mesh), plain)


class _Failing(torch.autograd.Function):
    """Raises an error in the backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("out of memory")


ENDED_BACKWARD = (
    r"the optimizer steps while gradients of 1 module\(s\), such as second, have not been reduced "
    r"over all ranks, because an error has ended a backward: call model\.reset_iter_state\(\) "
)


@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="needs torch 2.13: reset_iter_state"
)
@on_ranks(4)
def test_a_step_after_an_error_in_a_backward_names_the_way_out() -> None:
    """FSDP2 finishes no backward after it until its state is reset."""

    def program(run: Run, fails: bool = True, resets: bool = True) -> None:
        run.step(0)
        if fails:
            hook = run.model.second.register_forward_hook(lambda *given: _Failing.apply(given[-1]))
            with pytest.raises(ValueError, match="out of memory"):
                run.backward(1)
            hook.remove()
        if resets:
            run.model.reset_iter_state()
        run.optimizer.zero_grad()
        run.backward(2, last=False)
        run.backward(3)
        run.update()

    # FSDP2 alone adds the gradients of the failed backward to the next ones.
    assert_near(played(program, EXACT), played(partial(program, fails=False), None))
    with pytest.raises(RuntimeError, match=ENDED_BACKWARD):
        played(partial(program, resets=False), EXACT)


@on_ranks(4)
def test_a_hook_of_replicas_runs_in_the_backwards_in_which_fsdp2_calls_it() -> None:
    def calls(block: str | None) -> int:
        count = 0

        def hook(sums: Tensor) -> None:
            nonlocal count
            count += sums.is_floating_point()

        model = sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))
        model.set_all_reduce_hook(hook)
        optimizer = sgd(model)
        if block is not None:
            fsdp2.attach(model, block, optimizer=optimizer)
        for is_last in (False, True):
            model.set_requires_all_reduce(is_last)
            model(rows(1)).sum().backward()
        optimizer.step()
        return count

    assert calls("eden4") == calls(None) > 0


@on_ranks(4)
def test_a_hook_without_replicas_sees_the_gradients_of_every_backward() -> None:
    def program(run: Run) -> None:
        def hook(gradients: Tensor) -> None:
            seen.append(float(gradients.norm()))
            gradients.clamp_(-1e-2, 1e-2)

        run.model.set_all_reduce_hook(hook)
        run.backward(1, last=False)
        run.backward(2)
        run.update()
        run.look()

    seen: list[float] = []
    plain = played(program, None, optimizer=sgd)
    seen_plain, seen = seen, []
    run = played(program, {**EXACT, "node_size": 2}, optimizer=sgd)
    assert seen == pytest.approx(seen_plain, rel=1e-5)
    assert dist.get_rank() or min(seen) > 0  # the last rank's rows hold padding alone
    assert_near(run, plain)


@on_ranks(4)
def test_a_backward_that_was_given_up_leaves_the_random_bits_of_a_resumed_run() -> None:
    """A run that goes on equals one that loads its state, bit for bit."""
    block = {"scheme": "eden4", "node_size": 2}
    for name in ("optimizer_zero_grad", "model_zero_grad_in_place", "discard"):

        def dropping(run: Run, name: str = name) -> None:
            run.step(0)
            run.front.state_dict()  # the nodes fill their copies anew, as after a load
            run.backward(1)
            GIVEN_UP[name](run)
            run.step(2)
            run.look()

        def loading(run: Run, name: str = name) -> None:
            run.step(0)
            state = run.front.state_dict()
            run.backward(1)
            run.model.zero_grad()
            run.front.load_state_dict(state)
            run.step(2)
            run.look()

        def resuming(run: Run) -> None:
            run.step(0)
            run.front.load_state_dict(run.front.state_dict())
            run.step(2)
            run.look()

        runs = [played(each, block, optimizer=sgd) for each in (dropping, loading, resuming)]
        for run in runs[:2]:
            for key, weight in runs[2].held[-1].items():
                assert torch.equal(run.held[-1][key], weight), (name, key)


@on_ranks(4)
def test_gradients_left_inside_the_nodes_are_no_error_after_they_were_dropped() -> None:
    run = Run(sharded(), None, None)
    run.optimizer = sgd(run.model)
    front = fsdp2.attach(run.model, {**EXACT, "node_size": 2}, optimizer=run.optimizer)
    run.backward(0, last=False)
    with pytest.raises(RuntimeError, match=r"the optimizer steps while gradients of 4 module"):
        run.optimizer.step()
    with pytest.raises(RuntimeError, match=r"the model is detached while gradients of 4 module"):
        front.detach()
    run.optimizer.zero_grad()
    run.optimizer.step()
    front.detach()


# ---- optimizers ----


def _made_anew(run: Run) -> None:
    run.step(0)
    run.optimizer = adam(run.model)
    run.step(1)
    run.step(2)
    run.look()


def _two_in_turns(run: Run) -> None:
    first, second = run.optimizer
    for seed in range(4):
        run.backward(seed)
        first.step()
        if seed % 2:
            second.step()
        first.zero_grad()
        second.zero_grad()
    run.look()


def _last_given_steps_first(run: Run) -> None:
    first, second = run.optimizer
    for seed in range(3):
        run.backward(seed)
        second.step()
        first.step()
        run.model.zero_grad()
    run.look()


def _in_backward(run: Run) -> None:
    for seed in range(3):
        run.backward(seed)
    run.look()


def _compiled(run: Run) -> None:
    run.optimizer.step = torch.compile(run.optimizer.step, backend="eager")
    for seed in range(3):
        run.step(seed)
    run.look()


def _not_torchs(run: Run) -> None:
    for seed in range(3):
        run.backward(seed)
        for p in run.model.parameters():
            p.data.sub_(p.grad, alpha=0.1)
            p.grad = None
    run.look()


def _halves(model: Any) -> list[torch.optim.Optimizer]:
    lower = [*model.first.parameters(), *model.second.parameters()]
    upper = [*model.third.parameters(), *model.head.parameters()]
    return [torch.optim.SGD(lower, lr=0.1), torch.optim.AdamW(upper, lr=1e-2)]


def one_per_parameter(model: Any) -> list[torch.optim.Optimizer]:
    """Each steps in backward, when the gradient of its parameter has been reduced."""
    optimizers = []
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)

        def step(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(step)
        optimizers.append(optimizer)
    return optimizers


OPTIMIZERS: dict[str, tuple[Program, Callable[[Any], Any], int]] = {
    "made anew": (_made_anew, adam, 3),
    "two in turns": (_two_in_turns, _halves, 4),
    "the last one steps first": (_last_given_steps_first, _halves, 3),
    "one per parameter in backward": (_in_backward, one_per_parameter, 3),
    "none of torch's": (_not_torchs, lambda model: [], 0),
    "compiled": (_compiled, sgd, 3),
}


@pytest.mark.parametrize(
    ("scheme", "names"),
    thinned(
        [(scheme, tuple(OPTIMIZERS)) for scheme in ("full_precision", *COPIES)]
        + [
            ("hybrid", ("made anew", "the last one steps first", "one per parameter in backward")),
            ("eden4", ("two in turns", "none of torch's")),
        ],
        lambda scheme, names: len(names) < len(OPTIMIZERS),
    ),
)
@on_ranks(4, timeout=240)
def test_any_optimizer_may_move_the_model(scheme: str, names: tuple[str, ...]) -> None:
    options = {"mp_policy": BF16} if "lossless" in scheme else {}
    lines = logged()
    for name in names:
        program, optimizer, steps = OPTIMIZERS[name]
        lines.clear()
        plain = played(program, None, optimizer=optimizer, **options)
        run = played(program, {"scheme": scheme}, optimizer=optimizer, **options)
        assert_near(run, plain, off=COPIES.get(scheme, 0.0), case=name)
        run.evaluate()  # ends the last step where only a part of the optimizers has stepped
        assert run.front.step == steps, name
        if name != "none of torch's":
            assert not any("written outside" in line for line in lines), (name, lines)


@on_ranks(2)
def test_an_optimizer_that_attach_was_not_given_takes_part_in_the_steps_of_the_others() -> None:
    model = sharded()
    of_half, of_others = list(model.parameters())[::2], list(model.parameters())[1::2]
    given, unknown = torch.optim.SGD(of_half, lr=0.1), torch.optim.SGD(of_others, lr=0.1)
    front = fsdp2.attach(model, "qsdp", optimizer=given)
    for _ in range(3):
        model(rows(0)).sum().backward()
        given.step()
        unknown.step()
        model.zero_grad()
    model(rows(0))  # ends a step in which an optimizer has not taken part
    assert front.step == 3


@on_ranks(2)
def test_an_optimizer_of_another_model_is_refused() -> None:
    before = Net()
    made_before = sgd(before)
    model = fully_shard(before)
    with pytest.raises(AttachError, match="optimizer=SGD holds none of the model's parameters"):
        fsdp2.attach(model, "qsdp", optimizer=made_before)
    with pytest.raises(AttachError, match="holds none of the model's parameters"):
        fsdp2.attach(model, "qsdp", optimizer=[sgd(model), sgd(Net())])
    with pytest.raises(AttachError, match="optimizer=3: allowed: the optimizer of the model's"):
        fsdp2.attach(model, "qsdp", optimizer=3)
    assert front_of(model) is None


@on_ranks(4)
def test_a_step_that_only_makes_states_does_not_count() -> None:
    """torch's functions for checkpoints step an optimizer with a learning rate of 0."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    saved = sharded(mesh)
    its_optimizer = adam(saved)
    saved(rows(0)).sum().backward()
    its_optimizer.step()
    weights, states = get_state_dict(saved, its_optimizer)
    model = sharded(mesh)
    with torch.no_grad():  # replicas begin with other weights, until the load
        model.second.weight.mul_(dist.get_rank() + 1)
    optimizer = adam(model)
    front = fsdp2.attach(model, "full_precision", optimizer=optimizer)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    assert front.step == 0
    model(rows(1)).sum().backward()
    optimizer.step()
    assert front.step == 1


@pytest.mark.parametrize("scheme", ["hybrid", "qsdp"])
@on_ranks(2)
def test_a_rank_that_steps_alone_is_told_before_weights_are_compared(scheme: str) -> None:
    """The other rank takes no part in the comparison, but votes in its next forward."""

    def program(run: Run) -> None:
        run.step(0)
        run.backward(1)
        said = "have taken 1 steps on some ranks and 2 on others"
        with pytest.raises(RuntimeError, match=said):
            if dist.get_rank() == 1:
                run.optimizer.step()
            else:
                run.optimizer.zero_grad()
                run.model(rows(2))
                run.model(rows(3))

    mesh = None
    if scheme == "qsdp":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    block = {**with_copies(scheme, 2), "checksum_steps": 2}
    played(program, block, mesh=mesh)


@pytest.mark.parametrize("scheme", ["hybrid", "qsdp"])
@on_ranks(2)
def test_ranks_that_step_alone_end_all_of_them(scheme: str) -> None:
    """Without copies the ranks go on with equal steps; messages of copies would meet wrong ones."""
    said = "have taken 1 steps on some ranks and 2 on others"

    def program(run: Run) -> None:
        run.step(0)
        run.backward(1)
        if dist.get_rank() == 1:
            run.optimizer.step()
        run.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=said):
            run.backward(2)
            run.backward(3)
        if run.front.copies is None:
            run.front.load_state_dict({"step": 1})
            run.step(4)
            assert run.front.step == 2
            return
        calls = {
            "load": lambda: run.front.load_state_dict({"step": 1}),
            "forward": lambda: run.backward(4),
            "step": run.optimizer.step,
            "detach": run.front.detach,
        }
        for call in calls.values():
            with pytest.raises(RuntimeError, match=f"{said}.*Resume from a checkpoint in new"):
                call()

    played(program, with_copies(scheme, 2))
