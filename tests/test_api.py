"""`fedp3.run` keeps the promises of the command line."""

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
from fedp3 import config
from fedp3.errors import ConfigError, InputError, PlanError
from fedp3.experiment import assemble

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


def test_calling_again_with_the_same_folder_goes_on_where_it_stopped(data, tmp_path):
    whole = fedp3.run(net(), data, **SETTINGS)

    class Stop(Exception):
        pass

    def stop(record):
        if record.t == 1:
            raise Stop

    with pytest.raises(Stop):
        fedp3.run(net(), data, out=tmp_path / "r", on_round=stop, **SETTINGS)
    seen = []
    again = fedp3.run(net(), data, out=tmp_path / "r", on_round=seen.append, **SETTINGS)
    assert [r.t for r in seen] == [2]
    assert again.model_sha256 == whole.model_sha256
    other = SETTINGS | {"local": {"steps": 3, "lr": 0.1}}
    with pytest.raises(InputError, match=r"\[local\] steps: there 2, here 3"):
        fedp3.run(net(), data, out=tmp_path / "r", **other)

    def at_once(record):
        raise Stop

    finished = fedp3.run(net(), data, out=tmp_path / "r", on_round=at_once, **SETTINGS)
    assert finished.model_sha256 == whole.model_sha256 and finished.accuracy == again.accuracy, "read, not run"
    with pytest.raises(Stop):
        fedp3.run(net(), data, out=tmp_path / "s", on_round=at_once, **SETTINGS)
    shutil.rmtree(tmp_path / "s" / "checkpoint")  # as if it had been killed before the first one
    with pytest.raises(InputError, match="begun with other settings"):
        fedp3.run(net(), data, out=tmp_path / "s", **other)


def test_a_folder_goes_on_only_with_the_data_and_the_net_it_began_with(data, tmp_path):
    x, y = data
    fedp3.run(net(), data, out=tmp_path / "r", **SETTINGS)
    wider = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 2))
    for model, samples, what in ((net(), (x, 1 - y), "data"), (net(), (x + 1, y), "data"), (wider, data, "net")):
        with pytest.raises(InputError, match=f"begun with other {what}: a run goes on with what it began with"):
            fedp3.run(model, samples, out=tmp_path / "r", **SETTINGS)
    split = {str(i): list(range(20 * i, 20 * i + 20)) for i in range(4)}
    place = tmp_path / "clients.json"
    own = SETTINGS | {"partition": {"file": str(place), "clients": 4}}
    place.write_text(json.dumps(split))
    fedp3.run(net(), data, out=tmp_path / "s", **own)
    place.write_text(json.dumps({k: split[str((int(k) + 1) % 4)] for k in split}))
    with pytest.raises(InputError, match="begun with other clients"):
        fedp3.run(net(), data, out=tmp_path / "s", **own)


def test_asking_for_a_finished_private_run_again_costs_nothing(data, tmp_path):
    private = SETTINGS | {"privacy": {"enabled": True, "epsilon": 8.0, "delta": 1e-3, "sample_rate": 0.3}}
    private["plan"] = {"layers": "full"}
    results = [fedp3.run(net(), data, out=tmp_path / "r", **private) for _ in range(2)]
    assert results[0].outcome.result["epsilon_max"] == results[1].outcome.result["epsilon_max"]
    assert results[0].model_sha256 == results[1].model_sha256


def test_damaged_checkpoints_are_told(data, tmp_path):
    fedp3.run(net(), data, out=tmp_path / "r", **SETTINGS)
    for path in (tmp_path / "r" / "checkpoint").glob("*.safetensors"):
        path.write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged|cannot|not"):
        fedp3.run(net(), data, out=tmp_path / "r", **SETTINGS)


def test_a_buffer_that_forward_does_not_use_does_not_stop_a_small_net(data):
    mine = net()
    mine.register_buffer("temperature", torch.ones(1))
    assert fedp3.run(mine, data, **SETTINGS).outcome.result["rejected"] == 0


def test_a_report_needs_a_folder(data, tmp_path):
    with pytest.raises(InputError, match="out="):
        fedp3.run(net(), data, **SETTINGS).report(tmp_path / "r.html")
    result = fedp3.run(net(), data, out=tmp_path / "r", **SETTINGS)
    assert result.report(tmp_path / "r.html").exists()


def test_wrong_settings_are_said_before_training(data):
    with pytest.raises(ConfigError, match="did you mean 'rounds'"):
        fedp3.run(net(), data, run={"round": 3})
    with pytest.raises(PlanError, match="no client trains"):
        fedp3.run(
            net(),
            data,
            plan={"layers": "lowerb"},
            **(SETTINGS | {"partition": {"clients": 1, "kind": "iid"}, "run": {"rounds": 1, "clients_per_round": 1}}),
        )


class Tuple(nn.Module):
    """Answers with more than logits."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 2)

    def forward(self, x):
        return self.lstm(x)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)), r"cannot take samples of shape \(6,\)"),
        (
            lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)),
            r"shape \(2, 1\), want \(2, k\) with k >= 2",
        ),
        (Tuple, "answers with a tuple, want one tensor of logits"),
    ],
)
def test_a_net_that_does_not_fit_the_data_is_refused_before_training(data, model, why):
    with pytest.raises(InputError, match=why):
        fedp3.run(model(), data, **SETTINGS)


def test_labels_from_one_are_refused_by_what_the_net_can_say(data):
    x, y = data
    with pytest.raises(InputError, match="labels run from 0 to 2"):
        fedp3.run(net(), (x, y + 1), **SETTINGS)


def test_a_head_with_more_outputs_than_classes_is_trained_whole(data):
    """Such a net is small enough to be stacked, where only the classes would be in the softmax."""
    wide = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    result = fedp3.run(wide, data, plan={"layers": "full"}, prune={"keep": 1.0}, **SETTINGS)
    assert not result.experiment.recipe.chain
    before = result.experiment.start.W["2.bias"]
    assert bool((result.weights["2.bias"] != before).all()), "outputs without a class learn that they are wrong"


def test_a_device_that_is_not_there_is_refused(data):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(InputError, match="'cpu' always works"):
        fedp3.run(net(), data, **(SETTINGS | {"run": {"rounds": 1, "clients_per_round": 2, "device": "cuda"}}))


def test_fedcr_needs_a_net_with_a_code(data):
    with pytest.raises(InputError, match="stochastic code"):
        fedp3.run(net(), data, method="fedcr", **SETTINGS)


def test_workers_without_a_main_guard_end_in_one_sentence(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import fedp3, torch\n"
        "net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))\n"
        "data = torch.randn(80, 6), torch.arange(80) % 2\n"
        "fedp3.run(net, data, workers=2, partition={'kind': 'iid', 'clients': 4}, plan={'layers': 'full'},"
        " run={'rounds': 1, 'clients_per_round': 2})\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "no worker process could start" in done.stderr.splitlines()[-1]


def test_a_frozen_parameter_is_refused_and_a_net_can_be_given_again(data):
    mine = net()
    mine[0].requires_grad_(False)
    with pytest.raises(InputError, match=r"'0.weight' and 1 more of the model does not require a gradient"):
        fedp3.run(mine, data, **SETTINGS)
    mine.requires_grad_()
    for _ in range(2):  # the second time with what the first one left
        fedp3.run(mine, data, plan={"layers": "lowerb", "others": "freeze"}, **SETTINGS)


def test_own_layers_are_taken(data):
    own = {"body": ["0.weight", "0.bias", "2.weight", "2.bias"], "head": ["4.weight", "4.bias"]}
    result = fedp3.run(net(), data, layers=own, plan={"layers": "lowerb"}, **SETTINGS)
    assert list(result.experiment.problem.layers.layers) == ["body", "head"]


def test_the_public_names_are_these():
    assert sorted(fedp3.__all__) == ["Result", "__version__", "layer_map", "run"]
    assert all(getattr(fedp3, name) is not None for name in fedp3.__all__)
    with pytest.raises(AttributeError):
        _ = fedp3.nonsense


# --------------------------------------------------------------------------- going on with a net of one's own


def smooth() -> nn.Module:
    """A net whose clients are not stacked, so that it is the workbench."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize("method", ["fedper", "ditto"])
def test_a_run_goes_on_from_its_own_w0_whatever_the_net_holds_by_then(method, data, tmp_path):
    settings = SETTINGS | {"method": method, "run": {"rounds": 6, "clients_per_round": 1, "eval_every": 0}}
    whole = fedp3.run(smooth(), data, out=tmp_path / "whole", **settings)

    def stop(record):
        if record.t == 1:
            raise KeyboardInterrupt

    used = smooth()
    with pytest.raises(KeyboardInterrupt):
        fedp3.run(used, data, out=tmp_path / "r", on_round=stop, **settings)
    again = fedp3.run(used, data, out=tmp_path / "r", **settings)
    assert again.model_sha256 == whole.model_sha256 and again.accuracy == whole.accuracy


def test_a_run_stopped_in_its_first_round_begins_again_from_its_own_w0(data, tmp_path, monkeypatch):
    whole = fedp3.run(smooth(), data, **SETTINGS)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fedp3.driver.drive", killed)
        with pytest.raises(KeyboardInterrupt):
            fedp3.run(smooth(), data, out=tmp_path / "r", **SETTINGS)
    other = smooth()
    nn.init.zeros_(other[0].weight)
    assert fedp3.run(other, data, out=tmp_path / "r", **SETTINGS).model_sha256 == whole.model_sha256
    (tmp_path / "r" / "initial.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"cannot read .*initial\.safetensors"):
        fedp3.run(smooth(), data, out=tmp_path / "r", **SETTINGS)


def test_other_layers_or_another_scaling_are_refused_when_a_run_goes_on(data, tmp_path):
    pixels = fedp3.data.from_tensors(torch.arange(80 * 6, dtype=torch.uint8).view(80, 1, 2, 3), data[1])
    flat = nn.Sequential(nn.Flatten(), *net())
    fedp3.run(flat, pixels, out=tmp_path / "r", **SETTINGS)
    scaled = replace(pixels, mean=(0.1,), std=(0.3,))
    with pytest.raises(InputError, match="begun with other scaling"):
        fedp3.run(flat, scaled, out=tmp_path / "r", **SETTINGS)
    names = [n for n, _ in flat.named_parameters()]
    layers = {"all": names[:-2], "head": names[-2:]}
    with pytest.raises(InputError, match="begun with other layers"):
        fedp3.run(flat, pixels, out=tmp_path / "r", layers=layers, **SETTINGS)


# --------------------------------------------------------------------------- data and nets as people have them


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
        (TwoAnswers(), {}, "answers with a tuple"),
        (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), {"batch": 1}, "train on a batch of 1"),
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


def test_sections_named_data_and_model_can_be_set(data):
    result = fedp3.run(net(), data, data={"augment": False}, **SETTINGS)
    assert not result.experiment.config.data.augment


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
    assert "own data, iid" in page and "own net, " in page and "Run it again" not in page
    (tmp_path / "r" / "result.json").unlink()
    assert "Go on with it" not in result.report(tmp_path / "page.html").read_text(), "`fedp3 resume` would refuse"
