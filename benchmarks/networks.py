"""Networks that the measurements of costs need and the zoo does not have.

A vision transformer, and the two networks whose windows CoCoFL measured
(https://github.com/k1l1/CoCoFL): an inverted-residual stack as in MobileNetV2, for images of 32x32,
and a transformer that classifies texts.  They have the blocks, widths and inputs that are described
there; the code is our own.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --------------------------------------------------------------------------- vision transformer


class AttentionBlock(nn.Module):
    """A pre-norm block: attention, then two linear layers, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        added: Tensor = self.narrow(F.gelu(self.widen(self.norm2(x))))
        return x + added


class VisionTransformer(nn.Module):
    """Patches of 4x4 of a 3x32x32 image, blocks of attention, and a head on their mean."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, stride=4)
        self.place = nn.Parameter(torch.zeros(64, width))
        self.blocks = nn.Sequential(*(AttentionBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2) + self.place
        logits: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return logits


# --------------------------------------------------------------------------- MobileNetV2

# expansion, channels, number of blocks, stride of the first one; two strides are 1 instead of 2,
# because the images have 32x32 pixels
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def convolution(
    inputs: int, outputs: int, side: int, stride: int = 1, groups: int = 1
) -> nn.Module:
    """A convolution with BatchNorm."""
    kernel = nn.Conv2d(inputs, outputs, side, stride, side // 2, groups=groups, bias=False)
    return nn.Sequential(kernel, nn.BatchNorm2d(outputs))


class InvertedResidual(nn.Module):
    """Widen by 1x1, filter each channel by 3x3, narrow by 1x1; a shortcut if the stride is 1."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide = expansion * inputs
        self.widen = convolution(inputs, wide, 1)
        self.filter = convolution(wide, wide, 3, stride, groups=wide)
        self.narrow = convolution(wide, outputs, 1)
        self.shortcut: nn.Module | None = None
        if stride == 1:
            same = inputs == outputs
            self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(F.relu(self.filter(F.relu(self.widen(x)))))
        return y if self.shortcut is None else y + self.shortcut(x)


class MobileNet(nn.Module):
    """A stem, 17 inverted residuals, a 1x1 convolution to 1280 channels, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = convolution(3, 32, 3)
        blocks, inputs = [], 32
        for expansion, outputs, count, first in STAGES:
            for stride in (first, *[1] * (count - 1)):
                blocks.append(InvertedResidual(inputs, outputs, expansion, stride))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.last = convolution(inputs, 1280, 1)
        self.head = nn.Linear(1280, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.stem(x)))
        logits: Tensor = self.head(F.relu(self.last(x)).mean((2, 3)))
        return logits


# --------------------------------------------------------------------------- texts


class TextBlock(nn.Module):
    """A post-norm block, whose attention computes and stores all scores, as in CoCoFL."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out, self.widen, self.narrow = (
            nn.Linear(width, width) for _ in range(6)
        )
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.drop1, self.drop2 = nn.Dropout(0.05), nn.Dropout(0.05)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
        weights = scores.masked_fill_(padding[:, None, None, :], -1e9).softmax(3)
        attended = (weights @ v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.drop1(self.out(attended)))
        y: Tensor = self.norm2(x + self.drop2(self.narrow(F.relu(self.widen(x)))))
        return y


class TextTransformer(nn.Module):
    """16,000 words in texts of 512, six blocks 128 wide with two heads, two classes."""

    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16_000, 128)
        angle = torch.arange(512)[:, None] / 10_000 ** (torch.arange(0, 128, 2) / 128)
        self.register_buffer("place", torch.cat((angle.sin(), angle.cos()), 1), persistent=False)
        self.blocks = nn.ModuleList(TextBlock(128, 2) for _ in range(6))
        self.head = nn.Linear(128, 2)

    def forward(self, words: Tensor) -> Tensor:
        words = words.long()  # costs are counted with an input of float32
        x = self.embed(words) + self.place
        for block in self.blocks:
            x = block(x, words < 0)
        return torch.softmax(self.head(x.amax(1)), 1)


# --------------------------------------------------------------------------- layers


def by_block(net: nn.Module) -> dict[str, list[str]]:
    """Layers for `layer_map`, in order: what is before the blocks, each block, what is behind them.

    A norm before the head belongs to the head.
    """
    before = {"embed": "first", "place": "first", "stem": "first", "norm": "head"}
    layers: dict[str, list[str]] = {"first": []}
    for n in net.state_dict():
        if n.endswith("num_batches_tracked"):
            continue
        parts = n.split(".")
        own = ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]
        layers.setdefault(before.get(own, own), []).append(n)
    return layers
