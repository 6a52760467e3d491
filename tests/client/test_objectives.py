"""Objectives equal plain loops over records, add up over batches, and never count padding."""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedp3
from fedp3.client.objectives import OBJECTIVES, PADDING, SHIPPED, Objective, ratio
from fedp3.core.errors import InputError
from fedp3.core.scores import Score
from fedp3.data.inputs import Batch
from fedp3.data.user_data import from_tensors
from fedp3.experiment.compatibility import check_model

Case = tuple[Tensor, Tensor]  # outputs and targets


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --------------------------------------------------------------------------- references by loops


def softmax_loss(logits: list[float], label: int) -> float:
    return math.log(sum(math.exp(z) for z in logits)) - logits[label]


def loop_classification(out: Any, y: Any) -> tuple[float, dict[str, float]]:
    return softmax_loss(out, y), {"correct": float(max(range(len(out)), key=out.__getitem__) == y)}


def loop_multi_label(out: Any, y: Any) -> tuple[float, dict[str, float]]:
    losses = [math.log(1 + math.exp(-z if t else z)) for z, t in zip(out, y, strict=True)]
    pairs = [(z > 0, t > 0) for z, t in zip(out, y, strict=True)]
    counts = {
        "true_positives": float(pairs.count((True, True))),
        "false_positives": float(pairs.count((True, False))),
        "false_negatives": float(pairs.count((False, True))),
        "exact": float(all(a == b for a, b in pairs)),
    }
    return sum(losses) / len(losses), counts


def loop_regression(out: Any, y: Any) -> tuple[float, dict[str, float]]:
    errors = [a - b for a, b in zip(out, y, strict=True)]
    squared = sum(e * e for e in errors) / len(errors)
    return squared, {"squared": squared, "absolute": sum(map(abs, errors)) / len(errors)}


def loop_segmentation(out: Any, y: Any) -> tuple[float, dict[str, float]]:
    classes, losses, found, true = len(out), [], [], []
    for i, row in enumerate(y):
        for j, label in enumerate(row):
            if label == PADDING:
                continue
            logits = [out[c][i][j] for c in range(classes)]
            losses.append(softmax_loss(logits, label))
            found.append(max(range(classes), key=logits.__getitem__))
            true.append(label)
    overlaps = []
    for c in range(classes):
        both = sum(a == b == c for a, b in zip(found, true, strict=True))
        either = sum(c in pair for pair in zip(found, true, strict=True))
        if either:
            overlaps.append(both / either)
    sums = {
        "overlap": sum(overlaps) / max(1, len(overlaps)),
        "right_pixels": float(sum(a == b for a, b in zip(found, true, strict=True))),
        "pixels": float(len(true)),
    }
    return sum(losses) / max(1, len(losses)), sums


def loop_language_modelling(out: Any, y: Any) -> tuple[float, dict[str, float]]:
    losses = [softmax_loss(z, token) for z, token in zip(out, y, strict=True) if token != PADDING]
    return sum(losses) / max(1, len(losses)), {"nats": sum(losses), "tokens": float(len(losses))}


def padded(y: Tensor, seed: int) -> Tensor:
    """Some targets become padding; of the first record, all."""
    y = torch.where(torch.rand(y.shape, generator=rng(seed)) < 0.3, PADDING, y)
    y[0] = PADDING
    return y


def logits(*shape: int, seed: int) -> Tensor:
    return 2 * torch.randn(shape, generator=rng(seed))


def labels(below: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(below, shape, generator=rng(seed + 1))


LOOPS: Mapping[str, Callable[[Any, Any], tuple[float, dict[str, float]]]] = {
    "classification": loop_classification,
    "multi_label": loop_multi_label,
    "regression": loop_regression,
    "segmentation": loop_segmentation,
    "language_modelling": loop_language_modelling,
}
MADE: Mapping[str, Callable[[int, int], Case]] = {
    "classification": lambda n, s: (logits(n, 4, seed=s), labels(4, n, seed=s)),
    "multi_label": lambda n, s: (logits(n, 3, seed=s), labels(2, n, 3, seed=s)),
    "regression": lambda n, s: (logits(n, 2, seed=s), logits(n, 2, seed=s + 1)),
    "segmentation": lambda n, s: (
        logits(n, 3, 4, 5, seed=s),
        padded(labels(3, n, 4, 5, seed=s), s),
    ),
    "language_modelling": lambda n, s: (
        logits(n, 6, 7, seed=s),
        padded(labels(7, n, 6, seed=s), s),
    ),
}


def test_every_shipped_objective_has_a_reference() -> None:
    assert set(LOOPS) == set(MADE) == {n for n, o in OBJECTIVES.items() if o in SHIPPED}


@pytest.mark.parametrize("name", LOOPS)
@given(st.integers(1, 6), st.integers(0, 1000))
def test_losses_and_sums_are_those_of_a_loop_over_records(name: str, n: int, seed: int) -> None:
    outputs, y = MADE[name](n, seed)
    objective, batch = OBJECTIVES[name], Batch(torch.zeros(n), y)
    expected = [LOOPS[name](o, t) for o, t in zip(outputs.tolist(), y.tolist(), strict=True)]
    losses = torch.tensor([loss for loss, _ in expected])
    torch.testing.assert_close(objective.loss(outputs, batch), losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(objective.mean(outputs, batch), losses.mean(), rtol=1e-4, atol=1e-5)
    sums = objective.evaluate(outputs, batch)
    for key in expected[0][1]:
        assert sums[key] == pytest.approx(sum(s[key] for _, s in expected), rel=1e-4, abs=1e-5)
    assert sums["tested"] == n
    assert sums["test_loss"] == pytest.approx(float(losses.sum()), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", LOOPS)
@given(st.integers(2, 8), st.data())
def test_sums_add_up_over_batches_and_clients(name: str, n: int, data: st.DataObject) -> None:
    outputs, y = MADE[name](n, 3)
    cut = data.draw(st.integers(1, n - 1))
    objective = OBJECTIVES[name]

    def sums(rows: slice) -> dict[str, float]:
        return objective.evaluate(outputs[rows], Batch(torch.zeros(n)[rows], y[rows]))

    whole, first, second = sums(slice(n)), sums(slice(cut)), sums(slice(cut, n))
    for key, value in whole.items():
        assert first[key] + second[key] == pytest.approx(value, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", ["segmentation", "language_modelling"])
def test_outputs_at_padding_change_nothing(name: str) -> None:
    outputs, y = MADE[name](5, 0)
    other = outputs.clone()
    at = (y == PADDING).unsqueeze(1 if name == "segmentation" else -1).expand_as(outputs)
    other[at] = 1e3 * torch.randn(int(at.sum()))
    objective, batch = OBJECTIVES[name], Batch(y, y)
    assert torch.equal(objective.loss(outputs, batch), objective.loss(other, batch))
    assert objective.evaluate(outputs, batch) == objective.evaluate(other, batch)


def test_metrics_are_their_textbook_formulas() -> None:
    def metric(name: str, metric: str, **sums: float) -> float:
        return OBJECTIVES[name].metrics[metric](sums)

    counts = {"true_positives": 6, "false_positives": 2, "false_negatives": 4}
    precision, recall = 6 / 8, 6 / 10
    f1 = 2 * precision * recall / (precision + recall)
    assert metric("multi_label", "F1", **counts) == pytest.approx(f1)
    assert metric("multi_label", "F1", **dict.fromkeys(counts, 0)) == 1.0
    assert metric("regression", "RMSE", squared=18.0, tested=2) == 3.0
    nats = {"nats": 6.0, "tokens": 3}
    assert metric("language_modelling", "perplexity", **nats) == pytest.approx(math.exp(2))
    assert metric("language_modelling", "perplexity", nats=1e6, tokens=1) == math.inf
    assert math.isnan(metric("language_modelling", "nats", nats=0.0, tokens=0))


def test_outputs_may_be_a_record_with_logits() -> None:
    for name, make in MADE.items():
        outputs, y = make(3, 1)
        wrapped = SimpleNamespace(logits=outputs)
        batch = Batch(torch.zeros(3), y)
        assert torch.equal(
            OBJECTIVES[name].loss(wrapped, batch), OBJECTIVES[name].loss(outputs, batch)
        )


# --------------------------------------------------------------------------- what does not fit


def mean_loss(outputs: Tensor, batch: Batch) -> Tensor:
    return (outputs - batch.y).square().mean()


def refusal(objective: Objective, net: nn.Module, x: Tensor, y: Tensor) -> str:
    data = from_tensors(x, y, labelled=objective.labelled)
    with pytest.raises(InputError) as error:
        check_model(net, data, 2, 0, objective)
    return str(error.value)


def test_targets_and_outputs_that_do_not_fit_are_refused_before_training() -> None:
    x = torch.randn(6, 3)
    two, three = nn.Linear(3, 2), nn.Linear(3, 3)
    pick = OBJECTIVES.pick
    assert "want 0 or 1" in refusal(pick("multi_label"), two, x, torch.full((6, 2), 3))
    assert "returns shape (2, 2)" in refusal(pick("multi_label"), two, x, torch.ones(6, 3))
    assert "returns shape (2, 3)" in refusal(pick("regression"), three, x, torch.ones(6, 2))
    conv, images = nn.Conv2d(1, 2, 3, padding=1), torch.randn(4, 1, 5, 5)
    assert "want (2, classes, 5, 4)" in refusal(
        pick("segmentation"), conv, images, torch.zeros(4, 5, 4, dtype=torch.int64)
    )
    assert "run from 0 to 7" in refusal(
        pick("segmentation"), conv, images, torch.arange(100).view(4, 5, 5) % 8
    )
    tokens = torch.randint(5, (4, 6))
    embed = nn.Embedding(5, 5)
    language = pick("language_modelling")
    assert "the targets are the inputs" in refusal(language, embed, tokens, tokens)
    assert "(records, tokens, vocabulary)" in refusal(language, embed, tokens, tokens[:, 0])
    assert "from 0 to 9" in refusal(language, embed, tokens, torch.arange(24).view(4, 6) % 10)


def test_a_loss_that_is_a_mean_over_records_is_refused() -> None:
    own = Objective(loss=mean_loss)
    assert "one number for each record" in refusal(
        own, nn.Linear(3, 1), torch.randn(4, 3), torch.ones(4, 1)
    )


def test_a_score_without_its_metric_is_refused() -> None:
    with pytest.raises(InputError, match="'mae' is none of its metrics: rmse"):
        Objective(loss=mean_loss, score=Score("mae"), metrics={"rmse": ratio("x")})


def test_methods_for_classification_are_refused_with_other_objectives() -> None:
    x, y = torch.randn(200, 3), torch.randn(200, 1)
    for method, part in (("heterofl", "loss"), ("fedcr", "loss"), ("fjord", "step")):
        hooks = {"hooks": {"distil": True}} if method == "fjord" else {}
        net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        with pytest.raises(InputError, match=f"{part}.* made for classification"):
            fedp3.run(net, (x, y), objective="regression", method=method, **hooks)
