"""The model and the batches of a comparison: the demo's GPT or a model of your own.

`compare.py --model MODULE:FUNCTION` calls the function on every rank, with the seed as its only
argument, and expects (module, batch):

    def build(seed):
        module = MyModel()  # module(*batch) returns the loss, a scalar
        def batch(step, rank, size):  # `size` samples of micro-step `step`: a tuple of tensors
            return inputs, targets
        return module, batch

Batches must be a function of their arguments, so that every scheme trains on the same data. Steps
from HELD_OUT on are never trained on: return held-out samples for them. The function initialises
the module from the seed, equally on all ranks. MODULE may be in the current folder. May import the
standard library, torch and, for the GPT, gpt and text.
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
    """A module whose forward returns the loss, its batches, and its ZeRO-3 leaf modules."""

    module: torch.nn.Module
    batch: Batch
    whole_layers: list[type]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of train.py, which compare.py passes on. Defaults are those of the demo."""
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
    """Return the function MODULE:FUNCTION, also from the current folder.

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
    """Return the task of the command line. It is equal on all ranks and in all schemes."""
    if args.model is None:
        return _gpt(args, on_cpu=on_cpu)
    torch.manual_seed(args.seed)
    module, batch = find(args.model)(args.seed)
    return Task(module, batch, [])


def _gpt(args: argparse.Namespace, *, on_cpu: bool) -> Task:
    torch.manual_seed(args.seed)
    config = GPTConfig(
        layers=args.layers,
        width=args.width,
        heads=args.heads,
        seq_len=args.seq_len,
        compute_dtype=torch.float32 if on_cpu else None,
    )
    training, validation = text.split(text.load(args.text))

    def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, ...]:
        tokens = training
        if step >= HELD_OUT:
            tokens = validation
            step -= HELD_OUT
        return text.batch(
            tokens, seed=args.seed, step=step, rank=rank, batch_size=size, seq_len=args.seq_len
        )

    # Blocks are so small that one gather per block is enough.
    return Task(GPT(config), batch, [Block])
