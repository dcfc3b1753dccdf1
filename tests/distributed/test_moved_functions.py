"""A function that another version of DeepSpeed no longer calls: training ends, it does not go on
without the plugin. Moved here by renaming it where its caller looks it up.
"""

from __future__ import annotations

from itertools import count
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ds_quant
from tests.distributed.harness import on_ranks
from tests.distributed.models import (
    QSDP,
    Regression,
    engine_of,
    forward,
    heard,
    train_step,
    train_steps,
)

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

ELSEWHERE = "called_elsewhere"


GATHER = "all_gather_coalesced"
REDUCE = "reduce_scatter_coalesced"
SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
PARTITION = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
FETCH = "_PartitionedParameterCoordinator__all_gather_params_"
OWNERS = "allreduce_and_copy_with_multiple_ranks"


def looks_up(function: Any, name: str) -> FunctionType | None:
    """The function that looks up ``name``: this one, or the one inside its decorators."""
    if not isinstance(function, FunctionType):
        return None
    if name in function.__code__.co_names:
        return function
    inside = [cell.cell_contents for cell in function.__closure__ or ()]
    return next(filter(None, (looks_up(f, name) for f in inside)), None)


def with_names(function: Any, name: str) -> Any:
    """The function, looking up ``ELSEWHERE`` where it looked up ``name``."""
    function = looks_up(function, name)
    names = tuple(ELSEWHERE if n == name else n for n in function.__code__.co_names)
    renamed = FunctionType(
        function.__code__.replace(co_names=names), function.__globals__, function.__name__,
        function.__defaults__, function.__closure__,
    )  # fmt: skip
    renamed.__kwdefaults__ = function.__kwdefaults__
    return torch.no_grad()(renamed)


def move(stage: int, caller: str, name: str) -> None:
    """DeepSpeed's optimizer calls a copy of ``name`` from ``caller``."""
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    module = stage3 if stage == 3 else stage_1_and_2
    owner = module.DeepSpeedZeroOptimizer_Stage3 if stage == 3 else module.DeepSpeedZeroOptimizer
    setattr(owner, caller, with_names(getattr(owner, caller), name))
    home = owner if hasattr(owner, name) else module
    setattr(home, ELSEWHERE, getattr(home, name))


def fetched_elsewhere(engine: DeepSpeedEngine) -> None:
    from deepspeed.runtime.zero.partitioned_param_coordinator import (
        PartitionedParameterCoordinator as Coordinator,
    )

    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    renamed = with_names(getattr(Coordinator, FETCH), GATHER)
    setattr(coordinator, FETCH, MethodType(renamed, coordinator))
    for p in engine.module.parameters():
        setattr(p, ELSEWHERE, p.all_gather_coalesced.args[0])


@pytest.mark.parametrize(
    ("stage", "scheme", "caller", "name"),
    [
        (3, "qsdp", SCATTER, REDUCE),
        (3, "qsdp", PARTITION, SCATTER),
        (3, "qsdp", FETCH, GATHER),
        (2, "qsdp", "step", "all_gather_dp_groups"),
        (2, "sdp4bit", "step", "all_gather_dp_groups"),
        (2, "qsdp", "allreduce_and_scatter", OWNERS),
        (2, "qsdp", "reduce_ipg_grads", "average_tensor"),
    ],
)
@on_ranks(timeout=60)
def test_a_function_that_is_no_longer_called_ends_the_run(
    stage: int, scheme: str, caller: str, name: str
) -> None:
    if caller != FETCH:
        move(stage, caller, name)
    engine = engine_of(stage, {"scheme": scheme})
    if caller == FETCH:
        fetched_elsewhere(engine)
    with pytest.raises(Exception, match="quantized_comm: DeepSpeed 0.*did not call") as caught:
        train_step(engine, 0)
    if caller == FETCH:
        assert f"did not call {GATHER}" in str(caught.value)


@pytest.mark.parametrize("is_moved", [False, True])
@on_ranks()
def test_a_first_step_without_gradients_is_not_judged_but_the_next_one_is(is_moved: bool) -> None:
    if is_moved:
        move(3, PARTITION, SCATTER)
    engine = engine_of(3, QSDP)
    forward(engine, 0)
    engine.backward(torch.zeros((), requires_grad=True) * 1)
    engine.step()
    assert "gradients" not in engine.ds_quant_attached.front.requested_roles
    if is_moved:
        with pytest.raises(Exception, match="did not call"):
            train_step(engine, 1)
    else:
        assert train_steps(engine, 2, 1)[-1] < 1.3


class WithEmpty(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.empty = torch.nn.Linear(0, 3, bias=False)


@on_ranks()
def test_a_parameter_without_elements_is_named_and_trains_if_no_forward_needs_it() -> None:
    engine = engine_of(3, QSDP, WithEmpty)
    line = ds_quant.report(engine)["line"]
    assert "1 parameter(s) have 0 elements, such as empty.weight: DeepSpeed itself" in line
    assert train_step(engine, 0)[0] < 1.5


@pytest.mark.parametrize("dropped", [True, False])
@on_ranks()
def test_a_first_step_that_brings_few_gradients_is_logged_once(dropped: bool) -> None:
    """With ``dropped`` two of every three buckets pass the plugin by."""
    logged = heard()
    zero = {"reduce_bucket_size": 20_000, "overlap_comm": False}
    engine = engine_of(3, QSDP, zero=zero)
    del logged[:]
    ours, calls = getattr(engine.optimizer, SCATTER), count()
    if dropped:
        setattr(engine.optimizer, SCATTER, lambda *a: (
            ours(*a) if next(calls) % 3 == 2 else ours.ds_quant_wraps(*a)
        ))  # fmt: skip
    train_steps(engine, 3)
    assert len(logged) == dropped
    for line in logged:
        assert "bytes of gradients to rank 0" in line and "past this plugin" in line
