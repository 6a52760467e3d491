"""Callbacks: what they are called with, how they stop a run, and what other programs get to see."""

import io
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

import fedp3
from fedp3.core import files
from fedp3.core.errors import InputError
from fedp3.core.hashing import model_sha256
from fedp3.runs import callbacks, progress
from fedp3.runs.history import History
from fedp3.runs.run_folder import as_event

ROUNDS = 6


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.arange(80) % 2
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(0)) + 2 * y[:, None]
    return x, y


def run(data: Any, *calls: fedp3.Callback, **changes: Any) -> fedp3.Result:
    settings: dict[str, Any] = {
        "partition": {"kind": "iid", "clients": 4},
        "local": {"steps": 2, "lr": 0.1},
        "run": {"rounds": ROUNDS, "clients_per_round": 2, "eval_every": 1},
    }
    return fedp3.run(net(), data, callbacks=calls, **{**settings, **changes})


def after(rounds: int) -> fedp3.Callback:
    return fedp3.Callback(stop=lambda history: "enough" if len(history) >= rounds else None)


# --------------------------------------------------------------------------- stopping


def test_a_stopped_run_returns_a_result_that_says_why(data: Any) -> None:
    result = run(data, after(2))
    assert result.outcome.result["stopped"] == "enough" and len(result.history) == 2
    assert result.accuracy["G"] is not None and result.accuracy["P"] is not None
    assert repr(result).endswith("stopped: enough>") and "\n" not in repr(result)
    assert "enough" in result._repr_html_()
    whole = run(data)
    assert whole.outcome.result["stopped"] is None and "stopped" not in repr(whole)


def test_a_stopped_run_is_recorded_and_resumes_at_the_same_bits(data: Any, tmp_path: Path) -> None:
    run(data, after(2), out=tmp_path / "r")
    recorded = files.read_json(tmp_path / "r" / "result.json")
    assert recorded["stopped"] == "enough" and recorded["rounds"] == 2
    again = run(data, out=tmp_path / "r", resume=True)
    assert again.model_sha256 == run(data).model_sha256
    assert files.read_json(tmp_path / "r" / "result.json")["stopped"] is None


def test_a_reason_that_still_holds_does_not_train_another_round(data: Any, tmp_path: Path) -> None:
    """The cell of a notebook can be run again."""
    first = run(data, after(2), out=tmp_path / "r")
    ended: list[Any] = []
    again = run(
        data, after(2), fedp3.Callback(on_end=ended.append), out=tmp_path / "r", resume=True
    )
    assert len(again.history) == 2 and again.model_sha256 == first.model_sha256 and not ended
    assert len(run(data, after(4), out=tmp_path / "r", resume=True).history) == 4


def test_a_run_is_not_stopped_in_its_last_round(data: Any) -> None:
    assert run(data, after(ROUNDS)).outcome.result["stopped"] is None


def test_a_stopped_run_is_charged_for_its_rounds_only(data: Any, tmp_path: Path) -> None:
    ldp = {"enabled": True, "epsilon": 8.0, "sample_rate": 0.2, "delta": 1e-3}
    result = run(data, after(2), out=tmp_path / "r", privacy=ldp)
    assert result.accuracy["P"] is None
    charges = (tmp_path / "r" / "ledger.jsonl").read_text().splitlines()
    assert {json.loads(line)["released"] for line in charges} == {"update"} and len(charges) == 4


def test_the_order_and_arguments_of_calls(data: Any, tmp_path: Path) -> None:
    seen: list[Any] = []
    call = fedp3.Callback(
        on_begin=lambda start: seen.append(("begin", len(start.history), start.folder)),
        on_round=lambda record: seen.append(("round", record.t)),
        on_model=lambda rounds, W: seen.append(("model", rounds, model_sha256(W))),
        stop=lambda history: seen.append(("stop", len(history))),
        on_end=lambda result: seen.append(("end", None if result is None else result["rounds"])),
    )
    result = run(data, after(2), call, out=tmp_path / "r")
    assert seen[0] == ("begin", 0, tmp_path / "r") and seen[-1] == ("end", 2)
    models = [call for call in seen if call[0] == "model"]
    assert [rounds for _, rounds, _ in models] == [1, 2] and models[0][2] != models[1][2]
    assert models[1][2] == result.model_sha256
    assert seen[1:-1] == [("round", 0), models[0], ("stop", 1), ("round", 1), models[1]]
    seen.clear()
    run(data, call, out=tmp_path / "r", resume=True)
    assert seen[:2] == [("stop", 2), ("begin", 2, tmp_path / "r")]


def test_an_error_ends_the_run_without_a_result(data: Any) -> None:
    ended: list[Any] = []

    def fail(record: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(data, fedp3.Callback(on_round=fail), fedp3.Callback(on_end=ended.append))
    assert ended == [None]


@pytest.mark.parametrize("wrong", [3, [print], ["x"], {"stop": 1}])
def test_what_is_no_callback_is_refused_before_training(data: Any, wrong: Any) -> None:
    with pytest.raises(InputError, match="callbacks"):
        fedp3.run(net(), data, callbacks=wrong)


# --------------------------------------------------------------------------- when to stop


def history(scores: list[float | None], **columns: list[float]) -> History:
    events = []
    for t, score in enumerate(scores):
        event: dict[str, Any] = dict.fromkeys(("G", "D", "P", "loss", "epsilon", "client_epsilon"))
        event |= {"t": t, "void": False, "accepted": [], "late": [], "rejected": {}}
        event |= {"bytes_up": 1e6, "bytes_down": 2e6, "seconds": 1.5}
        event |= {name: column[t] for name, column in columns.items()}
        event["G"] = None if score is None else {"mean": score}
        events.append(event)
    return History(events)


def reason(callback: fedp3.Callback, scores: list[float | None], **columns: Any) -> str | None:
    assert callback.stop is not None
    return callback.stop(history(scores, **columns))


Scores = st.lists(st.none() | st.floats(0, 1), max_size=12)


@given(Scores, st.integers(1, 4), st.sampled_from([0.0, 0.1]))
def test_early_stopping_agrees_with_a_plain_loop(
    scores: list[float | None], patience: int, gain: float
) -> None:
    evaluated = [score for score in scores if score is not None]
    # Not better: at no later evaluation is there a gain over the best accepted so far.
    best, worse = None, 0
    for score in evaluated:
        if best is None or score > best + gain:
            best, worse = score, 0
        else:
            worse += 1
    assert bool(reason(fedp3.stop_early(patience, gain), scores)) == (worse >= patience)


@given(Scores, st.floats(0.01, 1))
def test_a_target_counts_only_the_last_evaluation(scores: list[float | None], goal: float) -> None:
    evaluated = [score for score in scores if score is not None]
    assert bool(reason(fedp3.stop_at(goal), scores)) == bool(evaluated and evaluated[-1] >= goal)


def test_budgets_end_a_run_with_the_round_that_reaches_them() -> None:
    assert reason(fedp3.stop_after(mb=6), [None]) is None
    assert "6 MB" in str(reason(fedp3.stop_after(mb=6), [None, None]))
    assert reason(fedp3.stop_after(seconds=3.1), [None, None]) is None
    assert "seconds" in str(reason(fedp3.stop_after(seconds=3), [None, None]))
    spent = fedp3.stop_after(epsilon=2, mb=100)
    assert reason(spent, [None], epsilon=[1.9]) is None
    assert "epsilon" in str(reason(spent, [None], epsilon=[2.0]))
    assert "epsilon" in str(reason(spent, [None], client_epsilon=[2.5]))
    assert reason(spent, []) is None, "no round, nothing spent"


@pytest.mark.parametrize(
    "make",
    [
        lambda: fedp3.stop_at(float("nan")),
        lambda: fedp3.stop_at(0.9, kind="X"),  # type: ignore[arg-type]
        lambda: fedp3.stop_early(0),
        lambda: fedp3.stop_early(True),
        lambda: fedp3.stop_early(2, min_gain=-1),
        lambda: fedp3.stop_early(2, min_gain=float("nan")),
        lambda: fedp3.stop_after(),
        lambda: fedp3.stop_after(mb=-1),
        lambda: fedp3.stop_after(seconds=float("nan")),
    ],
)
def test_limits_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(InputError):
        make()


# --------------------------------------------------------------------------- other programs


def test_tensorboard_gets_every_round(data: Any, tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = run(data, fedp3.log_to_tensorboard(tmp_path / "t"))
    events = reader.EventAccumulator(str(tmp_path / "t"))
    events.Reload()
    curve = [(e.step, pytest.approx(e.value)) for e in events.Scalars("accuracy/G")]
    assert [(row["round"], row["G"]) for row in result.history] == curve
    assert "train/loss" in events.Tags()["scalars"]


def test_mlflow_gets_config_rounds_and_result(
    data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs pip install 'fedp3[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    result = run(data, fedp3.log_to_mlflow("mine", run_name="first"))
    client = mlflow.MlflowClient()
    (logged,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert logged.info.run_name == "first" and logged.info.status == "FINISHED"
    assert logged.data.params["run.rounds"] == str(ROUNDS)
    assert logged.data.metrics["final/accuracy_global"] == result.accuracy["G"]
    curve = client.get_metric_history(logged.info.run_id, "accuracy/G")
    assert [m.step for m in curve] == list(range(1, ROUNDS + 1))
    assert [m.value for m in curve] == result.history.column("G")
    with pytest.raises(RuntimeError):
        run(data, fedp3.log_to_mlflow("mine"), fedp3.Callback(on_round=_fail))
    statuses = {r.info.status for r in client.search_runs([logged.info.experiment_id])}
    assert statuses == {"FINISHED", "KILLED"} and mlflow.active_run() is None


def _fail(record: Any) -> None:
    raise RuntimeError


def test_weights_and_biases_gets_config_rounds_and_result(
    data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real package in its offline mode, which writes what it would send to a file."""
    wandb = pytest.importorskip("wandb", reason="needs pip install 'fedp3[wandb]'")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged: list[tuple[Mapping[str, float], int]] = []
    log = wandb.sdk.wandb_run.Run.log

    def spy(self: Any, values: Mapping[str, float], step: int) -> None:
        logged.append((values, step))
        log(self, values, step=step)

    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log", spy)
    sink = fedp3.log_to_wandb("mine", mode="offline", dir=str(tmp_path), name="first")
    result = run(data, sink)
    assert [step for _, step in logged] == list(range(1, ROUNDS + 1))
    assert [values["accuracy/G"] for values, _ in logged] == result.history.column("G")
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    wanted = (b"accuracy/G", b"run.rounds", b"final/accuracy_global")
    for _ in range(300):  # its own process writes the file, some time after `finish`
        if all(name in written.read_bytes() for name in wanted):
            break
        time.sleep(0.1)
    assert [name in written.read_bytes() for name in wanted] == [True] * 3


def test_a_program_that_is_not_installed_is_named_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callbacks.importlib.util, "find_spec", lambda name: None)
    for make, extra in (
        (lambda: fedp3.log_to_tensorboard("x"), "tensorboard"),
        (fedp3.log_to_mlflow, "mlflow"),
        (fedp3.log_to_wandb, "wandb"),
    ):
        with pytest.raises(InputError, match=rf"pip install 'fedp3\[{extra}\]'"):
            make()


# --------------------------------------------------------------------------- the bar


def shown(data: Any, width: int, **options: Any) -> str:
    """What the bar of a run shows in a terminal of this width."""
    screen = Console(file=io.StringIO(), width=width, force_terminal=True)
    with progress.rounds(screen, "fedp3", ROUNDS) as on_round:
        run(data, fedp3.Callback(on_round=on_round), **options)
    file = screen.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_narrow_terminal_shows_bar_rounds_and_time(data: Any) -> None:
    ldp = {"enabled": True, "epsilon": 8.0, "sample_rate": 0.2, "delta": 1e-3}
    last = [line for line in shown(data, 80, privacy=ldp).splitlines() if f"/{ROUNDS}" in line][-1]
    assert f"{ROUNDS}/{ROUNDS}" in last and "━━━" in last and "0:00:0" in last and "G " in last


def test_a_notebook_gets_a_bar_and_a_file_a_line_for_each_round(data: Any) -> None:
    assert progress.can_show_a_bar(Console(force_jupyter=True))
    assert progress.can_show_a_bar(Console(force_terminal=True))
    plain = Console(file=io.StringIO())
    assert not progress.can_show_a_bar(plain)
    with progress.rounds(plain, "fedp3", ROUNDS) as on_round:
        run(data, fedp3.Callback(on_round=on_round))
    assert isinstance(plain.file, io.StringIO)
    assert plain.file.getvalue().count("\n") == ROUNDS


def test_python_code_in_a_pipe_shows_nothing_unless_asked(
    data: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    run(data)
    run(data, progress=False)
    assert capfd.readouterr() == ("", "")
    run(data, progress=True)
    assert capfd.readouterr().err.count("round") == ROUNDS


def test_totals_on_a_resumed_bar_include_earlier_rounds(data: Any) -> None:
    events: list[dict[str, Any]] = []
    run(data, fedp3.Callback(on_round=lambda record: events.append(as_event(record))))
    screen = Console(file=io.StringIO(), width=200, force_terminal=False)
    records: list[Any] = []
    run(data, fedp3.Callback(on_round=records.append))
    with progress.rounds(screen, "fedp3", ROUNDS, events[:-1]) as on_round:
        on_round(records[-1])
    accepted = sum(len(event["accepted"]) for event in events)
    assert isinstance(screen.file, io.StringIO)
    assert f"ok {accepted} " in screen.file.getvalue()


os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # MLflow looks for git
