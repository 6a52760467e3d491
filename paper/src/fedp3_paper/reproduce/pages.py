"""The page of each target, made from stored results alone."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedp3.core.files import write_atomic
from fedp3_paper.reproduce import figures
from fedp3_paper.reproduce.arithmetic import ARITHMETIC, Numbers
from fedp3_paper.reproduce.cells import PROTOCOLS, SCORED
from fedp3_paper.reproduce.tables import Table, markdown, number
from fedp3_paper.reproduce.targets import TARGETS, benches_of, cells_of
from fedp3_paper.reproduce.training import Results, length, nearest_reading, progress, tables

LEGEND = (
    "G: the server's model, with personal heads where a method has them (FedCR). D: the model as "
    "it was sent to the device. P: the client's personal model after local training. MB up: all "
    "clients, all rounds. Step density: the share of the pruned layers' retained weights that a "
    "local step uses."
)


def write_page(path: Path, blocks: Sequence[str]) -> Path:
    """Write a page of blocks of Markdown; empty ones are left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, ("\n\n".join(block.strip() for block in blocks if block) + "\n").encode())
    return path


def made_by(name: str, protocol: str) -> str:
    """The line under a title that names the command that writes the page."""
    return f"Made by `fedp3 reproduce {name}{flag(protocol)}`; do not edit."


def flag(protocol: str) -> str:
    """The option of a command that chooses this protocol."""
    return "" if protocol == "desk" else f" --protocol {protocol}"


def picture_of(path: Path | None, about: str) -> str:
    """The Markdown of a picture, if there is one."""
    return f"![{about}]({path.name})" if path else ""


def arithmetic_page(name: str, numbers: Numbers, docs: Path) -> Path:
    """Write the page of a target that needs no training."""
    target = ARITHMETIC[name]
    picture = figures.parameters(docs) if name == "fig-parameters" else None
    blocks = [f"# {target.title}", made_by(name, "desk"), picture_of(picture, target.title)]
    return write_page(
        docs / f"{name}.md", [*blocks, *(markdown(t) for t in target.tables(numbers))]
    )


def training_page(name: str, results: Results, protocol: str, docs: Path) -> Path:
    """Write the page of a target that trains."""
    target = TARGETS[name]
    done, planned = progress(target, results, protocol)
    kind, about = PROTOCOLS[protocol].score, PROTOCOLS[protocol].about
    runs = length({c.name: results.get(c.name, {}) for c in cells_of(target, protocol)})
    blocks = [
        f"# {target.title}",
        made_by(name, protocol),
        f"{target.about[0].upper()}{target.about[1:]}. Protocol {protocol}: {about}{runs}. "
        f"{done} of {planned} runs are finished; a score is the mean of the last {SCORED} "
        f"evaluations of {kind}, in percent, means over seeds; differences are paired by seed.",
        target.rows_are,
        LEGEND,
        picture_of(
            figures.differences(name, target, results, protocol, docs),
            f"{target.title}: published and ours",
        ),
    ]
    if name == "fig-global-pruning":
        blocks += _pruning_blocks(results, protocol, docs)
    return write_page(
        docs / f"{name}.md", [*blocks, *(markdown(t) for t in tables(target, results, protocol))]
    )


def _pruning_blocks(results: Results, protocol: str, docs: Path) -> Iterator[str]:
    """The readings by their distance from the published drops, and size against accuracy."""
    target = TARGETS["fig-global-pruning"]
    yield picture_of(figures.trade_off(target, results, protocol, docs), "Size against accuracy")
    for bench in benches_of(target, protocol):
        rows = [
            [name, number(error)]
            for name, error in nearest_reading(target, results, protocol, bench)
        ]
        if len(rows) > 1:
            title = f"{bench.name}: which reading gives the published drops"
            columns = ["selector, pruned weights, upload, score", "distance, points"]
            note = f"Root mean square over keep 0.9, 0.7, 0.5, class-wise, against {bench.paper}."
            yield markdown(Table(title, columns, rows, (note,)))
