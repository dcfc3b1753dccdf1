"""Bytes to train on: English documentation that every Python carries, in addressed batches.

The demo downloads nothing. CPython ships about 2 MB of text: the language reference in
`pydoc_data.topics` and the docstrings of the standard library. Batches are addressed by (seed,
step, rank), never drawn in order, so every scheme trains on the same bytes.
May import the standard library and torch.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

# Test suites, vendored packages and the 2to3 fixtures hold data, not prose.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages"}
MIN_LETTER_SHARE = 0.75  # drops doctest tables and tables of numbers
MIN_LENGTH = 80  # characters; shorter docstrings are labels


def documentation() -> str:
    """Return the English documentation of the running CPython, ASCII, the same on every call."""
    pieces = dict.fromkeys(piece for piece in (*_topics(), *_docstrings()) if _is_prose(piece))
    text = "\n\n".join(pieces)  # dict.fromkeys: first occurrence wins, order kept
    return text.encode("ascii", "ignore").decode("ascii")


def _topics() -> Iterator[str]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions package it apart
        return
    for name in sorted(topics):
        yield topics[name].strip()


def _docstrings() -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in _sources(Path(sysconfig.get_path("stdlib"))):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates and deliberately broken sources
            continue
        for node in ast.walk(tree):
            if isinstance(node, documented):
                yield ast.get_docstring(node) or ""


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in SKIPPED_FOLDERS:
            yield from _sources(path)
        elif path.suffix == ".py":
            yield path


def source_code() -> str:
    """Return the Python source that CPython ships, ASCII: another text, to fine-tune on."""
    sources = _sources(Path(sysconfig.get_path("stdlib")))
    return b"\n\n".join(path.read_bytes() for path in sources).decode("ascii", "ignore")


def _is_prose(piece: str) -> bool:
    letters = sum(character.isalpha() or character.isspace() for character in piece)
    return len(piece) >= MIN_LENGTH and letters >= MIN_LETTER_SHARE * len(piece)


def installed_sources() -> str:
    """Return the Python source of CPython and torch, ASCII: 60 MB for larger models.

    Its bytes depend on the versions of both.
    """
    sources = [
        *_sources(Path(sysconfig.get_path("stdlib"))),
        *_sources(Path(torch.__file__).parent),
    ]
    return b"\n\n".join(path.read_bytes() for path in sources).decode("ascii", "ignore")


# Words that stand for a text in place of a path.
SOURCE = "source"  # `source_code()`
INSTALLED = "installed"  # `installed_sources()`
SOURCE_NUMEL = 2 << 20  # bytes of the source code to use


def load(path: Path | None = None) -> Tensor:
    """Return a text as bytes, (numel,) uint8.

    path: a file, `SOURCE`, `INSTALLED`, or None for the documentation.
    """
    if path is None:
        data = documentation().encode("ascii")
    elif str(path) == SOURCE:
        data = source_code().encode("ascii")[:SOURCE_NUMEL]
    elif str(path) == INSTALLED:
        data = installed_sources().encode("ascii")
    else:
        data = Path(path).read_bytes()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def fingerprint(tokens: Tensor) -> str:
    """Return the hexadecimal SHA-256 of `tokens`, (numel,) uint8."""
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()


def split(tokens: Tensor, *, validation_share: float = 0.1) -> tuple[Tensor, Tensor]:
    """Split `tokens`, (numel,), into the first part for training and the last for validation."""
    cut = round(len(tokens) * (1 - validation_share))
    return tokens[:cut], tokens[cut:]


def batch(
    tokens: Tensor,
    *,
    seed: int,
    step: int,
    rank: int,
    batch_size: int,
    seq_len: int,
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of one micro-step, both (batch_size, seq_len) int64.

    The result depends on the arguments only. step: micro-step.

    Raises:
        ValueError: `tokens`, (numel,) uint8, is shorter than one sequence and its target.
    """
    num_starts = len(tokens) - seq_len
    if num_starts < 1:
        raise ValueError(f"text of {len(tokens)} bytes: at least seq_len + 1 = {seq_len + 1}")
    generator = random.Random(f"{seed}/{step}/{rank}")  # a string seed is hashed with SHA-512
    starts = torch.tensor([generator.randrange(num_starts) for _ in range(batch_size)])
    windows = tokens[starts[:, None] + torch.arange(seq_len + 1)].long()  # (batch, seq_len + 1)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
