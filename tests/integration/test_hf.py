"""Hugging Face Trainer and Accelerate with the block in the DeepSpeed config and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_quant.resources import resource_dir
from tests.distributed import harness
from tests.integration import hf
from tests.thin import thinned

for library in ("transformers", "accelerate", "peft"):
    pytest.importorskip(library, reason=f"needs {library}: pip install 'ds_quant[hf]'")
harness.preload("tests.integration.hf_preload")

WORLD = 2
QSDP = {"scheme": "qsdp", "min_numel": 512}  # else half of so small a model is exempt
W4 = {"scheme": "qsdp_w4g4", "min_numel": 512}


def report_of(trained: Any) -> dict[str, Any]:
    import ds_quant

    return ds_quant.report(trained.model_wrapped)


# ---- training ----


def _train(kind: str, stage: int, block: dict | None, folder: str, options: dict) -> dict:
    args = hf.arguments(folder, hf.ds_config(stage, block), **options)
    model = hf.new_model(kind)
    partitioned = any(hasattr(p, "ds_id") for p in model.parameters())
    trained = hf.trainer(model, args)
    addresses = _watch_addresses()
    trained.train()
    return {
        "losses": hf.losses(trained),
        "addresses": addresses,
        "partitioned": partitioned,
        "report": report_of(trained),
        "dtype": str(next(trained.model.parameters()).dtype),
    }


def _watch_addresses() -> set[int]:
    """Fills with the addresses that gradients of the following backwards are rounded with."""
    from ds_quant.zero.param import GradientStreams

    seen: set[int] = set()
    original = GradientStreams.codings

    def noted(self: GradientStreams, step: int, signed: int) -> Any:
        seen.add(step)
        return original(self, step, signed)

    GradientStreams.codings = noted  # in a process that ends with the test
    return seen


@pytest.mark.parametrize(
    ("kind", "stage", "options"),
    thinned(
        [
            ("llama", 1, {}),
            ("gpt2", 2, {"gradient_accumulation_steps": 2}),
            ("llama", 3, {}),
            ("gpt2", 3, {"gradient_checkpointing": True}),
        ],
        lambda kind, stage, options: (kind, stage) in (("gpt2", 2), ("llama", 3)),
    ),
)
def test_trainer_learns_with_quantized_communication(
    tmp_path: Path, kind: str, stage: int, options: dict
) -> None:
    facts = kind, stage
    ranks = harness.run(_train, WORLD, *facts, QSDP, str(tmp_path / "quantized"), options)
    plain = harness.run(_train, WORLD, *facts, None, str(tmp_path / "plain"), options)
    assert ranks[0]["losses"] == ranks[1]["losses"], "Trainer logs the mean over ranks"
    found, expected = ranks[0]["losses"], plain[0]["losses"]
    assert plain[0]["report"] is None and ranks[0]["dtype"] == "torch.bfloat16"
    # Equal weights at the start; then 8-bit noise, small against what six steps learn.
    assert found[0] == pytest.approx(expected[0], rel=5e-3)
    assert expected[-1] < expected[0] - 0.4
    assert found[-1] == pytest.approx(expected[-1], abs=0.1 * (expected[0] - expected[-1]))
    assert found != expected
    for rank in ranks:
        # zero.Init: from_config builds partitioned parameters under ZeRO-3
        assert rank["partitioned"] == (stage == 3)
        report = rank["report"]
        assert report["line"].startswith(f"qsdp on ZeRO-{stage}, ")
        assert report["steps"] == 6
        # accelerate advances engine.micro_steps once per step, yet every backward rounds afresh
        backwards = 6 * options.get("gradient_accumulation_steps", 1)
        assert len(rank["addresses"]) == backwards
        for role in ("weights", "gradients"):
            assert report["received_bytes"][role]["intra"] > 0
        assert report["full_precision_share"] < 0.05


# ---- LoRA ----


def _train_lora(stage: int, folder: str) -> dict:
    from peft import LoraConfig, PeftModel, get_peft_model

    args = hf.arguments(folder, hf.ds_config(stage, QSDP), max_steps=8, learning_rate=2e-2)
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trained = hf.trainer(get_peft_model(hf.new_model("llama"), adapters), args)
    trained.train()
    # As scripts do that save a state dict of their own, FastChat's and LLaVA's among them.
    left = {name: hf.as_array(p) for name, p in trained.model.named_parameters()}
    trained.save_model()
    torch.distributed.barrier()
    masters = hf.master_weights(trained.model_wrapped)
    dtypes = {name: p.dtype for name, p in trained.model.named_parameters()}
    again = PeftModel.from_pretrained(_on_cpu("llama"), folder).state_dict()
    return {
        "losses": hf.losses(trained),
        "report": report_of(trained),
        "masters": {
            name: (hf.as_array(again[name]), hf.rounded(value, dtypes[name]))
            for name, value in masters.items()
        },
        "left": {name: left[name] for name in masters},
    }


def _on_cpu(kind: str) -> Any:
    """The whole model on every rank: without the config that makes from_pretrained partition."""
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    return hf.new_model(kind)


@pytest.mark.parametrize("stage", [2, 3])
def test_lora_trains_and_saves_exact_adapters(tmp_path: Path, stage: int) -> None:
    for rank in harness.run(_train_lora, WORLD, stage, str(tmp_path)):
        assert rank["losses"][-1] < rank["losses"][0] - 0.02
        assert "lora" in " ".join(rank["masters"]) and len(rank["masters"]) == 8
        for name, (saved, expected) in rank["masters"].items():
            assert np.array_equal(saved, expected), name
            if stage == 2:
                assert np.array_equal(rank["left"][name], expected), name
        received = rank["report"]["received_bytes"]
        # ZeRO-3 gathers the frozen weights too, ZeRO-2 moves nothing but adapters.
        assert rank["report"]["params"] == (102208 if stage == 3 else 3584)
        assert received["weights"]["intra"] > 0 and received["gradients"]["intra"] > 0


def _train_shipped_lora(folder: str) -> dict:
    from peft import LoraConfig, get_peft_model

    config = json.loads((resource_dir("configs") / "ds_lora_zero3.json").read_text("utf-8"))
    config["optimizer"]["params"]["torch_adam"] = True  # no compiler run in a test
    config["quantized_comm"]["min_numel"] = 512
    config["zero_optimization"] |= hf.REFETCH
    args = hf.arguments(folder, config, learning_rate=2e-2)
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trained = hf.trainer(get_peft_model(hf.new_model("llama"), adapters), args)
    trained.train()
    report = report_of(trained)
    return {"losses": hf.losses(trained), "report": report}


def test_shipped_lora_config_keeps_frozen_weights_inside_the_node(tmp_path: Path) -> None:
    """2 x 2 ranks: between nodes go adapters and what is filled once, not six steps of weights."""
    local = {"LOCAL_SIZE": "2"}
    for rank in harness.run(_train_shipped_lora, 4, str(tmp_path), environment=local):
        assert rank["losses"][-1] < rank["losses"][0]
        report = rank["report"]
        assert report["kept_bytes"] > 0 and report["line"].startswith("qsdp on ZeRO-3")
        received = report["received_bytes"]["weights"]
        # Each of 6 steps gathers twice: a few times the model inside, under twice it between.
        assert received["intra"] > 6 * report["params"]
        assert received["inter"] < 2 * report["params"]


# ---- save, resume, best model ----


def _train_and_save(stage: int, block: dict, folder: str) -> dict:
    """Six steps with a checkpoint at three, then the same again from that checkpoint."""
    saving = {
        "save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3,
        "load_best_model_at_end": True,
    }  # fmt: skip
    first = hf.trainer(
        hf.new_model("llama"), hf.arguments(folder, hf.ds_config(stage, block), **saving)
    )
    first.train()
    exact = hf.master_weights(first.model_wrapped)
    first.save_model(f"{folder}/final")
    torch.distributed.barrier()
    again = hf.arguments(f"{folder}/again", hf.ds_config(stage, block), **saving)
    second = hf.trainer(hf.new_model("llama"), again)
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    return {
        "losses": (hf.losses(first), hf.losses(second)),
        "eval": [row["eval_loss"] for row in first.state.log_history if "eval_loss" in row],
        "best": first.state.best_model_checkpoint,
        "evaluated": first.evaluate()["eval_loss"],
        "exact": exact,
        "steps": report_of(second)["steps"],
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_resume_continues_bit_for_bit_and_saves_are_exact(tmp_path: Path, stage: int) -> None:
    from safetensors.torch import load_file

    rank, _ = harness.run(_train_and_save, WORLD, stage, W4, str(tmp_path))
    through, resumed = rank["losses"]
    assert len(through) == 6 and resumed[-3:] == through[3:] and rank["steps"] == 6
    # Best model: the checkpoint with the lower loss is loaded, and evaluates as it did then: under
    # ZeRO-2 with decoded weights, while the end of training leaves exact ones.
    assert Path(rank["best"]).name == "checkpoint-6" and rank["eval"][1] < rank["eval"][0]
    assert rank["evaluated"] == pytest.approx(rank["eval"][1], rel=1e-6 if stage == 3 else 0.01)
    assert stage == 3 or rank["evaluated"] != rank["eval"][1]
    saved = load_file(tmp_path / "final" / "model.safetensors")
    assert set(saved) | {"lm_head.weight"} == set(rank["exact"]) | {"lm_head.weight"}
    for name, tensor in saved.items():
        assert tensor.dtype == torch.bfloat16
        assert np.array_equal(hf.as_array(tensor), hf.rounded(rank["exact"][name], tensor.dtype))


# ---- without training ----


def _pretrained(kind: str, folder: str) -> dict:
    """Evaluate a saved model that from_pretrained has partitioned as it loaded."""
    from transformers import AutoModelForCausalLM

    reference = hf.new_model(kind)
    if torch.distributed.get_rank() == 0:
        reference.save_pretrained(folder)
    torch.distributed.barrier()
    reference = reference.bfloat16().eval()
    rows = torch.stack([row["input_ids"] for row in hf.dataset()[:8]])
    with torch.no_grad():
        expected = float(reference(input_ids=rows, labels=rows).loss)
    args = hf.arguments(f"{folder}/out", hf.ds_config(3, QSDP), per_device_eval_batch_size=4)
    model = AutoModelForCausalLM.from_pretrained(folder)
    partitioned = all(hasattr(p, "ds_id") for p in model.parameters())
    trained = hf.trainer(model, args)
    found = trained.evaluate()["eval_loss"]
    exact = _gathered(trained.model)
    saved = {n: hf.as_array(p) for n, p in reference.named_parameters()}
    return {
        "expected": expected, "found": found, "partitioned": partitioned,
        "exact": all(np.array_equal(exact[n], saved[n]) for n in saved),
        "report": report_of(trained),
    }  # fmt: skip


def _gathered(model: Any) -> dict[str, np.ndarray]:
    """Exact weights, which DeepSpeed gathers past the quantizer."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: hf.as_array(p) for name, p in model.named_parameters()}


def test_a_pretrained_model_is_evaluated_without_an_optimizer(tmp_path: Path) -> None:
    for rank in harness.run(_pretrained, WORLD, "gpt2", str(tmp_path)):
        assert rank["partitioned"] and rank["exact"]
        assert rank["found"] == pytest.approx(rank["expected"], rel=5e-3)
        assert rank["found"] != rank["expected"], "weights came decoded from 8 bits"
        assert rank["report"]["received_bytes"]["weights"]["intra"] > 0
        assert rank["report"]["received_bytes"]["gradients"]["intra"] == 0


# ---- Accelerate without Trainer ----


def _prepared(model: Any, block: dict[str, Any]) -> tuple[Any, Any]:
    """An accelerator under ZeRO-2 and the engine that it makes of a model."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim

    config = hf.ds_config(2, block) | {"gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    config |= {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 4 * WORLD}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 5e-3, "torch_adam": True}}
    config["zero_optimization"]["reduce_bucket_size"] = 100_000
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16")
    return accelerator, accelerator.prepare(model, DummyOptim(model.parameters()))[0]


def _trained(accelerator: Any, model: Any, steps: int) -> list[float]:
    """Losses of as many optimizer steps."""
    rank = torch.distributed.get_rank()
    data = hf.dataset()[rank * 8 : rank * 8 + 8]
    rows = {key: torch.stack([row[key] for row in data]) for key in data[0]}
    losses = []
    for _ in range(steps):
        loss = model(**rows).loss
        accelerator.backward(loss)
        losses.append(float(loss.detach()))
    return losses


def _accelerate(folder: str) -> dict:
    import ds_quant

    accelerator, model = _prepared(hf.new_model("gpt2"), W4)
    losses = _trained(accelerator, model, 4)
    accelerator.save_state(folder)
    exact = hf.master_weights(model)
    state = {name: hf.as_array(t) for name, t in accelerator.get_state_dict(model).items()}
    shown = {name: hf.as_array(p) for name, p in accelerator.unwrap_model(model).named_parameters()}
    accelerator.load_state(folder)
    alone = _state_dict_on_one_rank(accelerator, model)
    line = ds_quant.report(model)["line"]
    return {"losses": losses, "exact": exact, "state": state, "shown": shown, "alone": alone,
            "line": line}  # fmt: skip


def _state_dict_on_one_rank(accelerator: Any, model: Any) -> str:
    from ds_quant.zero import checkpoint

    checkpoint._PATIENCE, checkpoint._TIMEOUT = 0.2, 0.5
    try:
        if torch.distributed.get_rank() == 0:
            accelerator.get_state_dict(model)
    except RuntimeError as error:
        return str(error)
    finally:
        torch.distributed.barrier()
    return ""


def test_accelerate_reads_exact_weights_and_names_the_rank_that_is_missing(tmp_path: Path) -> None:
    first, second = harness.run(_accelerate, WORLD, str(tmp_path))
    assert first["line"].startswith("qsdp_w4g4 on ZeRO-2")
    assert first["losses"][-1] < first["losses"][0]
    lossy = 0
    for name, master in first["exact"].items():
        expected = hf.rounded(master, torch.bfloat16)
        assert np.array_equal(first["state"][name], expected), name
        lossy += not np.array_equal(first["shown"][name], expected)
    assert lossy > 5, "the replica itself is decoded from 4 bits, or this test shows nothing"
    assert "Accelerator.get_state_dict" in first["alone"] and second["alone"] == ""
    assert "not called on rank(s) [1]" in first["alone"]


def _of_accelerates_own() -> tuple[list[float], str]:
    """Losses and the start-up line, with the config that Accelerate makes of a few settings."""
    from accelerate import Accelerator, DeepSpeedPlugin

    import ds_quant

    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=1)
    # Without GPUs Accelerate takes each process for the first, and alone.
    plugin.deepspeed_config |= {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 4 * WORLD}
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16")
    model = hf.new_model("gpt2")
    model = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=5e-3))[0]
    return _trained(accelerator, model, 4), ds_quant.report(model)["line"]


def test_the_block_of_the_environment_reaches_a_config_that_accelerate_makes() -> None:
    given = {"DS_QUANT_BLOCK": '{"scheme": "qsdp_w4g4"}'}
    for losses, line in harness.run(_of_accelerates_own, WORLD, environment=given):
        assert line.startswith("qsdp_w4g4 on ZeRO-2") and "from DS_QUANT_BLOCK" in line
        assert losses[-1] < losses[0]


class PolicyAndValue(torch.nn.Module):
    """Two models of which one is saved, as TRL's PPOTrainer wraps them."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = hf.new_model("llama"), hf.new_model("llama")

    def forward(self, **rows: Any) -> Any:
        out = self.policy(**rows)
        out.loss = out.loss + self.value(**rows).loss
        return out


def _parts(block: dict[str, Any], folder: str) -> dict[str, int]:
    """How many tensors of what reads a part differ from the masters, and what rank 0 says."""
    from transformers import LlamaForCausalLM
    from transformers.trainer_callback import CallbackHandler

    from ds_quant.zero import log

    accelerator, model = _prepared(PolicyAndValue(), block)
    _trained(accelerator, model, 3)
    policy, found, logged = accelerator.unwrap_model(model).policy, {}, []
    log.log_rank0 = logged.append

    def count(name: str, state: Any) -> None:
        masters = hf.master_weights(model)
        found[name] = sum(
            not np.array_equal(
                hf.as_array(tensor), hf.rounded(masters[f"policy.{n}"], tensor.dtype)
            )
            for n, tensor in state.items()
            if f"policy.{n}" in masters  # others are tied
        )

    def save_pretrained(name: str) -> None:
        if (
            torch.distributed.get_rank() == 0
        ):  # as many scripts do: no other rank is to be waited for
            policy.save_pretrained(f"{folder}/{name}")
        torch.distributed.barrier()
        count(name, LlamaForCausalLM.from_pretrained(f"{folder}/{name}").bfloat16().state_dict())

    count("state_dict", policy.state_dict())
    save_pretrained("save_pretrained")
    found["said"] = len([line for line in logged if f"{__file__}:" in line])
    count("get_state_dict", accelerator.get_state_dict(policy))
    _trained(accelerator, model, 1)
    CallbackHandler([], model, None, None, None).on_train_end(None, None, None)
    save_pretrained("after the end of training")
    count("named_parameters", dict(policy.named_parameters()))
    found["said in the end"] = len(logged)
    return found


@pytest.mark.parametrize("scheme", ["qsdp", "sdp4bit"])
def test_a_part_of_the_model_is_saved_exactly_or_said_to_be_decoded(
    tmp_path: Path, scheme: str
) -> None:
    block = {"scheme": scheme, "min_numel": 512, "node_size": 1}
    first, _ = harness.run(_parts, WORLD, block, str(tmp_path))
    assert first.pop("state_dict") > 10 and first.pop("save_pretrained") > 10
    assert first == {
        "said": 2, "get_state_dict": 0, "after the end of training": 0, "named_parameters": 0,
        "said in the end": 2,
    }  # fmt: skip


# ---- as a user starts it ----
