"""A text becomes records that do not overlap, each of one speaker."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedp3
from fedp3.core.errors import DataError, InputError
from fedp3.data.dataset import Dataset
from fedp3.data.partition import by_roles
from fedp3.data.text import PADDING, read_text
from fedp3.experiment.assemble import assemble

PLAY = "ANNA:\nGood morning.\n\nBERT:\nIs it?\nI doubt it.\n\nANNA:\nIt is.\n"


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    return path


def texts(data: Dataset) -> list[str]:
    """The text of each record, from its inputs and its last target."""
    found = []
    for x, y in zip(data.x, data.y, strict=True):  # type: ignore[arg-type]
        real = int((y != PADDING).sum())
        found.append(bytes([*x[:real].tolist(), int(y[real - 1])]).decode())
    return found


def test_a_play_is_cut_by_speaker(tmp_path: Path) -> None:
    data = read_text(file(tmp_path, PLAY), 6)
    assert data.roles is not None
    by_role = {
        r: "".join(t for t, role in zip(texts(data), data.roles.tolist(), strict=True) if role == r)
        for r in (0, 1)
    }
    assert by_role == {0: "Good morning.\nIt is.\n", 1: "Is it?\nI doubt it.\n"}
    assert (data.classes, data.labelled, data.objective) == (256, False, "language_modelling")


@given(
    st.text(st.characters(codec="utf-8", exclude_characters=":\r"), min_size=2, max_size=120),
    st.integers(1, 20),
)
def test_no_character_is_in_two_records_and_targets_follow_inputs(text: str, length: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        data = read_text(file(Path(folder), text), length)
    codes = list(text.encode())
    records = []
    for x, y in zip(data.x, data.y, strict=True):  # type: ignore[arg-type]
        real = int((y != PADDING).sum())
        assert torch.equal(x[1:real], y[: real - 1])
        assert bool((y[real:] == PADDING).all())
        records += [*x[:real].tolist(), int(y[real - 1])]
    left_over = 1 if len(codes) % (length + 1) == 1 else 0  # a last character has no next one
    assert records == codes[: len(codes) - left_over]
    assert not data.overlapping


def test_a_text_without_speakers_has_no_roles(tmp_path: Path) -> None:
    data = read_text(file(tmp_path, "Nobody speaks here.\n\nNor here: a colon is no name.\n"), 8)
    assert data.roles is None


def test_windows_that_overlap_are_marked(tmp_path: Path) -> None:
    path = file(tmp_path, "abcdefghijklmnop")
    assert read_text(path, 4, 2).overlapping and not read_text(path, 4, 5).overlapping


def test_files_that_are_no_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_text(tmp_path / "missing.txt", 8)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(DataError, match="cannot be read"):
        read_text(tmp_path / "image.png", 8)
    with pytest.raises(DataError, match="want a text"):
        read_text(file(tmp_path, "a"), 8)


def test_each_client_is_one_of_the_roles_that_say_most() -> None:
    roles = np.array([2, 0, 1, 1, 2, 2])
    assert [part.tolist() for part in by_roles(roles, 2)] == [[0, 4, 5], [2, 3]]
    with pytest.raises(InputError, match="4 for the 3 roles"):
        by_roles(roles, 4)


def test_clients_that_are_roles_have_their_names(tmp_path: Path) -> None:
    experiment = assemble(settings(file(tmp_path, PLAY * 5)))
    data, shards = experiment.client.data, experiment.shards
    assert len(experiment.client_names) == 2
    for i, name in enumerate(experiment.client_names):
        assert data.roles is not None
        (role,) = set(data.roles[shards[i].train].tolist())
        assert data.role_names[role] == name and f"{name}:" in PLAY
    assert assemble(settings(file(tmp_path, PLAY * 5), "partition.kind=iid")).client_names == ()


def settings(path: Path, *more: str) -> fedp3.Config:
    return fedp3.make_config(
        *("data.name=text", f"data.path={path}", "data.length=8", "model.name=gpt"),
        *("model.width=0.125", "model.blocks=1", "partition.clients=2", "plan.layers=full"),
        *("run.clients_per_round=0", "partition.kind=roles", *more),
    )


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("partition.kind=classes",), "divides samples by their labels"),
        (("partition.clients=3",), "3 for the 2 roles"),
        (("local.objective=classification",), "needs one label per sample"),
        (("model.name=cnn",), "cannot pad|takes"),
        (("data.stride=3", "privacy.enabled=true", "privacy.delta=0.01"), "sequences .* overlap"),
    ],
)
def test_what_a_text_cannot_be_is_refused(tmp_path: Path, more: tuple[str, ...], text: str) -> None:
    with pytest.raises(InputError, match=text):
        assemble(settings(file(tmp_path, PLAY * 5), *more))


def test_roles_are_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no roles"):
        assemble(settings(file(tmp_path, "only words and words " * 9)))
