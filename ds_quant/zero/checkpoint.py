"""Save and restore the scheme's state with DeepSpeed's checkpoints; exact weights in state dicts.

Weights that are kept between steps are not in a checkpoint: saving and loading make them exact, so
both runs go on from the same bits (see replica.py and node_shard.py). Nothing depends on world or
node size.

[Note: who reads weights] Under ZeRO-1 and 2 a module's parameters hold decoded weights between
steps. ``Accelerator.get_state_dict``, from which Trainer.save_model and the usual save_pretrained
recipe take what they write, returns exact ones, and the end of ``Trainer.train`` leaves exact ones
behind, as scripts save from ``named_parameters()`` then. Both are collectives. Other state dicts,
such as that of ``save_pretrained`` on rank 0 alone, must not wait for other ranks: they are logged.
Both are wrapped once, when an engine attaches: their libraries are loaded by then if they built it.
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
from ds_quant.zero import hooks, log, safety
from ds_quant.zero.handshake import Board
from ds_quant.zero.plugin import Plugin

KEY = "ds_quant"  # in DeepSpeed's client state
VERSION = 1
_ENTRIES = {
    "scheme": str,
    "ranks": (tuple, list),
    "levels": dict,
    "learned_at": int,
    "exact_until": int,
}


def dump(plugin: Plugin) -> dict[str, Any]:
    """Return the state as plain types and CPU tensors."""
    learned = [param for param in plugin.all_params() if param.levels is not None]
    return {
        "version": VERSION,
        "scheme": plugin.scheme.name,
        "ranks": (plugin.topology.nodes, plugin.topology.node_size),
        "levels": {param.name: param.levels.cpu() for param in learned},
        "learned_at": plugin.state.learned_at,
        "exact_until": plugin.state.exact_until,
    }


def restore(plugin: Plugin, saved: Any) -> None:
    """Restore a state, and log what does not fit this run.

    A checkpoint without our state is accepted: it may come from a run without the plugin.

    Raises:
        RuntimeError: the state is of another version, is none, or is incomplete.
    """
    if plugin.telemetry is not None:
        plugin.telemetry.arm()  # DeepSpeed's count of steps has jumped
    if saved is None:
        log.log_rank0(
            f"quantized_comm: the checkpoint holds no state {KEY!r}, as one that was saved without "
            "this plugin; starting with fresh scheme state"
        )
        saved = dump(plugin) | {"levels": {}, "learned_at": 0, "exact_until": 0}
    _require_usable(saved)
    ranks = (plugin.topology.nodes, plugin.topology.node_size)
    scheme = RENAMED.get(saved["scheme"], saved["scheme"])
    if (scheme, tuple(saved["ranks"])) != (plugin.scheme.name, ranks):
        log.log_rank0(
            f"quantized_comm: resuming {scheme} of {saved['ranks'][0]} x "
            f"{saved['ranks'][1]} ranks as {plugin.scheme.name} on {ranks[0]} x {ranks[1]}"
            + ("; weights kept between steps start exact" if plugin.weight_cache else "")
        )
    plugin.state.exact_until = saved.get("exact_until", 0)
    _restore_levels(plugin, saved)
    if plugin.node is not None:
        plugin.node.resync()
    if plugin.replica is not None:
        plugin.replica.after_load()


def _require_usable(saved: Any) -> None:
    found = saved.get("version") if isinstance(saved, dict) else type(saved).__name__
    if found != VERSION:
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


def _restore_levels(plugin: Plugin, saved: dict[str, Any]) -> None:
    codec, tables, fitting = plugin.scheme.weights, saved["levels"], 0
    learned = isinstance(codec, GroupCodec) and codec.levels == "learned"
    for param in plugin.all_params():
        param.levels, table = None, tables.get(param.name)
        if learned and table is not None and table.numel() == 1 << codec.bits:
            param.levels, fitting = table.to(plugin.engine.device), fitting + 1
    if not learned:
        return
    plugin.state.learned_at = saved["learned_at"]
    if lost := len(tables) - fitting:
        log.log_rank0(
            f"quantized_comm: learned levels of {lost} parameter(s) in the checkpoint fit no "
            f"parameter with {codec.bits} bits here; those start uniform"
        )


# ---- who reads weights under ZeRO-1 and 2 ----


_PATIENCE = 60.0  # seconds before rank 0 warns which ranks are missing
_TIMEOUT = 1800.0  # seconds; torch's own limit for a collective

# In the order in which they attached, which is the same on all ranks.
_plugins: WeakKeyDictionary[Plugin, None] = WeakKeyDictionary()
_told: set[str] = set()  # places, as `_calling_place` returns them

# Their frames lie between the code that saves and the state dict. A program that is installed, such
# as OpenRLHF, is not among them.
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


def watch_reads(plugin: Plugin) -> None:
    """Serve or log what reads the weights of an engine: see [Note: who reads weights]."""
    if plugin.scheme.weights is None:  # nothing is decoded
        return
    cleanup = plugin.hooks.on_destroy
    _plugins[plugin] = None
    cleanup.append(partial(_plugins.pop, plugin, None))
    for module in plugin.engine.module.modules():
        if any(_is_coded(plugin, p) for p in module.parameters(recurse=False)):
            cleanup.append(module.register_state_dict_pre_hook(_tell).remove)
    accelerator = getattr(sys.modules.get("accelerate"), "Accelerator", None)
    if accelerator is not None:
        hooks.wrap_once(accelerator, "get_state_dict", _exactly)
    events = getattr(sys.modules.get("transformers.trainer_callback"), "CallbackHandler", None)
    if events is not None:
        hooks.wrap_once(events, "on_train_end", _train_end)


def _is_coded(plugin: Plugin, parameter: torch.Tensor) -> bool:
    param = plugin.param_of(parameter)
    return param is not None and param.trained and param.is_quantized(parameter.dtype)


def _decoded(model: Any) -> list[Plugin]:
    """Return the engines whose decoded weights are among the parameters of any module: part of
    theirs, theirs, or one around it.
    """
    params = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    shown = [p for p in _plugins if not p.replica.holds_exact]
    return [one for one in shown if any(_is_coded(one, p) for p in params)]


def _meet(what: str, model: Any) -> list[Any]:
    """Return the decoded replicas behind a module, once all ranks are there to make them exact."""
    replicas = [plugin.replica for plugin in _decoded(model)]
    if replicas:
        rank, world = hooks.rank_and_world()
        safety.wait_for_ranks(what, rank=rank, world=world, patience=_PATIENCE, timeout=_TIMEOUT)
    return replicas


def _exactly(original: Callable[..., Any], self: Any, model: Any, *args: Any, **kw: Any) -> Any:
    replicas = _meet("Accelerator.get_state_dict", model)
    with hooks.opened(replica.exact for replica in replicas):
        return original(self, model, *args, **kw)


def _train_end(original: Callable[..., Any], self: Any, *args: Any, **kw: Any) -> Any:
    for replica in _meet("Trainer's on_train_end", self.model):
        replica.show_exact()
    return original(self, *args, **kw)


def _tell(module: torch.nn.Module, *_: Any) -> None:
    """Log a state dict with decoded weights, once per place that takes one."""
    for plugin in _decoded(module):
        place = _calling_place()
        if place in _told:
            continue
        _told.add(place)
        if _speaks(place):
            log.log_here(
                f"quantized_comm: {place}: state_dict() on rank {plugin.engine.global_rank} under "
                f"ZeRO-{plugin.stage} gives decoded weights, which are not those of a checkpoint: "
                "call it inside `with ds_quant.exact_weights(engine):`, entered by all ranks, save "
                "with engine.save_16bit_model or Accelerator.get_state_dict, or take a scheme with "
                "exact weights: lossless, lossless_w_g4 or lossless_w_g3 (logged once per place)"
            )


def _speaks(place: str) -> bool:
    """Return True on rank 0, and on the first of the other ranks that comes to ``place``.

    Nobody waits: the state dict may be taken on one rank alone.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        return True
    try:
        return Board("decoded_state_dict").count(place) == 1
    except RuntimeError:  # the store is gone with rank 0
        return True


def _calling_place() -> str:
    """Return file and line of the innermost frame that belongs to no library of `_LIBRARIES`."""
    place = ""
    for frame, number in traceback.walk_stack(sys._getframe()):
        place = f"{frame.f_code.co_filename}:{number}"
        library = frame.f_globals.get("__name__", "").partition(".")[0]
        if library not in _LIBRARIES:
            break
    return place
