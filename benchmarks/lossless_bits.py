"""Bits per weight of lossless differences, and the entropy of the same data.

    python benchmarks/lossless_bits.py                    # four learning rates, a minute
    python benchmarks/lossless_bits.py --lr 1e-5 --measured 50

The demo's GPT is trained in fp32 past its warm-up, once. From there every learning rate goes on by
itself and settles. Then every step is measured: the bf16 roundings of all weights before and after
it, as one message. Entropies are those of the differences in units of the last place, pooled over
the steps, and of the same given the exponent before the step, which both sides know: no code of
single elements does better.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import report
import sections
import text
import torch
from gpt import GPT, GPTConfig
from torch import Tensor

from ds_quant.kernels import dispatch, lossless

SIGNLESS = 0x7FFF  # bits of a bf16 value below its sign


class Training:
    """fp32 weights of a GPT, of which a copy can go on by itself."""

    def __init__(self, args: argparse.Namespace, tokens: Tensor) -> None:
        torch.manual_seed(args.seed)
        self.model = GPT(GPTConfig(layers=args.layers, width=args.width))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.warmup_lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        self._tokens = tokens
        self._seed = args.seed
        self._step = 0

    def branch(self, lr: float) -> Training:
        """Return a copy with the optimizer's state, at another rate."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        other.optimizer = torch.optim.AdamW(other.model.parameters())
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        for group in other.optimizer.param_groups:
            group["lr"] = lr
        return other

    def advance(self, steps: int) -> Iterator[Tensor]:
        """Train. Yield all weights in bf16, (numel,), after every step."""
        for _ in range(steps):
            batch = text.batch(
                self._tokens, seed=self._seed, step=self._step, rank=0, batch_size=8, seq_len=64
            )
            self.optimizer.zero_grad()
            self.model(*batch).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self._step += 1
            yield self.weights()

    def weights(self) -> Tensor:
        """Return all weights in bf16, (numel,)."""
        return torch.cat([p.detach().bfloat16().view(-1) for p in self.model.parameters()])


def message_bits(values: Tensor, reference: Tensor) -> int:
    """Return the bits of the message of a difference.

    Raises:
        RuntimeError: it decodes to other values.
    """
    wire = torch.empty(lossless.max_bytes(values.numel()), dtype=torch.uint8)
    used = torch.zeros(1, dtype=torch.int64)
    dispatch.encode_lossless([(values, reference, wire)], used)
    nbytes = int(used)
    decoded = torch.empty_like(values)[None]
    status = torch.zeros(1, 2, dtype=torch.int32)
    dispatch.decode_lossless(
        wire[:nbytes], np.zeros(1, np.int64), np.array([nbytes]), reference[None], decoded, status
    )
    if not torch.equal(decoded[0].view(torch.int16), values.view(torch.int16)):
        raise RuntimeError("a lossless message decoded to other values")
    return 8 * nbytes


def differences(values: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return differences in units of the last place and exponents of the reference; int64."""
    after, before = (x.view(torch.int16).long() for x in (values, reference))
    # Negative values are ordered by their magnitude, downwards.
    ordered = [x.where(x >= 0, x ^ SIGNLESS) for x in (after, before)]
    return ordered[0] - ordered[1], before >> 7 & 0xFF


def entropy(symbols: Tensor) -> float:
    """Return the bits per symbol, by their frequencies."""
    _, counts = symbols.unique(return_counts=True)
    shares = counts.double() / counts.sum()
    return float(-(shares * shares.log2()).sum())


def measure(start: Training, lr: float, args: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a learning rate."""
    training = start.branch(lr)
    for _ in training.advance(args.settle):
        pass
    before = training.weights()
    bits = 0
    found = []
    for after in training.advance(args.measured):
        bits += message_bits(after, before)
        found.append(differences(after, before))
        before = after
    changes, exponents = (torch.cat(column) for column in zip(*found, strict=True))
    return {
        "lr": lr,
        "unchanged": float((changes == 0).double().mean()),
        "bits": bits / changes.numel(),
        "entropy": entropy(changes),
        "entropy_given_exponent": entropy(changes * 256 + exponents) - entropy(exponents),
        "numel": before.numel(),
    }


def section(result: dict[str, Any]) -> tuple[str, str]:
    """Return heading and body of the page: see sections.py."""
    header = ["learning rate", "unchanged", "codec", "entropy", "given the exponent"]
    rows = []
    for row in result["rows"]:
        figures = [f"{row[key]:.2f}" for key in ("bits", "entropy", "entropy_given_exponent")]
        rows.append([f"{row['lr']:g}", f"{100 * row['unchanged']:.0f} %", *figures])
    return "Exact weights: bits per difference", (
        "Bits per weight and step of the exact differences between the bf16 roundings of the\n"
        f"{result['rows'][0]['numel']} weights of a GPT in training, and entropies of the same\n"
        "data.\n\n" + sections.table(header, rows)
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--lr", type=float, nargs="+", default=[1e-3, 3e-4, 1e-4, 1e-5])
    add("--warmup", type=int, default=400, help="steps in common, at the rate --warmup-lr")
    add("--warmup-lr", type=float, default=1e-3)
    add("--settle", type=int, default=100, help="steps of each rate before it is measured")
    add("--measured", type=int, default=20, help="steps that are measured")
    add("--layers", type=int, default=2)
    add("--width", type=int, default=128)
    add("--seed", type=int, default=0)
    add("--text", type=Path, help="a file; default: the documentation of CPython")
    add("--json", type=Path, default=Path("lossless_bits.json"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)  # sums of several threads differ in their last bits
    tokens, _ = text.split(text.load(args.text))
    start = Training(args, tokens)
    for _ in start.advance(args.warmup):
        pass
    rows = [measure(start, lr, args) for lr in args.lr]
    print(section(report.save(args.json, "lossless_bits", args, rows=rows))[1])


if __name__ == "__main__":
    main()
