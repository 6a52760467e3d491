"""The pages in docs/reproduce that show one target each, made from summaries alone."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedp3.record import write_atomic
from fedp3.reproduce import figures
from fedp3.reproduce.arithmetic import ARITHMETIC, Numbers
from fedp3.reproduce.cells import PROTOCOLS, SCORED
from fedp3.reproduce.tables import Table, markdown, number
from fedp3.reproduce.targets import TARGETS, benches_of, cells_of
from fedp3.reproduce.training import Found, length, nearest_reading, progress, tables

LEGEND = (
    "G: the server's model, with the client's own head where a method keeps heads at the clients (FedCR). D: the "
    "model as it was sent to the device. P: the client's own after local training. MB up: all clients, all rounds. "
    "Step density: the share of the pruned layers' kept weights that a local step uses."
)


def write_page(path: Path, blocks: Sequence[str]) -> Path:
    """Blocks of Markdown, those that say something."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, ("\n\n".join(block.strip() for block in blocks if block) + "\n").encode())
    return path


def made_by(name: str, protocol: str) -> str:
    """Who writes a page, under its title."""
    return f"Made by `fedp3 reproduce {name}{flag(protocol)}`; do not edit."


def flag(protocol: str) -> str:
    """What a command says to get this protocol."""
    return "" if protocol == "desk" else f" --protocol {protocol}"


def picture_of(path: Path | None, about: str) -> str:
    """The Markdown of a picture, if there is one."""
    return f"![{about}]({path.name})" if path else ""


def arithmetic_page(name: str, numbers: Numbers, docs: Path) -> Path:
    """The page of a target that needs no training."""
    target = ARITHMETIC[name]
    picture = figures.parameters(docs) if name == "fig-parameters" else None
    blocks = [f"# {target.title}", made_by(name, "desk"), picture_of(picture, target.title)]
    return write_page(docs / f"{name}.md", [*blocks, *(markdown(t) for t in target.tables(numbers))])


def training_page(name: str, found: Found, protocol: str, docs: Path) -> Path:
    """The page of a training target."""
    target = TARGETS[name]
    done, planned = progress(target, found, protocol)
    kind = PROTOCOLS[protocol].score
    blocks = [
        f"# {target.title}",
        made_by(name, protocol),
        f"{target.about[0].upper()}{target.about[1:]}. Protocol {protocol}: {PROTOCOLS[protocol].about}"
        f"{length({c.name: found.get(c.name, {}) for c in cells_of(target, protocol)})}. {done} of "
        f"{planned} runs are finished; a score is the mean of the last {SCORED} evaluations of {kind}, in percent, "
        "means over seeds; differences are paired by seed.",
        target.rows_are,
        LEGEND,
        picture_of(figures.differences(name, target, found, protocol, docs), f"{target.title}: published and ours"),
    ]
    if name == "fig-global-pruning":
        blocks += _pruning_blocks(found, protocol, docs)
    return write_page(docs / f"{name}.md", [*blocks, *(markdown(t) for t in tables(target, found, protocol))])


def _pruning_blocks(found: Found, protocol: str, docs: Path) -> Iterator[str]:
    """Which reading comes nearest to the published drops, and the trade-off of size and accuracy."""
    target = TARGETS["fig-global-pruning"]
    yield picture_of(figures.trade_off(target, found, protocol, docs), "Size against accuracy")
    for bench in benches_of(target, protocol):
        rows = [[name, number(error)] for name, error in nearest_reading(target, found, protocol, bench)]
        if len(rows) > 1:
            yield markdown(
                Table(
                    f"{bench.name}: which reading gives the published drops",
                    ["selector, mask, upload, score", "distance, points"],
                    rows,
                    (f"Root mean square over keep 0.9, 0.7, 0.5, class-wise, against {bench.paper}.",),
                )
            )
