"""The error of sums of gradients between nodes, with shared signs and with each node's own.

    python benchmarks/gradient_errors.py --json gradient_errors.json      # five minutes

Trains the demo's GPT in this process. At some steps every node takes the gradient of micro-batches
of its own, and all matrices go through the codecs between nodes: one message, and the sum of all
nodes' messages. Signs are flipped before the Hadamard transform. Equal gradients under equal signs
have equal errors; the cosine of two nodes' gradients says how much they are alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import report
import sections
import text
import torch
from gpt import GPT, GPTConfig
from torch import Tensor

from ds_quant.codec.bound import BoundCodec, Rotation
from ds_quant.codec.codec import GroupCodec
from ds_quant.config.schema import parse_block
from ds_quant.kernels.batch import OWN_SIGNS, Encode, Offsets, Sum
from ds_quant.kernels.dispatch import Operations, RngState
from ds_quant.kernels.random_bits import Address, Role, key_of
from ds_quant.kernels.wire import round_up

GAUSSIAN = ("eden4", "eden3", "eden2")
SCHEMES = {name: parse_block({"scheme": name}).to_scheme() for name in ("sdp4bit", *GAUSSIAN)}
NODES = (2, 4, 8, 16)
SIGNS = 99  # hop of the sign flips in random keys, apart from those of messages


def sum_of(
    gradients: Tensor, codec: GroupCodec, block: int, *, step: int, parameter: int, own_signs: bool
) -> Tensor:
    """Return the sum of a gradient over nodes as its receivers add it up, (numel,) fp32.

    gradients: (nodes, numel) fp32.
    block: elements of the Hadamard transform.
    """
    nodes, numel = gradients.shape
    key = partial(key_of, seed=0, role=Role.GRADIENTS, parameter=parameter)
    signs = Address(key(hop=SIGNS), step) if codec.is_gaussian else None
    flips = 0 if signs is None else 1
    shared = Rotation(block=block, signs=signs)
    row_bytes = codec.wire_bytes(round_up(numel, block))
    rng_state = RngState(
        [BoundCodec(codec, Address(key(rank=node + 1), step)) for node in range(nodes)],
        [shared.of(node) if own_signs else shared for node in range(nodes)],
    )
    wire = torch.empty(nodes * row_bytes, dtype=torch.uint8)
    total = torch.empty(numel)
    encode = []
    for node in range(nodes):
        operation = Encode(codec, numel, 0, 1, node, block, bool(flips))
        encode.append((operation, Offsets(values=node * numel, wire=node * row_bytes)))
    add = Sum(
        codec,
        numel,
        wire_in=1,
        values=2,
        stream=0,
        sources=nodes,
        stride=row_bytes,
        own_row=None,
        own=2,
        block=block,
        flips=OWN_SIGNS if own_signs else flips,
    )
    for tasks in (encode, [(add, Offsets())]):
        Operations(tasks).run([gradients.reshape(-1), wire, total], rng_state)
    return total


def error_of_sum(
    matrices: Sequence[Tensor], scheme: str, *, step: int, own_signs: bool = False
) -> float:
    """Return the squared error of the sums over nodes over their energy, all matrices as one.

    matrices: (nodes, numel) fp32 each.
    """
    codec = SCHEMES[scheme].gradients
    assert isinstance(codec, GroupCodec)  # of all of SCHEMES
    block = SCHEMES[scheme].block.gradients.rotation
    error = 0.0
    energy = 0.0
    for index, gradients in enumerate(matrices):
        found = sum_of(
            gradients, codec, block, step=step, parameter=index, own_signs=own_signs
        ).double()
        exact = gradients.double().sum(0)
        error += float((found - exact).square().sum())
        energy += float(exact.square().sum())
    return error / energy


def look(model: GPT, tokens: Tensor, *, step: int, rows: int) -> dict[str, Any]:
    """Return the errors at one step. rows: of text per node."""
    chosen = [p for p in model.parameters() if p.dim() > 1 and p.numel() >= 2048]
    of_nodes = []
    for node in range(max(NODES)):
        batch = text.batch(tokens, seed=1, step=step, rank=node, batch_size=rows, seq_len=64)
        of_nodes.append([g.reshape(-1) for g in torch.autograd.grad(model(*batch), chosen)])
    matrices = [torch.stack(same) for same in zip(*of_nodes, strict=True)]
    sums = []
    for nodes in NODES:
        first = [gradients[:nodes] for gradients in matrices]
        for name in GAUSSIAN:
            shared = error_of_sum(first, name, step=step)
            own = error_of_sum(first, name, step=step, own_signs=True)
            sums.append({"nodes": nodes, "scheme": name, "common": shared, "own": own})
    alone = {
        name: error_of_sum([gradients[:1] for gradients in matrices], name, step=step)
        for name in SCHEMES
    }
    first_node, second_node = (torch.cat(of_nodes[node]) for node in range(2))
    cosine = float(torch.nn.functional.cosine_similarity(first_node, second_node, dim=0))
    return {"step": step, "batch": rows, "cosine": cosine, "alone": alone, "sums": sums}


def train(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train with exact gradients. Return what is seen at every look."""
    tokens, _ = text.split(text.load())
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    found = []
    for step in range(max(args.looks) + 1):
        if step in args.looks:
            found += [look(model, tokens, step=step, rows=rows) for rows in args.batch]
        batch = text.batch(tokens, seed=0, step=step, rank=0, batch_size=8, seq_len=64)
        optimizer.zero_grad()
        model(*batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return found


def section(result: dict[str, Any]) -> tuple[str, str]:
    """Return heading and body of the page: see sections.py."""
    looks = result["rows"]
    alone = []
    for name in looks[0]["alone"]:
        errors = [row["alone"][name] for row in looks]
        alone.append([f"`{name}`", f"{fmean(errors):.4f}", f"{max(errors):.4f}"])
    sums = []
    for row in looks:
        for nodes in dict.fromkeys(each["nodes"] for each in row["sums"]):
            cells = [
                f"{each['common']:.4f} / {each['own']:.4f}"
                for each in row["sums"]
                if each["nodes"] == nodes
            ]
            place = [str(row["step"]), str(row["batch"]), f"{row['cosine']:.2f}", str(nodes)]
            sums.append([*place, *cells])
    names = dict.fromkeys(f"`{each['scheme']}`" for each in looks[0]["sums"])
    return "What gradients lose", (
        "Squared error of what crosses between nodes over its energy, on gradients of a training:\n"
        "one message, mean and largest of all looks.\n\n"
        + sections.table(["codec of", "mean", "largest"], alone)
        + "\n\nOf the sum over nodes that all quantize, with the same random signs on all nodes /\n"
        "with signs of each node's own. Cosine: of the gradients of two nodes.\n\n"
        + sections.table(["step", "rows per node", "cosine", "nodes", *names], sums)
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--looks", type=int, nargs="+", default=[10, 100, 400, 1600])
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64], help="rows per node")
    parser.add_argument("--json", type=Path, default=Path("gradient_errors.json"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)  # sums of several threads differ in their last bits
    print(section(report.save(args.json, "gradient_errors", args, rows=train(args)))[1])


if __name__ == "__main__":
    main()
