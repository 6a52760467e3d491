"""Runs with other objectives, inputs and data than images with labels."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset

import fedp3
from fedp3.client.objectives import OBJECTIVES, Objective, ratio
from fedp3.core.errors import DataError, InputError
from fedp3.core.scores import ACCURACY, Score, score_of
from fedp3.core.types import ClientUpdate
from fedp3.node.account import noisy_scores
from fedp3.report.runs import load_runs
from fedp3.report.targets import first_at
from fedp3.runs.session import stops_early
from fedp3.runs.tuning import validate
from fedp3.server.evaluation import scores

RNG = torch.Generator().manual_seed(0)
X = torch.randn(80, 3, generator=RNG)
Y = X @ torch.tensor([[1.0], [-2.0], [0.5]])
QUICK = {"partition": {"clients": 4}, "run": {"rounds": 3, "clients_per_round": 0, "eval_every": 1}}


def mlp(outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, outputs))


class Embedded(nn.Module):
    """A network on padded tokens, as Hugging Face's models are called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(9, 6), nn.Linear(6, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        real = attention_mask[..., None].float()
        mean = (self.embed(input_ids) * real).sum(1) / real.sum(1).clamp(min=1)
        logits: Tensor = self.out(mean)
        return logits


TOKENS = torch.randint(9, (60, 5), generator=RNG)
MASK = (torch.arange(5) < torch.randint(1, 6, (60, 1), generator=RNG)).long()
LABELS = torch.arange(60) % 3
ROWS = [
    {"input_ids": t, "attention_mask": m, "label": int(l), "text": "some text"}
    for t, m, l in zip(TOKENS.tolist(), MASK.tolist(), LABELS, strict=True)
]


class Rows(TorchDataset[Any]):
    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


def sha(data: Any, **more: Any) -> str:
    return fedp3.run(Embedded(), data, **QUICK, **more).model_sha256


# --------------------------------------------------------------------------- inputs


def test_dicts_tuples_and_rows_of_the_same_samples_train_to_the_same_bits() -> None:
    named = {"input_ids": TOKENS, "attention_mask": MASK}
    pairs = [((t, m), int(l)) for t, m, l in zip(TOKENS, MASK, LABELS, strict=True)]
    assert (
        sha((named, LABELS)) == sha(((TOKENS, MASK), LABELS)) == sha(Rows(ROWS)) == sha(Rows(pairs))
    )


def test_padding_that_the_network_ignores_changes_no_bit() -> None:
    other = torch.where(MASK == 1, TOKENS, 0)
    a, b = ({"input_ids": t, "attention_mask": MASK} for t in (TOKENS, other))
    trained = [fedp3.run(Embedded(), (x, LABELS), **QUICK).weights["out.weight"] for x in (a, b)]
    assert torch.equal(*trained)


def test_several_inputs_give_the_same_bits_over_processes_and_after_a_resume(
    tmp_path: Path,
) -> None:
    data = ({"input_ids": TOKENS, "attention_mask": MASK}, LABELS)
    expected = sha(data)
    assert sha(data, workers=2) == expected

    class Stop(Exception):
        pass

    def stop(record: fedp3.RoundRecord) -> None:
        if record.t == 1:
            raise Stop

    with pytest.raises(Stop):
        sha(data, out=tmp_path / "run", on_round=stop)
    assert sha(data, out=tmp_path / "run", resume=True) == expected
    changed = ({"input_ids": TOKENS, "attention_mask": 1 - MASK}, LABELS)
    with pytest.raises(InputError, match="other data"):
        sha(changed, out=tmp_path / "run", resume=True)


def test_a_list_has_the_data_of_each_client() -> None:
    parts = [(X[:10], Y[:10]), (X[10:50], Y[10:50]), (X[50:], Y[50:])]
    run = {**QUICK["run"], "rounds": 1}
    result = fedp3.run(mlp(), parts, objective="regression", run=run)
    shards = result.experiment.shards
    for i, (low, high) in enumerate([(0, 10), (10, 50), (50, 80)]):
        own = torch.cat([shards[i].train, shards[i].test]).sort().values
        assert torch.equal(own, torch.arange(low, high))
    as_sets = [fedp3.from_tensors(x, y, labelled=False) for x, y in parts]
    again = fedp3.run(mlp(), as_sets, objective="regression", run=run)
    assert again.model_sha256 == result.model_sha256


def test_clients_whose_data_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(DataError, match="samples of client 1 have the shapes"):
        fedp3.run(mlp(), [(X, Y), (X[:, :2], Y)], objective="regression")


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([{"input_ids": [1, 2]}], "none of labels and label is the target"),
        ([{"text": "a", "label": 1}], "no numbers as inputs"),
        (
            [{"input_ids": [1], "label": 0}, {"input_ids": [1, 2], "label": 0}],
            "texts by padding",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: list[Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        fedp3.from_torch(Rows(rows))


# --------------------------------------------------------------------------- objectives


def absolute(outputs: Tensor, batch: fedp3.Batch) -> Tensor:
    return (outputs - batch.y).abs().mean(1)


MINE = Objective(loss=absolute, score=Score("MAE", True), metrics={"MAE": ratio("test_loss")})


def test_an_objective_of_ones_own_trains_scores_and_resumes(tmp_path: Path) -> None:
    result = fedp3.run(mlp(), (X, Y), objective=MINE, out=tmp_path / "a", **QUICK)
    G = result.history.column("G")
    assert G[-1] < G[0] and result.scores["G"] == G[-1]
    assert "MAE" not in repr(result) and f"{G[-1]:.3f}" in repr(result)
    again = fedp3.run(mlp(), (X, Y), objective=MINE, out=tmp_path / "a", resume=True, **QUICK)
    assert again.model_sha256 == result.model_sha256
    assert fedp3.run(mlp(), (X, Y), objective=MINE, workers=2, **QUICK).model_sha256 == (
        result.model_sha256
    )
    with pytest.raises(InputError, match="are not in it"):
        fedp3.resume(tmp_path / "a")


def test_the_folder_names_the_score_and_its_direction(tmp_path: Path) -> None:
    fedp3.run(mlp(), (X, Y), objective="regression", out=tmp_path / "r", **QUICK)
    about, result = (
        json.loads((tmp_path / "r" / f).read_text()) for f in ("run.json", "result.json")
    )
    kind = Score("RMSE", lower_is_better=True)
    assert score_of(about) == score_of(result) == kind
    assert result["accuracy_global"] is None and result["score_global"] > 0
    event = json.loads((tmp_path / "r" / "events.jsonl").read_text().splitlines()[-1])
    assert score_of(event["G"]) == kind and event["G"]["metrics"]["MAE"] > 0
    assert event["G"]["worst"] == max(event["G"]["clients"].values())
    labels = (torch.arange(80) % 2).long()
    fedp3.run(mlp(2), (X, labels), out=tmp_path / "c", **QUICK)
    with pytest.raises(InputError, match="different scores"):
        load_runs([tmp_path / "r", tmp_path / "c"])


def test_an_objective_is_named_once_and_known() -> None:
    with pytest.raises(InputError, match="both name one"):
        fedp3.run(mlp(), (X, Y), objective="regression", local={"objective": "regression"})
    named = fedp3.run(mlp(), (X, Y), local={"objective": "regression"}, **QUICK)
    passed = fedp3.run(mlp(), (X, Y), objective="regression", **QUICK)
    assert named.experiment.config == passed.experiment.config
    with pytest.raises(InputError, match="did you mean 'regression'"):
        fedp3.run(mlp(), (X, Y), objective="regresion")
    with pytest.raises(InputError, match="say what clients minimise"):
        fedp3.run(mlp(), fedp3.from_tensors(X, Y, labelled=False))
    with pytest.raises(InputError, match="want a name or an Objective"):
        fedp3.run(mlp(), (X, Y), objective=3)  # type: ignore[arg-type]


# --------------------------------------------------------------------------- direction


def reply(client: int, squared: float, tested: float = 1) -> ClientUpdate:
    metrics = {"squared": squared, "absolute": 0.0, "tested": tested, "test_loss": squared}
    return ClientUpdate(client=client, t=0, tensors={}, examples=1, metrics=metrics)


def test_where_less_is_better_the_worst_client_has_most() -> None:
    summary = scores([reply(i, float(i * i)) for i in range(11)], OBJECTIVES["regression"])
    assert summary is not None
    assert (summary.mean, summary.worst, summary.p10) == (5.0, 10.0, 9.0)


@pytest.mark.parametrize("squared", [math.nan, math.inf, -1.0])
def test_a_model_that_is_not_finite_is_the_worst_and_not_left_out(squared: float) -> None:
    summary = scores([reply(0, 1.0), reply(1, squared)], OBJECTIVES["regression"])
    assert summary is not None
    assert summary.worst == summary.clients[1] > 1e38 and math.isfinite(summary.mean)


def test_sums_that_are_missing_or_impossible_are_no_score() -> None:
    objective = OBJECTIVES["segmentation"]
    for metrics in ({"tested": 2}, {"tested": 2, "overlap": 3.0}, {"overlap": 1.0}):
        update = ClientUpdate(client=0, t=0, tensors={}, examples=1, metrics=metrics)
        assert scores([update], objective) is None


def test_a_node_with_noise_releases_only_sums_of_shares() -> None:
    sums = {"overlap": 3.0, "pixels": 99.0, "right_pixels": 7.0, "tested": 5, "test_loss": 2.0}
    shares = OBJECTIVES["segmentation"].shares
    released = noisy_scores({**sums, "density": 1.0}, 1.0, shares)
    assert released.keys() == {"overlap", "tested", "density"}
    assert 0 <= released["overlap"] <= 5
    tokens = {"nats": 3.0, "tokens": 5.0, "tested": 5, "test_loss": 2.0}
    assert noisy_scores(tokens, 1.0, OBJECTIVES["language_modelling"].shares) == {"tested": 5}


def test_best_near_and_first_respect_the_direction() -> None:
    nats = Score("nats", lower_is_better=True)
    assert (nats.best([3, 1, 2]), nats.worst([3, 1, 2])) == (1, 3)
    assert nats.better(1.0, 2.0) and ACCURACY.better(2.0, 1.0)
    assert nats.better(5.0, math.nan) and not nats.better(math.nan, 5.0)
    assert nats.near(0.98, 0.98) == 1.0 and ACCURACY.near(1.0, 0.98) == 0.98
    likelihood = Score("log-likelihood")
    assert nats.near(-1.0, 0.5) == -0.5 and likelihood.near(-1.0, 0.5) == -2.0  # both are worse
    curve = [(0, 1.0, 3.0), (1, 2.0, 2.0), (2, 3.0, 1.0)]
    assert first_at(curve, 2.0, nats) == 2.0 and first_at(curve, 2.0) == 1.0
    values = {"a": 3.0, "b": 1.0}
    assert nats.leader(values) == "b" and ACCURACY.leader(values) == "a"


def test_tuning_prefers_fewer_nats() -> None:
    play = Path(__file__).parents[1] / "play.txt"
    small = ("data.length=16", "model.width=0.125", "model.blocks=1", "partition.clients=3")
    found = {
        lr: validate(
            fedp3.make_config(
                *("data.name=text", f"data.path={play}", "model.name=gpt", "partition.kind=roles"),
                *(*small, "run.rounds=3", "run.clients_per_round=0", "run.eval_every=1"),
                *("local.optimizer=adam", f"local.lr={lr}", "plan.layers=full"),
            ),
            None,
            1,
            lambda record: None,
        )
        for lr in ("1e-6", "0.02")
    }
    scored = {lr: value for lr, (value, _) in found.items()}
    assert found["0.02"][1].leader(scored) == "0.02" and scored["0.02"] < scored["1e-6"]


# --------------------------------------------------------------------------- early stopping


@pytest.mark.parametrize(
    ("name", "G", "stops"),
    [
        ("regression", [3.0, 2.0, 2.5, 2.1], True),
        ("regression", [3.0, 2.0, 2.5, 1.9], False),
        ("classification", [0.5, 0.6, 0.55, 0.6], True),
        ("classification", [0.5, 0.6, 0.55, 0.61], False),
        ("classification", [0.5, 0.4], False),
    ],
)
def test_a_run_stops_once_g_has_not_improved(name: str, G: list[float], stops: bool) -> None:
    from types import SimpleNamespace as Fake

    spec, run = Fake(objective=OBJECTIVES[name]), Fake(patience=2)
    events = [{"G": None}, *({"G": {"mean": value}} for value in G)]
    experiment: Any = Fake(server=Fake(spec=spec, run=run))
    assert stops_early(experiment, events) is stops


def test_a_resumed_run_stops_in_the_same_round(tmp_path: Path) -> None:
    settings = {
        "partition": {"clients": 2},
        "local": {"lr": 1e-9},
        "run": {"rounds": 20, "clients_per_round": 0, "eval_every": 1, "patience": 2},
        "upload": {"compress": "none"},
    }
    labels = torch.arange(80) % 2
    stopped = fedp3.run(mlp(2), (X, labels), **settings)
    assert stopped.outcome.result["stopped_early"] and stopped.outcome.result["rounds"] == 3

    class Stop(Exception):
        pass

    def stop(record: fedp3.RoundRecord) -> None:
        if record.t == 2:  # after the last round, before the end
            raise Stop

    with pytest.raises(Stop):
        fedp3.run(mlp(2), (X, labels), out=tmp_path / "r", on_round=stop, **settings)
    again = fedp3.run(mlp(2), (X, labels), out=tmp_path / "r", resume=True, **settings)
    assert again.outcome.result["rounds"] == 3 and again.outcome.result["stopped_early"]
    assert again.model_sha256 == stopped.model_sha256
    assert not fedp3.run(mlp(), (X, Y), objective="regression", **QUICK).outcome.result[
        "stopped_early"
    ]
