"""Save and restore the scheme's state with DeepSpeed's checkpoints; exact weights in state dicts.

Cached weights are not in a checkpoint: saving and loading make them exact, so the run that saves
and the run that loads go on from the same bits (see replica.py and node_shard.py). The state does
not depend on world or node size.

[Note: who reads weights] Under ZeRO-1 and 2 a module's parameters hold decoded weights between
steps. ``Accelerator.get_state_dict``, which Trainer.save_model and the usual save_pretrained recipe
call, returns exact weights. The end of ``Trainer.train`` leaves exact weights in the module,
because scripts then save from ``named_parameters()``. Both are collectives. Other state dicts, such
as that of ``save_pretrained`` on rank 0 alone, must not wait for other ranks: they are logged. Both
methods are wrapped once, when an engine attaches: if their libraries built the engine, they are
imported by then.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ds_quant.codec.codec import GroupCodec
from ds_quant.config.presets import RENAMED
from ds_quant.runtime import log
from ds_quant.runtime.handshake import plugin_store, wait_for_ranks
from ds_quant.runtime.run import Run
from ds_quant.zero import hooks
from ds_quant.zero.engine import AttachedEngine
from ds_quant.zero.replica import Replica

KEY = "ds_quant"  # in DeepSpeed's client state
VERSION = 1
_ENTRIES: dict[str, type | tuple[type, ...]] = {
    "scheme": str,
    "ranks": (tuple, list),
    "levels": dict,
    "learned_at": int,
    "exact_until": int,
}


def dump(run: Run) -> dict[str, Any]:
    """Return the state as plain types and CPU tensors."""
    levels = {param.name: param.levels.cpu() for param in run.params if param.levels is not None}
    return {
        "version": VERSION,
        "scheme": run.scheme.name,
        "ranks": (run.topology.nodes, run.topology.node_size),
        "levels": levels,
        "learned_at": run.state.learned_at,
        "exact_until": run.state.exact_until,
    }


def restore(attached: AttachedEngine, saved: Any) -> None:
    """Restore a state, and log the parts that do not fit this run.

    A checkpoint without the state is accepted: it may come from a run without the plugin.

    Raises:
        RuntimeError: the state has another version, is incomplete, or is something else.
    """
    run = attached.run
    if saved is None:
        log.log_rank0(
            f"quantized_comm: the checkpoint holds no state {KEY!r}, as one that was saved without "
            "this plugin; starting with fresh scheme state"
        )
        saved = dump(run) | {"levels": {}, "learned_at": 0, "exact_until": 0}
    _require_usable(saved)
    ranks = (run.topology.nodes, run.topology.node_size)
    scheme = RENAMED.get(saved["scheme"], saved["scheme"])
    if (scheme, tuple(saved["ranks"])) != (run.scheme.name, ranks):
        nodes, node_size = saved["ranks"]
        cached = ""
        if attached.weight_cache is not None:
            cached = "; weights kept between steps start exact"
        log.log_rank0(
            f"quantized_comm: resuming {scheme} of {nodes} x {node_size} ranks as "
            f"{run.scheme.name} on {ranks[0]} x {ranks[1]}{cached}"
        )
    run.state.exact_until = saved.get("exact_until", 0)
    _restore_levels(run, attached.front.engine.device, saved)
    if attached.node_shard is not None:
        attached.node_shard.resync()
    if attached.replica is not None:
        attached.replica.after_load()


def _require_usable(saved: Any) -> None:
    version = saved.get("version") if isinstance(saved, dict) else type(saved).__name__
    if version != VERSION:
        raise RuntimeError(
            f"quantized_comm: the state in the checkpoint has version {version!r}, this ds_quant "
            f"reads {VERSION}; use the ds_quant that wrote it, or remove the key {KEY!r} from the "
            "checkpoint's model states to start with fresh scheme state"
        )
    entries = {"exact_until": 0, **saved}  # missing in states saved before fallbacks existed
    wrong = [name for name, kind in _ENTRIES.items() if not isinstance(entries.get(name), kind)]
    if not wrong:
        if len(saved["ranks"]) != 2:
            wrong.append("ranks")
        for name, table in saved["levels"].items():
            if not _is_table(table):
                wrong.append(f"levels[{name!r}]")
    if wrong:
        raise RuntimeError(
            f"quantized_comm: the state in the checkpoint has no usable {', '.join(wrong)}: it is "
            "incomplete or damaged; load another checkpoint, or remove the key "
            f"{KEY!r} from this one's model states to start with fresh scheme state"
        )


def _is_table(table: Any) -> bool:
    """Return True for learned levels: 4 to 256 finite fp32 values that do not decrease."""
    return (
        isinstance(table, torch.Tensor)
        and table.dtype == torch.float32
        and table.shape in [(1 << bits,) for bits in range(2, 9)]
        and bool(table.isfinite().all())
        and bool((table.diff() >= 0).all())
    )


def _restore_levels(run: Run, device: torch.device, saved: dict[str, Any]) -> None:
    codec, tables = run.scheme.weights, saved["levels"]
    for param in run.params:
        param.levels = None
    if not isinstance(codec, GroupCodec) or codec.levels != "learned":
        return
    fitting = 0
    for param in run.params:
        table = tables.get(param.name)
        if table is not None and table.numel() == 1 << codec.bits:
            param.levels = table.to(device)
            fitting += 1
    run.state.learned_at = saved["learned_at"]
    lost = len(tables) - fitting
    if lost:
        log.log_rank0(
            f"quantized_comm: learned levels of {lost} parameter(s) in the checkpoint fit no "
            f"parameter with {codec.bits} bits here; those start uniform"
        )


# ---- who reads weights under ZeRO-1 and 2 ----


_PATIENCE = 60.0  # seconds before rank 0 names the missing ranks
_TIMEOUT = 1800.0  # seconds; torch's own limit for a collective

# A set in the order of attaching, which is the same on all ranks.
_replicas: WeakKeyDictionary[Replica, None] = WeakKeyDictionary()
_logged_lines: set[str] = set()  # of ``_calling_line``

# Libraries whose frames lie between the code that saves and the state dict. An installed program,
# such as OpenRLHF, is the code that saves.
_LIBRARIES = frozenset(
    {
        "ds_quant",
        "torch",
        "transformers",
        "accelerate",
        "peft",
        "deepspeed",
        *sys.stdlib_module_names,
    }
)


def watch_reads(replica: Replica, events: hooks.Hooks) -> None:
    """Give Accelerate and the end of ``Trainer.train`` exact weights, and log other state dicts:
    see [Note: who reads weights].
    """
    if replica.front.run.scheme.weights is None:  # nothing is decoded
        return
    on_destroy = events.on_destroy
    _replicas[replica] = None
    on_destroy.append(partial(_replicas.pop, replica, None))
    for module in events.engine.module.modules():
        if any(_is_quantized(replica, p) for p in module.parameters(recurse=False)):
            on_destroy.append(module.register_state_dict_pre_hook(_log_state_dict).remove)
    # Not imported here: a library that has built the engine is imported by now.
    accelerator = getattr(sys.modules.get("accelerate"), "Accelerator", None)
    if accelerator is not None:
        hooks.wrap_once(accelerator, "get_state_dict", _get_exact_state_dict)
    callbacks = getattr(sys.modules.get("transformers.trainer_callback"), "CallbackHandler", None)
    if callbacks is not None:
        hooks.wrap_once(callbacks, "on_train_end", _end_train_exact)


def _is_quantized(replica: Replica, parameter: torch.Tensor) -> bool:
    param = replica.front.run.param_of(parameter)
    return param is not None and param.trained and param.is_quantized(parameter.dtype)


def _decoded_replicas(model: Any) -> list[Replica]:
    """Return the replicas whose decoded weights are among the parameters of a module.

    It may be the engine's module, a part of it, or a module around it.
    """
    if not isinstance(model, torch.nn.Module):
        return []
    params = list(model.parameters())
    return [
        replica
        for replica in _replicas
        if not replica.holds_exact and any(_is_quantized(replica, p) for p in params)
    ]


def _awaited_replicas(caller: str, model: Any) -> list[Replica]:
    """Return the decoded replicas behind a module; wait until all ranks can make them exact."""
    replicas = _decoded_replicas(model)
    if replicas:
        rank, world = hooks.rank_and_world()
        wait_for_ranks(caller, rank=rank, world=world, patience=_PATIENCE, timeout=_TIMEOUT)
    return replicas


def _get_exact_state_dict(
    original: Callable[..., object], self: object, model: object, *args: object, **kwargs: object
) -> object:
    replicas = _awaited_replicas("Accelerator.get_state_dict", model)
    with hooks.opened(replica.exact for replica in replicas):
        return original(self, model, *args, **kwargs)


def _end_train_exact(
    original: Callable[..., object], self: Any, *args: object, **kwargs: object
) -> object:
    for replica in _awaited_replicas("Trainer's on_train_end", self.model):
        replica.show_exact()
    return original(self, *args, **kwargs)


def _log_state_dict(module: torch.nn.Module, *_: object) -> None:
    """Log a state dict with decoded weights, once per line of code that takes one."""
    for replica in _decoded_replicas(module):
        line = _calling_line()
        if line in _logged_lines:
            continue
        _logged_lines.add(line)
        if _is_first_logger(line):
            front = replica.front
            log.log_here(
                f"quantized_comm: {line}: state_dict() on rank {front.engine.global_rank} under "
                f"ZeRO-{front.stage} gives decoded weights, which are not those of a checkpoint: "
                "call it inside `with ds_quant.exact_weights(engine):`, entered by all ranks, save "
                "with engine.save_16bit_model or Accelerator.get_state_dict, or take a scheme with "
                "exact weights: lossless, lossless_w_g4 or lossless_w_g3 (logged once per place)"
            )


def _is_first_logger(line: str) -> bool:
    """Return True on rank 0, and on the first of the other ranks that reaches ``line``.

    No rank waits: one rank alone may take the state dict.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        return True
    try:
        return plugin_store("decoded_state_dict").add(line, 1) == 1
    except RuntimeError:  # the store is gone with rank 0
        return True


def _calling_line() -> str:
    """Return "file:line" of the innermost frame that belongs to no library of `_LIBRARIES`."""
    line = ""
    for frame, number in traceback.walk_stack(sys._getframe()):
        line = f"{frame.f_code.co_filename}:{number}"
        library = frame.f_globals.get("__name__", "").partition(".")[0]
        if library not in _LIBRARIES:
            break
    return line
