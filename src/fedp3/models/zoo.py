"""The paper's networks, with a width factor: an MLP, a CNN and ResNet18.

The CNN has two convolutions and three fully connected layers.  The paper's text gives it four, but
its table and its 20/40/60 % imply three (erratum A14).  There is no ReLU behind the last layer,
where it would clip the logits (erratum A15).
"""

from collections.abc import Callable
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from fedp3.core.errors import InputError
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.core.registry import NameIn, Registry
from fedp3.core.settings import OWN, STRICT

Norm = Callable[[int], nn.Module]
NORMS: Registry[Norm] = Registry("normalisation")


@plain_dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A network that a config can name.

    Args:
        build: creates the network.  It draws the weights from torch's global generator, which is
            seeded before the call.
        image_side: the side length to which images are padded; None means no padding.
        several_inputs: whether it takes records of several tensors, such as tokens and a mask.
        tokenizer: the tokenizer file of a network that was trained with one.
    """

    build: "Callable[[ModelSpec], nn.Module]"
    image_side: int | None = None
    several_inputs: bool = False
    tokenizer: "Callable[[ModelSettings], Path] | None" = None


MODELS: Registry[Architecture] = Registry("model")


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The network that is trained."""

    name: Annotated[str, NameIn(MODELS, also=(OWN,))] = Field(
        default="mlp",
        description="the network; hf: the transformer in the folder path, of the kinds bert, "
        "distilbert, roberta, gpt2, llama and vit",
    )
    path: str = Field(
        default="",
        description="hf: a folder with config.json, model.safetensors and, for texts, "
        "tokenizer.json",
    )
    new_head: bool = Field(
        default=False,
        description="hf: replace a head that is for another number of classes than the data have",
    )
    width: float = Field(default=1.0, gt=0, le=8, description="factor on all hidden widths")
    norm: Annotated[str, NameIn(NORMS)] = Field(
        default="batch", description="resnet18: normalisation"
    )
    stem: Literal[3, 7] = Field(
        default=3,
        description="resnet18: 3 is a 3x3 stem for small images; 7 is 7x7 with stride 2 and max "
        "pooling, as for ImageNet",
    )
    blocks: int = Field(default=4, ge=1, le=64, description="gpt, vit: transformer blocks")
    heads: int = Field(
        default=4,
        ge=1,
        le=64,
        description="gpt, vit: attention heads, each 32 times the width factor wide",
    )
    layers: Literal["blocks", "sublayers"] = Field(
        default="blocks",
        description="transformers: a layer is a block, or attention and MLP of a block are two "
        "layers (sublayers)",
    )
    patch: int = Field(default=4, ge=1, description="vit: side length of a patch of an image")
    frozen: tuple[str, ...] = Field(
        default=(),
        description="names of layers or modules that stay as they are, such as ['embedding']: "
        "every client has them, and they are neither trained nor sent",
    )


# (features, classes) -> the module between body and head, and the head
Tail = Callable[[int, int], tuple[nn.Module, nn.Linear]]


def plain_tail(features: int, classes: int) -> tuple[nn.Module, nn.Linear]:
    """Nothing between the body and a linear head."""
    return nn.Identity(), nn.Linear(features, classes)


@plain_dataclass(frozen=True, slots=True)
class ModelSpec:
    """The input, output and settings of a network to build.

    Args:
        shape: the shape of one sample, (channels, height, width) for images.
        classes: the number of classes.
        settings: the user's settings.
        tail: creates the end of the network; a method may replace it (FedCR).
        labelled: whether every sample has one class label.
        vocabulary: the number of different tokens; 0 if samples are no tokens.
    """

    shape: tuple[int, ...]
    classes: int
    settings: ModelSettings = field(default_factory=ModelSettings)
    tail: Tail = plain_tail
    labelled: bool = True
    vocabulary: int = 0

    @property
    def width(self) -> float:
        """Factor on all hidden widths."""
        return self.settings.width


def scale_width(width: float, n: int) -> int:
    """Return n hidden units times the width factor, at least 1."""
    return max(1, round(width * n))


class MLP(nn.Module):
    """Fully connected layers: inputs - 1024 - 1024 - 1024 - classes at width 1.

    A tail other than the plain one replaces the third layer.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        h = scale_width(spec.width, 1024)
        self.fc1 = nn.Linear(torch.Size(spec.shape).numel(), h)
        self.fc2 = nn.Linear(h, h)
        self.fc3: nn.Module = nn.Linear(h, h) if spec.tail is plain_tail else nn.Identity()
        self.code, self.ffc = spec.tail(h, spec.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        x = F.relu(self.fc3(x))
        logits: Tensor = self.ffc(self.code(x))
        return logits


class CNN(nn.Module):
    """Two 5x5 convolutions and three fully connected layers, for 32x32 images.

    At width 1 the convolutions have 64 channels, and the other layers are
    1600 - 1024 - 1024 - classes.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        c, h = scale_width(spec.width, 64), scale_width(spec.width, 1024)
        self.conv1 = nn.Conv2d(spec.shape[0], c, 5)
        self.conv2 = nn.Conv2d(c, c, 5)
        self.fc1 = nn.Linear(c * 25, h)
        self.fc2 = nn.Linear(h, h)
        self.code, self.ffc = spec.tail(h, spec.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        logits: Tensor = self.ffc(self.code(x))
        return logits


def _batch_norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels)


def _group_norm(channels: int) -> nn.Module:
    # Groups of eight channels are small enough to be pruned; narrow networks use a divisor.
    groups = next(g for g in range(max(1, channels // 8), 0, -1) if channels % g == 0)
    return nn.GroupNorm(groups, channels)


NORMS.add("batch", _batch_norm)
NORMS.add("group", _group_norm)


class Residual(nn.Module):
    """A basic block: two 3x3 convolutions with an identity or 1x1 shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """A stem, four blocks B1..B4 of four convolutions, and a head: the paper's 18 layers."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        norm, stem = NORMS.pick(spec.settings.norm), spec.settings.stem
        c = [scale_width(spec.width, n) for n in (64, 128, 256, 512)]
        stride, padding = (1, 1) if stem == 3 else (2, 3)
        self.conv0 = nn.Conv2d(spec.shape[0], c[0], stem, stride, padding, bias=False)
        self.norm0 = norm(c[0])
        self.pool: nn.Module = nn.Identity() if stem == 3 else nn.MaxPool2d(3, 2, 1)
        self.b1 = nn.Sequential(Residual(c[0], c[0], 1, norm), Residual(c[0], c[0], 1, norm))
        self.b2 = nn.Sequential(Residual(c[0], c[1], 2, norm), Residual(c[1], c[1], 1, norm))
        self.b3 = nn.Sequential(Residual(c[1], c[2], 2, norm), Residual(c[2], c[2], 1, norm))
        self.b4 = nn.Sequential(Residual(c[2], c[3], 2, norm), Residual(c[3], c[3], 1, norm))
        self.code, self.ffc = spec.tail(c[3], spec.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm0(self.conv0(x))))
        x = self.b4(self.b3(self.b2(self.b1(x))))
        x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        logits: Tensor = self.ffc(self.code(x))
        return logits


def _cnn(spec: ModelSpec) -> nn.Module:
    if spec.shape[1:] != (32, 32):
        raise InputError(
            f"the cnn takes 32x32 images (5x5 convolutions without padding), got {spec.shape}"
        )
    return CNN(spec)


def _resnet18(spec: ModelSpec) -> nn.Module:
    if len(spec.shape) != 3:
        raise InputError(f"resnet18 takes images (channels, height, width), got {spec.shape}")
    return ResNet18(spec)


MODELS.add("mlp", Architecture(build=MLP))
MODELS.add("cnn", Architecture(build=_cnn, image_side=32))
MODELS.add("resnet18", Architecture(build=_resnet18, image_side=32))


def build(spec: ModelSpec, seed: int) -> nn.Module:
    """Build the network that the settings name, with W_0 drawn from the seed.

    The state of torch's global generator does not change.
    """
    architecture = MODELS.pick(spec.settings.name)
    with layers_draw_from(stream(seed, Stream.INIT)):
        return architecture.build(spec)


def channels_last(net: nn.Module) -> nn.Module:
    """Convert convolutions to the channels-last layout, with which a CPU is a fifth faster.

    A network with a strided 1x1 kernel (a ResNet's shortcut) is returned unchanged: in this layout
    the backward pass of such a kernel writes beyond its memory (torch 2.13).
    """
    convolutions = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    if any(max(m.kernel_size) == 1 < max(m.stride) for m in convolutions):
        return net
    for w in (*net.parameters(), *net.buffers()):
        if w.dim() == 4:  # `net.to` would fail for the five dimensions of a Conv3d weight
            w.data = w.data.to(memory_format=torch.channels_last)
    return net
