"""``ds_quant migrate``: turn DeepSpeed's own communication savers into a ``quantized_comm`` block.

Translates ZeRO++ (hpZ, qwZ, qgZ), LoCo, MiCS, 1-bit Adam, 1-bit LAMB and 0/1 Adam, and explains
every change. All other keys stay, in their order. Loads neither torch nor deepspeed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_quant.config.errors import ConfigError, path_of, show
from ds_quant.config.schema import KEY, parse
from ds_quant.policy import refusals
from ds_quant.policy.refusals import ONE_BIT, section
from ds_quant.tools.files import about, load, not_plain_json

_ZERO = "zero_optimization"
_HPZ = "zero_hpz_partition_size"
_WEIGHTS = "zero_quantized_weights"
_FROZEN = "zero_quantized_nontrainable_weights"
_GRADIENTS = "zero_quantized_gradients"
_LOCO = "zeropp_loco_param"
_MICS = "mics_shard_size"
_MICS_GATHER = "mics_hierarchical_params_gather"
_KNOWN = (_HPZ, _WEIGHTS, _FROZEN, _GRADIENTS, _LOCO, _MICS, _MICS_GATHER)
# Beginnings of keys that may be one of these in another version of DeepSpeed.
_FAMILIES = ("zero_quantized", "zero_hpz", "zeropp", "mics")
# Parameters of the 1-bit optimizers that DeepSpeed's Adam and LAMB have, too.
_OPTIMIZER_KEYS = "lr betas eps weight_decay bias_correction max_coeff min_coeff".split()
# Parameters that they do not have.
_COMPRESSION_KEYS = (
    "freeze_step", "cuda_aware", "comm_backend_name", "coeff_beta", "factor_max", "factor_min",
    "factor_threshold", "var_freeze_step", "var_update_scaler", "local_step_scaler",
    "local_step_clipper", "max_grad_norm", "amsgrad", "eps_inside_sqrt",
)  # fmt: skip


@dataclass(kw_only=True)
class Migration:
    """A config being translated, and its changes.

    block: the keys of quantized_comm, empty if none is needed.
    changes: one sentence per change.
    remarks: one sentence per setting that stays and may need an edit.
    """

    config: dict[str, Any]
    block: dict[str, Any] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def remove(self, *path: str, why: str) -> None:
        """Remove a key, and note the reason."""
        *parents, key = path
        section = self.config
        for parent in parents:
            section = section[parent]
        value = section.pop(key)
        self.changes.append(f"{'.'.join(path)}={show(value)}: {why}")

    def set(self, *path: str, value: object, why: str) -> None:
        """Set a key, and note the reason."""
        *parents, key = path
        section = self.config
        for parent in parents:
            if not isinstance(section.get(parent), dict):
                section[parent] = {}
            section = section[parent]
        section[key] = value
        self.changes.append(f"{'.'.join(path)}={show(value)} (new): {why}")


def main(arguments: argparse.Namespace) -> int:
    """Write the new file and explain it; return 1 if start-up would still refuse it."""
    source: Path = arguments.path
    with about(source):
        migration = translate(load(source))
        if not migration.changes:
            refused = _refused(source)
            print("\n".join([f"{source}: nothing to translate", *migration.remarks, *refused]))
            return 1 if refused else 0
        if not_plain_json(source):
            migration.remarks.append(
                "comments of the old file are not in the new one, which is plain JSON"
            )
    target: Path = arguments.out or source.with_name(f"{source.stem}.ds_quant{source.suffix}")
    with about(target):
        if target.exists() and arguments.out is None:
            raise ConfigError("exists: give -o FILE, which may overwrite")
        target.write_text(as_text(migration.config), "utf-8")
    refused = _refused(target)
    print("\n".join([*migration.changes, *migration.remarks, *refused, f"written: {target}"]))
    return 1 if refused else 0


def translate(config: dict[str, Any]) -> Migration:
    """Translate a DeepSpeed config in place."""
    migration = Migration(config=config)
    zero = config.get(_ZERO)
    if isinstance(zero, dict):
        _zeropp(zero, refusals.stage_of(config), migration)
        _mics(zero, migration)
        for key, value in zero.items():
            if key.startswith(_FAMILIES) and key not in _KNOWN:
                migration.remarks.append(
                    f"{_ZERO}.{key}={show(value)}: not known here, left as it is"
                )
    _one_bit(config, migration)
    _dtype(config, migration)
    if "sparse_gradients" in config:
        why = "DeepSpeed from 0.19.7 on refuses it; gradients of embeddings are reduced dense"
        migration.remove("sparse_gradients", why=why)
    if migration.block and KEY in config:
        migration.remarks.append(
            f"{KEY}: is there already and stays; the translation would be {show(migration.block)}"
        )
    elif migration.block:
        config[KEY] = migration.block
        migration.changes.append(f"{KEY}={json.dumps(migration.block)} (new)")
    return migration


_LOCO_REASON = (
    "error feedback is not offered, and DeepSpeed 0.19.8 removed it; schemes sdp4bit and eden4 "
    "round gradients unbiased and need none"
)


def _zeropp(zero: dict[str, Any], stage: object, migration: Migration) -> None:
    """Translate hpZ, qwZ, qgZ, quantized frozen weights and LoCo; node size also from MiCS."""
    secondary_shards = refusals.number(zero.get(_HPZ))
    mics_shards = refusals.number(zero.get(_MICS))
    has_weights = refusals.is_on(zero.get(_WEIGHTS))
    has_frozen = refusals.is_on(zero.get(_FROZEN))
    has_gradients = refusals.is_on(zero.get(_GRADIENTS))
    # MiCS shards the weights over its own ranks, also beside hpZ.
    node_size = mics_shards if mics_shards > 1 else secondary_shards
    has_node_shard = node_size > 1
    if has_node_shard or has_weights or has_frozen or has_gradients:
        migration.block |= _zeropp_block(has_node_shard, has_weights, has_frozen, has_gradients)
    if has_node_shard:
        migration.block["node_size"] = int(node_size)
    reasons = {_LOCO: _LOCO_REASON}
    if secondary_shards > 1:
        node_size_key = path_of(("node_size",))
        reasons[_HPZ] = f"{node_size_key}: weights stay in nodes of that many ranks"
        if mics_shards > 1 and mics_shards != secondary_shards:
            reasons[_HPZ] = f"{_MICS}={show(zero[_MICS])} sets {node_size_key}"
    if has_weights:
        reasons[_WEIGHTS] = "8-bit weights"
    if has_frozen:
        reasons[_FROZEN] = "frozen weights are sent in 8 bits, and kept in 16"
    if has_gradients:
        reasons[_GRADIENTS] = (
            "4-bit gradients on both hops; scheme sdp4bit sends fewer bytes and loses less"
        )
    ignored = ""
    if stage != 3:
        ignored = f"; DeepSpeed ignores it under stage {stage}, ds_quant does not"
    for key in (_HPZ, _WEIGHTS, _FROZEN, _GRADIENTS, _LOCO):
        if key in zero and key in reasons:
            migration.remove(_ZERO, key, why=reasons[key] + ignored)


def _zeropp_block(
    has_node_shard: bool, has_weights: bool, has_frozen: bool, has_gradients: bool
) -> dict[str, Any]:
    """Return the block of a combination of hpZ, qwZ, quantized frozen weights and qgZ."""
    if has_weights or has_gradients:
        block: dict[str, Any] = {"scheme": "zeropp"}
        if not has_node_shard:
            block["node_shard"] = False
        if not has_weights and not has_frozen:
            block["weights"] = {"enabled": False}
        if not has_gradients:
            block["gradients"] = {"enabled": False}
        return block
    if not has_frozen:  # hpZ alone
        return {"scheme": "hybrid"}
    block = {"scheme": "qsdp"}
    if has_node_shard:
        block["node_shard"] = True
    block["gradients"] = {"enabled": False}
    return block


def _mics(zero: dict[str, Any], migration: Migration) -> None:
    """Translate MiCS, after ``_zeropp`` has set the node size."""
    shards = refusals.number(zero.get(_MICS))
    if shards > 1:
        why = (
            f"scheme {migration.block['scheme']}: weights stay in nodes of node_size ranks, "
            "gradients cross between them once per step; optimizer states are sharded over all "
            "ranks: less memory"
        )
    elif shards == 1:
        if not migration.block:
            migration.block = {"scheme": "full_precision"}
        why = "shards of one rank are full copies: zero_optimization.stage 1 or 2 keeps those"
    else:
        why = "was off"
    if _MICS in zero:
        migration.remove(_ZERO, _MICS, why=why)
    if _MICS_GATHER in zero:
        migration.remove(_ZERO, _MICS_GATHER, why="belongs to MiCS; gathers stay inside the node")


def _one_bit(config: Mapping[str, Any], migration: Migration) -> None:
    """Replace an optimizer that compresses momentum by the plain one with a block."""
    optimizer = section(config, "optimizer")
    kind = str(optimizer.get("type", "")).lower()
    if kind not in ONE_BIT:
        return
    plain = ONE_BIT[kind]
    params = section(optimizer, "params")
    why = f"{optimizer['type']} compresses momentum by itself, and DeepSpeed 0.19.7 removed it"
    migration.set("optimizer", "type", value=plain, why=why)
    migration.block |= {"scheme": "sdp4bit"}
    freeze_step = refusals.number(params.get("freeze_step"))
    if freeze_step >= 1:
        migration.block["warmup_steps"] = int(freeze_step)
    for key, value in params.items():
        if key in _COMPRESSION_KEYS:
            why = f"{plain} has no such parameter"
            if key == "freeze_step" and freeze_step >= 1:
                why = f"{path_of(('warmup_steps',))}: steps in full precision at the start"
            migration.remove("optimizer", "params", key, why=why)
        elif key not in _OPTIMIZER_KEYS:
            migration.remarks.append(
                f"optimizer.params.{key}={show(value)}: not known here, left as it is"
            )
    if refusals.stage_of(config) not in (1, 2, 3):
        why = "ds_quant works under ZeRO; stage 1 keeps weights and gradients as they were"
        migration.set(_ZERO, "stage", value=1, why=why)
    if plain == "Lamb" and not config.get("zero_allow_untested_optimizer"):
        why = "DeepSpeed asks for it: ZeRO with LAMB"
        migration.set("zero_allow_untested_optimizer", value=True, why=why)


def _dtype(config: Mapping[str, Any], migration: Migration) -> None:
    """Remove a cast of gradients before they are sent; without a block add one."""
    dtype = config.get("communication_data_type")
    if dtype is None:
        return
    if str(dtype).lower() != "fp32" and not migration.block and KEY not in config:
        migration.block |= {"scheme": "qsdp"}
    if migration.block or KEY in config:
        why = "gradients are sent as the scheme says, summed in fp32: a cast before adds error"
        migration.remove("communication_data_type", why=why)


def as_text(config: dict[str, Any]) -> str:
    """Return the text of a file: keys in their order, lists of numbers on one line."""
    text = json.dumps(config, indent=2)
    lists = re.compile(r"\[\n\s+([^][{}\"]+?)\n\s*\]")
    return lists.sub(_on_one_line, text) + "\n"


def _on_one_line(match: re.Match[str]) -> str:
    return f"[{' '.join(match.group(1).split())}]"


def _refused(path: Path) -> list[str]:
    """Return a sentence per setting that start-up would still refuse."""
    try:
        config = load(path)
        block = parse(config)
        if block is not None:
            refusals.refuse(config, block)
    except ConfigError as error:
        return [f"still refused: {problem}" for problem in error.problems]
    return []
