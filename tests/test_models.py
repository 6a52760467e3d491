"""The paper's networks, counted layer by layer as its tables count them."""

import copy
import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import nn

from fedp3 import config, submodel
from fedp3.cost import sizes
from fedp3.data import from_tensors
from fedp3.engines.inprocess import sequential
from fedp3.errors import InputError
from fedp3.experiment import assemble_own
from fedp3.layermap import layer_map
from fedp3.models import MODELS, NORMS, PADS_TO, Spec, build, channels_last
from fedp3.server import run_round
from fedp3.types import LayerMap, Reply, Task

CIFAR10, CIFAR100 = Spec((3, 32, 32), 10), Spec((3, 32, 32), 100)
FMNIST, EMNIST_L = Spec((1, 32, 32), 10), Spec((1, 28, 28), 10)
FC1, FC2, CONV2 = 1_638_400, 1_048_576, 102_464


def mapped(name: str, spec: Spec) -> LayerMap:
    with torch.device("meta"):  # counting needs no values
        return layer_map(MODELS[name](spec))


# --------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("name", "spec", "layers", "with_biases"),
    [
        ("cnn", CIFAR10, (4_864, CONV2, FC1, FC2, 10_240), 2_806_602),
        ("cnn", CIFAR100, (4_864, CONV2, FC1, FC2, 102_400), 2_898_852),
        ("cnn", FMNIST, (1_664, CONV2, FC1, FC2, 10_240), 2_803_402),
        ("mlp", EMNIST_L, (802_816, FC2, FC2, 10_240), 2_913_290),
    ],
    ids=["cifar10", "cifar100", "fmnist", "emnist-l"],
)
def test_parameters_are_the_papers_with_and_without_fully_connected_biases(
    name: str, spec: Spec, layers: tuple[int, ...], with_biases: int
) -> None:
    m = mapped(name, spec)
    paper, true = sizes(m, "paper"), sizes(m, "true")
    assert tuple(paper.values()) == layers
    assert sum(true.values()) == with_biases
    biases = {l: m.shapes[f"{l}.bias"][0] for l in m.layers}
    assert true == {l: n + (biases[l] if l.startswith("f") else 0) for l, n in paper.items()}


@pytest.mark.parametrize(
    ("name", "total"), [("cifar10", 2_804_544), ("cifar100", 2_896_704), ("fmnist", 2_801_344), ("emnist", 2_910_208)]
)
def test_totals_of_the_papers_table(name: str, total: int) -> None:
    nets = {"cifar10": CIFAR10, "cifar100": CIFAR100, "fmnist": FMNIST, "emnist": EMNIST_L}
    assert sum(sizes(mapped("mlp" if name == "emnist" else "cnn", nets[name]), "paper").values()) == total


def test_resnet18_has_the_papers_eighteen_layers_and_the_known_count() -> None:
    m = mapped("resnet18", CIFAR10)
    blocks = [f"b{b}.{r}.conv{c}" for b in (1, 2, 3, 4) for r in (0, 1) for c in (1, 2)]
    assert list(m.layers) == ["conv0", *blocks, "ffc"]
    size = sizes(m)
    assert sum(size.values()) == 11_173_962
    each = [sum(n for l, n in size.items() if l.startswith(f"b{b}.")) for b in (1, 2, 3, 4)]
    assert each == [147_968, 525_568, 2_099_712, 8_393_728]


def test_a_shortcut_travels_with_the_first_convolution_of_its_block_and_norms_with_their_convolution() -> None:
    m = mapped("resnet18", CIFAR10)
    own = {n.removeprefix("b2.0.") for n in m.layers["b2.0.conv1"]}
    norm = {"weight", "bias", "running_mean", "running_var"}
    assert own == {"conv1.weight", "shortcut.0.weight", *(f"{p}.{n}" for p in ("norm1", "shortcut.1") for n in norm)}
    assert {n.partition(".")[0] for n in m.layers["conv0"]} == {"conv0", "norm0"}


def test_group_norm_has_the_same_parameters_and_no_statistics() -> None:
    batch, group = mapped("resnet18", CIFAR10), mapped("resnet18", Spec((3, 32, 32), 10, norm="group"))
    assert sizes(batch) == sizes(group)
    assert len(batch.buffers) == 2 * 20 and not group.buffers


def test_the_two_stems_differ_in_the_first_convolution_alone() -> None:
    three, seven = mapped("resnet18", CIFAR10), mapped("resnet18", Spec((3, 32, 32), 10, stem=7))
    assert sizes(three)["conv0"] == 3 * 64 * 9 + 128 and sizes(seven)["conv0"] == 3 * 64 * 49 + 128
    assert {n: s for n, s in three.shapes.items() if n != "conv0.weight"} == {
        n: s for n, s in seven.shapes.items() if n != "conv0.weight"
    }


# --------------------------------------------------------------------------- width and wiring


def hidden_units(m: LayerMap) -> dict[str, int]:
    return {g: u.units for g, u in m.groups.items() if g != m.head}


@pytest.mark.parametrize("width", [1 / 1024, 1 / 16, 0.3, 0.5, 1.0, 1.5])
@pytest.mark.parametrize(("name", "spec"), [("mlp", EMNIST_L), ("cnn", CIFAR10), ("resnet18", CIFAR10)])
def test_width_scales_every_hidden_layer_and_never_input_or_output(name: str, spec: Spec, width: float) -> None:
    whole, scaled = mapped(name, spec), mapped(name, Spec(spec.shape, spec.classes, width))
    want = {g: max(1, round(width * n)) for g, n in hidden_units(whole).items()}
    assert hidden_units(scaled) == want
    assert scaled.shapes["ffc.weight"][0] == spec.classes
    first = next(iter(scaled.shapes))
    assert scaled.shapes[first][1:] == whole.shapes[first][1:]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("stem", [3, 7])
def test_on_a_residual_stream_only_the_inner_width_of_a_block_can_be_cut(norm: str, stem: int) -> None:
    m = mapped("resnet18", Spec((3, 32, 32), 10, 0.5, norm, stem))
    assert not m.note
    free = [g for g, u in m.groups.items() if not u.fixed]
    assert free == [f"b{b}.{r}.conv1" for b in (1, 2, 3, 4) for r in (0, 1)]
    assert {m.groups[g].granule for g in free} == {1 if norm == "batch" else 8}
    assert m.groups["conv0"].fixed and m.groups["b2.0.shortcut.0"].fixed == "a residual sum reads them"


@pytest.mark.parametrize(("name", "spec"), [("mlp", EMNIST_L), ("cnn", CIFAR10)])
def test_every_hidden_unit_of_a_plain_net_can_be_cut(name: str, spec: Spec) -> None:
    m = mapped(name, spec)
    assert [g for g, u in m.groups.items() if u.fixed] == ["ffc"]
    reads = {n: a[1] for n, a in m.axes.items() if n.endswith("weight") and a[1] is not None}
    assert {n.partition(".")[0]: (a.group, a.repeat) for n, a in reads.items()} == (
        {"fc2": ("fc1", 1), "fc3": ("fc2", 1), "ffc": ("fc3", 1)}
        if name == "mlp"
        else {"conv2": ("conv1", 1), "fc1": ("conv2", 25), "fc2": ("fc1", 1), "ffc": ("fc2", 1)}
    )


@pytest.mark.parametrize("channels", [1, 4, 7, 8, 12, 20, 64])
def test_group_norm_finds_groups_for_any_width(channels: int) -> None:
    norm = NORMS["group"](channels)
    assert isinstance(norm, nn.GroupNorm)
    assert channels % norm.num_groups == 0 and (channels % 8 or channels // norm.num_groups == 8)


# --------------------------------------------------------------------------- building


@pytest.mark.parametrize("name", MODELS)
def test_any_model_answers_with_one_unclipped_number_per_class(name: str) -> None:
    side = PADS_TO[name] or 28
    net = build(name, Spec((1, side, side), 7, 1 / 16), 0).eval()
    logits = net(torch.randn(64, 1, side, side, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (64, 7)
    assert logits.min() < 0 < logits.max()


@pytest.mark.parametrize("name", MODELS)
def test_initial_weights_are_a_function_of_the_seed_and_of_nothing_else(name: str) -> None:
    spec = Spec((1, 32, 32), 4, 1 / 32)
    before = torch.random.get_rng_state()
    first, other = build(name, spec, 5).state_dict(), build(name, spec, 6).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    again = build(name, spec, 5).state_dict()
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(first["ffc.weight"], other["ffc.weight"])


@pytest.mark.parametrize(
    ("name", "spec", "text"),
    [
        ("cnn", Spec((1, 28, 28), 10), "takes 32x32 images"),
        ("cnn", Spec((3, 32), 10), "takes 32x32 images"),
        ("resnet18", Spec((3, 32, 32), 10, stem=5), "stem of 3"),
        ("resnet18", Spec((3, 32, 32), 10, norm="grup"), "unknown normalisation 'grup' .*did you mean 'group'"),
        ("resnet18", Spec((64,), 10), "takes images"),
        ("resnet81", Spec((3, 32, 32), 10), "unknown model 'resnet81' .*did you mean 'resnet18'"),
        ("mlp", Spec((4,), 10, 0.0), "factor above 0"),
        ("mlp", Spec((4,), 10, -1.0), "factor above 0"),
        ("mlp", Spec((4,), 10, math.nan), "factor above 0"),
        ("mlp", Spec((4,), 10, math.inf), "factor above 0"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_with_the_reason(name: str, spec: Spec, text: str) -> None:
    with pytest.raises(InputError, match=text):
        build(name, spec, 0)


# --------------------------------------------------------------------------- layout in memory


def last(w: torch.Tensor) -> bool:
    return w.stride() == torch.empty(w.shape, memory_format=torch.channels_last).stride()


def test_channels_last_computes_the_same_up_to_rounding() -> None:
    plain, laid = (build("cnn", Spec((3, 32, 32), 10, 0.1), 0) for _ in range(2))
    laid = channels_last(laid)
    assert last(laid.conv2.weight) and not last(plain.conv2.weight)
    x = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(laid(x), plain(x))
    gradients = [torch.autograd.grad(net(x).square().sum(), list(net.parameters())) for net in (laid, plain)]
    for g, h in zip(*gradients, strict=True):
        torch.testing.assert_close(g, h, rtol=1e-3, atol=1e-4)


def test_a_net_with_a_1x1_kernel_that_jumps_stays_as_it_is() -> None:
    net = channels_last(build("resnet18", Spec((3, 32, 32), 10, 0.1), 0))
    assert not any(last(w) for w in net.parameters() if w.dim() == 4)


class Film(nn.Module):
    """A net over films: 3x3x3 kernels, then the frames side by side as one image."""

    def __init__(self) -> None:
        super().__init__()
        self.over_time = nn.Conv3d(1, 4, 3)
        self.flat = nn.Conv2d(8, 4, 3)
        self.back = nn.ConvTranspose2d(4, 4, 3)
        self.register_buffer("shift", torch.zeros(1, 4, 6, 6))
        self.out = nn.Linear(144, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.back(self.flat(self.over_time(x).relu().flatten(1, 2)).relu()) + self.shift
        return self.out(x.flatten(1))


def test_what_has_four_sides_is_laid_out_and_a_net_with_other_convolutions_works_too() -> None:
    plain, x = Film(), torch.randn(2, 1, 4, 8, 8)
    laid = channels_last(copy.deepcopy(plain))
    assert {n for n, w in laid.state_dict().items() if w.dim() == 4 and last(w)} == {
        "flat.weight",
        "back.weight",
        "shift",
    }
    assert all(torch.equal(w, plain.state_dict()[n]) for n, w in laid.state_dict().items())
    torch.testing.assert_close(laid(x), plain(x))


def test_cut_nets_keep_the_layout_and_uploads_lie_as_their_shape_says() -> None:
    settings = ["prune.selector=neuron", "plan.others=train", "plan.layers=lowerb", "prune.keep=0.5", "local.steps=1"]
    c = config.parse({}, [*settings, "partition.clients=4", "partition.kind=iid", "run.clients_per_round=0"])
    data = from_tensors(torch.randn(40, 1, 32, 32), torch.arange(40) % 10, classes=10)
    e = assemble_own(c, build("cnn", Spec((1, 32, 32), 10, 0.1), 0), data)
    replies = []

    def watched(tasks: Sequence[Task]) -> Iterator[Reply]:
        for reply in sequential(e.recipe, e.shards).execute(tasks):
            replies.append(reply)
            yield reply

    state, _ = run_round(e.problem, e.start, watched)
    counts = {"conv1": 3, "conv2": 3}
    small = submodel.small_net(e.recipe.net, e.recipe.layers, counts)
    assert last(small.conv1.weight) and last(small.conv2.weight)  # conv1 sees one channel: it counts as either layout
    sent = [w for r in replies for w in r.tensors.values()]
    assert sent and all(w.is_contiguous() for w in [*sent, *state.W.values()])


def test_a_cut_of_a_net_that_stays_as_it_is_stays_so_too() -> None:
    net = build("resnet18", Spec((1, 32, 32), 10, 0.25), 0)
    layers = layer_map(net)
    small = submodel.small_net(net, layers, {g: u.units // 2 for g, u in layers.groups.items() if not u.fixed})
    assert not any(last(w) for w in small.parameters() if w.dim() == 4)


def test_a_step_under_a_mask_computes_in_the_layout_of_the_net() -> None:
    settings = ["prune.local=uniform", "plan.layers=prune-all", "prune.upload=kept", "local.steps=2"]
    c = config.parse({}, [*settings, "partition.clients=2", "partition.kind=iid", "run.clients_per_round=0"])
    data = from_tensors(torch.randn(40, 1, 32, 32), torch.arange(40) % 10, classes=10)
    e = assemble_own(c, build("cnn", Spec((1, 32, 32), 10, 0.1), 0), data)
    seen = []
    e.recipe.net.conv1.register_forward_hook(lambda m, x, y: seen.append(last(m.weight) and last(y)))
    run_round(e.problem, e.start, sequential(e.recipe, e.shards).execute)
    assert len(seen) > 2 and all(seen)
