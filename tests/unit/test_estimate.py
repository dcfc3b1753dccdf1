"""ds_quant estimate: rows against the cost model by hand, inputs, refusals, probes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_quant.config.presets import preset_names
from ds_quant.policy import choosing
from ds_quant.policy.autotune import Rate, rate_from
from ds_quant.resources import resource_dir
from ds_quant.tools import planning
from ds_quant.tools.cli import main

PLAN = ["--params", "7e9", "--nodes", "2", "--gpus", "8", "--link", "10", "--intra", "1e5"]


def rows(capsys, *arguments: str) -> dict[str, dict]:
    assert main(["estimate", *arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    return {"": facts, **{row["scheme"]: row for row in facts["rows"]}}


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


def test_what_limits_next_is_named(capsys) -> None:
    slow_encode = rows(capsys, *PLAN, "--step", "1", "--encode", "1e9")
    assert slow_encode["sdp4bit"]["limit"] == "encoding"
    assert slow_encode["full_precision"]["limit"] == "link between nodes"
    long = rows(capsys, *PLAN, "--step", "1000")
    assert {row["limit"] for row in long[""]["rows"]} == {"compute"}
    late = rows(capsys, *PLAN, "--step", "1", "--latency", "10")
    assert late["sdp4bit"]["limit"] == "latency"
    inside = rows(capsys, *PLAN[:-1], "0.1", "--step", "1")
    assert inside["sdp4bit"]["limit"] == "links inside a node"


def test_a_link_that_is_no_bottleneck_gains_nothing_and_the_table_says_so(capsys) -> None:
    assert main(["estimate", *PLAN[:6], "--link", "1e5", "--intra", "1e5", "--step", "9"]) == 0
    assert "nothing gains 2 %" in capsys.readouterr().out


def test_shipped_deepspeed_all_reduces_under_zero2(capsys) -> None:
    found = rows(capsys, *PLAN, "--step", "1", "--stage", "2", "--accumulation", "4")
    assert found["deepspeed as shipped"]["inter_bytes"] == 2 + 4 * 4
    # On two levels gradients cross once; with one rank per node in every micro-step.
    assert found["full_precision"]["inter_bytes"] == pytest.approx(2 + 2)
    alone = rows(
        capsys, "--params", "7b", "--nodes", "2", "--link", "10", "--step", "1", "--stage", "2",
        "--accumulation", "4",
    )  # fmt: skip
    assert alone["full_precision"]["inter_bytes"] == pytest.approx(2 + 4 * 2)


def test_bytes_by_micro_steps(capsys) -> None:
    """Of what crosses once they do not grow; what is held until then counts as memory."""
    once, four = (rows(capsys, *PLAN, "--step", "1", "--accumulation", k) for k in ("1", "4"))
    found = once[""]["accumulations"]
    for scheme, first, last in (
        ("sdp4bit", 1.033, 1.033), ("qsdp_shard", 2.016, 2.016),
        ("hybrid", 4, 4), ("zeropp", 1.501, 1 + 16 * 0.501),
    ):  # fmt: skip
        assert found["1"][scheme] == pytest.approx(first, rel=0.005)
        assert found["16"][scheme] == pytest.approx(last, rel=0.005)
        assert found["4"][scheme] == pytest.approx(four[scheme]["inter_bytes"])
    more = four["sdp4bit"]["peak"] - once["sdp4bit"]["peak"]
    assert more == pytest.approx(4 / 8 * 7e9, rel=0.01)
    assert four["zeropp"]["peak"] == pytest.approx(once["zeropp"]["peak"])
    assert main(["estimate", *PLAN, "--step", "1", "--all"]) == 0
    assert "by micro-steps of an optimizer step" in capsys.readouterr().out


def test_a_deepspeed_config_gives_stage_accumulation_dtype_and_its_own_block(
    capsys, tmp_path: Path
) -> None:
    path = tmp_path / "ds_config.json"
    config = {
        "zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 3,
        "bf16": {"enabled": True}, "quantized_comm": {"scheme": "qsdp", "gradients": {"bits": 5}},
    }  # fmt: skip
    path.write_text(json.dumps(config))
    found = rows(capsys, *PLAN, "--step", "1", "--ds-config", str(path))
    assert (found[""]["stage"], found[""]["micro_steps"]) == (2, 3)
    own = found["your block (qsdp)"]["inter_bytes"]
    assert own == pytest.approx(1.008 + 5 / 8 + 0.008, rel=0.002)


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


def test_a_hugging_face_config_gives_the_real_shapes(capsys, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    path = tmp_path / "config.json"
    llama = {
        "model_type": "llama", "vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 3,
        "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    path.write_text(json.dumps(llama))
    found = rows(capsys, "--model-config", str(path), *PLAN[2:], "--step", "1")
    block = 128 * 128 * 2 + 64 * 128 * 2 + 3 * 256 * 128 + 2 * 128
    assert found[""]["parameters"] == 2 * 1000 * 128 + 3 * block + 128


def test_options_fill_in_what_a_config_leaves_to_hugging_face(capsys) -> None:
    lora = str(resource_dir("configs") / "ds_lora_zero3.json")
    chosen = ("--ds-config", lora, "--dtype", "bf16", "--accumulation", "2", "--step", "1")
    facts = rows(capsys, *PLAN, *chosen)[""]
    assert (facts["stage"], facts["micro_steps"]) == (3, 2)


def test_full_replica_is_marked(capsys) -> None:
    options = ["--params", "7e9", "--nodes", "2", "--link", "10", "--step", "1", "--all"]
    assert main(["estimate", *options]) == 0
    shown = capsys.readouterr().out.splitlines()
    line = next(line for line in shown if line.startswith("sdp4bit "))
    assert "14" in line and "no: start-up refuses it: needs allow_full_replica" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (PLAN[2:] + ["--step", "1"], "no model: give --params"),
        (PLAN, "--step: seconds"),
        (["--params", "7e9", "--nodes", "2", "--step", "1"], "--link: Gb/s into one node"),
        (["--params", "7e9", "--gpus", "8", "--step", "1"], "--intra: Gb/s into one GPU"),
        (["--params", "7e9", "--step", "1"], "allowed: 2 ranks or more"),
        (PLAN + ["--step", "1", "--ds-config", "{bad}"], "zero_optimization.stage is not set"),
        (PLAN + ["--step", "1", "--probe", "{bad}"], "allowed: a file of this version's"),
        (PLAN[2:] + ["--step", "1", "--model-config", "{bad}"], "no model_type"),
        (PLAN + ["--step", "1", "--ds-config", "{block}"], "node_size=4: allowed here: --gpus"),
        (PLAN + ["--step", "1", "--ds-config", "{auto}"], '--dtype: "auto" in the DeepSpeed'),
    ],
)
def test_what_cannot_work_is_said_with_its_option(
    capsys, tmp_path: Path, arguments: list[str], message: str
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    block = tmp_path / "block.json"
    config = {"zero_optimization": {"stage": 2}, "quantized_comm": {"node_size": 4}}
    block.write_text(json.dumps(config))
    lora = resource_dir("configs") / "ds_lora_zero3.json"
    files = {"{bad}": str(bad), "{block}": str(block), "{auto}": str(lora)}
    filled = [files.get(argument, argument) for argument in arguments]
    assert main(["estimate", *filled]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


@pytest.mark.parametrize("value", ["0", "-1", "x", "inf", "1.5"])
def test_wrong_numbers_are_refused(capsys, value: str) -> None:
    with pytest.raises(SystemExit):
        main(["estimate", "--params", value])
    assert "allowed: " in capsys.readouterr().err


def test_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    path = tmp_path / "estimate.png"
    assert main(["estimate", *PLAN, "--step", "1", "--plot", str(path)]) == 0
    assert path.stat().st_size > 10_000


# ---- what is recommended ----


@pytest.mark.parametrize(
    ("options", "best", "against"),
    [
        # Others would take less time.
        ("--gpus 4 --intra 200", "eden4", {"qsdp": "others", "eden2": "research"}),
        ("", "qsdp", {"sdp4bit": "allow_full_replica", "zeropp": "start-up refuses"}),
        ("--stage 2", "eden4", {"qw4": "research", "hybrid": "others"}),
        ("--gpus 4 --intra 200 --gpu-memory 22", "eden4", {"lossless_w_g3": "needs 22.8 GB"}),
        ("--stage 2 --gpu-memory 9", "deepspeed as shipped", {}),
    ],
)
def test_what_is_advised_starts_and_fits(
    capsys, options: str, best: str, against: dict[str, str]
) -> None:
    plan = "--params 7b --link 10 --step 1 --nodes 2"
    found = rows(capsys, *plan.split(), *options.split())
    assert found[""]["best"] == best
    place = choosing.Place(found[""]["stage"], 2, found[""]["cluster"]["node_size"])
    taken = {name for name, row in found.items() if name and not row["note"]}
    assert taken <= {"deepspeed as shipped", "hybrid", *choosing.candidates(place)}
    for name, reason in against.items():
        assert reason in found[name]["note"]


def answer(capsys, options: str) -> list[str]:
    return rows(capsys, *options.split())[""]["answer"]


ONE_BILLION = "--params 1b --stage 2 --nodes 2 --link 10 --step 0.6"


def test_the_answer_comes_first_in_80_columns(capsys) -> None:
    for more in ("", "--gpu-memory 12", "--gpu-memory 2", "--gpus 8 --intra 200 --stage 3"):
        assert main(["estimate", *ONE_BILLION.split(), *more.split()]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert max(map(len, shown)) <= 80, max(shown, key=len)
        if not more:
            assert shown[0].startswith("take eden4: 2.9-4.0 x as fast as DeepSpeed as shipped, +5 ")


def test_nothing_gains_does_not_fit_and_the_model_itself_does_not_fit_are_told_apart(
    capsys,
) -> None:
    none, *_ = answer(capsys, f"{ONE_BILLION} --link 1000")
    assert none == "leave the block out: nothing gains 2 %, compute limits the step"
    tight, *_ = answer(capsys, f"{ONE_BILLION} --gpu-memory 12")
    assert tight.startswith("eden4 gains 2.9-4.0 x but does not fit: set reduce_bucket_size and ")
    assert tight.endswith("allgather_bucket_size to 5e7, -5.4 GB")
    beyond = answer(capsys, f"{ONE_BILLION} --gpu-memory 9.2")
    assert beyond[0].startswith("leave the block out: eden4 gains 2.9-4.0 x but needs ")
    no_room = answer(capsys, f"{ONE_BILLION} --gpu-memory 2")
    assert no_room[0].startswith("the model itself does not fit: DeepSpeed needs 9.1 GB of 2 per")
    large = "--params 7b --stage 2 --nodes 2 --gpus 8 --link 10 --intra 1800 --step 14"
    fits = answer(capsys, f"{large} --gpu-memory 16")
    assert "does not fit" in fits[0] and fits[1].startswith("ZeRO-3 with eden4 fits: ")


def test_another_stage_is_named_where_its_step_is_shorter(capsys) -> None:
    lora = "--params 7b --trained 0.01 --step 3 --nodes 2 --link 10 --stage"
    first, other = answer(capsys, f"{lora} 3")
    assert first.startswith("take qsdp")
    assert other.startswith("plain ZeRO-2 without the block is shorter than 5.5-8.5 s: 3-3.")
    assert "shorter" not in " ".join(answer(capsys, f"{lora} 2"))


def test_one_node_and_slow_links_have_answers_of_their_own(capsys) -> None:
    fast, *_ = answer(capsys, "--params 7b --gpus 8 --intra 3600 --step 4 --stage 2")
    assert fast == "leave the block out: on one node links are too fast for it to gain"
    slow = answer(capsys, f"{ONE_BILLION} --link 0.5")
    assert slow[0].startswith("take lossless_w_g3") and "docs/slow_links.md" in slow[-1]


def test_a_measured_step_gives_the_rate_that_the_link_reaches(capsys) -> None:
    plain = ("--params", "7b", "--nodes", "2", "--gpus", "8", "--intra", "1800", "--step", "4.2")
    known = rows(capsys, *plain, "--link", "25")
    step = known["deepspeed as shipped"]["step_serial"]
    found = rows(capsys, *plain, "--measured", str(step))
    assert found[""]["cluster"]["link"] == pytest.approx(25 * 1e9 / 8)
    inside = ("--params", "7b", "--gpus", "8", "--step", "4.2", "--measured", "5")
    found = rows(capsys, *inside)
    assert found["deepspeed as shipped"]["step_serial"] == pytest.approx(5)
    assert main(["estimate", *plain, "--measured", "4"]) == 1
    assert "allowed: a whole step, with DeepSpeed as shipped" in capsys.readouterr().err


def test_a_model_of_seven_parameters_is_asked_about(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["estimate", "--params", "7"])
    assert "7 billion? write 7b" in capsys.readouterr().err


def test_a_block_that_accepts_full_replicas_lets_them_be_recommended(capsys, tmp_path) -> None:
    path = tmp_path / "ds_config.json"
    block = {"scheme": "autotune", "allow_full_replica": True}
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "quantized_comm": block}
    path.write_text(json.dumps(config))
    options = ("--params", "7b", "--nodes", "2", "--link", "10", "--step", "1")
    assert rows(capsys, *options, "--ds-config", str(path))[""]["best"] == "eden4"


def test_what_start_up_refuses_is_not_priced(capsys, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    zero = {"stage": 3, "zero_quantized_weights": True}
    path.write_text(json.dumps({"zero_optimization": zero, "quantized_comm": {"scheme": "qsdp"}}))
    assert main(["estimate", *PLAN, "--step", "1", "--ds-config", str(path)]) == 1
    assert "cannot be used with zero_optimization.zero_quantized_weights" in capsys.readouterr().err


def test_everything_that_is_missing_is_named_at_once(capsys) -> None:
    lora = str(resource_dir("configs") / "ds_lora_zero3.json")
    assert main(["estimate", "--nodes", "2", "--gpus", "8", "--ds-config", lora]) == 1
    said = capsys.readouterr().err
    assert "6 are missing:" in said
    for option in (
        "--dtype: ",
        "--accumulation: ",
        "--params 7b",
        "--step: ",
        "--link: ",
        "--intra: ",
    ):
        assert option in said
    assert "gradient_accumulation_steps of" in said and "give bf16, fp16 or fp32" in said


@pytest.mark.parametrize(
    ("written", "numel"),
    [("7b", 7e9), ("1.3B", 1.3e9), ("350m", 3.5e8), ("7e9", 7e9)],
)
def test_parameters_are_written_as_models_are_named(capsys, written: str, numel: float) -> None:
    found = rows(capsys, "--params", written, "--nodes", "2", "--link", "10", "--step", "1")
    assert found[""]["parameters"] == numel


def test_frozen_weights_travel_under_zero3_only(capsys) -> None:
    lora = (*PLAN, "--step", "1", "--trained", "0.01")
    sharded, replicated = rows(capsys, *lora), rows(capsys, *lora, "--stage", "2")
    gathers = sharded[""]["gathers"]
    shipped = "deepspeed as shipped"
    assert sharded[shipped]["inter_bytes"] == pytest.approx(2 * (gathers + 0.01), rel=0.01)
    assert sharded["full_precision"]["inter_bytes"] == pytest.approx(2 * (gathers + 0.01), rel=0.01)
    # Between nodes a node shard exchanges what is trained.
    assert sharded["sdp4bit"]["inter_bytes"] < 0.02
    seconds = 6 * 0.01 * 7e9 / 2 / 1.25e9
    assert replicated[shipped]["communication"] == pytest.approx(seconds, rel=0.1)
    assert replicated[shipped]["gpu_memory"] < 16.5e9  # 2 bytes per weight and little besides


def test_settings_of_the_fetch_decide_how_often_weights_are_gathered(capsys, tmp_path) -> None:
    path = tmp_path / "ds_config.json"
    zero = {"stage": 3, "stage3_prefetch_bucket_size": "auto", "stage3_max_live_parameters": 1e9}
    path.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}}))
    small = ("--params", "400m", *PLAN[2:], "--step", "1", "--ds-config", str(path))
    found = rows(capsys, *small)
    assert found[""]["gathers"] == 1 and found["deepspeed as shipped"]["inter_bytes"] == 4
    zero |= {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    path.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}}))
    assert rows(capsys, *small)[""]["gathers"] == pytest.approx(2, rel=1e-3)


def test_auto_sizes_are_those_that_a_trainer_fills_in() -> None:
    keys = ("param_persistence_threshold", "prefetch_bucket_size", "max_reuse_distance")
    zero = {"reduce_bucket_size": "auto", **{f"stage3_{key}": "auto" for key in keys}}
    found = planning._buckets(zero, 1000)
    assert found.reduce == 10**6
    assert (found.fetch.prefetch_bucket_size, found.fetch.max_reuse_distance) == (9 * 10**5, 10**9)


def test_memory_of_a_gpu_is_that_of_its_parts(capsys) -> None:
    found = rows(capsys, *PLAN, "--step", "1", "--stage", "2")
    shipped = (2 + 2 / 16 + 12 / 16) * 7e9 + 2 * 5e8
    assert found["deepspeed as shipped"]["gpu_memory"] == pytest.approx(shipped)
    row = found["sdp4bit"]
    assert row["gpu_memory"] == pytest.approx(shipped + row["memory"] + row["peak"])
    assert 0.5e9 < row["peak"] < 5e9


def test_typical_links_are_in_the_table(capsys) -> None:
    assert main(["estimate", *PLAN, "--step", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (header,) = (line for line in lines if line.startswith("scheme") and " 25 " in line)
    assert header.split()[1:] == ["10", "25", "100", "200", "400"]
    own = next(line for line in lines[lines.index(header) :] if line.startswith("eden4"))
    figures = [float(figure) for figure in own.split()[1:]]
    assert figures == sorted(figures, reverse=True) and len(figures) == 5


# ---- with a probe ----


def test_probed_links_are_used_unless_an_option_replaces_them(capsys, tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    rate = {"bytes_per_second": 1e9, "latency": 1e-3}
    facts = {"kind": "probe", "version": 1, "nodes": 4, "node_size": 2, "backend": "nccl",
             "intra": {**rate, "bytes_per_second": 5e9}, "inter": rate}  # fmt: skip
    path.write_text(json.dumps(facts))
    options = ("--params", "1e9", "--step", "1", "--probe", str(path))
    cluster = rows(capsys, *options)[""]["cluster"]
    assert (cluster["nodes"], cluster["node_size"], cluster["link"]) == (4, 2, 1e9)
    assert (cluster["intra_link"], cluster["latency"]) == (5e9, 1e-3)
    assert rows(capsys, *options, "--link", "80")[""]["cluster"]["link"] == 1e10
    path.write_text(json.dumps({**facts, "nodes": 1, "inter": None}))
    assert main(["estimate", *options, "--nodes", "2"]) == 1
    assert "was measured on one node" in capsys.readouterr().err


def test_rate_leaves_out_the_latency() -> None:
    rate = rate_from([1000, 10**6, 2 * 10**6 + 1000], [0.5, 0.9, 1.5])
    assert rate == Rate(bytes_per_second=2e6, latency=0.5)


@pytest.mark.parametrize("longest", [0.4, 0.5, 0.9])
def test_rate_is_too_low_rather_than_absurd_where_noise_hides_it(longest: float) -> None:
    rate = rate_from([1000, 10**6], [0.5, longest])
    assert rate == Rate(bytes_per_second=10**6 / longest, latency=0.5)


def test_probe_outside_a_launcher_says_how_to_start_it(monkeypatch, capsys) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["probe"]) == 1
    assert "torchrun --nproc-per-node" in capsys.readouterr().err


def test_exact_differences_are_a_range_and_the_table_says_so(capsys) -> None:
    """2.36 bits, and bf16 gradients that cross once in 8 micro-steps; 16 bits at most."""
    options = (*PLAN, "--step", "1", "--accumulation", "8")
    row = rows(capsys, *options)["lossless"]
    assert row["inter_bytes"] == pytest.approx(2 + 2.36 / 8, rel=1e-3)
    assert row["most_bytes"] == pytest.approx(2 + 2, rel=1e-3)
    assert rows(capsys, *options)["sdp4bit"]["most_bytes"] is None
    assert main(["estimate", *options, "--all"]) == 0
    shown = capsys.readouterr().out
    assert "lossless: 2.36 bits per weight at a learning rate of 3e-4" in shown
    assert "at most, in B/param: 4.000 (lossless)" in shown
