"""`fedp3.run` keeps the promises of the command line."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedp3
from fedp3.errors import ConfigError, InputError, PlanError

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
