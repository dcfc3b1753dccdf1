"""``ds_quant probe``: bandwidth and latency of the process groups that training will use.

Run it as a training script is run, one process per GPU, or with ``--hostfile``: the groups, the
backend and the calls are those of the plugin. All nodes send at once, as they do in a step. Writes
JSON for ``ds_quant estimate --probe``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import socket
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_quant.comm.topology import Topology, default_node_size
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Communicator
from ds_quant.config.errors import show
from ds_quant.policy.timing import Rate, rate_from, slowest
from ds_quant.tools.cli import about

SIZES = (1 << 10, 1 << 20, 1 << 23, 1 << 25)  # bytes from each rank; the first gives the latency
KIND, VERSION = "probe", 1


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of a probe; None for a level that the ranks do not have."""

    nodes: int
    node_size: int
    backend: str
    intra: Rate | None
    inter: Rate | None


def load(path: Path) -> Found:
    """Read a file written by ``main``.

    Raises:
        ValueError: it is none, of another version, or has a number that cannot be.
    """
    facts = json.loads(path.read_text("utf-8"))
    try:
        known = (facts["kind"], facts["version"]) == (KIND, VERSION)
        given = {key: facts[key] for key in ("intra", "inter")}
        rates = {key: None if rate is None else Rate(**rate) for key, rate in given.items()}
        found = Found(**{key: facts[key] for key in ("nodes", "node_size", "backend")}, **rates)
    except (KeyError, TypeError):
        known = False
    if not known:
        raise ValueError("allowed: a file of this version's 'ds_quant probe'")
    numbers = {"nodes": found.nodes, "node_size": found.node_size}
    for level, rate in rates.items():
        numbers |= {} if rate is None else {f"{level}.{k}": v for k, v in vars(rate).items()}
    for key, value in numbers.items():
        kinds, what = ((int, float), "numbers") if "." in key else ((int,), "whole numbers")
        if type(value) not in kinds or not 0 < float(value) < math.inf:
            raise ValueError(f"{key}={show(value)}: allowed: {what} above 0")
    return found


def main(arguments: argparse.Namespace) -> int:
    """Measure and, on rank 0, write and print."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        if arguments.hostfile is not None:
            command = launch_command(arguments)
            sys.stdout.flush()
            os.execv(command[0], command)  # so that signals and exit code are the launcher's
        raise ValueError(
            "RANK and WORLD_SIZE are not set: give it a --hostfile, as deepspeed takes it, or a "
            "launcher: torchrun --nproc-per-node 8 --nnodes 2 ... --no-python ds_quant probe"
        )
    if os.environ["RANK"] == "0":
        _require_writable(arguments.out)
    measure_and_write(arguments)
    sys.stdout.flush()
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        os._exit(0)  # DeepSpeed on CPU may abort in a normal interpreter exit
    return 0


def _require_writable(path: Path) -> None:
    """Raise ValueError before anything is measured, if the file cannot be written."""
    is_new = not path.exists()
    with about(f"--out {path}"), path.open("a"):
        pass
    if is_new:
        path.unlink()


def launch_command(arguments: argparse.Namespace) -> list[str]:
    """The deepspeed launcher with this very command on the hosts of ``arguments.hostfile``."""
    path = arguments.hostfile
    lines = [line.strip() for line in path.read_text("utf-8", errors="replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines or not all(re.match(r"\S+\s+slots=\d", line) for line in lines):
        raise ValueError(f"--hostfile {path}: allowed: a line per host, such as 'node0 slots=8'")
    hosts = {line.split()[0] for line in lines}
    command = [sys.executable, "-m", "deepspeed.launcher.runner"]
    command += ["--hostfile", str(path), "--module", "--no_local_rank"]
    if hosts <= {"localhost", "127.0.0.1"}:  # no need to reach them by ssh
        command += ["--no_ssh_check", "--master_addr", "127.0.0.1", "--master_port", free_port()]
    command += ["ds_quant", "probe", "--out", str(arguments.out)]
    if arguments.node_size is not None:
        command += ["--node-size", str(arguments.node_size)]
    return command


def free_port() -> str:
    """Return a port of this machine that nobody uses."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def measure_and_write(arguments: argparse.Namespace) -> Found:
    """Measure on all ranks; rank 0 writes ``arguments.out`` and prints."""
    found = _measure(arguments)
    if int(os.environ["RANK"]) == 0:
        facts = {"kind": KIND, "version": VERSION, **asdict(found)}
        arguments.out.write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
        print("\n".join(describe(found)))
        print(f"written: {arguments.out}; next: ds_quant estimate --probe {arguments.out} ...")
    torch.distributed.barrier()
    return found


def describe(found: Found) -> list[str]:
    """Format a line per level."""
    shown = [f"{found.nodes} x {found.node_size} ranks over {found.backend}"]
    for rate, what in ((found.intra, "inside a node, into a rank"), (found.inter, "into a node")):
        if rate is not None:
            shown.append(
                f"{what}: {rate.bytes_per_second * 8 / 1e9:.3g} Gb/s, "
                f"{rate.latency * 1e6:.0f} us per collective"
            )
    return shown


def _measure(arguments: argparse.Namespace) -> Found:
    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    else:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a 30 s build
    backend = "nccl" if cuda else "gloo"
    deepspeed.init_distributed(backend, verbose=False)
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    if world < 2:
        raise ValueError("WORLD_SIZE=1: allowed: 2 ranks or more")
    topology = Topology(world=world, node_size=arguments.node_size or default_node_size(world))
    device = torch.device("cuda" if cuda else "cpu")
    levels = []
    for name, groups in zip(("inside nodes", "between nodes"), topology.levels(), strict=True):
        rate = None
        made = [(ranks, torch.distributed.new_group(ranks)) for ranks in groups]
        if len(groups[0]) > 1:
            (own,) = (group for ranks, group in made if rank in ranks)
            rate = _rate_of(name, own, topology, device, rank)
        levels.append(rate)
    intra, inter = levels
    if inter is not None:  # every rank of a node receives its own share at the same time
        whole = inter.bytes_per_second * topology.node_size
        inter = Rate(bytes_per_second=whole, latency=inter.latency)
    return Found(nodes=topology.nodes, node_size=topology.node_size, backend=backend,
                 intra=intra, inter=inter)  # fmt: skip


def _rate_of(name: str, group: Any, topology: Topology, device: Any, rank: int) -> Rate:
    """Return the rate of the slowest rank, so that the estimate waits as the step would."""
    communicator, found = Communicator(group, topology=topology, traffic=Traffic()), []
    for nbytes in SIZES:
        if rank == 0 and sys.stderr.isatty():
            print(f"  {name}: {nbytes} bytes per rank", file=sys.stderr)
        payload = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        repeats = 20 if nbytes < 1 << 20 else 5
        gather = partial(communicator.all_gather, payload, role="weights")
        found.append(slowest(lambda gather=gather: gather().wait(), device, repeats=repeats))
    return rate_from([nbytes * (communicator.size - 1) for nbytes in SIZES], found)
