"""Training between two hosts of two ranks, each a network namespace, over a bad network.

``measure`` starts the ranks; as ``python -m tests.distributed.network FOLDER`` this file is one of
them. Rank 0 sets what the cable does for each phase in turn, so that the ranks start only once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.distributed.cable import ADDRESSES, DEVICE, cable, command, disturb

ROOT = Path(__file__).resolve().parents[2]
HOSTS, PER_HOST, STEPS = 2, 2, 4
# Seconds that a packet is on its way between the hosts, and the share of packets that is lost.
PHASES = {"undisturbed": (0.0, 0.0), "50 ms delay": (0.05, 0.0), "1 % loss": (0.0, 0.01)}
RUNS = {"qsdp, ZeRO-2": (2, "qsdp"), "sdp4bit, ZeRO-3": (3, "sdp4bit")}
# losses by rank, seconds of all steps, TCP segments that rank 0's host has sent again
Trained = tuple[list[list[float]], float, int]
Measured = dict[str, dict[str, Trained]]


def measure(timeout: float = 240) -> Measured:
    """By run and phase. Needs root."""
    world = HOSTS * PER_HOST
    with tempfile.TemporaryDirectory() as folder, cable(folder):
        ranks = []
        try:
            for rank in range(world):
                log = Path(folder, f"log {rank}").open("w")
                argv = [sys.executable, "-m", "tests.distributed.network", folder]
                line = command(rank // PER_HOST, argv)
                to_log = {"stdout": log, "stderr": subprocess.STDOUT}
                ranks.append(subprocess.Popen(line, env=environment(rank), cwd=ROOT, **to_log))
                log.close()
            deadline = time.monotonic() + timeout
            codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        logs = [Path(folder, f"log {rank}").read_text()[-1500:] for rank in range(world)]
        assert codes == [0] * world, "\n".join(logs)
        return json.loads(Path(folder, "measured.json").read_text())


def environment(rank: int) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % PER_HOST),
        "WORLD_SIZE": str(HOSTS * PER_HOST),
        "LOCAL_SIZE": str(PER_HOST),
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": "29531",
        "GLOO_SOCKET_IFNAME": DEVICE,
    }


def sent_again() -> int:
    names, values = [
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if "Tcp:" in line
    ]
    return int(values[names.index("RetransSegs")])


def trained(stage: int, scheme: str) -> Trained:
    import torch

    from tests.distributed.models import build, settings, train_step

    engine = build(settings(stage, {"scheme": scheme, "node_size": PER_HOST}, dtype="bf16"))
    before, begin = sent_again(), time.monotonic()
    losses = [loss for step in range(STEPS) for loss in train_step(engine, step)]
    seconds = time.monotonic() - begin
    engine.destroy()
    gathered: list[Any] = [None] * (HOSTS * PER_HOST)
    torch.distributed.all_gather_object(gathered, losses)
    return gathered, seconds, sent_again() - before


def main(folder: str) -> None:
    from tests.distributed import preload  # noqa: F401

    import torch  # isort: skip
    from deepspeed import comm as dist

    dist.init_distributed("gloo", verbose=False)
    measured: Measured = {run: {} for run in RUNS}
    for phase, (delay, loss) in PHASES.items():
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            disturb(folder, delay=delay, loss=loss)
            time.sleep(0.5)  # the cable looks ten times a second
        torch.distributed.barrier()
        for run, (stage, scheme) in RUNS.items():
            measured[run][phase] = trained(stage, scheme)
    if torch.distributed.get_rank() == 0:
        Path(folder, "measured.json").write_text(json.dumps(measured))
    torch.distributed.barrier()
    os._exit(0)  # DeepSpeed on CPU may abort in a normal interpreter exit


if __name__ == "__main__":
    main(sys.argv[1])
