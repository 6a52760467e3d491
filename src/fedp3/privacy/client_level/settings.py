"""The settings of client-level differential privacy."""

import math
from typing import Annotated, Literal

from pydantic import Field, field_serializer
from pydantic.dataclasses import dataclass

from fedp3.core.settings import STRICT, Share
from fedp3.privacy.settings import AUTO


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class ClientPrivacySettings:
    """Client-level DP: one guarantee for all data of a client, from a server that is trusted."""

    enabled: bool = Field(
        default=False,
        description="the server clips every client's upload and adds noise to their sum; it sees "
        "the uploads themselves. For a server that is not trusted, see [privacy]",
    )
    epsilon: float = Field(
        default=8.0,
        gt=0,
        allow_inf_nan=True,
        description="client-level privacy budget of the entire run, the same for all clients; inf "
        "clips uploads and adds no noise",
    )
    delta: float = Field(
        default=1e-5,
        gt=0,
        lt=1,
        description="delta of the client-level guarantee; must be below 1 / number of clients",
    )
    clip: float = Field(
        default=1.0,
        gt=0,
        description="clipping norm C: the change of all that one client uploads in a round, "
        "buffers included, is scaled down to at most this L2 norm",
    )
    sample_rate: Share = Field(
        default=0.1,
        description="probability with which each client takes part in a round, by its own coin; "
        "run.clients_per_round is then 0",
    )
    noise_multiplier: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        default=AUTO,
        description="standard deviation of the noise on a round's sum, in units of clip; auto is "
        "the least noise that stays within epsilon; 0 means no noise and needs epsilon = inf",
    )
    randomness: Literal["os", "seeded"] = Field(
        default="os",
        description="source of participants and noise: the operating system, or run.seed "
        "(simulation only: whoever knows the seed can remove the noise)",
    )

    @field_serializer("epsilon", when_used="json")
    def _epsilon_as_json(self, epsilon: float) -> float | str:
        """Write infinity as text, because JSON has no infinity."""
        return epsilon if math.isfinite(epsilon) else "inf"
