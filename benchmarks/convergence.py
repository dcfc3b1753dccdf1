"""What a scheme costs in loss: held out, after the rate's decay, in pairs that differ in it alone.

    python benchmarks/convergence.py                                # every preset, hours
    python benchmarks/convergence.py --schemes sdp4bit,qsdp --text my.txt --interval 0.1

A base model is trained in full precision past its plateau, once. From its checkpoint each scheme
trains on while the rate falls to 3 %; the loss is that of the exact weights on text that nobody
trained on. A pair shares checkpoint and data order, which is the seed, with full precision. Every
scheme gets the least number of pairs, then the widest interval gets one more, until all are narrow.
Ranks are simulated in one process, with the bits of real ones (simulated.py).

Every finished run is a line in OUT/runs.jsonl: call it again to go on. `--report` only writes the
result file and its section.

`--tune source` fine-tunes instead: every scheme goes on from the base model with a new optimizer,
at --tune-lr, on Python source (or a file of yours); the loss is that of held-out text of its kind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import convergence_page
import paired
import report
import text
import torch
from gpt import GPT, GPTConfig
from schemes import SchemeEntry, parse_schemes, with_overrides
from simulated import Simulation
from torch import Tensor
from tqdm import tqdm

from ds_quant.comm.topology import Topology
from ds_quant.config.schema import parse_block
from ds_quant.policy import cost
from ds_quant.policy.scheme import Scheme

BASELINE = "full_precision"
# In the order in which a study begins: a study that is cut short has the first ones.
_LEARNED = "weights.levels=learned,weights.rounding=nearest,weights.level_steps=[1,75,150,225]"
SCHEMES = (
    "sdp4bit,qsdp,zeropp,qsdp_w4g4,ulq,tlq,tlq_hs,qwd,qw4,lossless_w_g4,lossless_w_g3,lossless_w_g2,"
    "eden4,eden3,eden2,sdp4bit_paper,qw4:weights.group_size=32,qw4:weights.group_size=128,"
    f"qsdp_w4g4:{_LEARNED},qsdp:weights.bits=6,gradients.bits=4,qsdp:weights.bits=5,gradients.bits=4"
)
FLOOR = 0.03  # of the rate, at the end of its decay
LAST = 50  # steps over which training loss is averaged
MEASURED = 20  # steps of a run whose reduced gradients are compared with exact ones
BASE_SEED = 1 << 20  # data order of the base model, apart from those of the pairs


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all runs of a study share. Batches are sequences per rank and micro-step."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    seq_len: int = 128
    batch: int = 4
    nodes: int = 2
    node_size: int = 2
    micro_steps: int = 1
    base_steps: int = 3000
    steps: int = 300
    lr: float = 2e-3

    @property
    def topology(self) -> Topology:
        return Topology(world=self.nodes * self.node_size, node_size=self.node_size)

    def model(self) -> GPT:
        """With the first weights, in bf16 and computing in fp32, see gpt.py."""
        torch.manual_seed(0)
        config = GPTConfig(
            layers=self.layers, width=self.width, heads=self.heads, seq_len=self.seq_len,
            compute_dtype=torch.float32,
        )  # fmt: skip
        return GPT(config).bfloat16()

    def scheme(self, entry: SchemeEntry, seed: int) -> Scheme:
        """Of an entry of --schemes, with random bits of ``seed``."""
        block = {"scheme": entry.name, "seed": seed, "node_size": self.node_size}
        config = parse_block(with_overrides(block, entry.overrides))
        config.validate_world(self.topology.world)
        return config.to_scheme()

    def simulation(self, entry: SchemeEntry, seed: int) -> Simulation:
        """Of training the model from its first weights."""
        return Simulation(
            self.model(), self.scheme(entry, seed),
            partial(torch.optim.AdamW, lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1),
            topology=self.topology, micro_steps=self.micro_steps,
        )  # fmt: skip


# ---- runs ----


class Corpus:
    """Text to train on, and text to measure on."""

    def __init__(self, path: Path | None, settings: Settings) -> None:
        tokens = text.load(path)
        self.about = {"bytes": len(tokens), "sha256": text.fingerprint(tokens)}
        self._training, self._held_out = text.split(tokens)
        self._settings = settings

    def batch(self, seed: int, step: int, micro_step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets; `step` counts optimizer steps."""
        s = self._settings
        return text.batch(
            self._training, seed=seed, step=step * s.micro_steps + micro_step, rank=rank,
            batch_size=s.batch, seq_len=s.seq_len,
        )  # fmt: skip

    @torch.no_grad()
    def held_out_loss(self, simulation: Simulation, weights: list[Tensor] | None = None) -> float:
        """Mean over all of the text, in windows that do not overlap, nats per byte.

        weights: to compute with; by default the exact ones.
        """
        simulation.compute_with(weights or simulation.exact_weights())
        seq_len = self._settings.seq_len
        count = (len(self._held_out) - 1) // seq_len
        inputs = self._held_out[: count * seq_len].long().view(count, seq_len)
        targets = self._held_out[1 : count * seq_len + 1].long().view(count, seq_len)
        total = 0.0
        for x, y in zip(inputs.split(32), targets.split(32), strict=True):
            total += float(simulation.module(x, y)) * len(x)
        return total / count


def train_base(settings: Settings, corpus: Corpus, path: Path) -> dict[str, Any]:
    """Train the base model at a constant rate, and write its checkpoint."""
    (entry,) = parse_schemes(BASELINE)
    simulation, curve = settings.simulation(entry, 0), []
    warmup = max(1, settings.base_steps // 40)
    bar = tqdm(range(settings.base_steps), desc="base model", disable=None, leave=False)
    for step in bar:
        simulation.set_rate(settings.lr * min(1, (step + 1) / warmup))
        loss, _ = simulation.step(lambda m, r, s=step: corpus.batch(BASE_SEED, s, m, r))
        if (step + 1) % max(1, settings.base_steps // 10) == 0:
            curve.append({"step": step + 1, "held_out": corpus.held_out_loss(simulation)})
            tqdm.write(f"base model, step {step + 1}: held out {curve[-1]['held_out']:.4f}")
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    state = {**simulation.state(), "curve": curve}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)
    return state


def branch(
    settings: Settings,
    corpus: Corpus,
    base: dict[str, Any],
    entry: SchemeEntry,
    seed: int,
    tune_lr: float | None = None,
) -> dict[str, Any]:
    """Train on from the base model; losses and errors of one run.

    tune_lr: to fine-tune, from this rate on and with a new optimizer; None: the decay.
    """
    simulation, rate = settings.simulation(entry, seed), tune_lr or settings.lr
    simulation.load(base, weights_only=tune_lr is not None)
    losses, errors = [], []
    title = f"{entry.label}, seed {seed}"
    every = max(1, settings.steps // MEASURED)
    for step in tqdm(range(settings.steps), desc=title, disable=None, leave=False):
        simulation.set_rate(rate * (1 - (1 - FLOOR) * (step + 1) / settings.steps))
        loss, error = simulation.step(
            lambda m, r, s=step: corpus.batch(seed, s, m, r), measure=step % every == 0
        )
        losses.append(loss)
        if error is not None:
            errors.append(error)
    held_out = travelled = corpus.held_out_loss(simulation)
    if simulation.scheme.weights is not None:
        travelled = corpus.held_out_loss(simulation, simulation.travelled_weights())
    return {
        "held_out": held_out,
        "held_out_travelled": travelled,
        "training": fmean(losses[-LAST:]),
        "gradient_error": fmean(errors),
        "weight_error": simulation.drift(),
    }


def before(settings: Settings, corpus: Corpus, base: dict[str, Any]) -> float:
    """Held-out loss of the base model."""
    (entry,) = parse_schemes(BASELINE)
    simulation = settings.simulation(entry, 0)
    simulation.load(base, weights_only=True)
    return corpus.held_out_loss(simulation)


# ---- the study ----


class Ledger:
    """Finished runs of one study, each a line of a file that other studies may share."""

    def __init__(self, path: Path, study: str) -> None:
        self._path, self._study = path, study
        self.runs: list[dict[str, Any]] = []
        for line in path.read_text("utf-8").splitlines() if path.exists() else []:
            run = json.loads(line)
            same = run.pop("study") == study  # same settings, text and base model
            if same:
                self.runs.append(run)

    def add(self, run: dict[str, Any]) -> None:
        """Also to the file, at once."""
        self.runs.append(run)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"study": self._study, **run}) + "\n")

    def labels(self) -> list[str]:
        """Schemes of the runs but full precision, in their order."""
        found = dict.fromkeys(run["scheme"] for run in self.runs)
        return [label for label in found if label != BASELINE]

    def by_seed(self, label: str, key: str = "held_out") -> dict[int, float]:
        """A figure of the runs of a scheme."""
        return {run["seed"]: run[key] for run in self.runs if run["scheme"] == label}

    def gap(self, label: str, key: str = "held_out") -> paired.Gap | None:
        """To full precision in per cent."""
        return paired.gap(self.by_seed(label, key), self.by_seed(BASELINE, key))


def missing_runs(
    ledger: Ledger, labels: Sequence[str], args: argparse.Namespace
) -> Iterator[tuple[str, int]]:
    """Scheme and seed of the next run, until every interval is narrow; asked after every run."""

    while True:
        gaps = {label: ledger.gap(label) for label in labels}
        pairs = {label: len(ledger.by_seed(label)) for label in labels}
        open_ = [
            label
            for label, gap in gaps.items()
            if pairs[label] < args.most_pairs
            and (gap is None or not gap.is_settled(interval=args.interval, least=args.pairs))
        ]
        if not open_:
            return
        few = [label for label in open_ if pairs[label] < args.pairs]
        label = few[0] if few else max(open_, key=lambda one: gaps[one].half_width)
        for name in (BASELINE, label):
            if pairs[label] not in ledger.by_seed(name):
                yield name, pairs[label]


def study(args: argparse.Namespace, settings: Settings) -> tuple[Ledger, dict[str, Any]]:
    """Do what is missing; all runs, and what the result file says about the base model."""
    entries = {entry.label: entry for entry in parse_schemes(f"{BASELINE},{args.schemes}")}
    for entry in entries.values():
        settings.scheme(entry, 0)  # a wrong one is refused now, not in an hour
    corpus = Corpus(args.text, settings)
    base, ledger, about = _opened(args, settings, corpus)
    tune_lr = None if args.tune is None else args.tune_lr
    if tune_lr is not None:
        corpus = Corpus(args.tune, settings)
        about["tuning"] = {"lr": tune_lr, "text": corpus.about}
        ledger = Ledger(args.out / "runs.jsonl", _digest(about))
        about["tuning"]["before"] = before(settings, corpus, base)
    labels = [label for label in entries if label != BASELINE]
    for label, seed in missing_runs(ledger, labels, args) if not args.report else ():
        run = branch(settings, corpus, base, entries[label], seed, tune_lr)
        ledger.add({"scheme": label, "seed": seed, **run})
        if label != BASELINE:
            tqdm.write(f"{label}: {ledger.gap(label)}")
    return ledger, about


def _opened(
    args: argparse.Namespace, settings: Settings, corpus: Corpus
) -> tuple[dict[str, Any], Ledger, dict[str, Any]]:
    """The base model, trained if need be, the runs that began at it, and what they share."""
    about: dict[str, Any] = {"settings": asdict(settings), "text": corpus.about}
    path = args.out / f"base-{_digest(about)}.pt"
    base = torch.load(path) if path.exists() else train_base(settings, corpus, path)
    weights = hashlib.sha256(base["master"].numpy().tobytes()).hexdigest()
    about["base"] = {"sha256": weights, "curve": base["curve"]}
    return base, Ledger(args.out / "runs.jsonl", _digest(about)), about


def save(
    args: argparse.Namespace, settings: Settings, ledger: Ledger, about: dict[str, Any]
) -> dict[str, Any]:
    """Write the result file with every scheme that has pairs, its page and its picture."""
    entries = parse_schemes(args.schemes)
    known = {entry.label for entry in entries}  # and those of other calls
    entries += [e for label in ledger.labels() if label not in known for e in parse_schemes(label)]
    found = [row(settings, ledger, entry) for entry in entries]
    arguments = {
        **asdict(settings), "pairs": args.pairs, "interval": args.interval, "text": args.text,
        **({} if args.tune is None else {"tune": args.tune, "tune_lr": args.tune_lr}),
        "schemes": [entry.label for entry in entries],
    }  # fmt: skip
    content = {
        **about,
        "parameters": sum(p.numel() for p in settings.model().parameters()),
        "rows": [one for one in found if one["gap"] is not None],
        "runs": ledger.runs,
    }
    convergence_page.draw(content, args.json.with_suffix(".png"))
    return report.save(args.json, "convergence", arguments, commas=["schemes"], **content)


def row(settings: Settings, ledger: Ledger, entry: SchemeEntry) -> dict[str, Any]:
    """Gaps, errors and bits of one scheme."""
    param_specs = [
        cost.ParamSpec(name, tuple(p.shape), p.dtype, True)
        for name, p in settings.model().named_parameters()
    ]
    comm_volume = cost.comm_volume(
        settings.scheme(entry, 0), 3, param_specs, ranks=settings.topology.world,
        node_size=settings.node_size, gradient_dtype=torch.bfloat16,
    )  # fmt: skip
    errors = {
        key: fmean(ledger.by_seed(entry.label, key).values() or [0.0])
        for key in ("gradient_error", "weight_error")
    }
    return {
        "scheme": entry.label,
        "gap": _plain(ledger.gap(entry.label)),
        "gap_travelled": _plain(ledger.gap(entry.label, "held_out_travelled")),
        **errors,
        "weight_bits": 8 * comm_volume.weights,
        "gradient_bits": 8 * comm_volume.gradients,
    }


def _plain(gap: paired.Gap | None) -> dict[str, Any] | None:
    return None if gap is None else asdict(gap)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def parse_args(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Settings]:
    """The command line, and the part of it that all runs of a study share."""
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--schemes", default=SCHEMES, metavar="A,B:KEY=VALUE,...", help="default: every preset")
    add("--pairs", type=int, default=8, help="least number of pairs")
    add("--most-pairs", type=int, default=32, help="after which an interval may stay wide")
    add("--interval", type=float, default=0.05, help="half-width that is narrow enough, in %%")
    add("--text", type=Path, help="your own; default: the documentation of CPython")
    add("--tune", type=Path, metavar="FILE", help=f"fine-tune on it; {text.SOURCE}: Python source")
    add("--tune-lr", type=float, default=2e-5, help="rate at which fine-tuning begins")
    add("--report", action="store_true", help="run nothing, write the result file and its section")
    add("--out", type=Path, default=Path("convergence_out"), help="checkpoint and finished runs")
    add("--json", type=Path, help="default: OUT/convergence.json, its section beside it")
    for field in fields(Settings):
        option = f"--{field.name.replace('_', '-')}"
        add(option, type=type(field.default), default=field.default)
    args = parser.parse_args(argv)
    args.json = args.json or args.out / "convergence.json"
    given = {field.name: getattr(args, field.name) for field in fields(Settings)}
    for name, value in given.items():
        if value <= 0:
            parser.error(f"--{name.replace('_', '-')}={value}: allowed: above 0")
    return args, Settings(**given)


def main(argv: Sequence[str] | None = None) -> int:
    args, settings = parse_args(argv)
    torch.set_num_threads(1)  # sums of several threads differ in their last bits
    try:
        ledger, about = study(args, settings)
    except (OSError, ValueError) as error:
        print(f"convergence.py: {error}", file=sys.stderr)
        return 1
    save(args, settings, ledger, about)
    print(args.json.with_suffix(".md").read_text("utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
