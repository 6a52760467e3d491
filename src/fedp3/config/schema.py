"""Every key of a config: its type, default, limits and meaning, in one place.

`fedp3 init` writes these descriptions, so a key cannot exist unexplained.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from fedp3 import aggregate, client, data, models, partition, plan, prune
from fedp3.errors import InputError
from fedp3.lookup import pick


def _known(table: Mapping[str, object] | Callable[[str], object], what: str) -> AfterValidator:
    """A validator that takes only names of this table (or that this finder finds)."""

    def check(name: str) -> str:
        try:
            _ = table(name) if callable(table) else pick(table, name, what)
        except InputError as error:
            raise ValueError(str(error)) from None
        return name

    return AfterValidator(check)


class Section(BaseModel):
    """A frozen table of the config; unknown keys are mistakes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


Share = Annotated[float, Field(gt=0, le=1)]


class DataSection(Section):
    """What is learnt."""

    name: Annotated[str, _known(data.NAMES, "data set")] = Field(
        "digits", description="digits (embedded), mnist, fashion-mnist, emnist-l, cifar10 or cifar100"
    )
    augment: bool = Field(
        True, description="random crop and flip of training images, where the data set has them (CIFAR)"
    )


class PartitionSection(Section):
    """Who has which samples."""

    kind: Annotated[str, _known(partition.PARTITIONS, "partition")] = Field(
        "classes", description="iid, classes (a few classes per client) or dirichlet"
    )
    clients: int = Field(20, ge=1, description="number of clients, n")
    classes: int = Field(5, ge=1, description="classes per client, for kind = 'classes'")
    alpha: float = Field(0.5, gt=0, description="concentration, for kind = 'dirichlet': smaller is more uneven")
    sizes: Literal["equal", "lognormal"] | int | tuple[int, ...] = Field(
        "equal", description="'equal', 'lognormal', samples per client, or a list with one number per client"
    )
    file: str = Field("", description="your own partition instead: JSON {client: [indices]} or CSV client,index")
    train_share: float = Field(0.7, gt=0, lt=1, description="share of a client's samples that it trains on")


class ModelSection(Section):
    """What is trained."""

    name: Annotated[str, _known(models.MODELS, "model")] = Field("mlp", description="mlp, cnn or resnet18")
    width: float = Field(1.0, gt=0, le=8, description="factor on all hidden widths")
    norm: Annotated[str, _known(models.NORMS, "normalisation")] = Field("batch", description="resnet18: batch or group")
    stem: Literal[3, 7] = Field(3, description="resnet18: side of the first convolution, 3 or 7")


class PlanSection(Section):
    """Which layers a client trains whole and uploads."""

    layers: Annotated[str, _known(plan.find, "choice of layers")] = Field(
        "opu2", description="full, lowerb, opu2, opu3, opu1-2-3, opu2-3, random-2, prune-all, resnet-no-b2-b3, ..."
    )
    redraw: bool = Field(False, description="draw the layer sets anew each round instead of once")
    others: Literal["train", "freeze"] = Field("train", description="layers outside L_i: train them locally, or freeze")
    head: Literal["shared", "personal", "personal_uploaded"] = Field(
        "shared", description="shared, personal (never sent or uploaded), or personal_uploaded"
    )


class PruneSection(Section):
    """How the other layers are pruned: P_i on the way down, Q_i at each local step."""

    keep: Share | tuple[Share, ...] | str = Field(
        0.9, description="share kept: a number, a list of device classes, or a CSV file with columns client,keep"
    )
    selector: Annotated[str, _known(prune.SELECTORS, "selector")] = Field(
        "magnitude", description="magnitude, random, neuron, neuron_norm, ordered or rolling"
    )
    hold: bool = Field(True, description="pruned coordinates stay zero while a client trains")
    upload: Literal["none", "kept", "zeros"] = Field("none", description="what comes back of pruned layers")
    stale: Literal["abstain", "vote"] = Field(
        "abstain", description="columns of L_i that only pruned units feed: stay home, or vote with their old value"
    )
    local: Annotated[str, _known(prune.LOCAL_PRUNERS, "local pruning")] = Field(
        "fixed", description="pruning per local step: fixed (none), uniform, ordered_dropout or ordered_matched"
    )
    q: Share | tuple[Share, ...] = Field(
        (), description="its share: a number, a list to draw from, or [] for U[q_min, 1]"
    )
    q_min: Share = Field(0.5, description="lower end of U[q_min, 1]")
    physical: bool = Field(True, description="where whole units are cut, train a smaller net instead of a masked one")


class LocalSection(Section):
    """How a client trains."""

    steps: int = Field(10, ge=0, description="local SGD steps, K")
    epochs: int = Field(0, ge=0, description="local epochs instead of steps, if not 0")
    batch: int = Field(48, ge=1, description="batch size")
    lr: float = Field(0.05, gt=0, description="learning rate")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum, begun anew each round")
    weight_decay: float = Field(0.0, ge=0, description="weight decay")
    clip_norm: float = Field(10.0, ge=0, description="largest norm of a step's gradient; 0: no clip")
    schedule: Annotated[str, _known(client.SCHEDULES, "schedule")] = Field(
        "constant", description="learning rate over the rounds: constant, linear or cosine"
    )


class AggregateSection(Section):
    """How uploads become the next model."""

    rule: Annotated[str, _known(aggregate.RULES, "aggregation rule")] = Field(
        "simple", description="simple, examples, weighted, attention or distance"
    )
    tau: float = Field(1.0, gt=0, description="distance: temperature")
    step: float = Field(aggregate.Aggregation().step, gt=0, description="attention: step of the logits")
    limit: float = Field(aggregate.Aggregation().limit, gt=0, description="attention: largest step of a logit")
    start: Literal["simple", "weighted"] = Field("simple", description="attention: the rule it begins as")
    sketch: int = Field(1024, ge=0, description="attention: numbers kept per upload and layer; 0: all")


class RunSection(Section):
    """The run."""

    rounds: int = Field(30, ge=1, description="communication rounds, T")
    seed: int = Field(0, ge=0, description="the one seed everything is drawn from")
    clients_per_round: int = Field(10, ge=0, description="participants per round; 0: all")
    quorum: int = Field(1, ge=1, description="a round with fewer usable updates is void and leaves the model as it was")
    max_void: int = Field(5, ge=1, description="end the run after this many void rounds in a row")
    deadline: float = Field(0.0, ge=0, description="seconds a round may wait for clients; 0: no limit")
    eval_every: int = Field(10, ge=0, description="rounds between evaluations; 0: only at the end")
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints: what a crash can cost")
    device: str = Field("cpu", pattern=r"^(cpu|mps|cuda(:\d+)?)$", description="cpu, cuda, cuda:1 or mps")


METHODS: Mapping[str, Mapping[str, Mapping[str, object]]] = {  # method -> section -> what it sets
    "fedp3": {},
    "fedavg": {"plan": {"layers": "full"}, "prune": {"keep": 1.0}, "aggregate": {"rule": "examples"}},
}
ABOUT_METHODS: Mapping[str, str] = {
    "fedp3": "a few layers whole, the rest pruned, only the few come back (Yi et al., ICLR 2024)",
    "fedavg": "the whole model down and up, weighted by examples (McMahan et al., 2017)",
}


class Config(Section):
    """One run, complete."""

    method: Annotated[str, _known(METHODS, "method")] = Field(
        "fedp3", description="sets the defaults of [plan], [prune] and [aggregate]: fedp3 or fedavg"
    )
    data: DataSection = DataSection()
    partition: PartitionSection = PartitionSection()
    model: ModelSection = ModelSection()
    plan: PlanSection = PlanSection()
    prune: PruneSection = PruneSection()
    local: LocalSection = LocalSection()
    aggregate: AggregateSection = AggregateSection()
    run: RunSection = RunSection()

    def digest(self) -> str:
        """What identifies this config: equal digests, equal runs."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
