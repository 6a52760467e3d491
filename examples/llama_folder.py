"""Make a folder of transformers from a model of llama2.c, such as stories260K.

    python llama_folder.py stories260K.bin tok512.bin stories260K

The folder can then be trained with [model] name = "hf" and path = "stories260K".  A model file has
seven integers (sizes), then weights in float32, each kind for all layers together.  A tokenizer
file has the length of its longest token, then a score, a length and the bytes of each token.
"""

import json
import struct
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from torch import Tensor

SPACE = "▁"  # stands for a space in a token


def read_model(path: Path) -> tuple[dict[str, int], dict[str, Tensor]]:
    """The sizes and the weights of a model file, under the names of transformers."""
    content = path.read_bytes()
    keys = ("width", "hidden", "layers", "heads", "kv_heads", "vocabulary", "length")
    s = dict(zip(keys, struct.unpack("7i", content[:28]), strict=True))
    tied = s["vocabulary"] > 0  # a negative size means that the head has weights of its own
    s["vocabulary"] = abs(s["vocabulary"])
    values = torch.frombuffer(bytearray(content[28:]), dtype=torch.float32)
    kv = s["width"] // s["heads"] * s["kv_heads"]
    d, h, n = s["width"], s["hidden"], s["layers"]
    place = 0

    def take(*shape: int) -> Tensor:
        nonlocal place
        count = torch.Size(shape).numel()
        place += count
        return values[place - count : place].view(shape).clone()

    weights = {"model.embed_tokens.weight": take(s["vocabulary"], d)}
    parts = {
        "input_layernorm": (d,),
        "self_attn.q_proj": (d, d),
        "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, d),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (h, d),
        "mlp.down_proj": (d, h),
        "mlp.up_proj": (h, d),
    }
    for name, shape in parts.items():
        for layer, w in enumerate(take(n, *shape)):
            if name.endswith(("q_proj", "k_proj")):
                w = halves(w, d // s["heads"])
            weights[f"model.layers.{layer}.{name}.weight"] = w.contiguous()
    weights["model.norm.weight"] = take(d)
    if not tied:
        take(2, s["length"], d // s["heads"] // 2)  # tables of rotations, which are computed
        weights["lm_head.weight"] = take(s["vocabulary"], d)
    return s, weights


def halves(w: Tensor, width: int) -> Tensor:
    """The rows of each head in transformers' order.

    llama2.c rotates rows 0 and 1, 2 and 3, ...; transformers rotates rows 0 and width / 2, ...
    """
    pairs = w.view(-1, width // 2, 2, w.shape[1])
    return pairs.transpose(1, 2).reshape(w.shape)


def read_tokenizer(path: Path, count: int) -> Tokenizer:
    """The tokenizer of a file: of two neighbours, those of the best score are joined first."""
    content, place = path.read_bytes(), 4
    pieces: list[tuple[float, str]] = []
    for _ in range(count):
        score, length = struct.unpack_from("fi", content, place)
        text = content[place + 8 : place + 8 + length].decode("utf-8", "replace")
        pieces.append((score, text.strip("\n").replace(" ", SPACE) or text))
        place += 8 + length
    ids = {text: j for j, (_, text) in enumerate(pieces)}
    merges = []
    for score, text in pieces:
        for cut in range(1, len(text)):
            pair = text[:cut], text[cut:]
            if pair[0] in ids and pair[1] in ids and not text.startswith("<"):
                merges.append((-score, ids[pair[0]], ids[pair[1]], pair))
    tokenizer = Tokenizer(
        models.BPE(
            ids,
            [pair for *_, pair in sorted(merges)],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = [AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    tokenizer.add_special_tokens(special)
    return tokenizer


def write_folder(model: Path, tokenizer: Path, folder: Path) -> None:
    """Write config.json, model.safetensors and tokenizer.json."""
    sizes, weights = read_model(model)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": sizes["width"],
        "intermediate_size": sizes["hidden"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "vocab_size": sizes["vocabulary"],
        "max_position_embeddings": sizes["length"],
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    read_tokenizer(tokenizer, sizes["vocabulary"]).save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    write_folder(*map(Path, sys.argv[1:4]))
    print(f"wrote {sys.argv[3]}")
