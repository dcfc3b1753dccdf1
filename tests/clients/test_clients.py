"""Client libraries train with the block in their DeepSpeed config as they train without it.

Run by `make test-clients`. Every program of ``programs`` runs under ZeRO-2 and 3 with plain
DeepSpeed, with qsdp and with sdp4bit. ``python -m tests.clients.test_clients`` writes the table of
docs/clients.md.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import needs
from tests.distributed import harness
from tests.distributed.models import heard
from tests.integration import hf
from tests.integration.processes import LAUNCHERS, QUIET, free_port, losses, run_both

needs.libraries("transformers", "peft", "trl", "lightning", extra="clients")
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


def _train(client: str, config: dict[str, Any], folder: str) -> dict[str, Any]:
    import ds_quant
    from tests.clients import programs

    said, start = heard("info_rank0"), time.monotonic()
    trained = programs.PROGRAMS[client](config, Path(folder))
    seconds = time.monotonic() - start
    return {
        "losses": trained.losses,
        "seconds": seconds,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "lines": [line for line in said if re.match(r"quantized_comm: \S+ on ZeRO-", line)],
        "report": ds_quant.report(trained.engine),
        "masters": {} if client == "lightning" else hf.master_weights(trained.engine),
        "saved": str(trained.saved),
    }


def run(client: str, stage: int, block: str, folder: Path) -> list[dict[str, Any]]:
    """Train on two ranks; what every rank saw."""
    config = hf.ds_config(stage, BLOCKS[block])
    return harness.run(_train, WORLD, client, config, str(folder / block), timeout=280)


def _saved_tensors(folder: Path) -> dict[str, Any]:
    """Return the saved tensors by name, if they are in one file of safetensors."""
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
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4,
)
model = AutoModelForCausalLM.from_config(config)
rows = [torch.arange(16) + i for i in range(24)]
data = [{"input_ids": row, "labels": row} for row in rows]
trainer = Trainer(model=model, args=args, train_dataset=data)
trainer.train()
trainer.save_model("out")
"""


def launched(folder: Path, *options: str, **given: str) -> str:
    """Run the script under accelerate launch, and return its output; it has learnt."""
    (folder / "train.py").write_text(SCRIPT)
    launch = (sys.executable, "-m", *LAUNCHERS["accelerate"], free_port(), *options)
    printed = "".join(run_both(*launch, "train.py", cwd=folder, **QUIET, **given))
    found = losses(printed)
    assert len(found) == 4 and found[-1] < found[0]
    return printed


@pytest.mark.parametrize("stage", STAGES)
def test_accelerate_launch_takes_the_block_from_its_config_file(stage: int, tmp_path: Path) -> None:
    """On GPUs the script says nothing of DeepSpeed: accelerate launch does."""
    config = hf.ds_config(stage, BLOCKS["qsdp"])
    config["train_micro_batch_size_per_gpu"] = 4
    config["optimizer"]["params"] = {"lr": 5e-3, "torch_adam": True}
    config["gradient_clipping"], config["gradient_accumulation_steps"] = 1.0, 1
    config["bf16"], config["train_batch_size"] = {"enabled": True}, 4 * WORLD
    zero = config["zero_optimization"]
    config["zero_optimization"] = {key: value for key, value in zero.items() if value != "auto"}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    file = ("--use_deepspeed", "--deepspeed_config_file", "ds_config.json")
    printed = launched(tmp_path, *file, "--num_processes", str(WORLD), "--num_machines", "1")
    assert printed.count(f"quantized_comm: qsdp on ZeRO-{stage}, ") == 1, printed
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 100_000


YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 1, offload_optimizer_device: none}
mixed_precision: bf16
num_machines: 1
num_processes: 2
machine_rank: 0
"""
ENVIRONMENT = {"DS_QUANT_BLOCK": json.dumps(BLOCKS["qsdp"])}


def test_the_environment_reaches_a_yaml_config_of_accelerate(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text(YAML)
    printed = launched(tmp_path, "--config_file", "accelerate.yaml", **ENVIRONMENT)
    assert printed.count("quantized_comm: qsdp on ZeRO-2, ") == 1
    assert "quantized_comm: from DS_QUANT_BLOCK\n" in printed


@pytest.mark.parametrize("stage", STAGES)
def test_trl_takes_the_block_of_the_environment(stage: int, tmp_path: Path) -> None:
    args = (_train, WORLD, "sft", hf.ds_config(stage, None), str(tmp_path / "environment"))
    found = harness.run(*args, timeout=280, environment=ENVIRONMENT)
    for ours, theirs in zip(found, run("sft", stage, "qsdp", tmp_path), strict=True):
        assert ours["losses"] == theirs["losses"]
        assert ours["report"]["received_bytes"] == theirs["report"]["received_bytes"]
        assert len(ours["lines"]) == len(theirs["lines"])
        assert ours["report"]["line"].endswith("from DS_QUANT_BLOCK")


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
