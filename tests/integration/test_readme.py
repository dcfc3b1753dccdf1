"""README's five-minute start, typed off: its script, its config, its commands."""

from __future__ import annotations

import re
from pathlib import Path

from tests import needs
from tests.integration.processes import LAUNCHERS, QUIET, free_port, losses, run, run_both

needs.libraries("transformers", extra="hf")

TEXT = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")
SECTION = TEXT.partition("## Five-minute start")[2].partition("\n## ")[0]
# The first block of a language is DeepSpeed's; those of FSDP2 and DDP follow.
BLOCKS = dict(reversed(re.findall(r"^```(\w+)\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)))
COMMANDS = BLOCKS["bash"]


def test_five_minute_start(python: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BLOCKS["python"])
    (tmp_path / "ds_config.json").write_text(BLOCKS["json"])
    _, _, validate, launch, both = COMMANDS.splitlines()
    assert validate.startswith("ds_quant validate ds_config.json ")
    assert launch.startswith("deepspeed --num_accelerators 2 train.py ")
    assert both.startswith("torchrun --nnodes 2 ") and " train.py " in both
    printed = run(python, "-m", "ds_quant", "validate", "ds_config.json", cwd=tmp_path)
    assert "ds_config.json: valid" in printed
    command = (python, "-m", *LAUNCHERS["deepspeed"], free_port(), "train.py")
    builds = tmp_path / "builds"
    quiet = {**QUIET, "TORCH_EXTENSIONS_DIR": str(builds)}
    printed = "".join(run_both(*command, cwd=tmp_path, timeout=280, **quiet))
    assert len(re.findall("^quantized_comm: eden4 on ZeRO-2, ", printed, re.MULTILINE)) == 1, (
        printed
    )
    assert not builds.exists(), "DeepSpeed has compiled an operator"
    found = losses(printed)
    assert len(found) >= 4 and found[-1] < found[0] - 0.3
    assert (tmp_path / "out" / "checkpoint-10" / "model.safetensors").stat().st_size > 100_000
