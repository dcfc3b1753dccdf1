"""What SDP4Bit's codecs lose on real weights and gradients, during one training of the demo's GPT.

Weights: master weights in fp32, a bf16 replica that receives 4-bit differences, gradients taken at
the replica. Reported is rms(replica - master) over that of a plain bf16 copy: 1.00 means that four
bits lose nothing beyond bf16. Gradients: normalised error of the sum over nodes x ranks when it
goes through each scheme's hops. Everything in one process, with the codecs that also train.

    python benchmarks/errors.py --json errors.json --plot errors.png
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

from ds_quant.codec.bound import Coding, Rotation
from ds_quant.codec.codec import GroupCodec
from ds_quant.config.schema import parse_block
from ds_quant.kernels.random_bits import Role, address
from ds_quant.policy.scheme import Scheme

WEIGHT_SCHEMES = ("sdp4bit", "sdp4bit_paper")  # nearest and stochastic differences
GRADIENT_SCHEMES = ("ulq", "tlq", "tlq_hs", "zeropp")
NODES, NODE_SIZE = 2, 2


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lr", type=float, nargs="+", default=[6e-4, 2e-3])
    parser.add_argument("--every", type=int, default=50, help="steps between two measurements")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, help="default: the documentation of CPython")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def coding(codec: GroupCodec, role: Role, *, step: int, parameter: int, rank: int = 0) -> Coding:
    """With random bits of its own."""
    where = address(seed=0, role=role, step=step, parameter=parameter, rank=rank + 1)
    return Coding(codec=codec, address=where)


class Replica:
    """bf16 weights that follow fp32 master weights by differences."""

    def __init__(self, masters: Sequence[Tensor], scheme: Scheme) -> None:
        self._scheme = scheme
        self.weights = [m.bfloat16() for m in masters]

    def follow(self, masters: Sequence[Tensor], step: int) -> None:
        """One difference per matrix; everything else exactly."""
        for index, (weight, master) in enumerate(zip(self.weights, masters, strict=True)):
            if self._scheme.skip_reason("", master.shape, master.dtype) is not None:
                weight.copy_(master)
                continue
            codec = self._scheme.weights
            how = coding(codec, Role.WEIGHTS, step=step, parameter=index)._replace(difference=True)
            flat = weight.view(-1)
            wire = torch.empty(codec.wire_bytes(flat.numel()), dtype=torch.uint8)
            how.encode(master.view(-1), wire, held=flat)
            how.decode(wire, flat)

    def squared_errors(self, masters: Sequence[Tensor]) -> dict[int, tuple[float, float]]:
        """Of every matrix, by its index: that of the replica, and that of a bf16 copy."""
        return {
            index: tuple(
                float((copy.float() - master).square().sum())
                for copy in (weight, master.bfloat16())
            )
            for index, (weight, master) in enumerate(zip(self.weights, masters, strict=True))
            if self._scheme.skip_reason("", master.shape, master.dtype) is None
        }

    def error_ratio(self, masters: Sequence[Tensor]) -> float:
        """rms(replica - master) / rms(bf16(master) - master), over all matrices."""
        kept, plain = map(sum, zip(*self.squared_errors(masters).values(), strict=True))
        return (kept / plain) ** 0.5


def reduced(gradients: Sequence[Tensor], scheme: Scheme, *, step: int, parameter: int) -> Tensor:
    """Sum of NODES x NODE_SIZE gradients, each (numel,), through the hops of a scheme.

    Own contributions are exact: the rank that sums is the first of its node, the node the first.
    """
    rotation = Rotation(block=scheme.rotation) if scheme.rotation else None
    numel = gradients[0].numel()
    values = [g.float() if rotation is None else rotation.forward(g) for g in gradients]
    partial = [
        _summed(
            values[node * NODE_SIZE : (node + 1) * NODE_SIZE],
            scheme.gradients_intra, step=step, parameter=parameter, hop=node,
        )
        for node in range(NODES)
    ]  # fmt: skip
    total = _summed(partial, scheme.gradients, step=step, parameter=parameter, hop=NODES)
    if rotation is not None:
        rotation.inverse_(total)
    return total[:numel]


def _summed(
    values: Sequence[Tensor], codec: GroupCodec, *, step: int, parameter: int, hop: int
) -> Tensor:
    others = values[1:]
    wires = torch.empty(len(others), codec.wire_bytes(values[0].numel()), dtype=torch.uint8)
    for rank, (value, wire) in enumerate(zip(others, wires, strict=True), start=1):
        place = hop * NODE_SIZE + rank
        coding(codec, Role.GRADIENTS, step=step, parameter=parameter, rank=place).encode(
            value, wire
        )
    total = torch.empty_like(values[0])
    codec.decode_sum(wires, total, own=(0, values[0]))
    return total


def gradient_errors(
    per_rank: Sequence[Sequence[Tensor]], name: str, step: int
) -> dict[int, tuple[float, float]]:
    """Of every matrix, by its index: ||Q(g) - g||^2 and ||g||^2 of the sum over ranks."""
    scheme, errors = parse_block({"scheme": name}).to_scheme(), {}
    for index, gradients in enumerate(zip(*per_rank, strict=True)):
        if scheme.skip_reason("", gradients[0].shape, gradients[0].dtype) is not None:
            continue
        flat = [g.reshape(-1) for g in gradients]
        exact = torch.stack([g.double() for g in flat]).sum(0)
        got = reduced(flat, scheme, step=step, parameter=index)
        errors[index] = float((got - exact).square().sum()), float(exact.square().sum())
    return errors


def together(errors: dict[int, tuple[float, float]]) -> float:
    """Normalised error of all matrices as one."""
    error, energy = map(sum, zip(*errors.values(), strict=True))
    return error / energy


def by_layer(
    names: Sequence[str],
    weights: dict[int, tuple[float, float]],
    gradients: dict[str, dict[int, tuple[float, float]]],
) -> list[dict[str, Any]]:
    """Per matrix the error ratio of its weights and the normalised error of its gradient."""
    return [
        {
            "name": names[index],
            "ratio": (kept / plain) ** 0.5,
            "gradients": {
                scheme: errors[index][0] / errors[index][1] for scheme, errors in gradients.items()
            },
        }
        for index, (kept, plain) in weights.items()
    ]


def effective_bits(name: str, numel: int = 1 << 20) -> dict[str, float]:
    """Bits per element with scales, of what crosses between nodes and of what stays inside."""
    scheme = parse_block({"scheme": name}).to_scheme()
    codecs = {"weights": scheme.weights, "gradients": scheme.gradients}
    codecs |= {"gradients inside a node": scheme.gradients_intra}
    return {role: 8 * codec.wire_bytes(numel) / numel for role, codec in codecs.items() if codec}


def train(args: argparse.Namespace, lr: float, name: str, tokens: Tensor) -> dict[str, Any]:
    """One training; the error of the weights, and now and then that of the gradients."""
    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(layers=args.layers, width=args.width))
    masters = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    replica = Replica(masters, parse_block({"scheme": name}).to_scheme())
    outcome: dict[str, Any] = {"lr": lr, "scheme": name, "steps": [], "ratio": [], "gradients": []}
    for step in track(range(args.steps), description=f"{name}, lr {lr:g}"):
        for p, weight in zip(model.parameters(), replica.weights, strict=True):
            p.data.copy_(weight)
        per_rank, loss = [], 0.0
        look = (step + 1) % args.every == 0
        for rank in range(NODES * NODE_SIZE if look else 1):
            x, y = text.batch(
                tokens, seed=args.seed, step=step, rank=rank, batch_size=8, seq_len=64
            )
            value = model(x, y)
            per_rank.append(torch.autograd.grad(value, list(model.parameters())))
            loss = loss or value.item()
        for master, gradient in zip(masters, per_rank[0], strict=True):
            master.grad = gradient
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        replica.follow(masters, step)
        if look:
            outcome["steps"].append(step + 1)
            outcome["ratio"].append(replica.error_ratio(masters))
            errors = {}
            if name == WEIGHT_SCHEMES[0]:
                errors = {s: gradient_errors(per_rank, s, step) for s in GRADIENT_SCHEMES}
                outcome["gradients"].append({s: together(e) for s, e in errors.items()})
            names = [parameter for parameter, _ in model.named_parameters()]
            outcome["layers"] = by_layer(names, replica.squared_errors(masters), errors)
            outcome["loss"] = loss
    return outcome


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Error ratio of the weights, and normalised error of the gradients, against steps."""
    from ds_quant.tools import plot_style

    figure, (left, right) = plot_style.pyplot().subplots(
        1, 2, figsize=(13, 4.8), layout="constrained"
    )
    for run in runs:
        left.plot(run["steps"], run["ratio"], label=f"{run['scheme']}, lr {run['lr']:g}")
    left.axhline(1, color="0.5", linewidth=0.8, label="_")
    left.set(xlabel="optimizer step", ylabel="times that of a bf16 copy",
             title="Weights: distance to the master weights")  # fmt: skip
    measured = next(run for run in runs if run["gradients"])
    colors = plot_style.colors(GRADIENT_SCHEMES)
    for name in GRADIENT_SCHEMES:
        values = [g[name] for g in measured["gradients"]]
        right.plot(measured["steps"], values, label=name, color=colors[name])
    right.set(xlabel="optimizer step", ylabel="squared error over energy", yscale="log",
              title="Summed gradients: error")  # fmt: skip
    plot_style.plain_ticks(right.yaxis, plot_style.round_marks(*right.get_ylim()))
    for axes in (left, right):
        plot_style.finish(axes)
        plot_style.label_lines(axes)
    plot_style.save(figure, path)


def section(result: dict[str, Any]) -> tuple[str, str]:
    """See sections.py; single matrices are in the file."""
    runs, roles = result["runs"], ("weights", "gradients", "gradients inside a node")
    weights = [
        [f"`{run['scheme']}`, lr {run['lr']:g}", f"{max(run['ratio']):.3f}",
         f"{fmean(run['ratio'][len(run['ratio']) // 2 :]):.3f}", f"{run['loss']:.3f}"]
        for run in runs
    ]  # fmt: skip
    measured = [run for run in runs if run["gradients"]]
    gradients = [
        [f"`{name}`", *(f"{fmean(g[name] for g in run['gradients']):.4f}" for run in measured)]
        for name in measured[0]["gradients"][0]
    ]
    bits = [
        [f"`{name}`", *(report.number(codecs.get(role), ".3f") for role in roles)]
        for name, codecs in result["bits"].items()
    ]
    rates = [f"lr {run['lr']:g}" for run in measured]
    return "What the codecs lose in training", (
        "Error of the weights over that of a plain bf16 copy (1.00: nothing lost beyond bf16).\n\n"
        + sections.table(["scheme", "largest", "mean of the second half", "last loss"], weights)
        + "\n\nSquared error of summed gradients over their energy, mean over the training.\n\n"
        + sections.table(["scheme", *rates], gradients)
        + "\n\nEffective bits per element, scales included.\n\n"
        + sections.table(["scheme", *roles], bits)
    )


def main() -> None:
    args = parse_args()
    tokens, _ = text.split(text.load(args.text))
    runs = [train(args, lr, name, tokens) for lr in args.lr for name in WEIGHT_SCHEMES]
    for run in runs:
        late = run["ratio"][len(run["ratio"]) // 2 :]
        print(
            f"{run['scheme']:14} lr {run['lr']:g}: ratio at most {max(run['ratio']):.3f}, "
            f"mean of the second half {sum(late) / len(late):.3f}, last loss {run['loss']:.3f}"
        )
        for name in GRADIENT_SCHEMES if run["gradients"] else ():
            mean = sum(g[name] for g in run["gradients"]) / len(run["gradients"])
            print(f"    gradients, {name:8} {mean:.4f}")
    if args.plot is not None:
        plot(runs, args.plot)
    if args.json is not None:
        bits = {name: effective_bits(name) for name in (*WEIGHT_SCHEMES, *GRADIENT_SCHEMES)}
        args.text = None if args.text is None else args.text.name
        report.save(args.json, "errors", args, bits=bits, runs=runs)


if __name__ == "__main__":
    main()
