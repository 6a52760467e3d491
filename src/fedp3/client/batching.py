"""How a client iterates over its samples: settings, batches, number of steps, learning rate."""

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedp3.client.objectives import OBJECTIVES
from fedp3.client.optimizers import OPTIMIZERS
from fedp3.core.registry import NameIn, Registry
from fedp3.core.settings import OWN, STRICT

AUTO = "auto"  # the objective that fits the data set
# Samples that are scored at once.  With more of them, activations do not fit into a CPU's cache.
EVAL_BATCH = 48

# share of the run, or of a round's steps, that has passed -> factor on the learning rate
SCHEDULES: Registry[Callable[[float], float]] = Registry("schedule")
SCHEDULES.add("constant", lambda passed: 1.0)
SCHEDULES.add("linear", lambda passed: 1.0 - passed)
SCHEDULES.add("cosine", lambda passed: 0.5 * (1 + math.cos(math.pi * passed)))


Beta = Annotated[float, Field(ge=0, lt=1)]


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """How a client trains: K steps (Algorithm 2)."""

    objective: Annotated[str, NameIn(OBJECTIVES, also=(AUTO, OWN))] = Field(
        default=AUTO,
        description="what clients minimise, and what models are scored by; auto: what fits the "
        "data set",
    )
    steps: int = Field(default=10, ge=0, description="local steps, K")
    epochs: int = Field(default=0, ge=0, description="local epochs; if not 0, they replace steps")
    batch: int = Field(
        default=48,
        ge=1,
        description="batch size; under LDP only the number of records processed at once, see "
        "privacy.sample_rate",
    )
    optimizer: Annotated[str, NameIn(OPTIMIZERS)] = Field(
        default="sgd", description="how a gradient becomes a step: sgd, adam, adamw"
    )
    lr: float = Field(default=0.05, gt=0, description="learning rate")
    momentum: float = Field(
        default=0.0, ge=0, lt=1, description="sgd: momentum; it starts at zero in each round"
    )
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.999),
        description="adam, adamw: decay of the running means of gradients and of their squares",
    )
    eps: float = Field(
        default=1e-8, gt=0, description="adam, adamw: added to the root of the mean square"
    )
    optimizer_state: Literal["round", "client"] = Field(
        default="round",
        description="what momentum and adam remember begins at zero in each round (round), or "
        "stays on the client for its next round (client)",
    )
    weight_decay: float = Field(
        default=0.0, ge=0, description="weight decay; adamw decays weights apart from the gradient"
    )
    clip_norm: float = Field(
        default=10.0,
        ge=0,
        description="clip the gradient of each step to this L2 norm; 0 means no clipping; not used "
        "under LDP, where privacy.clip applies",
    )
    schedule: Annotated[str, NameIn(SCHEDULES)] = Field(
        default="constant", description="learning rate over the rounds"
    )
    warmup: int = Field(
        default=0,
        ge=0,
        description="local steps at the beginning of each round over which the learning rate rises "
        "linearly",
    )
    step_schedule: Annotated[str, NameIn(SCHEDULES)] = Field(
        default="constant", description="learning rate over the local steps of a round"
    )
    augment: bool = Field(
        default=True,
        description="augment training images with random crops and flips, if the data set defines "
        "them (CIFAR)",
    )


def learning_rate(settings: LocalSettings, t: int, rounds: int) -> float:
    """The learning rate of round t of `rounds`; after the last round, that of the last round."""
    rounds = max(rounds, 1)
    passed = min(t, rounds - 1) / rounds
    return settings.lr * SCHEDULES.pick(settings.schedule)(passed)


def has_constant_rate(settings: LocalSettings) -> bool:
    """Whether the learning rate is the same at all steps of a round."""
    return settings.warmup == 0 and settings.step_schedule == "constant"


def step_rate(settings: LocalSettings, lr: float, k: int, steps: int) -> float:
    """The learning rate of step k (from 0) of a pass of this many steps.

    Args:
        settings: the local settings.
        lr: the learning rate of the round.
        k: the step.
        steps: the number of steps of the pass.
    """
    rising = min(1.0, (k + 1) / settings.warmup) if settings.warmup else 1.0
    return lr * rising * SCHEDULES.pick(settings.step_schedule)(k / steps)


def step_count(settings: LocalSettings, samples: int, share: float = 1.0) -> int:
    """The number of steps of a pass: at least one, unless the settings have none.

    Args:
        settings: the local settings.
        samples: the client's training samples.
        share: the pass's share of the local steps.
    """
    steps = settings.epochs * math.ceil(samples / settings.batch) or settings.steps
    return min(steps, 1) if share * steps < 1 else round(share * steps)


def batch_sizes(samples: int, size: int) -> list[int]:
    """The batch sizes of one epoch.

    If one sample is left for the last batch, it gets a second one, because BatchNorm needs two.
    """
    sizes = [min(size, samples - j) for j in range(0, samples, size)]
    if size > 2 and sizes[1:] and sizes[-1] == 1:
        sizes[-2:] = [size - 1, 2]
    return sizes


def batches(samples: int, settings: LocalSettings, rng: torch.Generator) -> Iterator[Tensor]:
    """The positions of each step's samples: shuffled epochs, whose last batch may be shorter."""
    sizes = batch_sizes(samples, settings.batch)
    steps = settings.epochs * len(sizes) if settings.epochs else settings.steps
    for k in range(steps):
        if k % len(sizes) == 0:
            epoch = torch.split(torch.randperm(samples, generator=rng), sizes)
        yield epoch[k % len(sizes)]
