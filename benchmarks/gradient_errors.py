"""What every gradient codec loses on real gradients, and what random signs of its own buy a node.

Trains the demo's GPT in this process. At some steps every *node* takes the gradient of
micro-batches of its own, and all matrices go through each codec. Reported is the normalised error,
||Q(g) - g||^2 / ||g||^2, of one message, and of the sum over nodes with Gaussian levels where all
nodes flip the same signs before the Hadamard transform, or each its own. The cosine of two nodes'
gradients says how much they are alike: equal gradients under equal signs have equal errors.

    python benchmarks/gradient_errors.py --json gradient_errors.json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import report
import sections
import text
import torch
from gpt import GPT, GPTConfig
from rich.progress import track
from torch import Tensor

from ds_quant.codec.bound import Coding, Rotation, decode_sum, encode
from ds_quant.codec.codec import GroupCodec
from ds_quant.config.schema import parse_block
from ds_quant.kernels.random_bits import Role, address
from ds_quant.policy.scheme import Scheme

SCHEMES = ("qsdp", "qsdp_w4g4", "zeropp", "tlq", "sdp4bit")
GAUSSIAN = ("eden4", "eden3", "eden2")
_SIGNS = 99  # the "hop" of sign flips


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--looks", type=int, nargs="+", default=[10, 100, 400, 800, 1600])
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64], help="rows per node")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, help="default: the documentation of CPython")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def schemes() -> dict[str, Scheme]:
    """By label: how gradients travel between nodes; fewer bits in the way of sdp4bit, too."""
    found = {name: parse_block({"scheme": name}).to_scheme() for name in (*SCHEMES, *GAUSSIAN)}
    for bits in (3, 2):
        block = {"scheme": "sdp4bit", "gradients": {"bits": bits}}
        found[f"sdp4bit, {bits} bits"] = parse_block(block).to_scheme()
    return found


def decoded(
    g: Tensor, scheme: Scheme, *, step: int, parameter: int, rank: int, signs: int
) -> Tensor:
    """A gradient (numel,) as its receivers see it. ``signs``: the rank whose flips it takes."""
    codec, names = scheme.gradients, {"seed": 0, "role": Role.GRADIENTS, "step": step}
    rotation = None
    keys = scheme.block.gradients
    if keys.rotation:
        flips = address(**names, parameter=parameter, rank=signs, hop=_SIGNS)
        rotation = Rotation(block=keys.rotation, signs=flips if keys.rotation_signs else None)
    coding = Coding(codec, address(**names, parameter=parameter, rank=rank + 1))
    on_wire = rotation.padded(g.numel()) if rotation else g.numel()
    wire, out = torch.empty(codec.wire_bytes(on_wire), dtype=torch.uint8), torch.empty(g.numel())
    encode(coding.codec, g[None], wire[None], address=coding.address, rotation=rotation)
    decode_sum(coding.codec, wire[None], out, rotation=rotation)
    return out


def error_of_sum(
    nodes: Sequence[Sequence[Tensor]], scheme: Scheme, *, step: int, own_signs: bool = False
) -> float:
    """Normalised error of the sum over nodes, all matrices as one."""
    error = energy = 0.0
    for index, gradients in enumerate(zip(*nodes, strict=True)):
        exact = torch.stack([g.double() for g in gradients]).sum(0)
        found = torch.zeros_like(exact)
        for rank, g in enumerate(gradients):
            how = {"rank": rank, "signs": rank if own_signs else 0}
            found += decoded(g, scheme, step=step, parameter=index, **how)
        error += float((found - exact).square().sum())
        energy += float(exact.square().sum())
    return error / energy


def node_gradients(model: GPT, tokens: Tensor, *, step: int, node: int, rows: int) -> list[Tensor]:
    """Of every matrix, flat, on micro-batches of this node."""
    x, y = text.batch(tokens, seed=1, step=step, rank=node, batch_size=rows, seq_len=64)
    gradients = torch.autograd.grad(model(x, y), list(model.parameters()))
    pairs = zip(gradients, model.parameters(), strict=True)
    return [g.reshape(-1) for g, p in pairs if p.dim() > 1 and p.numel() >= 2048]


def look(model: GPT, tokens: Tensor, args: argparse.Namespace, step: int) -> list[dict[str, Any]]:
    """The rows of one step: one per batch size."""
    all_schemes, rows = schemes(), []
    for batch in args.batch:
        nodes = [
            node_gradients(model, tokens, step=step, node=node, rows=batch)
            for node in range(max(args.nodes))
        ]
        first, second = (torch.cat(g) for g in nodes[:2])
        alone = {
            label: error_of_sum(nodes[:1], scheme, step=step)
            for label, scheme in all_schemes.items()
        }
        sums = [
            {
                "nodes": count,
                "scheme": name,
                "common": error_of_sum(nodes[:count], all_schemes[name], step=step),
                "own": error_of_sum(nodes[:count], all_schemes[name], step=step, own_signs=True),
            }
            for count in args.nodes
            for name in GAUSSIAN
        ]
        cosine = float(torch.nn.functional.cosine_similarity(first, second, dim=0))
        rows.append({"step": step, "batch": batch, "cosine": cosine, "alone": alone, "sums": sums})
    return rows


def train(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One training with exact gradients, and what is seen at its looks."""
    tokens, _ = text.split(text.load(args.text))
    torch.manual_seed(args.seed)
    model, rows = GPT(GPTConfig(layers=args.layers, width=args.width)), []
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    for step in track(range(max(args.looks) + 1), description="training"):
        if step in args.looks:
            rows += look(model, tokens, args, step)
        x, y = text.batch(tokens, seed=args.seed, step=step, rank=0, batch_size=8, seq_len=64)
        optimizer.zero_grad()
        model(x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return rows


def bits_of(codec: GroupCodec, numel: int = 1 << 20) -> float:
    """Bits per element with scales."""
    return 8 * codec.wire_bytes(numel) / numel


def section(result: dict[str, Any]) -> tuple[str, str]:
    """See sections.py."""
    rows = result["rows"]
    codecs = [
        [f"`{name}`", f"{bits:.3f}",
         *[f"{pick(row['alone'][name] for row in rows):.4f}" for pick in (fmean, max)]]
        for name, bits in sorted(result["bits"].items(), key=lambda item: -item[1])
    ]  # fmt: skip
    names = list(dict.fromkeys(s["scheme"] for s in rows[0]["sums"]))
    sums = [
        [str(row["step"]), str(row["batch"]), f"{row['cosine']:.2f}", str(nodes),
         *[f"{s['common']:.4f} / {s['own']:.4f}" for s in row["sums"] if s["nodes"] == nodes]]
        for row in rows
        for nodes in dict.fromkeys(s["nodes"] for s in row["sums"])
    ]  # fmt: skip
    header = ["step", "rows per node", "cosine", "nodes", *[f"`{name}`" for name in names]]
    return "What gradients lose", (
        "Squared error of what crosses between nodes over its energy, on gradients of a training:\n"
        "one message, mean and largest of all looks.\n\n"
        + sections.table(["codec of", "bits", "mean", "largest"], codecs)
        + "\n\nOf the sum over nodes that all quantize, with the same random signs on all nodes\n"
        "(as built) / with signs of each node's own. Cosine: of the gradients of two nodes.\n\n"
        + sections.table(header, sums)
    )


def main() -> None:
    args = parse_args()
    rows = train(args)
    bits = {label: bits_of(scheme.gradients) for label, scheme in schemes().items()}
    print(section({"bits": bits, "rows": rows})[1])
    if args.json is not None:
        report.save(args.json, "gradient_errors", args, bits=bits, rows=rows)


if __name__ == "__main__":
    main()
