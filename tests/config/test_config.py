"""A config is complete and explained, and all its mistakes are listed at once."""

import contextlib
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedp3 import config
from fedp3.config import Config
from fedp3.config.schema import SECTIONS, fields_of
from fedp3.core.errors import ConfigError
from fedp3.methods import METHODS


def mistakes(raw, overrides=(), **kw) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config.parse(raw, overrides, "my.toml", **kw)
    return str(caught.value).splitlines()


def test_the_template_explains_every_key_and_no_other():
    text = config.template()
    keys = {(section, key) for section, kind in SECTIONS.items() for key in fields_of(kind)}
    explained, section = set(), ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif "=" in line.split("#  ")[0] and section:
            body, _, about = line.removeprefix("# ").partition(" # ")
            assert about.strip(), f"no explanation: {line}"
            explained.add((section, body.partition(" =")[0].strip()))
    assert explained == keys


def test_the_template_is_a_config_whose_method_is_one_line():
    raw = tomllib.loads(config.template())
    assert config.parse(raw).plan.layers == "opu2"
    changed = config.parse(
        tomllib.loads(config.template().replace('method = "fedp3"', 'method = "fedavg"'))
    )
    assert (changed.plan.layers, changed.prune.keep, changed.aggregate.rule) == (
        "full",
        1.0,
        "examples",
    )


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_reads_back_the_same(method):
    c = config.parse(
        {"method": method, "partition": {"sizes": [90] * 20}, "prune": {"keep": [0.9, 0.5]}}
    )
    again = config.parse(tomllib.loads(config.to_toml(c)))
    assert again == c
    assert again.digest() == c.digest()


def test_a_method_sets_defaults_and_a_file_wins_over_them():
    c = config.parse({"method": "fedavg", "aggregate": {"rule": "simple"}})
    assert (c.aggregate.rule, c.plan.layers) == ("simple", "full")


def test_an_override_wins_over_the_file_and_needs_no_quotes():
    c = config.parse(
        {"local": {"lr": 1.0}}, ["local.lr=0.25", "prune.selector=neuron", "prune.keep=[0.9, 0.5]"]
    )
    assert (c.local.lr, c.prune.selector, c.prune.keep) == (0.25, "neuron", (0.9, 0.5))


def test_all_mistakes_are_listed_at_once_with_the_nearest_name():
    raw = {
        "local": {"learning_rate": 1, "lr": -1, "batch": "x"},
        "plann": {"layers": "opu2"},
        "prune": {"selector": "magnitud"},
        "run": {"seed": 1.5},
    }
    lines = mistakes(raw, ["local.steps=abc", "nonsense"])
    text = "\n".join(lines)
    assert len(lines) == 8
    assert "unknown key 'learning_rate' (did you mean 'lr'?)" in text
    assert "unknown section 'plann' (did you mean 'plan'?)" in text
    assert "did you mean 'magnitude'?" in text
    assert "[local] lr: should be greater than 0, got -1" in text
    assert "override 'nonsense'" in text
    assert all(line.startswith("my.toml: ") for line in lines)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["run.clients_per_round=21"], "21 of 20 clients"),
        (["partition.clients=2"], "10 (the default) of 2 clients"),
        (["run.quorum=11"], "more than the 10 participants"),
        (["partition.sizes=[1, 2]"], "2 numbers for 20 clients"),
        (
            ["prune.keep=[0.5, 0.5, 0.5]", "partition.clients=2", "run.clients_per_round=1"],
            "3 device classes",
        ),
        (["local.lr=inf"], "[local] lr: should be a finite number"),
        (["run.deadline=inf"], "[run] deadline: should be a finite number"),
        (["plan.layers=prune-all"], "set [plan] upload"),
        (["plan.layers=opu9x"], "unknown layer set"),
        (["prune.keep=0"], "[prune] keep"),
        (["run.device=tpu"], "[run] device"),
        (["method=fedsgd"], "unknown method"),
        (["aggregate.rule=middle"], "unknown aggregation rule"),
    ],
)
def test_what_cannot_be_run_is_refused(overrides, text):
    assert any(text in line for line in mistakes({}, overrides))


def test_a_keep_file_becomes_part_of_the_config(tmp_path: Path):
    (tmp_path / "devices.csv").write_text("client,keep\n1,0.5\n0,0.25\n")
    raw = {
        "prune": {"keep": "devices.csv"},
        "partition": {"clients": 2},
        "run": {"clients_per_round": 2},
    }
    assert config.parse(raw, folder=tmp_path).prune.keep == (0.25, 0.5)
    (tmp_path / "devices.csv").write_text("client,keep\n1,0.5\n")
    assert "a row for each of clients 0..1" in mistakes(raw, folder=tmp_path)[0]
    (tmp_path / "devices.csv").write_text("client,keep\n1,0.5\n0,7\n")
    assert "must be in (0, 1], got 7.0" in mistakes(raw, folder=tmp_path)[0]


def test_a_missing_or_broken_file_is_one_sentence(tmp_path: Path):
    with pytest.raises(ConfigError, match="fedp3 init"):
        config.load(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("local = [")
    with pytest.raises(ConfigError, match="is not TOML"):
        config.load(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        config.load(tmp_path)


leaf = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers()),
)
names = st.sampled_from(["method", *fields_of(Config), "zzz"])


@given(
    st.dictionaries(
        names, st.one_of(leaf, st.dictionaries(st.sampled_from(["lr", "keep", "name", "x"]), leaf))
    )
)
def test_any_table_is_a_config_or_a_list_of_mistakes(raw):
    with contextlib.suppress(ConfigError):
        assert isinstance(config.parse(raw), Config)


def test_the_digest_tells_configs_apart():
    a, b = config.parse({}), config.parse({}, ["local.lr=0.06"])
    assert a.digest() != b.digest()
    assert a.digest() == config.parse({}).digest()


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["plan.others=personal", "plan.redraw=true"], "set redraw to false"),
        (["plan.others=freeze", "plan.upload=retained"], "is trained, not frozen"),
        (["plan.others=freeze", "method=heterofl"], "is trained, not frozen"),
        (["upload.compress=topk", "plan.head=personal_uploaded"], "that is never sent has none"),
        (["method=fiarse", "upload.compress=topk"], "may retain nothing"),
        (
            ["method=fjord", "hooks.distil=true", "prune.freeze_pruned=false"],
            "freeze_pruned and physical",
        ),
    ],
)
def test_settings_that_would_be_ignored_are_refused(overrides, text):
    with pytest.raises(ConfigError, match=text):
        config.parse({}, overrides)


def test_a_file_that_is_typed_is_looked_up_from_where_it_is_typed(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "dev.csv").write_text("client,keep\n0,0.5\n1,1.0\n")
    text = "[partition]\nclients = 2\n[run]\nclients_per_round = 2\n"
    (tmp_path / "sub" / "typed.toml").write_text(text)
    (tmp_path / "sub" / "named.toml").write_text(text + '[prune]\nkeep = "dev.csv"\n')
    monkeypatch.chdir(tmp_path)
    typed = config.load(Path("sub/typed.toml"), ["prune.keep=sub/dev.csv"])
    assert typed.prune.keep == config.load(Path("sub/named.toml")).prune.keep == (0.5, 1.0)
    (tmp_path / "sub" / "dev.csv").write_text("client,keep\n0,0.5\n")
    with pytest.raises(ConfigError, match=r"it has no row for client 1"):
        config.load(Path("sub/named.toml"))


def test_what_a_run_writes_down_can_be_read_again(tmp_path):
    odd = str(tmp_path / "🙂\x7f\x01é.json")
    c = config.parse({"partition": {"file": odd}})
    (tmp_path / "c.toml").write_text("\ufeff" + config.to_toml(c), encoding="utf-8")
    assert config.load(tmp_path / "c.toml") == c
