"""``pip install`` and a block in the config are all it takes: scripts without a line of ours.

The end-to-end runs start real launchers in an environment that has the wheel; the switches are
tried in single processes, where a wrapped config parser shows that the plugin is installed. The
import hook itself is tested in this process, on a module that stands in for DeepSpeed's engine.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_quant import _autoload
from tests.integration.processes import LAUNCHERS, free_port, run, run_both

IMPORTS = {
    "torch first": "import torch\nimport deepspeed",
    "deepspeed first": "import deepspeed\nimport torch",
}
TRAINING = """
import json, os, sys

torch.manual_seed(0)
model = torch.nn.Linear(128, 128)
optimizer = torch.optim.AdamW(model.parameters())
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config="ds_config.json")
for _ in range(3):
    loss = engine(torch.ones(2, 128)).square().mean()
    engine.backward(loss)
    engine.step()
plugin = sys.modules.get("ds_quant")
report = plugin.report(engine) if plugin else None
with open(f"rank{os.environ['RANK']}.json", "w") as file:
    json.dump(report, file)
deepspeed.comm.barrier()
os._exit(0)  # DeepSpeed on CPU may abort in a normal interpreter exit
"""


def ds_config(stage: int) -> dict:
    zero: dict = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "quantized_comm": {"scheme": "qsdp"},
    }


# ---- launchers ----


@pytest.mark.parametrize(
    ("launcher", "order", "stage"),
    [
        # The test of the README starts DeepSpeed's launcher.
        pytest.param("deepspeed", "deepspeed first", 3, marks=pytest.mark.slow),
        ("torchrun", "torch first", 2),
    ],
)
def test_a_script_without_a_line_of_ours_is_quantized(
    python: Path, tmp_path: Path, launcher: str, order: str, stage: int
) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(ds_config(stage)))
    (tmp_path / "train.py").write_text(IMPORTS[order] + TRAINING)
    command = (python, "-m", *LAUNCHERS[launcher], free_port(), "train.py")
    environment = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": "builds"}
    printed = "".join(run_both(*command, cwd=tmp_path, **environment))
    assert not (tmp_path / "builds").exists(), "DeepSpeed has compiled an operator"
    assert printed.count("quantized_comm: qsdp on ") == 1, printed
    assert f"quantized_comm: qsdp on ZeRO-{stage}, 1 node x 2 CPU processes: " in printed
    for rank in range(2):
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert report["steps"] == 3 and report["world"] == 2
        for role in ("weights", "gradients"):
            assert report["received_bytes"][role]["intra"] > 0
            assert report["received_bytes"][role]["inter"] == 0


# ---- switches, in single processes ----

SHOW = """
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
wrapped = [hasattr(f, "ds_quant_wraps") for f in (
    DeepSpeedConfig._initialize_params,
    DeepSpeedEngine._configure_zero_optimizer,
    DeepSpeedEngine._configure_bf16_optimizer,
    DeepSpeedEngine._configure_fp16_optimizer,
)]
assert len(set(wrapped)) == 1, wrapped
print("active" if all(wrapped) else "inactive")
"""
OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (IMPORTS["torch first"], "inactive"),
        pytest.param("import ds_quant\nimport deepspeed", "active", marks=pytest.mark.slow),
        ("import deepspeed\nimport ds_quant", "active"),
    ],
    ids=["not imported", "imported before", "imported after"],
)
def test_without_autoload_an_import_switches_the_plugin_on(
    python: Path, tmp_path: Path, code: str, expected: str
) -> None:
    printed = run(python, "-c", code + SHOW, cwd=tmp_path, DS_ACCELERATOR="cpu", **OFF)
    assert printed.splitlines()[-1] == expected


BREAK = "import sys\nsys.modules['ds_quant.zero.hooks'] = None  # importing it now fails\n"


@pytest.mark.parametrize(
    ("code", "environment"),
    [
        (IMPORTS["torch first"], {}),
        pytest.param(
            "import torch\nimport deepspeed\nimport ds_quant", OFF, marks=pytest.mark.slow
        ),
    ],
    ids=["while deepspeed is imported", "when deepspeed is there already"],
)
def test_a_broken_install_only_warns(
    python: Path, tmp_path: Path, code: str, environment: dict[str, str]
) -> None:
    printed, warned = run_both(
        python, "-c", BREAK + code + SHOW, cwd=tmp_path, DS_ACCELERATOR="cpu", **environment
    )
    assert printed.splitlines()[-1] == "inactive"
    assert warned.count("quantized_comm is NOT active") == 1
    assert "RuntimeWarning" in warned and "ds_quant.zero.hooks" in warned


def test_a_broken_install_does_not_raise_where_warnings_are_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pytest runs with warnings as errors here, as ``python -W error`` does."""
    monkeypatch.setitem(sys.modules, "ds_quant.zero.install", None)
    _autoload._install()
    assert "quantized_comm is NOT active" in capsys.readouterr().err


# ---- the import hook ----

ENGINE = """
class DeepSpeedEngine:
    pass

seen_while_running = __loader__, __spec__.loader
"""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A package ``hooked.engine`` as the target; lists the installs. Leaves no hook behind."""
    package = tmp_path / "hooked"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("")
    (package / "engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_autoload, "TARGET", "hooked.engine")
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not is_hook(f)])
    monkeypatch.delenv(_autoload.DISABLE_VARIABLE, raising=False)
    installs: list[str] = []
    monkeypatch.setattr(_autoload, "_install", lambda: installs.append("installed"))
    yield installs
    for name in [n for n in sys.modules if n.split(".")[0] == "hooked"]:
        del sys.modules[name]


def is_hook(finder: object) -> bool:
    return isinstance(finder, _autoload._EngineFinder)


def hooks() -> int:
    return sum(is_hook(finder) for finder in sys.meta_path)


def test_the_hook_installs_once_when_the_engine_is_imported_and_is_gone(
    installed: list[str],
) -> None:
    """However often it was activated; looking for the engine without importing it keeps it."""
    _autoload.activate()
    _autoload.activate()
    assert importlib.util.find_spec("hooked.engine") is not None
    assert hooks() == 1 and is_hook(sys.meta_path[0]) and installed == []
    for _ in range(2):
        importlib.import_module("hooked.engine")
        assert installed == ["installed"] and hooks() == 0
        del sys.modules["hooked.engine"]


def test_the_engine_module_keeps_its_own_loader(installed: list[str]) -> None:
    _autoload.activate()
    module = importlib.import_module("hooked.engine")
    plain = importlib.util.spec_from_file_location("hooked.engine", module.__file__).loader
    for loader in (module.__loader__, module.__spec__.loader, *module.seen_while_running):
        assert type(loader) is type(plain) and loader.path == plain.path


@pytest.mark.parametrize("name", ["hooked", "hooked.other", "hooked.engine.part", "json"])
def test_the_hook_ignores_every_other_module(installed: list[str], name: str) -> None:
    _autoload.activate()
    assert sys.meta_path[0].find_spec(name, None) is None
    assert hooks() == 1 and installed == []


def test_an_engine_that_is_missing_or_fails_to_import_is_hooked_when_it_succeeds(
    installed: list[str], tmp_path: Path
) -> None:
    source = tmp_path / "hooked" / "engine.py"
    source.unlink()
    _autoload.activate()
    for sentence in ("No module named 'hooked.engine'", "not yet"):
        importlib.invalidate_caches()
        with pytest.raises(ImportError, match=sentence):
            importlib.import_module("hooked.engine")
        assert installed == []
        source.write_text("raise ImportError('not yet')")
    source.write_text(ENGINE + "\n# of another size, so that no stale byte code is used\n")
    importlib.invalidate_caches()
    importlib.import_module("hooked.engine")
    assert installed == ["installed"] and hooks() == 0


@pytest.mark.parametrize(
    ("value", "active"),
    [("1", False), ("true", False), ("YES", False), ("", True), ("0", True), ("no", True)],
)
def test_the_variable_disables_the_hook(
    installed: list[str], monkeypatch: pytest.MonkeyPatch, value: str, active: bool
) -> None:
    monkeypatch.setenv("DS_QUANT_DISABLE", value)
    _autoload.activate()
    assert hooks() == int(active)
