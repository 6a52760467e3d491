"""Networks that leave a run: they are what the run scored, and load without fedp3."""

import json
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedp3
from fedp3.cli import main
from fedp3.core import files
from fedp3.core.errors import InputError, RunError
from fedp3.data import batch
from fedp3.experiment.experiment import Experiment
from fedp3.runs import export as exports
from fedp3.runs.networks import Trained, network, read_trained

SMALL = (
    *("partition.clients=6", "run.clients_per_round=3", "local.steps=3", "run.rounds=3"),
    "model.width=0.25",
)
CLIENT = 2
HALF = "prune.keep=0.5", "prune.selector=neuron", "model.name=cnn"
# methods that differ in what a client's network is
CASES: dict[str, tuple[str, ...]] = {
    "stacked": ("method=fedp3",),
    "masked": ("method=fedp3", "prune.keep=0.3", "model.name=cnn"),
    "fewer units": ("method=fedp3", *HALF),
    "sub-model": ("method=heterofl",),
    "dealt units": ("method=ist",),
    "layers in turn": ("method=fedp3-paced",),
    "coded downloads": ("method=fedp3", "download.compress=int8"),
    "fine-tuned": ("method=fedbabu",),
    "alone": ("method=local",),
    "personal head": ("method=fedper",),
    "two passes": ("method=fedrep",),
    "own model": ("method=ditto",),
    "module called code": ("method=fedcr",),
}


def command(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs by the name of their case, each trained when it is first needed."""
    place = tmp_path_factory.mktemp("runs")
    assert command("init", place / "my.toml") == 0

    class Lazy(dict[str, Path]):
        def __missing__(self, case: str) -> Path:
            folder = self[case] = place / case.replace(" ", "-")
            words = *SMALL, *CASES[case], "--out", folder
            assert command("run", place / "my.toml", *words) == 0
            return folder

    return Lazy()


def score(experiment: Experiment, net: nn.Module) -> float:
    data, test = experiment.client.data, experiment.shards[CLIENT].test
    with torch.no_grad():
        right = net(batch(data, test)).argmax(1) == data.y[test]
    return int(right.sum()) / len(test)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("what", "kind"), [("dispatched", "D"), ("personal", "P")])
def test_a_clients_network_has_the_accuracy_that_the_run_recorded(
    runs: dict[str, Path], case: str, what: str, kind: str
) -> None:
    run = read_trained(runs[case])
    final = files.read_json(runs[case] / "result.json")["final"]
    net = network(run, what, CLIENT)
    assert score(run.experiment, net) == final[kind]["clients"][str(CLIENT)]
    assert not net.training and all(w.requires_grad for w in net.parameters())


@pytest.mark.parametrize("case", CASES)
def test_the_global_network_has_the_hash_of_the_result(runs: dict[str, Path], case: str) -> None:
    result = fedp3.resume(runs[case])
    about = result.export(runs[case] / "export" / "hash", format="safetensors")
    assert about["weights_sha256"] == result.model_sha256
    weights = load_file(runs[case] / "export" / "hash" / "model.safetensors")
    assert all(torch.equal(w, result.weights[n]) for n, w in weights.items() if n in result.weights)


@pytest.mark.parametrize("case", ["fewer units", "sub-model"])
def test_a_client_with_pruned_units_gets_a_smaller_network(
    runs: dict[str, Path], case: str
) -> None:
    result = fedp3.resume(runs[case])
    net = result.client_model(CLIENT)
    count = sum(w.numel() for w in net.parameters())
    assert count < 0.8 * sum(w.numel() for w in result.model.parameters())
    assert score(result.experiment, net) == result.per_client[CLIENT]["D"]
    assert (
        score(result.experiment, result.client_model(CLIENT, "personal"))
        == (result.per_client[CLIENT]["P"])
    )
    assert all(
        m.weight.shape[0] == (m.out_features if isinstance(m, nn.Linear) else m.out_channels)
        for m in net.modules()
        if isinstance(m, nn.Linear | nn.Conv2d)
    ), "what a module says about itself is true"


def test_client_networks_are_copies(runs: dict[str, Path]) -> None:
    result = fedp3.resume(runs["fewer units"])
    first = result.client_model(CLIENT)
    before = {n: w.clone() for n, w in first.state_dict().items()}
    result.client_model(CLIENT, "personal")
    assert all(torch.equal(w, before[n]) for n, w in first.state_dict().items())


# --------------------------------------------------------------------------- files


def lines_of(folder: Path) -> str:
    """The Python code of an export's README."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return str(code)


def prepare(folder: Path, x: Tensor, net: nn.Module) -> None:
    """Write what the program of an export reads."""
    about = files.read_json(folder / "model.json")
    np.save(folder / "x.npy", x.numpy())
    torch.save(net, folder / "net.bin") if about["format"] == "safetensors" else None
    (folder / "lines.py").write_text(lines_of(folder))
    program = PROGRAM.format(
        sizes=SIZES,
        given=SAFETENSORS if about["format"] == "safetensors" else "",
        as_array=".numpy()" if about["format"] == "onnx" else "",
    )
    (folder / "program.py").write_text(program)


def outputs_of(folders: list[Path]) -> list[list[Tensor]]:
    """What the lines of READMEs compute for batches of `SIZES`, in one process without fedp3."""
    every = (
        "import os, runpy, sys\nfor f in sys.argv[1:]: os.chdir(f); runpy.run_path('program.py')"
    )
    names = [str(folder) for folder in folders]
    subprocess.run([sys.executable, "-W", "ignore", "-c", every, *names], check=True)
    return [
        [torch.from_numpy(np.load(folder / f"outputs-{size}.npy")) for size in SIZES]
        for folder in folders
    ]


SIZES = (1, 5, 90)
PROGRAM = """\
import numpy, sys, torch
samples = torch.from_numpy(numpy.load('x.npy'))
{given}
for size in {sizes}:
    x = samples[:size]{as_array}
    exec(open('lines.py').read())
    values = outputs if isinstance(outputs, numpy.ndarray) else outputs.detach().numpy()
    numpy.save(f'outputs-{{size}}.npy', values)
assert not any(name.startswith('fedp3') for name in sys.modules)
"""
# A network that the user builds, of the sizes that the README prints, with other values.
SAFETENSORS = """\
net = torch.load('net.bin', weights_only=False)
for w in net.parameters(): w.data.normal_()
"""


@pytest.mark.parametrize("format", ["pt2", "safetensors", "onnx"])
def test_the_lines_of_the_readme_compute_the_network(tmp_path: Path, format: str) -> None:
    if format == "onnx":
        pytest.importorskip("onnxruntime", reason="needs pip install 'fedp3[onnx]'")
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    )
    y = torch.arange(90) % 3
    x = torch.randn(90, 1, 8, 8, generator=torch.Generator().manual_seed(0)) + y.view(-1, 1, 1, 1)
    result = fedp3.run(
        net,
        (x, y),
        partition={"kind": "iid", "clients": 3},
        prune={"keep": 0.5, "selector": "neuron"},
        local={"steps": 3},
        run={"rounds": 2, "clients_per_round": 0},
    )
    models = {"global": result.model}
    models |= {what: result.client_model(1, what) for what in ("dispatched", "personal")}
    for what, model in models.items():
        client = None if what == "global" else 1
        about = result.export(tmp_path / what, what=what, client=client, format=format)
        assert about["difference"] <= 1e-5
        prepare(tmp_path / what, x, model)
    computed = outputs_of([tmp_path / what for what in models])
    for model, outputs in zip(models.values(), computed, strict=True):
        for size, got in zip(SIZES, outputs, strict=True):
            torch.testing.assert_close(got, model(x[:size]).detach(), rtol=1e-4, atol=1e-5)


def test_a_file_contains_none_of_the_records_it_was_traced_with(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = 77.25
    monkeypatch.setattr(exports, "made_up_records", lambda d, n, r: torch.full((n, 1, 8, 8), mark))
    exports.export(read_trained(runs["stacked"]), tmp_path / "e")
    archive = zipfile.ZipFile(tmp_path / "e" / "model.pt2")
    assert not [n for n in archive.namelist() if struct.pack("<f", mark) in archive.read(n)]


def test_an_export_that_computes_something_else_is_not_written(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(exports.FORMATS["pt2"], read=lambda path, net: lambda x: 1.01 * net(x))
    monkeypatch.setitem(exports.FORMATS._table, "pt2", wrong)
    with pytest.raises(RunError, match="computes something else"):
        exports.export(read_trained(runs["stacked"]), tmp_path / "e")
    assert not list(tmp_path.iterdir())


class Branching(nn.Module):
    """Which way it goes depends on values, which no exporter can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h if h.sum() > 0 else -h)


def test_a_network_that_cannot_be_traced_is_exported_as_tensors(tmp_path: Path) -> None:
    x, y = torch.randn(60, 6), torch.arange(60) % 2
    result = fedp3.run(Branching(), (x, y), method="fedavg", run={"rounds": 1})
    with pytest.raises(InputError, match="the format safetensors takes any network"):
        result.export(tmp_path / "e")
    assert not list(tmp_path.iterdir())
    result.export(tmp_path / "e", format="safetensors")


def test_checkpoints_load_in_the_two_lines_of_the_documentation(runs: dict[str, Path]) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "export.md"
    (code,) = re.findall(r"<!-- checkpoint -->\n```python\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line for line in code.splitlines() if line]
    assert len(lines) == 3, "an import and two lines"
    code = code.replace("runs/a/checkpoint/00000030", str(runs["stacked"] / "checkpoint/00000003"))
    names: dict[str, Any] = {}
    exec(code, names)
    want = fedp3.resume(runs["stacked"]).weights
    assert names["weights"].keys() == want.keys()
    assert all(torch.equal(w, want[n]) for n, w in names["weights"].items())


# --------------------------------------------------------------------------- the command


def refusal(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    capsys.readouterr()
    assert command("export", *words) == 2
    return capsys.readouterr().err


def test_the_command_says_what_it_wrote(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("export", runs["sub-model"], "--client", "2", "--out", tmp_path / "e") == 0
    printed = capsys.readouterr().out
    assert "of the global network" in printed and "README.md" in printed
    words = runs["sub-model"], "--client", "2", "--what", "personal", "--json"
    assert command("export", *words) == 0
    about = files.plain_json(json.loads(capsys.readouterr().out))
    assert about["what"] == "personal" and about["client"] == 2
    assert about["parameters"] < about["parameters_of_the_global_network"]
    assert (Path(about["out"]) / "model.pt2").exists() and "export" in about["out"]


def test_bad_input_is_answered_before_anything_is_written(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = runs["stacked"], tmp_path / "e"
    for words, text in {
        ("--client", "6"): "there is no client 6; the run has clients 0..5",
        ("--client", "-1"): "there is no client -1",
        ("--what", "personal"): "is that of one client; name one of 0..5",
        ("--what", "global", "--client", "1"): "is not that of client 1",
        ("--what", "persnal", "--client", "1"): "want one of: global, dispatched, personal",
        ("--format", "onx"): "unknown format 'onx' (did you mean 'onnx'?)",
    }.items():
        assert text in refusal(capsys, run, *words, "--out", out)
    assert not out.exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    assert "not an empty folder" in refusal(capsys, run, "--out", tmp_path / "full")
    assert "not a run folder" in refusal(capsys, tmp_path, "--out", out)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_missing_extra_is_named_before_the_run_is_read(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports.importlib.util, "find_spec", lambda name: None)
    text = refusal(capsys, runs["stacked"], "--format", "onnx")
    assert "pip install 'fedp3[onnx]'" in text


def as_deployed(run: Trained) -> Trained:
    return replace(run, deployed=True, clients={})


def test_what_is_on_nodes_is_not_the_servers_to_have(runs: dict[str, Path]) -> None:
    run = as_deployed(read_trained(runs["stacked"]))
    network(run, "global")
    network(run, "dispatched", CLIENT)
    with pytest.raises(InputError, match="is on its node, and not the server's to have"):
        network(run, "personal", CLIENT)
    with pytest.raises(InputError, match="layers of client 2 that never leave it"):
        network(as_deployed(read_trained(runs["personal head"])), "dispatched", CLIENT)


def test_a_folder_of_flower_is_recognised(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs["stacked"], tmp_path / "r")
    (tmp_path / "r" / "flower.json").write_text('{"run": "x"}')
    text = refusal(capsys, tmp_path / "r", "--client", "2", "--what", "personal")
    assert "not the server's to have" in text
    assert command("export", tmp_path / "r", "--client", "2") == 0


def test_personal_networks_are_outside_what_epsilon_covers(tmp_path: Path) -> None:
    x, y = torch.randn(120, 6), torch.arange(120) % 2
    result = fedp3.run(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)),
        (x, y),
        partition={"clients": 3},
        privacy={"enabled": True, "delta": 1e-3},
        run={"rounds": 1},
    )
    result.client_model(1)
    with pytest.raises(InputError, match="outside what epsilon covers"):
        result.client_model(1, "personal")


def test_several_seeds_and_runs_without_a_checkpoint_are_refused(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "seeds.json").write_text("{}")
    assert "name one of them" in refusal(capsys, tmp_path / "s")
    shutil.copytree(runs["stacked"], tmp_path / "r")
    for path in (tmp_path / "r" / "checkpoint").iterdir():
        path.unlink()
    assert "no intact checkpoint yet" in refusal(capsys, tmp_path / "r")


def test_the_readme_of_a_method_with_personal_layers_says_so(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    exports.export(read_trained(runs["personal head"]), tmp_path / "e", format="safetensors")
    text = (tmp_path / "e" / "README.md").read_text()
    assert "never uploaded" in text and "as they were before training" in text
