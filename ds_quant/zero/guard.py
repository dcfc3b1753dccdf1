"""Roll calls and room: what must be settled before a collective. Combinations that are refused are
in ``refusals``, the handshake of the ranks in ``handshake``.

A rank that decides alone can hang the others, so every check reads facts that all ranks share and
every error names the setting, its value and the way out.
"""

from __future__ import annotations

import torch.distributed as torch_dist

from ds_quant.zero import parameters
from ds_quant.zero.binding import Binding
from ds_quant.zero.handshake import Board, handshake
from ds_quant.zero.log import log_rank0
from ds_quant.zero.world import minimum

__all__ = ["handshake", "refuse_no_room", "roll_call"]


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
    board, ranks = Board(store, f"ds_quant/roll_call/{what}/{call}"), range(world)
    board.put(rank, "here")
    message = "quantized_comm: {} needs all ranks under ZeRO-1 and 2: not called on rank(s) {}"
    if board.arrive(ranks, patience):
        return
    if missing := board.missing(ranks):
        log_rank0(message.format(what, missing) + f" after {patience:g} s, still waiting")
    if not board.arrive(ranks, timeout) and (missing := board.missing(ranks)):
        raise RuntimeError(
            message.format(what, missing) + f" within {timeout:g} s. Call it on all ranks and let "
            "one of them write the files, as ZeRO-3 needs it too"
        )
