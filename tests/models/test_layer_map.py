"""Any network becomes layers, and a unit that can be pruned can be removed from the network."""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from fedp3.core import masks as M
from fedp3.core.errors import InputError
from fedp3.core.types import LayerMap, Params
from fedp3.models import unit_tracing
from fedp3.models.layer_map import layer_map
from fedp3.models.zoo import ModelSettings, ModelSpec, build

# --------------------------------------------------------------------------- nets


class Wired(nn.Module):
    """A net whose forward pass is a function of the net and its input."""

    def __init__(
        self, run: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter
    ) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def data_dependent(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.b(h if h.sum() > 0 else -h)


def conv_block(net: Any, x: Tensor) -> Tensor:
    h = F.relu(net.norm(net.conv(x)))
    return net.out(torch.flatten(F.max_pool2d(h, 2), 1))


def blank_names(net: nn.Module) -> list[str]:
    return [n for n in net.state_dict() if not n.endswith("num_batches_tracked")]


def fill(net: nn.Module, seed: int = 0) -> nn.Module:
    """Values that no initialiser would give: affine parts and statistics are not 0 and 1."""
    rng = torch.Generator().manual_seed(seed)
    for name, w in net.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            w.copy_(torch.randn(w.shape, generator=rng))
            if name.endswith("running_var"):
                w.abs_()
    return net


def inputs(*shape: int) -> Tensor:
    return torch.randn(5, *shape, generator=torch.Generator().manual_seed(3))


def small(name: str, shape: tuple[int, ...], width: float, **choices: Any) -> nn.Module:
    return build(ModelSpec(shape, 4, ModelSettings(name=name, width=width, **choices)), 0)


IMAGE = (2, 8, 8)
Make = Callable[[], nn.Module]
# Networks in which units can be traced, with the shape of a sample.
FOLLOWED: dict[str, tuple[Make, tuple[int, ...]]] = {
    "mlp": (lambda: small("mlp", (1, 3, 3), 0.006), (1, 3, 3)),
    "cnn": (lambda: small("cnn", (1, 32, 32), 1 / 16), (1, 32, 32)),
    "resnet-batch-3": (lambda: small("resnet18", IMAGE, 1 / 16), IMAGE),
    "resnet-group-7": (
        lambda: small("resnet18", (1, 32, 32), 1 / 4, norm="group", stem=7),
        (1, 32, 32),
    ),
    "functional": (
        lambda: Wired(
            conv_block, conv=nn.Conv2d(2, 6, 3), norm=nn.GroupNorm(3, 6), out=nn.Linear(54, 4)
        ),
        IMAGE,
    ),
    "norm behind a flatten": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3),
            nn.Flatten(),
            nn.BatchNorm1d(108),
            nn.ReLU(),
            nn.Linear(108, 5),
            nn.Tanh(),
            nn.Linear(5, 4),
        ),
        IMAGE,
    ),
    "groups of a flattened conv": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 7), nn.Flatten(), nn.GroupNorm(2, 16), nn.Linear(16, 4)
        ),
        IMAGE,
    ),
    "two group norms": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 12, 3),
            nn.GroupNorm(6, 12),
            nn.ReLU(),
            nn.GroupNorm(4, 12),
            nn.Conv2d(12, 4, 6),
            nn.Flatten(),
        ),
        IMAGE,
    ),
    "view by size": (
        lambda: Wired(
            lambda net, x: net.b(net.a(x).relu().view(x.size(0), -1)),
            a=nn.Conv2d(2, 3, 7),
            b=nn.Linear(12, 4),
        ),
        IMAGE,
    ),
    "view by shape, in a tuple": (
        lambda: Wired(
            lambda net, x: net.b(net.a(x).reshape((x.shape[0], -1))),
            a=nn.Conv2d(2, 3, 7),
            b=nn.Linear(12, 4),
        ),
        IMAGE,
    ),
    "flatten method": (
        lambda: Wired(
            lambda net, x: net.b(net.a(x).flatten(start_dim=1)),
            a=nn.Conv2d(2, 3, 7),
            b=nn.Linear(12, 4),
        ),
        IMAGE,
    ),
    "sequences": (
        lambda: Wired(
            lambda net, x: net.c(net.b(net.a(x).relu()).tanh()).mean(1),
            a=nn.Linear(6, 5),
            b=nn.Linear(5, 3),
            c=nn.Linear(3, 4),
        ),
        (7, 6),
    ),
    "conv1d": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 4, 2),
            nn.BatchNorm1d(4),
            nn.ELU(),
            nn.MaxPool1d(2),
            nn.Conv1d(4, 2, 1),
            nn.Flatten(),
            nn.Linear(6, 3),
        ),
        (3, 7),
    ),
    "conv3d": (
        lambda: nn.Sequential(
            nn.Conv3d(1, 4, 2),
            nn.BatchNorm3d(4),
            nn.SiLU(),
            nn.AvgPool3d(2),
            nn.Flatten(),
            nn.Linear(4, 3),
        ),
        (1, 3, 3, 3),
    ),
    "norms of neurons before the logits": (
        lambda: nn.Sequential(
            nn.Linear(6, 4),
            nn.BatchNorm1d(4),
            nn.Dropout(0.0),
            nn.Linear(4, 6),
            nn.GroupNorm(3, 6),
            nn.ReLU(),
            nn.Linear(6, 4),
            nn.LogSoftmax(1),
        ),
        (6,),
    ),
    "norms of neurons behind a flatten": (
        lambda: Wired(
            lambda n, x: n.c(n.norm(n.b(n.a(x).flatten(1))).relu())[:, :4],
            a=nn.Conv2d(2, 3, 7),
            b=nn.Linear(12, 5),
            norm=nn.BatchNorm1d(5),
            c=nn.Linear(5, 6),
        ),
        IMAGE,
    ),
    "normalised input": (
        lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5), nn.LeakyReLU(), nn.Linear(5, 4)),
        (6,),
    ),
}


# --------------------------------------------------------------------------- removing units


def cut(layers: LayerMap, group: str, keep: Sequence[int]) -> dict[str, Tensor]:
    """Keep these granules of one group."""
    u = layers.groups[group]
    indices = torch.tensor(sorted(keep))[:, None] * u.granule + torch.arange(u.granule)
    return {group: indices.flatten()}


def loaded(net: nn.Module, W: Params) -> nn.Module:
    out = copy.deepcopy(net)
    out.load_state_dict(W, strict=False)
    return out


def silenced(net: nn.Module, layers: LayerMap, units: dict[str, Tensor]) -> Params:
    """The net's tensors with the rows of cut units at zero; what they feed is left alone."""
    W = {n: w.clone() for n, w in net.state_dict().items() if n in layers.shapes}
    for n, w in W.items():
        block = M.block(n, units, layers)
        if block is not None and block.rows is not None:
            W[n] = M.zero_pruned(w, M.Block(block.rows, None))
    return W


def removed(net: nn.Module, layers: LayerMap, units: dict[str, Tensor]) -> nn.Module:
    """The network rebuilt without the pruned units."""
    small = copy.deepcopy(net)
    for n, w in net.state_dict().items():
        if n in layers.shapes:
            path, _, attribute = n.rpartition(".")
            m = small.get_submodule(path)
            value = M.take(w, M.block(n, units, layers)).clone()
            setattr(m, attribute, value if n in layers.buffers else nn.Parameter(value))
            if isinstance(m, nn.GroupNorm) and attribute == "weight":
                m.num_groups = m.num_groups * len(value) // len(w)
    return small


def fed(layers: LayerMap, units: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensor -> columns that only cut units feed."""
    out = {}
    for n, shape in layers.shapes.items():
        block = M.block(n, units, layers)
        if block is not None and block.cols is not None:
            gone = torch.ones(shape[1], dtype=torch.bool)
            gone[block.cols] = False
            out[n] = gone.nonzero().flatten()
    return out


def assert_removable(net: nn.Module, layers: LayerMap, units: dict[str, Tensor], x: Tensor) -> None:
    net, x = copy.deepcopy(net).double(), x.double()  # normalisation magnifies rounding
    quiet = silenced(net, layers, units)
    loud = {n: w.clone() for n, w in quiet.items()}
    columns = fed(layers, units)
    assert columns, "a unit that can be pruned feeds a column"
    for n, at in columns.items():
        loud[n].index_fill_(1, at, 7.0)
    for mode in (False, True):
        with torch.no_grad():
            y = loaded(net, quiet).train(mode)(x)
            assert torch.equal(y, loaded(net, loud).train(mode)(x)), (
                "the columns they feed count for nothing"
            )
            torch.testing.assert_close(
                removed(net, layers, units).train(mode)(x), y, rtol=1e-6, atol=1e-6
            )


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_silent_unit_is_a_unit_removed(name: str) -> None:
    make, shape = FOLLOWED[name]
    net = fill(make())
    layers = layer_map(net)
    free = [g for g, u in layers.groups.items() if not u.fixed and u.units > u.granule]
    assert free and not layers.note
    for g in free:
        blocks = layers.groups[g].units // layers.groups[g].granule
        assert_removable(net, layers, cut(layers, g, range(0, blocks, 2)), inputs(*shape))


@pytest.mark.parametrize(
    ("name", "free"),
    [
        ("norms of neurons before the logits", {"0", "3"}),
        ("norms of neurons behind a flatten", {"a", "b"}),
    ],
)
def test_units_before_a_norm_of_neurons_can_be_cut(name: str, free: set[str]) -> None:
    layers = layer_map(FOLLOWED[name][0]())
    assert {g for g, u in layers.groups.items() if not u.fixed} == free


ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.LeakyReLU, nn.SiLU, nn.ELU, nn.ReLU6, nn.Identity)


@st.composite
def sequentials(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """Convolutions, then fully connected layers, with norms, pools and dropouts between them."""
    parts: list[nn.Module] = []
    shape: tuple[int, ...]
    convolutions = draw(st.integers(0, 3))
    if convolutions:
        channels, side = draw(st.integers(1, 2)), 8
        shape = (channels, side, side)
        for _ in range(convolutions):
            out, kernel, bias = (
                draw(st.integers(1, 6)),
                draw(st.sampled_from((1, 3))),
                draw(st.booleans()),
            )
            parts.append(nn.Conv2d(channels, out, kernel, padding=kernel // 2, bias=bias))
            groups = draw(st.sampled_from([g for g in range(1, out + 1) if out % g == 0]))
            parts.extend(
                draw(st.sampled_from(([], [nn.BatchNorm2d(out)], [nn.GroupNorm(groups, out)])))
            )
            parts.append(draw(st.sampled_from(ACTIVATIONS))())
            if side > 2 and draw(st.booleans()):
                parts.append(draw(st.sampled_from((nn.MaxPool2d, nn.AvgPool2d)))(2))
                side //= 2
            channels = out
        parts.append(nn.Flatten())
        width = channels * side * side
        parts.extend(draw(st.sampled_from(([], [nn.BatchNorm1d(width)]))))
    else:
        width = draw(st.integers(1, 6))
        shape = (width,)
    for _ in range(draw(st.integers(0 if convolutions else 1, 3))):
        out = draw(st.integers(1, 7))
        parts.append(nn.Linear(width, out, bias=draw(st.booleans())))
        parts.extend(draw(st.sampled_from(([], [nn.BatchNorm1d(out)], [nn.GroupNorm(1, out)]))))
        parts.extend([draw(st.sampled_from(ACTIVATIONS))(), nn.Dropout(0.0)])
        width = out
    parts.append(nn.Linear(width, 3))
    return nn.Sequential(*parts), shape


@given(sequentials(), st.data())
def test_in_any_sequential_every_unit_but_the_outputs_can_be_cut(
    drawn: tuple[nn.Module, tuple[int, ...]], data: st.DataObject
) -> None:
    net, shape = drawn
    fill(net)
    layers = layer_map(net)
    weighted = [p for p, m in net.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert list(layers.layers) == weighted
    assert [g for g, u in layers.groups.items() if u.fixed] == [layers.head] == weighted[-1:]
    g = data.draw(st.sampled_from(weighted[:-1]))
    blocks = layers.groups[g].units // layers.groups[g].granule
    retained = data.draw(st.sets(st.integers(0, blocks - 1), min_size=1))
    if len(retained) < blocks:
        assert_removable(net, layers, cut(layers, g, sorted(retained)), inputs(*shape))


@given(sequentials())
def test_every_tensor_is_in_exactly_one_layer(drawn: tuple[nn.Module, tuple[int, ...]]) -> None:
    net, _ = drawn
    layers = layer_map(net)
    named = [n for names in layers.layers.values() for n in names]
    assert sorted(named) == sorted(blank_names(net)) == sorted(layers.shapes)
    assert layers.buffers == {n for n in named if "running" in n}
    assert layers.prunable == {n for n in named if len(layers.shapes[n]) > 1}
    for n, axes in layers.axes.items():
        for side, axis in enumerate(axes):
            if axis is not None:
                assert layers.shapes[n][side] == layers.groups[axis.group].units * axis.repeat


def keeps_zeros_apart(op: Any, x: Tensor) -> bool:
    """Whether silent units, and only those, are silent behind a module, function or method."""
    quiet = x.clone()
    quiet[:, [1, 4]] = 0
    # A kernel size, or the output size of an adaptive pool.
    args = (2,) if op in unit_tracing.POOLS else ()
    if isinstance(op, str):
        y = getattr(Tensor, op)(quiet)
    elif isinstance(op, type):
        y = op(*args)(quiet)
    else:
        y = op(quiet, *args)
    return y.shape[:2] == x.shape[:2] and not y[:, [1, 4]].any() and bool(y[:, [0, 2, 3, 5]].any())


def test_what_units_are_followed_through_maps_zero_to_zero_and_keeps_units_apart() -> None:
    for op in unit_tracing.POINTWISE | unit_tracing.POOLS:
        # The most dimensions first: a pool with one too few takes channels for a dimension.
        for sides in (3, 2, 1):
            try:
                fits = keeps_zeros_apart(op, torch.rand(64, 6, *(4,) * sides) + 0.1)
            except (RuntimeError, ValueError, UserWarning):
                continue
            assert fits, op
            break
        else:
            raise AssertionError(f"{op} takes no channels")


# --------------------------------------------------------------------------- fixed units


def _residual(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.c(h + net.b(h.relu()))


def _linear(*sizes: int) -> dict[str, nn.Module]:
    return {"abcd"[i]: nn.Linear(m, n) for i, (m, n) in enumerate(pairwise(sizes))}


# Networks with fixed units: group -> part of the reason.
FIXED: dict[str, tuple[Make, dict[str, str]]] = {
    "sigmoid": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2)),
        {"0": "Sigmoid reads"},
    ),
    "softplus": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 2)),
        {"0": "Softplus reads"},
    ),
    "softmax": (
        lambda: Wired(lambda n, x: n.b(F.softmax(n.a(x), 1)), **_linear(4, 4, 2)),
        {"a": "softmax reads"},
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
        {"0": "LayerNorm reads"},
    ),
    "group norm without scales": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4, affine=False), nn.ReLU(), nn.Conv2d(4, 2, 1)
        ),
        {"0": "GroupNorm 1 has no tensors"},
    ),
    "instance norm": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 2, 1)
        ),
        {"0": "InstanceNorm2d reads"},
    ),
    "instance norm without scales": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)
        ),
        {"0": "InstanceNorm2d reads"},
    ),
    "concatenation": (
        lambda: Wired(
            lambda n, x: n.c(torch.cat([n.a(x), n.b(x)], 1)),
            a=nn.Linear(4, 4),
            b=nn.Linear(4, 4),
            c=nn.Linear(8, 2),
        ),
        {"a": "cat reads", "b": "cat reads"},
    ),
    "residual sum": (
        lambda: Wired(_residual, **_linear(4, 4, 4, 2)),
        {"a": "residual sum", "b": "residual sum"},
    ),
    "product": (
        lambda: Wired(
            lambda n, x: n.c(n.a(x) * n.b(x)),
            a=nn.Linear(4, 4),
            b=nn.Linear(4, 4),
            c=nn.Linear(4, 2),
        ),
        {"a": "mul reads", "b": "mul reads"},
    ),
    "depthwise convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 1), nn.Flatten()
        ),
        {"0": "grouped convolution 1 reads", "1": "grouped convolution 1 writes", "2": "output"},
    ),
    "weight used twice": (
        lambda: Wired(lambda n, x: n.c(n.b(n.b(n.a(x).relu()).relu())), **_linear(4, 4, 4, 2)),
        {"a": "b is used more than once", "b": "b is used more than once", "c": "output"},
    ),
    "weight used twice, by two readers": (
        lambda: Wired(
            lambda n, x: n.b(n.a(x)) + n.b(n.c(x)),
            a=nn.Linear(4, 3),
            c=nn.Linear(4, 3),
            b=nn.Linear(3, 2),
        ),
        {"a": "b is used more", "c": "b is used more", "b": "residual sum"},
    ),
    "norm used twice": (
        lambda: Wired(
            lambda n, x: n.c(n.norm(n.b(n.norm(n.a(x)).relu())).relu()),
            **_linear(4, 4, 4, 2),
            norm=nn.BatchNorm1d(4),
        ),
        {"a": "norm is used more than once", "b": "norm is used more than once"},
    ),
    "weight of a module read by hand": (
        lambda: Wired(
            lambda n, x: F.linear(n.b(n.a(x)), n.b.weight.t()), a=nn.Linear(4, 3), b=nn.Linear(3, 3)
        ),
        {"a": "b is used more than once", "b": "linear reads"},
    ),
    "bias of a module read by hand": (
        lambda: Wired(lambda n, x: n.b(n.a(x).relu()) + n.a.bias.sum(), **_linear(4, 4, 2)),
        {"a": "a is used more than once"},
    ),
    "reparametrised weight": (
        lambda: nn.Sequential(nn.Linear(4, 4), weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2)),
        {"0": "reparametrised weight of 1 reads"},
    ),
    "second input of a module": (
        lambda: Wired(
            lambda n, x: n.c(n.b(x, n.a(x))),
            a=nn.Linear(4, 3),
            b=nn.Bilinear(4, 3, 5),
            c=nn.Linear(5, 2),
        ),
        {"a": "Bilinear reads"},
    ),
    "transposed": (
        lambda: Wired(lambda n, x: n.b(n.a(x).T.T), **_linear(4, 4, 2)),
        {"a": "getattr reads"},
    ),
    # Sizes agree in all of these, and yet what is read are no units of the writer.
    "fully connected over a side of the image": (
        lambda: Wired(lambda n, x: n.b(n.a(x)).flatten(1), a=nn.Conv2d(2, 4, 1), b=nn.Linear(4, 2)),
        {"a": "b reads them after a change of shape"},
    ),
    "flatten of the image alone": (
        lambda: Wired(
            lambda n, x: n.b(n.a(x).flatten(2)).mean(1), a=nn.Conv2d(2, 4, 1), b=nn.Linear(16, 2)
        ),
        {"a": "flatten reads"},
    ),
    "flatten that takes the batch along": (
        lambda: Wired(lambda n, x: n.b(torch.flatten(n.a(x))), **_linear(4, 4, 2)),
        {"a": "flatten reads"},
    ),
    "flattened sequence": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(12, 2)),
        {"0": "2 reads them after a change of shape"},
    ),
    "view of three sides": (
        lambda: Wired(
            lambda n, x: n.b(n.a(x).view(-1, 2, 2)).flatten(1), a=nn.Linear(4, 4), b=nn.Linear(2, 2)
        ),
        {"a": "view reads"},
    ),
    "view with the features spelled out": (
        lambda: Wired(
            lambda n, x: n.b(n.a(x).view(-1, 12)), a=nn.Conv2d(2, 3, 7), b=nn.Linear(12, 4)
        ),
        {"a": "view reads"},
    ),
    "flattened image cut up again": (
        lambda: Wired(
            lambda n, x: n.b(n.a(x).flatten(1).view(4 * x.size(0), -1)),
            a=nn.Conv2d(2, 4, 1),
            b=nn.Linear(4, 2),
        ),
        {"a": "view reads"},
    ),
    "pool over neurons": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.AvgPool1d(3, 1, 1), nn.Linear(4, 2)),
        {"0": "AvgPool1d reads"},
    ),
    "norm over another side": (
        lambda: Wired(
            lambda n, x: n.b(n.norm(n.a(x))).mean(1), **_linear(4, 4, 2), norm=nn.BatchNorm1d(3)
        ),
        {"a": "norm reads them after a change of shape"},
    ),
    "batch norm over as many tokens as units": (
        lambda: Wired(
            lambda n, x: n.b(n.norm(n.a(x)).relu()).mean(1),
            **_linear(4, 4, 2),
            norm=nn.BatchNorm1d(4),
        ),
        {"a": "norm normalises dimension 1"},
    ),
    "group norm over as many tokens as units": (
        lambda: Wired(
            lambda n, x: n.b(n.norm(n.a(x)).relu())[:, 0],
            **_linear(4, 4, 2),
            norm=nn.GroupNorm(2, 4),
        ),
        {"a": "norm normalises dimension 1"},
    ),
    "tokens that are flattened behind the norm": (
        lambda: nn.Sequential(
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.ReLU(),
            nn.Linear(4, 4),
            nn.Flatten(),
            nn.Linear(16, 2),
        ),
        {"0": "1 normalises dimension 1", "3": "after a change of shape"},
    ),
}


@pytest.mark.parametrize("name", FIXED)
def test_units_that_cannot_be_followed_are_fixed_with_the_reason(name: str) -> None:
    make, reasons = FIXED[name]
    layers = layer_map(make())
    assert not layers.note
    for g, why in reasons.items():
        assert why in layers.groups[g].fixed


def test_a_silent_unit_before_a_sigmoid_is_not_a_unit_removed() -> None:
    """Why units before a sigmoid are fixed: zero units still count in the columns they feed."""
    net = fill(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2)))
    wired = layer_map(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert not wired.groups["0"].fixed
    with pytest.raises(AssertionError, match="columns they feed"):
        assert_removable(net, wired, cut(wired, "0", [0, 1]), inputs(4))


# --------------------------------------------------------------------------- layers of any net


def _attention(net: Any, x: Tensor) -> Tensor:
    h = net.embed(x) + net.place
    y, _ = net.attend(h, h, h)
    return net.out(net.norm(h + y).mean(1))


def _recurrent(net: Any, x: Tensor) -> Tensor:
    h, _ = net.lstm(net.embed(x.long()))
    return net.out(h[:, -1])


def _by_hand(net: Any, x: Tensor) -> Tensor:
    return net.out(F.relu(F.linear(x, net.first, net.shift)))


def _first_normalised(net: Any, x: Tensor) -> Tensor:
    first, second = net.a(x), net.b(x.relu())
    return net.c(net.norm(first) + second).mean(1)


class Centred(nn.LayerNorm):
    """Not torch's own module, so it is traced through."""


# Networks with the shape of a sample, and their layers in order: layer -> number of tensors.
ANY: dict[str, tuple[Make, tuple[int, ...], dict[str, int]]] = {
    "batch norm, pool, flatten": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(36, 3),
        ),
        (1, 8, 8),
        {"0": 6, "5": 2},
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(), nn.ReLU(), nn.Linear(5, 3)),
        (4,),
        {"0": 2, "3": 2},
    ),
    "embedding and lstm": (
        lambda: Wired(
            _recurrent,
            embed=nn.Embedding(9, 4),
            lstm=nn.LSTM(4, 5, batch_first=True),
            out=nn.Linear(5, 3),
        ),
        (6,),
        {"embed": 1, "lstm": 4, "out": 2},
    ),
    "attention, registered in another order": (
        lambda: Wired(
            _attention,
            out=nn.Linear(8, 3),
            norm=nn.LayerNorm(8),
            embed=nn.Linear(5, 8),
            attend=nn.MultiheadAttention(8, 2, batch_first=True),
            place=nn.Parameter(torch.zeros(4, 8)),
        ),
        (4, 5),
        {"embed": 2, "net": 1, "attend": 2, "attend.out_proj": 4, "out": 2},
    ),
    "a transformer block": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(32, 3)
        ),
        (4, 8),
        {"0": 12, "2": 2},
    ),
    "norm before anything": (
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)),
        (4,),
        {"1": 6, "3": 2},
    ),
    "layer norm before anything": (
        lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)),
        (4,),
        {"1": 4, "3": 2},
    ),
    "layer norm over an image": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.LayerNorm((4, 6, 6)), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
        ),
        (1, 8, 8),
        {"0": 4, "4": 2},
    ),
    "norm of an image before anything": (
        lambda: nn.Sequential(nn.RMSNorm((1, 8, 8)), nn.Flatten(), nn.Linear(64, 3)),
        (1, 8, 8),
        {"2": 3},
    ),
    "layer norm of the first of two layers": (
        lambda: Wired(
            _first_normalised,
            a=nn.Linear(4, 5),
            b=nn.Linear(4, 5),
            norm=nn.LayerNorm((2, 5)),
            c=nn.Linear(5, 3),
        ),
        (2, 4),
        {"a": 4, "b": 2, "c": 2},
    ),
    "a layer norm of one's own": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), Centred((6, 6)), nn.Flatten(), nn.Linear(144, 3)),
        (1, 8, 8),
        {"0": 4, "3": 2},
    ),
    "weights of the net itself": (
        lambda: Wired(
            _by_hand,
            out=nn.Linear(5, 3),
            first=nn.Parameter(torch.ones(5, 4)),
            shift=nn.Parameter(torch.ones(5)),
        ),
        (4,),
        {"net": 2, "out": 2},
    ),
    "a part that is never run": (
        lambda: Wired(
            lambda n, x: n.b(n.a(x)), a=nn.Linear(4, 5), b=nn.Linear(5, 3), spare=nn.Linear(9, 9)
        ),
        (4,),
        {"spare": 2, "a": 2, "b": 2},
    ),
    "data-dependent steps": (
        lambda: Wired(data_dependent, **_linear(4, 5, 3)),
        (4,),
        {"a": 2, "b": 2},
    ),
    "two readers of one tensor": (
        lambda: Wired(
            lambda n, x: n.c(n.a(x.relu()) + n.b(x)),
            a=nn.Linear(4, 5),
            b=nn.Linear(4, 5),
            c=nn.Linear(5, 3),
        ),
        (4,),
        {"a": 2, "b": 2, "c": 2},
    ),
    "a shortcut": (
        lambda: Wired(
            lambda n, x: n.c(n.a(x) + n.b(x)),
            a=nn.Linear(4, 5),
            b=nn.Linear(4, 5),
            c=nn.Linear(5, 3),
        ),
        (4,),
        {"a": 4, "c": 2},
    ),
    "a single layer": (lambda: nn.Linear(4, 3), (4,), {"net": 2}),
    "reparametrised": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), weight_norm(nn.Linear(5, 3))),
        (4,),
        {"0": 2, "2": 3},
    ),
    "a module called like a question": (
        lambda: Wired(lambda n, x: n.out(n.shape(x)), shape=nn.GRUCell(4, 3), out=nn.Linear(3, 3)),
        (4,),
        {"shape": 4, "out": 2},
    ),
}


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, Centred])
@pytest.mark.parametrize(
    "run", [lambda n, x: n.b(n.norm(n.a(x)).flatten(1)), data_dependent], ids=["traced", "not"]
)
def test_scales_and_shifts_over_several_sides_are_not_pruned_and_begin_no_layer(
    norm: type, run: Any
) -> None:
    layers = layer_map(Wired(run, a=nn.Conv2d(1, 4, 3), norm=norm((4, 6, 6)), b=nn.Linear(144, 3)))
    assert bool(layers.note) == (run is data_dependent)
    assert layers.prunable == {"a.weight", "b.weight"}
    assert list(layers.layers) == ["a", "b"] and "norm.weight" in layers.layers["a"]


@pytest.mark.parametrize("name", ANY)
def test_any_net_has_layers_and_its_last_step_is_the_head(name: str) -> None:
    make, shape, want = ANY[name]
    net = make()
    assert net(torch.rand(5, *shape)).shape == (5, 3), "the example itself is a net"
    layers = layer_map(net)
    assert {l: len(names) for l, names in layers.layers.items()} == want
    assert list(layers.layers) == list(want)
    assert sorted(n for names in layers.layers.values() for n in names) == sorted(blank_names(net))
    assert layers.head == list(want)[-1] and layers.hidden == tuple(want)[:-1]


def test_a_net_that_cannot_be_traced_gets_a_note_with_the_reason() -> None:
    layers = layer_map(Wired(data_dependent, **_linear(4, 5, 3)))
    assert layers.note.startswith("the network cannot be traced (TraceError: ")
    assert not layers.groups and not layers.axes
    assert layers.prunable == {"a.weight", "b.weight"}


def test_tracing_draws_nothing_and_changes_nothing() -> None:
    net = Wired(lambda n, x: n.b(n.a(x) + torch.randn(5)), **_linear(4, 5, 3))
    before, values = torch.random.get_rng_state(), copy.deepcopy(net.state_dict())
    layer_map(net)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(w, values[n]) for n, w in net.state_dict().items())


def _writing(net: Any, x: Tensor) -> Tensor:
    h = net.a(x) - net.mean.mul_(0.5)
    net.seen = net.seen + h.detach().mean()
    return net.b(h - net.seen)


def test_tracing_does_not_write_to_buffers_and_adds_nothing_that_is_saved() -> None:
    net = Wired(_writing, **_linear(4, 5, 3))
    net.register_buffer("mean", torch.ones(5))
    net.register_buffer("seen", torch.ones(1), persistent=False)
    names = list(net.state_dict())
    layer_map(net)
    assert net.mean.tolist() == [1] * 5 and net.seen.tolist() == [1]
    assert list(net.state_dict()) == names


# --------------------------------------------------------------------------- refusals


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    return net


def test_a_tensor_in_two_places_belongs_to_the_first_and_its_units_are_fixed() -> None:
    layers = layer_map(_tied())
    assert layers.aliases == {"1.weight": "0.weight"}
    assert dict(layers.layers) == {"0": ("0.weight", "0.bias"), "1": ("1.bias",)}
    assert layers.groups["0"].fixed == "0.weight is used in two places"
    assert layers.chain is None
    given = layer_map(_tied(), {"a": ["0.weight", "0.bias"], "b": ["1.weight", "1.bias"]})
    assert dict(given.layers) == {"a": ("0.weight", "0.bias"), "b": ("1.bias",)}


def _aliased() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = nn.Parameter(net[0].weight.data)
    return net


def _counting() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4))
    net.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
    return net


def _causal(persistent: bool) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4))
    net.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(3), persistent)
    return net


def _diverged() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4))
    nn.init.constant_(net[0].bias, float("nan"))
    return net


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_aliased, r"tensors \['1.weight'\] share storage"),
        (lambda: nn.Linear(3, 2).double(), r"tensors \['bias', 'weight'\] are not float32"),
        (lambda: nn.Linear(3, 2).bfloat16(), "are not float32"),
        (_counting, r"tensors \['seen'\] are not float32"),
        (
            lambda: _causal(True),
            r"tensors \['mask'\] contain NaN or infinity.* "
            r"register_buffer\(\.\.\., persistent=False\)",
        ),
        (_diverged, r"tensors \['0.bias'\] contain NaN or infinity"),
        (lambda: nn.Sequential(nn.ReLU()), "no parameters"),
        (
            lambda: nn.Sequential(nn.LazyLinear(3)),
            r"tensors \['0.bias', '0.weight'\] have no shape yet",
        ),
    ],
)
def test_a_net_that_cannot_be_averaged_is_refused_with_the_reason(
    make: Callable[[], nn.Module], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        layer_map(make())


def test_a_mask_that_is_not_saved_is_no_tensor_to_average() -> None:
    assert set(layer_map(_causal(False)).shapes) == {"0.weight", "0.bias"}


# --------------------------------------------------------------------------- the user's layers


def _pair() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


NORM = ("1.weight", "1.bias", "1.running_mean", "1.running_var")


def test_the_users_layers_replace_the_traced_ones_and_keep_the_wiring() -> None:
    given = {"all but the norm": ("0.weight", "0.bias", "3.weight", "3.bias"), "norm": NORM}
    layers = layer_map(_pair(), given)
    assert layers.layers == given and layers.head == "norm"
    assert layers.axes == layer_map(_pair()).axes
    assert layers.groups["0"].layer == "all but the norm"


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ({"a": ("0.weight", "0.bias", *NORM)}, "missing: 3.bias, 3.weight"),
        (
            {"a": ("0.weight", "0.bias", *NORM, "3.weight", "3.bias", "4.weight")},
            "not in the network: 4.weight",
        ),
        (
            {"a": ("0.weight", "0.bias", *NORM), "b": ("3.weight", "3.bias", "0.bias")},
            "given twice: 0.bias",
        ),
        ({"a": ("0.weight", "0.bias", *NORM, "3.weight", "3.bias"), "b": ()}, "without tensors: b"),
        ({}, "missing: 0.bias, 0.weight"),
    ],
)
def test_the_users_layers_must_name_every_tensor_once(
    layers: dict[str, tuple[str, ...]], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        layer_map(_pair(), layers)
