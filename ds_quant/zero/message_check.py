"""End the run on all ranks if any rank received a message that it cannot use.

Such a message was changed on its way, or holds lossless differences that could not be decoded. All
ranks check together: before every optimizer step, before weights are exported, and after every
save, which may send weights too. A rank that raised alone would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ds_quant.comm.checksum import MessageError
from ds_quant.runtime.message_error import end_of_run
from ds_quant.zero import accelerator, hooks
from ds_quant.zero.plugin import Plugin
from ds_quant.zero.world import broadcast, minimum


def check_messages(plugin: Plugin) -> None:
    """End the run if any rank noted a message error. A collective; waits for the device once.

    Raises:
        RuntimeError: on all ranks, with the message error of the lowest rank that has one.
    """
    rank, world = hooks.rank_and_world()
    message_errors = plugin.message_errors
    # This rank's number if it has an error, else the world size. Made on the device, so that the
    # host waits only for the minimum.
    vote = torch.where(message_errors.any_error(accelerator.device()), rank, world)
    (receiver,) = minimum(vote.view(1))
    if receiver < world:
        error = broadcast(message_errors.first(), source=receiver)
        assert error is not None, "the receiver has voted for it"
        raise_message_error(plugin, receiver, error)
    message_errors.forget()


@contextmanager
def checked_messages(plugin: Plugin) -> Iterator[None]:
    """Check the messages on entry, for a context in which all ranks read the weights."""
    check_messages(plugin)
    yield


def raise_message_error(plugin: Plugin, receiver: int, error: MessageError) -> None:
    """Raise RuntimeError for a message that rank ``receiver`` cannot use."""
    raise end_of_run(
        error,
        receiver=receiver,
        step=plugin.engine.global_steps,
        sealed=plugin.scheme.block.payload_checksum,
        lossless=plugin.scheme.lossless,
    )
