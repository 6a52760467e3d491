"""What clients minimise, and what models are scored by.

An `Objective` has the loss of every single record, which LDP needs to clip each record's gradient,
and metrics that are computed from sums over records, so that batches and clients add up.

    classification      one label per sample; accuracy
    multi_label         several labels per sample, each 0 or 1; F1 over all labels
    regression          numbers; root of the mean squared error
    segmentation        one label per pixel; intersection over union
    language_modelling  the next token at each position; nats per token

Targets of pixels and tokens that are -100 are padding: they have no loss and no score.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedp3.core.errors import InputError, type_of
from fedp3.core.registry import Registry
from fedp3.core.scores import ACCURACY, Score
from fedp3.data.dataset import Dataset
from fedp3.data.inputs import Batch, tensors_of

LONGEST_EXPONENT = 700  # beyond it, the exponential overflows
PADDING = -100  # a target that does not count; torch's and Hugging Face's convention
LOSS = Score("loss", lower_is_better=True)
TESTED, TEST_LOSS = "tested", "test_loss"  # sums that every objective has

# (what the network returns, the batch) -> the loss of each record, (records,)
RecordLoss = Callable[[Any, Batch], Tensor]
Sums = Mapping[str, float]


def no_sums(outputs: Any, batch: Batch) -> Mapping[str, Tensor]:
    """No sums besides those that every objective has."""
    return {}


def ratio(top: str, bottom: str = TESTED) -> Callable[[Sums], float]:
    """The metric that is the ratio of two sums; per record, unless another one is named."""
    return partial(_ratio, top, bottom)


def _ratio(top: str, bottom: str, sums: Sums) -> float:
    return sums[top] / sums[bottom] if sums[bottom] else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What clients minimise, and what models are scored by.

    Args:
        loss: takes what the network returns and the batch; returns the loss of each record.
        score: the metric that models are compared by.  Without metrics of your own, it is the mean
            loss.
        sums: takes the same; returns sums over the records of the batch, by name.
        metrics: functions of a client's sums, by name; one of them has the score's name.  Besides
            those of `sums`, there are `tested`, the number of records, and `test_loss`, the sum of
            their losses.
        shares: names of sums to which each record adds a number from 0 to 1.  Nodes that must not
            release exact scores add noise to these, and release no other sums.
        labelled: whether each sample has one class label.
        mean_loss: the mean of `loss` over a batch, where that is computed faster than by `loss`.
        problem: takes the outputs, the batch and the data set; returns why they do not fit each
            other, or an empty text.
    """

    loss: RecordLoss
    score: Score = LOSS
    sums: Callable[[Any, Batch], Mapping[str, Tensor]] = no_sums
    metrics: Mapping[str, Callable[[Sums], float]] = field(
        default_factory=lambda: {"loss": ratio(TEST_LOSS, TESTED)}
    )
    shares: frozenset[str] = frozenset()
    labelled: bool = False
    mean_loss: RecordLoss | None = None
    problem: Callable[[Any, Batch, Dataset], str] | None = None

    def __post_init__(self) -> None:
        if self.score.name not in self.metrics:
            raise InputError(
                f"the objective's score {self.score.name!r} is none of its metrics: "
                f"{', '.join(self.metrics) or 'there are none'}"
            )

    def mean(self, outputs: Any, batch: Batch) -> Tensor:
        """The mean loss of a batch."""
        if self.mean_loss is not None:
            return self.mean_loss(outputs, batch)
        return self.loss(outputs, batch).mean()

    def evaluate(self, outputs: Any, batch: Batch) -> dict[str, float]:
        """The sums of a batch, with the number of its records and the sum of their losses."""
        counted = {name: value.item() for name, value in self.sums(outputs, batch).items()}
        loss = self.loss(outputs, batch).sum().item()
        return {**counted, TESTED: len(batch.y), TEST_LOSS: loss}


OBJECTIVES: Registry[Objective] = Registry("objective")


def logits_of(outputs: Any) -> Tensor:
    """The network's output, which is a tensor or has it as `logits` (Hugging Face)."""
    logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
    return logits


# --------------------------------------------------------------------------- classification


def cross_entropies(outputs: Any, batch: Batch) -> Tensor:
    """The cross-entropy of each record with its label."""
    return F.cross_entropy(logits_of(outputs), batch.y, reduction="none")


def _mean_cross_entropy(outputs: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(logits_of(outputs), batch.y)


def _correct(outputs: Any, batch: Batch) -> dict[str, Tensor]:
    return {"correct": (logits_of(outputs).argmax(1) == batch.y).sum()}


def _too_few_outputs(outputs: Any, batch: Batch, data: Dataset) -> str:
    """Why outputs are no logits of these classes."""
    if not isinstance(outputs, Tensor) and not hasattr(outputs, "logits"):
        return f"the model returns {type_of(outputs)}, want one tensor of logits"
    logits, records, classes = logits_of(outputs), len(batch.y), data.classes
    if logits.dim() == 2 and len(logits) == records and logits.shape[1] >= classes:
        return ""
    shapes = ", ".join(str(tuple(w.shape[1:])) for w in tensors_of(batch.x))
    from_one = len(data.y) > 1 and int(data.y.min()) == 1
    return (
        f"for {records} samples of shape {shapes} the model returns shape "
        f"{tuple(logits.shape)}, want ({records}, k) with k >= {classes} classes "
        f"(labels run from 0 to {classes - 1})"
        + ("; the smallest label is 1: if labels count from 1, pass y - 1" if from_one else "")
    )


CLASSIFICATION = OBJECTIVES.add(
    "classification",
    Objective(
        loss=cross_entropies,
        mean_loss=_mean_cross_entropy,
        score=ACCURACY,
        sums=_correct,
        metrics={"accuracy": ratio("correct")},
        shares=frozenset({"correct"}),
        labelled=True,
        problem=_too_few_outputs,
    ),
)


# --------------------------------------------------------------------------- several labels


def _binary_losses(outputs: Any, batch: Batch) -> Tensor:
    logits = logits_of(outputs)
    targets = batch.y.to(logits.dtype)
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return losses.flatten(1).mean(1)


def _binary_counts(outputs: Any, batch: Batch) -> dict[str, Tensor]:
    found, true = logits_of(outputs) > 0, batch.y > 0
    exact = (found == true).flatten(1).all(1)
    return {
        "true_positives": (found & true).sum(),
        "false_positives": (found & ~true).sum(),
        "false_negatives": (~found & true).sum(),
        "exact": exact.sum(),
    }


def _f1(sums: Sums) -> float:
    """F1 over all labels; 1 if there are no positives and none was found."""
    wrong = sums["false_positives"] + sums["false_negatives"]
    twice = 2 * sums["true_positives"]
    return twice / (twice + wrong) if twice + wrong else 1.0


def _no_binary_targets(outputs: Any, batch: Batch, data: Dataset) -> str:
    if not bool(((data.y == 0) | (data.y == 1)).all()):
        return f"targets run from {data.y.min()} to {data.y.max()}, want 0 or 1 for each label"
    return _other_shape(outputs, batch, data)


def _other_shape(outputs: Any, batch: Batch, data: Dataset) -> str:
    shape, want = tuple(logits_of(outputs).shape), tuple(batch.y.shape)
    if shape != want:
        return f"the model returns shape {shape}, and the targets have shape {want}"
    return ""


OBJECTIVES.add(
    "multi_label",
    Objective(
        loss=_binary_losses,
        score=Score("F1", percent=True),
        sums=_binary_counts,
        metrics={"F1": _f1, "exact": ratio("exact")},
        shares=frozenset({"exact"}),
        problem=_no_binary_targets,
    ),
)


# --------------------------------------------------------------------------- regression


def _errors(outputs: Any, batch: Batch) -> Tensor:
    """Predictions minus targets, (records, numbers); (records, 1) fits targets (records,)."""
    numbers = logits_of(outputs)
    predictions = numbers.flatten(1) if numbers.dim() > 1 else numbers[:, None]
    return predictions - batch.y.to(predictions.dtype).reshape(predictions.shape)


def _squared_errors(outputs: Any, batch: Batch) -> Tensor:
    return _errors(outputs, batch).square().mean(1)


def _error_sums(outputs: Any, batch: Batch) -> dict[str, Tensor]:
    errors = _errors(outputs, batch).double()
    return {"squared": errors.square().mean(1).sum(), "absolute": errors.abs().mean(1).sum()}


def _rmse(sums: Sums) -> float:
    return math.sqrt(sums["squared"] / sums[TESTED]) if sums["squared"] >= 0 else math.nan


def _other_numbers(outputs: Any, batch: Batch, data: Dataset) -> str:
    shape, want = tuple(logits_of(outputs).shape), tuple(batch.y.shape)
    if math.prod(shape) != math.prod(want) or shape[:1] != want[:1]:
        return f"the model returns shape {shape}, and the targets have shape {want}"
    return ""


OBJECTIVES.add(
    "regression",
    Objective(
        loss=_squared_errors,
        score=Score("RMSE", lower_is_better=True),
        sums=_error_sums,
        metrics={"RMSE": _rmse, "MAE": ratio("absolute")},
        problem=_other_numbers,
    ),
)


# --------------------------------------------------------------------------- pixels and tokens


def _mean_of_own(losses: Tensor, counts: Tensor) -> Tensor:
    """The mean over each record's own pixels or tokens; 0 for a record that is only padding."""
    return (losses * counts).flatten(1).sum(1) / counts.flatten(1).sum(1).clamp(min=1)


def _pixel_losses(outputs: Any, batch: Batch) -> Tensor:
    y = batch.y
    losses = F.cross_entropy(logits_of(outputs), y, ignore_index=PADDING, reduction="none")
    return _mean_of_own(losses, y != PADDING)


def _pixel_sums(outputs: Any, batch: Batch) -> dict[str, Tensor]:
    logits = logits_of(outputs)
    classes = logits.shape[1]
    found, true, counts = logits.argmax(1).flatten(1), batch.y.flatten(1), batch.y.flatten(1) >= 0
    pairs = (true.clamp(min=0) * classes + found) * counts
    confusion = torch.zeros(len(pairs), classes * classes, device=pairs.device)
    confusion.scatter_add_(1, pairs, counts.to(confusion.dtype))
    confusion = confusion.view(-1, classes, classes)  # (records, true class, class found)
    both = confusion.diagonal(dim1=1, dim2=2)
    either = confusion.sum(1) + confusion.sum(2) - both
    present = either > 0
    overlap = torch.where(present, both / either.clamp(min=1), 0.0)
    per_image = overlap.sum(1) / present.sum(1).clamp(min=1)
    return {"overlap": per_image.sum(), "right_pixels": both.sum(), "pixels": counts.sum()}


def _no_pixel_logits(outputs: Any, batch: Batch, data: Dataset) -> str:
    shape, y = tuple(logits_of(outputs).shape), batch.y
    fits = len(shape) == y.dim() + 1 and (shape[0], *shape[2:]) == tuple(y.shape)
    if not fits:
        want = f"({len(y)}, classes, {', '.join(map(str, y.shape[1:]))})"
        return f"the model returns shape {shape}, want {want} for targets of {tuple(y.shape)}"
    return _no_class_of(data, shape[1], "pixels")


def _no_class_of(data: Dataset, classes: int, what: str) -> str:
    """Why the targets of pixels or tokens are no classes."""
    if data.y.dtype != torch.int64:
        return f"the targets of {what} are {data.y.dtype}, want integers"
    real = data.y[data.y != PADDING]
    if real.numel() and not (int(real.min()) >= 0 and int(real.max()) < classes):
        return (
            f"the targets of {what} run from {int(real.min())} to {int(real.max())}, and the model "
            f"has {classes} classes, from 0; {PADDING} is padding"
        )
    return ""


OBJECTIVES.add(
    "segmentation",
    Objective(
        loss=_pixel_losses,
        score=Score("IoU", percent=True),
        sums=_pixel_sums,
        metrics={"IoU": ratio("overlap"), "pixel_accuracy": ratio("right_pixels", "pixels")},
        shares=frozenset({"overlap"}),
        problem=_no_pixel_logits,
    ),
)


def _token_losses_of(outputs: Any, batch: Batch) -> Tensor:
    """The loss of each token, 0 for padding: (records, tokens)."""
    logits, y = logits_of(outputs), batch.y
    losses = F.cross_entropy(
        logits.flatten(0, 1), y.flatten(), ignore_index=PADDING, reduction="none"
    )
    return losses.view(y.shape)


def _token_losses(outputs: Any, batch: Batch) -> Tensor:
    """The mean over each record's own tokens."""
    return _mean_of_own(_token_losses_of(outputs, batch), batch.y != PADDING)


def _token_sums(outputs: Any, batch: Batch) -> dict[str, Tensor]:
    losses = _token_losses_of(outputs, batch).double()
    return {"nats": losses.sum(), "tokens": (batch.y != PADDING).sum()}


def _perplexity(sums: Sums) -> float:
    nats = _ratio("nats", "tokens", sums)
    return math.exp(nats) if nats < LONGEST_EXPONENT else math.inf


def _no_next_tokens(outputs: Any, batch: Batch, data: Dataset) -> str:
    shape, y = tuple(logits_of(outputs).shape), batch.y
    if y.dim() != 2 or shape[:2] != tuple(y.shape) or len(shape) != 3:
        return (
            f"the model returns shape {shape}, want (records, tokens, vocabulary) for targets of "
            f"shape {tuple(y.shape)}"
        )
    if any(w.shape == y.shape and _equal_but_padding(w, y) for w in tensors_of(batch.x)):
        return (
            "the targets are the inputs, which a model could copy: the target at a position is the "
            f"token after it; pass x[:, :-1] and y[:, 1:], or shift y and end it with {PADDING}"
        )
    return _no_class_of(data, shape[2], "tokens")


def _equal_but_padding(x: Tensor, y: Tensor) -> bool:
    real = y != PADDING
    same, varied = (x[real] == y[real]).all(), (y[real] != y[real][:1]).any()
    return bool(same) and bool(varied)


# The score is nats per token and not the perplexity, because scores are averaged over clients: the
# mean of perplexities is that of the worst client, and one that diverges makes it infinite.
OBJECTIVES.add(
    "language_modelling",
    Objective(
        loss=_token_losses,
        score=Score("nats", lower_is_better=True),
        sums=_token_sums,
        metrics={"nats": ratio("nats", "tokens"), "perplexity": _perplexity},
        problem=_no_next_tokens,
    ),
)

SHIPPED = tuple(OBJECTIVES.values())  # whose losses of a record are known to depend on it alone
