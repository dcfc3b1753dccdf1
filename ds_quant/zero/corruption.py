"""Ends a job whose messages are changed on their way, on all ranks at once.

What the links of an engine have found is read before every optimizer step, when nothing has been
made of the messages yet, and after every save, whose weights have travelled too. All ranks learn
of it together: one that ended alone would leave the others waiting.
"""

from __future__ import annotations

from ds_quant.zero import seams
from ds_quant.zero.binding import Binding
from ds_quant.zero.world import broadcast, minimum


class Corruption:
    """Asks the links of one engine whether a checksum was wrong."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding

    def check(self) -> None:
        """A collective of the whole world.

        Raises:
            RuntimeError: on all ranks, naming the message that the first of them found changed.
        """
        rank, world = seams.rank_and_world()
        found = self._binding.findings.first()
        (receiver,) = minimum([world if found is None else rank])
        if receiver < world:
            self._end(*broadcast(found, source=receiver), receiver)

    def end_alone(self, role: str, sender: int) -> None:
        """For an engine without steps.

        Raises:
            RuntimeError: always, on this rank.
        """
        self._end(role, sender, seams.rank_and_world()[0])

    def _end(self, role: str, sender: int, receiver: int) -> None:
        step = self._binding.engine.global_steps
        raise RuntimeError(
            f"quantized_comm: step {step}: {role} from rank {sender} were changed on their way to "
            f"rank {receiver}: their checksum is wrong. Training ends because "
            "quantized_comm.payload_checksum=true; look for faulty memory or a faulty network on "
            "the hosts of these two, and resume from a checkpoint that was saved before this step"
        )
