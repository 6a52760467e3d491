"""Clipping by record, for every objective, equals a loop over single records."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedp3
from fedp3.client.objectives import OBJECTIVES, Objective
from fedp3.core.errors import InputError
from fedp3.core.types import Params
from fedp3.data.inputs import Batch, Inputs, call, map_tensors
from fedp3.models.zoo import ModelSettings, ModelSpec, build
from fedp3.privacy.clipping import add_clipped, ghost_agrees
from fedp3.privacy.made_up import made_up_records
from fedp3.privacy.settings import Mechanism

CLIP = 0.3


class TwoInputs(nn.Module):
    """Adds what it reads from two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Embedding(5, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, numbers: Tensor, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.a(numbers) + self.b(tokens).mean(1)))
        return out


def gpt() -> nn.Module:
    settings = ModelSettings(name="gpt", width=0.125, heads=2, blocks=2)
    return build(ModelSpec((6,), 7, settings), 0)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def padded_tokens() -> Tensor:
    y = torch.randint(7, (5, 6))
    y[1, 4:] = -100
    y[2] = -100  # a record of padding only
    return y


numbers, tokens = torch.randn(5, 3), torch.randint(5, (5, 2))
CASES: dict[str, tuple[str, Callable[[], nn.Module], Inputs, Tensor]] = {
    "regression": ("regression", mlp, numbers, torch.randn(5, 2)),
    "language modelling": ("language_modelling", gpt, torch.randint(7, (5, 6)), padded_tokens()),
    "several labels": ("multi_label", mlp, numbers, torch.randint(2, (5, 2))),
    "pixels": (
        "segmentation",
        lambda: nn.Conv2d(1, 3, 3, padding=1),
        torch.randn(5, 1, 4, 4),
        torch.randint(3, (5, 4, 4)),
    ),
    "a tuple of inputs": ("regression", TwoInputs, (numbers, tokens), torch.randn(5, 2)),
    "a dict of inputs": (
        "classification",
        TwoInputs,
        {"numbers": numbers, "tokens": tokens},
        torch.randint(2, (5,)),
    ),
}


def naive(net: nn.Module, x: Inputs, y: Tensor, W: Params, objective: Objective) -> list[Tensor]:
    """One backward pass for each record."""
    total = [torch.zeros_like(w) for w in W.values()]
    for j in range(len(y)):
        row = slice(j, j + 1)
        one = Batch(map_tensors(lambda w, row=row: w[row], x), y[row])  # type: ignore[misc]
        loss = objective.loss(call(net, one.x), one)[0]
        grads = torch.autograd.grad(loss, list(W.values()), materialize_grads=True)
        norm = torch.sqrt(sum((g.square().sum() for g in grads), torch.zeros(())))
        factor = min(1.0, CLIP / float(norm)) if norm > 0 else 1.0
        for t, g in zip(total, grads, strict=True):
            t.add_(g, alpha=factor)
    return total


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ghost", [False, True])
def test_clipped_sums_are_those_of_a_loop_over_records(case: str, ghost: bool) -> None:
    name, build_net, x, y = CASES[case]
    torch.manual_seed(0)
    net, objective = build_net(), OBJECTIVES[name]
    W = dict(net.named_parameters())
    out = {n: torch.zeros_like(w) for n, w in W.items()}
    mechanism = Mechanism(clip=CLIP, noise_multiplier=0.0, sample_rate=1.0, ghost=ghost)
    add_clipped(out, net, x, y, W, {}, mechanism, objective.loss)
    for got, want in zip(out.values(), naive(net, x, y, W, objective), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_ghost_clipping_covers_a_regression() -> None:
    net = mlp()
    W, loss = dict(net.named_parameters()), OBJECTIVES["regression"].loss
    assert ghost_agrees(net, numbers, torch.randn(5, 2), W, loss)


def mixing_loss(outputs: Tensor, batch: Batch) -> Tensor:
    """A loss whose records influence each other in a batch, and only there."""
    return (outputs[:, 0] - outputs[:, 0].mean()).square() + outputs[:, 1].square()


def run(objective: Any, **more: Any) -> fedp3.Result:
    x, y = torch.randn(60, 3), torch.randn(60, 2)
    privacy = {"enabled": True, "randomness": "seeded", "noise_multiplier": 1.0, "delta": 1e-3}
    return fedp3.run(
        mlp(),
        (x, y),
        objective=objective,
        privacy={**privacy, "epsilon": 50},
        partition={"clients": 2},
        plan={"layers": "full"},
        local={"steps": 2},
        run={"rounds": 1, "clients_per_round": 0},
        **more,
    )


def test_a_loss_of_ones_own_never_sees_two_records_at_once() -> None:
    own = run(Objective(loss=mixing_loss))
    mechanism = own.experiment.client.steps.mechanism  # type: ignore[attr-defined]
    assert not mechanism.ghost
    shipped = run("regression").experiment.client.steps.mechanism  # type: ignore[attr-defined]
    assert shipped.ghost


def test_made_up_records_have_the_types_and_ranges_of_the_data() -> None:
    data = fedp3.from_tensors({"numbers": numbers, "tokens": tokens}, torch.zeros(5, dtype=int))
    made = made_up_records(data, 40, torch.Generator().manual_seed(0))
    assert made["tokens"].dtype == torch.int64 and made["numbers"].shape == (40, 3)
    assert bool((made["tokens"] >= tokens.amin(0)).all() & (made["tokens"] <= tokens.amax(0)).all())


def test_records_that_overlap_are_refused() -> None:
    x = torch.randint(7, (60, 6))
    data = fedp3.from_tensors(x, torch.randint(7, (60, 6)), labelled=False)
    data = replace(data, overlapping=True, objective="language_modelling")
    with pytest.raises(InputError, match="overlap"):
        fedp3.run(gpt(), data, privacy={"enabled": True, "delta": 1e-3}, plan={"layers": "full"})


def test_an_audit_of_another_objective_is_refused() -> None:
    from fedp3.runs.rehearsal import audit_subject

    with pytest.raises(InputError, match="classification only"):
        audit_subject(run("regression").experiment)
