"""FSDP2's steps: where forwards begin, which optimizer steps count, which gradients are dropped."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ds_quant.fsdp2 import forwards, optimizers, torch_names, watched_gradients
from ds_quant.fsdp2.dropped_gradients import GradientsBefore, drop_with_module
from ds_quant.fsdp2.forwards import Forwards, StepsVote
from ds_quant.fsdp2.optimizers import OptimizerSteps
from ds_quant.fsdp2.watched_gradients import WatchedGradients
from ds_quant.runtime.fallback import Finding
from ds_quant.runtime.written_weights import UnequalSteps

CPU = torch.device("cpu")

# ---- forwards ----


def forwards_of(weights: Any = None, gradients: Any = None) -> tuple[Forwards, list[str]]:
    """Return the forwards of a run, and its log."""
    lines: list[str] = []
    run = Mock(log=lines.append, device=CPU, step=3)
    run.scheme.weights, run.scheme.gradients = weights, gradients
    return Forwards(run), lines


def test_a_forward_begins_with_the_first_gather_and_where_a_module_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = True
    monkeypatch.setattr(torch_names, "in_forward", lambda module: running and module == "module")
    found, _ = forwards_of()
    first, second = (Mock(module="module") for _ in range(2))
    assert found.begins_with(first)
    assert found.begins_with(second)  # until the forward has begun
    found.begin_with(first)
    assert not found.begins_with(second)
    assert found.begins_with(second) and found.begins_with(first)
    found.begin_with(second)
    assert not found.begins_with(first)
    found.expect()
    assert found.begins_with(Mock(module="module"))
    found.begin_with(None)
    assert not found.begins_with(second)
    running = False  # outside of any forward
    assert found.begins_with(Mock(module="module"))


def test_a_thousand_forwards_without_a_step_are_warned_of_once() -> None:
    found, lines = forwards_of()

    def run(count: int) -> None:
        for _ in range(count):
            found.begin_with(None)

    run(999)
    with torch.no_grad():
        run(5)
    found.after_step()
    run(999)
    assert lines == []
    run(1)
    said = (
        "quantized_comm: 1000 forwards without a step of an optimizer of torch.optim.Optimizer "
        "that holds this model's parameters: random bits repeat, and warmup_steps do not end "
        "(logged once)"
    )
    assert lines == [said]
    run(50)
    assert lines == [said]


def test_steps_that_ranks_take_alone_end_a_model_with_copies() -> None:
    found, _ = forwards_of()
    found.refuse_ended()
    said = (
        "quantized_comm: optimizers of this model have taken 1 steps on some ranks and 2 on "
        "others. Random bits and the nodes' copies of the weights need steps of all ranks alike: "
        "let all ranks decide together, such as by torch.distributed.all_reduce of the flag that "
        "skips a step. "
    )
    error = found.error_of(UnequalSteps(1, 2), has_copies=False)
    assert str(error) == f"{said}Load a checkpoint on all ranks, also to the front"
    found.refuse_ended()
    ended = (
        f"{said}Resume from a checkpoint in new processes: weights are under way to ranks that do "
        "not expect them"
    )
    assert str(found.error_of(UnequalSteps(1, 2), has_copies=True)) == found.ended_by == ended
    with pytest.raises(RuntimeError) as raised:
        found.refuse_ended()
    assert str(raised.value) == ended


def test_a_vote_on_steps_is_read_in_the_next_forward_or_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps_of_other = 3
    waited: list[bool] = []

    def post_least(numbers: Tensor) -> Any:
        def wait() -> None:
            waited.append(True)
            other = torch.tensor([steps_of_other, ~steps_of_other])
            torch.minimum(numbers, other, out=numbers)

        return Mock(wait=wait)

    vote = StepsVote(Mock(post_least=post_least), CPU)
    vote.read()
    vote.compare(3)
    assert waited == []
    vote.compare(3)
    assert waited == [True]
    steps_of_other = 4
    with pytest.raises(UnequalSteps) as raised:
        vote.read()
    assert raised.value.args == (3, 4)
    vote.read()
    assert len(waited) == 2
    steps_of_other = 2
    vote.compare(3)
    with pytest.raises(UnequalSteps) as raised:
        vote.compare(4)
    assert raised.value.args == (2, 3)
    made = Mock()
    monkeypatch.setattr(forwards, "StepsVote", made)
    found, _ = forwards_of(weights="codec")
    made.assert_called_once_with(found._run.votes, CPU)
    found.compare_steps()
    made.return_value.compare.assert_called_once_with(3)
    made.return_value.read.assert_not_called()
    found.compare_steps(now=True)
    made.return_value.read.assert_called_once_with()


# ---- optimizers ----


class Front:
    """Notes what ``OptimizerSteps`` tells a model of two parameters."""

    def __init__(self) -> None:
        self.parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
        self.events: list[Any] = []
        self.waiting: list[str] = []
        self.kept: list[nn.Parameter] = []  # gradients that FSDP2 keeps
        self.looked_up = 0

    def parameter_ids(self) -> Iterable[int]:
        self.looked_up += 1
        return map(id, self.parameters)

    def before_step(self, optimizer: Optimizer, *, has_moved: bool) -> None:
        assert isinstance(optimizer, Optimizer)
        self.events.append(("before", has_moved))

    def after_step(self, *, is_new: bool) -> None:
        self.events.append(("after", is_new))

    def has_waiting_gradients(self) -> bool:
        return bool(self.waiting)

    def discard_gradients(self, parameters: Collection[int] | None = None) -> None:
        self.events.append(("dropped", parameters))

    def kept_gradients(self) -> set[int]:
        return {id(parameter) for parameter in self.kept}

    def said(self) -> list[Any]:
        events, self.events = self.events, []
        return events


@pytest.fixture
def front() -> Any:
    return Front()


@pytest.fixture
def steps(front: Front) -> Any:
    made = OptimizerSteps(front)
    yield made
    made.stop()


def sgd(*parameters: Tensor, lr: Any = 0.1) -> Optimizer:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return SGD(list(parameters), lr=lr)


def test_a_step_ends_when_all_optimizers_have_stepped(front: Front, steps: OptimizerSteps) -> None:
    first, second = (sgd(parameter) for parameter in front.parameters)
    steps.follow([first, second])
    steps.after_reduction()
    first.step()
    assert front.said() == [("before", False)] and steps.begun == 1 and not steps.has_reduced
    second.step()
    assert front.said() == [("before", True), ("after", True)] and steps.begun == 0
    sgd(nn.Parameter(torch.ones(1))).step()  # of another model
    assert front.said() == []
    # One steps alone: the next forward ends its step, and a late one goes on with it.
    steps.after_reduction()
    second.step()
    steps.before_forward()
    assert front.said() == [("before", False), ("after", True)]
    steps.before_forward()
    assert front.said() == []
    first.step()
    steps.before_forward()
    assert front.said() == [("before", False), ("after", False)]
    # The same optimizer again begins a new step, also without a reduction.
    first.step()
    first.step()
    assert steps.begun == 1
    steps.before_forward()
    assert front.said() == [("before", False), ("before", True), ("after", True)]


def test_an_optimizer_that_is_first_seen_when_it_steps_is_known_then(
    front: Front, steps: OptimizerSteps
) -> None:
    steps.follow([])
    made = sgd(*front.parameters)
    made.step()
    assert front.said() == [("before", False), ("after", True)]
    assert steps.held_parameters() == {id(parameter) for parameter in front.parameters}
    other = sgd(front.parameters[1])
    steps.know([other, other])
    made.step()
    assert front.said() == [("before", False)]
    other.step()
    assert front.said() == [("before", True), ("after", True)]
    del made
    gc.collect()
    assert steps.held_parameters() == {id(front.parameters[1])}


def test_optimizers_that_step_in_a_backward_end_their_step_with_the_next_forward(
    front: Front, steps: OptimizerSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = sgd(*front.parameters)
    steps.follow([made])
    monkeypatch.setattr(torch_names, "in_backward", lambda: True)
    made.step()
    assert front.said() == [("before", False)] and steps.have_stepped_in_backward
    monkeypatch.setattr(torch_names, "in_backward", lambda: False)
    steps.before_forward()
    assert front.said() == [("after", True)] and not steps.have_stepped_in_backward


@pytest.mark.parametrize(
    ("rates", "has_reduced", "waits", "counts"),
    [
        ([0.1], False, False, True),
        ([0.0], False, False, False),
        ([0.0], True, False, True),
        ([0.0], True, True, False),
        ([0.0, 0.1], False, False, True),
        ([torch.tensor(0.0)], False, False, False),
        ([torch.tensor(0.1)], False, False, True),
        ([0.0, torch.tensor(0.0)], False, False, False),
        ([None], False, False, True),
        (["none"], False, False, True),
    ],
)
def test_a_step_with_a_rate_of_zero_makes_states_and_does_not_count(
    rates: list[Any],
    has_reduced: bool,
    waits: bool,
    counts: bool,
    front: Front,
    steps: OptimizerSteps,
) -> None:
    made = sgd(*front.parameters)
    steps.follow([made])
    groups = [{"params": front.parameters, "lr": rate} for rate in rates]
    if rates == ["none"]:
        groups = [{"params": front.parameters}]  # an optimizer without learning rates
    made.param_groups = groups
    if has_reduced:
        steps.after_reduction()
    front.waiting = ["first"] if waits else []
    optimizers._before(made)
    optimizers._after(made)
    assert front.said() == ([("before", False), ("after", True)] if counts else [])
    # The zeros that such a step was made with are dropped alone, once.
    ids = {id(parameter) for parameter in front.parameters}
    made.zero_grad()
    assert front.said() == ([("dropped", ids)] if counts else [])
    made.zero_grad()
    assert front.said() == [("dropped", ids)]


@pytest.mark.parametrize("event", ["forward", "reduction", "step", "zero_grad"])
def test_an_event_after_states_were_made_lets_zero_grad_drop_all(
    event: str, front: Front, steps: OptimizerSteps
) -> None:
    made, other = sgd(*front.parameters, lr=0.0), sgd(nn.Parameter(torch.ones(1)))
    steps.follow([made])
    made.step()
    if event == "forward":
        steps.before_forward()
    elif event == "reduction":
        steps.after_reduction()
    elif event == "step":
        other.step()
    else:
        other.zero_grad()
    assert front.said() == []
    made.zero_grad()
    assert [name for name, _ in front.said()] == ["dropped"]


def test_an_optimizer_holds_a_model_if_any_of_its_parameters_is_one_of_it(
    front: Front, steps: OptimizerSteps
) -> None:
    strange = nn.Parameter(torch.ones(1))
    assert steps.holds_any(sgd(strange, front.parameters[1]))
    assert not steps.holds_any(sgd(strange))
    made = sgd(strange)
    steps.follow([])
    (group,) = made.param_groups
    made.param_groups = [{**group, "params": []}, {**group, "params": front.parameters[:1]}]
    made.step()
    assert front.said() == [("before", False), ("after", True)]
    made.param_groups = [{**group, "params": [strange]}]
    made.step()
    assert front.said() == []
    front.parameters.append(strange)  # replaced since
    made.step()
    assert front.said() == [("before", False), ("after", True)]


def test_the_parameters_of_a_model_are_looked_up_once_while_they_stay(
    front: Front, steps: OptimizerSteps
) -> None:
    """A model has thousands, and every step of every optimizer asks."""
    made = sgd(*front.parameters)
    (group,) = made.param_groups
    made.param_groups = [{**group, "params": []}, group]
    steps.follow([made])
    for _ in range(3):
        made.step()
    assert front.looked_up == 1 and len(front.said()) == 6
    sgd(nn.Parameter(torch.ones(1))).step()  # perhaps a new parameter of this model
    assert front.looked_up == 3 and front.said() == []
    assert not steps.holds_any(sgd(nn.Parameter(torch.ones(1)))) and front.looked_up == 4


class OwnZeroGrad(SGD):
    """Drops gradients in its own way."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


class ThenSuper(OwnZeroGrad):
    """Calls the ``zero_grad`` of its base class."""

    def zero_grad(self, set_to_none: bool = True) -> Any:
        super().zero_grad(set_to_none)
        return "dropped"


class Drops:
    """Is mixed in."""

    def zero_grad(self, set_to_none: bool = True) -> Any:
        OwnZeroGrad.zero_grad(self, set_to_none)  # type: ignore[arg-type]


def _class_made_now() -> type[Optimizer]:
    class MadeNow(SGD):
        def __init_subclass__(cls, color: str = "", **keywords: Any) -> None:
            super().__init_subclass__(**keywords)
            cls.color = color

        def zero_grad(self, set_to_none: bool = True) -> None:
            pass

    class Subclass(MadeNow, color="red"):
        pass

    assert Subclass.color == "red" and Subclass.zero_grad is MadeNow.zero_grad
    return Subclass


@pytest.mark.parametrize(
    ("class_of", "drops"),
    [
        (lambda: SGD, 1),
        (lambda: OwnZeroGrad, 1),
        (lambda: ThenSuper, 2),
        (lambda: type("Inherits", (ThenSuper,), {}), 2),
        (lambda: type("Mixed", (Drops, SGD), {}), 2),
        (_class_made_now, 1),
    ],
)
def test_a_zero_grad_of_any_class_drops_until_the_model_is_detached(
    class_of: Callable[[], type[Any]], drops: int, front: Front, steps: OptimizerSteps
) -> None:
    """drops: how often, where a ``zero_grad`` calls another one. No optimizer has stepped."""
    steps.follow([])
    made = class_of()(front.parameters, lr=0.1)
    ids = {id(parameter) for parameter in front.parameters}
    returned = made.zero_grad()
    assert front.said() == [("dropped", ids)] * drops
    assert returned == ("dropped" if isinstance(made, ThenSuper) else None)
    class_of()([nn.Parameter(torch.ones(1))], lr=0.1).zero_grad(set_to_none=False)
    assert front.said() == [], "of another model"
    steps.stop()
    made.zero_grad()
    assert front.said() == []


class Conditional(SGD):
    """Drops the gradients that it is told to.

    way: "none", "in place", "another" or "raise".
    """

    dropped: Sequence[int] = ()
    way = "none"

    def zero_grad(self, set_to_none: bool = True) -> None:
        parameters = self.param_groups[0]["params"]
        for index in self.dropped:
            if self.way == "none":
                parameters[index].grad = None
            elif self.way == "in place":
                parameters[index].grad.zero_()
            elif self.way == "another":
                parameters[index].grad = torch.zeros(1)
        if self.way == "raise":
            raise ValueError("not now")


@pytest.mark.parametrize("way", ["none", "in place", "another", "raise"])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("dropped", [(), (1,), (0, 1)])
def test_sums_of_gradients_that_a_zero_grad_keeps_are_kept(
    dropped: tuple[int, ...], kept: bool, way: str, front: Front, steps: OptimizerSteps
) -> None:
    """kept: FSDP2 keeps the gradients, and ``.grad`` is None."""
    made = Conditional(front.parameters, lr=0.1)
    steps.follow([made])
    made.dropped, made.way = dropped, way
    before = [None if kept else torch.ones(1) for _ in front.parameters]
    for parameter, gradient in zip(front.parameters, before, strict=True):
        parameter.grad = gradient
    front.kept = front.parameters if kept else []
    with pytest.raises(ValueError, match="not now") if way == "raise" else nullcontext():
        made.zero_grad()
    seen = () if way == "raise" else dropped
    assert front.said() == [("dropped", {id(front.parameters[index]) for index in seen})]
    for index, parameter in enumerate(front.parameters):
        if kept:
            assert parameter.grad is None
        elif index not in seen:
            assert parameter.grad is before[index] and parameter.grad.item() == 1


def test_placeholders_share_the_memory_of_the_largest_one(front: Front) -> None:
    sizes = (2, 3), (5,), (), (4, 2)
    dtypes = torch.float32, torch.float32, torch.float32, torch.bfloat16
    front.parameters = [
        nn.Parameter(torch.ones(size, dtype=dtype))
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]
    front.kept = front.parameters
    gradients = GradientsBefore(front.parameters, front, drops_all=False)
    placeholders = [parameter.grad for parameter in front.parameters]
    assert [tuple(each.shape) for each in placeholders] == list(sizes)
    assert [each.dtype for each in placeholders] == list(dtypes)
    assert all(each.is_contiguous() for each in placeholders)
    storages = [each.untyped_storage() for each in placeholders]
    assert [each.nbytes() for each in storages] == [24, 24, 24, 16]
    assert len({each.data_ptr() for each in storages}) == 2
    placeholders[1].zero_()
    assert gradients.dropped() == {id(front.parameters[1])}, "the others have other versions"
    assert all(parameter.grad is None for parameter in front.parameters)


@pytest.mark.parametrize(
    ("grad_dtype", "given"), [(torch.float32, torch.float32), (None, torch.bfloat16)]
)
def test_a_placeholder_has_a_dtype_that_torch_allows(
    front: Front, grad_dtype: torch.dtype | None, given: torch.dtype
) -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    parameter.grad_dtype = grad_dtype
    front.parameters = front.kept = [parameter]
    gradients = GradientsBefore(front.parameters, front, drops_all=False)
    assert parameter.grad is not None and parameter.grad.dtype == given
    parameter.grad = None
    assert gradients.dropped() == {id(parameter)}


def test_an_optimizer_without_groups_drops_as_before(steps: OptimizerSteps) -> None:
    class Wrapper(Optimizer):
        def __init__(self) -> None:
            pass

        def zero_grad(self, set_to_none: bool = True) -> Any:
            return "dropped"

    steps.follow([])
    assert Wrapper().zero_grad() == "dropped"


@pytest.mark.parametrize("kind", [property, staticmethod, classmethod])
def test_a_zero_grad_that_is_no_method_stays(kind: Any, steps: OptimizerSteps) -> None:
    steps.follow([])
    strange = kind(lambda *given: len(given))
    made = type("Strange", (SGD,), {"zero_grad": strange})
    assert vars(made)["zero_grad"] is strange


def test_gradients_that_wait_stay_in_the_zero_grad_after_states_were_made(
    front: Front, steps: OptimizerSteps
) -> None:
    """torch makes gradients of zeros, steps with a rate of 0, and drops them."""
    made = ThenSuper(front.parameters, lr=0.0)
    steps.follow([made])
    front.waiting = ["a module"]
    steps.has_reduced = True
    made.step()
    made.zero_grad()
    assert front.said() == []
    made.zero_grad()
    assert len(front.said()) == 2


def test_models_that_are_gone_are_followed_no_more() -> None:
    before = list(optimizers._following)
    fronts = [Front() for _ in range(3)]
    made: list[Any] = [OptimizerSteps(front) for front in fronts]
    for each in made:
        each.follow([])
    assert [each() for each in optimizers._following[-3:]] == made
    made[0].stop()
    assert [each() for each in optimizers._following[-2:]] == made[1:]
    del made[1], each
    gc.collect()
    last = made[-1]
    sgd(*fronts[2].parameters).step()
    assert fronts[2].said() == [("before", False), ("after", True)] and fronts[1].said() == []
    later = OptimizerSteps(fronts[0])
    later.follow([])
    assert [each() for each in optimizers._following[-2:]] == [last, later]
    last.stop()
    later.stop()
    assert {each() for each in optimizers._following} <= {each() for each in before}


def test_hooks_of_torch_are_registered_once() -> None:
    assert len(optimizers._registered) in (0, 2)
    for _ in range(2):
        optimizers._register()
        assert len(optimizers._registered) == 2
    assert Optimizer.zero_grad.__name__ == "zero_grad"


# ---- gradients that are dropped ----


class Layer(nn.Module):
    """Notes how it drops its gradients. kept: it keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.calls: list[Any] = []
        self.kept = False

    def zero_grad(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        self.calls.append((args, kwargs))
        if not self.kept:
            self.weight.grad = None
        return "result"


def test_a_module_drops_the_sums_of_the_gradients_that_it_drops(front: Front) -> None:
    layer = Layer()
    layer.kept, layer.weight.grad = True, torch.ones(1)
    (undo,) = drop_with_module(layer, front)
    assert layer.zero_grad(1, set_to_none=False) == "result"
    assert layer.calls == [((1,), {"set_to_none": False})] and front.said() == [("dropped", set())]
    layer.kept = False
    layer.zero_grad()
    assert front.said() == [("dropped", {id(layer.weight)})]
    undo()
    assert "zero_grad" not in vars(layer)
    layer.zero_grad()
    undo()
    assert front.said() == []
    # What a user has wrapped stays.
    (undo,) = drop_with_module(layer, front)
    wrapped = layer.zero_grad
    layer.zero_grad = lambda: wrapped()  # type: ignore[method-assign]
    of_user = layer.zero_grad
    undo()
    assert layer.zero_grad is of_user and of_user() == "result"
    assert front.said() == []


def test_torchs_zero_grad_of_a_module_drops_all_its_sums(front: Front) -> None:
    """Also where FSDP2 keeps the gradients, and without a placeholder for them."""
    module = nn.Linear(1, 1)
    drop_with_module(module, front)
    front.kept = list(module.parameters())
    module.zero_grad()
    assert front.said() == [("dropped", {id(module.weight), id(module.bias)})]


def test_a_zero_grad_of_one_module_is_watched_and_given_back(front: Front) -> None:
    """A user may have replaced it, for example to keep gradients until a condition holds."""
    module = nn.Linear(1, 1)
    calls: list[str] = []
    module.zero_grad = lambda: calls.append("kept")  # type: ignore[method-assign]
    of_user = module.zero_grad
    module.weight.grad = torch.ones(1, 1)
    (undo,) = drop_with_module(module, front)
    front.kept = [module.bias]
    module.zero_grad()
    assert calls == ["kept"] and front.said() == [("dropped", set())]
    undo()
    assert module.zero_grad is of_user


def test_a_front_that_is_gone_is_not_told() -> None:
    layer, gone = Layer(), Mock(side_effect=AssertionError("it is gone"))
    drop_with_module(layer, gone)
    reference = weakref.ref(gone)
    del gone
    gc.collect()
    assert reference() is None and layer.zero_grad() == "result"


def test_what_wraps_a_method_keeps_neither_side_alive() -> None:
    module, kept = nn.Linear(1, 1), Mock()
    (undo,) = drop_with_module(module, kept)
    module.zero_grad()
    kept.discard_gradients.assert_called_once_with({id(p) for p in module.parameters()})
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    undo()


# ---- gradients that are watched ----


def watched(model: nn.Module, *, held: Collection[Tensor] = (), in_backward: bool = False) -> Any:
    steps = Mock(have_stepped_in_backward=in_backward)
    steps.held_parameters.return_value = {id(parameter) for parameter in held}
    return WatchedGradients([], model, [], steps)


def nan_in(parameter: Tensor) -> None:
    parameter.grad = torch.full_like(parameter, torch.nan)


def test_the_first_gradient_with_nan_is_found_with_its_origin() -> None:
    model = nn.Linear(3, 2)
    found = watched(model)
    assert found.first_nonfinite() is None
    model.weight.grad = torch.zeros(2, 3)
    assert found.first_nonfinite() is None
    nan_in(model.bias)
    assert found.first_nonfinite() == Finding("bias", is_origin=False)
    rows = Mock(finite_flags=lambda row: [row.isfinite().all()])
    found.note("first", rows, torch.ones(2))
    found.note("second", rows, torch.tensor([torch.inf]))
    assert found.first_nonfinite() == Finding("second", is_origin=True)
    found.note("second", rows, torch.tensor([torch.inf]))
    model.bias.grad = None  # dropped since
    assert found.first_nonfinite() is None
    found.note("third", rows, torch.tensor([torch.inf]))
    found.clear()
    nan_in(model.bias)
    assert found.first_nonfinite() == Finding("bias", is_origin=False)
    stepped = watched(model, in_backward=True)
    assert stepped.first_nonfinite() is None
    stepped.note("first", rows, torch.tensor([torch.inf]))
    assert stepped.first_nonfinite() == Finding("first", is_origin=True)


def test_a_gradient_that_no_optimizer_uses_counts_once() -> None:
    model = nn.Linear(3, 2)
    found = watched(model, held=[model.weight])
    nan_in(model.bias)
    assert found.first_nonfinite() == Finding("bias", is_origin=False)
    assert found.first_nonfinite() is None
    nan_in(model.weight)
    for _ in range(2):
        assert found.first_nonfinite() == Finding("weight", is_origin=False)
    model.weight.grad = None
    nan_in(model.bias)  # another tensor
    assert found.first_nonfinite() == Finding("bias", is_origin=False)
    found.drop({id(model.bias)})
    assert found.first_nonfinite() == Finding("bias", is_origin=False)
    found.clear()  # an optimizer step does not drop it
    assert found.first_nonfinite() is None


def test_gradients_of_a_vote_are_noted_until_they_are_dropped() -> None:
    model = nn.Linear(3, 2)
    found = watched(model, held=[model.weight])
    assert found.found is False and not found.are_noted and not found.are_dropped
    nan_in(model.bias)
    found.note_found()  # no optimizer uses it
    assert not found.are_noted and not found.are_dropped
    nan_in(model.weight)
    found.note_found()
    assert found.are_noted and not found.are_dropped
    model.weight.grad.add_(1)
    assert found.are_noted
    model.weight.grad = torch.zeros(2, 3)
    assert not found.are_noted and found.are_dropped
    found.note_found()
    found.drop({id(model.bias)})
    assert found.are_noted
    found.drop({id(model.weight)})
    assert not found.are_noted and not found.are_dropped
    found.note_found()
    found.found = True
    found.drop(None)
    assert found.found is False and not found.are_noted and not found.are_dropped
    for parameter in model.parameters():
        nan_in(parameter)
    without_optimizer = watched(model)
    without_optimizer.note_found()
    model.weight.grad = None
    assert without_optimizer.are_noted
    gone = watched(model)
    del model, parameter
    gc.collect()
    assert list(gone._parameters()) == [] and gone.first_nonfinite() is None


def test_sparse_and_empty_gradients_are_looked_at() -> None:
    values = {"a": torch.zeros(2, 2), "b": torch.zeros(0), "c": torch.zeros(2), "d": torch.ones(1)}
    named = [(name, nn.Parameter(value)) for name, value in values.items()]
    assert watched_gradients._nonfinite(named) == []
    for _, parameter in named[1:]:
        parameter.grad = torch.zeros_like(parameter)
    assert watched_gradients._nonfinite(named) == []
    assert named[2][1].grad is not None
    named[2][1].grad[1] = -torch.inf
    indices = torch.tensor([[1], [0]])
    named[0][1].grad = torch.sparse_coo_tensor(
        indices, torch.tensor([torch.nan]), (2, 2), check_invariants=True
    )
    found = watched_gradients._nonfinite(named)
    assert [name for name, _ in found] == ["a", "c"]
    assert found[0][1] is named[0][1]
