"""Promises of the package: which packages import which, what it never does, what it never loads."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedp3

ROOT = Path(fedp3.__file__).parent
# A package imports only itself and packages before it in this line.
PACKAGES = [
    *("core", "data", "models", "planning", "messages", "client", "privacy", "costs"),
    *(
        "devices",
        "server",
        "methods",
        "config",
        "experiment",
        "node",
        "engines",
        "runs",
        "report",
        "deploy",
    ),
    *("flower", "api", "cli"),
]
# Files at the top of the package; everything else is in one of its packages.
TOP = {"__init__.py", "__main__.py", "api.py", "flower.py", "py.typed"}
FLOWER = ("engines.flower", "deploy")  # the only places that import Flower
HEAVY = (
    "flwr",
    "ray",
    "matplotlib",
    "sklearn",
    "tensorboard",
    "mlflow",
    "wandb",
    "onnx",
    "onnxruntime",
    "dp_accounting",
    "opacus",
    "playwright",
)


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
    """(module of this package, line) for each import, also those inside functions.

    The name '' stands for the package itself, which has the version.
    """
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = source_of(node, module)
            names = [f"{base}.{a.name}" for a in node.names]
        else:
            continue
        for name in names:
            if name == "fedp3" or name.startswith("fedp3."):
                yield resolve(name), node.lineno


def source_of(node: ast.ImportFrom, module: str) -> str:
    """The absolute name of what a `from ... import` names, which may be relative."""
    if not node.level:
        return node.module or ""
    is_package = MODULES[module].name == "__init__.py"
    parts = ["fedp3", *module.split(".")] if module else ["fedp3"]
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def resolve(name: str) -> str:
    """The module that an imported name is in; public names such as fedp3.Config are in theirs."""
    inner = name.removeprefix("fedp3").removeprefix(".")
    if inner in fedp3._HOME_OF:
        return fedp3._HOME_OF[inner].removeprefix("fedp3.")
    while inner not in MODULES:  # a name inside a module
        inner = inner.rpartition(".")[0]
    return inner


def package_of(module: str) -> str:
    """The package of a module: engines.flower.grid is in engines."""
    return module.partition(".")[0]


# --------------------------------------------------------------------------- who imports whom


def test_only_packages_and_the_api_are_at_the_top() -> None:
    contents = {path.name for path in ROOT.iterdir() if path.name != "__pycache__"}
    folders = {name for name in contents if (ROOT / name).is_dir()}
    assert contents - folders == TOP
    assert folders == set(PACKAGES) - {"api", "flower"}
    assert not [name for name in folders if not (ROOT / name / "__init__.py").exists()]


def misplaced(module: str) -> list[str]:
    """Imports of packages that come after that of this module; `fedp3` itself has the version."""
    position = PACKAGES.index(package_of(module))
    return [
        f"{module}, line {line}, imports {name}"
        for name, line in imports(module)
        if name and PACKAGES.index(package_of(name)) > position
    ]


@pytest.mark.parametrize("module", [m for m in MODULES if m not in ("", "__main__")])
def test_a_module_imports_only_its_package_and_those_before_it(module: str) -> None:
    assert not misplaced(module)


def test_the_program_imports_the_command_line_alone() -> None:
    assert {package_of(name) for name, _ in imports("__main__")} == {"cli"}


def test_the_search_for_imports_finds_them() -> None:
    rounds = {name for name, _ in imports("server.rounds")}
    assert rounds >= {"server.gate", "server.round_record", "core.types"}
    assert "core.masks" in {name for name, _ in imports("messages.codec")}, (
        "also `from fedp3.core import masks as M`"
    )
    assert "deploy.cluster" in {name for name, _ in imports("cli.flower")}, "also inside functions"


def test_relative_imports_and_public_names_are_resolved() -> None:
    (node,) = ast.parse("from ..core import masks").body
    assert isinstance(node, ast.ImportFrom)
    assert source_of(node, "planning.pruning") == "fedp3.core"
    (node,) = ast.parse("from . import masks").body
    assert isinstance(node, ast.ImportFrom)
    assert source_of(node, "core") == source_of(node, "core.types") == "fedp3.core"
    assert resolve("fedp3.Config") == "config" and resolve("fedp3.run") == "api"
    assert resolve("fedp3.core.masks.Mask") == "core.masks" and resolve("fedp3.__version__") == ""


def test_no_module_imports_by_a_name_that_is_a_text() -> None:
    """Such imports would escape the checks above; those of `fedp3` itself are lazy public names."""
    for module in MODULES:
        called = [
            node.func.attr
            for node in ast.walk(tree(module))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        ]
        assert module == "" or "import_module" not in called, module


def test_only_the_flower_engine_and_deployment_import_flower() -> None:
    for module in MODULES:
        if not any(module == place or module.startswith(f"{place}.") for place in FLOWER):
            assert not {"flwr", "ray"} & set(outside(module)), module


def test_the_library_knows_nothing_of_the_package_about_the_paper() -> None:
    assert not [module for module in MODULES if "fedp3_paper" in outside(module)]


def test_the_wheel_holds_the_library_alone() -> None:
    settings = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/fedp3"]}
    assert not {"reproduce", "theory"} & {module.partition(".")[0] for module in MODULES}


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
    return set(
        subprocess.run(
            [sys.executable, "-c", shown], check=True, capture_output=True, text=True
        ).stdout.split()
    )


def test_import_fedp3_loads_none_of_the_heavy_libraries() -> None:
    assert not loaded_by("import fedp3") & {*HEAVY, "torch"}


def test_all_packages_up_to_the_server_load_none_of_the_heavy_libraries() -> None:
    """Libraries for figures, digits, trackers and Flower are loaded where they are used."""
    packages = set(PACKAGES[: PACKAGES.index("server") + 1])
    modules = [m for m in MODULES if package_of(m) in packages]
    assert {"server.rounds", "client.update", "data.catalogue"} <= set(modules)
    loaded = loaded_by("import " + ", ".join(f"fedp3.{m}" for m in modules))
    assert "torch" in loaded and not loaded & set(HEAVY)


def test_the_python_interface_loads_none_of_the_heavy_libraries() -> None:
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


# The one module that unpickles: what processes of one run, which it started, pass to each other.
UNPICKLES = "engines.shared_memory"
# The one module that imports a file by its path: files of the user, named with --use.
IMPORTS_FILES = "config.plugins"
FILE_IMPORTS = {"spec_from_file_location", "exec_module", "SourceFileLoader", "run_path"}


def forbidden(source: ast.AST) -> list[str]:
    """Calls of what runs code from data, hides randomness, or ends the process."""
    lines = []
    for node in ast.walk(source):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in BANNED_CALLS
        ):
            lines.append(f"line {node.lineno}: {node.func.id}()")
        if isinstance(node, ast.Attribute):
            owner, _, name = ast.unparse(node).rpartition(".")
            if (owner, name) in BANNED_ATTRIBUTES or name in FILE_IMPORTS:
                lines.append(f"line {node.lineno}: {owner}.{name}")
        if isinstance(node, ast.ImportFrom):
            lines += [
                f"line {node.lineno}: {a.name}"
                for a in node.names
                if (node.module, a.name) in BANNED_ATTRIBUTES or a.name in FILE_IMPORTS
            ]
        if (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and ast.unparse(node.value) != "False"
        ):
            lines.append(f"line {node.lineno}: allow_pickle={ast.unparse(node.value)}")
    return lines


def allowed(module: str, line: str) -> bool:
    """Whether this is one of the two exemptions."""
    if module == UNPICKLES:
        return "pickle.Unpickler" in line
    if module == IMPORTS_FILES:
        return line.endswith((".spec_from_file_location", ".exec_module"))
    return False


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_unpickled_or_run_from_data(module: str) -> None:
    assert not [line for line in forbidden(tree(module)) if not allowed(module, line)]


def test_the_exemptions_are_needed() -> None:
    assert forbidden(tree(UNPICKLES)) and forbidden(tree(IMPORTS_FILES))


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
        "importlib.util.spec_from_file_location('x', 'x.py')",
        "from importlib.util import spec_from_file_location",
        "spec.loader.exec_module(module)",
        "runpy.run_path('x.py')",
    ],
)
def test_the_search_for_forbidden_calls_finds_them(code: str) -> None:
    assert forbidden(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    ["net.eval()", "re.compile('a')", "pickle.dumps(net)", "from safetensors.torch import load"],
)
def test_the_search_for_forbidden_calls_knows_their_harmless_namesakes(code: str) -> None:
    assert not forbidden(ast.parse(code))


def test_types_are_announced_to_type_checkers() -> None:
    assert (ROOT / "py.typed").exists()


def test_public_names_exist() -> None:
    assert all(hasattr(fedp3, name) for name in fedp3.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fedp3.nothing
