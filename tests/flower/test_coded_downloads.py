"""Nodes that store copies of published weights on their disks, and nodes that lose them."""

import time
from pathlib import Path

import pytest
import torch

from fedp3 import config
from fedp3.core.types import RejectionCode
from fedp3.engines.base import Engine, States
from fedp3.engines.catalogue import make_engine
from fedp3.engines.flower.client_app import client_app, configured, configured_node
from fedp3.engines.flower.grid import Roster, Wire, over
from fedp3.engines.flower.records import frame_of
from fedp3.experiment.assemble import assemble
from fedp3.experiment.experiment import Experiment
from fedp3.messages.framing import payload_size
from fedp3.runs.session import run_rounds
from fedp3.server.rounds import run_round
from flower.fakes import FakeGrid, in_a_run

CLIENTS = 4
RUN = "cd" * 16
SMALL = [
    *("method=fedavg", "model.width=0.02", f"partition.clients={CLIENTS}", "run.rounds=5"),
    *("run.clients_per_round=3", "local.steps=2", "run.seed=2"),
]
CODES = ["upload.compress=ternary", "download.compress=ternary"]
ENTROPY = ["upload.entropy=true", "download.entropy=true"]
CASES = {
    "ternary": CODES,
    "entropy": [*CODES, *ENTROPY],
    "sub-models": ["method=heterofl", "prune.keep=[1.0, 0.5]", *CODES, *ENTROPY],
    "largest weights": ["method=fiarse", "prune.keep=[1.0, 0.5]", *CODES],
    "personal head": ["method=fedper", *CODES],
}


@pytest.fixture(autouse=True)
def _in_a_run():
    with in_a_run():
        yield


def made(*more: str) -> Experiment:
    return assemble(config.parse({}, [*SMALL, *more]))


def grid_of(experiment: Experiment, folder: Path) -> FakeGrid:
    nodes = [{"partition-id": i, "folder": str(folder / f"client-{i}")} for i in range(CLIENTS)]
    return FakeGrid(client_app(configured_node(experiment.config)), nodes)


def engine_over(grid: FakeGrid, experiment: Experiment, states: States | None = None) -> Engine:
    wire = Wire(
        spec=experiment.server.spec,
        digest=experiment.config.digest(),
        run=RUN,
        rest=lambda: time.sleep(0.001),
    )
    return over(grid, wire, Roster(), states)


def files_of(folder: Path, client: int) -> list[Path]:
    return sorted((folder / f"client-{client}" / "runs" / RUN).iterdir())


@pytest.mark.parametrize("case", CASES)
def test_nodes_with_copies_on_disk_end_at_the_bits_and_bytes_of_a_run_in_process(
    case: str, tmp_path: Path
) -> None:
    experiment = made(*CASES[case])
    here = run_rounds(experiment, make_engine(experiment, 1)).result
    grid = grid_of(experiment, tmp_path)
    there = run_rounds(experiment, engine_over(grid, experiment)).result
    for key in ("model_sha256", "final", "mb_up", "mb_down", "rejected"):
        assert there[key] == here[key], key
    sent = [payload_size(frame_of(m.content)) for m in grid.seen if _trains(m)]
    assert sum(sent) / 1e6 == pytest.approx(there["mb_down"], abs=1e-9), "what is sent is counted"
    assert all(len(files_of(tmp_path, i)) <= 2 for i in range(CLIENTS)), "copies are bounded"


def _trains(message: object) -> bool:
    return message.metadata.message_type == "train"  # type: ignore[attr-defined]


@pytest.mark.parametrize("damage", ["wiped", "changed"])
def test_a_node_that_lost_its_copy_says_so_and_is_sent_one(damage: str, tmp_path: Path) -> None:
    experiment = made(*CODES, "run.clients_per_round=0")
    engine = engine_over(grid_of(experiment, tmp_path), experiment)
    state, _ = run_round(experiment.server, experiment.start, engine.execute)
    (file,) = files_of(tmp_path, 1)
    if damage == "wiped":
        file.unlink()
    else:
        _change_a_weight(file)
    state, record = run_round(experiment.server, state, engine.execute)
    assert record.accepted == (0, 2, 3)
    assert record.rejected[1].code is RejectionCode.COPY
    assert "does not hold the weights that the task changes" in record.rejected[1].text
    steady = record.bytes_down
    state, record = run_round(experiment.server, state, engine.execute)
    assert record.accepted == (0, 1, 2, 3), "it was sent a copy"
    assert record.bytes_down > steady, "which is counted"
    _, record = run_round(experiment.server, state, engine.execute)
    assert record.accepted == (0, 1, 2, 3) and record.bytes_down == steady


def _change_a_weight(file: Path) -> None:
    """Change one number of a stored copy, and leave everything else as it was."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(file, framework="pt") as opened:
        about = opened.metadata()
        tensors = {n: opened.get_tensor(n) for n in opened.keys()}  # noqa: SIM118
    n = next(n for n in tensors if n.startswith("copy/"))
    tensors[n] = tensors[n] + torch.ones_like(tensors[n])
    save_file(tensors, file, about)


def test_a_node_that_lost_a_personal_head_is_not_started_anew(tmp_path: Path) -> None:
    experiment = made("method=fedper", *CODES, "run.clients_per_round=0")
    engine = engine_over(grid_of(experiment, tmp_path), experiment)
    state, _ = run_round(experiment.server, experiment.start, engine.execute)
    files_of(tmp_path, 1)[0].unlink()
    state, record = run_round(experiment.server, state, engine.execute)
    assert record.rejected[1].code is RejectionCode.COPY
    _, record = run_round(experiment.server, state, engine.execute)
    assert 1 in record.rejected, "its personal layer is gone, and is not replaced silently"


def test_a_simulation_that_is_resumed_sends_copies_and_ends_at_the_same_bits() -> None:
    experiment = made(*CODES, "upload.entropy=true")
    here = run_rounds(experiment, make_engine(experiment, 1)).result

    def engine(states: States) -> Engine:
        app = client_app(configured(experiment.config), state_in_message=True)
        nodes = [{"partition-id": i} for i in range(CLIENTS)]
        return engine_over(FakeGrid(app, nodes), experiment, states)

    states, state = States(), experiment.start
    first = engine(states)
    down = 0
    for _ in range(2):
        state, record = run_round(experiment.server, state, first.execute)
        down += record.bytes_down
    second = engine(states)  # without the copies of the first
    for _ in range(3):
        state, record = run_round(experiment.server, state, second.execute)
        down += record.bytes_down
    from fedp3.core.hashing import model_sha256

    assert model_sha256(state.W) == here["model_sha256"]
    assert down / 1e6 == pytest.approx(here["mb_down"])
