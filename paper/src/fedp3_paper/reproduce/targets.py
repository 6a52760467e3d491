"""The targets that train: which cells make up each table or figure of the paper.

To extend a table, add a `Row`: its cells are run, shown and compared like the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product

from fedp3.config import Config
from fedp3_paper.reproduce.cells import (
    BENCHES,
    PROTOCOLS,
    SPLITS,
    Bench,
    Cell,
    Settings,
    Variant,
    config_of,
)

Q_GRID = (0.2, 0.4, 0.6, 0.8, 1.0)  # FjORD's
# Networks with more than three hidden layers, on which OPU3 is not the same as FedAvg.
DEEP = tuple(name for name in BENCHES if "-mlp" not in name)
# Every target runs on these, but for the one of ResNet18.
SHORT = ("mnist-mlp", "fashion-mlp", "fashion-cnn", "cifar10-cnn", "cifar100-cnn")
SCANNED = ("fashion-mlp", "cifar10-cnn")  # where readings of the paper are compared
OVERLAP = tuple(name for name in BENCHES if "resnet" not in name)
RESNETS = ("cifar10-resnet18", "cifar100-resnet18")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table.

    Args:
        label: its first column.
        variant: what is run.
        published: the name of the row in `published`; empty: the paper has none.
        drawn: whether the figure shows it; the table shows all rows.
    """

    label: str
    variant: Variant
    published: str = ""
    drawn: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One table or figure.

    Args:
        title: the title of its page.
        about: one line about it.
        rows: its rows; the others are compared with the first.
        rows_are: what the labels of the rows mean, in Markdown.
        benches: the benches that it runs on.
        splits: the splits that it runs on.
    """

    title: str
    about: str
    rows: tuple[Row, ...]
    rows_are: str
    benches: tuple[str, ...] = SHORT
    splits: tuple[str, ...] = ("classes", "dirichlet")


# --------------------------------------------------------------------------- variants

FEDAVG = Variant("fedavg", {"method": "fedavg", "plan.head": "shared"}, seeds=5)


def layers(plan: str, suffix: str = "", more: Settings | None = None) -> Variant:
    """FedP3 with one rule for L_i, at keep 0.9.

    Args:
        plan: the value of `plan.layers`.
        suffix: the end of the variant's name.
        more: further settings.
    """
    settings = {"plan.layers": plan, "prune.keep": 0.9, **(more or {})}
    return Variant(plan + suffix, settings, on=DEEP if plan == "opu3" else ())


def pruned(keep: float, suffix: str = "", more: Settings | None = None) -> Variant:
    """FedP3 with every layer pruned but the head; the retained weights are uploaded.

    Args:
        keep: the share of weights that is retained.
        suffix: the end of the variant's name.
        more: further settings.
    """
    settings = {
        "plan.layers": "prune-all",
        "prune.keep": keep,
        "plan.upload": "retained",
        **(more or {}),
    }
    return Variant(f"prune-{keep}{suffix}", settings, seeds=5 if keep == 0.9 and not suffix else 3)


def scan(
    variant: Variant, on: Sequence[str] = SCANNED, splits: tuple[str, ...] = tuple(SPLITS)
) -> Variant:
    """The same variant as a scan, which runs after the cells that claims need.

    Args:
        variant: the variant.
        on: the benches that run it, as far as the variant itself allows them.
        splits: the splits that it is run on.
    """
    benches = tuple(name for name in on if not variant.on or name in variant.on)
    return replace(variant, scan=True, on=benches, splits=splits)


# --------------------------------------------------------------------------- the tables


def _overlap() -> Iterator[Row]:
    yield Row("FedAvg", FEDAVG, "FedAvg")
    plans = {"opu3": "OPU3", "opu2": "OPU2", "lowerb": "LowerB"}
    for plan, label in plans.items():
        yield Row(label, layers(plan), label)
    yield Row("FedCR", Variant("fedcr", {"method": "fedcr", "plan.head": "personal"}), "FedCR")
    yield Row(
        "FedCR-OPU3",
        Variant("fedcr-opu3", {"method": "fedcr-opu3", "plan.head": "personal"}, on=DEEP),
        "FedCR-OPU3",
    )
    for plan, label in plans.items():
        frozen = layers(plan, "-frozen", {"plan.others": "freeze"})
        yield Row(f"{label}, others frozen", scan(frozen, SHORT))
        redrawn = layers(plan, "-redrawn", {"plan.redraw": True})
        yield Row(f"{label}, layers redrawn", scan(redrawn, SHORT))
        unpruned = layers(plan, "-keep-1.0", {"prune.keep": 1.0})
        yield Row(f"{label}, keep 1.0", scan(unpruned))


@dataclass(frozen=True, slots=True)
class Word:
    """One setting of a reading of global pruning, with its two names.

    Args:
        value: the value in a config.
        name: its part of a cell's name; stored results are found by it.
        label: its part of a row's label.
    """

    value: object
    name: str
    label: str


FREEZES = (Word(True, "held", "frozen"), Word(False, "free", "not frozen"))
UPLOADS = (Word("retained", "kept", "retained"), Word("zeros", "zeros", "zeros"))


def _pruning() -> Iterator[Row]:
    yield Row("keep 1.0 (FedAvg)", FEDAVG, "FedAvg")
    keeps = (0.9, 0.7, 0.5)
    for keep in keeps:
        yield Row(f"keep {keep}", pruned(keep), f"keep {keep}")
    readings = product(("magnitude", "random"), FREEZES, UPLOADS)
    next(readings)  # the three rows above have the first reading
    for (selector, freeze, upload), keep in product(readings, keeps):
        settings = {
            "prune.selector": selector,
            "prune.freeze_pruned": freeze.value,
            "plan.upload": upload.value,
        }
        variant = pruned(keep, f"-{selector}-{freeze.name}-{upload.name}", settings)
        label = f"keep {keep}, {selector}, {freeze.label}, {upload.label}"
        yield Row(label, scan(variant, splits=("classes",)), f"keep {keep}", drawn=False)


PRUNERS: Mapping[str, tuple[str, str]] = {  # name -> local pruner, row of the paper
    "uniform": ("uniform", "Uniform"),
    "ordered": ("ordered_dropout", "Ordered"),
    "matched": ("ordered_matched", ""),  # ordered dropout at uniform's density
}


def _local() -> Iterator[Row]:
    """Three readings of the paper's p.

    (a) is a constant local share, (b) the global share under q ~ U[q_min, 1], (c) FjORD's grid.
    """
    yield Row("Fixed", pruned(0.9), "keep 0.9")
    for p, (name, (pruner, row)) in product((0.9, 0.7), PRUNERS.items()):
        published = f"{row} {p}" if row else ""
        a = pruned(0.9, f"-local-a-{name}-{p}", {"prune.local_pruner": pruner, "prune.q": p})
        yield Row(f"(a) {name}, q = {p}", a if row else scan(a), published)
        b = pruned(p, f"-local-b-{name}", {"prune.local_pruner": pruner})
        yield Row(f"(b) {name}, keep {p}", scan(b), published)
    yield Row("(b) Fixed, keep 0.7", pruned(0.7), "keep 0.7")
    for name, (pruner, _) in PRUNERS.items():
        settings: Settings = {"prune.local_pruner": pruner, "prune.q": list(Q_GRID)}
        c = pruned(0.9, f"-local-c-{name}", settings)
        yield Row(f"(c) {name}, FjORD's grid", scan(c))


def _aggregation() -> Iterator[Row]:
    for plan, label in (("opu1-2-3", "OPU1-2-3"), ("opu2-3", "OPU2-3")):
        for rule in ("simple", "weighted"):
            variant = replace(layers(plan, f"-{rule}", {"aggregate.rule": rule}), seeds=5)
            yield Row(f"{label} {rule}", variant, f"{label} {rule}")
        attention = layers(plan, "-attention", {"aggregate.rule": "attention"})
        # The paper names attention and does not measure it.
        yield Row(f"{label} attention", scan(replace(attention, seeds=5), SHORT))


def _resnet() -> Iterator[Row]:
    yield Row("Full", pruned(0.9), "Full")
    yield Row("FedAvg, unpruned", FEDAVG)
    plans = {
        "resnet-no-b2-b3": "-B2-B3 (full)",
        "resnet-b2-part": "-B2 (part)",
        "resnet-b3-part": "-B3 (part)",
    }
    for plan, label in plans.items():
        yield Row(label, layers(plan), label)


EPSILONS = ("inf", 8, 4, 2, 1)  # inf: every record's gradient is clipped, no noise is added


def _ldp() -> Iterator[Row]:
    """OPU2 under LDP; layers outside L_i are frozen: nothing may be sent without noise."""
    frozen: Settings = {"plan.others": "freeze"}
    yield Row("no LDP", scan(layers("opu2", "-frozen", frozen), SHORT))
    for epsilon in EPSILONS:
        settings = frozen | {
            "privacy.enabled": True,
            "privacy.epsilon": epsilon,
            "privacy.randomness": "seeded",
        }
        variant = layers("opu2", f"-ldp-{epsilon}", settings)
        yield Row(f"epsilon {epsilon}", scan(variant, SHORT))


TARGETS: Mapping[str, Target] = {
    "fig-overlap": Target(
        title="Layer overlap",
        about="FedAvg against three, two and one trained layers per client",
        rows=tuple(_overlap()),
        rows_are="A client trains three (OPU3), two (OPU2) or one (LowerB) of the hidden layers "
        "dense, and the head; which ones is fixed for the run. It is sent the others at keep 0.9 "
        "and trains them too, but does not upload them. *Frozen*: it does not train them. "
        "*Redrawn*: its layers are drawn anew every round. FedCR-OPU3 is FedCR with the layers of "
        "OPU3. On the MLPs, with three hidden layers, OPU3 is FedAvg and FedCR-OPU3 is FedCR, so "
        "they have no rows there.",
        benches=OVERLAP,
    ),
    "fig-global-pruning": Target(
        title="Global pruning",
        about="every layer but the head is pruned before it is sent",
        rows=tuple(_pruning()),
        rows_are="*Keep* is the share of a layer's weights that is sent. *Magnitude* retains the "
        "largest, *random* draws them anew every round. *Frozen*: pruned weights stay zero in "
        "local training, else they may grow back. *Retained*: a weight is averaged over the "
        "clients that were sent it; *zeros*: pruned weights enter the average as zeros. The rows "
        "without these words are magnitude, frozen, retained. The paper weighs size against "
        "accuracy by accuracy + alpha / r, where r is keep; the second picture shows what that "
        "gains over keep 1.0.",
        benches=(*SHORT, "emnist-mlp"),
    ),
    "table-local-pruning": Target(
        title="Local pruning",
        about="fixed, uniform and ordered dropout per step",
        rows=tuple(_local()),
        rows_are="*Fixed*: the server prunes to 0.9 and a step uses all of that. Per step, "
        "*uniform* uses each weight with probability q, *ordered* dropout the leading share q of a "
        "layer's inputs and of its outputs, *matched* the same with shares that leave as many "
        "weights as uniform. The paper's p is read in three ways: (a) q = p in every step, keep "
        "0.9; (b) keep p, q drawn from U[0.5, 1] at every step; (c) q drawn from FjORD's grid 0.2, "
        "0.4, ..., 1, keep 0.9. *(b) Fixed, keep 0.7* is compared with the paper's figure of "
        "global pruning.",
        benches=(*SHORT, "emnist-mlp"),
    ),
    "fig-aggregation": Target(
        title="Aggregation",
        about="how layers of unequal clients are averaged",
        rows=tuple(_aggregation()),
        rows_are="Clients train one, two or three hidden layers (OPU1-2-3), or two or three "
        "(OPU2-3). *Simple*: all clients that upload a layer count alike in its mean; *weighted*: "
        "by the number of layers they train; *attention*: by learned weights, a rule that we "
        "chose.",
    ),
    "ldp": Target(
        title="LDP-FedP3",
        about="accuracy of OPU2 against epsilon, noise from the seed (a simulation); the paper has "
        "no numbers",
        rows=tuple(_ldp()),
        rows_are="In all rows, also the one without LDP, layers outside L_i are frozen, so that "
        "nothing is sent without noise. *Epsilon inf*: every record's gradient is clipped, no "
        "noise is added.",
    ),
    "table-resnet": Target(
        title="ResNet18",
        about="leaving out blocks",
        rows=tuple(_resnet()),
        rows_are="*Full*: every layer but the head is pruned to 0.9 before it is sent, and its "
        "retained weights are uploaded. The rows below leave layers of B2 or B3 out of L_i: those "
        "are sent at keep 0.9 and not uploaded, all others are dense both ways. So Full is pruned "
        "more than they are, and *FedAvg, unpruned* is the other extreme to compare with.",
        benches=RESNETS,
        splits=("classes",),
    ),
}


# --------------------------------------------------------------------------- cells of a target


def benches_of(target: Target, protocol: str) -> list[Bench]:
    """The benches a target runs on under a protocol, in running order."""
    return [b for b in BENCHES.values() if b.name in target.benches and protocol in b.protocols]


def places_of(target: Target, protocol: str) -> list[tuple[Bench, str]]:
    """Benches and splits of a target under a protocol, in running order."""
    return [(b, s) for b in benches_of(target, protocol) for s in target.splits if s in b.splits]


def runs_on(row: Row, bench: Bench, split: str) -> bool:
    """Whether this row is run on a bench and a split."""
    variant = row.variant
    return (not variant.on or bench.name in variant.on) and split in variant.splits


def cells_of(target: Target, protocol: str) -> Iterator[Cell]:
    """Every cell of a target, once.

    A reading of the paper that a protocol has anyway would be a second cell with the same config,
    and is left out.
    """
    for bench, split in places_of(target, protocol):
        seen: list[Config] = []
        for row in target.rows:
            if not runs_on(row, bench, split):
                continue
            cell = Cell(bench, split, row.variant)
            config = config_of(cell, protocol, seed=0)
            if config not in seen:
                seen.append(config)
                yield cell


def queue(
    targets: Sequence[Target],
    protocol: str,
    benches: Sequence[str] = (),
    seeds: int = 0,
    scans: bool = True,
    names: Sequence[str] = (),
) -> list[tuple[Cell, int]]:
    """Cells and seeds in running order.

    They run stage by stage, in a stage the cells that claims need before the scans, and of these
    the first seed of every cell before the second.

    Args:
        targets: the targets whose cells are wanted.
        protocol: the name of the protocol.
        benches: the benches that are wanted; empty: all.
        seeds: the number of seeds per cell; 0: as many as the protocol or the cell wants.
        scans: whether scans are wanted.
        names: patterns of cells, as in fashion-mlp/*/lowerb*; empty: all.
    """
    cells: dict[str, Cell] = {}
    for target in targets:
        for cell in cells_of(target, protocol):
            if not benches or cell.bench.name in benches:
                cells[cell.name] = cell
    order = {name: position for position, name in enumerate(cells)}
    runs = []
    for name, cell in cells.items():
        if cell.variant.scan and not scans:
            continue
        if names and not any(fnmatchcase(name, pattern) for pattern in names):
            continue
        count = seeds or PROTOCOLS[protocol].seeds or cell.variant.seeds
        runs += [(cell, seed) for seed in range(count)]

    def rank(run: tuple[Cell, int]) -> tuple[str, bool, int, int]:
        cell, seed = run
        return cell.bench.stage, cell.variant.scan, seed, order[cell.name]

    return sorted(runs, key=rank)
