"""What sums of gradients lose where all nodes flip the same signs before the Hadamard transform,
and where each flips its own.

Trains the demo's GPT in this process. At some steps every *node* takes the gradient of
micro-batches of its own, and all matrices go through the codecs between nodes. Reported is the
normalised error, ||Q(g) - g||^2 / ||g||^2, of one message, and of the sum of all nodes' messages.
The cosine of two nodes' gradients says how much they are alike: equal gradients under equal signs
have equal errors.

    python benchmarks/gradient_errors.py --json gradient_errors.json
"""

from __future__ import annotations

import argparse
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

from ds_quant.codec.bound import Coding, Rotation, squares
from ds_quant.config.schema import parse_block
from ds_quant.kernels.batch import OWN_SIGNS, Encode, Sum
from ds_quant.kernels.random_bits import Address, Role, key_of
from ds_quant.kernels.run import Operations, Streams
from ds_quant.kernels.wire import round_up
from ds_quant.policy.scheme import Scheme

GAUSSIAN = ("eden4", "eden3", "eden2")
SCHEMES = {name: parse_block({"scheme": name}).to_scheme() for name in ("sdp4bit", *GAUSSIAN)}
NODES = (2, 4, 8, 16)


def sum_of(nodes: Tensor, scheme: Scheme, *, step: int, parameter: int, own_signs: bool) -> Tensor:
    """The sum of a gradient over nodes, (nodes, numel) fp32, as its receivers add it up."""
    codec, block, (count, numel) = scheme.gradients, scheme.block.gradients.rotation, nodes.shape
    key = partial(key_of, seed=0, role=Role.GRADIENTS, parameter=parameter)
    signs, flips = (Address(key(hop=99), step), 1) if codec.is_gaussian else (None, 0)
    shared, nbytes = Rotation(block=block, signs=signs), codec.wire_bytes(round_up(numel, block))
    turns = [shared.of(place) if own_signs else shared for place in range(count)]
    ranks = [Coding(codec, Address(key(rank=place + 1), step)) for place in range(count)]
    streams = Streams(ranks, turns)
    wire, out = torch.empty(count * nbytes, dtype=torch.uint8), torch.empty(numel)
    sends = [
        (Encode(codec, numel, 0, 1, p, block, bool(flips)), (p * numel, p * nbytes, 0))
        for p in range(count)
    ]
    adds = Sum(
        codec, numel, wire_in=1, values=2, stream=0, sources=count, stride=nbytes, place=None,
        own=2, block=block, flips=OWN_SIGNS if own_signs else flips,
    )  # fmt: skip
    for tasks in (sends, [(adds, (0, 0, 0))]):
        Operations(tasks).run([nodes.reshape(-1), wire, out], streams)
    return out


def error_of_sum(nodes: list[Tensor], scheme: Scheme, step: int, own_signs: bool = False) -> float:
    """Normalised error of the sum over nodes, all matrices (nodes, numel) as one."""
    total = torch.zeros(2, dtype=torch.float64)
    for index, gradients in enumerate(nodes):
        how = {"step": step, "parameter": index, "own_signs": own_signs}
        total += squares(sum_of(gradients, scheme, **how), gradients.sum(0))
    return float(total[0] / total[1])


def look(model: GPT, tokens: Tensor, step: int, rows: int) -> dict[str, Any]:
    """What is seen at one step with so many rows of text per node."""
    chosen = [p for p in model.parameters() if p.dim() > 1 and p.numel() >= 2048]
    of_nodes = []
    for node in range(max(NODES)):
        x, y = text.batch(tokens, seed=1, step=step, rank=node, batch_size=rows, seq_len=64)
        of_nodes.append([g.reshape(-1) for g in torch.autograd.grad(model(x, y), chosen)])
    matrices = [torch.stack(same) for same in zip(*of_nodes, strict=True)]
    first, second = (torch.cat(of_nodes[node]) for node in range(2))
    sums = [
        {"nodes": count, "scheme": name, **{
            key: error_of_sum([m[:count] for m in matrices], SCHEMES[name], step, key == "own")
            for key in ("common", "own")
        }}
        for count in NODES for name in GAUSSIAN
    ]  # fmt: skip
    alone = {n: error_of_sum([m[:1] for m in matrices], s, step) for n, s in SCHEMES.items()}
    cosine = float(torch.nn.functional.cosine_similarity(first, second, dim=0))
    return {"step": step, "batch": rows, "cosine": cosine, "alone": alone, "sums": sums}


def train(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One training with exact gradients, and what is seen at its looks."""
    tokens, _ = text.split(text.load())
    torch.manual_seed(0)
    model, found = GPT(GPTConfig(layers=2, width=128)), []
    how = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    for step in range(max(args.looks) + 1):
        found += [look(model, tokens, step, rows) for rows in args.batch if step in args.looks]
        x, y = text.batch(tokens, seed=0, step=step, rank=0, batch_size=8, seq_len=64)
        optimizer.zero_grad()
        model(x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return found


def section(result: dict[str, Any]) -> tuple[str, str]:
    """See sections.py."""
    rows = result["rows"]
    alone = [
        [f"`{name}`", *[f"{pick(row['alone'][name] for row in rows):.4f}" for pick in (fmean, max)]]
        for name in rows[0]["alone"]
    ]
    sums = [
        [str(row["step"]), str(row["batch"]), f"{row['cosine']:.2f}", str(nodes),
         *[f"{s['common']:.4f} / {s['own']:.4f}" for s in row["sums"] if s["nodes"] == nodes]]
        for row in rows
        for nodes in dict.fromkeys(s["nodes"] for s in row["sums"])
    ]  # fmt: skip
    names = dict.fromkeys(f"`{s['scheme']}`" for s in rows[0]["sums"])
    return "What gradients lose", (
        "Squared error of what crosses between nodes over its energy, on gradients of a training:\n"
        "one message, mean and largest of all looks.\n\n"
        + sections.table(["codec of", "mean", "largest"], alone)
        + "\n\nOf the sum over nodes that all quantize, with the same random signs on all nodes /\n"
        "with signs of each node's own. Cosine: of the gradients of two nodes.\n\n"
        + sections.table(["step", "rows per node", "cosine", "nodes", *names], sums)
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--looks", type=int, nargs="+", default=[10, 100, 400, 1600])
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64], help="rows per node")
    parser.add_argument("--json", type=Path, default=Path("gradient_errors.json"))
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    print(section(report.save(args.json, "gradient_errors", args, rows=train(args)))[1])


if __name__ == "__main__":
    main()
