"""Begin a run under FSDP2 or DDP.

The order of ``attach``: validate the block and the model, ``handshake``, ``tuned``, make the front,
``start``, ``announce``, connect the model. So an error leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Callable

from ds_quant.runtime.run import Run
from ds_quant.runtime.step_events import StepEvents
from ds_quant.runtime.warmup import message_kinds, warm_up


def start(run: Run, events: StepEvents, *, resync: Callable[[], None] | None) -> None:
    """Begin the votes and metrics, and compile the kernels. A collective of all ranks of the run.

    resync: as of ``StepEvents.begin``.
    """
    if run.topology.world == 1:
        run.notices.append("single rank: nothing to communicate")
        return
    events.begin(resync)
    if run.device.type == "cuda":
        warm_up(run, message_kinds(run, run.levels))
