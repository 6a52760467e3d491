"""How to reproduce a run: its config, facts about it, and commands."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from fedp3.config.toml import toml_value
from fedp3.core.settings import OWN
from fedp3.report import text
from fedp3.report.runs import Json, Run

LONGEST_LIST = 12  # values of a setting that are shown
# A setting of one run: key, value, whether it differs between the runs of the page.
Setting = tuple[str, str, bool]


def config_of(configs: Sequence[Json], i: int) -> tuple[tuple[str, tuple[Setting, ...]], ...]:
    """The config of run i by section, with a flag at every key that differs between the runs."""

    def differs(section: str, key: str) -> bool:
        return len({_shown(c.get(section, {}).get(key)) for c in configs}) > 1

    return tuple(
        (section, tuple((key, _shown(v), differs(section, key)) for key, v in keys.items()))
        for section, keys in configs[i].items()
        if isinstance(keys, Mapping) and keys.get("enabled", True)
    )


def _shown(value: Any) -> str:
    """A value as TOML; long lists are shortened."""
    if value is None:
        return text.NONE
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > LONGEST_LIST:
        start = toml_value(value[:LONGEST_LIST]).removesuffix("]")
        return f"{start}, … {len(value)} in all]"
    return toml_value(value)


def facts_of(run: Run) -> tuple[tuple[str, str], ...]:
    """Seeds, hashes, versions and the folder of a run."""
    about = run.seeds[0].about
    shas = [
        (str(s.config["run"]["seed"]), str(s.result.get("model_sha256") or "not finished"))
        for s in run.seeds
    ]
    if len(shas) == 1:
        seed, sha = shas[0]
        models = [("seed", seed), ("model sha256", sha)]
    else:
        models = [("seeds", ", ".join(seed for seed, _ in shas))]
        models += [(f"model sha256, seed {seed}", sha) for seed, sha in shas]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        *models,
        ("config sha256", str(about["digest"])),
        ("versions", versions),
        ("folder", str(run.folder)),
    )


def commands_of(run: Run) -> tuple[tuple[str, str], ...]:
    """Purpose and text of the commands that resume or repeat a run."""
    seed = run.seeds[0]
    commands = []
    # The command line has neither the model nor the data of a run that was started from Python.
    if seed.config["model"]["name"] != OWN:
        again = ["fedp3", "run", str(seed.folder / "config.toml"), "--out", f"{run.folder}-again"]
        if len(run.seeds) > 1:
            again += ["--seeds", str(len(run.seeds))]
        for plugin in seed.about.get("plugins", ()):
            again += ["--use", str(plugin["path"])]
        commands += [
            ("Resume it", shlex.join(["fedp3", "resume", str(s.folder)]))
            for s in run.seeds
            if not s.result or s.result.get("stopped")
        ]
        commands.append(("Run it again", shlex.join(again)))
    original = str(seed.about["command"])
    if " " in original:
        commands.append(("Original command", original))
    return tuple(commands)
