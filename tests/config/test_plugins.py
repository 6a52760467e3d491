"""Plugins: files named with `--use`, and packages with an entry point, register parts."""

import hashlib
import pickle
import shutil
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch
from torch import nn

import fedp3
from fedp3 import config
from fedp3.config import plugins
from fedp3.core import files
from fedp3.core.errors import ConfigError, InputError
from fedp3.core.registry import Registry
from fedp3.methods import METHODS
from fedp3.planning.prune_settings import SELECTORS
from fedp3.runs import existing
from fedp3.server.aggregators import AGGREGATORS

RULES = """
import fedp3

@fedp3.register.aggregator("first")
def first(settings, spec):
    return fedp3.Aggregator(apply=apply_first)

def apply_first(W, updates, state):
    received = list(updates)
    return {**W, **received[0].update.tensors} if received else W, state

fedp3.register.method("fedfirst")(fedp3.Method("the first client wins", {
    "plan": {"layers": "full"}, "prune": {"keep": 1.0}, "aggregate": {"rule": "first"},
}))
"""
SETTINGS = {
    "method": "fedfirst",
    "partition": {"kind": "iid", "clients": 4},
    "local": {"steps": 2, "lr": 0.1},
    "run": {"rounds": 3, "clients_per_round": 2, "eval_every": 0},
}
CONFIG = """
method = "fedfirst"
[partition]
clients = 4
[model]
width = 0.02
[local]
steps = 2
[run]
rounds = 3
clients_per_round = 2
"""


@pytest.fixture(autouse=True)
def _tables(monkeypatch):
    """Tables and modules are restored after each test, as in a new process."""
    for table in (AGGREGATORS, METHODS, SELECTORS):
        monkeypatch.setattr(table, "_table", dict(table))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("fedp3_use_"):
            del sys.modules[name]


def forget(table: Registry, *names: str) -> None:
    """Remove names and plugin modules, so that the next import is that of a new process."""
    for name in names:
        table._table.pop(name, None)
    for name in [name for name in sys.modules if name.startswith("fedp3_use_")]:
        del sys.modules[name]


def new_process() -> None:
    forget(AGGREGATORS, "first")
    forget(METHODS, "fedfirst")


@pytest.fixture
def rules(tmp_path) -> Path:
    path = tmp_path / "my_rules.py"
    path.write_text(RULES)
    return path


@pytest.fixture
def data():
    y = torch.arange(80) % 2
    return torch.randn(80, 6, generator=torch.Generator().manual_seed(0)) + 2 * y[:, None], y


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


# --------------------------------------------------------------------------- files


def test_a_file_registers_parts_and_is_imported_once(rules):
    with pytest.raises(ConfigError, match="unknown method 'fedfirst'"):
        config.parse({"method": "fedfirst"})
    loaded = plugins.load_plugins([rules])
    assert loaded == plugins.load_plugins([str(rules)]), "a second import would register twice"
    assert loaded[0].sha256 == hashlib.sha256(RULES.encode()).hexdigest()
    assert config.parse({"method": "fedfirst"}).aggregate.rule == "first"


def test_a_relative_name_is_recorded_as_a_full_path(rules, monkeypatch):
    monkeypatch.chdir(rules.parent)
    assert plugins.load_plugins(["my_rules.py"])[0].path == str(rules)


def test_a_run_records_its_files_with_their_sha256(rules, data, tmp_path):
    fedp3.run(net(), data, out=tmp_path / "r", use=[rules], **SETTINGS)
    recorded = files.read_json(tmp_path / "r" / "run.json")["plugins"]
    digest = hashlib.sha256(RULES.encode()).hexdigest()
    assert recorded == [{"path": str(rules), "sha256": digest}]
    fedp3.run(net(), data, out=tmp_path / "s", **SETTINGS | {"method": "fedavg"})
    assert files.read_json(tmp_path / "s" / "run.json")["plugins"] == []


def test_the_command_line_records_them_and_resumes_with_them(fedp3, rules, tmp_path):
    (tmp_path / "my.toml").write_text(CONFIG)
    code, _, err = fedp3("run", "my.toml", "--out", "r", "--use", str(rules))
    assert code == 0, err
    want = files.read_json(tmp_path / "r" / "result.json")["model_sha256"]
    recorded = files.read_json(tmp_path / "r" / "run.json")["plugins"]
    assert [p["path"] for p in recorded] == [str(rules)]
    (tmp_path / "r" / "result.json").unlink()
    newest = max((tmp_path / "r" / "checkpoint").glob("*.json"))
    newest.unlink()
    new_process()
    code, _, err = fedp3("resume", "r")
    assert code == 0, err
    assert files.read_json(tmp_path / "r" / "result.json")["model_sha256"] == want


def test_several_seeds_record_and_resume_with_them(fedp3, rules, tmp_path):
    (tmp_path / "my.toml").write_text(CONFIG)
    code, _, err = fedp3("run", "my.toml", "--out", "r", "--seeds", "2", "--use", str(rules))
    assert code == 0, err
    shutil.rmtree(tmp_path / "r" / "seed-1")
    new_process()
    code, _, err = fedp3("resume", "r")
    assert code == 0, err
    assert (tmp_path / "r" / "seed-1" / "result.json").exists()
    rules.write_text(RULES + "# changed\n")
    new_process()
    code, _, err = fedp3("resume", "r")
    assert code == 2 and "was changed after the run began" in err


@pytest.fixture
def stopped(rules, data, tmp_path) -> Path:
    """A run folder whose run stopped after two of three rounds; then the process ended."""

    class Stop(Exception):
        pass

    def stop(record):
        if record.t == 1:
            raise Stop

    with pytest.raises(Stop):
        fedp3.run(net(), data, out=tmp_path / "r", use=[rules], on_round=stop, **SETTINGS)
    new_process()
    return tmp_path / "r"


def test_a_changed_file_is_refused_on_resume(stopped, rules, data):
    rules.write_text(RULES + "# changed\n")
    with pytest.raises(InputError, match=r"my_rules\.py was changed after the run began"):
        existing.reopen(stopped)
    with pytest.raises(InputError, match=r"my_rules\.py was changed after the run began"):
        fedp3.run(net(), data, out=stopped, resume=True, use=[rules], **SETTINGS)
    new_process()
    rules.write_text(RULES)
    fedp3.run(net(), data, out=stopped, resume=True, use=[rules], **SETTINGS)


def test_a_missing_file_is_refused_on_resume(stopped, rules):
    rules.unlink()
    with pytest.raises(InputError, match=r"--use .*my_rules\.py: cannot read it"):
        existing.reopen(stopped)
    with pytest.raises(InputError, match=r"--use .*my_rules\.py: cannot read it"):
        fedp3.resume(stopped)


def test_other_files_are_refused_on_resume(stopped, rules, data, tmp_path):
    more = tmp_path / "more.py"
    more.write_text("x = 1\n")
    with pytest.raises(InputError, match=r"other plugins: then .*my_rules\.py, now .*more\.py"):
        fedp3.run(net(), data, out=stopped, resume=True, use=[rules, more], **SETTINGS)


def test_worker_processes_import_the_file(rules, data, tmp_path):
    """A part that runs on clients must exist in workers: here a compressor."""
    path = tmp_path / "compressors.py"
    path.write_text(
        "import fedp3, torch\n"
        "def pack(change, share, rng):\n"
        "    return (change * 0.5).half(), None\n"
        "fedp3.register.compressor('half')(fedp3.Compressor(pack=pack, dtype=torch.float16))\n"
    )
    settings = SETTINGS | {"method": "fedavg", "upload": {"compress": "half"}}
    table = fedp3.register.compressor.__self__
    before = dict(table)
    try:
        hashes = {
            fedp3.run(net(), data, use=[path], workers=n, **settings).model_sha256 for n in (1, 2)
        }
    finally:
        table._table.clear()
        table._table.update(before)
    assert len(hashes) == 1


def test_a_plugin_is_pickled_as_its_path_and_imported_where_it_arrives(rules):
    (plugin,) = plugins.load_plugins([rules])
    message = pickle.dumps(plugin)
    new_process()
    assert pickle.loads(message) == plugin
    assert "first" in AGGREGATORS
    rules.write_text(RULES + "# changed\n")
    with pytest.raises(InputError, match="was changed"):
        pickle.loads(message)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("1 / 0", r"--use .*my_rules\.py failed: ZeroDivisionError: division by zero"),
        ("import no_such_module", r"my_rules\.py failed: ModuleNotFoundError: .*no_such_module"),
        ("def f(:\n", r"my_rules\.py failed: SyntaxError"),
        (
            "import fedp3\nfedp3.register.aggregator('simple')(lambda settings, spec: None)",
            r"--use .*my_rules\.py: there is an? aggregation rule 'simple' already",
        ),
        ("import fedp3\nfedp3.register.aggregator('')(print)", r"my_rules\.py: the name of"),
    ],
)
def test_a_file_that_fails_is_an_error_with_its_name(rules, text, want):
    rules.write_text(text)
    for _ in range(2):  # the second time it must not seem to be imported
        with pytest.raises(InputError, match=want):
            plugins.load_plugins([rules])


def test_a_file_that_does_not_exist_or_is_not_python_is_an_error(fedp3, tmp_path):
    with pytest.raises(InputError, match=r"--use .*no\.py: cannot read it \(No such file"):
        plugins.load_plugins([tmp_path / "no.py"])
    (tmp_path / "rules.txt").write_text("x = 1\n")
    with pytest.raises(InputError, match=r"--use .*rules\.txt: it is not a Python file"):
        plugins.load_plugins([tmp_path / "rules.txt"])
    (tmp_path / "my.toml").write_text(CONFIG)
    code, _, err = fedp3("run", "my.toml", "--use", "no.py")
    assert code == 2 and "cannot read it" in err and "Traceback" not in err


# --------------------------------------------------------------------------- packages


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with this module behind an entry point."""

    def install(text: str) -> None:
        (tmp_path / "my_package_of_rules.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "my_package_of_rules", raising=False)
        entry = EntryPoint("mine", "my_package_of_rules", plugins.GROUP)
        monkeypatch.setattr(
            "importlib.metadata.entry_points",
            lambda **select: EntryPoints([entry]).select(**select),
        )

    return install


def test_entry_points_are_loaded_with_any_files(package):
    package(RULES)
    assert plugins.load_plugins(()) == ()
    assert config.parse({"method": "fedfirst"}).aggregate.rule == "first"


def test_entry_points_are_loaded_on_resume(package, data, tmp_path):
    package(RULES)
    plugins.load_plugins(())
    fedp3.run(net(), data, out=tmp_path / "r", **SETTINGS)
    new_process()
    sys.modules.pop("my_package_of_rules")
    assert existing.reopen(tmp_path / "r").method == "fedfirst"


def test_an_entry_point_that_fails_is_an_error_with_its_name(package):
    package("raise RuntimeError('broken')")
    with pytest.raises(
        InputError, match=r"the plugin 'mine' \(my_package_of_rules\) failed: broken"
    ):
        plugins.load_plugins(())


# --------------------------------------------------------------------------- names in texts


def test_registered_names_are_in_error_texts(rules):
    plugins.load_plugins([rules])
    with pytest.raises(ConfigError, match="did you mean 'first'"):
        config.parse({"aggregate": {"rule": "frist"}})
    with pytest.raises(ConfigError, match="did you mean 'fedfirst'"):
        config.parse({"method": "fedfrist"})
    with pytest.raises(ConfigError, match=r"unknown aggregation rule 'zzz' \(known: .*first.*\)"):
        config.parse({"aggregate": {"rule": "zzz"}})


def test_registered_names_are_in_the_template(rules):
    def line_of_rule() -> str:
        section = config.template().partition("[aggregate]")[2]
        return next(line for line in section.splitlines() if line.startswith("# rule = "))

    before = line_of_rule()
    plugins.load_plugins([rules])
    assert line_of_rule() == f"{before} (also first)"
