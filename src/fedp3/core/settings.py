"""How settings are declared: once, in a frozen dataclass beside the code that reads them.

Each field has a type, limits and a description.  `fedp3.config` composes these dataclasses into
the sections of a config file, and `fedp3 init` writes their descriptions as comments.  This module
holds the settings that every stage reads.
"""

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

# Unknown keys are mistakes, and so are NaN and infinity unless a field allows them.
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
OWN = "own"  # the name of a network or data set that a caller passed to `fedp3.run`
Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How long a run takes, who participates in a round, and when it is evaluated and saved."""

    rounds: int = Field(default=30, ge=1, description="number of communication rounds, T")
    seed: int = Field(
        default=0,
        ge=0,
        description="seed of all random choices; under LDP, noise and batches come from the "
        "operating system unless privacy.randomness is 'seeded'; client-level DP likewise",
    )
    clients_per_round: int = Field(
        default=10,
        ge=0,
        description="participants per round; 0 means all clients, and under client-level DP those "
        "that client_privacy.sample_rate draws",
    )
    quorum: int = Field(
        default=1,
        ge=1,
        description="a round with fewer accepted updates is void: the model does not change; not "
        "applied under client-level DP",
    )
    max_void: int = Field(
        default=5, ge=1, description="the run fails after this many void rounds in a row"
    )
    deadline: float = Field(
        default=0.0, ge=0, description="seconds to wait for a round's clients; 0 means no limit"
    )
    eval_every: int = Field(
        default=10, ge=0, description="rounds between evaluations; 0 means only at the end"
    )
    patience: int = Field(
        default=0,
        ge=0,
        description="stop once G has not improved for this many evaluations; 0 means never",
    )
    final_p: bool = Field(
        default=True,
        description="measure P, the score after one local update, once training is over; under "
        "LDP this update is charged like a round",
    )
    checkpoint_every: int = Field(
        default=1,
        ge=1,
        description="rounds between checkpoints: a killed process loses at most this many rounds "
        "besides the current one; with [privacy], [client_privacy] and on Flower always 1",
    )
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|mps|cuda(:\d+)?)$",
        description="where clients train: cpu, cuda, cuda:1 or mps",
    )
