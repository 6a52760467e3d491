"""`fedp3.flower`: a stock Flower app, converted by a few lines, trains as `fedp3.run` does."""

import importlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("flwr")

import fedp3
from fedp3.core.errors import FedP3Error, InputError, RunError
from fedp3.core.files import read_json
from fedp3.core.hashing import model_sha256
from fedp3.deploy.strategy_settings import completed
from fedp3.flower import FedP3, fedp3_client
from flower.conversion import trained_without_flower, write_converted
from flower.fakes import FakeGrid, in_a_run

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict  # isort: skip
from flwr.clientapp import ClientApp  # isort: skip

RUN_CONFIG = {
    "num-server-rounds": 2,
    "fraction-evaluate": 1.0,
    "local-epochs": 1,
    "learning-rate": 0.1,
    "batch-size": 16,
}
SETTINGS = {"prune": {"keep": 0.5}, "local": {"lr": 0.1}, "run": {"rounds": 2}}


@pytest.fixture(autouse=True)
def _inside_a_run():
    with in_a_run():
        yield


def grid_of(app: ClientApp, folder: Path, clients: int = 3, **more) -> FakeGrid:
    nodes = [
        {"partition-id": i, "num-partitions": clients, "folder": str(folder / f"node-{i}"), **more}
        for i in range(clients)
    ]
    grid = FakeGrid(app, nodes)
    for i, node in enumerate(nodes):
        grid.contexts[100 + i] = Context(7, 100 + i, node, RecordDict(), dict(RUN_CONFIG))
    return grid


# --------------------------------------------------------------------------- the stock app


@pytest.fixture
def converted(tmp_path, monkeypatch):
    """The converted app: its folder, and its modules."""
    folder = tmp_path / "app"
    write_converted(folder)
    monkeypatch.syspath_prepend(str(folder))
    names = ("client_app", "server_app", "task")
    yield folder, *(importlib.import_module(f"quickstart.{name}") for name in names)
    for name in [name for name in sys.modules if name.partition(".")[0] == "quickstart"]:
        del sys.modules[name]


def test_a_stock_app_is_converted_by_at_most_10_lines(tmp_path):
    assert 0 < len(write_converted(tmp_path / "app")) <= 10


def test_the_converted_app_trains_to_the_bits_of_a_run_without_flower(converted, monkeypatch):
    folder, client, server, task = converted
    made = []
    monkeypatch.setattr(server, "Net", lambda: made.append(task.Net()) or made[-1])
    out = folder / "final.pt"
    context = Context(7, 1, {}, RecordDict(), {**RUN_CONFIG, "save-to": str(out)})
    server.app(grid=grid_of(client.app, folder), context=context)
    initial = made[0].state_dict()
    trained = torch.load(out)
    assert model_sha256(trained) == trained_without_flower(task, initial)
    assert model_sha256(initial) != model_sha256(trained), "the user's own network is left alone"


def test_the_functions_of_the_stock_app_still_answer_other_strategies(converted):
    folder, client, _, task = converted
    grid = grid_of(client.app, folder)
    content = RecordDict(
        {"arrays": ArrayRecord(task.Net().state_dict()), "config": ConfigRecord({"lr": 0.1})}
    )
    (sent,) = grid.push_messages([Message(content, 100, "train")])
    (reply,) = grid.pull_messages([sent])
    assert reply.content["metrics"]["num-examples"] == 40


def test_the_converted_app_runs_in_flowers_simulation(converted, tmp_path):
    pytest.importorskip("ray")
    folder, *_, task = converted
    paths = [str(folder), *(path for path in sys.path if path)]
    env = os.environ | {"PYTHONPATH": ":".join(paths), "XDG_STATE_HOME": str(tmp_path / "state")}
    script = Path(__file__).with_name("simulate_quickstart.py")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    initial, trained = (torch.load(folder / f"{name}.pt") for name in ("initial", "final"))
    assert model_sha256(trained) == trained_without_flower(task, initial)
    assert not (tmp_path / "state").exists(), "simulated nodes store nothing on the disk"


# --------------------------------------------------------------------------- any other app


def make_net(outputs: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, outputs)
    )


def samples(i: int, count: int = 30):
    rng = torch.Generator().manual_seed(i)
    y = torch.arange(count) % 3
    return torch.randn(count, 6, generator=rng) + 2 * torch.eye(3, 6)[y], y


def load(partition_id: int):
    return TensorDataset(*samples(partition_id))


def app_of(load_data=load, net=make_net) -> ClientApp:
    return fedp3_client(ClientApp(), net, load_data)


def hash_of(result) -> str:
    return model_sha256(result.arrays.to_torch_state_dict())


def test_an_app_trains_to_the_bits_of_fedp3_run(tmp_path):
    settings = {**SETTINGS, "plan": {"head": "personal"}, "run": {"rounds": 3, "eval_every": 1}}
    net = make_net()
    arrays = ArrayRecord(net.state_dict())
    strategy = FedP3(net, out=tmp_path / "run", wait=1, **settings)
    result = strategy.start(grid_of(app_of(), tmp_path), arrays)
    expected = fedp3.run(net, [load(i) for i in range(3)], **settings)
    assert hash_of(result) == expected.model_sha256
    final = json.loads(json.dumps(expected.outcome.result["final"]))
    assert read_json(tmp_path / "run" / "result.json")["final"] == final
    assert (tmp_path / "run" / "report.html").exists()


def test_the_result_is_flowers_and_has_every_round(tmp_path):
    net = make_net()
    arrays = ArrayRecord(net.state_dict())
    seen = []

    def evaluate(rounds, now):
        net.load_state_dict(now.to_torch_state_dict())
        seen.append(model_sha256(now.to_torch_state_dict()))
        return MetricRecord({"rounds": rounds}) if rounds != 1 else None

    result = FedP3(make_net(), wait=1, **SETTINGS).start(
        grid=grid_of(app_of(), tmp_path),
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": 0.3, "steps": 2}),
        num_rounds=3,
        timeout=50,
        evaluate_fn=evaluate,
    )
    assert type(result).__module__ == "flwr.serverapp.strategy.result"
    assert list(result.train_metrics_clientapp) == [1, 2, 3]
    assert result.train_metrics_clientapp[2]["clients"] == 3
    assert result.train_metrics_clientapp[2]["train_loss"] > 0
    assert set(result.evaluate_metrics_clientapp[3]) == {
        "accuracy_global",
        "accuracy_dispatched",
        "accuracy_personal",
    }
    assert {t: m["rounds"] for t, m in result.evaluate_metrics_serverapp.items()} == {
        0: 0,
        2: 2,
        3: 3,
    }
    assert len(set(seen)) == 4 and seen[-1] == model_sha256(result.arrays.to_torch_state_dict())
    assert "Global Arrays" in repr(result)


def test_arguments_of_start_win_over_the_config_and_are_checked(tmp_path):
    net, arrays = make_net(), ArrayRecord(make_net().state_dict())
    start = partial(FedP3(net, wait=1, **SETTINGS).start, FakeGrid(None, []), arrays)
    for options, words in (
        ({"train_config": ConfigRecord({"learning-rate": 0.1})}, "[local] unknown key"),
        ({"train_config": ConfigRecord({"lr": -1.0})}, "[local] lr"),
        ({"evaluate_config": ConfigRecord({"k": 1})}, "evaluate_config has 'k'"),
        ({"num_rounds": 0}, "[run] rounds"),
    ):
        with pytest.raises(InputError) as error:
            start(**options)
        assert words in str(error.value)


@pytest.mark.parametrize("form", ["config", "file"])
def test_a_config_or_a_file_means_the_same_as_sections(tmp_path, form):
    sections = {
        **SETTINGS,
        "partition": {"clients": 3},
        "run": {"rounds": 1, "clients_per_round": 0},
    }
    sections["plan"] = {"layers": "full"}
    config = fedp3.make_config(**sections)
    given = config
    if form == "file":
        given = tmp_path / "my.toml"
        given.write_text(
            "[partition]\nclients = 3\n[prune]\nkeep = 0.5\n[local]\nlr = 0.1\n"
            "[run]\nrounds = 1\nclients_per_round = 0\n[plan]\nlayers = 'full'\n"
        )
    net = make_net()
    arrays = ArrayRecord(net.state_dict())
    hashes = {
        model_sha256(
            strategy.start(
                grid_of(app_of(), tmp_path / str(k)), arrays
            ).arrays.to_torch_state_dict()
        )
        for k, strategy in enumerate((FedP3(net, given, wait=1), FedP3(net, wait=1, **sections)))
    }
    assert len(hashes) == 1


def test_a_killed_run_is_resumed_by_the_strategy(tmp_path):
    net = make_net()
    arrays = ArrayRecord(net.state_dict())
    settings = {**SETTINGS, "plan": {"head": "personal"}}
    grid = grid_of(app_of(), tmp_path)

    def stop(rounds, now):
        if rounds == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FedP3(net, out=tmp_path / "run", wait=1, **settings).start(grid, arrays, evaluate_fn=stop)
    resumed = FedP3(net, out=tmp_path / "run", resume=True, wait=1, **settings)
    result = resumed.start(grid, arrays)
    expected = fedp3.run(net, [load(i) for i in range(3)], **settings)
    assert hash_of(result) == expected.model_sha256


def test_under_ldp_the_noise_is_found_for_the_records_that_nodes_report(tmp_path):
    net = make_net()
    privacy = {"enabled": True, "epsilon": 8.0, "delta": 1e-3}
    strategy = FedP3(net, out=tmp_path / "run", wait=1, privacy=privacy, run={"rounds": 1})
    strategy.start(grid_of(app_of(), tmp_path), ArrayRecord(net.state_dict()))
    result = read_json(tmp_path / "run" / "result.json")
    assert result["rejected"] == 0 and 0 < result["epsilon_max"] <= 8
    assert (tmp_path / "node-0" / "ledger.jsonl").exists(), "the node keeps its own account"


FORMS = {
    "tensors": lambda i: samples(i),
    "a data set": load,
    "a loader": lambda i: DataLoader(load(i), batch_size=7, shuffle=True),
    "rows with one column": lambda i: [
        {"img": x, "label": int(y)} for x, y in zip(*samples(i), strict=True)
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_load_data_returns_samples_in_any_usual_form(form, tmp_path):
    from fedp3.deploy.node_samples import node_samples

    context = Context(7, 1, {"partition-id": 1}, RecordDict(), {"k": 4})
    config = completed(SETTINGS, make_net(), 3)
    data, shard = node_samples(
        lambda partition_id: FORMS[form](partition_id), context, make_net(), config
    )
    x, y = samples(1)
    assert torch.equal(data.x, x) and torch.equal(data.y, y) and data.classes == 3
    assert len(shard.train) == 21 and len(shard.test) == 9
    both, parts = node_samples(
        lambda context, k, more=5: (
            FORMS[form](k + more),
            FORMS[form](context.node_config["partition-id"]),
        ),
        context,
        make_net(),
        config,
    )
    assert torch.equal(both.x[parts.train], samples(9)[0]) and torch.equal(both.x[parts.test], x)


# --------------------------------------------------------------------------- mistakes


def test_without_flower_the_door_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "fedp3.flower")
    with pytest.raises(ImportError, match=r"pip install 'fedp3\[flower\]'"):
        importlib.import_module("fedp3.flower")


def test_a_node_does_not_import_what_only_the_server_needs():
    code = (
        "import sys; from fedp3.flower import fedp3_client; "
        "print(sorted(m for m in sys.modules if m.startswith(('fedp3.runs', 'torch._dynamo'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_door_has_two_names():
    assert sorted(fedp3.flower.__all__) == ["FedP3", "fedp3_client"]
    with pytest.raises(AttributeError, match="no attribute 'Strategy'"):
        fedp3.flower.Strategy  # noqa: B018


SEEDED = {"enabled": True, "randomness": "seeded", "noise_multiplier": 2.0, "epsilon": 50.0}
BAD_STRATEGIES = {
    "no network": (lambda: FedP3({"prune": 1}), "got a dict as its network"),
    "a data set by name": (
        lambda: FedP3(make_net(), data={"name": "mnist"}),
        "[data] name = 'mnist'",
    ),
    "a network by name": (lambda: FedP3(make_net(), model={"name": "mlp"}), "[model] name = 'mlp'"),
    "a config with data": (
        lambda: FedP3(make_net(), fedp3.make_config("data.name=cifar10")),
        "remove the section [data]",
    ),
    "a file of shares": (lambda: FedP3(make_net(), prune={"keep": "k.csv"}), "names a file"),
    "noise from a seed": (lambda: FedP3(make_net(), privacy=SEEDED), "simulation"),
    "a typo": (lambda: FedP3(make_net(), prune={"kep": 0.5}), "did you mean 'keep'"),
    "an unknown section": (lambda: FedP3(make_net(), prunes={}), "unknown section 'prunes'"),
    "a config twice": (
        lambda: FedP3(make_net(), fedp3.make_config(), prune={}),
        "one or the other",
    ),
    "no config": (lambda: FedP3(make_net(), 5), "got an int as its config"),
    "resume from nowhere": (lambda: FedP3(make_net(), resume=True), "out='FOLDER'"),
    "no app": (lambda: fedp3_client(make_net, load, load), "as its app"),
    "an instance": (lambda: fedp3_client(ClientApp(), make_net(), load), "pass what makes it"),
    "no function": (lambda: fedp3_client(ClientApp(), make_net, [1]), "as load_data"),
}


@pytest.mark.parametrize("case", BAD_STRATEGIES)
def test_a_mistake_is_told_before_any_node_is_asked(case):
    make, words = BAD_STRATEGIES[case]
    with pytest.raises(FedP3Error) as error:
        make()
    assert words in str(error.value)


def test_arrays_of_another_network_are_refused():
    strategy = FedP3(make_net(), **SETTINGS)
    for arrays, words in (
        (ArrayRecord(make_net(5).state_dict()), "not those of the network"),
        (ArrayRecord(), "has no arrays"),
    ):
        with pytest.raises(InputError, match=words):
            strategy.start(FakeGrid(None, []), arrays)


BAD_NODES = {
    "returns nothing": (lambda: None, "data"),
    "no samples": (lambda: samples(0, 0), "data"),
    "labels beyond the head": (lambda: (samples(0)[0], samples(0)[1] + 2), "data"),
    "an unknown parameter": (lambda size: None, "setup"),
    "many sets": (lambda: [load(0), load(1), load(2)], "data"),
    "an error of its own": (lambda: 1 / 0, "training"),
    "other shapes to test on": (
        lambda: (load(0), TensorDataset(torch.zeros(4, 5), torch.zeros(4).long())),
        "data",
    ),
}


@pytest.mark.parametrize("case", BAD_NODES)
def test_nodes_that_cannot_take_part_are_told_before_training(case, tmp_path):
    load_data, code = BAD_NODES[case]
    grid = grid_of(app_of(load_data), tmp_path)
    with pytest.raises(RunError, match=rf"3 nodes: its node refused \({code}\)"):
        FedP3(make_net(), wait=0, **SETTINGS).start(grid, ArrayRecord(make_net().state_dict()))
    assert {m.metadata.message_type for m in grid.seen} == {"query.fedp3"}


def test_the_log_of_a_node_says_which_label_does_not_fit_the_head(tmp_path):
    grid = grid_of(app_of(BAD_NODES["labels beyond the head"][0]), tmp_path)
    with pytest.raises(RunError):
        FedP3(make_net(), wait=0, **SETTINGS).start(grid, ArrayRecord(make_net().state_dict()))
    assert (
        "labels of this node reach 4, and the head of the network has 3 outputs"
        in (tmp_path / "node-0" / "refusals.log").read_text()
    )


def test_a_node_with_other_samples_gets_no_tasks_and_the_others_train(tmp_path):
    def other(partition_id):
        x, y = samples(partition_id)
        return (x[:, :5], y) if partition_id == 1 else (x, y)

    class Any(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.b(torch.relu(self.a(x[:, :5])))

    net = Any()
    strategy = FedP3(net, wait=1, plan={"layers": "full"}, run={"rounds": 1})
    result = strategy.start(grid_of(app_of(other, Any), tmp_path), ArrayRecord(net.state_dict()))
    assert result.train_metrics_clientapp[1]["clients"] == 2


def test_nodes_need_to_know_how_many_they_are(tmp_path):
    grid = grid_of(app_of(), tmp_path)
    for node in grid.configs:
        del node["num-partitions"]
    arrays = ArrayRecord(make_net().state_dict())
    with pytest.raises(RunError, match=r"refused \(setup\)"):
        FedP3(make_net(), wait=0, **SETTINGS).start(grid, arrays)
    assert "num-partitions=3" in (tmp_path / "node-0" / "refusals.log").read_text()
    strategy = FedP3(make_net(), wait=1, **SETTINGS, partition={"clients": 3})
    assert strategy.start(grid, arrays).train_metrics_clientapp[2]["clients"] == 3


def test_a_node_that_claims_absurd_numbers_does_no_harm(tmp_path):
    def lies(sent, reply):
        if sent.metadata.dst_node_id == 101 and "node" in reply.content:
            reply.content["node"]["examples"] = 1 << 60
            reply.content["node"]["clients"] = 1 << 30
        return reply

    grid = grid_of(app_of(), tmp_path)
    grid.spoil = lies
    strategy = FedP3(make_net(), wait=1, **SETTINGS)
    result = strategy.start(grid, ArrayRecord(make_net().state_dict()))
    assert result.train_metrics_clientapp[1]["clients"] >= 2


def test_nobody_online_is_told(monkeypatch):
    strategy = FedP3(make_net(), wait=0, **SETTINGS)
    with pytest.raises(RunError, match="no node answered within 0 s"):
        strategy.start(FakeGrid(None, []), ArrayRecord(make_net().state_dict()))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", '{"data": {"name": "mnist"}}', '{"partition": {"file": "/etc/passwd"}}'],
)
def test_a_node_acts_on_no_settings_but_those_that_a_strategy_may_send(text, tmp_path):
    from fedp3.deploy.strategy_settings import from_text

    with pytest.raises(FedP3Error):
        from_text(text)
