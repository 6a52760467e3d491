"""What the owner of a node allows, whatever a server asks for.

The policy is a TOML file in the node's folder.  Without a file the node runs every config it was
started with, as a node of a test cluster should; what is personal or private stays so even then.
"""

import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from fedp3.config.schema import fields_of
from fedp3.config.toml import toml_value
from fedp3.core.errors import InputError
from fedp3.core.settings import STRICT, Share

FILE = "policy.toml"
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class RunsPolicy:
    """Which runs this node takes part in."""

    configs: tuple[Digest, ...] = Field(
        default=(),
        description="digests of the accepted configs, as `fedp3 node check CONFIG` prints them; "
        "[] accepts every config that the node was started with",
    )
    owners: tuple[PublicKey, ...] = Field(
        default=(),
        description="public keys of run owners: every task must then carry a permit that one of "
        "them signed (`fedp3 permit sign`); [] needs none",
    )
    largest_task_mb: float = Field(
        default=0.0,
        ge=0,
        description="refuse larger tasks, in MB; 0 allows what the network can fill",
    )
    stored: int = Field(
        default=100,
        ge=0,
        description="number of runs whose states this node stores, such as personal layers; once "
        "there are so many, it refuses new runs",
    )


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class PrivacyPolicy:
    """What the records that train may cost over the life of this node, over all runs together."""

    required: bool = Field(default=False, description="train only under LDP")
    epsilon: float = Field(
        default=math.inf,
        gt=0,
        allow_inf_nan=True,
        description="largest epsilon that updates may cost; a finite one also means required",
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="delta at which epsilon is counted")

    @property
    def needs_ldp(self) -> bool:
        """Whether the node trains only under LDP."""
        return self.required or math.isfinite(self.epsilon)


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class ScoresPolicy:
    """Scores on test records, which reveal something about these records."""

    enabled: bool | Literal["auto"] = Field(
        default="auto",
        description="return scores; auto: only where there is no epsilon, neither in this policy "
        "nor in the run",
    )
    limit: int = Field(
        default=10_000, ge=0, description="number of scores returned over the life of this node"
    )
    noise_multiplier: float = Field(
        default=0.0,
        ge=0,
        description="standard deviation of the noise on the number of correct answers; with noise, "
        "no test loss is returned and epsilon below is counted; 0 means exact scores; the number "
        "of test records is always exact",
    )
    epsilon: float = Field(
        default=math.inf,
        gt=0,
        allow_inf_nan=True,
        description="largest epsilon that noisy scores may cost the test records",
    )


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class SplitPolicy:
    """Which records train and which are only scored."""

    own: bool = Field(
        default=False,
        description="this node splits its records by a secret hash of each record, the same in "
        "every run and stable when records are added; false: the config splits them",
    )
    test_share: Share = Field(default=0.3, description="with own = true: share of test records")


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class LayersPolicy:
    """What never leaves this node."""

    never_leave: tuple[str, ...] = Field(
        default=(),
        description="layers that are never uploaded, by name or pattern, as in ['fc4', 'head*']",
    )
    personal_uploaded: bool = Field(
        default=False,
        description="allow plan.head = 'personal_uploaded', which uploads a layer that the server "
        "never sends",
    )


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class ErrorsPolicy:
    """What a server learns when something fails."""

    reveal: bool = Field(
        default=False,
        description="send the texts of errors, which can contain values of the data, instead of "
        "codes; for debugging",
    )


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class Policy:
    """What the owner of a node allows."""

    runs: RunsPolicy = Field(default_factory=RunsPolicy)
    privacy: PrivacyPolicy = Field(default_factory=PrivacyPolicy)
    scores: ScoresPolicy = Field(default_factory=ScoresPolicy)
    split: SplitPolicy = Field(default_factory=SplitPolicy)
    layers: LayersPolicy = Field(default_factory=LayersPolicy)
    errors: ErrorsPolicy = Field(default_factory=ErrorsPolicy)


SECTIONS: dict[str, type[Any]] = {
    "runs": RunsPolicy,
    "privacy": PrivacyPolicy,
    "scores": ScoresPolicy,
    "split": SplitPolicy,
    "layers": LayersPolicy,
    "errors": ErrorsPolicy,
}
ADAPTER: TypeAdapter[Policy] = TypeAdapter(Policy)
# What `fedp3 node init` writes: a node that trusts nobody.
CAREFUL = Policy(
    privacy=PrivacyPolicy(required=True, epsilon=8.0),
    scores=ScoresPolicy(enabled=False, limit=1000),
    split=SplitPolicy(own=True),
)


def load_policy(path: Path) -> Policy:
    """Read a policy file; an unknown key or a wrong value is an error, never ignored."""
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError(f"cannot read the policy {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"the policy {path} is not TOML: {error}") from None
    try:
        policy = ADAPTER.validate_python(tables)
    except ValidationError as error:
        lines = [
            f"  [{'] '.join(map(str, e['loc'][:2]))}: {e['msg'].lower()}, got {e['input']!r:.60}"
            for e in error.errors()
        ]
        text = "\n".join(lines)
        raise InputError(f"the policy {path} has mistakes:\n{text}") from None
    if policy.privacy.needs_ldp and policy.scores.enabled is True and not policy.split.own:
        raise InputError(
            f"the policy {path} has a mistake: with [scores] enabled and training under LDP only, "
            "the node must split its records itself, or one config could score records that "
            "another one trains on; set [split] own = true"
        )
    return policy


def policy_text(policy: Policy = CAREFUL) -> str:
    """A policy as a commented TOML file."""
    lines = [
        "# What this node allows, whatever a server asks for.  It is read for every message.",
        "# Try a config against it with: fedp3 node check CONFIG",
    ]
    for section, settings in SECTIONS.items():
        lines += ["", f"# {settings.__doc__}", f"[{section}]"]
        for name, field in fields_of(settings).items():
            value = getattr(getattr(policy, section), name)
            lines.append(f"{f'{name} = {toml_value(value)}':<30} # {field.description}")
    return "\n".join(lines) + "\n"
