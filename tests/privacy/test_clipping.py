"""Per-example clipping against one backward pass per record, against torch.func and Opacus."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.core.types import Params
from fedp3.models import shrinking
from fedp3.privacy import clipping
from fedp3.privacy.clipping import add_clipped, func_pieces, ghost_agrees, ghost_pieces
from fedp3.privacy.settings import Mechanism
from worlds import world

GHOST, FUNC = Mechanism(ghost=True), Mechanism(ghost=False)


def by_hand(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    W: Mapping[str, Tensor],
    C: float,
    masks: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Record by record: its gradient, one norm over all tensors, clip, add."""
    total = {n: torch.zeros_like(w) for n, w in W.items()}
    for one, label in zip(x, y, strict=True):
        loss = F.cross_entropy(net(one[None]), label[None])
        grads = torch.autograd.grad(loss, list(W.values()), allow_unused=True)
        gradients = {
            n: torch.zeros_like(W[n]) if g is None else g for n, g in zip(W, grads, strict=True)
        }
        gradients = {n: g * masks[n] if n in masks else g for n, g in gradients.items()}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        for n, g in gradients.items():
            total[n] += g * min(1.0, C / (norm + 1e-6))
    return total


def summed(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    W: Mapping[str, Tensor],
    mechanism: Mechanism,
    masks: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    out = {n: torch.zeros(w.shape) for n, w in W.items()}
    add_clipped(out, net, x, y, W, masks, mechanism)
    return out


def close(a: Mapping[str, Tensor], b: Mapping[str, Tensor], tolerance: float = 2e-5) -> bool:
    return a.keys() == b.keys() and all(
        torch.allclose(a[n], b[n], rtol=1e-4, atol=tolerance) for n in a
    )


def trained(net: nn.Module, names: set[str]) -> dict[str, Tensor]:
    """The parameters of these modules, which then train alone."""
    for n, p in net.named_parameters():
        p.requires_grad_(n.rpartition(".")[0] in names)
    return {n: p for n, p in net.named_parameters() if p.requires_grad}


def modules_of(net: nn.Module) -> list[str]:
    return sorted({n.rpartition(".")[0] for n, _ in net.named_parameters()})


# --------------------------------------------------------------------------- our networks


@given(
    kind=st.sampled_from(["mlp", "cnn", "groupnorm"]),
    C=st.sampled_from([1e-3, 0.3, 2.0, math.inf]),
    batch=st.integers(1, 5),
    data=st.data(),
)
def test_ghost_and_func_are_one_backward_pass_per_record(
    kind: str, C: float, batch: int, data: st.DataObject
) -> None:
    w = world(kind)
    net = copy.deepcopy(w.net)
    chosen = data.draw(st.sets(st.sampled_from(modules_of(net)), min_size=1))
    W, x, y = trained(net, chosen), w.data.x[:batch], w.data.y[:batch]
    want = by_hand(net, x, y, W, C, {})
    assert ghost_pieces(net, x, y, W) is not None
    assert close(summed(net, x, y, W, Mechanism(clip=C), {}), want)
    assert close(summed(net, x, y, W, Mechanism(clip=C, ghost=False), {}), want)


@pytest.mark.parametrize("kind", ["mlp", "cnn", "groupnorm"])
def test_a_smaller_net_is_clipped_like_a_whole_one(kind: str) -> None:
    w = world(kind)
    keep = {
        g: max(u.granule, u.units // 2 // u.granule * u.granule)
        for g, u in w.layers.groups.items()
        if not u.fixed
    }
    net = shrinking.shrink_net(w.net, w.layers, keep)
    W, x, y = trained(net, set(modules_of(net))), w.data.x[:4], w.data.y[:4]
    with torch.no_grad():
        for k, p in enumerate(W.values()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(k)) / 3)
    assert keep and ghost_agrees(net, x, y, W)
    assert close(summed(net, x, y, W, Mechanism(clip=0.5), {}), by_hand(net, x, y, W, 0.5, {}))


def test_no_record_moves_the_sum_by_more_than_the_clip() -> None:
    w = world("cnn")
    net = copy.deepcopy(w.net)
    W = trained(net, set(modules_of(net)))
    for j in range(6):
        one = summed(
            net, 50 * w.data.x[j : j + 1], w.data.y[j : j + 1], W, Mechanism(clip=0.25), {}
        )
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in one.values()))
        assert norm <= 0.25 and norm == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize("bias", [0.0, 3e2, 1e3, 3e3, 1e4])
def test_a_server_that_makes_gradients_cancel_gains_nothing(bias: float) -> None:
    """Before a normalisation deltas of a record sum to zero, and a large bias hides their norm."""
    with layers_draw_from(stream(0, Stream.INIT)):
        front = (
            nn.Conv2d(3, 64, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1, stride=2),
        )
        net = nn.Sequential(
            *front, nn.GroupNorm(64, 64), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10)
        )
        x = torch.randn(24, 3, 16, 16)
    with torch.no_grad():
        net[0].bias.fill_(bias)
        net[6].weight.mul_(100)
    W = trained(net, {"2", "6"})
    assert 16 * (576 + 64) < 576 * 64, "so norms come from Gram matrices"
    for j in range(len(x)):
        one = summed(net, x[j : j + 1], torch.tensor([j % 10]), W, Mechanism(clip=1.0), {})
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in one.values()))
        assert norm <= 1.0, j


@pytest.mark.parametrize("mechanism", [GHOST, FUNC])
def test_a_record_that_counts_as_none_leaves_the_dropout_of_the_others_as_it_is(
    mechanism: Mechanism,
) -> None:
    net = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Dropout(0.5), nn.Linear(40, 3))
    W, y = trained(net, {"0", "3"}), torch.tensor([0, 1, 2, 0, 1])
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))

    def sums(records: Tensor) -> Params:
        with layers_draw_from(stream(0, Stream.LAYER)):
            return summed(net, records, y, W, replace(mechanism, clip=math.inf), {})

    broken = x.clone()
    broken[1] = math.nan
    alone = torch.full_like(x, math.nan)
    alone[1] = x[1]
    complete, without, only = sums(x), sums(broken), sums(alone)
    assert close(complete, {n: without[n] + only[n] for n in W})


def test_masked_coordinates_count_neither_in_the_norm_nor_in_the_sum() -> None:
    w = world("mlp")
    net = copy.deepcopy(w.net)
    W, x, y = trained(net, {"fc2", "ffc"}), w.data.x[:5], w.data.y[:5]
    mask = torch.rand(W["fc2.weight"].shape, generator=torch.Generator().manual_seed(0)) < 0.4
    got = summed(net, x, y, W, Mechanism(clip=0.2), {"fc2.weight": mask})
    assert close(got, by_hand(net, x, y, W, 0.2, {"fc2.weight": mask}))
    assert not bool(got["fc2.weight"][~mask].any())
    assert not close(
        got,
        {
            n: g * mask if n == "fc2.weight" else g
            for n, g in by_hand(net, x, y, W, 0.2, {}).items()
        },
    )


@pytest.mark.parametrize("mechanism", [GHOST, FUNC])
@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e30])
def test_a_record_whose_gradient_is_not_finite_counts_as_none(
    mechanism: Mechanism, bad: float
) -> None:
    w = world("mlp")
    net = copy.deepcopy(w.net)
    W, x, y = trained(net, set(modules_of(net))), w.data.x[:4].clone(), w.data.y[:4]
    want = summed(net, x[1:], y[1:], W, mechanism, {})
    x[0] = bad
    assert close(summed(net, x, y, W, mechanism, {}), want)
    assert not any(bool(g.any()) for g in summed(net, x[:1], y[:1], W, mechanism, {}).values())


@given(
    kind=st.sampled_from(["mlp", "cnn", "groupnorm"]),
    ghost=st.booleans(),
    bad=st.sampled_from([math.inf, -math.inf, math.nan]),
    broken=st.lists(st.booleans(), min_size=1, max_size=6),
    data=st.data(),
)
def test_any_records_without_finite_gradients_count_as_none_and_stay_as_they_are(
    kind: str, ghost: bool, bad: float, broken: list[bool], data: st.DataObject
) -> None:
    w = world(kind)
    net = copy.deepcopy(w.net)
    W = trained(net, data.draw(st.sets(st.sampled_from(modules_of(net)), min_size=1)))
    x, y = w.data.x[: len(broken)].clone(), w.data.y[: len(broken)]
    finite = ~torch.tensor(broken)
    x[~finite] = bad
    before, mechanism = x.clone(), Mechanism(clip=0.3, ghost=ghost)
    got = summed(net, x, y, W, mechanism, {})
    assert torch.equal(x.nan_to_num(), before.nan_to_num())
    assert close(got, summed(net, x[finite], y[finite], W, mechanism, {}))


@pytest.mark.parametrize("mechanism", [GHOST, FUNC])
def test_a_record_that_counts_as_none_is_no_reason_to_compute_again(
    mechanism: Mechanism, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, calls = world("mlp"), []
    net, pieces = copy.deepcopy(w.net), clipping.gradient_pieces

    def counted(net: nn.Module, x: Tensor, *others: Any) -> Any:
        calls.append(len(x))
        return pieces(net, x, *others)

    monkeypatch.setattr(clipping, "gradient_pieces", counted)
    x, W = w.data.x[:4].clone(), trained(net, set(modules_of(net)))
    for broken in range(5):
        x[:broken] = math.nan
        summed(net, x, w.data.y[:4], W, mechanism, {})
    assert calls == [4] * 5


def test_a_tensor_that_no_record_uses_may_have_a_mask() -> None:
    net, x, y, W = sample_net(Unused)
    mask = torch.ones(6, 6, dtype=torch.bool)
    got = summed(net, x, y, W, FUNC, {"unused.weight": mask})
    assert not bool(got["unused.weight"].any())
    assert close(got, by_hand(net, x, y, W, 1.0, {}))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_opacus_sums_the_same() -> None:
    from opacus import GradSampleModule

    for kind in ("mlp", "cnn", "groupnorm"):
        w = world(kind)
        net = copy.deepcopy(w.net).train()
        W, x, y = trained(net, set(modules_of(net))), w.data.x[:6], w.data.y[:6]
        got = summed(net, x, y, W, Mechanism(clip=0.4), {})
        theirs = GradSampleModule(copy.deepcopy(net), loss_reduction="sum")
        F.cross_entropy(theirs(x), y, reduction="sum").backward()
        samples = {n.removeprefix("_module."): p.grad_sample for n, p in theirs.named_parameters()}
        norms = torch.stack([g.flatten(1).square().sum(1) for g in samples.values()]).sum(0).sqrt()
        c = (0.4 / (norms + 1e-6)).clamp(max=1)
        assert close(
            got, {n: torch.einsum("b,b...->...", c, g).detach() for n, g in samples.items()}
        )


# --------------------------------------------------------------------------- networks of users


class Tied(nn.Module):
    """One matrix used twice: once by its layer, once behind the layer's back."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.fc(x)), self.fc.weight)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.fc(x)))


class TimeFirst(nn.Module):
    """Feeds its layer with time first: the first side is not the record."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.view(len(x), 2, 3).transpose(0, 1)).mean(0)


class Overwrites(nn.Module):
    """Changes a layer's input after the layer has seen it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * 1.0
        z = self.fc(h)
        with torch.no_grad():
            h.mul_(3.0)
        return z


FOLLOWED: Mapping[str, Callable[[], nn.Module]] = {
    "relu in place": lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 6)),
    "no bias": lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 6)),
    "sequence": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2)), nn.Linear(2, 4), nn.Flatten(), nn.Linear(12, 6)
    ),
    "wide sequence": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Linear(3, 64), nn.Linear(64, 64), nn.Flatten()
    ),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 3, (2, 3), (2, 1), (3, 2), (1, 2)),
        nn.ReLU(),
        nn.Flatten(),
    ),
    "deep convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 16, 1), nn.Conv2d(16, 16, 2), nn.Flatten()
    ),
    "norm of vectors": lambda: nn.Sequential(
        nn.Linear(6, 6), nn.GroupNorm(2, 6), nn.ReLU(), nn.Linear(6, 6)
    ),
}
NOT_FOLLOWED: Mapping[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "twice": Twice,
    "time first": TimeFirst,
    "overwrites": Overwrites,
    "layer norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)),
    "grouped": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 4, 1, groups=2), nn.Flatten()
    ),
    "circular": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 2, 2, padding=1, padding_mode="circular"),
        nn.Flatten(),
    ),
}


def sample_net(
    make: Callable[[], nn.Module], records: int = 4
) -> tuple[nn.Module, Tensor, Tensor, dict[str, Tensor]]:
    torch.manual_seed(3)
    net = make()
    return net, torch.randn(records, 6), torch.arange(records) % 3, dict(net.named_parameters())


@pytest.mark.parametrize("name", FOLLOWED)
def test_layers_with_a_rule_are_followed(name: str) -> None:
    net, x, y, W = sample_net(FOLLOWED[name])
    assert ghost_agrees(net, x, y, W)
    assert close(summed(net, x, y, W, Mechanism(clip=0.3), {}), by_hand(net, x, y, W, 0.3, {}))


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_what_cannot_be_followed_is_noticed_and_clipped_all_the_same(name: str) -> None:
    net, x, y, W = sample_net(NOT_FOLLOWED[name])
    assert not ghost_agrees(net, x, y, W)
    if name != "overwrites":  # whose gradient autograd itself refuses
        assert close(
            summed(net, x, y, W, Mechanism(clip=0.3, ghost=False), {}),
            by_hand(net, x, y, W, 0.3, {}),
        )


def test_norms_of_func_are_per_example_also_under_dropout() -> None:
    net, x, y, W = sample_net(
        lambda: nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 6)), 8
    )
    same = x[:1].expand(8, 6).contiguous()
    squares = func_pieces(net, same, y[:1].expand(8), W, {})["0.weight"][0]
    assert len({round(float(s), 5) for s in squares}) == 8, "each record draws its own mask"
