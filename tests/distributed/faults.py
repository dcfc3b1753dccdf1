"""Faults of real processes, for ``test_faults``.

A rank does something to itself while it takes part in a collective: its receives are posted, its
sends are not.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.distributed.models import build, master_bits, settings, train_step

RANKS, VICTIM = 4, 3
SAVED_STEP, FAULT_STEP, STEPS = 2, 4, 7
TIMEOUT = 6.0  # seconds after which a collective gives up: what a user gives init_distributed
Outcome = tuple[list[float], dict[str, str]]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stall() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def cut() -> None:
    """Shut down every TCP connection of this process but the one to the store."""
    store = int(os.environ["MASTER_PORT"])
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        try:
            ports = connection.getsockname()[1], connection.getpeername()[1]
            if store not in ports:
                connection.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError, TypeError):
            pass  # no TCP socket, or one that listens
        finally:
            connection.close()


def die_while_saving() -> None:
    """The next file of a checkpoint is written by half."""
    whole = torch.save

    def half(content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        whole(content, path, *args, **kwargs)
        os.truncate(path, os.path.getsize(path) // 2)
        die()

    torch.save = half


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens, to which traffic, and until when all others have ended."""

    act: Callable[[], None]
    role: str  # weights, gradients, or "save": instead of step FAULT_STEP a checkpoint is saved
    stage: int
    scheme: str
    within: float  # seconds

    def config(self) -> dict[str, Any]:
        block = {"scheme": self.scheme, "node_size": 2}
        return settings(self.stage, block, dtype="bf16")


# A rank whose connections are reset lives on: one that waits for another survivor may learn of it
# only by the timeout.
SOON, LATE = 5.0, TIMEOUT + 5.0
FAULTS = {
    f"rank {what} while {role} travel, {scheme}, ZeRO-{stage}": Fault(
        act=act, role=role, stage=stage, scheme=scheme, within=within
    )
    for what, act, within, cases in (
        ("killed", die, SOON, [
            ("weights", "qsdp", 3), ("gradients", "qsdp", 2), ("weights", "sdp4bit", 1),
            ("weights", "sdp4bit", 3), ("gradients", "sdp4bit", 3),
        ]),
        ("stopped", stall, LATE, [("weights", "qsdp", 2), ("gradients", "sdp4bit", 3)]),
        ("cut off", cut, LATE, [("gradients", "qsdp", 3), ("weights", "sdp4bit", 2)]),
    )
    for role, scheme, stage in cases
} | {
    f"rank killed while it saves a checkpoint, {scheme}, ZeRO-{stage}": Fault(
        act=die_while_saving, role="save", stage=stage, scheme=scheme, within=SOON
    )
    for scheme, stage in (("qsdp", 2), ("sdp4bit", 3))
}  # fmt: skip


def strike_in(fault: Fault, engine: Any, folder: str) -> None:
    """Arm the victim: at its first send of the role in step ``FAULT_STEP``."""
    from ds_quant.comm.transport import Link

    count, send, role = Link._count, torch.distributed.isend, [""]

    def noted(self: Any, of: str, received: Any) -> None:
        role[0] = of
        count(self, of, received)

    def struck(*args: Any, **kwargs: Any) -> Any:
        if engine.global_steps == FAULT_STEP and role[0] == fault.role:
            strike(fault, folder)
        return send(*args, **kwargs)

    Link._count, torch.distributed.isend = noted, struck


def strike(fault: Fault, folder: str) -> None:
    when = Path(folder, "struck")
    if not when.exists():
        when.write_text(str(time.time()))
        fault.act()


def struck(fault: Fault, folder: str) -> None:
    """Save after two steps, go on until the fault; leaves a note of when this rank ended."""
    rank = torch.distributed.get_rank()
    engine = build(fault.config())
    try:
        for step in range(STEPS):
            if step == SAVED_STEP:
                engine.save_checkpoint(folder, "good")
                torch.distributed.barrier()
                if rank == VICTIM:
                    strike_in(fault, engine, folder)
            if step == FAULT_STEP and fault.role == "save":
                if rank == VICTIM:
                    strike(fault, folder)
                engine.save_checkpoint(folder, "bad")
            train_step(engine, step)
    finally:
        Path(folder, f"ended {rank}").write_text(str(time.time()))


def trained_on(fault: Fault, folder: str, resumed: bool) -> Outcome:
    """Losses from ``SAVED_STEP`` on and final weights, of a run that saves there or of one that
    loads what was saved there.
    """
    engine = build(fault.config(), seed=7 if resumed else 0)
    losses: list[float] = []
    if resumed:
        engine.load_checkpoint(folder, tag="good")  # `latest` may be the one that was cut short
    for step in range(SAVED_STEP if resumed else 0, STEPS):
        if step == SAVED_STEP and not resumed:
            engine.save_checkpoint(folder, "good")
            losses = []
        losses += train_step(engine, step)
    return losses, master_bits(engine)
