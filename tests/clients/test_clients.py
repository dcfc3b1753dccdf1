"""Client libraries train with the block in their DeepSpeed config as they train without it.

Run by `make test-clients`. Every program of ``programs`` runs under ZeRO-2 and 3 with plain
DeepSpeed, with qsdp and with sdp4bit. ``python -m tests.clients.test_clients`` writes the table of
docs/clients.md.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import harness
from tests.integration import hf
from tests.integration.processes import free_port, run_both

for library in ("transformers", "peft", "trl", "lightning"):
    pytest.importorskip(library, reason=f"needs {library}: pip install 'ds_quant[clients]'")
harness.preload("tests.clients.preload")

pytestmark = pytest.mark.clients

WORLD = 2
PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
CLIENTS = {
    "trainer": "transformers", "resumed": "transformers", "lora": "peft", "sft": "trl",
    "dpo": "trl", "grpo": "trl", "lightning": "lightning",
}  # fmt: skip
NEEDS_CUDA = pytest.mark.skipif(
    torch.cuda.device_count() < WORLD, reason="needs cuda: Lightning's strategy refuses CPUs"
)
STAGES = (2, 3)
BLOCKS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "qsdp": {"scheme": "qsdp", "min_numel": 512},
    # One rank per "node", so that differences and 4 bits are used on two ranks.
    "sdp4bit": {
        "scheme": "sdp4bit", "min_numel": 512, "node_size": 1, "allow_full_replica": True,
    },
}  # fmt: skip


@contextmanager
def _printed(file: Path) -> Iterator[None]:
    """Everything that this process prints goes to a file, whoever prints it."""
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with file.open("wb") as sink:
        for descriptor in (1, 2):
            os.dup2(sink.fileno(), descriptor)
    try:
        yield
    finally:
        for descriptor, original in zip((1, 2), kept, strict=True):
            os.dup2(original, descriptor)
            os.close(original)


def _train(client: str, config: dict[str, Any], folder: str) -> dict[str, Any]:
    import ds_quant
    from tests.clients import programs

    log = Path(folder) / f"log{os.environ['RANK']}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with _printed(log):
        trained = programs.PROGRAMS[client](config, Path(folder))
    seconds = time.monotonic() - start
    lines = re.findall(r"quantized_comm: \S+ on ZeRO-\d, .*", log.read_text("utf-8", "replace"))
    return {
        "losses": trained.losses,
        "seconds": seconds,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "lines": lines,
        "report": ds_quant.report(trained.engine),
        "masters": {} if client == "lightning" else hf.master_weights(trained.engine),
        "saved": str(trained.saved),
    }


def run(client: str, stage: int, block: str, folder: Path) -> list[dict[str, Any]]:
    """Train on two ranks; what every rank saw."""
    config = hf.ds_config(stage, BLOCKS[block])
    return harness.run(_train, WORLD, client, config, str(folder / block), timeout=280)


def _saved_tensors(folder: Path) -> dict[str, Any]:
    """What the library saved, by name, if it is one file of safetensors."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return load_file(files[0]) if files else {}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    """Runs without the block, each once."""

    class Runs(dict):
        def __missing__(self, key: tuple[str, int]) -> Any:
            folder = tmp_path_factory.mktemp("-".join(map(str, key)))
            self[key] = run(*key, "plain", folder)
            return self[key]

    return Runs()


@pytest.mark.parametrize("block", ["qsdp", "sdp4bit"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "client", [pytest.param(c, marks=NEEDS_CUDA) if c == "lightning" else c for c in CLIENTS]
)
def test_client_trains_as_without_the_block(
    client: str, stage: int, block: str, plain: dict, tmp_path: Path
) -> None:
    expected, found = plain[client, stage], run(client, stage, block, tmp_path)
    check(client, expected, found)


def check(client: str, expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    """Losses within a bound, saves equal in form and exact, one start-up line per engine."""
    ours, theirs = found[0], expected[0]
    # A reference model is an engine of its own, active where its weights are sharded.
    engines = 1 + (client == "resumed") + (client == "dpo" and ours["report"]["stage"] == 3)
    assert len(ours["lines"]) == engines and not theirs["lines"]
    assert theirs["report"] is None
    assert len(ours["losses"]) == len(theirs["losses"])
    # Equal weights at the start, but for GRPO, whose first loss comes from sampled completions.
    if client != "grpo":
        assert ours["losses"][0] == pytest.approx(theirs["losses"][0], rel=0.02)
        learnt = abs(theirs["losses"][-1] - theirs["losses"][0])
        assert ours["losses"][-1] == pytest.approx(theirs["losses"][-1], abs=0.25 * learnt + 0.02)
    report = ours["report"]
    assert report["received_bytes"]["weights"] and report["steps"] >= 3
    moved = sum(sum(links.values()) for links in report["received_bytes"].values())
    assert moved > report["params"] / 2
    saves = [_saved_tensors(Path(side["saved"])) for side in (theirs, ours)]
    assert {n: (t.dtype, t.shape) for n, t in saves[0].items()} == {
        n: (t.dtype, t.shape) for n, t in saves[1].items()
    }
    for name, master in ours["masters"].items():
        saved = saves[1].get(name)
        if saved is not None:
            assert (hf.as_array(saved) == hf.rounded(master, saved.dtype)).all(), name


SCRIPT = """
import torch
if not torch.cuda.is_available():  # accelerate does not tell DeepSpeed, so zero.Init sees 1 rank
    import deepspeed
    deepspeed.init_distributed("gloo")
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

args = TrainingArguments(
    output_dir="out", per_device_train_batch_size=4, max_steps=4, bf16=True, report_to=[],
    use_cpu=not torch.cuda.is_available(), save_strategy="no", disable_tqdm=True, logging_steps=1,
    learning_rate=5e-3,
)
"""


@pytest.mark.parametrize("stage", STAGES)
def test_accelerate_launch_takes_the_block_from_its_config_file(stage: int, tmp_path: Path) -> None:
    """On GPUs the script says nothing of DeepSpeed: accelerate launch does."""
    (tmp_path / "train.py").write_text(SCRIPT + hf.TRAINING)
    config = hf.ds_config(stage, BLOCKS["qsdp"])
    config["train_micro_batch_size_per_gpu"] = 4
    config["optimizer"]["params"] = {"lr": 5e-3, "torch_adam": True}
    config["gradient_clipping"], config["gradient_accumulation_steps"] = 1.0, 1
    config["bf16"], config["train_batch_size"] = {"enabled": True}, 4 * WORLD
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size",
                "stage3_param_persistence_threshold"):  # fmt: skip
        config["zero_optimization"].pop(key, None)
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    command = (
        sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed",
        "--deepspeed_config_file", "ds_config.json", "--num_processes", str(WORLD),
        "--num_machines", "1", "--main_process_port", free_port(), "train.py",
    )  # fmt: skip
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    printed = "".join(run_both(*command, cwd=tmp_path, **quiet))
    assert printed.count(f"quantized_comm: qsdp on ZeRO-{stage}, ") == 1, printed
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 100_000


@pytest.mark.parametrize("stage", STAGES)
def test_trl_takes_the_block_of_the_environment(stage: int, tmp_path: Path) -> None:
    given = {"DS_QUANT_BLOCK": json.dumps(BLOCKS["qsdp"])}
    args = (_train, WORLD, "sft", hf.ds_config(stage, None), str(tmp_path / "environment"))
    for ours, theirs in zip(
        harness.run(*args, timeout=280, environment=given),
        run("sft", stage, "qsdp", tmp_path),
        strict=True,
    ):
        assert ours["losses"] == theirs["losses"]
        assert ours["report"]["received_bytes"] == theirs["report"]["received_bytes"]
        assert [line.endswith("from DS_QUANT_BLOCK") for line in ours["lines"]] == [True] * len(
            theirs["lines"]
        )


YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 1, offload_optimizer_device: none}
mixed_precision: bf16
num_machines: 1
num_processes: 2
machine_rank: 0
"""


def test_the_environment_reaches_a_yaml_config_of_accelerate(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + hf.TRAINING)
    (tmp_path / "accelerate.yaml").write_text(YAML)
    command = (
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml",
        "--main_process_port", free_port(), "train.py",
    )  # fmt: skip
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    given = {"DS_QUANT_BLOCK": json.dumps(BLOCKS["qsdp"])}
    printed = "".join(run_both(*command, cwd=tmp_path, **quiet, **given))
    (line,) = re.findall(r"quantized_comm: \S+ on ZeRO-\d, .*", printed)
    assert "qsdp on ZeRO-2" in line and "from DS_QUANT_BLOCK" in line
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert len(losses) == 4 and losses[-1] < losses[0]


# ---- the page's table ----


def table() -> str:
    """Train everything once; a row per client, stage and scheme."""
    lines = [
        "| client | version | ZeRO | scheme | outcome | last loss (plain) | steps/s (plain) | "
        "peak MB per rank (plain) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for client, library in CLIENTS.items():
        if client == "lightning" and torch.cuda.device_count() < WORLD:
            continue
        for stage in STAGES:
            with tempfile.TemporaryDirectory() as folder:
                theirs = run(client, stage, "plain", Path(folder))
                for block in ("qsdp", "sdp4bit"):
                    lines.append(_row(client, library, stage, block, theirs, Path(folder)))
                    print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def _row(
    client: str, library: str, stage: int, block: str, theirs: list[dict], folder: Path
) -> str:
    start = f"| {client} | {library} {version(library)} | {stage} | `{block}` |"
    try:
        found = run(client, stage, block, folder)
        check(client, theirs, found)
    except AssertionError as error:
        return f"{start} fails: {str(error).strip().splitlines()[-1][:120]} | | | |"
    ours, plain = found[0], theirs[0]
    pairs = [(ours["losses"][-1], plain["losses"][-1], ".3f")]
    pairs += [(6 / ours["seconds"], 6 / plain["seconds"], ".2f")]
    pairs += [(ours["peak_mb"], plain["peak_mb"], ".0f")]
    cells = " | ".join(f"{a:{spec}} ({b:{spec}})" for a, b, spec in pairs)
    return f"{start} as without the block | {cells} |"


def main() -> None:
    """Replace the table of docs/clients.md."""
    text = PAGE.read_text("utf-8")
    head, _, rest = text.partition("<!-- table -->\n")
    tail = rest.partition("<!-- end of table -->")[2]
    PAGE.write_text(f"{head}<!-- table -->\n{table()}<!-- end of table -->{tail}", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
