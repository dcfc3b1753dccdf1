"""Guards of the architecture: order of the rooms, a light ``import ds_quant``, resources.

Sources are parsed, not imported, so an edge is found wherever it is written.
"""

from __future__ import annotations

import ast
import configparser
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ds_quant"
ROOMS = {  # folder -> its modules; "ds_quant" itself first
    folder.name: sorted(folder.glob("*.py"))
    for folder in sorted({path.parent for path in PACKAGE.rglob("*.py")})
}

MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 60

# Every room imports itself and the rooms to its left.
ORDER = ("kernels", "codec", "comm", "policy", "runtime", "zero", "fsdp2", "ddp", "tools")
FRONTS = ("zero", "fsdp2", "ddp")  # none knows another
# The block stands beside comm. A scheme is built of codecs, but checks must not load torch.
CONFIG_USERS = ("policy", "runtime", "zero", "fsdp2", "ddp", "tools")
CONFIG_BUILDS = ("codec", "policy")  # inside functions
CONFIG_READS = ("codec.rules", "comm.topology")  # standard library only
ANYWHERE = ("resources", "leftovers", "_autoload", "__init__")  # standard library only

# Room or module -> packages of others that it may import.
TORCH = {"torch", "numpy"}
OTHERS = {
    "": set(),
    "kernels": TORCH,
    "kernels.cuda": TORCH | {"cupy"},
    "kernels.wire": set(),
    "kernels.random_bits": set(),
    "codec": TORCH,
    "codec.rules": set(),
    "comm": TORCH,
    "comm.topology": set(),
    "comm.transport": TORCH | {"deepspeed.comm"},  # so that DeepSpeed's comms_logger sees it
    "policy": TORCH,
    "runtime": {"torch"},
    "fsdp2": {"torch"},
    "ddp": {"torch"},
    "config": {"pydantic", "pydantic_core", "yaml"},
    "zero": {"torch", "deepspeed.comm"},
    "zero.hooks": {"torch", "deepspeed"},
    "zero.accelerator": {"torch", "deepspeed"},
    "zero.shard_hooks": {"torch", "deepspeed"},
    "zero.sharded_params": {"torch", "deepspeed"},
    "zero.optimizer_hooks": {"torch", "deepspeed"},
    "zero.offload": {"torch", "deepspeed"},
    "zero.muon": {"torch", "deepspeed"},
    "zero.version": {"deepspeed", "packaging"},
    "zero.install": {"torch", "deepspeed"},
    "tools": set("torch deepspeed packaging matplotlib transformers hjson cupy pydantic".split()),
}
ONLY_INSIDE_FUNCTIONS = {"cupy", "deepspeed"}
# Modules that may use any attribute that zero/deepspeed_types.py declares.
HOOKS = (
    "zero.hooks",
    "zero.shard_hooks",
    "zero.sharded_params",
    "zero.optimizer_hooks",
    "zero.offload",
    "zero.muon",
    "zero.install",
    "zero.accelerator",
    "zero.deepspeed_types",
    "tools.stock_config",  # asks DeepSpeed's own config
)
# Internals that other modules read: names of no hook.
READ_ELSEWHERE = {
    "zero.attach": {"dp_process_group", "ds_process_group"},
    "zero.fetch": {
        "all_gather_coalesced",
        "ds_active_sub_modules",
        "ds_id",
        "ds_numel",
        "ds_persist",
        "ds_process_group",
        "ds_tensor",
    },
    "zero.first_step": {"ds_persist"},
    "zero.gather_count": {"ds_numel", "ds_persist"},
    "zero.node_shard": {"ds_numel", "ds_persist", "ds_process_group", "ds_tensor"},
    "zero.owner_gradients": {"dp_process_group"},
    "zero.partial_gradients": {"independent_gradient_partition_epilogue"},
    "zero.replica": {"allgather_bucket_size"},
    "zero.row_memory": {"ds_numel", "ds_tensor"},
}
# Classes of deepspeed_types.py whose public attributes are DeepSpeed's interface, not internals.
INTERFACES = {"Engine", "Monitor", "OffloadSettings", "GatherHandle", "CheckpointEngine"}
# Names that objects of torch, of Python or of this package have, too.
SHARED_NAMES = {
    "all_gather",
    "current_stream",
    "get_rank",
    "get_world_size",
    "initialize",
    "optimizer",
    "params",
    "partition",
    "quantized_comm",
    "reduce_scatter",
    "stage",
    "step",
    "synchronize",
    "zero_grad",
}


class Edge(NamedTuple):
    source: str  # module without "ds_quant."
    target: str  # the same for our modules, else as imported
    line: int
    at_top: bool
    for_types: bool  # under ``if TYPE_CHECKING``: never run


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def edges_of(path: Path, module: str) -> list[Edge]:
    """Return every import of a module, those of the standard library left out."""
    tree = ast.parse(path.read_text("utf-8"))
    in_functions, for_types = set[int](), set[int]()  # ids of nodes
    for outer in ast.walk(tree):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            in_functions.update(map(id, ast.walk(outer)))
        elif isinstance(outer, ast.If) and ast.unparse(outer.test) == "TYPE_CHECKING":
            for_types.update(map(id, ast.walk(outer)))
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
                typed = id(node) in for_types
                at_top = id(node) not in in_functions and not typed
                found.append(Edge(module, short, node.lineno, at_top, typed))
    return found


def _imported(module: str, name: str) -> str:
    """Return the module of ``from module import name``: the submodule ``name`` if there is one."""
    as_path = PACKAGE.parent.joinpath(*module.split("."), name)
    if as_path.is_dir() or as_path.with_suffix(".py").exists() or module == "deepspeed":
        return f"{module}.{name}"
    return module


def room_of(module: str) -> str:
    return module.partition(".")[0] if "." in module or module in ROOMS else ""


def is_allowed(module: str, edge: Edge) -> bool:
    """Return True if a module may have an edge."""
    room, target = room_of(module), edge.target
    if target.split(".")[0] in ANYWHERE:
        return True
    if target.split(".")[0] in ROOMS:
        to = room_of(target)
        if room == "config" and target in CONFIG_READS:
            return True
        if room == "config" and to in CONFIG_BUILDS:
            return not edge.at_top
        if to == "config":
            return room in ("config", *CONFIG_USERS)
        if room in FRONTS and to in FRONTS and room != to:
            return False
        if room in ORDER:
            return ORDER.index(to) <= ORDER.index(room)
        return module == "__main__" or not edge.at_top
    others = OTHERS.get(module, OTHERS[room])
    return any(target == entry or target.startswith(f"{entry}.") for entry in others)


@pytest.mark.parametrize("room", ROOMS)
def test_modules_import_only_what_their_room_allows(room: str) -> None:
    wrong = []
    for path in ROOMS[room]:
        module = module_name(path)
        for edge in edges_of(path, module):
            where = f"ds_quant.{module}, line {edge.line}: imports {edge.target}"
            if not is_allowed(module, edge):
                wrong.append(where)
            if edge.at_top and edge.target.split(".")[0] in ONLY_INSIDE_FUNCTIONS:
                wrong.append(f"{where} at the top")
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions hide a circle as well, but for those that start or check only.
    Imports for types alone are never run: they count in the rooms that know what a run is.
    """
    hidden = {"__init__", "_autoload", "zero.install", "config.schema"}
    left: dict[str, set[str]] = {}
    for room, paths in ROOMS.items():
        for path in paths:
            module = module_name(path)
            left[module] = {
                e.target
                for e in edges_of(path, module)
                if e.at_top
                or (e.for_types and room in ("runtime", *FRONTS))
                or not (e.for_types or module in hidden)
            }
    while leaves := [m for m, targets in left.items() if not targets & set(left) - {m}]:
        for module in leaves:
            del left[module]
    assert not left, "a circle among these"


HUBS = {
    "zero/front.py": "EngineFront",
    "zero/engine.py": "AttachedEngine",
    "fsdp2/context.py": "Context",
    "fsdp2/model.py": "AttachedModel",
    "ddp/model.py": "AttachedModel",
}  # classes that many modules of a room are given
MAX_HUB_ATTRIBUTES = 12


def hub_attributes(place: str) -> set[str]:
    """Return the attributes of a hub: its fields, and what its methods set on ``self``."""
    tree = ast.parse((PACKAGE / place).read_text("utf-8"))
    (hub,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == HUBS[place])
    fields = {ast.unparse(node.target) for node in hub.body if isinstance(node, ast.AnnAssign)}
    for node in ast.walk(hub):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) == "self":
                fields.add(node.attr)
    return fields


@pytest.mark.parametrize("place", HUBS)
def test_hubs_hold_few_attributes(place: str) -> None:
    attributes = hub_attributes(place)
    assert 0 < len(attributes) <= MAX_HUB_ATTRIBUTES, sorted(attributes)


def test_no_module_assigns_attributes_of_a_hub_of_zero() -> None:
    """Neither those that it has nor new ones. mypy would not see it in an untyped variable."""
    wrong = []
    for path in ROOMS["zero"]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                owner = ast.unparse(node.value).rpartition(".")[2]
                if owner in ("front", "_front", "attached", "_attached"):
                    wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []


def declared_names() -> dict[str, set[str]]:
    """Return the attributes and methods that zero/deepspeed_types.py declares, by class."""
    tree = ast.parse((PACKAGE / "zero" / "deepspeed_types.py").read_text("utf-8"))
    names = {}
    for kind in tree.body:
        if not isinstance(kind, ast.ClassDef):
            continue
        names[kind.name] = {
            node.target.id
            for node in kind.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        } | {node.name for node in kind.body if isinstance(node, ast.FunctionDef)}
    return names


def internal_names() -> set[str]:
    """Return the declared names that are DeepSpeed's internals and nobody else's."""
    declared = declared_names()
    public = {name for kind in INTERFACES for name in declared[kind] if not name.startswith("_")}
    return set().union(*declared.values()) - public - SHARED_NAMES


def attributes_in(path: Path) -> Iterator[tuple[str, int]]:
    """Return every attribute that a module uses, also by getattr and its kin, with its line."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "getattr",
            "hasattr",
            "setattr",
        ):
            name = node.args[1]
            if isinstance(name, ast.Constant):
                yield str(name.value), node.lineno


def test_declared_names_are_those_of_the_hooks() -> None:
    names = internal_names()
    assert {"ds_tensor", "_config", "ipg_buckets", "average_tensor", "parameter_offload"} <= names
    assert "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads" in names
    assert "global_steps" not in names and "_take_model_step" in names


@pytest.mark.parametrize("room", ROOMS)
def test_only_hooks_use_internals_of_deepspeed(room: str) -> None:
    names = internal_names()
    wrong = []
    unused = []
    for path in ROOMS[room]:
        module = module_name(path)
        if module in HOOKS:
            continue
        readable = READ_ELSEWHERE.get(module, set())
        used = {name: line for name, line in attributes_in(path) if name in names}
        for name in used.keys() - readable:
            wrong.append(f"{path.name}:{used[name]} uses {name}")
        unused += [f"{path.name} no longer reads {name}" for name in readable - used.keys()]
    assert wrong == [], "only the hooks may"
    assert unused == []


@pytest.mark.parametrize("room", ROOMS)
def test_only_hooks_name_modules_inside_deepspeed(room: str) -> None:
    # _autoload waits for one module by name
    paths = [p for p in ROOMS[room] if module_name(p) not in (*HOOKS, "_autoload")]
    wrong = [
        f"{path.name}:{number}: {line.strip()}"
        for path in paths
        for number, line in code_of(path).items()
        if "deepspeed.runtime" in line
    ]
    assert wrong == [], "only the hooks may"


def code_of(path: Path) -> dict[int, str]:
    """Return the lines without blanks, comments and docstrings, by number."""
    source = path.read_text("utf-8")
    lines, found = source.splitlines(), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT and token.string.strip():
            found.update(range(token.start[0], token.end[0] + 1))
    for docstring in filter(None, map(docstring_of, ast.walk(ast.parse(source)))):
        found -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return {number: lines[number - 1] for number in sorted(found)}


def docstring_of(node: ast.AST) -> ast.Expr | None:
    body = getattr(node, "body", None)
    first = body[0] if isinstance(body, list) and body else None
    text = getattr(first.value, "value", None) if isinstance(first, ast.Expr) else None
    return first if isinstance(text, str) else None


@pytest.mark.parametrize("room", ROOMS)
def test_modules_and_functions_are_short(room: str) -> None:
    long = {}
    for path in ROOMS[room]:
        source = path.read_text("utf-8")
        long[path.name] = len(source.splitlines()) - MAX_MODULE_LINES
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            docstring = docstring_of(node)
            lines = node.end_lineno - node.lineno + 1
            lines -= docstring.end_lineno - docstring.lineno + 1 if docstring else 0
            long[f"{path.name}: {node.name}"] = lines - MAX_FUNCTION_LINES
    assert {place: lines for place, lines in long.items() if lines > 0} == {}, "lines too many"


# Dataclasses of a run that are assigned to, made by position or compared by value.
CHANGED = {
    "runtime.param.Param",
    "runtime.run.SchemeState",
    "zero.node_shard._RequestedGather",
    "zero.shard_gradients.ShardBucket",
    "zero.written_replica._Slices",
    "fsdp2.context.Context",
    "fsdp2.module_reductions.PartialSums",
}
BY_POSITION = {
    "runtime.run.SchemeState",
    "zero.node_messages.NodePlan",
    "zero.node_shard._RequestedGather",
    "zero.shard_gradients.ShardBucket",
    "fsdp2.weight_codecs._HopCodecs",
}
BY_VALUE = {
    "runtime.front.Workload",
    "runtime.run.ProcessGroups",
    "runtime.run.SchemeState",
    "runtime.start_line.LineParts",
    "runtime.warmup.MessageKinds",
    "runtime.written_weights._Piece",
    "runtime.written_weights._Run",
    "zero.node_shard._RequestedGather",
    "zero.partial_gradients.PartialBucket",
    "zero.written_replica._Slices",
    "fsdp2.model.AttachArguments",
    "fsdp2.ranks.RanksOfModel",
    "fsdp2.weight_codecs._HopCodecs",
}


def options_of_dataclasses(rooms: Sequence[str]) -> dict[str, dict[str, object]]:
    """Return what every dataclass of some rooms is declared with, by its place."""
    options: dict[str, dict[str, object]] = {}
    for path in (path for room in rooms for path in ROOMS[room]):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for decorator in getattr(node, "decorator_list", []):
                if ast.unparse(decorator).partition("(")[0] == "dataclass":
                    options[f"{module_name(path)}.{node.name}"] = {
                        keyword.arg: ast.literal_eval(keyword.value)
                        for keyword in getattr(decorator, "keywords", [])
                    }
    return options


def test_records_of_a_run_are_made_by_name_and_stay_as_they_are() -> None:
    """What holds tensors or process groups is compared by identity."""
    options = options_of_dataclasses(("runtime", *FRONTS))
    assert {name for name, of in options.items() if not of.get("frozen")} == CHANGED
    assert {name for name, of in options.items() if not of.get("kw_only")} == BY_POSITION
    assert {name for name, of in options.items() if of.get("eq", True)} == BY_VALUE


@pytest.mark.parametrize("room", ROOMS)
def test_sources_are_ascii_and_modules_say_what_they_are(room: str) -> None:
    for path in ROOMS[room]:
        source = path.read_text("utf-8")
        assert source.isascii(), path
        if source.strip():
            assert ast.get_docstring(ast.parse(source)), path


@pytest.mark.parametrize(
    "code",
    [
        "import sys; before = set(sys.modules); import ds_quant; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "extra = new - set(sys.stdlib_module_names) - {'ds_quant'}; assert not extra, extra",
        "import sys, torch, ds_quant.codec.codec, ds_quant.policy.scheme, ds_quant.config; "
        "assert not torch.cuda.is_initialized(); "
        "assert not {'cupy', 'deepspeed'} & set(sys.modules)",
        "import sys, ds_quant.fsdp2, ds_quant.questions; assert 'deepspeed' not in sys.modules",
        "import sys, ds_quant.ddp, ds_quant.questions; assert 'deepspeed' not in sys.modules",
    ],
    ids=["the package", "the codecs", "the front of FSDP2", "the front of DDP"],
)
def test_imports_load_no_more_than_they_need(code: str) -> None:
    """The standard library alone; neither CUDA nor CuPy."""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_torch_without_the_methods_of_fsdp2_is_refused_by_name() -> None:
    code = (
        "from torch.distributed.fsdp import FSDPModule\n"
        "del FSDPModule.set_custom_reduce_scatter\n"
        "import ds_quant.fsdp2"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    message = "has no set_custom_reduce_scatter: use torch 2.10 or newer"
    assert ended.returncode == 1 and message in ended.stderr


def test_private_names_of_torchs_fsdp2_are_declared_in_one_file() -> None:
    """As docs/new_torch.md says. Of torch itself others use a DTensor's shard and its version, and
    operations on lists.
    """
    declared = {"_local_tensor", "_version", "_foreach_copy_", "_foreach_norm"}
    tree = ast.parse((PACKAGE / "fsdp2" / "torch_names.py").read_text("utf-8"))
    declared |= {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for path in ROOMS["fsdp2"]:
        if path.name == "torch_names.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
                continue
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not is_own and not node.attr.startswith("__"):
                assert node.attr in declared, f"{path.name}:{node.lineno}: {node.attr}"


def test_the_front_of_ddp_uses_no_private_name_of_torch() -> None:
    for path in ROOMS["ddp"]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
                continue
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            assert is_own or node.attr.startswith("__"), f"{path.name}:{node.lineno}: {node.attr}"
        imported = [edge.target for edge in edges_of(path, module_name(path))]
        assert not [name for name in imported if "._" in name], path.name


def test_the_package_shows_its_public_names() -> None:
    import ds_quant

    assert dir(ds_quant) == sorted(ds_quant.__all__) and "exact_weights" in dir(ds_quant)
    for name in dir(ds_quant):
        assert getattr(ds_quant, name) is not None


def test_setup_cfg_lists_every_package() -> None:
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")
    }
    assert listed == folders | {"ds_quant.configs", "ds_quant.cuda"}
