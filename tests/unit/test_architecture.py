"""Guards of the architecture: who may import whom, sizes, a light ``import ds_quant``, resources.

Sources are parsed, not imported, so an edge is found wherever it is written. A new module needs a
row in MAY_IMPORT; that is the moment to ask whether it belongs.
"""

from __future__ import annotations

import ast
import configparser
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ds_quant"
ROOMS = {  # folder -> its modules; "ds_quant" itself first
    folder.name: sorted(folder.glob("*.py"))
    for folder in sorted({path.parent for path in PACKAGE.rglob("*.py")})
}

MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 60

# Module -> what it may import besides the standard library; names without a dot that are not
# other packages mean ds_quant.<name>. "kernels" and "zero" stand for all their modules.
_BELOW_ZERO = (
    "autotune bandwidth buffers bundle checksum clock codec codec_speed coding collectives config "
    "config_blocks config_errors cost gathers hops kernels layout leftovers levels link memory "
    "meter metrics module_codec node_shard owners owner_plan presets refusals rng rotation scheme "
    "slicing"
)
ANYTHING = "*"
_PUBLIC_DEEPSPEED = "deepspeed.comm deepspeed.accelerator"
MAY_IMPORT = {
    "layout": "",
    "rng": "",
    "resources": "",
    "leftovers": "",
    "_autoload": "zero",  # inside functions, see STDLIB_AT_TOP
    "__init__": "_autoload",
    "kernels": "torch layout rng kernels",
    "kernels.source": "resources",
    "kernels.building": "setuptools",
    "kernels.cuda": "torch numpy layout rng kernels cupy",
    "levels": "torch kernels layout",
    "codec_checks": "torch layout",
    "codec": "torch layout kernels rng codec_checks",
    "module_codec": "torch layout kernels rng codec_checks",
    "rotation": "torch kernels layout rng",
    "presets": "yaml resources",
    "config_errors": "pydantic pydantic_core presets",
    "config_blocks": "pydantic pydantic_core",
    "config": (
        "pydantic pydantic_core config_blocks config_errors presets codec module_codec scheme"
    ),
    "refusals": "config",
    "memory": "cost layout slicing",
    "scheme": "torch codec rng",
    "clock": "torch",
    "bandwidth": "torch clock link",
    "codec_speed": "torch clock codec coding rng rotation scheme",
    "autotune": "bandwidth codec_speed cost scheme slicing",
    "meter": "",
    "metrics": "meter",
    "gathers": "",
    "topology": "",
    "checksum": "torch layout",
    "link": "torch deepspeed.comm buffers checksum meter metrics topology",
    "coding": "torch codec codec_checks kernels rng rotation",
    "buffers": "numpy torch",
    "bundle": "torch codec coding layout",
    "collectives": "torch codec coding kernels layout link meter",
    "node_shard": "torch coding collectives kernels layout link",
    "hops": "torch codec coding collectives kernels layout link meter rotation slicing",
    "slicing": "",
    "owner_plan": "codec layout",
    "owners": "torch codec coding collectives hops kernels link owner_plan rotation",
    "cost": "torch scheme layout codec rng",
    "zero": f"torch {_PUBLIC_DEEPSPEED} zero topology resources __init__ {_BELOW_ZERO}",
    "zero.replica_seams": "torch deepspeed zero",
    "zero.wrapping": "deepspeed",
    "zero.log": "deepspeed.comm",
    "zero.seams": f"torch deepspeed zero topology resources __init__ {_BELOW_ZERO}",
    "tools": ANYTHING,
    "tools.options": "",
    "tools.checks": "",
    "tools.keys": "config config_errors presets",
    "cli": ANYTHING,
    "__main__": "cli",
}
STDLIB_AT_TOP = {"__init__", "_autoload"}
ONLY_INSIDE_FUNCTIONS = {"cupy"}
PRIVATE_NAMES = ("deepspeed.runtime", "_DeepSpeedZeroOptimizer")
PRIVATE_HOMES = ("zero.seams", "zero.replica_seams")


class Edge(NamedTuple):
    source: str  # module without "ds_quant."
    target: str  # the same for our modules, else as imported
    line: int
    at_top: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def edges_of(path: Path, module: str) -> list[Edge]:
    """Every import of a file that is not the standard library."""
    tree = ast.parse(path.read_text("utf-8"))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import"
            targets = [_imported(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for target in targets:
            if target.split(".")[0] not in sys.stdlib_module_names:
                short = "__init__" if target == "ds_quant" else target.removeprefix("ds_quant.")
                found.append(Edge(module, short, node.lineno, id(node) not in inside))
    return found


def _imported(module: str, name: str) -> str:
    """The module behind ``from module import name``: the submodule ``name`` if there is one."""
    as_path = PACKAGE.parent.joinpath(*module.split("."), name)
    if as_path.is_dir() or as_path.with_suffix(".py").exists() or module == "deepspeed":
        return f"{module}.{name}"
    return module


def rule_for(module: str) -> set[str] | None:
    """The row of the module, or of its package."""
    while module:
        if module in MAY_IMPORT:
            return set(MAY_IMPORT[module].split())
        module = module.rpartition(".")[0]
    return None


def is_allowed(target: str, allowed: set[str]) -> bool:
    """A row entry covers the module of that name and everything below it."""
    return any(
        entry == ANYTHING or target == entry or target.startswith(f"{entry}.") for entry in allowed
    )


@pytest.mark.parametrize(
    "target, row, expected",
    [
        ("torch.distributed", "torch", True),
        ("torchvision", "torch", False),
        ("deepspeed.comm", "deepspeed.comm", True),
        ("deepspeed.runtime.engine", "torch deepspeed.comm", False),
        ("deepspeed", "deepspeed.comm", False),
        ("kernels.reference", "kernels", True),
        ("codec", "kernels", False),
        ("codec", ANYTHING, True),
    ],
)
def test_row_covers_modules_below_it_only(target: str, row: str, expected: bool) -> None:
    assert is_allowed(target, set(row.split())) is expected


def test_edges_are_found_wherever_they_are_written(tmp_path: Path) -> None:
    path = PACKAGE / "layout.py"
    source = tmp_path / "layout.py"
    source.write_text(
        "import math\nimport torch.nn\nfrom ds_quant import rng\n"
        "def f():\n    import cupy\n    from ds_quant.kernels import reference\n"
    )
    found = {(edge.target, edge.at_top) for edge in edges_of(source, module_name(path))}
    assert found == {
        ("torch.nn", True),
        ("rng", True),
        ("cupy", False),
        ("kernels.reference", False),
    }


@pytest.mark.parametrize("room", ROOMS)
def test_modules_import_only_what_their_rows_allow(room: str) -> None:
    wrong = []
    for path in ROOMS[room]:
        module = module_name(path)
        allowed = rule_for(module)
        assert allowed is not None, f"ds_quant.{module} has no row in MAY_IMPORT"
        for edge in edges_of(path, module):
            where = f"ds_quant.{module}, line {edge.line}: imports {edge.target}"
            package = edge.target.split(".")[0]
            own = package in ("__init__", "_autoload")
            if not is_allowed(edge.target, allowed):
                wrong.append(f"{where}; allowed: {sorted(allowed)}")
            if edge.at_top and package in ONLY_INSIDE_FUNCTIONS:
                wrong.append(f"{where} at the top")
            if edge.at_top and module in STDLIB_AT_TOP and not own:
                wrong.append(f"{where} at the top")
    assert wrong == []


@pytest.mark.parametrize("room", ROOMS)
def test_only_seams_names_private_deepspeed(room: str) -> None:
    # _autoload waits for one module by name
    paths = [p for p in ROOMS[room] if module_name(p) not in (*PRIVATE_HOMES, "_autoload")]
    wrong = []
    for path in paths:
        tree = ast.parse(path.read_text("utf-8"))
        docstrings = {id(node) for node in map(_docstring_node, ast.walk(tree)) if node is not None}
        for node in ast.walk(tree):
            text = ""
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = "" if id(node) in docstrings else node.value
            elif isinstance(node, ast.Name | ast.Attribute):
                text = node.id if isinstance(node, ast.Name) else node.attr
            named = [name for name in PRIVATE_NAMES if name in text]
            wrong += [f"{path.name}:{node.lineno} names {name}" for name in named]
    assert wrong == [], "only zero/seams.py and zero/replica_seams.py may"


def _docstring_node(node: ast.AST) -> ast.Constant | None:
    body = getattr(node, "body", None)
    if not isinstance(body, list) or not body or not isinstance(body[0], ast.Expr):
        return None
    value = body[0].value
    return value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


@pytest.mark.parametrize("room", ROOMS)
def test_modules_and_functions_are_short(room: str) -> None:
    long = {}
    for path in ROOMS[room]:
        source = path.read_text("utf-8")
        long[path.name] = len(source.splitlines()) - MAX_MODULE_LINES
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            docstring = _docstring_node(node)
            lines = node.end_lineno - node.lineno + 1
            lines -= docstring.end_lineno - docstring.lineno + 1 if docstring else 0
            long[f"{path.name}: {node.name}"] = lines - MAX_FUNCTION_LINES
    assert {place: lines for place, lines in long.items() if lines > 0} == {}, "lines too many"


@pytest.mark.parametrize("room", ROOMS)
def test_sources_are_ascii_and_modules_say_what_they_are(room: str) -> None:
    for path in ROOMS[room]:
        source = path.read_text("utf-8")
        assert source.isascii(), path
        assert not source.strip() or ast.get_docstring(ast.parse(source)), path


def test_import_ds_quant_loads_the_standard_library_only() -> None:
    code = (
        "import sys; before = set(sys.modules); import ds_quant; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "extra = new - set(sys.stdlib_module_names) - {'ds_quant'}; assert not extra, extra"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_package_shows_its_public_names() -> None:
    import ds_quant

    assert dir(ds_quant) == sorted(ds_quant.__all__) and "exact_weights" in dir(ds_quant)
    for name in dir(ds_quant):
        assert getattr(ds_quant, name) is not None


def test_import_of_the_codecs_starts_no_cuda_and_loads_no_cupy() -> None:
    code = (
        "import sys, torch, ds_quant.codec, ds_quant.scheme, ds_quant.config; "
        "assert not torch.cuda.is_initialized(); "
        "assert not {'cupy', 'deepspeed'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_config_files_parse() -> None:
    for path in ROOT.glob("configs/*"):
        assert path.suffix in (".yaml", ".json"), "presets and DeepSpeed configs only"
        parse = yaml.safe_load if path.suffix == ".yaml" else json.loads
        assert isinstance(parse(path.read_text("utf-8")), dict), path


def test_setup_cfg_lists_every_package() -> None:
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")
    }
    assert listed == folders | {"ds_quant.configs", "ds_quant.cuda"}
