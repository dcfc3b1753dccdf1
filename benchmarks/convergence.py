"""Measures the loss that a scheme costs: held out, after the rate's decay, in pairs of runs.

    python benchmarks/convergence.py                                # every preset, hours
    python benchmarks/convergence.py --schemes sdp4bit,qsdp --text my.txt --interval 0.1

A base model is trained once, in full precision and past its plateau. From its checkpoint every
scheme continues while the learning rate falls to 3 %. The loss is that of the exact weights on
held-out text. A pair is a run of a scheme and one in full precision, with the same checkpoint and
seed; the seed sets the order of the data. Every scheme gets --pairs pairs, then the scheme with the
widest interval gets one more, until all intervals are narrow. Ranks are simulated in one process,
with the bits of real ones (simulated.py).

Every finished run is a line in OUT/runs.jsonl; the next call continues there. `--report` only
writes the result file and its section. With `--limit SECONDS` a call ends in the middle of a run
and leaves a checkpoint, from which the next call goes on with equal bits.

`--base-steps 0` trains every run from the first weights on: the rate rises over the first steps and
then falls, and the codec acts in all of them.

`--sums hsdp` and `--sums ddp` sum gradients as HSDP and DDP do (simulated_replicas.py);
`--schemes eden4,eden4:gradients.returned_bits=4` compares widths of the sums that are sent back.
With `--sums ddp` the entry `powersgd:rank=4` is PowerSGD with error feedback (power_sgd.py).

`--device cuda` trains on a GPU with bf16 autocast. There bits depend on the GPU. `--text installed`
has 60 MB of Python source for models of a hundred million parameters.

`--tune source` fine-tunes instead: every scheme continues from the base model with a new optimizer,
at --tune-lr, on Python source or a file of yours. The loss is that of held-out text of that kind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported

import convergence_page
import paired
import power_sgd
import report
import text
from gpt import GPT, GPTConfig
from schemes import SchemeEntry, parse_schemes, with_overrides
from simulated import Simulation
from simulated_replicas import WAYS
from torch import Tensor
from tqdm import tqdm

from ds_quant.comm.topology import Topology
from ds_quant.config.schema import parse_block
from ds_quant.policy import cost
from ds_quant.policy.scheme import Scheme

BASELINE = "full_precision"
POWER_SGD = "powersgd"
# In the order of a study: a study that is cut short has the first ones.
_LEARNED = "weights.levels=learned,weights.rounding=nearest,weights.level_steps=[1,75,150,225]"
SCHEMES = (
    "sdp4bit,qsdp,zeropp,qsdp_w4g4,ulq,tlq,tlq_hs,qwd,qw4,lossless_w_g4,lossless_w_g3,lossless_w_g2,"
    "eden4,eden3,eden2,sdp4bit_paper,qw4:weights.group_size=32,qw4:weights.group_size=128,"
    f"qsdp_w4g4:{_LEARNED},qsdp:weights.bits=6,gradients.bits=4,qsdp:weights.bits=5,gradients.bits=4"
)
FLOOR = 0.03  # of the rate, at the end of its decay
LAST = 50  # steps over which the training loss is averaged
POINTS = 4  # of the held-out curve of a run from the first weights on
MEASURED = 20  # steps of a run in which reduced gradients are compared with exact ones
BASE_SEED = 1 << 20  # data order of the base model, apart from those of the pairs


CHOICES = {"sums": ("zero3", *WAYS), "device": ("cpu", "cuda")}
MAY_BE_ZERO = ("base_steps",)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of all runs of a study.

    batch: sequences per rank and micro-step.
    base_steps: steps of the base model; 0: runs begin at the initial weights.
    sums: see ``Simulation``.
    """

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
    sums: str = "zero3"
    device: str = "cpu"

    @property
    def topology(self) -> Topology:
        return Topology(world=self.nodes * self.node_size, node_size=self.node_size)

    def model(self) -> GPT:
        """Return the model with its initial weights, in bf16; it computes in fp32, see gpt.py."""
        torch.manual_seed(0)
        config = GPTConfig(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            seq_len=self.seq_len,
            compute_dtype=torch.float32,
        )
        return GPT(config).bfloat16().to(self.device)

    def scheme(self, entry: SchemeEntry, seed: int) -> Scheme:
        """Return the scheme of an entry of --schemes. seed: of its random bits."""
        if entry.name == POWER_SGD:
            (entry,) = parse_schemes(BASELINE)
        block = {"scheme": entry.name, "seed": seed, "node_size": self.node_size}
        config = parse_block(with_overrides(block, entry.overrides))
        config.validate_world(self.topology.world)
        return config.to_scheme()

    def simulation(self, entry: SchemeEntry, seed: int) -> Simulation:
        """Return a simulation of the model with its initial weights."""
        return Simulation(
            self.model(),
            self.scheme(entry, seed),
            partial(torch.optim.AdamW, lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1),
            topology=self.topology,
            micro_steps=self.micro_steps,
            sums=self.sums,
            own_sums=self.power_sgd(entry, seed),
        )

    def power_sgd(self, entry: SchemeEntry, seed: int) -> power_sgd.PowerSGD | None:
        """Return the sums of an entry that is PowerSGD, None for a scheme.

        Raises:
            ValueError: other sums than DDP's, several micro-steps, or no rank.
        """
        if entry.name != POWER_SGD:
            return None
        if (self.sums, self.micro_steps) != ("ddp", 1):
            raise ValueError(
                f"{entry.label} with --sums {self.sums} --micro-steps {self.micro_steps}: allowed: "
                "--sums ddp --micro-steps 1"
            )
        parameters = list(self.model().parameters())
        return power_sgd.PowerSGD(
            parameters, ranks=self.topology.world, rank=rank_of(entry), seed=seed
        )

    def rate(self, step: int, first: float) -> float:
        """Return the learning rate of a step of a run: ``first``, falling to FLOOR of it.

        Without a base model the rate rises first.
        """
        rate = first * (1 - (1 - FLOOR) * (step + 1) / self.steps)
        if self.base_steps:
            return rate
        return rate * min(1, (step + 1) / warmup_steps(self.steps))


def rank_of(entry: SchemeEntry) -> int:
    """Return the rank of the factors of PowerSGD.

    Raises:
        ValueError: the overrides are not a rank.
    """
    rank = entry.overrides.get("rank")
    if entry.overrides.keys() != {"rank"} or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"schemes: {entry.label!r}: allowed: {POWER_SGD}:rank=R, R above 0")
    return rank


def warmup_steps(steps: int) -> int:
    """Return over how many of a training's first steps the rate rises."""
    return max(1, steps // 40)


# ---- the time of a call ----


class OutOfTime(Exception):
    """The time of the call is over. The message says where the run will go on."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Ends a call after ``limit`` seconds, and keeps what a run needs to go on.

    folder: of the checkpoint.
    end: on the clock of ``time.monotonic``; None: no limit.
    """

    folder: Path
    end: float | None

    def saved(self, run: str) -> dict[str, Any] | None:
        """Return the checkpoint of a run, None if it has none. run: its name."""
        path = self._path(run)
        return torch.load(path) if path.exists() else None

    def check(self, run: str, state: Callable[[], dict[str, Any]]) -> None:
        """Return if there is time. Otherwise write a checkpoint.

        state: makes its content.

        Raises:
            OutOfTime: the checkpoint is written.
        """
        if self.end is None or time.monotonic() < self.end:
            return
        path = self._path(run)
        torch.save(state(), path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
        raise OutOfTime(f"the time is over in the run {run!r}: call again to go on")

    def forget(self, run: str) -> None:
        """Remove the checkpoint of a finished run."""
        self._path(run).unlink(missing_ok=True)

    def _path(self, run: str) -> Path:
        return self.folder / f"run-{hashlib.sha256(run.encode()).hexdigest()[:16]}.pt"


# ---- runs ----


class Corpus:
    """Training text and held-out text."""

    def __init__(self, path: Path | None, settings: Settings) -> None:
        tokens = text.load(path)
        self.about = {"bytes": len(tokens), "sha256": text.fingerprint(tokens)}
        self._training, self._held_out = text.split(tokens)
        self._settings = settings

    def batch(self, seed: int, step: int, micro_step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets. step: optimizer step."""
        return text.batch(
            self._training,
            seed=seed,
            step=step * self._settings.micro_steps + micro_step,
            rank=rank,
            batch_size=self._settings.batch,
            seq_len=self._settings.seq_len,
        )

    @torch.no_grad()
    def held_out_loss(self, simulation: Simulation, weights: list[Tensor] | None = None) -> float:
        """Return the mean loss over the held-out text in disjoint windows, nats per byte.

        weights: weights to compute with, by default the exact ones.
        """
        simulation.compute_with(weights or simulation.exact_weights())
        seq_len = self._settings.seq_len
        count = (len(self._held_out) - 1) // seq_len
        inputs = self._held_out[: count * seq_len].long().view(count, seq_len)
        targets = self._held_out[1 : count * seq_len + 1].long().view(count, seq_len)
        total = 0.0
        for x, y in zip(inputs.split(32), targets.split(32), strict=True):
            total += float(simulation.loss(x, y)) * len(x)
        return total / count


def base_settings(settings: Settings) -> Settings:
    """Return the settings of the base model, which all ways of summing begin at."""
    return replace(settings, sums="zero3")


def train_base(settings: Settings, corpus: Corpus, path: Path, clock: Clock) -> dict[str, Any]:
    """Train the base model at a constant rate. Write its checkpoint and return it.

    settings: those of ``base_settings``.
    """
    (entry,) = parse_schemes(BASELINE)
    simulation = settings.simulation(entry, 0)
    curve: list[dict[str, Any]] = []
    first = 0
    run = path.stem
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = clock.saved(run)
    if saved is not None:
        simulation.resume(saved["simulation"])
        curve, first = saved["curve"], saved["simulation"]["step"]
    warmup = warmup_steps(settings.base_steps)
    bar = tqdm(range(first, settings.base_steps), desc="base model", disable=None, leave=False)
    for step in bar:
        simulation.set_rate(settings.lr * min(1, (step + 1) / warmup))
        loss, _ = simulation.step(partial(corpus.batch, BASE_SEED, step))
        if (step + 1) % max(1, settings.base_steps // 10) == 0:
            curve.append({"step": step + 1, "held_out": corpus.held_out_loss(simulation)})
            tqdm.write(f"base model, step {step + 1}: held out {curve[-1]['held_out']:.4f}")
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        clock.check(run, lambda: {"simulation": simulation.progress(), "curve": curve})
    state = {**simulation.state(), "curve": curve}
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)
    clock.forget(run)
    return state


def branch(
    settings: Settings,
    corpus: Corpus,
    base: dict[str, Any],
    entry: SchemeEntry,
    seed: int,
    clock: Clock,
    tune_lr: float | None = None,
) -> dict[str, Any]:
    """Continue from the base model. Return losses and errors of the run.

    tune_lr: first learning rate of a fine-tuning, which has a new optimizer; None: the rate decays.
    """
    simulation = settings.simulation(entry, seed)
    simulation.load(base, weights_only=tune_lr is not None)
    losses: list[float] = []
    errors: list[float] = []
    curve: list[dict[str, Any]] = []
    title = f"{entry.label}, seed {seed}"
    run = f"{title}, {_digest([asdict(settings), corpus.about, tune_lr])}"
    saved = clock.saved(run)
    if saved is not None:
        simulation.resume(saved["simulation"])
        losses, errors, curve = saved["losses"], saved["errors"], saved["curve"]

    def state() -> dict[str, Any]:
        return {
            "simulation": simulation.progress(),
            "losses": losses,
            "errors": errors,
            "curve": curve,
        }

    every = max(1, settings.steps // MEASURED)
    steps = range(len(losses), settings.steps)
    for step in tqdm(steps, desc=title, disable=None, leave=False):
        simulation.set_rate(settings.rate(step, tune_lr or settings.lr))
        loss, error = simulation.step(partial(corpus.batch, seed, step), measure=step % every == 0)
        losses.append(loss)
        if error is not None:
            errors.append(error)
        if not settings.base_steps and (step + 1) % max(1, settings.steps // POINTS) == 0:
            curve.append({"step": step + 1, "held_out": corpus.held_out_loss(simulation)})
        clock.check(run, state)
    clock.forget(run)
    held_out = travelled = corpus.held_out_loss(simulation)
    if simulation.scheme.weights is not None:
        travelled = corpus.held_out_loss(simulation, simulation.decoded_weights())
    figures = {
        "held_out": held_out,
        "held_out_travelled": travelled,
        "training": fmean(losses[-LAST:]),
        "gradient_error": fmean(errors),
        "weight_error": simulation.drift(),
    }
    return {**figures, "curve": curve} if curve else figures


def before(settings: Settings, corpus: Corpus, base: dict[str, Any]) -> float:
    """Return the held-out loss of the base model."""
    (entry,) = parse_schemes(BASELINE)
    simulation = settings.simulation(entry, 0)
    simulation.load(base, weights_only=True)
    return corpus.held_out_loss(simulation)


# ---- the study ----


class Ledger:
    """Finished runs of one study. Each is a line of a file that studies may share.

    study: digest of its settings, text and base model.
    """

    def __init__(self, path: Path, study: str) -> None:
        self._path = path
        self._study = study
        self.runs: list[dict[str, Any]] = []
        if not path.exists():
            return
        for line in path.read_text("utf-8").splitlines():
            run = json.loads(line)
            if run.pop("study") == study:
                self.runs.append(run)

    def add(self, run: dict[str, Any]) -> None:
        """Add a run and append it to the file."""
        self.runs.append(run)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"study": self._study, **run}) + "\n")

    def labels(self) -> list[str]:
        """Return the schemes of the runs except full precision, in the order of the first runs."""
        labels = dict.fromkeys(run["scheme"] for run in self.runs)
        return [label for label in labels if label != BASELINE]

    def by_seed(self, label: str, key: str = "held_out") -> dict[int, float]:
        """Return a figure of every run of a scheme."""
        return {run["seed"]: run[key] for run in self.runs if run["scheme"] == label}

    def gap(self, label: str, key: str = "held_out") -> paired.Gap | None:
        """Return the gap of a scheme to full precision in per cent."""
        return paired.gap(self.by_seed(label, key), self.by_seed(BASELINE, key))


def missing_runs(
    ledger: Ledger, labels: Sequence[str], args: argparse.Namespace
) -> Iterator[tuple[str, int]]:
    """Return scheme and seed of every missing run, until all intervals are narrow.

    The ledger is read again after every run.
    """
    while True:
        pairs = {label: len(ledger.by_seed(label)) for label in labels}
        half_widths = {}  # of the schemes that need another pair
        for label in labels:
            gap = ledger.gap(label)
            if pairs[label] >= args.most_pairs:
                continue
            if gap is None or not gap.is_settled(interval=args.interval, least=args.pairs):
                half_widths[label] = None if gap is None else gap.half_width
        if not half_widths:
            return
        too_few = [label for label in half_widths if pairs[label] < args.pairs]
        label = too_few[0] if too_few else _widest(half_widths)
        for name in (BASELINE, label):
            if pairs[label] not in ledger.by_seed(name):
                yield name, pairs[label]


def _widest(half_widths: Mapping[str, float | None]) -> str:
    """Return the scheme with the widest interval. One pair has no interval: it is the widest."""

    def width(label: str) -> float:
        half_width = half_widths[label]
        return math.inf if half_width is None else half_width

    return max(half_widths, key=width)


def study(args: argparse.Namespace, settings: Settings) -> tuple[Ledger, dict[str, Any]]:
    """Do the missing runs. Return all runs, and the facts about base model and text."""
    entries = {entry.label: entry for entry in parse_schemes(f"{BASELINE},{args.schemes}")}
    for entry in entries.values():
        settings.scheme(entry, 0)  # refuses a wrong one before the first run
        settings.power_sgd(entry, 0)
    corpus = Corpus(args.text, settings)
    clock = Clock(
        folder=args.out, end=None if args.limit is None else time.monotonic() + args.limit
    )
    base, ledger, about = _opened(args, settings, corpus, clock)
    tune_lr = None if args.tune is None else args.tune_lr
    if tune_lr is not None:
        corpus = Corpus(args.tune, settings)
        about["tuning"] = {"lr": tune_lr, "text": corpus.about}
        ledger = Ledger(args.out / "runs.jsonl", _digest(about))
        about["tuning"]["before"] = before(settings, corpus, base)
    if args.report:
        return ledger, about
    labels = [label for label in entries if label != BASELINE]
    for label, seed in missing_runs(ledger, labels, args):
        run = branch(settings, corpus, base, entries[label], seed, clock, tune_lr)
        ledger.add({"scheme": label, "seed": seed, **run})
        if label != BASELINE:
            tqdm.write(f"{label}: {ledger.gap(label)}")
    return ledger, about


def _opened(
    args: argparse.Namespace, settings: Settings, corpus: Corpus, clock: Clock
) -> tuple[dict[str, Any], Ledger, dict[str, Any]]:
    """Return the base model, the runs that began at it, and the facts about model and text.

    The base model is trained if its checkpoint is missing.
    """
    about: dict[str, Any] = {"settings": asdict(settings), "text": corpus.about}
    of_base = base_settings(settings)
    path = args.out / f"base-{_digest([asdict(of_base), corpus.about])}.pt"
    base = torch.load(path) if path.exists() else train_base(of_base, corpus, path, clock)
    weights = hashlib.sha256(base["master"].cpu().numpy().tobytes()).hexdigest()
    about["base"] = {"sha256": weights, "curve": base["curve"]}
    return base, Ledger(args.out / "runs.jsonl", _digest(about)), about


def save(
    args: argparse.Namespace, settings: Settings, ledger: Ledger, about: dict[str, Any]
) -> dict[str, Any]:
    """Write the result file with all schemes that have pairs, its page and its picture."""
    entries = parse_schemes(args.schemes)
    known = {entry.label for entry in entries}
    for label in ledger.labels():  # schemes of earlier calls
        if label not in known:
            entries += parse_schemes(label)
    rows = [row(settings, ledger, entry) for entry in entries]
    arguments: dict[str, Any] = asdict(settings)
    arguments |= {"pairs": args.pairs, "interval": args.interval, "text": args.text}
    if args.tune is not None:
        arguments |= {"tune": args.tune, "tune_lr": args.tune_lr}
    arguments["schemes"] = [entry.label for entry in entries]
    content = {
        **about,
        "parameters": sum(p.numel() for p in settings.model().parameters()),
        "rows": [row for row in rows if row["gap"] is not None],
        "runs": ledger.runs,
    }
    convergence_page.draw(content, args.json.with_suffix(".png"))
    return report.save(args.json, "convergence", arguments, commas=["schemes"], **content)


def row(settings: Settings, ledger: Ledger, entry: SchemeEntry) -> dict[str, Any]:
    """Return gaps, errors and bits of a scheme."""
    parameters = dict(settings.model().named_parameters())
    param_specs = [
        cost.ParamSpec(name, tuple(p.shape), p.dtype, True) for name, p in parameters.items()
    ]
    comm_volume = cost.comm_volume(
        settings.scheme(entry, 0),
        3,
        param_specs,
        ranks=settings.topology.world,
        node_size=settings.node_size,
        gradient_dtype=torch.bfloat16,
        replicas=settings.sums != "zero3",
    )
    gradient_bits = 8 * comm_volume.gradients
    if entry.name == POWER_SGD:
        shapes = [p.shape for p in parameters.values()]
        gradient_bits = power_sgd.bits_per_element(shapes, rank_of(entry))
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
        "gradient_bits": gradient_bits,
    }


def _plain(gap: paired.Gap | None) -> dict[str, Any] | None:
    return None if gap is None else asdict(gap)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def parse_args(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Settings]:
    """Return the command line and the settings of all runs of the study."""
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--schemes", default=SCHEMES, metavar="A,B:KEY=VALUE,...", help="default: every preset")
    add("--pairs", type=int, default=8, help="pairs of every scheme, at least")
    add("--most-pairs", type=int, default=32, help="pairs of a scheme, at most")
    add("--interval", type=float, default=0.05, help="half-width of a narrow interval, in %%")
    add(
        "--text",
        type=Path,
        help=f"file to train on; {text.INSTALLED}: Python source of CPython and torch; default: "
        "the documentation of CPython",
    )
    add("--tune", type=Path, metavar="FILE", help=f"fine-tune on it; {text.SOURCE}: Python source")
    add("--tune-lr", type=float, default=2e-5, help="first learning rate of fine-tuning")
    add("--limit", type=float, help="seconds after which the call ends, to go on in the next one")
    add("--report", action="store_true", help="run nothing, write the result file and its section")
    add("--out", type=Path, default=Path("convergence_out"), help="folder of checkpoint and runs")
    add("--json", type=Path, help="default: OUT/convergence.json, its section beside it")
    for field in fields(Settings):
        add(option_of(field.name), type=type(field.default), default=field.default)
    args = parser.parse_args(argv)
    args.json = args.json or args.out / "convergence.json"
    values = {field.name: getattr(args, field.name) for field in fields(Settings)}
    for name, value in values.items():
        if isinstance(value, str):
            if value not in CHOICES[name]:
                parser.error(f"{option_of(name)}={value}: allowed: {', '.join(CHOICES[name])}")
        elif value < 0 or (value == 0 and name not in MAY_BE_ZERO):
            parser.error(f"{option_of(name)}={value}: allowed: above 0")
    return args, Settings(**values)


def option_of(name: str) -> str:
    """Return the option of a setting."""
    return f"--{name.replace('_', '-')}"


def main(argv: Sequence[str] | None = None) -> int:
    args, settings = parse_args(argv)
    torch.set_num_threads(1)  # sums of several threads differ in their last bits
    try:
        ledger, about = study(args, settings)
    except (OSError, ValueError, OutOfTime) as error:
        print(f"convergence.py: {error}", file=sys.stderr)
        return 1
    save(args, settings, ledger, about)
    print(args.json.with_suffix(".md").read_text("utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
