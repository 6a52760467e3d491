"""What `fedp3 demo --transformer DIR` trains: adapters of a pretrained transformer."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedp3.cli.manual_texts import write_labelled, write_play
from fedp3.core.errors import InputError

if TYPE_CHECKING:
    from fedp3.config import Config

NOTES = (
    "20 devices, each with sentences of a few topics of Python's manual.",
    "all-blocks: every device trains the adapters of all blocks of the transformer.",
    "some-blocks: a device has one, three or six blocks, drawn anew in each round.",
)
TOPICS = 6  # whose sentences are told apart
SPEAKERS = 20  # clients of a language model; each has one topic
COMMON = (
    *("model.name=hf", "adapter.rank=8", "data.length=32", "partition.clients=20"),
    *("local.optimizer=adam", "local.lr=0.01", "local.steps=5", "local.batch=16"),
    *("local.clip_norm=1", "run.rounds=10", "run.clients_per_round=8", "run.eval_every=5"),
)
# A device holds one, three or six blocks; the others are left out of its network.
WINDOWS = ("plan.layers=opu1-3-6", "plan.others=skip", "plan.redraw=true")
BY_TOPIC = (
    *("data.name=tsv", "partition.kind=dirichlet", "partition.alpha=0.5"),
    "model.new_head=true",  # whatever classes the model was trained on
)
BY_SPEAKER = ("data.name=text", "partition.kind=roles")

# What a kind of transformer reads -> how the texts are written, and settings that read them
TEXTS: Mapping[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "sequences": (lambda path: write_labelled(path, TOPICS), BY_TOPIC),
    "text": (lambda path: write_play(path, SPEAKERS), BY_SPEAKER),
}


def runs(folder: Path, texts: Path) -> dict[str, "Config"]:
    """The runs that are compared: adapters in all blocks, and in as many as a device can hold.

    Args:
        folder: the pretrained model.
        texts: the file in which the texts are; `write_texts` writes it.
    """
    from fedp3 import config

    _, data = TEXTS[_reads(folder)]
    common = [*COMMON, *data, f"model.path={folder.resolve()}", f"data.path={texts.resolve()}"]
    return {
        "all-blocks": config.parse({"method": "ffa-lora"}, common),
        "some-blocks": config.parse({"method": "ffa-lora"}, [*common, *WINDOWS]),
    }


def write_texts(folder: Path, texts: Path) -> None:
    """Write the texts that this kind of transformer reads, from Python's manual."""
    texts.parent.mkdir(parents=True, exist_ok=True)
    write, _ = TEXTS[_reads(folder)]
    write(texts)


def _reads(folder: Path) -> str:
    """What the transformer of a folder reads: a key of `TEXTS`."""
    from fedp3.models.hf_folder import KINDS, read_folder

    kind = read_folder(folder).kind
    if KINDS[kind].reads not in TEXTS:
        raise InputError(f"--transformer: {folder} has a {kind}, which reads no texts")
    return KINDS[kind].reads
