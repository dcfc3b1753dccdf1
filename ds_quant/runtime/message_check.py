"""End the run on all ranks if any rank received a message that it cannot use.

Such a message was changed on its way, or holds lossless differences that could not be decoded. All
ranks check together: before every optimizer step, before weights are exported, and after a save
that sends weights. A rank that raised alone would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ds_quant.comm.checksum import MessageError
from ds_quant.runtime.run import Run


def check_messages(run: Run) -> None:
    """End the run if any rank noted a message error. A collective; waits for the device once.

    Raises:
        RuntimeError: on all ranks, with the message error of the lowest rank that has one.
    """
    flat = run.votes
    # This rank's number if it has an error, else the number of ranks. Made on the device, so that
    # the host waits only for the minimum.
    vote = torch.where(run.message_errors.any_error(run.device), flat.rank, flat.size)
    (receiver,) = flat.least(vote.view(1).to(run.device)).tolist()
    if receiver == flat.size:
        run.message_errors.forget()
        return
    errors: list[MessageError | None] = [run.message_errors.first()]
    torch.distributed.broadcast_object_list(
        errors, src=flat.ranks[receiver], group=flat.process_group
    )
    error = errors[0]
    assert error is not None, "the receiver has voted for it"
    raise_message_error(run, flat.ranks[receiver], error)


@contextmanager
def checked_messages(run: Run) -> Iterator[None]:
    """Check the messages on entry, for a context in which all ranks read the weights."""
    check_messages(run)
    yield


def raise_message_error(run: Run, receiver: int, error: MessageError) -> None:
    """Raise RuntimeError for a message that rank ``receiver`` cannot use."""
    block = run.scheme.block
    why = " because quantized_comm.payload_checksum=true" if block.payload_checksum else ""
    code = " and for code that writes weights outside the optimizer" if run.scheme.lossless else ""
    raise RuntimeError(
        f"quantized_comm: step {run.counted_steps}: {error.role} from rank {error.sender} "
        f"{error.problem.format(receiver)}. Training ends{why}; look for faulty memory or a "
        f"faulty network on the hosts of these two{code}, and resume from a checkpoint that "
        "was saved before this step"
    )
