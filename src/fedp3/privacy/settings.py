"""The settings of local differential privacy, and the mechanism and budget they resolve to."""

import math
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, Literal

from pydantic import Field, field_serializer
from pydantic.dataclasses import dataclass

from fedp3.client.batching import LocalSettings
from fedp3.core.settings import STRICT, Share

AUTO: Literal["auto"] = "auto"


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class PrivacySettings:
    """LDP: an (epsilon, delta) guarantee for each training record, against all who see uploads."""

    enabled: bool = Field(
        default=False,
        description="DP-SGD on the client: each step clips every record's gradient and adds noise "
        "to their sum",
    )
    epsilon: float = Field(
        default=8.0,
        gt=0,
        allow_inf_nan=True,
        description="privacy budget of each client for the entire run; inf clips gradients and "
        "adds no noise",
    )
    delta: float = Field(
        default=1e-5,
        gt=0,
        lt=1,
        description="delta of the guarantee; must be below 1 / m, where m is the largest number of "
        "training records of any client",
    )
    clip: float = Field(
        default=1.0,
        gt=0,
        description="clipping norm C: the gradient of each record is scaled down to at most this "
        "L2 norm",
    )
    sample_rate: Share = Field(
        default=0.1,
        description="probability with which each record is in a step; local.batch then only "
        "limits how many records are in memory at once",
    )
    noise_multiplier: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        default=AUTO,
        description="standard deviation of the noise on a step's sum, in units of clip; auto is "
        "the least noise that stays within epsilon; 0 means no noise and needs epsilon = inf",
    )
    randomness: Literal["os", "seeded"] = Field(
        default="os",
        description="source of noise and batches: the operating system, or run.seed (simulation "
        "only: whoever knows the seed can remove the noise)",
    )

    ledger: str = Field(
        default="",
        description="file in which runs of this machine add up what they cost each single record, "
        "over seeds, sweeps, tuning and repeated runs; the result then reports the largest epsilon",
    )

    @field_serializer("epsilon", when_used="json")
    def _epsilon_as_json(self, epsilon: float) -> float | str:
        """Write infinity as text, because JSON has no infinity."""
        return epsilon if math.isfinite(epsilon) else "inf"


@plain_dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """The parameters of one private step (Algorithm 5).

    A step adds Gaussian noise to the clipped gradients of Poisson-sampled records.  Client-level DP
    adds it to the clipped uploads of Poisson-sampled clients: there a step is a round, and clients
    take the place of records.

    Args:
        clip: C, the largest norm of one record's gradient, over all coordinates that train.
        noise_multiplier: the noise on the sum of a step's gradients has standard deviation
            noise_multiplier * clip.
        sample_rate: the probability with which each record is in a step.
        randomness: the source of noise and batches.
        ghost: compute per-example norms without per-example gradients, where the layers allow it.
    """

    clip: float = 1.0
    noise_multiplier: float = 1.0
    sample_rate: float = 0.1
    randomness: Literal["os", "seeded"] = "os"
    ghost: bool = True

    def steps_per_task(self, local: LocalSettings) -> int:
        """Count the steps of one task; an epoch draws each record once on average."""
        return math.ceil(local.epochs / self.sample_rate) if local.epochs else local.steps


@plain_dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The privacy limit of one run: of LDP, the same for every client, or of client-level DP."""

    mechanism: Mechanism
    steps_per_task: int
    epsilon: float
    delta: float
    allowed_steps: int  # of a client in total; computed once, so that rounds only compare integers
