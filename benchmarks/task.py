"""What a comparison trains: a module and its batches, the demo's GPT or a model of your own.

`compare.py --model MODULE:FUNCTION` calls the function on every rank, with the seed as its only
argument, and expects (module, batch):

    def build(seed):
        module = MyModel()  # module(*batch) returns the loss, a scalar
        def batch(step, rank, size):  # `size` samples of micro-step `step`: a tuple of tensors
            return inputs, targets
        return module, batch

Batches must be a function of their arguments, so that every scheme trains on the same data.
Steps from HELD_OUT on are never trained on: give other samples for them. The module is initialised
by the function, from the seed, equally on all ranks. MODULE is found in the current folder too.
May import the standard library, torch and, for the GPT, gpt and text.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import text
import torch
from gpt import GPT, Block, GPTConfig

HELD_OUT = 1 << 30  # micro-steps from here on are for validation

Batch = Callable[[int, int, int], tuple[torch.Tensor, ...]]  # step, rank, size


class Task(NamedTuple):
    """A module whose forward returns the loss, batches, and layers that ZeRO-3 gathers whole."""

    module: torch.nn.Module
    batch: Batch
    whole_layers: list[type]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of train.py, which compare.py hands on; sizes are those of the demo."""
    add = parser.add_argument
    add("--steps", type=int, default=150, help="optimizer steps per scheme")
    add("--seed", type=int, default=0, help="of initial weights, data order and rounding")
    add("--layers", type=int, default=2)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--seq-len", type=int, default=64, help="bytes per sequence")
    add("--model", metavar="MODULE:FUNCTION", help="your own model instead of the GPT, see task.py")
    add("--text", type=Path, help="file to train on; default: the documentation of CPython")


def find(name: str) -> Callable[[int], tuple[torch.nn.Module, Batch]]:
    """The function MODULE:FUNCTION, also from the current folder.

    Raises:
        ValueError: there is no such module or function.
    """
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--model={name}: {error}; allowed: MODULE:FUNCTION") from error


def load_task(args: argparse.Namespace, *, on_cpu: bool) -> Task:
    """The task that the command line names; equal on all ranks and in all schemes."""
    if args.model is None:
        return _gpt(args, on_cpu=on_cpu)
    torch.manual_seed(args.seed)
    module, batch = find(args.model)(args.seed)
    return Task(module, batch, [])


def _gpt(args: argparse.Namespace, *, on_cpu: bool) -> Task:
    torch.manual_seed(args.seed)
    config = GPTConfig(
        layers=args.layers, width=args.width, heads=args.heads, seq_len=args.seq_len,
        compute_dtype=torch.float32 if on_cpu else None,
    )  # fmt: skip
    training, validation = text.split(text.load(args.text))

    def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, ...]:
        tokens, step = (training, step) if step < HELD_OUT else (validation, step - HELD_OUT)
        where = {"seed": args.seed, "step": step, "rank": rank}
        return text.batch(tokens, **where, batch_size=size, seq_len=args.seq_len)

    # A block of this size is not worth a collective of its own.
    return Task(GPT(config), batch, [Block])
