"""What a reader of a run must know about its privacy."""

from collections.abc import Sequence

from fedp3.client.context import ClientContext
from fedp3.core.types import ClientPlan
from fedp3.privacy import accountant
from fedp3.privacy.settings import Budget

# Warnings that hold for nearly every run; a command that shows them each time teaches to skip them.
STANDING = frozenset({"W1", "W2", "W3", "W4", "W7", "C1", "C4"})
WEAK_EPSILON = 10.0  # above this epsilon a guarantee means little
FEW_SAMPLES = 16  # up to this many samples in an update can be told apart
MAX_STEPS = 1 << 53  # the largest integer that every JSON reader represents exactly

UNACCOUNTED = (
    "the number of training records of each client, which also divides its gradients",
    "scores on each client's test records (G, D, P), which are no training records of this run",
    "which clients answered in time, late or not at all",
    "the mean and deviation that normalise inputs, where a data set provides them",
    "settings that were tuned on these data: learning rate, clip, rounds",
    "samples of each class at each client, where a report of a simulation shows them",
    "when messages arrive and how large they are: the number of records in a step varies, and the "
    "time of a step with it",
)


def warnings(
    context: ClientContext, plans: Sequence[ClientPlan], budget: Budget | None
) -> dict[str, str]:
    """Warnings about a run's privacy, by their id."""
    return _upload_warnings(context, plans) if budget is None else _budget_warnings(budget)


def _upload_warnings(context: ClientContext, plans: Sequence[ClientPlan]) -> dict[str, str]:
    """What uploads without noise reveal."""
    layers, shapes, local = context.layers, context.layers.shapes, context.local
    with_matrix = {
        l for l, names in context.layers.layers.items() if any(len(shapes[n]) == 2 for n in names)
    }
    uploaded = {l for plan in plans for l in plan.uploaded}
    first = next(l for l in layers.layers if l not in layers.constant)
    texts = {}
    if first in uploaded & with_matrix and any(not w.layer for w in layers.frozen.values()):
        texts["W1"] = (
            f"{first} reads what the frozen part computes of the samples, and is uploaded: since "
            "everybody has the frozen part, samples may be computed from its update"
        )
    elif first in uploaded & with_matrix:
        texts["W1"] = (
            f"{first} reads the samples themselves and is uploaded: training samples can be "
            "computed from its update: exactly where a step has one sample, mostly where it has few"
        )
    if context.layers.head in uploaded:
        texts["W2"] = (
            f"{context.layers.head} is uploaded: its update shows how many samples of each label "
            "were used"
        )
    samples = local.batch * local.steps
    if samples <= FEW_SAMPLES and not local.epochs and uploaded & with_matrix:
        texts["W3"] = (
            f"an update comes from {samples} samples: so few can be told apart in any fully "
            "connected layer"
        )
    texts["W4"] = (
        "the server chooses weights and layer sets; a dishonest server can choose them to see "
        "more. Sending fewer layers saves traffic; no formal guarantee follows"
    )
    return texts


def _budget_warnings(budget: Budget) -> dict[str, str]:
    """What limits a run's guarantee."""
    texts = {}
    if budget.mechanism.randomness == "seeded":
        texts["W5"] = (
            "simulation only: the noise is drawn from run.seed, so whoever knows the seed can "
            "remove it"
        )
    if budget.epsilon > WEAK_EPSILON:
        texts["W6"] = (
            f"an epsilon of {budget.epsilon:g} is a weak guarantee: above {WEAK_EPSILON:g} little "
            "is promised"
        )
    texts["W7"] = "released and not in epsilon: " + "; ".join(UNACCOUNTED)
    return texts


def described(budget: Budget) -> dict[str, object]:
    """Everything that gives an epsilon its meaning."""
    mechanism = budget.mechanism
    return {
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "noise_multiplier": mechanism.noise_multiplier,
        "sample_rate": mechanism.sample_rate,
        "clip": mechanism.clip,
        "accountant": accountant.describe(),
        "adjacency": accountant.ADJACENCY,
        "sampling": accountant.SAMPLING,
        "randomness": mechanism.randomness,
        "clipping": "ghost" if mechanism.ghost else "torch.func",
        "steps_per_task": budget.steps_per_task,
        "allowed_steps": min(budget.allowed_steps, MAX_STEPS),
        "unaccounted": list(UNACCOUNTED),
    }
