"""Sentences of Python's own manual by topic: texts that every installation of Python has."""

import re
from collections.abc import Iterator
from pathlib import Path

from fedp3.core.files import write_atomic

FEWEST_WORDS = 6  # of a sentence
PARAGRAPHS = re.compile(r"\n\s*\n")
SENTENCES = re.compile(r"(?<=[.!?:]) (?=[A-Z])")


def largest_topics(count: int) -> dict[str, list[str]]:
    """The topics of the manual with the most text, each with its sentences.

    Args:
        count: how many topics.
    """
    from pydoc_data.topics import topics

    names = sorted(topics, key=lambda name: len(topics[name]), reverse=True)[:count]
    return {name: list(_sentences(topics[name])) for name in names}


def _sentences(text: str) -> Iterator[str]:
    """The sentences of a topic, without examples of code and titles."""
    for paragraph in PARAGRAPHS.split(text):
        line = " ".join(paragraph.split())
        if ">>>" not in line:
            yield from (s for s in SENTENCES.split(line) if len(s.split()) >= FEWEST_WORDS)


def write_labelled(path: Path, count: int) -> None:
    """A file of sentences and their topics, for `data.name = "tsv"`."""
    lines = [f"{s}\t{name}" for name, found in largest_topics(count).items() for s in found]
    write_atomic(path, ("\n".join(lines) + "\n").encode())


def write_play(path: Path, count: int) -> None:
    """A file in which each topic is what one speaker says, for `partition.kind = "roles"`."""
    blocks = [f"{name}:\n" + "\n".join(found) for name, found in largest_topics(count).items()]
    write_atomic(path, ("\n\n".join(blocks) + "\n").encode())
