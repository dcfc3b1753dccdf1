"""Check after the first step that DeepSpeed still calls the functions that this plugin replaces.

If DeepSpeed stopped calling one, its messages would bypass the plugin without an error. Where the
calling function is known, ``hooks.ExpectedCall`` notices at once. This check covers the rest: a
role that DeepSpeed never requested ends the run, a role that received few bytes is logged.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_quant.runtime import log
from ds_quant.zero import hooks
from ds_quant.zero.front import EngineFront
from ds_quant.zero.version import deepspeed_version

# Share of the bytes of one exchange of all weights and one reduction of all gradients. A rank
# receives less if it owns more than others, or if a step leaves parameters unused.
_LEAST_SHARE = 0.5


def check_first_step(front: EngineFront, events: hooks.Hooks, promised: Sequence[str]) -> None:
    """Check once that the first step with gradients requests the roles ``promised``.

    Steps that DeepSpeed skips, and steps without gradients (every label masked), do not count. The
    step raises RuntimeError if DeepSpeed has not requested a promised role.
    """
    counts = "gradients" not in promised  # then every step that is not skipped counts
    least_bytes = _least_bytes(front, promised)

    def note_gradients() -> None:
        # The last buckets of a backward hold gradients if it made any.
        nonlocal counts
        counts |= hooks.has_gradients(events.optimizer)

    def check(skipped: bool) -> None:
        # Buckets that were full before have requested the role already.
        if skipped or not (counts or "gradients" in front.requested_roles):
            return
        events.after_step.remove(check)
        if note_gradients in events.before_last_buckets:
            events.before_last_buckets.remove(note_gradients)
        for role in promised:
            if role not in front.requested_roles:
                raise hooks.moved(f"{hooks.CARRIERS[role]} in the first step")
        for role, least in least_bytes.items():
            received = sum(front.run.traffic.received[role].values())
            if received < least:
                log.log_rank0(
                    f"quantized_comm: the first step has brought {received} bytes of {role} to "
                    f"rank 0, and {least / _LEAST_SHARE:.0f} or more were expected: unless many "
                    f"parameters were unused in it, {deepspeed_version()} sends {role} past this "
                    "plugin, and the start-up line is wrong"
                )

    if not counts:
        events.before_last_buckets.append(note_gradients)
    events.after_step.append(check)


def _least_bytes(front: EngineFront, promised: Sequence[str]) -> dict[str, float]:
    """Return the bytes that this rank receives at least in a first step, by role.

    Empty where no formula predicts them.
    """
    if front.has_few_ranks:  # the formula counts bytes that other ranks send
        return {}
    # As for ZeRO-1: one exchange and one reduction, the least that a step of any stage needs.
    received = front.run.comm_volume().received(1, micro_steps=1)
    if front.run.scheme.lossless:  # depends on how much the weights have changed
        received.pop("weights")
    return {
        role: _LEAST_SHARE * sum(links.values())
        for role, links in received.items()
        if role in promised
    }


def promised_roles(front: EngineFront) -> list[str]:
    """Return the roles that DeepSpeed must request in a step."""
    shared = [p for p, group in front.served_params if front.run.communicator(group).size > 1]
    roles = []
    if any(not getattr(p, "ds_persist", False) for p in shared):
        roles.append("weights")
    if front.stock_gradients_reason is None and any(p.requires_grad for p in shared):
        roles.append("gradients")
    return roles
