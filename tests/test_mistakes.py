"""Mistakes that users make, and the answer to each: a table for the shell and one for Python."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fedp3
from fedp3.cli import main
from fedp3.core.errors import InputError

TINY = ["model.width=0.02", "run.rounds=1", "run.clients_per_round=2", "local.steps=1"]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = 0
        try:
            main(list(arguments))
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    call("init", "my.toml")
    return call


# --------------------------------------------------------------------------- the shell

REFUSED = {
    "true for a number": (["run.rounds=true"], "[run] rounds: got true, want number of"),
    "false for a number": (["local.lr=false"], "[local] lr: got false"),
    "true in a list": (["prune.keep=[0.5, true]"], "[prune] keep: got true"),
    "an empty list of shares": (["prune.keep=[]"], "[prune] keep: the list is empty"),
    "nothing to train": (["local.steps=0"], "0 steps and 0 epochs train nothing"),
    "a keep file without a client": (["prune.keep=few.csv"], "it has no row for client 1"),
    "a keep file without a column": (["prune.keep=odd.csv"], "it has no column 'keep'"),
    "a share above one": (["prune.keep=1.5"], "[prune] keep"),
    "a negative rate": (["local.lr=-1"], "[local] lr"),
    "a key of another section": (["run.lr=1"], "unknown key 'lr'"),
    "another library's name": (["local.learning_rate=1"], "did you mean 'lr'?"),
    "an unknown section": (["fleet.memory=1"], "unknown section 'fleet'"),
    "no value": (["run.rounds"], "is not of the form section.key=value"),
    "an unknown method": (["method=fedavgg"], "fedavg"),
    "an unknown data set": (["data.name=mnits"], "mnist"),
    "too many participants": (["run.clients_per_round=21"], "21 of 20 clients"),
    "a text for a number": (["run.rounds=many"], "[run] rounds"),
    "a fraction for a count": (["run.rounds=1.5"], "[run] rounds"),
    "a fleet that nobody knows": (["devices.fleet=phnes"], "did you mean 'phones'?"),
    "a device that nobody knows": (["devices.fleet={'Pixl 3'=1.0}"], "did you mean 'Pixel 3'?"),
    "shares that do not add up": (["devices.fleet={'Pixel 3'=0.5}"], "add up to 0.5"),
    "a fleet file that is not there": (["devices.fleet=none.csv"], "none.csv cannot be read"),
    "a fleet file with holes": (["devices.fleet=holes.csv"], "no line for clients 1, 3"),
    "negative memory": (["devices.fleet=holes.csv"], "memory_mb is -5, want a number above 0"),
    "layers beside a planner": (
        ["devices.fleet=phones", "plan.layers=opu2"],
        "[plan] layers: 'opu2', but [devices] planner = 'auto' chooses it",
    ),
    "a share beside a planner": (
        ["devices.fleet=phones", "prune.keep=0.5"],
        "[prune] keep: 0.5, but [devices] planner = 'auto' chooses it",
    ),
    "a limit without devices": (
        ["devices.round_seconds=5"],
        "[devices] round_seconds: no devices are described",
    ),
    "auto without devices": (["plan.layers=auto"], "set [devices] fleet"),
    "a deadline without seconds": (
        ["devices.fleet=phones", "devices.round_end=deadline"],
        "'deadline' needs one; set round_seconds",
    ),
    "a deadline that nobody meets": (
        ["devices.fleet=phones", "devices.round_seconds=0.00001"],
        "the smallest change that helps one device: devices.round_seconds = ",
    ),
    "a deadline that nobody meets, with plans of the config": (
        [
            *("devices.fleet=phones", "devices.planner=manual", "method=fedavg"),
            *("devices.round_end=deadline", "devices.round_seconds=0.0001"),
        ],
        "no device can answer within 0.0001 seconds; the fastest takes ",
    ),
    "attention over stale updates": (
        ["devices.fleet=phones", "devices.round_end=buffered", "aggregate.rule=attention"],
        "[aggregate] rule: 'attention' weighs an update by where it is",
    ),
    "codes for devices under a plan of one's own": (
        ["devices.fleet=phones", "devices.planner=manual", "devices.codes=['ternary']"],
        "[devices] codes: chosen together with windows of layers, and this run chooses none",
    ),
    "codes for devices without devices": (
        ["devices.codes=['ternary']"],
        "[devices] codes: no devices are described",
    ),
    "codes for devices under LDP": (
        ["devices.fleet=phones", "devices.codes=['int8']", "privacy.enabled=true"],
        "[devices] codes: under LDP all devices have one code",
    ),
    "a sparse code for devices": (
        ["devices.fleet=phones", "devices.codes=['topk', 'int8']"],
        "[devices] codes: topk sends some coordinates",
    ),
    "a code for devices that nobody knows": (
        ["devices.fleet=phones", "devices.codes=['int7']"],
        "did you mean 'int8'",
    ),
    "a buffer larger than who computes": (
        ["devices.fleet=phones", "devices.round_end=buffered", "devices.buffer=50"],
        "[devices] buffer: 50 arrivals end a round, but only",
    ),
    "a trace that is not there": (
        ["devices.fleet=phones", "devices.bandwidth=nowhere"],
        "[devices] bandwidth: there is no file",
    ),
    "adapters without attention": (
        ["method=ffa-lora"],
        "[adapter] targets: no linear module is named like a projection of queries or values; the "
        "network has fc1, fc2, fc3, ffc",
    ),
    "adapters of nothing": (
        ["method=fedit", "adapter.targets=['qeury']"],
        "no linear module is named 'qeury'",
    ),
    "a rank above a width": (
        ["method=fedit", "adapter.targets=['fc2']", "adapter.rank=21"],
        "[adapter] rank: 21 is above the width of fc2, which has 20 inputs and 20 outputs",
    ),
    "an adapter of the head": (
        ["method=fedit", "adapter.targets=['ffc']", "adapter.rank=2"],
        "ffc is trained itself ([adapter] train)",
    ),
    "a rank without adapters": (["adapter.rank=4"], "[adapter] rank: there are no adapters"),
    "momentum over products": (
        ["method=flexlora", "aggregate.server=momentum"],
        "no optimizer, damping, recycling or interval can follow the mean",
    ),
    "a frozen layer that is not there": (
        ["model.frozen=['fc9']"],
        "[model] frozen: the network has no layer, module or tensor 'fc9'",
    ),
    "nothing left to train": (
        ["model.frozen=['fc1', 'fc2', 'fc3', 'ffc']"],
        "nothing is left to train",
    ),
    "a selection without gradients": (
        ["method=fedavg", "aggregate.select=2"],
        "set [hooks] exchange to 'norms', or select to 0",
    ),
    "gradients that nobody reads": (
        ["method=fedavg", "hooks.exchange=norms"],
        "'norms' is what [aggregate] select reads, and it is 0",
    ),
    "agreement on nothing": (
        ["method=fedavg", "aggregate.agreement=1"],
        "[aggregate] agreement: it is between clients that select layers",
    ),
    "a selection on a schedule": (
        ["method=selective", "plan.schedule=paced"],
        "a layer may be selected that is not due",
    ),
    "a selection within L_i": (
        ["method=selective", "plan.layers=opu2"],
        "set [plan] layers to 'full', or select to 0",
    ),
    "a selection of recycled layers": (
        ["method=selective", "aggregate.recycle=0.5"],
        "set recycle or select to 0",
    ),
    "norms under LDP": (
        ["method=selective", "privacy.enabled=true"],
        "the method's own tensors leave the client without noise",
    ),
    "an average over no rounds": (
        ["aggregate.average=0"],
        "[aggregate] average: should be greater than or equal to 1",
    ),
    "nodes in a simulation": (["devices.fleet=nodes"], "report what they are"),
    "no section": (["rounds=3"], "did you mean run.rounds=3?"),
    "no section, two homes": (["name=mnist"], "did you mean data.name=mnist or model.name=mnist?"),
    "no key": (["=3"], "is not of the form section.key=value"),
    "an empty key": (["run.=3"], "[run] unknown key ''"),
    "two dots": (["run..rounds=3"], "did you mean 'run'?"),
    "spaces around the sign": (["run.rounds", "=", "3"], "override '=' is not of the form"),
    "capital letters": (["data.name=CIFAR10"], "did you mean 'cifar10'?"),
    "a method in capital letters": (["method=FedP3"], "did you mean 'fedp3'?"),
    "no method": (["method="], "unknown method ''"),
    "a network without width": (["model.width=0"], "[model] width: should be greater than 0"),
    "an empty batch": (["local.batch=0"], "[local] batch: should be greater than or equal to 1"),
    "no rounds": (["run.rounds=0"], "[run] rounds: should be greater than or equal to 1"),
    "rounds in words": (["run.rounds=ten"], "[run] rounds: should be a valid integer"),
    "a decimal comma": (["local.lr=0,1"], "[local] lr: should be a valid number"),
    "a rate that is not a number": (["local.lr=nan"], "[local] lr: should be a finite number"),
    "an infinite rate": (["local.lr=inf"], "[local] lr: should be a finite number"),
    "a momentum of 2": (["local.momentum=2"], "[local] momentum: should be less than 1"),
    "a negative seed": (["run.seed=-1"], "[run] seed: should be greater than or equal to 0"),
    "no clients": (["partition.clients=0"], "[partition] clients"),
    "more clients than samples": (["partition.clients=100000"], "1797 samples among 100000"),
    "more classes than there are": (["partition.classes=11"], "is 11: want 1..10"),
    "a partition that nobody knows": (["partition.kind=irr"], "known: classes, dirichlet, iid"),
    "a split without a file": (["partition.file=none.json"], "none.json cannot be read"),
    "a concentration of 0": (
        ["partition.kind=dirichlet", "partition.alpha=0"],
        "[partition] alpha: should be greater than 0",
    ),
    "a rule that nobody knows": (["aggregate.rule=meen"], "unknown aggregation rule 'meen'"),
    "a code that nobody knows": (["upload.compress=int7"], "did you mean 'int8'"),
    "a selector with a slip": (["prune.selector=magnitud"], "did you mean 'magnitude'?"),
    "a network with a slip": (["model.name=resnet"], "did you mean 'resnet18'?"),
    "a percentage for a share": (["prune.keep=90"], "[prune] keep: got 90, want share"),
    "a share of 0": (["prune.keep=[0.5, 0]"], "[prune] keep: got [0.5, 0]"),
    "a folder for a file": (["prune.keep=."], "Is a directory"),
    "a device that torch does not have": (["run.device=gpu"], "cpu, cuda, cuda:1 or mps"),
    "a quorum that nobody reaches": (["run.quorum=50"], "more than the 2 participants"),
    "a negative epsilon": (
        ["privacy.enabled=true", "privacy.epsilon=-1"],
        "[privacy] epsilon: should be greater than 0",
    ),
    "a delta of 2": (["privacy.enabled=true", "privacy.delta=2"], "[privacy] delta"),
    "a clip of 0": (["privacy.enabled=true", "privacy.clip=0"], "[privacy] clip"),
    "a test part that is not there": (["data.test=official"], "has no test part of its own"),
    "a test part with a slip": (["data.test=offical"], "did you mean 'official'?"),
    "a test file of no text": (["data.test_path=a.txt"], "only read with name = 'text'"),
    "an official part of a text": (
        ["data.name=text", "data.path=few.csv", "data.test=official", "model.name=gpt"],
        "name a second file in test_path",
    ),
    "a transformer without a folder": (["model.name=hf"], "name = 'hf' needs a folder; set path"),
    "a folder for another network": (["model.path=x"], "[model] path: only read with name = 'hf'"),
    "a folder that is not there": (
        ["model.name=hf", "model.path=gone"],
        "[model] path: there is no folder gone",
    ),
    "a folder with a pickle": (
        ["model.name=hf", "model.path=pickled"],
        "has pytorch_model.bin and no model.safetensors; pickles can run code",
    ),
    "a model of another type": (
        ["model.name=hf", "model.path=other"],
        "has a model of type 'mamba', known: bert",
    ),
    "texts without a file": (["data.name=tsv"], "[data] path: name = 'tsv' needs a file"),
    "labels of another data set": (
        ["data.labels=['a']"],
        "[data] labels: only read with name = 'tsv'",
    ),
    "texts without a tokenizer": (
        ["data.name=tsv", "data.path=few.csv"],
        "name = 'tsv' needs a tokenizer.json",
    ),
    "heads of a network without attention": (
        ["prune.heads=true", "prune.selector=rolling"],
        "this network has no attention heads",
    ),
    "blocks of a network without any": (
        ["plan.layers=blocks-1", "plan.others=skip"],
        "this plan skips residual blocks, of which this network has none",
    ),
    "a schedule with a slip": (["local.schedule=cos"], "did you mean 'cosine'?"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_wrong_setting_is_refused_with_its_key_before_any_folder_is_made(
    mistake: str, shell: Any, tmp_path: Path
) -> None:
    (tmp_path / "few.csv").write_text("client,keep\n0,0.5\n")
    (tmp_path / "odd.csv").write_text("client,share\n0,0.5\n")
    (tmp_path / "holes.csv").write_text(
        "client,name,memory_mb\n0,Pixel 3,\n2,Pixel 3,-5\n"
        + "".join(f"{i},Pixel 3,\n" for i in range(4, 20))
    )
    for folder, kind in (("pickled", "bert"), ("other", "mamba")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    overrides, text = REFUSED[mistake]
    tiny = [o for o in TINY if o.split("=")[0] not in {x.split("=")[0] for x in overrides}]
    code, _, err = shell("run", "my.toml", *tiny, *overrides, "--out", "a")
    assert code == 2 and text in err, err
    assert not (tmp_path / "a").exists() and "Traceback" not in err


# Commands in a folder with a finished run "good", a file "file", a folder "folder", a damaged run
# "broken", and files that are no config: the answer has this text, the exit code is 2, and nothing
# new is written.
COMMANDS = {
    "a command with a slip": (["rnu", "my.toml"], "Did you mean 'run'?"),
    "an option for a setting": (["run", "my.toml", "--rounds", "3"], "No such option"),
    "no config": (["run", "none.toml"], "write one with: fedp3 init none.toml"),
    "a folder for a config": (["run", "folder"], "folder is a folder, want a TOML file"),
    "a run for its config": (["run", "good"], "did you mean good/config.toml?"),
    "YAML for TOML": (["run", "yaml.toml"], "yaml.toml is not TOML: Expected '='"),
    "a text without quotes": (["plan", "bare.toml"], "column 8); texts need quotes"),
    "bytes for TOML": (["plan", "bytes.toml"], "bytes.toml is not TOML"),
    "a file for a folder": (["run", "my.toml", *TINY, "--out", "file"], "cannot write to file"),
    "a folder in a file": (["run", "my.toml", *TINY, "--out", "file/a"], "cannot write to file/a"),
    "a run that is there": (["run", "my.toml", *TINY, "--out", "good"], "fedp3 resume good"),
    "an engine with a slip": (
        ["run", "my.toml", *TINY, "--engine", "flwr", "--out", "a"],
        "did you mean 'flower'?",
    ),
    "parts that are not there": (
        ["run", "my.toml", *TINY, "--use", "none.py", "--out", "a"],
        "none.py: cannot read it",
    ),
    "parts with an error": (
        ["run", "my.toml", *TINY, "--use", "error.py", "--out", "a"],
        "error.py failed: ZeroDivisionError",
    ),
    "fewer workers than none": (
        ["run", "my.toml", *TINY, "--workers", "-1", "--out", "a"],
        "--workers",
    ),
    "nothing to compare": (["compare"], "Missing argument"),
    "a run that is not there": (["compare", "good", "none"], "none is not a run folder"),
    "a percentage for a target": (["compare", "good", "--target", "80"], "a number from 0 to 1"),
    "a budget below 0": (["compare", "good", "--at-mb", "-1"], "is not in the range"),
    "a page that is a folder": (["report", "good", "--out", "folder"], "folder/report.html"),
    "a damaged run": (["report", "broken"], "broken/run.json was damaged"),
    "nothing to resume": (["resume", "folder"], "folder is not a run folder"),
    "a demo into a file": (["demo", "--out", "file"], "file is a file; choose a folder"),
    "a config that is there": (["init", "my.toml"], "overwrite it with --force"),
    "no methods": (["sweep", "my.toml", "--methods", ",", "--out", "a"], "--methods names none"),
    "one value to tune": (
        ["sweep", "my.toml", "--methods", "fedavg", "--tune", "local.lr=1", "--out", "a"],
        "at least two values",
    ),
    "a data set that nobody knows": (["data", "get", "nosuch"], "unknown data set 'nosuch'"),
    "nothing to audit": (["audit", "my.toml"], "set privacy.enabled=true"),
}


@pytest.mark.parametrize("mistake", COMMANDS)
def test_a_wrong_command_is_answered_and_writes_nothing(
    mistake: str, shell: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "yaml.toml").write_text("run:\n  rounds: 3\n")
    (tmp_path / "bare.toml").write_text("[data]\nname = mnist\n")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "error.py").write_text("1 / 0")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.toml").write_text("")
    (tmp_path / "broken" / "run.json").write_text("{")
    shell("run", "my.toml", *TINY, "--out", "good")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    command, text = COMMANDS[mistake]
    code, _, err = shell(*command)
    plain = " ".join(err.replace("│", " ").split())
    assert code == 2 and text in plain, err
    assert "Traceback" not in err and plain.lower().count("did you mean") <= 1
    after = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert after == before


def test_a_folder_with_other_files_is_not_used_for_a_run(shell: Any, tmp_path: Path) -> None:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "draft.tex").write_text("...")
    code, _, err = shell("run", "my.toml", *TINY, "--out", "papers")
    assert code == 2 and "it contains draft.tex; choose a new folder" in err
    assert [p.name for p in (tmp_path / "papers").iterdir() if p.name[0] != "."] == ["draft.tex"]
    (tmp_path / "empty").mkdir()
    assert shell("run", "my.toml", *TINY, "--out", "empty")[0] == 0


def test_divergence_is_told_once_after_the_round_in_which_it_shows(shell: Any) -> None:
    wild = ["local.lr=1e6", "run.rounds=3", "local.steps=4", "local.clip_norm=0"]
    _, _, err = shell("run", "my.toml", *TINY[:1], *wild, "--out", "a")
    assert err.count("Lower local.lr") == 1
    _, _, err = shell("run", "my.toml", *TINY, "--out", "b")
    assert "diverges" not in err


def test_a_layer_set_larger_than_the_network_is_said_to_be_the_full_one(shell: Any) -> None:
    _, out, err = shell("plan", "my.toml", *TINY, "plan.layers=opu9")
    assert "gives every client all 3 hidden layers" in out + err
    _, out, err = shell("plan", "my.toml", *TINY, "plan.layers=opu2")
    assert "gives every client all" not in out + err


def test_more_workers_than_cores_are_pointed_out(shell: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    _, _, err = shell("run", "my.toml", *TINY, "--workers", "2", "--out", "a")
    assert "2 workers share 1 cores" in err


def test_resume_with_other_settings_says_how_to_start_a_new_run(shell: Any) -> None:
    shell("run", "my.toml", *TINY, "--out", "a")
    code, _, err = shell("resume", "a", "local.lr=0.5")
    assert code == 2 and "fedp3 run a/config.toml local.lr=0.5 --out NEW_FOLDER" in err


def test_a_finished_run_without_its_record_is_not_reported_as_empty(
    shell: Any, tmp_path: Path
) -> None:
    shell("run", "my.toml", *TINY, "--out", "a")
    (tmp_path / "a" / "events.jsonl").unlink()
    code, _, err = shell("report", "a")
    assert code == 2 and "events.jsonl, the record of its rounds, is missing" in err


def test_a_data_folder_that_is_a_file_is_refused(
    shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").write_text("")
    monkeypatch.setenv("FEDP3_DATA", str(tmp_path / "data"))
    code, _, err = shell("data", "ls")
    assert code == 2 and "is a file: --data-dir and FEDP3_DATA name a folder" in err


def test_a_missing_extra_is_told_before_a_folder_is_made(
    shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = shell("run", "my.toml", *TINY, "--tensorboard", "--out", "a")
    assert code == 2 and "fedp3[tensorboard]" in err and not (tmp_path / "a").exists()


# --------------------------------------------------------------------------- Python

X, Y = torch.randn(60, 4), torch.arange(60) % 3


def net(classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, classes))


BAD_TOKEN = ((torch.tensor([41]), torch.tensor([2])), torch.tensor(25))


def tokens(count: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(count, 4), nn.Flatten(), nn.Linear(20, 3))


class Columns(Dataset[Any]):
    """Rows with named columns, as Hugging Face's data sets have."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        return {"x": X[i], "label": int(Y[i])}


class Net(nn.Module):
    """A class where an instance is wanted."""


def run(model: Any = None, data: Any = (X, Y), **settings: Any) -> Any:
    settings = {
        "partition": {"kind": "iid", "clients": 3},
        "run": {"rounds": 1, "clients_per_round": 0},
        "plan": {"layers": "full"},
        **settings,
    }
    return fedp3.run(net() if model is None else model, data, **settings)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a class": (lambda: run(Net), "is the class Net; pass an instance"),
    "a function": (lambda: run(lambda x: x), "is a function, want an nn.Module"),
    "a scripted net": (lambda: run(torch.jit.trace(net(), X[:2])), "is scripted"),
    "an exported net": (
        lambda: run(torch.export.export(net(), (X[:2],)).module()),
        "is exported, and can no longer be trained",
    ),
    "training and test data of each client": (
        lambda: run(data=[((X, Y), (X, Y)), ((X, Y), (X, Y))]),
        "the data of client 0 are a pair of data sets",
    ),
    "a client without samples": (
        lambda: run(data={"anna": (X, Y), "bob": (X[:0], Y[:0])}),
        "client 'bob': data set 'user' has no samples",
    ),
    "other clients than were passed": (
        lambda: run(data=[(X, Y), (X, Y)]),
        "partition={'clients': 3}: the data are those of 2 clients",
    ),
    "a budget of epsilon without any": (
        lambda: run(callbacks=[fedp3.stop_after(epsilon=4)]),
        "this run has no epsilon",
    ),
    "three tensors": (lambda: run(data=(X, Y, Y)), "3 values, want a pair"),
    "four tensors": (lambda: run(data=(X, Y, X, Y)), "pass ((x_train, y_train), (x_test, y_test))"),
    "two test sets": (
        lambda: run(data=((X, Y), (X, Y)), test=(X, Y)),
        "a pair (train, test), and test= is another test set",
    ),
    "an official part of one's own data": (
        lambda: fedp3.run(net(), (X, Y), **{"data": {"test": "official"}}),  # type: ignore[arg-type]
        "a test set of your own as test=",
    ),
    "a test set of another width": (
        lambda: run(test=(X[:, :3], Y)),
        "the central test set does not fit",
    ),
    "texts among numbers": (lambda: run(data=(X, ["a", 1, None] * 20)), "want texts only"),
    "a loader with its own batches": (
        lambda: run(data=DataLoader(TensorDataset(X, Y), collate_fn=lambda rows: rows)),
        "with a collate_fn of its own",
    ),
    "parts by name": (
        lambda: run(data={"train": (X, Y), "test": (X, Y)}),
        "pass (data['train'], data['test'])",
    ),
    "inputs by name without labels": (lambda: run(data={"x": X}), "as in {'anna': (x, y)"),
    "one-hot labels": (lambda: run(data=(X, torch.eye(3)[Y])), "pass y.argmax(1)"),
    "labels as a column": (lambda: run(data=(X, Y[:, None])), "pass y[:, 0]"),
    "labels of -1 and 1": (lambda: run(data=(X, 2 * (Y > 0).long() - 1)), "number them with"),
    "truth values as labels": (lambda: run(data=(X, Y > 0)), "pass y.long()"),
    "arrays to be read lazily": (lambda: run(lazy=True), "read row by row; these are arrays"),
    "rows without identifiers under LDP": (
        lambda: run(
            data=TensorDataset(X, Y), lazy=True, privacy={"enabled": True, "sample_rate": 0.3}
        ),
        "let the data set have `ids`",
    ),
    "labels from 1": (lambda: run(data=(X, Y + 1)), "pass y - 1"),
    "no function to call": (lambda: run(on_round=3), "on_round is an int"),
    "a function as a callback": (lambda: run(callbacks=[print]), "want a fedp3.Callback"),
    "a percentage as a target": (
        lambda: run(callbacks=[fedp3.stop_at(95)]),
        "want a share in (0, 1]",
    ),
    "no patience": (lambda: fedp3.stop_early(0), "an integer of at least 1"),
    "no budget": (lambda: fedp3.stop_after(), "at least one limit above 0"),
    "true for a number": (lambda: run(partition={"clients": True}), "got true"),
    "a named data set": (lambda: run(data_set=1), "data_set"),
    "a name beside the data": (
        lambda: fedp3.run(net(), (X, Y), **{"data": {"name": "mnist"}}),  # type: ignore[arg-type]
        "names a data set, and fedp3.run is passed one",
    ),
    "floats as labels": (lambda: run(data=(X, Y.float())), "labels of torch.float32"),
    "a value that is not finite": (lambda: run(data=(X / 0, Y)), "not finite"),
    "no x": (lambda: run(data=(None, Y)), "x is None, want a tensor"),
    "no data": (lambda: run(data=None), "want a map-style dataset"),
    "a path": (lambda: run(data="data.csv"), "read the file, and pass (x, y)"),
    "a generator": (lambda: run(data=(pair for pair in zip(X, Y, strict=True))), "map-style"),
    "no samples": (lambda: run(data=(X[:0], Y[:0])), "has no samples"),
    "fewer labels than samples": (lambda: run(data=(X, Y[:50])), "60 samples but labels"),
    "a sparse tensor": (lambda: run(data=(X.to_sparse(), Y)), "pass x.to_dense()"),
    "a tensor without values": (lambda: run(data=(X.to("meta"), Y)), "has no values"),
    "complex numbers": (lambda: run(data=(X.to(torch.complex64), Y)), "want real numbers"),
    "too few outputs": (lambda: run(net(2)), "want (2, k) with k >= 3 classes"),
    "samples of another width": (lambda: run(data=(X[:, :3], Y)), "cannot take samples of shape"),
    "a token that the network does not have": (
        lambda: run(tokens(20), data=(torch.randint(20, (60, 5)).index_put_(*BAD_TOKEN), Y)),
        "sample 41, which has the largest of all integers, 25",
    ),
    "a column that the network does not know": (
        lambda: run(data=Columns()),
        "columns of rows are passed by name",
    ),
    "a net without parameters": (lambda: run(nn.ReLU()), "no parameters to train"),
    "half precision": (lambda: run(net().half()), "call net.float() first"),
    "swapped arguments": (lambda: run((X, Y), net()), "is a tuple, want an nn.Module"),
    "an unknown section": (lambda: run(runs={"rounds": 1}), "did you mean 'run'?"),
    "a number for the section of a loader": (
        lambda: run(data=DataLoader(TensorDataset(X, Y), batch_size=4), local=5),
        "local=5: want a dict of settings",
    ),
    "a number for a section": (lambda: run(run=5), "should be a dictionary"),
    "another library's name": (lambda: run(local={"learning_rate": 1}), "did you mean 'lr'?"),
    "an engine that nobody knows": (lambda: run(engine="gpu"), "unknown engine 'gpu'"),
    "fewer workers than none": (lambda: run(workers=-1), "workers=-1"),
    "nothing to resume": (lambda: run(resume=True), "pass it as out="),
    "one file that is not there": (lambda: run(use="none.py"), "none.py: cannot read it"),
    "layers without tensors": (lambda: run(layers={"a": []}), "missing: 0.bias"),
    "more clients than samples": (
        lambda: run(partition={"kind": "iid", "clients": 100}),
        "60 samples among 100 clients",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_argument_is_an_input_error_that_says_what_to_do(mistake: str) -> None:
    call, text = WRONG[mistake]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing a network warns
        with pytest.raises(InputError) as error:
            call()
    assert text in str(error.value)
    assert len(str(error.value)) < 500, "no tensor is printed"


def test_divergence_is_a_warning_in_python() -> None:
    settings = {"local": {"lr": 1e3, "steps": 3, "clip_norm": 0}}
    with pytest.warns(UserWarning, match="training diverges"):
        run(data=(X * 100, Y), **settings)


class Broken(Dataset[Any]):
    """One row cannot be read."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        if i == 7:
            raise OSError("disk error")
        return X[i], int(Y[i])

    labels = Y


def test_a_client_that_fails_is_a_warning_and_counted_in_python() -> None:
    with pytest.warns(UserWarning, match=r"client \d failed in round 1, .* sample 7") as warned:
        result = run(data=Broken(), lazy=True, run={"rounds": 2, "clients_per_round": 0})
    assert len([w for w in warned if "failed in round" in str(w.message)]) == 1
    assert "2 updates rejected" in repr(result)


def test_a_test_set_may_have_a_class_that_no_client_has() -> None:
    result = fedp3.run(net(4), ((X, Y), (X, Y + 1)), run={"rounds": 1})
    assert result.scores["C"] is not None


def test_a_client_is_asked_for_by_name_or_number() -> None:
    partition = {"kind": "iid"}
    result = run(data={"anna": (X, Y), "bob": (X, Y)}, partition=partition)
    for a, b in zip(
        result.client_model("bob").parameters(), result.client_model(1).parameters(), strict=True
    ):
        assert torch.equal(a, b)
    for client in ("eve", True, 1.5):
        with pytest.raises(InputError, match="want a number from 0 to 1, or a name, such"):
            result.client_model(client)
