"""Files that register a user's own parts work in worker processes, and must stay unchanged."""

import multiprocessing
from dataclasses import replace

import pytest

from fedp3 import config
from fedp3.client.hooks import Hooks
from fedp3.config.plugins import load_plugin
from fedp3.core.errors import InputError
from fedp3.engines.catalogue import make_engine
from fedp3.engines.process_pool import pool
from fedp3.experiment.assemble import assemble
from fedp3.methods import METHODS
from fedp3.planning.prune_settings import LOCAL_PRUNERS, SELECTORS
from fedp3.runs.session import run_rounds

SMALL = [
    "model.width=0.03",
    "partition.clients=4",
    "run.clients_per_round=0",
    "run.rounds=2",
    "local.steps=2",
]
PRUNER = '''
"""A local pruner, a selector and a method with a loss of its own, as a user would register them."""

import torch
from torch.nn.functional import cross_entropy

from fedp3.client.hooks import Hooks
from fedp3.core.types import Masks
from fedp3.methods import METHODS
from fedp3.methods.catalogue import Method
from fedp3.planning.prune_settings import LOCAL_PRUNERS, SELECTORS, LocalPruner, Selector

TAG = "{tag}"


def every_second(q, plan, masks, layers, rng):
    weights = {{}}
    for layer, p in plan.layers.items():
        for name in layers.layers[layer] if p.send == "pruned" else ():
            if name in layers.prunable:
                columns = torch.arange(layers.shapes[name][1]) % 2 == 0
                weights[name] = columns.expand(layers.shapes[name]).clone()
    return Masks(weights=weights)


def smallest(w, k, rng):
    order = w.abs().flatten().argsort(stable=True)
    mask = torch.zeros(w.numel(), dtype=torch.bool)
    mask[order[:k]] = True
    return mask.view(w.shape)


def half_loss(net, x, y, inputs):
    return 0.5 * cross_entropy(net(x), y)


def hooks(settings):
    return Hooks(loss=half_loss)


LOCAL_PRUNERS.add("every_second_{tag}", LocalPruner(draw=every_second))
SELECTORS.add("smallest_{tag}", Selector(weights=smallest))
METHODS.add("half_{tag}", Method("half of the usual loss", {{}}, hooks))
'''


@pytest.fixture(autouse=True)
def _registries_as_before():
    """What a test registers is not there for other tests."""
    registries = (LOCAL_PRUNERS, SELECTORS, METHODS)
    before = [dict(registry._table) for registry in registries]
    yield
    for registry, table in zip(registries, before, strict=True):
        registry._table.clear()
        registry._table.update(table)


def write_plugin(folder, tag: str):
    path = folder / "my_rules.py"
    path.write_text(PRUNER.format(tag=tag))
    return path


def final_hash(experiment, workers: int, plugins=()) -> str:
    engine = make_engine(experiment, workers, plugins=plugins)
    try:
        result = run_rounds(experiment, engine).result
    finally:
        engine.close()
    assert result["rejected"] == 0
    return result["model_sha256"]


@pytest.mark.parametrize(
    ("tag", "method", "settings"),
    [
        ("a", "fedp3", ["prune.local_pruner=every_second_a"]),
        ("b", "fedp3", ["prune.selector=smallest_b"]),
        ("c", "half_c", []),
    ],
)
def test_workers_import_the_file_and_give_the_same_bits(tag, method, settings, tmp_path):
    plain = assemble(config.parse({}, SMALL))
    plugin = load_plugin(str(write_plugin(tmp_path, tag)))
    experiment = assemble(config.parse({"method": method}, [*SMALL, *settings]))
    expected = final_hash(experiment, 1)
    assert final_hash(experiment, 2, [plugin]) == expected
    assert expected != final_hash(plain, 1), "the plugin has an effect"


def test_a_file_that_was_changed_is_refused(tmp_path):
    path = write_plugin(tmp_path, "d")
    plugin = load_plugin(str(path))
    assert load_plugin(str(path), plugin.sha256) == plugin
    experiment = assemble(config.parse({}, [*SMALL, "prune.selector=smallest_d"]))
    path.write_text(path.read_text() + "\nTAG = 'another'\n")
    with pytest.raises(InputError, match="was changed after the run began"):
        load_plugin(str(path), plugin.sha256)
    with pytest.raises(InputError, match="was changed after the run began"):
        make_engine(experiment, 2, plugins=[plugin])
    path.unlink()
    with pytest.raises(InputError, match="cannot read it"):
        make_engine(experiment, 2, plugins=[plugin])
    assert not multiprocessing.active_children()


def test_hooks_that_cannot_be_pickled_are_refused_for_workers():
    experiment = assemble(config.parse({}, SMALL))
    hooks = Hooks(loss=lambda net, x, y, inputs: net(x).sum())
    client = replace(experiment.client, spec=replace(experiment.client.spec, hooks=hooks))
    with pytest.raises(InputError, match="hooks that can be pickled"):
        pool(client, experiment.shards, 2)
