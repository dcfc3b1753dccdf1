"""The plugin's tensors follow DeepSpeed's ``offload_states``: by its arguments, and when."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from ds_quant.zero import hooks, offload


class Optimizer:
    """The part of ZeRO's that moves its states."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def offload_states(
        self, include: Sequence[str] | None = None, pin_memory: bool = True, device: str = "cpu"
    ) -> None:
        self.events.append("DeepSpeed's leave")

    def reload_states(self, non_blocking: bool = False) -> None:
        self.events.append("DeepSpeed's return")


def guest(name: str, events: list[str]) -> SimpleNamespace:
    return SimpleNamespace(
        leave_device=lambda *, pin: events.append(f"{name} leave{' pinned' * pin}"),
        return_to_device=lambda: events.append(f"{name} return"),
    )


@pytest.mark.parametrize(
    ("include", "moved"),
    [
        (None, ["weights", "gradients"]),
        (["lp_params"], ["weights", "gradients"]),
        (["lp_grads"], ["gradients"]),
        (["optim_states", "lp_grads"], ["gradients"]),
        (["optim_states", "hp_params", "contiguous_grad_buffer"], []),
        ([], []),
    ],
    ids=str,
)
@pytest.mark.parametrize("pinned", [True, False])
def test_what_leaves_is_what_was_asked_for_and_all_of_it_returns(
    include: list[str] | None, moved: list[str], pinned: bool
) -> None:
    """Ahead of DeepSpeed, which gives memory back at its end, and back behind it."""
    events: list[str] = []
    optimizer = Optimizer(events)
    weights, gradients = guest("weights", events), guest("gradients", events)
    around = hooks.Hooks(None, optimizer)
    offload.follow_states(around, weights=[weights], gradients=[gradients])
    optimizer.offload_states(include, pin_memory=pinned)
    leave = " leave pinned" if pinned else " leave"
    assert events == [*(name + leave for name in moved), "DeepSpeed's leave"]
    events.clear()
    optimizer.reload_states()
    assert events == ["DeepSpeed's return", "weights return", "gradients return"]
