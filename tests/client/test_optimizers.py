"""Local optimizers equal torch's own, leave inactive coordinates alone, and can be kept."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedp3
from fedp3.client import optimizers
from fedp3.client.batching import LocalSettings, step_rate
from fedp3.client.optimizers import OPTIMIZERS, OptimizerState, slots_of
from fedp3.core.errors import ConfigError

TORCH = {
    "sgd": lambda p, s: torch.optim.SGD(p, s.lr, s.momentum, weight_decay=s.weight_decay),
    "adam": lambda p, s: torch.optim.Adam(p, s.lr, s.betas, s.eps, s.weight_decay),
    "adamw": lambda p, s: torch.optim.AdamW(p, s.lr, s.betas, s.eps, s.weight_decay),
}
LOCAL = LocalSettings(lr=0.1, weight_decay=0.03, betas=(0.8, 0.95), clip_norm=0)


def decayed(local: LocalSettings, w: Tensor, g: Tensor) -> Tensor:
    """The gradient with the decay that `take_step` adds to it."""
    coupled = not OPTIMIZERS[local.optimizer].decoupled_decay
    return g + local.weight_decay * w if coupled else g.clone()


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("saved", [False, True])
def test_steps_are_those_of_torch(name: str, saved: bool) -> None:
    local = replace(LOCAL, optimizer=name, momentum=0.9 if name == "sgd" else 0.0)
    rng = torch.Generator().manual_seed(0)
    w = torch.randn(4, 3, generator=rng)
    theirs = w.clone().requires_grad_()
    reference = TORCH[name]([theirs], local)
    state = OptimizerState()
    for _ in range(7):
        g = torch.randn(4, 3, generator=rng)
        theirs.grad = g.clone()
        reference.step()
        OPTIMIZERS[name].step({"w": w}, [decayed(local, w, g)], state, {}, local, local.lr)
        state.steps += 1
        if saved:  # through what stays on the client
            state = optimizers.from_tensors(optimizers.to_tensors(state), "cpu")
        torch.testing.assert_close(w, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TORCH)
@given(st.lists(st.booleans(), min_size=6, max_size=6))
def test_inactive_coordinates_keep_weight_and_state(name: str, active: list[bool]) -> None:
    local = replace(LOCAL, optimizer=name, momentum=0.9 if name == "sgd" else 0.0)
    w, state, mask = torch.ones(6), OptimizerState(), torch.tensor(active)
    OPTIMIZERS[name].step({"w": w}, [torch.ones(6)], state, {}, local, 0.1)
    state.steps += 1
    before, slots = w.clone(), {s: v["w"].clone() for s, v in state.slots.items()}
    OPTIMIZERS[name].step({"w": w}, [torch.ones(6) * mask], state, {"w": mask}, local, 0.1)
    assert torch.equal(w[~mask], before[~mask])
    assert bool((w[mask] != before[mask]).all())
    for slot, values in state.slots.items():
        assert torch.equal(values["w"][~mask], slots[slot][~mask])
    assert len(state.slots) == slots_of(local)


def test_the_rate_rises_over_the_warm_up_and_then_falls() -> None:
    local = LocalSettings(warmup=2, step_schedule="linear")
    assert [step_rate(local, 1.0, k, 4) for k in range(4)] == [0.5, 0.75, 0.5, 0.25]
    assert step_rate(LocalSettings(), 0.3, 5, 7) == 0.3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
Y = X[:, :1] - X[:, 1:2]


def weights(state: str, rounds: int, steps: int, **local: Any) -> dict[str, Tensor]:
    """Training of one client whose every batch is all of its samples."""
    result = fedp3.run(
        net(),
        (X, Y),
        objective="regression",
        plan={"layers": "full"},
        partition={"clients": 1},
        local={"steps": steps, "batch": 64, "optimizer_state": state, "lr": 0.01, **local},
        run={"rounds": rounds, "eval_every": 0, "final_p": False},
    )
    return dict(result.weights)


@pytest.mark.parametrize("local", [{"optimizer": "adamw"}, {"momentum": 0.9}])
def test_kept_state_makes_two_rounds_one(local: dict[str, Any]) -> None:
    one = weights("client", 1, 6, **local)
    for state, same in (("client", True), ("round", False)):
        two = weights(state, 2, 3, **local)
        close = all(torch.allclose(w, one[n], rtol=1e-4, atol=1e-6) for n, w in two.items())
        assert close is same


def test_settings_that_contradict_each_other_are_refused() -> None:
    for settings, text in (
        ({"local": {"optimizer": "adam", "momentum": 0.5}}, "has betas in its place"),
        ({"local": {"optimizer_state": "client"}, "prune": {"selector": "neuron"}}, "of units"),
        ({"method": "scaffold", "local": {"optimizer": "adam"}}, "steps of equal length"),
        ({"method": "scaffold", "local": {"warmup": 3}}, "steps of equal length"),
        ({"run": {"patience": 2, "eval_every": 0}}, "nobody knows whether G improves"),
        ({"data": {"name": "text"}}, "needs a file"),
        ({"data": {"length": 7}}, "only read with name = 'text'"),
        ({"partition": {"kind": "roles", "sizes": 4}}, "leave sizes out"),
    ):
        with pytest.raises(ConfigError, match=text):
            fedp3.make_config(**settings)
