"""What the package promises about itself: who imports whom, what it never does, what it never loads."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedp3

ROOT = Path(fedp3.__file__).parent
# A module imports from its own level or from those above it in this list, never from below.
LEVELS = (
    "errors types hooks rng lookup masks handful locks unsaved",
    "data partition partition_file wiring layermap models plan",
    "prune local_prune checks submodel compress optimise mean aggregate gate privacy.clip privacy.mechanism "
    "privacy.account privacy.ledger privacy.bounds",
    "frames codec cost work recipe steps passes stacked client evaluate fleet fit",
    "server",
    "record tensorboard methods theory privacy",
    "config",
    "experiment",
    "engines report scribe inputs",
    "driver",
    "api tune",
    "reproduce engines.flower.app engines.flower.strategy",
    "cli __main__",
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names.split()}
LINES = 330
HEAVY = ("flwr", "ray", "matplotlib", "sklearn", "tensorboard", "dp_accounting", "opacus", "playwright")


def modules() -> dict[str, Path]:
    """Every module by its name inside the package; the package itself is ''."""
    out = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return out


MODULES = modules()


def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports(module: str) -> Iterator[tuple[str, int]]:
    """(module of this package, line) for each import, also those inside functions."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join(filter(None, ["fedp3", *up, node.module or ""] if node.level else [node.module or ""]))
            names = [f"{base}.{a.name}" for a in node.names]
        else:
            continue
        for name in names:
            if name == "fedp3" or name.startswith("fedp3."):
                inner = name.removeprefix("fedp3").removeprefix(".")
                while inner not in MODULES:  # a name inside a module
                    inner = inner.rpartition(".")[0]
                yield inner, node.lineno


def level(module: str) -> int | None:
    """The level of a module or of the nearest package around it."""
    while module and module not in LEVEL:
        module = module.rpartition(".")[0]
    return LEVEL.get(module)


# --------------------------------------------------------------------------- who imports whom


def test_every_module_has_a_level() -> None:
    homeless = [m for m in MODULES if m and level(m) is None]
    assert not homeless, f"say in LEVELS where {homeless} belong"


@pytest.mark.parametrize("module", [m for m in MODULES if m])
def test_a_module_imports_from_its_level_or_below(module: str) -> None:
    own = level(module)
    assert own is not None
    wrong = []
    for name, line in imports(module):
        if name:  # the package itself: its version
            theirs = level(name)
            assert theirs is not None
            if theirs > own:
                wrong.append(f"{MODULES[module].name}:{line} imports {name}")
    assert not wrong


def test_the_reader_of_imports_finds_them() -> None:
    assert {name for name, _ in imports("server")} >= {"aggregate", "cost", "types", "rng"}
    assert {name for name, _ in imports("codec")} >= {"masks", "prune"}, "also `from fedp3 import masks as M`"


def test_only_the_flower_engine_imports_flower() -> None:
    for module in MODULES:
        if not module.startswith("engines.flower"):
            assert not {"flwr", "ray"} & set(outside(module)), module


def outside(module: str) -> Iterator[str]:
    """Top-level names of other packages that a module imports, wherever in it."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (a.name.partition(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


# --------------------------------------------------------------------------- what it never loads


def loaded_by(code: str) -> set[str]:
    shown = f"{code}; import sys; print(*{{m.partition('.')[0] for m in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", shown], check=True, capture_output=True, text=True).stdout.split())


def test_import_fedp3_loads_none_of_the_heavy_libraries() -> None:
    assert not loaded_by("import fedp3") & {*HEAVY, "torch"}


def test_the_whole_core_loads_none_of_the_heavy_libraries() -> None:
    """Up to the server; figures, digits, trackers and Flower are loaded where they are used."""
    core = [m for m in MODULES if m and (level(m) or 0) <= LEVEL["server"]]
    assert {"server", "client", "data.catalogue"} <= set(core)
    loaded = loaded_by("import " + ", ".join(f"fedp3.{m}" for m in core))
    assert "torch" in loaded and not loaded & set(HEAVY)


def test_the_way_in_from_python_loads_none_of_the_heavy_libraries() -> None:
    assert not loaded_by("import fedp3; fedp3.run, fedp3.layer_map") & set(HEAVY)


# --------------------------------------------------------------------------- what it never does

BANNED_CALLS = {"eval", "exec", "compile", "__import__", "exit", "quit"}
BANNED_ATTRIBUTES = {
    ("pickle", "load"),
    ("pickle", "loads"),
    ("pickle", "Unpickler"),
    ("cloudpickle", "load"),
    ("cloudpickle", "loads"),
    ("marshal", "load"),
    ("marshal", "loads"),
    ("shelve", "open"),
    ("joblib", "load"),
    ("torch", "load"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("os", "system"),
    ("os", "popen"),
    ("torch", "manual_seed"),
    ("random", "seed"),
    ("np.random", "seed"),
    ("numpy.random", "seed"),
}


PIPES = frozenset({"engines.parcels"})  # what our own processes pass to each other


def forbidden(source: ast.AST) -> list[str]:
    """Calls of what runs code from data, hides randomness, or ends the process."""
    found = []
    for node in ast.walk(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
            found.append(f"line {node.lineno}: {node.func.id}()")
        if isinstance(node, ast.Attribute):
            owner, _, name = ast.unparse(node).rpartition(".")
            if (owner, name) in BANNED_ATTRIBUTES:
                found.append(f"line {node.lineno}: {owner}.{name}")
        if isinstance(node, ast.ImportFrom):
            found += [f"line {node.lineno}: {a.name}" for a in node.names if (node.module, a.name) in BANNED_ATTRIBUTES]
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append(f"line {node.lineno}: allow_pickle={ast.unparse(node.value)}")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_unpickled_or_run_from_data(module: str) -> None:
    found = forbidden(tree(module))
    assert not [f for f in found if not (module in PIPES and "pickle.Unpickler" in f)]


@pytest.mark.parametrize(
    "code",
    [
        "pickle.load(f)",
        "pickle.loads(b)",
        "from pickle import loads",
        "torch.load('x')",
        "load = torch.load",
        "eval('1')",
        "exec(code)",
        "yaml.load(text)",
        "np.load(f, allow_pickle=True)",
        "np.random.seed(0)",
        "torch.manual_seed(0)",
        "exit(1)",
        "import os\nos.system('ls')",
    ],
)
def test_the_search_for_forbidden_calls_finds_them(code: str) -> None:
    assert forbidden(ast.parse(code))


@pytest.mark.parametrize(
    "code", ["net.eval()", "re.compile('a')", "pickle.dumps(net)", "from safetensors.torch import load"]
)
def test_the_search_for_forbidden_calls_knows_their_harmless_namesakes(code: str) -> None:
    assert not forbidden(ast.parse(code))


@pytest.mark.parametrize("module", MODULES)
def test_no_module_is_too_long_to_read(module: str) -> None:
    assert len(MODULES[module].read_text(encoding="utf-8").splitlines()) <= LINES


def test_types_are_announced_to_type_checkers() -> None:
    assert (ROOT / "py.typed").exists()


def test_public_names_exist() -> None:
    assert all(hasattr(fedp3, name) for name in fedp3.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fedp3.nothing
