"""`fedp3 demo --transformer`: texts of Python's manual, and adapters in all or in some blocks."""

from pathlib import Path

import pytest

import hf_folders as H
from fedp3.cli import demo_transformer as demo
from fedp3.cli.manual_texts import largest_topics
from fedp3.core.errors import InputError
from fedp3.data.tsv import read_lines
from fedp3.experiment.assemble import assemble
from fedp3.experiment.experiment import Experiment


def assembled(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Experiment]:
    monkeypatch.setattr(demo, "COMMON", (*demo.COMMON, "adapter.rank=2", "data.length=8"))
    H.folder(folder / kind, kind)
    demo.write_texts(folder / kind, folder / "texts.txt")
    runs = demo.runs(folder / kind, folder / "texts.txt")
    return {name: assemble(config) for name, config in runs.items()}


def test_topics_have_sentences_and_no_prompts_of_an_interpreter() -> None:
    topics = largest_topics(demo.TOPICS)
    assert len(topics) == demo.TOPICS
    for sentences in topics.values():
        assert len(sentences) > 50
        assert all(len(s.split()) >= 6 and ">>>" not in s and "\t" not in s for s in sentences)


def test_a_classifier_tells_topics_apart_and_some_devices_upload_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything, some = assembled("bert", tmp_path, monkeypatch).values()
    topics = largest_topics(demo.TOPICS)
    assert set(everything.client.data.class_names) == set(topics)
    assert len(read_lines(tmp_path / "texts.txt")) == sum(map(len, topics.values()))
    uploads = {cost.mb_up for cost in everything.costs}
    assert len(uploads) == 1
    assert min(cost.mb_up for cost in some.costs) < uploads.pop()


def test_a_language_model_has_one_topic_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for experiment in assembled("gpt2", tmp_path, monkeypatch).values():
        assert len(experiment.shards) == demo.SPEAKERS
        assert experiment.client.data.roles is not None


def test_a_network_of_images_and_a_folder_that_is_none_are_refused(tmp_path: Path) -> None:
    H.folder(tmp_path / "vit", "vit")
    for folder, reason in (("vit", "reads no texts"), ("gone", "there is no folder")):
        with pytest.raises(InputError, match=reason):
            demo.runs(tmp_path / folder, tmp_path / "texts.txt")
