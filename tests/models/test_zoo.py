"""The paper's networks, counted layer by layer as its tables count them."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from fedp3 import config
from fedp3.core.errors import InputError
from fedp3.core.types import LayerMap, Reply, Task
from fedp3.costs.traffic import sizes
from fedp3.data import from_tensors
from fedp3.engines.in_process import sequential
from fedp3.experiment.assemble import assemble_from
from fedp3.models import shrinking
from fedp3.models.layer_map import layer_map
from fedp3.models.zoo import MODELS, NORMS, ModelSettings, ModelSpec, build, channels_last
from fedp3.server.rounds import run_round

# The shape of one sample and the number of classes.
CIFAR10, CIFAR100 = ((3, 32, 32), 10), ((3, 32, 32), 100)
FMNIST, EMNIST_L = ((1, 32, 32), 10), ((1, 28, 28), 10)
Samples = tuple[tuple[int, ...], int]
FC1, FC2, CONV2 = 1_638_400, 1_048_576, 102_464


def spec_of(name: str, samples: Samples, **choices: Any) -> ModelSpec:
    return ModelSpec(*samples, ModelSettings(name=name, **choices))


def mapped(name: str, samples: Samples, **choices: Any) -> LayerMap:
    with torch.device("meta"):  # counting needs no values
        return layer_map(MODELS[name].build(spec_of(name, samples, **choices)))


# --------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("name", "samples", "layers", "with_biases"),
    [
        ("cnn", CIFAR10, (4_864, CONV2, FC1, FC2, 10_240), 2_806_602),
        ("cnn", CIFAR100, (4_864, CONV2, FC1, FC2, 102_400), 2_898_852),
        ("cnn", FMNIST, (1_664, CONV2, FC1, FC2, 10_240), 2_803_402),
        ("mlp", EMNIST_L, (802_816, FC2, FC2, 10_240), 2_913_290),
    ],
    ids=["cifar10", "cifar100", "fmnist", "emnist-l"],
)
def test_parameters_are_the_papers_with_and_without_fully_connected_biases(
    name: str, samples: Samples, layers: tuple[int, ...], with_biases: int
) -> None:
    m = mapped(name, samples)
    paper, true = sizes(m, "paper"), sizes(m, "true")
    assert tuple(paper.values()) == layers
    assert sum(true.values()) == with_biases
    biases = {l: m.shapes[f"{l}.bias"][0] for l in m.layers}
    assert true == {l: n + (biases[l] if l.startswith("f") else 0) for l, n in paper.items()}


@pytest.mark.parametrize(
    ("name", "total"),
    [("cifar10", 2_804_544), ("cifar100", 2_896_704), ("fmnist", 2_801_344), ("emnist", 2_910_208)],
)
def test_totals_of_the_papers_table(name: str, total: int) -> None:
    samples = {"cifar10": CIFAR10, "cifar100": CIFAR100, "fmnist": FMNIST, "emnist": EMNIST_L}
    m = mapped("mlp" if name == "emnist" else "cnn", samples[name])
    assert sum(sizes(m, "paper").values()) == total


def test_resnet18_has_the_papers_eighteen_layers_and_the_known_count() -> None:
    m = mapped("resnet18", CIFAR10)
    blocks = [f"b{b}.{r}.conv{c}" for b in (1, 2, 3, 4) for r in (0, 1) for c in (1, 2)]
    assert list(m.layers) == ["conv0", *blocks, "ffc"]
    size = sizes(m)
    assert sum(size.values()) == 11_173_962
    block_sizes = [sum(n for l, n in size.items() if l.startswith(f"b{b}.")) for b in (1, 2, 3, 4)]
    assert block_sizes == [147_968, 525_568, 2_099_712, 8_393_728]


def test_a_shortcut_joins_the_first_convolution_of_its_block_and_norms_theirs() -> None:
    m = mapped("resnet18", CIFAR10)
    tensors = {n.removeprefix("b2.0.") for n in m.layers["b2.0.conv1"]}
    norm = {"weight", "bias", "running_mean", "running_var"}
    assert tensors == {
        "conv1.weight",
        "shortcut.0.weight",
        *(f"{p}.{n}" for p in ("norm1", "shortcut.1") for n in norm),
    }
    assert {n.partition(".")[0] for n in m.layers["conv0"]} == {"conv0", "norm0"}


def test_group_norm_has_the_same_parameters_and_no_statistics() -> None:
    batch, group = mapped("resnet18", CIFAR10), mapped("resnet18", CIFAR10, norm="group")
    assert sizes(batch) == sizes(group)
    assert len(batch.buffers) == 2 * 20 and not group.buffers


def test_the_two_stems_differ_in_the_first_convolution_alone() -> None:
    three, seven = mapped("resnet18", CIFAR10), mapped("resnet18", CIFAR10, stem=7)
    assert sizes(three)["conv0"] == 3 * 64 * 9 + 128 and sizes(seven)["conv0"] == 3 * 64 * 49 + 128
    assert {n: s for n, s in three.shapes.items() if n != "conv0.weight"} == {
        n: s for n, s in seven.shapes.items() if n != "conv0.weight"
    }


# --------------------------------------------------------------------------- width and wiring


def hidden_units(m: LayerMap) -> dict[str, int]:
    return {g: u.units for g, u in m.groups.items() if g != m.head}


@pytest.mark.parametrize("width", [1 / 1024, 1 / 16, 0.3, 0.5, 1.0, 1.5])
@pytest.mark.parametrize(
    ("name", "samples"), [("mlp", EMNIST_L), ("cnn", CIFAR10), ("resnet18", CIFAR10)]
)
def test_width_scales_every_hidden_layer_and_never_input_or_output(
    name: str, samples: Samples, width: float
) -> None:
    full, scaled = mapped(name, samples), mapped(name, samples, width=width)
    want = {g: max(1, round(width * n)) for g, n in hidden_units(full).items()}
    assert hidden_units(scaled) == want
    _, classes = samples
    assert scaled.shapes["ffc.weight"][0] == classes
    first = next(iter(scaled.shapes))
    assert scaled.shapes[first][1:] == full.shapes[first][1:]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("stem", [3, 7])
def test_on_a_residual_stream_only_the_inner_width_of_a_block_can_be_cut(
    norm: str, stem: int
) -> None:
    m = mapped("resnet18", CIFAR10, width=0.5, norm=norm, stem=stem)
    assert not m.note
    free = [g for g, u in m.groups.items() if not u.fixed]
    assert free == [f"b{b}.{r}.conv1" for b in (1, 2, 3, 4) for r in (0, 1)]
    assert {m.groups[g].granule for g in free} == {1 if norm == "batch" else 8}
    assert (
        m.groups["conv0"].fixed and m.groups["b2.0.shortcut.0"].fixed == "a residual sum reads them"
    )


@pytest.mark.parametrize(("name", "samples"), [("mlp", EMNIST_L), ("cnn", CIFAR10)])
def test_every_hidden_unit_of_a_plain_net_can_be_cut(name: str, samples: Samples) -> None:
    m = mapped(name, samples)
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


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"gpt", "hf"}))
def test_any_model_answers_with_one_unclipped_number_per_class(name: str) -> None:
    side = MODELS[name].image_side or 28
    net = build(ModelSpec((1, side, side), 7, ModelSettings(name=name, width=1 / 16)), 0).eval()
    logits = net(torch.randn(64, 1, side, side, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (64, 7)
    assert logits.min() < 0 < logits.max()


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"gpt", "hf"}))
def test_initial_weights_are_a_function_of_the_seed_and_of_nothing_else(name: str) -> None:
    spec = spec_of(name, ((1, 32, 32), 4), width=1 / 32)
    before = torch.random.get_rng_state()
    first, other = build(spec, 5).state_dict(), build(spec, 6).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    again = build(spec, 5).state_dict()
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(first["ffc.weight"], other["ffc.weight"])


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("cnn", (1, 28, 28), "takes 32x32 images"),
        ("cnn", (3, 32), "takes 32x32 images"),
        ("resnet18", (64,), "takes images"),
    ],
)
def test_a_model_that_cannot_read_the_samples_is_refused_with_the_reason(
    name: str, shape: tuple[int, ...], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        build(spec_of(name, (shape, 10)), 0)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("name=resnet81", "unknown model 'resnet81' .*did you mean 'resnet18'"),
        ("norm=grup", "unknown normalisation 'grup' .*did you mean 'group'"),
        ("stem=5", "stem.* 3 or 7"),
        ("width=0.0", "width.* greater than 0"),
        ("width=-1.0", "width.* greater than 0"),
        ("width=nan", "width.* finite number"),
        ("width=inf", "width.* finite number"),
    ],
)
def test_settings_of_a_model_that_cannot_be_built_are_refused_with_the_reason(
    setting: str, text: str
) -> None:
    with pytest.raises(InputError, match=f"(?s){text}"):
        config.parse({}, [f"model.{setting}"])
    key, value = setting.split("=")
    with pytest.raises(ValidationError):
        ModelSettings(**{key: value if key in ("name", "norm") else float(value)})


# --------------------------------------------------------------------------- layout in memory


def last(w: torch.Tensor) -> bool:
    return w.stride() == torch.empty(w.shape, memory_format=torch.channels_last).stride()


def test_channels_last_computes_the_same_up_to_rounding() -> None:
    plain, laid = (
        build(ModelSpec((3, 32, 32), 10, ModelSettings(name="cnn", width=0.1)), 0) for _ in range(2)
    )
    laid = channels_last(laid)
    assert last(laid.conv2.weight) and not last(plain.conv2.weight)
    x = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(laid(x), plain(x))
    gradients = [
        torch.autograd.grad(net(x).square().sum(), list(net.parameters())) for net in (laid, plain)
    ]
    for g, h in zip(*gradients, strict=True):
        torch.testing.assert_close(g, h, rtol=1e-3, atol=1e-4)


def test_a_net_with_a_1x1_kernel_that_jumps_stays_as_it_is() -> None:
    net = channels_last(
        build(ModelSpec((3, 32, 32), 10, ModelSettings(name="resnet18", width=0.1)), 0)
    )
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
    settings = [
        "prune.selector=neuron",
        "plan.others=train",
        "plan.layers=lowerb",
        "prune.keep=0.5",
        "local.steps=1",
    ]
    c = config.parse(
        {}, [*settings, "partition.clients=4", "partition.kind=iid", "run.clients_per_round=0"]
    )
    data = from_tensors(torch.randn(40, 1, 32, 32), torch.arange(40) % 10, classes=10)
    e = assemble_from(
        c, build(ModelSpec((1, 32, 32), 10, ModelSettings(name="cnn", width=0.1)), 0), data
    )
    replies = []

    def watched(tasks: Sequence[Task]) -> Iterator[Reply]:
        for reply in sequential(e.client, e.shards).execute(tasks):
            replies.append(reply)
            yield reply

    state, _ = run_round(e.server, e.start, watched)
    counts = {"conv1": 3, "conv2": 3}
    small = shrinking.small_net(e.client.net, e.client.layers, counts)
    # conv1 reads one channel, so that its weight is contiguous in both layouts.
    assert last(small.conv1.weight) and last(small.conv2.weight)
    sent = [w for r in replies for w in r.tensors.values()]
    assert sent and all(w.is_contiguous() for w in [*sent, *state.W.values()])


def test_a_cut_of_a_net_that_stays_as_it_is_stays_so_too() -> None:
    net = build(ModelSpec((1, 32, 32), 10, ModelSettings(name="resnet18", width=0.25)), 0)
    layers = layer_map(net)
    small = shrinking.small_net(
        net, layers, {g: u.units // 2 for g, u in layers.groups.items() if not u.fixed}
    )
    assert not any(last(w) for w in small.parameters() if w.dim() == 4)


def test_a_step_under_a_mask_computes_in_the_layout_of_the_net() -> None:
    settings = [
        "prune.local_pruner=uniform",
        "plan.layers=prune-all",
        "plan.upload=retained",
        "local.steps=2",
    ]
    c = config.parse(
        {}, [*settings, "partition.clients=2", "partition.kind=iid", "run.clients_per_round=0"]
    )
    data = from_tensors(torch.randn(40, 1, 32, 32), torch.arange(40) % 10, classes=10)
    e = assemble_from(
        c, build(ModelSpec((1, 32, 32), 10, ModelSettings(name="cnn", width=0.1)), 0), data
    )
    seen = []
    e.client.net.conv1.register_forward_hook(
        lambda m, x, y: seen.append(last(m.weight) and last(y))
    )
    run_round(e.server, e.start, sequential(e.client, e.shards).execute)
    assert len(seen) > 2 and all(seen)
