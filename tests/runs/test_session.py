"""One rule for existing run folders everywhere: run refuses them, resume continues them."""

from pathlib import Path

import pytest
import torch
from torch import nn

import fedp3
from fedp3.core import files
from fedp3.core.errors import InputError
from fedp3.core.files import locked
from fedp3.engines.catalogue import make_engine
from fedp3.experiment.assemble import assemble
from fedp3.runs import existing, run_folder, session

SMALL = ("partition.clients=4", "run.clients_per_round=2", "run.rounds=3", "model.width=0.02")
CONFIG = """
[partition]
clients = 4
[model]
width = 0.02
[run]
rounds = 3
clients_per_round = 2
"""
HOLDS = "holds a run already; continue it with: "


class Stop(Exception):
    pass


def train(folder: Path, *overrides: str, stop_after: int = 0, **options):
    def stop(record):
        if record.t + 1 == stop_after:
            raise Stop

    experiment = assemble(fedp3.make_config(*SMALL, *overrides))
    return session.train(
        experiment,
        folder,
        lambda experiment, states: make_engine(experiment, 1, states),
        watch=session.watch_with(stop),
        **options,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(params=[1, 0], ids=["stopped", "finished"])
def folder(request, tmp_path) -> Path:
    """A run folder, of a run that was stopped after its first round or is finished."""
    place = tmp_path / "run"
    if request.param:
        with pytest.raises(Stop):
            train(place, stop_after=request.param)
    else:
        train(place)
    return place


# --------------------------------------------------------------------------- the session


def test_a_session_refuses_an_existing_run_and_touches_nothing(folder):
    before = contents(folder)
    with pytest.raises(InputError, match=f"{HOLDS}fedp3 resume {folder}"):
        train(folder)
    with pytest.raises(InputError, match=f"{HOLDS}call it again"):
        train(folder, how_to_resume="call it again")
    assert contents(folder) == before


def test_a_session_continues_an_existing_run_on_request(folder, tmp_path):
    uninterrupted = train(tmp_path / "uninterrupted")
    resumed = train(folder, resume=True)
    assert resumed.result["model_sha256"] == uninterrupted.result["model_sha256"]
    assert [e["t"] for e in run_folder.read_events(folder)] == [0, 1, 2]


def test_without_a_run_resume_begins_one(tmp_path):
    resumed = train(tmp_path / "new", resume=True)
    assert resumed.result["model_sha256"] == train(tmp_path / "other").result["model_sha256"]


def test_a_folder_with_other_files_is_not_used_for_a_run(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"it contains notes\.txt; choose a new folder"):
        train(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_two_processes_cannot_begin_the_same_run(tmp_path, monkeypatch):
    """The other process begins after this one has looked, and before it has the lock."""
    place, real = tmp_path / "run", existing.holds_run
    looks = []

    def looked_too_early(folder: Path) -> bool:
        looks.append(folder)
        return len(looks) > 2 and real(folder)

    train(place)
    before = contents(place)
    monkeypatch.setattr(session, "holds_run", looked_too_early)
    with pytest.raises(InputError, match=HOLDS):
        train(place)
    assert contents(place) == before


def test_a_folder_that_another_process_writes_is_refused(tmp_path):
    with locked(tmp_path / "run"), pytest.raises(InputError, match="is being written by process"):
        train(tmp_path / "run")
    assert not existing.holds_run(tmp_path / "run")


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = train(None)
    assert outcome.result["out"] is None and not list(tmp_path.iterdir())


# --------------------------------------------------------------------------- the Python interface


def test_the_python_interface_follows_the_rule(tmp_path):
    y = torch.arange(60) % 2
    data = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), y
    settings = {
        "partition": {"kind": "iid", "clients": 3},
        "plan": {"layers": "full"},
        "run": {"rounds": 2, "clients_per_round": 0},
    }

    def net() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    first = fedp3.run(net(), data, out=tmp_path / "r", **settings)
    before = contents(tmp_path / "r")
    with pytest.raises(InputError, match=rf"{HOLDS}fedp3\.run\(\.\.\., resume=True\)"):
        fedp3.run(net(), data, out=tmp_path / "r", **settings)
    assert contents(tmp_path / "r") == before
    again = fedp3.run(net(), data, out=tmp_path / "r", resume=True, **settings)
    assert again.model_sha256 == first.model_sha256


def test_resume_of_the_python_interface_continues(folder, tmp_path):
    uninterrupted = train(tmp_path / "uninterrupted")
    assert fedp3.resume(folder).model_sha256 == uninterrupted.result["model_sha256"]


# --------------------------------------------------------------------------- the command line


def test_the_command_line_follows_the_rule(fedp3, tmp_path):
    (tmp_path / "my.toml").write_text(CONFIG)
    assert fedp3("run", "my.toml", "--out", "r")[0] == 0
    before = files.read_json(tmp_path / "r" / "result.json")
    code, _, err = fedp3("run", "my.toml", "--out", "r")
    assert code == 2 and f"{HOLDS}fedp3 resume r" in err
    assert fedp3("resume", "r")[0] == 0
    assert files.read_json(tmp_path / "r" / "result.json") == before


def test_several_seeds_follow_the_rule(fedp3, tmp_path):
    (tmp_path / "my.toml").write_text(CONFIG)
    seeds = ("run", "my.toml", "--out", "r", "--seeds", "2")
    assert fedp3(*seeds)[0] == 0
    hashes = [
        files.read_json(tmp_path / "r" / f"seed-{k}" / "result.json")["model_sha256"]
        for k in range(2)
    ]
    assert len(set(hashes)) == 2
    for command in (
        seeds,
        ("run", "my.toml", "--out", "r"),
        ("run", "my.toml", "--out", "r/seed-0"),
    ):
        code, _, err = fedp3(*command)
        assert code == 2 and HOLDS in err
    (tmp_path / "r" / "seed-1" / "result.json").unlink()  # as if it had been stopped at its end
    assert fedp3("resume", "r")[0] == 0
    again = files.read_json(tmp_path / "r" / "seed-1" / "result.json")["model_sha256"]
    assert again == hashes[1]


def test_a_folder_of_several_seeds_is_not_the_folder_of_a_run(tmp_path):
    existing.begin_seeds(fedp3.make_config(*SMALL), tmp_path / "r", 2)
    for resume in (False, True):
        with pytest.raises(InputError, match=f"{HOLDS}fedp3 resume"):
            train(tmp_path / "r", resume=resume)


def test_the_seeds_of_a_folder_are_recorded(tmp_path):
    settings = fedp3.make_config(*SMALL, "run.seed=7")
    existing.begin_seeds(settings, tmp_path / "r", 3)
    assert existing.recorded_seeds(tmp_path / "r") == (settings, 3)
    assert existing.recorded_seeds(tmp_path) is None
    configs = existing.seed_configs(settings, tmp_path / "r", 3)
    assert {p.name: c.run.seed for p, c in configs.items()} == {
        "seed-0": 7,
        "seed-1": 8,
        "seed-2": 9,
    }
