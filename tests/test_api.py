"""The Python interface keeps the promises of the command line."""

import doctest
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedp3
from fedp3 import api, config
from fedp3.config import schema
from fedp3.core.errors import ConfigError, InputError, PlanError
from fedp3.engines.catalogue import make_engine
from fedp3.experiment.assemble import assemble
from fedp3.runs import session
from worlds import same

SETTINGS = {
    "partition": {"kind": "iid", "clients": 4},
    "local": {"steps": 2, "lr": 0.1},
    "run": {"rounds": 3, "clients_per_round": 2, "eval_every": 0},
}


@pytest.fixture
def data():
    y = torch.arange(80) % 2
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(0)) + 2 * y[:, None]
    return x, y


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def test_tensors_and_torch_data_sets_give_the_same_bits(data):
    a = fedp3.run(net(), data, **SETTINGS)
    b = fedp3.run(net(), TensorDataset(*data), **SETTINGS)
    assert a.model_sha256 == b.model_sha256
    assert set(a.accuracy) == {"G", "D", "P"}
    net().load_state_dict(dict(a.weights))


class Stop(Exception):
    pass


def test_resume_continues_where_the_run_stopped(data, tmp_path):
    uninterrupted = fedp3.run(net(), data, **SETTINGS)

    def stop(record):
        if record.t == 1:
            raise Stop

    with pytest.raises(Stop):
        fedp3.run(net(), data, out=tmp_path / "r", on_round=stop, **SETTINGS)
    seen = []
    again = fedp3.run(
        net(), data, out=tmp_path / "r", resume=True, on_round=seen.append, **SETTINGS
    )
    assert [r.t for r in seen] == [2] and len(again.history) == 3
    assert again.model_sha256 == uninterrupted.model_sha256
    other = SETTINGS | {"local": {"steps": 3, "lr": 0.1}}
    with pytest.raises(InputError, match=r"\[local\] steps: there 2, here 3"):
        fedp3.run(net(), data, out=tmp_path / "r", resume=True, **other)
    with pytest.raises(InputError, match="method: there 'fedp3', here 'fedavg'"):
        fedp3.run(net(), data, out=tmp_path / "r", resume=True, method="fedavg", **SETTINGS)

    def at_once(record):
        raise Stop

    finished = fedp3.run(net(), data, out=tmp_path / "r", resume=True, on_round=at_once, **SETTINGS)
    assert finished.model_sha256 == uninterrupted.model_sha256, "it is read, not run"
    assert finished.accuracy == again.accuracy
    with pytest.raises(Stop):
        fedp3.run(net(), data, out=tmp_path / "s", on_round=at_once, **SETTINGS)
    shutil.rmtree(tmp_path / "s" / "checkpoint")  # as if it had been killed before the first one
    with pytest.raises(InputError, match="begun with other settings"):
        fedp3.run(net(), data, out=tmp_path / "s", resume=True, **other)


def test_a_run_is_resumed_only_with_the_data_and_the_network_it_began_with(data, tmp_path):
    x, y = data
    fedp3.run(net(), data, out=tmp_path / "r", **SETTINGS)
    wider = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 2))
    for model, samples, what in (
        (net(), (x, 1 - y), "data"),
        (net(), (x + 1, y), "data"),
        (wider, data, "net"),
    ):
        with pytest.raises(
            InputError, match=f"begun with other {what}: a run can be resumed only with what it"
        ):
            fedp3.run(model, samples, out=tmp_path / "r", resume=True, **SETTINGS)
    split = {str(i): list(range(20 * i, 20 * i + 20)) for i in range(4)}
    place = tmp_path / "clients.json"
    by_file = SETTINGS | {"partition": {"file": str(place), "clients": 4}}
    place.write_text(json.dumps(split))
    fedp3.run(net(), data, out=tmp_path / "s", **by_file)
    place.write_text(json.dumps({k: split[str((int(k) + 1) % 4)] for k in split}))
    with pytest.raises(InputError, match="begun with other clients"):
        fedp3.run(net(), data, out=tmp_path / "s", resume=True, **by_file)


def test_reading_a_finished_private_run_again_costs_nothing(data, tmp_path):
    private = SETTINGS | {
        "privacy": {"enabled": True, "epsilon": 8.0, "delta": 1e-3, "sample_rate": 0.3}
    }
    private["plan"] = {"layers": "full"}
    first = fedp3.run(net(), data, out=tmp_path / "r", **private)
    again = fedp3.run(net(), data, out=tmp_path / "r", resume=True, **private)
    assert first.outcome.result["epsilon_max"] == again.outcome.result["epsilon_max"]
    assert first.model_sha256 == again.model_sha256


def test_damaged_checkpoints_are_reported(data, tmp_path):
    fedp3.run(net(), data, out=tmp_path / "r", **SETTINGS)
    for path in (tmp_path / "r" / "checkpoint").glob("*.safetensors"):
        path.write_bytes(b"")
    with pytest.warns(UserWarning, match=r"checkpoint of round \d cannot be used"):
        fedp3.run(net(), data, out=tmp_path / "r", resume=True, **SETTINGS)


def test_a_buffer_that_forward_does_not_use_does_not_stop_a_small_net(data):
    mine = net()
    mine.register_buffer("temperature", torch.ones(1))
    assert fedp3.run(mine, data, **SETTINGS).outcome.result["rejected"] == 0


def test_a_report_needs_a_folder(data, tmp_path):
    with pytest.raises(InputError, match="out="):
        fedp3.run(net(), data, **SETTINGS).report(tmp_path / "r.html")
    result = fedp3.run(net(), data, out=tmp_path / "r", **SETTINGS)
    assert result.report(tmp_path / "r.html").exists()


def test_wrong_settings_are_refused_before_training(data):
    with pytest.raises(ConfigError, match="did you mean 'rounds'"):
        fedp3.run(net(), data, run={"round": 3})
    with pytest.raises(PlanError, match="no client trains"):
        fedp3.run(
            net(),
            data,
            plan={"layers": "lowerb"},
            **(
                SETTINGS
                | {
                    "partition": {"clients": 1, "kind": "iid"},
                    "run": {"rounds": 1, "clients_per_round": 1},
                }
            ),
        )


class Tuple(nn.Module):
    """Returns more than logits."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 2)

    def forward(self, x):
        return self.lstm(x)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (
            lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)),
            r"cannot take samples of shape \(6,\)",
        ),
        (
            lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)),
            r"shape \(2, 1\), want \(2, k\) with k >= 2",
        ),
        (Tuple, "returns a tuple, want one tensor of logits"),
    ],
)
def test_a_net_that_does_not_fit_the_data_is_refused_before_training(data, model, why):
    with pytest.raises(InputError, match=why):
        fedp3.run(model(), data, **SETTINGS)


def test_labels_that_start_at_one_are_refused(data):
    x, y = data
    with pytest.raises(InputError, match="labels run from 0 to 2"):
        fedp3.run(net(), (x, y + 1), **SETTINGS)


def test_a_head_with_more_outputs_than_classes_is_trained_in_full(data):
    """Such a net is small enough to be stacked, where only the classes would be in the softmax."""
    wide = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    result = fedp3.run(wide, data, plan={"layers": "full"}, prune={"keep": 1.0}, **SETTINGS)
    assert not result.experiment.client.stacked
    before = result.experiment.start.W["2.bias"]
    assert bool((result.weights["2.bias"] != before).all()), (
        "outputs without a class learn that they are wrong"
    )


def test_a_device_that_is_not_there_is_refused(data):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(InputError, match="'cpu' always works"):
        fedp3.run(
            net(),
            data,
            **(SETTINGS | {"run": {"rounds": 1, "clients_per_round": 2, "device": "cuda"}}),
        )


def test_fedcr_needs_a_net_with_a_code(data):
    with pytest.raises(InputError, match="stochastic code"):
        fedp3.run(net(), data, method="fedcr", **SETTINGS)


def test_workers_without_a_main_guard_end_in_one_sentence(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import fedp3, torch\n"
        "net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))\n"
        "data = torch.randn(80, 6), torch.arange(80) % 2\n"
        "fedp3.run(net, data, workers=2, partition={'kind': 'iid', 'clients': 4},"
        " plan={'layers': 'full'}, run={'rounds': 1, 'clients_per_round': 2})\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0 and "no worker process could start" in done.stderr.splitlines()[-1]


def test_a_frozen_parameter_is_refused_and_a_net_can_be_given_again(data):
    mine = net()
    mine[0].requires_grad_(False)
    with pytest.raises(
        InputError, match=r"'0.weight' and 1 more of the model does not require a gradient"
    ):
        fedp3.run(mine, data, **SETTINGS)
    mine.requires_grad_()
    for _ in range(2):  # the second time with what the first one left
        fedp3.run(mine, data, plan={"layers": "lowerb", "others": "freeze"}, **SETTINGS)


def test_own_layers_are_taken(data):
    own = {"body": ["0.weight", "0.bias", "2.weight", "2.bias"], "head": ["4.weight", "4.bias"]}
    result = fedp3.run(net(), data, layers=own, plan={"layers": "lowerb"}, **SETTINGS)
    assert list(result.experiment.server.layers.layers) == ["body", "head"]


def test_every_public_name_can_be_imported():
    names = {"run", "resume", "plan", "make_config", "load_config", "register", "Result", "Plan"}
    names |= {"Aggregator", "uploads_of", "Config", "layer_map", "__version__", "History"}
    assert names <= set(fedp3.__all__)
    assert all(getattr(fedp3, name) is not None for name in fedp3.__all__)
    with pytest.raises(AttributeError):
        _ = fedp3.nonsense


# --------------------------------------------------------------------------- resuming with a model


def smooth() -> nn.Module:
    """A network whose clients are not stacked, so that they compute with it."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize("method", ["fedper", "ditto"])
def test_a_resumed_run_uses_its_w0_whatever_values_the_model_has_by_then(method, data, tmp_path):
    settings = SETTINGS | {
        "method": method,
        "run": {"rounds": 6, "clients_per_round": 1, "eval_every": 0},
    }
    uninterrupted = fedp3.run(smooth(), data, out=tmp_path / "whole", **settings)

    def stop(record):
        if record.t == 1:
            raise KeyboardInterrupt

    used = smooth()
    with pytest.raises(KeyboardInterrupt):
        fedp3.run(used, data, out=tmp_path / "r", on_round=stop, **settings)
    again = fedp3.run(used, data, out=tmp_path / "r", resume=True, **settings)
    assert again.model_sha256 == uninterrupted.model_sha256
    assert again.accuracy == uninterrupted.accuracy


def test_a_run_stopped_in_its_first_round_begins_again_from_its_w0(data, tmp_path, monkeypatch):
    uninterrupted = fedp3.run(smooth(), data, **SETTINGS)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fedp3.runs.session.run_rounds", killed)
        with pytest.raises(KeyboardInterrupt):
            fedp3.run(smooth(), data, out=tmp_path / "r", **SETTINGS)
    other = smooth()
    nn.init.zeros_(other[0].weight)
    resumed = fedp3.run(other, data, out=tmp_path / "r", resume=True, **SETTINGS)
    assert resumed.model_sha256 == uninterrupted.model_sha256
    (tmp_path / "r" / "initial.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"cannot read .*initial\.safetensors"):
        fedp3.run(smooth(), data, out=tmp_path / "r", resume=True, **SETTINGS)


def test_other_layers_or_another_scaling_are_refused_on_resume(data, tmp_path):
    pixels = fedp3.from_tensors(torch.arange(80 * 6, dtype=torch.uint8).view(80, 1, 2, 3), data[1])
    flat = nn.Sequential(nn.Flatten(), *net())
    fedp3.run(flat, pixels, out=tmp_path / "r", **SETTINGS)
    scaled = replace(pixels, mean=(0.1,), std=(0.3,))
    with pytest.raises(InputError, match="begun with other scaling"):
        fedp3.run(flat, scaled, out=tmp_path / "r", resume=True, **SETTINGS)
    names = [n for n, _ in flat.named_parameters()]
    layers = {"all": names[:-2], "head": names[-2:]}
    with pytest.raises(InputError, match="begun with other layers"):
        fedp3.run(flat, pixels, out=tmp_path / "r", resume=True, layers=layers, **SETTINGS)


# ---------------------------------------------------------------- data and nets as people have them


@pytest.mark.parametrize("as_given", ["column", "gradient", "uint16", "big-endian"])
def test_data_as_people_have_them(as_given, data, tmp_path):
    x, y = data
    given = {
        "column": lambda: (x, torch.stack([y, y], 1)[:, 0]),
        "gradient": lambda: (x.clone().requires_grad_() * 1, y),
        "uint16": lambda: (x, y.numpy().astype("uint16")),
        "big-endian": lambda: (x.numpy().astype(">f4"), y.numpy().astype(">i4")),
    }[as_given]()
    again = fedp3.run(net(), given, out=tmp_path / "r", **SETTINGS)
    assert again.model_sha256 == fedp3.run(net(), data, **SETTINGS).model_sha256


class Picky(nn.Module):
    """Its `view` cannot take an empty batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x.view(x.size(0), -1)).tanh())


def test_scores_change_no_bit_for_a_client_with_a_single_sample(data, tmp_path):
    parts = {"0": list(range(30)), "1": list(range(30, 60)), "2": [60]}
    (tmp_path / "parts.json").write_text(json.dumps(parts))
    found = set()
    for often in (0, 1, 2):
        run = {"rounds": 3, "clients_per_round": 0, "eval_every": often}
        partition = {"file": str(tmp_path / "parts.json"), "clients": 3}
        result = fedp3.run(Picky(), data, partition=partition, run=run, local={"steps": 2})
        assert result.outcome.result["rejected"] == 0
        found.add(result.model_sha256)
    assert len(found) == 1


class TwoAnswers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return (self.head(x), x) if self.training else self.head(x)


@pytest.mark.parametrize(
    ("model", "more", "text"),
    [
        (TwoAnswers(), {}, "returns a tuple"),
        (
            nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
            {"batch": 1},
            "train on a batch of 1",
        ),
        (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), {"batch": 3}, None),
    ],
)
def test_a_net_that_cannot_train_is_refused_before_training(model, more, text, data):
    settings = SETTINGS | {"local": {"steps": 2, **more}}
    if text is None:
        assert fedp3.run(model, data, **settings).outcome.result["rejected"] == 0
    else:
        with pytest.raises(InputError, match=text):
            fedp3.run(model, data, **settings)


def test_a_head_with_outputs_to_spare_trains_under_a_masked_loss(data):
    wide = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    result = fedp3.run(wide, data, method="heterofl", prune={"keep": [1.0, 0.5]}, **SETTINGS)
    assert result.outcome.result["rejected"] == 0


def test_the_sections_data_and_model_are_read(data):
    result = fedp3.run(net(), data, model={"width": 0.5}, **SETTINGS)
    assert result.experiment.config.model.width == 0.5
    with pytest.raises(ConfigError, match=r"it is \[local\] augment now"):
        fedp3.run(net(), data, data={"augment": False}, **SETTINGS)


def test_nonsense_is_refused_in_words(data):
    with pytest.raises(InputError, match="workers=-1"):
        fedp3.run(net(), data, workers=-1, **SETTINGS)
    with pytest.raises(PlanError, match="no shortcut leads around it"):
        fedp3.run(net(), data, plan={"others": "skip", "layers": "lowerb"}, **SETTINGS)
    with pytest.raises(PlanError, match="made for model resnet18"):
        fedp3.run(net(), data, plan={"layers": "resnet-b2-part"}, **SETTINGS)


def test_a_config_of_ones_own_net_runs_nothing_else(data, tmp_path):
    result = fedp3.run(net(), data, out=tmp_path / "r", **SETTINGS)
    with pytest.raises(InputError, match=r"call fedp3\.run again"):
        assemble(config.load(tmp_path / "r" / "config.toml"))
    page = result.report(tmp_path / "page.html").read_text()
    assert "user-provided data, iid" in page and "user-provided model, " in page
    assert "Run it again" not in page
    (tmp_path / "r" / "result.json").unlink()
    assert "Resume it" not in result.report(tmp_path / "page.html").read_text(), (
        "`fedp3 resume` would refuse"
    )


# --------------------------------------------------------------------------- resume and plan

SMALL = ("partition.clients=4", "run.clients_per_round=2", "run.rounds=3", "model.width=0.02")


def begin(folder, stop_after=None, *overrides):
    """A run from a config in this folder, as `fedp3 run` makes it; it may be stopped."""

    def stop(record):
        if record.t + 1 == stop_after:
            raise Stop

    def start_engine(experiment, states):
        return make_engine(experiment, 1, states)

    experiment = assemble(fedp3.make_config(*SMALL, *overrides))
    return session.train(experiment, folder, start_engine, watch=session.watch_with(stop))


def test_resume_continues_a_run_from_a_config(tmp_path):
    uninterrupted = begin(tmp_path / "whole")
    with pytest.raises(Stop):
        begin(tmp_path / "r", 2)
    seen = []
    result = fedp3.resume(tmp_path / "r", workers=1, on_round=seen.append)
    assert [record.t for record in seen] == [2]
    assert result.model_sha256 == uninterrupted.result["model_sha256"]
    assert result.history.column("round") == [1, 2, 3]
    assert result.folder == tmp_path / "r"
    again = fedp3.resume(str(tmp_path / "r"), on_round=seen.append)
    assert len(seen) == 1, "a finished run is read, not run"
    assert again.model_sha256 == result.model_sha256 and again.accuracy == result.accuracy
    assert same(again.weights, result.weights) and again.per_client == result.per_client


def test_resume_refuses_what_it_cannot_continue(data, tmp_path):
    with pytest.raises(InputError, match="is not a run folder"):
        fedp3.resume(tmp_path / "nothing")
    fedp3.run(net(), data, out=tmp_path / "r", **SETTINGS)
    with pytest.raises(InputError, match=r"call fedp3\.run again .* resume=True"):
        fedp3.resume(tmp_path / "r")


def test_plan_shows_what_each_client_will_do(tmp_path):
    settings = fedp3.make_config(*SMALL, "plan.layers=lowerb", "prune.keep=[0.9, 0.5]")
    plan = fedp3.plan(settings)
    assert len(plan.clients) == len(plan.costs) == 4
    assert [plan.clients[i].client for i in range(4)] == [0, 1, 2, 3]
    assert {cost.capacity for cost in plan.costs} == {0.9, 0.5}
    head = list(plan.clients[0].layers)[-1]
    assert list(plan.coverage[head]) == [0, 1, 2, 3]
    assert all(len(p.full_layers) == 2 for p in plan.clients), "one hidden layer and the head"
    assert repr(plan).startswith("<Plan of 4 clients: ") and "MB up per client" in repr(plan)
    path = tmp_path / "my.toml"
    path.write_text(config.to_toml(settings))
    assert fedp3.plan(path).costs == fedp3.plan(str(path)).costs == plan.costs
    with pytest.raises(ConfigError, match="no config at"):
        fedp3.plan(tmp_path / "no.toml")


# --------------------------------------------------------------------------- results


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run in a folder, and the network that was passed in."""
    y = torch.arange(80) % 2
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(0)) + 2 * y[:, None]
    model = net()
    run = {"rounds": 4, "clients_per_round": 2, "eval_every": 2}
    out = tmp_path_factory.mktemp("finished") / "r"
    return fedp3.run(model, (x, y), out=out, **(SETTINGS | {"run": run})), model, x


def test_the_model_of_a_result_has_the_trained_weights(finished, data):
    result, passed_in, x = finished
    assert not result.model.training
    values = result.model.state_dict()
    assert same({n: values[n] for n in result.weights}, result.weights)
    assert result.model is result.model is not passed_in
    before = result.model(x)
    fedp3.run(passed_in, data, **SETTINGS)
    assert torch.equal(result.model(x), before), "another run with the same network changes nothing"
    assert all(p.requires_grad for p in result.model.parameters())


def test_buffers_that_are_not_exchanged_have_their_initial_values(data):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 2)
            self.register_buffer("calls", torch.zeros(1), persistent=False)

        def forward(self, x):
            self.calls += 1
            return self.head(self.body(x).tanh())

    result = fedp3.run(Counting(), data, **SETTINGS)
    assert float(result.model.calls) == 0


def test_the_history_has_one_row_per_round(finished):
    history = finished[0].history
    assert len(history) == 4 and history.column("round") == [1, 2, 3, 4]
    assert [row["G"] is not None for row in history] == [False, True, False, True]
    assert set(history[0]) == {
        "round", "G", "D", "P", "C", "loss", "bytes_up", "bytes_down", "seconds", "epsilon", "void",
        "client_epsilon", "accepted", "late", "rejected", "virtual_seconds", "joules",
    }  # fmt: skip
    assert history.column("virtual_seconds") == history.column("joules") == [None] * 4
    assert history.column("accepted") == [2] * 4 and history.column("void") == [False] * 4
    assert history[-1]["G"] == finished[0].outcome.result["accuracy_global"]
    assert repr(history).startswith("<History of 4 rounds, G ") and "in round 4" in repr(history)


def test_the_history_is_the_same_with_and_without_a_folder(data, tmp_path):
    a = fedp3.run(net(), data, out=tmp_path / "r", **SETTINGS).history
    b = fedp3.run(net(), data, **SETTINGS).history
    seconds = {"seconds": 0.0}
    assert [row | seconds for row in a] == [row | seconds for row in b]


def test_data_frames_need_their_library(finished, monkeypatch):
    for name in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(InputError, match=f"pip install {name}"):
            getattr(finished[0].history, f"to_{name}")()


def test_each_client_has_a_row(finished):
    rows = finished[0].per_client
    assert [row["client"] for row in rows] == [0, 1, 2, 3]
    assert sum(row["examples"] for row in rows) == sum(
        len(s.train) for s in finished[0].experiment.shards.values()
    )
    for kind in ("G", "D", "P"):
        scores = [row[kind] for row in rows]
        assert sum(scores) / len(scores) == pytest.approx(finished[0].accuracy[kind])
    assert all(row["mb_up"] > 0 and row["keep"] == 0.9 for row in rows)


def test_a_figure_shows_accuracy_and_loss_and_can_be_written(finished, tmp_path):
    figure = finished[0].plot(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    scores, losses = figure.axes
    assert {line.get_label() for line in scores.get_lines()} == {"G", "D", "P"}
    assert scores.get_ylabel() == "accuracy, %" and losses.get_ylabel() == "training loss"
    assert list(losses.get_lines()[0].get_ydata()) == finished[0].history.column("loss")


def test_a_result_is_readable_in_a_shell_and_in_a_notebook(finished):
    result = finished[0]
    text = repr(result)
    assert text.startswith("<Result fedp3: 4 rounds, G ")
    assert "kB up, " in text and "kB down" in text
    html = result._repr_html_()
    assert html.startswith("<table>") and html.endswith("</table>")
    assert f"<td>{result.model_sha256[:16]}</td>" in html
    assert f"<th>G</th><td>{100 * result.accuracy['G']:.1f} %</td>" in html


# --------------------------------------------------------------------------- examples in docstrings


@pytest.mark.parametrize("module", [api, schema])
def test_examples_in_docstrings_are_right(module):
    tested = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert tested.attempted > 0 and tested.failed == 0


def test_the_main_functions_have_an_example():
    for function in (fedp3.run, api.plan, fedp3.make_config, fedp3.Config):
        assert "Example:" in function.__doc__ and ">>> " in function.__doc__


# --------------------------------------------------------------------------- the shortest call


@pytest.mark.parametrize("classes", [2, 3, 12])
@pytest.mark.parametrize("samples", [12, 45, 400])
def test_the_shortest_call_works_on_any_classes_and_samples(classes: int, samples: int) -> None:
    x, y = torch.randn(samples, 6), torch.arange(samples) % classes
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, classes))
    result = fedp3.run(net, (x, y), run={"rounds": 1})
    assert len(result.history) == 1
    assert result.experiment.config.partition.classes == min(5, classes)


def test_with_few_clients_the_default_plan_still_trains_every_layer_of_a_deep_network() -> None:
    layers = [m for _ in range(9) for m in (nn.Linear(6, 6), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Linear(6, 2))
    x, y = torch.randn(60, 6), torch.arange(60) % 2
    result = fedp3.run(net, (x, y), partition={"clients": 2}, run={"rounds": 1})
    assert result.experiment.config.plan.layers == "opu5"
    assert result.experiment.config.run.clients_per_round == 2


def test_a_setting_that_is_given_is_never_replaced_by_a_fitting_default() -> None:
    x, y = torch.randn(60, 6), torch.arange(60) % 2
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(InputError, match="classes"):
        fedp3.run(net, (x, y), partition={"classes": 3})
    with pytest.raises(InputError, match="clients_per_round"):
        fedp3.run(net, (x, y), run={"clients_per_round": 30})


def test_a_run_over_devices_from_python_has_virtual_time():
    x, y = torch.randn(200, 20), torch.arange(200) % 3
    net = nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3)
    )
    devices = {"fleet": "phones", "round_seconds": 0.05}
    result = fedp3.run(net, (x, y), devices=devices, run={"rounds": 2})
    assert all(row["virtual_seconds"] > 0 for row in result.history)
    with pytest.raises(fedp3.InputError, match="the smallest change that helps one device"):
        fedp3.run(net, (x, y), devices={"fleet": "phones", "round_seconds": 1e-6})
