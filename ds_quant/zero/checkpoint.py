"""What a scheme remembers, inside DeepSpeed's checkpoint: small, versioned, by parameter name.

Weights that are kept between steps are not in it: saving and loading make them exact, so both runs
go on from the same bits (see replica.py and node.py). Nothing depends on world or node size.
"""

from __future__ import annotations

from typing import Any

from ds_quant.zero import seams
from ds_quant.zero.binding import Binding

KEY = "ds_quant"  # in DeepSpeed's client state
VERSION = 1


def dump(binding: Binding) -> dict[str, Any]:
    """The state as plain types and CPU tensors."""
    names = {tracked.index: tracked.name for tracked in binding.all_tracked()}
    levels = {names[index]: table.cpu() for index, table in binding.state.levels.items()}
    return {
        "version": VERSION,
        "scheme": binding.scheme.name,
        "ranks": (binding.topology.nodes, binding.topology.node_size),
        "levels": levels,
        "learned_at": binding.state.learned_at,
        "exact_until": binding.state.exact_until,
    }


def restore(binding: Binding, saved: Any) -> None:
    """Take over a state; says what does not fit this run.

    Raises:
        RuntimeError: the state is of another version or is none.
    """
    binding.state.exact_until = 0
    if binding.telemetry is not None:
        binding.telemetry.arm()  # DeepSpeed's count of steps has jumped
    if saved is None:
        seams.log_rank0(
            "quantized_comm: the checkpoint was saved without it; the scheme starts afresh"
        )
        return
    if not isinstance(saved, dict) or saved.get("version") != VERSION:
        found = saved.get("version") if isinstance(saved, dict) else type(saved).__name__
        raise RuntimeError(
            f"quantized_comm: the state in the checkpoint has version {found!r}, this ds_quant "
            f"reads {VERSION}; use the ds_quant that wrote it, or remove the key {KEY!r} from the "
            "checkpoint's model states to start the scheme afresh"
        )
    ranks = (binding.topology.nodes, binding.topology.node_size)
    if (saved["scheme"], tuple(saved["ranks"])) != (binding.scheme.name, ranks):
        seams.log_rank0(
            f"quantized_comm: resuming {saved['scheme']} of {saved['ranks'][0]} x "
            f"{saved['ranks'][1]} ranks as {binding.scheme.name} on {ranks[0]} x {ranks[1]}"
        )
    binding.state.exact_until = saved.get("exact_until", 0)  # not in states of before fallbacks
    _restore_levels(binding, saved)
    if binding.replica is not None and (binding.state.levels or binding.is_exact(binding.step)):
        with binding.replica.exact():  # DeepSpeed has gathered before it was known how
            pass


def _restore_levels(binding: Binding, saved: dict[str, Any]) -> None:
    codec = binding.scheme.weights
    binding.state.levels.clear()
    if codec is None or codec.levels != "learned":
        return
    binding.state.learned_at = saved["learned_at"]
    indices = {tracked.name: tracked.index for tracked in binding.all_tracked()}
    fitting = {
        name: table
        for name, table in saved["levels"].items()
        if name in indices and table.numel() == 1 << codec.bits
    }
    device = binding.engine.device
    binding.state.levels.update({indices[n]: table.to(device) for n, table in fitting.items()})
    if lost := len(saved["levels"]) - len(fitting):
        seams.log_rank0(
            f"quantized_comm: learned levels of {lost} parameter(s) in the checkpoint fit no "
            f"parameter with {codec.bits} bits here; those start uniform"
        )
