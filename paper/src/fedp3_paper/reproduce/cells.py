"""Cells, the training runs behind the tables: a bench, a split of its data, and a variant.

A bench is a data set with a network, and a variant is a way to train.  A cell, a protocol and a
seed give a config.  Variants of one bench, split and seed share all random streams (data, initial
weights, batches), so that their differences are paired.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedp3.config import Config, parse
from fedp3.core.registry import pick

Settings = dict[str, object]  # "section.key" -> value, as on the command line of `fedp3 run`
SCORED = 10  # the score of a run is the mean of its last ten evaluations
EVALUATIONS = 25  # of a run, so that the last ten fall into its last two fifths


# --------------------------------------------------------------------------- data sets and networks


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A data set with the network that is trained on it.

    Args:
        name: the name, as in `cifar10-cnn`.
        stage: benches run stage by stage, in alphabetical order.
        paper: the column of the paper that is shown beside our results.
        settings: the config of the data set and the network.
        alpha: the parameter of the Dirichlet split.
        classes: the number of classes per client in the class-wise split.
        protocols: the protocols that run this bench.
        splits: the splits that it is run on.
        same_data: whether the published column has the same data; if not, only differences can be
            compared.
        tuned_on: the bench of the same data set whose learning rate it takes; empty: itself.
        more: whether it is another bench trained longer or wider, which is shown beside that one
            and not pooled with it.
    """

    name: str
    stage: str
    paper: str
    settings: Settings
    alpha: float = 0.5
    classes: int = 5
    protocols: tuple[str, ...] = ("desk",)
    splits: tuple[str, ...] = ("classes", "dirichlet")
    same_data: bool = True
    tuned_on: str = ""
    more: bool = False

    @property
    def rate(self) -> str:
        """The bench whose learning rate it takes."""
        return self.tuned_on or self.name


def _settings(data: str, model: str, size: int, **more: object) -> Settings:
    """Settings of a data set with `size` samples per client, on a network of a quarter width."""
    settings: Settings = {
        "data.name": data,
        "model.name": model,
        "partition.sizes": size,
        "model.width": 0.25,
        "local.steps": 10,
    }
    if model != "mlp":
        # With the released code's clip of 10 a CNN stays at chance for a random number of rounds.
        settings["local.clip_norm"] = 1.0
    return settings | _keys(more)


def _keys(arguments: Mapping[str, object]) -> Settings:
    """Keyword arguments as config keys: `local_steps` is the key `local.steps`."""
    return {name.replace("_", ".", 1): value for name, value in arguments.items()}


def _more(bench: Bench, suffix: str, stage: str, **more: object) -> Bench:
    """The same bench, trained longer or wider at the same learning rate."""
    return replace(
        bench,
        name=f"{bench.name}-{suffix}",
        stage=stage,
        settings=bench.settings | _keys(more),
        protocols=("desk",),
        tuned_on=bench.name,
        more=True,
    )


EVERYWHERE = ("desk", "paper", "released", "released-desk")
_MNIST = Bench(
    name="mnist-mlp",
    stage="A",
    paper="EMNIST-L",
    settings=_settings("mnist", "mlp", 700),
    same_data=False,
)
_FASHION = Bench(
    name="fashion-mlp",
    stage="A",
    paper="EMNIST-L",
    settings=_settings("fashion-mnist", "mlp", 700),
    same_data=False,
)
_FASHION_CNN = Bench(
    name="fashion-cnn",
    stage="B",
    paper="FMNIST",
    settings=_settings("fashion-mnist", "cnn", 700),
    protocols=EVERYWHERE,
)
_CIFAR10 = Bench(
    name="cifar10-cnn",
    stage="C",
    paper="CIFAR10",
    settings=_settings("cifar10", "cnn", 600),
    protocols=EVERYWHERE,
)
_CIFAR100 = Bench(
    name="cifar100-cnn",
    stage="E",
    paper="CIFAR100",
    settings=_settings("cifar100", "cnn", 600),
    alpha=0.3,
    classes=15,
    protocols=EVERYWHERE,
)
_CIFAR100_OF_5 = replace(  # five classes per client are the default of the released code
    _CIFAR100,
    name="cifar100-cnn-5",
    classes=5,
    protocols=("released", "released-desk"),
    splits=("classes",),
    tuned_on="cifar100-cnn",
)
_CIFAR10_RESNET = Bench(
    name="cifar10-resnet18",
    stage="F",
    paper="CIFAR10",
    settings=_settings("cifar10", "resnet18", 600, model_stem=7),
    protocols=EVERYWHERE,
)
_CIFAR100_RESNET = Bench(
    name="cifar100-resnet18",
    stage="F",
    paper="CIFAR100",
    settings=_settings("cifar100", "resnet18", 600, model_stem=7),
    alpha=0.3,
    classes=15,
    protocols=EVERYWHERE,
)
_EMNIST = Bench(
    name="emnist-mlp",
    stage="G",
    paper="EMNIST-L",
    settings=_settings("emnist-l", "mlp", 560),
    protocols=("paper", "released"),
)
_IN_RUNNING_ORDER = (
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
    _CIFAR100_OF_5,
    _CIFAR10_RESNET,
    _CIFAR100_RESNET,
    _EMNIST,
)
BENCHES: Mapping[str, Bench] = {bench.name: bench for bench in _IN_RUNNING_ORDER}
SPLITS: Mapping[str, str] = {"classes": "S1, class-wise", "dirichlet": "S2, Dirichlet"}


# --------------------------------------------------------------------------- protocols


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """The fleet, length and score of every run.

    Args:
        about: a description for the pages.
        settings: they override those of the bench.
        rounds: the length of a run.
        score: the accuracy that is compared, G or P.
        seeds: the number of seeds per cell; 0: as many as its variant wants.
        head_round: whether a run ends with a round in which only heads train.
    """

    about: str
    settings: Settings
    rounds: int
    score: str
    seeds: int = 0
    head_round: bool = False


_PAPER: Settings = {
    "partition.clients": 100,
    "local.epochs": 10,
    "local.lr": 0.01,
    "local.clip_norm": 10.0,
    "model.width": 1.0,
}
_DESK: Settings = {"partition.clients": 20}
_RELEASED: Settings = {"plan.head": "personal_uploaded", "prune.freeze_pruned": False}
PROTOCOLS: Mapping[str, Protocol] = {
    "desk": Protocol(
        about="20 clients with the paper's number of samples each (MLPs: FashionMNIST's), 10 local "
        "steps (90 on benches named k90 or full), networks of a quarter width (full width on those "
        "named wide or full), gradients clipped at 10 (MLP) or 1 (others)",
        settings=_DESK,
        rounds=40,
        score="G",
    ),
    "paper": Protocol(
        about="100 clients, 10 local epochs",
        settings=_PAPER,
        rounds=500,
        score="G",
        seeds=1,
    ),
    "released": Protocol(
        about="as in the released code: personal heads are uploaded but never sent, pruned weights "
        "grow back, personal models are scored",
        settings=_PAPER | _RELEASED,
        rounds=500,
        score="P",
        seeds=1,
        head_round=True,
    ),
    "released-desk": Protocol(
        about="as in the released code, with the desk protocol's fleet, rates and clip: 20 "
        "clients, 10 local steps, a quarter width",
        settings=_DESK | _RELEASED,
        rounds=40,
        score="P",
        head_round=True,
    ),
}
# Chosen by `fedp3 reproduce lr`, which records its scores in results/lr.json.  A bench that is not
# listed needs such a choice before it can be run.
LR: Mapping[str, float] = {
    "mnist-mlp": 0.2,
    "fashion-mlp": 0.2,
    "fashion-cnn": 1.0,
    "cifar10-cnn": 0.5,
    "cifar100-cnn": 0.5,
    "cifar10-resnet18": 0.5,
}

UNCHOSEN = 0.05  # a placeholder, for config files of benches that have no learning rate yet


# --------------------------------------------------------------------------- cells


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train.

    Args:
        name: the last part of a cell's name; stored results are found by it.
        settings: they override those of bench and protocol.
        seeds: the number of runs.
        scan: whether it only compares readings of the paper; scans run after the other cells.
        on: the benches that run it; empty: all.
        splits: the splits that it is run on.
    """

    name: str
    settings: Settings
    seeds: int = 3
    scan: bool = False
    on: tuple[str, ...] = ()
    splits: tuple[str, ...] = tuple(SPLITS)


@dataclass(frozen=True, slots=True)
class Cell:
    """A variant on a bench and a split."""

    bench: Bench
    split: str
    variant: Variant

    @property
    def name(self) -> str:
        """The name by which its results are stored; also the path of its run folders."""
        return f"{self.bench.name}/{self.split}/{self.variant.name}"


def settings_of(cell: Cell, protocol: str, seed: int, rounds: int = 0) -> dict[str, object]:
    """All settings of a run; the protocol overrides the bench, and the variant both.

    Args:
        cell: the cell.
        protocol: the name of the protocol.
        seed: the seed of the run.
        rounds: its number of rounds; 0: as the protocol has it.
    """
    fleet = pick(PROTOCOLS, protocol, "protocol")
    bench, T = cell.bench, rounds or fleet.rounds
    split: Settings = {"partition.kind": cell.split}
    if cell.split == "classes":
        split["partition.classes"] = bench.classes
    else:
        split["partition.alpha"] = bench.alpha
    return {
        **bench.settings,
        "local.lr": LR.get(bench.rate, UNCHOSEN),
        **split,
        **fleet.settings,
        **cell.variant.settings,
        "run.rounds": T,
        "run.eval_every": max(1, T // EVALUATIONS),
        "run.clients_per_round": 0,
        "run.seed": seed,
    }


def config_of(
    cell: Cell, protocol: str, seed: int, rounds: int = 0, overrides: Sequence[str] = ()
) -> Config:
    """The config of one run; `overrides` are applied last, as on the command line."""
    settings = settings_of(cell, protocol, seed, rounds)
    texts = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return parse({}, [*texts, *overrides], f"{cell.name} ({protocol})")
