"""``ds_quant probe``: measure bandwidth and latency of the process groups that training will use.

Start it as a training script, one process per GPU, with deepspeed or torchrun. Groups, backend and
calls are the plugin's. All nodes send at once, as they do in a step. Writes JSON for
``ds_quant estimate --probe``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ds_quant.comm.topology import Topology, default_node_size
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Communicator
from ds_quant.config.errors import show
from ds_quant.policy.timing import Rate, rate_from, slowest
from ds_quant.tools.files import about

SIZES = (1 << 10, 1 << 20, 1 << 23, 1 << 25)  # bytes from each rank; the first gives the latency
KIND = "probe"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Nodes of a job and the rates of its links.

    intra: into one rank from its node; None with one rank per node.
    inter: into one node from the others; None with one node.
    """

    nodes: int
    node_size: int
    backend: str
    intra: Rate | None
    inter: Rate | None


# ---- the file ----


def load(path: Path) -> ProbeResult:
    """Read a file written by ``main``.

    Raises:
        ValueError: it is another file, of another version, or has an impossible number.
    """
    facts = json.loads(path.read_text("utf-8"))
    try:
        is_known = (facts["kind"], facts["version"]) == (KIND, VERSION)
        result = ProbeResult(
            nodes=facts["nodes"],
            node_size=facts["node_size"],
            backend=facts["backend"],
            intra=_read_rate(facts["intra"]),
            inter=_read_rate(facts["inter"]),
        )
    except (KeyError, TypeError):
        is_known = False
    if not is_known:
        raise ValueError("allowed: a file of this version's 'ds_quant probe'")
    _require_positive("nodes", result.nodes, whole=True)
    _require_positive("node_size", result.node_size, whole=True)
    for level, rate in (("intra", result.intra), ("inter", result.inter)):
        if rate is not None:
            _require_positive(f"{level}.bytes_per_second", rate.bytes_per_second)
            _require_positive(f"{level}.latency", rate.latency)
    return result


def _read_rate(facts: dict[str, Any] | None) -> Rate | None:
    """Return a rate from its JSON; TypeError for other keys."""
    return None if facts is None else Rate(**facts)


def _require_positive(key: str, value: object, *, whole: bool = False) -> None:
    """Raise ValueError unless a value of the file is a finite number above 0."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if 0 < float(value) < math.inf and not (whole and isinstance(value, float)):
            return
    numbers = "whole numbers" if whole else "numbers"
    raise ValueError(f"{key}={show(value)}: allowed: {numbers} above 0")


def _require_writable(path: Path) -> None:
    """Raise ValueError before anything is measured, if the file cannot be written."""
    is_new = not path.exists()
    with about(f"--out {path}"), path.open("a"):
        pass
    if is_new:
        path.unlink()


# ---- the command ----


def main(arguments: argparse.Namespace) -> int:
    """Measure and, on rank 0, write and print."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "RANK and WORLD_SIZE are not set: start it with a launcher: deepspeed --hostfile "
            "hostfile --no_local_rank --module ds_quant probe, or torchrun --nproc-per-node 8 "
            "--nnodes 2 ... --no-python ds_quant probe"
        )
    if os.environ["RANK"] == "0":
        _require_writable(arguments.out)
    measure_and_write(arguments)
    sys.stdout.flush()
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        os._exit(0)  # DeepSpeed on CPU may abort in a normal interpreter exit
    return 0


def measure_and_write(arguments: argparse.Namespace) -> ProbeResult:
    """Measure on all ranks; rank 0 writes ``arguments.out`` and prints."""
    result = _measure(arguments)
    if int(os.environ["RANK"]) == 0:
        facts = {"kind": KIND, "version": VERSION, **asdict(result)}
        arguments.out.write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
        print("\n".join(describe(result)))
        print(f"written: {arguments.out}; next: ds_quant estimate --probe {arguments.out} ...")
    torch.distributed.barrier()
    return result


def describe(result: ProbeResult) -> list[str]:
    """Format the nodes, and a line per level that exists."""
    lines = [f"{result.nodes} x {result.node_size} ranks over {result.backend}"]
    if result.intra is not None:
        lines.append(f"inside a node, into a rank: {_describe_rate(result.intra)}")
    if result.inter is not None:
        lines.append(f"into a node: {_describe_rate(result.inter)}")
    return lines


def _describe_rate(rate: Rate) -> str:
    gigabits = rate.bytes_per_second * 8 / 1e9
    return f"{gigabits:.3g} Gb/s, {rate.latency * 1e6:.0f} us per collective"


# ---- measuring ----


def _measure(arguments: argparse.Namespace) -> ProbeResult:
    """Initialize communication and measure both levels. A collective."""
    has_cuda = torch.cuda.is_available()
    if not has_cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Imported here: it reads DS_ACCELERATOR.
    import deepspeed

    if has_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "nccl" if has_cuda else "gloo"
    deepspeed.init_distributed(backend, verbose=False)
    world = torch.distributed.get_world_size()
    if world < 2:
        raise ValueError("WORLD_SIZE=1: allowed: 2 ranks or more")
    topology = Topology(world=world, node_size=arguments.node_size or default_node_size(world))
    device = torch.device("cuda" if has_cuda else "cpu")
    nodes, across_nodes = topology.levels()
    intra = _rate_of("inside nodes", nodes, topology, device)
    inter = _rate_of("between nodes", across_nodes, topology, device)
    if inter is not None:
        # Every rank of a node receives its own share at the same time.
        into_node = inter.bytes_per_second * topology.node_size
        inter = Rate(bytes_per_second=into_node, latency=inter.latency)
    return ProbeResult(
        nodes=topology.nodes,
        node_size=topology.node_size,
        backend=backend,
        intra=intra,
        inter=inter,
    )


def _rate_of(
    level: str, groups: list[list[int]], topology: Topology, device: torch.device
) -> Rate | None:
    """Return the rate of a level on the slowest rank; None for groups of one rank. A collective.

    groups: global ranks of every process group, of which each rank belongs to one.
    """
    rank = torch.distributed.get_rank()
    own_group = None
    for ranks in groups:
        group = torch.distributed.new_group(ranks)  # which all ranks of the world must call
        if rank in ranks:
            own_group = group
    if len(groups[0]) == 1:
        return None
    communicator = Communicator(own_group, topology=topology, traffic=Traffic())
    seconds = []
    for nbytes in SIZES:
        if rank == 0 and sys.stderr.isatty():
            print(f"  {level}: {nbytes} bytes per rank", file=sys.stderr)
        seconds.append(_seconds_of(communicator, nbytes, device))
    received = [nbytes * (communicator.size - 1) for nbytes in SIZES]
    return rate_from(received, seconds)


def _seconds_of(communicator: Communicator, nbytes: int, device: torch.device) -> float:
    """Return the seconds of an all-gather of ``nbytes`` from each rank, on the slowest rank."""
    payload = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def gather() -> None:
        communicator.all_gather(payload, role="weights").wait()

    return slowest(gather, device, repeats=20 if nbytes < 1 << 20 else 5)
