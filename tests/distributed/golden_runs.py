"""Compares training runs with recorded ones, bit by bit: losses, weights, bytes and messages.

    python -m tests.distributed.golden_runs           # print differences, exit 1 if there are any
    python -m tests.distributed.golden_runs --write   # the same, and record the runs

A row of ZeRO is a preset x stage x topology (nodes x ranks per node) x dtype, gradient
accumulation, slices and buckets, thinned to all pairs. A row of FSDP2 or DDP is a preset x front x
topology. Record the runs again in golden_runs.json only after an intended change of results or
messages. The digests hold on any x86-64 CPU, see ``exact_model``, and for both C++ and torch
kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.distributed import harness
from tests.distributed.exact_model import ExactModel, sgd
from tests.distributed.models import build, digests, masters, settings
from tests.pairwise import all_pairs

FILE = Path(__file__).with_name("golden_runs.json")
STEPS = 6
TOPOLOGIES = {"1x2": (1, 2), "2x1": (2, 1), "2x2": (2, 2), "4x1": (4, 1)}
FACTORS: dict[str, Sequence[Any]] = {
    # In the order in which they were added: a new one goes last and only adds rows.
    "scheme": (
        "full_precision", "qsdp", "qsdp_w4g4", "qw4", "qwd", "sdp4bit", "sdp4bit_paper", "tlq",
        "tlq_hs", "ulq", "zeropp", "eden4", "eden3", "eden2", "lossless", "qsdp_shard",
        "lossless_w_g2", "lossless_w_g3", "lossless_w_g4", "hybrid",
    ),
    "topology": tuple(TOPOLOGIES),
    "stage": (1, 2, 3),
    "dtype": ("bf16", "fp32"),
    "accumulation": (1, 2),
    "slices": (1, 3),
    "bucket": (20_000, 10**6),  # elements; several and one
}  # fmt: skip

Outcome = dict[str, Any]
Golden = dict[str, Outcome]  # by the name of a row


def _block(scheme: str, topology: str, slices: int, backend: str) -> dict[str, Any]:
    block = {
        "scheme": scheme,
        "node_size": TOPOLOGIES[topology][1],
        "slices": slices,
        "allow_full_replica": True,
        "metrics": {"interval": 0},
    }
    return block if backend == "auto" else block | {"backend": backend}


class Row(NamedTuple):
    scheme: str
    topology: str
    stage: int
    dtype: str
    accumulation: int
    slices: int
    bucket: int

    @property
    def name(self) -> str:
        return (
            f"{self.scheme} zero{self.stage} {self.topology} {self.dtype} k{self.accumulation} "
            f"slices{self.slices} bucket{self.bucket}"
        )

    def config(self, backend: str) -> dict[str, Any]:
        """Return the DeepSpeed config. ZeRO-3 prefetches parameters, several per message."""
        zero: dict[str, Any] = {"reduce_bucket_size": self.bucket}
        if self.stage == 3 and self.bucket < 10**6:
            zero |= {"stage3_prefetch_bucket_size": 40_000, "stage3_max_live_parameters": 70_000}
        block = _block(self.scheme, self.topology, self.slices, backend)
        # Without clipping, DeepSpeed's default: the order of the norm's sum depends on the CPU.
        return settings(
            self.stage,
            block,
            dtype=self.dtype,
            accumulation=self.accumulation,
            zero=zero,
            gradient_clipping=0.0,
        )


# Most errors are possible on two levels: a few schemes in every stage, in slices.
_TWO_LEVELS = tuple(
    Row(scheme, "2x2", stage, dtype="bf16", accumulation=1, slices=3, bucket=20_000)
    for scheme in ("qsdp", "sdp4bit", "zeropp", "lossless")
    for stage in FACTORS["stage"]
)
# Partial sums, which stay inside the nodes until the last micro-step.
_ACCUMULATED = tuple(
    Row(scheme, "2x2", stage, dtype="bf16", accumulation=3, slices=3, bucket=20_000)
    for scheme in ("full_precision", "qsdp", "sdp4bit")
    for stage in (2, 3)
)
ZERO_ROWS = tuple(dict.fromkeys((*map(Row._make, all_pairs(FACTORS)), *_TWO_LEVELS, *_ACCUMULATED)))


class FrontRow(NamedTuple):
    """A training under FSDP2 or DDP.

    front: fsdp2; hsdp, which is FSDP2 with a replica in every node; ddp.
    """

    scheme: str
    front: str
    topology: str
    dtype: str
    accumulation: int
    slices: int

    @property
    def name(self) -> str:
        return (
            f"{self.scheme} {self.front} {self.topology} {self.dtype} k{self.accumulation} "
            f"slices{self.slices}"
        )

    def block(self, backend: str) -> dict[str, Any]:
        return _block(self.scheme, self.topology, self.slices, backend)


# Presets that quantize gradients, each in a way of its own.
_GRADIENTS = ("full_precision", "qsdp", "sdp4bit", "zeropp", "eden4", "eden2", "tlq", "ulq")
FRONT_ROWS = (
    *(FrontRow(scheme, "fsdp2", "2x2", "bf16", 2, 1) for scheme in FACTORS["scheme"]),
    *(FrontRow(scheme, "fsdp2", "2x2", "fp32", 1, 3) for scheme in ("qsdp", "sdp4bit", "lossless")),
    *(FrontRow(scheme, "fsdp2", "2x1", "bf16", 1, 1) for scheme in ("qsdp", "eden4")),
    *(FrontRow(scheme, "hsdp", "2x2", "bf16", 2, 1) for scheme in _GRADIENTS),
    *(FrontRow(scheme, "hsdp", "2x2", "fp32", 1, 3) for scheme in ("full_precision", "eden4")),
    *(FrontRow(scheme, "ddp", "2x2", "fp32", 1, 1) for scheme in _GRADIENTS),
    *(FrontRow(scheme, "ddp", "2x2", "bf16", 2, 3) for scheme in ("qsdp", "eden4")),
    *(FrontRow(scheme, "ddp", "1x2", "fp32", 1, 1) for scheme in ("qsdp", "eden4")),
    *(FrontRow(scheme, "ddp", "2x1", "fp32", 1, 1) for scheme in ("qsdp", "eden4")),
)
AnyRow = Row | FrontRow
ROWS: tuple[AnyRow, ...] = (*ZERO_ROWS, *FRONT_ROWS)


def versions() -> dict[str, str]:
    """Return the versions of libraries whose order of operations affects bits and messages."""
    return {name: version(name).split("+")[0] for name in ("torch", "deepspeed")}


# ---- in the ranks ----


def train_rows(rows: Sequence[AnyRow], backend: str) -> dict[str, Outcome]:
    """Train every row on this rank. Return the outcomes by name of the row."""
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    trained = {}
    for row in rows:
        train = _train if isinstance(row, Row) else _train_front
        trained[row.name] = train(row, backend)
    return trained


def _train(row: Row, backend: str) -> Outcome:
    import ds_quant

    rank = torch.distributed.get_rank()
    _, node_size = TOPOLOGIES[row.topology]
    with _received_messages(rank, node_size) as messages:
        engine = build(row.config(backend), ExactModel, optimizer=sgd)
        losses = []
        for step in range(STEPS):
            for micro in range(row.accumulation):
                loss = engine((step * 10 + micro) * 10 + rank)
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
    report = ds_quant.report(engine)
    weights = masters(engine)
    engine.destroy()
    return {
        "losses": losses,
        "weights": digests(weights),
        "bytes": report["received_bytes"],
        "collectives": report["collectives"],
        "messages": dict(messages),
    }


def _train_front(row: FrontRow, backend: str) -> Outcome:
    import ds_quant
    from ds_quant import ddp, fsdp2

    rank = torch.distributed.get_rank()
    _, node_size = TOPOLOGIES[row.topology]
    with _received_messages(rank, node_size) as messages:
        model = _wrapped(row)
        optimizer = sgd(model.parameters())
        attach = ddp.attach if row.front == "ddp" else fsdp2.attach
        attach(model, row.block(backend), optimizer=optimizer)
        losses = []
        for step in range(STEPS):
            for micro in range(row.accumulation):
                is_last = micro == row.accumulation - 1
                if row.front == "ddp":
                    model.require_backward_grad_sync = is_last
                else:
                    model.set_is_last_backward(is_last)
                loss = model((step * 10 + micro) * 10 + rank)
                (loss / row.accumulation).backward()
                losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
    report = ds_quant.report(model)
    assert report is not None
    weights = {
        name.removeprefix("module."): (p.full_tensor() if isinstance(p, DTensor) else p)
        for name, p in model.named_parameters()
    }
    return {
        "losses": losses,
        "weights": digests({name: p.detach().float().numpy() for name, p in weights.items()}),
        "bytes": report["received_bytes"],
        "collectives": report["collectives"],
        "messages": dict(messages),
    }


def _wrapped(row: FrontRow) -> Any:
    """Return the model under its front, without a block."""
    model: nn.Module = ExactModel()
    if row.front == "ddp":
        return DistributedDataParallel(model.bfloat16() if row.dtype == "bf16" else model)
    policy = MixedPrecisionPolicy()
    if row.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shape = TOPOLOGIES[row.topology]
    if row.front == "hsdp":
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    else:
        mesh = init_device_mesh("cpu", (shape[0] * shape[1],))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


@contextmanager
def _received_messages(rank: int, node_size: int) -> Iterator[Counter[str]]:
    """Count messages from ranks of this node, "intra", and of other nodes, "inter"."""
    counts = Counter(intra=0, inter=0)
    receive = torch.distributed.irecv

    def counted(tensor: torch.Tensor, src: int, **keywords: Any) -> Any:
        same_node = src // node_size == rank // node_size
        counts["intra" if same_node else "inter"] += 1
        return receive(tensor, src=src, **keywords)

    with patch.object(torch.distributed, "irecv", counted):
        yield counts


# ---- in the parent process ----


def run_topology(topology: str, rows: Sequence[AnyRow] = ROWS, backend: str = "auto") -> Golden:
    """Train the rows of a topology on new ranks. Return their entries of the file."""
    nodes, node_size = TOPOLOGIES[topology]
    own = [row for row in rows if row.topology == topology]
    ranks = harness.run(train_rows, nodes * node_size, own, backend, timeout=280)
    return {row.name: _summary([rank[row.name] for rank in ranks]) for row in own}


def _summary(ranks: Sequence[Outcome]) -> Outcome:
    """Return the entry of a row in the file: digests, and counts, by rank where ranks differ.

    Raises:
        AssertionError: the weights of two ranks differ.
    """
    for number, rank in enumerate(ranks):
        assert rank["weights"] == ranks[0]["weights"], f"weights of ranks 0 and {number} differ"
    losses = [rank["losses"] for rank in ranks]
    roles = ("weights", "gradients")
    links = ("intra", "inter")
    counts = {
        f"{role} bytes {link}": [rank["bytes"][role][link] for rank in ranks]
        for role, link in product(roles, links)
    }
    for role in roles:
        counts[f"{role} collectives"] = [rank["collectives"][role] for rank in ranks]
    for link in links:
        counts[f"messages {link}"] = [rank["messages"][link] for rank in ranks]
    return {
        "losses": _digest_of([[loss.hex() for loss in rank] for rank in losses]),
        "first and last loss": [fmean(rank[i] for rank in losses) for i in (0, -1)],
        "weights": _digest_of(ranks[0]["weights"]),
        **{key: _once(values) for key, values in counts.items()},
    }


def _digest_of(value: Any) -> str:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def _once(values: list[int]) -> int | list[int]:
    """Return the value if it is equal on all ranks, else the list."""
    return values[0] if len(set(values)) == 1 else values


@cache
def recorded() -> dict[str, Any]:
    """Return the content of the file, empty before the first run."""
    if not FILE.exists():
        return {"versions": {}, "rows": {}}
    return json.loads(FILE.read_text("utf-8"))


def differences(before: Golden, now: Golden) -> Iterator[str]:
    """Return a line for every value that differs, and for every row that only one of them has."""
    for name in dict.fromkeys((*before, *now)):
        if name not in now:
            yield f"- {name}"
        elif name not in before:
            yield f"+ {name}"
        else:
            for key in dict.fromkeys((*before[name], *now[name])):
                old, new = before[name].get(key), now[name].get(key)
                if old != new:
                    yield f"{name}: {key}: {old} -> {new}"


def save(rows: Golden) -> None:
    """Write the file with one line per row, so that its diffs are readable."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    head = f'{{\n "versions": {json.dumps(versions())},\n "rows": {{\n'
    FILE.write_text(f"{head}{lines}\n }}\n}}\n", "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--write", action="store_true", help=f"record the runs in {FILE.name}")
    add("--only", default="", metavar="TEXT", help="rows with this in their name")
    add("--backend", choices=("auto", "torch"), default="auto")
    args = parser.parse_args(argv)
    before, rows = recorded(), [row for row in ROWS if args.only in row.name]
    names = [row.name for row in ROWS]
    compared = {n: row for n, row in before["rows"].items() if args.only in n or n not in names}
    now: Golden = {}
    for topology in dict.fromkeys(row.topology for row in rows):
        now |= run_topology(topology, rows, args.backend)
    lines = list(differences(compared, now))
    if before["versions"] != versions():
        lines.insert(0, f"versions: {before['versions']} -> {versions()}")
    print("\n".join(lines) or f"no difference in {len(now)} rows")
    if args.write:
        found = {**before["rows"], **now}
        save({name: found[name] for name in names if name in found})
    return 1 if lines and not args.write else 0


if __name__ == "__main__":
    sys.exit(main())
