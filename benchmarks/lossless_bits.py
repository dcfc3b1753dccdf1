"""Bits per weight of lossless differences against the entropy of the same data.

    python benchmarks/lossless_bits.py                    # four learning rates, in minutes
    python benchmarks/lossless_bits.py --lr 1e-5 --measured 50

The demo's GPT is trained in fp32 by AdamW past its warm-up, once; from there each learning rate
goes on by itself, settles for a while, and then every step is measured: the bf16 roundings of all
weights before and after it, as one message. The entropies are those of the differences in units of
the last place, pooled over the steps, and of the same given the exponent before the step, which
both sides know: what any code of single elements could reach at best.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import report
import sections
import text
import torch
from gpt import GPT, GPTConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ds_quant.codec.lossless import LosslessCodec

CODEC = LosslessCodec()


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lr", type=float, nargs="+", default=[1e-3, 3e-4, 1e-4, 1e-5])
    add("--warmup", type=int, default=400, help="steps in common, at the rate --warmup-lr")
    add("--warmup-lr", type=float, default=1e-3)
    add("--settle", type=int, default=100, help="steps of each rate before it is measured")
    add("--measured", type=int, default=20, help="steps that are measured")
    add("--layers", type=int, default=2)
    add("--width", type=int, default=128)
    add("--seed", type=int, default=0)
    add("--text", help="a file; default: the documentation of CPython")
    add("--json", type=Path, default=Path("lossless_bits.json"))
    return parser.parse_args(argv)


class Training:
    """fp32 master weights of a GPT, of which a copy can go on by itself."""

    def __init__(self, args: argparse.Namespace, tokens: Tensor) -> None:
        torch.manual_seed(args.seed)
        self.model = GPT(GPTConfig(layers=args.layers, width=args.width))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.warmup_lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.tokens, self.seed, self.step = tokens, args.seed, 0

    def branch(self, lr: float) -> Training:
        """A copy with the optimizer's state, at another rate."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        other.optimizer = torch.optim.AdamW(other.model.parameters())
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        for group in other.optimizer.param_groups:
            group["lr"] = lr
        return other

    def advance(self, steps: int) -> Iterator[Tensor]:
        """Train, and give the weights in bf16 after every step as one tensor."""
        for _ in range(steps):
            x, y = text.batch(
                self.tokens, seed=self.seed, step=self.step, rank=0, batch_size=8, seq_len=64
            )
            self.optimizer.zero_grad()
            self.model(x, y).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1
            yield self.weights()

    def weights(self) -> Tensor:
        """All of them in bf16, (numel,)."""
        return torch.cat([p.detach().bfloat16().view(-1) for p in self.model.parameters()])


def message_bits(values: Tensor, reference: Tensor) -> int:
    """Bits of the codec's message, after a look at what it decodes to."""
    wire = torch.empty(CODEC.max_bytes(values.numel()), dtype=torch.uint8)
    nbytes, found = torch.zeros(1, dtype=torch.int64), torch.empty_like(values)
    CODEC.encode(values, reference, wire, nbytes)
    CODEC.decode(wire[: nbytes.item()], reference, found)
    assert torch.equal(found.view(torch.int16), values.view(torch.int16))
    return 8 * nbytes.item()


def differences(values: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """In units of the last place, and the exponents of the reference; int64."""
    after, before = (x.view(torch.int16).long() for x in (values, reference))
    order = [x.where(x >= 0, x ^ 0x7FFF) for x in (after, before)]
    return order[0] - order[1], before >> 7 & 0xFF


def entropy(symbols: Tensor) -> float:
    """Bits per symbol, by their frequencies."""
    _, counts = symbols.unique(return_counts=True)
    shares = counts.double() / counts.sum()
    return float(-(shares * shares.log2()).sum())


def measure(start: Training, lr: float, args: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    training = start.branch(lr)
    for _ in training.advance(args.settle):
        pass
    before, bits, found = training.weights(), 0, []
    for after in training.advance(args.measured):
        bits += message_bits(after, before)
        found.append(differences(after, before))
        before = after
    changes, exponents = (torch.cat(column) for column in zip(*found, strict=True))
    known = entropy(exponents)
    return {
        "lr": lr,
        "unchanged": float((changes == 0).double().mean()),
        "bits": bits / changes.numel(),
        "entropy": entropy(changes),
        "entropy_given_exponent": entropy(changes * 256 + exponents) - known,
        "numel": before.numel(),
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    grid = Table(title="Lossless differences, bits per weight and step")
    for header in ("lr", "unchanged", "codec", "entropy", "given the exponent"):
        grid.add_column(header, justify="right")
    for row in rows:
        numbers = (row["bits"], row["entropy"], row["entropy_given_exponent"])
        shares = f"{row['lr']:g}", f"{100 * row['unchanged']:.0f} %"
        grid.add_row(*shares, *(f"{number:.2f}" for number in numbers))
    return grid


def section(result: dict[str, Any]) -> tuple[str, str]:
    """See sections.py."""
    header = ["learning rate", "unchanged", "codec", "entropy", "given the exponent"]
    rows = [
        [f"{row['lr']:g}", f"{100 * row['unchanged']:.0f} %",
         *(f"{row[key]:.2f}" for key in ("bits", "entropy", "entropy_given_exponent"))]
        for row in result["rows"]
    ]  # fmt: skip
    return "Exact weights: bits per difference", (
        "Bits per weight and step of the exact differences between the bf16 roundings of the\n"
        f"{result['rows'][0]['numel']} weights of a GPT in training, and entropies of the same\n"
        "data.\n\n" + sections.table(header, rows)
    )


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse_args(argv), Console()
    tokens, _ = text.split(text.load(args.text and Path(args.text)))
    start = Training(args, tokens)
    for _ in start.advance(args.warmup):
        pass
    rows = []
    for lr in args.lr:
        rows.append(measure(start, lr, args))
        console.print(table(rows[-1:]))
    console.print(table(rows))
    report.save(args.json, "lossless_bits", args, rows=rows)
    console.print(f"results: {args.json}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
