"""A rank dies, stalls or loses its connections: the others end in time and the run can resume.

A rank does something to itself while it takes part in a collective: its receives are posted, its
sends are not.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.distributed.harness import run, run_each
from tests.distributed.messages import before_each_send
from tests.distributed.models import engine_of, master_bits, train_steps
from tests.thin import thinned

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

RANKS, VICTIM = 4, 3
SAVED_STEP, FAULT_STEP, STEPS = 2, 4, 7
TIMEOUT = 6.0  # seconds after which a collective gives up: what a user gives init_distributed


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
        # What is no TCP socket, or one that listens, has no peer with a port.
        with connection, suppress(OSError, IndexError, TypeError):
            ports = connection.getsockname()[1], connection.getpeername()[1]
            if store not in ports:
                connection.shutdown(socket.SHUT_RDWR)


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
    """An accident, the traffic that it meets, and the time by which all others have ended."""

    act: Callable[[], None]
    role: str  # weights, gradients, or "save": instead of step FAULT_STEP a checkpoint is saved
    stage: int
    scheme: str
    within: float  # seconds

    def engine(self, seed: int = 0) -> Any:
        return engine_of(self.stage, {"scheme": self.scheme, "node_size": 2}, seed=seed)


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


def strike_in(fault: Fault, engine: DeepSpeedEngine, folder: str) -> None:
    """Arm the victim: at its first send of the role in step ``FAULT_STEP``."""

    def act(role: str) -> None:
        if engine.global_steps == FAULT_STEP and role == fault.role:
            strike(fault, folder)

    before_each_send(act)


def strike(fault: Fault, folder: str) -> None:
    when = Path(folder, "struck")
    if not when.exists():
        when.write_text(str(time.time()))
        fault.act()


def struck(fault: Fault, folder: str) -> None:
    """Save after two steps, go on until the fault; leaves a note of when this rank ended."""
    rank, engine = torch.distributed.get_rank(), fault.engine()
    try:
        train_steps(engine, SAVED_STEP)
        engine.save_checkpoint(folder, "good")
        torch.distributed.barrier()
        if rank == VICTIM:
            strike_in(fault, engine, folder)
        train_steps(engine, FAULT_STEP - SAVED_STEP, SAVED_STEP)
        if fault.role == "save":
            if rank == VICTIM:
                strike(fault, folder)
            engine.save_checkpoint(folder, "bad")
        train_steps(engine, STEPS - FAULT_STEP, FAULT_STEP)
    finally:
        Path(folder, f"ended {rank}").write_text(str(time.time()))


def trained_on(fault: Fault, folder: str, resumed: bool) -> tuple[list[float], dict[str, str]]:
    """Losses from ``SAVED_STEP`` on and final weights, of a run that saves there or of one that
    loads what was saved there.
    """
    engine = fault.engine(seed=7 if resumed else 0)
    if resumed:
        engine.load_checkpoint(folder, tag="good")  # `latest` may be the one that was cut short
    else:
        train_steps(engine, SAVED_STEP)
        engine.save_checkpoint(folder, "good")
    return train_steps(engine, STEPS - SAVED_STEP, SAVED_STEP), master_bits(engine)


# ---- what comes after ----

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"

QUICK = ("rank killed while gradients travel, sdp4bit, ZeRO-3",)

# What gloo says, below our sentence or, in DeepSpeed's own collectives, alone.
CLEAR = ("does not answer", "Timed out", "Connection closed", "Connection reset", "closed by peer")


@pytest.mark.parametrize("name", thinned(FAULTS, QUICK.__contains__))
def test_survivors_end_in_time_with_a_clear_error_and_the_run_resumes(
    name: str, tmp_path: Path
) -> None:
    fault, folder = FAULTS[name], str(tmp_path)
    patience = 15 if fault.act is stall else 60  # the stopped rank never answers
    environment = {"TEST_COLLECTIVE_TIMEOUT": str(TIMEOUT)}
    outcomes = run_each(struck, RANKS, fault, folder, timeout=patience, environment=environment)
    when, errors, seconds = float((tmp_path / "struck").read_text()), [], []
    for rank, (_, error) in enumerate(outcomes):
        if rank == VICTIM and fault.act is not cut:
            continue
        assert "Error" in error and any(text in error for text in CLEAR), (rank, error)
        errors.append(error)
        seconds.append(float((tmp_path / f"ended {rank}").read_text()) - when)
    assert max(seconds) < fault.within
    if fault.role != "save":
        assert any("quantized_comm: rank" in error for error in errors)
    if fault.act is stall:  # nobody gives up early on a rank that is slow
        assert max(seconds) > TIMEOUT - 1
    resumed = run(trained_on, RANKS, fault, folder, True)
    (tmp_path / "other").mkdir()
    assert resumed == run(trained_on, RANKS, fault, str(tmp_path / "other"), False)
    assert len(resumed[0][0]) == STEPS - SAVED_STEP


def test_the_page_has_a_row_of_every_fault() -> None:
    rows = PAGE.read_text("utf-8").splitlines()
    for name, fault in FAULTS.items():
        (row,) = [line for line in rows if line.startswith(f"| {name} |")]
        *_, seconds, resumed, _ = row.split("|")
        assert float(seconds) < fault.within and resumed.strip() == "equal"
