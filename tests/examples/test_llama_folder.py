"""The folder that examples/llama_folder.py makes computes what llama2.c computes."""

import importlib.util
import struct
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from fedp3.data.tokens import read_tokenizer
from fedp3.models.zoo import ModelSettings, ModelSpec, build

PROGRAM = Path(__file__).parents[2] / "examples" / "llama_folder.py"
D, HIDDEN, LAYERS, HEADS, KV, LENGTH = 8, 12, 2, 4, 2, 16
PIECES = ("<unk>", "<s>", "</s>", " ", "a", "b", " a", "ab", " ab", "<0x0A>")
SHAPES = {
    "embedding": (len(PIECES), D),
    "norm1": (LAYERS, D),
    "wq": (LAYERS, D, D),
    "wk": (LAYERS, D // HEADS * KV, D),
    "wv": (LAYERS, D // HEADS * KV, D),
    "wo": (LAYERS, D, D),
    "norm2": (LAYERS, D),
    "w1": (LAYERS, HIDDEN, D),
    "w2": (LAYERS, D, HIDDEN),
    "w3": (LAYERS, HIDDEN, D),
    "norm": (D,),
    "rotations": (2, LENGTH, D // HEADS // 2),
}


def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llama_folder", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_loops(w: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """The forward pass of llama2.c: one token and head after the other."""

    def norm(x: Tensor, scale: Tensor) -> Tensor:
        return scale * x / (x.square().mean() + 1e-5).sqrt()

    def rotated(v: Tensor, place: int) -> Tensor:
        out = v.clone()
        for i in range(0, len(v), 2):
            angle = torch.tensor(place / 10000.0 ** ((i % (D // HEADS)) / (D // HEADS)))
            c, s = angle.cos(), angle.sin()
            out[i], out[i + 1] = v[i] * c - v[i + 1] * s, v[i] * s + v[i + 1] * c
        return out

    width, keys, values = D // HEADS, [[] for _ in range(LAYERS)], [[] for _ in range(LAYERS)]
    logits = []
    for place, token in enumerate(tokens):
        x = w["embedding"][token]
        for l in range(LAYERS):
            y = norm(x, w["norm1"][l])
            q = rotated(w["wq"][l] @ y, place)
            keys[l].append(rotated(w["wk"][l] @ y, place))
            values[l].append(w["wv"][l] @ y)
            mixed = torch.zeros(D)
            for h in range(HEADS):
                own, shared = slice(h * width, (h + 1) * width), h // (HEADS // KV)
                other = slice(shared * width, (shared + 1) * width)
                scores = torch.stack([q[own] @ k[other] / width**0.5 for k in keys[l]]).softmax(0)
                mixed[own] = sum(s * v[other] for s, v in zip(scores, values[l], strict=True))
            x = x + w["wo"][l] @ mixed
            y = norm(x, w["norm2"][l])
            x = x + w["w2"][l] @ (torch.nn.functional.silu(w["w1"][l] @ y) * (w["w3"][l] @ y))
        logits.append(w["embedding"] @ norm(x, w["norm"]))
    return torch.stack(logits)


def test_the_folder_computes_what_llama2_c_computes(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    w = {name: 0.5 * torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}
    sizes = struct.pack("7i", D, HIDDEN, LAYERS, HEADS, KV, len(PIECES), LENGTH)
    content = b"".join(v.numpy().tobytes() for v in w.values())
    (tmp_path / "model.bin").write_bytes(sizes + content)
    tokens = struct.pack("i", 6)
    for j, piece in enumerate(PIECES):
        tokens += struct.pack("fi", -float(j), len(piece)) + piece.encode()
    (tmp_path / "tokens.bin").write_bytes(tokens)
    program().write_folder(tmp_path / "model.bin", tmp_path / "tokens.bin", tmp_path / "folder")

    tokenizer = read_tokenizer(tmp_path / "folder" / "tokenizer.json")
    assert tokenizer.size == len(PIECES)
    assert tokenizer.plain("ab b") == [8, 3, 5]
    assert tokenizer.plain("a\n") == [6, 9]
    settings = ModelSettings(name="hf", path=str(tmp_path / "folder"))
    spec = ModelSpec((6,), len(PIECES), settings, labelled=False, vocabulary=len(PIECES))
    x = [3, 8, 5, 9, 4, 6]
    expected = by_loops(w, x)
    torch.testing.assert_close(build(spec, 0)(torch.tensor([x]))[0], expected, rtol=1e-4, atol=1e-5)
