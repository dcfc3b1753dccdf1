"""What QSDP's learned levels buy against uniform levels, on weights that were really trained.

Trains the demo's GPT in this process for a while, then encodes every weight matrix at several
widths and reports the squared error relative to the weights' energy, ||Q(w) - w||^2 / ||w||^2,
summed over matrices, after one and after four updates of the levels (the published schedule has
four). The wire is the same size for all columns.

    python benchmarks/levels.py --json levels.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import report
import sections
import text
import torch
from gpt import GPT, GPTConfig

from ds_quant.codec.codec import GroupCodec
from ds_quant.codec.levels import initial_levels, update_levels

WIDTHS = (2, 3, 4, 5, 6, 8)
UPDATES = (0, 1, 4)  # 0 is the uniform table


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="training steps")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--group-size", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate of the levels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, help="default: the documentation of CPython")
    parser.add_argument("--json", type=Path, help="also write the table here")
    return parser.parse_args()


def trained_matrices(args: argparse.Namespace) -> tuple[list[torch.Tensor], float]:
    """Weight matrices, fp32, of a GPT after ``args.steps`` steps, and its last loss."""
    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(layers=args.layers, width=args.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, _ = text.split(text.load(args.text))
    for step in range(args.steps):
        inputs, targets = text.batch(
            tokens, seed=args.seed, step=step, rank=0, batch_size=8, seq_len=128
        )
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters() if p.dim() == 2], loss.item()


def relative_error(
    matrices: list[torch.Tensor], codec: GroupCodec, tables: list[torch.Tensor]
) -> float:
    """Squared error over squared norm, both summed over all matrices."""
    error = energy = 0.0
    for matrix, table in zip(matrices, tables, strict=True):
        row = matrix.reshape(1, -1)
        wire = torch.empty(1, codec.wire_bytes(row.numel()), dtype=torch.uint8)
        decoded = torch.empty_like(row)
        codec.encode(row, wire, levels=table)
        codec.decode(wire, decoded, levels=table)
        error += float((decoded - row).square().sum())
        energy += float(row.square().sum())
    return error / energy


def measure(matrices: list[torch.Tensor], args: argparse.Namespace) -> list[dict[str, float]]:
    """One row per width: relative error after each number of updates."""
    rows = []
    for bits in WIDTHS:
        codec = GroupCodec(bits=bits, group_size=args.group_size, levels="learned")
        tables = [initial_levels(bits) for _ in matrices]
        row: dict[str, float] = {"bits": bits}
        for update in range(max(UPDATES) + 1):
            if update in UPDATES:
                row[f"error_after_{update}"] = relative_error(matrices, codec, tables)
            tables = [
                update_levels(t, m, group_size=args.group_size, rate=args.rate)
                for t, m in zip(tables, matrices, strict=True)
            ]
        rows.append(row)
    return rows


def section(result: dict[str, Any]) -> tuple[str, str]:
    """See sections.py."""
    rows = [
        [
            str(row["bits"]), *(f"{row[f'error_after_{update}']:.2e}" for update in UPDATES),
            f"{row['error_after_4'] / row['error_after_0']:.2f}",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    header = ["bits", "uniform", "after 1 update", "after 4 updates", "ratio"]
    return "Learned levels", (
        "Squared error of trained weights over their energy, uniform and learned levels.\n\n"
        + sections.table(header, rows)
    )


def main() -> None:
    args = parse_args()
    matrices, loss = trained_matrices(args)
    rows = measure(matrices, args)
    numel = sum(m.numel() for m in matrices)
    print(f"{len(matrices)} matrices, {numel:,} weights, loss {loss:.3f}, {args.steps} steps")
    print("bits   uniform    1 update (ratio)   4 updates (ratio)")
    for row in rows:
        uniform, once, often = (row[f"error_after_{u}"] for u in UPDATES)
        print(
            f"{row['bits']:>4}   {uniform:.2e}   {once:.2e}  ({once / uniform:.2f})"
            f"   {often:.2e}  ({often / uniform:.2f})"
        )
    if args.json is not None:
        args.text = None if args.text is None else args.text.name
        report.save(args.json, "levels", args, loss=loss, weights=numel, rows=rows)


if __name__ == "__main__":
    main()
