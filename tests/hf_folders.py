"""Small transformers with random weights, saved as folders, and texts for them."""

import json
import random
from pathlib import Path
from typing import Any

import torch

WORDS = ("red", "green", "blue", "cat", "dog", "bird", "runs", "sleeps", "flies", "old", "young")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
VOCABULARY = len(WORDS) + len(SPECIAL)
CLASSES = 3
SIZES: dict[str, dict[str, Any]] = {
    "bert": {
        "hidden_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "max_position_embeddings": 16,
    },
    "distilbert": {
        "dim": 8,
        "n_layers": 3,
        "n_heads": 2,
        "hidden_dim": 12,
        "max_position_embeddings": 16,
    },
    "gpt2": {"n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 16},
    "llama": {
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 12,
        "max_position_embeddings": 16,
        "tie_word_embeddings": True,
    },
    "vit": {
        "hidden_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 1,
    },
}
SIZES["roberta"] = SIZES["bert"] | {"max_position_embeddings": 18}


def model(kind: str, seed: int = 0, classes: int = CLASSES, **more: Any) -> Any:
    """A model of `transformers` in evaluation mode, whose weights are all drawn here.

    So they do not depend on its version, and every tensor matters, norms and biases too.
    """
    import transformers

    from fedp3.models.hf import KINDS

    settings = {**SIZES[kind], **more}
    if KINDS[kind].reads != "text":
        settings["num_labels"] = classes
    if kind != "vit":
        settings |= {"vocab_size": VOCABULARY, "pad_token_id": 0}
        settings |= {"bos_token_id": 2, "eos_token_id": 3}
    config = getattr(transformers, KINDS[kind].config)(**settings)
    net = getattr(transformers, KINDS[kind].model)(config).eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for w in net.parameters():
            w.normal_(0, 0.3, generator=rng)
    return net


def folder(path: Path, kind: str, seed: int = 0, **more: Any) -> Path:
    """Save such a model, and a tokenizer of words, into a folder."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    path.mkdir(parents=True, exist_ok=True)
    model(kind, seed, **more).save_pretrained(path)
    write_tokenizer(path / "tokenizer.json")
    return path


def write_tokenizer(path: Path) -> Path:
    """A tokenizer whose tokens are words, with [CLS] and [SEP] around sequences."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    ids = {word: j for j, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(path))
    return path


def sentences(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Texts, and as the label of each the colour that it names."""
    rng = random.Random(seed)
    colours = WORDS[:CLASSES]
    found = []
    for j in range(count):
        label = colours[j % CLASSES]
        words = [label, *rng.choices(WORDS[CLASSES:], k=rng.randint(1, 6))]
        rng.shuffle(words)
        found.append((" ".join(words), label))
    return found


def write_tsv(path: Path, rows: list[tuple[str, str]], header: str = "") -> Path:
    lines = [header] if header else []
    path.write_text("\n".join([*lines, *(f"{text}\t{label}" for text, label in rows)]) + "\n")
    return path


def write_text(path: Path, words: int = 600, seed: int = 0) -> Path:
    rng = random.Random(seed)
    path.write_text(" ".join(rng.choices(WORDS, k=words)) + "\n")
    return path


def edit_config(path: Path, **fields: Any) -> None:
    """Change fields of a folder's config.json."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))
