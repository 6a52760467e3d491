"""Aggregators outside the package pass the same conformance table as those inside.

The median of examples/own_aggregator.py is loaded as a plugin file, as `--use` does; a trimmed mean
with an option of its own is registered here.
"""

import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedp3
from conformance import CONFORMANCE, _rounds, apply, close_workers
from fedp3.config.plugins import Plugin, load_plugin
from fedp3.core.errors import ConfigError, InputError
from fedp3.core.masks import as_bool
from fedp3.server.aggregators import AGGREGATORS

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_aggregator.py"
every_claim = pytest.mark.parametrize("claim", CONFORMANCE)


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    yield
    close_workers()


@pytest.fixture
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of aggregators is restored after a test that adds to it."""
    monkeypatch.setattr(AGGREGATORS, "_table", dict(AGGREGATORS))


@pytest.fixture
def plugin(_table: None, monkeypatch: pytest.MonkeyPatch) -> Plugin:
    for name in [name for name in sys.modules if name.startswith("fedp3_use_own_aggregator")]:
        monkeypatch.delitem(sys.modules, name)
    return load_plugin(str(EXAMPLE))


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40


@every_claim
@pytest.mark.usefixtures("plugin")
def test_the_median_conforms(claim: str) -> None:
    CONFORMANCE[claim](fedp3.AggregateSettings(rule="median"))


@pytest.mark.usefixtures("plugin")
def test_the_median_is_the_middle_of_the_uploads_of_a_coordinate() -> None:
    for here, updates in _rounds():
        new = apply(fedp3.AggregateSettings(rule="median"), here, updates)
        for layer in here.layers.layers:
            for n, uploads in fedp3.uploads_of(updates, layer, here.spec).items():
                for place in torch.ones(here.layers.shapes[n]).nonzero().tolist():
                    index = tuple(place)
                    values = sorted(
                        float(w[index]) for _, w, mask in uploads if as_bool(mask, w.shape)[index]
                    )
                    if values:
                        assert float(new[n][index]) == values[(len(values) - 1) // 2]


@pytest.mark.usefixtures("plugin")
def test_the_example_trains_the_digits(capsys: pytest.CaptureFixture[str]) -> None:
    (module,) = (m for n, m in sys.modules.items() if n.startswith("fedp3_use_own_aggregator"))
    result = module.main()
    assert capsys.readouterr().out == f"accuracy {100 * result.accuracy['G']:.1f} %\n"
    assert result.accuracy["G"] > 0.8
    assert result.experiment.config.aggregate.rule == "median"


# --------------------------------------------------------------------------- options


@pytest.fixture
def _trimmed_mean(_table: None) -> None:
    @fedp3.register.aggregator("trimmed")
    def trimmed(settings: fedp3.AggregateSettings, spec: fedp3.RunSpec) -> fedp3.Aggregator:
        """The mean without the largest and smallest uploads of each coordinate."""
        trim = float(settings.options.get("trim", 0.0))
        if not 0 <= trim < 0.5:
            raise InputError(f"[aggregate] options: trim must be in [0, 0.5), got {trim}")

        def mean(values: list[float]) -> float:
            dropped = math.floor(trim * len(values))
            used = sorted(values)[dropped : len(values) - dropped]
            return math.fsum(used) / len(used)

        def aggregate(old: Tensor, uploads: list[tuple[Any, Tensor, Any]]) -> Tensor:
            new = old.clone()
            masks = [as_bool(mask, old.shape) for _, _, mask in uploads]
            for place in torch.ones(old.shape).nonzero().tolist():
                index = tuple(place)
                pairs = zip(uploads, masks, strict=True)
                values = [float(w[index]) for (_, w, _), mask in pairs if mask[index]]
                if values:
                    new[index] = mean(values)
            return new

        def apply(W: Any, updates: Iterable[fedp3.AcceptedUpdate], state: Any) -> Any:
            received, new = list(updates), dict(W)
            for layer in spec.layers.layers:
                for name, uploads in fedp3.uploads_of(received, layer, spec).items():
                    new[name] = aggregate(W[name], uploads)
            return new, state

        return fedp3.Aggregator(apply=apply)


@every_claim
@pytest.mark.usefixtures("_trimmed_mean")
def test_a_trimmed_mean_conforms(claim: str) -> None:
    CONFORMANCE[claim](fedp3.AggregateSettings(rule="trimmed", options={"trim": 0.25}))


@pytest.mark.usefixtures("_trimmed_mean")
def test_an_option_changes_the_result_and_is_written_with_the_config() -> None:
    differ = 0
    for here, updates in _rounds():
        means, trimmed = (
            apply(fedp3.AggregateSettings(rule="trimmed", options=options), here, updates)
            for options in ({}, {"trim": 0.25})
        )
        differ += sum(not torch.equal(means[n], trimmed[n]) for n in means)
    assert differ > 0
    config = fedp3.make_config("aggregate.options={trim = 0.25}", "aggregate.rule=trimmed")
    assert config.aggregate.options == {"trim": 0.25}
    assert config.digest() != fedp3.make_config("aggregate.rule=trimmed").digest()


@pytest.mark.usefixtures("_trimmed_mean")
def test_an_option_reaches_the_aggregator_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('[aggregate]\nrule = "trimmed"\noptions = {trim = 0.25}\n')
    config = fedp3.load_config(path)
    assert config.aggregate.options == {"trim": 0.25}
    (tmp_path / "written.toml").write_text(fedp3.config.to_toml(config))
    assert fedp3.load_config(tmp_path / "written.toml") == config
    with pytest.raises(InputError, match=r"trim must be in \[0, 0.5\), got 0.5"):
        fedp3.plan(fedp3.load_config(path, ["aggregate.options={trim = 0.5}"]))
    with pytest.raises(ConfigError, match="options"):
        fedp3.load_config(path, ["aggregate.options={trim = [1, 2]}"])
