"""The training targets: which cells make up each table or figure of the paper, and what stands beside them.

To add a column, add a `Row`: its cells are run, shown and compared like the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product

from fedp3.config import Config
from fedp3.reproduce.cells import BENCHES, PROTOCOLS, SPLITS, Bench, Cell, Settings, Variant, config_of

Q_GRID = (0.2, 0.4, 0.6, 0.8, 1.0)  # FjORD's
DEEP = tuple(b for b in BENCHES if "-mlp" not in b)  # nets with more than three hidden layers: OPU3 is not FedAvg
SHORT = ("mnist-mlp", "fashion-mlp", "fashion-cnn", "cifar10-cnn", "cifar100-cnn")  # every target runs on these
SCANNED = ("fashion-mlp", "cifar10-cnn")  # where readings are told apart
OVERLAP = tuple(b for b in BENCHES if "resnet" not in b)
RESNETS = ("cifar10-resnet18", "cifar100-resnet18")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table."""

    label: str
    variant: Variant
    published: str = ""  # its row in `published`; empty: the paper has none
    drawn: bool = True  # in the figure; all are in the table


@dataclass(frozen=True, slots=True)
class Target:
    """One table or figure."""

    title: str
    about: str
    rows: tuple[Row, ...]  # the first is what the others are compared with
    rows_are: str  # what the names of rows mean
    benches: tuple[str, ...] = SHORT
    splits: tuple[str, ...] = ("classes", "dirichlet")


# --------------------------------------------------------------------------- variants

FEDAVG = Variant("fedavg", {"method": "fedavg", "plan.head": "shared"}, seeds=5)


def layers(plan: str, suffix: str = "", more: Settings | None = None) -> Variant:
    """A choice of L_i at keep 0.9."""
    settings = {"plan.layers": plan, "prune.keep": 0.9, **(more or {})}
    return Variant(plan + suffix, settings, on=DEEP if plan == "opu3" else ())


def pruned(keep: float, suffix: str = "", more: Settings | None = None) -> Variant:
    """Every layer but the head pruned on the way down, what was kept comes back."""
    settings = {"plan.layers": "prune-all", "prune.keep": keep, "prune.upload": "kept", **(more or {})}
    return Variant(f"prune-{keep}{suffix}", settings, seeds=5 if keep == 0.9 and not suffix else 3)


def scan(variant: Variant, on: Sequence[str] = SCANNED, splits: tuple[str, ...] = tuple(SPLITS)) -> Variant:
    """The same, run after what the claims need, and on these benches only."""
    return replace(variant, scan=True, on=tuple(b for b in on if not variant.on or b in variant.on), splits=splits)


# --------------------------------------------------------------------------- the tables


def _overlap() -> Iterator[Row]:
    yield Row("FedAvg", FEDAVG, "FedAvg")
    plans = {"opu3": "OPU3", "opu2": "OPU2", "lowerb": "LowerB"}
    for plan, label in plans.items():
        yield Row(label, layers(plan), label)
    yield Row("FedCR", Variant("fedcr", {"method": "fedcr", "plan.head": "personal"}), "FedCR")
    yield Row(
        "FedCR-OPU3", Variant("fedcr-opu3", {"method": "fedcr-opu3", "plan.head": "personal"}, on=DEEP), "FedCR-OPU3"
    )
    for plan, label in plans.items():
        yield Row(f"{label}, others frozen", scan(layers(plan, "-frozen", {"plan.others": "freeze"}), SHORT))
        yield Row(f"{label}, layers redrawn", scan(layers(plan, "-redrawn", {"plan.redraw": True}), SHORT))
        yield Row(f"{label}, keep 1.0", scan(layers(plan, "-keep-1.0", {"prune.keep": 1.0})))


def _pruning() -> Iterator[Row]:
    yield Row("keep 1.0 (FedAvg)", FEDAVG, "FedAvg")
    keeps = (0.9, 0.7, 0.5)
    for keep in keeps:
        yield Row(f"keep {keep}", pruned(keep), f"keep {keep}")
    readings = product(("magnitude", "random"), (True, False), ("kept", "zeros"))
    next(readings)  # the first is what stands above
    for (selector, hold, upload), keep in product(readings, keeps):
        suffix = f"-{selector}-{'held' if hold else 'free'}-{upload}"
        variant = pruned(keep, suffix, {"prune.selector": selector, "prune.hold": hold, "prune.upload": upload})
        label = f"keep {keep}, {selector}, {'held' if hold else 'not held'}, {upload}"
        yield Row(label, scan(variant, splits=("classes",)), f"keep {keep}", drawn=False)


WAYS: Mapping[str, tuple[str, str]] = {  # name -> local pruning, row of the paper
    "uniform": ("uniform", "Uniform"),
    "ordered": ("ordered_dropout", "Ordered"),
    "matched": ("ordered_matched", ""),  # ordered dropout at uniform's density
}


def _local() -> Iterator[Row]:
    """Three readings of p: (a) a constant local share, (b) the global share under q ~ U[q_min, 1], (c) FjORD's grid."""
    yield Row("Fixed", pruned(0.9), "keep 0.9")
    for p, (name, (way, row)) in product((0.9, 0.7), WAYS.items()):
        published = f"{row} {p}" if row else ""
        a = pruned(0.9, f"-local-a-{name}-{p}", {"prune.local": way, "prune.q": p})
        yield Row(f"(a) {name}, q = {p}", a if row else scan(a), published)
        b = pruned(p, f"-local-b-{name}", {"prune.local": way})
        yield Row(f"(b) {name}, keep {p}", scan(b), published)
    yield Row("(b) Fixed, keep 0.7", pruned(0.7), "keep 0.7")
    for name, (way, _) in WAYS.items():
        c = pruned(0.9, f"-local-c-{name}", {"prune.local": way, "prune.q": list(Q_GRID)})
        yield Row(f"(c) {name}, FjORD's grid", scan(c))


def _aggregation() -> Iterator[Row]:
    for plan, label in (("opu1-2-3", "OPU1-2-3"), ("opu2-3", "OPU2-3")):
        for rule in ("simple", "weighted", "attention"):
            variant = replace(layers(plan, f"-{rule}", {"aggregate.rule": rule}), seeds=5)
            named_only = rule == "attention"  # the paper does not measure it
            row = f"{label} {rule}"
            yield Row(row, scan(variant, SHORT) if named_only else variant, "" if named_only else row)


def _resnet() -> Iterator[Row]:
    yield Row("Full", pruned(0.9), "Full")
    yield Row("FedAvg, unpruned", FEDAVG)
    for plan, label in (
        ("resnet-no-b2-b3", "-B2-B3 (full)"),
        ("resnet-b2-part", "-B2 (part)"),
        ("resnet-b3-part", "-B3 (part)"),
    ):
        yield Row(label, layers(plan), label)


EPSILONS = ("inf", 8, 4, 2, 1)  # inf: every record's gradient is clipped, no noise is added


def _ldp() -> Iterator[Row]:
    """What LDP costs; the layers outside L_i are frozen, as nothing may leave without noise."""
    frozen: Settings = {"plan.others": "freeze"}
    yield Row("no LDP", scan(layers("opu2", "-frozen", frozen), SHORT))
    for epsilon in EPSILONS:
        rules = {"privacy.enabled": True, "privacy.epsilon": epsilon, "privacy.randomness": "seeded"}
        yield Row(f"epsilon {epsilon}", scan(layers("opu2", f"-ldp-{epsilon}", frozen | rules), SHORT))


TARGETS: Mapping[str, Target] = {
    "fig-overlap": Target(
        "Layer overlap",
        "FedAvg against three, two and one trained layers per client",
        tuple(_overlap()),
        "A client trains three (OPU3), two (OPU2) or one (LowerB) of the hidden layers whole, and the head; which "
        "ones is fixed for the run. It is sent the others at keep 0.9 and trains them too, but they do not come "
        "back. *Frozen*: it does not train them. *Redrawn*: its layers are drawn anew every round. FedCR-OPU3 is "
        "FedCR with the layers of OPU3. On the MLPs, with three hidden layers, OPU3 is FedAvg and FedCR-OPU3 is "
        "FedCR, so they have no rows there.",
        OVERLAP,
    ),
    "fig-global-pruning": Target(
        "Global pruning",
        "every layer but the head pruned on the way down",
        tuple(_pruning()),
        "*Keep* is the share of a layer's weights that is sent. *Magnitude* keeps the largest, *random* draws them "
        "anew every round. *Held*: pruned weights stay zero in local training, else they may grow back. *Kept*: a "
        "weight is averaged over the clients that were sent it; *zeros*: pruned weights enter the average as zeros. "
        "The rows without these words are magnitude, held, kept. The paper weighs size against accuracy by accuracy "
        "+ alpha / r, r being keep; the picture of it shows what that gains over keep 1.0.",
        (*SHORT, "emnist-mlp"),
    ),
    "table-local-pruning": Target(
        "Local pruning",
        "fixed, uniform and ordered dropout per step",
        tuple(_local()),
        "*Fixed*: the server prunes to 0.9 and a step uses all of that. Per step, *uniform* uses each weight with "
        "chance q, *ordered* dropout the leading share q of a layer's inputs and of its outputs, *matched* the same "
        "with shares that leave as many weights as uniform. The paper's p is read in three ways: (a) q = p in every "
        "step, keep 0.9; (b) keep p, q drawn from U[0.5, 1] at every step; (c) q drawn from FjORD's grid 0.2, 0.4, "
        "..., 1, keep 0.9. *(b) Fixed, keep 0.7* stands beside the paper's figure of global pruning.",
        (*SHORT, "emnist-mlp"),
    ),
    "fig-aggregation": Target(
        "Aggregation",
        "how layers of unequal clients are averaged",
        tuple(_aggregation()),
        "Clients train one, two or three hidden layers (OPU1-2-3), or two or three (OPU2-3). *Simple*: all that "
        "send a layer count alike in its mean; *weighted*: by the number of layers they train; *attention*: by "
        "learned weights, a rule of our own.",
    ),
    "ldp": Target(
        "LDP-FedP3",
        "accuracy of OPU2 against epsilon, noise from the seed (a simulation); the paper has no numbers",
        tuple(_ldp()),
        "In all rows, the one without LDP too, layers outside L_i are frozen, so that nothing leaves without noise. "
        "*Epsilon inf*: every record's gradient is clipped, no noise is added.",
    ),
    "table-resnet": Target(
        "ResNet18",
        "leaving out blocks",
        tuple(_resnet()),
        "*Full*: every layer but the head is pruned to 0.9 on the way down and comes back as it was sent. The rows "
        "below leave layers of B2 or B3 out of L_i: those are sent at keep 0.9 and do not come back, all others are "
        "whole both ways. So Full is pruned more than they are, and *FedAvg, unpruned* is the other end to compare "
        "with.",
        RESNETS,
        ("classes",),
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
    """Whether this row is run there."""
    return (not row.variant.on or bench.name in row.variant.on) and split in row.variant.splits


def cells_of(target: Target, protocol: str) -> Iterator[Cell]:
    """Every cell of a target, once: a reading that the protocol takes anyway is no cell of its own."""
    for bench, split in places_of(target, protocol):
        seen: list[Config] = []
        for cell in (Cell(bench, split, row.variant) for row in target.rows if runs_on(row, bench, split)):
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
    names: Sequence[str] = (),  # patterns, as in fashion-mlp/*/lowerb*
) -> list[tuple[Cell, int]]:
    """Cells and seeds in running order: stage by stage, what the claims need before the scans, seed by seed."""
    cells = {c.name: c for t in targets for c in cells_of(t, protocol) if not benches or c.bench.name in benches}
    fixed = seeds or PROTOCOLS[protocol].seeds
    asked = [c for name, c in cells.items() if not names or any(fnmatchcase(name, each) for each in names)]
    wanted = [c for c in asked if scans or not c.variant.scan]
    runs = [(c, seed) for c in wanted for seed in range(fixed or c.variant.seeds)]
    place = {name: i for i, name in enumerate(cells)}
    return sorted(runs, key=lambda r: (r[0].bench.stage, r[0].variant.scan, r[1], place[r[0].name]))
