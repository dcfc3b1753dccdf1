"""What every ``attach`` does with its arguments, and the front of a model without a block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_quant.config.errors import AttachError
from ds_quant.runtime import log
from ds_quant.runtime.given_optimizers import optimizers_of
from ds_quant.runtime.inactive import InactiveFront

WEIGHT = nn.Parameter(torch.zeros(2))
SGD, ADAM = torch.optim.SGD([WEIGHT]), torch.optim.Adam([WEIGHT])
WRAPPED = SimpleNamespace(optimizer=ADAM)  # as Accelerate does


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (SGD, [SGD]),
        (WRAPPED, [ADAM]),
        ([], []),
        ([SGD, WRAPPED], [SGD, ADAM]),
        ((each for each in ((SGD,), [ADAM])), [SGD, ADAM]),
        ({"first": SGD}.values(), [SGD]),
    ],
)
def test_optimizers_are_found_in_lists_and_wrappers(given: Any, found: list[Any]) -> None:
    assert [id(each) for each in optimizers_of(given)] == [id(each) for each in found]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (None, "None"),
        ("adam", "'adam'"),
        (3, "3"),
        (0.5, "0.5"),
        (True, "True"),
        (b"adam", "bytes"),
        (torch.zeros(2), "Tensor"),
        (WEIGHT, "Parameter"),
        (torch.optim.SGD, "type"),
        ({"lr": SGD}, "'lr'"),  # its keys
        ([SGD, None], "None"),
        (nn.Linear(1, 1), "Linear"),
    ],
)
def test_what_is_no_optimizer_is_shown(given: Any, shown: str) -> None:
    with pytest.raises(AttachError) as raised:
        optimizers_of(given)
    assert str(raised.value) == (
        f"quantized_comm: optimizer={shown}: allowed: the optimizer of the model's parameters, a "
        "list of several, or [] for a model that is only evaluated"
    )


def test_a_type_that_can_be_iterated_is_no_list() -> None:
    """As an enumeration of optimizers."""

    class Meta(type):
        def __iter__(cls) -> Any:
            return iter([SGD])

    with pytest.raises(AttachError, match="optimizer=Meta: allowed"):
        optimizers_of(Meta("Optimizers", (), {}))


def test_a_model_without_a_block_has_a_front_that_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(log, "info_rank0", logged.append)
    front = InactiveFront("no block was given")
    assert front.line == "no block was given"
    assert logged == ["quantized_comm: no block was given"]
    assert front.state_dict() == {"step": 0}
    assert front.found_nonfinite() is False
    for call in (front.discard_gradients, front.resync, front.detach):
        assert call() is None
    front.discard_gradients([id(WEIGHT)])
    state = {"step": 7, "exact_until": 9}
    front.load_state_dict(state)
    state["step"] = 8  # a checkpoint's state is copied
    kept = front.state_dict()
    assert kept == {"step": 7, "exact_until": 9}
    kept.clear()
    assert front.state_dict() == {"step": 7, "exact_until": 9}
