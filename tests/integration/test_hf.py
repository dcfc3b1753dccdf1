"""Hugging Face Trainer and Accelerate with the block in the DeepSpeed config and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ds_quant
from ds_quant.resources import resource_dir
from tests import needs
from tests.distributed import harness
from tests.distributed.harness import of_all_ranks, on_ranks
from tests.distributed.models import gathered, heard
from tests.integration import hf
from tests.thin import thinned

needs.libraries("transformers", "accelerate", "peft", extra="hf")
harness.preload("tests.integration.hf_preload")

WORLD = 2
QSDP = {"scheme": "qsdp", "min_numel": 512}  # else half of so small a model is exempt
W4 = {"scheme": "qsdp_w4g4", "min_numel": 512}


def report_of(trained: Any) -> dict[str, Any]:
    return ds_quant.report(trained.model_wrapped)


# ---- training ----


def _watch_addresses() -> set[int]:
    """Fills with the addresses that gradients of the following backwards are rounded with."""
    from ds_quant.runtime.param import GradientCodecs

    seen: set[int] = set()
    original = GradientCodecs.bound_codecs

    def noted(self: GradientCodecs, step: int, signed: int) -> Any:
        seen.add(step)
        return original(self, step, signed)

    GradientCodecs.bound_codecs = noted  # in a process that ends with the test
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
        lambda kind, stage, options: (kind, stage) == ("llama", 3),
    ),
)
@on_ranks()
def test_trainer_learns_with_quantized_communication(
    tmp_path: Path, kind: str, stage: int, options: dict[str, Any]
) -> None:
    def trained(block: dict[str, Any] | None) -> Any:
        args = hf.arguments(tmp_path, hf.ds_config(stage, block), **options)
        made = hf.trainer(hf.new_model(kind), args)
        # zero.Init: from_config builds partitioned parameters under ZeRO-3
        assert any(hasattr(p, "ds_id") for p in made.model.parameters()) == (stage == 3)
        made.train()
        return made

    plain, addresses = trained(None), _watch_addresses()
    ours = trained(QSDP)
    found, expected = hf.losses(ours), hf.losses(plain)
    assert of_all_ranks(found) == [found] * WORLD, "Trainer logs the mean over ranks"
    # Equal weights at the start; then 8-bit noise, small against what six steps learn.
    assert found[0] == pytest.approx(expected[0], rel=5e-3)
    assert expected[-1] < expected[0] - 0.4
    assert found[-1] == pytest.approx(expected[-1], abs=0.1 * (expected[0] - expected[-1]))
    assert found != expected
    assert next(ours.model.parameters()).dtype == torch.bfloat16
    # accelerate advances engine.micro_steps once per step, yet every backward rounds afresh
    assert len(addresses) == 6 * options.get("gradient_accumulation_steps", 1)
    report = report_of(ours)
    assert report_of(plain) is None
    assert report["line"].startswith(f"qsdp on ZeRO-{stage}, ") and report["steps"] == 6
    for role in ("weights", "gradients"):
        assert report["received_bytes"][role]["intra"] > 0
    assert report["full_precision_share"] < 0.05


def _sequence(stage: int, block: dict[str, Any] | None, folder: Path) -> tuple[list[float], Any]:
    """Ulysses by ``ParallelismConfig`` and nothing else, which a process can do once; gloo gathers
    over the world only.
    """
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
    from transformers import AutoModelForCausalLM, Trainer

    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    world = torch.distributed.get_world_size()
    spread = ParallelismConfig(sp_size=world, sp_backend="deepspeed", sp_handler=handler)
    args = hf.arguments(folder, hf.ds_config(stage, block), parallelism_config=spread)
    torch.manual_seed(0)
    config, data = hf.model_config("llama"), hf.dataset()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for row in data:
        row["position_ids"] = torch.arange(hf.LENGTH)
    trained = Trainer(model=model, args=args, train_dataset=data)
    trained.train()
    return hf.losses(trained), report_of(trained)


@pytest.mark.parametrize(
    ("stage", "world", "block"),
    [
        pytest.param(1, 2, {"scheme": "qsdp", "node_size": 1}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"scheme": "qsdp", "node_size": 1}, marks=pytest.mark.slow),
        pytest.param(3, 4, {"scheme": "sdp4bit", "node_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_sequence_over_all_ranks_trains_as_without_the_plugin(
    tmp_path: Path, stage: int, world: int, block: dict[str, Any]
) -> None:
    plain, ranks = (
        harness.run(_sequence, world, stage, own, tmp_path, timeout=120)
        for own in (None, {**block, "min_numel": 512})
    )
    for (expected, _), (losses, report) in zip(plain, ranks, strict=True):
        assert expected[-1] < expected[0] - 0.5
        assert losses == pytest.approx(expected, abs=0.1 * (expected[0] - expected[-1]))
        assert losses != expected
        assert (report["world"], report["steps"]) == (world, len(losses))
        for role in ("weights", "gradients"):
            assert report["received_bytes"][role]["inter"] > 0


# ---- LoRA ----


def _adapted(args: Any) -> Any:
    """A Trainer of adapters."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trained = hf.trainer(get_peft_model(hf.new_model("llama"), adapters), args)
    trained.train()
    return trained


def _on_cpu(kind: str) -> Any:
    """The whole model on every rank: without the config that makes from_pretrained partition."""
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    return hf.new_model(kind)


@pytest.mark.parametrize("stage", thinned([2, 3], lambda stage: stage == 3))
@on_ranks()
def test_lora_trains_and_saves_exact_adapters(tmp_path: Path, stage: int) -> None:
    from peft import PeftModel

    config = hf.ds_config(stage, QSDP)
    trained = _adapted(hf.arguments(tmp_path, config, max_steps=8, learning_rate=2e-2))
    named = dict(trained.model.named_parameters())
    # As scripts do that save a state dict of their own, FastChat's and LLaVA's among them.
    left = {name: hf.as_array(p) for name, p in named.items()}
    trained.save_model()
    torch.distributed.barrier()
    losses, masters = hf.losses(trained), hf.master_weights(trained.model_wrapped)
    again = PeftModel.from_pretrained(_on_cpu("llama"), tmp_path).state_dict()
    assert losses[-1] < losses[0] - 0.02
    assert "lora" in " ".join(masters) and len(masters) == 8
    for name, master in masters.items():
        expected = hf.rounded(master, named[name].dtype)
        assert np.array_equal(hf.as_array(again[name]), expected), name
        if stage == 2:
            assert np.array_equal(left[name], expected), name
    report = report_of(trained)
    # ZeRO-3 gathers the frozen weights too, ZeRO-2 moves nothing but adapters.
    assert report["params"] == (102208 if stage == 3 else 3584)
    for role in ("weights", "gradients"):
        assert report["received_bytes"][role]["intra"] > 0


@pytest.mark.slow
@on_ranks(4, environment={"LOCAL_SIZE": "2"})
def test_shipped_lora_config_keeps_frozen_weights_inside_the_node(tmp_path: Path) -> None:
    """2 x 2 ranks: between nodes go adapters and what is filled once, not six steps of weights."""
    config = json.loads((resource_dir("configs") / "ds_lora_zero3.json").read_text("utf-8"))
    config["optimizer"]["params"]["torch_adam"] = True  # no compiler run in a test
    config["quantized_comm"]["min_numel"] = 512
    config["zero_optimization"] |= hf.REFETCH
    trained = _adapted(hf.arguments(tmp_path, config, learning_rate=2e-2))
    losses, report = hf.losses(trained), report_of(trained)
    assert losses[-1] < losses[0]
    assert report["kept_bytes"] > 0 and report["line"].startswith("qsdp on ZeRO-3")
    received = report["received_bytes"]["weights"]
    # Each of 6 steps gathers twice: a few times the model inside, under twice it between.
    assert received["intra"] > 6 * report["params"]
    assert received["inter"] < 2 * report["params"]


# ---- save, resume, best model ----


@pytest.mark.parametrize("stage", thinned([2, 3], lambda stage: stage == 3))
@on_ranks()
def test_resume_continues_bit_for_bit_and_saves_are_exact(tmp_path: Path, stage: int) -> None:
    """Six steps with a checkpoint at three, then the same again from that checkpoint."""
    from safetensors.torch import load_file

    def made(folder: Path) -> Any:
        args = hf.arguments(
            folder, hf.ds_config(stage, W4), save_strategy="steps", save_steps=3,
            eval_strategy="steps", eval_steps=3, load_best_model_at_end=True,
        )  # fmt: skip
        return hf.trainer(hf.new_model("llama"), args)

    first = made(tmp_path)
    first.train()
    exact = hf.master_weights(first.model_wrapped)
    first.save_model(tmp_path / "final")
    torch.distributed.barrier()
    second = made(tmp_path / "again")
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    through, resumed = hf.losses(first), hf.losses(second)
    assert len(through) == 6 and resumed[-3:] == through[3:]
    assert report_of(second)["steps"] == 6
    # Best model: the checkpoint with the lower loss is loaded, and evaluates as it did then: under
    # ZeRO-2 with decoded weights, while the end of training leaves exact ones.
    before, after = (row["eval_loss"] for row in first.state.log_history if "eval_loss" in row)
    assert Path(first.state.best_model_checkpoint).name == "checkpoint-6" and after < before
    evaluated = first.evaluate()["eval_loss"]
    assert evaluated == pytest.approx(after, rel=1e-6 if stage == 3 else 0.01)
    if stage == 2:
        assert evaluated != after
    saved = load_file(tmp_path / "final" / "model.safetensors")
    assert set(saved) | {"lm_head.weight"} == set(exact) | {"lm_head.weight"}
    for name, tensor in saved.items():
        assert tensor.dtype == torch.bfloat16
        assert np.array_equal(hf.as_array(tensor), hf.rounded(exact[name], tensor.dtype))


# ---- without training ----


@on_ranks()
def test_a_pretrained_model_is_evaluated_without_an_optimizer(tmp_path: Path) -> None:
    """A saved one that from_pretrained has partitioned as it loaded."""
    from transformers import AutoModelForCausalLM

    reference = hf.new_model("gpt2")
    if torch.distributed.get_rank() == 0:
        reference.save_pretrained(tmp_path)
    torch.distributed.barrier()
    reference = reference.bfloat16().eval()
    rows = torch.stack([row["input_ids"] for row in hf.dataset()[:8]])
    with torch.no_grad():
        expected = float(reference(input_ids=rows, labels=rows).loss)
    args = hf.arguments(tmp_path / "out", hf.ds_config(3, QSDP), per_device_eval_batch_size=4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(hasattr(p, "ds_id") for p in model.parameters())
    trained = hf.trainer(model, args)
    found = trained.evaluate()["eval_loss"]
    assert found == pytest.approx(expected, rel=5e-3)
    assert found != expected, "weights came decoded from 8 bits"
    with gathered(trained.model.parameters()):  # exactly, past the quantizer
        exact = {name: hf.as_array(p) for name, p in trained.model.named_parameters()}
    for name, p in reference.named_parameters():
        assert np.array_equal(exact[name], hf.as_array(p)), name
    received = report_of(trained)["received_bytes"]
    assert received["weights"]["intra"] > 0 == received["gradients"]["intra"]


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


@on_ranks()
def test_accelerate_reads_exact_weights_and_names_the_rank_that_is_missing(tmp_path: Path) -> None:
    from ds_quant.zero import checkpoint

    accelerator, model = _prepared(hf.new_model("gpt2"), W4)
    losses = _trained(accelerator, model, 4)
    assert ds_quant.report(model)["line"].startswith("qsdp_w4g4 on ZeRO-2")
    assert losses[-1] < losses[0]
    accelerator.save_state(tmp_path)
    exact, state = hf.master_weights(model), accelerator.get_state_dict(model)
    shown, lossy = dict(accelerator.unwrap_model(model).named_parameters()), 0
    for name, master in exact.items():
        expected = hf.rounded(master, torch.bfloat16)
        assert np.array_equal(hf.as_array(state[name]), expected), name
        lossy += not np.array_equal(hf.as_array(shown[name]), expected)
    assert lossy > 5, "the replica itself is decoded from 4 bits, or this test shows nothing"
    accelerator.load_state(tmp_path)
    checkpoint._PATIENCE, checkpoint._TIMEOUT = 0.2, 0.5
    if torch.distributed.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"Accelerator\.get_state_dict") as caught:
            accelerator.get_state_dict(model)
        assert "not called on rank(s) [1]" in str(caught.value)


@on_ranks(environment={"DS_QUANT_BLOCK": '{"scheme": "qsdp_w4g4"}'})
def test_the_block_of_the_environment_reaches_a_config_that_accelerate_makes() -> None:
    """The config has a few settings only."""
    from accelerate import Accelerator, DeepSpeedPlugin

    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=1)
    # Without GPUs Accelerate takes each process for the first, and alone.
    plugin.deepspeed_config |= {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 4 * WORLD}
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16")
    model = hf.new_model("gpt2")
    model = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=5e-3))[0]
    losses, line = _trained(accelerator, model, 4), ds_quant.report(model)["line"]
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


@pytest.mark.parametrize("scheme", ["qsdp", pytest.param("sdp4bit", marks=pytest.mark.slow)])
@on_ranks()
def test_a_part_of_the_model_is_saved_exactly_or_said_to_be_decoded(
    tmp_path: Path, scheme: str
) -> None:
    from transformers import LlamaForCausalLM
    from transformers.trainer_callback import CallbackHandler

    block = {"scheme": scheme, "min_numel": 512, "node_size": 1}
    accelerator, model = _prepared(PolicyAndValue(), block)
    _trained(accelerator, model, 3)
    policy, logged = accelerator.unwrap_model(model).policy, heard("log_here")

    def differing(state: Any) -> int:
        """How many tensors of what reads the part differ from the masters."""
        masters = hf.master_weights(model)
        own = {n: masters[f"policy.{n}"] for n in state if f"policy.{n}" in masters}  # or are tied
        return sum(
            not np.array_equal(hf.as_array(state[n]), hf.rounded(master, state[n].dtype))
            for n, master in own.items()
        )

    def as_saved(name: str) -> Any:
        if torch.distributed.get_rank() == 0:  # as many scripts do: no other rank is waited for
            policy.save_pretrained(tmp_path / name)
        torch.distributed.barrier()
        return LlamaForCausalLM.from_pretrained(tmp_path / name).bfloat16().state_dict()

    assert differing(policy.state_dict()) > 10 and differing(as_saved("decoded")) > 10
    # Rank 0 warns at both places, rank 1 at the one that it reaches; nobody warns later.
    told = [line for line in logged if f"{__file__}:" in line]
    assert len(told) == (2 if torch.distributed.get_rank() == 0 else 1)
    assert differing(accelerator.get_state_dict(policy)) == 0
    _trained(accelerator, model, 1)
    CallbackHandler([], model, None, None, None).on_train_end(None, None, None)
    assert differing(as_saved("exact")) == differing(dict(policy.named_parameters())) == 0
    assert logged == told
