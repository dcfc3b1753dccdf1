"""``ds_quant migrate``: turn DeepSpeed's own communication savers into a ``quantized_comm`` block.

ZeRO++ (hpZ, qwZ, qgZ), LoCo, MiCS, 1-bit Adam, 1-bit LAMB and 0/1 Adam are translated; every change
is explained. Every other key stays, in its order. Loads neither torch nor deepspeed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from ds_quant.config.errors import ConfigError, path_of, show
from ds_quant.config.schema import KEY, parse
from ds_quant.policy import refusals
from ds_quant.policy.refusals import ONE_BIT, section
from ds_quant.tools.cli import about, load, not_plain_json

_ZERO = "zero_optimization"
_NODE = "zero_hpz_partition_size"
_MICS = ("mics_shard_size", "mics_hierarchical_params_gather")
_WEIGHTS, _FROZEN, _GRADIENTS = (
    f"zero_quantized_{what}" for what in ("weights", "nontrainable_weights", "gradients")
)
_KNOWN = (_NODE, _WEIGHTS, _FROZEN, _GRADIENTS, "zeropp_loco_param", *_MICS)
_FAMILIES = ("zero_quantized", "zero_hpz", "zeropp", "mics")
# What DeepSpeed's Adam and LAMB take, of the parameters of their 1-bit forms.
_OPTIMIZER_KEYS = "lr betas eps weight_decay bias_correction max_coeff min_coeff".split()
_COMPRESSION_KEYS = (
    "freeze_step", "cuda_aware", "comm_backend_name", "coeff_beta", "factor_max", "factor_min",
    "factor_threshold", "var_freeze_step", "var_update_scaler", "local_step_scaler",
    "local_step_clipper", "max_grad_norm", "amsgrad", "eps_inside_sqrt",
)  # fmt: skip


@dataclass(kw_only=True)
class Migration:
    """A config that changes, and what changes in it.

    block: of quantized_comm, empty if none is needed. said: one line per change; left: what stays
    and may need a hand.
    """

    config: dict[str, Any]
    block: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def remove(self, *path: str, why: str) -> None:
        """Take a key out, and say why."""
        value = reduce(getitem, path[:-1], self.config).pop(path[-1])
        self.said.append(f"{'.'.join(path)}={show(value)}: {why}")

    def set(self, *path: str, value: Any, why: str) -> None:
        """Give a key a value, and say why."""
        place = self.config
        for part in path[:-1]:
            place[part] = place[part] if isinstance(place.get(part), dict) else {}
            place = place[part]
        place[path[-1]] = value
        self.said.append(f"{'.'.join(path)}={show(value)} (new): {why}")


def main(arguments: argparse.Namespace) -> int:
    """Write the new file and explain it; 1 if something is left that start-up refuses."""
    source = arguments.path
    with about(source):
        found = translate(load(source))
        if not found.said:
            refused = _refused(source)
            print("\n".join([f"{source}: nothing to translate", *found.left, *refused]))
            return 1 if refused else 0
        if not_plain_json(source):
            found.left.append(
                "comments of the old file are not in the new one, which is plain JSON"
            )
    target = arguments.out or source.with_name(f"{source.stem}.ds_quant{source.suffix}")
    with about(target):
        if target.exists() and arguments.out is None:
            raise ConfigError("exists: give -o FILE, which may overwrite")
        target.write_text(as_text(found.config), "utf-8")
    refused = _refused(target)
    print("\n".join([*found.said, *found.left, *refused, f"written: {target}"]))
    return 1 if refused else 0


def translate(config: dict[str, Any]) -> Migration:
    """Change a DeepSpeed config."""
    found, zero = Migration(config=config), config.get(_ZERO)
    if isinstance(zero, dict):
        _zeropp(zero, refusals.stage_of(config), found)
        _mics(zero, found)
        found.left += [
            f"{_ZERO}.{key}={show(value)}: not known here, left as it is"
            for key, value in zero.items()
            if key.startswith(_FAMILIES) and key not in _KNOWN
        ]
    _one_bit(config, found)
    _dtype(config, found)
    if "sparse_gradients" in config:
        why = "DeepSpeed from 0.19.7 on refuses it; gradients of embeddings are reduced dense"
        found.remove("sparse_gradients", why=why)
    if found.block and KEY in config:
        found.left.append(f"{KEY}: is there already and stays; the translation would be "
                          f"{show(found.block)}")  # fmt: skip
    elif found.block:
        config[KEY] = found.block
        found.said.append(f"{KEY}={json.dumps(found.block)} (new)")
    return found


def _zeropp(zero: dict[str, Any], stage: Any, found: Migration) -> None:
    """hpZ, qwZ, qgZ, frozen weights in few bits, LoCo, and the shards of MiCS."""
    secondary, mics = (refusals.number(zero.get(key)) for key in (_NODE, _MICS[0]))
    ranks = mics if mics > 1 else secondary  # MiCS splits the weights over its own shards
    weights, frozen, gradients = (
        refusals.is_on(zero.get(key)) for key in (_WEIGHTS, _FROZEN, _GRADIENTS)
    )
    shard = ranks > 1
    if shard or weights or frozen or gradients:
        found.block |= _zeropp_block(shard, weights, frozen, gradients)
    if shard:
        found.block["node_size"] = int(ranks)
    node = f"{path_of(('node_size',))}: weights stay in nodes of that many ranks"
    if mics > 1 and mics != secondary:
        node = f"{_MICS[0]}={show(zero[_MICS[0]])} sets {path_of(('node_size',))}"
    reasons = {
        _NODE: secondary > 1 and node,
        _WEIGHTS: weights and "8-bit weights",
        _FROZEN: frozen and "frozen weights travel in 8 bits, and are kept in 16",
        _GRADIENTS: gradients and "4-bit gradients on both hops; scheme sdp4bit sends fewer bytes "
        "and loses less",
        "zeropp_loco_param": "error feedback is not offered, and DeepSpeed 0.19.8 removed it; "
        "schemes sdp4bit and eden4 round gradients unbiased and need none",
    }  # fmt: skip
    ignored = "" if stage == 3 else f"; DeepSpeed ignores it under stage {stage}, ds_quant does not"
    for key, why in reasons.items():
        if key in zero and why:
            found.remove(_ZERO, key, why=why + ignored)


def _zeropp_block(shard: bool, weights: bool, frozen: bool, gradients: bool) -> dict[str, Any]:
    if not (weights or gradients):  # hpZ, perhaps with adapters over frozen weights
        if not frozen:
            return {"scheme": "hybrid"}
        more = {"node_shard": True} if shard else {}
        return {"scheme": "qsdp", **more, "gradients": {"enabled": False}}
    block: dict[str, Any] = {"scheme": "zeropp"}
    if not shard:
        block["node_shard"] = False
    if not (weights or frozen):
        block["weights"] = {"enabled": False}
    if not gradients:
        block["gradients"] = {"enabled": False}
    return block


def _mics(zero: dict[str, Any], found: Migration) -> None:
    """MiCS, after ``_zeropp``, which gives the block the shards of its size."""
    size = refusals.number(zero.get("mics_shard_size"))
    if size > 1:
        why = (
            f"scheme {found.block['scheme']}: weights stay in nodes of node_size ranks, gradients "
            "cross between them once per step; optimizer states are sharded over all ranks: less "
            "memory"
        )
    elif size == 1:
        found.block = found.block or {"scheme": "full_precision"}
        why = "shards of one rank are full copies: zero_optimization.stage 1 or 2 keeps those"
    else:
        why = "was off"
    for key, reason in zip(
        _MICS, (why, "belongs to MiCS; gathers stay inside the node"), strict=True
    ):
        if key in zero:
            found.remove(_ZERO, key, why=reason)


def _one_bit(config: Mapping[str, Any], found: Migration) -> None:
    """Optimizers that compress by themselves become the plain ones, with a block."""
    optimizer = section(config, "optimizer")
    kind = str(optimizer.get("type", "")).lower()
    if kind not in ONE_BIT:
        return
    plain, params = ONE_BIT[kind], section(optimizer, "params")
    why = f"{optimizer['type']} compresses momentum by itself, and DeepSpeed 0.19.7 removed it"
    found.set("optimizer", "type", value=plain, why=why)
    found.block |= {"scheme": "sdp4bit"}
    steps = refusals.number(params.get("freeze_step"))
    if steps >= 1:
        found.block["warmup_steps"] = int(steps)
    for key, value in params.items():
        if key in _COMPRESSION_KEYS:
            why = f"{plain} has no such parameter"
            if key == "freeze_step" and steps >= 1:
                why = f"{path_of(('warmup_steps',))}: steps in full precision at the start"
            found.remove("optimizer", "params", key, why=why)
        elif key not in _OPTIMIZER_KEYS:
            found.left.append(
                f"optimizer.params.{key}={show(value)}: not known here, left as it is"
            )
    if refusals.stage_of(config) not in (1, 2, 3):
        why = "ds_quant works under ZeRO; stage 1 keeps weights and gradients as they were"
        found.set(_ZERO, "stage", value=1, why=why)
    if plain == "Lamb" and not config.get("zero_allow_untested_optimizer"):
        why = "DeepSpeed asks for it: ZeRO with LAMB"
        found.set("zero_allow_untested_optimizer", value=True, why=why)


def _dtype(config: Mapping[str, Any], found: Migration) -> None:
    """A cast before gradients are sent."""
    value = config.get("communication_data_type")
    if value is None:
        return
    if value != "fp32" and not found.block and KEY not in config:
        found.block |= {"scheme": "qsdp"}
    if found.block or KEY in config:
        why = "gradients are sent as the scheme says, summed in fp32: a cast before adds error"
        found.remove("communication_data_type", why=why)


def as_text(config: dict[str, Any]) -> str:
    """Return the text of a file: keys in their order, lists of numbers on one line."""
    text = json.dumps(config, indent=2)
    numbers = re.compile(r"\[\n\s+([^][{}\"]+?)\n\s*\]")
    return numbers.sub(lambda found: f"[{' '.join(found.group(1).split())}]", text) + "\n"


def _refused(path: Path) -> list[str]:
    """What start-up would still refuse."""
    try:
        config = load(path)
        block = parse(config)
        if block is not None:
            refusals.refuse(config, block)
    except ConfigError as error:
        return [f"still refused: {problem}" for problem in error.problems]
    return []
