"""Save and restore the scheme's state with DeepSpeed's checkpoints; exact weights in state dicts.

Weights that are kept between steps are not in a checkpoint: saving and loading make them exact, so
both runs go on from the same bits (see stage12.py and node_shard.py). Nothing depends on world or
node size.

[Note: state dicts] Under ZeRO-1 and 2 ``module.state_dict()`` reads the replica, which holds
decoded weights, and logs that once. ``Accelerator.get_state_dict``, from which Trainer.save_model
and the usual save_pretrained recipe take what they write, calls it too: it is wrapped once, when an
engine attaches, to return exact weights. Accelerate is loaded by then if it built the engine.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ds_quant.codec.codec import GroupCodec
from ds_quant.zero import hooks, log, safety
from ds_quant.zero.engine import QuantizedEngine

KEY = "ds_quant"  # in DeepSpeed's client state
VERSION = 1
_ENTRIES = {
    "scheme": str,
    "ranks": (tuple, list),
    "levels": dict,
    "learned_at": int,
    "exact_until": int,
}


def dump(binding: QuantizedEngine) -> dict[str, Any]:
    """Return the state as plain types and CPU tensors."""
    learned = [param for param in binding.all_params() if param.levels is not None]
    return {
        "version": VERSION,
        "scheme": binding.scheme.name,
        "ranks": (binding.topology.nodes, binding.topology.node_size),
        "levels": {param.name: param.levels.cpu() for param in learned},
        "learned_at": binding.state.learned_at,
        "exact_until": binding.state.exact_until,
    }


def restore(binding: QuantizedEngine, saved: Any) -> None:
    """Restore a state, and log what does not fit this run.

    A checkpoint without one is welcome: it cannot be told from that of a run without the plugin.

    Raises:
        RuntimeError: the state is of another version, is none, or is incomplete.
    """
    binding.state.exact_until = 0
    if binding.telemetry is not None:
        binding.telemetry.arm()  # DeepSpeed's count of steps has jumped
    if saved is None:
        log.log_rank0(
            f"quantized_comm: the checkpoint holds no state {KEY!r}, as one that was saved without "
            "this plugin; starting with fresh scheme state"
        )
    else:
        _require_usable(saved)
        _take_over(binding, saved)
    if binding.node is not None:
        binding.node.resync()
    if binding.replica is not None and _gathered_otherwise(binding):
        with binding.replica.exact():
            pass


def _gathered_otherwise(binding: QuantizedEngine) -> bool:
    """Whether DeepSpeed has gathered the replica before it was known how, or, as it does for
    universal checkpoints, by a way of its own.
    """
    has_levels = any(param.levels is not None for param in binding.all_params())
    known_late = has_levels or binding.is_exact(binding.step)
    return known_late or binding.engine.load_universal_checkpoint()


def _require_usable(saved: Any) -> None:
    if not isinstance(saved, dict) or saved.get("version") != VERSION:
        found = saved.get("version") if isinstance(saved, dict) else type(saved).__name__
        raise RuntimeError(
            f"quantized_comm: the state in the checkpoint has version {found!r}, this ds_quant "
            f"reads {VERSION}; use the ds_quant that wrote it, or remove the key {KEY!r} from the "
            "checkpoint's model states to start with fresh scheme state"
        )
    given = {"exact_until": 0, **saved}  # missing in states saved before fallbacks existed
    wrong = [name for name, kind in _ENTRIES.items() if not isinstance(given.get(name), kind)]
    if not wrong:
        wrong += ["ranks"] if len(saved["ranks"]) != 2 else []
        wrong += [f"levels[{n!r}]" for n, table in saved["levels"].items() if not _is_table(table)]
    if wrong:
        raise RuntimeError(
            f"quantized_comm: the state in the checkpoint has no usable {', '.join(wrong)}: it is "
            "incomplete or damaged; load another checkpoint, or remove the key "
            f"{KEY!r} from this one's model states to start with fresh scheme state"
        )


def _is_table(table: Any) -> bool:
    """Whether it can be learned levels: finite and increasing, of 2 to 8 bits."""
    return (
        isinstance(table, torch.Tensor)
        and table.dtype == torch.float32
        and table.shape in [(1 << bits,) for bits in range(2, 9)]
        and bool(table.isfinite().all())
        and bool((table.diff() >= 0).all())
    )


def _take_over(binding: QuantizedEngine, saved: dict[str, Any]) -> None:
    ranks = (binding.topology.nodes, binding.topology.node_size)
    if (saved["scheme"], tuple(saved["ranks"])) != (binding.scheme.name, ranks):
        log.log_rank0(
            f"quantized_comm: resuming {saved['scheme']} of {saved['ranks'][0]} x "
            f"{saved['ranks'][1]} ranks as {binding.scheme.name} on {ranks[0]} x {ranks[1]}"
            + ("; weights kept between steps start exact" if _keeps_weights(binding) else "")
        )
    binding.state.exact_until = saved.get("exact_until", 0)
    _restore_levels(binding, saved)


def _keeps_weights(binding: QuantizedEngine) -> bool:
    return binding.node is not None or (
        binding.replica is not None and binding.scheme.keeps_reference
    )


def _restore_levels(binding: QuantizedEngine, saved: dict[str, Any]) -> None:
    codec, tables, fitting = binding.scheme.weights, saved["levels"], 0
    learned = isinstance(codec, GroupCodec) and codec.levels == "learned"
    for param in binding.all_params():
        param.levels, table = None, tables.get(param.name)
        if learned and table is not None and table.numel() == 1 << codec.bits:
            param.levels, fitting = table.to(binding.engine.device), fitting + 1
    if not learned:
        return
    binding.state.learned_at = saved["learned_at"]
    if lost := len(tables) - fitting:
        log.log_rank0(
            f"quantized_comm: learned levels of {lost} parameter(s) in the checkpoint fit no "
            f"parameter with {codec.bits} bits here; those start uniform"
        )


# ---- state dicts of ZeRO-1 and 2 ----


_PATIENCE = 60.0  # seconds before rank 0 warns which ranks are missing
_TIMEOUT = 1800.0  # seconds; torch's own limit for a collective


def wrap_state_dict() -> None:
    """Make ``Accelerator.get_state_dict`` see exact weights of engines that quantize. Idempotent.

    It becomes a collective under ZeRO-1 and 2, as it is under ZeRO-3.
    """
    accelerator = getattr(sys.modules.get("accelerate"), "Accelerator", None)
    if accelerator is not None:
        hooks.wrap_once(accelerator, "get_state_dict", _exactly)


def _exactly(original: Callable[..., Any], self: Any, model: Any, *args: Any, **kw: Any) -> Any:
    replica = _replica_of(model, getattr(self, "_models", ()))
    if replica is None:
        return original(self, model, *args, **kw)
    rank, world = hooks.rank_and_world()
    safety.wait_for_ranks(
        "Accelerator.get_state_dict", rank=rank, world=world,
        patience=_PATIENCE, timeout=_TIMEOUT,
    )  # fmt: skip
    with replica.exact():
        return original(self, model, *args, **kw)


def _replica_of(model: Any, engines: Any) -> Any:
    """Find the decoded replica behind an engine or its module, None if there is none."""
    for engine in (model, *engines):
        if engine is model or getattr(engine, "module", None) is model:
            binding = getattr(engine, "ds_quant_engine", None)
            if binding is not None:
                return binding.replica
    return None


def watch_state_dict(binding: QuantizedEngine) -> None:
    """Log the first call of ``module.state_dict()`` that gives decoded weights."""
    if binding.scheme.weights is None:
        return
    hook = binding.engine.module.register_state_dict_pre_hook(_Hook(binding))
    binding.hooks.on_destroy.append(hook.remove)


class _Hook:
    """Does not keep the engine alive; inert in a copy of the module and in a pickled one."""

    def __init__(self, binding: QuantizedEngine | None = None) -> None:
        self._find = (lambda: None) if binding is None else weakref.ref(binding)

    def __reduce__(self) -> Any:
        return _Hook, ()

    def __call__(self, *_: Any) -> None:
        binding = self._find()
        if binding is None or binding.replica.is_exact():
            return
        self._find = lambda: None
        log.log_rank0(
            f"quantized_comm: module.state_dict() under ZeRO-{binding.stage} gives decoded "
            "weights, which are not those of a checkpoint: call it inside `with "
            "ds_quant.exact_weights(engine):`, entered by all ranks, or use "
            "engine.save_16bit_model (logged once)"
        )
