"""Configs and run folders of 0.1.0.dev: old keys are refused by name, configs can be translated.

The files in old/ were written by 0.1.0.dev: the template of its `fedp3 init`, and three complete
configs as its run folders have them.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fedp3
from fedp3 import config
from fedp3.config.legacy import RENAMED_KEYS, RENAMED_VALUES, translate
from fedp3.config.schema import SECTIONS, fields_of
from fedp3.core import files
from fedp3.core.errors import ConfigError, InputError
from fedp3.runs import existing

OLD = Path(__file__).with_name("old")
OLD_VALUES = {  # a value that 0.1.0.dev allowed for each key that was renamed
    ("data", "augment"): False,
    ("prune", "upload"): "kept",
    ("prune", "hold"): False,
    ("prune", "stale"): "vote",
    ("prune", "local"): "uniform",
    ("prune", "q_of"): "whole",
    ("aggregate", "adapt"): 0.01,
    ("hooks", "tune"): 5.0,
    ("privacy", "others"): "noise",
}


def old(name: str) -> dict[str, Any]:
    return tomllib.loads((OLD / f"{name}.toml").read_text())


def translated(name: str) -> config.Config:
    return config.parse(translate(old(name))[0])


# --------------------------------------------------------------------------- refusals


def test_the_table_of_renamed_keys_is_complete():
    assert OLD_VALUES.keys() == RENAMED_KEYS.keys()
    for (section, key), (new_section, new_key) in RENAMED_KEYS.items():
        assert key not in fields_of(SECTIONS[section])
        assert new_key in fields_of(SECTIONS[new_section])
    for name in ("template", "fjord", "heterofl-adam", "fedp3-ldp"):
        keys = {(s, k) for s, of_section in old(name).items() if s != "method" for k in of_section}
        known = {(s, k) for s, kind in SECTIONS.items() for k in fields_of(kind)}
        assert keys - known <= RENAMED_KEYS.keys(), "a key that was dropped and not renamed"


@pytest.mark.parametrize(("section", "key"), RENAMED_KEYS)
def test_a_renamed_key_is_refused_with_its_new_name(section, key, tmp_path):
    new_section, new_key = RENAMED_KEYS[section, key]
    want = rf"\[{section}\] unknown key '{key}' \(it is \[{new_section}\] {new_key} now; translate"
    with pytest.raises(ConfigError, match=want):
        config.parse({section: {key: OLD_VALUES[section, key]}})
    with pytest.raises(ConfigError, match=want):
        config.parse({}, [f"{section}.{key}={OLD_VALUES[section, key]}"])
    with pytest.raises(ConfigError, match=r"fedp3 init NEW\.toml --from OLD\.toml"):
        fedp3.make_config(**{section: {key: OLD_VALUES[section, key]}})


def test_all_old_keys_of_a_file_are_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        config.load(OLD / "fjord.toml")
    lines = str(caught.value).splitlines()
    assert len(lines) >= len(RENAMED_KEYS)
    for section, key in RENAMED_KEYS:
        assert any(f"[{section}] unknown key '{key}'" in line for line in lines)


@pytest.mark.parametrize(
    ("override", "allowed"),
    [("plan.upload=kept", "'retained'"), ("prune.q_relative_to=whole", "'layer'")],
)
def test_an_old_value_is_refused_with_the_values_of_today(override, allowed):
    with pytest.raises(ConfigError, match=allowed):
        config.parse({}, [override])


# --------------------------------------------------------------------------- translation


@pytest.mark.parametrize("name", ["template", "fjord", "heterofl-adam", "fedp3-ldp"])
def test_keys_that_were_not_renamed_keep_their_values(name):
    raw, new = old(name), translated(name).as_json()
    assert new["method"] == raw.pop("method")
    changed = {("privacy", "noise_multiplier"), ("plan", "others")}
    for section, keys in raw.items():
        for key, value in keys.items():
            if (section, key) not in {*RENAMED_KEYS, *changed}:
                assert new[section][key] == value, f"{section}.{key}"


def test_renamed_keys_keep_their_meaning():
    fjord = translated("fjord")
    assert fjord.plan.upload == "retained"
    assert fjord.local.augment is False
    assert fjord.prune.freeze_pruned is True
    assert fjord.prune.unfed_columns == "abstain"
    assert fjord.prune.local_pruner == "ordered_dropout"
    assert fjord.prune.q_relative_to == "layer"
    assert fjord.aggregate.server_epsilon == 0.001
    assert fjord.hooks.finetune_factor == 1.0
    assert fjord.privacy.noise_multiplier == "auto"
    assert fjord.plan.others == "train", "[privacy] others had no effect without LDP"
    heterofl = translated("heterofl-adam")
    assert heterofl.prune.unfed_columns == "vote"
    assert (heterofl.aggregate.server, heterofl.aggregate.server_epsilon) == ("adam", 0.01)
    private = translated("fedp3-ldp")
    assert private.plan.others == "noise", "it was [plan] others = train with noise"
    assert (private.privacy.epsilon, private.privacy.noise_multiplier) == (4.0, "auto")
    assert private.plan.upload == "none"


def test_the_old_template_is_the_run_that_the_new_one_is():
    assert translated("template") == config.parse(tomllib.loads(config.template()))


@pytest.mark.parametrize(
    ("raw", "others"),
    [
        ({"privacy": {"others": "noise"}}, "train"),
        ({"privacy": {"enabled": False, "others": "noise"}}, "train"),
        ({"privacy": {"enabled": True}}, "freeze"),
        ({"privacy": {"enabled": True, "others": "freeze"}}, "freeze"),
        ({"privacy": {"enabled": True, "others": "noise"}}, "noise"),
        ({"privacy": {"enabled": True, "others": "noise"}, "plan": {"others": "train"}}, "noise"),
        ({"privacy": {"enabled": True, "others": "noise"}, "plan": {"others": "freeze"}}, "freeze"),
        ({"privacy": {"enabled": True, "others": "freeze"}, "method": "resist"}, "skip"),
    ],
)
def test_layers_outside_l_i_are_treated_as_before(raw, others):
    assert config.parse(translate(raw)[0]).plan.others == others


def test_what_broke_the_guarantee_is_still_refused():
    raw = {"privacy": {"enabled": True, "others": "freeze"}, "plan": {"others": "train"}}
    with pytest.raises(ConfigError, match="train without noise"):
        config.parse(translate(raw)[0])


@pytest.mark.parametrize(("section", "key"), RENAMED_KEYS)
def test_there_is_one_note_for_each_change(section, key):
    value = OLD_VALUES[section, key]
    raw = {section: {key: value}, "local": {"lr": 0.1}}
    if section == "privacy":
        raw["privacy"]["enabled"] = True
    new, notes = translate(raw)
    new_section, new_key = RENAMED_KEYS[section, key]
    new_value = RENAMED_VALUES.get((new_section, new_key), {}).get(value, value)
    assert notes == [
        f"[{section}] {key} = {value!r} is now [{new_section}] {new_key} = {new_value!r}"
    ]
    assert new[new_section][new_key] == new_value
    assert key not in new[section] or (section, key) == (new_section, new_key)


def test_a_config_of_today_is_left_as_it_is():
    raw = tomllib.loads(config.to_toml(config.parse({"method": "fjord"})))
    assert translate(raw) == (raw, [])


def test_if_both_names_are_set_the_new_one_wins():
    new, _ = translate({"prune": {"hold": False, "freeze_pruned": True, "upload": "kept"}})
    assert new == {"prune": {"freeze_pruned": True}, "plan": {"upload": "retained"}}


def test_the_command_writes_a_config_that_parses(fedp3, tmp_path):
    code, out, err = fedp3("init", "new.toml", "--from", str(OLD / "fjord.toml"))
    assert code == 0, err
    assert "[prune] hold = True is now [prune] freeze_pruned = True" in out
    assert config.load(tmp_path / "new.toml") == translated("fjord")


# --------------------------------------------------------------------------- run folders


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run folder as 0.1.0.dev left it: its run.json names no plugins."""
    place = tmp_path / "run"
    (place / "checkpoint").mkdir(parents=True)
    (place / "config.toml").write_text((OLD / "fjord.toml").read_text())
    about = {"config": old("fjord"), "versions": {"fedp3": "0.1.0.dev0"}, "digest": "0" * 64}
    (place / "run.json").write_text(json.dumps(about))
    return place


WANT = r"begun with fedp3 0\.1\.0\.dev0.*fedp3 init NEW\.toml --from .*config\.toml"


def test_an_old_run_folder_is_refused_with_the_way_to_translate_it(folder):
    with pytest.raises(InputError, match=WANT):
        existing.reopen(folder)
    with pytest.raises(InputError, match=WANT):
        fedp3.resume(folder)


def test_an_old_run_folder_is_refused_on_the_command_line(fedp3, folder):
    code, _, err = fedp3("resume", str(folder))
    assert code == 2
    assert "--from" in err and "0.1.0.dev0" in err and "Traceback" not in err


def test_an_old_folder_of_several_seeds_is_refused_too(tmp_path):
    place = tmp_path / "seeds"
    place.mkdir()
    files.write_json(place / "seeds.json", {"seeds": 2, "config": old("fjord")})
    with pytest.raises(InputError, match=WANT):
        existing.recorded_seeds(place)
