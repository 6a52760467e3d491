"""The paper's networks, with a width factor: the MLP of EMNIST-L, the 2 conv + 3 FC CNN, ResNet18.

The paper's text says four fully connected layers; its table and its 20/40/60 % say three (erratum A14), and a
ReLU behind the last layer would clip the logits (A15), so there is none.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedp3.errors import InputError
from fedp3.lookup import pick
from fedp3.rng import Use, layers_draw_from, stream


def _scaled(width: float, n: int) -> int:
    return max(1, round(width * n))


def gaussian(out: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of a code, from the 2 z numbers its layer says."""
    mu, rho = out.chunk(2, dim=1)
    return mu, F.softplus(rho)


class Code(nn.Module):
    """A stochastic code of z numbers: drawn while training, its mean otherwise."""

    def __init__(self, inputs: int, z: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 2 * z)

    def forward(self, x: Tensor) -> Tensor:
        mu, sigma = gaussian(self.linear(x))
        return mu + sigma * torch.randn_like(sigma) if self.training else mu


def _end(h: int, classes: int, z: int) -> tuple[nn.Module, nn.Linear]:
    """What comes after the body: the code, if there is one, and the head."""
    return (Code(h, z), nn.Linear(z, classes)) if z else (nn.Identity(), nn.Linear(h, classes))


class MLP(nn.Module):
    """Fully connected: in - 1024 - 1024 - 1024 - classes at width 1; a code takes the place of the third layer."""

    def __init__(self, inputs: int, classes: int, width: float = 1.0, z: int = 0) -> None:
        super().__init__()
        h = _scaled(width, 1024)
        self.fc1 = nn.Linear(inputs, h)
        self.fc2 = nn.Linear(h, h)
        self.fc3: nn.Module = nn.Identity() if z else nn.Linear(h, h)
        self.code, self.ffc = _end(h, classes, z)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        x = F.relu(self.fc3(x))
        logits: Tensor = self.ffc(self.code(x))
        return logits


class CNN(nn.Module):
    """Two 5x5 convolutions of 64 channels, then FC 1600 - 1024 - 1024 - classes, on 32x32 images."""

    def __init__(self, channels: int, classes: int, width: float = 1.0, z: int = 0) -> None:
        super().__init__()
        c, h = _scaled(width, 64), _scaled(width, 1024)
        self.conv1 = nn.Conv2d(channels, c, 5)
        self.conv2 = nn.Conv2d(c, c, 5)
        self.fc1 = nn.Linear(c * 25, h)
        self.fc2 = nn.Linear(h, h)
        self.code, self.ffc = _end(h, classes, z)

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
    # Eight channels a group keep the groups small enough to be cut; narrow nets take what divides.
    groups = next(g for g in range(max(1, channels // 8), 0, -1) if channels % g == 0)
    return nn.GroupNorm(groups, channels)


Norm = Callable[[int], nn.Module]
NORMS: Mapping[str, Norm] = {"batch": _batch_norm, "group": _group_norm}


class Residual(nn.Module):
    """A basic block: two 3x3 convolutions and an identity or 1x1 shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """Four blocks B1..B4 of four convolutions, a stem and a head: the paper's 18 layers."""

    def __init__(self, channels: int, classes: int, width: float, norm: Norm, stem: int, z: int = 0) -> None:
        super().__init__()
        c = [_scaled(width, n) for n in (64, 128, 256, 512)]
        stride, padding = (1, 1) if stem == 3 else (2, 3)
        self.conv0 = nn.Conv2d(channels, c[0], stem, stride, padding, bias=False)
        self.norm0 = norm(c[0])
        self.pool: nn.Module = nn.Identity() if stem == 3 else nn.MaxPool2d(3, 2, 1)
        self.b1 = nn.Sequential(Residual(c[0], c[0], 1, norm), Residual(c[0], c[0], 1, norm))
        self.b2 = nn.Sequential(Residual(c[0], c[1], 2, norm), Residual(c[1], c[1], 1, norm))
        self.b3 = nn.Sequential(Residual(c[1], c[2], 2, norm), Residual(c[2], c[2], 1, norm))
        self.b4 = nn.Sequential(Residual(c[2], c[3], 2, norm), Residual(c[3], c[3], 1, norm))
        self.code, self.ffc = _end(c[3], classes, z)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm0(self.conv0(x))))
        x = self.b4(self.b3(self.b2(self.b1(x))))
        x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        logits: Tensor = self.ffc(self.code(x))
        return logits


@dataclass(frozen=True, slots=True)
class Spec:
    """What a builder needs to know: the sample's shape and the user's choices."""

    shape: tuple[int, ...]  # (channels, height, width)
    classes: int
    width: float = 1.0
    norm: str = "batch"
    stem: int = 3
    code: int = 0  # numbers of a stochastic code before the head, at width 1; 0: none

    @property
    def z(self) -> int:
        """The size of the code at this width."""
        return _scaled(self.width, self.code) if self.code else 0


def _mlp(s: Spec) -> nn.Module:
    return MLP(torch.Size(s.shape).numel(), s.classes, s.width, s.z)


def _cnn(s: Spec) -> nn.Module:
    if s.shape[1:] != (32, 32):
        raise InputError(f"the cnn takes 32x32 images (5x5 convolutions without padding), got {s.shape}")
    return CNN(s.shape[0], s.classes, s.width, s.z)


def _resnet18(s: Spec) -> nn.Module:
    if len(s.shape) != 3:
        raise InputError(f"resnet18 takes images (channels, height, width), got {s.shape}")
    if s.stem not in (3, 7):
        raise InputError(f"resnet18 has a stem of 3 (for 32x32 images) or 7, got {s.stem}")
    return ResNet18(s.shape[0], s.classes, s.width, pick(NORMS, s.norm, "normalisation"), s.stem, s.z)


MODELS: Mapping[str, Callable[[Spec], nn.Module]] = {"mlp": _mlp, "cnn": _cnn, "resnet18": _resnet18}
PADS_TO: Mapping[str, int | None] = {"mlp": None, "cnn": 32, "resnet18": 32}  # image side a model asks for


def build(name: str, spec: Spec, seed: int) -> nn.Module:
    """The named net with W_0 drawn from the seed; the global generator is left as it was."""
    make = pick(MODELS, name, "model")
    if not 0 < spec.width < math.inf:
        raise InputError(f"the width of a model is a factor above 0, got {spec.width}")
    with layers_draw_from(stream(seed, Use.INIT)):
        return make(spec)


def channels_last(net: nn.Module) -> nn.Module:
    """The net with its convolutions laid out as a CPU computes them a fifth faster; the numbers they hold are the same.

    Not where a kernel of 1x1 jumps (a ResNet's shortcut): its backward pass then writes beyond its memory (torch 2.13).
    """
    convolutions = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    if any(max(m.kernel_size) == 1 < max(m.stride) for m in convolutions):
        return net
    for w in (*net.parameters(), *net.buffers()):
        if w.dim() == 4:  # not `net.to`: it asks the same of five sides (Conv3d), which have no such layout
            w.data = w.data.to(memory_format=torch.channels_last)
    return net
