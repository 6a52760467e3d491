"""Two small transformers: a GPT for texts and a ViT for images.

Both are pre-norm (each half of a block adds to what it reads), and their blocks are the layers of
a plan: attention, MLP and both norms of a block are sent, trained and averaged together.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedp3.core.errors import InputError
from fedp3.models.zoo import MODELS, Architecture, ModelSpec, plain_tail, scale_width

HEAD_WIDTH = 32  # of one attention head at width 1
INITIAL_DEVIATION = 0.02  # of embeddings, as in GPT-2


class Attention(nn.Module):
    """Self-attention of several heads.

    Args:
        width: numbers per token.
        heads: attention heads.
        causal: whether a token sees only itself and the tokens before it.
    """

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.head_width, self.causal = width // heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        records, tokens, _ = x.shape
        # A smaller network has fewer heads, so that their number is not written down.
        per_head = self.qkv(x).view(records, tokens, 3, -1, self.head_width)
        q, k, v = per_head.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(records, tokens, -1))
        return projected


class Block(nn.Module):
    """Attention and an MLP of four times the width, each on a residual stream."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        added: Tensor = self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return x + added


class TokenEmbedding(nn.Module):
    """A vector for each token of the vocabulary, plus one for its place.

    Args:
        vocabulary: the number of different tokens.
        places: the longest sequence.
        width: numbers per token.
    """

    def __init__(self, vocabulary: int, places: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=INITIAL_DEVIATION)
        self.places = nn.Parameter(INITIAL_DEVIATION * torch.randn(places, width))

    def forward(self, x: Tensor) -> Tensor:
        vectors: Tensor = self.tokens(x)
        return vectors + self.places[: x.shape[1]]


class PatchEmbedding(nn.Module):
    """A vector for each square patch of an image, plus one for its place.

    Args:
        shape: of an image, (channels, height, width).
        patch: the side length of a patch.
        width: numbers per patch.
    """

    def __init__(self, shape: tuple[int, ...], patch: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(shape[0], width, patch, patch)
        count = (shape[1] // patch) * (shape[2] // patch)
        self.places = nn.Parameter(INITIAL_DEVIATION * torch.randn(count, width))

    def forward(self, x: Tensor) -> Tensor:
        vectors: Tensor = self.patches(x)
        return vectors.flatten(2).transpose(1, 2) + self.places


class GPT(nn.Module):
    """A decoder: for each place of a sequence, the logits of the token after it."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        heads, width = spec.settings.heads, _width(spec)
        self.embedding = TokenEmbedding(spec.classes, spec.shape[0], width)
        blocks = (Block(width, heads, causal=True) for _ in range(spec.settings.blocks))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, spec.classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(x))))
        return logits


class ViT(nn.Module):
    """An encoder of patches; the mean over all patches is classified."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        heads, width = spec.settings.heads, _width(spec)
        self.embedding = PatchEmbedding(spec.shape, spec.settings.patch, width)
        blocks = (Block(width, heads, causal=False) for _ in range(spec.settings.blocks))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.code, self.ffc = spec.tail(width, spec.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.embedding(x))).mean(1)
        logits: Tensor = self.ffc(self.code(x))
        return logits


def _width(spec: ModelSpec) -> int:
    """Numbers per token: a multiple of the number of heads."""
    return spec.settings.heads * scale_width(spec.width, HEAD_WIDTH)


def _gpt(spec: ModelSpec) -> nn.Module:
    if len(spec.shape) != 1:
        raise InputError(f"the gpt takes sequences of tokens, got samples of shape {spec.shape}")
    if spec.tail is not plain_tail:
        raise InputError("a stochastic code ([hooks] code) is for networks that classify, not gpt")
    return GPT(spec)


def _vit(spec: ModelSpec) -> nn.Module:
    patch = spec.settings.patch
    if len(spec.shape) != 3 or spec.shape[1] % patch or spec.shape[2] % patch:
        raise InputError(
            f"the vit takes images (channels, height, width) that patches of {patch}x{patch} "
            f"divide, got {spec.shape}; set [model] patch"
        )
    return ViT(spec)


MODELS.add("gpt", Architecture(build=_gpt))
MODELS.add("vit", Architecture(build=_vit))
