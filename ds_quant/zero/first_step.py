"""After the first complete step: has DeepSpeed handed over what the start-up line promises?

A function that DeepSpeed does not call any more fails without a word: what it carried travels past
the plugin. Where its caller is known, ``wrapping.Seam`` notices it at once. What is left is noticed
here, when the first step has changed the weights: a role that was never asked for ends the run, one
that has brought few bytes is logged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ds_quant.zero import seams
from ds_quant.zero.binding import Binding
from ds_quant.zero.wrapping import deepspeed_version

# Of the bytes of one exchange of all weights and one reduction of all gradients. What a rank
# receives varies with what it owns and with parameters that a step leaves unused.
_LEAST_SHARE = 0.5


class FirstStep:
    """Judges one engine once."""

    def __init__(self, binding: Binding, promised: Iterable[str]) -> None:
        """``promised``: roles that must be asked for."""
        self._binding, self._promised = binding, tuple(promised)
        self._done = False
        # As for ZeRO-1: one exchange and one reduction, the least that a step of any stage needs.
        received = binding.bill().received(
            1, micro_steps=1,
            nodes=binding.topology.nodes, node_size=binding.topology.node_size,
        )  # fmt: skip
        self._least = {role: _LEAST_SHARE * sum(received[role].values()) for role in self._promised}
        if binding.has_few_ranks:  # then other ranks send what the formula counts
            self._least.clear()

    def after_step(self, skipped: bool) -> None:
        """The optimizer has stepped, or DeepSpeed has ``skipped`` the update.

        Raises:
            RuntimeError: DeepSpeed has not asked for a role that was promised.
        """
        if self._done or skipped:
            return
        self._done = True
        for role in self._promised:
            if role not in self._binding.asked:
                raise seams.unasked(role)
        for role, least in self._least.items():
            brought = sum(self._binding.traffic.received[role].values())
            if brought < least:
                self._warn(role, brought, least / _LEAST_SHARE)

    def _warn(self, role: str, brought: int, expected: float) -> None:
        seams.log_rank0(
            f"quantized_comm: the first step has brought {brought} bytes of {role} to rank 0, and "
            f"{expected:.0f} or more were expected: unless many parameters were unused in it, "
            f"{deepspeed_version()} sends {role} past this plugin, and the start-up line is wrong"
        )


def promised_roles(
    binding: Binding, parameters: Iterable[tuple[Any, Any]], *, gradients: bool
) -> list[str]:
    """The roles that a step must ask for, given (parameter, its process group)."""
    shared = [p for p, group in parameters if binding.tracked(p) and binding.link(group).size > 1]
    roles = []
    if any(not getattr(p, "ds_persist", False) for p in shared):
        roles.append("weights")
    if gradients and any(p.requires_grad for p in shared):
        roles.append("gradients")
    return roles
