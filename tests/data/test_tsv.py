"""Texts with labels, and texts by a tokenizer: what becomes a record, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tokenizers")

import fedp3
import hf_folders as H
from fedp3.core.errors import DataError, InputError
from fedp3.data.dataset import Dataset
from fedp3.data.text import PADDING, read_text
from fedp3.data.tokens import Tokenizer, read_tokenizer
from fedp3.data.tsv import read_lines, read_tsv
from fedp3.experiment.assemble import assemble

IDS = {word: j for j, word in enumerate((*H.SPECIAL, *H.WORDS))}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return read_tokenizer(H.write_tokenizer(tmp_path / "tokenizer.json"))


def file(tmp_path: Path, text: str, name: str = "texts.tsv") -> Path:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / name


def tokens(data: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(data.x, dict)
    return data.x["input_ids"], data.x["attention_mask"]


def test_a_line_is_cut_padded_and_masked(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = file(tmp_path, "red cat\tanimal\nold dog runs sleeps flies\tanimal\n\nblue\tcolour\n")
    data = read_tsv(path, 5, tokenizer)
    ids, mask = tokens(data)
    begin, end = IDS["[CLS]"], IDS["[SEP]"]
    assert ids.tolist() == [
        [begin, IDS["red"], IDS["cat"], end, 0],
        [begin, IDS["old"], IDS["dog"], IDS["runs"], end],
        [begin, IDS["blue"], end, 0, 0],
    ]
    assert mask.sum(1).tolist() == [4, 5, 3]
    assert data.y.tolist() == [0, 0, 1] and data.class_names == ("animal", "colour")
    assert (data.classes, data.vocabulary, data.labelled) == (2, H.VOCABULARY, True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\t1\nb\t0\n", [("a", "1"), ("b", "0")]),
        ("sentence\tlabel\na\t1\n", [("a", "1")]),
        ("Label\tText\r\n1\ta\r\n", [("a", "1")]),
        ("a b \t x\n\n \n", [("a b", "x")]),
    ],
)
def test_headers_and_empty_lines_are_no_records(
    tmp_path: Path, text: str, expected: list[tuple[str, str]]
) -> None:
    assert [line[1:] for line in read_lines(file(tmp_path, text))] == expected


def test_labels_are_numbered_in_their_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    numbers = file(tmp_path, "cat\t10\ndog\t9\nbird\t10\n")
    data = read_tsv(numbers, 4, tokenizer)
    assert data.class_names == ("9", "10") and data.y.tolist() == [1, 0, 1]
    given = read_tsv(numbers, 4, tokenizer, labels=("10", "8", "9"))
    assert given.classes == 3 and given.y.tolist() == [0, 2, 0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a\t1\nno label\n", "line 2 of .* has 1 columns, want 2"),
        ("a\tb\t1\n", "line 1 of .* has 3 columns, want 2"),
        ("sentence\tlabel\n", "has no lines"),
        ("\t1\n", "line 1 of .* has no tokens"),
        ("cat\t1\ndog\tx\n", "line 2 of .* has the label 'x', which is none of 0, 1"),
    ],
)
def test_lines_that_are_no_records_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = H.write_tokenizer(tmp_path / "tokenizer.json")
    plain = read_tokenizer(path)
    bare = Tokenizer(
        size=plain.size,
        padding=0,
        sequences=lambda texts, length: [plain.plain(text)[:length] for text in texts],
        plain=plain.plain,
    )
    with pytest.raises(DataError, match=reason):
        read_tsv(file(tmp_path, text), 4, bare, labels=("0", "1"))


def test_files_that_are_no_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        read_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="is no tokenizer"):
        read_tokenizer(file(tmp_path, '{"model": 1}', "tokenizer.json"))
    with pytest.raises(DataError, match="a model of sentencepiece; convert it"):
        read_tokenizer(file(tmp_path, "", "tokenizer.model"))


# --------------------------------------------------------------------------- texts to continue


def test_a_text_by_tokens_is_cut_like_one_by_characters(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    play = "ANNA:\nred cat runs\nold dog\n\nBERT:\nblue bird\n"
    data = read_text(file(tmp_path, play, "play.txt"), 3, tokenizer=tokenizer)
    words = {v: k for k, v in IDS.items()}
    read = [
        [words[int(t)] for t, real in zip(x, y != PADDING, strict=True) if real]
        for x, y in zip(data.x, data.y, strict=True)  # type: ignore[arg-type]
    ]
    predicted = [[words[t] for t in y.tolist() if t != PADDING] for y in data.y]
    assert read == [["red", "cat", "runs"], ["blue"]]  # a single last word has no next one
    assert predicted == [["cat", "runs", "old"], ["bird"]]
    assert data.roles is not None and data.roles.tolist() == [0, 1]
    assert data.classes == data.vocabulary == H.VOCABULARY and not data.overlapping


# --------------------------------------------------------------------------- runs


def settings(tmp_path: Path, *more: str) -> Any:
    pytest.importorskip("transformers")
    folder = tmp_path / "bert"
    if not folder.exists():
        H.folder(folder, "bert")
        H.write_tsv(tmp_path / "a.tsv", H.sentences(60))
        H.write_tsv(tmp_path / "test.tsv", H.sentences(30, seed=1), "text\tlabel")
    return fedp3.make_config(
        *("model.name=hf", f"model.path={folder}", "data.name=tsv", "data.path=a.tsv"),
        *("data.length=8", "partition.clients=3", "partition.classes=1", "plan.layers=full"),
        *("run.clients_per_round=0", *more),
    )


def test_lines_are_divided_by_labels_and_no_client_has_the_second_file(tmp_path: Path) -> None:
    data = assemble(settings(tmp_path, "data.test_path=test.tsv"), tmp_path)
    y, central = data.client.data.y, data.server.central
    for i, shard in data.shards.items():
        assert set(y[shard.train].tolist()) == set(y[shard.test].tolist()) == {i}
    assert sum(len(s.train) + len(s.test) for s in data.shards.values()) == len(y) == 60
    assert central is not None
    assert len(central.data.y) == 30
    assert central.data.class_names == data.client.data.class_names


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("data.tokenizer=characters",), "'tsv' needs a tokenizer.json"),
        (("data.tokenizer=nowhere.json",), "there is no file nowhere.json"),
        (("model.name=mlp", "model.path=''"), "needs a tokenizer.json"),
        (("data.path=gone.tsv",), "cannot be read"),
        (("data.length=99",), "at most 16 tokens"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, more: tuple[str, ...], reason: str
) -> None:
    with pytest.raises((InputError, DataError), match=reason):
        assemble(settings(tmp_path, *more), tmp_path)


def test_a_network_of_one_input_does_not_take_tokens_and_masks(tmp_path: Path) -> None:
    config = settings(
        tmp_path,
        "model.name=mlp",
        "model.path=''",
        f"data.tokenizer={tmp_path}/bert/tokenizer.json",
    )
    with pytest.raises(InputError, match="takes one tensor per record, but the data have several"):
        assemble(config, tmp_path)
