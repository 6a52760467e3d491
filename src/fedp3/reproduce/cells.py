"""A cell is one training run of a table: a bench (data set and net), a split, and a variant of the method.

A cell and a protocol give a config, seed by seed.  Variants of one bench, split and seed share every stream (data,
initial weights, batches), so that their differences are paired.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedp3.config import Config, parse
from fedp3.lookup import pick

Settings = dict[str, object]  # "section.key" -> value, as on the command line of `fedp3 run`
SCORED = 10  # the score of a run is the mean of its last ten evaluations
EVALUATIONS = 25  # evaluations a run aims at, so that the last ten fall into its last two fifths


# --------------------------------------------------------------------------- data sets and nets


@dataclass(frozen=True, slots=True)
class Bench:
    """One data set on one net."""

    name: str
    stage: str  # benches of one stage are run together
    paper: str  # the column of the paper that stands beside ours
    settings: Settings
    alpha: float = 0.5
    classes: int = 5
    protocols: tuple[str, ...] = ("desk",)
    splits: tuple[str, ...] = ("classes", "dirichlet")
    same_data: bool = True  # as the published column; else only differences compare
    tuned_on: str = ""  # the bench whose learning rate it takes, of the same data set; empty: its own
    more: bool = False  # another bench trained longer or wider: shown beside it, not pooled with it

    @property
    def rate(self) -> str:
        """The bench whose learning rate it takes."""
        return self.tuned_on or self.name


def _net(data: str, model: str, size: int, **more: object) -> Settings:
    """A data set with `size` samples a client on a net of a quarter width, 10 local steps."""
    # At the released code's clip of 10 a CNN spends its first rounds at chance, and how many is luck.
    clip = {"local.clip_norm": 1.0} if model != "mlp" else {}
    fixed = {"data.name": data, "model.name": model, "partition.sizes": size, "model.width": 0.25, "local.steps": 10}
    return fixed | clip | _keys(more)


def _keys(said: Mapping[str, object]) -> Settings:
    """`local_steps` is the key `local.steps`."""
    return {where.replace("_", ".", 1): value for where, value in said.items()}


def _more(bench: Bench, suffix: str, stage: str, **more: object) -> Bench:
    """The same trained longer or wider, at the same learning rate."""
    name, settings = f"{bench.name}-{suffix}", bench.settings | _keys(more)
    return replace(
        bench, name=name, stage=stage, settings=settings, protocols=("desk",), tuned_on=bench.name, more=True
    )


EVERYWHERE = ("desk", "paper", "released", "released-desk")
_MNIST = Bench("mnist-mlp", "A", "EMNIST-L", _net("mnist", "mlp", 700), same_data=False)
_FASHION = Bench("fashion-mlp", "A", "EMNIST-L", _net("fashion-mnist", "mlp", 700), same_data=False)
_FASHION_CNN = Bench("fashion-cnn", "B", "FMNIST", _net("fashion-mnist", "cnn", 700), protocols=EVERYWHERE)
_CIFAR10 = Bench("cifar10-cnn", "C", "CIFAR10", _net("cifar10", "cnn", 600), protocols=EVERYWHERE)
_CIFAR100 = Bench("cifar100-cnn", "E", "CIFAR100", _net("cifar100", "cnn", 600), 0.3, 15, EVERYWHERE)
_RESNET10 = _net("cifar10", "resnet18", 600, model_stem=7)
_RESNET100 = _net("cifar100", "resnet18", 600, model_stem=7)
BENCHES: Mapping[str, Bench] = {  # in the order in which the desk runs them
    b.name: b
    for b in (
        _MNIST,
        _FASHION,
        _more(_MNIST, "k90", "A90", local_steps=90),
        _more(_FASHION, "k90", "A90", local_steps=90),
        _FASHION_CNN,
        _more(_FASHION_CNN, "k90", "B90", local_steps=90),
        _CIFAR10,
        _more(_CIFAR10, "k90", "C90", local_steps=90),
        _more(_FASHION_CNN, "wide", "D", model_width=1.0),
        _more(_CIFAR10, "wide", "D", model_width=1.0),
        _more(_FASHION_CNN, "full", "D90", local_steps=90, model_width=1.0),
        _more(_CIFAR10, "full", "D90", local_steps=90, model_width=1.0),
        _CIFAR100,
        replace(  # five classes a client are the default of the released code
            _CIFAR100,
            name="cifar100-cnn-5",
            classes=5,
            protocols=("released", "released-desk"),
            splits=("classes",),
            tuned_on="cifar100-cnn",
        ),
        Bench("cifar10-resnet18", "F", "CIFAR10", _RESNET10, protocols=EVERYWHERE),
        Bench("cifar100-resnet18", "F", "CIFAR100", _RESNET100, 0.3, 15, EVERYWHERE),
        Bench("emnist-mlp", "G", "EMNIST-L", _net("emnist-l", "mlp", 560), protocols=("paper", "released")),
    )
}
SPLITS: Mapping[str, str] = {"classes": "S1, class-wise", "dirichlet": "S2, Dirichlet"}


# --------------------------------------------------------------------------- protocols


@dataclass(frozen=True, slots=True)
class Protocol:
    """Fleet, length and scoring of every run."""

    about: str
    settings: Settings  # laid over the bench's
    rounds: int
    score: str  # the accuracy that is compared: G or P
    seeds: int = 0  # per cell; 0: as many as the cell asks for
    head_round: bool = False  # ends with a round in which only heads train


_PAPER: Settings = {
    "partition.clients": 100,
    "local.epochs": 10,
    "local.lr": 0.01,
    "local.clip_norm": 10.0,
    "model.width": 1.0,
}
_DESK: Settings = {"partition.clients": 20}
_RELEASED: Settings = {"plan.head": "personal_uploaded", "prune.hold": False}
PROTOCOLS: Mapping[str, Protocol] = {
    "desk": Protocol(
        "20 clients with the paper's number of samples each (MLPs: FashionMNIST's), 10 local steps (90 on benches "
        "named k90 or full), nets of a quarter width (whole on those named wide or full), gradients clipped at 10 "
        "(MLP) or 1 (others)",
        _DESK, 40, "G",
    ),
    "paper": Protocol("100 clients, 10 local epochs", _PAPER, 500, "G", 1),
    "released": Protocol(
        "as the released code: own head uploaded but never sent, pruned weights grow back, own model scored",
        _PAPER | _RELEASED, 500, "P", 1, True,
    ),
    "released-desk": Protocol(
        "as the released code does, with the desk's fleet, rates and clip: 20 clients, 10 local steps, a quarter width",
        _DESK | _RELEASED, 40, "P", 0, True,
    ),
}  # fmt: skip
# Chosen by `fedp3 reproduce lr`, which records its scores in experiments/lr.json; other benches wait for theirs.
LR: Mapping[str, float] = {
    "mnist-mlp": 0.2,
    "fashion-mlp": 0.2,
    "fashion-cnn": 1.0,
    "cifar10-cnn": 0.5,
    "cifar100-cnn": 0.5,
    "cifar10-resnet18": 0.5,
}
UNCHOSEN = 0.05


# --------------------------------------------------------------------------- cells


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train, named as files are named."""

    name: str
    settings: Settings
    seeds: int = 3
    scan: bool = False  # asks which reading is meant; run after what the claims need
    on: tuple[str, ...] = ()  # benches that run it; empty: all
    splits: tuple[str, ...] = tuple(SPLITS)


@dataclass(frozen=True, slots=True)
class Cell:
    """A variant on a bench and a split."""

    bench: Bench
    split: str
    variant: Variant

    @property
    def name(self) -> str:
        """Also the path of its file and of its results."""
        return f"{self.bench.name}/{self.split}/{self.variant.name}"


def settings_of(cell: Cell, protocol: str, seed: int, rounds: int = 0) -> dict[str, object]:
    """All that this cell sets; what comes later wins: bench, protocol, variant."""
    rules = pick(PROTOCOLS, protocol, "protocol")
    bench, T = cell.bench, rounds or rules.rounds
    return {
        **bench.settings,
        "local.lr": LR.get(bench.rate, UNCHOSEN),
        "partition.kind": cell.split,
        **({"partition.classes": bench.classes} if cell.split == "classes" else {"partition.alpha": bench.alpha}),
        **rules.settings,
        **cell.variant.settings,
        "run.rounds": T,
        "run.eval_every": max(1, T // EVALUATIONS),
        "run.clients_per_round": 0,
        "run.seed": seed,
    }


def config_of(cell: Cell, protocol: str, seed: int, rounds: int = 0, overrides: Sequence[str] = ()) -> Config:
    """The config of one run."""
    said = [f"{k}={json.dumps(v)}" for k, v in settings_of(cell, protocol, seed, rounds).items()]
    return parse({}, [*said, *overrides], f"{cell.name} ({protocol})")
