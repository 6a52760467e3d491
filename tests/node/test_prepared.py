"""A deployed node prepares its shard once, and trusts no damaged or foreign entry."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("flwr")

from safetensors import safe_open
from safetensors.torch import save_file

from fedp3 import config
from fedp3.config.plugins import Plugin
from fedp3.data.shards import Shard
from fedp3.engines.flower import client_app
from fedp3.engines.flower.client_app import configured_file, configured_node
from fedp3.experiment.assemble import assemble
from fedp3.node import prepared
from fedp3.node.prepared import preparation_key
from fedp3.privacy.mechanism import mechanism_of
from worlds import same

SMALL = [
    "model.width=0.02",
    "partition.clients=4",
    "run.clients_per_round=0",
    "run.rounds=2",
    "local.steps=2",
]
LDP = [
    "privacy.enabled=true",
    "privacy.noise_multiplier=auto",
    "privacy.epsilon=20.0",
    "privacy.randomness=seeded",
]
CLIENT = 1


def node_context(folder: Path, client: int = CLIENT) -> SimpleNamespace:
    node_config = {"partition-id": client, "folder": str(folder)}
    return SimpleNamespace(node_config=node_config, run_config={})


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "prepared").iterdir())


@pytest.fixture
def settings(request):
    return config.parse({}, [*SMALL, *getattr(request, "param", [])])


@pytest.fixture
def assembled(monkeypatch):
    """How often an experiment was assembled on the node."""
    calls = []
    original = client_app.assemble_from

    def counted(*arguments, **options):
        calls.append(arguments)
        return original(*arguments, **options)

    monkeypatch.setattr(client_app, "assemble_from", counted)
    return calls


def check(holding, settings):
    """The node trains with what the whole experiment would give it."""
    experiment = assemble(settings)
    expected = experiment.client
    assert torch.equal(holding.shard.train, experiment.shards[holding.client].train)
    assert torch.equal(holding.shard.test, experiment.shards[holding.client].test)
    mechanism = mechanism_of(expected)
    assert holding.ghost == (mechanism is not None and mechanism.ghost)
    assert mechanism_of(holding.context) is None, "the noise comes with each task"
    assert same(holding.context.initial, expected.initial)
    assert holding.context.spec == expected.spec and holding.context.local == expected.local
    assert holding.config == settings


@pytest.mark.parametrize(
    "settings", [[], LDP, ["prune.local_pruner=uniform", "plan.head=personal"]], indirect=True
)
def test_the_second_message_reads_what_the_first_prepared(settings, assembled, tmp_path):
    load = configured_node(settings)
    check(load(node_context(tmp_path)), settings)
    assert len(assembled) == 1 and len(entries(tmp_path)) == 1
    check(load(node_context(tmp_path)), settings)
    assert len(assembled) == 1, "nothing was partitioned or planned again"
    check(load(node_context(tmp_path, client=2)), settings)
    assert len(assembled) == 2 and len(entries(tmp_path)) == 2, "every client has its own entry"


@pytest.mark.parametrize("settings", [LDP], indirect=True)
def test_a_node_never_searches_the_noise(settings, tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("the noise multiplier was searched")

    monkeypatch.setattr("fedp3.privacy.accountant.noise_multiplier", never)
    monkeypatch.setattr("fedp3.privacy.accountant.allowed_steps", never)
    for _ in range(2):
        assert configured_node(settings)(node_context(tmp_path)).ghost


def test_a_config_file_is_prepared_once_too(settings, assembled, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml(settings))
    for _ in range(2):
        check(configured_file(path)(node_context(tmp_path)), settings)
    assert len(assembled) == 1


# --------------------------------------------------------------------------- damaged and foreign


def rewrite(path: Path, change) -> None:
    """Change an entry's content, and give it a checksum that fits."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in ("train", "test")}
        about = json.loads(file.metadata()["about"])
    change(tensors, about)
    text = json.dumps(about, sort_keys=True)
    metadata = {"about": text, "sha256": prepared._checksum(text, tensors)}
    save_file({name: w.contiguous() for name, w in tensors.items()}, path, metadata)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def claim_ghost_clipping(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'ghost\\": true', b'ghost\\": 1   '))


def set_value(name: str, value):
    return lambda path: rewrite(path, lambda tensors, about: about.update({name: value}))


def set_indices(name: str, change):
    def damage(path: Path) -> None:
        rewrite(path, lambda tensors, _: tensors.update({name: change(tensors[name])}))

    return damage


DAMAGES = {
    "cut short": truncate,
    "a bit": flip_a_bit,
    "empty": empty,
    "another value without a checksum": claim_ghost_clipping,
    "another client": set_value("client", 3),
    "another config": set_value("config", "0" * 64),
    "other inputs": set_value("inputs", "0" * 64),
    "no word about ghost clipping": set_value("ghost", None),
    "an index too large": set_indices("train", lambda w: w + 10**6),
    "a negative index": set_indices("test", lambda w: w - 10**6),
    "floats": set_indices("train", lambda w: w.double()),
    "a matrix": set_indices("test", lambda w: w[None]),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("settings", [LDP], indirect=True)
def test_a_damaged_or_foreign_entry_is_ignored_and_written_again(
    damage, settings, assembled, tmp_path
):
    load = configured_node(settings)
    load(node_context(tmp_path))
    (entry,) = entries(tmp_path)
    good = entry.read_bytes()
    DAMAGES[damage](entry)
    assert entry.read_bytes() != good
    check(load(node_context(tmp_path)), settings)
    assert len(assembled) == 2, "the entry was not used"
    check(load(node_context(tmp_path)), settings)
    assert len(assembled) == 2 and entries(tmp_path) == [entry], "it was written again"


def test_a_folder_that_cannot_be_written_costs_time_and_nothing_else(
    settings, assembled, tmp_path, caplog
):
    (tmp_path / "prepared").write_text("a file where a folder should be")
    for _ in range(2):
        check(configured_node(settings)(node_context(tmp_path)), settings)
    assert len(assembled) == 2
    assert "will prepare client 1 again" in caplog.text


# --------------------------------------------------------------------------- keys


def test_the_key_follows_from_everything_that_a_preparation_depends_on(settings, tmp_path):
    client = assemble(settings).client
    data, net = client.data, client.net
    part = tmp_path / "partition.json"

    def key(settings=settings, client=0, data=data, plugins=(), net=net):
        return preparation_key(settings, client, net, data, plugins)

    file = replace(settings, partition=replace(settings.partition, file=str(part)))
    part.write_text("one partition")
    with_file = key(file)
    part.write_text("another partition")
    keys = [
        key(),
        key(client=1),
        key(config.parse({}, [*SMALL, "run.seed=1"])),
        key(data=replace(data, y=data.y.flip(0))),
        key(data=replace(data, x=data.x[:, :, :4])),
        key(plugins=(Plugin("rules.py", "0" * 64),)),
        key(plugins=(Plugin("rules.py", "1" * 64),)),
        with_file,
        key(file),
        key(net=torch.nn.Linear(2, 2)),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == key(data=replace(data, y=data.y.clone())), "it is the same in the next process"


def test_an_empty_shard_is_stored_too(settings, tmp_path):
    client = assemble(settings).client
    key = preparation_key(settings, 0, client.net, client.data, ())
    nothing = torch.empty(0, dtype=torch.int64)
    made = prepared.Preparation(Shard(torch.arange(10), nothing), False)
    prepared.prepare_once(tmp_path, key, lambda: made, samples=10)
    stored = prepared.prepare_once(tmp_path, key, lambda: pytest.fail("made again"), samples=10)
    assert stored.shard.train.tolist() == list(range(10)) and len(stored.shard.test) == 0
