"""Every key of a config: its type, default, limits and meaning, in one place.

`fedp3 init` writes these descriptions, so a key cannot exist unexplained.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_serializer

from fedp3 import aggregate, data, local_prune, methods, models, optimise, partition, plan, prune, recipe
from fedp3.compress import WAYS
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

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


Share = Annotated[float, Field(gt=0, le=1)]
OWN = "own"  # the net or the data of one who called `fedp3.run`


class DataSection(Section):
    """What is learnt."""

    name: Annotated[str, _known({**data.NAMES, OWN: None}, "data set")] = Field(
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

    name: Annotated[str, _known({**models.MODELS, OWN: None}, "model")] = Field(
        "mlp", description="mlp, cnn or resnet18"
    )
    width: float = Field(1.0, gt=0, le=8, description="factor on all hidden widths")
    norm: Annotated[str, _known(models.NORMS, "normalisation")] = Field("batch", description="resnet18: batch or group")
    stem: Literal[3, 7] = Field(3, description="resnet18: side of the first convolution, 3 or 7")


class PlanSection(Section):
    """Which layers a client trains whole and uploads."""

    layers: Annotated[str, _known(plan.find, "choice of layers")] = Field(
        "opu2", description="full, lowerb, opu2, opu3, opu1-2-3, opu2-3, random-2, prune-all, resnet-no-b2-b3, ..."
    )
    redraw: bool = Field(False, description="draw the layer sets anew each round instead of once")
    others: Literal["train", "freeze", "personal", "skip"] = Field(
        "train", description="layers outside L_i: train or freeze them, personal (never sent), or skip their blocks"
    )
    head: Literal["shared", "personal", "personal_uploaded"] = Field(
        "shared", description="shared, personal (never sent or uploaded), or personal_uploaded"
    )


class PruneSection(Section):
    """How the other layers are pruned: P_i on the way down, Q_i at each local step."""

    keep: Share | tuple[Share, ...] | dict[Share, Share] | str = Field(
        0.9,
        description="share kept, in (0, 1]: a number, a list of device classes, a table {'0.125' = 0.2, '1.0' = 0.8} "
        "of classes and their shares of the fleet, or a CSV file with columns client,keep",
    )
    selector: Annotated[str, _known(prune.SELECTORS, "selector")] = Field(
        "magnitude", description="magnitude, random, neuron, neuron_norm, ordered, rolling, magnitude_all or dealt"
    )
    hold: bool = Field(True, description="pruned coordinates stay zero while a client trains")
    upload: Literal["none", "kept", "zeros"] = Field("none", description="what comes back of pruned layers")
    stale: Literal["abstain", "vote"] = Field(
        "abstain", description="columns of L_i that only pruned units feed: stay home, or vote with their old value"
    )
    local: Annotated[str, _known(local_prune.LOCAL_PRUNERS, "local pruning")] = Field(
        "fixed", description="pruning per local step: fixed (none), uniform, ordered_dropout or ordered_matched"
    )
    q: Share | tuple[Share, ...] = Field(
        (), description="its share: a number, a list to draw from, or [] for U[q_min, 1]"
    )
    q_min: Share = Field(0.5, description="lower end of U[q_min, 1]")
    q_of: Literal["kept", "whole"] = Field(
        "kept", description="a list q is of shares of what was kept, or of the whole net and at most keep"
    )
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
    schedule: Annotated[str, _known(recipe.SCHEDULES, "schedule")] = Field(
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
    server: Annotated[str, _known(optimise.SERVERS, "server optimiser")] = Field(
        "none", description="how the model follows the mean of the uploads: none, momentum or adam"
    )
    server_lr: float = Field(1.0, gt=0, description="its learning rate; with server = 'none', 1 is the mean itself")
    beta1: float = Field(0.9, ge=0, lt=1, description="momentum, adam: how long the mean is remembered")
    beta2: float = Field(0.99, ge=0, lt=1, description="adam: how long the square is remembered")
    adapt: float = Field(1e-3, gt=0, description="adam: how little a coordinate must move to be sped up")


class UploadSection(Section):
    """How uploads are written."""

    compress: Annotated[str, _known(WAYS, "compression")] = Field(
        "none", description="none, fp16, int8 or topk (with error feedback): of the change of what was sent"
    )
    share: Share = Field(0.01, description="topk: share of each tensor's coordinates that is sent")


class HooksSection(Section):
    """What the method adds to local training."""

    passes: Annotated[str, _known(methods.PASSES, "sequence of passes")] = Field(
        "joint", description="joint, head-body (FedRep), body (FedBABU), head-last (FedCR) or own (Ditto)"
    )
    mu: float = Field(0.0, ge=0, description="pull towards what was sent (FedProx); passes = 'own': of the own model")
    head_share: float = Field(1.0, gt=0, description="head-body: steps of the head, as a share of the local steps")
    tune: float = Field(1.0, gt=0, description="P is measured after this many times the local steps")
    loss: Annotated[str, _known(methods.LOSSES, "loss")] = Field(
        "cross_entropy", description="cross_entropy, present (only labels the client has) or code (FedCR)"
    )
    scale: bool = Field(False, description="on the client, divide what cut layers say by the share that is kept")
    static_norm: bool = Field(False, description="take batch norm's running statistics once, after the last step")
    distil: bool = Field(False, description="under ordered dropout, the drawn width also learns from the whole one")
    exchange: Annotated[str, _known(methods.EXCHANGES, "exchange")] = Field(
        "none", description="none, scaffold (control variates) or gaussians (one per class)"
    )
    code: int = Field(0, ge=0, description="numbers of a stochastic code before the head, at width 1; 0: none")
    beta: float = Field(0.001, ge=0, description="code: weight of the divergence from the class's Gaussian")
    samples: int = Field(8, ge=1, description="code: draws per sample")


class PrivacySection(Section):
    """LDP: an (epsilon, delta) per client and training record, against everybody who sees its uploads."""

    enabled: bool = Field(False, description="clip and noise every record's gradient before it leaves the client")
    epsilon: float = Field(
        8.0, gt=0, allow_inf_nan=True, description="what the whole run may cost a client; inf: clip, add no noise"
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="must be below 1 / training records of every client")
    clip: float = Field(1.0, gt=0, allow_inf_nan=False, description="largest norm of one record's gradient, C")
    sample_rate: Share = Field(0.1, description="chance of each record to be in a step, instead of local.batch")
    noise_multiplier: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="noise on a step's sum in units of clip; 0: the least for epsilon"
    )
    randomness: Literal["os", "seeded"] = Field(
        "os", description="noise and records from the operating system, or from run.seed (simulation only)"
    )
    others: Literal["freeze", "noise"] = Field(
        "freeze", description="layers outside L_i: freeze them, or train them under the same clip and noise"
    )

    @field_serializer("epsilon", when_used="json")
    def _finite(self, epsilon: float) -> float | str:
        """JSON has no infinity."""
        return epsilon if math.isfinite(epsilon) else "inf"


class RunSection(Section):
    """The run."""

    rounds: int = Field(30, ge=1, description="communication rounds, T")
    seed: int = Field(0, ge=0, description="the one seed everything is drawn from")
    clients_per_round: int = Field(10, ge=0, description="participants per round; 0: all")
    quorum: int = Field(1, ge=1, description="a round with fewer usable updates is void and leaves the model as it was")
    max_void: int = Field(5, ge=1, description="end the run after this many void rounds in a row")
    deadline: float = Field(0.0, ge=0, description="seconds a round may wait for clients; 0: no limit")
    eval_every: int = Field(10, ge=0, description="rounds between evaluations; 0: only at the end")
    checkpoint_every: int = Field(
        1, ge=1, description="rounds between checkpoints: what a kill can cost, and one more; under LDP always 1"
    )
    device: str = Field("cpu", pattern=r"^(cpu|mps|cuda(:\d+)?)$", description="cpu, cuda, cuda:1 or mps")


METHODS: Mapping[str, Mapping[str, Mapping[str, object]]] = {  # method -> section -> what it sets
    name: method.settings for name, method in methods.METHODS.items()
}
ABOUT_METHODS: Mapping[str, str] = {name: method.about for name, method in methods.METHODS.items()}


class Config(Section):
    """One run, complete."""

    method: Annotated[str, _known(METHODS, "method")] = Field(
        "fedp3", description="sets what is commented out below; `fedp3 methods` lists them all"
    )
    data: DataSection = DataSection()
    partition: PartitionSection = PartitionSection()
    model: ModelSection = ModelSection()
    plan: PlanSection = PlanSection()
    prune: PruneSection = PruneSection()
    local: LocalSection = LocalSection()
    upload: UploadSection = UploadSection()
    aggregate: AggregateSection = AggregateSection()
    hooks: HooksSection = HooksSection()
    privacy: PrivacySection = PrivacySection()
    run: RunSection = RunSection()

    @property
    def parts(self) -> methods.Parts:
        """What the [hooks] section says, for those who know no config."""
        return methods.Parts(**self.hooks.model_dump())

    def digest(self) -> str:
        """What identifies this config: equal digests, equal runs."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
