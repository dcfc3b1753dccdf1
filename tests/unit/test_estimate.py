"""ds_quant estimate: rows by hand, inputs, probes; whole outputs are in golden/commands.yaml."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_quant.config.presets import preset_names
from ds_quant.policy.cost import Cluster
from ds_quant.policy.model import FetchSettings, Model
from ds_quant.policy.timing import Rate, rate_from
from ds_quant.tools import planning
from ds_quant.tools.cli import main
from ds_quant.tools.forecast import Buckets, Plan

PLAN = ["--params", "7e9", "--nodes", "2", "--gpus", "8", "--link", "10", "--intra", "1e5"]


def rows(capsys, *arguments: str) -> dict[str, dict]:
    assert main(["estimate", *arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    return {"": facts, **{row["scheme"]: row for row in facts["rows"]}}


@pytest.mark.parametrize(
    "options",
    ["", "--nodes 2", "--params 7e9 --gpus 8", "--front fsdp2 --nodes 4 --gpus 2 --step 2.5"],
)
def test_the_example_of_an_error_is_a_complete_command(options: str, capsys) -> None:
    assert main(["estimate", *options.split()]) == 1
    *_, example = capsys.readouterr().err.splitlines()
    assert example.startswith("for example: ds_quant estimate ")
    command = example.removeprefix("for example: ds_quant ").split()
    given = dict(zip(options.split()[::2], options.split()[1::2], strict=True))
    assert given.items() <= dict(zip(command[1::2], command[2::2], strict=True)).items()
    assert main(command) == 0


def test_a_value_that_is_presumed_is_that_of_its_option(capsys) -> None:
    written = ["--params", "7e9", "--nodes", "2", "--gpus", "8", "--link", "10", "--step", "1"]
    presumed = rows(capsys, *written)
    options = [word for said in presumed[""]["presumed"] for word in said.split()[:2]]
    assert {"--stage", "--dtype", "--accumulation", "--intra"} == {*options[::2]}
    given = rows(capsys, *written, *options)
    assert given[""].pop("presumed") == [] != presumed[""].pop("presumed")
    assert given == presumed


def test_rows_are_the_published_floor_of_wire_time(capsys, tmp_path: Path) -> None:
    """field of 7 B, 2 nodes, 10 Gb/s: bytes x 7e9 / 2 at full line rate, two gathers."""
    released = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": released, "bf16": {"enabled": True}}))
    config = ("--ds-config", str(path))
    found = rows(capsys, *PLAN, *config, "--step", "1", "--latency", "1e-9", "--encode", "1e18")
    assert set(found) == {"", "deepspeed as shipped", *preset_names()}
    assert found["hybrid"]["inter_bytes"] == 4
    for scheme, nbytes in {"full_precision": 6.0, "qsdp": 3.02, "sdp4bit": 1.033}.items():
        row = found[scheme]
        assert row["inter_bytes"] == pytest.approx(nbytes, rel=0.003)
        assert row["communication"] == pytest.approx(nbytes * 7e9 / 2 / 1.25e9, rel=0.02)
        assert row["step_serial"] == pytest.approx(row["communication"] + 1)
        assert row["step_overlapped"] == pytest.approx(max(row["communication"], 1))
        assert row["limit"] == "link between nodes"
    assert found["sdp4bit"]["memory"] == pytest.approx(2 / 8 * 7e9, rel=0.001)
    assert found["full_precision"]["speedup_serial"] == pytest.approx(1)
    assert found["sdp4bit"]["speedup_overlapped"] == pytest.approx(6 / 1.033, rel=0.01)
    assert found[""]["best"] == "eden4"


def test_what_is_offloaded_leaves_the_gpu(capsys, tmp_path: Path) -> None:
    """And the page's table of 72.7 B parameters on GPUs of 40 GB."""
    lines = (Path(__file__).parents[2] / "docs" / "choosing.md").read_text("utf-8").splitlines()
    kinds = {"all weights, Adam": (), "adapters of 0.2 %": ("--trained", "0.002")}
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith(("| all", "| ada"))]
    assert len(table) == 5
    for training, offloaded, scheme, gpu, shard, host in table:
        of = [] if offloaded == "nothing" else offloaded.split(", ")
        zero = {"stage": 3} | {f"offload_{name}": {"device": "cpu"} for name in of}
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}}))
        options = "--params 72.7e9 --nodes 2 --gpus 8 --link 100 --intra 200 --step 60".split()
        found = rows(capsys, *options, *kinds[training], "--ds-config", str(path))
        row = found["deepspeed as shipped" if scheme == "none" else scheme.strip("`")]
        assert [gpu, host] == [f"{row[f'{where}_memory'] / 1e9:.3g}" for where in ("gpu", "host")]
        place = "host" if "param" in of else "GPU"
        kept = f"{row['memory'] / 1e9:.3g} on the {place}" if row["memory"] else "none"
        assert shard == kept
        assert main(["estimate", *options, "--ds-config", str(path)]) == 0
        assert ("host GB" in capsys.readouterr().out) == bool(of)


# Gigabytes of 10^9 parameters, half of them trained, on 4 GPUs: weights, gradients, masters with
# Adam's states, what ZeRO-3 gathers, and a bucket. Behind them those in host memory.
HELD = {
    (1, "bf16", ""): (2 + 1 + 1.5 + 0.2, 0), (1, "fp32", ""): (4 + 2 + 1 + 0.4, 0),
    (2, "bf16", ""): (2 + 0.25 + 1.5 + 0.2, 0), (2, "fp32", ""): (4 + 0.5 + 1 + 0.4, 0),
    (3, "bf16", ""): (0.5 + 0.25 + 1.5 + 0.02 + 0.2, 0),
    (3, "fp32", ""): (1 + 0.5 + 1 + 0.04 + 0.4, 0),
    (1, "bf16", "optimizer"): (2 + 1 + 0.2, 2), (1, "fp32", "optimizer"): (4 + 2 + 0.4, 1.5),
    (2, "bf16", "optimizer"): (2 + 0.2, 2), (3, "bf16", "optimizer"): (0.5 + 0.02 + 0.2, 2),
    (3, "bf16", "param"): (0.25 + 1.5 + 0.02 + 0.2, 0.5),
    (3, "fp32", "optimizer param"): (0.04 + 0.4, 1.5 + 1),
    (2, "bf16", "param"): (2 + 0.25 + 1.5 + 0.2, 0),  # which ZeRO-2 does not read
}  # fmt: skip


@pytest.mark.parametrize(("stage", "dtype", "offloads"), HELD)
def test_memory_of_deepspeed_is_added_up_by_hand(stage: int, dtype: str, offloads: str) -> None:
    fetch = FetchSettings(max_reuse_distance=0, max_live_parameters=0, prefetch_bucket_size=0)
    plan = Plan(
        model=Model(name="", numel=10**9, layers=10, param_specs=(), trained=5 * 10**8, modules=10,
                    largest=10**7, hidden=1000),
        dtype=planning.DTYPES[dtype], stage=stage, micro_steps=1, compute=1.0,
        cluster=Cluster(nodes=2, node_size=2, link=1.0, intra_link=1.0),
        offloads=frozenset(offloads.split()), buckets=Buckets(reduce=10**8, fetch=fetch),
    )  # fmt: skip
    found = plan.stock_memory / 1e9, plan.stock_host_memory / 1e9
    assert found == pytest.approx(HELD[stage, dtype, offloads])
    assert plan.counted == (10**9 if stage == 3 else 5 * 10**8)


def test_auto_sizes_are_those_that_a_trainer_fills_in() -> None:
    keys = ("param_persistence_threshold", "prefetch_bucket_size", "max_reuse_distance")
    zero = {"reduce_bucket_size": "auto", **{f"stage3_{key}": "auto" for key in keys}}
    found = planning.buckets_of(zero, 1000, 3)
    assert found.reduce == 10**6
    assert (found.fetch.prefetch_bucket_size, found.fetch.max_reuse_distance) == (9 * 10**5, 10**9)


@pytest.mark.parametrize("block", [None, {"scheme": "eden4"}])
@pytest.mark.parametrize(("stage", "refused"), [(1, True), (2, True), (3, False)])
def test_a_size_of_gathers_by_which_deepspeed_divides_is_not_0(
    stage: int, refused: bool, block: dict[str, Any] | None, tmp_path, capsys
) -> None:
    """Without the plugin it ends in a ZeroDivisionError at the first step."""
    config = {"zero_optimization": {"stage": stage, "allgather_bucket_size": 0}}
    config |= {} if block is None else {"quantized_comm": block}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    options = "estimate --params 1b --nodes 2 --gpus 2 --link 10 --intra 200 --step 1".split()
    assert main([*options, "--ds-config", str(path)]) == (1 if refused else 0)
    said = capsys.readouterr().err
    assert ("zero_optimization.allgather_bucket_size=0" in said) == refused


# ---- under FSDP2 ----


def under_fsdp2(capsys, *options: str) -> dict[str, dict]:
    return rows(capsys, "--front", "fsdp2", *PLAN, "--step", "1", *options)


@pytest.mark.parametrize("k", [1, 8])
def test_bytes_under_fsdp2_are_added_up_by_hand(k: int, capsys) -> None:
    """bf16, 8 GPUs per node: gathers for forward and backward, and what crosses once per step."""
    found = under_fsdp2(capsys, "--accumulation", str(k))
    assert set(found) == {"", "fsdp2 as shipped", "fsdp2 hsdp as shipped", *preset_names()}
    expected = {
        "fsdp2 as shipped": (6 * k, 6 * k),
        "fsdp2 hsdp as shipped": (4, 6 * k),
        "full_precision": (4 * k + 2, 6 * k),
        "hybrid": (4, 6 * k),
        "qsdp": (2.014 * k + 1.007, 3.02 * k),
        "eden4": (1.018, 5.03 * k),
    }
    for scheme, nbytes in expected.items():
        row = found[scheme]
        assert (row["inter_bytes"], row["intra_bytes"]) == pytest.approx(nbytes, rel=0.01), scheme
    hsdp = found["fsdp2 hsdp as shipped"]
    seconds = 4 * 7e9 / 2 / 1.25e9 + 6 * k * 7e9 * 7 / 8 / 1.25e13 + (3 * k + 1) * 33 * 2e-5
    assert hsdp["communication"] == pytest.approx(seconds)
    assert hsdp["speedup_serial"] == pytest.approx(
        found["fsdp2 as shipped"]["step_serial"] / hsdp["step_serial"]
    )


def test_memory_under_fsdp2_is_added_up_by_hand(capsys) -> None:
    """16 bytes per parameter and its shards; five blocks of bf16; the scheme's own beside them."""
    found = under_fsdp2(capsys)
    block = 5 * 2 * 7e9 / 33
    flat, hsdp = found["fsdp2 as shipped"], found["fsdp2 hsdp as shipped"]
    assert flat["gpu_memory"] == pytest.approx(16 * 7e9 / 16 + block)
    assert hsdp["gpu_memory"] == pytest.approx(16 * 7e9 / 8 + block)
    eden4 = found["eden4"]
    assert eden4["gpu_memory"] == flat["gpu_memory"] + eden4["memory"] + eden4["peak"]
    # All new weights of this rank and those that arrive from both nodes, in 4 bits and scales.
    assert eden4["peak"] > 3 * 0.5 * 7e9 / 16
    accumulated = under_fsdp2(capsys, "--accumulation", "2")
    assert accumulated["fsdp2 hsdp as shipped"]["gpu_memory"] == pytest.approx(
        hsdp["gpu_memory"] + 2 * 7e9 / 8
    )
    fp32 = under_fsdp2(capsys, "--dtype", "fp32")["fsdp2 as shipped"]
    assert fp32["gpu_memory"] == pytest.approx(16 * 7e9 / 16 + 2 * block)


def test_hsdp_is_left_out_where_it_is_not_hybrid(capsys) -> None:
    for nodes, gpus in (("1", "8"), ("4", "1")):
        found = under_fsdp2(capsys, "--nodes", nodes, "--gpus", gpus)
        assert "fsdp2 as shipped" in found and "fsdp2 hsdp as shipped" not in found


def test_hsdp_without_the_plugin_is_taken_if_nothing_is_clearly_faster_and_it_fits(capsys) -> None:
    slow = ("--encode", "1e9")  # so that codecs cost more than the bytes they save
    found = under_fsdp2(capsys, *slow)
    assert found[""]["best"] == "fsdp2 hsdp as shipped"
    assert found[""]["answer"][0].startswith("take fsdp2 hsdp as shipped: ")
    found = under_fsdp2(capsys, *slow, "--gpu-memory", "15")
    assert found["fsdp2 hsdp as shipped"]["note"] == "needs 16.1 GB"
    assert found[""]["best"] == "hybrid"


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (["--stage", "2"], ["--stage 2: allowed with --front fsdp2: none; leave it out"]),
        (["--ds-config", __file__], [f"--ds-config {__file__}: allowed with --front fsdp2: none"]),
        (["--stage", "3", "--ds-config", __file__], ["--stage 3: ", "--ds-config "]),
    ],
)
def test_settings_of_deepspeed_are_refused_under_fsdp2(options, messages, capsys) -> None:
    assert main(["estimate", "--front", "fsdp2", *PLAN, "--step", "1", *options]) == 1
    said = capsys.readouterr().err
    assert all(message in said for message in messages), said


# ---- with a probe ----


def test_rate_leaves_out_the_latency() -> None:
    rate = rate_from([1000, 10**6, 2 * 10**6 + 1000], [0.5, 0.9, 1.5])
    assert rate == Rate(bytes_per_second=2e6, latency=0.5)


@pytest.mark.parametrize("longest", [0.4, 0.5, 0.9])
def test_rate_is_too_low_rather_than_absurd_where_noise_hides_it(longest: float) -> None:
    rate = rate_from([1000, 10**6], [0.5, longest])
    assert rate == Rate(bytes_per_second=10**6 / longest, latency=0.5)


# ---- under DDP ----


def under_ddp(capsys, *options: str) -> dict[str, dict]:
    return rows(capsys, "--front", "ddp", *PLAN, "--step", "1", *options)


@pytest.mark.parametrize("k", [1, 4])
def test_bytes_and_memory_under_ddp_are_added_up_by_hand(k: int, capsys) -> None:
    """Gradients in fp32 are sent once per optimizer step. Weights, two states, gradients and
    buckets take 4 bytes each.
    """
    found = under_ddp(capsys, "--accumulation", str(k))
    hook = "ddp with bf16_compress_hook"
    assert set(found) == {"", "ddp as shipped", hook, *preset_names()}
    for scheme, nbytes in {
        "ddp as shipped": 8,
        hook: 4,
        "full_precision": 8,
        "lossless": 8,
        "qw4": 8,
    }.items():
        row = found[scheme]
        assert (row["inter_bytes"], row["intra_bytes"]) == pytest.approx((nbytes, nbytes)), scheme
        assert row["memory"] == 0
    assert 1.0 < found["eden4"]["inter_bytes"] < 1.2
    assert found["lossless_w_g4"]["inter_bytes"] == found["eden4"]["inter_bytes"]
    assert found["ddp as shipped"]["gpu_memory"] == pytest.approx(20 * 7e9, rel=0.01)
    assert 0 < found["eden4"]["gpu_memory"] - found["ddp as shipped"]["gpu_memory"] < 3e9
    assert found[""]["best"] == "eden4" and found[""]["front"] == "ddp"


def test_one_box_under_ddp_is_priced_by_the_links_inside(capsys) -> None:
    options = ["--params", "1b", "--nodes", "1", "--gpus", "8", "--step", "1.4", "--front", "ddp"]
    slow = rows(capsys, *options, "--intra", "80")
    assert slow[""]["best"] == "eden4"
    seconds = slow["ddp as shipped"]["communication"]
    assert seconds == pytest.approx(1e9 * 8 * 7 / 8 / 1e10, rel=0.01)
    assert slow["eden4"]["communication"] < 0.2 * seconds
    fast = rows(capsys, *options, "--intra", "3600")
    assert fast[""]["best"] == "ddp as shipped"
    half = rows(capsys, *options, "--intra", "80", "--dtype", "bf16")
    assert half["ddp as shipped"]["inter_bytes"] == 4
    assert "ddp with bf16_compress_hook" not in half
    assert main(["estimate", *options, "--all"]) == 0
    assert "at most, in B/param" not in capsys.readouterr().out  # no message varies


def test_settings_of_deepspeed_are_refused_under_ddp(capsys) -> None:
    options = ["estimate", "--front", "ddp", *PLAN, "--step", "1"]
    assert main([*options, "--stage", "1"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "--stage 1: allowed with --front ddp: none; leave it out: DDP shards nothing" in said


# ---- tensor and expert parallelism ----

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "moe_intermediate_size": 768, "num_experts_per_tok": 8, "tie_word_embeddings": False,
}  # fmt: skip
EIGHT_NODES = "--front fsdp2 --nodes 8 --gpus 8 --link 100 --step 4".split()


def test_the_page_has_the_bytes_of_experts_of_a_config(capsys, tmp_path: Path) -> None:
    """Dense part, experts and both together, with 1 and 8 micro-steps."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN3_30B_A3B))
    page = (Path(__file__).parents[2] / "docs" / "fsdp2.md").read_text("utf-8")
    model = ["--model-config", str(config), "--ep", "8"]
    found = [
        rows(capsys, *EIGHT_NODES, *model, "--accumulation", micro_steps)
        for micro_steps in ("1", "8")
    ]
    assert found[0][""]["parameters"] == 30_532_122_624
    for scheme in ("full_precision", "qsdp", "sdp4bit", "eden4", "lossless_w_g3"):
        figures: list[float] = []
        for of_micro_steps in found:
            row = of_micro_steps[scheme]
            figures += [row["by_part"]["dense part"], row["by_part"]["experts"], row["inter_bytes"]]
        kept = found[0][scheme]["memory"] / 1e9
        cells = [f"{figure:.2f}" for figure in (*figures, kept)]
        assert f"| `{scheme}` | {' | '.join(cells)} |" in page, cells


def test_tensor_parallelism_divides_parameters_and_gpus(capsys) -> None:
    """8 parts that fill a node share its link, which carries as many bytes as for one GPU."""
    whole = rows(capsys, *EIGHT_NODES, "--params", "8b", "--gpus", "1")
    part = rows(capsys, *EIGHT_NODES, "--params", "1b", "--gpus", "1", "--link", "12.5")
    found = rows(capsys, *EIGHT_NODES, "--params", "8b", "--tp", "8")
    for scheme in ("full_precision", "qsdp", "eden4"):
        assert found[scheme]["inter_bytes"] == pytest.approx(part[scheme]["inter_bytes"], rel=0.01)
        assert found[scheme]["memory"] == pytest.approx(part[scheme]["memory"], rel=0.01)
        assert found[scheme]["by_part"] == {}
    seconds = [each["fsdp2 as shipped"]["communication"] for each in (found, whole)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.01)
    assert found["eden4"]["note"].startswith("start-up refuses it: needs 2 GPUs per node")
    within = rows(capsys, *EIGHT_NODES, "--params", "8b", "--tp", "2")["eden4"]
    assert within["note"] == "" and within["memory"] == pytest.approx(2 / 4 * 4e9, rel=0.01)


def test_experts_of_one_gpu_send_nothing(capsys) -> None:
    experts = ["--params", "9b", "--expert-params", "8b"]
    found = rows(capsys, *EIGHT_NODES, *experts, "--ep", "64")
    dense = rows(capsys, *EIGHT_NODES, "--params", "1b")
    for scheme in ("fsdp2 as shipped", "eden4"):
        assert found[scheme]["inter_bytes"] == pytest.approx(dense[scheme]["inter_bytes"], rel=0.01)
    more = found["eden4"]["gpu_memory"] - dense["eden4"]["gpu_memory"]
    assert more > 16 * 8e9 / 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--front fsdp2 --tp 3", "--tp 3: allowed with 8 x 8 GPUs: a divisor of 8, or a multiple"),
        ("--front fsdp2 --tp 64", "--tp 64: allowed with 64 GPUs: at most 32"),
        ("--front fsdp2 --ep 8", "--ep 8: allowed without experts: 1; give their parameters as"),
        ("--front fsdp2 --expert-params 8b", "allowed: fewer than --params, which are 7000000000"),
        ("--tp 8", "--tp 8: allowed with --front zero: none; leave it out, or take --front fsdp2"),
        ("--front ddp --expert-params 6b", "--expert-params 6000000000: allowed with --front ddp:"),
    ],
)
def test_parts_that_cannot_be_are_refused_by_name(options: str, message: str, capsys) -> None:
    cluster = "--params 7b --nodes 8 --gpus 8 --link 100 --step 4"
    assert main(["estimate", *cluster.split(), *options.split()]) == 1
    assert message in capsys.readouterr().err
