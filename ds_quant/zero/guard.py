"""The handshake and roll calls: what must be settled before the first collective. Combinations
that are refused are in ``refusals``.

A rank that decides alone can hang the others, so every check reads facts that all ranks share and
every error names the setting, its value and the way out.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist

from ds_quant.zero import parameters
from ds_quant.zero.binding import Binding
from ds_quant.zero.seams import log_rank0
from ds_quant.zero.world import minimum

WIRE_VERSION = 2  # raised when bytes on the wire change meaning


def handshake(*, settings: str, rank: int, world: int, timeout: float) -> None:
    """Check through the store that all ranks run the same plugin with one block and one node size.

    No collective is involved, so a rank without the plugin cannot hang the others.

    Raises:
        RuntimeError: naming the ranks that did not answer within ``timeout`` seconds, or those
            whose version or settings differ.
    """
    from ds_quant import __version__

    store = torch_dist.distributed_c10d._get_default_store()
    engine = store.add(f"ds_quant/engines/{rank}", 1)  # the n-th engine of this rank
    mine = json.dumps({"ds_quant": __version__, "wire": WIRE_VERSION, "settings": settings})
    prefix = f"ds_quant/handshake/{engine}"
    store.set(f"{prefix}/{rank}", mine)
    if absent := _absent(store, prefix, world, timeout):
        raise RuntimeError(
            f"quantized_comm: no answer from rank(s) {absent} within {timeout:g} s. Is ds_quant "
            "installed on their hosts, DS_QUANT_DISABLE unset and the same config used there? "
            "A slow start needs a larger quantized_comm.handshake_timeout"
        )
    answers = {r: store.get(f"{prefix}/{r}").decode() for r in range(world)}
    differing = {r: a for r, a in answers.items() if a != answers[0]}
    if differing:
        raise RuntimeError(
            "quantized_comm: ranks disagree; install the same ds_quant everywhere and use one "
            f"config. rank 0: {answers[0]}; "
            + "; ".join(f"rank {r}: {a}" for r, a in sorted(differing.items()))
        )


def refuse_no_room(binding: Binding) -> None:
    """Raise RuntimeError on all ranks if the node shard does not fit on one. A collective."""
    bill = binding.bill()
    kept, peak = bill.memory * bill.numel, binding.peak_bytes(bill)
    (free,) = minimum([parameters.free_memory()])
    shown = f"{free / 1e9:.3g} GB of memory are free on the fullest device"
    if kept > free:
        raise RuntimeError(
            f"quantized_comm: the node shard takes {kept / 1e9:.3g} GB on every rank, but {shown}; "
            "use more ranks per node, zero_optimization.stage 2, or a scheme without a node shard "
            'such as "qsdp"'
        )
    if kept + peak > free:
        binding.notices.append(
            f"may run out of memory: {kept / 1e9:.3g} GB of node shard and {peak / 1e9:.3g} GB of "
            f"messages are to come and {shown}"
        )


def roll_call(what: str, *, rank: int, world: int, patience: float, timeout: float) -> None:
    """Wait through the store until every rank has called ``what``, which is a collective.

    Rank 0 warns after ``patience`` seconds, because it may be alone by mistake; others may also be
    late because they write a large file.

    Raises:
        RuntimeError: naming the ranks that have not called it within ``timeout`` seconds.
    """
    store = torch_dist.distributed_c10d._get_default_store()
    call = store.add(f"ds_quant/calls/{what}/{rank}", 1)
    prefix = f"ds_quant/roll_call/{what}/{call}"
    store.set(f"{prefix}/{rank}", "here")
    message = "quantized_comm: {} needs all ranks under ZeRO-1 and 2: not called on rank(s) {}"
    if absent := _absent(store, prefix, world, patience):
        log_rank0(message.format(what, absent) + f" after {patience:g} s, still waiting")
    if absent and (absent := _absent(store, prefix, world, timeout)):
        raise RuntimeError(
            message.format(what, absent) + f" within {timeout:g} s. Call it on all ranks and let "
            "one of them write the files, as ZeRO-3 needs it too"
        )


def _absent(store: Any, prefix: str, world: int, timeout: float) -> list[int]:
    """Ranks without a key under ``prefix`` after ``timeout`` seconds."""
    try:
        store.wait([f"{prefix}/{r}" for r in range(world)], timedelta(seconds=timeout))
    except RuntimeError:  # torch.distributed.DistStoreError and friends
        return [r for r in range(world) if not store.check([f"{prefix}/{r}"])]
    return []
