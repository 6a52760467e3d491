"""What runs must have in common for a comparison to mean something, and where they differ."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedp3.report.budgets import AXES
from fedp3.report.runs import Json, Run, Seed

ALL = frozenset(AXES)
FLEET = "fleet"
LONGEST = 60  # characters of a setting that are shown
# Settings of [devices] that describe the fleet; the others are what a run makes of it.
OF_THE_FLEET = ("fleet", "availability", "bandwidth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Something that compared runs should have in common.

    Attributes:
        settings: the settings of a run, which are shown where they differ.
        facts: what the settings led to, in one seed; compared between runs with the same seed.
        forbids: the axes on which no verdict is given where runs differ in it.
    """

    settings: Callable[[Json], Mapping[str, Any]]
    facts: Callable[[Seed], object] = lambda seed: None
    forbids: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Inequality:
    """A condition that runs do not meet."""

    condition: str
    values: Mapping[str, str]  # run -> its value, in words
    forbids: frozenset[str]

    @property
    def sentence(self) -> str:
        """The difference in words, as in "fleet: prune.keep=1.0 (a), prune.keep=0.5 (b, c)"."""
        names: dict[str, list[str]] = {}
        for run, value in self.values.items():
            names.setdefault(value, []).append(run)
        return f"{self.condition}: " + "; ".join(
            f"{value} ({', '.join(members)})" for value, members in names.items()
        )


def _section(section: str, *keys: str) -> Callable[[Json], dict[str, Any]]:
    """Some settings of a section; all of them if no key is named."""
    return lambda config: {
        f"{section}.{key}": value
        for key, value in config.get(section, {}).items()
        if not keys or key in keys
    }


def _data(config: Json) -> Mapping[str, Any]:
    """What decides which samples clients have; a test set of no client changes nothing for them."""
    kept = _section("data", "name", "path", "length", "stride")(config)
    official = config.get("data", {}).get("test") == "official"
    return kept | {"data.test": "official" if official else "pooled"}


def _fleet(config: Json) -> Mapping[str, Any]:
    """The devices; where none are described, times are modelled by the shares that clients hold."""
    if config.get("devices", {}).get("fleet"):
        return _section("devices", *OF_THE_FLEET)(config)
    return _section("prune", "keep")(config)


def _privacy(config: Json) -> Mapping[str, Any]:
    return {
        f"{section}.epsilon": config[section]["epsilon"]
        for section in ("privacy", "client_privacy")
        if config.get(section, {}).get("enabled")
    } or {"privacy": "none"}


def _scaling(seed: Seed) -> object:
    """Classes, mean and spread of the data: where they are equal, the data very likely are."""
    return seed.about.get("inputs", {}).get("scaling")


CONDITIONS: Mapping[str, Condition] = {
    "data": Condition(settings=_data, facts=_scaling, forbids=ALL),
    "split": Condition(
        settings=_section("partition"), facts=lambda seed: seed.about["labels"], forbids=ALL
    ),
    "network": Condition(settings=_section("model"), facts=lambda seed: seed.about["parameters"]),
    FLEET: Condition(
        settings=_fleet,
        facts=lambda seed: seed.about.get("devices"),
        forbids=frozenset({"seconds", "joules"}),
    ),
    "end of a round": Condition(settings=_section("devices", "round_end", "round_seconds")),
    "local training": Condition(settings=_section("local", "steps", "epochs", "batch")),
    "participants": Condition(settings=_section("run", "clients_per_round")),
    "privacy": Condition(settings=_privacy),
}


def inequalities(runs: Sequence[Run]) -> list[Inequality]:
    """All conditions in which these runs differ."""
    found = []
    for name, condition in CONDITIONS.items():
        values = _different_settings(condition, runs) or _different_facts(condition, runs)
        if values:
            found.append(Inequality(condition=name, values=values, forbids=condition.forbids))
    return found


def _different_settings(condition: Condition, runs: Sequence[Run]) -> dict[str, str]:
    """Run -> the settings in which it differs from another one."""
    settings = {run.name: condition.settings(run.seeds[0].config) for run in runs}
    keys = list(dict.fromkeys(key for values in settings.values() for key in values))
    differing = [
        key for key in keys if len({repr(values.get(key)) for values in settings.values()}) > 1
    ]
    if not differing:
        return {}
    return {
        name: ", ".join(f"{key}={_short(values[key])}" for key in differing if key in values)
        for name, values in settings.items()
    }


def _short(value: Any) -> str:
    shown = str(value)
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def _different_facts(condition: Condition, runs: Sequence[Run]) -> dict[str, str]:
    """Run -> a number, equal for runs whose common seeds led to the same."""
    groups: list[dict[int, str]] = []
    values = {}
    for run in runs:
        facts = {seed.config["run"]["seed"]: repr(condition.facts(seed)) for seed in run.seeds}
        agreeing = (
            k
            for k, group in enumerate(groups)
            if all(group.get(seed, fact) == fact for seed, fact in facts.items())
        )
        k = next(agreeing, len(groups))
        if k == len(groups):
            groups.append({})
        groups[k] |= facts
        values[run.name] = f"same settings, content {k + 1}"
    return values if len(groups) > 1 else {}
